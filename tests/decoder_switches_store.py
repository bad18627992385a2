"""Rules of what is published and what is found, switched off."""

from typing import Any

import msgspec
from decoder_histories import (
    Request,
    planner,
    sequence,
    serve,
    truth,
    wrong,
)
from decoder_switches import BASE, LENGTH, TEXT, Outcome, Witnesses, outcome, patched, resume, zeros

from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_store import Key, MemoryStore, Ref, Slot, copy_object

WITNESSES = Witnesses()


@WITNESSES.of(
    "nothing past the committed position is published",
    "POS-002 S3-011",
    "a prompt of 30 in steps of 10, aborted in the third; all 30 published with the first step",
)
def _(on: bool) -> Outcome:
    class Eager(Session):
        """Publishes what is scheduled."""

        def _publishable(self) -> int:
            return 30

    first = Request(0, 30, (10,), abort=2)
    sizes = msgspec.structs.replace(BASE, max_step=10)
    return resume(planner(sizes), 30, writer_type=Session if on else Eager, first=first)


@WITNESSES.of(
    "drafts are not published from blocks that go on being written",
    "POS-002 CKV-006 S3-004",
    "8 drafts after 20 tokens, all rejected; a second request has the drafts for its prompt",
)
def _(on: bool) -> Outcome:
    class InPlace(Session):
        """Its objects are its own blocks: published with the drafts, written again by the tokens that replace them."""

        shared: list[tuple[Any, Key, int, int]]

        def _publishable(self) -> int:
            return self.pending

        def _write(self, item: Any, key: Key, first: int, count: int) -> None:
            self.shared = [*getattr(self, "shared", []), (item, key, first, count)]
            super()._write(item, key, first, count)

        def commit(self, accepted: int) -> None:
            super().commit(accepted)
            for item, key, first, count in self.shared:
                ref = self.store.find(item.layer, item.group, key, self.planner.descriptors[item.layer, item.group])
                rows = self.store.rows(ref) if ref is not None else None
                if rows is not None and item.shape == "window":
                    copy_object(self.state.rows(item.layer, item.group), first, rows, 0, count)

    plan = planner(BASE)
    drafts = tuple(wrong(token, BASE.vocab) for token in TEXT[20:28])
    with zeros():
        store = MemoryStore(plan.decoder, 500)
        session = (Session if on else InPlace)(plan, store, TEXT[:20])
        while session.position < 20:
            session.prefill(5)
        session.compute(drafts)
        session.commit(0)
        session.compute(TEXT[20:28])
        session.commit(8)
        return outcome(plan, store, LENGTH, text=(*TEXT[:20], *drafts, *TEXT[28:]))


@WITNESSES.of(
    "rows before the replay's exact ones are not published", "L3-006", "fill 40 without windows; zero-exact; plain hit"
)
def _(on: bool) -> Outcome:
    class Eager(Session):
        """Publishes every row."""

        def _exact(self, item: object, first: int) -> bool:
            return True

    plan = planner(BASE)
    with zeros():
        store, known = MemoryStore(plan.decoder, 400), truth(plan, TEXT)
        fill = Request(0, 40, (8,))
        serve(Session(plan, store, TEXT[:40]), fill, known)
        for layer, group, key in list(store.objects()):
            if plan.groups[group].miss == "replay":
                store.evict(layer, group, key)
        again = Request(0, 40, (8,), want=Want(mode="zero-exact"))
        serve((Session if on else Eager)(plan, store, TEXT[:40], again.want), again, known)
        return max((outcome(plan, store, end) for end in range(22, 41)), key=lambda o: o.difference)


@WITNESSES.of(
    "the grade is part of the key", "L3-008 KEY-002", "fill 32; 40 by a bounded request that replays 8; a plain request"
)
def _(on: bool) -> Outcome:
    class Unlabelled(Session):
        """Publishes bounded rows as exact ones."""

        def _grade(self) -> str:
            return "exact"

    plan = planner(BASE)
    with zeros():
        store, known = MemoryStore(plan.decoder, 400), truth(plan, TEXT)
        serve(Session(plan, store, TEXT[:32]), Request(0, 32, (8,)), known)
        bounded = Request(0, 40, (8,), want=Want(mode="bounded", replay=8))
        serve((Session if on else Unlabelled)(plan, store, TEXT[:40], bounded.want), bounded, known)
        return outcome(plan, store, LENGTH)


@WITNESSES.of(
    "an object is found only when it is complete", "S3-011 S3-012", "objects begun and not written; a second request"
)
def _(on: bool) -> Outcome:
    class Hasty(MemoryStore):
        """Finds objects from the moment that they are begun."""

        def _complete(self, slot: Slot) -> bool:
            return True

    class Slow(Session):
        """Its copies have not happened yet."""

        def _write(self, item: Any, key: Key, first: int, count: int) -> None:
            self.store.begin(item.layer, item.group, key, self.planner.descriptors[item.layer, item.group])

    plan = planner(BASE)
    return resume(plan, 22, store_type=MemoryStore if on else Hasty, writer_type=Slow)


@WITNESSES.of(
    "a lease names the generation",
    "S3-002 S3-003 L1-004",
    "fill A 22; B matches it; A goes, C takes its slots; B reads",
)
def _(on: bool) -> Outcome:
    class Trusting(MemoryStore):
        """Reads whatever lies in the slot."""

        def _same_generation(self, slot: Slot, ref: Ref) -> bool:
            return True

    plan, other = planner(BASE), sequence(BASE, 9, LENGTH)

    class Interrupted(Planner):
        """Between the match and the read, another request takes the slots, once."""

        done = False

        def restore(self, store: Any, match: Any, state: Any) -> bool:
            if not self.done and match.hit.r:
                self.done = True
                for layer, group, key in list(store.objects()):
                    store.evict(layer, group, key)
                serve(Session(plan, store, other[:22]), Request(0, 22, (8,)), truth(plan, other))
            return super().restore(store, match, state)

    return resume(plan, 22, store_type=MemoryStore if on else Trusting, reader=Interrupted(plan.decoder))


@WITNESSES.of(
    "a key covers every token from position 0 on", "KEY-001", "A and B differ in their first token only; B hits A"
)
def _(on: bool) -> Outcome:
    class Short(Planner):
        """Keys of the length and the last two tokens."""

        def key(self, tokens: tuple[int, ...], grade: str) -> Key:
            return Key(self.decoder.identity, grade, (len(tokens), *tokens[-2:]))

    plan = planner(BASE) if on else Short(planner(BASE).decoder)
    return resume(plan, 22, other=((TEXT[0] + 1) % BASE.vocab, *TEXT[1:]))


@WITNESSES.of("a key names the weights", "KEY-002", "fill with seed 0, resume with seed 1")
def _(on: bool) -> Outcome:
    def nameless(self: Decoder) -> str:
        return "any"

    def run() -> Outcome:
        return resume(planner(BASE), 22, reader=planner(BASE, 1))

    return patched(on, Decoder, "identity", property(nameless), run)
