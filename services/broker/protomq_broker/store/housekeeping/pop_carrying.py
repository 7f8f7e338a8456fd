"""Carries popped messages that are still open forward: before their segment is deleted, it appends a copy of each to the group's retry
topic.

A message stays what it is for its group: same queue offset, same receipt, same attempt. The state remembers where its copy stands, and pops
read it there. The copies and the record that says where they stand are one append.

A group may pop its retry topic, too. The copies there are no messages of their own for it: their flag says so. Else each pass of retention
would double them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from protomq.v1.state_pb2 import PoppedQueue, PopRecord
from protomq.wire.record import FLAG_KEPT, STORE_TIME_MS_AT
from protomq.wire.runs import runs_of
from protomq.wire.topics import POP_TOPIC, retry_topic
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.move import ReadRecords, move_records
from protomq_broker.store.log.record_arrays import U64, windows
from protomq_broker.store.queues.consume_queue import ConsumeQueue
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.state.pop import PopState
from protomq_broker.store.state.popped_queue import OpenMessages
from protomq_broker.store.state.topics import TopicTable, topic_of_broker

log = logging.getLogger(__name__)

MOVED_COUNT_MAX: Final = 512
MOVED_SIZE_MAX_BYTES: Final = 1 << 20
"""Most bytes of copies in one append, so that sends can go on in between."""


class _Place(NamedTuple):
    """Where the record of an open message stands."""

    offset: int
    position: int
    size: int


class PopCarrier:
    """Call `move_below` on any thread but the writer's, unless `on_writer` allows it. `append_moved`: as `Store.append_moved`."""

    def __init__(
        self,
        popped: PopState,
        queues: ConsumeQueueTable,
        topics: TopicTable,
        read_records: ReadRecords,
        on_writer: Callable[[Callable[[], None]], None],
        append_moved: Callable[[Sequence[AppendRequest], Sequence[tuple[str, Sequence[bytes]]]], int],
        append_size_max_bytes: int,
    ) -> None:
        self._popped = popped
        self._queues = queues
        self._topics = topics
        self._read_records = read_records
        self._on_writer = on_writer
        self._append_moved = append_moved
        self._size_max_bytes = min(MOVED_SIZE_MAX_BYTES, append_size_max_bytes // 4)

    def move_below(self, cut: int, check_loss: Callable[[], None]) -> None:
        """Moves the open messages whose record stands before `cut`. Raises what an append raises.

        `check_loss` is called before messages that are damaged are given up, and may raise instead.
        """
        for listed in self._popped.queues():
            while (known := self._present(listed)) is not None and (places := self._places_below(known, cut)):
                self._move(known, self._first(places), check_loss)

    def _present(self, known: OpenMessages) -> OpenMessages | None:
        """The queue as it is now: it may have been reset. None if its topic or its group is gone."""
        with self._popped.lock:
            return self._popped.find(known.key, known.incarnation)

    def _places_below(self, known: OpenMessages, cut: int) -> list[_Place]:
        """Where they stand, in the order of the log."""
        group, topic, queue_id = known.key
        own, retry = self._queues.find(topic, queue_id), self._queues.find(retry_topic(group), 0)
        own_first = own.first_at_or_beyond(cut) if own is not None else 0
        retry_first = retry.first_at_or_beyond(cut) if retry is not None else 0
        with self._popped.lock:
            moved = known.moved
            gone = [(offset, own, offset) for offset in known.open if offset < own_first and offset not in moved]
            gone += [(offset, retry, at) for offset, at in moved.items() if at < retry_first]
        places = [_place(offset, queue, at) for offset, queue, at in gone if queue is not None]
        return sorted(places, key=lambda place: place.position)

    def _move(self, known: OpenMessages, places: Sequence[_Place], check_loss: Callable[[], None]) -> None:
        positions = np.array([place.position for place in places], np.int64)
        sizes = np.array([place.size for place in places], np.int64)
        data, starts, is_sound = self._read_records(positions, sizes)
        is_sound &= sizes > 0
        copies: list[AppendRequest] = []
        kept: dict[int, int] = {}
        if is_sound.any():
            topic = retry_topic(known.key.group)
            copies.append(AppendRequest(move_records(data, starts[is_sound], sizes[is_sound], topic, marks=FLAG_KEPT), 0))
            sound = [place.offset for place, holds in zip(places, is_sound.tolist(), strict=True) if holds]
            times_ms = windows(data, U64)[starts[is_sound] + sizes[is_sound] + STORE_TIME_MS_AT]
            kept = dict(zip(sound, times_ms.tolist(), strict=True))
        lost = sorted({place.offset for place in places} - kept.keys())
        if lost:
            check_loss()
            log.error(
                "%d messages of queue %d of %s that %s has popped are damaged, and are lost with their segment",
                len(lost), known.key.queue_id, known.key.topic, known.key.group,
            )  # fmt: skip
        self._on_writer(partial(self._append, known, copies, kept, lost))

    def _append(
        self, known: OpenMessages, copies: Sequence[AppendRequest], kept: dict[int, int], lost: Sequence[int]
    ) -> None:
        """Appends the copies on the writer thread. If one of the messages was settled meanwhile, or the queue was reset, appends nothing;
        the caller prepares them again. `kept`: offsets, and the store times of what is copied.
        """
        group, topic, queue_id = known.key
        if self._present(known) is not known or any(offset not in known.open for offset in (*kept, *lost)):
            return
        name = retry_topic(group)
        first = self._queues.end_offset(name, 0)
        told = PoppedQueue(
            consumer_group=group,
            topic=topic,
            topic_incarnation=known.incarnation,
            queue_id=queue_id,
            lost_runs=runs_of(lost),
            moved_offsets=kept,
            retry_offsets=range(first, first + len(kept)),
            # Of a copy that is copied again: the time of the message itself.
            moved_store_times_ms=[known.stored_ms.get(offset, time_ms) for offset, time_ms in kept.items()],
        )
        record = PopRecord(time_ms=self._popped.time_ms, queues=[told])
        self._append_moved(copies, [(POP_TOPIC, [record.SerializeToString()])])
        if copies and self._topics.find(name) is None:
            self._topics.add([topic_of_broker(name)])

    def _first(self, places: Sequence[_Place]) -> Sequence[_Place]:
        """Returns the first places whose records together fit into one append of copies; at least one."""
        ends = np.cumsum([place.size for place in places[:MOVED_COUNT_MAX]])
        return places[: max(int(np.searchsorted(ends, self._size_max_bytes, "right")), 1)]


def _place(offset: int, queue: ConsumeQueue, at: int) -> _Place:
    entry: Any = queue.entry(at) if queue.known_min_offset <= at < queue.end_offset else (0, 0)
    return _Place(offset, int(entry[0]), int(entry[1]))
