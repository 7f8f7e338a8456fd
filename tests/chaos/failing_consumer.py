"""A push consumer in a process of its own, for whoever kills it: python -m tests.chaos.failing_consumer NAMESRV SEED RETRIES.

It fails as `delivery_rounds.failures_of` says, and tells each step, before the consumer itself knows, in a line that a kill cannot cut:

    came|failed|done BODY ATTEMPT MONOTONIC_S
"""

from __future__ import annotations

import os
import signal
import sys
import time

from protomq import Message, PushConsumer
from protomq.errors import NoRouteError

from .delivery_rounds import COMMIT_INTERVAL_S, GROUP, TOPIC, World, failures_of


def work_s(world: World, body: bytes) -> float:
    """One message of eight takes longer than two commits are apart: a commit, and then a kill, fall into its work."""
    return 2 * COMMIT_INTERVAL_S if world.draw(body + b" work").random() < 1 / 8 else 0.005


def tell(step: str, message: Message) -> None:
    line = f"{step} {message.body.decode()} {message.attempt} {time.monotonic()!r}\n"
    os.write(1, line.encode())


def main(namesrv: str, seed: int, retries: int) -> None:
    """Until it is killed, or its standard input ends: then its parent is gone."""
    world = World(seed, retries)

    def listen(message: Message) -> None:
        tell("came", message)
        time.sleep(work_s(world, message.body))
        if message.attempt < failures_of(world, message.body):
            tell("failed", message)
            raise ValueError(f"no {message.attempt}")
        tell("done", message)

    consumer = PushConsumer(GROUP, namesrv=namesrv, commit_interval_s=COMMIT_INTERVAL_S, concurrency=4)
    consumer.on(TOPIC)(listen)
    try:
        consumer.start()
    except NoRouteError:
        return  # The broker is down: the next consumer tries again.
    sys.stdin.read()
    consumer.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
