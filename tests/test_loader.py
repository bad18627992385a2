"""What the loader refuses, in one line with file, place, column and token; and how rows of several files become events."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers import copy_spec, edit, faulty
from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build, load_tables, table_hash
from hybridkv_ref.model_checks.check import cited_rules_exist
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import FileSpec, Spec, read_spec, read_toml
from hybridkv_ref.tables import Tables

COMMON, HIT, HANDOFFS, GRAPH = "common.toml", *(f"protocols/{n}.toml" for n in ("prefix_hit", "handoffs", "cuda_graph"))
SWA, CKV, TAIL, DISK = (
    f"kinds/{n}.toml" for n in ("swa_window", "compressed_kv", "uncompressed_tail", "on_disk_prefix")
)

# file, section, text, its replacement, and the whole message
REFUSED = [
    # names and types inside expressions
    (COMMON, "rows.move", '"off >= 0"', '"offf >= 0"', "common.toml: rows.move.when[0]: column 1, at 'offf': unknown name"),
    (COMMON, "rows.move", '"off >= 0"', '"off"', "common.toml: rows.move.when[0]: column 1, at 'off': is int, expected bool"),
    (COMMON, "rows.admit", '"req.stage in RUNNING"', '"req.stage == FREE"',
     "common.toml: rows.admit.when[0]: column 14, at 'FREE': not a member of enum{IDLE, "),
    (COMMON, "rows.admit", '"req.stage in RUNNING"', '"req.stage in RUNING"',
     "common.toml: rows.admit.when[0]: column 14, at 'RUNING': unknown set"),
    (COMMON, "rows.admit", '"req.stage in RUNNING"', '"req.stage in HELD"',
     "common.toml: rows.admit.when[0]: column 14, at 'HELD': not a set of enum{IDLE, "),
    (COMMON, "rows.admit", '"off == 0"', '"offf == 0"', "common.toml: rows.admit.can[1]: column 1, at 'offf': unknown name"),
    (COMMON, "rows.admit", '"off == 0"', '"new(off) == 0"', "common.toml: rows.admit.can[1]: column 5, at 'off': new(...) takes"),
    (COMMON, "invariant.charged", "mem >= 1", "mem >= True", "common.toml: invariant.charged.holds: column 29, at 'mem >= True': compares int with bool"),
    (COMMON, "invariant.charged", "mem >= 1", "new(mem) >= 1", "common.toml: invariant.charged.holds: column 29, at 'new(mem)': not part of"),
    (COMMON, "response.eviction_ends", '"1 if pins > 0 else 0"', '"pins > 0"', "common.toml: response.eviction_ends.rank[0]: column 1, at 'pins > 0': is bool, expected int"),
    (COMMON, "response.eviction_ends", 'row = "free"', 'row = "fre"', "common.toml: response.eviction_ends: no row 'fre'"),
    (COMMON, "segment", "1 if lease.stage in HELD else 0", "lease.stage in HELD", "segment.pins.sum.term: column 1, at 'lease.stage in HELD': is bool, expected int"),
    (COMMON, "constants", '"GPU_CAP >= 1"', '"GPU_CAPS >= 1"', "common.toml: constants.GPU_CAP.assume[0]: column 1, at 'GPU_CAPS': unknown name"),
    (HIT, "invariant.cover_is_range", 'role = "helper"', 'role = "helper"\nchoose = "req.s == 0"', "prefix_hit.toml: invariant.cover_is_range.choose: fixes a constant"),
    # writes outside the footprint
    (COMMON, "rows.move", '"slack = off"', '"CAP = off"', "common.toml: rows.move.then[0]: column 1, at 'CAP': a constant, an input or rigid: never written"),
    (COMMON, "rows.move", '"slack = off"', '"off = off"', "common.toml: rows.move.then[0]: column 1, at 'off': a constant, an input or rigid: never written"),
    (HIT, "rows.match", '"req.s = s"', '"req.length = s"', "protocols/prefix_hit.toml: rows.match.then[0]: column 1, at 'req.length': a constant, an input or rigid"),
    (DISK, "rows.seal", '"intact = True"', '"intact = True", "parts = 1"', "kinds/on_disk_prefix.toml: rows.seal.then[1]: column 1, at 'parts': a constant, an input or rigid"),
    (SWA, "rows.realign_end", '"mark = 0"', '"mark = 0", "compressed_kv.used = 0"', "kinds/swa_window.toml: rows.realign_end.then[1]: column 1, at 'compressed_kv.used': unknown name, or outside"),
    (SWA, "rows.realign_end", '"mark = 0"', '"mark = 0", "lease.seen = 0"', "kinds/swa_window.toml: rows.realign_end.then[1]: column 1, at 'lease.seen': unknown name, or outside"),
    (COMMON, "rows.move", '"slack = off"', '"slack = off", "slack = 0"', "common.toml: rows.move.then[1]: column 1, at 'slack': written twice in one row"),
    (COMMON, "rows.move", '"slack = off"', '"slack == off"', "common.toml: rows.move.then[0]: column 1, at 'slack == off': not an assignment"),
    (COMMON, "rows.move", '"slack = off"', '"slack = off > 0"', "common.toml: rows.move.then[0]: column 1, at 'off > 0': is bool, expected int"),
    (HANDOFFS, "handoffs.clone_begin", '"copy.seen = src.generation"', '"dst.mark = 0"', "protocols/handoffs.toml: handoffs.clone_begin.then[0]: at 'dst.mark = 0': a handoff itself writes only the copy"),
    # inputs
    (COMMON, "rows.move", 'inputs = { off = "int" }', 'inputs = { off = "int", idle = "int" }', "common.toml: rows.move.inputs.idle: nothing reads this input"),
    (COMMON, "rows.move", 'inputs = { off = "int" }', 'inputs = { off = "int", mem = "int" }', "common.toml: rows.move.inputs.mem: hides a variable of that name"),
    (COMMON, "rows.move", 'inputs = { off = "int" }', 'inputs = { off = "float" }', "common.toml: rows.move.inputs.off: unknown type 'float'"),
    (HANDOFFS, "handoffs.split", 'pass = { cut = "cut", ', 'pass = { cut = "cut", depth = "cut", ', "protocols/handoffs.toml: handoffs.split.src.pass.depth: row 'split_out' has no such input"),
    (HANDOFFS, "handoffs.split", 'pass = { cut = "cut", ', 'pass = { cut = "src.cut", ', "protocols/handoffs.toml: handoffs.split.src.pass.cut: column 1, at 'src.cut': unknown name"),
    # stages, sets, edges
    (COMMON, "rows.move", 'from = "READABLE"', 'from = "READABEL"', "common.toml: rows.move.from: 'READABEL' is neither a stage nor a set"),
    (COMMON, "rows.free", 'to = "EMPTY"', 'to = "KEPT"', "common.toml: rows.free.to: 'KEPT' is "),
    (COMMON, "rows.new_model", 'scope = "system"', 'scope = "system"\nfrom = "FREE"', "common.toml: rows.new_model.from: this scope has no stage"),
    (SWA, "sets", 'EMPTY = ["FREE"]', 'EMPTY = ["FRE"]', "kinds/swa_window.toml: sets.EMPTY: 'FRE' is no stage of swa_window"),
    (SWA, "sets", 'EMPTY = ["FREE"]\n', "", "kinds/swa_window.toml: sets.EMPTY: missing; shared rows use it"),
    (HIT, "sets", '"lease.HELD"', '"leese.HELD"', "protocols/prefix_hit.toml: sets.leese.HELD: no stages of 'leese' to choose from"),
    (SWA, "", '"FREE -> FILLING"', '"FREE -> FULL"', "kinds/swa_window.toml: edges[0]: 'FREE -> FULL' is not 'STAGE -> STAGE'"),
    (SWA, "", '"FREE -> FILLING"', '"FREE"', "kinds/swa_window.toml: edges[0]: 'FREE' is not 'STAGE -> STAGE'"),
    (SWA, "", '"FREE -> FILLING"', '"FREE -> FILLING -> READY"', "kinds/swa_window.toml: edges[0]: 'FREE -> FILLING -> READY' is not"),
    # which rows a kind has
    (SWA, "", '"find", "drop"', '"fnd", "drop"', "kinds/swa_window.toml: uses: 'fnd' is no shared row of a segment or lease"),
    (SWA, "", '"find", "drop"', '"match", "drop"', "kinds/swa_window.toml: uses: 'match' is no shared row of a segment or lease"),
    (SWA, "", '"admit", "append"', '"append"', "kinds/swa_window.toml: extend.admit: not among the rows that this kind uses"),
    (SWA, "", "[rows.slide]", "[rows.free]", "kinds/swa_window.toml: rows.free: a shared row has this name"),
    (HIT, "", "[rows.drop]", "[rows.free]", "protocols/prefix_hit.toml: rows.free: written twice"),
    (COMMON, "", "[rows.unmark]", "[rows.free]", "common.toml: Cannot declare ('rows', 'free') twice"),
    (SWA, "", '"out_begin", "out_end"', '"out_end"', "kinds/swa_window.toml: capability 'spills' needs the part row 'out_begin'"),
    (SWA, "", '"ranged"]', '"ranged", "clones", "folds"]', "kinds/swa_window.toml: capability 'folds' needs the part row 'fold_out_begin'"),
    (TAIL, "rows.fold_out_begin", "part = true\n", "", "kinds/uncompressed_tail.toml: capability 'folds' needs the part row 'fold_out_begin'"),
    # declarations
    (COMMON, "segment", 'mem = { type = "int"', 'mem = { type = "integer"', "unknown type 'integer'"),
    (DISK, "segment", "at_least = 1", 'at_least = "one"', "kinds/on_disk_prefix.toml: segment[...].at_least: Expected `int | null`, got `str`"),
    (DISK, "segment", "rigid = true, at_least = 1", "at_least = 1", "kinds/on_disk_prefix.toml: segment.parts.at_least: only a rigid int has a lower bound"),
    (DISK, "segment", "rigid = true, doc = \"where", 'rigid = true, init = "TAPE", doc = "where', "kinds/on_disk_prefix.toml: segment.medium.init: 'TAPE' is not enum{HOST, DISK, OBJECT}"),
    (DISK, "segment", "cursor = {", 'mem = { type = "int" }\ncursor = {', "kinds/on_disk_prefix.toml: variable 'mem': declared twice"),
    (GRAPH, "pool", "topology = {", 'gpu_used = { type = "int" }\ntopology = {', "protocols/cuda_graph.toml: variable 'gpu_used': declared twice"),
    (SWA, "", 'kind = "swa_window"', 'kind = "compressed_kv"', "kinds: two files describe the same kind"),
    (HANDOFFS, "stages", "copy = [", 'lease = ["A"]\ncopy = [', "stages 'lease': declared twice"),
    # shapes
    (COMMON, "rows.move", 'doc = "The bytes', 'dock = "The bytes', "common.toml: rows[...]: "),
    (COMMON, "rows.move", 'actor = "gpu"', 'actor = "tpu"', "common.toml: rows[...].actor: Invalid enum value 'tpu'"),
    (COMMON, "rows.move", 'when = ["off', 'when = [3, "off', "common.toml: rows[...].when[0]: Expected `str`, got `int`"),
    (COMMON, "rows.move", 'when = ["off', 'when = "off', "common.toml: "),
    (COMMON, "rows.move", "rules = [", "rules = [[", "common.toml: "),
    (COMMON, "rows.new_model", "then = [", "than = [", "common.toml: rows[...]: Object contains unknown field `than`"),
    # recovery.toml
    ("recovery.toml", "", "[need.swa_window]", "[need.swa_windows]", "recovery.toml: need.swa_window: missing; a cacheable kind needs a recovery entry"),
    ("recovery.toml", "", "[need.recurrent_state]", '[need.extra]\nlo = "0"\nhi = "s"\nmiss = "replay"\n\n[need.recurrent_state]', "recovery.toml: need.extra: no such kind"),
    ("recovery.toml", "need.swa_window", 'window = "W"', 'window = "WW"', "recovery.toml: need.swa_window.params.window: 'WW' is no constant or request variable"),
    ("recovery.toml", "need.swa_window", "(window - 1)", "(width - 1)", "recovery.toml: need.swa_window.lo: column 13, at 'width': unknown name"),
    ("recovery.toml", "need.swa_window", 'hi = "s"', 'hi = "s > 0"', "recovery.toml: need.swa_window.hi: column 1, at 's > 0': is bool, expected int"),
    ("recovery.toml", "need.swa_window", 'hi = "s"', 'hi = "floor_to(s, window)"', "recovery.toml: need.swa_window: 'floor_to(s, window)' has no entry under 'boundary'"),
    ("recovery.toml", "boundary", '"floor_to(F, ratio)" = "req.bound"\n', "", "recovery.toml: need.compressed_kv: 'floor_to(F, ratio)' has no entry under 'boundary'"),
    ("recovery.toml", "positions", '"req.s"', '"req.start"', "recovery.toml: need.compressed_kv.params.s: 'req.start' is no constant or request variable"),
    ("recovery.toml", "need.swa_window", 'miss = "replay"', "", "recovery.toml: Object missing required field `miss`"),
]  # fmt: skip

# Names that tie files together: misspelt, they would silently take rows or properties away.
MISSPELT = [
    (COMMON, "invariant.pinned_is_kept", 'has = "cacheable"', 'has = "cachable"', "common.toml: invariant.pinned_is_kept.has: no kind has the capability 'cachable'"),
    (COMMON, "step.admission_leaves_reserve", 'on = "admission"', 'on = "admision"', "common.toml: step.admission_leaves_reserve.on: no row has the tag 'admision'"),
    (COMMON, "segment", 'pins = { type = "int", needs = "cacheable"', 'pins = { type = "int", needs = "cachable"', "common.toml: segment.pins.needs: no kind has the capability 'cachable'"),
    (COMMON, "pool", 'has = "device"', 'has = "devise"', "common.toml: pool.gpu_used.sum.has: no kind has the capability 'devise'"),
    (HIT, "request", 'found = { type = "int", sum = { of = "lease", via = "req"', 'found = { type = "int", sum = { of = "lease", via = "rq"', "protocols/prefix_hit.toml: request.found.sum.via: a lease points at no request as 'rq'"),
    (HANDOFFS, "handoffs.spill_begin", 'has = "store"', 'has = "stor"', "protocols/handoffs.toml: handoffs.spill_begin.dst.has: no kind has the capability 'stor'"),
    (HANDOFFS, "invariant.splice", 'src_has = "folds"', 'src_has = "fold"', "protocols/handoffs.toml: invariant.splice.src_has: no kind has the capability 'fold'"),
    (HANDOFFS, "handoffs.split", 'order = ["src", "dst"]', 'order = ["src", "src"]', "protocols/handoffs.toml: handoffs.split.order: names a side twice, or none"),
    (HANDOFFS, "handoffs.split", 'order = ["src", "dst"]', "order = []", "protocols/handoffs.toml: handoffs.split.order: names a side twice, or none"),
    (SWA, "", '"spills"', '"spils"', "kinds/swa_window.toml: capabilities: nothing asks for 'spils'"),
    (SWA, "extend_claim", "device_drains", "device_drain", "kinds/swa_window.toml: extend_claim.device_drain: no claim of this name"),
    (SWA, "stages", '["FREE", ', '["FREE", "FREE", ', "kinds/swa_window.toml: stages.segment: names a stage twice, or none"),
    (SWA, "stages", "segment = [", 'lesse = ["A"]\nsegment = [', "kinds/swa_window.toml: stages.lesse: no class of this name"),
    (SWA, "sets", 'EMPTY = ["FREE"]', "EMPTY = []", "common.toml: rows.admit.segment_from: 'EMPTY' is an empty set"),
    (SWA, "constants", "W = {", "RATIO = { small = 2 }\nW = {", "kinds/swa_window.toml: constant 'RATIO': declared twice"),
    (SWA, "rows.slide", 'n = "int"', 'lambda = "int", n = "int"', "kinds/swa_window.toml: rows.slide.inputs.lambda: not a name"),
    (SWA, "constants", "W = {", '"W 2" = { small = 2 }\nW = {', "kinds/swa_window.toml: constants.W 2: not a name"),
    (COMMON, "segment", "mark = {", 'kind = { type = "int" }\nmark = {', "common.toml: segment.kind: not a name"),
    (COMMON, "segment", "mark = {", '"m k" = { type = "int" }\nmark = {', "common.toml: segment.m k: not a name"),
    (COMMON, "rows.new_model", 'scope = "system"', 'scope = "global"', "common.toml: rows.new_model.scope: no row has the scope 'global'"),
    ("recovery.toml", "need.swa_window", 'miss = "replay"', 'miss = "repaly"', "recovery.toml: Invalid enum value 'repaly'"),
    ("recovery.toml", "positions", 'F = "req.f"', 'frontier = "req.f"', "recovery.toml: positions: expected s and F"),
    ("recovery.toml", "boundary", '"req.bound"', '"req.stage"', "recovery.toml: boundary.floor_to(F, ratio): 'req.stage' is no number of the request"),
]  # fmt: skip

# An assumption that cannot hold would prove everything.
IMPOSSIBLE = [
    (COMMON, "constants", 'assume = ["RATIO >= 1"]', 'assume = ["RATIO >= 1", "RATIO <= 0"]', "common.toml: constants.RATIO.assume[1]: 'RATIO <= 0' does not hold for the small values (RATIO=2)"),
    (COMMON, "constants", "RESERVE = { small = 1", "RESERVE = { small = -1", "common.toml: constants.RESERVE.assume[0]: 'RESERVE >= 0' does not hold for the small values (RESERVE=-1)"),
    (COMMON, "kind_constants", 'assume = ["CAP >= 1"]', 'assume = ["CAP >= 1", "CAP > GPU_CAP"]', "common.toml: constants.compressed_kv.CAP.assume[1]: 'CAP > GPU_CAP' does not hold"),
]  # fmt: skip


def message(folder: Path, file: str, header: str, old: str, new: str) -> str:
    spec = copy_spec(folder)
    edit(spec / file, old, new, header)
    with pytest.raises(InputError) as error:
        faulty(spec)
    return str(error.value)


@pytest.mark.parametrize(("file", "header", "old", "new", "expected"), REFUSED)
def test_a_mistake_is_named_with_its_place(
    tmp_path: Path, file: str, header: str, old: str, new: str, expected: str
) -> None:
    found = message(tmp_path, file, header, old, new)
    assert expected in found
    assert "\n" not in found


@pytest.mark.parametrize(("file", "header", "old", "new", "expected"), MISSPELT)
def test_a_misspelt_tie_is_no_smaller_spec(
    tmp_path: Path, file: str, header: str, old: str, new: str, expected: str
) -> None:
    assert expected in message(tmp_path, file, header, old, new)


@pytest.mark.parametrize(("file", "header", "old", "new", "expected"), IMPOSSIBLE)
def test_an_assumption_that_cannot_hold_is_refused(
    tmp_path: Path, file: str, header: str, old: str, new: str, expected: str
) -> None:
    assert expected in message(tmp_path, file, header, old, new)


def test_the_unchanged_copy_loads(tmp_path: Path) -> None:
    assert faulty(copy_spec(tmp_path)).sha256 == load_tables().sha256


def test_a_rule_that_nobody_wrote_is_not_cited(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / COMMON, '"HKV-S1-001"', '"HKV-S1-999"', "invariant.charged")
    with pytest.raises(InputError, match=r"common.toml: invariant.charged: .* cites 'HKV-S1-999', which rules.toml does not"):
        cited_rules_exist(faulty(spec), spec)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("missing", None, "cannot be read: No such file"),
        ("empty", b"", "empty table"),
        ("only a comment", b"# nothing\n", "empty table"),
        ("binary", b"\x00\xff\xfe\x01", "byte 1: not UTF-8 text"),
        ("malformed", b"title = \n", "Invalid value (at line 1, column 9)"),
        ("cut short", b'title = "x', "(at end of document)"),
        ("deep", b"x = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        ("without a title", b'[pool]\nx = { type = "int" }\n', "missing required field `title`"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, name: str, data: bytes | None, reason: str) -> None:
    for label in (COMMON, "recovery.toml", "rules.toml") if name != "without a title" else (COMMON,):
        spec = copy_spec(tmp_path / label)
        (spec / label).unlink()
        if data is not None:
            (spec / label).write_bytes(data)
        with pytest.raises(InputError) as error:
            cited_rules_exist(faulty(spec), spec)
        assert str(error.value).startswith(f"{label}: ")
        assert reason in str(error.value)
        assert "\n" not in str(error.value)


def test_a_folder_without_kinds_is_no_spec(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    for path in (spec / "kinds").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="no table of a kind"):
        read_spec(spec)
    with pytest.raises(InputError, match="not a directory of tables"):
        read_spec(tmp_path / "nothing")


# -- what is loaded -----------------------------------------------------------------------------------------------------
def test_every_kind_has_each_row_that_it_uses_with_its_own_extension() -> None:
    tables, spec = load_tables(), read_spec(SPEC_DIR)
    ids = {e.id for e in tables.events}
    for file in spec.files.values():
        for row in file.uses if file.kind else ():
            shared = next(s.rows[row] for s in spec.files.values() if row in s.rows)
            assert (f"{file.kind}.{row}" in ids) is not shared.part
        for row, extension in file.extend.items():
            event = next((e for e in tables.events if e.row == row and e.kinds.get("self", file.kind) == file.kind), None)
            texts = [g.text for g in event.guards] if event else extension.when
            assert set(extension.when) <= set(texts)


def test_handoffs_bind_kinds_by_capability_only() -> None:
    tables, spec = load_tables(), read_spec(SPEC_DIR)
    for file in spec.files.values():
        for name, handoff in file.handoffs.items():
            able = {
                (a, b)
                for a, src in tables.kinds.items()
                for b, dst in tables.kinds.items()
                if handoff.src.has in src.capabilities and handoff.dst.has in dst.capabilities
                if not handoff.same_kind or a == b
            }
            assert {(e.kinds["src"], e.kinds["dst"]) for e in tables.events if e.row == name and e.scope == "copy"} == able
            assert able


def test_comments_do_not_count_for_the_hash_and_every_rule_does(tmp_path: Path) -> None:
    spec, original = copy_spec(tmp_path), read_spec(SPEC_DIR)
    edit(spec / COMMON, "[pool]", "# a comment\n\n[pool]")
    assert table_hash(read_spec(spec)) == table_hash(original)
    edit(spec / COMMON, '"off >= 0"', '"off >= 1"', "rows.move")
    assert table_hash(read_spec(spec)) != table_hash(original)


def test_a_recovery_entry_counts_for_the_hash(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "recovery.toml", "window - 1", "window", "need.swa_window")
    assert table_hash(read_spec(spec)) != load_tables().sha256


# -- anything at all -----------------------------------------------------------------------------------------------------
def raw_files() -> dict[str, dict[str, Any]]:
    files = {label: read_toml(SPEC_DIR / label, label) for label in (*read_spec(SPEC_DIR).files, "recovery.toml")}
    return dict(files)


def places(data: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*at, key))


def change(data: Any, at: tuple[str | int, ...], how: str) -> None:
    for key in at[:-1]:
        data = data[key]
    key = at[-1]
    match how:
        case "delete":
            del data[key]
        case "rename" if isinstance(data, dict):
            data["renamed"] = data.pop(key)
        case "double" if isinstance(data, list):
            data.append(data[key])
        case "empty":
            data[key] = type(data[key])()
        case "number":
            data[key] = -7
        case _:
            data[key] = "nonsense"


def broken(seed: int, count: int) -> Iterator[str]:
    """Changes anything in any file; yields what came back as anything else than tables or one clear line."""
    raw, rng = raw_files(), random.Random(seed)
    everything = [(label, at) for label, data in raw.items() for at in places(data)]
    good = {label: msgspec.convert(data, FileSpec) for label, data in raw.items() if label != "recovery.toml"}
    for label, at in rng.sample(everything, count):
        how = rng.choice(["delete", "rename", "double", "empty", "number", "nonsense"])
        data = copy.deepcopy(raw[label])
        change(data, at, how)
        try:
            recovery = data if label == "recovery.toml" else raw["recovery.toml"]
            files = good if label == "recovery.toml" else {**good, label: msgspec.convert(data, FileSpec)}
            assert isinstance(build(Spec(files, recovery)), Tables)
        except (InputError, msgspec.ValidationError) as error:
            if "\n" in str(error):
                yield f"{label}: {at} {how}: more than one line"
        except Exception as error:  # anything else is what this looks for
            yield f"{label}: {at} {how}: {error!r}"


def test_no_change_of_a_table_ends_in_a_traceback() -> None:
    assert list(broken(1, 80)) == []


@pytest.mark.deep
def test_no_change_of_a_table_ends_in_a_traceback_deep() -> None:
    assert list(broken(2, 3000)) == []
