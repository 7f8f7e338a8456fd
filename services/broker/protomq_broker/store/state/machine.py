"""States that stand in the log: what a broker must still know after a fail-over is a record, and nothing else.

A state is a machine: `apply` takes the records of its system topic in the order of the log, live and at a start. It reads neither clock
nor disk. So the same records make the same state. The store has a list of machines and knows none by name: it replays, saves and
carries forward whatever is in the list.

    append   the record is written, then applied in the same turn of the writer
    start    the snapshot, if one holds, then the records behind its position
    cut      before segments go, each machine says again what of it stands in them: `carry`
    save     a snapshot, once the log is synced as far as it tells
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from protomq.v1.record_pb2 import Record
from protomq.wire.record import (
    BODY_SIZE_MAX_BYTES,
    FLAG_KIND_STATE,
    RecordTemplate,
    encode_record_field,
)
from protomq_broker.store.log.append import AppendRequest, RecordRegion
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.queues.log_reader import LogReader


class Carrier(NamedTuple):
    """A slice of what is carried forward. Called on the writer thread, it gives the body of a record that says its items again.

    Those that are not alive at this moment are left out: b"" if none is.
    """

    body_of: Callable[[Sequence[Any]], bytes]
    items: Sequence[Any]

    def __call__(self) -> bytes:
        return self.body_of(self.items)

    def halves(self) -> tuple[Carrier, Carrier] | None:
        """Two that say the same; None if there is but one item."""
        middle = len(self.items) // 2
        if not middle:
            return None
        return self._replace(items=self.items[:middle]), self._replace(items=self.items[middle:])


class Snapshot(NamedTuple):
    """What a machine knows at one moment.

    Attributes:
        end_position: it reports no record at or behind it: nothing is saved before the log is synced up to there.
        save: writes it down; every record before the position that it is given is in the snapshot. Raises OSError.
    """

    end_position: int
    save: Callable[[int], None]


class StateMachine(Protocol):
    """The state of one system topic.

    Attributes:
        topic: the system topic; its records stand in queue 0.
        replay_from: at a start: what the log has before this position is in the state already.
    """

    topic: str
    replay_from: int

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Takes the body of the record at `position`; the topics that are gone with it. Never raises for what the record says: that was
        checked before it was appended."""

    def carry(self, cut: int) -> Sequence[Carrier]:
        """What is alive and has its newest record before `cut`, in slices of a few milliseconds; any thread.

        Of what is known without any record, from a file of an earlier version say, that is before everything.
        """

    def unsaved(self) -> Snapshot | None:
        """What is to be saved; None if that is saved already. Any thread."""


StateAppend = Callable[[bytes], int]
"""Called on the writer thread: appends a record with this body and applies it; where it ends. Raises what `Store.append` raises."""


def state_region(topic: str, bodies: Sequence[bytes], now_ms: int) -> RecordRegion:
    """Records of a system topic with these bodies, ready to be appended. They have no producer: nobody sends them twice."""
    template = _template_of(topic)
    if len(bodies) == 1:  # nearly always: without arrays and lists it costs a tenth
        body = bodies[0]
        assert len(body) <= BODY_SIZE_MAX_BYTES, "what the broker wrote itself must hold"
        record = template.encode(body, 0, now_ms, flags=FLAG_KIND_STATE)
        data = bytearray(encode_record_field(record))
        return RecordRegion(topic, data, 1, None, None, 0, 0, 0, 0, 0, flags=FLAG_KIND_STATE)
    fields = [
        encode_record_field(template.encode(body, number, now_ms, flags=FLAG_KIND_STATE))
        for number, body in enumerate(bodies)
    ]
    assert max(map(len, bodies)) <= BODY_SIZE_MAX_BYTES, "what the broker wrote itself must hold"
    count = len(fields)
    data = bytearray().join(fields)
    sizes = np.array([len(field) for field in fields], np.int64)
    return RecordRegion(
        topic,
        data,
        count,
        np.cumsum(sizes) - sizes,
        sizes,
        np.zeros(count, np.int64),
        np.zeros(count, np.uint64),
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        flags=FLAG_KIND_STATE,
    )


@lru_cache(maxsize=64)
def _template_of(topic: str) -> RecordTemplate:
    return RecordTemplate(topic, 0, 0)


def positions_of(request: AppendRequest) -> list[int]:
    """Physical offsets of the records of a request that was appended."""
    starts = request.region.starts
    at = request.physical_offset
    return [at] if starts is None else [at + start for start in starts.tolist()]


def replay_states(
    machines: Sequence[StateMachine], queues: ConsumeQueueTable, reader: LogReader
) -> None:
    """Applies the records of the system topics that the log has behind what the states know. Those in quarantine are skipped,
    and those that the log has lost: another record may stand at the position of their entries.

    Raises ConsumeQueueDamagedError: then nothing is applied, so that the next call takes no record a second time.
    """
    begins = []
    for machine in machines:
        for queue in queues.queues_of(machine.topic).values():
            first = max(queue.known_min_offset, queue.first_at_or_beyond(machine.replay_from))
            queue.check(first)
            begins.append((machine, queue, first))
    for machine, queue, first in begins:
        for queue_offset in range(first, queue.end_offset):
            position, size, _ = queue.entry(queue_offset)
            record = reader.record_at(position) if size else None
            if record is not None:
                machine.apply(Record.FromString(record).body, position)
