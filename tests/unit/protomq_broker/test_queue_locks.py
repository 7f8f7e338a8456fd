"""QueueLockService through fake lanes: who gets a queue, until when, and whose commits are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from protomq.v1.admin_service_pb2 import DeleteGroupRequest
from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetOffsetsRequest,
    QueueOffset,
    ResetOffsetsRequest,
)
from protomq.v1.queue_lock_service_pb2 import (
    ListQueueLocksRequest,
    LockQueuesRequest,
    QueueName,
    UnlockQueuesRequest,
)
from protomq.v1.state_pb2 import LocksRecord
from protomq.wire.topics import LOCKS_TOPIC
from protomq_broker import queue_lock_service
from protomq_broker.queue_locks import LOCK_MS, SLICE_COUNT, QueueLocks
from protomq_broker.store.state.locks import LockKey, LockOwner, LockTable, locks_record
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_runtime.errors import ServiceError
from protomq_runtime.testing import FakeCall

from .fake_broker import ADMIN, CONSUMER, LOCKS, FakeBroker

LOCK_GAP_MS = 25_000
Q0, Q1 = ("topic", 0), ("topic", 1)


def names(queues: Sequence[tuple[str, int]]) -> list[QueueName]:
    return [QueueName(topic=topic, queue_id=queue_id) for topic, queue_id in queues]


def lock(
    broker: FakeBroker, client_id: str, *queues: tuple[str, int], nonce: int = 1
) -> list[tuple[int, str]]:
    """Token and owner of each queue, as the answer has them."""
    request = LockQueuesRequest(
        consumer_group="g", client_id=client_id, nonce=nonce, queues=names(queues)
    )
    response = broker.call(LOCKS + "LockQueues", request).response()
    assert response.lock_ms == LOCK_MS
    assert [(one.queue.topic, one.queue.queue_id) for one in response.queues] == list(queues)
    return [(one.token, one.owner) for one in response.queues]


def unlock(broker: FakeBroker, client_id: str, *queues: tuple[str, int], nonce: int = 1) -> None:
    request = UnlockQueuesRequest(
        consumer_group="g", client_id=client_id, nonce=nonce, queues=names(queues)
    )
    broker.call(LOCKS + "UnlockQueues", request).response()


def commit(broker: FakeBroker, token: int, queue_offset: int = 1, queue_id: int = 0) -> FakeCall:
    offset = QueueOffset(
        topic="topic", queue_id=queue_id, queue_offset=queue_offset, lock_token=token
    )
    request = CommitOffsetsRequest(consumer_group="g", offsets=[offset])
    return broker.call(CONSUMER + "CommitOffsets", request)


def committed(broker: FakeBroker) -> list[int]:
    request = GetOffsetsRequest(consumer_group="g", topic="topic")
    answer = broker.call(CONSUMER + "GetOffsets", request).response()
    return [offset.queue_offset for offset in answer.offsets]


def listed(broker: FakeBroker) -> dict[tuple[str, int], tuple[str, int]]:
    request = ListQueueLocksRequest(consumer_group="g")
    answer = broker.call(LOCKS + "ListQueueLocks", request).response()
    return {
        (one.queue.topic, one.queue.queue_id): (one.client_id, one.left_ms) for one in answer.locks
    }


def filled(**settings: Any) -> FakeBroker:
    broker = FakeBroker(**settings)
    broker.fill([b"x"] * 5)
    broker.fill([b"x"] * 5, queue_id=1)
    return broker


def test_a_queue_has_one_owner_who_keeps_it_by_asking_again() -> None:
    broker = filled()
    assert lock(broker, "a", Q0) == [(1, "")]
    assert lock(broker, "b", Q0, Q1) == [(0, "a"), (2, "")]
    position = broker.store.appended_position
    assert lock(broker, "a", Q0) == [(1, "")]
    assert broker.store.appended_position == position, "that it was renewed is no record"
    assert listed(broker) == {Q0: ("a", LOCK_MS), Q1: ("b", LOCK_MS)}


def test_members_of_one_name_are_told_apart() -> None:
    broker = filled()
    assert lock(broker, "a", Q0, nonce=1) == [(1, "")]
    assert lock(broker, "a", Q0, nonce=2) == [(0, "a")]
    unlock(broker, "a", Q0, nonce=2)
    assert Q0 in listed(broker), "it is not its own"


def test_what_is_given_up_is_free_and_its_next_lock_has_another_token() -> None:
    broker = filled()
    lock(broker, "a", Q0, Q1)
    unlock(broker, "a", Q0)
    assert list(listed(broker)) == [Q1]
    assert lock(broker, "b", Q0) == [(3, "")]
    unlock(broker, "a")
    assert list(listed(broker)) == [Q0], "no queues: all that it has"


def test_a_lock_that_nobody_renews_ends_by_a_record() -> None:
    broker = filled()
    broker.locks.arm()
    lock(broker, "a", Q0)
    lock(broker, "b", Q1)
    broker.advance(LOCK_MS - 2_000)
    lock(broker, "b", Q1)
    position = broker.store.appended_position
    broker.advance(3_000)
    assert list(listed(broker)) == [Q1]
    assert broker.store.appended_position > position
    assert broker.queue_locks.counts().expired == 1


def test_a_member_that_is_there_renews_by_that() -> None:
    broker = filled()
    broker.locks.arm()
    lock(broker, "a", Q0)
    broker.members.add(("g", "a", 1))
    broker.advance(3 * LOCK_MS)
    assert list(listed(broker)) == [Q0]
    broker.members.clear()
    broker.advance(2 * LOCK_MS)
    assert listed(broker) == {}


def test_queues_of_a_member_that_is_gone_are_free_at_once_unless_it_is_back() -> None:
    broker = filled()
    lock(broker, "a", Q0)
    lock(broker, "b", Q1)
    broker.members.add(("g", "b", 1))
    broker.locks.gone("g", "a", 1, False)
    broker.locks.gone("g", "b", 1, False)
    assert list(listed(broker)) == [Q1]
    assert broker.queue_locks.counts().freed == 1


def broken() -> tuple[FakeBroker, int]:
    """A broker, and the token of a member whose connection has broken."""
    broker = filled()
    broker.locks.arm()
    broker.members.add(("g", "a", 1))
    ((token, _),) = lock(broker, "a", Q0)
    commit(broker, token, 2).response()
    broker.members.clear()
    broker.locks.gone("g", "a", 1, True)
    broker.server.run()
    return broker, token


def test_a_member_whose_connection_broke_goes_on_with_its_lock_if_nobody_asked_for_the_queue() -> None:
    broker, token = broken()
    assert (listed(broker), broker.queue_locks.counts().held) == ({}, 0), "nobody has it now"
    broker.advance(LOCK_GAP_MS - 2_000)
    commit(broker, token, 3).response()
    broker.members.add(("g", "a", 1))
    assert lock(broker, "a", Q0) == [(token, "")], "what it has finished and not committed, it has still"
    assert lock(broker, "b", Q0) == [(0, "a")]
    broker.advance(LOCK_GAP_MS)
    commit(broker, token, 4).response()
    assert (committed(broker), list(listed(broker)), broker.queue_locks.counts().freed) == ([4], [Q0], 0)


def test_a_member_that_is_back_has_its_queues_before_it_asks() -> None:
    broker, token = broken()
    broker.members.add(("g", "a", 1))
    assert lock(broker, "b", Q0) == [(0, "a")]
    broker.members.clear()
    assert lock(broker, "b", Q0) == [(0, "a")], "another break waits for it again"
    commit(broker, token, 3).response()


def test_the_queue_of_a_member_whose_connection_broke_is_whose_who_asks_first() -> None:
    broker, old = broken()
    ((new, owner),) = lock(broker, "b", Q0)
    assert (new != old, owner, list(listed(broker))) == (True, "", [Q0])
    broker.members.add(("g", "a", 1))
    assert lock(broker, "a", Q0) == [(0, "b")]
    error = commit(broker, old, 3).error
    assert error is not None
    assert (error.reason, error.metadata["owner"]) == ("QUEUE_NOT_OWNED", "b")
    commit(broker, new, 3).response()
    assert (committed(broker), broker.queue_locks.counts().freed) == ([3], 1)


def test_a_take_over_that_is_not_appended_leaves_the_queue_to_the_next_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, old = broken()

    def fail(topic: str, bodies: Sequence[bytes]) -> int:
        raise OSError("no")

    monkeypatch.setattr(broker.store, "append_state", fail)
    request = LockQueuesRequest(consumer_group="g", client_id="b", nonce=1, queues=names([Q0]))
    assert broker.call(LOCKS + "LockQueues", request).error is not None
    monkeypatch.undo()
    commit(broker, old, 3).response()
    ((new, _),) = lock(broker, "c", Q0)
    assert new not in (0, old)
    broker.advance(LOCK_MS + 2_000)
    assert (broker.store.locks.count, broker.queue_locks.counts().expired) == (0, 1)


def test_locks_of_a_call_that_the_log_takes_in_part_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled()
    broker.locks.arm()
    monkeypatch.setattr(queue_lock_service, "SLICE_COUNT", 1)
    real = broker.store.append_state

    def fail_at_the_second(topic: str, bodies: Sequence[bytes]) -> int:
        if broker.store.locks.count:
            raise OSError("no")
        return real(topic, bodies)

    with monkeypatch.context() as patch:
        patch.setattr(broker.store, "append_state", fail_at_the_second)
        request = LockQueuesRequest(consumer_group="g", client_id="a", nonce=1, queues=names([Q0, Q1]))
        assert broker.call(LOCKS + "LockQueues", request).error is not None
    assert list(listed(broker)) == [Q0]
    broker.advance(LOCK_MS + 1_000)
    assert (listed(broker), broker.queue_locks.counts().expired) == ({}, 1)


def test_who_had_the_queue_in_between_and_gave_it_up_has_ended_the_lock_all_the_same() -> None:
    broker, old = broken()
    lock(broker, "b", Q0)
    unlock(broker, "b", Q0)
    broker.members.add(("g", "a", 1))
    assert commit(broker, old, 3).error is not None
    ((new, _),) = lock(broker, "a", Q0)
    assert new not in (0, old)


def test_the_lock_of_a_member_whose_connection_broke_ends_with_the_gap() -> None:
    broker, old = broken()
    broker.advance(LOCK_GAP_MS + 1_000)
    assert (broker.store.locks.count, broker.queue_locks.counts().expired) == (0, 1)
    assert commit(broker, old, 3).error is not None


def test_the_gap_of_a_member_whose_connection_broke_is_not_cut_short_by_the_time_of_its_lock() -> None:
    broker = filled()
    broker.locks.arm()
    broker.members.add(("g", "a", 1))
    ((token, _),) = lock(broker, "a", Q0)
    broker.advance(LOCK_MS - 5_000)
    broker.members.clear()
    broker.locks.gone("g", "a", 1, True)
    broker.server.run()
    broker.advance(LOCK_GAP_MS - 2_000)
    commit(broker, token, 3).response()
    broker.advance(3_000)
    assert (broker.store.locks.count, broker.queue_locks.counts().expired) == (0, 1)


def after_start() -> tuple[FakeBroker, int]:
    """A broker that has just started, and the token of a member that was there before."""
    broker, token = broken()
    broker.store.close()
    again = FakeBroker(disk=broker.disk)
    again.locks.arm()
    return again, token


def test_a_member_that_is_back_after_a_start_and_whose_connection_breaks_then_has_the_whole_gap() -> None:
    broker, token = after_start()
    broker.advance(LOCK_GAP_MS - 5_000)
    broker.locks.gone("g", "a", 1, True)
    broker.advance(LOCK_GAP_MS - 2_000)
    commit(broker, token, 3).response()


def test_a_promotion_waits_for_members_whose_connections_had_broken_at_the_slave() -> None:
    broker, token = broken()
    broker.locks.arm()
    assert lock(broker, "b", Q0) == [(0, "a")]
    commit(broker, token, 3).response()


def test_a_slave_that_a_member_leaves_ends_no_lock_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Members find each other at slaves while the master is away. Their locks are the master's."""
    master, _ = broken()
    master.store.close()
    opened = Store.open

    def open_following(*arguments: Any, **settings: Any) -> Store:
        return opened(*arguments, **{**settings, "follows": True})

    with mock.patch.object(Store, "open", open_following):
        slave = FakeBroker(disk=master.disk, clock_ms=master.clock.time_ms, is_permitted=False)
    before = slave.store.appended_position
    slave.locks.gone("g", "a", 1, False)
    slave.server.run()
    assert (slave.store.appended_position, slave.queue_locks.counts().held, caplog.messages) == (before, 1, [])


def test_a_commit_without_a_lock_ends_the_lock_of_a_member_whose_connection_broke() -> None:
    broker, old = broken()
    commit(broker, 0, 5).response()
    broker.members.add(("g", "a", 1))
    assert commit(broker, old, 3).error is not None, "a step back"
    ((new, _),) = lock(broker, "a", Q0)
    assert (committed(broker), new not in (0, old)) == ([5], True)


def test_a_commit_without_a_lock_ends_that_lock_also_for_commits_of_the_same_record() -> None:
    broker, old = broken()
    calls = []
    for token, queue_offset in ((0, 5), (old, 3)):
        offset = QueueOffset(topic="topic", queue_id=0, queue_offset=queue_offset, lock_token=token)
        calls.append(broker.server.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=[offset])))
    broker.server.run()
    assert (calls[0].error, calls[1].error is not None, committed(broker)) == (None, True, [5])


def test_a_commit_that_is_refused_for_one_queue_ends_no_lock_of_another() -> None:
    broker, old = broken()
    offsets = [QueueOffset(topic="topic", queue_id=i, queue_offset=3, lock_token=token) for i, token in ((0, 0), (1, 9))]
    assert broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=offsets)).error is not None
    commit(broker, old, 3).response()


@pytest.mark.parametrize("refused_for", ["where it began", "a reset"])
def test_a_commit_of_which_nothing_is_taken_ends_no_lock_of_a_member_whose_connection_broke(refused_for: str) -> None:
    broker, old = broken()
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=1)
    if refused_for == "a reset":
        reset = ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0], queue_offset=2)
        broker.call(CONSUMER + "ResetOffsets", reset).response()
        offset.reset_epoch = 0
    else:
        offset.began_offset = 0
    answer = broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=[offset])).response()
    assert [one.queue_offset for one in (*answer.kept, *answer.resets)] == [2]
    commit(broker, old, 3).response()
    assert committed(broker) == [3]


def test_who_reads_the_log_gives_a_member_whose_connection_had_broken_its_time() -> None:
    again, token = after_start()
    assert lock(again, "b", Q0) == [(0, "a")]
    commit(again, token, 3).response()
    again.members.add(("g", "a", 1))
    assert lock(again, "a", Q0) == [(token, "")]


def test_a_member_that_does_not_come_back_after_a_start_is_gone_within_the_gap_and_one_without_a_call_has_its_time() -> None:
    broker = FakeBroker()
    broker.store.topics.create(TopicConfig("three", 3, 3))
    of_dead, of_back, of_other = ("three", 0), ("three", 1), ("three", 2)
    broker.members.update({("g", "dies", 1), ("g", "returns", 1)})
    lock(broker, "dies", of_dead)
    lock(broker, "returns", of_back)
    broker.members.clear()
    lock(broker, "beats", of_other)
    broker.queue_locks._deadlines_ms.clear()  # as after a start
    broker.locks.arm()
    broker.advance(1_000)
    broker.members.add(("g", "returns", 1))
    broker.advance(LOCK_GAP_MS - 1_500)
    assert list(listed(broker)) == [of_dead, of_back, of_other]
    broker.advance(1_500)
    assert list(listed(broker)) == [of_back, of_other]
    broker.advance(LOCK_MS)
    assert list(listed(broker)) == [of_back]
    assert broker.queue_locks.counts().expired == 2


def test_who_says_to_be_a_member_and_is_none_any_more_gets_no_lock() -> None:
    broker = filled()
    request = LockQueuesRequest(consumer_group="g", client_id="a", nonce=1, queues=names([Q0]), is_member=True)
    error = broker.call(LOCKS + "LockQueues", request).error
    assert error is not None
    assert (error.reason, error.metadata["client_id"]) == ("MEMBER_UNKNOWN", "a")
    assert listed(broker) == {}
    broker.members.add(("g", "a", 1))
    assert broker.call(LOCKS + "LockQueues", request).response().queues[0].token


def test_a_listed_lock_has_its_token_and_its_age_which_a_start_does_not_end() -> None:
    broker = filled()
    ((token, _),) = lock(broker, "a", Q0)
    broker.advance(5_000)
    topic = broker.store.topics.find("topic")
    assert topic is not None
    early = locks_record([(LockKey("g", "topic", topic.incarnation, 1), LockOwner(9, "old", 1))])
    broker.store.append_state(LOCKS_TOPIC, [early])
    request = ListQueueLocksRequest(consumer_group="g")
    first, old = broker.call(LOCKS + "ListQueueLocks", request).response().locks
    assert (first.token, first.age_ms, first.is_member) == (token, 5_000, False)
    assert (old.token, old.HasField("age_ms")) == (9, False), "of an earlier version"
    broker.members.add(("g", "a", 1))
    broker.clock.time_ms -= 60_000  # somebody sets the clock back
    assert broker.call(LOCKS + "ListQueueLocks", request).response().locks[0].age_ms == 0
    assert broker.call(LOCKS + "ListQueueLocks", request).response().locks[0].is_member


def test_only_the_owner_of_a_locked_queue_commits() -> None:
    broker = filled()
    commit(broker, 0).response()
    ((token, _),) = lock(broker, "a", Q0)
    error = commit(broker, 0, 2).error
    assert error is not None
    assert (error.reason, error.metadata["owner"]) == ("QUEUE_NOT_OWNED", "a")
    assert commit(broker, token + 1, 2).error is not None
    assert committed(broker) == [1]
    commit(broker, token, 2).response()
    assert committed(broker) == [2]
    assert broker.queue_locks.refused_commit_count == 2


def test_an_old_token_commits_nothing_whether_another_has_the_queue_or_nobody() -> None:
    broker = filled()
    ((old, _),) = lock(broker, "a", Q0)
    commit(broker, old, 2).response()
    broker.locks.gone("g", "a", 1, False)
    broker.server.run()
    error = commit(broker, old, 3).error
    assert error is not None
    assert (error.metadata["queue_ids"], error.metadata["owner"]) == ("0", "")
    ((new, _),) = lock(broker, "b", Q0)
    error = commit(broker, old, 3).error
    assert error is not None
    assert error.metadata["owner"] == "b"
    commit(broker, new, 4).response()
    assert committed(broker) == [4]


def test_all_queues_that_are_not_owned_are_named_and_nothing_is_taken() -> None:
    broker = filled()
    ((token, _),) = lock(broker, "a", Q0)
    offsets = [
        QueueOffset(topic="topic", queue_id=0, queue_offset=3, lock_token=token),
        QueueOffset(topic="topic", queue_id=1, queue_offset=3, lock_token=9),
    ]
    request = CommitOffsetsRequest(consumer_group="g", offsets=offsets)
    error = broker.call(CONSUMER + "CommitOffsets", request).error
    assert error is not None
    assert error.metadata["queue_ids"] == "1"
    assert committed(broker) == []


def test_an_operator_resets_what_is_locked() -> None:
    broker = filled()
    ((token, _),) = lock(broker, "a", Q0)
    commit(broker, token, 4).response()
    reset = ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0], queue_offset=1)
    broker.call(CONSUMER + "ResetOffsets", reset).response()
    assert committed(broker) == [1]


def test_tokens_do_not_go_into_the_log_with_offsets() -> None:
    broker = filled()
    ((token, _),) = lock(broker, "a", Q0)
    commit(broker, token, 2).response()
    position = broker.store.appended_position
    commit(broker, token, 2).response()
    assert broker.store.appended_position == position, "it says nothing new"


def test_the_tokens_of_a_commit_that_is_refused_stay_as_the_caller_gave_them() -> None:
    broker = filled()
    offsets = [QueueOffset(topic="topic", queue_id=0, queue_offset=3, lock_token=9)]
    request = CommitOffsetsRequest(consumer_group="g", offsets=offsets)
    first = broker.call(CONSUMER + "CommitOffsets", request)
    call = FakeCall(broker.server.lanes[first.bound.method.lane], first.bound, request)
    broker.commits.commit(request, call)
    broker.server.run()
    assert call.error is not None
    assert request.offsets[0].lock_token == 9


def test_a_start_finds_the_owners_and_gives_them_their_time() -> None:
    broker = filled()
    ((token, _),) = lock(broker, "a", Q0)
    broker.store.close()
    again = FakeBroker(disk=broker.disk)
    again.locks.arm()
    assert lock(again, "b", Q0) == [(0, "a")]
    again.advance(LOCK_MS - 1_000)
    commit(again, token, 3).response()
    assert lock(again, "a", Q0) == [(token, "")]
    again.advance(LOCK_MS + 1_000)
    assert lock(again, "b", Q0)[0][1] == ""


def test_what_is_not_here_has_no_owner_and_hinders_nothing() -> None:
    broker = filled()
    assert lock(broker, "a", ("gone", 0), ("topic", 2), Q0) == [(0, ""), (0, ""), (1, "")]


@pytest.mark.parametrize(
    "change", [TopicConfig("topic", 1, 1), TopicConfig("topic", 2, 2, readable=False)], ids=["fewer queues", "not to be read"]
)
def test_the_owner_of_a_queue_that_is_gone_commits_and_gives_it_up_and_it_comes_back_free(change: TopicConfig) -> None:
    broker = filled()
    ((token, _),) = lock(broker, "a", Q1)
    broker.store.topics.put([change])
    assert lock(broker, "a", Q1) == [(token, "")]
    assert lock(broker, "b", Q1) == [(0, "a")]
    commit(broker, token, 2, queue_id=1).response()
    unlock(broker, "a", Q1)
    assert listed(broker) == {}
    assert lock(broker, "b", Q1) == [(0, "")], "it is gone"
    broker.store.topics.put([TopicConfig("topic", 2, 2)])
    assert lock(broker, "b", Q1) == [(token + 1, "")]
    assert committed(broker) == [2]


def test_a_topic_that_is_made_again_has_no_locks() -> None:
    broker = filled()
    lock(broker, "a", Q0)
    broker.store.delete_topic("topic")
    assert listed(broker) == {}
    remade = broker.store.topics.create(TopicConfig("topic", 2, 2))
    assert listed(broker) == {}
    assert lock(broker, "b", Q0) == [(2, "")]
    assert listed(broker)[Q0][0] == "b"
    lock(broker, "a", Q1)
    request = LockQueuesRequest(consumer_group="g", client_id="b", nonce=1, queues=names([Q0, Q1]))
    locked = broker.call(LOCKS + "LockQueues", request).response().queues
    assert [one.topic_incarnation for one in locked] == [remade.incarnation, 0]


def test_a_lock_of_a_topic_that_was_deleted_ends_with_its_time_though_its_member_stays() -> None:
    broker = filled()
    broker.locks.arm()
    lock(broker, "a", Q0, Q1)
    broker.members.add(("g", "a", 1))
    broker.store.delete_topic("topic")
    broker.store.topics.create(TopicConfig("topic", 2, 2))
    lock(broker, "a", Q0)
    assert broker.store.locks.count == 3
    broker.advance(3 * LOCK_MS)
    assert (broker.store.locks.count, list(listed(broker))) == (1, [Q0])


def test_a_group_that_is_deleted_has_no_locks() -> None:
    broker = filled()
    lock(broker, "a", Q0)
    broker.call(
        ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="g", force=True)
    ).response()
    assert listed(broker) == {}
    assert LockTable.topic == "%SYS%LOCKS"


def test_under_sync_flush_an_answer_waits_for_the_disk() -> None:
    broker = FakeBroker(sync_flush=True)
    request = LockQueuesRequest(consumer_group="g", client_id="a", nonce=1, queues=names([Q0]))
    call = broker.call(LOCKS + "LockQueues", request)
    assert not call.answered, "a power cut could take it back"
    broker.store.flush()
    broker.server.run()
    assert call.response().queues[0].token == 1


def fill_locks(broker: FakeBroker, count: int, client_id: str = "a") -> None:
    owner = LockOwner(7, client_id, 1)
    keys = [LockKey("g", "other", 1, queue_id) for queue_id in range(count)]
    broker.store.append_state(LOCKS_TOPIC, [locks_record((key, owner) for key in keys)])


def test_one_lock_too_many_is_refused_and_what_is_held_is_renewed() -> None:
    broker = filled()
    fill_locks(broker, 2)
    locks = QueueLocks(broker.store.locks, lambda *_: False, lambda: 1, count_max=3)
    new = [LockKey("h", "other", 1, queue_id) for queue_id in range(2)]
    with pytest.raises(ServiceError, match="delete groups") as raised:
        locks.take(new, "b", 1, 0)
    assert (raised.value.reason, raised.value.metadata["limit"]) == ("TOO_MANY", "3")
    assert len(locks.take(new[:1], "b", 1, 0)[0]) == 1
    assert locks.take([LockKey("g", "other", 1, 0)], "a", 1, 0) == ([], [LockOwner(7, "a", 1)])


def test_what_ends_together_is_appended_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled()
    fill_locks(broker, SLICE_COUNT + 1)
    broker.locks.arm()
    sizes: list[int] = []
    append = broker.store.append_state

    def count(topic: str, bodies: Sequence[bytes]) -> int:
        sizes.extend(len(LocksRecord.FromString(body).locks) for body in bodies)
        return append(topic, bodies)

    monkeypatch.setattr(broker.store, "append_state", count)
    broker.advance(LOCK_MS + 1_000)
    assert sizes == [SLICE_COUNT, 1]
    fill_locks(broker, SLICE_COUNT + 1)
    sizes.clear()
    broker.locks.gone("g", "a", 1, False)
    broker.server.run()
    assert sizes == [SLICE_COUNT, 1]
    assert (broker.queue_locks.counts().expired, broker.queue_locks.counts().freed) == (501, 501)


def test_locks_that_others_hold_are_counted_when_a_member_is_gone() -> None:
    broker = filled()
    broker.locks.arm()
    lock(broker, "a", Q0)
    lock(broker, "b", Q1)
    broker.locks.gone("g", "a", 1, False)
    broker.server.run()
    assert (broker.queue_locks.counts().held, broker.queue_locks.counts().freed) == (1, 1)
    lock(broker, "b", Q0)
    assert broker.queue_locks.counts().held == 2


@pytest.mark.parametrize("count", [1, SLICE_COUNT + 2])
def test_what_a_member_had_that_is_gone_is_anybodys_before_all_of_it_is_appended(count: int) -> None:
    """A group that does not lock any more takes over from one that did: a commit that is refused costs it the queue."""
    broker = filled()
    fill_locks(broker, count)
    locks = QueueLocks(broker.store.locks, lambda *_: False, lambda: 8)
    (*_, last) = sorted(broker.store.locks.all())
    assert not locks.may_commit(last, 0)
    assert len(locks.gone("g", "a", 1, 0, may_return=False)) == count
    assert locks.may_commit(last, 0)
    assert locks.take([last], "b", 1, 0)[1] == [LockOwner(8, "b", 1)]
    # What could not be appended ends with the next look.
    freed = locks.expired(1)
    assert len(freed) == min(count, SLICE_COUNT)


def test_the_queue_of_a_member_that_is_gone_is_taken_though_that_could_not_be_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = filled()
    broker.locks.arm()
    lock(broker, "a", Q0, Q1)

    def fail(topic: str, bodies: Sequence[bytes]) -> int:
        raise OSError("no")

    monkeypatch.setattr(broker.store, "append_state", fail)
    broker.locks.gone("g", "a", 1, False)
    broker.server.run()
    monkeypatch.undo()
    assert lock(broker, "b", Q0) == [(3, "")]
    commit(broker, 0, 1, queue_id=1).response()


def test_a_member_that_goes_while_its_first_lock_is_on_its_way_leaves_none() -> None:
    broker = filled()
    request = LockQueuesRequest(consumer_group="g", client_id="a", nonce=1, queues=names([Q0]))
    broker.server.call(LOCKS + "LockQueues", request)
    broker.locks.gone("g", "a", 1, False)
    broker.server.run()
    assert listed(broker) == {}


def test_an_expiry_that_is_not_appended_comes_again_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = filled()
    broker.locks.arm()
    lock(broker, "a", Q0)

    def fail(topic: str, bodies: Sequence[bytes]) -> int:
        raise OSError("no")

    monkeypatch.setattr(broker.store, "append_state", fail)
    broker.advance(LOCK_MS + 1_000)
    broker.locks.gone("g", "a", 1, False)
    broker.server.run()
    for _ in range(5):
        broker.advance(1_000)
    assert (broker.queue_locks.counts().expired, broker.queue_locks.counts().freed) == (0, 0)
    assert caplog.text.count("cannot be unlocked now") == 1
    monkeypatch.undo()
    broker.advance(2_000)
    assert (listed(broker), broker.queue_locks.counts().expired) == ({}, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"client_id": ""}, "client_id"),
        ({"nonce": 0}, "nonce"),
        ({"queues": names([Q0, Q0])}, "queues"),
        ({"queues": names([("topic", -1)])}, "queues"),
        ({"consumer_group": "no group!"}, "consumer_group"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], field: str) -> None:
    good = {"consumer_group": "g", "client_id": "a", "nonce": 1, "queues": names([Q0])}
    error = FakeBroker().refusal(LOCKS + "LockQueues", LockQueuesRequest(**{**good, **fields}))
    assert error.reason == "INVALID_ARGUMENT"
    assert error.message.startswith(field)
