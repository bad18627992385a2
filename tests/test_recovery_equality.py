"""The form that is proved and the form that runs are equal, and a difference of one position is found."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv_ref.compile_py import python
from hybridkv_ref.expr import Expr, Ref, refs, rewrite
from hybridkv_ref.model_checks.recovery_equality import (
    LIMIT,
    both_functions,
    compare_exhaustively,
    first_difference,
    parameter_sets,
    prove_equality,
)
from hybridkv_ref.names import declare
from hybridkv_ref.need_functions import prover_form_at, runtime_form, stand_ins
from hybridkv_ref.needs import Need, read_needs, resume_guards
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import Contents, cache_group, can_resume, need_function
from hybridkv_ref.spec_files import read_spec

SPEC = read_spec(SPEC_DIR)
NEEDS = read_needs(SPEC.recovery)[1]


def other_needs(kind: str, **changes: object) -> dict[str, Need]:
    """The entries as they stand, save for the given keys of one."""
    raw = {**SPEC.recovery}
    entries = raw["need"]
    assert isinstance(entries, dict)
    raw["need"] = {**entries, kind: {**entries[kind], **changes}}
    return read_needs(raw)[1]


def test_every_claim_is_proved() -> None:
    found = prove_equality(SPEC)
    assert [o.id for o in found if o.status != "proved"] == []
    assert len({o.id for o in found}) == len(found)
    for kind, need in NEEDS.items():
        for params in parameter_sets(need):
            at = ",".join(f"{name}={value}" for name, value in params.items())
            claims = {o.property for o in found if o.id.startswith(f"recovery/{kind}[{at}]/")}
            assert {"lo", "hi", "joint row"} <= claims


def test_the_parameters_of_real_models_are_among_those_compared() -> None:
    sets = {kind: list(parameter_sets(need)) for kind, need in NEEDS.items()}
    assert {"ratio": 4, "halo": 4} in sets["uncompressed_tail"]
    assert {"ratio": 128, "halo": 0} in sets["uncompressed_tail"]
    assert all({"ratio": ratio} in sets[kind] for kind in ("compressed_kv", "indexer_state") for ratio in (1, 4, 128))
    assert all({"window": window} in sets["swa_window"] for window in (1, 4, 128, 1024))


def test_all_pairs_up_to_the_limit_agree() -> None:
    found = compare_exhaustively(SPEC)
    assert LIMIT == 1024
    assert [o.id for o in found if o.status != "proved"] == []
    assert {o.table for o in found} == {"recovery.toml"}
    assert len(found) == sum(1 for need in NEEDS.values() for _ in parameter_sets(need))


MUTANTS = [
    ("swa_window", {"lo": "max(0, s - window)"}, {"lo"}),
    ("swa_window", {"hi": "F"}, {"hi"}),
    ("swa_window", {"lo": "s - (window - 1)"}, {"lo"}),
    ("uncompressed_tail", {"lo": "floor_to(F, ratio)"}, {"lo"}),
    ("uncompressed_tail", {"lo": "max(0, floor_to(s, ratio) - halo)"}, {"lo"}),
    ("uncompressed_tail", {"exact": False}, {"joint row"}),
    ("compressed_kv", {"hi": "F"}, {"hi"}),
    ("compressed_kv", {"hi": "floor_to(s, ratio)"}, {"hi"}),
    ("indexer_state", {"lo": "1"}, {"lo"}),
    ("recurrent_state", {"lo": "0"}, {"lo"}),
    ("recurrent_state", {"exact": False}, {"joint row"}),
]


@pytest.mark.parametrize(("kind", "changes", "claims"), MUTANTS)
def test_a_changed_entry_is_found_by_the_solver(kind: str, changes: dict[str, object], claims: set[str]) -> None:
    failed = [o for o in prove_equality(SPEC, other_needs(kind, **changes)) if o.status == "failed"]
    assert {o.row for o in failed} == {f"need.{kind}"}
    assert claims <= {o.property for o in failed} <= claims | {"joint row"}


@pytest.mark.parametrize(("kind", "changes"), [(kind, changes) for kind, changes, _ in MUTANTS])
def test_a_changed_entry_is_found_by_comparing(kind: str, changes: dict[str, object]) -> None:
    failed = [o for o in compare_exhaustively(SPEC, other_needs(kind, **changes), limit=150) if o.status == "failed"]
    assert {o.row for o in failed} == {f"need.{kind}"}


def test_the_first_difference_is_named() -> None:
    right, wrong = both_functions(SPEC, "swa_window", {"window": 4}, other_needs("swa_window", lo="max(0, s - window)"))
    assert first_difference(right, wrong, 20) == (4, 4)
    assert first_difference(right, right, 20) is None


def test_the_library_runs_the_form_that_is_compared() -> None:
    for kind, need in NEEDS.items():
        for params in parameter_sets(need):
            runs = need_function(kind, params)
            assert first_difference(runs, both_functions(SPEC, kind, params)[1], limit=300) is None


@pytest.mark.parametrize("kind", NEEDS)
def test_both_forms_speak_of_nothing_but_the_positions(kind: str) -> None:
    recovery, needs = read_needs(SPEC.recovery)
    declared = declare(SPEC.files)
    for params in parameter_sets(needs[kind]):
        forms = (runtime_form(needs[kind], params), prover_form_at(recovery, needs[kind], declared, params))
        for part in itertools.chain(*forms):
            assert {ref.name for ref in refs(part)} <= {"s", "F"}


# ---- The joint row's conjuncts and can_resume say the same of one covered range --------------------------------------


def row_holds(kind: str, params: dict[str, int], s: int, frontier: int, cover: tuple[int, int], hits: int) -> bool:
    """The conjuncts of the joint row, evaluated: their variables replaced by what stands for them.

    ``hits`` segments of the kind are held, which together cover ``cover``.
    """
    recovery, needs = read_needs(SPEC.recovery)
    declared = declare(SPEC.files)
    values = stand_ins(recovery, needs[kind], declared, params)
    names = declared.scope("request", {"self": kind}).names
    env = {"s": s, "F": frontier, "uses": True, "hits": hits, "cov_lo": cover[0], "cov": cover[1]}
    known = {names[f"req.{name}"]: name for name in ("uses", "hits", "cov_lo", "cov")}

    def write(ref: Ref) -> str:
        return known.get(ref, ref.name)

    def fill(node: Expr) -> Expr | None:
        return values.get(node) if isinstance(node, Ref) else None

    texts = [python(rewrite(guard.expr, fill), write) for guard in resume_guards(SPEC.recovery, declared)[kind]]
    return all(eval(text, {"min": min, "max": max}, env) for text in texts)


@given(st.data())
def test_one_covered_range_passes_the_row_exactly_if_the_group_can_resume(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(NEEDS)))
    params = data.draw(st.sampled_from([p for p in parameter_sets(NEEDS[kind]) if max([*p.values(), 0]) <= 4]))
    group = cache_group("g", kind, 1, params)
    frontier = data.draw(st.integers(0, 24))
    s = data.draw(st.integers(0, frontier))
    end = data.draw(st.integers(0, 26))
    if group.exact:
        cover = (group.need(end, end)[0], end)  # a segment that ends here holds what a resume here needs
        contents = Contents(ends={end})
    else:
        cover = (data.draw(st.integers(0, end)), end)
        contents = Contents(blocks=sum(1 << token for token in range(*cover)))
    # A range that is left from an earlier hit, of which nothing is held any more, is nothing that is cached.
    hits = data.draw(st.integers(0, 2))
    found = can_resume(group, contents if hits else Contents(), s, frontier)
    assert found == row_holds(kind, params, s, frontier, cover, hits)
