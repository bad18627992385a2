"""Readers of recorded traces: public traces as they are, and small broken ones."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.request_traces import Request, read_trace

LINE = '{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def ideal_hit(requests: Iterable[Request]) -> tuple[int, int]:
    """(tokens that a cache without end would have, input tokens), by the definition that the issue gives."""
    seen: set[int] = set()
    hit = total = 0
    for request in requests:
        common = next((i for i, block in enumerate(request.block_ids) if block not in seen), len(request.block_ids))
        hit += min(common * request.block_tokens, request.input_tokens)
        total += request.input_tokens
        seen.update(request.block_ids)
    return hit, total


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def conversation(*calls: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": calls} | changes)


def call(t: float = 0.0, tokens: int = 130, ids: tuple[int, ...] = (1, 2), **changes: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 4, "hash_ids": ids, "stop": "end_turn"} | changes


def test_conversation_trace(shared_data: Path) -> None:
    requests = list(read_trace(shared_data / "traces" / "mooncake_conversation_trace.jsonl"))
    assert len(requests) == 12_031
    hit, total = ideal_hit(requests)
    assert total == 144_793_823
    assert f"{100 * hit / total:.1f}" == "37.4"


def test_conversation_trace_is_prefix_chained(shared_data: Path) -> None:
    before: dict[int, int] = {}
    for request in read_trace(shared_data / "traces" / "mooncake_conversation_trace.jsonl"):
        for parent, block in zip((-1, *request.block_ids), request.block_ids, strict=False):
            assert before.setdefault(block, parent) == parent


def test_azure_trace(shared_data: Path) -> None:
    requests = list(read_trace(shared_data / "traces" / "AzureLLMInferenceTrace_code.csv"))
    assert len(requests) == 8_819
    assert f"{sum(request.input_tokens for request in requests) / 1e6:.2f}" == "18.06"
    assert not any(request.block_ids or request.block_tokens for request in requests)
    assert requests[:2] == [Request(0.0, 4808, 10, 0, ()), Request(52.0, 3180, 8, 0, ())]


def test_kv_cache_tester_folder(shared_data: Path) -> None:
    folder = shared_data / "traces" / "kv_cache_tester"
    files = sorted(folder.glob("*.json"))
    assert len(files) == 16
    merged = list(read_trace(folder))
    assert [request.arrival_ms for request in merged] == sorted(request.arrival_ms for request in merged)
    # No id is shared by two files, so the merged trace reuses exactly what the files reuse one by one.
    alone = [list(read_trace(file)) for file in files]
    assert len(merged) == sum(map(len, alone))
    hits = [ideal_hit(requests) for requests in alone]
    assert ideal_hit(merged) == (sum(hit for hit, _ in hits), sum(total for _, total in hits))
    # "About 96 %" of what a conversation sends after its first request was sent before.
    first = sum(requests[0].input_tokens for requests in alone)
    assert 0.945 < sum(hit for hit, _ in hits) / (sum(total for _, total in hits) - first) < 0.97


def test_mooncake_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", LINE + "\n" + LINE)
    assert list(read_trace(path)) == [Request(5.0, 700, 3, 512, (0, 1))] * 2


def test_azure_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", HEADER + "2023-11-16 18:17:03.5,7,0\r\n\r\n2023-11-16 18:17:04.0000009,8,1")
    assert list(read_trace(str(path))) == [Request(0.0, 7, 0, 0, ()), Request(500.0, 8, 1, 0, ())]


def test_sub_agents_share_their_parents_ids_and_clock(tmp_path: Path) -> None:
    agent = {"type": "subagent", "agent_id": "a", "requests": [call(2.0, ids=(1, 9)), call(6.0, ids=(1, 8), type="s")]}
    path = write(tmp_path / "trace", json.dumps(json.loads(conversation(call(1.0), agent, call(4.0))), indent=1))
    assert [(request.arrival_ms, request.block_ids) for request in read_trace(path)] == [
        (1000.0, (1, 2)),
        (2000.0, (1, 9)),
        (4000.0, (1, 2)),
        (6000.0, (1, 8)),
    ]


def test_ids_of_two_files_never_meet(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.json", conversation(call(ids=()), call(1.0)))
    ids = [set(request.block_ids) for request in read_trace(tmp_path)]
    assert len(ids) == 4
    assert len(set().union(*ids)) == 4


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path / "trace", LINE * 3 + "{"))
    assert [next(requests).input_tokens for _ in range(3)] == [700] * 3
    with pytest.raises(InputError, match=r"trace:4: Input data was truncated$"):
        next(requests)


def mooncake(**changes: Any) -> str:
    record = json.loads(LINE) | changes
    return json.dumps({key: value for key, value in record.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1: empty file"),
        (" \n\n", "1: empty file"),
        (b"\x7fELF\x00\x00\x01", "1: binary file"),
        (b"\xff\xfe{\x00", "1: binary file"),
        ("hello\n", "1: unknown trace format"),
        ("[1, 2]", "1: unknown trace format"),
        ("TIMESTAMP,ContextTokens\n", "1: unknown trace format"),
        (LINE + mooncake(input_length=None), "2: Object missing required field `input_length`"),
        (LINE + mooncake(output_length=None), "2: Object missing required field `output_length`"),
        (LINE + mooncake(input_length=-4), "2: input_length: Expected `int` >= 1"),
        (LINE + mooncake(input_length=0), "2: input_length: Expected `int` >= 1"),
        (LINE + mooncake(input_length=7.5), "2: input_length: Expected `int`, got `float`"),
        (LINE + mooncake(input_length="700"), "2: input_length: Expected `int`, got `str`"),
        (LINE + mooncake(output_length=-1), "2: output_length: Expected `int` >= 0"),
        (LINE + mooncake(timestamp=-1), "2: timestamp: Expected `float` >= 0"),
        (LINE + mooncake(hash_ids=[0, -1]), "2: hash_ids[1]: Expected `int` >= 0"),
        (LINE + mooncake(hash_ids=[0, 1, 2]), "2: 3 block ids for 700 input tokens in blocks of 512"),
        (LINE + mooncake(timestamp=4), "2: arrives before the request ahead of it"),
        (LINE + LINE[:30], "2: Input data was truncated"),
        (LINE + LINE.strip() + "x", "2: JSON is malformed"),
        (LINE.encode() + b'{"\xff": 1}', "1: binary file"),
        (LINE + '{"deep": ' + "[" * 100_000, "2: nested too deeply"),
        (HEADER, "1: no requests"),
        (HEADER + "2023-11-16 18:17:03,7\n", "2: expected 3 columns, got 2"),
        (HEADER + "2023-11-16 18:17:03,7,-1\n", "2: GeneratedTokens: expected an integer >= 0, got '-1'"),
        (HEADER + "2023-11-16 18:17:03,7.0,1\n", "2: ContextTokens: expected an integer >= 1, got '7.0'"),
        (HEADER + "2023-11-16 18:17:03,,1\n", "2: ContextTokens: expected an integer >= 1, got ''"),
        (HEADER + "2023-11-16 18:17:03,0,1\n", "2: ContextTokens: expected an integer >= 1, got '0'"),
        (HEADER + "yesterday,7,1\n", "2: Invalid isoformat string: 'yesterday'"),
        (HEADER + "2023-11-16 18:17:03,7,1\n2023-11-16 18:17:02,7,1\n", "3: arrives before"),
        (HEADER + "2023-11-16 18:17:03,7,1\n2023-11-16 18:17:04+00:00,7,1\n", "3: can't subtract"),
        (HEADER + '"2023', "2: unexpected end of data"),
        (HEADER.encode() + b"2023-11-16 18:17:03,7,1\n" * 400 + b"\xff\xff", "utf-8"),
        (conversation(), "1: no requests"),
        (conversation(call(), call(tokens=-5)), "requests[1].in: Expected `int` >= 1"),
        (conversation(call(), call(type="x")), "requests[1].type: Invalid value 'x'"),
        (
            conversation({"t": 0.0, "type": "n", "out": 1, "hash_ids": []}),
            "requests[0]: Object missing required field `in`",
        ),
        (conversation(call(), call(tokens=64)), "requests[1]: 2 block ids for 64 input tokens in blocks of 64"),
        (conversation(block_size=0), "block_size: Expected `int` >= 1"),
        (conversation(hash_id_scope="global"), "hash_id_scope: Invalid enum value 'global'"),
        ('{"block_size": 64}', "1: Object missing required field `hash_id_scope`"),
        (conversation(call())[:-9], "1: Input data was truncated"),
        ('{"block_size": 64,\n"requests": [\n', "2: Input data was truncated"),
        ('{"block_size": 64,\n"requests": nope}\n', "2: JSON is malformed"),
        ('{"block_size": 64, "x": ' + "[" * 100_000, "1: nested too deeply"),
    ],
)
def test_malformed(tmp_path: Path, text: str | bytes, expected: str) -> None:
    path = write(tmp_path / "trace", text)
    with pytest.raises(InputError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent:1: cannot be read: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(InputError, match=r"no \*\.json file in this folder"):
        read_trace(tmp_path)


def test_a_broken_file_in_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.json", conversation(call()))
    write(tmp_path / "b.json", "")
    with pytest.raises(InputError, match=r"b\.json:1: empty file"):
        list(read_trace(tmp_path))
