"""Entries for messages that the log has lost: no queue offset is given twice, and readers are told.

A damaged range of the log takes messages from the end of a queue, or from its beginning. The ends are known from files of the queue
(`queue_ends.py`) or from the log's own records of where queues begin and end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from protomq_broker.store.log.recovery import DamagedRange

from .consume_queue import ConsumeQueue
from .queue_ends import QueueEnd
from .queue_replay import fill_lost, restart

log = logging.getLogger(__name__)


def fill_ends(
    ends: Iterable[QueueEnd],
    damaged: Sequence[DamagedRange],
    deleted: Mapping[str, int],
    find: Callable[[str, int], ConsumeQueue | None],
    make: Callable[[str, int], ConsumeQueue],
) -> set[ConsumeQueue]:
    """Fills queues up to the ends that they had. Returns the queues that it has changed.

    `find` returns a queue that is there, `make` also one that is not. `deleted`: up to where records of deleted topics are deleted.
    """
    changed: set[ConsumeQueue] = set()
    for end in ends if damaged else ():
        queue = find(end.topic, end.queue_id)
        known = queue.end_offset if queue is not None else end.min_offset
        if end.end_offset <= known or end.position < deleted.get(end.topic, -1):
            continue
        last = 0
        if queue is not None and known > queue.known_min_offset:
            position, size, _ = queue.entry(known - 1)
            last = position + size
        damage = next((d for d in damaged if d.end_position > max(last, end.position)), None)
        # Else it was never synced: a torn tail is no loss.
        if damage is None or -1 < end.position < damage.start_position:
            continue
        queue = make(end.topic, end.queue_id)
        if not queue.end_offset:
            queue.reset(end.min_offset, end.min_offset)
        fill_lost(queue, end.end_offset, max(last, damage.start_position))
        log.error(
            "queue %d of topic %s: messages %d to %d are lost with positions %d to %d of the log",
            end.queue_id, end.topic, known, end.end_offset - 1, damage.start_position, damage.end_position,
        )  # fmt: skip
        changed.add(queue)
    return changed


def fill_beginnings(
    queues: Iterable[ConsumeQueue],
    begins: Callable[[ConsumeQueue], int | None],
    damaged: Sequence[DamagedRange],
    deleted: Mapping[str, int],
) -> set[ConsumeQueue]:
    """Fills queues that begin later than they should: what stood before their first entry is lost. Returns the queues that it has changed.

    `begins`: the offset at which a queue should begin; None: where it does.
    """
    changed: set[ConsumeQueue] = set()
    for queue in queues if damaged else ():
        first, end = queue.known_min_offset, queue.end_offset
        wanted = begins(queue)
        if wanted is None or first <= wanted or first == end or queue.topic in deleted:
            continue
        entries = queue.entries(first, end - first).copy()
        position = int(entries["position"][0])
        before = [d for d in damaged if d.end_position <= position]
        if before and len(entries) == end - first:
            restart(queue)
            queue.reset(wanted, wanted)
            fill_lost(queue, first, before[-1].start_position)
            queue.append_many(entries["position"], entries["size"], entries["tag_code"])
            changed.add(queue)
    return changed
