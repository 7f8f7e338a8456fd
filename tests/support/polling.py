"""What a consumer gets."""

from __future__ import annotations

from protomq import Message, PullConsumer
from tests.support.waiting import PATIENCE_S, wait_for


def polled(consumer: PullConsumer, count: int) -> list[Message]:
    """At least so many messages, until there are no more."""
    found: list[Message] = []

    def poll() -> bool:
        some = consumer.poll(0.2)
        found.extend(some)
        return not some and len(found) >= count

    wait_for(poll, PATIENCE_S, pause_s=0.0)
    return found
