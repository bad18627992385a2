"""Made-up workloads: repeatable, in order, prefix-chained, and as reusable as their docstring says."""

from collections.abc import Iterable

import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.request_traces import Request
from hybridkv_ref.workloads import BLOCK_TOKENS, DEFAULT_WORKLOAD, MAX_INPUT_TOKENS, WORKLOADS, generate


def reuse(requests: Iterable[Request]) -> float:
    """Share of the input tokens that lie in blocks seen before."""
    seen: set[int] = set()
    old = total = 0
    for request in requests:
        old += sum(block in seen for block in request.block_ids) * request.block_tokens
        total += request.input_tokens
        seen.update(request.block_ids)
    return old / total


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_well_formed(name: str) -> None:
    requests = list(generate(name, 1000, seed=7))
    assert len(requests) == 1000
    assert [request.arrival_ms for request in requests] == sorted(request.arrival_ms for request in requests)
    for request in requests:
        assert 1 <= request.input_tokens <= MAX_INPUT_TOKENS
        assert request.output_tokens >= 1
        assert len(request.block_ids) == request.input_tokens // BLOCK_TOKENS
        assert request.block_tokens == BLOCK_TOKENS


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_are_prefix_chained(name: str) -> None:
    before: dict[int, int] = {}
    for request in generate(name, 1000, seed=3):
        for parent, block in zip((-1, *request.block_ids), request.block_ids, strict=False):
            assert before.setdefault(block, parent) == parent


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_seed_decides(name: str) -> None:
    assert list(generate(name, 200, seed=1)) == list(generate(name, 200, seed=1))
    assert list(generate(name, 200, seed=1)) == list(generate(name, 300, seed=1))[:200]
    assert list(generate(name, 200, seed=1)) != list(generate(name, 200, seed=2))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("conversation", 0.6, 0.9), ("agent", 0.93, 0.97), ("retrieval", 0.05, 0.1)]
)
@pytest.mark.parametrize("seed", range(3))
def test_reuse(name: str, low: float, high: float, seed: int) -> None:
    assert low < reuse(generate(name, 2000, seed)) < high


def test_mixed_holds_the_sessions_of_all_three() -> None:
    arrivals = {request.arrival_ms for request in generate("mixed", 2000)}
    for name in ("conversation", "agent", "retrieval"):
        alone = [request.arrival_ms for request in generate(name, 50)]
        assert arrivals.issuperset(alone)


def test_the_default_is_a_workload() -> None:
    assert list(generate()) == list(generate(DEFAULT_WORKLOAD, 1000, 0))


@pytest.mark.parametrize(
    ("name", "requests", "expected"),
    [
        ("agnet", 5, r"^workload:name: no workload named 'agnet' \(did you mean agent\?\)$"),
        ("zzz", 5, r"\(known: conversation, agent, retrieval, mixed\)$"),
        ("agent", 0, r"^workload:requests: expected at least 1, got 0$"),
    ],
)
def test_bad_arguments(name: str, requests: int, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        generate(name, requests)
