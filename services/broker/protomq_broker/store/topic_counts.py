"""Counts what goes into topics and what is read from them, since the start.

The writer counts appends. Several threads count reads, without a lock: what is read may miss a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .log.append import AppendRequest
from .log.kinds import is_queued
from .log.positions import QueueKey
from .queues.reading import ReadResult, TopicCounters


class TopicCounts:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._counters: dict[str, TopicCounters] = {}

    def of(self, topic: str) -> TopicCounters:
        """Counters of a topic since the start. Any thread."""
        counters = self._counters.get(topic)
        return (
            counters if counters is not None else self._counters.setdefault(topic, TopicCounters())
        )

    def go_on(self, before: TopicCounts) -> None:
        """Begins with these counts. To be called before anything is counted."""
        self._counters.update({topic: replace(counters) for topic, counters in before._counters.items()})

    def count_appended(self, requests: Sequence[AppendRequest]) -> list[QueueKey]:
        """Counts the messages that entered queues. Returns these queues. The writer thread."""
        keys: list[QueueKey] = []
        counters = self._counters
        for request in requests:
            region = request.region
            if region.flags and not is_queued(region.flags):
                continue  # nobody can read it there
            topic = region.topic
            keys.append((topic, request.queue_id))
            counter = counters.get(topic)
            if counter is None:
                counter = self.of(topic)
            counter.records_in += region.count
            counter.bytes_in += len(region.data)
        return keys

    def count_read(self, topic: str, result: ReadResult) -> None:
        """Counts records that leave the broker. Any thread."""
        counters = self.of(topic)
        counters.records_out += result.record_count
        counters.bytes_out += result.regions_size_bytes

    def forget(self, topic: str) -> None:
        """Forgets a deleted topic."""
        self._counters.pop(topic, None)
