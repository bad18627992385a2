"""What must be present to resume, against attention's own definition; the longest hit, against a search of its own."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv_ref.errors import InputError
from hybridkv_ref.models import load_model, model_names
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import (
    NOTHING,
    Contents,
    Group,
    Hit,
    bounded_hit,
    cache_group,
    can_resume,
    from_model,
    longest_hit,
    need_function,
)

HORIZON = 64


# ---- The needs, from the definition of attention ---------------------------------------------------------------------
# One layer, tokens s, s + 1, ... are computed.  What they read at positions before s, and entries that are not made
# again, must be cached.  An entry i of ratio c and halo h is made of tokens [ci - h, ci + c), and visible from token
# ci + c - 1 on.


def window_reads(s: int, window: int) -> set[int]:
    """Rows before s that a query at or after s sees."""
    return {row for t in range(s, s + window) for row in range(max(0, t - window + 1), t + 1) if row < s}


def entry_reads(s: int, frontier: int, ratio: int) -> set[int]:
    """Tokens of the entries that some query at or after s sees and that are cached: those that end at or before F."""
    seen = (i for i in range(frontier + 1) if any(t >= ratio * i + ratio - 1 for t in range(s, s + frontier + ratio)))
    return {token for i in seen if ratio * (i + 1) <= frontier for token in range(ratio * i, ratio * (i + 1))}


def tail_reads(s: int, frontier: int, ratio: int, halo: int) -> set[int]:
    """Rows before s of the entries that are made: those that end after F."""
    made = (i for i in range(frontier + ratio + halo + 2) if ratio * (i + 1) > frontier)
    return {row for i in made for row in range(max(0, ratio * i - halo), ratio * (i + 1)) if row < s}


def positions() -> Iterator[tuple[int, int]]:
    return ((s, frontier) for frontier in range(HORIZON + 1) for s in range(frontier + 1))


def needed(kind: str, s: int, frontier: int, **params: int) -> set[int]:
    lo, hi, _ = need_function(kind, params)(s, frontier)
    return set(range(lo, hi))


@pytest.mark.parametrize("window", [1, 2, 4, 7, 16, 100])
def test_a_window_needs_what_its_queries_see(window: int) -> None:
    for s, frontier in positions():
        assert needed("swa_window", s, frontier, window=window) == window_reads(s, window), (s, frontier)


@pytest.mark.parametrize("kind", ["compressed_kv", "indexer_state"])
@pytest.mark.parametrize("ratio", [1, 2, 4, 16])
def test_entries_are_needed_up_to_the_frontier(kind: str, ratio: int) -> None:
    for s, frontier in positions():
        assert needed(kind, s, frontier, ratio=ratio) == entry_reads(s, frontier, ratio), (s, frontier)


@pytest.mark.parametrize(("ratio", "halo"), [(1, 0), (2, 0), (4, 0), (4, 4), (4, 2), (16, 0), (16, 16)])
def test_a_tail_needs_the_rows_of_the_entries_to_come(ratio: int, halo: int) -> None:
    for s, frontier in positions():
        expected = tail_reads(s, frontier, ratio, halo)
        assert needed("uncompressed_tail", s, frontier, ratio=ratio, halo=halo) == expected, (s, frontier)


def test_a_recurrent_state_is_needed_at_the_start_exactly() -> None:
    need = need_function("recurrent_state", {})
    for s, frontier in positions():
        assert need(s, frontier) == (max(0, s - 1), s, True)


@pytest.mark.parametrize("r", range(0, 300, 7))
def test_rows_of_a_v4_tail_at_a_plain_hit(r: int) -> None:
    """FACTS section 1: min(r, r mod 4 + 4) rows of CSA, r mod 128 of HCA."""
    assert len(needed("uncompressed_tail", r, r, ratio=4, halo=4)) == min(r, r % 4 + 4)
    assert len(needed("uncompressed_tail", r, r, ratio=128, halo=0)) == r % 128


# ---- The longest hit -------------------------------------------------------------------------------------------------


def full(name: str = "full", unit: int = 16, ratio: int = 1) -> Group:
    return cache_group(name, "compressed_kv", unit, {"ratio": ratio})


def window(name: str = "window", unit: int = 16, size: int = 16) -> Group:
    return cache_group(name, "swa_window", unit, {"window": size})


def tail(name: str = "tail", unit: int = 4, ratio: int = 4, halo: int = 4) -> Group:
    return cache_group(name, "uncompressed_tail", unit, {"ratio": ratio, "halo": halo})


def state(name: str = "state") -> Group:
    return cache_group(name, "recurrent_state", 1, {})


def blocks(*numbers: int) -> Contents:
    return Contents(blocks=sum(1 << n for n in numbers))


def test_states_at_64_and_48_meet_at_32() -> None:
    """FACTS section 1: a shrink to 48 is no position of the first group; the fixed point is 32."""
    groups = (state("a"), state("b"))
    contents = {"a": Contents(ends={32, 64}), "b": Contents(ends={32, 48})}
    hit = longest_hit(groups, contents, 64, 100, alignment=16)
    assert (hit.r, hit.frontier, hit.grade, hit.limiting, hit.recompute) == (32, 32, "exact", ("b",), 32)


def test_good_positions_are_not_downward_closed() -> None:
    groups = (full(), window(size=17))
    contents = {"full": blocks(0, 1, 2, 3), "window": blocks(3)}
    assert [r for r in range(16, 65, 16) if longest_hit(groups, contents, r, 100).r == r] == [64]
    assert longest_hit(groups, contents, 63, 100) == Hit(0, 0, "exact", (), ("window",), 63)


def test_the_window_is_needed_at_the_resume_point_not_at_the_end_of_the_match() -> None:
    groups = (full(), window(size=17))
    contents = {"full": blocks(0, 1, 2), "window": blocks(2, 3)}
    hit = longest_hit(groups, contents, 64, 100)
    assert (hit.r, hit.limiting) == (48, ("full",))
    assert [(read.group, read.lo, read.hi) for read in hit.reads] == [("full", 0, 48), ("window", 32, 48)]


def test_the_last_token_is_always_computed() -> None:
    contents = {"full": blocks(0, 1, 2, 3)}
    assert longest_hit((full(),), contents, 64, 65).r == 64
    assert longest_hit((full(),), contents, 64, 64).r == 48
    assert longest_hit((full(),), contents, 64, 64).limiting == ()
    assert longest_hit((full(),), contents, 64, 64, alignment=1).r == 63


def test_by_default_a_hit_is_a_common_multiple_of_the_units() -> None:
    groups = (full("a", unit=64), full("b", unit=48))
    contents = {"a": Contents(blocks=(1 << 20) - 1), "b": Contents(blocks=(1 << 20) - 1)}
    assert longest_hit(groups, contents, 400, 1000).r == 384 == 2 * math.lcm(64, 48)
    assert longest_hit(groups, contents, 400, 1000, alignment=16).r == 400


def test_a_stored_halo_resumes_and_a_missing_one_costs_a_replay_of_its_rows() -> None:
    """FACTS section 2: without a halo, window rows [B - m - (W - 1), B - m) are needed and m tokens replayed."""
    groups = (full(unit=128, ratio=4), window(size=16, unit=4), tail())
    contents = {"full": blocks(0), "window": Contents(blocks=(1 << 32) - 1)}
    assert longest_hit(groups, {**contents, "tail": Contents(ends={128})}, 128, 200).r == 128
    assert longest_hit(groups, contents, 128, 200).r == 0
    assert longest_hit(groups, contents, 128, 200, replay=3).r == 0
    hit = longest_hit(groups, contents, 128, 200, replay=4)
    assert (hit.r, hit.frontier, hit.grade, hit.limiting, hit.recompute) == (124, 128, "exact", ("tail",), 4)
    assert [(read.group, read.lo, read.hi) for read in hit.reads] == [("full", 0, 128), ("window", 109, 124)]


def test_at_a_multiple_a_tail_without_halo_needs_nothing() -> None:
    groups = (full(unit=128, ratio=128), tail(unit=8, ratio=128, halo=0))
    assert longest_hit(groups, {"full": blocks(0)}, 200, 300).r == 128
    assert longest_hit(groups, {"full": blocks(0), "tail": Contents(ends={200})}, 200, 300, alignment=8).r == 200


def test_a_segment_must_hold_all_that_a_start_before_the_frontier_needs() -> None:
    """A made-up kind that needs one row more when tokens are computed again: the segment of a plain resume lacks it."""
    group = Group("odd", "odd", 1, {}, "replay", True, lambda s, frontier: (s - 1 if s == frontier else s - 2, s, True))
    assert can_resume(group, Contents(ends={8}), 8, 8)
    assert not can_resume(group, Contents(ends={8}), 8, 12)


SHAPES = st.sampled_from(["full", "window", "tail", "state"])


@st.composite
def caches(draw: st.DrawFn) -> tuple[tuple[Group, ...], dict[str, Contents]]:
    """Some groups with some blocks and some ends, on a prefix of at most 64 tokens."""
    groups, contents = [], {}
    for index, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=4))):
        name = f"{shape}{index}"
        unit = draw(st.sampled_from([1, 2, 4, 8, 12]))
        if shape == "full":
            group = full(name, unit, draw(st.sampled_from([1, 2, 4])))
        elif shape == "window":
            group = window(name, unit, draw(st.integers(1, 20)))
        elif shape == "tail":
            group = tail(name, unit, draw(st.sampled_from([1, 4, 8])), draw(st.sampled_from([0, 4])))
        else:
            group = state(name)
        everything = (1 << 64) - 1
        holes = draw(st.sets(st.integers(0, 63), max_size=3))
        ends = draw(st.sets(st.integers(0, 64), max_size=30))
        groups.append(group)
        contents[name] = Contents(everything & ~sum(1 << hole for hole in holes), ends)
    return tuple(groups), contents


def holds(group: Group, contents: Contents, s: int, frontier: int) -> bool:
    """Position by position: every needed token lies in a cached block, or in the segment that ends where it must."""
    lo, hi, exact = group.need(s, frontier)
    cached = {token for token in range(80) if contents.blocks >> (token // group.unit) & 1}
    if exact:
        cached = {token for end in contents.ends if end == hi for token in range(group.need(end, end)[0], end)}
    return set(range(lo, hi)) <= cached


@given(
    caches(), st.integers(0, 64), st.integers(1, 66), st.sampled_from([None, 1, 2, 4, 16]), st.sampled_from([0, 1, 5])
)
def test_the_longest_hit_is_the_maximum_of_all_good_positions(
    cache: tuple[tuple[Group, ...], dict[str, Contents]], matched: int, length: int, alignment: int | None, replay: int
) -> None:
    groups, contents = cache
    matched = min(matched, length)
    unit = alignment or math.lcm(*(group.unit for group in groups))
    tops = [f for f in range(length) if f <= matched and f % unit == 0]
    good = {(0, 0)} | {
        (s, f)
        for f in tops
        for s in range(max(0, f - replay), f + 1)
        if all(holds(group, contents[group.name], s, f) for group in groups)
    }
    hit = longest_hit(groups, contents, matched, length, alignment, replay)
    assert hit.r == max(s for s, _ in good)
    assert (hit.r, hit.frontier) in good
    assert hit.recompute == matched - hit.r
    refusing = {g.name for g in groups if not holds(g, contents[g.name], tops[-1], tops[-1])}
    assert set(hit.limiting) == (refusing if hit.r < tops[-1] else set())
    assert bool(hit.limiting) == (hit.r < tops[-1])


# ---- Bounded recovery ------------------------------------------------------------------------------------------------


def test_bounded_replays_the_window_and_says_so() -> None:
    groups = (full(unit=128), window(size=128, unit=64))
    hit = bounded_hit(groups, {"full": blocks(0, 1, 2)}, 384, 500, replay=128)
    assert (hit.r, hit.frontier, hit.grade, hit.recompute) == (256, 384, "bounded", 128)
    assert [(read.group, read.lo, read.hi) for read in hit.reads] == [("full", 0, 384)]
    assert hit.limiting == ("window",)


def test_bounded_replays_tails_in_full_however_small_the_replay() -> None:
    """FACTS section 2: for V4 it must cover at least P - B + m tokens; here P = B, m = 4."""
    groups = (full(unit=128, ratio=4), window(size=128, unit=64), tail())
    assert bounded_hit(groups, {"full": blocks(0, 1)}, 256, 500, replay=1).r == 252
    assert bounded_hit(groups, {"full": blocks(0, 1)}, 256, 500, replay=100).r == 156


def test_bounded_makes_no_recurrent_state() -> None:
    groups = (full(unit=128), window(size=128, unit=64), state())
    contents = {"full": blocks(0, 1, 2)}
    assert bounded_hit(groups, contents, 384, 500, replay=128).r == 0
    hit = bounded_hit(groups, {**contents, "state": Contents(ends={128})}, 384, 500, replay=128)
    assert (hit.r, hit.frontier, hit.grade) == (128, 256, "bounded")


def test_nothing_is_bounded_without_a_window() -> None:
    contents = {"full": blocks(0, 1), "state": Contents(ends={256})}
    hit = bounded_hit((full(unit=128), state()), contents, 256, 500, replay=128)
    assert (hit.r, hit.grade) == (256, "exact")
    assert bounded_hit((window(size=128),), {}, 64, 100, replay=128) == Hit(0, 0, "exact", (), ("window",), 64)


# ---- Models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model_names())
def test_every_model_resumes_from_a_full_cache_and_from_no_less(name: str) -> None:
    model = load_model(name)
    groups = from_model(model)
    step = math.lcm(*(group.unit for group in groups))
    top = step * max(1, 4096 // step)
    contents = {g.name: Contents((1 << top // g.unit) - 1, {top}) for g in groups}
    assert longest_hit(groups, contents, top, top + 1).r == top
    for group in groups:
        if can_resume(group, NOTHING, top, top):
            continue  # a tail that needs nothing at a multiple
        hit = longest_hit(groups, {**contents, group.name: NOTHING}, top, top + 1)
        assert (hit.r, hit.limiting) == (0, (group.name,))


# ---- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"matched": -1}, "hit: matched: expected 0 to 100 tokens, got -1"),
        ({"matched": 101}, "hit: matched: expected 0 to 100 tokens, got 101"),
        ({"length": 0, "matched": 0}, "hit: length: expected at least 1 token, got 0"),
        ({"alignment": 0}, "hit: alignment: expected at least 1 token, got 0"),
        ({"replay": -1}, "longest_hit: replay: expected at least 0 tokens, got -1"),
        ({"contents": {"fully": NOTHING}}, "hit: contents: no group is named 'fully'"),
        ({"groups": (full(), full())}, "hit: groups: two groups have the same name"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: dict[str, object], message: str) -> None:
    valid: dict[str, object] = {"groups": (full(),), "contents": {}, "matched": 64, "length": 100}
    with pytest.raises(InputError) as error:
        longest_hit(**{**valid, **arguments})  # type: ignore[arg-type]
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("swa_windows", {}, "recovery.toml: need.swa_windows: no such entry"),
        ("swa_window", {}, "recovery.toml: need.swa_window.params: expected window, got none"),
        ("swa_window", {"window": 4, "ratio": 1}, "recovery.toml: need.swa_window.params: expected window, got"),
        ("swa_window", {"window": 0}, "recovery.toml: need.swa_window.params.window: 0 breaks 'W >= 1'"),
        ("swa_window", {"window": 1.5}, "recovery.toml: need.swa_window.params.window: expected an integer, got 1.5"),
        ("compressed_kv", {"ratio": 0}, "recovery.toml: need.compressed_kv.params.ratio: 0 breaks 'RATIO >= 1'"),
    ],
)
def test_a_need_of_unknown_kind_or_parameters_is_refused(kind: str, params: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as error:
        need_function(kind, params)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_group_with_no_unit_is_refused() -> None:
    with pytest.raises(InputError, match=r"^full:unit: expected at least 1 token, got 0$"):
        full(unit=0)


def test_a_replay_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"^bounded_hit: replay: expected at least 1 token, got 0$"):
        bounded_hit((full(),), {}, 16, 100, replay=0)


# ---- A new kind needs an entry and no code ---------------------------------------------------------------------------


def test_another_entry_gives_another_need(tmp_path: Path) -> None:
    spec = tmp_path / "spec"
    for path in SPEC_DIR.rglob("*.toml"):
        target = spec / path.relative_to(SPEC_DIR)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    recovery = spec / "recovery.toml"
    text = recovery.read_text()
    assert text.count("s - (window - 1)") == 1
    recovery.write_text(text.replace("s - (window - 1)", "s - window"))
    assert need_function("swa_window", {"window": 8}, spec)(20, 20) == (12, 20, False)
    assert need_function("swa_window", {"window": 8})(20, 20) == (13, 20, False)
