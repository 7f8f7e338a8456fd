"""Pulls with filters through a fake lane: what is answered and when, what is held, who is told what."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest

from protomq.v1.admin_service_pb2 import DeleteTopicRequest
from protomq.v1.consumer_service_pb2 import ResetOffsetsRequest
from protomq.v1.pull_service_pb2 import FilterType, PullRequest, PullResponse, PullStatus
from protomq_broker import filtered_pulls, filtered_read
from protomq_broker.store.store import Store
from protomq_runtime.testing import FakeCall
from tests.support.waiting import wait_for

from .fake_broker import ADMIN, CONSUMER, PULL, FakeBroker, told

FOUND = PullStatus.PULL_STATUS_FOUND
NO_MATCHED_MSG = PullStatus.PULL_STATUS_NO_MATCHED_MSG
EVEN = {"n": "2"}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    monkeypatch.setattr(
        filtered_pulls, "read_regions", lambda regions: [part.file.read(*part[1:]) for part in regions]
    )
    return FakeBroker()


def pull(broker: FakeBroker, text: str = "n = 2", **fields: Any) -> FakeCall:
    """The call; its filter, which another thread compiles, is known."""
    wanted = {"topic": "topic", "filter_type": FilterType.FILTER_TYPE_SQL92, "filter": text}
    call = broker.call(PULL, PullRequest(**{**wanted, **fields}))

    def is_done() -> bool:
        broker.server.run()
        return call.answered or call.is_held

    wait_for(is_done, pause_s=0.001)
    return call


def response_of(call: FakeCall) -> PullResponse:
    response = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
    assert isinstance(response, PullResponse)
    return response


def offsets(call: FakeCall) -> list[int]:
    return [record.queue_offset for record in response_of(call).records]


def test_a_pull_may_take_many_turns(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtered_read, "RUN_COUNT", 2)
    monkeypatch.setattr("protomq_broker.filter_searches.SLICE_S", 0.0)
    for number in range(12):
        broker.fill([b"x"], properties={"n": str(number % 4)})
    assert offsets(pull(broker)) == [2, 6, 10]
    assert offsets(pull(broker, record_count_max=2)) == [2, 6]


def test_what_is_damaged_between_two_turns_is_not_answered(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull(broker)  # Its filter is known from here on.
    monkeypatch.setattr(filtered_read, "RUN_COUNT", 1)
    monkeypatch.setattr("protomq_broker.filter_searches.SLICE_S", 0.0)
    for _ in range(3):
        broker.fill([bytes(300)], properties=EVEN)
    position = broker.store.read("topic", 0, 0, 1, 1).regions[0].offset
    request = PullRequest(
        topic="topic", filter_type=FilterType.FILTER_TYPE_SQL92, filter="n = 2"
    )
    call = broker.server.call(PULL, request)
    lane = broker.server.lanes["pull"]
    for _ in range(4):
        lane.posted.popleft()()
    assert not call.answered
    broker.disk.flip_bit("/s/commitlog/" + "0" * 20, (position + 40) * 8)
    broker.clock.time_ms += 2_000
    broker.server.run()
    assert call.error is not None
    assert told(call.error)[1] == "CORRUPT_LOG"


def test_a_pull_with_a_filter_commits_while_at_it(broker: FakeBroker) -> None:
    broker.fill([b"x"] * 3, properties=EVEN)
    call = pull(broker, consumer_group="group", commit_offset=2)
    assert response_of(call).status == FOUND
    assert broker.store.offsets.groups()["group"]
    wrong = pull(broker, "n =", consumer_group="other", commit_offset=1)
    assert wrong.error is not None
    assert "other" not in broker.store.offsets.groups()


def test_a_wrong_filter_changes_nothing_and_says_where(broker: FakeBroker) -> None:
    before = broker.state()
    call = pull(broker, "n = 2 AND", hold_ms=1_000)
    assert call.error is not None
    code, reason, metadata = told(call.error)
    assert (code, reason) == ("INVALID_ARGUMENT", "ILLEGAL_FILTER")
    assert metadata["language"] == "SQL92"
    assert (metadata["line"], metadata["column"], metadata["position"]) == ("1", "10", "9")
    assert "a property" in metadata["expected"]
    assert broker.state() == before


def test_a_filter_is_read_before_its_topic_is_there(broker: FakeBroker) -> None:
    for text, reason in (("n = 2 AND", "ILLEGAL_FILTER"), ("n = 2", "TOPIC_NOT_FOUND")):
        request = PullRequest(topic="none", queue_offset=2**62, filter_type=FilterType.FILTER_TYPE_SQL92, filter=text)
        call = broker.server.call(PULL, request)
        while not call.answered:
            broker.server.run()
        assert call.error is not None
        assert told(call.error)[1] == reason


def test_a_hold_is_answered_by_what_matches_and_by_nothing_else(broker: FakeBroker) -> None:
    calls = [pull(broker, hold_ms=10_000), pull(broker, hold_ms=10_000), pull(broker, "n = 3", hold_ms=10_000)]
    broker.fill([b"x"], properties={"n": "1"})
    broker.server.run()
    assert all(call.is_held for call in calls)
    broker.fill([b"x"], properties=EVEN)
    broker.server.run()
    assert [offsets(call) for call in calls[:2]] == [[1], [1]]
    assert calls[2].is_held
    broker.advance(10_000)
    broker.server.run()
    assert response_of(calls[2]).next_offset == 2


def test_a_hold_whose_caller_goes_away_is_forgotten(broker: FakeBroker) -> None:
    call = pull(broker, hold_ms=10_000)
    call.hang_up()
    broker.fill([b"x"], properties=EVEN)
    broker.server.run()
    assert call.answer_payload is None
    assert [lane.holds for lane in broker.server.lanes.values() if lane.holds] == []


def test_a_hold_is_told_that_its_topic_was_deleted(broker: FakeBroker) -> None:
    call = pull(broker, hold_ms=10_000)
    broker.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic")).response()
    broker.server.run()
    assert call.error is not None
    assert told(call.error)[1] == "TOPIC_NOT_FOUND"


def test_a_broker_that_stops_answers_its_holds(broker: FakeBroker) -> None:
    call = pull(broker, hold_ms=10_000)
    broker.pull.stop()
    broker.server.run()
    assert response_of(call).next_offset == 0
    broker.pull.close()


def test_a_broker_without_a_library_says_so(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protomq_broker.filters import cel_filter

    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    cel_filter._environment.cache_clear()
    call = pull(broker, "true", filter_type=FilterType.FILTER_TYPE_CEL)
    cel_filter._environment.cache_clear()
    assert call.error is not None
    code, reason, metadata = told(call.error)
    assert (code, reason, metadata["field"]) == ("UNIMPLEMENTED", "UNSUPPORTED", "filter_type")
    assert "protomq-broker[cel]" in str(call.error)


def test_a_pull_with_a_filter_follows_resets_as_the_others_do(broker: FakeBroker) -> None:
    broker.fill([b"x"] * 5, properties=EVEN)
    member: dict[str, Any] = {"consumer_group": "g", "reset_epoch": 0, "hold_ms": 60_000}
    held = pull(broker, queue_offset=5, **member)
    assert held.is_held
    reset = ResetOffsetsRequest(consumer_group="g", topic="topic", queue_ids=[0], queue_offset=2)
    broker.call(CONSUMER + "ResetOffsets", reset).response()
    epoch = broker.store.offsets.reset_epoch("g", "topic", broker.topic.incarnation, 0)
    for call in (held, pull(broker, queue_offset=5, **member)):
        response = response_of(call)
        assert (response.status, response.next_offset) == (PullStatus.PULL_STATUS_OFFSET_RESET, 2)
        assert response.reset_epoch == epoch > 0
    member["reset_epoch"] = epoch
    assert offsets(pull(broker, queue_offset=2, **member)) == [2, 3, 4]


@pytest.mark.parametrize("hold_ms", [0, 1_000])
def test_a_filter_calls_no_offset_illegal_that_may_be_readable_soon(broker: FakeBroker, hold_ms: int) -> None:
    """A slave, or who has just begun to lead, does not know yet what is confirmed."""
    broker.fill([b"x"] * 3, properties=EVEN)
    broker.store.flush()
    with mock.patch.object(Store, "open", partial(Store.open, waits_for_replicas=True)):
        promoted = FakeBroker(disk=broker.disk.killed(), clock_ms=broker.clock.time_ms)
    error = pull(promoted, queue_offset=2, hold_ms=hold_ms).error
    assert error is not None
    assert told(error)[1] == "REPLICA_BEHIND"
    promoted.store.positions.wait_for_replicas(False)
    assert offsets(pull(promoted, queue_offset=2)) == [2]
    assert response_of(pull(promoted, queue_offset=4)).status == PullStatus.PULL_STATUS_OFFSET_ILLEGAL
