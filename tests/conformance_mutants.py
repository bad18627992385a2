"""Planted faults in the reference allocator and its engine, and the table of what finds each.

``python tests/conformance_mutants.py`` writes ``tests/data/conformance_mutants.md``: fault, rule, histories needed,
seconds, for each of the adapter's parameters.
"""

from collections.abc import Iterator
from pathlib import Path

from conformance_faults import (
    all_limits,
    appends_twice,
    changes_plan,
    commits_early,
    first_group_decides,
    forgets_group,
    forgets_leases,
    forgets_match,
    frees_moving,
    grants_anything,
    ignores_failed_write,
    ignores_failure,
    keeps_entries,
    keys_of,
    lets_go_at_once,
    lets_go_early,
    loses_ends,
    mistakes_keys,
    no_limits,
    no_salt,
    off_by_one,
    one_unit_before,
    pins_too_late,
    publishes_first,
    publishes_while_loading,
    remembers_hits,
    replaces_entries,
    shorter,
    takes_used_records,
    takes_whole_prompt,
    unit_only,
)
from conformance_planting import PARAMETERS, Mutant, every, hunt, saying, swap, without, without_effect

from hybridkv_ref.allocator import writer
from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.hits import Hits
from hybridkv_ref.allocator.index import PrefixIndex
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.conformance import gate
from hybridkv_ref.conformance.reference import ReferenceEngine
from hybridkv_ref.events import Complete, Finish, Free, KeyRemove

REPORT = Path(__file__).with_name("data") / "conformance_mutants.md"

MUTANTS: dict[str, Mutant] = {
    **{
        f"a hit forgets the group {name}": forgets_group(name)
        for name in ("window", "csa", "hca", "index", "tail", "state")
    },
    "the window of the unit before is used": Mutant("HKV-SWA-001", one_unit_before("window"), lambda: without("join")),
    "the tail of another position is used": Mutant(
        "HKV-TAIL-001", one_unit_before("tail"), lambda: without("join pin pass_l1")
    ),
    "the state of another position is used": Mutant("HKV-REC-001", one_unit_before("state"), lambda: without("join")),
    "one group decides for all": Mutant(
        "HKV-L3-001", swap(Hits, "look", first_group_decides), lambda: without("join pin"), quiet=True
    ),
    "a shorter hit than there is": Mutant("HKV-L3-002", changes_plan(shorter)),
    "a short hit names no group": Mutant("HKV-MISS-001", changes_plan(no_limits)),
    "a hit names every group as its limit": Mutant("HKV-MISS-001", changes_plan(all_limits)),
    "the match is forgotten": Mutant("HKV-MISS-002", swap(Hits, "look", forgets_match)),
    "the whole prompt is reused": Mutant(
        "HKV-L1-006", swap(Hits, "look", takes_whole_prompt), lambda: without("match", "req.length")
    ),
    "hits are remembered by prompt": Mutant(
        "HKV-L3-001", swap(Hits, "look", remembers_hits), lambda: without("find pin join pass_l1"), quiet=True
    ),
    "the hit is let go when reading begins": Mutant(
        "HKV-L3-001", swap(Hits, "read", lets_go_at_once), lambda: without("release", "req.stage")
    ),
    "evicted between match and pin": Mutant(
        "HKV-S3-011",
        swap(Hits, "pin", pins_too_late),
        lambda: without("pin join pass_l1 pass_l2 pass_l4 read"),
        quiet=True,
    ),
    "keys leave out the salt": Mutant("HKV-KEY-002", keys_of(no_salt), quiet=True),
    "a key stands for its own unit only": Mutant(
        "HKV-KEY-001",
        every(keys_of(unit_only), changes_plan(no_limits)),
        lambda: without("find pin join pass_l1"),
        quiet=True,
    ),
    "keys are a byte long": Mutant(
        "HKV-KEY-001",
        # The salt stays whole: what collides are tokens.
        every(keys_of(lambda keys, salt, about: [bytes([k[0] % 4]) + salt for k in keys]), changes_plan(no_limits)),
        quiet=True,
    ),
    "entries stay when memory goes": Mutant("HKV-ACC-001", swap(PrefixIndex, "drop", keeps_entries)),
    "a newer equal segment takes the entry over": Mutant("HKV-ACC-001", swap(PrefixIndex, "put", replaces_entries)),
    "a segment is published without its last token": Mutant("HKV-L1-003", swap(writer.Writer, "append", commits_early)),
    "everything written is let go at once": Mutant("HKV-SWA-003", lets_go_early(0)),
    "the window slides a unit too far": Mutant("HKV-SWA-003", lets_go_early(1)),
    "a record is handed out twice": Mutant(
        "HKV-ALIAS-001",
        every(swap(Book, "settle", takes_used_records), swap(Book, "grant", grants_anything)),
        lambda: without("admit", "stage"),
    ),
    "tokens are written twice": Mutant(
        "HKV-S3-003", swap(Book, "fire_lease", appends_twice), lambda: without("append", "at == end")
    ),
    "the release of a read segment is skipped": Mutant(
        "HKV-REF-005", forgets_leases("hits"), lambda: without("close retry"), quiet=True
    ),
    "the release of a written segment is skipped": Mutant(
        "HKV-REF-005", forgets_leases("kept"), lambda: without("close")
    ),
    "what was half written stays": Mutant("HKV-REF-005", forgets_leases("writing"), lambda: without("close")),
    "held segments are evicted": Mutant("HKV-S3-004", tables=lambda: without("free", "pins == 0")),
    "segments are evicted under a running step": Mutant("HKV-S3-016", tables=lambda: without("free", "steps == 0")),
    "the source of a copy is evicted": Mutant("HKV-S3-009", tables=lambda: without("retire", "holds == 0")),
    "memory is given back and stays charged": Mutant("HKV-ACC-001", tables=lambda: without_effect("free", "used")),
    "what was half written stays charged": Mutant("HKV-ACC-001", tables=lambda: without_effect("abort", "used")),
    "memory is taken and not charged": Mutant("HKV-ACC-001", tables=lambda: without_effect("admit", "used")),
    "free on abort during a load": Mutant("HKV-ALIAS-001", swap(ReferenceEngine, "abort", frees_moving)),
    "a load can be found before it has arrived": Mutant("HKV-S3-011", swap(Tiers, "attach", publishes_while_loading)),
    "a load is kept under another key": Mutant("HKV-MISS-001", swap(Tiers, "attach", mistakes_keys)),
    "a failed read counts as data": Mutant("HKV-ERR-002", swap(gate.GatedMemory, "read", ignores_failure)),
    "a failed write counts as a copy": Mutant("HKV-ERR-002", swap(gate.GatedMemory, "write", ignores_failed_write)),
    "a load never ends": Mutant("HKV-LIVE-003", swap(Tiers, "carry_out", loses_ends)),
    "the completion of a step is lost": Mutant(
        "HKV-S3-016", saying(lambda e: [] if isinstance(e, Complete) and e.step[0] == "r" else [e])
    ),
    "a request ends twice": Mutant("HKV-REF-005", saying(lambda e: [e, e] if isinstance(e, Finish) else [e])),
    "a removal is announced twice": Mutant(
        "HKV-OBS-001", saying(lambda e: [e, e] if isinstance(e, KeyRemove) else [e])
    ),
    "the null block is published": Mutant("HKV-S4-007", swap(ReferenceEngine, "copy_number", off_by_one)),
    "a free is announced twice": Mutant("HKV-REF-005", saying(lambda e: [e, e] if isinstance(e, Free) else [e])),
    "entries come before their data": Mutant(
        "HKV-S3-011",
        saying(publishes_first),
    ),
}


def table() -> Iterator[str]:
    """The report, line by line, as Markdown."""
    yield "# Faults planted in the reference allocator, and what finds them\n"
    yield "Written by `python tests/conformance_mutants.py`: the quick profile, derandomised, up to the first refusal."
    shown = "; ".join(f"{n}: {', '.join(f'{k}={v}' for k, v in p.items())}" for n, p in PARAMETERS.items())
    yield f"Per parameter of the adapter ({shown}): histories and seconds until then.\n"
    yield f"| fault | rules of the first refusal | {' | '.join(PARAMETERS)} |"
    yield "|---|---|" + "---|" * len(PARAMETERS)
    for name, mutant in MUTANTS.items():
        cells, named = [], "-"
        for parameters in PARAMETERS.values():
            found = hunt(mutant, parameters)
            if found is None or mutant.rule not in found.rules:
                cells.append("not found")
                continue
            cells.append(f"{found.examples}, {found.seconds:.1f} s")
            if named == "-":
                named = ", ".join(found.rules)
        yield f"| {name} | {named} | {' | '.join(cells)} |"


if __name__ == "__main__":
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    REPORT.write_text("\n".join(lines) + "\n")
