"""The fast search for the longest hit against the plain definition, and plans over tiers against a search by blocks."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import INT, Expr, Ref, Scope, parse
from hybridkv_ref.fast_hit import Finder, Plan, Tier, grows, plan_hit
from hybridkv_ref.models import load_model
from hybridkv_ref.need_functions import compile_form
from hybridkv_ref.recovery import NOTHING, Contents, Group, cache_group, from_model, longest_hit

RANGED = ("compressed_kv", "indexer_state", "swa_window")
EXACT = ("uncompressed_tail", "recurrent_state")


@st.composite
def cache_groups(draw: st.DrawFn) -> tuple[Group, ...]:
    """Any groups of any kinds; the units' least common multiple is mostly none of them."""
    made = []
    for index in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from((*RANGED, *RANGED, *EXACT)))
        ratio = draw(st.sampled_from((1, 2, 3, 4)))
        params = {
            "compressed_kv": {"ratio": ratio},
            "indexer_state": {"ratio": ratio},
            "swa_window": {"window": draw(st.sampled_from((1, 2, 5, 9, 30)))},
            "uncompressed_tail": {"ratio": ratio, "halo": draw(st.integers(0, 3))},
            "recurrent_state": {},
        }[kind]
        made.append(cache_group(f"g{index}", kind, draw(st.sampled_from((1, 2, 3, 4, 6, 10))), params))
    return tuple(made)


LENGTH = 120


@st.composite
def held(draw: st.DrawFn, groups: tuple[Group, ...]) -> dict[str, Contents]:
    """Any contents: mostly runs, as caches hold them, with a few holes, or none of a group at all."""
    found = {}
    for group in groups:
        blocks = draw(st.one_of(st.just((1 << LENGTH) - 1), st.integers(0, (1 << LENGTH) - 1)))
        for hole in draw(st.lists(st.integers(0, LENGTH // group.unit), max_size=3)):
            blocks &= ~(1 << hole)
        ends = draw(st.one_of(st.just(range(LENGTH)), st.lists(st.integers(0, LENGTH), max_size=12)))
        if draw(st.integers(0, 9)):
            found[group.name] = Contents(blocks, frozenset(ends))
    return found


@given(data=st.data())
@settings(max_examples=400)
def test_the_fast_search_gives_the_answer_of_the_definition(data: st.DataObject) -> None:
    groups = data.draw(cache_groups())
    contents = data.draw(held(groups))
    length = data.draw(st.integers(1, LENGTH))
    arguments = (data.draw(st.integers(0, length)), length)
    alignment = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    replay = data.draw(st.sampled_from((0, 0, 1, 4, 17, 200)))
    plain = longest_hit(groups, contents, *arguments, alignment, replay)
    assert Finder(groups).longest_hit(contents, *arguments, alignment, replay) == plain


@pytest.mark.deep
@given(data=st.data())
@settings(max_examples=4_000)
def test_the_fast_search_gives_the_answer_of_the_definition_at_length(data: st.DataObject) -> None:
    groups = data.draw(cache_groups())
    contents = data.draw(held(groups))
    length = data.draw(st.integers(1, LENGTH))
    matched = data.draw(st.integers(0, length))
    alignment = data.draw(st.one_of(st.none(), st.integers(1, 12)))
    replay = data.draw(st.integers(0, 40))
    plain = longest_hit(groups, contents, matched, length, alignment, replay)
    assert Finder(groups).longest_hit(contents, matched, length, alignment, replay) == plain


@given(data=st.data())
@settings(max_examples=150)
def test_a_block_counts_only_if_its_successors_were_matched(data: st.DataObject) -> None:
    groups = data.draw(cache_groups())
    contents = data.draw(held(groups))
    length = data.draw(st.integers(1, LENGTH))
    matched = data.draw(st.integers(0, length))
    ahead = {g.name: data.draw(st.integers(0, 7)) for g in groups}
    seen = {
        g.name: Contents(
            sum(
                1 << i
                for i in range(LENGTH)
                if contents[g.name].blocks >> i & 1 and (i + 1) * g.unit + ahead[g.name] <= matched
            ),
            frozenset(e for e in contents[g.name].ends if e + ahead[g.name] <= matched),
        )
        for g in groups
        if g.name in contents
    }
    found = Finder(groups, ahead).longest_hit(contents, matched, length)
    plain = longest_hit(groups, seen, matched, length)
    assert (found.r, found.frontier, found.limiting) == (plain.r, plain.frontier, plain.limiting)


def holder(group: Group, tiers: list[Tier], position: int, hi: int) -> str:
    """The first tier that holds one position."""
    for tier in tiers:
        one = tier.contents.get(group.name, NOTHING)
        if (hi in one.ends) if group.exact else (one.blocks >> position // group.unit & 1):
            return tier.name
    raise LookupError(f"{group.name}: nothing holds {position}")


@given(data=st.data())
@settings(max_examples=150)
def test_a_plan_reads_each_position_from_the_first_tier_that_holds_it(data: st.DataObject) -> None:
    groups = data.draw(cache_groups())
    tiers = [Tier(name, data.draw(held(groups))) for name in ("device", "host", "disk")]
    length = data.draw(st.integers(1, LENGTH))
    plan: Plan = plan_hit(Finder(groups), tiers, length, length)
    by_name = {g.name: g for g in groups}
    loaded: dict[str, int] = {}
    for read in plan.hit.reads:
        parts = [p for p in plan.parts if p.group == read.group]
        assert [p.lo for p in parts] == [read.lo, *(p.hi for p in parts[:-1])]
        assert parts[-1].hi == read.hi
        for part in parts:
            for position in range(part.lo, part.hi):
                assert holder(by_name[read.group], tiers, position, read.hi) == part.tier
            if part.tier != "device":
                loaded[read.group] = loaded.get(read.group, 0) + part.hi - part.lo
    assert {p.group for p in plan.parts} == {r.group for r in plan.hit.reads}
    assert plan.loaded == loaded


def test_tiers_together_reach_further_than_each() -> None:
    groups = (cache_group("entries", "compressed_kv", 4, {"ratio": 1}),)
    device, disk = Tier("device", {"entries": Contents(0b0011)}), Tier("disk", {"entries": Contents(0b1110)})
    assert plan_hit(Finder(groups), [device], 16, 20).hit.r == 8
    plan = plan_hit(Finder(groups), [device, disk], 16, 20)
    assert (plan.hit.r, plan.loaded) == (16, {"entries": 8})


def needs_of(lo: str, hi: str) -> tuple[Expr, Expr]:
    scope = Scope({n: Ref("input", n, INT) for n in ("s", "F")}, arith=True)
    return parse(lo, scope, "lo", INT), parse(hi, scope, "hi", INT)


@pytest.mark.parametrize("text", ["s", "0", "F - 3", "max(0, s - 4)", "floor_to(F, 8) + s", "min(s, F) - 1"])
def test_an_end_that_grows_is_seen(text: str) -> None:
    assert grows(needs_of(text, text)[0])


@pytest.mark.parametrize("text", ["0 - s", "F - s", "s if s > 3 else 0", "-F"])
def test_an_end_that_may_fall_is_not_taken_to_grow(text: str) -> None:
    assert not grows(needs_of(text, text)[0])


def test_a_jump_for_a_need_that_falls_would_be_wrong() -> None:
    """Why ``grows`` is asked: a group whose need shrinks as s rises is found only by trying each candidate."""
    (group,) = (cache_group("g", "compressed_kv", 1, {"ratio": 1}),)
    odd = dataclasses.replace(group, need=compile_form(needs_of("F - s", "F - s + 2 if F > 5 else F"), False))
    contents = {"g": Contents(0b0001)}
    finder = Finder((odd,))
    finder._jumps["g"] = False
    assert finder.longest_hit(contents, 9, 10, replay=2) == longest_hit((odd,), contents, 9, 10, replay=2)


def test_the_real_needs_grow_except_for_exact_positions() -> None:
    groups = from_model(load_model("deepseek-v4-flash"))
    jumps = Finder(groups)._jumps
    assert {name for name, yes in jumps.items() if not yes} == {g.name for g in groups if g.exact}


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (lambda f: f.longest_hit({}, 5, 4), "matched"),
        (lambda f: f.longest_hit({"no": NOTHING}, 4, 5), "no group is named 'no'"),
        (lambda f: f.longest_hit({}, 4, 5, replay=-1), "replay"),
        (lambda f: f.longest_hit({}, 4, 5, alignment=0), "alignment"),
        (lambda f: Finder(f.groups, {"g": -1}), "ahead.g"),
        (lambda f: Finder(f.groups, {"x": 1}), "ahead.x"),
        (lambda f: plan_hit(f, [], 4, 5), "tiers"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(action, reason) -> None:  # type: ignore[no-untyped-def]
    finder = Finder((cache_group("g", "compressed_kv", 4, {"ratio": 4}),))
    with pytest.raises(InputError, match=reason):
        action(finder)
