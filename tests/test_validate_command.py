"""`hybridkv validate`: what it prints, its exit codes, and bad input of every kind."""

import contextlib
import gzip
import io
import json
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from helpers import copy_oracle_spec, edit
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_driver import Driver

from hybridkv_ref import trace_reader
from hybridkv_ref.cli import main
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Evict, GroupSpec, Header, Io, KeyPublish, Run, Vote
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_tables import oracle_hash
from hybridkv_ref.trace_reader import TraceReader, encode_trace, open_trace, read_trace
from hybridkv_ref.trace_shrink import fails, shrink
from hybridkv_ref.validate import validate

HEADER = Header("hybridkv.events/1", unit=4, groups=(GroupSpec("full", "compressed_kv", 4),))


@pytest.fixture
def legal() -> tuple[Header, list[Event]]:
    driver = Driver(random.Random(3))
    return driver.header, driver.run(150)


@pytest.fixture
def illegal(legal: tuple[Header, list[Event]]) -> tuple[Header, list[Event]]:
    """A block is evicted that the index still names."""
    header, events = legal
    place = next(
        i for i, e in enumerate(events) if isinstance(e, KeyPublish) and e.group == "full" and e.tier == "device"
    )
    published = events[place]
    assert isinstance(published, KeyPublish)
    return header, [*events[: place + 1], Evict("full", published.blocks), *events[place + 1 :]]


def write(path: Path, trace: tuple[Header, list[Event]]) -> Path:
    data = encode_trace(*trace)
    packed = {".gz": gzip.compress(data), ".zst": zstandard.compress(data)}
    path.write_bytes(packed.get(path.suffix, data))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["validate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


# ---- verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz", "trace.jsonl.zst"])
def test_a_legal_trace_is_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], legal: tuple[Header, list[Event]], name: str
) -> None:
    code, out, err = run(capsys, write(tmp_path / name, legal))
    assert (code, err) == (0, "")
    assert "0 refused" in out.replace("\n", " ")


def test_an_illegal_trace_is_named_and_shrunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], illegal: tuple[Header, list[Event]]
) -> None:
    path = write(tmp_path / "trace.jsonl", illegal)
    code, out, _ = run(capsys, path, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["verdict"] == "fail"
    first = report["first"][0]
    line = 2 + next(i for i, e in enumerate(illegal[1]) if isinstance(e, Evict))
    assert (first["line"], first["event"], first["row"]) == (line, "evict", "full.free")
    # The shortest trace is still refused, and nothing of it can be left out.
    header = illegal[0]
    refusal = Oracle(header).feed_all(illegal[1])[0]
    events = [trace_reader._EVENT.decode(json.dumps(e)) for e in first["events"]]
    assert len(events) < 10
    check = fails(header, refusal)
    assert check(events)
    assert not any(check([*events[:i], *events[i + 1 :]]) for i in range(len(events)))


def test_the_report_for_people_says_which_rule_and_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], illegal: tuple[Header, list[Event]]
) -> None:
    code, out, _ = run(capsys, write(tmp_path / "trace.jsonl", illegal))
    assert code == 1
    for text in ("First refusal of each rule", "full.free", "The shortest trace found", '{"event":"evict"', "fail:"):
        assert text in out


def test_the_readme_shows_what_the_command_says() -> None:
    checkout = Path(__file__).resolve().parents[1]
    report = validate(str(checkout / "tests" / "data" / "window_gone.jsonl"))
    (first,) = report.first[:1]
    assert (report.verdict, report.refusals, first.line, first.segment) == ("fail", 1, 14, "win:b")
    said = f"fail: {report.events} events, {report.coverage.rows_fired} rows, 1 refused, "
    readme = (checkout / "README.md").read_text()
    assert said in readme
    assert f"tables {oracle_hash()[:12]}\n" in readme


def test_standard_input_is_read_and_its_last_events_are_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], illegal: tuple[Header, list[Event]]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(encode_trace(*illegal))))
    code, out, _ = run(capsys, "-", "--json")
    assert code == 1
    report = json.loads(out)
    assert report["first"][0]["events"][-1]["event"] == "evict"


def test_a_trace_of_other_tables_warns_or_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], legal: tuple[Header, list[Event]]
) -> None:
    lines = encode_trace(*legal).replace(b'"table_sha256":null', b'"table_sha256":"00"', 1)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines)
    code, _, err = run(capsys, path)
    assert code == 0
    assert f"warning: {path}:1: is of other tables: table_sha256 00, not {oracle_hash()}" in err
    code, out, err = run(capsys, path, "--strict-hash")
    assert (code, out) == (2, "")
    assert "is of other tables" in err
    path.write_bytes(encode_trace(*legal).replace(b"null", b'"' + oracle_hash().encode() + b'"', 1))
    assert run(capsys, path, "--strict-hash")[0] == 0


def test_a_model_takes_the_place_of_the_headers_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace.jsonl", (HEADER, [KeyPublish("window", ["k"]), Io(4096)]))
    code, _, err = run(capsys, path)
    assert code == 2
    assert f"{path}:2: event 1 (key_publish): no group 'window' in the header (known: full)" in err
    assert run(capsys, path, "--model", "deepseek-v4-flash")[0] == 0
    code, _, err = run(capsys, path, "--model", "deepseek-v5")
    assert (code, err.count("\n")) == (2, 1)


def test_instances_are_judged_apart_and_ranks_together(tmp_path: Path, illegal: tuple[Header, list[Event]]) -> None:
    header, events = illegal
    lines = []
    for event in events:
        for name in ("a", "b", "c"):
            record = json.loads(trace_reader.encode_trace(header, [event]).splitlines()[1])
            lines.append(json.dumps({**record, "instance": name}))
    votes = [Vote("q", 0, 8, instance="a"), Vote("q", 1, 4, instance="b")]
    lines += [line.decode() for line in encode_trace(header, list(votes)).splitlines()[1:]]
    lines.append('{"event":"agree","req":"q","hit":8,"instance":"a"}')
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([encode_trace(header, []).decode().strip(), *lines]) + "\n")
    reports = [validate(str(path), jobs=jobs, shrink_seconds=0) for jobs in (1, 2)]
    for report in reports:
        assert report.instances == 3
        assert report.events == 3 * len(events) + 3
        assert "HKV-RANK-001" in {first.rule for first in report.first}
    assert reports[0].coverage == reports[1].coverage
    assert reports[0].refusals == reports[1].refusals


# ---- input that cannot be used ------------------------------------------------------------------------------------


def header_line() -> bytes:
    return encode_trace(HEADER, [])


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", ":1: empty; expected a header"),
    "blank": (lambda: b"\n\n", ":1: empty; expected a header"),
    "no header": (lambda: b'{"event":"drain"}\n', ":1: not a header of a trace"),
    "not JSON": (lambda: b"hello\n", ":1: not a header of a trace: JSON is malformed"),
    "binary": (lambda: bytes(range(256)), ":1: not a header of a trace"),
    "other schema": (lambda: b'{"schema":"hybridkv.events/2"}\n', ":1: not a header of a trace: Invalid enum value"),
    "header only": (header_line, ":2: no events"),
    "no row": (
        lambda: header_line() + b'{"event":"vote","req":"a","rank":0,"hit":1}\n',
        ":2: its 1 events fire no row",
    ),
    "unknown event": (
        lambda: header_line() + b'{"event":"drain"}\n{"event":"nap"}\n',
        ":3: not an event: Invalid value",
    ),
    "unknown field": (
        lambda: header_line() + b'{"event":"drain","x":1}\n',
        ":2: not an event: Object contains unknown",
    ),
    "truncated": (lambda: header_line() + b'{"event":"drain"}\n{"event":"dr', ":3: not an event: truncated"),
    "second header": (lambda: header_line() * 2, ":2: not an event"),
    "not UTF-8": (lambda: header_line() + b'{"event":"finish","req":"\xff"}\n', ":2: not an event"),
    "deep": (lambda: header_line() + b'{"event":' + b"[" * 100_000 + b"\n", ":2: not an event"),
    "huge number": (lambda: header_line() + b'{"event":"accept","req":"a","to":1e400}\n', ":2: not an event"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    make, reason = BAD[name]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(make())
    code, _, err = run(capsys, path)
    assert code == 2
    assert err.startswith(f"hybridkv: {path}{reason}"), err
    assert err.count("\n") == 1


def test_nothing_is_lost_of_what_was_read_before_a_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], illegal: tuple[Header, list[Event]]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(encode_trace(*illegal) + b'{"event":"nap"}\n')
    code, out, err = run(capsys, path, "--json")
    assert code == 2
    assert f"{path}:{len(illegal[1]) + 2}: not an event" in err
    report = json.loads(out)
    assert report["events"] == len(illegal[1])
    assert report["first"][0]["row"] == "full.free"


def test_a_line_without_end_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_reader, "LONGEST", 3 << 20)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(header_line() + b'{"event":"drain"}\n{"event":"finish","req":"' + b"x" * (5 << 20) + b'"}\n')
    found: list[Event] = []
    with open_trace(str(path)) as (stream, _):
        reader = TraceReader(stream, str(path))
        batches = reader.batches()
        found += next(batches)[1]
        with pytest.raises(InputError, match=r"trace\.jsonl:3: longer than 3 MiB"):
            next(batches)
    assert len(found) == 1


def test_a_cut_gzip_file_says_so_after_what_it_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], legal: tuple[Header, list[Event]]
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(encode_trace(*legal))[:-20])
    code, _, err = run(capsys, path)
    assert code == 2
    assert "truncated" in err
    path.write_bytes(b"no gzip at all")
    assert "truncated or damaged" in run(capsys, path)[2]


def test_zstd_in_several_frames_is_read_whole(tmp_path: Path, legal: tuple[Header, list[Event]]) -> None:
    data = encode_trace(*legal)
    path = tmp_path / "trace.jsonl.zst"
    for places in ((), (1000,), (0, 5, len(data) - 5)):
        parts = [data[a:b] for a, b in pairwise((0, *places, len(data)))]
        path.write_bytes(b"".join(map(zstandard.compress, parts)))
        assert read_trace(str(path)) == legal


@pytest.mark.parametrize("cut", [1, 3, 50, 2000])
def test_a_cut_zstd_file_says_so_after_what_it_held(
    tmp_path: Path, legal: tuple[Header, list[Event]], cut: int
) -> None:
    # The first frame is whole and ends with a line: only the frame that is cut says that something is missing.
    header, events = legal
    path = tmp_path / "trace.jsonl.zst"
    rest = zstandard.compress(encode_trace(header, events).split(b"\n", 1)[1])
    path.write_bytes(zstandard.compress(encode_trace(header, events)) + rest[:-cut])
    found = list[Event]()
    with open_trace(str(path)) as (stream, _):
        reader = TraceReader(stream, str(path))

        def read_on() -> None:
            for _, batch in reader.batches():
                found.extend(batch)

        with pytest.raises(InputError, match=r"truncated|not an event"):
            read_on()
    assert found[: len(events)] == events
    assert found[len(events) :] == events[: len(found) - len(events)]


def test_what_is_no_zstd_says_so_after_what_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"no zstd at all")
    assert f"{path}:1: truncated or damaged: zstd" in run(capsys, path)[2]
    path.write_bytes(zstandard.compress(encode_trace(HEADER, [Io(4096)])) + b"no zstd at all")
    code, _, err = run(capsys, path)
    assert code == 2
    assert f"{path}:3: truncated or damaged: zstd" in err
    path.write_bytes(b"")
    assert f"{path}:1: empty; expected a header" in run(capsys, path)[2]


def test_zstd_without_its_package_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    code, _, err = run(capsys, path)
    assert (code, err) == (2, f"hybridkv: {path}:1: needs the package zstandard to be read (pip install zstandard)\n")


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path / "none.jsonl.gz", tmp_path):
        code, out, err = run(capsys, path)
        assert (code, out) == (2, "")
        assert err.startswith(f"hybridkv: {path}:1: cannot be read: ")


def test_blank_lines_are_passed_over_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(header_line() + b'\n{"event":"drain"}\n\n\n{"event":"nap"}\n')
    assert f"{path}:6: not an event" in run(capsys, path)[2]


def test_a_trace_survives_being_written_and_read(tmp_path: Path, legal: tuple[Header, list[Event]]) -> None:
    assert read_trace(str(write(tmp_path / "trace.jsonl", legal))) == legal


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([b'{"event":"drain"}', b"{}", b'{"event":"finish"}'])))
)
def test_no_bytes_bring_the_reader_down(lines: list[bytes]) -> None:
    data = header_line() + b"\n".join(lines)
    reader = TraceReader(io.BytesIO(data), "fuzz")
    count = 0
    with contextlib.suppress(InputError):
        for _, events in reader.batches():
            count += len(events)
    assert count <= data.count(b"\n") + 1


@settings(max_examples=100)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32))
def test_shuffled_and_thinned_traces_are_judged_without_a_crash(chance: random.Random, seed: int) -> None:
    driver = Driver(random.Random(seed), recurrent=bool(seed % 2), capacity=16)
    events = driver.run(40)
    chance.shuffle(events)
    oracle = Oracle(driver.header)
    chosen = events[: chance.randint(1, len(events))]
    refused = oracle.feed_all(chosen)
    assert oracle.snapshot()["events"] == len(chosen)
    failed = {rule for rule, v in oracle.coverage().rules.items() if v.result == "fail"}
    assert failed == {rule for refusal in refused for rule in refusal.rules}


def test_a_refusal_is_shrunk_by_the_tables_that_refused(tmp_path: Path) -> None:
    spec = copy_oracle_spec(tmp_path)
    edit(spec / "oracle" / "waits.toml", 'when = ["own"]', 'when = ["not own"]')
    path = write(tmp_path / "trace.jsonl", (HEADER, [Io(4096), Run("copy", "copy", ["copy"])]))
    assert validate(str(path)).refusals == 0
    assert [len(first.events) for first in validate(str(path), spec=spec).first if first.events] == [1]


def test_shrinking_keeps_what_does_not_fail(legal: tuple[Header, list[Event]]) -> None:
    assert shrink(legal[1], lambda events: False, 1e18) == legal[1]
