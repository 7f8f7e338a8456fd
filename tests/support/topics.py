"""Topics of a real broker: made, filled with ids, and read to their end, so that ids can be counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from protomq import Admin, Message, OutgoingMessage, Producer, PullConsumer
from protomq._types import MessageQueue


class Reachable(Protocol):
    """Whatever has a name server."""

    @property
    def namesrv(self) -> str:
        """host:port."""


def make_topic(server: Reachable, name: str, queues: int) -> str:
    """A new topic of `queues` queues; its name."""
    with Admin(namesrv=server.namesrv) as admin:
        admin.create_topic(name, write_queues=queues, read_queues=queues)
    return name


def fill(producer: Producer, topic: str, count: int, *, first: int = 0) -> None:
    """Sends the ids first, first + 1 ... as bodies, with key, tag and a property made of the id."""
    for start in range(first, first + count, 250):
        end = min(start + 250, first + count)
        producer.send_batch(
            topic,
            [
                OutgoingMessage(
                    topic, b"%d" % n, key=f"k{n}", tag="ABC"[n % 3], properties={"n": str(n)}
                )
                for n in range(start, end)
            ],
        )


def end_offsets(server: Reachable, topic: str) -> dict[MessageQueue, int]:
    """Where the queues of a topic end now."""
    with PullConsumer(namesrv=server.namesrv) as consumer:
        return {queue: consumer.end_offset(queue) for queue in consumer.queues(topic)}


def stored_count(server: Reachable, topic: str) -> int:
    """Messages of a topic that was never cut."""
    return sum(end_offsets(server, topic).values())


def drain(server: Reachable, topic: str) -> list[Message]:
    """All messages of a topic that are there now."""
    messages: list[Message] = []
    with PullConsumer(namesrv=server.namesrv) as consumer:
        queues = consumer.queues(topic)
        count = sum(consumer.end_offset(queue) - consumer.min_offset(queue) for queue in queues)
        consumer.assign(queues)
        consumer.seek_to_begin()
        ends_s = time.monotonic() + 60
        while len(messages) < count and time.monotonic() < ends_s:
            messages += consumer.poll(0.2)
    assert len(messages) >= count, f"{len(messages)} of {count} messages of {topic} came"
    return messages


def bodies(messages: Iterable[Any]) -> Counter[bytes]:
    """How often each body occurs in messages or rows."""
    return Counter(bytes(message.body) for message in messages)


def once(*ids: int) -> Counter[bytes]:
    """The ids range(*ids), each once."""
    return Counter(b"%d" % n for n in range(*ids))
