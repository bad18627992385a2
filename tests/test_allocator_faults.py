"""Faults that are injected, and what comes of them: nothing lost that was committed, nothing wrong that is read.

`python tests/test_allocator_faults.py` prints the table: fault, times injected, outcome.
"""

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from allocator_tools import check, cold, direct, hit, idle, make, prompt, run
from fsspec.implementations.local import LocalFileSystem

from hybridkv_ref.allocator import HeterogeneousAllocator
from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.allocator.media import TEMPORARY, Files, MediumError
from hybridkv_ref.machine import Refused

TOKENS = prompt("ABC", 3 * UNIT + 1)
VICTIM = Path(__file__).with_name("allocator_victim.py")


class Faulty(LocalFileSystem):  # type: ignore[misc]
    """The local file system, in which the next writes fail in one way."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.fault, self.times = "", 0

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super().open(path, mode, **options)
        if "w" in mode and self.fault:
            self.times += 1
            return Broken(file, self.fault)
        return file


class Broken:
    """An open file whose write fails after half of the bytes."""

    def __init__(self, file: Any, fault: str) -> None:
        self.file, self.fault = file, fault

    def write(self, data: bytes) -> int:
        written: int = self.file.write(data[: len(data) // 2])
        if self.fault == "short write":
            return written
        code = {"write error": errno.EIO, "full disk": errno.ENOSPC}[self.fault]
        raise OSError(code, os.strerror(code))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "Broken":
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()


def serves(allocator: HeterogeneousAllocator, least: int = 0) -> int:
    """The prompt is served with the right bytes, whatever is left of it; the tokens that its hit saved."""
    request, lease = hit(allocator, TOKENS)
    saved = lease.tokens
    assert saved >= least
    run(allocator, request, TOKENS)
    allocator.finish(request)
    idle(allocator)
    check(allocator)
    return saved


def ended(allocator: HeterogeneousAllocator) -> None:
    """Everything drains to zero."""
    allocator.drain()
    check(allocator)
    assert (allocator.ledger.pool.gpu_used, allocator.ledger.pool.io_used, allocator.ledger.pool.gpu_reserved) == (
        0,
        0,
        0,
    )
    allocator.close()


def writes_fail(fault: str) -> Callable[[Path], tuple[int, str]]:
    def inject(folder: Path) -> tuple[int, str]:
        disk = Faulty()
        allocator = make(media={"DISK": Files(str(folder), disk)}, store_bytes=100_000, shadow=True)
        disk.fault = fault
        cold(allocator, TOKENS)
        idle(allocator)
        assert list(folder.iterdir()) == []
        assert allocator.tiers.objects == {}
        assert allocator.ledger.pool.disk_used == 0
        serves(allocator, 3 * UNIT)
        injected, disk.fault = disk.times, ""
        allocator.evictor.empty()
        assert serves(allocator) == 0
        assert len(allocator.tiers.objects) > 0
        ended(allocator)
        return injected, "no file and no object; the segments stay cached; later copies succeed"

    return inject


def file_changes(fault: str) -> Callable[[Path], tuple[int, str]]:
    def inject(folder: Path) -> tuple[int, str]:
        injected = 0
        for index in range(100):
            below = folder / str(index)
            allocator = make(below, shadow=True, tries=2)
            cold(allocator, TOKENS)
            idle(allocator)
            allocator.evictor.empty()
            files = sorted(below.glob("*.safetensors"))
            if index >= min(len(files), 3):
                ended(allocator)
                break
            data = bytearray(files[index].read_bytes())
            if fault == "missing file":
                files[index].unlink()
            elif fault == "cut file":
                files[index].write_bytes(data[: len(data) - 1 - index * 7])
            else:
                data[-1 - index * 5] ^= 1 << index % 8
                files[index].write_bytes(data)
            injected += 1
            for _ in range(2):
                results = [load.result(30) for load in allocator.prefetch(TOKENS)]
                if all(results):
                    break
            for stored in list(allocator.tiers.objects):  # the tables learn of a fault when the bytes are read
                if stored.name == files[index].stem and allocator.tiers.can(stored.entity, "rot"):
                    allocator.tiers.fire(stored.entity, "rot")
            serves(allocator)
            ended(allocator)
        return injected, "the load fails, no target becomes readable; tried again, then given up; recomputed"

    return inject


def slow_disk(folder: Path) -> tuple[int, str]:
    class Slow(Files):
        def read(self, name: str) -> Any:
            started.set()
            assert going_on.wait(30)
            return super().read(name)

    injected = 0
    for _ in range(3):
        started, going_on = threading.Event(), threading.Event()
        allocator = make(media={"DISK": Slow(str(folder))}, store_bytes=100_000, shadow=True, io_slots=1)
        cold(allocator, TOKENS)
        idle(allocator)
        allocator.evictor.empty()
        loads = allocator.prefetch(TOKENS)
        assert started.wait(30)
        late = next(stored for stored, load in allocator.tiers.loads.items() if load.targets)
        assert allocator.tiers.timer(late)
        injected += 1
        request, lease = hit(allocator, TOKENS)  # nobody waits for the disk
        assert lease.tokens == 0
        allocator.abort(request)
        going_on.set()
        results = [load.result(30) for load in loads]
        assert results.count(False) == 1
        idle(allocator)
        check(allocator)
        serves(allocator)
        ended(allocator)
        for path in folder.glob("*"):
            path.unlink()
    return injected, "the timer fails the load; its bytes arrive late and are discarded; the request recomputes"


def killed(what: str, *at: int) -> Callable[[Path], tuple[int, str]]:
    """Killed when so many writes or reads were done."""

    def inject(folder: Path) -> tuple[int, str]:
        injected, written = 0, what != "load"
        if what == "direct":
            direct(folder)
        for after in at:
            below = folder / f"{what}{after}"
            with subprocess.Popen(
                [sys.executable, str(VICTIM), str(below), what, str(after)], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(VICTIM.parent), *sys.path])},
            ) as victim:  # fmt: skip
                assert victim.stdout is not None
                for line in victim.stdout:
                    if line.startswith("here"):
                        break
                sealed = {path.name for path in below.glob("*.safetensors")}
                torn = list(below.glob(f"{TEMPORARY}*"))
                assert bool(torn) == written
                victim.send_signal(signal.SIGKILL)
                assert victim.wait(30) == -signal.SIGKILL
            injected += 1
            allocator = make(below, shadow=True, store_io="direct" if what == "direct" else "buffered")
            # Every object that was committed is there, none that was torn.  A copy may have been sealed since the look.
            assert sealed <= {f"{stored.name}.safetensors" for stored in allocator.tiers.objects}
            assert not list(below.glob(f"{TEMPORARY}*"))
            assert len(allocator.tiers.objects) >= after if written else len(sealed) > 0
            check(allocator)
            assert all(load.result(30) for load in allocator.prefetch(TOKENS))
            saved = serves(allocator)
            assert saved == 3 * UNIT or written
            ended(allocator)
        return injected, "the store opens with every committed object and no torn one; the prefix comes back"

    return inject


def file_limit(folder: Path) -> tuple[int, str]:
    """The operating system refuses the write: a limit on the size of files, in a process of its own."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    done = subprocess.run(
        [sys.executable, str(VICTIM), str(folder / "limit"), "write", "0"], capture_output=True, text=True, check=True,
        preexec_fn=limit, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(VICTIM.parent), *sys.path])},
    )  # fmt: skip
    assert "spilled 0 {'spill failed: MediumError'" in done.stdout, done.stdout
    assert list((folder / "limit").iterdir()) == []
    return done.stdout.count("MediumError"), "no file and no object; the process goes on"


STAGES: dict[str, Callable[[HeterogeneousAllocator], Any]] = {
    "matched": lambda a: a.match(TOKENS).request,
    "pinned": lambda a: a.pin(a.match(TOKENS)).request,
    "recompute": lambda a: a.match(prompt("XYZ", 20)).request,
}


def _to(stage: str, allocator: HeterogeneousAllocator) -> Any:
    """A request in this stage."""
    if stage in STAGES:
        return STAGES[stage](allocator)
    lease = allocator.pin(allocator.match(TOKENS))
    request = lease.request
    if stage == "refused":
        allocator.transition(lease.segments[0], "retire")
        assert not allocator.validate(lease)[-1].accepted
        return request
    assert allocator.validate(lease)[-1].accepted
    if stage in ("reading", "writing", "dispatched", "spilling"):
        allocator.read(lease)
    if stage == "writing":
        allocator.extend(request, len(TOKENS))
    if stage == "dispatched":
        steps = allocator.dispatch(lease)
        threading.Timer(0.05, lambda: allocator.complete(steps)).start()
    if stage == "preempted":
        allocator.read(lease)
        allocator.ledger.step(request.records, "preempt")
    return request


ALL_STAGES = (*STAGES, "refused", "validated", "reading", "writing", "dispatched", "spilling", "preempted")


class Held(Files):
    """Files whose writes wait until they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened = threading.Event()

    def write(self, name: str, parts: Any, about: Any) -> None:
        assert self.opened.wait(30)
        super().write(name, parts, about)


def cancelled(folder: Path) -> tuple[int, str]:
    for stage in ALL_STAGES:
        disk = Held(str(folder / stage))
        allocator = make(media={"DISK": disk}, store_bytes=100_000, shadow=True)
        cold(allocator, TOKENS)
        if stage != "spilling":  # in which what is read is copied until its reader is gone
            disk.opened.set()
            idle(allocator)
        request = _to(stage, allocator)
        if stage == "spilling":
            assert not {lease.segment for lease in request.hits}.isdisjoint(allocator.tiers.spills)
        allocator.abort(request)
        disk.opened.set()
        idle(allocator)
        assert request.stage == "IDLE", stage
        assert all(s.ref_count == 0 for s in allocator.segments()), stage
        check(allocator)
        serves(allocator)
        ended(allocator)
    return len(ALL_STAGES), "every lease is released, counts are zero, what was cached stays"


FAULTS: dict[str, Callable[[Path], tuple[int, str]]] = {
    "write error": writes_fail("write error"),
    "short write": writes_fail("short write"),
    "full disk": writes_fail("full disk"),
    "limit on the size of files": file_limit,
    "flipped byte": file_changes("flipped byte"),
    "cut file": file_changes("cut file"),
    "missing file": file_changes("missing file"),
    "slow disk": slow_disk,
    "kill -9 in a spill": killed("spill", 3),
    "kill -9 in a direct spill": killed("direct", 3),
    "kill -9 in a load": killed("load", 4),
    "cancelled request, every stage": cancelled,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_loses_nothing_and_makes_nothing_wrong(fault: str, tmp_path: Path) -> None:
    injected, _ = FAULTS[fault](tmp_path)
    assert injected > 0


@pytest.mark.deep
@pytest.mark.parametrize("what", ["spill", "direct", "load"])
def test_a_kill_at_any_time_loses_nothing(what: str, tmp_path: Path) -> None:
    assert killed(what, *range(9))(tmp_path)[0] == 9


def test_a_flipped_byte_is_found_by_the_checksum_alone(tmp_path: Path) -> None:
    allocator = make(tmp_path)
    cold(allocator, TOKENS)
    idle(allocator)
    stored = next(iter(allocator.tiers.objects))
    files = allocator.tiers.media["DISK"]
    path = tmp_path / f"{stored.name}.safetensors"
    data = bytearray(path.read_bytes())
    for at in (len(data) - 1, len(data) - stored.entity.mem // 2):
        changed = bytearray(data)
        changed[at] ^= 4
        path.write_bytes(changed)
        with pytest.raises(MediumError, match="checksum differs"):
            files.read(stored.name)
    allocator.close()


def test_an_object_of_another_layout_is_no_object_here(tmp_path: Path) -> None:
    allocator = make(tmp_path)
    cold(allocator, TOKENS)
    idle(allocator)
    count = len(allocator.tiers.objects)
    allocator.book.abi = [value + 1 for value in allocator.book.abi]
    assert allocator.tiers.reopen("DISK", allocator.geometry.group) == 0
    allocator.close()
    assert len(make(tmp_path).tiers.objects) == count


def test_counters_outlive_the_process(tmp_path: Path) -> None:
    allocator = make(tmp_path)
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.system("new_model")
    allocator.close()
    again = make(tmp_path)
    assert again.ledger.pool.model_epoch == 1
    for load in again.prefetch(TOKENS):
        load.result(30)
    lease = again.pin(again.match(TOKENS))
    refused = again.validate(lease)[0]
    assert (refused.layer, refused.guard) == ("L1", "epoch == req.epoch")  # bytes of other weights
    with pytest.raises(Refused):
        again.read(lease)
    again.drain()
    again.close()


def main() -> None:
    """Prints the table."""
    print(f"| {'fault':32} | times | outcome |\n|{'-' * 34}|-------|---------|")
    for name, inject in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            times, outcome = inject(Path(folder))
        print(f"| {name:32} | {times:5} | {outcome} |", flush=True)


if __name__ == "__main__":
    main()
