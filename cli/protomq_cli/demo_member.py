"""A member of the demo's group, as a process of its own. It says what it got, and goes on when it is told to.

    stdout   a line for each poll: {"queues": queues that it has, "runs": [[queue, first offset, end offset], ...]}
    stdin    a line: what was given is finished, commit it and poll again; the end: leave the group

Between the two lines it is at work: killed then, it leaves messages that it has finished and not committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protomq import Message, MessageQueue

POLL_S = 0.2


def name_of(queue: MessageQueue) -> str:
    """Broker and number: the topic is the same for all."""
    return f"{queue.broker_name}/{queue.queue_id}"


def runs_of(messages: Iterable[Message]) -> list[list[str | int]]:
    """Neighbouring offsets of one queue as [queue, first offset, end offset]."""
    runs: list[list[str | int]] = []
    for message in messages:
        queue = name_of(message.queue)
        if runs and runs[-1][0] == queue and runs[-1][2] == message.queue_offset:
            runs[-1][2] = message.queue_offset + 1
        else:
            runs.append([queue, message.queue_offset, message.queue_offset + 1])
    return runs


def main(namesrv: str, group: str, topic: str, count_max: str) -> None:
    """Consumes its share until stdin ends; `count_max`: messages of a poll."""
    from protomq import PullConsumer

    with PullConsumer(group, namesrv=namesrv, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        while True:
            messages = consumer.poll(POLL_S, int(count_max))
            said = {"queues": [name_of(queue) for queue in consumer.assignment()], "runs": runs_of(messages)}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            if not sys.stdin.readline():
                return
            consumer.commit()


if __name__ == "__main__":
    main(*sys.argv[1:])
