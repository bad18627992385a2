"""Says as JSON what the oracle of this process says of traces: run by ``test_native`` compiled and interpreted.

    python tests/native_verdicts.py TRACE ... [--spec DIR]

Of every fault and correction in ``tests/faults``, and of the traces named, whole and one by one: each refusal with its
rules, coverage and what is left alive. The first line names the file that the oracle's steps were imported from.
"""

import argparse
import json
from pathlib import Path

import msgspec
from test_faults import FAULTS

from hybridkv_ref import oracle_steps
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.trace_reader import read_trace


def say(place: str, header: Header, events: list[Event], spec: Path) -> None:
    try:
        oracle = Oracle(header, spec=spec)
        found = [(str(r), list(r.rules)) for r in oracle.judge(events)]
        single = Oracle(header, spec=spec)
        alone = [(str(r), list(r.rules)) for event in events for r in single.feed(event).refusals]
        left = [(msgspec.to_builtins(o.coverage()), o.snapshot()) for o in (oracle, single)]
    except InputError as error:
        print(json.dumps([place, str(error)]))
        return
    print(json.dumps([place, found, alone, left], sort_keys=True, default=int))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--spec", type=Path, default=SPEC_DIR)
    args = parser.parse_args()
    print(oracle_steps.__file__)
    for name in args.traces:
        header, events = read_trace(name)
        say(name, header, events, args.spec)
    for name, fault in FAULTS.items():
        for ending in (fault.bad, fault.good):
            say(name, *fault.trace(ending), args.spec)


if __name__ == "__main__":
    main()
