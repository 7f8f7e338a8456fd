"""AdminService over a store on a simulated disk, without lanes and sockets."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from protomq.v1 import admin_service_pb2
from protomq.v1.admin_service_pb2 import (
    CreateTopicRequest,
    DeleteGroupRequest,
    DeleteTopicRequest,
    DescribeTopicRequest,
    GetBrokerStatusRequest,
    GetStatsRequest,
    ListGroupsRequest,
    ListTopicsRequest,
    QueryMessagesRequest,
)
from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, QueueOffset
from protomq.v1.pop_service_pb2 import PopRequest
from protomq.v1.pull_service_pb2 import PullRequest
from protomq.v1.state_pb2 import OffsetsRecord, PoppedQueue, PopRecord
from protomq.v1.topic_pb2 import Permission, Topic
from protomq.wire.record import encode_message_id
from protomq_broker.admin_service import AdminService
from protomq_broker.config import BrokerConfig
from protomq_broker.group_members import GroupMembers
from protomq_broker.member_commits import MemberCommits
from protomq_broker.offset_commits import OffsetCommits
from protomq_broker.queue_locks import QueueLocks
from protomq_broker.state_changes import StateChanges
from protomq_broker.store.state.group_settings import GroupSettings
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import SimDisk
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.errors import SHUTTING_DOWN, Code, ServiceError
from protomq_runtime.testing import FakeCall, FakeGrpcCall, FakeServer
from tests.support.retry_world import TOPIC, RetryWorld
from tests.support.transaction_world import COMMIT
from tests.support.transaction_world import World as TransactionWorld

from .fake_broker import ADMIN, CONSUMER, POP, PULL, FakeBroker, no_members, told
from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import SEGMENT, open_store
from .test_metrics import numbers_of, samples_of


def service_of(store: Store, clock: ManualClock) -> AdminService:
    permit = WritePermit()
    permit.give()
    writer = SystemWriter(permit)
    waiting = WaitingAnswers(store, clock)
    return AdminService(
        store,
        BrokerConfig(),
        broker_name="b",
        version="1",
        start_time_ms=clock.now_ms(),
        lane_status=list,
        announce=lambda: None,
        write_refusal=lambda: "",
        commits=OffsetCommits(
            store,
            writer,
            waiting,
            BrokerConfig(),
            QueueLocks(store.locks, lambda *_: False, lambda: 1),
            MemberCommits(no_members()),
        ),
        members=GroupMembers(clock),
        a_member=lambda group: "",
        permit=permit,
        changes=StateChanges(store, writer, waiting, BrokerConfig(), lambda: None),
        on_grown=lambda _: None,
    )


def call_of(service: AdminService, timeout_s: float | None = None, **fields: Any) -> FakeCall:
    """A look-up in the topic over gRPC."""
    table = DispatchTable()
    table.add_service(admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"], service)
    request = QueryMessagesRequest(topic="topic", **fields)
    return FakeServer(table).call(
        ADMIN + "QueryMessages", request, kind=FakeGrpcCall, timeout_s=timeout_s
    )


def look_up(service: AdminService, **fields: Any) -> list[int] | ServiceError:
    """Sequences of the messages found, or the error."""
    call = call_of(service, **fields)
    return call.error or [record.sequence for record in call.response().records]


def test_a_look_up_that_may_miss_damaged_messages_says_which_and_what_to_do() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    store.topics.create(TopicConfig("topic"))
    requests = [
        make_request([bytes(99)], key="k", producer_id=7, sequence=number) for number in range(9)
    ]
    for request in requests:
        store.append([request])
    position = requests[5].physical_offset
    store.flush()
    disk.flip_bit("/s/commitlog/" + "0" * 20, (position % SEGMENT + 40) * 8)
    clock.time_ms += 1000
    service = service_of(store, clock)
    error = look_up(service, key="k")
    assert isinstance(error, ServiceError)
    assert (error.code, error.reason) == (Code.DATA_LOSS, "CORRUPT_LOG")
    assert error.metadata == {
        "definite": "true",
        "position": str(position),
        "topic": "topic",
        "queue_id": "0",
        "queue_offset": "5",
        "next_offset": "6",
        "is_lost": "false",
        "found_count": "3",
    }
    assert "a record_count_max of 3" in error.message
    assert look_up(service, key="k", record_count_max=3) == [8, 7, 6]
    assert look_up(service, key="other") == []
    assert look_up(service, message_id=encode_message_id(7, 0, 4)) == [4]
    error = look_up(service, message_id=encode_message_id(7, 0, 5))
    assert isinstance(error, ServiceError)
    assert (error.reason, error.metadata["queue_offset"]) == ("CORRUPT_LOG", "5")


def test_as_many_are_found_by_key_as_are_asked_for() -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock, segment=1 << 20)
    store.topics.create(TopicConfig("topic"))
    for first in range(0, 300, 100):
        store.append([make_request([b"x"] * 100, key="k", producer_id=7, sequence=first)])
    found = look_up(service_of(store, clock), key="k", record_count_max=256)
    assert found == list(range(299, 43, -1))


def test_a_look_up_by_key_ends_with_its_caller_s_time() -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock)
    store.topics.create(TopicConfig("topic"))
    store.append([make_request([b"x"], key="k", producer_id=7, sequence=0)])
    call = call_of(service_of(store, clock), -1.0, key="k")
    assert call.error is not None
    assert call.error.code == Code.DEADLINE_EXCEEDED
    assert "narrow it by begin_time" in call.error.message


# Through a fake lane: each call, what it refuses, and that a refusal changes nothing.

INVALID: tuple[str, str, dict[str, str]] = ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})
NO_TOPIC = ("NOT_FOUND", "TOPIC_NOT_FOUND", {"topic": "other"})


def create(name: str = "new", update: bool = False, **fields: Any) -> CreateTopicRequest:
    return CreateTopicRequest(topic=Topic(name=name, **fields), update=update)


def commit(broker: FakeBroker, group: str) -> None:
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=0)
    broker.call(
        CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group=group, offsets=[offset])
    ).response()


def test_a_topic_is_made_with_defaults_and_announced() -> None:
    broker = FakeBroker(default_queues=3)
    topic = broker.call(ADMIN + "CreateTopic", create()).response().topic
    assert (topic.name, topic.write_queues, topic.read_queues) == ("new", 3, 3)
    assert topic.permission == Permission.PERMISSION_READ_WRITE
    assert topic.incarnation > 0
    assert broker.announced_count == 1
    again = broker.call(ADMIN + "CreateTopic", create(incarnation=topic.incarnation)).response().topic
    assert again == topic


def test_a_topic_changes_when_the_caller_says_so_and_keeps_its_incarnation() -> None:
    broker = FakeBroker()
    made = broker.call(ADMIN + "CreateTopic", create(write_queues=1)).response().topic
    changed = broker.call(ADMIN + "CreateTopic", create(update=True, write_queues=4)).response().topic
    assert (changed.write_queues, changed.incarnation) == (4, made.incarnation)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({}, None),
        ({"incarnation": 0}, None),
        ({"write_queues": 2}, "TOPIC_EXISTS"),
        ({"permission": Permission.PERMISSION_READ}, "TOPIC_EXISTS"),
        ({"closed_from": Permission.PERMISSION_READ}, "TOPIC_EXISTS"),
        ({"incarnation": 6}, "TOPIC_EXISTS"),
        ({"name": "other"}, "TOPIC_EXISTS"),
        ({"write_queues": -1}, "INVALID_ARGUMENT"),
    ],
)
def test_a_topic_changes_only_as_the_caller_has_seen_it(seen: dict[str, Any], reason: str | None) -> None:
    broker = FakeBroker()
    made = broker.call(ADMIN + "CreateTopic", create(write_queues=1, incarnation=5)).response().topic
    only_if = Topic()
    only_if.CopyFrom(made)
    for name, value in seen.items():
        setattr(only_if, name, value)
    request = create(update=True, write_queues=4)
    request.only_if.CopyFrom(only_if)
    call = broker.call(ADMIN + "CreateTopic", request)
    found = broker.call(ADMIN + "DescribeTopic", DescribeTopicRequest(topic="new")).response().topic
    if reason is None:
        assert call.response().topic == found != made
        return
    assert call.error is not None
    assert call.error.reason == reason
    assert found == made


def test_a_topic_that_is_gone_is_not_made_again_by_who_has_seen_it() -> None:
    broker = FakeBroker()
    request = create(update=True, write_queues=4)
    request.only_if.CopyFrom(Topic(name="new", write_queues=4, read_queues=4))
    error = broker.call(ADMIN + "CreateTopic", request).error
    assert error is not None
    assert error.reason == "TOPIC_NOT_FOUND"
    assert broker.store.topics.find("new") is None


def test_who_makes_a_topic_smaller_is_told_what_groups_have_not_consumed_there(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker()
    broker.call(ADMIN + "CreateTopic", create("topic", update=True, write_queues=4)).response()
    for queue_id in range(4):
        broker.fill([b"0", b"1", b"2"], queue_id=queue_id)

    def commit(group: str, *offsets: int) -> None:
        named = [QueueOffset(topic="topic", queue_id=queue_id, queue_offset=offset) for queue_id, offset in enumerate(offsets)]
        broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group=group, offsets=named)).response()

    def change(write_queues: int, read_queues: int) -> list[tuple[str, int]]:
        wanted = create("topic", update=True, write_queues=write_queues, read_queues=read_queues)
        return [(each.consumer_group, each.message_count) for each in broker.call(ADMIN + "CreateTopic", wanted).response().unread]

    commit("done", 0, 0, 3, 3)
    commit("slow", 3, 3, 2, 1)
    commit("new", 0)
    for queue_id, count in ((2, 2), (3, 3)):
        pop = PopRequest(consumer_group="pops", topic="topic", queue_id=queue_id, record_count_max=count)
        broker.call(POP + "Pop", pop)
    assert change(2, 4) == []
    assert caplog.messages == []
    assert change(2, 2) == [("new", 6), ("pops", 1), ("slow", 3)]
    assert change(2, 2) == [], "it is smaller already"
    (message,) = caplog.messages
    assert message == (
        "topic 'topic' has 2 read queues now, not 4. Nobody can read what groups have not consumed in the others, in messages: "
        "new 6, pops 1, slow 3. Give it 4 read queues again until they have"
    )


def test_groups_that_consumed_the_topic_before_it_was_made_again_have_nothing_unread() -> None:
    broker = FakeBroker()
    broker.fill([b"0"])

    def make(queues: int, **fields: Any) -> list[str]:
        if queues == 1:
            broker.call(ADMIN + "CreateTopic", create("topic", write_queues=1, read_queues=2, **fields)).response()
        answer = broker.call(ADMIN + "CreateTopic", create("topic", write_queues=queues, read_queues=queues, **fields)).response()
        return [each.consumer_group for each in answer.unread]

    broker.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic")).response()
    # Their last records may stand behind that of the deletion.
    offset = QueueOffset(topic="topic", queue_offset=1, topic_incarnation=5)
    commit = CommitOffsetsRequest(consumer_group="commits", offsets=[offset])
    for machine, body in (
        (broker.store.offsets, OffsetsRecord(commits=[commit])),
        (broker.store.popped, PopRecord(queues=[PoppedQueue(consumer_group="pops", topic="topic", topic_incarnation=5, next_offset=1)])),
    ):
        broker.store.append_state(machine.topic, [body.SerializeToString()])
    assert make(2) == []
    broker.fill([b"1"], queue_id=1)
    assert make(1, update=True) == []
    assert make(2, update=True) == []
    broker.call(POP + "Pop", PopRequest(consumer_group="pops", topic="topic", queue_id=0))
    assert make(1, update=True) == ["pops"], "it is one of the topic of today now"


def test_topics_that_arrive_together_are_announced_together_and_each_is_told_its_own() -> None:
    broker = FakeBroker()
    requests = [create("a"), create("b", write_queues=1_000_000), create("c")]
    first, second, third = broker.server.call_together(ADMIN + "CreateTopic", requests)
    broker.server.run()
    assert (first.response().topic.name, third.response().topic.name) == ("a", "c")
    assert second.error is not None
    assert broker.announced_count == 1


def test_what_changes_topics_waits_for_the_permit() -> None:
    broker = FakeBroker(is_permitted=False)
    made = broker.call(ADMIN + "CreateTopic", create())
    gone = broker.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic"))
    assert not made.answered
    assert not gone.answered
    assert broker.store.topics.find("topic") is not None
    broker.permit.give()
    broker.server.run()
    made.response()
    gone.response()
    assert [topic.name for topic in broker.store.topics.all()] == ["new"]


def test_without_the_permit_topics_stay_as_they_are() -> None:
    broker = FakeBroker(is_permitted=False)
    call = broker.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic"))
    broker.permit.refuse(SHUTTING_DOWN)
    broker.server.run()
    assert call.error is SHUTTING_DOWN
    assert broker.refusal(ADMIN + "CreateTopic", create()) is SHUTTING_DOWN


def test_a_topic_is_described_with_its_queues() -> None:
    broker = FakeBroker()
    broker.fill([b"a", b"b"], queue_id=1)
    response = broker.call(ADMIN + "DescribeTopic", DescribeTopicRequest(topic="topic")).response()
    ranges = [(queue.queue_id, queue.min_offset, queue.end_offset) for queue in response.queues]
    assert ranges == [(0, 0, 0), (1, 0, 2)]
    assert not response.queues[0].HasField("last_store_time")
    assert response.queues[1].last_store_time.ToMilliseconds() == broker.clock.time_ms


def test_a_deleted_topic_is_gone_and_that_is_announced() -> None:
    broker = FakeBroker()
    commit(broker, "group")
    broker.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic")).response()
    assert (broker.store.topics.find("topic"), broker.announced_count) == (None, 1)
    expected = ("NOT_FOUND", "TOPIC_NOT_FOUND", {"topic": "topic"})
    assert told(broker.refusal(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic"))) == expected


@pytest.mark.parametrize(
    ("path", "deletion", "reason"),
    [
        ("DeleteTopic", DeleteTopicRequest(topic="topic"), "TOPIC_NOT_FOUND"),
        ("DeleteGroup", DeleteGroupRequest(consumer_group="group"), "GROUP_NOT_FOUND"),
    ],
)
def test_a_deletion_that_is_said_again_is_answered_when_it_is_stored(path: str, deletion: Message, reason: str) -> None:
    broker = FakeBroker(sync_flush=True)
    broker.store.groups.put(GroupSettings("group"))
    broker.store.flush()
    first, second = (broker.call(ADMIN + path, deletion) for _ in range(2))
    assert not first.answered
    assert not second.answered, "a power cut or a fail-over may bring it back"
    broker.store.flush()
    broker.server.run()
    first.response()
    assert second.error is not None
    assert second.error.reason == reason


def test_topics_are_listed_page_by_page() -> None:
    broker = FakeBroker()
    for name in ("b", "a", "c"):
        broker.call(ADMIN + "CreateTopic", create(name)).response()
    names, token = [], ""
    while True:
        request = ListTopicsRequest(page_size=2, page_token=token)
        response = broker.call(ADMIN + "ListTopics", request).response()
        names.append([topic.name for topic in response.topics])
        token = response.next_page_token
        if not token:
            break
    assert names == [["a", "b"], ["c", "topic"]]


def test_groups_are_listed_with_their_topics() -> None:
    broker = FakeBroker()
    commit(broker, "one")
    commit(broker, "two")
    page = broker.call(ADMIN + "ListGroups", ListGroupsRequest(page_size=1)).response()
    assert [(group.consumer_group, list(group.topics)) for group in page.groups] == [("one", ["topic"])]
    request = ListGroupsRequest(page_token=page.next_page_token, topic="topic")
    rest = broker.call(ADMIN + "ListGroups", request).response()
    assert [group.consumer_group for group in rest.groups] == ["two"]
    assert rest.next_page_token == ""


def test_a_group_that_nobody_uses_is_deleted() -> None:
    broker = FakeBroker()
    commit(broker, "group")
    broker.call(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="group")).response()
    assert broker.store.offsets.groups() == {}


def test_a_group_in_use_is_deleted_only_by_force() -> None:
    broker = FakeBroker()
    commit(broker, "group")
    request = PullRequest(topic="topic", consumer_group="group", member="worker-7")
    broker.call(PULL, request).response()
    deletion = DeleteGroupRequest(consumer_group="group")
    assert told(broker.refusal(ADMIN + "DeleteGroup", deletion)) == (
        "FAILED_PRECONDITION",
        "GROUP_IN_USE",
        {"consumer_group": "group", "member": "worker-7"},
    )
    deletion.force = True
    broker.call(ADMIN + "DeleteGroup", deletion).response()
    assert broker.store.offsets.groups() == {}


def test_a_group_whose_members_pull_elsewhere_is_deleted_only_by_force() -> None:
    broker = FakeBroker()
    commit(broker, "group")
    commit(broker, "other")
    broker.members.add(("group", "worker-7", 1))
    deletion = DeleteGroupRequest(consumer_group="group")
    assert told(broker.refusal(ADMIN + "DeleteGroup", deletion)) == (
        "FAILED_PRECONDITION",
        "GROUP_IN_USE",
        {"consumer_group": "group", "member": "worker-7"},
    )
    broker.call(ADMIN + "DeleteGroup", DeleteGroupRequest(consumer_group="other")).response()
    deletion.force = True
    broker.call(ADMIN + "DeleteGroup", deletion).response()
    assert broker.store.offsets.groups() == {}


def test_the_status_tells_how_far_the_log_is() -> None:
    broker = FakeBroker(sync_flush=True)
    begin = broker.store.appended_position
    offset = QueueOffset(topic="topic", queue_id=0, queue_offset=0)
    broker.call(CONSUMER + "CommitOffsets", CommitOffsetsRequest(consumer_group="g", offsets=[offset]))
    status = broker.call(ADMIN + "GetBrokerStatus", GetBrokerStatusRequest()).response()
    assert (status.broker_name, status.version, status.flush_mode) == ("b", "1", "SYNC_FLUSH")
    assert status.appended_position == broker.store.appended_position > begin
    assert status.readable_position == status.flushed_position <= begin
    assert (status.topics, status.write_refusal, list(status.log_damages)) == (1, "", [])


def test_statistics_count_messages_by_topic() -> None:
    broker = FakeBroker()
    broker.fill([b"a", b"b"])
    broker.call(PULL, PullRequest(topic="topic", queue_offset=1))
    (stats,) = broker.call(ADMIN + "GetStats", GetStatsRequest(topics=["topic"])).response().topics
    assert (stats.topic, stats.records_in, stats.records_out) == ("topic", 2, 1)
    assert stats.bytes_in > stats.bytes_out > 0


def test_messages_are_found_by_key_and_by_id() -> None:
    broker = FakeBroker()
    for number in range(3):
        broker.fill([b"%d" % number], keys=["k"], producer_id=7, sequence=number)

    def bodies(**fields: Any) -> list[bytes]:
        request = QueryMessagesRequest(topic="topic", **fields)
        response = broker.call(ADMIN + "QueryMessages", request).response()
        return [record.body for record in response.records]

    assert bodies(key="k") == [b"2", b"1", b"0"]
    assert bodies(key="k", record_count_max=1) == [b"2"]
    assert bodies(message_id=encode_message_id(7, 0, 1)) == [b"1"]
    assert bodies(key="other") == []


def test_a_ping_is_answered() -> None:
    broker = FakeBroker()
    before = broker.state()
    broker.call(ADMIN + "Ping", b"").response()
    assert broker.state() == before


@pytest.mark.parametrize(
    ("rpc", "request_", "expected"),
    [
        ("CreateTopic", create(""), INVALID),
        ("CreateTopic", create("no/topic"), INVALID),
        ("CreateTopic", create(write_queues=-1), INVALID),
        ("CreateTopic", create(read_queues=1_000_000), INVALID),
        ("CreateTopic", create(permission=77), INVALID),
        ("CreateTopic", create(incarnation=-1), INVALID),
        (
            "CreateTopic",
            create(write_queues=4, read_queues=2),
            (
                "INVALID_ARGUMENT",
                "INVALID_ARGUMENT",
                {"topic": "new", "write_queues": "4", "read_queues": "2", "read_queues_min": "4"},
            ),
        ),
        (
            "CreateTopic",
            create("topic", write_queues=5),
            ("ALREADY_EXISTS", "TOPIC_EXISTS", {"topic": "topic"}),
        ),
        ("DescribeTopic", DescribeTopicRequest(topic="other"), NO_TOPIC),
        ("DescribeTopic", DescribeTopicRequest(), INVALID),
        ("DeleteTopic", DeleteTopicRequest(topic="other"), NO_TOPIC),
        ("DeleteTopic", DeleteTopicRequest(), INVALID),
        ("ListTopics", ListTopicsRequest(page_size=-1), INVALID),
        ("ListTopics", ListTopicsRequest(page_size=1_001), INVALID),
        ("ListTopics", ListTopicsRequest(page_token="no/topic"), INVALID),
        ("ListGroups", ListGroupsRequest(page_size=1_001), INVALID),
        ("ListGroups", ListGroupsRequest(page_token="no/group"), INVALID),
        ("ListGroups", ListGroupsRequest(topic="other"), NO_TOPIC),
        ("DeleteGroup", DeleteGroupRequest(consumer_group=""), INVALID),
        (
            "DeleteGroup",
            DeleteGroupRequest(consumer_group="other", force=True),
            ("NOT_FOUND", "GROUP_NOT_FOUND", {"consumer_group": "other"}),
        ),
        ("GetStats", GetStatsRequest(topics=["other"]), NO_TOPIC),
        ("GetStats", GetStatsRequest(topics=["topic", "topic"]), INVALID),
        ("QueryMessages", QueryMessagesRequest(topic="other", key="k"), NO_TOPIC),
        ("QueryMessages", QueryMessagesRequest(topic="topic"), INVALID),
        ("QueryMessages", QueryMessagesRequest(topic="topic", key="k", message_id="m"), INVALID),
        ("QueryMessages", QueryMessagesRequest(topic="topic", message_id="m"), INVALID),
        ("QueryMessages", QueryMessagesRequest(topic="topic", key="k", record_count_max=257), INVALID),
        (
            "QueryMessages",
            QueryMessagesRequest(
                topic="topic", key="k", begin_time=Timestamp(seconds=2), end_time=Timestamp(seconds=1)
            ),
            INVALID,
        ),
    ],
)
def test_what_is_refused_says_why_and_changes_nothing(
    rpc: str, request_: Any, expected: tuple[str, str, dict[str, str]]
) -> None:
    assert told(FakeBroker().refusal(ADMIN + rpc, request_)) == expected


@pytest.mark.parametrize(
    "rpc",
    [
        "CreateTopic", "DescribeTopic", "DeleteTopic", "ListTopics", "GetBrokerStatus", "GetStats", "QueryMessages", "Ping",
        "ListGroups", "DeleteGroup",
    ],
)  # fmt: skip
def test_what_does_not_parse_is_refused(rpc: str) -> None:
    assert told(FakeBroker().refusal(ADMIN + rpc, b"\xff\xff")) == INVALID


def test_the_status_counts_failed_messages_until_their_next_delivery() -> None:
    world = RetryWorld()
    world.send(b"first", b"second")
    world.send_back(world.read(TOPIC))
    service = service_of(world.store, ManualClock())
    table = DispatchTable()
    table.add_service(admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"], service)

    def count() -> int:
        call = FakeServer(table).call(ADMIN + "GetBrokerStatus", GetBrokerStatusRequest())
        found: int = call.response().delayed_messages
        return found

    assert count() == 2
    world.deliver(10_001)
    assert count() == 0


def test_the_status_does_not_count_transactions_before_they_are_committed() -> None:
    world = TransactionWorld().start()
    table = DispatchTable()
    table.add_service(
        admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"], service_of(world.store, ManualClock())
    )

    def count() -> int:
        call = FakeServer(table).call(ADMIN + "GetBrokerStatus", GetBrokerStatusRequest())
        found: int = call.response().delayed_messages
        assert found == samples_of(numbers_of(world.store))["protomq_delayed_pending", ""]
        return found

    delayed, _ = world.half(delay_ms=60_000), world.half()
    assert count() == 0
    world.end((delayed, COMMIT))
    assert count() == 1
    world.store.close()
