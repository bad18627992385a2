"""A kind that nobody foresaw: one TOML file and one recovery entry, no Python; then it is proved, run and drawn."""

import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
from helpers import Scene, copy_spec, drop, edit, failed, faulty, prove, prove_claims

from hybridkv_ref import cli
from hybridkv_ref.allocator import HeterogeneousAllocator, build
from hybridkv_ref.errors import InputError
from hybridkv_ref.export import export_json
from hybridkv_ref.graph import mermaid
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Machine
from hybridkv_ref.model_checks.check import cited_rules_exist
from hybridkv_ref.models import Group, Model
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import Contents, cache_group, from_model, longest_hit
from hybridkv_ref.request_traces import Request
from hybridkv_ref.simulate import simulate
from hybridkv_ref.tables import Tables

KIND = "vision_embedding"
DATA = Path(__file__).parent / "data" / "seventh_kind"
CLAIMS = [
    *(f"{claim}<{KIND}>" for claim in ("lease_ends", "steps_of_the_gone_end", "eviction_ends", "device_drains")),
    f"copy_ends_spill<{KIND}>on_disk_prefix>",
    f"copy_ends_restore<on_disk_prefix>{KIND}>",
]


def add_kind(spec: Path) -> Path:
    """The whole of what a new kind takes."""
    shutil.copy(DATA / f"{KIND}.toml", spec / "kinds" / f"{KIND}.toml")
    recovery = spec / "recovery.toml"
    recovery.write_text(recovery.read_text("utf-8") + (DATA / "recovery_entry.toml").read_text("utf-8"), "utf-8")
    return spec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_kind(copy_spec(tmp_path_factory.mktemp("seventh")))


@pytest.fixture(scope="module")
def tables(spec: Path) -> Tables:
    return load_tables(spec)


def test_no_other_file_differs(spec: Path, tmp_path: Path) -> None:
    plain = copy_spec(tmp_path)
    names = {p.relative_to(spec): p.read_bytes() for p in spec.rglob("*.toml")}
    before = {p.relative_to(plain): p.read_bytes() for p in plain.rglob("*.toml")}
    assert {str(p) for p in names if names[p] != before.get(p)} == {f"kinds/{KIND}.toml", "recovery.toml"}


def test_it_joins_the_other_kinds(spec: Path, tables: Tables) -> None:
    assert set(tables.kinds) - set(load_tables().kinds) == {KIND}
    cited_rules_exist(tables, spec)
    mine = {e.row for e in tables.events if KIND in e.kinds.values()}
    assert mine >= {"admit", "pin", "free", "dim", "brighten", "spill_begin", "publish"}
    before = {e.id for e in load_tables().events}
    assert before < {e.id for e in tables.events}


def test_its_rows_are_proved(tables: Tables) -> None:
    result = prove(tables, [e for e in tables.events if KIND in e.kinds.values()])
    assert len(result.obligations) > 500
    assert failed(result) == []


def test_it_is_a_bystander_of_every_other_kinds_rows(tables: Tables) -> None:
    events = [
        next(e for e in tables.events if e.id == f"{kind}.{row}")
        for kind, row in (("swa_window", "slide"), ("compressed_kv", "admit"))
    ]
    result = prove(tables, [*events, tables.event("request.join")])
    assert failed(result) == []
    assert any(KIND in o.id for o in result.obligations)


def test_every_shared_claim_that_fits_it_is_made(tables: Tables) -> None:
    assert {c.id for c in tables.responses if KIND in c.kinds.values()} == set(CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_shared_claims_hold_for_it(tables: Tables, claim: str) -> None:
    result = prove_claims(tables, claim)
    assert result.obligations
    assert failed(result) == []


def test_a_fault_in_its_file_is_found(tmp_path: Path) -> None:
    spec = add_kind(copy_spec(tmp_path))
    drop(spec / "kinds" / f"{KIND}.toml", "rows.dim", "pins == 0")
    broken = failed(prove(tables := faulty(spec), [tables.event(f"{KIND}.dim")]))
    assert any(rule.startswith("HKV-S3-") for o in broken for rule in o.rules)


def test_the_machine_runs_it(tables: Tables) -> None:
    machine = Machine(tables)
    for event in tables.events:
        if KIND in event.kinds.values():
            scene = Scene(machine.world(), event, random.Random(event.id))
            scene.settle()
            scene.fire()


def test_it_is_exported_and_drawn(spec: Path, tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(export_json(tables))
    assert document["kinds"][KIND]["stages"][0] == "FREE"
    assert cli.main(["graph", KIND, "--spec", str(spec)]) == 0
    assert capsys.readouterr().out == mermaid(tables, KIND)
    assert "    WHOLE --> DIM: dim\n" in mermaid(tables, KIND)


def test_the_joint_hit_asks_for_it(spec: Path, tables: Tables) -> None:
    demands = [g for g in tables.event("request.join").guards if f"need.{KIND}" in g.place]
    assert demands
    entries = cache_group("entries", "compressed_kv", 4, {"ratio": 4}, spec)
    images = cache_group("images", KIND, 4, {"image": 4}, spec)
    whole = {"entries": Contents(0b1111), "images": Contents(0b1111)}
    assert longest_hit([entries, images], whole, matched=16, length=20).r == 16
    shorter = longest_hit([entries, images], {**whole, "images": Contents(0b0111)}, matched=16, length=20)
    assert (shorter.r, shorter.limiting) == (12, ("images",))
    assert longest_hit([entries, images], {**whole, "images": Contents(0b1110)}, matched=16, length=20).r == 0


def test_a_model_of_it_is_simulated_and_allocated(tmp_path: Path) -> None:
    """The constant of its own comes from the model, and the trace and the tokens run through its rows."""
    shutil.copytree(SPEC_DIR, tmp_path / "spec")
    spec = add_kind(tmp_path / "spec")
    entries = Group(name="entries", kind="compressed_kv", layers=1, ratio=1, entry_bytes={"bf16": 4}, block_tokens=4)
    images = Group(
        name="images", kind=KIND, layers=1, ratio=1, entry_bytes={"bf16": 4}, block_tokens=4, constants={"IMAGE": 4}
    )  # fmt: skip
    model = Model(
        name="sees", source="made up", confidence="made up", note="", alignment=4, groups=(entries, images)
    )  # fmt: skip
    with pytest.raises(InputError, match=f"asks for 'image' of {KIND}, which is not given"):
        from_model(
            msgspec.structs.replace(model, groups=(entries, msgspec.structs.replace(images, constants={}))), spec
        )
    asked = [Request(0.0, 4, 1, 4, (1,)), Request(1.0, 6, 1, 4, (1, 2))]  # one image, and the same again
    result = simulate(asked, model, gpu_memory=1 << 20, spec=spec)
    assert (result.requests, result.saved_tokens) == (2, 4)
    geometry = build(model, spec=spec)
    with HeterogeneousAllocator(geometry, 10_000, spec=spec) as cache:
        for expected in (0, 8):
            lease = cache.pin(cache.match(list(range(12))))
            assert lease.tokens == expected
            assert not expected or cache.validate(lease)[-1].accepted
            if expected:
                cache.read(lease)
                assert {s.kind for s in lease.segments} == {"compressed_kv", KIND}
            for upto in range(lease.request.position + 4, 13, 4):
                cache.extend(lease.request, upto)
            cache.finish(lease.request)


def test_its_file_alone_is_not_enough(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    shutil.copy(DATA / f"{KIND}.toml", spec / "kinds" / f"{KIND}.toml")
    with pytest.raises(InputError, match=f"recovery.toml: need.{KIND}: missing"):
        faulty(spec)


def test_its_entry_alone_is_not_enough(tmp_path: Path) -> None:
    spec = add_kind(copy_spec(tmp_path))
    (spec / "kinds" / f"{KIND}.toml").unlink()
    with pytest.raises(InputError, match=f"need.{KIND}: no such kind"):
        faulty(spec)


def test_a_capability_that_it_does_not_live_up_to_is_refused(tmp_path: Path) -> None:
    spec = add_kind(copy_spec(tmp_path))
    edit(spec / "kinds" / f"{KIND}.toml", '"attended"]', '"attended", "ranged"]')
    with pytest.raises(InputError, match=f"kinds/{KIND}.toml: capability 'ranged' needs the part row 'split_out'"):
        faulty(spec)
