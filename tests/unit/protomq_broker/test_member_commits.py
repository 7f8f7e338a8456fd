"""Commits that name a membership: a broker takes those of members that have the queues, and refuses those of members that were given up."""

from __future__ import annotations

from typing import Any
from unittest import mock

from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    CommittingMember,
    GetOffsetsRequest,
    QueueOffset,
    ResetOffsetsRequest,
)
from protomq.v1.membership_service_pb2 import GroupMember, MemberTopic
from protomq.v1.queue_lock_service_pb2 import LockQueuesRequest, QueueName
from protomq.v1.state_pb2 import OffsetsRecord
from protomq.wire.topics import OFFSETS_TOPIC
from protomq_broker.system_writer import SystemWriter
from protomq_runtime.testing import FakeCall

from .fake_broker import CONSUMER, LOCKS, FakeBroker

GAP_MS = 25_000


def made() -> FakeBroker:
    broker = FakeBroker()
    for queue_id in (0, 1):
        broker.fill([b"x"] * 20, queue_id=queue_id)
    return broker


def says(broker: FakeBroker, name: str, *queue_ids: int, epoch: int = 1) -> None:
    """The member has these queues; it holds no call."""
    said = GroupMember(
        client_id=name, nonce=7, topics=[MemberTopic(topic="topic", queue_ids=queue_ids)], member_epoch=epoch
    )
    now_ms = broker.clock.monotonic_ms()
    broker.memberships.seen("g", said, "peer", now_ms, rejoins=False)
    broker.memberships.held("g", (name, 7))
    broker.memberships.answered("g", (name, 7), now_ms)


def request(offsets: dict[int, int], **member: Any) -> CommitOffsetsRequest:
    made = CommitOffsetsRequest(
        consumer_group="g",
        offsets=[QueueOffset(topic="topic", queue_id=queue_id, queue_offset=offset) for queue_id, offset in offsets.items()],
    )
    if member:
        made.member.CopyFrom(CommittingMember(**{"nonce": 7, "member_epoch": 1, **member}))
    return made


def commit(broker: FakeBroker, offsets: dict[int, int], **member: Any) -> FakeCall:
    return broker.call(CONSUMER + "CommitOffsets", request(offsets, **member))


def committed(broker: FakeBroker) -> dict[int, int]:
    response = broker.call(CONSUMER + "GetOffsets", GetOffsetsRequest(consumer_group="g", topic="topic")).response()
    return {offset.queue_id: offset.queue_offset for offset in response.offsets}


def refusal(broker: FakeBroker, offsets: dict[int, int], **member: Any) -> tuple[str, dict[str, str]]:
    before = broker.memberships.refused_commit_count
    error = broker.refusal(CONSUMER + "CommitOffsets", request(offsets, **member))
    metadata = dict(error.metadata)
    assert metadata.pop("definite") == "true"
    assert broker.memberships.refused_commit_count == before + 1
    return error.reason, metadata


def test_a_member_commits_in_the_queues_that_it_has_and_the_log_does_not_keep_who_it_was() -> None:
    broker = made()
    says(broker, "a", 0, 1)
    with mock.patch.object(SystemWriter, "append", autospec=True, side_effect=SystemWriter.append) as append:
        commit(broker, {0: 5, 1: 6}, client_id="a").response()
    assert committed(broker) == {0: 5, 1: 6}
    ((_, topic, (record,)),) = [call.args for call in append.call_args_list]
    (stored,) = OffsetsRecord.FromString(record).commits
    assert topic == OFFSETS_TOPIC
    assert not stored.HasField("member")


def test_the_commit_of_a_member_that_was_given_up_changes_nothing_whether_others_have_its_queues_or_not() -> None:
    broker = made()
    says(broker, "a", 0)
    broker.clock.time_ms += GAP_MS
    assert broker.memberships.expire(broker.clock.monotonic_ms())
    assert refusal(broker, {0: 5}, client_id="a") == ("MEMBER_UNKNOWN", {"consumer_group": "g", "client_id": "a"})
    says(broker, "b", 0)
    commit(broker, {0: 10}, client_id="b").response()
    assert refusal(broker, {0: 5}, client_id="a")[0] == "MEMBER_UNKNOWN"
    assert committed(broker) == {0: 10}


def test_one_that_has_joined_again_may_not_make_the_commit_of_its_membership_before() -> None:
    broker = made()
    says(broker, "a", 0)
    broker.clock.time_ms += GAP_MS
    broker.memberships.expire(broker.clock.monotonic_ms())
    says(broker, "b", 0)
    commit(broker, {0: 10}, client_id="b").response()
    says(broker, "a", epoch=2)
    assert refusal(broker, {0: 5}, client_id="a")[0] == "MEMBER_UNKNOWN"
    assert refusal(broker, {0: 5}, client_id="a", member_epoch=2) == (
        "QUEUE_NOT_OWNED", {"consumer_group": "g", "topic": "topic", "queue_ids": "0", "owner": "b"},
    )  # fmt: skip
    says(broker, "b")
    says(broker, "a", 0, epoch=2)
    assert refusal(broker, {0: 5}, client_id="a")[0] == "MEMBER_UNKNOWN", "it has the queue, by another membership"
    assert committed(broker) == {0: 10}
    commit(broker, {0: 11}, client_id="a", member_epoch=2).response()
    assert committed(broker) == {0: 11}


def test_while_a_queue_changes_hands_its_old_owner_commits_until_it_gives_the_queue_up() -> None:
    broker = made()
    says(broker, "a", 0, 1)
    says(broker, "b")
    commit(broker, {1: 5}, client_id="a").response()
    says(broker, "b", 1)
    commit(broker, {1: 6}, client_id="a").response()  # The claim of the other one came too early.
    says(broker, "a", 0)
    assert refusal(broker, {1: 7}, client_id="a") == (
        "QUEUE_NOT_OWNED", {"consumer_group": "g", "topic": "topic", "queue_ids": "1", "owner": "b"},
    )  # fmt: skip
    commit(broker, {1: 8}, client_id="b").response()
    assert committed(broker) == {1: 8}


def test_a_broker_that_has_just_started_takes_the_commit_once_the_member_has_called() -> None:
    broker = made()
    assert refusal(broker, {0: 5}, client_id="a")[0] == "MEMBER_UNKNOWN"
    says(broker, "a", 0)
    commit(broker, {0: 5}, client_id="a").response()
    assert committed(broker) == {0: 5}


def test_of_a_commit_all_is_taken_or_nothing_and_the_error_names_the_queues_that_are_not_the_members() -> None:
    broker = made()
    says(broker, "a", 0)
    reason, metadata = refusal(broker, {0: 5, 1: 5}, client_id="a")
    assert (reason, metadata["queue_ids"], metadata["owner"]) == ("QUEUE_NOT_OWNED", "1", "")
    assert committed(broker) == {}
    commit(broker, {0: 5}, client_id="a").response()
    assert committed(broker) == {0: 5}


def test_a_commit_that_names_no_member_is_taken_as_before_and_so_is_a_reset() -> None:
    broker = made()
    says(broker, "a", 0)
    commit(broker, {0: 5, 1: 5}).response()
    reset = ResetOffsetsRequest(consumer_group="g", topic="topic", queue_offset=3)
    broker.call(CONSUMER + "ResetOffsets", reset).response()
    assert committed(broker) == {0: 3, 1: 3}
    assert broker.memberships.refused_commit_count == 0


def test_what_a_broker_of_an_older_version_has_kept_of_the_member_changes_nothing() -> None:
    broker = made()
    says(broker, "a", 0)
    kept = request({0: 5}, client_id="a")
    kept.offsets[0].topic_incarnation = broker.topic.incarnation
    broker.store.append_state(OFFSETS_TOPIC, [OffsetsRecord(commits=[kept]).SerializeToString()])
    assert committed(broker) == {0: 5}
    broker.store.close()
    again = FakeBroker(disk=broker.disk)
    assert committed(again) == {0: 5}
    says(again, "a", 0)
    commit(again, {0: 6}, client_id="a").response()
    assert committed(again) == {0: 6}


def test_a_lock_is_looked_at_too() -> None:
    broker = made()
    says(broker, "a", 0)
    lock = LockQueuesRequest(consumer_group="g", client_id="b", nonce=7, queues=[QueueName(topic="topic", queue_id=0)])
    broker.call(LOCKS + "LockQueues", lock).response()
    error = broker.refusal(CONSUMER + "CommitOffsets", request({0: 5}, client_id="a"))
    assert (error.reason, error.metadata["owner"]) == ("QUEUE_NOT_OWNED", "b")
    assert broker.memberships.refused_commit_count == 0


def test_commits_of_two_members_that_wait_for_one_append_are_judged_each_for_itself() -> None:
    broker = made()
    says(broker, "a", 0)
    calls = [
        broker.server.call(CONSUMER + "CommitOffsets", request(*said[:1], client_id=said[1]))
        for said in (({0: 5}, "a"), ({0: 2}, "gone"), ({0: 6}, "a"))
    ]
    broker.server.run()
    assert [call.error.reason if call.error else "" for call in calls] == ["", "MEMBER_UNKNOWN", ""]
    assert committed(broker) == {0: 6}
