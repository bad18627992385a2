"""The engines that ``hybridkv conform`` drives: what their environment must hold, which models, by which drivers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter

    from hybridkv_ref.events import Event, Header
    from hybridkv_ref.oracle import Oracle
    from hybridkv_ref.oracle_records import Refusal


class Driver(Protocol):
    """Drives one engine by chance, the oracle in lock step.

    ``trail``: the events so far. ``stats``: what happened how often; of these ``lookups``, ``hit_tokens``,
    ``best_tokens`` (of the longest hits), ``longer`` and ``shorter`` (lookups) are reported. ``lost``: tokens by the
    groups that cost them. ``missing``: what this release cannot show.
    """

    header: "Header"
    oracle: "Oracle"
    trail: "list[Event]"
    refusals: "list[Refusal]"
    stats: "Counter[str]"
    lost: "Counter[str]"
    missing: dict[str, list[str]]

    def step(self) -> None:
        """One step of the engine, and what comes and goes beside it."""

    def end(self) -> None:
        """Ends all that runs."""


@dataclass(frozen=True)
class EngineKind:
    """``package`` is what the environment must hold; ``drivers`` take a model's name and a seed; by a name of theirs.

    ``check``: InputError for a model's name that none of them can drive. ``variables``: of the process.
    """

    package: str
    models: tuple[str, ...]
    check: Callable[[str], object]
    drivers: Mapping[str, Callable[[str, int], Driver]]
    variables: Mapping[str, str]


def _vllm() -> EngineKind:
    from hybridkv_ref.adapters import vllm_driver, vllm_scheduler

    return EngineKind(
        package="vllm",
        models=tuple(vllm_driver.MODELS),
        check=vllm_driver.geometry,
        drivers={
            "manager": vllm_driver.Driver,
            "manager, two steps in flight": partial(vllm_driver.Driver, depth=2),
            "scheduler": vllm_scheduler.SchedulerDriver,
            "asynchronous scheduler": partial(vllm_scheduler.SchedulerDriver, asynchronous=True),
        },
        variables={"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
    )


def _sglang() -> EngineKind:
    from hybridkv_ref.adapters import sglang_driver, sglang_scheduler, sglang_workload

    return EngineKind(
        package="sglang",
        models=sglang_workload.MODELS,
        check=sglang_workload.geometry,
        drivers={"cache": sglang_driver.Driver, "scheduler": sglang_scheduler.SchedulerDriver},
        variables={"HF_HUB_OFFLINE": "1"},
    )


ENGINES: Mapping[str, Callable[[], EngineKind]] = {"vllm": _vllm, "sglang": _sglang}
"""By name. Made when asked for, so that the command line can name them without their drivers."""
