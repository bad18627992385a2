"""What the adapter tells of the blocks that decoding reads, in vLLM's own environment.

Prints one line of JSON: for each step of one request the blocks told of the window's group, and whether its table was
another one than at the step before.
"""

import json

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from hybridkv_ref import Oracle
from hybridkv_ref.adapters.vllm import Attached
from hybridkv_ref.adapters.vllm_build import build
from hybridkv_ref.events import Dispatch, Event
from hybridkv_ref.models import load_model

PROMPT, DECODE = 200, 64


def main() -> None:
    """One request through a prefill and some decoding, judged in lock step."""
    manager, header = build(load_model("gpt-oss-20b"), 100, PROMPT + DECODE + 1)
    oracle, told, tables = Oracle(header, "strict"), list[Dispatch](), list[list[int]]()

    def hear(event: Event) -> None:
        oracle.feed(event)
        if isinstance(event, Dispatch):
            told.append(event)
            tables.append([b.block_id for b in manager.coordinator.get_blocks("r")[1]])

    Attached(manager, header, hear)
    sampling = SamplingParams(max_tokens=DECODE)
    request = Request("r", list(range(PROMPT)), sampling, None, block_hasher=get_request_block_hasher(16, sha256))
    manager.allocate_slots(request, PROMPT)
    request.num_computed_tokens = PROMPT
    for token in range(DECODE):
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    manager.free(request)
    lines = [
        {"at": PROMPT + i, "table": tables[i + 1], "moved": tables[i + 1] != tables[i], "read": spans}
        for i, event in enumerate(told[1:])
        if (spans := [(s.blocks, s.lo, s.hi) for s in event.reads if s.group == "window"])
    ]
    print(json.dumps({"steps": lines, "window": header.groups[1].window, "block": header.groups[1].block}))


if __name__ == "__main__":
    main()
