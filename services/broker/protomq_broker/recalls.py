"""Recalls of delayed messages. The send lane does both recalls and deliveries, so a message is recalled or delivered, never both.

A handle can be made by hand. So only what a producer sent with a delay can be recalled: no retry, and no message of a transaction.

The caller gets the answer when the recall is stored as SEND_OK promises.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import RecallMessageResponse
from protomq.v1.state_pb2 import TimerEnd
from protomq.wire.recall_handle import RecallHandle, decode_handle, encode_handle
from protomq.wire.record import FLAG_COMMITTED, FLAG_KIND_COPY, FLAG_KIND_MASK, encode_message_id
from protomq.wire.topics import TIMER_TOPIC, TopicClass, class_of
from protomq_runtime.errors import corrupt_log, invalid_argument, too_many

from .store.log.record_scan import read_trailers
from .store.timer.carrying import first_rows
from .store.timer.recalled import recalled_key
from .store.timer.timer import timer_record
from .store_errors import to_service_error
from .topic_access import existing_topic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from protomq.v1.send_service_pb2 import RecallMessageRequest
    from protomq_runtime.call import Call

    from .config import BrokerConfig
    from .log_time import LogTime
    from .store.log.append import AppendRequest, RecordRegion, ScannedRecords
    from .store.store import Store
    from .system_writer import SystemWriter
    from .waiting_answers import WaitingAnswers

CANDIDATES_MAX: Final = 1_024
"""Most messages with one due time among which a recall looks for one that was carried forward."""
CANDIDATES_SIZE_MAX_BYTES: Final = 8 << 20
"""Most bytes of these, unless the first alone has more: sends wait some 20 ms while they are read."""
_NOT_FOUND_AMONG_ALL: Final = (
    "the message was moved within the log, and is not found among all that fall due in its millisecond. If it is pending,"
    " it is delivered. Give messages that may be recalled times that differ"
)


class Recalls:
    """All methods on the send lane's thread."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        broker_name: str,
        writer: SystemWriter,
        waiting: WaitingAnswers,
        log_time: LogTime,
    ) -> None:
        self._store = store
        self._config = config
        self._broker_name = broker_name
        self._writer = writer
        self._waiting = waiting
        self._log_time = log_time

    def handle_of(self, request: AppendRequest) -> str:
        """Returns the recall handle of the first message of a request that was appended."""
        region = request.region
        due_ms = region.due_times_ms
        if not isinstance(due_ms, int):
            assert due_ms is not None
            due_ms = int(due_ms[0])
        message_id = (region.producer_id, region.producer_epoch, region.first_sequence)
        return encode_handle(
            RecallHandle(self._broker_name, request.physical_offset, due_ms, message_id)
        )

    def handle_at(self, position: int, region: RecordRegion) -> str:
        """Returns the recall handle of the first message of a region that stands at a position; "" if it is gone or damaged."""
        octets = self._store.record_at(position)
        if octets is None:
            return ""
        record = Record.FromString(octets)
        message_id = (record.producer_id, record.producer_epoch, record.sequence)
        if message_id != (region.producer_id, region.producer_epoch, region.first_sequence):
            return ""
        return encode_handle(
            RecallHandle(self._broker_name, position, record.due_time_ms, message_id)
        )

    def recall(self, request: RecallMessageRequest, call: Call) -> None:
        """Recalls the message if it is still pending, and answers the call. A repeat is told that it was recalled.

        Raises ServiceError, StoreError.
        """
        try:
            handle = decode_handle(request.recall_handle)
        except ValueError as error:
            raise invalid_argument("recall_handle", str(error)) from None
        if handle.broker_name != self._broker_name:
            raise invalid_argument(
                "recall_handle",
                f"is of broker {handle.broker_name!r}, this is {self._broker_name!r}: ask that one",
            )
        topic = existing_topic(self._store, request.topic).name
        response = RecallMessageResponse(message_id=encode_message_id(*handle.message_id))
        row = self._find(topic, handle)
        if row is not None:
            body = timer_record(row, TimerEnd.TIMER_END_RECALLED, self._log_time.now_ms(), handle.message_id)
            end_position = self._writer.append(TIMER_TOPIC, [body])
            response.recalled = True
        elif self._was_recalled(handle):
            end_position = self._store.appended_position
            response.recalled_before = True
        elif self._store.has_skipped(handle.position):
            raise corrupt_log(
                "the message stood in a part of the log that is damaged, or may have been carried there. Whether it is pending is known"
                " once that is healed: recall it again then",
                {"position": handle.position},
            )
        else:
            call.answer(response.SerializeToString())
            return
        wait_ms = call.hold_time_ms(self._config.sync_flush_timeout_ms)
        self._waiting.wait(call.lane, end_position, wait_ms, partial(_answer, call, response))
        self._waiting.request_flush()

    def _find(self, topic: str, handle: RecallHandle) -> NDArray[Any] | None:
        """Returns the row of the message in the timer if it is pending, else None.

        Raises ServiceError if the message is for another topic, if it cannot be read, or if it may be among more messages than are read.
        """
        rows = self._store.pending.at_due(handle.due_time_ms, CANDIDATES_MAX + 1, handle.position)
        if len(rows) and int(rows["position"][0]) == handle.position:
            rows = rows[:1]  # else it is not pending, or was carried forward, to behind that position
        candidates = first_rows(rows, CANDIDATES_MAX, CANDIDATES_SIZE_MAX_BYTES)
        is_cut, is_cut_by_size = len(candidates) < len(rows), len(candidates) < min(len(rows), CANDIDATES_MAX)
        rows = candidates
        data, starts, is_sound = self._store.read_records(
            rows["position"].astype(np.int64), rows["size"].astype(np.int64)
        )
        unreadable, rows = rows[~is_sound], rows[is_sound]
        found = read_trailers(data, 0, starts[is_sound], rows["size"].astype(np.int64))
        producer_id, epoch, sequence = handle.message_id
        is_it = (found.producer_ids == np.uint64(producer_id)) & (found.producer_epochs == epoch)
        is_it &= found.sequences == np.uint64(sequence)
        is_it &= _are_sent(found, rows["position"] == handle.position)
        if not is_it.any():
            if self._was_recalled(handle):
                return None
            if len(unreadable):
                raise corrupt_log(
                    "the message may be a pending one that is damaged. It is delivered when it can be read; heal or repair the log, and"
                    " recall it again",
                    {"position": int(unreadable["position"][0])},
                )
            if is_cut_by_size:
                raise too_many("bytes of candidates of a recall", CANDIDATES_SIZE_MAX_BYTES, _NOT_FOUND_AMONG_ALL)
            if is_cut:
                raise too_many("candidates of a recall", CANDIDATES_MAX, _NOT_FOUND_AMONG_ALL)
            return None
        stored = found.topics[int(found.topic_indexes[is_it][0])]
        if stored != topic:
            # "Too late" would be wrong: the message is pending, and will be delivered.
            raise invalid_argument("topic", f"is {topic!r}, the message of this handle is for {stored!r}")
        chosen = rows[is_it][:1]
        queue_id = int(found.queue_ids[is_it][0])
        # What was for the topic that had this name before is dropped when it is due.
        return chosen if self._store.has_topic_of(stored, queue_id, int(chosen["position"][0])) else None

    def _was_recalled(self, handle: RecallHandle) -> bool:
        """Whether it is one of those that were recalled of late."""
        return recalled_key(handle.due_time_ms, handle.message_id) in self._store.pending.recalled


def _are_sent(found: ScannedRecords, is_there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of pending messages a producer has sent so, as their records say. `is_there`: they stand where the handle says."""
    kinds = found.flags & np.uint32(FLAG_KIND_MASK)
    is_carried = (kinds == FLAG_KIND_COPY) & (found.flags & np.uint32(FLAG_COMMITTED) == 0) & ~is_there
    is_of_user = np.array([class_of(topic) is TopicClass.USER for topic in found.topics], np.bool_)
    return ((kinds == 0) | is_carried) & is_of_user[found.topic_indexes]


def _answer(call: Call, response: RecallMessageResponse, failure: Exception | None) -> None:
    """Answers a recall that is stored, or that may not be stored."""
    if call.answered:  # its time was up before
        return
    if failure is not None:
        call.fail(to_service_error(failure))
        return
    call.answer(response.SerializeToString())
