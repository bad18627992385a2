"""Durable copies as records of the tables: their rows, their space, and what a new process finds of them.

A record is used again after its object is gone, so whoever acts on an object that it found earlier asks first, in the
same atomic step, whether it is still there.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.ledger import Step
from hybridkv_ref.allocator.media import Medium
from hybridkv_ref.allocator.object_file import Description
from hybridkv_ref.allocator.records import CacheSegment, StoredObject
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused


class Objects:
    """The durable copies of one allocator, on media in the order in which they are tried."""

    def __init__(self, book: Book, media: Mapping[str, Medium]) -> None:
        self.book, self.ledger, self.media = book, book.ledger, media
        self.lane = self.ledger.lanes[0]
        self.objects: OrderedDict[StoredObject, None] = OrderedDict()  # the least recently wanted first
        self.spare: dict[tuple[int, str, int], list[Any]] = {}
        self.of: dict[int, StoredObject] = {}  # by the identity of its record
        self.outcomes: dict[str, int] = {}
        (self.survivor,) = [s for s in self.ledger.tables.survivors if s.kind == self.ledger.store]
        self.out, self.back = (
            {
                group.index: self.ledger.kernel(self.ledger.event_id(group.kind, row))
                for group in book.geometry.groups
                if self.restores(group)
            }
            for row in ("spill_begin", "restore_begin")
        )  # the operations that move bytes, by group
        # Rows that change what a file says.  What the environment does to a medium nobody can write down there.
        self.rewriting = {
            event.id
            for event in self.ledger.tables.events
            if event.kinds == {"self": self.ledger.store}
            and event.actor != "environment"
            and any(e.target.role == "self" and e.target.name in self.survivor.keep for e in event.effects)
        }

    def restores(self, group: GroupGeometry) -> bool:
        """Whether a way back from a tier exists for a group: only then does a tier take it."""
        return self.ledger.has(group.kind, "spill_begin") and self.ledger.has(group.kind, "restore_begin")

    def shape(self, group: GroupGeometry, span: tuple[int, int]) -> tuple[int, int]:
        """(blocks of all layers, bytes of a block) of the part that holds these tokens of a group."""
        return group.layers * group.blocks(*span), group.page.nbytes

    def note(self, outcome: str) -> None:
        """Counts how spills and loads ended."""
        with self.ledger.lock:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            self.ledger.changed.notify_all()

    # -- rows ----------------------------------------------------------------------------------------------------------
    def event_of(self, row: str) -> str:
        """The event of an object's row."""
        return self.ledger.event_id(self.ledger.store, row)

    def fire(self, entity: Any, row: str, **inputs: int) -> None:
        """A row of one object; where it changes what survives a crash, the medium is told in the same step.

        MediumError, and the row has not fired, if it cannot be told.
        """
        event = self.event_of(row)
        with self.ledger.atomic(event):
            stored = self.of.get(id(entity)) if event in self.rewriting else None
            if stored is not None:
                group = stored.group
                _, after = self.ledger.rehearse(self.lane, [(event, (entity,))], **inputs)
                about = self.describe(after[id(entity)], group, stored.keys, stored.spans)
                self.media[stored.medium].redescribe(stored.name, about)
            self.ledger.fire(self.lane, event, entity, **inputs)

    def can(self, entity: Any, row: str, **inputs: int) -> bool:
        """Whether it could fire now."""
        return self.ledger.allows(self.lane, self.event_of(row), entity, **inputs)

    def rehearse(self, group: GroupGeometry, entity: Any, steps: Sequence[Step]) -> Any:
        """What an object's record would be after rows with segments of a group."""
        return self.ledger.rehearse(self.ledger.lane_of[group.name], steps)[1][id(entity)]

    def hand(
        self, group: GroupGeometry, row: str, src: Any, dst: Any, copy: Any, segment: CacheSegment, **inputs: int
    ) -> None:
        """A handoff between an object and a segment, in the lane of the segment's group."""
        lane = self.ledger.lane_of[group.name]
        event = self.ledger.event_id(group.kind, row)
        self.ledger.run(lane, event, (src, dst, copy), inputs, self.book.settle, segment)

    # -- records -------------------------------------------------------------------------------------------------------
    def new_object(self, group: GroupGeometry, medium: str, parts: int) -> Any:
        """A record of an object that does not exist yet."""
        with self.ledger.lock:
            spare = self.spare.setdefault((group.index, medium, parts), [])
            if spare:
                return spare.pop()
            return self.ledger.maker(
                self.lane, "segment", self.ledger.store, medium=medium, parts=parts, group=group.cache
            )()

    def rest(self, group: GroupGeometry, entity: Any) -> None:
        """An object's record may be used again."""
        with self.ledger.lock:
            self.spare.setdefault((group.index, entity.medium, entity.parts), []).append(entity)

    def stored(self, segment: CacheSegment) -> StoredObject | None:
        """The durable copy of what a segment holds, if there is one."""
        node = self.book.index.nodes.get(segment.key) if segment.key is not None else None
        return None if node is None else node.objects[segment.group.index]

    def adopt_object(self, stored: StoredObject) -> None:
        """An object is there from now on; called under the lock."""
        self.objects[stored] = None
        self.of[id(stored.entity)] = stored
        self.book.index.put_object(stored)

    def forget(self, stored: StoredObject) -> None:
        """An object is found no more; called under the lock."""
        self.objects.pop(stored, None)
        self.of.pop(id(stored.entity), None)
        self.book.index.drop_object(stored)
        for key in stored.keys:
            node = self.book.index.nodes.get(key)
            segment = None if node is None else node.segments[stored.group.index]
            if segment is not None and segment.stored is stored:
                self.book.keep(segment, None)

    # -- space ---------------------------------------------------------------------------------------------------------
    def erase_one(self, medium: str) -> bool:
        """Gives the space of the object back that was wanted least recently; False if none may go."""
        with self.ledger.lock:
            candidates = [o for o in self.objects if o.medium == medium]
        return any(self.erase(stored) for stored in candidates)

    def erase(self, stored: StoredObject) -> bool:
        """Deletes one object, unless it is wanted."""
        try:
            with self.ledger.atomic(self.ledger.event_id(self.ledger.store, "retire")):
                if stored not in self.objects:
                    return False
                self.fire(stored.entity, "retire")
                self.forget(stored)
        except Refused:
            return False
        self.media[stored.medium].delete(stored.name)
        self.fire(stored.entity, "erase")
        self.rest(stored.group, stored.entity)
        return True

    # -- a new process -------------------------------------------------------------------------------------------------
    def describe(
        self, entity: Any, group: GroupGeometry, keys: tuple[bytes, ...], spans: tuple[tuple[int, int], ...]
    ) -> Description:
        """What a new process must know of an object whose record is ``entity``: what the tables say survives.

        It is written before the row that it describes fires, so ``entity`` is what a rehearsal of that row gave.
        """
        kept = {name: getattr(entity, attribute(name)) for name in self.survivor.keep}
        about: dict[str, int | str | bool] = {f"kept.{name}": value for name, value in kept.items()}
        about |= {"group": group.name, "kind": group.kind, "parts": len(keys), "medium": entity.medium}
        about |= {"keys": ",".join(key.hex() for key in keys), "spans": ",".join(f"{a}:{b}" for a, b in spans)}
        return about

    def reopen(self, medium: str, group_of: Callable[[str], GroupGeometry]) -> int:
        """Finds what an earlier process sealed on a medium, the state that the tables' crash leaves; gives their count.

        Objects of another layout, model or schema are passed over.
        """
        described: list[tuple[StoredObject, Mapping[str, Any]]] = []
        for name, about in self.media[medium].objects():
            try:
                group = group_of(str(about["group"]))
                keys = tuple(bytes.fromhex(key) for key in str(about["keys"]).split(","))
                spans = tuple((int(a), int(b)) for a, b in (span.split(":") for span in str(about["spans"]).split(",")))
                kept = {name: about[f"kept.{name}"] for name in self.survivor.keep}
                fits = (
                    about["kind"] == group.kind
                    and about["medium"] == medium
                    and kept["abi"] == self.book.abi[group.index]
                )
            except (InputError, KeyError, ValueError):
                continue
            if not fits or len(keys) != len(spans) or about["parts"] != len(keys):
                continue
            entity = self.new_object(group, medium, len(keys))
            location = self.media[medium].location(name)
            described.append((StoredObject(group, entity, medium, name, location, keys, spans), kept))
        with self.ledger.lock:
            for stored, values in described:
                stored.entity.stage = self.survivor.stages[0]
                for variable, value in values.items():
                    setattr(stored.entity, attribute(variable), value)
                if self.lane.world.survive(stored.entity):
                    self.adopt_object(stored)
                else:
                    self.rest(stored.group, stored.entity)
            self.lane.world.recount_all()
            return sum(stored in self.objects for stored, _ in described)
