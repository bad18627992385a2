"""What commands share: sizes as people write them, files that are written whole or not at all, a progress bar."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridkv_ref.errors import InputError

UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def size(text: str) -> int:
    """A number of bytes: 1048576, 80GiB, 1.5TB (units of 1000 without the i, of 1024 with it)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?(?:/s)?\s*", text, re.IGNORECASE)
    if match is None:
        raise InputError(f"'{text}': not a size such as 80GiB or 2TB")
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


def write_whole(path: Path, data: bytes) -> None:
    """Writes under a temporary name and renames, so that nobody sees half a file."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
