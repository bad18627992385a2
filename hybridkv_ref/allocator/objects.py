"""Durable copies as records of the tables: their rows, their space, and what a new process finds of them.

A record is used again after its object is gone, so whoever acts on an object that it found earlier asks first, in the
same atomic step, whether it is still there.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.media import Description, Medium
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
        self.outcomes: dict[str, int] = {}
        (self.survivor,) = [s for s in self.ledger.tables.survivors if s.kind == self.ledger.store]

    def restores(self, group: GroupGeometry) -> bool:
        """Whether a way back from a tier exists for a group: only then does a tier take it."""
        return self.ledger.has(group.kind, "spill_begin") and self.ledger.has(group.kind, "restore_begin")

    def note(self, outcome: str) -> None:
        """Counts how spills and loads ended."""
        with self.ledger.lock:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            self.ledger.changed.notify_all()

    # -- rows ----------------------------------------------------------------------------------------------------------
    def fire(self, entity: Any, row: str, **inputs: int) -> None:
        """A row of one object."""
        self.ledger.fire(self.lane, self.ledger.event_id(self.ledger.store, row), entity, settle=None, **inputs)

    def can(self, entity: Any, row: str, **inputs: int) -> bool:
        """Whether it could fire now."""
        return self.ledger.allows(self.lane, self.ledger.event_id(self.ledger.store, row), entity, **inputs)

    def hand(
        self, group: GroupGeometry, row: str, src: Any, dst: Any, copy: Any, segment: CacheSegment, **inputs: int
    ) -> None:
        """A handoff between an object and a segment, in the lane of the segment's group."""
        lane = self.ledger.lane_of[group.name]
        event = self.ledger.event_id(group.kind, row)
        self.ledger.fire(lane, event, src, dst, copy, settle=lambda: self.book.settle(segment), **inputs)

    # -- records -------------------------------------------------------------------------------------------------------
    def new_object(self, group: GroupGeometry, medium: str, parts: int) -> Any:
        """A record of an object that does not exist yet."""
        with self.ledger.lock:
            spare = self.spare.setdefault((group.index, medium, parts), [])
            if spare:
                return spare.pop()
            return self.ledger.maker(
                self.lane, "segment", self.ledger.store, medium=medium, parts=parts, group=group.index
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
        self.book.index.put_object(stored)

    def forget(self, stored: StoredObject) -> None:
        """An object is found no more; called under the lock."""
        self.objects.pop(stored, None)
        self.book.index.drop_object(stored)
        for key in stored.keys:
            node = self.book.index.nodes.get(key)
            segment = None if node is None else node.segments[stored.group.index]
            if segment is not None and segment.stored is stored:
                segment.stored = None

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
        self, entity: Any, group: GroupGeometry, keys: tuple[bytes, ...], spans: tuple[tuple[int, int], ...], parts: int
    ) -> Description:
        """What a new process must know of an object: what the tables say survives, as it will be once sealed."""
        kept = {name: getattr(entity, attribute(name)) for name in self.survivor.keep}
        kept |= {"written": parts, "intact": True}
        about: dict[str, int | str | bool] = {f"kept.{name}": value for name, value in kept.items()}
        about |= {"group": group.name, "kind": group.kind, "parts": parts, "medium": entity.medium}
        about |= {"keys": ",".join(key.hex() for key in keys), "spans": ",".join(f"{a}:{b}" for a, b in spans)}
        return about

    def reopen(self, medium: str, group_of: Callable[[str], GroupGeometry]) -> int:
        """Finds what an earlier process sealed on a medium: the state that the tables' crash leaves.  Gives their
        count.

        Objects of another layout, model or schema are passed over.
        """
        found = 0
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
            with self.ledger.lock:
                entity = self.new_object(group, medium, len(keys))
                entity.stage = self.survivor.to
                for variable, value in kept.items():
                    setattr(entity, attribute(variable), value)
                guards = self.lane.world.machine.survivors[self.ledger.store][0][1]
                if all(guard(self.ledger.pool, entity) for guard in guards):
                    location = self.media[medium].location(name)
                    self.adopt_object(StoredObject(group, entity, medium, name, location, keys, spans))
                    found += 1
            self.recount()
        return found

    def recount(self) -> None:
        """The sums of the pool over what survived."""
        world = self.lane.world
        for name, var in self.ledger.tables.globals.items():
            if not var.durable and var.sums:
                setattr(world.pool, attribute(name), world.recount(var))
