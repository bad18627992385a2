"""Rules of recovery, switched off: what must be there, at which position, and who sees it."""

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import torch
from decoder_histories import (
    planner,
    sequence,
)
from decoder_switches import (
    BASE,
    LENGTH,
    RING,
    TEXT,
    Change,
    Outcome,
    Witness,
    Witnesses,
    outcome,
    overwrite,
    patched,
    reject,
    resume,
    ring_sizes,
    table_rule,
    without,
    zeros,
)

from hybridkv_ref import (
    decoder_attention,
    decoder_plan,
    decoder_reuse,
    decoder_store,
    exact_start,
)
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Sizes, Stored
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_store import MemoryStore
from hybridkv_ref.recovery import Hit

WITNESSES = Witnesses()


# ---- recovery.toml ---------------------------------------------------------------------------------------------------

NO_HALO = partial(table_rule, "uncompressed_tail", "lo", "floor_to(F, ratio)")


@WITNESSES.of(
    "halo rows at a multiple of the small ratio", "TAIL-002 TAIL-005", "fill 20, resume at 20 (a multiple of 4)"
)
def _(on: bool) -> Outcome:
    return NO_HALO(20, on)


@WITNESSES.of(
    "halo rows at a multiple of both ratios", "TAIL-002 TAIL-005", "fill 24, resume at 24 (a multiple of 4 and 8)"
)
def _(on: bool) -> Outcome:
    return NO_HALO(24, on)


REAL = Sizes(
    layers=("window", "csa", "hca"), window=128, hca_ratio=128, hca_block=128, reach=272, max_step=32, top_k=32
)


def real_halo(r: int, on: bool) -> Outcome:
    """V4's own window and ratios."""
    text = sequence(REAL, 1, REAL.reach)
    reader = planner(REAL) if on else without("uncompressed_tail", "lo", "floor_to(F, ratio)", REAL)
    return resume(planner(REAL), r, REAL.reach, reader=reader, chunks=(8,), text=text, other=text)


@WITNESSES.of(
    "halo rows at a multiple of 4", "TAIL-002 TAIL-005", "ratios 4 and 128, window 128; fill 252, resume at 252"
)
def _(on: bool) -> Outcome:
    return real_halo(252, on)


@WITNESSES.of(
    "halo rows at a multiple of 128", "TAIL-002 TAIL-005", "ratios 4 and 128, window 128; fill 256, resume at 256"
)
def _(on: bool) -> Outcome:
    return real_halo(256, on)


@WITNESSES.of(
    "tail rows between multiples", "TAIL-002", "fill 23, resume at 23 with the halo and no row after the multiple"
)
def _(on: bool) -> Outcome:
    return table_rule("uncompressed_tail", "hi", "max(0, floor_to(F, ratio))", 23, on)


@WITNESSES.of("W - 1 window rows before the start", "SWA-001", "fill 22, resume at 22 with W - 2 rows")
def _(on: bool) -> Outcome:
    return table_rule("swa_window", "lo", "max(0, s - (window - 2))", 22, on)


@WITNESSES.of(
    "the window lies before the start, not before the match's end", "SWA-001",
    "fill 24 and drop tails after 22; start at 22 with frontier 24, window rows counted back from 24",
)  # fmt: skip
def _(on: bool) -> Outcome:
    plan = planner(BASE) if on else without("swa_window", "lo", "max(0, F - (window - 1))")

    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if planner(BASE).groups[group].exact and len(key.tokens) > 22:
                store.evict(layer, group, key)

    return resume(planner(BASE), 24, reader=plan, want=Want(alignment=8, replay=6), stored=drop)


@WITNESSES.of("every whole entry before the frontier", "CKV-001", "fill 24, resume at 24 without the last entries")
def _(on: bool) -> Outcome:
    return table_rule("compressed_kv", "hi", "max(0, floor_to(F, ratio) - ratio)", 24, on)


@WITNESSES.of("an index key for every entry", "IDX-001 IDX-006", "fill 24, resume at 24 without the last index key")
def _(on: bool) -> Outcome:
    return table_rule("indexer_state", "hi", "max(0, floor_to(F, ratio) - ratio)", 24, on)


def drop_group(name: str, r: int, on: bool) -> Outcome:
    """A resume by all groups but one, which has been evicted."""

    class Blind(Planner):
        """Does not ask for one group."""

        def __init__(self) -> None:
            super().__init__(planner(BASE).decoder)
            self.groups = {key: group for key, group in self.groups.items() if key != name}

    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group == name:
                store.evict(layer, group, key)

    return resume(planner(BASE), r, reader=planner(BASE) if on else Blind(), stored=drop)


for _name in planner(BASE).groups:
    WITNESSES.append(
        Witness(
            f"group intersection: {_name} too",
            ("HKV-L3-001", "HKV-L3-003"),
            f"fill 23, evict {_name}, resume by the other groups",
            partial(drop_group, _name, 23),
        )
    )


# ---- Positions -------------------------------------------------------------------------------------------------------


@WITNESSES.of("a start without windows lies at or before s*", "L3-007", "no recurrent layer; fill 40, start at s* + 1")
def _(on: bool) -> Outcome:
    sizes = msgspec.structs.replace(BASE, layers=("window", "window", "csa", "hca"))
    found = exact_start.zero_exact_hit

    def late(*args: Any) -> Hit:
        hit = found(*args)
        return replace(hit, r=hit.r + 1, replay=exact_start.replay(args[0], hit.r + 1, args[1]))

    return patched(
        on, decoder_reuse, "zero_exact_hit", late, lambda: resume(planner(sizes), 40, want=Want(mode="zero-exact"))
    )


def other_snapshot(offset: int) -> Change:
    """Brings back the recurrent snapshot of another position, in the place of the right one."""

    def change(store: MemoryStore, session: Session) -> None:
        plan, r = session.planner, session.hit.r
        for item in plan.decoder.stored:
            if item.shape == "state":
                key = plan.key(session.tokens[: r + offset], "exact")
                ref = store.find(item.layer, item.group, key, plan.descriptors[item.layer, item.group])
                rows = store.rows(ref) if ref is not None else None
                if rows is not None:
                    decoder_store.copy_object(rows, 0, session.state.rows(item.layer, item.group), r - 1, 1)

    return change


@WITNESSES.of(
    "a snapshot's position is the start exactly", "REC-001 POS-001", "fill 22, resume at 22 from the state at 21"
)
def _(on: bool) -> Outcome:
    return resume(planner(BASE), 22, resumed=None if on else other_snapshot(-1))


@WITNESSES.of("each token is applied once", "REC-006 REC-005", "fill 24, start at 23 from the state at 24")
def _(on: bool) -> Outcome:
    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group.endswith("tail") and len(key.tokens) == 24:
                store.evict(layer, group, key)

    return resume(
        planner(BASE), 24, want=Want(alignment=8, replay=6), stored=drop, resumed=None if on else other_snapshot(1)
    )


@WITNESSES.of("a snapshot has the convolution's last inputs", "REC-002", "fill 22, resume at 22 with these set to zero")
def _(on: bool) -> Outcome:
    def cut(arena: torch.Tensor) -> torch.Tensor:
        split = 8 * BASE.delta_heads * BASE.delta_dim**2
        return torch.cat((arena[:, :split], torch.zeros_like(arena[:, split:])), dim=1)

    return resume(planner(BASE), 22, resumed=None if on else lambda _, session: overwrite(session, "state", cut))


def move_frontier(_: MemoryStore, session: Session) -> None:
    """The request takes entries for cached that end one ratio later than they do."""
    session.hit = replace(session.hit, frontier=session.hit.frontier + BASE.csa_ratio)


@WITNESSES.of("the splice has no gap", "TAIL-001 L4-003", "fill 24, resume at 24 as if entries reached 28")
def _(on: bool) -> Outcome:
    return resume(planner(BASE), 24, resumed=None if on else move_frontier)


@WITNESSES.of(
    "a replay writes no entry before the frontier", "L3-006", "fill 24, start at 20 with frontier 24, fold again"
)
def _(on: bool) -> Outcome:
    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group.endswith("tail") and len(key.tokens) > 18:
                store.evict(layer, group, key)

    def refold(_: MemoryStore, session: Session) -> None:
        session.hit = replace(session.hit, frontier=session.hit.r)

    return resume(planner(BASE), 24, want=Want(alignment=8, replay=6), stored=drop, resumed=None if on else refold)


@WITNESSES.of(
    "ring phase: position p at index p mod ring", "POS-004 SWA-006", "fill 22, resume at 22 into a ring, one off"
)
def _(on: bool) -> Outcome:
    def turn(_: MemoryStore, session: Session) -> None:
        overwrite(session, "window", lambda arena: arena.roll(1, 0))

    return resume(planner(RING), 22, resumed=None if on else turn)


@WITNESSES.of("ring phase of tails", "POS-004 TAIL-008", "fill 22, resume at 22 with the tails' rings one off")
def _(on: bool) -> Outcome:
    def turn(_: MemoryStore, session: Session) -> None:
        overwrite(session, "ring", lambda arena: arena.roll(1, 0))

    return resume(planner(RING), 22, resumed=None if on else turn)


# ---- Drafts, padding, visibility -------------------------------------------------------------------------------------


@WITNESSES.of(
    "a ring keeps the rows that a rejection needs again", "TAIL-009 POS-003 SWA-007",
    "steps of 1 in the smallest rings that serve them; 2 drafts at 19 are rejected",
)  # fmt: skip
def _(on: bool) -> Outcome:
    def smallest(item: Stored) -> int | None:
        return None if item.shape == "state" or on else item.keep + 1

    with zeros(), ring_sizes(smallest):
        before, after = reject(planner(RING), TEXT, 19, 2)
    assert before == 0.0, "these rings do not serve steps of 1"
    return Outcome(after, 0)


@WITNESSES.of(
    "padding rows have the null slot", "S4-006 SWA-004", "steps of 2 tokens and 3 of padding; padding at position 0"
)
def _(on: bool) -> Outcome:
    def first_slot(step: decoder_plan.Step) -> torch.Tensor:
        return torch.cat((torch.arange(step.start, step.end), torch.zeros(step.padding, dtype=torch.int64)))

    return patched(
        on, decoder_plan.Step, "positions", property(first_slot),
        lambda: resume(planner(RING), 3, chunks=(2,), padding=3),
    )  # fmt: skip


@WITNESSES.of(
    "an entry is visible from its last token on", "CKV-007", "the same tokens in steps of 1 and of 8, one token early"
)
def _(on: bool) -> Outcome:
    def early(step: decoder_plan.Step, ratio: int) -> torch.Tensor:
        return ((step.positions + 2) // ratio).int()

    def run() -> Outcome:
        plan = Planner(Decoder(BASE))  # its run from scratch, in steps of 8, is made under the same rule
        return resume(plan, 20, chunks=(1,))

    return patched(on, decoder_plan.Step, "visible", early, run)


@WITNESSES.of(
    "equal scores by index", "IDX-008", "the same tokens in steps of 1 and of 8; torch.topk over what the step sees"
)
def _(on: bool) -> Outcome:
    def arbitrary(logits: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        width = max(int(visible.max()), 1)
        scores = logits[:, :width].masked_fill(torch.arange(width) >= visible[:, None], -torch.inf)
        best = scores.topk(min(width, chosen.shape[1]), dim=1)
        index = torch.where(best.values > -torch.inf, best.indices, width).sort(dim=1).values
        chosen.fill_(-1)
        chosen[:, : index.shape[1]] = torch.where(index < width, index, -1).int()
        return chosen

    return patched(on, decoder_attention, "topk_select", arbitrary, _in_two_chunkings)


def _in_two_chunkings() -> Outcome:
    plan = Planner(Decoder(BASE))  # its run from scratch, in steps of 8, is made under the same rule
    return outcome(plan, MemoryStore(plan.decoder, 400), LENGTH, chunks=(1,))
