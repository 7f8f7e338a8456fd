"""OffsetCommits over a store on a simulated disk: its lane is a list of what was posted, and of what is due later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, CommitOffsetsResponse, QueueOffset
from protomq_broker import offset_commits
from protomq_broker.config import BrokerConfig
from protomq_broker.member_commits import MemberCommits
from protomq_broker.offset_commits import OffsetCommits
from protomq_broker.queue_locks import QueueLocks
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_broker.waiting_answers import NOT_STORED_IN_TIME, WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_runtime.errors import Code, ServiceError

from .fake_broker import no_members
from .store.log_helpers import ManualClock
from .store.store_helpers import commit as store_commit
from .store.store_helpers import committed, open_store


class StubTimer(NamedTuple):
    """Leads to a function that is due later."""

    due: list[Callable[[], None]]
    function: Callable[[], None]

    def cancel(self) -> None:
        self.due.remove(self.function)


class StubCall:
    """A call of CommitOffsets or DeleteGroup, and how it ended."""

    def __init__(self, lane: StubLane, left_ms: float = 60_000, size_bytes: int = 0) -> None:
        self.payload = bytes(size_bytes)
        self.lane = lane
        self.outcome: bytes | ServiceError | None = None
        self._left_ms = left_ms

    def hold_time_ms(self, wanted_ms: float) -> float:
        return min(wanted_ms, self._left_ms)

    def answer(self, payload: bytes) -> None:
        assert self.outcome is None
        self.outcome = payload

    def fail(self, error: ServiceError) -> None:
        assert self.outcome is None
        self.outcome = error


class StubLane:
    """Runs what is posted when it is told to; timers never go off by themselves."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []
        self.due: list[Callable[[], None]] = []

    def post(self, function: Callable[[], None]) -> None:
        self.posted.append(function)

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> StubTimer:
        self.due.append(function)
        return StubTimer(self.due, function)

    def run(self, functions: list[Callable[[], None]]) -> None:
        while functions:
            functions.pop(0)()


def no_locks(store: Store) -> QueueLocks:
    return QueueLocks(store.locks, lambda *_: False, lambda: 1)


def make_commits() -> tuple[OffsetCommits, StubLane, Store, int]:
    store, lane, writer = open_store(SimDisk()), StubLane(), SystemWriter(WritePermit())
    writer.start(store, cast("Any", lane))
    incarnation = store.topics.create(TopicConfig("topic")).incarnation
    waiting = WaitingAnswers(store, ManualClock())
    return OffsetCommits(store, writer, waiting, BrokerConfig(), no_locks(store), MemberCommits(no_members())), lane, store, incarnation


def refuse(*_: object) -> int:
    raise DiskFullError("the disk is full")


def commit_by_pull(commits: OffsetCommits, incarnation: int, queue_offset: int) -> None:
    commits.commit_in_passing(
        "group",
        QueueOffset(topic="topic", queue_id=0, queue_offset=queue_offset, topic_incarnation=incarnation),
    )


@pytest.mark.parametrize("how", ["the timer", "the end"])
def test_what_pulls_commit_while_the_log_takes_nothing_is_said_once_and_appended_later(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commits, lane, store, incarnation = make_commits()
    with monkeypatch.context() as patch:
        patch.setattr(store, "append_state", refuse)
        for queue_offset in range(5):
            commit_by_pull(commits, incarnation, queue_offset)
            lane.run(lane.posted)
    assert caplog.text.count("not in the log yet") == len(lane.due) == 1
    assert committed(store, "group", "topic", 0) is None

    if how == "the timer":
        lane.run(lane.due)
    else:
        commits.close()

    assert committed(store, "group", "topic", 0) == 4


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("before", "during", "expected"),
    [
        ([], ["commit 20", "pull 25"], 25),
        ([], ["pull 20", "commit 25"], 25),
        (["pull 15"], ["commit 20"], 20),
        (["pull 15"], ["pull 20"], 20),
        (["pull 15"], ["commit 20", "pull 25"], 25),
        (["commit 15", "pull 20"], [], 20),
    ],
)
def test_of_offsets_that_come_during_an_append_the_last_one_stays(
    before: list[str], during: list[str], expected: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fails`: that append, and those of its turn."""
    commits, lane, store, incarnation = make_commits()
    append = store.append_state

    def commit(how: str, queue_id: int = 0) -> None:
        kind, number = how.split()
        offset = QueueOffset(topic="topic", queue_id=queue_id, topic_incarnation=incarnation)
        offset.queue_offset = int(number)
        if kind == "pull":
            commits.commit_in_passing("group", offset)
        else:
            request = CommitOffsetsRequest(consumer_group="group", offsets=[offset])
            commits.commit(request, cast("Any", StubCall(lane)))

    coming = list(during)

    def append_and_be_late(*arguments: Any) -> int:
        while coming:
            commit(coming.pop(0))
        if fails and is_first_turn:
            raise DiskFullError("the disk is full")
        return append(*arguments)

    monkeypatch.setattr(store, "append_state", append_and_be_late)
    commit("commit 1", queue_id=1)
    for how in before:
        commit(how)
    is_first_turn = True
    lane.posted.pop(0)()
    is_first_turn = False
    lane.run(lane.posted)
    lane.run(lane.due)
    lane.run(lane.posted)
    assert committed(store, "group", "topic", 0) == expected


def commit_on_the_wire(commits: OffsetCommits, lane: StubLane, incarnation: int, queue_offset: int, **fields: Any) -> StubCall:
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=queue_offset, topic_incarnation=incarnation, **fields)
    call = StubCall(lane)
    commits.commit(CommitOffsetsRequest(consumer_group="group", offsets=[offset]), cast("Any", call))
    return call


def test_a_commit_from_where_a_slave_said_is_compared_with_those_that_arrive_with_it_too() -> None:
    commits, lane, store, incarnation = make_commits()
    calls = [
        commit_on_the_wire(commits, lane, incarnation, queue_offset, began_offset=began)
        for queue_offset, began in ((9, None), (6, 4), (10, 4), (5, 4))
    ]
    lane.run(lane.posted)
    answers = [CommitOffsetsResponse.FromString(cast("bytes", call.outcome)) for call in calls]
    assert [[one.queue_offset for one in answer.kept] for answer in answers] == [[], [9], [], [10]]
    assert committed(store, "group", "topic", 0) == 10


def test_a_commit_from_where_a_slave_said_leaves_what_a_pull_committed_if_it_is_not_taken() -> None:
    commits, lane, store, incarnation = make_commits()
    commit_on_the_wire(commits, lane, incarnation, 5)
    lane.run(lane.posted)
    commit_by_pull(commits, incarnation, 7)
    commit_on_the_wire(commits, lane, incarnation, 4, began_offset=2)
    lane.run(lane.posted)
    assert committed(store, "group", "topic", 0) == 7


def test_a_commit_that_is_refused_leaves_what_a_pull_committed_before_it() -> None:
    commits, lane, store, incarnation = make_commits()
    commit_by_pull(commits, incarnation, 3)
    refused = commit_on_the_wire(commits, lane, incarnation, 5, lock_token=77)  # Nobody has that lock.
    lane.run(lane.posted)
    assert isinstance(refused.outcome, ServiceError)
    assert refused.outcome.reason == "QUEUE_NOT_OWNED"
    assert committed(store, "group", "topic", 0) == 3


def test_a_commit_that_comes_when_its_topic_is_made_again_is_of_the_topic_before_and_no_lock_is_lost() -> None:
    commits, lane, store, incarnation = make_commits()
    late = commit_on_the_wire(commits, lane, incarnation, 5, lock_token=77)
    store.delete_topic("topic")
    store.topics.create(TopicConfig("topic"))
    lane.run(lane.posted)
    assert isinstance(late.outcome, ServiceError)
    assert late.outcome.reason == "TOPIC_RECREATED"
    assert committed(store, "group", "topic", 0) is None


def test_a_commit_that_the_log_does_not_take_leaves_what_a_pull_committed_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    commits, lane, store, incarnation = make_commits()
    with monkeypatch.context() as patch:
        patch.setattr(store, "append_state", refuse)
        commit_by_pull(commits, incarnation, 3)
        refused = commit_on_the_wire(commits, lane, incarnation, 5)
        lane.run(lane.posted)
    assert isinstance(refused.outcome, ServiceError)
    assert refused.outcome.reason == "DISK_FULL"
    lane.run(lane.due)
    assert committed(store, "group", "topic", 0) == 3


def test_a_commit_replaces_what_a_pull_committed_before_it_even_if_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    commits, lane, store, incarnation = make_commits()
    commit_on_the_wire(commits, lane, incarnation, 5)
    lane.run(lane.posted)
    commit_by_pull(commits, incarnation, 7)
    taken = commit_on_the_wire(commits, lane, incarnation, 5)
    lane.run(lane.posted)
    lane.run(lane.due)
    assert taken.outcome == b""
    assert committed(store, "group", "topic", 0) == 5


def test_a_deletion_that_is_refused_leaves_what_a_pull_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    commits, lane, store, incarnation = make_commits()
    refused = StubCall(lane)
    with monkeypatch.context() as patch:
        patch.setattr(store, "append_state", refuse)
        commit_by_pull(commits, incarnation, 3)
        commits.delete_group("group", cast("Any", refused))
        lane.run(lane.posted)
    assert isinstance(refused.outcome, ServiceError)
    assert refused.outcome.reason == "GROUP_NOT_FOUND"
    lane.run(lane.due)
    assert committed(store, "group", "topic", 0) == 3


def test_what_pulls_commit_beyond_the_limit_is_counted_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commits, lane, store, incarnation = make_commits()
    monkeypatch.setattr(offset_commits, "PASSING_MAX", 2)
    monkeypatch.setattr(store, "append_state", refuse)
    for queue_id in range(5):
        offset = QueueOffset(topic="topic", queue_id=queue_id, topic_incarnation=incarnation)
        commits.commit_in_passing("group", offset)
    lane.run(lane.posted)
    assert "2 of them, and 3 were dropped" in caplog.text
    caplog.clear()

    lane.run(lane.due[:])

    assert "2 of them, and 0 were dropped" in caplog.text


def test_a_pull_whose_commits_are_refused_again_and_again_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    commits, lane, _, incarnation = make_commits()
    for number in range(20):
        commit_by_pull(commits, incarnation + 1, number)
        lane.run(lane.posted)
    assert len(caplog.messages) == 1
    assert "group committed by a pull in queue 0 of topic topic is refused" in caplog.text


def test_commits_that_the_send_lane_does_not_come_to_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits, lane, store, incarnation = make_commits()
    monkeypatch.setattr(offset_commits, "ARRIVED_SIZE_MAX_BYTES", 10_000)
    calls = [StubCall(lane, size_bytes=2_000) for _ in range(5)]
    offset = QueueOffset(topic="topic", queue_id=0, topic_incarnation=incarnation)
    for number, call in enumerate(calls):
        offset.queue_offset = number
        request = CommitOffsetsRequest(consumer_group="group", offsets=[offset])
        commits.commit(request, cast("Any", call))
    assert [call.outcome is None for call in calls] == [True, True, True, False, False]
    for call in calls[3:]:
        assert isinstance(call.outcome, ServiceError)
        assert (call.outcome.reason, call.outcome.retry_delay_ms) == ("SYSTEM_BUSY", 100)

    lane.run(lane.posted)

    assert [call.outcome for call in calls[:3]] == [b""] * 3
    assert committed(store, "group", "topic", 0) == 2
    again = StubCall(lane, size_bytes=2_000)
    commits.commit(CommitOffsetsRequest(consumer_group="group"), cast("Any", again))
    lane.run(lane.posted)
    assert again.outcome == b"", "there is room again"


def test_resets_that_wait_count_by_the_offsets_that_they_set_and_not_by_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    commits, lane, _, incarnation = make_commits()
    monkeypatch.setattr(offset_commits, "ARRIVED_SIZE_MAX_BYTES", 50_000)
    calls = [StubCall(lane, size_bytes=20) for _ in range(3)]
    for call in calls:
        offsets = [QueueOffset(topic="topic", queue_id=queue_id, topic_incarnation=incarnation) for queue_id in range(1_000)]
        commits.commit(CommitOffsetsRequest(consumer_group="group", offsets=offsets), cast("Any", call), is_reset=True)
    assert [call.outcome is None for call in calls] == [True, True, False]


def test_a_commit_that_comes_while_another_is_appended_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits, lane, store, incarnation = make_commits()
    real = store.append_state

    def append(*arguments: Any) -> int:
        monkeypatch.setattr(store, "append_state", real)
        position = real(*arguments)
        commit_by_pull(commits, incarnation, 2)
        return position

    commit_by_pull(commits, incarnation, 1)
    monkeypatch.setattr(store, "append_state", append)
    lane.run(lane.posted)
    assert committed(store, "group", "topic", 0) == 2


def test_a_group_is_deleted_behind_what_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits, lane, store, incarnation = make_commits()
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=3, topic_incarnation=incarnation)
    committing, deleting, repeated, later = (StubCall(lane) for _ in range(4))
    request = CommitOffsetsRequest(consumer_group="group", offsets=[offset])
    commits.commit(request, cast("Any", committing))
    commit_by_pull(commits, incarnation, 4)
    commits.delete_group("group", cast("Any", deleting))
    commits.delete_group("group", cast("Any", repeated))
    lane.run(lane.posted)
    assert (committing.outcome, deleting.outcome) == (b"", b"")
    assert isinstance(repeated.outcome, ServiceError)
    assert repeated.outcome.reason == "GROUP_NOT_FOUND"
    assert store.offsets.groups() == {}

    commits.commit(request, cast("Any", later))
    lane.run(lane.posted)
    assert committed(store, "group", "topic", 0) == 3, "the same offset as before: it must be said again"


def test_a_deletion_that_the_log_does_not_take_deletes_nothing_and_later_pulls_do_not_bring_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits, lane, store, incarnation = make_commits()
    commit_by_pull(commits, incarnation, 1)
    lane.run(lane.posted)
    refused, taken = StubCall(lane), StubCall(lane)
    with monkeypatch.context() as patch:
        patch.setattr(store, "append_state", refuse)
        patch.setattr(store, "append_moved", refuse)
        commit_by_pull(commits, incarnation, 2)
        commits.delete_group("group", cast("Any", refused))
        lane.run(lane.posted)
    assert isinstance(refused.outcome, ServiceError)
    assert refused.outcome.reason == "DISK_FULL"
    assert committed(store, "group", "topic", 0) == 1
    commits.delete_group("group", cast("Any", taken))
    lane.run(lane.posted)
    lane.run(lane.due)
    assert (taken.outcome, store.offsets.groups()) == (b"", {})


def test_a_deletion_waits_for_the_disk_as_a_commit_does() -> None:
    lane, store, writer = StubLane(), open_store(SimDisk(), sync_flush=True), SystemWriter(WritePermit())
    waiting = WaitingAnswers(store, ManualClock())
    writer.start(store, cast("Any", lane))
    store_commit(store, "group", "topic", 0, 5)
    commits = OffsetCommits(store, writer, waiting, BrokerConfig(), no_locks(store), MemberCommits(no_members()))
    call, repeated = StubCall(lane), StubCall(lane)
    for each in (call, repeated):
        commits.delete_group("group", cast("Any", each))
    lane.run(lane.posted)
    assert (call.outcome, repeated.outcome) == (None, None), "that the group is not there rests on the first one"
    store.flush()
    waiting.resolve()
    lane.run(lane.posted)
    assert call.outcome == b""
    assert isinstance(repeated.outcome, ServiceError)
    assert repeated.outcome.reason == "GROUP_NOT_FOUND"


def test_a_commit_waits_for_the_disk_no_longer_than_a_send() -> None:
    clock, lane = ManualClock(), StubLane()
    store, writer = open_store(SimDisk(), sync_flush=True), SystemWriter(WritePermit())
    writer.start(store, cast("Any", lane))
    incarnation = store.topics.create(TopicConfig("topic")).incarnation
    waiting = WaitingAnswers(store, clock)
    commits = OffsetCommits(store, writer, waiting, BrokerConfig(sync_flush_timeout_ms=5_000), no_locks(store), MemberCommits(no_members()))
    patient, hurried, late = (StubCall(lane, left_ms) for left_ms in (60_000, 1_000, 9_000))

    def commit(queue_id: int, call: StubCall) -> None:
        offset = QueueOffset(topic="topic", queue_id=queue_id, topic_incarnation=incarnation)
        request = CommitOffsetsRequest(consumer_group="group", offsets=[offset])
        commits.commit(request, cast("Any", call))

    def pass_time(passed_ms: int) -> None:
        """Nothing is flushed meanwhile: the fsync hangs."""
        clock.time_ms += passed_ms
        due, lane.due[:] = list(lane.due), []
        assert len(due) == 1, "one timer for all"
        lane.run(due)
        lane.run(lane.posted)

    commit(0, patient)
    commit(1, hurried)
    lane.run(lane.posted)
    pass_time(999)
    assert (patient.outcome, hurried.outcome) == (None, None)
    pass_time(1)
    assert (patient.outcome, hurried.outcome) == (None, NOT_STORED_IN_TIME)
    pass_time(3_999)
    commit(2, late)
    lane.run(lane.posted)
    pass_time(1)
    assert (patient.outcome, late.outcome) == (NOT_STORED_IN_TIME, None)

    store.flush()
    waiting.resolve()
    lane.run(lane.posted)
    assert late.outcome == b""
    assert not lane.due, "nobody waits any more"


def test_a_commit_that_is_not_on_disk_in_time_is_not_definite() -> None:
    assert NOT_STORED_IN_TIME.code is Code.DEADLINE_EXCEEDED
    assert NOT_STORED_IN_TIME.metadata["definite"] == "false"
    assert "try again" in NOT_STORED_IN_TIME.message
