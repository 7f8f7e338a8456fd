"""PullService through a fake lane: what it answers, what it holds, and that a refused pull changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from protomq.v1.consumer_service_pb2 import ResetOffsetsRequest
from protomq.v1.pull_service_pb2 import FilterType, PullRequest, PullResponse, PullStatus
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq_broker.config import LaneSizes
from protomq_broker.pull_requests import GRPC_SIZE_MAX_BYTES
from protomq_broker.pull_service import QUIET_PARTS, together_s
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.replicas import ReplicaView
from protomq_ha.roles import BrokerRole, HaConfig
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.testing import FakeCall, FakeGrpcCall
from tests.support.waiting import wait_for

from .fake_broker import ADMIN, CONSUMER, PULL, SEND, FakeBroker, told

FOUND = PullStatus.PULL_STATUS_FOUND
NO_NEW_MSG = PullStatus.PULL_STATUS_NO_NEW_MSG


def pull(**fields: Any) -> PullRequest:
    return PullRequest(**{"topic": "topic", "queue_id": 0, **fields})


def response_of(call: FakeCall) -> PullResponse:
    response = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
    assert isinstance(response, PullResponse)
    return response


def bodies(response: PullResponse) -> list[bytes]:
    return [record.body for record in response.records]


# Answers.


def test_messages_come_with_their_places_and_the_range_of_the_queue() -> None:
    broker = FakeBroker()
    broker.fill([b"a", b"b", b"c"])
    response = response_of(broker.call(PULL, pull(queue_offset=1)))
    assert (response.status, bodies(response)) == (FOUND, [b"b", b"c"])
    assert (response.first_offset, response.next_offset) == (1, 3)
    assert (response.min_offset, response.end_offset) == (0, 3)
    assert response.topic_incarnation == broker.topic.incarnation
    assert [record.queue_offset for record in response.records] == [1, 2]


def test_no_more_messages_come_than_were_asked_for() -> None:
    broker = FakeBroker()
    broker.fill([bytes(100)] * 40)
    assert response_of(broker.call(PULL, pull())).next_offset == 32
    assert response_of(broker.call(PULL, pull(record_count_max=5))).next_offset == 5
    one = response_of(broker.call(PULL, pull(size_max_bytes=1)))
    assert one.next_offset == 1  # one is always given


def test_a_pull_for_tags_gets_those_and_goes_on_behind_the_others() -> None:
    broker = FakeBroker()
    for tag in ("red", "blue", "red"):
        broker.fill([tag.encode()], tag=tag)
    response = response_of(broker.call(PULL, pull(tags=["red"])))
    assert (bodies(response), response.next_offset) == ([b"red", b"red"], 3)
    assert list(response.queue_offsets) == [0, 2]
    nothing = response_of(broker.call(PULL, pull(tags=["green"])))
    assert (nothing.status, nothing.next_offset) == (PullStatus.PULL_STATUS_NO_MATCHED_MSG, 3)


@pytest.mark.parametrize(
    ("queue_offset", "status", "next_offset"),
    [(1, NO_NEW_MSG, 1), (9, PullStatus.PULL_STATUS_OFFSET_ILLEGAL, 1)],
)
def test_at_and_beyond_the_end_there_is_a_status(
    queue_offset: int, status: int, next_offset: int
) -> None:
    broker = FakeBroker()
    broker.fill([b"a"])
    response = response_of(broker.call(PULL, pull(queue_offset=queue_offset)))
    assert (response.status, response.next_offset) == (status, next_offset)
    assert bodies(response) == []


def test_an_answer_over_grpc_is_within_what_its_clients_take() -> None:
    broker = FakeBroker()
    for _ in range(6):
        broker.fill([bytes(1_000_000)])
    wanted = pull(size_max_bytes=16 << 20)
    assert response_of(broker.call(PULL, wanted)).next_offset == 6
    over_grpc = broker.call(PULL, wanted, kind=FakeGrpcCall)
    assert response_of(over_grpc).next_offset == 3
    assert sum(region.size_bytes for region in over_grpc.regions) <= GRPC_SIZE_MAX_BYTES


def test_a_pull_commits_in_passing() -> None:
    broker = FakeBroker()
    broker.fill([b"a", b"b"])
    request = pull(queue_offset=1, consumer_group="group", commit_offset=1)
    assert bodies(response_of(broker.call(PULL, request))) == [b"b"]
    assert broker.store.offsets.find("group", "topic", broker.topic.incarnation, 0) == 1


def test_two_members_that_take_turns_at_a_queue_are_told_of_each_other() -> None:
    broker = FakeBroker()
    for member, other in (("one", ""), ("two", ""), ("one", "two"), ("two", "one")):
        call = broker.call(PULL, pull(consumer_group="group", member=member))
        assert response_of(call).other_member == other


# Holds.


def hold(broker: FakeBroker, **fields: Any) -> FakeCall:
    call = broker.call(PULL, pull(**{"hold_ms": 1_000, **fields}))
    assert call.is_held, call.error
    return call


def test_a_pull_that_finds_nothing_is_held_until_a_message_comes() -> None:
    broker = FakeBroker()
    call, other_queue = hold(broker), hold(broker, queue_id=1)
    broker.fill([b"at last"])
    assert bodies(response_of(call)) == [b"at last"]
    assert other_queue.is_held
    assert broker.server.lanes["pull"].holds == 1


def test_a_pull_without_a_hold_is_answered_at_once() -> None:
    assert response_of(FakeBroker().call(PULL, pull())).status == NO_NEW_MSG


def test_a_hold_ends_with_its_time() -> None:
    broker = FakeBroker()
    call = hold(broker)
    broker.advance(999)
    assert call.is_held
    broker.advance(1)
    assert response_of(call).status == NO_NEW_MSG
    assert broker.server.lanes["pull"].holds == 0
    assert len(broker.server.lanes["pull"].timers) == 0


@pytest.mark.parametrize("hold_ms", [15_000, 60_001, 86_400_000])
def test_a_longer_hold_than_the_broker_gives_ends_with_the_brokers_time(hold_ms: int) -> None:
    broker = FakeBroker(hold_max_ms=5_000)
    call = hold(broker, hold_ms=hold_ms)
    broker.advance(4_999)
    assert call.is_held
    broker.advance(1)
    assert response_of(call).status == NO_NEW_MSG


@pytest.mark.parametrize(
    ("fields", "role", "ends_ms"),
    [
        ({"hold_ms": 1_000, "quiet_hold_ms": 4_000}, BrokerRole.ASYNC_MASTER, 4_000),
        ({"hold_ms": 1_000, "quiet_hold_ms": 500}, BrokerRole.ASYNC_MASTER, 1_000),
        ({"hold_ms": 1_000, "quiet_hold_ms": 1 << 40}, BrokerRole.ASYNC_MASTER, 120_000),
        ({"hold_ms": 1_000, "quiet_hold_ms": -1}, BrokerRole.ASYNC_MASTER, 1_000),
        ({"hold_ms": 1_000, "quiet_hold_ms": 4_000}, BrokerRole.SLAVE, 1_000),
    ],
)
def test_a_master_holds_a_quiet_pull_for_longer(fields: dict[str, int], role: BrokerRole, ends_ms: int) -> None:
    broker = FakeBroker(broker_role=role.value, broker_id=7 if role is BrokerRole.SLAVE else 0, broker_name="b")
    call = hold(broker, **fields)
    sure_ms = ends_ms - ends_ms // QUIET_PARTS - 1 if ends_ms > fields["hold_ms"] else ends_ms - 1
    broker.advance(sure_ms)
    assert call.is_held
    broker.advance(ends_ms - sure_ms)
    assert response_of(call).status == NO_NEW_MSG


def test_quiet_pulls_of_one_caller_end_together_in_one_turn() -> None:
    broker = FakeBroker()
    calls = []
    for delay_ms in (1, 2, 3, 500):
        calls.append(hold(broker, hold_ms=15_000, quiet_hold_ms=60_000))
        broker.advance(delay_ms)
    lane = broker.server.lanes["pull"]
    ends: list[int] = []
    while any(call.is_held for call in calls):
        next_at = lane.timers.next_at()
        assert next_at is not None
        lane.advance(next_at * 1_000 - lane.now_ms)
        ends.append(sum(not call.is_held for call in calls) - sum(ends))
    # One moment at which the grid of this caller happens to begin may stand between them.
    assert len(ends) <= 2


def test_quiet_pulls_that_end_together_have_one_timer() -> None:
    broker = FakeBroker()
    lane = broker.server.lanes["pull"]
    calls = [hold(broker, queue_id=queue_id, quiet_hold_ms=60_000) for queue_id in (0, 0, 1)]
    assert len(lane.timers) == 1
    calls[0].hang_up()
    assert len(lane.timers) == 1
    broker.fill([b"first"])
    assert bodies(response_of(calls[1])) == [b"first"]
    calls[2].hang_up()
    assert (lane.holds, len(lane.timers)) == (0, 0)
    last = hold(broker, queue_id=1, quiet_hold_ms=60_000)
    broker.advance(60_000)
    assert response_of(last).status == NO_NEW_MSG
    assert (lane.holds, len(lane.timers)) == (0, 0)


@pytest.mark.parametrize("peer", [f"192.0.2.1:{port}" for port in range(4000, 4010)])
def test_a_quiet_pull_ends_a_little_earlier_than_it_was_asked_for(peer: str) -> None:
    ends = [together_s(peer, 100.0 + 0.01 * number, 60.0) for number in range(100)]
    assert all(60 / QUIET_PARTS >= 100.0 + 0.01 * number - end >= 0 for number, end in enumerate(ends))
    assert len({round(end, 6) for end in ends}) <= 3
    assert together_s("192.0.2.1:1", 100.0, 60.0) != together_s(peer, 100.0, 60.0)


class ImpatientCall(FakeCall):
    """Its caller waits for 1 s at most."""

    def hold_time_ms(self, wanted_ms: float) -> float:
        return min(wanted_ms, 900.0)


def test_a_quiet_pull_of_a_caller_that_waits_for_less_is_held_for_nearly_all_of_that() -> None:
    broker = FakeBroker()
    for _ in range(5):
        call = broker.call(PULL, pull(hold_ms=500, quiet_hold_ms=60_000), kind=ImpatientCall)
        broker.advance(900 - 900 // QUIET_PARTS - 2)
        assert call.is_held
        broker.advance(900 // QUIET_PARTS + 2)
        assert response_of(call).status == NO_NEW_MSG
        broker.advance(61)


def test_members_at_rest_at_one_queue_are_told_of_each_other() -> None:
    broker = FakeBroker()
    for member in ("one", "two"):
        hold(broker, quiet_hold_ms=60_000, consumer_group="group", member=member)
    broker.advance(62_000)
    call = broker.call(PULL, pull(consumer_group="group", member="one"))
    assert response_of(call).other_member == "two"


def test_a_quiet_pull_over_grpc_is_held_as_any_other() -> None:
    broker = FakeBroker()
    call = broker.call(PULL, pull(hold_ms=1_000, quiet_hold_ms=4_000), kind=FakeGrpcCall)
    broker.advance(1_000)
    assert response_of(call).status == NO_NEW_MSG


def test_a_pull_without_a_hold_is_not_held_as_a_quiet_one() -> None:
    assert response_of(FakeBroker().call(PULL, pull(quiet_hold_ms=4_000))).status == NO_NEW_MSG


def test_a_hold_ends_before_its_caller_stops_waiting() -> None:
    broker = FakeBroker()
    call = broker.call(PULL, pull(hold_ms=60_000), timeout_s=10)
    broker.advance(10_000)
    assert response_of(call).status == NO_NEW_MSG


def test_a_caller_that_goes_leaves_nothing_behind() -> None:
    broker = FakeBroker()
    call = hold(broker)
    call.hang_up()
    lane = broker.server.lanes["pull"]
    assert (lane.holds, len(lane.timers)) == (0, 0)
    broker.fill([b"for nobody"])
    assert call.answer_payload is None


def test_messages_of_other_tags_do_not_end_a_hold() -> None:
    broker = FakeBroker()
    call = hold(broker, tags=["red"])
    broker.fill([b"blue"], tag="blue")
    assert call.is_held
    broker.fill([b"red"], tag="red")
    response = response_of(call)
    assert (bodies(response), response.first_offset, response.next_offset) == ([b"red"], 1, 2)


def test_a_hold_that_skips_messages_tells_its_offset_within_a_second() -> None:
    broker = FakeBroker()
    call, other_queue = hold(broker, tags=["red"], hold_ms=15_000), hold(broker, tags=["red"], hold_ms=15_000, queue_id=1)
    broker.advance(5_000)
    broker.fill([b"blue"], tag="blue")
    broker.advance(600)
    broker.fill([b"blue"], tag="blue")
    assert call.is_held
    broker.advance(400)
    response = response_of(call)
    assert (bodies(response), response.next_offset) == ([], 2)
    assert other_queue.is_held
    assert len(broker.server.lanes["pull"].timers) == 1
    # What the first look has skipped is told as soon; a hold that is over sooner ends then.
    for hold_ms, ends_ms in ((15_000, 1_000), (300, 300)):
        late = hold(broker, tags=["red"], hold_ms=hold_ms)
        broker.advance(ends_ms - 1)
        assert late.is_held
        broker.advance(1)
        assert response_of(late).next_offset == 2


def test_under_sync_flush_a_hold_ends_when_the_message_is_on_the_disk() -> None:
    broker = FakeBroker(sync_flush=True)
    call = hold(broker)
    broker.call(SEND, SendRequest(topic="topic", queue_id=0, records=[Record(body=b"x")]))
    assert call.is_held
    broker.store.flush()
    broker.server.run()
    assert bodies(response_of(call)) == [b"x"]


@pytest.mark.parametrize("fields", [{}, {"filter_type": FilterType.FILTER_TYPE_SQL92, "filter": "a = 1"}], ids=["plain", "filtered"])
def test_a_pull_that_is_about_to_be_held_as_the_first_of_its_lane_while_the_server_stops_is_answered(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """`stop` runs on another thread, and knows of no held pull yet."""
    broker = FakeBroker()
    hold = broker.pull._hold

    def stop_and_hold(*arguments: Any) -> None:
        broker.pull.stop()
        hold(*arguments)

    monkeypatch.setattr(broker.pull, "_hold", stop_and_hold)
    call = broker.server.call(PULL, pull(hold_ms=60_000, **fields))


    def is_answered() -> bool:
        broker.server.run()
        return call.answered or call.is_held

    wait_for(is_answered)
    broker.server.run()
    assert response_of(call).status == NO_NEW_MSG


def test_a_stop_answers_what_is_held_and_holds_nothing_more() -> None:
    broker = FakeBroker()
    call = hold(broker)
    broker.pull.stop()
    broker.server.run()
    assert response_of(call).status == NO_NEW_MSG
    assert response_of(broker.call(PULL, pull(hold_ms=1_000))).status == NO_NEW_MSG


def test_who_waits_for_a_topic_that_is_deleted_is_told() -> None:
    broker = FakeBroker()
    call = hold(broker)
    broker.store.delete_topic("topic")
    broker.server.run()
    assert call.error is not None
    assert told(call.error) == ("NOT_FOUND", "TOPIC_NOT_FOUND", {"topic": "topic"})


def test_no_more_pulls_are_held_than_a_lane_may_hold() -> None:
    broker = FakeBroker(lanes=LaneSizes(pull_threads=1, hold_max=2))
    for _ in range(2):
        hold(broker)
    error = broker.refusal(PULL, pull(hold_ms=1_000))
    assert told(error) == (
        "RESOURCE_EXHAUSTED", "TOO_MANY", {"what": "held pulls of a lane", "limit": "2"},
    )  # fmt: skip
    assert error.retry_delay_ms == 1_000
    assert response_of(broker.call(PULL, pull())).status == NO_NEW_MSG  # without a hold it may


# Refusals.

INVALID: tuple[str, str, dict[str, str]] = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"queue_offset": -1}, INVALID),
        ({"record_count_max": -1}, INVALID),
        ({"record_count_max": 32_769}, INVALID),
        ({"size_max_bytes": -1}, INVALID),
        ({"size_max_bytes": (16 << 20) + 1}, INVALID),
        ({"hold_ms": -1}, INVALID),
        ({"hold_ms": 86_400_001}, INVALID),
        ({"member": "m" * 256}, INVALID),
        ({"tags": ["t"] * 257}, INVALID),
        ({"tags": ["a||b"]}, INVALID),
        ({"consumer_group": "no/group"}, INVALID),
        ({"commit_offset": 0}, INVALID),
        ({"topic": ""}, INVALID),
        ({"topic": "other"}, ("NOT_FOUND", "TOPIC_NOT_FOUND", {"topic": "other"})),
        (
            {"queue_id": 2},
            (
                "NOT_FOUND",
                "QUEUE_NOT_FOUND",
                {"topic": "topic", "queue_id": "2", "read_queues": "2"},
            ),
        ),
        (
            {"consumer_group": "group", "commit_offset": 2},
            (
                "OUT_OF_RANGE",
                "OFFSET_OUT_OF_RANGE",
                {
                    "topic": "topic",
                    "queue_id": "0",
                    "queue_offset": "2",
                    "min_offset": "0",
                    "end_offset": "1",
                },
            ),
        ),
    ],
)
@pytest.mark.parametrize("hold_ms", [0, 1_000])
def test_a_pull_that_is_refused_says_why_and_changes_nothing(
    fields: dict[str, Any], expected: tuple[str, str, dict[str, str]], hold_ms: int
) -> None:
    broker = FakeBroker()
    broker.fill([b"a"])
    request = pull(**{"hold_ms": hold_ms, "queue_offset": 1, **fields})
    assert told(broker.refusal(PULL, request)) == expected


def test_a_pull_for_an_older_incarnation_is_told_the_current_one() -> None:
    broker = FakeBroker()
    error = broker.refusal(PULL, pull(topic_incarnation=broker.topic.incarnation + 1, hold_ms=9))
    assert told(error) == (
        "FAILED_PRECONDITION",
        "TOPIC_RECREATED",
        {
            "topic": "topic",
            "wanted": str(broker.topic.incarnation + 1),
            "current": str(broker.topic.incarnation),
        },
    )


def test_a_topic_that_may_not_be_read_is_not_read() -> None:
    broker = FakeBroker()
    broker.store.topics.create(TopicConfig("secret", 1, 1, readable=False))
    error = broker.refusal(PULL, pull(topic="secret"))
    assert told(error) == ("PERMISSION_DENIED", "NOT_PERMITTED", {"topic": "secret"})


def test_a_request_that_does_not_parse_is_refused() -> None:
    error = FakeBroker().refusal(PULL, b"\xff\xff")
    assert told(error) == INVALID
    assert "protomq.v1.PullRequest" in error.message


def test_damaged_messages_are_told_with_the_way_around_them() -> None:
    disk = SimDisk()
    broker = FakeBroker(disk=disk)
    places = []
    for number in range(3):
        places.append(broker.store.appended_position)
        broker.fill([b"%d" % number * 99])
    broker.store.flush()
    disk.flip_bit("/s/commitlog/" + "0" * 20, (places[1] + 40) * 8)
    broker.clock.time_ms += 1_000
    error = broker.refusal(PULL, pull(queue_offset=1))
    assert (error.code, error.reason) == (Code.DATA_LOSS, "CORRUPT_LOG")
    assert error.metadata["queue_offset"] == "1"
    assert error.metadata["next_offset"] == "2"
    assert bodies(response_of(broker.call(PULL, pull(queue_offset=2)))) == [b"2" * 99]


def test_a_deleted_topic_is_not_found_by_name() -> None:
    broker = FakeBroker()
    broker.call(ADMIN + "Ping", b"")  # all four services stand in one table
    broker.store.delete_topic("topic")
    with pytest.raises(ServiceError, match="does not exist"):
        response_of(broker.call(PULL, pull()))


@pytest.mark.parametrize(
    "fields", [{}, {"filter_type": FilterType.FILTER_TYPE_SQL92, "filter": "TRUE"}]
)
def test_a_member_that_stands_at_damage_follows_a_reset(fields: dict[str, Any]) -> None:
    broker = FakeBroker()
    for number in range(4):
        broker.fill([b"%d" % number])
    broker.store.flush()
    (region,) = broker.store.read("topic", 0, 1, 1, 1).regions
    start = region.file.base_position + region.offset
    found = DamagedRange(start, start + region.size_bytes, 0, "a flipped bit")
    broker.store._quarantine.add(found)
    request = pull(queue_offset=1, consumer_group="group", reset_epoch=0, **fields)

    def answered() -> FakeCall:
        call = broker.call(PULL, request)
        while not call.answered:  # the filter is compiled on a thread of its own
            broker.server.run()
        return call

    assert told(answered().error)[1] == "CORRUPT_LOG"  # type: ignore[arg-type]
    reset = ResetOffsetsRequest(consumer_group="group", topic="topic", queue_ids=[0], queue_offset=2)
    broker.call(CONSUMER + "ResetOffsets", reset).response()
    response = response_of(answered())
    assert response.status == PullStatus.PULL_STATUS_OFFSET_RESET
    assert response.next_offset == 2


# From which broker to pull next.


@pytest.mark.parametrize("role", [BrokerRole.ASYNC_MASTER, BrokerRole.SLAVE])
@pytest.mark.parametrize("transport", [FakeCall, FakeGrpcCall])
def test_whoever_lags_is_told_to_pull_from_a_slave_until_the_end_of_the_queue(role: BrokerRole, transport: type[FakeCall]) -> None:
    broker_id = 7 if role is BrokerRole.SLAVE else 0
    broker = FakeBroker(
        broker_role=role.value, broker_id=broker_id, broker_name="b", ha=HaConfig(slave_read_memory_ratio=0)
    )
    broker.fill([b"a", b"b", b"c"])
    end = broker.store.appended_position
    broker.slaves = [] if broker_id else [ReplicaView(7, "", True, end, end, 0, 0)]

    def suggested(**fields: Any) -> int:
        return response_of(broker.call(PULL, pull(**fields), kind=transport)).suggested_broker_id

    assert suggested(record_count_max=1) == 7
    assert suggested(record_count_max=2) == 7
    assert suggested(record_count_max=3) == 0
    assert suggested(queue_offset=3) == 0


def test_what_is_in_memory_is_pulled_from_the_master() -> None:
    broker = FakeBroker()
    broker.fill([b"a", b"b", b"c"])
    end = broker.store.appended_position
    broker.slaves = [ReplicaView(7, "", True, end, end, 0, 0)]
    assert response_of(broker.call(PULL, pull(record_count_max=1))).suggested_broker_id == 0
