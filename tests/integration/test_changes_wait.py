"""Every call that changes what a fail-over would take back is answered as a send is: not before the slaves that are waited for have it.

A method that a slave refuses stands in CHANGES, with requests that change something, or in NOT_STORED, with the reason. A new method stands
in neither, so this test fails until somebody has decided.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from google.protobuf.message import Message

from protomq.v1.admin_service_pb2 import (
    CreateTopicRequest,
    DeleteGroupRequest,
    DeleteTopicRequest,
    PingRequest,
    PingResponse,
)
from protomq.v1.consumer_service_pb2 import (
    CloneOffsetsRequest,
    CommitOffsetsRequest,
    GetOffsetsRequest,
    GetOffsetsResponse,
    QueueOffset,
    ResetOffsetsRequest,
)
from protomq.v1.dead_letter_service_pb2 import ReplayDeadLettersRequest
from protomq.v1.group_pb2 import GroupSettings
from protomq.v1.group_service_pb2 import (
    CreateRetryTopicRequest,
    FailedMessage,
    PutGroupRequest,
    SendBackRequest,
    SendBackResponse,
)
from protomq.v1.pop_service_pb2 import (
    AckRequest,
    ChangeInvisibleRequest,
    PoppedMessages,
    PopRequest,
    PopResponse,
)
from protomq.v1.queue_lock_service_pb2 import (
    LockQueuesRequest,
    LockQueuesResponse,
    QueueName,
    UnlockQueuesRequest,
)
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import RecallMessageRequest, SendRequest, SendResponse, SendStatus
from protomq.v1.topic_pb2 import Permission, Topic, TopicType
from protomq.v1.transaction_service_pb2 import (
    EndTransactionRequest,
    TransactionDecision,
    TransactionEnd,
)
from protomq_broker.broker_process import BrokerProcess
from protomq_broker.slave_gate import SERVED
from protomq_broker.store.state.topics import NOWHERE
from protomq_ha.roles import HaConfig
from tests.support.waiting import PATIENCE_S, async_wait_for

from .broker_client import Client, config_in
from .transport_callers import CallFailed

SHORT_MS: Final = 300
NOT_STORED: Final = {
    "HaService/Fetch": "of slaves: it copies the log",
    "HaService/Acknowledge": "of slaves: that is what the others wait for",
    "HaService/CompareLog": "of slaves: a look-up",
    "PopService/GiveUpPop": "ends a held call, which stands in memory",
    "QueueLockService/ListQueueLocks": "a look-up",
    "ReplyService/Reply": "a reply is not stored",
    "ReplyService/WaitForReplies": "a held call, which stands in memory",
    "TransactionService/ListTransactions": "a look-up",
    "TransactionService/WaitForChecks": "a held call; what it is told is readable",
}
"""Methods that a slave refuses, and that change nothing in the log."""


class World:
    """A broker with something of everything. Until `wait_for_slaves`, it waits for nobody."""

    def __init__(self, process: BrokerProcess, client: Client) -> None:
        self.store = process.broker.store
        self.broker = process.broker
        self.paths = [
            bound.method.path.removeprefix("/protomq.v1.") for bound in process.server.table
        ]
        self.client = client
        self.receipts: dict[str, Sequence[PoppedMessages]] = {}
        self.handles: dict[str, str] = {}

    async def call(self, request: Message, response_class: type[Any] = PingResponse) -> Any:
        return await self.client.call(request, response_class)

    async def fill(self) -> None:
        """Makes what the changes change."""
        for name in ("t", "grows", "closes", "typed", "deleted"):
            await self.call(topic(name, 2))
        for _ in range(4):
            await self.client.send(Record(body=b"x"), topic="t", queue_id=0)
        for group in ("commits", "deleted", "cloned", "locks", "dead"):
            await self.call(commit(group, 1))
        for group in ("acks", "renews"):
            popped = await self.call(
                PopRequest(consumer_group=group, topic="t", queue_id=0, record_count_max=1),
                PopResponse,
            )
            receipt = popped.hand_outs[0].receipt
            self.receipts[group] = [PoppedMessages(receipt=receipt, offset_runs=[popped.queue_offsets[0], 1])]
        for sequence, name in enumerate(("commit", "roll back")):
            half = await self.client.send(of_producer(sequence), half=True)
            (self.handles[name],) = half.transaction_handles
        delayed = await self.client.send(Record(body=b"x"), delay_ms=3_600_000)
        self.handles["recall"] = delayed.recall_handle
        await self.call(send_back("dead", 0, dead_letter=True), SendBackResponse)
        await self.call(locks("unlocks"), LockQueuesResponse)

    def wait_for_slaves(self) -> None:
        """From now on the broker waits for a slave, which confirms nothing."""
        positions = self.store.positions
        positions.note_replicated(positions.appended)
        positions.wait_for_replicas(True)

    def confirm(self) -> None:
        """The slave has everything, and gets at once what is appended from now on."""

        def confirm_here() -> None:
            self.store.positions.wait_for_replicas(False)
            self.broker._waiting.resolve()

        self.broker._writer.post(confirm_here)

    def refuse_sends(self) -> None:
        """Too few slaves are in sync."""
        replication = self.broker._replication
        self.broker._send.shortage = replication._shortage(replication.service.verdict)


def topic(name: str, queues: int, **fields: Any) -> CreateTopicRequest:
    update = fields.pop("update", False)
    return CreateTopicRequest(
        topic=Topic(name=name, write_queues=queues, read_queues=queues, **fields), update=update
    )


def commit(group: str, offset: int) -> CommitOffsetsRequest:
    return CommitOffsetsRequest(
        consumer_group=group, offsets=[QueueOffset(topic="t", queue_id=0, queue_offset=offset)]
    )


def send_back(group: str, offset: int, **fields: Any) -> SendBackRequest:
    failed = FailedMessage(topic="t", queue_id=0, queue_offset=offset, error="x", **fields)
    return SendBackRequest(consumer_group=group, messages=[failed], request_id=offset + 1)


def locks(group: str) -> LockQueuesRequest:
    return LockQueuesRequest(
        consumer_group=group, client_id="c", nonce=7, queues=[QueueName(topic="t", queue_id=0)]
    )


def end(handle: str, decision: TransactionDecision.ValueType) -> EndTransactionRequest:
    return EndTransactionRequest(
        ends=[TransactionEnd(transaction_handle=handle, decision=decision)]
    )


def of_producer(sequence: int) -> Record:
    return Record(body=b"x", producer_id=9, sequence=sequence)


def send(name: str = "t", **fields: Any) -> SendRequest:
    return SendRequest(topic=name, records=[Record(body=b"x")], **fields)


class Change(NamedTuple):
    """One way to change something. `request`: made when everything is there."""

    path: str
    what: str
    request: Callable[[World], Message]


COMMIT, ROLL_BACK = (
    TransactionDecision.TRANSACTION_DECISION_COMMIT,
    TransactionDecision.TRANSACTION_DECISION_ROLL_BACK,
)
CHANGES: Final = [
    Change("AdminService/CreateTopic", "new", lambda _: topic("new", 2)),
    Change("AdminService/CreateTopic", "more queues", lambda _: topic("grows", 6, update=True)),
    Change(
        "AdminService/CreateTopic",
        "permission",
        lambda _: topic("closes", 2, permission=Permission.PERMISSION_READ, update=True),
    ),
    Change(
        "AdminService/CreateTopic",
        "type",
        lambda _: topic("typed", 2, type=TopicType.TOPIC_TYPE_FIFO, update=True),
    ),
    Change("AdminService/DeleteTopic", "", lambda _: DeleteTopicRequest(topic="deleted")),
    Change(
        "AdminService/DeleteGroup",
        "",
        lambda _: DeleteGroupRequest(consumer_group="deleted", force=True),
    ),
    Change("ConsumerService/CommitOffsets", "", lambda _: commit("commits", 2)),
    Change(
        "ConsumerService/ResetOffsets",
        "",
        lambda _: ResetOffsetsRequest(consumer_group="resets", topic="t", queue_offset=1),
    ),
    Change(
        "ConsumerService/CloneOffsets",
        "",
        lambda _: CloneOffsetsRequest(consumer_group="clones", source_group="cloned"),
    ),
    Change(
        "DeadLetterService/ReplayDeadLetters",
        "",
        lambda _: ReplayDeadLettersRequest(consumer_group="dead"),
    ),
    Change(
        "GroupService/PutGroup",
        "",
        lambda _: PutGroupRequest(settings=GroupSettings(consumer_group="set", retry_count_max=3)),
    ),
    Change(
        "GroupService/CreateRetryTopic",
        "",
        lambda _: CreateRetryTopicRequest(consumer_group="retries"),
    ),
    Change("GroupService/SendBack", "", lambda _: send_back("fails", 1)),
    Change(
        "PopService/Pop", "", lambda _: PopRequest(consumer_group="pops", topic="t", queue_id=0)
    ),
    Change(
        "PopService/Ack",
        "",
        lambda world: AckRequest(consumer_group="acks", topic="t", messages=world.receipts["acks"]),
    ),
    Change(
        "PopService/ChangeInvisible",
        "",
        lambda world: ChangeInvisibleRequest(
            consumer_group="renews",
            topic="t",
            messages=world.receipts["renews"],
            invisible_ms=3_600_000,
        ),
    ),
    Change("QueueLockService/LockQueues", "", lambda _: locks("locks")),
    Change(
        "QueueLockService/UnlockQueues",
        "",
        lambda _: UnlockQueuesRequest(consumer_group="unlocks", client_id="c", nonce=7),
    ),
    Change("SendService/Send", "", lambda _: send()),
    Change("SendService/Send", "makes its topic", lambda _: send("made-by-a-send")),
    Change("SendService/Send", "delayed", lambda _: send(delay_ms=3_600_000)),
    Change("SendService/Send", "half", lambda _: SendRequest(topic="t", records=[of_producer(2)], half=True)),
    Change(
        "SendService/RecallMessage",
        "",
        lambda world: RecallMessageRequest(topic="t", recall_handle=world.handles["recall"]),
    ),
    Change(
        "TransactionService/EndTransaction",
        "commit",
        lambda world: end(world.handles["commit"], COMMIT),
    ),
    Change(
        "TransactionService/EndTransaction",
        "roll back",
        lambda world: end(world.handles["roll back"], ROLL_BACK),
    ),
]
REFUSED_AS_SENDS: Final = {
    "AdminService/CreateTopic", "AdminService/DeleteTopic", "DeadLetterService/ReplayDeadLetters", "GroupService/CreateRetryTopic",
    "GroupService/PutGroup", "SendService/Send",
}  # fmt: skip
"""Methods that change nothing where a send is refused."""


@asynccontextmanager
async def running(
    folder: Path, transport: str = "grpc", wait_ms: int = 600_000
) -> AsyncIterator[World]:
    config = config_in(folder, sync_flush_timeout_ms=wait_ms, ha=HaConfig(sync_timeout_ms=wait_ms))
    process = BrokerProcess(config)
    await process.start()
    client = Client(process, transport)
    try:
        world = World(process, client)
        await world.fill()
        yield world
    finally:
        await client.close()
        await process.stop(5)


async def outcome(world: World, change: Change) -> str:
    """OK, the send status, or the reason of the error."""
    request = change.request(world)
    try:
        answer = await world.client.raw(f"/protomq.v1.{change.path}", request.SerializeToString())
    except CallFailed as failed:
        return f"{failed.status.reason} {failed.status.metadata['definite']}"
    if change.path == "SendService/Send":
        return SendStatus.Name(SendResponse.FromString(answer).status).removeprefix("SEND_STATUS_")
    return "OK"


async def outcomes(world: World) -> dict[str, str]:
    """Of all changes, made at the same time."""
    found = await asyncio.gather(*(outcome(world, change) for change in CHANGES))
    return {
        f"{change.path} {change.what}".strip(): each
        for change, each in zip(CHANGES, found, strict=True)
    }


async def test_each_method_that_a_slave_refuses_is_known_here(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        refused = {path for path in world.paths if f"/protomq.v1.{path}" not in SERVED}
    changes = {change.path for change in CHANGES}
    assert changes.isdisjoint(NOT_STORED)
    assert changes | set(NOT_STORED) == refused


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
async def test_nothing_that_a_fail_over_may_take_back_is_answered_ok(
    tmp_path: Path, transport: str
) -> None:
    async with running(tmp_path, transport, SHORT_MS) as world:
        world.wait_for_slaves()
        found = await outcomes(world)
        expected = {
            name: "FLUSH_SLAVE_TIMEOUT"
            if name.startswith("SendService/Send")
            else "DEADLINE_EXCEEDED false"
            for name in found
        }
        assert found == expected


async def test_they_are_answered_when_the_slaves_have_them_and_hold_no_lane_until_then(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        world.wait_for_slaves()
        before = world.store.appended_position
        calls = asyncio.create_task(outcomes(world))
        async with asyncio.timeout(PATIENCE_S):
            # The last of them is appended: the topics are there, the settings, the copies.
            await async_wait_for(partial(_all_is_appended, world))
            await world.call(PingRequest())
            offsets = await world.call(
                GetOffsetsRequest(consumer_group="commits", topic="t"), GetOffsetsResponse
            )
            assert [offset.queue_offset for offset in offsets.offsets] == [2]
            assert not calls.done()
            assert world.store.readable_position <= before
            world.confirm()
            found = await calls
        assert found == {
            name: "SEND_OK" if name.startswith("SendService/Send") else "OK" for name in found
        }


def _all_is_appended(world: World) -> bool:
    store = world.store
    return (
        {"new", "made-by-a-send", "%RETRY%retries"} <= {topic.name for topic in store.topics.all()}
        and store.topics.find("deleted") is None
        and store.groups.has_settings("set")
        and store.groups.replayed(
            "dead", store.topics.snapshot().by_name["%DLQ%dead"].incarnation
        ).count_within(0, 1)
        == 1
        and store.offsets.has_group("clones")
        and not store.offsets.has_group("deleted")
    )


async def test_what_is_refused_for_want_of_slaves_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        world.refuse_sends()
        changes = [change for change in CHANGES if change.path in REFUSED_AS_SENDS]
        end = world.store.appended_position
        found = [await outcome(world, change) for change in changes]
        assert found == ["NOT_ENOUGH_REPLICAS true"] * len(changes)
        assert world.store.appended_position == end


async def test_what_is_said_again_waits_for_the_first_time(tmp_path: Path) -> None:
    """Who repeats a change whose outcome is not known must not hear that it is there already before the slaves have it."""
    async with running(tmp_path, wait_ms=SHORT_MS) as world:
        world.wait_for_slaves()
        repeated = [
            change
            for change in CHANGES
            if change.path in REFUSED_AS_SENDS
            and change.path not in ("SendService/Send", "AdminService/DeleteTopic")
        ]
        for _ in range(2):
            found = await asyncio.gather(*(outcome(world, change) for change in repeated))
            assert found == ["DEADLINE_EXCEEDED false"] * len(repeated)
        world.confirm()
        end = world.store.appended_position
        again = [await outcome(world, change) for change in repeated if change.path != "GroupService/PutGroup"]
        assert again == ["OK"] * len(again)
        assert world.store.appended_position == end


async def test_nothing_is_answered_ok_once_sends_are_not_taken_any_more(tmp_path: Path) -> None:
    """Fewer copies than are needed have confirmed it, or another broker leads by now."""
    async with running(tmp_path) as world:
        world.wait_for_slaves()
        changes = [change for change in CHANGES if change.path in REFUSED_AS_SENDS and not change.path.startswith("SendService")]
        calls = [asyncio.create_task(outcome(world, change)) for change in changes]
        await async_wait_for(lambda: len(world.broker._waiting._waiters) == len(changes))
        world.refuse_sends()
        world.confirm()
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*calls) == ["DEADLINE_EXCEEDED false"] * len(changes)


def retry_topic_of(group: str) -> Change:
    return Change("GroupService/CreateRetryTopic", "", lambda _: CreateRetryTopicRequest(consumer_group=group))


async def test_a_retry_topic_that_the_slaves_have_is_told_though_sends_are_refused(tmp_path: Path) -> None:
    """Members that start then get the retries that are there."""
    async with running(tmp_path) as world:
        assert await outcome(world, retry_topic_of("there")) == "OK"
        world.refuse_sends()
        assert await outcome(world, retry_topic_of("there")) == "OK"
        assert await outcome(world, retry_topic_of("missing")) == "NOT_ENOUGH_REPLICAS true"


async def test_a_retry_topic_without_a_record_waits_for_its_messages(tmp_path: Path) -> None:
    """A log that took no record, or a queue that a start found: only the messages say that the topic is there."""
    async with running(tmp_path, wait_ms=SHORT_MS) as world:
        world.wait_for_slaves()
        assert await outcome(world, Change("GroupService/SendBack", "", lambda _: send_back("found", 1))) == "DEADLINE_EXCEEDED false"
        world.store.topics._positions["%RETRY%found"] = NOWHERE
        assert await outcome(world, retry_topic_of("found")) == "DEADLINE_EXCEEDED false"
        world.confirm()
        assert await outcome(world, retry_topic_of("found")) == "OK"
