"""Safeguard 2: each actor of the tables has workers of its own, so that none waits for another's.

Rows name their actor: ``io`` moves bytes of tiers, ``cpu`` rebuilds indexes, ``gpu`` runs kernels in its own stream.
Rows of requests and of the allocator run in the caller's thread.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Pipelines:
    """Worker pools by actor."""

    def __init__(self, device: torch.device, io: int, cpu: int) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        sizes = {"io": io, "cpu": cpu, "gpu": 1}
        self.pools = {
            name: ThreadPoolExecutor(size, thread_name_prefix=f"hybridkv-{name}") for name, size in sizes.items()
        }

    def submit(self, actor: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Runs work on an actor's pipeline."""
        if actor == "gpu" and self.stream is not None:
            return self.pools[actor].submit(lambda: self.on_stream(work, *args, **kwargs))
        return self.pools[actor].submit(work, *args, **kwargs)

    def on_stream(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """On the device's own stream, and waited for."""
        with torch.cuda.stream(self.stream):
            done = work(*args, **kwargs)
        if self.stream is not None:
            self.stream.synchronize()
        return done

    def close(self) -> None:
        """Waits for what runs and ends the workers."""
        for pool in self.pools.values():
            pool.shutdown(wait=True)
