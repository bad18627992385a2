"""Safeguard 2: each actor of the tables has workers of its own, so that none waits for another's.

Rows name their actor: ``io`` moves bytes of tiers, ``cpu`` rebuilds indexes.  Rows of requests and of the allocator run
in the caller's thread, and so do kernels.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Shared(Future[R]):
    """What several may wait for; so none of them cancels it for the others."""

    def cancel(self) -> bool:
        """Never."""
        return False


class Pipelines:
    """Worker pools by actor."""

    def __init__(self, io: int, cpu: int) -> None:
        self.workers: dict[str, set[int]] = {}
        self.pools: dict[str, ThreadPoolExecutor] = {}
        for actor, size in {"io": io, "cpu": cpu}.items():
            self.open(actor, size)

    def open(self, actor: str, size: int) -> None:
        """Gives an actor so many workers."""
        mine = self.workers[actor] = set()
        self.pools[actor] = ThreadPoolExecutor(
            size, thread_name_prefix=f"hybridkv-{actor}", initializer=lambda: mine.add(threading.get_ident())
        )

    def inside(self, actor: str) -> bool:
        """Whether this thread is one of an actor's workers."""
        return threading.get_ident() in self.workers[actor]

    def submit(self, actor: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Runs work on an actor's pipeline."""
        return self.pools[actor].submit(work, *args, **kwargs)

    def close(self) -> None:
        """Waits for what runs and ends the workers."""
        for pool in self.pools.values():
            pool.shutdown(wait=True)
