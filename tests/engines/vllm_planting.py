"""Changes of the engine in memory, for as long as they are wanted: of an attribute, or of some lines of a function."""

import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Change = Callable[[Any], Any]
"""old -> new."""


@contextmanager
def changed(owner: Any, attribute: str, change: Change) -> Iterator[None]:
    """An attribute of a class or module is another while this lasts."""
    inherited = attribute not in vars(owner)
    old = inspect.getattr_static(owner, attribute)
    new = change(old)
    if callable(new) and callable(old):
        functools.update_wrapper(new, old)
    setattr(owner, attribute, new)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, old)


def rewritten(*pairs: tuple[str, str]) -> Change:
    """A function with some lines replaced; SystemExit where one is not found exactly once."""

    def change(old: Any) -> Any:
        source = textwrap.dedent(inspect.getsource(old))
        for before, after in pairs:
            if source.count(before) != 1:
                raise SystemExit(f"{old.__qualname__}: {source.count(before)} places for {before!r}")
            source = source.replace(before, after)
        made: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source, vars(sys.modules[old.__module__]), made)
        return made[old.__name__]

    return change
