"""Lag, reset and clone of offsets: each for all queues or none, and in the log as a commit is."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from protomq.v1.admin_service_pb2 import DeleteGroupRequest
from protomq.v1.consumer_service_pb2 import (
    CloneOffsetsRequest,
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    GetLagRequest,
    GetLagResponse,
    GetOffsetsRequest,
    GetOffsetsResponse,
    GetQueueRangeRequest,
    QueueOffset,
    ResetOffsetsRequest,
    SearchOffsetRequest,
    SearchOffsetResponse,
)
from protomq.v1.pull_service_pb2 import PullRequest, PullResponse, PullStatus
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker.request_times import AHEAD_MAX_MS
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.topics import TopicConfig, topic_of_broker
from protomq_broker.store.store import Store
from protomq_runtime.testing import FakeCall

from .fake_broker import ADMIN, CONSUMER, PULL, SEND, FakeBroker


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
    assert lags(broker, "g") == lags(broker, "g", "topic") == [(0, 4, 6, 6_000), (1, -1, 0, 0)]
    assert lags(broker, "nobody", "topic") == [(0, -1, 10, 10_000), (1, -1, 0, 0)]
    assert broker.refusal(CONSUMER + "GetLag", GetLagRequest(consumer_group="nobody")).reason == "GROUP_NOT_FOUND"
    unknown = GetLagRequest(consumer_group="g", topic="unknown")
    assert broker.refusal(CONSUMER + "GetLag", unknown).reason == "TOPIC_NOT_FOUND"


def test_a_queue_that_the_group_has_not_touched_counts_whole_with_and_without_the_topic(broker: FakeBroker) -> None:
    request = SendRequest(topic="topic", queue_id=1, records=[Record(body=b"")] * 3)
    assert broker.call(SEND, request).error is None
    broker.clock.time_ms += 1_000
    assert lags(broker, "g") == lags(broker, "g", "topic") == [(0, 4, 6, 7_000), (1, -1, 3, 1_000)]


def test_what_is_left_in_queues_that_the_topic_has_no_more_counts_with_and_without_the_topic(broker: FakeBroker) -> None:
    def send(body: bytes) -> None:
        request = SendRequest(topic="topic", queue_id=1, records=[Record(body=body)])
        assert broker.call(SEND, request).error is None

    def commit(queue_id: int, queue_offset: int) -> None:
        offset = QueueOffset(topic="topic", queue_id=queue_id, queue_offset=queue_offset)
        assert broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=[offset])).error is None

    commit(0, 10)
    send(b"0")
    commit(1, 1)
    for change in ((1, 2), (1, 1)):
        broker.store.topics.put([TopicConfig("topic", *change)])
    assert lags(broker, "g") == lags(broker, "g", "topic") == [(0, 10, 0, 0)]
    for change in ((2, 2), (1, 2)):
        broker.store.topics.put([TopicConfig("topic", *change)])
        if change == (2, 2):
            send(b"1")
    broker.store.topics.put([TopicConfig("topic", 1, 1)])
    assert lags(broker, "g") == lags(broker, "g", "topic") == [(0, 10, 0, 0), (1, 1, 1, 0)]
    assert lags(broker, "nobody", "topic") == [(0, -1, 10, 10_000)]


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


def test_a_reset_to_a_time_ahead_is_refused_since_it_would_skip_everything(broker: FakeBroker) -> None:
    when = Timestamp()
    when.FromMilliseconds(broker.clock.time_ms + AHEAD_MAX_MS + 1)
    request = ResetOffsetsRequest(consumer_group="g", topic="topic", store_time=when)
    error = broker.refusal(CONSUMER + "ResetOffsets", request)
    assert (error.reason, error.field_violations[0][0]) == ("INVALID_ARGUMENT", "store_time")
    assert "say end" in str(error)
    assert lags(broker, "g") == [(0, 4, 6, 6_000), (1, -1, 0, 0)]
    when.FromMilliseconds(broker.clock.time_ms + AHEAD_MAX_MS)
    reset(broker, store_time=when)
    assert lags(broker, "g") == [(0, 10, 0, 0), (1, 0, 0, 0)], "clocks may differ"


def test_a_clone_goes_on_where_the_other_group_is(broker: FakeBroker) -> None:
    reset(broker, queue_offset=3, queue_ids=[0])
    clone = CloneOffsetsRequest(source_group="g", consumer_group="h")
    assert broker.call(CONSUMER + "CloneOffsets", clone).error is None
    assert lags(broker, "h") == lags(broker, "g") == [(0, 3, 7, 7_000), (1, -1, 0, 0)]


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
        ("CloneOffsets", CloneOffsetsRequest(source_group="g", consumer_group="g"), "INVALID_ARGUMENT"),
        ("CloneOffsets", CloneOffsetsRequest(source_group="g", consumer_group="h", topic="none"), "TOPIC_NOT_FOUND"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_changes_nothing(
    broker: FakeBroker, method: str, request_: Any, reason: str
) -> None:
    assert broker.refusal(CONSUMER + method, request_).reason == reason


def test_a_group_that_has_settings_only_is_not_said_to_have_none(broker: FakeBroker) -> None:
    broker.store.groups.put(GroupSettings("set"))
    for method, request in (
        ("GetLag", GetLagRequest(consumer_group="set")),
        ("CloneOffsets", CloneOffsetsRequest(source_group="set", consumer_group="h")),
    ):
        error = broker.refusal(CONSUMER + method, request)
        assert error.reason == "GROUP_NOT_FOUND"
        assert "group 'set' has committed no offset here, and has popped nothing; another broker may know" in str(error)


def committed(broker: FakeBroker) -> dict[int, tuple[int, int]]:
    """(offset, reset epoch) of each queue of `g`."""
    call = broker.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group="g", topic="topic"))
    found = GetOffsetsResponse.FromString(call.answer_payload or b"").offsets
    return {one.queue_id: (one.queue_offset, one.reset_epoch) for one in found}


def commit(
    broker: FakeBroker, *offsets: tuple[int, int, int | None]
) -> list[tuple[int, int, int]]:
    """Commits (queue, offset, reset epoch that is known); what the answer calls reset meanwhile."""
    request = CommitOffsetsRequest(consumer_group="g")
    for queue_id, offset, epoch in offsets:
        request.offsets.add(topic="topic", queue_id=queue_id, queue_offset=offset, reset_epoch=epoch)
    call = broker.call(CONSUMER + "CommitOffsets", request)
    assert call.error is None
    found = CommitOffsetsResponse.FromString(call.answer_payload or b"").resets
    return [(one.queue_id, one.queue_offset, one.reset_epoch) for one in found]


def test_a_commit_from_before_a_reset_is_not_taken_and_learns_of_it(broker: FakeBroker) -> None:
    assert commit(broker, (0, 5, 0)) == []
    assert committed(broker) == {0: (5, 0)}
    reset(broker, queue_offset=2, queue_ids=[0])
    offset, epoch = committed(broker)[0]
    assert (offset, epoch > 0) == (2, True)
    # The other queue of the same commit was not reset: it is taken.
    assert commit(broker, (0, 6, 0), (1, 0, 0)) == [(0, 2, epoch)]
    assert committed(broker) == {0: (2, epoch), 1: (0, 0)}
    assert commit(broker, (0, 6, 0)) == [(0, 2, epoch)]
    # Whoever knows of it commits on; the epoch stays.
    assert commit(broker, (0, 3, epoch)) == []
    assert committed(broker)[0] == (3, epoch)
    # So does whoever knows nothing of resets.
    assert commit(broker, (0, 4, None)) == []
    assert committed(broker)[0] == (4, epoch)
    # A reset to where the group is is a reset.
    reset(broker, queue_offset=4, queue_ids=[0])
    assert committed(broker)[0][0] == 4
    assert committed(broker)[0][1] > epoch
    assert commit(broker, (0, 5, epoch)) == [(0, *committed(broker)[0])]


def test_resets_outlive_a_restart_and_a_group_that_was_deleted_has_none(broker: FakeBroker) -> None:
    reset(broker, queue_offset=2, queue_ids=[0])
    _, epoch = committed(broker)[0]
    assert commit(broker, (0, 3, epoch)) == []
    broker.store.close()
    again = FakeBroker(disk=broker.disk)
    assert committed(again)[0] == (3, epoch)
    assert commit(again, (0, 5, 0)) == [(0, 3, epoch)]
    assert again.call(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="g", force=True)).error is None
    assert commit(again, (0, 6, epoch)) == []
    assert committed(again) == {0: (6, 0)}
    reset(again, queue_offset=1, queue_ids=[0])
    assert committed(again)[0][1] not in (0, epoch)
    assert commit(again, (0, 6, epoch)) == [(0, *committed(again)[0])]


def pull(broker: FakeBroker, queue_offset: int, **fields: Any) -> FakeCall:
    request = PullRequest(
        topic="topic", queue_id=0, queue_offset=queue_offset, consumer_group="g", **fields
    )
    return broker.call(PULL, request)


def told(call: FakeCall) -> tuple[str, int, int]:
    """(status, next offset, reset epoch) of the answer."""
    response = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
    assert isinstance(response, PullResponse)
    status = PullStatus.Name(response.status).removeprefix("PULL_STATUS_")
    return status, response.next_offset, response.reset_epoch


def test_a_pull_from_before_a_reset_is_told_where_to_go_on(broker: FakeBroker) -> None:
    assert told(pull(broker, 4, reset_epoch=0)) == ("FOUND", 10, 0)
    reset(broker, queue_offset=2, queue_ids=[0])
    _, epoch = committed(broker)[0]
    assert told(pull(broker, 4, reset_epoch=0, commit_offset=4)) == ("OFFSET_RESET", 2, epoch)
    assert told(pull(broker, 4, reset_epoch=0, hold_ms=1_000)) == ("OFFSET_RESET", 2, epoch)
    assert told(pull(broker, 2, reset_epoch=epoch)) == ("FOUND", 10, 0)
    assert told(pull(broker, 4)) == ("FOUND", 10, 0)
    broker.server.run()
    assert committed(broker)[0] == (2, epoch), "the offset that a pull from before commits is not taken"
    refused = broker.refusal(PULL, PullRequest(topic="topic", reset_epoch=1))
    assert refused.reason == "INVALID_ARGUMENT", "resets are of a group"


def test_a_held_pull_is_answered_when_its_group_is_reset(broker: FakeBroker) -> None:
    held = pull(broker, 10, reset_epoch=0, hold_ms=60_000)
    unaware = pull(broker, 10, hold_ms=60_000)
    request = PullRequest(
        topic="topic", queue_offset=10, consumer_group="h", reset_epoch=0, hold_ms=60_000
    )
    other = broker.call(PULL, request)
    assert not held.answered
    reset(broker, queue_offset=3, queue_ids=[0])
    broker.server.run()
    assert told(held) == ("OFFSET_RESET", 3, committed(broker)[0][1])
    assert not unaware.answered
    assert not other.answered


def test_a_clone_leaves_the_retries_to_their_group(broker: FakeBroker) -> None:
    broker.store.topics.create(topic_of_broker("%RETRY%g"))
    offset = QueueOffset(topic="%RETRY%g", queue_id=0, queue_offset=0)
    assert broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=[offset])).error is None
    clone = CloneOffsetsRequest(source_group="g", consumer_group="h")
    assert broker.call(CONSUMER + "CloneOffsets", clone).error is None
    assert broker.store.offsets.groups()["h"] == ["topic"]


def test_members_follow_a_clone_too(broker: FakeBroker) -> None:
    held = pull(broker, 10, reset_epoch=0, hold_ms=60_000)
    source = CommitOffsetsRequest(
        consumer_group="source", offsets=[QueueOffset(topic="topic", queue_id=0, queue_offset=1)]
    )
    assert broker.call(CONSUMER + "CommitOffsets", source).error is None
    clone = CloneOffsetsRequest(source_group="source", consumer_group="g")
    assert broker.call(CONSUMER + "CloneOffsets", clone).error is None
    broker.server.run()
    assert told(held) == ("OFFSET_RESET", 1, committed(broker)[0][1])


def test_a_reader_whose_messages_were_taken_back_is_told_where_the_logs_part(broker: FakeBroker) -> None:
    first = pull(broker, 4).answer_payload
    epoch = PullResponse.FromString(first or b"").log_epoch
    assert epoch == broker.store.last_epoch > 0
    assert told(pull(broker, 10, log_epoch=epoch)) == ("NO_NEW_MSG", 10, 0)
    broker.store.close()
    # A later leader, whose log has the first ten messages of that epoch only, and others behind them.
    later = FakeBroker(disk=broker.disk)
    for at in range(10, 14):
        request = SendRequest(topic="topic", queue_id=0, records=[Record(body=b"other %d" % at)])
        assert later.call(SEND, request).error is None
    assert told(pull(later, 10, log_epoch=epoch)) == ("FOUND", 14, 0)
    assert told(pull(later, 12)) == ("FOUND", 14, 0), "who names no epoch is not told"
    answer = PullResponse.FromString(pull(later, 12, log_epoch=epoch, commit_offset=12).answer_payload or b"")
    assert (answer.status, answer.next_offset) == (PullStatus.PULL_STATUS_DIVERGED, 10)
    assert answer.log_epoch == later.store.last_epoch > epoch
    assert told(pull(later, 12, log_epoch=answer.log_epoch)) == ("FOUND", 14, 0)
    assert later.store.offsets.of_topic("g", "topic", later.topic.incarnation) == {0: 4}, "12 was not committed"


def test_a_reader_that_stands_at_damage_is_told_where_the_logs_part(broker: FakeBroker) -> None:
    epoch = broker.store.last_epoch
    broker.store.close()
    later = FakeBroker(disk=broker.disk)
    request = SendRequest(topic="topic", queue_id=0, records=[Record(body=b"other")] * 4)
    assert later.call(SEND, request).error is None
    (region,) = later.store.read("topic", 0, 12, 1, 1).regions
    start = region.file.base_position + region.offset
    later.store._quarantine.add(DamagedRange(start, start + region.size_bytes, 0, "a flipped bit"))
    error = pull(later, 12).error
    assert error is not None
    assert error.reason == "CORRUPT_LOG"
    assert told(pull(later, 12, log_epoch=epoch)) == ("DIVERGED", 10, 0)


@pytest.mark.parametrize(("offset", "stored"), [(8, 8), (12, 10), (20, 10)])
def test_a_commit_of_what_was_taken_back_stands_where_the_logs_part(
    broker: FakeBroker, offset: int, stored: int
) -> None:
    epoch = broker.store.last_epoch
    broker.store.close()
    later = FakeBroker(disk=broker.disk)
    for at in range(10, 14):
        request = SendRequest(topic="topic", queue_id=0, records=[Record(body=b"other %d" % at)])
        assert later.call(SEND, request).error is None
    one = QueueOffset(topic="topic", queue_id=0, queue_offset=offset, log_epoch=epoch)
    commit = CommitOffsetsRequest(consumer_group="g", offsets=[one])
    assert later.call(CONSUMER + "CommitOffsets", commit).error is None
    answer = later.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group="g", topic="topic"))
    found = GetOffsetsResponse.FromString(answer.answer_payload or b"")
    assert [(each.queue_offset, each.log_epoch) for each in found.offsets] == [(stored, 0)]
    assert found.log_epoch == later.store.last_epoch


def test_a_master_that_knows_less_than_its_caller_does_not_call_an_offset_illegal(broker: FakeBroker) -> None:
    epoch = broker.store.last_epoch
    request = PullRequest(topic="topic", queue_offset=12, log_epoch=epoch + 1)
    assert broker.refusal(PULL, request).reason == "REPLICA_BEHIND"
    assert told(pull(broker, 12, log_epoch=epoch)) == ("OFFSET_ILLEGAL", 10, 0)


@pytest.mark.parametrize("source", ["%", "g"])
def test_what_is_wrong_with_the_source_of_a_clone_is_said_of_the_source(broker: FakeBroker, source: str) -> None:
    clone = CloneOffsetsRequest(source_group=source, consumer_group="g")
    error = broker.call(CONSUMER + "CloneOffsets", clone).error
    assert error is not None
    assert ": source_group: " in str(error)


@pytest.mark.parametrize(("place", "expected"), [({"end": True}, 10), ({"queue_offset": 9}, 9)], ids=["end", "offset"])
def test_a_reset_right_after_a_fail_over_goes_where_it_says(broker: FakeBroker, place: dict[str, Any], expected: int) -> None:
    """Though the new master does not know yet that anything is confirmed."""
    broker.store.flush()
    with mock.patch.object(Store, "open", partial(Store.open, waits_for_replicas=True)):
        promoted = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
    assert promoted.store.queue_range("topic", 0) == (0, 0)
    call = promoted.call(CONSUMER + "ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0], **place))
    promoted.store.positions.wait_for_replicas(False)
    promoted.store.flush()
    promoted.server.run()
    assert (call.answered, call.error) == (True, None)
    assert promoted.store.offsets.find("g", "topic", promoted.topic.incarnation, 0) == expected


def test_a_reset_to_a_time_right_after_a_fail_over_goes_there(broker: FakeBroker) -> None:
    """Though the new master does not know yet that anything is confirmed."""
    start = Timestamp()
    start.FromMilliseconds(broker.clock.time_ms - 2_000)
    broker.store.flush()
    with mock.patch.object(Store, "open", partial(Store.open, waits_for_replicas=True)):
        promoted = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
    call = promoted.call(CONSUMER + "ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0], store_time=start))
    promoted.store.positions.wait_for_replicas(False)
    promoted.store.flush()
    promoted.server.run()
    assert (call.answered, call.error) == (True, None)
    assert promoted.store.offsets.find("g", "topic", promoted.topic.incarnation, 0) == 8


def test_a_reset_behind_what_may_not_be_read_yet_sets_no_member_back() -> None:
    """What is appended is readable once the disk has it. A member that was told of the reset before must not begin in front of that."""
    broker = FakeBroker(sync_flush=True)
    broker.store.flush()
    sent = broker.call(SEND, SendRequest(topic="topic", queue_id=0, records=[Record(body=b"new")] * 3))
    reset = broker.call(CONSUMER + "ResetOffsets", ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0], end=True))
    assert told(pull(broker, 0, reset_epoch=0))[:2] == ("OFFSET_RESET", 3)
    assert broker.refusal(PULL, PullRequest(topic="topic", queue_offset=3)).reason == "REPLICA_BEHIND"
    assert told(pull(broker, 4)) == ("OFFSET_ILLEGAL", 0, 0), "nothing will ever stand before that"
    broker.store.flush()
    broker.server.run()
    assert (sent.error, reset.error) == (None, None)
    assert told(pull(broker, 3)) == ("NO_NEW_MSG", 3, 0)


def test_where_a_queue_ends_is_not_told_before_a_new_master_knows_it(broker: FakeBroker) -> None:
    """KIP-207: a group that begins with the latest would get again what others had before the fail-over."""
    late = Timestamp()
    late.FromMilliseconds(broker.clock.time_ms)
    asked = (
        (CONSUMER + "GetQueueRange", GetQueueRangeRequest(topic="topic")),
        (CONSUMER + "SearchOffset", SearchOffsetRequest(topic="topic", store_time=late)),
    )
    broker.store.flush()
    with mock.patch.object(Store, "open", partial(Store.open, waits_for_replicas=True)):
        promoted = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
    for method, request in asked:
        assert promoted.refusal(method, request).reason == "REPLICA_BEHIND"
    empty = promoted.call(CONSUMER + "GetQueueRange", GetQueueRangeRequest(topic="topic", queue_ids=[1]))
    assert empty.error is None
    positions = promoted.store.positions
    positions.note_replicated(positions.appended)
    for method, request in asked:
        assert promoted.call(method, request).error is None
    found = SearchOffsetResponse.FromString(promoted.call(*asked[1]).answer_payload or b"")
    assert found.queue_offset == 10


def commit_from(broker: FakeBroker, *offsets: tuple[int, int, int], epoch: int = 0, group: str = "g") -> CommitOffsetsResponse:
    """Commits (queue, offset, where the caller began by a slave's word)."""
    request = CommitOffsetsRequest(consumer_group=group)
    for queue_id, offset, began in offsets:
        request.offsets.add(topic="topic", queue_id=queue_id, queue_offset=offset, reset_epoch=epoch, began_offset=began)
    call = broker.call(CONSUMER + "CommitOffsets", request)
    assert call.error is None
    return CommitOffsetsResponse.FromString(call.answer_payload or b"")


def kept_of(answer: CommitOffsetsResponse) -> list[tuple[int, int, int]]:
    """(queue, offset, reset epoch) of what the group has committed instead."""
    assert not any(one.HasField("began_offset") for one in answer.kept)
    return [(one.queue_id, one.queue_offset, one.reset_epoch) for one in answer.kept]


def test_whoever_began_where_a_slave_said_takes_back_nothing_that_was_committed(broker: FakeBroker) -> None:
    assert commit(broker, (0, 6, 0)) == []
    # The slave said 2, and the group was at 6: what it did again is no news.
    assert kept_of(commit_from(broker, (0, 5, 2), (1, 0, 0))) == [(0, 6, 0)]
    assert committed(broker) == {0: (6, 0), 1: (0, 0)}, "the other queue of the same commit is taken"
    # All from 2 to 8 is done.
    assert kept_of(commit_from(broker, (0, 8, 2))) == []
    assert committed(broker)[0] == (8, 0)
    # Who sought back does not name where it began.
    assert commit(broker, (0, 3, 0)) == []
    assert committed(broker)[0] == (3, 0)


def test_whoever_began_at_the_end_at_a_slave_that_did_not_know_the_group_skips_nothing(broker: FakeBroker) -> None:
    assert kept_of(commit_from(broker, (0, 9, 7))) == [(0, 4, 0)], "nobody has done 4 to 6"
    assert committed(broker)[0] == (4, 0)
    assert kept_of(commit_from(broker, (0, 9, 7), group="new")) == []


def test_a_reset_wins_over_where_a_member_began_at_a_slave(broker: FakeBroker) -> None:
    reset(broker, queue_offset=2, queue_ids=[0])
    _, epoch = committed(broker)[0]
    answer = commit_from(broker, (0, 6, 4), epoch=0)
    assert ([(one.queue_offset, one.reset_epoch) for one in answer.resets], kept_of(answer)) == ([(2, epoch)], [])
    assert commit(broker, (0, 5, epoch)) == []
    assert kept_of(commit_from(broker, (0, 3, 2), epoch=epoch)) == [(0, 5, epoch)]


def test_a_slave_says_that_it_is_one(broker: FakeBroker) -> None:
    def is_from_slave() -> bool:
        call = broker.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group="g", topic="topic"))
        return GetOffsetsResponse.FromString(call.answer_payload or b"").from_slave

    assert not is_from_slave()
    with mock.patch.object(Store, "is_leading", False):
        assert is_from_slave()
    # It was paused, or cut off, and another one may have taken commits since.
    with mock.patch.object(broker.consumer, "_may_have_lost_lead", return_value=True):
        assert is_from_slave()
