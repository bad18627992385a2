"""Part: captured graphs and the decoder on this device: what the cuda_graph table promises, and equal logits.

A batched decode step of the small decoder in V4's byte formats is captured once.  Logits are compared bit for bit with
those of the same step run eagerly over another memory; of one eager step every launch is compared with float64.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from hybridkv_ref.batch_step import BatchStep, feed, v4_decoder
from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.graphs import CapturedStep, TableRows
from hybridkv_ref.kernels import operation
from hybridkv_ref.kernels.cases import check, on_device
from hybridkv_ref.kernels.dispatch import recorded_by
from hybridkv_ref.kernels.judged import JUDGES
from hybridkv_ref.machine import Refused

P = ParamSpec("P")
R = TypeVar("R")
ROWS, SEED = 4, 0


class Differs(Exception):
    """Something is not as it should be."""


def demand(holds: bool, what: str) -> None:
    """Differs unless it holds."""
    if not holds:
        raise Differs(what)


class Scene:
    """A captured step, and the logits that its texts should give."""

    def __init__(self, bench: Bench) -> None:
        self.length, self.half = (12, 6) if bench.tiny else (40, 20)
        narrow = bench.tiny or bench.device.type == "cuda"
        self.step = BatchStep(v4_decoder(SEED), ROWS, bench.device, narrow=narrow)
        self.graph = CapturedStep(self.step, TableRows())
        self.eager = BatchStep(v4_decoder(SEED), ROWS, bench.device, narrow=narrow)
        chance = torch.Generator().manual_seed(SEED)
        vocab = self.step.decoder.sizes.vocab
        texts = torch.randint(0, vocab, (2, self.length), generator=chance).tolist()
        self.texts: dict[int, Sequence[int]] = {0: texts[0], 2: texts[1]}
        self.expected = feed(self.eager, without_grad(self.eager.run), self.texts, 0, self.length)

    def replay(self) -> None:
        """Replays over poisoned logits."""
        self.step.logits.fill_(torch.nan)
        self.graph.replay()

    def play(self, start: int, end: int) -> None:
        """Tokens [start, end); the logits must be the expected ones."""
        found = feed(self.step, self.replay, self.texts, start, end)
        for row in self.texts:
            same = torch.equal(found[:, row], self.expected[start:end, row])
            worst = float((found[:, row] - self.expected[start:end, row]).abs().max())
            demand(same, f"logits of row {row} differ by {worst:.3g} in tokens [{start}, {end})")


def without_grad(run: Callable[[], None]) -> Callable[[], None]:
    """A run that records no gradients."""

    def inner() -> None:
        with torch.no_grad():
            run()

    return inner


def run(bench: Bench) -> None:
    """The checks in the order in which a service meets them, and the seconds of a step."""
    made: list[Scene] = []

    def captured() -> str:
        scene = Scene(bench)
        scene.graph.capture()
        made.append(scene)
        return f"{len(scene.graph.plan.launches) if scene.graph.plan else 0} launches"

    bench.check("capture", captured)
    for name, promise in (
        ("poisoned replay, changed contents", _contents),
        ("restore to other blocks: logits after the hit equal those from scratch", _restored),
        ("rebound pool refused, then captured anew", _rebound),
        ("padding that addresses a request refused", _padding),
        ("one plan for every mix of stages", _one_plan),
        ("every launch of the decoder's step against float64", _launches),
        ("the decoder from scratch, step by step", _scratch),
    ):
        bench.check(name, partial(_on_scene, promise, made))
    if made:
        scene = made[0]
        bench.measure("decode step, replayed", "steps/s", 1.0, scene.graph.replay)
        bench.measure("decode step, eager", "steps/s", 1.0, without_grad(scene.eager.run))


def _on_scene(promise: Callable[[Scene], str], made: Sequence[Scene]) -> str:
    demand(bool(made), "nothing is captured")
    return promise(made[0])


def _contents(scene: Scene) -> str:
    scene.play(0, scene.half)
    return f"{scene.half} steps of two requests"


def _restored(scene: Scene) -> str:
    memory, kept = scene.step.memory, {}
    for row in scene.texts:
        kept[row] = memory.save(row)
        memory.release(row)
    for row in sorted(scene.texts, reverse=True):  # in the other order, so that each gets other blocks
        memory.restore(row, kept[row])
    elsewhere = sum(kept[row].blocks[g] != memory.batch.blocks[g][row] for row in scene.texts for g in kept[row].blocks)
    demand(elsewhere > 0, "every block came back to where it was")
    scene.play(scene.half, scene.length - 1)
    return f"{elsewhere} lists of blocks moved"


def _rebound(scene: Scene) -> str:
    layer, group = next(at for at in scene.step.memory.arenas if at[1] == "window")
    old: Tensor = scene.step.memory.arenas[layer, group]
    scene.step.memory.move(layer, group)
    try:
        scene.graph.replay()
    except Refused as refused:
        demand(refused.guard.text == "graph.captured == topology", f"refused by {refused.guard.text}")
    else:
        raise Differs("a replay over a pool that moved was not refused")
    old.fill_(0xFF)
    scene.graph.recapture()
    demand(scene.graph.stage == "RECAPTURED", f"stage {scene.graph.stage}")
    scene.play(scene.length - 1, scene.length)
    return "RECAPTURED, equal logits"


def _padding(scene: Scene) -> str:
    scene.step.write({0: 1}, {0: scene.length})
    contents = scene.step.memory.contents["write/hca"]
    before = contents.clone()
    contents[1] = 2 * scene.step.memory.forms["hca"].page.entries
    try:
        scene.graph.replay()
    except Refused as refused:
        demand(refused.guard.text == "graph.padded", f"refused by {refused.guard.text}")
    else:
        raise Differs("a padding row that writes to a request's block was not refused")
    contents.copy_(before)
    scene.graph.replay()
    return "refused, and replayed when set right"


def _one_plan(scene: Scene) -> str:
    scene.step.write({1: 3}, {1: 0})
    found = scene.graph.differences()
    demand(not found, "; ".join(found[:2]))
    return "no difference at other stages"


def _scratch(scene: Scene) -> str:
    for row in range(ROWS):
        scene.step.memory.release(row)
    scene.play(0, scene.length)
    return f"{scene.length} steps, bit for bit"


class _Compared:
    """Compares every launch with its float64 reference before it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.count = device, 0

    def launch(self, name: str, version: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        module = operation(name)
        given = inspect.signature(module.reference).bind(*args, **kwargs)
        given.apply_defaults()
        case = JUDGES[name]({k: v.cpu() if isinstance(v, Tensor) else v for k, v in given.arguments.items()})
        there = on_device(version, self.device, case.outputs)
        try:
            check(module, there, case, tensor_cores=self.device.type == "cuda")
        except Exception as error:
            raise Differs(f"launch {self.count} {name}: {error}") from error
        self.count += 1
        return version(*args, **kwargs)


def _launches(scene: Scene) -> str:
    compared = _Compared(scene.step.memory.device)
    with recorded_by(compared):
        without_grad(scene.eager.run)()
    return f"{compared.count} launches"
