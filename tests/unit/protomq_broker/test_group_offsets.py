"""Lag, reset and clone of offsets: each for all queues or none, and in the log as a commit is."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from protomq.v1.consumer_service_pb2 import (
    CloneOffsetsRequest,
    CommitOffsetsRequest,
    GetLagRequest,
    GetLagResponse,
    QueueOffset,
    ResetOffsetsRequest,
)
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest

from .fake_broker import CONSUMER, SEND, FakeBroker


@pytest.fixture
def broker() -> FakeBroker:
    """Queue 0 of `topic` has ten messages, one a second; the group `g` has consumed four of them."""
    broker = FakeBroker()
    for at in range(10):
        request = SendRequest(topic="topic", queue_id=0, records=[Record(body=b"%d" % at)])
        assert broker.call(SEND, request).error is None
        broker.clock.time_ms += 1_000
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=4)
    commit = CommitOffsetsRequest(consumer_group="g", offsets=[offset])
    assert broker.call(CONSUMER + "CommitOffsets", commit).error is None
    return broker


def lags(broker: FakeBroker, group: str, topic: str = "") -> list[tuple[int, int, int, int]]:
    """(queue, committed, lag, delay) of each queue."""
    call = broker.call(CONSUMER + "GetLag", GetLagRequest(consumer_group=group, topic=topic))
    assert call.error is None
    found = GetLagResponse.FromString(call.answer_payload or b"").queues
    assert all(queue.topic == "topic" for queue in found)
    return [(queue.queue_id, queue.committed_offset, queue.lag, queue.delay_ms) for queue in found]


def reset(broker: FakeBroker, **fields: Any) -> None:
    request = ResetOffsetsRequest(consumer_group="g", topic="topic", **fields)
    assert broker.call(CONSUMER + "ResetOffsets", request).error is None


def test_lag_is_counted_in_messages_and_in_time(broker: FakeBroker) -> None:
    assert lags(broker, "g") == [(0, 4, 6, 6_000)]
    assert lags(broker, "g", "topic") == [(0, 4, 6, 6_000), (1, -1, 0, 0)]
    assert lags(broker, "nobody", "topic") == [(0, -1, 10, 10_000), (1, -1, 0, 0)]
    assert broker.refusal(CONSUMER + "GetLag", GetLagRequest(consumer_group="nobody")).reason == "GROUP_NOT_FOUND"
    unknown = GetLagRequest(consumer_group="g", topic="unknown")
    assert broker.refusal(CONSUMER + "GetLag", unknown).reason == "TOPIC_NOT_FOUND"


def test_a_group_goes_on_at_a_time_an_offset_or_the_end(broker: FakeBroker) -> None:
    reset(broker, end=True)
    assert lags(broker, "g") == [(0, 10, 0, 0), (1, 0, 0, 0)]
    reset(broker, queue_offset=7, queue_ids=[0])
    assert lags(broker, "g")[0] == (0, 7, 3, 3_000)
    reset(broker, queue_offset=1_000)
    assert lags(broker, "g")[0] == (0, 10, 0, 0)
    when = Timestamp()
    when.FromMilliseconds(broker.clock.time_ms - 5_500)
    reset(broker, store_time=when)
    assert lags(broker, "g")[0] == (0, 5, 5, 5_000)
    broker.store.close()
    again = FakeBroker(disk=broker.disk)
    assert again.store.offsets.of_topic("g", "topic", broker.topic.incarnation) == {0: 5, 1: 0}


def test_a_clone_goes_on_where_the_other_group_is(broker: FakeBroker) -> None:
    reset(broker, queue_offset=3, queue_ids=[0])
    clone = CloneOffsetsRequest(source_group="g", consumer_group="h")
    assert broker.call(CONSUMER + "CloneOffsets", clone).error is None
    assert lags(broker, "h") == lags(broker, "g") == [(0, 3, 7, 7_000)]


@pytest.mark.parametrize(
    ("method", "request_", "reason"),
    [
        ("ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="topic"), "INVALID_ARGUMENT"),
        ("ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="topic", end=False), "INVALID_ARGUMENT"),
        ("ResetOffsets", ResetOffsetsRequest(consumer_group="", topic="topic", end=True), "INVALID_ARGUMENT"),
        ("ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="none", end=True), "TOPIC_NOT_FOUND"),
        ("ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0, 2], end=True), "QUEUE_NOT_FOUND"),
        ("CloneOffsets", CloneOffsetsRequest(source_group="nobody", consumer_group="h"), "GROUP_NOT_FOUND"),
        ("CloneOffsets", CloneOffsetsRequest(source_group="g", consumer_group="%"), "INVALID_ARGUMENT"),
        ("CloneOffsets", CloneOffsetsRequest(source_group="g", consumer_group="h", topic="none"), "TOPIC_NOT_FOUND"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_changes_nothing(
    broker: FakeBroker, method: str, request_: Any, reason: str
) -> None:
    assert broker.refusal(CONSUMER + method, request_).reason == reason
