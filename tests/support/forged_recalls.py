"""Recalls by handles that nobody was given: whoever knows a message and its time can make one by hand."""

from __future__ import annotations

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import RecallMessageRequest, RecallMessageResponse
from protomq.wire.recall_handle import RecallHandle, encode_handle
from protomq_broker.recalls import Recalls
from protomq_broker.store.store import Store
from protomq_runtime.errors import ServiceError

from .retry_world import Call, Lane


def taken_back(recalls: Recalls, store: Store) -> list[Record]:
    """The pending messages that are recalled so: of each two tries, one as if it had been carried forward, one by its position.

    Nothing is appended or flushed if there are none.
    """
    positions = [int(at) for rows in store.pending.below(store.readable_position) for at in rows["position"]]
    found = []
    for position in positions:
        octets = store.record_at(position)
        assert octets is not None, f"no record at {position}"
        record = Record.FromString(octets)
        identity = record.producer_id, record.producer_epoch, record.sequence
        for at in (0, position):
            handle = encode_handle(RecallHandle(recalls._broker_name, at, record.due_time_ms, identity))
            call = Call(b"", Lane())
            try:
                recalls.recall(RecallMessageRequest(topic=record.topic, recall_handle=handle), call)  # type: ignore[arg-type]
            except ServiceError as error:
                # A disk that failed took no record of the topic; it is made again when the first message falls due.
                if error.reason != "TOPIC_NOT_FOUND":
                    raise
                continue
            # One that is taken back waits for the disk.
            if not call.answered or RecallMessageResponse.FromString(call.outcome or b"").recalled:  # type: ignore[arg-type]
                found.append(record)
    return found
