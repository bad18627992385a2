"""Exact starts against brute-force propagation through small layer stacks in every order; DeepSeek-V4's figures."""

import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass

import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.exact_start import Stack, exact_start, layer_stack, replay, zero_exact_hit
from hybridkv_ref.models import load_model
from hybridkv_ref.recovery import Contents, Group, Read, bounded_hit, cache_group, from_model, longest_hit

W, M, WIDE = 3, 2, 4
"""The brute force's window, overlapping ratio (halo M) and plain ratio: V4's 128, 4 and 128 in small."""


@dataclass(frozen=True)
class Layer:
    """What a layer's queries see: a window, entries of a ratio with a halo, a state; any of them or none."""

    window: int = 0
    ratio: int = 0
    halo: int = 0
    state: bool = False

    def groups(self) -> tuple[Group, ...]:
        """The layer's cache groups, as the library sees them."""
        found = []
        if self.window:
            found.append(cache_group(f"w{self.window}", "swa_window", 1, {"window": self.window}))
        if self.ratio:
            found.append(cache_group(f"kv{self.ratio}{self.halo}", "compressed_kv", 1, {"ratio": self.ratio}))
        if self.ratio > 1:
            params = {"ratio": self.ratio, "halo": self.halo}
            found.append(cache_group(f"tail{self.ratio}{self.halo}", "uncompressed_tail", 1, params))
        if self.state:
            found.append(cache_group("state", "recurrent_state", 1, {}))
        return tuple(found)


WINDOW, CSA, HCA = Layer(window=W), Layer(window=W, ratio=M, halo=M), Layer(window=W, ratio=WIDE)
FULL, STATE, BARE_CSA, WIDER = Layer(ratio=1), Layer(state=True), Layer(ratio=M, halo=M), Layer(window=5)
KINDS = (WINDOW, CSA, HCA, FULL, STATE, BARE_CSA, WIDER)


def exact_rows(layers: tuple[Layer, ...], s: int, frontier: int, snapshots: Set[int], end: int) -> list[set[int]]:
    """Per layer, then for the output: the positions at which its input is exact when tokens [s, end) are computed.

    Only entries that end at or before the frontier are cached, and snapshots of the states.
    """
    exact = [set(range(s, end))]
    for layer in layers:
        fine = exact[-1]
        exact.append(
            {t for t in fine if _sees_only_exact(layer, t, fine, frontier) and _state(layer, t, fine, snapshots)}
        )
    return exact


def _sees_only_exact(layer: Layer, t: int, fine: set[int], frontier: int) -> bool:
    rows = range(max(0, t - layer.window + 1), t + 1) if layer.window else ()
    if not all(row in fine for row in rows):
        return False
    for entry in range((t + 1) // layer.ratio) if layer.ratio else ():
        begin, close = layer.ratio * entry, layer.ratio * (entry + 1)
        if close > frontier and not all(row in fine for row in range(max(0, begin - layer.halo), close)):
            return False
    return True


def _state(layer: Layer, t: int, fine: set[int], snapshots: Set[int]) -> bool:
    if not layer.state:
        return True
    return any(all(x in fine for x in range(p, t + 1)) for p in {0, *snapshots} if p <= t)


def latest_start(layers: tuple[Layer, ...], position: int, frontier: int, snapshots: Set[int]) -> int:
    """The largest start from which all outputs from ``position`` on are exact, long enough for entries to close."""
    end = position + 2 * WIDE + W
    wanted = set(range(position, end))
    return next(s for s in range(position, -1, -1) if wanted <= exact_rows(layers, s, frontier, snapshots, end)[-1])


def stack_of(layers: tuple[Layer, ...]) -> Stack:
    return tuple(layer.groups() for layer in layers)


def stacks() -> Iterator[tuple[Layer, ...]]:
    for size in (1, 2, 3):
        yield from itertools.product(KINDS, repeat=size)


SNAPSHOTS = [frozenset[int](), frozenset({8, 14, 21})]


@pytest.mark.parametrize("snapshots", SNAPSHOTS, ids=["none", "some"])
def test_the_start_is_the_latest_exact_one_in_every_order_of_layers(snapshots: frozenset[int]) -> None:
    contents = {"state": Contents(ends=snapshots)}
    for layers in stacks():
        if snapshots and STATE not in layers:
            continue
        for frontier, beyond in ((24, 0), (24, 1), (24, 3), (22, 0), (23, 0), (4, 2), (0, 3)):
            position = frontier + beyond
            found = exact_start(stack_of(layers), position, frontier, contents)
            assert found == latest_start(layers, position, frontier, snapshots), (layers, position, frontier)


@pytest.mark.parametrize("depth", [4, 6])
def test_deeper_stacks_of_windows_and_entries(depth: int) -> None:
    for layers in itertools.islice(itertools.product((WINDOW, CSA, HCA), repeat=depth), 0, None, 7):
        for position, frontier in ((40, 40), (43, 40), (41, 40)):
            assert exact_start(stack_of(layers), position, frontier, {}) == latest_start(
                layers, position, frontier, set()
            )


def test_a_replay_makes_each_layers_rows_exactly_from_where_it_says() -> None:
    snapshots = {8, 14, 21}
    contents = {"state": Contents(ends=snapshots)}
    for layers in stacks():
        stack = stack_of(layers)
        latest = exact_start(stack, 25, 24, contents)
        for start in {latest, max(0, latest - 1), latest // 2, 0}:
            exact = exact_rows(layers, start, 24, snapshots, 60)
            assert [min(rows) for rows in exact[:-1]] == list(replay(stack, start, contents).rows_from), (layers, start)


@pytest.fixture(scope="module", params=["deepseek-v4-flash", "deepseek-v4-pro"])
def v4(request: pytest.FixtureRequest) -> tuple[str, tuple[Group, ...], Stack]:
    model = load_model(request.param)
    groups = from_model(model)
    return model.name, groups, layer_stack(model, groups)


FAR_OUT = 128 * 1000


def test_v4_starts_its_layers_times_127_before_an_aligned_hit(v4: tuple[str, tuple[Group, ...], Stack]) -> None:
    """FACTS section 2: 5,461 (Flash) and 7,747 (Pro) tokens; at worst 5,465 and 7,751."""
    name, _, stack = v4
    aligned, worst = {"deepseek-v4-flash": (5461, 5465), "deepseek-v4-pro": (7747, 7751)}[name]
    assert FAR_OUT - exact_start(stack, FAR_OUT, FAR_OUT, {}) == aligned == len(stack) * 127
    assert max(p - exact_start(stack, p, FAR_OUT, {}) for p in range(FAR_OUT, FAR_OUT + 128)) == worst


def test_v4_agrees_with_the_published_formula(v4: tuple[str, tuple[Group, ...], Stack]) -> None:
    """FACTS section 2: the minimum over layers; w(l) = l here, for every layer of V4 has the window."""
    _, _, stack = v4
    ratios = [{group.params.get("ratio") for group in layer} - {None} for layer in stack]
    for position in range(FAR_OUT, FAR_OUT + 128):
        windows = [position - 127 * (below + 1) for below in range(len(stack))]
        csa = [FAR_OUT - 4 - 127 * below for below, ratio in enumerate(ratios) if ratio == {4}]
        hca = [FAR_OUT - 127 * below for below, ratio in enumerate(ratios) if ratio == {128} and position > FAR_OUT]
        assert exact_start(stack, position, FAR_OUT, {}) == min(windows + csa + hca)


def test_a_v4_replay_may_cache_window_rows_later_in_every_layer(v4: tuple[str, tuple[Group, ...], Stack]) -> None:
    _, _, stack = v4
    start = FAR_OUT - 9000
    assert replay(stack, start, {}).rows_from == tuple(start + 127 * layer for layer in range(len(stack)))
    assert set(replay(stack, 0, {}).rows_from) == {0}


def test_v4_by_the_three_recoveries(v4: tuple[str, tuple[Group, ...], Stack]) -> None:
    _, groups, stack = v4
    size = 128 * 100
    entries = {
        g.name: Contents((1 << size // g.unit) - 1) for g in groups if g.kind in ("compressed_kv", "indexer_state")
    }
    zero = zero_exact_hit(stack, entries, size, size + 1, alignment=128)
    assert (zero.r, zero.frontier, zero.grade, zero.recompute) == (
        size - len(stack) * 127,
        size,
        "exact",
        size - zero.r,
    )
    assert {read.group for read in zero.reads} == set(entries)
    assert zero.limiting == ("window", "csa_tail", "csa_index_tail")
    bounded = bounded_hit(groups, entries, size, size + 1, replay=128, alignment=128)
    assert (bounded.r, bounded.frontier, bounded.grade) == (size - 128, size, "bounded")
    window = {"window": Contents((1 << size // 64) - 1)}
    assert longest_hit(groups, {**entries, **window}, size, size + 1, alignment=128).r == 0
    assert longest_hit(groups, {**entries, **window}, size, size + 1, alignment=128, replay=4).r == size - 4
    tails = {g.name: Contents(ends={size}) for g in groups if g.kind == "uncompressed_tail"}
    assert longest_hit(groups, {**entries, **window, **tails}, size, size + 1, alignment=128).r == size


def test_a_short_match_saves_nothing_without_windows(v4: tuple[str, tuple[Group, ...], Stack]) -> None:
    _, groups, stack = v4
    entries = {g.name: Contents((1 << 100) - 1) for g in groups}
    hit = zero_exact_hit(stack, entries, 5120, 6000, alignment=128)
    assert (hit.r, hit.frontier, hit.reads, hit.recompute) == (0, 0, (), 5120)


def test_a_missing_entry_shortens_a_zero_exact_hit_and_is_named() -> None:
    full, window = FULL.groups()[0], WINDOW.groups()[0]
    stack = ((full,), (window,))
    hit = zero_exact_hit(stack, {full.name: Contents((1 << 20) - 1)}, 24, 30, alignment=4)
    assert (hit.r, hit.frontier, hit.limiting, hit.recompute) == (20, 20, (full.name, window.name), 4)


def test_a_snapshot_is_taken_up_where_the_windows_below_it_allow() -> None:
    layers = (WINDOW, STATE, WINDOW)
    hit = zero_exact_hit(stack_of(layers), {"state": Contents(ends={7, 14, 21})}, 18, 30, alignment=1)
    assert hit.r == latest_start(layers, 18, 18, {7, 14, 21}) == 14 - (W - 1)
    assert hit.reads == (Read("state", 13, 14),)


def test_from_token_0_on_no_snapshot_is_read() -> None:
    assert replay(stack_of((WINDOW, STATE)), 0, {"state": Contents(ends={7})}).snapshots == ()


def test_a_start_is_never_after_the_frontier() -> None:
    assert exact_start(stack_of((WINDOW,)), 27, 24, {}) == 27 - (W - 1)
    hit = zero_exact_hit(stack_of((WINDOW,)), {}, 27, 30, alignment=8)
    assert (hit.r, hit.frontier) == (24, 24)


def test_an_unknown_order_of_layers_is_refused() -> None:
    model = load_model("kimi-linear-48b")
    with pytest.raises(
        InputError, match=r"^kimi-linear-48b:groups\.mla\.layer_ids: no source gives the order"
    ) as error:
        layer_stack(model, from_model(model))
    assert "\n" not in str(error.value)


def test_a_group_that_is_not_given_is_refused() -> None:
    model = load_model("gpt-oss-20b")
    with pytest.raises(InputError, match=r"^gpt-oss-20b:groups\.full: missing among the groups given$"):
        layer_stack(model, from_model(model)[1:])


def test_a_frontier_after_the_position_is_refused() -> None:
    with pytest.raises(InputError, match=r"^exact_start: frontier: expected 0 to 10, got 11$"):
        exact_start((), 10, 11, {})
