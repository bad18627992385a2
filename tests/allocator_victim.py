"""A process that is killed: `python allocator_victim.py FOLDER spill|direct|load|write`, stops in the middle and waits.

It says where it is on standard output, one word a line.  ``direct`` is a spill by direct I/O.  ``write`` fills the
store and ends; a limit on the size of files may be set on it from outside.
"""

import sys
import time
from pathlib import Path
from typing import Any

from allocator_tools import cold, make, prompt

from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.allocator.media import Files
from hybridkv_ref.allocator.media_direct import DirectFiles


class Halting(Files):
    """Files that stop in the middle of the nth write or read."""

    def __init__(self, url: str, what: str, after: int) -> None:
        super().__init__(url)
        self.what, self.left = what, after

    def put(self, name: str, data: bytes) -> None:
        if self.what == "spill" and self.left <= 0:
            with self.fs.open(f"{self.root}/.writing-{name}-halted", "wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                halt()
        super().put(name, data)
        self.left -= self.what == "spill"

    def read(self, name: str) -> Any:
        if self.what == "load" and self.left <= 0:
            halt()
        self.left -= self.what == "load"
        return super().read(name)


class HaltingDirect(DirectFiles):
    """Files for direct I/O that stop in the middle of the nth write."""

    left = sys.maxsize

    def pour(self, path: str, data: bytes) -> None:
        if self.left > 0:
            super().pour(path, data)
            self.left -= 1
        else:
            super().pour(path, data[: len(data) // self.unit // 2 * self.unit])
            halt()


def halt() -> None:
    """Says so and waits to be killed."""
    print("here", flush=True)
    time.sleep(600)


def main(folder: str, what: str, after: int) -> None:
    """Serves some prompts; what is committed is printed."""
    files: Files = HaltingDirect(folder) if what == "direct" else Halting(folder, what, after)
    if isinstance(files, HaltingDirect):
        files.left = after
    allocator = make(media={"DISK": files}, store_bytes=100_000)
    cold(allocator, prompt("ABC", 3 * UNIT + 1))
    while allocator.tiers.spills:
        next(iter(list(allocator.tiers.spills.values()))).result()
    print("spilled", len(allocator.tiers.objects), allocator.tiers.outcomes, flush=True)
    allocator.evictor.empty()
    for load in allocator.prefetch(prompt("ABC", 3 * UNIT + 1)):
        load.result()
    print("loaded", flush=True)
    allocator.drain()
    allocator.close()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
