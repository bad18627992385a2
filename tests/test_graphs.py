"""Captured decode steps under the rows of the cuda_graph table: the same tests on the plan and on a CUDA graph."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import msgspec
import pytest

pytest.importorskip("torch", reason="graphs are of launches on tensors")

import torch
from torch import Tensor

from hybridkv_ref import load_tables
from hybridkv_ref.batch_memory import NULL_BLOCK, Saved
from hybridkv_ref.batch_step import BatchStep, feed, v4_decoder
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.decoder_plan import Folded
from hybridkv_ref.decoder_weights import Compressor
from hybridkv_ref.graphs import CapturedStep, GraphRows, TableRows
from hybridkv_ref.launch_plan import NotCapturable
from hybridkv_ref.machine import Machine, Refused

ROWS, LENGTH = 4, 40
torch.set_num_threads(1)  # many small launches: more threads only wait for each other
FORMATS = ("cpu, float64", "cpu, V4's formats", "cuda, V4's formats")


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@lru_cache(maxsize=8)
def decoder(form: str) -> Decoder:
    return Decoder(Sizes()) if form.endswith("float64") else v4_decoder()


def new_step(form: str, spare: int = 2) -> BatchStep:
    return BatchStep(decoder(form), ROWS, form.split(",")[0], narrow=form.endswith("formats"), spare=spare)


def text(seed: int) -> list[int]:
    return torch.randint(0, 29, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


@lru_cache(maxsize=32)
def truth(form: str, seed: int) -> Tensor:
    """Logits [LENGTH, vocab] of one text, alone in the batch, with nothing captured."""
    step = new_step(form)

    def eager() -> None:
        with torch.no_grad():
            step.run()

    return feed(step, eager, {0: text(seed)}, 0, LENGTH)[:, 0]


def forward(form: str, seed: int) -> Tensor:
    """Logits [LENGTH, vocab] of the decoder's own forward pass, in chunks, with nothing cached."""
    own, tokens = decoder(form), text(seed)
    state, chunk = own.state(keep_all=True), own.sizes.max_step
    return torch.cat([own.forward(tokens[at : at + chunk], at, 0, state) for at in range(0, LENGTH, chunk)])


def captured(form: str, rows: GraphRows | None = None) -> CapturedStep:
    graph = CapturedStep(new_step(form), rows or TableRows())
    graph.capture()
    return graph


def batch(graph: CapturedStep) -> BatchStep:
    assert isinstance(graph.step, BatchStep)
    return graph.step


def play(graph: CapturedStep, texts: Mapping[int, int], start: int, end: int) -> Tensor:
    """Replays tokens [start, end) of the texts with these seeds; the logits are poisoned before each."""
    step = batch(graph)

    def replay() -> None:
        step.logits.fill_(torch.nan)
        graph.replay()

    return feed(step, replay, {row: text(seed) for row, seed in texts.items()}, start, end)


def test_the_step_is_the_decoder() -> None:
    """In float64 and fixed order a batched step gives the very bits of the decoder's own forward pass."""
    for seed in (1, 2):
        assert torch.equal(truth(FORMATS[0], seed), forward(FORMATS[0], seed))


def test_in_v4_formats_the_step_is_the_decoder_up_to_its_queries() -> None:
    step = BatchStep(decoder(FORMATS[1]), 1)
    with torch.no_grad():
        found = feed(step, step.run, {0: text(1)}, 0, LENGTH)[:, 0]
    assert torch.equal(found, forward(FORMATS[1], 1))


@pytest.mark.parametrize("seed", range(3))
def test_one_capture_serves_every_mix_of_stages(form: str, seed: int) -> None:
    """Requests that begin, fold, slide their window, leave, and come back to other blocks: one graph, no other plan."""
    graph, chance = captured(form), random.Random(seed)
    step, plan = batch(graph), graph.plan
    at: dict[int, tuple[int, int]] = {}  # row -> text, position
    saved: dict[tuple[int, int], Saved] = {}
    moved = 0
    for number in range(70):
        for row in range(ROWS):
            if row not in at and chance.random() < 0.3:
                if saved and chance.random() < 0.7:
                    key = chance.choice(list(saved))
                    at[row], kept = key, saved.pop(key)
                    step.memory.restore(row, kept)
                    blocks = {group: step.memory.batch.blocks[group][row] for group in kept.blocks}
                    moved += blocks != dict(kept.blocks)
                else:
                    at[row] = (chance.randrange(4), 0)
            elif row in at and (at[row][1] == LENGTH or chance.random() < 0.04):
                if at[row][1] < LENGTH and at[row] not in saved:
                    saved[at[row]] = step.memory.save(row)
                step.memory.release(row)
                del at[row]
        step.write({row: text(s)[p] for row, (s, p) in at.items()}, {row: p for row, (_, p) in at.items()})
        step.logits.fill_(torch.nan)
        graph.replay()
        for row, (s, p) in at.items():
            assert torch.equal(step.logits[row], truth(form, s)[p]), (number, row)
            at[row] = (s, p + 1)
    assert graph.plan is plan
    assert graph.differences() == []
    assert moved


def test_a_moved_base_ends_recaptured_with_equal_logits(form: str) -> None:
    graph = captured(form)
    play(graph, {0: 1, 2: 2}, 0, 20)
    stale = batch(graph).memory.arenas
    stale = {at: stale[at] for at in stale if at[1] == "hca"}
    for layer, group in stale:
        batch(graph).memory.move(layer, group)
    with pytest.raises(Refused) as refused:
        graph.replay()
    assert refused.value.guard.text == "graph.captured == topology"
    assert "HKV-S4-002" in refused.value.event.rules
    assert graph.stage == "CAPTURED"
    for arena in stale.values():
        arena.fill_(0xFF)  # nobody may read it any more
    graph.recapture()
    assert graph.stage == "RECAPTURED"
    found = play(graph, {0: 1, 2: 2}, 20, LENGTH)
    for row, seed in ((0, 1), (2, 2)):
        assert torch.equal(found[:, row], truth(form, seed)[20:])


def without(row: str, guard: str) -> Machine:
    """A machine of the tables without one guard of a row of graphs."""
    tables = load_tables()
    events = [
        dataclasses.replace(event, guards=tuple(g for g in event.guards if g.text != guard))
        if event.id == f"graph.{row}"
        else event
        for event in tables.events
    ]
    assert events != list(tables.events)
    return Machine(dataclasses.replace(tables, events=tuple(events)))


def test_without_the_guard_a_moved_base_is_read_where_it_was(form: str) -> None:
    """Why the rule is there: the old graph reads the old memory, and the logits differ."""
    graph = captured(form, TableRows(without("replay", "graph.captured == topology")))
    play(graph, {0: 1}, 0, 20)
    memory = batch(graph).memory
    layer, group = next(at for at in memory.arenas if at[1] == "window")
    old = memory.arenas[layer, group]
    memory.move(layer, group)
    old.fill_(0)
    assert not torch.equal(play(graph, {0: 1}, 20, 21)[0, 0], truth(form, 1)[20])


def rebind(graph: CapturedStep) -> None:
    contents = batch(graph).memory.contents
    contents["positions"] = contents["positions"].clone()


def reshape(graph: CapturedStep) -> None:
    contents = batch(graph).memory.contents
    wider = torch.full((ROWS, contents["table/hca"].shape[1] + 1), -1, dtype=torch.int32)
    contents["table/hca"] = wider.to(contents["table/hca"].device)


def rebind_weights(graph: CapturedStep) -> None:
    step = batch(graph)
    step.weights = dataclasses.replace(step.weights, head=step.weights.head.clone())


@pytest.mark.parametrize("change", [rebind, reshape, rebind_weights])
def test_a_rebound_buffer_is_noticed(form: str, change: Callable[[CapturedStep], None]) -> None:
    graph = captured(form)
    graph.replay()
    change(graph)
    for _ in range(2):  # it stays refused, and the topology moved once
        with pytest.raises(Refused, match=r"graph\.captured == topology.* with topology=1, graph\.captured=0"):
            graph.replay()
    graph.recapture()
    graph.replay()
    assert graph.stage == "CAPTURED"


def test_a_changed_scalar_shows_as_a_difference(form: str) -> None:
    graph = captured(form)
    assert graph.differences() == []
    step = batch(graph)
    sizes = msgspec.structs.replace(step.decoder.sizes, window=4)
    step.decoder = Decoder(sizes, layouts=step.decoder.layouts)
    window = decoder(form).sizes.window
    assert any(f"aten.sub.Tensor: other {window - 1}, 3 now" in line for line in graph.differences())


@pytest.mark.parametrize("name", ["write/window", "write/hca", "write/csa_tail", "rows"])
def test_padding_that_addresses_a_request_is_refused(form: str, name: str) -> None:
    graph = captured(form)
    play(graph, {0: 1}, 0, 5)
    step = batch(graph)
    step.write({0: text(1)[5]}, {0: 5})
    step.memory.contents[name][3] = 0 if name == "rows" else 2 * 16  # block 2 or later, in every page
    before = {at: arena.clone() for at, arena in step.memory.arenas.items()}
    with pytest.raises(Refused) as refused:
        graph.replay()
    assert refused.value.guard.text == "graph.padded"
    assert "HKV-S4-006" in refused.value.event.rules
    assert all(torch.equal(arena, before[at]) for at, arena in step.memory.arenas.items())
    step.write({0: text(1)[5]}, {0: 5})
    graph.replay()
    assert torch.equal(step.logits[0], truth(form, 1)[5])


def test_padding_in_the_null_block_is_padding(form: str) -> None:
    graph = captured(form)
    step = batch(graph)
    step.write({0: text(1)[0]}, {0: 0})
    step.memory.contents["write/window"][3] = NULL_BLOCK
    graph.replay()
    assert torch.equal(step.logits[0], truth(form, 1)[0])


def test_no_base_moves_under_a_replay(form: str) -> None:
    rows = TableRows()
    graph = captured(form, rows)
    graph.begin()
    assert graph.stage == "REPLAYING"
    with pytest.raises(Refused) as refused:
        rows.system("rebase")
    assert refused.value.guard.text == "replays == 0"
    assert "HKV-S4-003" in refused.value.event.rules
    with pytest.raises(Refused, match=r"graph\.stage in \{CAPTURED, RECAPTURED\}"):
        graph.begin()
    graph.end()
    rows.system("rebase")
    with pytest.raises(Refused, match=r"graph\.captured == topology"):
        graph.replay()


def test_every_stage_has_its_refusals(form: str) -> None:
    graph = CapturedStep(new_step(form), TableRows())
    with pytest.raises(Refused, match=r"graph\.set_contents: refused by 'graph\.stage in"):
        graph.replay()
    graph.capture()
    with pytest.raises(Refused, match=r"graph\.capture: refused by 'graph\.stage == NONE'"):
        graph.capture()
    with pytest.raises(Refused, match=r"graph\.invalidate: refused by 'graph\.captured != topology'"):
        graph.recapture()
    graph.replay()
    graph.discard()
    assert graph.stage == "NONE"
    with pytest.raises(Refused, match=r"graph\.replay"):
        graph.replay()
    assert graph.differences() == ["nothing is captured"]
    graph.capture()
    graph.replay()


class Peeking(BatchStep):
    """Looks at a value in the middle of the step."""

    def run(self) -> None:
        super().run()
        if bool(self.logits.isnan().any()):
            self.logits.zero_()


class Borrowing(BatchStep):
    """Adds something that it did not declare."""

    extra: Tensor

    def run(self) -> None:
        super().run()
        self.logits.add_(self.extra)


def test_a_step_that_no_graph_can_hold_leaves_nothing_captured(form: str) -> None:
    device = form.split(",")[0]
    borrowing = Borrowing(decoder(form), ROWS, device)
    borrowing.extra = torch.ones_like(borrowing.logits)
    for step, reason in ((Peeking(decoder(form), ROWS, device), "reads a value"), (borrowing, "is no buffer")):
        graph = CapturedStep(step, TableRows())
        with pytest.raises(NotCapturable, match=reason):
            graph.capture()
        assert graph.stage == "NONE"
        assert graph.plan is None
        with pytest.raises(Refused):
            graph.replay()
    assert torch.ones(1, device=device).item() == 1.0  # the device is usable afterwards


class Deciding(BatchStep):
    """Leaves folds out, in Python, where the contents have none."""

    def _fold(self, layer: int, folded: Folded, w: Compressor, x: Tensor) -> None:
        if bool((self.memory.contents[f"write/{folded.entries}"] >= 0).any()):
            super()._fold(layer, folded, w, x)


class DecidingQuietly(Deciding):
    """The same, with the contents as the host knew them: no read of a value gives it away."""

    folds: frozenset[str] = frozenset()

    def write(self, tokens: Mapping[int, int], positions: Mapping[int, int]) -> None:
        super().write(tokens, positions)
        contents = self.memory.contents
        self.folds = frozenset(group for group in self.memory.tails if bool((contents[f"write/{group}"] >= 0).any()))

    def _fold(self, layer: int, folded: Folded, w: Compressor, x: Tensor) -> None:
        if folded.entries in self.folds:
            BatchStep._fold(self, layer, folded, w, x)


def test_what_a_step_decides_in_python_is_decided_for_good(form: str) -> None:
    """Why the grid is the whole one and contents say who takes part: a graph captured without folds never folds."""
    device, narrow = form.split(",")[0], form.endswith("formats")
    with pytest.raises(NotCapturable, match="reads a value on the host"):
        CapturedStep(Deciding(decoder(form), ROWS, device, narrow), TableRows()).capture()
    step = DecidingQuietly(decoder(form), ROWS, device, narrow)
    graph = CapturedStep(step, TableRows())
    graph.capture()
    found = play(graph, {0: 1}, 0, 20)
    assert not torch.equal(found[:, 0], truth(form, 1)[:20])
    step.write({0: text(1)[19]}, {0: 19})  # the last token of an entry
    assert any("launches" in line or "now" in line for line in graph.differences())


def test_a_capture_anew_that_fails_leaves_nothing(form: str) -> None:
    graph = captured(form)
    step = batch(graph)
    step.memory.contents["tokens"] = step.memory.contents["tokens"].clone()
    step.run = lambda: void(float(step.logits[0, 0]))  # type: ignore[method-assign]
    with pytest.raises(NotCapturable, match="reads a value on the host"):
        graph.recapture()
    assert graph.stage == "NONE"
    with pytest.raises(Refused):
        graph.replay()


def void(value: object) -> None:
    """A step returns nothing."""
    del value


def test_rows_may_be_those_of_an_allocator() -> None:
    """The graph reads an allocator's pools, so its rows are fired there: one topology for all graphs of it."""
    from allocator_tools import make

    with make() as allocator:
        first, second = captured(FORMATS[0], allocator), captured(FORMATS[0], allocator)
        allocator.system("rebase")
        for graph in (first, second):
            with pytest.raises(Refused, match=r"graph\.captured == topology"):
                graph.replay()
            graph.recapture()
            assert graph.stage == "RECAPTURED"
            graph.replay()


def test_a_restored_request_reads_other_blocks(form: str) -> None:
    graph = captured(form)
    step = batch(graph)
    play(graph, {1: 3}, 0, 24)
    kept = step.memory.save(1)
    step.memory.release(1)
    play(graph, {0: 4}, 0, 24)  # takes blocks and writes over what was left
    step.memory.restore(2, kept)
    assert {g: list(b) for g, b in kept.blocks.items()} != {g: b[2] for g, b in step.memory.batch.blocks.items()}
    found = play(graph, {2: 3}, 24, LENGTH)
    assert torch.equal(found[:, 2], truth(form, 3)[24:])


@pytest.mark.parametrize("texts", [{0: 1, 1: 2}, {3: 1, 2: 1, 1: 3, 0: 2}])
def test_no_row_depends_on_the_others(form: str, texts: Mapping[int, int]) -> None:
    found = play(captured(form), texts, 0, LENGTH)
    rows: Sequence[int] = list(texts)
    for row in rows:
        assert torch.equal(found[:, row], truth(form, texts[row]))
