"""Traces of rows: read strictly, replayed on the tables, and changed by one fault."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables
from hybridkv_ref.row_faults import Fault, faulty, load_faults
from hybridkv_ref.row_traces import Add, Crash, Fire, Header, Line, Scalar, encode_rows, leftovers, read_rows, replay

TABLES = load_tables()
KIND = "compressed_kv"  # any kind whose segments are written and read would do
HEADER = Header("hybridkv.rows/1", "made up")
ADMIT: dict[str, Scalar] = {"at": 0, "size": 1, "meta": 0, "off": 0, "until": 0, "known": 2}
LINES: list[Line] = [
    Add("segment", "c", KIND, set={"group": 1}),
    Add("request", "q", set={"length": 3, "kernel": True}),
    Add("lease", "c.q", of=("c", "q")),
    Fire("request.start_cold", ("q",)),
    Fire(f"{KIND}.admit", ("c", "c.q", "q"), ADMIT),
    Fire(f"{KIND}.append", ("c", "c.q", "q"), {"at": 0, "n": 2}),
    Fire(f"{KIND}.commit", ("c", "c.q", "q")),
    Fire(f"{KIND}.let_go", ("c", "c.q", "q")),
    Fire("request.finish", ("q",)),
    Fire("request.close", ("q",)),
    Fire(f"{KIND}.retire", ("c",)),
    Fire(f"{KIND}.free", ("c",)),
]


def text(lines: list[Line], header: Header = HEADER) -> list[bytes]:
    return encode_rows(header, lines).splitlines()


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode_rows(HEADER, [*LINES, Crash(True)]))
    header, lines = read_rows(path)
    assert header == HEADER
    assert [line for _, line in lines] == [*LINES, Crash(True)]
    assert [number for number, _ in lines] == list(range(2, len(LINES) + 3))


def test_a_legal_trace_is_accepted_and_counted() -> None:
    found = replay(text(LINES), TABLES)
    assert found.refusal is None
    assert found.fired == {line.row: 1 for line in LINES if isinstance(line, Fire)}
    assert found.crashes == 0
    assert leftovers(found.world) == []
    assert repr(found.entities["c"]) == "c"


def test_the_first_refusal_ends_it_and_changes_nothing() -> None:
    found = replay(text([*LINES[:5], LINES[6], LINES[5]]), TABLES)
    refusal = found.refusal
    assert refusal is not None
    assert (refusal.line, refusal.event, refusal.on) == (7, f"{KIND}.commit", ("c", "c.q", "q"))
    assert (refusal.guard, refusal.values) == ("start < end", {"start": 0, "end": 0})
    assert refusal.message.startswith(f"trace:7: {KIND}.commit: refused by 'start < end' with end=0, start=0")
    assert found.fired[f"{KIND}.append"] == 0
    assert found.entities["c"].stage == "FILLING"


def test_what_is_not_at_rest_is_named() -> None:
    found = leftovers(replay(text(LINES[:6]), TABLES).world)
    assert "gpu_used is 1" in found
    assert "c.stage is FILLING" in found
    assert "c.writers is 1" in found
    assert "q.stage is RECOMPUTE" in found


def test_a_crash_takes_what_is_volatile() -> None:
    found = replay(text([*LINES[:6], Crash(True)]), TABLES)
    assert found.crashes == 1
    assert leftovers(found.world) == []


def test_constants_are_the_headers_unless_given() -> None:
    small = Header("hybridkv.rows/1", "made up", constants={f"{KIND}.CAP": 0})
    refusal = replay(text(LINES, small), TABLES).refusal
    assert refusal is not None
    assert refusal.guard == "used + size <= CAP"
    assert replay(text(LINES, small), TABLES, {f"{KIND}.CAP": 1}).refusal is None


def test_a_trace_of_these_tables_only() -> None:
    assert replay(text(LINES, Header("hybridkv.rows/1", "", TABLES.sha256)), TABLES).refusal is None
    with pytest.raises(InputError, match=r"^trace:1: is of other tables: table_sha256 0000"):
        replay(text(LINES, Header("hybridkv.rows/1", "", "0000")), TABLES)


# ---- bad input -------------------------------------------------------------------------------------------------------

HEAD = b'{"schema":"hybridkv.rows/1","title":"t","table_sha256":null}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "1: empty; expected a header"),
        (b'{"row":"request.reject","on":["q"]}', "1: expected a header"),
        (HEAD + b"\n" + HEAD, "2: a second header"),
        (HEAD + b"\n\n", "2: not JSON"),
        (HEAD + b'\n{"row":"request.rej', "2: not JSON"),
        (HEAD + b"\n\xff\xfe", "2: not "),
        (HEAD + b"\n[1]", "2: Expected `object`"),
        (HEAD + b'\n{"on":["q"]}', "2: none of the keys row, add, crash, schema"),
        (HEAD + b'\n{"row":"request.reject","on":["q"],"at":3}', "2: Object contains unknown field `at`"),
        (HEAD + b'\n{"row":"request.reject","on":"q"}', "2: Expected `array`"),
        (HEAD + b'\n{"row":"request.reject","in":{"s":1.5}}', "2: Expected `bool | int | str`, got `float`"),
        (HEAD + b'\n{"crash":false}', "2: crash: expected true"),
        (HEAD + b'\n{"crash":"now"}', "2: Expected `bool`"),
        (b'{"schema":"hybridkv.rows/9","title":"t"}', "1: Invalid enum value 'hybridkv.rows/9'"),
        (b'{"schema":"hybridkv.rows/1"}', "1: Object missing required field `title`"),
        (b"[" * 100_000, "1: Expected `object`"),
    ],
)
def test_a_line_that_is_no_record(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        read_rows(path)
    message = str(error.value)
    assert message.startswith(f"{path}:{reason}")
    assert "\n" not in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match=r":1: cannot be read: "):
            replay(path, TABLES)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (Add("segment", "c", KIND), "'c' is taken"),
        (Add("block", "b"), "no class 'block' of entities"),
        (Add("global", "b"), "no class 'global' of entities"),
        (Add("segment", "b"), "a segment has a kind of the tables"),
        (Add("segment", "b", "paged"), "a segment has a kind of the tables"),
        (Add("request", "b", KIND), "a segment has a kind of the tables"),
        (Add("lease", "b", of=("c",)), "'b' is of segment, request, not of c"),
        (Add("lease", "b", of=("q", "c")), "'b' is of segment, request, not of q, c"),
        (Add("lease", "b", of=("c", "q", "q")), "'b' is of segment, request, not of c, q, q"),
        (Add("lease", "b", of=("c", "p")), "no entity 'p'"),
        (Add("request", "b", of=("c",)), "'b' is of nothing, not of c"),
        (Add("request", "b", set={"s": 1}), "a request has no rigid variable 's'"),
        (Add("request", "b", set={"size": 1}), "a request has no rigid variable 'size'"),
        (Add("request", "b", set={"kernel": 1}), "kernel: 1 is no bool"),
        (Add("request", "b", set={"length": True}), "length: True is no int"),
        (Add("request", "b", set={"ranks": -1}), "request#1: ranks=-1 is below 0"),
        (Fire("request.nothing", ("q",)), "no row 'request.nothing' in the tables"),
        (Fire("request.reject", ("p",)), "no entity 'p'"),
        (Fire("request.reject", ("c",)), "request.reject: c cannot be 'req'"),
        (Fire("request.reject", ()), "request.reject: takes entities"),
        (Fire(f"{KIND}.pin", ("c", "q", "c.q")), f"{KIND}.pin: q cannot be 'lease'"),
        (Fire(f"{KIND}.move", ("c",)), f"{KIND}.move: takes entities"),
        (Fire(f"{KIND}.move", ("c",), {"off": 0, "to": 1}), f"{KIND}.move: takes entities"),
        (Fire(f"{KIND}.move", ("c",), {"off": "0"}), "off: '0' is no int"),
        (Fire("graph.set_contents", ("c",), {"padded": 0}), "padded: 0 is no bool"),
    ],
)
def test_a_record_that_does_not_fit_the_tables(line: Line, reason: str) -> None:
    with pytest.raises(InputError) as error:
        replay(text([*LINES[:3], line]), TABLES)
    assert str(error.value).startswith(f"trace:5: {reason}")
    assert "\n" not in str(error.value)


def test_a_constant_that_the_tables_do_not_have() -> None:
    with pytest.raises(InputError, match=r"^trace:1: no constant 'CAPACITY' in the tables"):
        replay(text(LINES), TABLES, {"CAPACITY": 1})


# ---- faults ----------------------------------------------------------------------------------------------------------


def fault(**change: object) -> Fault:
    return msgspec.convert({"doc": "d", "refused": {"row": f"{KIND}.free", "guard": "pins == 0"}, **change}, Fault)


APPEND = {"row": f"{KIND}.append", "on": ["c.q"]}
COMMIT = {"row": f"{KIND}.commit"}


def changed(own: Fault) -> list[Line]:
    return faulty(own, HEADER, LINES)[1]


def test_each_change_of_a_trace() -> None:
    append, commit = LINES[5], LINES[6]
    assert changed(fault(drop=APPEND)) == [*LINES[:5], *LINES[6:]]
    assert changed(fault(repeat=APPEND)) == [*LINES[:5], append, append, *LINES[6:]]
    assert changed(fault(move=APPEND, after=COMMIT)) == [*LINES[:5], commit, append, *LINES[7:]]
    assert changed(fault(move=COMMIT, before=APPEND)) == [*LINES[:5], commit, append, *LINES[7:]]
    assert changed(fault(insert={"row": "system.rebase"}, before=APPEND)) == [
        *LINES[:5],
        Fire("system.rebase"),
        *LINES[5:],
    ]
    assert changed(fault(change=APPEND, **{"in": {"n": 9}}))[5] == Fire(
        f"{KIND}.append", ("c", "c.q", "q"), {"at": 0, "n": 9}
    )
    assert changed(fault(create={"name": "c", "set": {"group": 2}}))[0] == Add("segment", "c", KIND, set={"group": 2})
    header, lines = faulty(fault(constants={"GPU_CAP": 1}), HEADER, LINES)
    assert (header.constants, lines) == ({"GPU_CAP": 1}, LINES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"drop": {"row": "request.match"}}, "the trace does not fire request.match 1 times"),
        ({"drop": {**APPEND, "nth": 2}}, f"the trace does not fire {KIND}.append on c.q 2 times"),
        ({"drop": {**APPEND, "on": ["d"]}}, f"the trace does not fire {KIND}.append on d 1 times"),
        ({"move": APPEND, "after": {"row": "request.match"}}, "the trace does not fire request.match 1 times"),
        ({"change": APPEND, "in": {"m": 1}}, "in: the line has no such inputs"),
        ({"create": {"name": "d", "set": {}}}, "the trace makes no 'd'"),
    ],
)
def test_a_change_of_what_is_not_there(change: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError) as error:
        faulty(fault(**change), HEADER, LINES, "file:faults.f")
    assert str(error.value).replace("f.in", "f: in") == f"file:faults.f: {reason}"


GOOD = """
title = "t"
trace = "x.jsonl"
[faults.f]
doc = "d"
drop = { row = "request.reject" }
refused = { row = "request.close", guard = "req.held == 0" }
"""


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda t: t.replace("drop", "lose"), "faults"),
        (lambda t: t.replace("drop = {", "repeat = { row = 'r' }\ndrop = {"), "faults.f: needs one of drop, repeat"),
        (lambda t: t.replace('drop = { row = "request.reject" }', ""), "faults.f: needs one of"),
        (lambda t: t.replace("drop", "move"), "faults.f: 'move' and 'insert' need 'before' or 'after'"),
        (lambda t: t.replace("drop = ", "after = { row = 'r' }\ndrop = "), "faults.f: 'move' and 'insert' need"),
        (lambda t: t.replace("drop", "change"), "faults.f.in: 'change' needs it"),
        (lambda t: t.replace("drop = ", "in = { a = 1 }\ndrop = "), "faults.f.in: 'change' needs it"),
        (lambda t: t.replace('row = "request.reject"', 'row = "r", nth = 0'), "faults"),
        (lambda t: t.replace('doc = "d"', "doc = 3"), "faults"),
        (lambda t: t.partition("[faults.f]")[0] + "[faults]\n", "faults: empty"),
        (lambda t: t.partition("[faults.f]")[0], "file: "),
        (lambda t: t + "[", "file: not TOML"),
    ],
)
def test_a_file_of_faults_that_is_none(tmp_path: Path, edit: Callable[[str], str], reason: str) -> None:
    path = tmp_path / "faults.toml"
    path.write_text(GOOD)
    assert list(load_faults(path).faults) == ["f"]
    path.write_text(edit(GOOD))
    assert path.read_text() != GOOD
    with pytest.raises(InputError) as error:
        load_faults(path)
    assert str(error.value).startswith(f"{path}:{reason}")
    assert "\n" not in str(error.value)


def test_a_file_of_faults_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r":1: cannot be read: "):
        load_faults(tmp_path / "none.toml")
