"""Publishes the events of a real radix cache with SGLang's own ZMQ publisher: ``sglang_publisher.py ADDRESS PROMPTS``.

Says that it is ready, begins once somebody has subscribed, then says how many events it published and waits for a line
on standard input.
"""

import sys
import time
from array import array

import zmq

from hybridkv_ref.adapters.sglang_build import build
from hybridkv_ref.models import load_model

PAGE, SHARED, OWN, POOL = 1, 16, 96, 1024


def main() -> None:
    """Prompts that share their first pages are stored; what no longer fits is evicted on the way."""
    address, prompts = sys.argv[1], int(sys.argv[2])
    cache, _ = build(load_model("gpt-oss-20b"), PAGE, pages=POOL, window_pages=POOL, longest=4096)
    from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    zmq.PUB = zmq.XPUB  # the same socket, which can also be asked who has subscribed
    publisher = ZmqEventPublisher(0, endpoint=address)
    while publisher._pub is None:
        time.sleep(0.01)
    print("ready", flush=True)
    publisher._pub.recv()  # a subscription: what is sent from now on arrives
    slots, count = cache.token_to_kv_pool_allocator, 0
    cache.take_events()  # that it was made
    for number in range(prompts):
        tokens = [*range(SHARED * (number % 4)), *(10_000 * (number + 1) + i for i in range(OWN))]
        value = slots.alloc(len(tokens))
        if value is None:
            cache.evict(EvictParams(num_tokens=2 * OWN, swa_num_tokens=2 * OWN))
            value = slots.alloc(len(tokens))
        cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=value))
        if fresh := cache.take_events():
            publisher.publish(KVEventBatch(ts=time.time(), events=list(fresh)))
            count += sum(1 if hasattr(e, "token_ids") else len(e.block_hashes) for e in fresh)
    print(count, flush=True)
    sys.stdin.readline()
    publisher.shutdown()


if __name__ == "__main__":
    main()
