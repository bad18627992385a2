"""The script behind spec/traces/serving.jsonl: one prefix, from its first prefill to a hit on what a crash left of it.

Run as a program, it writes the trace anew. The prompt has 9 tokens and entries pool 4 each, so the first hit is at 8;
the request that drafts writes on to 12, where every later hit is.
"""

from collections.abc import Iterable

from trace_script import CONSTANTS, ENTRIES, GROUP, KEYS, LIFE, STATE, STORE, TAIL, USES, WHOLE, WINDOW, Script

from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.row_traces import Crash, Header, Scalar, encode_rows

PATH = SPEC_DIR / "traces" / "serving.jsonl"
TITLE = "Serving one prefix: from its first prefill to a hit on what a crash left of it"
HEADER = Header("hybridkv.rows/1", TITLE, None, CONSTANTS)

AT_8 = ("c", "t", "w", "i", "s")
AT_12 = ("c", "c2", "t2", "w2", "i", "i2", "s3")


# ---- the prefix is written, hit and continued ------------------------------------------------------------------------


def fill(s: Script) -> None:
    """A cold request computes 8 tokens of every group; the tail is folded twice."""
    for name, kind in zip(AT_8, (ENTRIES, TAIL, WINDOW, KEYS, STATE), strict=True):
        s.segment(name, kind, group=GROUP[kind], **({"keys": True} if kind == KEYS else {}))
    s.request("a", length=9)
    s.ask("a", "start_cold")
    for name in AT_8:
        s.admit(name, "a", at=0, size=4 if name in "ts" else 8, known=8)
    s.lease("append", "t", "a", at=0, n=4)
    s.fold("t", "c")
    s.lease("dispatch", "c", "a", upto=4)
    s.lease("append", "t", "a", at=4, n=4)
    s.fold("t", "c")
    s.lease("dispatch", "c", "a", upto=8)
    s.leases("complete", ["c", "c"], "a")
    s.leases("append", ["w", "i"], "a", at=0, n=8)
    s.lease("append", "s", "a", at=0, n=4)
    s.lease("append", "s", "a", at=4, n=4)
    s.leases("commit", AT_8, "a")
    s.end("a", AT_8, "let_go")
    s.segments("slide", ["w"], n=4, size=4)


def first_hit(s: Script) -> None:
    """Two ranks agree on a joint hit; the request is preempted under a step, after which its entries are evicted."""
    s.request("b", length=9, need_until=50, ranks=2, **{f"ahead.{WINDOW}": 1}, **USES)
    s.add("rank", "b0", "b", index=0)
    s.add("rank", "b1", "b", index=1)
    s.hit("b", 8, AT_8, "match", "b0", "b1")
    s.lease("dispatch", "c", "b", upto=8)
    s.lease("dispatch", "c", "b", upto=8)
    s.lease("complete", "c", "b")
    s.ask("b", "preempt")
    s.leases("release", AT_8, "b")
    for rank in ("b0", "b1"):
        s.fire("rank.withdraw", "b", rank)
    s.segments("retire", ["c"])
    s.lease("complete", "c", "b")
    s.segments("free", ["c"])


def refill(s: Script) -> None:
    """Another request computes the entries again, from the start."""
    s.request("r", length=9)
    s.ask("r", "start_cold")
    s.segment("t3", TAIL, group=GROUP[TAIL])
    s.admit("c", "r", at=0, size=8, known=8)
    s.admit("t3", "r", at=0, size=4, known=8)
    for at in (0, 4):
        s.lease("append", "t3", "r", at=at, n=4)
        s.fold("t3", "c")
    s.lease("commit", "c", "r")
    s.lease("let_go", "c", "r")
    s.lease("cancel", "t3", "r")
    s.lease("abort", "t3", "r")
    s.ask("r", "finish", "close")


def draft(s: Script) -> None:
    """The request is back; it drafts across a fold, and all but one draft are refused."""
    s.hit("b", 8, AT_8, "resume", "b0", "b1")
    new = ("c2", "w2", "i2")
    for name, kind in (("c2", ENTRIES), ("t2", TAIL), ("w2", WINDOW), ("i2", KEYS), ("s2", STATE), ("s3", STATE)):
        s.segment(name, kind, group=GROUP[kind], **({"keys": True} if kind == KEYS else {}))
    for src, dst in (("t", "t2"), ("s", "s2")):
        s.copy("clone_begin", src, dst, size=4, off=0)
        s.copy("clone_end", src, dst)
        s.lease("reopen", dst, "b")
    for name in new:
        s.admit(name, "b", at=8, size=8, known=9)
    # The last token of the prompt, and a checkpoint of the state after it.
    for name in ("t2", "s2"):
        s.lease("append", name, "b", at=8, n=1)
        s.lease("accept_tokens", name, "b", to=9)
    s.leases("append", ("w2", "i2"), "b", at=8, n=1)
    s.copy("clone_begin", "s2", "s3", size=4, off=0)
    s.copy("clone_end", "s2", "s3")
    # Drafts: 3 complete an entry, 3 more are what the ring has room for.
    s.lease("append", "t2", "b", at=9, n=3)
    s.fold("t2", "c2")
    s.lease("append", "t2", "b", at=12, n=3)
    s.leases("append", ("w2", "i2", "s2"), "b", at=9, n=6)
    s.step(("c", "w", "i", "s"), "b", upto=8)
    s.lease("dispatch", "c2", "b", upto=12)
    s.leases("dispatch", ("w2", "i2", "s2"), "b", upto=15)
    s.leases("complete", ("c2", "w2", "i2", "s2"), "b")
    # One draft is confirmed.
    s.ask("b", "confirm", to=10)
    s.leases("accept_tokens", (*new, "t2", "s2"), "b", to=10)
    s.lease("reject_drafts", "t2", "b", to=12)
    s.pair("unfold", "t2", "c2")
    s.leases("reject_drafts", ("t2", "w2", "i2"), "b", to=10)
    # A state is never rewound: the checkpoint runs on.
    s.lease("cancel", "s2", "b")
    s.lease("abort", "s2", "b")
    s.lease("reopen", "s3", "b")
    s.lease("append", "s3", "b", at=9, n=1)
    s.lease("accept_tokens", "s3", "b", to=10)
    s.leases("append", ("t2", "w2", "i2", "s3"), "b", at=10, n=2)
    s.ask("b", "confirm", to=12)
    s.leases("accept_tokens", ("t2", "w2", "i2", "s3"), "b", to=12)
    s.fold("t2", "c2")
    s.lease("accept_tokens", "c2", "b", to=12)
    written = (*new, "t2", "s3")
    s.leases("commit", written, "b")
    s.leases("let_go", written, "b")
    s.ask("b", "finish")
    s.leases("release", AT_8, "b")
    for rank in ("b0", "b1"):
        s.fire("rank.withdraw", "b", rank)
    s.ask("b", "close")


def shorter(s: Script) -> None:
    """What else becomes of requests: shorter hits, none, a refusal at admission."""
    s.request("d", length=13, **USES)
    s.ask("d", "match", s=12, f=12, bound=12, matched=13)
    s.lease("find", "c", "d")
    s.lease("pin", "c", "d")
    for name in ("c2", "t2", "w2", "i", "s3"):
        s.lease("find", name, "d")
    s.ask("d", "shorten")
    s.leases("drop", ("c2", "t2", "w2", "i", "s3"), "d")
    s.lease("release", "c", "d")
    s.ask("d", "retry", s=8, f=8, bound=8)
    s.ask("d", "recompute")
    s.ask("d", "preempt", "resume_cold", "finish", "close")
    s.ask("d", "match", s=12, f=12, bound=12, matched=13)
    s.ask("d", "shorten", "give_up", "finish", "close")
    s.ask("d", "reject", "close")


# ---- spill, evict, restore -------------------------------------------------------------------------------------------

OBJECTS = {  # object: medium, size, range, boundary or position, sources in order
    "oc": ("DISK", 12, 0, 12, 0, ("c", "c2")),
    "ot": ("OBJECT", 4, 8, 12, 12, ("t2",)),
    "ow": ("DISK", 4, 8, 12, 0, ("w2",)),
    "oi": ("OBJECT", 12, 0, 12, 0, ("i", "i2")),
    "os": ("DISK", 4, 0, 12, 12, ("s3",)),
    "oh": ("HOST", 4, 4, 8, 0, ("w",)),
}
FIRST, SECOND = (8, 0, 8), (4, 8, 12)
PARTS = {"c": FIRST, "c2": SECOND, "t2": SECOND, "w2": SECOND, "i": FIRST, "i2": SECOND}
PARTS |= {"s3": (4, 0, 12), "w": (4, 4, 8)}
DURABLE = ("oc", "ot", "ow", "oi", "os")


def io_of(medium: str) -> dict[str, Scalar]:
    """The disk is read and written by direct I/O, aligned; host memory and object store as it comes."""
    missed = 0 if medium == "DISK" else 8
    return {"direct": medium == "DISK", "buffer": missed, "offset": missed, "length": missed}


def open_object(s: Script, name: str) -> None:
    medium, size, lo, hi, meta, _ = OBJECTS[name]
    about: dict[str, Scalar] = {"size": size, "lo": lo, "hi": hi, "meta": meta, **io_of(medium)}
    s.segments("open_object", [name], made_in=0, layout=0, until=LIFE, **about)


def spill(s: Script) -> None:
    """Each group gets a durable copy: the first write of each fails, the second one is sealed."""
    for name, (medium, _, _, _, _, sources) in OBJECTS.items():
        s.segment(name, STORE, medium=medium, parts=len(sources), group=GROUP[s.kinds[sources[0]]])
        open_object(s, name)
        s.copy("spill_begin", sources[0], name)
        s.copy("spill_fail", sources[0], name)
        s.segments("scrap", [name])
        open_object(s, name)
        for source in sources:
            s.copy("spill_begin", source, name)
        for source in sources:
            s.copy("spill_end", source, name)
        s.segments("seal", [name])
    s.segments("reschedule_object", ["oh"], until=60)


def evict(s: Script) -> None:
    """Marked under a reader, unmarked; marked under a step that is late; freed."""
    s.request("e", length=13, **USES)
    s.hit("e", 12, AT_12)
    s.segments("retire", AT_12)
    s.segments("unmark", AT_12)
    attended = [name for name in AT_12 if s.kinds[name] != TAIL]
    s.leases("dispatch", attended, "e", upto=8)
    s.end("e", AT_12)
    s.segments("retire", AT_12)
    s.leases("complete", attended, "e")
    s.segments("free", AT_12)
    s.evict(("t", "w", "s"))


def begin_load(s: Script, name: str) -> None:
    """A load of the object takes its turn and all its targets."""
    s.segments("load_begin", [name], need=OBJECTS[name][1], **io_of(OBJECTS[name][0]))
    for part in OBJECTS[name][5]:
        size, lo, hi = PARTS[part]
        s.copy("restore_begin", name, part, size=size, lo=lo, hi=hi, off=0)


def load(s: Script, name: str) -> None:
    """A load that succeeds."""
    begin_load(s, name)
    parts = OBJECTS[name][5]
    for part in parts:
        s.copy("restore_part", name, part)
    s.segments("verify", [name])
    for part in parts:
        s.copy("publish", name, part)
    s.segments("settle", [name])


def restore(s: Script) -> None:
    """Each load fails once: one part is missing, arrives late and does not count. Then each one succeeds."""
    s.segments("want", DURABLE, need_until=LIFE)
    for name in DURABLE:
        begin_load(s, name)
        first, *late = OBJECTS[name][5]
        s.copy("restore_part", name, first)
        s.segments("load_fail", [name])
        for part in late:
            s.copy("restore_part", name, part)
        for part in (first, *late):
            s.copy("discard", name, part)
        s.segments("settle_failed", [name])
    s.segments("want", DURABLE, need_until=LIFE)
    for name in DURABLE:
        load(s, name)
    # An object that rots is tried as often as is allowed, then given up.
    s.segments("want", ["oh"], need_until=60)
    s.segments("skip", ["oh"])
    s.segments("rot", ["oh"])
    for row in ("settle_failed", "give_up_object"):
        s.segments("want", ["oh"], need_until=60)
        begin_load(s, "oh")
        s.copy("restore_part", "oh", "w")
        s.segments("load_fail", ["oh"])
        s.copy("discard", "oh", "w")
        s.segments(row, ["oh"])


# ---- transfer, crash, and what is left -------------------------------------------------------------------------------


def reshape(s: Script) -> None:
    """Neighbours become one segment, so that a transfer has one part per group."""
    s.pair("join", "c", "c2")
    s.pair("join", "i", "i2")
    s.pair("split", "w2", "w", cut=10, size=2, off=0)
    s.pair("join", "w2", "w")
    for name in ("c", "i"):
        s.pair("split", name, f"{name}2", cut=8, size=4, off=0)
        s.pair("join", name, f"{name}2")


def transfer(s: Script) -> None:
    """To a decode peer: cancelled before anything arrived, aborted when the peer dies, delivered."""
    s.add("transfer", "x", parts=len(WHOLE))
    for name in WHOLE:
        s.segment(f"r{name}", s.kinds[name], group=GROUP[s.kinds[name]])

    def ships(row: str, names: Iterable[str], **inputs: Scalar) -> None:
        for name in names:
            s.ship(row, name, f"r{name}", "x", **inputs)

    def begin() -> None:
        s.fire("transfer.offer", "x")
        for name in WHOLE:
            s.ship("ship_begin", name, f"r{name}", "x", size=12 if name in "ci" else 4, off=0)

    begin()
    s.fire("transfer.transfer_fail", "x")
    ships("ship_stop", WHOLE)
    ships("ship_discard", WHOLE)
    s.fire("transfer.transfer_close", "x")
    begin()
    ships("ship_part", ("c", "t2", "w2"))
    s.fire("transfer.peer_dies", "x")
    s.fire("transfer.transfer_fail", "x")
    ships("ship_part", ("i",))  # late
    ships("ship_stop", ("s3",))
    ships("ship_discard", WHOLE)
    s.fire("transfer.transfer_close", "x")
    begin()
    ships("ship_part", WHOLE)
    s.fire("transfer.deliver", "x")
    ships("ship_publish", WHOLE)
    s.fire("transfer.transfer_close", "x")
    received = [f"r{name}" for name in WHOLE]
    s.request("g", length=13, **USES)
    s.hit("g", 12, received)
    s.step(received, "g", upto=12)
    s.end("g", received)


def graphs(s: Script) -> None:
    """Contents change in place; a moved base invalidates; a replay is in flight when the process dies."""
    s.add("graph", "h")
    s.fire("graph.capture", "h")
    s.fire("graph.set_contents", "h", padded=False)
    s.fire("graph.set_contents", "h", padded=True)
    s.fire("graph.replay", "h")
    s.fire("graph.replayed", "h")
    s.fire("system.rebase")
    s.fire("graph.invalidate", "h")
    s.fire("graph.recapture", "h")
    s.fire("graph.replay", "h")


def crash(s: Script) -> None:
    """The process dies in the middle of everything."""
    s.request("k", length=13, ranks=1, **USES)
    s.add("rank", "k0", "k", index=0)
    s.hit("k", 12, WHOLE, "match", "k0")
    s.leases("dispatch", ("c", "i"), "k", upto=12)
    s.segment("c4", ENTRIES, group=GROUP[ENTRIES])
    s.segment("t4", TAIL, group=GROUP[TAIL])
    s.admit("c4", "k", at=12, size=4, known=13)
    s.admit("t4", "k", at=8, size=4, known=13, meta=12)
    s.lease("append", "t4", "k", at=8, n=8)
    s.copy("fold_begin", "t4", "c4")
    s.segments("want", ("oc", "ow"), need_until=LIFE)
    s.segments("load_begin", ["oc"], need=12, **io_of("DISK"))
    s.segment("c5", ENTRIES, group=GROUP[ENTRIES])
    s.copy("restore_begin", "oc", "c5", size=8, lo=0, hi=8, off=0)
    s.copy("restore_part", "oc", "c5")
    open_object(s, "oh")
    s.fire("transfer.offer", "x")
    s.evict(["rc"])
    s.ship("ship_begin", "c", "rc", "x", size=12, off=0)
    s.lines.append(Crash(True))


def recover(s: Script) -> None:
    """The sealed objects on disk and in the object store are found again and serve the same joint hit."""
    s.segments("want", DURABLE, need_until=LIFE)
    for name in DURABLE:
        load(s, name)
    s.request("n", length=13, need_until=LIFE, **USES)
    s.hit("n", 12, AT_12)
    s.step(("c", "i", "s3"), "n", upto=8)
    s.step(("c2", "w2", "i2", "s3"), "n", upto=12)
    s.end("n", AT_12)


# ---- the rest of the tables ------------------------------------------------------------------------------------------


def housekeeping(s: Script) -> None:
    """Moves, schedules, realignment, copies that fail, writers that give up."""
    s.segments("move", WHOLE, off=16)
    s.segments("move", WHOLE, off=0)
    s.segments("reschedule", WHOLE, until=2 * LIFE)
    s.segments("skew", ["w2"], phase=2)
    s.segments("realign_begin", ["w2"])
    s.segments("realign_end", ["w2"])
    s.copy("clone_begin", "t2", "t", size=4, off=0)
    s.copy("clone_fail", "t2", "t")
    s.copy("clone_begin", "s3", "s", size=4, off=0)
    s.copy("clone_fail", "s3", "s")
    s.request("p", length=1)
    s.ask("p", "start_cold")
    s.segment("w3", WINDOW, group=GROUP[WINDOW])
    s.segment("ti", TAIL, group=GROUP[KEYS])
    s.segment("i3", KEYS, group=GROUP[KEYS])
    s.segment("c3", ENTRIES, group=GROUP[ENTRIES])
    writers = ("c3", "t3", "w3", "s2")
    for name in (*writers, "ti", "i3"):
        s.admit(name, "p", at=0, size=4, known=0)
    s.leases("append", ("t3", "ti"), "p", at=0, n=4)
    s.lease("append", "w3", "p", at=0, n=2)
    s.copy("fold_begin", "ti", "i3")
    s.copy("fold_fail", "ti", "i3")
    s.fold("ti", "i3")
    s.pair("unfold", "ti", "i3")
    s.lease("reject_drafts", "ti", "p", to=2)
    s.copy("fold_begin", "t3", "c3")
    s.leases("cancel", (*writers, "ti", "i3"), "p")
    s.copy("fold_fail", "t3", "c3")
    s.leases("abort", (*writers, "ti", "i3"), "p")
    # Entries of one token each are appended and refused as rows are.
    s.admit("c3", "p", at=0, size=4, known=1)
    s.lease("append", "c3", "p", at=0, n=3)
    s.lease("reject_drafts", "c3", "p", to=1)
    s.leases("cancel", ["c3"], "p")
    s.leases("abort", ["c3"], "p")
    s.ask("p", "finish", "close")
    s.fire("graph.capture", "h")
    s.fire("graph.discard_graph", "h")


def bounded(s: Script) -> None:
    """A lost window is replayed; what is computed from then on is approximate, and read only by who asked for that."""
    for name in ("u", "y"):
        s.request(name, length=9, bounded=True, **{f"uses.{WINDOW}": True})
    s.ask("u", "start_cold", "replay_window")
    s.admit("w3", "u", at=4, size=4, known=9)
    s.lease("append", "w3", "u", at=4, n=4)
    s.lease("commit", "w3", "u")
    s.end("u", ["w3"], "let_go")
    s.hit("y", 8, ["w3"])
    s.step(["w3"], "y", upto=8)
    s.end("y", ["w3"])
    s.evict(["w3"])


def changes(s: Script) -> None:
    """A new index version and a new model: what was matched before goes on, what comes later looks elsewhere."""
    s.request("o", length=13, **USES)
    s.hit("o", 12, AT_12)
    s.fire("system.new_index")
    s.step(["i"], "o", upto=8)
    s.end("o", AT_12)
    s.segments("outdate", ["i"])
    s.segments("rebuild_begin", ["i"])
    s.segments("rebuild_fail", ["i"])
    s.segments("rebuild_begin", ["i"])
    s.segments("rebuild_end", ["i"])
    s.fire("system.new_model")
    s.request("v", length=13, **USES)
    s.pin("v", 12, ["c", "i"])
    s.ask("v", "check", "recompute")
    s.end("v", ["c", "i"])


def drain(s: Script) -> None:
    """Everything that is cached or stored goes."""
    s.evict(AT_12)
    for name in DURABLE:
        s.segments("retire", [name])
        s.segments("erase", [name])


CHAPTERS = (
    *(fill, first_hit, refill, draft, shorter, spill, evict, restore, reshape, transfer, graphs, crash),
    *(recover, housekeeping, bounded, changes, drain),
)


def serving() -> bytes:
    """The whole trace."""
    script = Script()
    for chapter in CHAPTERS:
        chapter(script)
    return encode_rows(HEADER, script.lines)


if __name__ == "__main__":
    PATH.write_bytes(serving())
