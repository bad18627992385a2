"""What a launch plan holds and refuses, and that equal plans mean one graph; on every device that is there."""

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch", reason="plans are of tensors")

import torch
from torch import Tensor

from hybridkv_ref import layouts
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.copy_blocks import copy_blocks
from hybridkv_ref.kernels.gather_dequant import gather_dequant
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.merge_lse import merge_lse
from hybridkv_ref.launch_plan import NotCapturable, Plan, record

PAGE = layouts.load("bf16").page(4, dim=16)
Body = Callable[["Small"], None]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


class Small:
    """Rows into a page, and back: two kernels and some of torch's operations between them."""

    def __init__(self, device: str, body: Body | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(3, 16, generator=generator).to(device)
        self.slots = torch.tensor([1, -1, 6]).to(device)
        self.cache = _pages.empty_arena(PAGE, 2, device).fill_(0xFF)
        self.out = torch.full((3, 1, 16), torch.nan).to(device)
        self.scale, self.body = 2.0, body

    def buffers(self) -> dict[str, Tensor]:
        return {"x": self.x, "slots": self.slots, "cache": self.cache, "out": self.out}

    def run(self) -> None:
        if self.body is not None:
            self.body(self)
        rows = (self.x * self.scale).view(-1).view(-1, 16)
        rows[:, 3:5].add_(1.0)
        index_build(rows.contiguous(), self.slots, self.cache, PAGE)
        read = torch.empty_like(self.out)
        gather_dequant(self.cache, self.slots, read, PAGE)
        self.out.copy_(torch.cat((read[:1], read[1:].neg())))

    def expected(self) -> Tensor:
        value = self.x * self.scale
        value[:, 3:5] += 1.0
        value = value.bfloat16().float() * (self.slots >= 0)[:, None]
        value[1:] *= -1.0
        return value[:, None]


def plan_of(step: Small) -> Plan:
    return record(step.run, step.buffers())


def test_a_plan_names_kernels_grids_pointers_and_scalars(device: str) -> None:
    step = Small(device)
    plan = plan_of(step)
    kernels = [launch for launch in plan.launches if not launch.operation.startswith("aten.")]
    assert [launch.operation for launch in kernels] == ["index_build", "gather_dequant"]
    build = kernels[0]
    assert build.grid == (1,)
    assert dict(build.scalars) == {"page": PAGE}
    pointers = dict(build.pointers)
    assert pointers["cache"].buffer == "cache"
    assert pointers["slots"].buffer == "slots"
    assert pointers["keys"].buffer == "#0"  # made by the product before it
    inner = [launch for launch in plan.launches if launch.operation == "aten.add_.Tensor"]
    assert dict(inner[0].pointers)["self"].offset == 3 * 4  # a view: bytes into what the step made
    assert [launch.operation for launch in plan.launches][-1] == "aten.copy_.default"
    assert torch.equal(step.out, step.expected())


def test_a_replay_reads_the_contents_of_now_and_nothing_that_was_kept(device: str) -> None:
    step = Small(device)
    plan = plan_of(step)
    for seed in (1, 2):
        step.x.copy_(torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)))
        step.slots.copy_(torch.tensor([seed + 2, 0, -1]))
        step.out.fill_(torch.nan)
        step.cache.fill_(0xFF)
        plan.replay()
        assert torch.equal(step.out, step.expected())


def test_other_contents_are_the_same_plan(device: str) -> None:
    step = Small(device)
    first = plan_of(step)
    step.x.mul_(-3.0)
    step.slots.fill_(-1)
    second = plan_of(step)
    assert first == second
    assert first.differences(second) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: setattr(s, "scale", 3.0), "launch 0 aten.mul.Tensor: other 2.0, 3.0 now"),
        (lambda s: setattr(s, "x", s.x[:2].clone()), "launch 0 aten.mul.Tensor: self "),
        (lambda s: setattr(s, "x", s.out.view(3, 16)), "launch 6 aten.copy_.default: self Pointer(buffer='out'"),
        (
            lambda s: setattr(s, "body", lambda s: index_build(s.x, s.slots, s.cache, PAGE)),
            "launch 0 aten.mul.Tensor: ",
        ),
    ],
)
def test_what_would_need_another_graph_is_named(device: str, change: Callable[[Small], None], message: str) -> None:
    step = Small(device)
    first = plan_of(step)
    change(step)
    if len(step.x) == 2:
        step.slots, step.out = step.slots[:2].clone(), step.out[:2].clone()
    found = first.differences(plan_of(step))
    assert found
    assert found[0].startswith(message)


def test_more_programs_are_another_grid(device: str) -> None:
    partials, lse = torch.zeros(2, 3, 4, 8, device=device), torch.zeros(2, 3, 4, device=device)

    def merge(queries: int) -> Plan:
        parts, logs = partials[:, :queries].contiguous(), lse[:, :queries].contiguous()
        out, log = torch.empty(queries, 4, 8, device=device), torch.empty(queries, 4, device=device)
        buffers = {"parts": parts, "logs": logs, "out": out, "log": log}
        return record(lambda: void(merge_lse(parts, logs, None, out, log, Lse.FLASHMLA)), buffers)

    assert "launch 0 merge_lse: grid (3, 1), (2, 1) now" in merge(3).differences(merge(2))


def void(value: object) -> None:
    """A step returns nothing."""
    del value


HOST_READS: dict[str, Body] = {
    "item": lambda s: void(s.x[0, 0].item()),
    "tolist": lambda s: void(s.slots.tolist()),
    "bool": lambda s: void(bool(s.x[0, 0] > 0)),
    "int": lambda s: void(int(s.slots[0])),
    "iteration": lambda s: void([float(v) for v in s.x[0]]),
    "numpy": lambda s: void(s.x.cpu().numpy()),
    "equal": lambda s: void(torch.equal(s.x, s.x)),
    "nonzero": lambda s: void(s.x.nonzero()),
    "mask": lambda s: void(s.x[s.x > 0]),
    "masked write": lambda s: s.x.__setitem__(s.x > 0, s.x[0, 0]),
    "unique": lambda s: void(torch.unique(s.slots)),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_a_host_read_is_refused(device: str, name: str) -> None:
    with pytest.raises(NotCapturable, match=r"^launch \d+ \S+: reads a value on the host$"):
        plan_of(Small(device, HOST_READS[name]))


def test_integers_may_choose_rows(device: str) -> None:
    step = Small(device, lambda s: void(s.x.copy_(s.x[s.slots.clamp(min=0) % 3])))
    plan = plan_of(step)
    assert any(launch.operation == "aten.index.Tensor" for launch in plan.launches)


def foreign(step: Small) -> Iterator[Body]:
    other = torch.ones_like(step.x)
    arena = _pages.empty_arena(PAGE, 2, step.x.device).fill_(0)
    moves = torch.tensor([[0, 0, 1, 0, 16]], device=step.x.device)
    yield lambda s: void(s.x + other)
    yield lambda s: void(other.view(48))
    yield lambda s: void(s.x.add_(other))
    yield lambda s: void(index_build(s.x, s.slots, arena, PAGE))
    yield lambda s: void(copy_blocks(s.cache, s.cache, moves))
    if step.x.device.type == "cpu":  # a CUDA capture has no such copy at all
        yield lambda s: void(torch.tensor([1.0, 2.0]) + 1.0)


@pytest.mark.parametrize("number", range(6))
def test_foreign_memory_is_refused(device: str, number: int) -> None:
    step = Small(device)
    bodies = list(foreign(step))
    if number >= len(bodies):
        pytest.skip("on the CPU only")
    step.body = bodies[number]
    with pytest.raises(NotCapturable, match="memory that is no buffer of the step and that it did not make"):
        plan_of(step)


def test_a_copy_between_devices_is_refused(device: str) -> None:
    if device == "cpu":
        pytest.skip("there is one device only")
    with pytest.raises(NotCapturable, match=r"moves data between cpu and cuda|reads a value on the host"):
        plan_of(Small(device, lambda s: void(s.x.copy_(torch.ones(3, 16)))))
