"""Publishes the events of one driven manager with vLLM's own ZMQ publisher: ``vllm_publisher.py ADDRESS MODEL STEPS``.

Says that it is ready, begins once somebody has subscribed, then says how many events it published and waits for a line
on standard input.
"""

import sys
import time
from typing import Any

import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher

from hybridkv_ref.adapters.vllm_driver import Driver


def parts(event: Any, groups: int) -> int:
    """How many events of a trace one that is published stands for: each removal is one, a reset one per group."""
    match type(event).__name__:
        case "BlockRemoved":
            return len(event.block_hashes)
        case "AllBlocksCleared":
            return groups
    return 1


if __name__ == "__main__":
    address, model, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    zmq.PUB = zmq.XPUB  # the same socket, which can also be asked who has subscribed
    publisher = ZmqEventPublisher(0, endpoint=address)
    driver = Driver(model, seed=3, depth=2)
    print("ready", flush=True)
    publisher._pub.recv()  # a subscription: what is sent from now on arrives
    count = 0
    for _ in range(steps):
        driver.attached.index.taken.clear()
        driver.step()
        if fresh := driver.attached.index.taken:
            publisher.publish(KVEventBatch(ts=time.time(), events=list(fresh)))
            count += sum(parts(e, len(driver.header.groups)) for e in fresh)
    print(count, flush=True)
    sys.stdin.readline()
    publisher.shutdown()
