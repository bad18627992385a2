"""A store for direct I/O: every call is of whole units, and what the file system or the URL cannot do is refused."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from allocator_tools import TABLES, OffByEight, check, cold, direct, hit, idle, make, prompt, run
from safetensors import safe_open
from test_allocator_rules import without

from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.allocator.media import Files, MediumError
from hybridkv_ref.allocator.media_direct import PIECE, DirectFiles, address, aligned
from hybridkv_ref.allocator.object_file import unit_bytes, whole_units
from hybridkv_ref.errors import InputError
from hybridkv_ref.io_unit import Transfer, remainders
from hybridkv_ref.machine import Refused
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_file, read_spec

TOKENS = prompt("ABC", 3 * UNIT + 1)
GUARDS = ["not direct or buffer == 0", "not direct or offset == 0", "not direct or length == 0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose file system takes direct I/O; its unit is that of ``direct(folder)``."""
    direct(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """Every call that moves bytes of a file opened for direct I/O: name, address, offset, length."""
    made: list[tuple[str, int, int, int]] = []
    flagged: set[int] = set()
    os_open, pwrite, preadv = os.open, os.pwrite, os.preadv

    def opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
        handle = os_open(path, flags, *more, **options)
        (flagged.add if flags & os.O_DIRECT else flagged.discard)(handle)
        return handle

    def write(handle: int, data: memoryview, offset: int) -> int:
        assert handle in flagged
        made.append(("write", address(data), offset, len(data)))
        return pwrite(handle, data, offset)

    def read(handle: int, buffers: list[memoryview], offset: int) -> int:
        assert handle in flagged
        made.append(("read", address(buffers[0]), offset, len(buffers[0])))
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "preadv", read)
    return made


def filled(folder: Path, store_io: str) -> set[str]:
    """Leaves a store with every group's objects; their names."""
    allocator = make(folder, shadow=True, store_io=store_io)
    cold(allocator, TOKENS)
    idle(allocator)
    check(allocator)
    names = {stored.name for stored in allocator.tiers.objects}
    assert len(names) > 5
    allocator.close()
    return names


def served_from(folder: Path, store_io: str) -> set[str]:
    """What a new process finds; the whole prefix comes back from it, with the bytes that were written."""
    allocator = make(folder, shadow=True, store_io=store_io)
    names = {stored.name for stored in allocator.tiers.objects}
    assert all(load.result(30) for load in allocator.prefetch(TOKENS))
    request, lease = hit(allocator, TOKENS)
    assert lease.tokens == 3 * UNIT
    run(allocator, request, TOKENS)
    allocator.finish(request)
    allocator.drain()
    check(allocator)
    allocator.close()
    return names


# ---- What is written and read ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("reader", ["direct", "buffered"])
@pytest.mark.parametrize("writer", ["direct", "buffered"])
def test_either_store_finds_what_the_other_one_wrote(writer: str, reader: str, folder: Path) -> None:
    written = filled(folder, writer)
    assert served_from(folder, reader) == written


def test_every_call_is_of_whole_units(folder: Path, calls: list[tuple[str, int, int, int]]) -> None:
    filled(folder, "direct")
    served_from(folder, "direct")
    unit = direct(folder).unit
    assert {call[0] for call in calls} == {"write", "read"}
    assert {remainders(*call[1:], unit) for call in calls} == {(0, 0, 0)}


def test_a_direct_file_is_a_safetensors_file_of_whole_units(folder: Path) -> None:
    names, unit = filled(folder, "direct"), direct(folder).unit
    files = Files(str(folder))
    for name in names:
        path = folder / f"{name}.safetensors"
        assert path.stat().st_size % unit == 0
        parts = files.read(name)
        with safe_open(path, "pt") as opened:
            assert set(opened.keys()) - {f"p{i}" for i in range(len(parts))} <= {"padding"}
            assert all(torch.equal(opened.get_tensor(f"p{i}"), part) for i, part in enumerate(parts))


@pytest.mark.parametrize("sizes", [[1], [0, 7, 4096], [PIECE], [PIECE + 1, 3], [2 * PIECE + PIECE // 2, PIECE]])
def test_parts_of_any_size_come_back(sizes: list[int], folder: Path, calls: list[tuple[str, int, int, int]]) -> None:
    """Also those of a buffered store, whose files end inside a unit."""
    files, through_cache = direct(folder), Files(str(folder))
    calls.clear()
    parts = [torch.arange(size).mul(37).to(torch.uint8) for size in sizes]
    files.write("direct", parts, {})
    assert (folder / "direct.safetensors").stat().st_size == unit_bytes(sizes, files.unit)
    through_cache.write("buffered", parts, {})
    for name in ("direct", "buffered"):
        for store in (files, through_cache):
            assert all(torch.equal(a, b) for a, b in zip(store.read(name), parts, strict=True))
    assert [name for name, _ in files.objects()] == ["buffered", "direct"]
    assert {remainders(*call[1:], files.unit) for call in calls} == {(0, 0, 0)}


def test_a_row_is_told_of_the_calls_that_follow(folder: Path, calls: list[tuple[str, int, int, int]]) -> None:
    files, part = direct(folder), torch.zeros(5000, dtype=torch.uint8)
    calls.clear()
    assert files.outgoing([5000]) == Transfer(True, 0, 0, 0)
    files.write("a", [part], {})
    assert files.incoming("a") == Transfer(True, 0, 0, 0)
    files.read("a")
    assert calls == [
        (what, address(files.buffer()), 0, unit_bytes([5000], files.unit)) for what in ("write", "read")
    ]  # fmt: skip
    assert files.incoming("gone") == Transfer(True, 0, 0, 0)


def test_a_new_description_and_counters_are_whole_units_too(
    folder: Path, calls: list[tuple[str, int, int, int]]
) -> None:
    files, parts = direct(folder), [torch.arange(300).to(torch.uint8)]
    files.write("a", parts, {"n": 1})
    Files(str(folder)).write("b", parts, {"n": 1})
    for name in ("a", "b"):
        files.redescribe(name, {"n": 2})
        assert torch.equal(files.read(name)[0], parts[0])
    assert dict(files.objects()) == {"a": {"n": 2}, "b": {"n": 2}}
    files.remember({"epoch": 3})
    assert files.recall(["epoch"]) == Files(str(folder)).recall(["epoch"]) == {"epoch": 3}
    assert {remainders(*call[1:], files.unit) for call in calls} == {(0, 0, 0)}
    assert all(path.stat().st_size % files.unit == 0 for path in folder.iterdir())


@pytest.mark.parametrize("unit", [512, 4096, 1 << 16, 1 << 20])
def test_a_buffer_begins_at_a_multiple_of_the_unit(unit: int) -> None:
    """Also of a unit that is larger than a page."""
    for units in (1, 3):
        buffer = aligned(units * unit, unit)
        assert (address(buffer) % unit, len(buffer)) == (0, units * unit)
        buffer[-1] = 1


@pytest.mark.parametrize(("count", "whole"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024)])
def test_whole_units(count: int, whole: int) -> None:
    assert whole_units(count, 512) == whole


def test_a_description_without_room_leaves_nothing(folder: Path) -> None:
    files = direct(folder)
    with pytest.raises(MediumError, match=r"cannot be described: a header of \d+ bytes has room for \d+$"):
        files.write("a", [torch.zeros(3, dtype=torch.uint8)], {"text": "x" * 2 * files.unit})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_torn_direct_file_is_no_object(cut: int, folder: Path) -> None:
    files = direct(folder)
    files.write("a", [torch.ones(9000, dtype=torch.uint8)], {})
    path = folder / "a.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert list(files.objects()) == []
    with pytest.raises(MediumError, match="torn"):
        files.read("a")
    path.write_bytes(data.replace(b"\1" * 9000, b"\1" * 8999 + b"\2"))
    with pytest.raises(MediumError, match="checksum differs"):
        files.read("a")


# ---- What a row refuses ----------------------------------------------------------------------------------------------
class Sectors(DirectFiles):
    """Its files are whole sectors, which are less than a unit, once it is opened."""

    block = 0

    def prove(self, url: str) -> None:
        super().prove(url)
        self.block, self.unit = self.unit, 512

    def transfer(self, length: int) -> Transfer:
        return Transfer(True, *remainders(address(self.buffer()), 0, length, self.block))


def test_a_misaligned_transfer_is_refused_by_rule_guard_and_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = make(media={"DISK": direct(folder, OffByEight)}, store_bytes=100_000)
    refused: list[Refused] = []
    fire = allocator.tiers.fire

    def watched(entity: Any, row: str, **inputs: int) -> None:
        try:
            fire(entity, row, **inputs)
        except Refused as error:
            refused.append(error)
            raise

    monkeypatch.setattr(allocator.tiers, "fire", watched)
    cold(allocator, TOKENS)
    idle(allocator)
    assert refused
    for error in refused:
        assert (error.event.row, error.guard.text) == ("open_object", GUARDS[0])
        assert error.values == {"direct": True, "buffer": 8}
        assert "HKV-L4-002" in str(error)
    assert list(folder.iterdir()) == []
    assert (allocator.tiers.objects, allocator.ledger.pool.disk_used) == ({}, 0)
    check(allocator)
    allocator.close()


def test_a_length_of_sectors_goes_through_only_without_its_guard(folder: Path) -> None:
    if direct(folder).unit == 512:
        pytest.skip("the unit of this file system is one sector")
    for tables in (TABLES, without("open_object", GUARDS[2])):
        allocator = make(media={"DISK": direct(folder, Sectors)}, store_bytes=100_000, tables=tables)
        cold(allocator, TOKENS)
        idle(allocator)
        assert (f"spill refused: {GUARDS[2]}" in allocator.tiers.outcomes) is (tables is TABLES)
        allocator.close()


def test_the_next_medium_takes_what_the_disk_refuses(folder: Path) -> None:
    store = make(media={"DISK": direct(folder, OffByEight), "OBJECT": Files(str(folder / "o"))}, store_bytes=100_000)
    cold(store, TOKENS)
    idle(store)
    assert {stored.medium for stored in store.tiers.objects} == {"OBJECT"}
    store.close()


def test_the_oracle_asks_for_the_same_as_the_allocators_rows() -> None:
    rows = read_spec(SPEC_DIR).files["kinds/on_disk_prefix.toml"].rows
    calls = read_file(SPEC_DIR / "oracle" / "layouts.toml", "oracle/layouts.toml").rows["direct_io"]
    for name in ("open_object", "load_begin"):
        assert [guard for guard in rows[name].when if "direct" in guard] == calls.when == GUARDS


# ---- What has no direct I/O ------------------------------------------------------------------------------------------
def test_a_file_system_that_refuses_is_said_when_the_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=r":store_io: .* takes no direct I/O: Invalid argument$") as caught:
        make(tmp_path, store_io="direct")
    assert str(caught.value).startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_memory_as_a_file_system_is_refused_where_the_kernel_refuses_it() -> None:
    """tmpfs takes O_DIRECT since Linux 6.6, to no effect."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm")
    path = shared / f"hybridkv-{os.getpid()}"
    path.mkdir()
    try:
        probe = path / "probe"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        except OSError:
            with pytest.raises(InputError, match="takes no direct I/O"):
                DirectFiles(str(path))
        else:
            pytest.skip("the tmpfs of this kernel takes O_DIRECT")
        finally:
            probe.unlink(missing_ok=True)
    finally:
        path.rmdir()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"store": "memory://hybridkv-direct", "store_bytes": 1}, "store_io: direct I/O needs a local folder"),
        ({}, "allocator:store_io: direct I/O needs a store"),
        ({"store_io": "mapped"}, "allocator:store_io: expected buffered or direct, got 'mapped'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"{reason}$") as caught:
        make(**{"store_io": "direct"} | options)
    assert "\n" not in str(caught.value)


def test_a_system_without_the_flag_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    with pytest.raises(InputError, match="this operating system has no O_DIRECT"):
        make(tmp_path, store_io="direct")
