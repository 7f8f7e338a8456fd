"""ConsumerService through a fake lane: offsets of groups, ranges, offsets by time, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetOffsetsRequest,
    GetQueueRangeRequest,
    QueueOffset,
    SearchOffsetRequest,
)
from protomq_broker.consumer_service import OFFSETS_PER_COMMIT_MAX
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.testing.simdisk import Fault
from protomq_runtime.errors import SHUTTING_DOWN

from .fake_broker import CONSUMER, FakeBroker, told

COMMIT = CONSUMER + "CommitOffsets"
GET = CONSUMER + "GetOffsets"
RANGE = CONSUMER + "GetQueueRange"
SEARCH = CONSUMER + "SearchOffset"
INVALID: tuple[str, str, dict[str, str]] = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})
NO_TOPIC = ("NOT_FOUND", "TOPIC_NOT_FOUND", {"topic": "other"})
NO_QUEUE = ("NOT_FOUND", "QUEUE_NOT_FOUND", {"topic": "topic", "queue_id": "2", "read_queues": "2"})


def commit(*offsets: tuple[int, int], group: str = "group", **fields: Any) -> CommitOffsetsRequest:
    """`offsets`: (queue id, offset) in the topic."""
    made = [
        QueueOffset(**{"topic": "topic", "queue_id": queue_id, "queue_offset": offset, **fields})
        for queue_id, offset in offsets
    ]
    return CommitOffsetsRequest(consumer_group=group, offsets=made)


def committed(broker: FakeBroker, group: str = "group") -> dict[int, int]:
    response = broker.call(GET, GetOffsetsRequest(consumer_group=group, topic="topic")).response()
    return {offset.queue_id: offset.queue_offset for offset in response.offsets}


def filled(**settings: Any) -> FakeBroker:
    """With three messages in queue 0."""
    broker = FakeBroker(**settings)
    broker.fill([b"a", b"b", b"c"])
    return broker


# Commits.


def test_what_is_committed_is_told_and_may_rise_and_fall() -> None:
    broker = filled()
    for offsets in ([(0, 1), (1, 0)], [(0, 3)], [(0, 2)]):
        broker.call(COMMIT, commit(*offsets)).response()
    assert committed(broker) == {0: 2, 1: 0}
    assert committed(broker, "other") == {}


def test_commits_of_one_turn_are_one_append() -> None:
    broker = filled()
    begin = broker.store.appended_position
    calls = [
        broker.server.call(COMMIT, commit((0, number), group=f"g{number}")) for number in range(3)
    ]
    broker.server.run()
    for call in calls:
        call.response()
    alone = FakeBroker()
    alone.fill([b"a", b"b", b"c"])
    alone.call(COMMIT, commit((0, 0), group="g0"))
    size_of_one = alone.store.appended_position - begin
    assert broker.store.appended_position - begin < 2 * size_of_one


def test_the_same_commit_again_appends_nothing() -> None:
    broker = filled()
    broker.call(COMMIT, commit((0, 1))).response()
    position = broker.store.appended_position
    broker.call(COMMIT, commit((0, 1))).response()
    assert broker.store.appended_position == position


def test_under_sync_flush_a_commit_is_answered_when_it_is_on_the_disk() -> None:
    broker = FakeBroker(sync_flush=True)
    call = broker.call(COMMIT, commit((0, 0)))
    assert not call.answered
    broker.store.flush()
    broker.server.run()
    call.response()


def test_a_commit_that_the_disk_does_not_confirm_in_time_is_doubtful() -> None:
    broker = FakeBroker(sync_flush=True, sync_flush_timeout_ms=500)
    call = broker.call(COMMIT, commit((0, 0)))
    broker.advance(500)
    assert call.error is not None
    assert call.error.reason == "DEADLINE_EXCEEDED"
    assert call.error.metadata["definite"] == "false"


def test_a_commit_that_the_disk_loses_is_doubtful() -> None:
    broker = FakeBroker(sync_flush=True)
    call = broker.call(COMMIT, commit((0, 0)))
    broker.disk.fail_at(1, Fault.SYNC_LOST)
    broker.store.flush()
    broker.server.run()
    assert call.error is not None
    assert (call.error.reason, call.error.metadata["definite"]) == ("STORE_FAILED", "false")


def test_a_commit_is_taken_where_the_disk_is_too_full_for_messages() -> None:
    broker = filled()
    broker.store._refusals.refuse("the disk is full")
    broker.call(COMMIT, commit((0, 1))).response()
    assert committed(broker) == {0: 1}


def test_a_broker_that_may_not_write_commits_nothing() -> None:
    broker = FakeBroker(is_permitted=False)
    broker.permit.refuse(SHUTTING_DOWN)
    assert told(broker.refusal(COMMIT, commit((0, 0))))[:2] == ("UNAVAILABLE", "SHUTTING_DOWN")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (commit((0, 0), group=""), INVALID),
        (commit((0, 0), group="no/group"), INVALID),
        (commit((0, 0), (0, 1)), INVALID),
        (commit(*((0, 0),) * (OFFSETS_PER_COMMIT_MAX + 1)), INVALID),
        (commit((0, 0), topic="other"), NO_TOPIC),
        (commit((0, 0), topic=""), INVALID),
        (commit((2, 0)), ("NOT_FOUND", "QUEUE_NOT_FOUND", {**NO_QUEUE[2], "queue_ids": "2"})),
        (commit((3, 0), (0, 1), (2, 0)), ("NOT_FOUND", "QUEUE_NOT_FOUND", {**NO_QUEUE[2], "queue_ids": "2,3"})),
        (commit((-1, 0)), ("NOT_FOUND", "QUEUE_NOT_FOUND", {**NO_QUEUE[2], "queue_id": "-1", "queue_ids": "-1"})),
        *(
            (
                commit((1, 0), (0, offset)),  # the first is good: all of them or none
                (
                    "OUT_OF_RANGE",
                    "OFFSET_OUT_OF_RANGE",
                    {
                        "topic": "topic",
                        "queue_id": "0",
                        "queue_offset": str(offset),
                        "min_offset": "0",
                        "end_offset": "3",
                    },
                ),
            )
            for offset in (-1, 4)
        ),
    ],
)
def test_a_commit_that_is_refused_says_why_and_commits_nothing(
    request_: CommitOffsetsRequest, expected: tuple[str, str, dict[str, str]]
) -> None:
    broker = filled()
    assert told(broker.refusal(COMMIT, request_)) == expected
    assert committed(broker) == {}


def test_what_was_had_of_a_queue_that_is_gone_is_committed_and_does_not_come_again() -> None:
    broker = filled()
    broker.fill([b"d", b"e"], queue_id=1)
    broker.store.topics.put([TopicConfig("topic", 1, 1)])
    broker.call(COMMIT, commit((0, 3), (1, 1))).response()
    assert committed(broker) == {0: 3, 1: 1}
    assert broker.refusal(COMMIT, commit((1, 3))).reason == "OFFSET_OUT_OF_RANGE"
    broker.store.topics.put([TopicConfig("topic", 2, 2)])
    assert committed(broker) == {0: 3, 1: 1}


@pytest.mark.parametrize("path", [COMMIT, GET, RANGE, SEARCH])
def test_what_does_not_parse_is_refused(path: str) -> None:
    assert told(FakeBroker().refusal(path, b"\xff\xff")) == INVALID


@pytest.mark.parametrize(
    ("path", "make"),
    [
        (COMMIT, lambda wanted: commit((0, 0), topic_incarnation=wanted)),
        (
            GET,
            lambda wanted: GetOffsetsRequest(
                consumer_group="g", topic="topic", topic_incarnation=wanted
            ),
        ),
        (RANGE, lambda wanted: GetQueueRangeRequest(topic="topic", topic_incarnation=wanted)),
        (SEARCH, lambda wanted: _search(0, topic_incarnation=wanted)),
    ],
)
def test_each_call_knows_the_incarnation_that_is_meant(path: str, make: Any) -> None:
    broker = FakeBroker()
    current = broker.topic.incarnation
    broker.call(path, make(current)).response()
    expected = {"topic": "topic", "wanted": str(current + 1), "current": str(current)}
    assert told(broker.refusal(path, make(current + 1))) == (
        "FAILED_PRECONDITION",
        "TOPIC_RECREATED",
        expected,
    )


def test_a_commit_for_a_topic_that_was_made_again_with_fewer_queues_is_told_so() -> None:
    broker = filled()
    before = broker.topic.incarnation
    broker.store.delete_topic("topic")
    broker.store.topics.create(TopicConfig("topic", 1, 1))
    refusal = broker.refusal(COMMIT, commit((1, 0), topic_incarnation=before))
    assert refusal.reason == "TOPIC_RECREATED"


# Look-ups.


def test_queues_that_are_named_are_told_if_they_have_an_offset() -> None:
    broker = filled()
    broker.call(COMMIT, commit((0, 2)))
    request = GetOffsetsRequest(consumer_group="group", topic="topic", queue_ids=[1, 0])
    response = broker.call(GET, request).response()
    assert [(offset.queue_id, offset.queue_offset) for offset in response.offsets] == [(0, 2)]
    assert (
        response.topic_incarnation
        == response.offsets[0].topic_incarnation
        == broker.topic.incarnation
    )


def test_the_ranges_of_all_queues_or_of_those_that_are_named() -> None:
    broker = filled()

    def ranges(*queue_ids: int) -> list[tuple[int, int, int]]:
        request = GetQueueRangeRequest(topic="topic", queue_ids=queue_ids)
        response = broker.call(RANGE, request).response()
        return [(found.queue_id, found.min_offset, found.end_offset) for found in response.ranges]

    assert ranges() == [(0, 0, 3), (1, 0, 0)]
    assert ranges(1) == [(1, 0, 0)]


def _search(time_s: int, **fields: Any) -> SearchOffsetRequest:
    request = SearchOffsetRequest(**{"topic": "topic", "queue_id": 0, **fields})
    request.store_time.seconds = time_s
    return request


def test_an_offset_is_found_by_its_time() -> None:
    broker = FakeBroker()
    begin_s = broker.clock.time_ms // 1_000
    for _ in range(3):
        broker.fill([b"x"])
        broker.clock.time_ms += 10_000
    for time_s, expected in (
        (0, 0),
        (begin_s, 0),
        (begin_s + 1, 1),
        (begin_s + 20, 2),
        (begin_s + 21, 3),
    ):
        response = broker.call(SEARCH, _search(time_s)).response()
        assert (response.queue_offset, response.topic_incarnation) == (
            expected,
            broker.topic.incarnation,
        )


@pytest.mark.parametrize(
    ("path", "request_", "expected"),
    [
        (GET, GetOffsetsRequest(consumer_group="", topic="topic"), INVALID),
        (GET, GetOffsetsRequest(consumer_group="group", topic="other"), NO_TOPIC),
        (GET, GetOffsetsRequest(consumer_group="group", topic="topic", queue_ids=[2]), NO_QUEUE),
        (GET, GetOffsetsRequest(consumer_group="group", topic="topic", queue_ids=[0, 0]), INVALID),
        (RANGE, GetQueueRangeRequest(topic="other"), NO_TOPIC),
        (RANGE, GetQueueRangeRequest(topic="topic", queue_ids=[0, 2]), NO_QUEUE),
        (RANGE, GetQueueRangeRequest(topic="topic", queue_ids=[1, 1]), INVALID),
        (SEARCH, _search(0, topic="other"), NO_TOPIC),
        (SEARCH, _search(0, queue_id=2), NO_QUEUE),
        (SEARCH, SearchOffsetRequest(topic="topic"), INVALID),
    ],
)
def test_a_look_up_that_is_refused_says_why(
    path: str, request_: Any, expected: tuple[str, str, dict[str, str]]
) -> None:
    assert told(FakeBroker().refusal(path, request_)) == expected


def test_a_topic_that_may_not_be_read_is_not_searched() -> None:
    broker = FakeBroker()
    broker.store.topics.create(TopicConfig("secret", 1, 1, readable=False))
    expected = ("PERMISSION_DENIED", "NOT_PERMITTED", {"topic": "secret"})
    assert told(broker.refusal(SEARCH, _search(0, topic="secret"))) == expected
