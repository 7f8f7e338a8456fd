"""A whole broker over both transports: what each service promises, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from protomq.v1 import admin_service_pb2 as admin
from protomq.v1 import consumer_service_pb2 as consumer
from protomq.v1 import pull_service_pb2 as pull
from protomq.v1 import send_service_pb2 as send
from protomq.v1.record_pb2 import Attributes, Record
from protomq.v1.topic_pb2 import Permission, Topic
from protomq.wire import record as layout
from protomq.wire.hashing import sharded_index
from protomq_broker import plain_body_workers
from protomq_broker.broker_process import BrokerProcess
from protomq_broker.config import BrokerConfig
from protomq_broker.plain_bodies import with_plain_bodies
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.state import offsets
from protomq_runtime import grpc_gathering
from protomq_runtime.grpc_server import GrpcServer
from protomq_runtime.remoting_server import RemotingServer
from tests.integration.broker_client import Client, config_in
from tests.integration.transport_callers import CallFailed
from tests.support.waiting import PATIENCE_S

FOUND = pull.PullStatus.PULL_STATUS_FOUND
NO_NEW_MSG = pull.PullStatus.PULL_STATUS_NO_NEW_MSG
NO_MATCHED_MSG = pull.PullStatus.PULL_STATUS_NO_MATCHED_MSG
OFFSET_ILLEGAL = pull.PullStatus.PULL_STATUS_OFFSET_ILLEGAL


@pytest.fixture(params=["remoting", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Start = Callable[..., Any]


@pytest.fixture
def running() -> list[tuple[BrokerProcess, Client]]:
    """The broker that `start` has started last, and its client."""
    return []


@pytest.fixture
def broker_of(running: list[tuple[BrokerProcess, Client]]) -> Callable[[], BrokerProcess]:
    """Gives the broker that runs now."""
    return lambda: running[-1][0]


@pytest.fixture
async def start(
    tmp_path: Path, transport: str, running: list[tuple[BrokerProcess, Client]]
) -> AsyncIterator[Start]:
    """Starts brokers on one store, one after the other; all are stopped at the end."""

    async def stop() -> None:
        while running:
            broker, client = running.pop()
            await client.close()
            await broker.stop(1)

    async def make(**fields: Any) -> Client:
        await stop()
        broker = BrokerProcess(config_in(tmp_path, **fields))
        await broker.start()
        running.append((broker, Client(broker, transport)))
        return running[-1][1]

    yield make
    await stop()


@pytest.fixture
async def client(start: Start) -> Client:
    made = await start()
    await made.call(
        admin.CreateTopicRequest(topic=Topic(name="t", write_queues=1)), admin.CreateTopicResponse
    )
    return made


async def failure(call: Any) -> tuple[int, str]:
    with pytest.raises(CallFailed) as caught:
        await call
    return caught.value.status.code, caught.value.status.reason


async def test_a_message_with_nothing_but_a_body_is_stored_and_read_back(client: Client) -> None:
    sent = await client.send(Record(body=b"hello", tag="red", keys=["k"], properties={"a": "b"}))
    assert (sent.status, sent.queue_id, sent.queue_offset) == (send.SendStatus.SEND_STATUS_SEND_OK, 0, 0)
    answer = await client.pull()
    assert (answer.status, answer.next_offset, answer.min_offset, answer.end_offset) == (FOUND, 1, 0, 1)
    (record,) = answer.records
    assert (record.body, record.tag, list(record.keys), dict(record.properties)) == (b"hello", "red", ["k"], {"a": "b"})
    assert (record.queue_id, record.queue_offset, record.physical_offset) == (0, 0, sent.physical_offset)
    identity = (record.producer_id, record.producer_epoch, record.sequence)
    assert layout.encode_message_id(*identity) == sent.message_id


async def test_the_header_says_where_each_record_stands(client: Client) -> None:
    for i in range(5):
        await client.send(Record(body=b"x" * i))
    path = "/protomq.v1.PullService/Pull"
    payload = await client.raw(path, pull.PullRequest(topic="t", queue_offset=1).SerializeToString())
    answer = pull.PullResponse.FromString(payload)
    regions = payload[len(payload) - answer.regions_size_bytes :]
    assert answer.first_offset == 1
    for i, (start, size) in enumerate(zip(answer.record_starts, answer.record_sizes, strict=True)):
        field = pull.PullResponse.FromString(regions[start : start + size])
        assert [record.body for record in field.records] == [b"x" * (i + 1)]
        assert field.records[0].queue_offset == 1 + i


async def test_a_batch_is_one_run_of_offsets(client: Client) -> None:
    await client.send(Record(body=b"before"))
    sent = await client.send(*(Record(body=b"%d" % i) for i in range(100)))
    assert (sent.queue_offset, sent.record_count) == (1, 100)
    answer = await client.pull(1, record_count_max=200)
    assert [record.body for record in answer.records] == [b"%d" % i for i in range(100)]


async def test_queues_are_taken_in_turn_where_none_is_named(start: Start) -> None:
    client = await start()
    queues = [(await client.send(Record(body=b"x"), topic="auto")).queue_id for _ in range(16)]
    assert sorted(queues) == sorted(list(range(8)) * 2)


async def test_a_sharding_key_chooses_the_queue_where_none_is_named(start: Start) -> None:
    client = await start(default_queues=8)
    kinds: list[dict[str, Any]] = [{}, {"delay_ms": 1}, {"half": True}]
    for sequence, fields in enumerate(kinds * 3):
        record = Record(body=b"x", attributes=Attributes(sharding_key="order-7"), producer_id=7, sequence=sequence)
        assert (await client.send(record, **fields)).queue_id == sharded_index("order-7", 8)
    others = [Record(body=b"x", attributes=Attributes(sharding_key=key)) for key in "ab"]
    assert (await failure(client.send(*others)))[1] == "INVALID_ARGUMENT"


async def test_pull_statuses(client: Client) -> None:
    assert (await client.pull()).status == NO_NEW_MSG
    await client.send(Record(body=b"x", tag="red"))
    beyond = await client.pull(5)
    assert (beyond.status, beyond.next_offset) == (OFFSET_ILLEGAL, 1)
    unmatched = await client.pull(0, tags=["blue"])
    assert (unmatched.status, unmatched.next_offset) == (NO_MATCHED_MSG, 1)
    assert (await client.pull(1)).status == NO_NEW_MSG
    assert len((await client.pull(0, tags=["blue", "red"])).records) == 1


async def test_filtered_offsets_are_named_one_by_one(client: Client) -> None:
    await client.send(*(Record(body=b"x", tag="red" if i % 3 else "blue") for i in range(9)))
    answer = await client.pull(tags=["blue"])
    assert list(answer.queue_offsets) == [0, 3, 6]
    assert [record.queue_offset for record in answer.records] == [0, 3, 6]
    assert answer.next_offset == 9


async def test_messages_of_other_topics_are_never_part_of_an_answer(client: Client) -> None:
    for i in range(20):
        await client.send(Record(body=b"mine %d" % i))
        await client.send(Record(body=b"secret"), topic="other")
    payload = await client.raw(
        "/protomq.v1.PullService/Pull", pull.PullRequest(topic="t", record_count_max=20).SerializeToString()
    )
    assert b"secret" not in payload
    assert len(pull.PullResponse.FromString(payload).records) == 20


async def test_a_hold_is_answered_by_the_arrival(client: Client) -> None:
    held = asyncio.create_task(client.pull(hold_ms=20_000))
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    while not next(lane for lane in status.lanes if lane.lane == "pull").holds:
        status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    await client.send(Record(body=b"now"))
    answer = await asyncio.wait_for(held, PATIENCE_S)
    assert [record.body for record in answer.records] == [b"now"]


async def test_a_hold_goes_on_past_what_does_not_match(client: Client) -> None:
    held = asyncio.create_task(client.pull(hold_ms=20_000, tags=["red"]))
    await client.send(Record(body=b"1", tag="blue"))
    await client.send(Record(body=b"2", tag="red"))
    answer = await asyncio.wait_for(held, PATIENCE_S)
    assert [(record.body, record.queue_offset) for record in answer.records] == [(b"2", 1)]


async def test_a_hold_ends_with_its_time(client: Client) -> None:
    assert (await client.pull(hold_ms=30)).status == NO_NEW_MSG


async def test_a_hold_ends_before_its_caller_stops_waiting(client: Client) -> None:
    request = pull.PullRequest(topic="t", hold_ms=50_000)
    path = "/protomq.v1.PullService/Pull"
    held = (await client._caller(path)).call(path, request.SerializeToString(), timeout_s=0.5)
    payload = await asyncio.wait_for(held, PATIENCE_S)
    assert pull.PullResponse.FromString(payload).status == NO_NEW_MSG


async def test_a_send_that_waits_for_the_disk_is_answered_before_its_caller_stops_waiting(
    start: Start,
) -> None:
    client = await start(store={"sync_flush": True})
    first = await client.send(Record(body=b"x"), queue_id=0)
    assert first.status == send.SendStatus.SEND_STATUS_SEND_OK
    request = send.SendRequest(topic="t", records=[Record(body=b"y")], queue_id=0)
    path = "/protomq.v1.SendService/Send"
    caller = await client._caller(path)
    with client._broker.broker.store._flusher._lock:  # as if a sync took for ever
        answer = caller.call(path, request.SerializeToString(), timeout_s=0.5)
        late = send.SendResponse.FromString(await asyncio.wait_for(answer, PATIENCE_S))
    assert late.status == send.SendStatus.SEND_STATUS_FLUSH_DISK_TIMEOUT
    assert late.queue_offset == 1


async def holds_of_the_pull_lane(client: Client) -> int:
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    return next(lane for lane in status.lanes if lane.lane == "pull").holds


async def test_held_pulls_are_counted_once_and_make_no_crowd(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_gathering, "GATHER_S", 60.0)  # who is gathered waits so long
    held = []
    for count in range(1, 6):
        held.append(asyncio.create_task(client.pull(hold_ms=50_000)))
        while await holds_of_the_pull_lane(client) < count:
            pass
    assert await holds_of_the_pull_lane(client) == 5
    pools = client._broker.server.lane_statuses()  # what the metrics show
    assert [pool.holds for pool in pools if pool.lane == "pull"] == [5]
    assert (await asyncio.wait_for(client.pull(), PATIENCE_S)).status == NO_NEW_MSG
    await client.send(Record(body=b"now"))
    assert {answer.status for answer in await asyncio.gather(*held)} == {FOUND}
    assert await holds_of_the_pull_lane(client) == 0


@pytest.mark.parametrize("front", [GrpcServer, RemotingServer])
async def test_the_store_tells_the_lanes_before_a_port_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front: Any
) -> None:
    process = BrokerProcess(config_in(tmp_path))
    positions = process.broker.store.positions
    opened = []
    open_port = front.start

    def start(self: Any) -> Any:
        opened.append(bool(positions.on_arrival and positions.on_flushed))
        return open_port(self)

    monkeypatch.setattr(front, "start", start)
    await process.start()
    await process.stop(1)
    assert opened == [True]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"broker_id": 1}, "broker_id is 1 and broker_role ASYNC_MASTER: a master has the id 0"),
        ({"broker_role": "SLAVE"}, "broker_id is 0 and broker_role SLAVE"),
        ({"broker_role": "SLAVE", "broker_id": 1, "broker_name": ""}, "a SLAVE has the name of its master"),
        ({"broker_role": "LEADER"}, "must be one of ASYNC_MASTER, SYNC_MASTER, SLAVE"),
    ],
)
def test_a_role_and_an_id_that_do_not_fit_are_refused(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        BrokerConfig(**{"data_dir": tmp_path, "broker_name": "b", **settings})


async def test_stopping_answers_the_holds(client: Client, start: Start) -> None:
    held = asyncio.create_task(client.pull(hold_ms=50_000))
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    while not next(lane for lane in status.lanes if lane.lane == "pull").holds:
        status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    broker = client._broker
    stopping = asyncio.create_task(broker.stop(5))
    assert (await asyncio.wait_for(held, PATIENCE_S)).status == NO_NEW_MSG
    await asyncio.wait_for(stopping, PATIENCE_S)
    await client.close()


def whole_request(first_sequence: int, count: int = 1, epoch: int = 1, topic: str = "t", word: bytes = b"") -> bytes:
    template = layout.RecordTemplate(topic, 4711, epoch)
    records = [template.encode(word + b"%d" % (first_sequence + i), first_sequence + i, 5) for i in range(count)]
    rest = send.SendRequest(topic=topic, record_sizes=[len(record) for record in records])
    return b"".join(map(layout.encode_record_field, records)) + rest.SerializeToString()


SEND = "/protomq.v1.SendService/Send"


async def test_a_repeated_send_is_stored_once(client: Client, start: Start) -> None:
    first = send.SendResponse.FromString(await client.raw(SEND, whole_request(0, 30)))
    again = send.SendResponse.FromString(await client.raw(SEND, whole_request(0, 30)))
    assert not first.repeated_send
    assert again.repeated_send
    assert (again.queue_offset, again.physical_offset) == (first.queue_offset, first.physical_offset)
    client = await start()  # the table is derived from the log, and survives
    again = send.SendResponse.FromString(await client.raw(SEND, whole_request(0, 30)))
    assert (again.repeated_send, again.queue_offset, again.physical_offset) == (True, 0, first.physical_offset)
    assert (await client.pull()).end_offset == 30


async def test_of_two_producers_with_one_id_the_second_stores_nothing_and_is_told_so(client: Client, start: Start) -> None:
    await client.raw(SEND, whole_request(0, 30))
    for is_started_again in (False, True):
        client = await start() if is_started_again else client
        for first, count in ((0, 1), (0, 30), (10, 5), (25, 10)):  # a part of a batch, and one of which a part is new
            refused = client.raw(SEND, whole_request(first, count, word=b"other "))
            assert await failure(refused) == (6, "PRODUCER_ID_TAKEN")
        assert (await client.pull()).end_offset == 30
    assert send.SendResponse.FromString(await client.raw(SEND, whole_request(30, word=b"other "))).queue_offset == 30
    assert await failure(client.raw(SEND, whole_request(30, 2, word=b"other "))) == (9, "SEQUENCE_EXPIRED")


async def sent_in_the_end(client: Client, payload: bytes) -> bytes:
    """Sends again while the broker is busy, as every client does."""
    while True:
        try:
            return await client.raw(SEND, payload)
        except CallFailed as error:
            if error.status.reason != "SYSTEM_BUSY":
                raise
            await asyncio.sleep((error.status.retry_delay_ms or 0) / 1_000)


async def test_the_same_send_many_times_at_once_is_stored_once(client: Client) -> None:
    answers = await asyncio.gather(*(sent_in_the_end(client, whole_request(7)) for _ in range(20)))
    assert sorted(send.SendResponse.FromString(answer).repeated_send for answer in answers) == [False] + [True] * 19
    assert (await client.pull()).end_offset == 1


async def test_a_producer_of_an_older_epoch_is_fenced(client: Client) -> None:
    await client.raw(SEND, whole_request(0, epoch=2))
    assert await failure(client.raw(SEND, whole_request(1, epoch=1))) == (9, "PRODUCER_FENCED")


@pytest.mark.parametrize(
    ("request_message", "expected"),
    [
        (send.SendRequest(topic="../x", records=[Record(body=b"x")]), (3, "INVALID_ARGUMENT")),
        (send.SendRequest(topic="%SYS%OFFSETS", records=[Record(body=b"x")]), (3, "INVALID_ARGUMENT")),
        (send.SendRequest(records=[Record(body=b"x")]), (3, "INVALID_ARGUMENT")),
        (send.SendRequest(topic="t"), (3, "INVALID_ARGUMENT")),
        (send.SendRequest(topic="t", queue_id=1, records=[Record(body=b"x")]), (5, "QUEUE_NOT_FOUND")),
        (send.SendRequest(topic="t", queue_id=-1, records=[Record(body=b"x")]), (5, "QUEUE_NOT_FOUND")),
        (send.SendRequest(topic="t", records=[Record(body=bytes((4 << 20) + 1))]), (3, "MESSAGE_TOO_LARGE")),
        (pull.PullRequest(topic="nowhere"), (5, "TOPIC_NOT_FOUND")),
        (pull.PullRequest(topic="%SYS%OFFSETS"), (3, "INVALID_ARGUMENT")),
        (pull.PullRequest(topic="t", queue_id=3), (5, "QUEUE_NOT_FOUND")),
        (pull.PullRequest(topic="t", queue_offset=-1), (3, "INVALID_ARGUMENT")),
        (pull.PullRequest(topic="t", record_count_max=100_000), (3, "INVALID_ARGUMENT")),
        (pull.PullRequest(topic="t", hold_ms=1 << 40), (3, "INVALID_ARGUMENT")),
        (pull.PullRequest(topic="t", tags=["a", "b||c"]), (3, "INVALID_ARGUMENT")),
        (pull.PullRequest(topic="t", commit_offset=1), (3, "INVALID_ARGUMENT")),
        (consumer.GetOffsetsRequest(topic="t", consumer_group="a/b"), (3, "INVALID_ARGUMENT")),
        (consumer.SearchOffsetRequest(topic="t"), (3, "INVALID_ARGUMENT")),
        (consumer.SearchOffsetRequest(topic="t", store_time=Timestamp(seconds=1 << 62)), (3, "INVALID_ARGUMENT")),
        (consumer.SearchOffsetRequest(topic="t", store_time=Timestamp(nanos=-1)), (3, "INVALID_ARGUMENT")),
        (admin.QueryMessagesRequest(topic="t", key="k", end_time=Timestamp(seconds=1 << 62)), (3, "INVALID_ARGUMENT")),
        (admin.CreateTopicRequest(topic=Topic(name="a b")), (3, "INVALID_ARGUMENT")),
        (admin.CreateTopicRequest(topic=Topic(name="a", write_queues=5000)), (3, "INVALID_ARGUMENT")),
        (admin.DescribeTopicRequest(topic="nowhere"), (5, "TOPIC_NOT_FOUND")),
        (admin.DeleteTopicRequest(topic="nowhere"), (5, "TOPIC_NOT_FOUND")),
        (admin.ListTopicsRequest(page_token="no/name"), (3, "INVALID_ARGUMENT")),
        (admin.ListGroupsRequest(page_token="no name"), (3, "INVALID_ARGUMENT")),
        (admin.QueryMessagesRequest(topic="t"), (3, "INVALID_ARGUMENT")),
        (admin.QueryMessagesRequest(topic="t", message_id="zz"), (3, "INVALID_ARGUMENT")),
    ],
)
async def test_what_is_wrong_is_refused_with_a_reason_and_changes_nothing(
    client: Client, request_message: Message, expected: tuple[int, str]
) -> None:
    before = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    assert await failure(client.call(request_message, Message)) == expected
    after = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    assert (after.appended_position, after.topics) == (before.appended_position, before.topics)


async def test_permissions_are_kept_apart(client: Client) -> None:
    await client.send(Record(body=b"x"))
    for permission, may_send, may_pull in (
        (Permission.PERMISSION_READ, False, True),
        (Permission.PERMISSION_WRITE, True, False),
        (Permission.PERMISSION_NONE, False, False),
        (Permission.PERMISSION_READ_WRITE, True, True),
    ):
        topic = Topic(name="t", write_queues=1, permission=permission)
        await client.call(admin.CreateTopicRequest(topic=topic, update=True), admin.CreateTopicResponse)
        if may_send:
            await client.send(Record(body=b"y"))
        else:
            assert await failure(client.send(Record(body=b"y"))) == (7, "NOT_PERMITTED")
        if may_pull:
            assert (await client.pull()).status == FOUND
        else:
            assert await failure(client.pull()) == (7, "NOT_PERMITTED")


async def test_topics_are_created_changed_listed_and_deleted(client: Client, start: Start) -> None:
    same = Topic(name="t", write_queues=1)
    await client.call(admin.CreateTopicRequest(topic=same), admin.CreateTopicResponse)
    other = Topic(name="t", write_queues=4)
    assert await failure(client.call(admin.CreateTopicRequest(topic=other), Message)) == (6, "TOPIC_EXISTS")
    changed = await client.call(admin.CreateTopicRequest(topic=other, update=True), admin.CreateTopicResponse)
    assert (changed.topic.write_queues, changed.topic.read_queues) == (4, 4)
    for name in ("a", "b", "c"):
        await client.call(admin.CreateTopicRequest(topic=Topic(name=name)), admin.CreateTopicResponse)
    first = await client.call(admin.ListTopicsRequest(page_size=3), admin.ListTopicsResponse)
    assert [topic.name for topic in first.topics] == ["a", "b", "c"]
    rest = await client.call(
        admin.ListTopicsRequest(page_size=3, page_token=first.next_page_token), admin.ListTopicsResponse
    )
    assert ([topic.name for topic in rest.topics], rest.next_page_token) == (["t"], "")
    await client.call(admin.DeleteTopicRequest(topic="b"), admin.DeleteTopicResponse)
    client = await start()
    listed = await client.call(admin.ListTopicsRequest(), admin.ListTopicsResponse)
    assert [(topic.name, topic.write_queues) for topic in listed.topics] == [("a", 8), ("c", 8), ("t", 4)]


async def test_unpacking_bodies_holds_up_no_other_pull(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacking, go_on = threading.Semaphore(0), threading.Event()

    def slow(*arguments: Any) -> Any:
        unpacking.release()
        assert go_on.wait(60)
        return with_plain_bodies(*arguments)

    monkeypatch.setattr("protomq_broker.pull_service.with_plain_bodies", slow)
    packed = zlib.compress(b"x" * 100_000)
    await client.send(Record(body=packed, flags=layout.COMPRESSION_ZLIB))
    plain = [asyncio.create_task(client.pull(plain_bodies=True)) for _ in range(8)]  # more than there are lanes
    try:
        assert await asyncio.to_thread(unpacking.acquire, timeout=60)
        for _ in range(4):
            assert (await client.pull()).records[0].body == packed
        assert not any(task.done() for task in plain)
    finally:
        go_on.set()
    for answer in await asyncio.gather(*plain):
        assert answer.records[0].body == b"x" * 100_000


async def test_a_held_pull_for_plain_bodies_is_answered_and_an_error_in_unpacking_is_told(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = asyncio.create_task(client.pull(plain_bodies=True, hold_ms=30_000))
    await client.send(Record(body=zlib.compress(b"x" * 1_000), flags=layout.COMPRESSION_ZLIB))
    assert (await held).records[0].body == b"x" * 1_000

    def fail(*_: Any) -> Any:
        raise OSError(5, "the disk cannot be read")

    monkeypatch.setattr("protomq_broker.pull_service.read_regions", fail)
    assert await failure(client.pull(plain_bodies=True)) == (9, "STORE_FAILED")
    monkeypatch.setattr(plain_body_workers, "PENDING_SIZE_MAX_BYTES", 0)
    assert await failure(client.pull(plain_bodies=True)) == (8, "SYSTEM_BUSY")


async def test_what_cannot_be_meant_is_refused_by_field(client: Client) -> None:
    offset = consumer.QueueOffset(topic="t", queue_id=0)
    times: dict[str, Any] = {"begin_time": Timestamp(seconds=9), "end_time": Timestamp(seconds=8)}
    for request, field in (
        (consumer.CommitOffsetsRequest(consumer_group="g", offsets=[offset, offset]), "offsets[1]"),
        (consumer.GetOffsetsRequest(consumer_group="g", topic="t", queue_ids=[0, 0]), "queue_ids"),
        (consumer.GetQueueRangeRequest(topic="t", queue_ids=[0, 0]), "queue_ids"),
        (consumer.GetQueueRangeRequest(topic="t", queue_ids=range(2_000)), "queue_ids"),
        (admin.GetStatsRequest(topics=["t", "t"]), "topics"),
        (admin.QueryMessagesRequest(topic="t", key="k", **times), "end_time"),
        (pull.PullRequest(topic="t", consumer_group="a b"), "consumer_group"),
        (pull.PullRequest(topic="t", consumer_group="g" * 121), "consumer_group"),
    ):
        with pytest.raises(CallFailed) as caught:
            await client.call(request, Message)
        status = caught.value.status
        assert (status.reason, [name for name, _ in status.field_violations]) == ("INVALID_ARGUMENT", [field])


async def test_a_group_is_deleted_unless_it_is_in_use(client: Client, start: Start) -> None:
    def delete(group: str, *, force: bool = False) -> Any:
        request = admin.DeleteGroupRequest(consumer_group=group, force=force)
        return client.call(request, admin.DeleteGroupResponse)

    async def groups() -> list[str]:
        answer = await client.call(admin.ListGroupsRequest(), admin.ListGroupsResponse)
        return [group.consumer_group for group in answer.groups]

    await client.send(Record(body=b"x"))
    for group in ("idle", "busy"):
        offset = consumer.QueueOffset(topic="t", queue_id=0, queue_offset=1)
        commit = consumer.CommitOffsetsRequest(consumer_group=group, offsets=[offset])
        await client.call(commit, consumer.CommitOffsetsResponse)
    await client.pull(consumer_group="busy", member="one of them")
    await delete("idle")
    assert await groups() == ["busy"]
    assert await failure(delete("idle")) == (5, "GROUP_NOT_FOUND")
    assert await failure(delete("a b")) == (3, "INVALID_ARGUMENT")
    with pytest.raises(CallFailed) as caught:
        await delete("busy")
    status = caught.value.status
    assert (status.code, status.reason) == (9, "GROUP_IN_USE")
    assert status.metadata == {"definite": "true", "consumer_group": "busy", "member": "one of them"}
    assert await groups() == ["busy"]
    await delete("busy", force=True)
    assert await groups() == []
    client = await start()
    assert await groups() == []


async def test_no_queue_is_written_that_cannot_be_read(client: Client) -> None:
    async def put(name: str, write_queues: int, read_queues: int, *, update: bool = True) -> Topic:
        wanted = Topic(name=name, write_queues=write_queues, read_queues=read_queues)
        request = admin.CreateTopicRequest(topic=wanted, update=update)
        return (await client.call(request, admin.CreateTopicResponse)).topic

    async def refused(name: str, write_queues: int, read_queues: int, *, least: int, update: bool = True) -> str:
        with pytest.raises(CallFailed) as caught:
            await put(name, write_queues, read_queues, update=update)
        status = caught.value.status
        assert (status.code, status.reason) == (3, "INVALID_ARGUMENT")
        assert status.metadata == {
            "definite": "true",
            "topic": name,
            "write_queues": str(write_queues),
            "read_queues": str(read_queues),
            "read_queues_min": str(least),
        }
        assert [field for field, _ in status.field_violations] == ["topic.read_queues"]
        return status.message

    assert "raise the read queues" in await refused("new", 4, 2, least=4, update=False)
    assert await failure(client.call(admin.DescribeTopicRequest(topic="new"), Message)) == (5, "TOPIC_NOT_FOUND")
    await put("s", 4, 4)
    assert "raise the read queues" in await refused("s", 8, 4, least=8)
    assert "Lower those first" in await refused("s", 2, 2, least=4)
    described = await client.call(admin.DescribeTopicRequest(topic="s"), admin.DescribeTopicResponse)
    assert (described.topic.write_queues, described.topic.read_queues) == (4, 4)
    for write_queues, read_queues in ((4, 8), (8, 8), (2, 8), (2, 2)):  # growing, then shrinking
        made = await put("s", write_queues, read_queues)
        assert (made.write_queues, made.read_queues) == (write_queues, read_queues)


async def test_a_deleted_topic_begins_anew(client: Client) -> None:
    await client.send(Record(body=b"old"))
    await client.call(admin.DeleteTopicRequest(topic="t"), admin.DeleteTopicResponse)
    assert await failure(client.pull()) == (5, "TOPIC_NOT_FOUND")
    await client.send(Record(body=b"new"), queue_id=0)
    assert [record.body for record in (await client.pull()).records] == [b"new"]


async def test_offsets_of_groups_are_kept(client: Client, start: Start) -> None:
    for _ in range(5):
        await client.send(Record(body=b"x"))
    offset = consumer.QueueOffset(topic="t", queue_id=0, queue_offset=3)
    await client.call(
        consumer.CommitOffsetsRequest(consumer_group="g", offsets=[offset]), consumer.CommitOffsetsResponse
    )
    await client.pull(consumer_group="h", commit_offset=2)
    client = await start()
    for group, expected in (("g", [3]), ("h", [2]), ("new", [])):
        request = consumer.GetOffsetsRequest(consumer_group=group, topic="t")
        got = await client.call(request, consumer.GetOffsetsResponse)
        assert [entry.queue_offset for entry in got.offsets] == expected


async def test_groups_that_have_committed_are_listed(client: Client, start: Start) -> None:
    await client.call(admin.CreateTopicRequest(topic=Topic(name="u")), admin.CreateTopicResponse)
    for group, topics in (("h", "t"), ("g", "ut"), ("i", "u")):
        offsets = [consumer.QueueOffset(topic=topic, queue_offset=0) for topic in topics]
        await client.call(
            consumer.CommitOffsetsRequest(consumer_group=group, offsets=offsets), consumer.CommitOffsetsResponse
        )
    client = await start()

    async def listed(**fields: Any) -> tuple[list[tuple[str, list[str]]], str]:
        page = await client.call(admin.ListGroupsRequest(**fields), admin.ListGroupsResponse)
        return [(group.consumer_group, list(group.topics)) for group in page.groups], page.next_page_token

    assert await listed(page_size=2) == ([("g", ["t", "u"]), ("h", ["t"])], "h")
    assert await listed(page_size=2, page_token="h") == ([("i", ["u"])], "")
    assert await listed(topic="u") == ([("g", ["t", "u"]), ("i", ["u"])], "")
    assert await failure(listed(topic="none")) == (5, "TOPIC_NOT_FOUND")
    assert await failure(listed(page_size=1001)) == (3, "INVALID_ARGUMENT")
    await client.call(admin.DeleteTopicRequest(topic="u"), admin.DeleteTopicResponse)
    assert await listed() == ([("g", ["t"]), ("h", ["t"])], "")


async def test_ranges_and_times(client: Client) -> None:
    for i in range(3):
        await client.send(Record(body=b"%d" % i))
    (queue,) = (await client.call(consumer.GetQueueRangeRequest(topic="t"), consumer.GetQueueRangeResponse)).ranges
    assert (queue.min_offset, queue.end_offset) == (0, 3)
    times = [record.store_time_ms for record in (await client.pull()).records]
    for time_ms, expected in ((0, 0), (times[0], 0), (times[2] + 1, 3)):
        store_time = Timestamp()
        store_time.FromMilliseconds(time_ms)
        found = await client.call(
            consumer.SearchOffsetRequest(topic="t", store_time=store_time), consumer.SearchOffsetResponse
        )
        assert found.queue_offset == expected


async def test_messages_are_found_by_key_and_by_id(client: Client) -> None:
    ids = [(await client.send(Record(body=b"%d" % i, keys=[f"k{i % 3}", "second"]))).message_id for i in range(9)]
    by_key = await client.call(admin.QueryMessagesRequest(topic="t", key="k1"), admin.QueryMessagesResponse)
    assert [record.body for record in by_key.records] == [b"7", b"4", b"1"]
    by_second = await client.call(
        admin.QueryMessagesRequest(topic="t", key="second"), admin.QueryMessagesResponse
    )
    assert [record.body for record in by_second.records] == [b"%d" % i for i in range(8, -1, -1)]
    by_id = await client.call(
        admin.QueryMessagesRequest(topic="t", message_id=ids[5]), admin.QueryMessagesResponse
    )
    assert [record.body for record in by_id.records] == [b"5"]
    none = await client.call(admin.QueryMessagesRequest(topic="t", key="k9"), admin.QueryMessagesResponse)
    assert not none.records


@pytest.mark.parametrize(
    ("body_size_bytes", "given"),
    [(900_000, {"grpc": 4, "remoting": 5}), (4 << 20, {"grpc": 1, "remoting": 3})],
)
async def test_what_a_look_up_finds_is_bounded_in_bytes(
    client: Client, transport: str, body_size_bytes: int, given: dict[str, int]
) -> None:
    for number in range(5):
        await client.send(Record(body=bytes((number,)) * body_size_bytes, keys=["k"]))
    found = await client.call(admin.QueryMessagesRequest(topic="t", key="k"), admin.QueryMessagesResponse)
    assert [record.body[0] for record in found.records] == [4, 3, 2, 1, 0][: given[transport]]


async def test_status_and_statistics_count(client: Client) -> None:
    await client.send(*(Record(body=b"x") for _ in range(7)))
    await client.pull()
    (stats,) = (await client.call(admin.GetStatsRequest(), admin.GetStatsResponse)).topics
    assert (stats.topic, stats.records_in, stats.records_out) == ("t", 7, 7)
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    assert (status.broker_name, status.flush_mode, status.write_refusal) == ("b", "ASYNC_FLUSH", "")
    assert status.readable_position == status.appended_position > 0
    assert {lane.lane for lane in status.lanes} == {"send", "pull", "consumer", "pop", "admin", "ha"}


async def test_under_sync_flush_an_answer_means_on_stable_storage(start: Start) -> None:
    client = await start(store={"sync_flush": True})
    answers = await asyncio.gather(*(client.send(Record(body=b"%d" % i)) for i in range(50)))
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    assert {answer.status for answer in answers} == {send.SendStatus.SEND_STATUS_SEND_OK}
    assert status.flushed_position == status.appended_position == status.readable_position
    assert status.flush_mode == "SYNC_FLUSH"
    answer = await client.send(Record(body=b"no wait"), wait_store_ok=False)
    assert answer.status == send.SendStatus.SEND_STATUS_SEND_OK


async def test_without_auto_create_an_unknown_topic_is_refused(start: Start) -> None:
    client = await start(auto_create_topics=False)
    assert await failure(client.send(Record(body=b"x"))) == (5, "TOPIC_NOT_FOUND")


async def test_messages_survive_a_restart(client: Client, start: Start) -> None:
    await client.send(*(Record(body=b"%d" % i) for i in range(50)))
    client = await start()
    answer = await client.pull(record_count_max=100)
    assert [record.body for record in answer.records] == [b"%d" % i for i in range(50)]
    assert (await client.send(Record(body=b"more"), queue_id=0)).queue_offset == 50


async def incarnation_of(client: Client, topic: str = "t") -> int:
    described = await client.call(admin.DescribeTopicRequest(topic=topic), admin.DescribeTopicResponse)
    return described.topic.incarnation


async def recreate(client: Client, **fields: Any) -> int:
    await client.call(admin.DeleteTopicRequest(topic="t"), admin.DeleteTopicResponse)
    topic = Topic(name="t", write_queues=1, **fields)
    made = await client.call(admin.CreateTopicRequest(topic=topic), admin.CreateTopicResponse)
    return made.topic.incarnation


async def test_a_topic_keeps_its_incarnation_until_it_is_deleted(client: Client, start: Start) -> None:
    first = await incarnation_of(client)
    assert 1 <= first < 1 << 63
    update = admin.CreateTopicRequest(topic=Topic(name="t", write_queues=3), update=True)
    assert (await client.call(update, admin.CreateTopicResponse)).topic.incarnation == first
    client = await start()
    assert await incarnation_of(client) == first
    second = await recreate(client)
    assert second != first
    assert await incarnation_of(client) == second
    await client.send(Record(body=b"x"), topic="sent")
    assert await incarnation_of(client, "sent") not in (0, first, second)


async def test_a_topic_can_be_given_its_incarnation_and_no_other_then(client: Client) -> None:
    def create(incarnation: int, **fields: Any) -> Any:
        topic = Topic(name="given", incarnation=incarnation)
        return client.call(admin.CreateTopicRequest(topic=topic, **fields), admin.CreateTopicResponse)

    assert (await create(77)).topic.incarnation == 77
    assert (await create(77)).topic.incarnation == (await create(0)).topic.incarnation == 77
    for fields in ({}, {"update": True}):
        with pytest.raises(CallFailed) as caught:
            await create(78, **fields)
        assert caught.value.status.reason == "TOPIC_EXISTS"
        assert caught.value.status.metadata == {"definite": "true", "topic": "given", "wanted": "78", "current": "77"}
    assert await failure(create(-1)) == (3, "INVALID_ARGUMENT")
    assert await incarnation_of(client, "given") == 77


async def test_all_answers_carry_the_incarnation_and_requests_for_another_are_refused(client: Client) -> None:
    await client.send(Record(body=b"old"), Record(body=b"old"))
    old = await incarnation_of(client)

    def commit(incarnation: int) -> Any:
        offset = consumer.QueueOffset(topic="t", queue_offset=1, topic_incarnation=incarnation)
        request = consumer.CommitOffsetsRequest(consumer_group="g", offsets=[offset])
        return client.call(request, consumer.CommitOffsetsResponse)

    def questions(incarnation: int) -> list[Any]:
        named: Any = {"topic": "t", "topic_incarnation": incarnation}
        return [
            client.pull(topic_incarnation=incarnation),
            client.call(consumer.GetOffsetsRequest(consumer_group="g", **named), consumer.GetOffsetsResponse),
            client.call(consumer.GetQueueRangeRequest(**named), consumer.GetQueueRangeResponse),
            client.call(consumer.SearchOffsetRequest(store_time=Timestamp(), **named), consumer.SearchOffsetResponse),
        ]

    await commit(old)
    for question in [*questions(0), *questions(old)]:
        assert (await question).topic_incarnation == old
    current = await recreate(client)
    await client.send(Record(body=b"new"))
    for question in [commit(old), *questions(old)]:
        with pytest.raises(CallFailed) as caught:
            await question
        assert (caught.value.status.code, caught.value.status.reason) == (9, "TOPIC_RECREATED")
        assert caught.value.status.metadata == {"definite": "true", "topic": "t", "wanted": str(old), "current": str(current)}
    for question in [*questions(0), *questions(current)]:
        assert (await question).topic_incarnation == current
    request = consumer.GetOffsetsRequest(consumer_group="g", topic="t")
    assert not (await client.call(request, consumer.GetOffsetsResponse)).offsets
    assert [record.body for record in (await client.pull(topic_incarnation=current)).records] == [b"new"]


@pytest.mark.parametrize("makes_again", [False, True], ids=["deleted", "made again"])
async def test_a_hold_is_answered_when_its_topic_goes(client: Client, makes_again: bool) -> None:
    old = await incarnation_of(client)
    held = asyncio.create_task(client.pull(hold_ms=50_000, topic_incarnation=old))
    unchecked = asyncio.create_task(client.pull(hold_ms=50_000))
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    while next(lane for lane in status.lanes if lane.lane == "pull").holds < 2:
        status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    if makes_again:
        await recreate(client)
        await client.send(Record(body=b"new"))
        assert await failure(held) in ((5, "TOPIC_NOT_FOUND"), (9, "TOPIC_RECREATED"))
        unchecked.cancel()
    else:
        await client.call(admin.DeleteTopicRequest(topic="t"), admin.DeleteTopicResponse)
        assert await failure(held) == await failure(unchecked) == (5, "TOPIC_NOT_FOUND")


async def test_a_topic_made_by_its_first_message_keeps_its_incarnation_though_all_files_are_lost(
    start: Start, tmp_path: Path
) -> None:
    client = await start()
    await client.send(*(Record(body=b"x") for _ in range(3)), topic="sent")
    made = await incarnation_of(client, "sent")
    await start()  # stopped: the file is written
    await start()
    for path in (tmp_path / "config").iterdir():
        if path.name not in ("store.json", "filters"):
            path.unlink()
    client = await start()
    assert await incarnation_of(client, "sent") == made


# Repeats and order.


def numbered(sequence: int) -> Record:
    return Record(body=b"%d" % sequence, producer_id=77, sequence=sequence)


async def test_a_previous_sequence_that_is_not_stored_keeps_a_send_out(client: Client) -> None:
    assert await failure(client.send(numbered(3), queue_id=0, previous_sequence=2)) == (9, "SEQUENCE_EXPIRED")
    await client.send(numbered(0), queue_id=0)
    assert await failure(client.send(numbered(2), queue_id=0, previous_sequence=1)) == (9, "SEND_OUT_OF_ORDER")
    await client.send(numbered(1), queue_id=0, previous_sequence=0)
    assert (await client.send(numbered(2), queue_id=0, previous_sequence=1)).queue_offset == 2
    again = await client.send(numbered(1), queue_id=0, previous_sequence=0)
    assert (again.queue_offset, again.repeated_send) == (1, True)


async def test_after_a_refused_send_what_is_pipelined_behind_it_lands_in_order(client: Client) -> None:
    await client.send(numbered(0), queue_id=0)
    orders = [(numbered(n), n - 1) for n in range(1, 20)]
    orders[4][0].properties["k"] = "v" * 40_000  # refused: too large
    outcomes = await asyncio.gather(
        *(client.send(record, queue_id=0, previous_sequence=previous) for record, previous in orders),
        return_exceptions=True,
    )
    # Calls over gRPC may overtake each other: then one more is refused, and nothing is out of order all the same.
    assert not any(isinstance(outcome, send.SendResponse) for outcome in outcomes[4:])
    orders[4][0].properties.clear()
    for record, previous in orders:
        await client.send(record, queue_id=0, previous_sequence=previous)
    stored = (await client.pull(record_count_max=100)).records
    assert [record.sequence for record in stored] == list(range(20))


async def test_a_refused_send_makes_no_topic(client: Client) -> None:
    assert (await failure(client.send(Record(body=b"x", flags=1 << 9), topic="new")))[1] == "INVALID_ARGUMENT"
    assert await failure(client.pull(topic="new")) == (5, "TOPIC_NOT_FOUND")
    await client.send(Record(body=b"x"), topic="new", queue_id=0)
    assert len((await client.pull(topic="new")).records) == 1


# Committed offsets.


def commit_request(offset: int, *, group: str = "g", queue_id: int = 0) -> consumer.CommitOffsetsRequest:
    entry = consumer.QueueOffset(topic="t", queue_id=queue_id, queue_offset=offset)
    return consumer.CommitOffsetsRequest(consumer_group=group, offsets=[entry])


async def committed(client: Client, group: str = "g") -> list[int]:
    answer = await client.call(consumer.GetOffsetsRequest(consumer_group=group, topic="t"), consumer.GetOffsetsResponse)
    return [entry.queue_offset for entry in answer.offsets]


async def test_an_offset_outside_the_queue_is_refused_with_the_range(client: Client) -> None:
    await client.send(*(Record(body=b"x") for _ in range(3)))
    await client.call(commit_request(3), consumer.CommitOffsetsResponse)
    for offset in (-1, 4, 1 << 62):
        attempts = [
            client.call(commit_request(offset), consumer.CommitOffsetsResponse),
            client.pull(consumer_group="g", commit_offset=offset),
        ]
        for attempt in attempts:
            with pytest.raises(CallFailed) as caught:
                await attempt
            status = caught.value.status
            assert (status.code, status.reason) == (11, "OFFSET_OUT_OF_RANGE")
            assert (status.metadata["min_offset"], status.metadata["end_offset"]) == ("0", "3")
            assert "from 0 to 3" in status.message
    assert await committed(client) == [3]
    await client.call(commit_request(0), consumer.CommitOffsetsResponse)
    assert await committed(client) == [0]


async def test_one_bad_offset_of_many_commits_none(client: Client) -> None:
    await client.send(Record(body=b"x"))
    await client.call(admin.CreateTopicRequest(topic=Topic(name="u")), admin.CreateTopicResponse)
    request = commit_request(1)
    request.offsets.add(topic="u", queue_id=0, queue_offset=9)
    assert await failure(client.call(request, consumer.CommitOffsetsResponse)) == (11, "OFFSET_OUT_OF_RANGE")
    assert await committed(client) == []


async def test_under_sync_flush_a_commit_waits_for_the_disk_and_what_is_appended_counts(start: Start) -> None:
    client = await start(store={"sync_flush": True})
    await client.call(admin.CreateTopicRequest(topic=Topic(name="t", write_queues=1)), admin.CreateTopicResponse)
    await client.send(*(Record(body=b"x") for _ in range(3)))
    await asyncio.gather(
        *(client.call(commit_request(i % 4, group=f"g{i}"), consumer.CommitOffsetsResponse) for i in range(40))
    )
    status = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    assert status.flushed_position == status.appended_position
    assert [await committed(client, f"g{i}") for i in range(8)] == [[i % 4] for i in range(8)]


async def test_commits_of_one_group_count_in_their_order(client: Client, start: Start) -> None:
    await client.send(*(Record(body=b"x") for _ in range(9)))
    for offset in (5, 9, 2):
        await client.call(commit_request(offset), consumer.CommitOffsetsResponse)
    await client.pull(consumer_group="g", commit_offset=7)
    await client.call(commit_request(4), consumer.CommitOffsetsResponse)
    assert await committed(client) == [4]
    client = await start()
    assert await committed(client) == [4]


async def test_what_a_pull_commits_is_in_the_log_soon(client: Client, start: Start) -> None:
    await client.send(*(Record(body=b"x") for _ in range(9)))
    await client.pull(consumer_group="g", commit_offset=7)
    while await committed(client) != [7]:
        pass  # each look is a call
    client = await start()
    assert await committed(client) == [7]


async def test_there_is_a_limit_to_groups(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "GROUPS_MAX", 2)
    for group in ("a", "b", "a"):
        await client.call(commit_request(0, group=group), consumer.CommitOffsetsResponse)
    assert await failure(client.call(commit_request(0, group="c"), consumer.CommitOffsetsResponse)) == (8, "TOO_MANY")
    # A pull that commits is refused as well: its caller would not hear that the offset is not kept.
    assert await failure(client.pull(consumer_group="c", commit_offset=0)) == (8, "TOO_MANY")
    await client.pull(consumer_group="b", commit_offset=0)
    await client.pull(consumer_group="c")
    await client.call(admin.DeleteGroupRequest(consumer_group="b", force=True), admin.DeleteGroupResponse)
    await client.pull(consumer_group="c", commit_offset=0)
    while await committed(client, "c") != [0]:
        pass  # each look is a call


async def test_a_commit_that_cannot_be_appended_is_an_error_and_the_next_one_is_taken(
    client: Client, broker_of: Callable[[], BrokerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.send(*(Record(body=b"x") for _ in range(3)))
    store = broker_of().broker.store
    real = store.append_state
    failures = [OSError(5, "no"), RuntimeError("a defect"), DiskFullError("full")]

    def fail(*_: Any) -> int:
        raise failures.pop()

    monkeypatch.setattr(store, "append_state", fail)
    for expected in ((8, "DISK_FULL"), (13, "INTERNAL"), (9, "STORE_FAILED")):
        assert await failure(client.call(commit_request(2), consumer.CommitOffsetsResponse)) == expected
    failures.append(DiskFullError("full"))
    await client.pull(consumer_group="p", commit_offset=1)
    while failures:
        await committed(client, "p")
    assert (await committed(client), await committed(client, "p")) == ([], [])
    monkeypatch.setattr(store, "append_state", real)
    await client.call(commit_request(2), consumer.CommitOffsetsResponse)
    while await committed(client, "p") != [1]:
        pass  # it is tried again
    assert await committed(client) == [2]
