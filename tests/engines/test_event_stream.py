"""Published event streams become traces: forms, media, multisets, gaps, bad input. No engine is needed."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybridkv_ref.adapters.event_stream import EventStream, StreamJudge, read_batches
from hybridkv_ref.cli import main
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR


def stored(*keys: int, tokens: int = -1, group: int = 0, size: int = 16, **more: Any) -> dict[str, Any]:
    """A BlockStored as the engine publishes it."""
    count = len(keys) * size if tokens < 0 else tokens
    return {"type": "BlockStored", "block_hashes": list(keys), "parent_block_hash": None, "block_size": size,
            "token_ids": list(range(count)), "lora_id": None, "medium": "GPU", "group_idx": group, **more}  # fmt: skip


def removed(*keys: int, group: int = 0, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": medium, "group_idx": group}


CLEARED = {"type": "AllBlocksCleared"}


def judge(*batches: list[dict[str, Any]], seqs: tuple[int, ...] = ()) -> tuple[StreamJudge, EventStream]:
    stream = EventStream("vllm")
    found = StreamJudge(stream)
    for number, events in enumerate(batches):
        for event in stream.batch([0.0, events, 0], f"batch {number}", seqs[number] if seqs else -1):
            found.feed(event, f"batch {number}")
    return found, stream


def rules(found: StreamJudge) -> set[str]:
    return {rule for _, refusal in found.refusals for rule in refusal.rules}


def test_entries_are_a_multiset() -> None:
    """The same hash may be stored twice and removed twice, not three times."""
    twice = [stored(1, 2), stored(1), removed(1), removed(1), removed(2)]
    assert judge(twice)[0].refusals == []
    assert "HKV-OBS-001" in rules(judge([*twice, removed(1)])[0])


def test_groups_ranks_and_media_are_apart() -> None:
    found, stream = judge([stored(1), stored(1, group=1, size=64, kv_cache_spec_kind="mamba")])
    assert found.refusals == []
    assert [(g.name, g.block) for g in stream.groups.values()] == [("group0", 16), ("group1", 64)]
    assert rules(judge([stored(1), stored(2, group=1), removed(1, group=1)])[0]) == {"HKV-OBS-001"}
    assert rules(judge([stored(1), removed(1, medium="CPU")])[0]) == {"HKV-OBS-001"}


def test_a_span_that_is_not_dense_is_refused() -> None:
    assert rules(judge([stored(1, tokens=48)])[0]) == {"HKV-OBS-002"}


def test_a_clear_ends_all_entries() -> None:
    assert judge([stored(1), CLEARED, stored(1), removed(1)])[0].refusals == []
    assert rules(judge([stored(1), CLEARED, removed(1)])[0]) == {"HKV-OBS-001"}


def test_who_joins_late_or_lost_a_batch_is_not_alarmed() -> None:
    late, stream = judge([stored(1)], [removed(9), removed(1)], seqs=(7, 8))
    assert (late.refusals, stream.gaps, stream.untold) == ([], 1, 1)
    lost, stream = judge([stored(1)], [removed(9)], seqs=(0, 2))
    assert (lost.refusals, stream.gaps, stream.untold) == ([], 1, 1)
    again, _ = judge([stored(1)], [CLEARED, stored(2)], [removed(9)], seqs=(3, 4, 5))
    assert rules(again) == {"HKV-OBS-001"}


@pytest.mark.parametrize("form", ["jsonl", "events", "frames", "arrays"])
def test_forms(tmp_path: Path, form: str) -> None:
    """Batches and single events as JSON Lines, batches as frames, events as arrays: the same stream."""
    events: list[Any] = [stored(1, 2), removed(1), removed(2)]
    path = tmp_path / form
    if form == "arrays":
        events = [["BlockStored", [1, 2], None, list(range(32)), 16, None, "GPU"], ["BlockRemoved", [1, 2], "GPU"]]
    if form == "frames":
        data = msgspec.msgpack.encode([0.0, events])
        path.write_bytes(2 * (len(data).to_bytes(4, "big") + data))
    else:
        lines = events if form == "events" else [[0.0, events], [1.0, events, None]]
        path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    assert main(["events", str(path), "--format", "vllm", "--out", str(tmp_path / "trace")]) == 0
    assert main(["validate", str(tmp_path / "trace")]) == 0
    assert sum(1 for _ in read_batches(path)) == (3 if form == "events" else 2)


def test_a_refusal_is_printed_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, [stored(1), removed(1), removed(1)])))
    assert main(["events", str(path), "--format", "vllm"]) == 1
    assert f"{path}:3: event 3 (key_remove)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no event"),
        (b"{", ":1: Input data was truncated"),
        (b'{"type": "BlockMoved"}', "type: expected one of"),
        (b'{"type": "BlockStored", "block_hashes": 3}', "BlockStored"),
        (b'{"type": "BlockStored", "block_hashes": [1.5], "block_size": 16}', "block_hashes"),
        (b'{"type": "BlockStored", "block_hashes": [1]}', "block_size"),
        (b"[1, 2]", "type: expected"),
        (b'{"events": 3}', "events: expected a list"),
        (b"\x00\x00\x00\x09\x93", "frame 1: 9 bytes announced, 1 there"),
        (b"\x00\x00\x00\x01\xc1", "frame 1:"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, reason: str) -> None:
    """One line with place and reason, exit code 2, nothing written."""
    path = tmp_path / "dump"
    path.write_bytes(data)
    assert main(["events", str(path), "--format", "vllm", "--out", str(tmp_path / "trace")]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_sglangs_batches_name_no_group_and_media_of_their_own(tmp_path: Path) -> None:
    """Maps without group or kind, as SGLang encodes them; what lies in host memory and in a pool is told apart."""
    page = {"block_hashes": [7, 8], "token_ids": [1, 2], "block_size": 1, "lora_id": None, "parent_block_hash": None}
    begin = [{"type": "BlockStored", "medium": medium, **page} for medium in ("GPU", "CPU_PINNED", "EXTERNAL")]
    gone = [{"type": "BlockRemoved", "block_hashes": [7], "medium": medium} for medium in ("GPU", "EXTERNAL")]
    frames = tmp_path / "batches"

    def run(events: list[dict[str, Any]]) -> int:
        batch = msgspec.msgpack.encode([0.5, events, None])
        frames.write_bytes(len(batch).to_bytes(4, "big") + batch)
        return main(["events", str(frames), "--format", "sglang"])

    assert run([*begin, *gone]) == 0
    assert run([*begin, *gone, gone[1]]) == 1


@pytest.mark.parametrize("name", ["other", "../events", ""])
def test_another_format_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"no such format \(known: sglang, vllm\)"):
        EventStream(name)


def test_each_file_of_an_engine_is_a_format(tmp_path: Path) -> None:
    spec = tmp_path / "spec"
    shutil.copytree(SPEC_DIR, spec)
    shutil.copy(spec / "engines" / "vllm.toml", spec / "engines" / "fork.toml")
    path = tmp_path / "dump.jsonl"
    path.write_bytes(msgspec.json.encode(stored(1)))
    assert main(["events", str(path), "--format", "fork", "--spec", str(spec)]) == 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"kv_cache_spec_kind": "holographic"}, "kv_cache_spec_kind: 'holographic' is none of engines/vllm.toml"),
        ({"kv_cache_spec_kind": "sliding_window"}, "window"),
    ],
)
def test_a_group_that_cannot_be_judged_is_refused_at_its_place(more: dict[str, Any], reason: str) -> None:
    """An unknown kind is not taken for another one, nor is a window without a size taken for anything."""
    with pytest.raises(InputError, match=f"^batch 1: .*{reason}"):
        judge([stored(1)], [stored(2, group=1, **more)])


def test_a_removal_of_a_group_that_was_never_announced_is_not_swallowed() -> None:
    with pytest.raises(InputError, match=r"^batch 1: BlockRemoved: group_idx: no entry of group 3"):
        judge([stored(1)], [removed(1, group=3)])
    late, stream = judge([removed(1, group=3)], [stored(1)], seqs=(4, 5))
    assert (late.refusals, stream.untold) == ([], 1)


@pytest.mark.parametrize("form", ["array", "object"])
def test_rank_0_and_no_rank_are_two_instances(form: str) -> None:
    def batch(rank: int | None, *events: dict[str, Any]) -> Any:
        return [0.0, list(events), rank] if form == "array" else {"events": list(events), "data_parallel_rank": rank}

    stream = EventStream("vllm")
    found = StreamJudge(stream)
    for one in (batch(0, stored(1)), batch(None, stored(1)), batch(0, removed(1)), batch(0, removed(1))):
        for event in stream.batch(one, "here"):
            found.feed(event, "here")
    assert rules(found) == {"HKV-OBS-001"}
    with pytest.raises(InputError, match="here: data_parallel_rank"):
        list(stream.batch({"events": [], "data_parallel_rank": "x"}, "here"))
