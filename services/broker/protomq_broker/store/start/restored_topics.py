"""Topics that have messages in the log and no record there: a start restores them from their queues."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.state.topics import TopicTable, incarnation_of_first

log = logging.getLogger(__name__)


def restore_topics(
    topics: TopicTable,
    queues: ConsumeQueueTable,
    queues_default: int,
    known_incarnations: Mapping[str, int],
    store_id: int,
) -> None:
    """Restores from their queues the topics that have messages but no record. A crash came just after their first message, or their record
    is lost.

    Their incarnation comes from the newest committed offset (`known_incarnations`), or from the first message. The latter gives another
    incarnation if the store's number was lost too; then readers get TOPIC_RECREATED, and begin again.
    """
    counts = {
        topic: max(queues.queues_of(topic)) + 1
        for topic in queues.topics()
        # An older table may have queues of a topic that is long deleted, and one that took no message has none.
        if topics.find(topic) is None and any(queue.end_offset for queue in queues.queues_of(topic).values())
    }
    incarnations = {
        topic: incarnation_of_first(store_id, topic, position)
        for topic in counts
        if (position := _first_position_of(topic, queues)) is not None
    }
    found = topics.restore(counts, queues_default, {**incarnations, **known_incarnations})
    if found:
        log.warning(
            "%d topics are recovered from their queues: the log has their messages, but no record of them",
            len(found),
        )


def _first_position_of(topic: str, queues: ConsumeQueueTable) -> int | None:
    """Returns where the oldest message of a topic stands; None if its queues do not say."""
    positions = []
    for queue in queues.queues_of(topic).values():
        if queue.known_min_offset < queue.end_offset:
            try:
                position, size_bytes, _ = queue.entry(queue.known_min_offset)
            except ConsumeQueueDamagedError:
                continue
            if size_bytes:
                positions.append(position)
    return min(positions, default=None)
