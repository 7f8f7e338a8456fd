"""Sending the rows of one task so that they are stored once, however often the task runs.

The broker stores a repeated (producer id, epoch, sequence) once. So what a task sends is numbered by what it is, not by
when it runs:

    producer id   hash of (query id or write id, partition): the same for every attempt and for the replay of a batch
    epoch         always 0: a higher one would make the broker forget what the attempts before have stored
    sequence      batch id * 2^32 + number of the row in its partition

There may be a second attempt, a speculative twin, or the replay of a batch after a restart. All send the same numbers with
the same rows, in the same requests, to the same brokers. The answers have the places of the first time.

What that rests on:
- The same rows in the same order in each partition. Spark gives that for sources that can be replayed and narrow transformations;
  behind a shuffle the order may differ: `send_batch` sorts. This is checked, not believed: the broker compares what it has stored
  under these numbers with what comes again. A difference is an error, never silently lost rows.
- The queue of a window follows from its number and the list of queues, which the driver looks up once for all tasks.
- The broker remembers a producer for 24 h of the log's time after its last send; among more than a million producers for 15 minutes.

Memory is bounded by the window (1 MiB) times the requests in flight.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from protomq import MessageQueue, SendStatus
from protomq.errors import NotConfirmedError, ProducerIdTakenError
from protomq.records import make_compressor

from .cluster import Cluster
from .encoding import EncodedRows, TopicEncoder
from .options import BATCH_ID_MAX, WriteOptions
from .rows import Place, Rows, parse_queue, windows

logger = logging.getLogger("protomq_spark")

REQUESTS_IN_FLIGHT: Final = 4
_UNCONFIRMED: Final = (SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT)
"""A fail-over, or a power cut, may take such rows back."""
SEQUENCES_PER_BATCH: Final = 1 << 32


class ReplayMismatchError(RuntimeError):
    """A task that runs again has other rows, or the same in another order, than the attempt whose rows are stored."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes the rows of one task recognisable. `scope`: of the query or the batch write."""

    scope: str
    partition: int
    batch_id: int = 0

    @property
    def producer_id(self) -> int:
        """In [1, 2**64)."""
        digest = hashlib.blake2b(f"{self.scope}\0{self.partition}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") or 1

    @property
    def first_sequence(self) -> int:
        """The number of the first row."""
        if not 0 <= self.batch_id <= BATCH_ID_MAX:
            raise ValueError(f"batch id {self.batch_id} cannot be part of a sequence")
        return self.batch_id * SEQUENCES_PER_BATCH


@dataclass(slots=True)
class SentRows:
    """What a task has sent."""

    rows: int = 0
    requests: int = 0
    repeated_rows: int = 0
    """Of them stored by an earlier attempt."""
    size_bytes: int = 0


class _Request(NamedTuple):
    queue: MessageQueue
    encoded: EncodedRows

    @property
    def row_count(self) -> int:
        return len(self.encoded.trailers)


@dataclass(slots=True)
class RowSender:
    """Sends the rows of one task. One thread calls `send`."""

    cluster: Cluster
    options: WriteOptions
    identity: Identity
    queues: dict[str, tuple[MessageQueue, ...]] = field(default_factory=dict)
    """The queues of each topic in their order; those that the driver looked up come with it."""

    _encoders: dict[str, TopicEncoder] = field(init=False, default_factory=dict)
    _last: dict[MessageQueue, Future[bool]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.queues = dict(self.queues)

    def send(self, batches: Iterable[pa.RecordBatch]) -> SentRows:
        """Sends all rows and waits until they are stored. Raises the first error; rows before it may be stored then."""
        sent = SentRows()
        options = self.options
        sequence = self.identity.first_sequence
        in_flight: deque[tuple[_Request, Future[bool]]] = deque()
        with ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="protomq-send") as pool:
            cut = windows(
                batches,
                options.topic,
                make_compressor(options.compression),
                options.batch_rows,
                options.batch_size_bytes,
                options.shard_by,
            )
            for number, window in enumerate(cut):
                for queue, rows in self._by_queue(window, number):
                    request = self._request(queue, rows, sequence)
                    sequence += rows.row_count
                    self._wait_for_turn(queue)
                    while len(in_flight) >= REQUESTS_IN_FLIGHT:
                        self._finish(in_flight.popleft(), sent)
                    future = self._last[queue] = pool.submit(self._send_one, request)
                    in_flight.append((request, future))
            while in_flight:
                self._finish(in_flight.popleft(), sent)
        return sent

    def _wait_for_turn(self, queue: MessageQueue) -> None:
        """One request at a time for each queue: its order is that of the rows, also after a retry."""
        before = self._last.get(queue)
        if before is not None:
            before.result()

    def _finish(self, item: tuple[_Request, Future[bool]], sent: SentRows) -> None:
        request, future = item
        repeated = future.result()
        count = request.row_count
        sent.rows += count
        sent.requests += 1
        sent.size_bytes += sum(map(len, request.encoded.payload))
        sent.repeated_rows += count if repeated else 0

    # -- where to ---------------------------------------------------------------------------------------------------------

    def _by_queue(self, window: Rows, number: int) -> Iterator[tuple[MessageQueue, Rows]]:
        """The rows of a window by queue; within a queue they keep their order."""
        places: Sequence[Place] = window.places or [(self.options.topic, None)]
        found: dict[MessageQueue, list[NDArray[np.int64]]] = {}
        for place, rows in _rows_by_place(window, places):
            for queue, members in self._by_shard(window, place, rows, number):
                found.setdefault(queue, []).append(members)
        for queue, parts in found.items():
            indices = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))
            yield queue, window if len(indices) == window.row_count else window.pick(indices)

    def _by_shard(
        self, window: Rows, place: Place, rows: NDArray[np.int64], number: int
    ) -> Iterator[tuple[MessageQueue, NDArray[np.int64]]]:
        """Rows of one place by queue: the one that they name, else the one that their hash chooses, else the one whose turn it is."""
        topic, queue_text = place
        queues = self.queues.get(topic)
        if queues is None:
            queues = self.queues[topic] = self.cluster.write_queues(topic)
        in_turn = (self.identity.partition + number) % len(queues)
        if queue_text is not None:
            yield parse_queue(queue_text, topic, queues), rows
        elif window.shards is None:
            yield queues[in_turn], rows
        else:
            hashes = window.shards[rows]
            chosen = np.where(hashes == 0, in_turn, (hashes % np.uint64(len(queues))).astype(int))
            for index in np.unique(chosen).tolist():
                yield queues[index], rows[chosen == index]

    def _request(self, queue: MessageQueue, rows: Rows, first_sequence: int) -> _Request:
        encoder = self._encoders.get(queue.topic)
        if encoder is None:
            encoder = TopicEncoder(queue.topic, self.identity.producer_id)
            self._encoders[queue.topic] = encoder
        born_time_ms = time.time_ns() // 1_000_000
        encoded = encoder.encode(
            rows, first_sequence, born_time_ms, queue.queue_id, self.options.wait_store_ok
        )
        return _Request(queue, encoded)

    # -- one request, on a thread of the pool --------------------------------------------------------------------------------

    def _send_one(self, request: _Request) -> bool:
        """Whether it was stored already. The same bytes go to the same broker until it answers, and confirms, or the time is over."""
        queue, calls = request.queue, self.cluster.calls
        deadline_s = time.monotonic() + calls.timeout_s
        repeated: list[bool] = []

        def attempt() -> bool:
            stored = calls.send(queue, *request.encoded.payload, timeout_s=max(deadline_s - time.monotonic(), 0.001))
            repeated.append(stored.repeated)
            # Spark writes down that the rows are stored. A repeat is recognised, and waits for replicas and disk once more.
            if self.options.wait_store_ok and stored.status in _UNCONFIRMED:
                error = NotConfirmedError(
                    f"{queue.topic}/{queue.broker_name}:{queue.queue_id}: {request.row_count} rows were answered {stored.status.name}",
                    metadata={"topic": queue.topic, "broker_name": queue.broker_name, "status": stored.status.name},
                )
                error.definite = False
                raise error
            return repeated[0]

        try:
            return calls.retried(attempt)
        except ProducerIdTakenError as error:
            raise ReplayMismatchError(
                f"{queue.topic}/{queue.broker_name}:{queue.queue_id}: partition {self.identity.partition} runs again with other rows, or"
                " in another order, than what is stored already. Behind a shuffle rows need an order of their own: on a stream by"
                " foreachBatch(protomq_spark.send_batch(...)), else by sortWithinPartitions before the write (docs/spark.md, exactly"
                f" once). The broker: {error}"
            ) from error


def _rows_by_place(
    window: Rows, places: Sequence[Place]
) -> Iterable[tuple[Place, NDArray[np.int64]]]:
    """Each place with its rows; `places`: one for each row, or one for all."""
    if len(places) == 1:
        return [(places[0], np.arange(window.row_count))]
    members: dict[Place, list[int]] = {}
    for index, place in enumerate(places):
        members.setdefault(place, []).append(index)
    return [(place, np.asarray(rows)) for place, rows in members.items()]
