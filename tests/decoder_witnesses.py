"""Every witness in one table: ``python tests/decoder_witnesses.py FILE`` runs them and writes it as Markdown."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import decoder_switches_abi
import decoder_switches_recovery
import decoder_switches_store
from decoder_switches import Outcome, Witness

WITNESSES: tuple[Witness, ...] = (
    *decoder_switches_recovery.WITNESSES,
    *decoder_switches_store.WITNESSES,
    *decoder_switches_abi.WITNESSES,
)


def table(found: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """Markdown: rule, IDs, history, hits and differences with and without the rule."""
    lines = [
        "# Every recovery rule of the decoder, switched off",
        "",
        "Written by `python tests/decoder_witnesses.py FILE`; `tests/test_decoder_necessity.py` runs the same table.",
        "The difference is the largest of any logit from the run from scratch (float64, fixed order, memory of zeros);",
        "with the rule it is exactly 0. Hits are tokens reused.",
        "",
        "| rule | IDs | history | hit with | hit without | without the rule |",
        "|---|---|---|---|---|---|",
    ]
    for one in WITNESSES:
        kept, lost = found[one.rule]
        what = f"refused: {lost.refused}" if lost.refused else f"logits differ by {lost.difference:.2g}"
        lines.append(f"| {one.rule} | {', '.join(one.ids)} | {one.history} | {kept.hit} | {lost.hit} | {what} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Runs every witness and writes the table."""
    found = {one.rule: (one.run(True), one.run(False)) for one in WITNESSES}
    Path(arguments[0]).write_text(table(found))
    return 0 if all(kept.harmless and not lost.harmless for kept, lost in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
