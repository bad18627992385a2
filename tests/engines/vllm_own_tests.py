"""vLLM's own manager tests with the oracle attached to each KVCacheManager that they construct.

    python tests/engines/vllm_own_tests.py SOURCES [--markdown FILE]

SOURCES is the unpacked source distribution, whose tests are not part of the wheel. Runs in the engine's environment:
its tests once as they are and once watched, each in a process of its own, in turns. This file is also the plugin of the
watched run. A test that goes below the manager, to its pool, does what no event tells, so its manager is watched until
then. A manager without events gets them, and its test still sees none.
"""

import argparse
import functools
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager

from hybridkv_ref import Oracle, native
from hybridkv_ref.adapters.vllm import CLAIMS, Attached
from hybridkv_ref.adapters.vllm_features import call_names
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Engine, Event, GroupSpec, Header

REPORT, BARE = "HYBRIDKV_OWN_TESTS", "HYBRIDKV_OWN_TESTS_BARE"
"""Variables: the report that the plugin writes, and whether it only counts."""

FILES = ("test_prefix_caching.py", "test_single_type_kv_cache_manager.py", "test_kv_cache_utils.py",
         "test_swa_inflight_window_free.py", "test_mamba_align_chunk_split.py",
         "prefix_cache/test_partial_prefix_cache_primitives.py")  # fmt: skip
"""Of tests/v1/core: those that construct managers. Some of their tests ask the hub for a model, and fail without it."""

BELOW = ("get_new_blocks", "touch", "free_blocks", "evict_blocks", "cache_full_blocks", "cache_partial_block",
         "reset_prefix_cache")  # fmt: skip
"""Calls of the pool that change it."""


class Unwatched(Exception):
    """Why a manager cannot be watched."""


def header_of(config: Any, unit: int) -> Header:
    """The header for the engine's own configuration; Unwatched for a group that the events do not know."""
    groups = []
    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        name, size = f"group{number}", spec.block_size
        match type(spec).__name__:
            case "FullAttentionSpec" | "MLAAttentionSpec" if not getattr(spec, "sliding_window", None):
                groups.append(GroupSpec(name, "compressed_kv", size, getattr(spec, "tokens_per_state", 1)))
            case "SlidingWindowSpec" | "SlidingWindowMLASpec":
                groups.append(GroupSpec(name, "swa_window", size, window=spec.sliding_window))
            case "MambaSpec":
                groups.append(GroupSpec(name, "recurrent_state", size))
            case other:
                raise Unwatched(f"{other}: no event tells of such a group")
    return Header("hybridkv.events/1", Engine("vllm"), unit=unit, groups=tuple(groups), capabilities=CLAIMS)


@dataclass
class Watched:
    """One manager: what was told of it and refused, and why no more is told."""

    test: str
    events: int = 0
    refused: list[str] = field(default_factory=list)
    ended: str = ""


class Session:
    """What one run of pytest saw."""

    def __init__(self) -> None:
        self.test = ""
        self.managers: list[Watched] = []
        self.outcomes: dict[str, str] = {}
        self.inside = 0
        self.seconds = 0.0

    def attach(self, manager: Any, asked: bool, unit: int, ranks: int) -> None:
        """Watches a manager from its first call on."""
        seen = Watched(self.test)
        self.managers.append(seen)
        try:
            header = header_of(manager.kv_cache_config, unit)
            oracle = Oracle(header)
            if not manager.enable_caching:
                raise Unwatched("caching is off: nothing enters the index")
            if ranks > 1:
                raise Unwatched("context parallel ranks share a block: the events know blocks of one rank")
            if getattr(manager.coordinator, "enable_partial_hash_hits", False):
                raise Unwatched("hits inside a block: the events know whole blocks")
        except (Unwatched, InputError) as reason:
            seen.ended = str(reason)
            return

        def hear(event: Event) -> None:
            if not seen.ended:
                seen.events += 1
                try:
                    found = oracle.feed(event).refusals
                except InputError as error:
                    seen.refused.append(str(error))
                    seen.ended = "refused"
                    return
                seen.refused += [f"{r} ({', '.join(r.rules)})" for r in found]
                if found:
                    seen.ended = "refused"

        Attached(manager, header, hear)
        manager.block_pool.hybridkv = seen
        for name in [n for n in call_names() if n in vars(manager)]:
            hidden = name == "take_events" and not asked
            setattr(manager, name, self.counted(seen, getattr(manager, name), hidden))

    def counted(self, seen: Watched, call: Callable[..., Any], hidden: bool) -> Callable[..., Any]:
        """A call of the manager: what it does to its pool is its own business."""
        signature = inspect.signature(KVCacheManager.allocate_slots)

        def made(*args: Any, **kwargs: Any) -> Any:
            if call.__name__ == "_allocate_slots" and not seen.ended:
                hits = signature.bind(None, *args, **kwargs).arguments.get("new_computed_blocks")
                if any(b.block_hash is None and not b.is_null for g in (hits.blocks if hits else ()) for b in g):
                    seen.ended = "the test makes up a hit: its blocks are in no index"
            self.inside += 1
            try:
                result = call(*args, **kwargs)
            finally:
                self.inside -= 1
            return [] if hidden else result

        return made

    def guard(self, name: str) -> None:
        """A pool's call, which ends the watch when a test makes it."""
        old = getattr(BlockPool, name)

        @functools.wraps(old)
        def made(pool: Any, *args: Any, **kwargs: Any) -> Any:
            seen = getattr(pool, "hybridkv", None)
            if seen is not None and not self.inside and not seen.ended:
                seen.ended = f"the test calls {name} below the manager"
            return old(pool, *args, **kwargs)

        setattr(BlockPool, name, made)

    def install(self) -> None:
        """Watches every manager that is made from now on."""
        old = KVCacheManager.__init__
        signature = inspect.signature(old)

        @functools.wraps(old)
        def made(manager: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(manager, *args, **kwargs)
            given.apply_defaults()
            asked, given.arguments["enable_kv_cache_events"] = given.arguments["enable_kv_cache_events"], True
            old(*given.args, **given.kwargs)
            sizes = [g.kv_cache_spec.block_size for g in manager.kv_cache_config.kv_cache_groups]
            ranks = given.arguments.get("dcp_world_size", 1)
            self.attach(manager, asked, gcd(given.arguments["hash_block_size"], *sizes), ranks)

        KVCacheManager.__init__ = made
        for name in [n for n in BELOW if hasattr(BlockPool, n)]:
            self.guard(name)

    # -- pytest ----------------------------------------------------------------------------------------------------

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
            self.seconds += report.duration

    def pytest_sessionfinish(self) -> None:
        told = {"outcomes": self.outcomes, "managers": [vars(m) for m in self.managers],
                "seconds": self.seconds}  # fmt: skip
        Path(os.environ[REPORT]).write_bytes(msgspec.json.encode(told))


def pytest_configure(config: pytest.Config) -> None:
    session = Session()
    if BARE not in os.environ:
        session.install()
    config.pluginmanager.register(session, "hybridkv-own-tests")


def run(sources: Path, bare: bool) -> dict[str, Any]:
    """One run of the engine's tests: its tests alone on the path, not its sources."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(sources.resolve() / "tests")
        env = dict(os.environ, **{REPORT: str(Path(folder) / "report.json")}, **({BARE: "1"} if bare else {}))
        env["PYTHONPATH"] = os.pathsep.join([folder, str(Path(__file__).parent), env["PYTHONPATH"]])
        files = [f"tests/v1/core/{name}" for name in FILES]
        quiet = ("-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", folder, "-W", "ignore")
        command = [sys.executable, "-m", "pytest", "-p", "vllm_own_tests", *quiet, *files]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        report = Path(env[REPORT])
        if not report.exists():
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        found: dict[str, Any] = json.loads(report.read_bytes())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    rounds = [(run(args.sources, bare=True), run(args.sources, bare=False)) for _ in range(args.rounds)]
    bare, seen = rounds[-1]
    managers = seen["managers"]
    told = {
        "passed": sum(v == "passed" for v in seen["outcomes"].values()),
        "passed_bare": sum(v == "passed" for v in bare["outcomes"].values()),
        "changed": [name for name in bare["outcomes"] if bare["outcomes"][name] != seen["outcomes"].get(name)],
        "failed_in_both": sum(v != "passed" for v in bare["outcomes"].values()),
        "managers": len(managers),
        "watched": sum(m["events"] > 0 for m in managers),
        "ended": Counter(m["ended"] or "watched to the end" for m in managers),
        "events": sum(m["events"] for m in managers),
        "refused": [[m["test"].split("::")[-1], m["refused"][0]] for m in managers if m["refused"]],
        "seconds_bare": round(statistics.median(r[0]["seconds"] for r in rounds), 2),
        "seconds": round(statistics.median(r[1]["seconds"] for r in rounds), 2),
    }
    print(json.dumps(told))
    if args.markdown:
        args.markdown.write_text("\n".join(markdown(told, args.rounds)) + "\n")


def markdown(told: dict[str, Any], rounds: int) -> list[str]:
    import vllm

    passing = f"{told['passed_bare']} tests pass as they are, {told['passed']} watched"
    cost = f"{told['seconds_bare']} s in the tests as they are, {told['seconds']} s watched and judged"
    return [
        f"# vLLM {vllm.__version__}: its own manager tests with the oracle attached", "",
        f"Written by `tests/engines/vllm_own_tests.py`. Files: {', '.join(FILES)}.", "",
        f"* {passing}; outcomes that differ: {len(told['changed'])}.",
        f"* {told['failed_in_both']} more ask the hub for a model and fail in both, without a network.",
        f"* {told['managers']} managers, {told['watched']} of which something was told; {told['events']:,} events.",
        f"* Cost: {cost} (median of {rounds}; each manager has an oracle of its own, {native.made()}).", "",
        "| managers | watched |", "|---|---|",
        *(f"| {count} | {why} |" for why, count in told["ended"].most_common()), "",
        f"Refused: {len(told['refused'])}.", "",
        *(f"* `{test}`: {refusal}" for test, refusal in told["refused"]),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
