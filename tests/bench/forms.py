"""The three forms in which a real engine is timed, and what the rounds of them come to."""

import statistics
from collections.abc import Iterator

FORMS = ("bare", "watched", "judged")

Round = tuple[float, int, int]
"""Of one form: rate, events, rows fired."""


def compared(rounds: list[list[Round]], count: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Per form its name, the median rate, that of its ratios to the bare rate of the same round, and per one of
    ``count`` the events and rows.
    """
    for place, form in enumerate(FORMS):
        rate = statistics.median(r[place][0] for r in rounds)
        ratio = statistics.median(r[place][0] / r[0][0] for r in rounds)
        _, events, rows = rounds[0][place]
        yield form, f"{rate:.0f}", f"{ratio:.2f}", f"{events / count:.0f}", f"{rows / count:.0f}"
