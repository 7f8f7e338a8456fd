"""TrackService: every place of a message in this broker's log, and who has consumed it there. On the admin lane."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from protomq.v1.record_pb2 import Record
from protomq.v1.track_service_pb2 import (
    GroupTrack,
    MessagePlace,
    PlaceKind,
    TrackMessageRequest,
    TrackMessageResponse,
    TrackState,
)
from protomq.wire.record import decode_message_id
from protomq.wire.topics import RETRY_PREFIX
from protomq_runtime.errors import invalid_argument

from .message_track import origin_of, state_of
from .store.state.popped_queue import QueueOfGroup
from .store.state.transactions import Ending, TransactionKey
from .store_errors import tells_store_errors
from .waiting_messages import find_waiting, still_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protomq_runtime.call import CallContext

    from .store.store import Store

PLACES_MAX: Final = 256
_IN_NO_QUEUE: Final = (1 << 64) - 1
GROUPS_MAX: Final = 1_000
"""Most groups that the answer lists for one place."""


class TrackService:
    """Implements protomq.v1.TrackService."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @tells_store_errors
    def track_message(
        self, request: TrackMessageRequest, context: CallContext
    ) -> TrackMessageResponse:
        """See the service."""
        try:
            identity = decode_message_id(request.message_id)
        except ValueError as error:
            raise invalid_argument("message_id", str(error)) from error
        key = TransactionKey(*identity)
        # First those that wait: what is delivered meanwhile is found in its queue then, and waits no more.
        waiting = find_waiting(self._store, identity)
        found = self._store.find_everywhere(identity, PLACES_MAX)
        response = TrackMessageResponse(
            damaged_count=found.damaged_count, unsearched_count=waiting.unsearched_count
        )
        transaction = self._store.transactions.decide(key, Ending.COMMITTED)
        was_committed = transaction.ending == Ending.COMMITTED
        response.places.extend(
            self._place_of(Record.FromString(data), was_committed=was_committed)
            for data in found.records
        )
        response.places.extend(self._open_transaction(key))
        response.places.extend(self._waiting(waiting.records))
        return response

    def _waiting(self, records: Sequence[Record]) -> Iterator[MessagePlace]:
        for record in still_waiting(self._store, records):
            group = record.topic.removeprefix(RETRY_PREFIX)
            yield MessagePlace(
                kind=PlaceKind.PLACE_KIND_WAITING,
                topic=record.topic,
                queue_id=record.queue_id,
                queue_offset=-1,
                store_time_ms=record.store_time_ms,
                attempt=record.transit.attempt,
                last_error=record.transit.last_error,
                consumer_group=group if group != record.topic else "",
                due_time_ms=record.due_time_ms,
                **_origin_fields(record),
            )

    def _place_of(self, record: Record, *, was_committed: bool) -> MessagePlace:
        origin = origin_of(record, was_committed=was_committed)
        is_kept = origin.kind == PlaceKind.PLACE_KIND_KEPT
        groups = self._kept_for(record, origin.consumer_group) if is_kept else self._groups_of(record)
        return MessagePlace(
            kind=origin.kind,
            topic=record.topic,
            queue_id=record.queue_id,
            queue_offset=record.queue_offset,
            store_time_ms=record.store_time_ms,
            attempt=record.transit.attempt,
            last_error=record.transit.last_error,
            consumer_group=origin.consumer_group,
            groups=islice(groups, GROUPS_MAX),
            **_origin_fields(record),
        )

    def _kept_for(self, record: Record, group: str) -> Iterator[GroupTrack]:
        """What the group has done with a message of which retention keeps this copy."""
        for known in self._store.popped.queues():
            if known.key.group != group:
                continue
            with self._store.popped.lock:
                offset = next((offset for offset, at in known.moved.items() if at == record.queue_offset), None)
                state = None if offset is None else state_of(offset, None, known)
            if state is not None:
                yield GroupTrack(consumer_group=group, state=state.state, attempt=state.attempt)
                return
        yield GroupTrack(consumer_group=group, state=TrackState.TRACK_STATE_CONSUMED)

    def _groups_of(self, record: Record) -> Iterator[GroupTrack]:
        topic = self._store.topics.find(record.topic)
        if topic is None:
            return
        offsets, popped = self._store.offsets, self._store.popped
        consuming = {group for group, topics in offsets.groups().items() if topic.name in topics}
        consuming |= {group for group, topics in popped.groups().items() if topic.name in topics}
        for group in sorted(consuming):
            key = QueueOfGroup(group, topic.name, record.queue_id)
            state = state_of(
                record.queue_offset,
                offsets.find(group, topic.name, topic.incarnation, record.queue_id),
                popped.find(key, topic.incarnation),
            )
            if state is not None:
                yield GroupTrack(consumer_group=group, state=state.state, attempt=state.attempt)

    def _open_transaction(self, key: TransactionKey) -> Iterator[MessagePlace]:
        known = self._store.transactions.find(key)
        if known is not None:
            yield MessagePlace(
                kind=PlaceKind.PLACE_KIND_OPEN_TRANSACTION,
                topic=known.half.topic,
                queue_id=known.half.queue_id,
                queue_offset=-1,
                store_time_ms=known.half.store_time_ms,
                check_count=known.check_count,
            )


def _origin_fields(record: Record) -> dict[str, Any]:
    """Fields of the place of a message that was moved."""
    transit = record.transit
    if not transit.origin_topic:
        return {}
    fields: dict[str, Any] = {"origin_topic": transit.origin_topic, "origin_queue_id": transit.origin_queue_id}
    if transit.origin_queue_offset != _IN_NO_QUEUE:
        fields["origin_queue_offset"] = transit.origin_queue_offset
    return fields
