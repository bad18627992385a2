"""Publishes the events of one driven manager with vLLM's own ZMQ publisher: ``vllm_publisher.py ADDRESS MODEL STEPS``.

Waits for a line on standard input, so that who subscribes can be there first; says "ready" before.
"""

import sys
import time

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm_driver import Driver

if __name__ == "__main__":
    address, model, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    publisher = ZmqEventPublisher(0, endpoint=address)
    driver = Driver(model, seed=3, depth=2)
    print("ready", flush=True)
    sys.stdin.readline()
    count = 0
    for _ in range(steps):
        driver.attached.taken.clear()
        driver.step()
        if fresh := driver.attached.taken:
            publisher.publish(KVEventBatch(ts=time.time(), events=list(fresh)))
            count += sum(
                len(getattr(e, "block_hashes", ())) if type(e).__name__ == "BlockRemoved" else 1 for e in fresh
            )
    print(count, flush=True)
    sys.stdin.readline()
    publisher.shutdown()
