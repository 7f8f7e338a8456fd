"""Bad input of delivery, over both transports: each case has its status, its reason with metadata, and changes nothing (issue 13)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import wasmtime
from google.protobuf.message import Message

from protomq.v1 import admin_service_pb2 as admin
from protomq.v1 import consumer_service_pb2 as consumer
from protomq.v1 import dead_letter_service_pb2 as dead_letters
from protomq.v1 import filter_service_pb2 as filters
from protomq.v1 import group_pb2
from protomq.v1 import group_service_pb2 as groups
from protomq.v1 import membership_service_pb2 as membership
from protomq.v1 import pop_service_pb2 as pop
from protomq.v1 import pull_service_pb2 as pull
from protomq.v1 import send_service_pb2 as send
from protomq.v1 import transaction_service_pb2 as transactions
from protomq.v1.record_pb2 import Attributes, Record
from protomq.v1.topic_pb2 import Topic
from protomq_broker.broker_process import BrokerProcess
from protomq_broker.store.state.transactions import TransactionKey
from protomq_broker.transaction_handles import Handles
from tests.integration.broker_client import Client, config_in
from tests.integration.transport_callers import CallFailed
from tests.support.wasm_modules import LATE, LATE_TEXT

DAY_MS = 86_400_000
LIMIT_MS = 40 * DAY_MS
HELD_MS = 60_000
INVALID, NOT_FOUND, PRECONDITION = 3, 5, 9
SQL, CEL, MODULE = (
    pull.FilterType.FILTER_TYPE_SQL92, pull.FilterType.FILTER_TYPE_CEL, pull.FilterType.FILTER_TYPE_MODULE,
)  # fmt: skip
COMMIT = transactions.TransactionDecision.TRANSACTION_DECISION_COMMIT


class Refusal(NamedTuple):
    """How a call was refused."""

    code: int
    reason: str
    metadata: dict[str, str]


@pytest.fixture(params=["remoting", "grpc"])
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Client]:
    """Of a broker `b` with a topic `t` of one queue."""
    broker = BrokerProcess(config_in(tmp_path))
    await broker.start()
    made = Client(broker, str(request.param))
    await made.call(admin.CreateTopicRequest(topic=Topic(name="t", write_queues=1, read_queues=1)), admin.CreateTopicResponse)
    yield made
    await made.close()
    await broker.stop(1)


async def refusal(client: Client, request: Message) -> Refusal:
    """Of a call that is refused, and so appends nothing and makes no topic."""
    before = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    with pytest.raises(CallFailed) as caught:
        await client.call(request, Message)
    after = await client.call(admin.GetBrokerStatusRequest(), admin.GetBrokerStatusResponse)
    assert (after.appended_position, after.topics) == (before.appended_position, before.topics)
    status = caught.value.status
    metadata = dict(status.metadata)
    assert metadata.pop("definite") == "true"
    metadata.update(("field", field) for field, _ in status.field_violations)
    return Refusal(status.code, status.reason, metadata)


async def popped(client: Client, **fields: Any) -> pop.PopResponse:
    fields = {"consumer_group": "g", "topic": "t", "invisible_ms": HELD_MS, **fields}
    return await client.call(pop.PopRequest(**fields), pop.PopResponse)


def settled(response: pop.PopResponse) -> list[pop.PoppedMessages]:
    """All messages of a pop, to be given back."""
    (hand_out,) = response.hand_outs
    runs = [number for offset in response.queue_offsets for number in (offset, 1)]
    return [pop.PoppedMessages(receipt=hand_out.receipt, offset_runs=runs)]


@pytest.mark.parametrize(
    "request_message",
    [
        consumer.GetLagRequest(consumer_group="nobody"),
        consumer.CloneOffsetsRequest(source_group="nobody", consumer_group="g"),
        admin.DeleteGroupRequest(consumer_group="nobody"),
    ],
    ids=lambda request: request.DESCRIPTOR.name,
)
async def test_an_unknown_group(client: Client, request_message: Message) -> None:
    assert await refusal(client, request_message) == (NOT_FOUND, "GROUP_NOT_FOUND", {"consumer_group": "nobody"})


async def test_an_unknown_group_has_no_dead_letters_and_no_members(client: Client) -> None:
    replay = dead_letters.ReplayDeadLettersRequest(consumer_group="nobody")
    assert await refusal(client, replay) == (NOT_FOUND, "TOPIC_NOT_FOUND", {"topic": "%DLQ%nobody"})
    with pytest.raises(CallFailed) as caught:
        await client.call(replay, Message)
    assert caught.value.status.message.startswith("group 'nobody' has no dead letters here")
    describe = membership.DescribeMemberRequest(consumer_group="nobody", client_id="x")
    metadata = {"consumer_group": "nobody", "client_id": "x"}
    assert await refusal(client, describe) == (PRECONDITION, "MEMBER_UNKNOWN", metadata)
    members = await client.call(membership.ListMembersRequest(consumer_group="nobody"), membership.ListMembersResponse)
    assert not members.members
    for request in (
        pop.PopRequest(consumer_group="no/group", topic="t"),
        groups.SendBackRequest(consumer_group="no/group"),
        consumer.ResetOffsetsRequest(consumer_group="no/group", topic="t", end=True),
    ):
        assert (await refusal(client, request))[:2] == (INVALID, "INVALID_ARGUMENT")


@pytest.mark.parametrize("level", [0, 19, -1, 2**31 - 1])
async def test_an_illegal_level(client: Client, level: int) -> None:
    limit = {"field": "delay_level", "value": str(level), "limit": "18"}
    sent = send.SendRequest(topic="t", records=[Record(body=b"x")], delay_level=level)
    assert await refusal(client, sent) == (INVALID, "ILLEGAL_DELAY", limit)
    await client.send(Record(body=b"failed"))
    failed = groups.FailedMessage(topic="t", queue_id=0, queue_offset=0, delay_level=level)
    sent_back = groups.SendBackRequest(consumer_group="g", messages=[failed], request_id=1)
    assert await refusal(client, sent_back) == (INVALID, "ILLEGAL_DELAY", limit)


async def test_a_level_below_zero_of_a_nack(client: Client) -> None:
    await client.send(Record(body=b"x"))
    held = settled(await popped(client))
    request = pop.ChangeInvisibleRequest(consumer_group="g", topic="t", messages=held, retry_level=-1)
    assert await refusal(client, request) == (INVALID, "INVALID_ARGUMENT", {"field": "retry_level"})


async def test_a_time_below_zero_or_beyond_40_days(client: Client) -> None:
    await client.send(Record(body=b"failed"))
    for delay_ms, limit in ((LIMIT_MS + 1, LIMIT_MS), (-1, 0), (-DAY_MS, 0), (-(2**63), 0)):
        told = {"field": "delay_ms", "value": str(delay_ms), "limit": str(limit)}
        sent = send.SendRequest(topic="t", records=[Record(body=b"x")], delay_ms=delay_ms)
        assert await refusal(client, sent) == (INVALID, "ILLEGAL_DELAY", told)
        failed = groups.FailedMessage(topic="t", queue_id=0, queue_offset=0, delay_ms=delay_ms)
        sent_back = groups.SendBackRequest(consumer_group="g", messages=[failed], request_id=1)
        assert await refusal(client, sent_back) == (INVALID, "ILLEGAL_DELAY", told)
    for due_time_ms in (2**63 - 1, (2**40) * 1_000):
        sent = send.SendRequest(topic="t", records=[Record(body=b"x", due_time_ms=due_time_ms)])
        code, reason, metadata = await refusal(client, sent)
        assert (code, reason) == (INVALID, "ILLEGAL_DELAY")
        assert (metadata["field"], metadata["value"]) == ("due_time_ms", str(due_time_ms))


async def test_a_time_in_the_past_is_at_once(client: Client) -> None:
    await client.send(Record(body=b"relative"), delay_ms=0)
    await client.send(Record(body=b"absolute", due_time_ms=1))
    bodies: list[bytes] = []
    while len(bodies) < 2:
        found = await client.pull(len(bodies), hold_ms=10_000)
        assert found.records
        bodies += [record.body for record in found.records]
    assert sorted(bodies) == [b"absolute", b"relative"]


@pytest.mark.parametrize(
    ("filter_type", "text", "expected"),
    [
        (SQL, "n >", {"language": "SQL92", "position": "3", "line": "1", "column": "4"}),
        (SQL, "n > 1\nAND = 2", {"language": "SQL92", "position": "10", "line": "2", "column": "5"}),
        (CEL, "n >", {"language": "CEL", "line": "1"}),
    ],
)
async def test_a_bad_expression_is_told_with_its_place(
    client: Client, filter_type: pull.FilterType.ValueType, text: str, expected: dict[str, str]
) -> None:
    fields: dict[str, Any] = {"filter_type": filter_type, "filter": text}
    for request in (
        pull.PullRequest(topic="t", queue_id=0, **fields),
        pop.PopRequest(consumer_group="g", topic="t", **fields),
    ):
        code, reason, metadata = await refusal(client, request)
        assert (code, reason) == (INVALID, "ILLEGAL_FILTER")
        assert metadata.items() >= expected.items()
        assert metadata.keys() == {"language", "position", "line", "column", "expected"}
        assert int(metadata["position"]) <= len(text)


async def test_too_many_retries_make_a_dead_letter_and_no_further_one(client: Client) -> None:
    settings = group_pb2.GroupSettings(consumer_group="g", retry_count_max=2)
    await client.call(groups.PutGroupRequest(settings=settings), groups.PutGroupResponse)
    await client.send(Record(body=b"failed"))

    def failed(attempt: int) -> groups.SendBackRequest:
        message = groups.FailedMessage(topic="t", queue_id=0, queue_offset=0, attempt=attempt, error="why")
        return groups.SendBackRequest(consumer_group="g", messages=[message], request_id=attempt + 1)

    (retried,) = (await client.call(failed(1), groups.SendBackResponse)).results
    assert (retried.attempt, retried.dead_letter) == (2, False)
    (dead,) = (await client.call(failed(2), groups.SendBackResponse)).results
    assert (dead.attempt, dead.dead_letter) == (3, True)
    (letter,) = (await client.pull(topic="%DLQ%g")).records
    assert (letter.body, letter.transit.attempt, letter.transit.last_error) == (b"failed", 3, "why")
    # A second letter of that id would be replayed, too. Another group may fail with it: then it is that group's.
    again = groups.FailedMessage(topic="%DLQ%g", queue_id=0, queue_offset=0, attempt=3, error="why")
    own = groups.SendBackRequest(consumer_group="g", messages=[again], request_id=9)
    assert await refusal(client, own) == (INVALID, "INVALID_ARGUMENT", {"field": "messages[0].topic"})
    others = groups.SendBackRequest(consumer_group="repair", messages=[again], request_id=9)
    assert len((await client.call(others, groups.SendBackResponse)).results) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("retry_count_max", -1), ("retry_delays_ms", [LIMIT_MS + 1]), ("retry_delays_ms", [-1]), ("retry_delays_ms", [1] * 65)],
)
async def test_retries_that_no_group_may_have(client: Client, field: str, value: Any) -> None:
    settings = group_pb2.GroupSettings(consumer_group="g", **{field: value})
    told = (INVALID, "INVALID_ARGUMENT", {"field": f"settings.{field}"})
    assert await refusal(client, groups.PutGroupRequest(settings=settings)) == told


async def test_a_decision_for_an_unknown_transaction(client: Client) -> None:
    unknown = Handles("b").encode(0, TransactionKey(1, 2, 3))
    end = transactions.TransactionEnd(transaction_handle=unknown, decision=COMMIT)
    code, reason, metadata = await refusal(client, transactions.EndTransactionRequest(ends=[end]))
    assert (code, reason, list(metadata)) == (NOT_FOUND, "TRANSACTION_NOT_FOUND", ["message_id"])
    half = Record(body=b"half", attributes=Attributes(producer_group="g"), producer_id=7, sequence=1)
    (handle,) = (await client.send(half, queue_id=0, half=True)).transaction_handles
    known = transactions.TransactionEnd(transaction_handle=handle, decision=COMMIT)
    both = transactions.EndTransactionRequest(ends=[end, known])
    answer = await client.call(both, transactions.EndTransactionResponse)
    assert [result.error_reason for result in answer.results] == ["TRANSACTION_NOT_FOUND", ""]
    assert [record.body for record in (await client.pull()).records] == [b"half"]


@pytest.mark.parametrize("handle", ["", "nonsense", "AAAA", Handles("another").encode(0, TransactionKey(1, 2, 3))])
async def test_a_decision_for_what_is_no_transaction_here(client: Client, handle: str) -> None:
    end = transactions.TransactionEnd(transaction_handle=handle, decision=COMMIT)
    told = (INVALID, "INVALID_ARGUMENT", {"field": "transaction_handle"})
    assert await refusal(client, transactions.EndTransactionRequest(ends=[end])) == told


async def test_a_receipt_of_another_group_settles_nothing(client: Client) -> None:
    await client.send(Record(body=b"x"))
    held = settled(await popped(client))
    told = (INVALID, "ILLEGAL_RECEIPT", {"field": "consumer_group", "value": "g"})
    ack = pop.AckRequest(consumer_group="other", topic="t", messages=held)
    change = pop.ChangeInvisibleRequest(consumer_group="other", topic="t", messages=held, invisible_ms=HELD_MS)
    assert await refusal(client, ack) == told
    assert await refusal(client, change) == told
    ack.consumer_group = "g"
    assert await client.call(ack, pop.AckResponse) == pop.AckResponse(), "the group itself has it still"


async def test_a_stale_receipt_is_told_so(client: Client) -> None:
    await client.send(Record(body=b"x"))
    first = settled(await popped(client))
    await client.call(consumer.ResetOffsetsRequest(consumer_group="g", topic="t", queue_offset=0), consumer.ResetOffsetsResponse)
    second = settled(await popped(client))
    told = (PRECONDITION, "STALE_RECEIPT", {"topic": "t", "queue_id": "0", "queue_offset": "0", "never_acknowledged": "false"})
    ack = pop.AckRequest(consumer_group="g", topic="t", messages=first)
    change = pop.ChangeInvisibleRequest(consumer_group="g", topic="t", messages=first, invisible_ms=HELD_MS)
    assert await refusal(client, ack) == told
    assert await refusal(client, change) == told
    both = pop.AckRequest(consumer_group="g", topic="t", messages=[*first, *second])
    assert list((await client.call(both, pop.AckResponse)).stale_messages) == first


async def test_a_pop_beyond_what_is_there(client: Client) -> None:
    nothing = pop.PopStatus.POP_STATUS_NO_NEW_MSG
    assert (await popped(client)).status == nothing, "an empty queue"
    await client.send(Record(body=b"x"))
    assert len((await popped(client, record_count_max=32)).records) == 1, "fewer than asked for"
    assert (await popped(client)).status == nothing, "all is handed out"
    missing = pop.PopRequest(consumer_group="g", topic="t", queue_id=1)
    assert (await refusal(client, missing))[:2] == (NOT_FOUND, "QUEUE_NOT_FOUND")
    nowhere = pop.PopRequest(consumer_group="g", topic="nowhere")
    assert await refusal(client, nowhere) == (NOT_FOUND, "TOPIC_NOT_FOUND", {"topic": "nowhere"})
    for fields in ({"record_count_max": 100_000}, {"invisible_ms": 1}, {"invisible_ms": DAY_MS}, {"hold_ms": 1 << 40}):
        (field,) = fields
        wrong = pop.PopRequest(consumer_group="g", topic="t", **fields)  # type: ignore[arg-type]
        assert await refusal(client, wrong) == (INVALID, "INVALID_ARGUMENT", {"field": field})


@pytest.mark.parametrize(
    ("module", "why"),
    [(b"", "no WebAssembly module"), (b"(module)", "no WebAssembly module"), (LATE[:-1], "no valid WebAssembly module"),
     (bytes(wasmtime.wat2wasm("(module)")), "export"),
     (bytes(wasmtime.wat2wasm('(module (import "wasi" "x" (func)))')), "imports nothing")],
    ids=["empty", "text", "cut", "without its functions", "with imports"],
)  # fmt: skip
async def test_a_module_that_is_no_webassembly(client: Client, module: bytes, why: str) -> None:
    with pytest.raises(CallFailed, match=why):
        await client.call(filters.DeployFilterRequest(name="m", module=module), Message)
    code, reason, metadata = await refusal(client, filters.DeployFilterRequest(name="m", module=module))
    assert (code, reason, metadata["language"]) == (INVALID, "ILLEGAL_FILTER", "WebAssembly")
    assert not (await client.call(filters.ListFiltersRequest(), filters.ListFiltersResponse)).modules


async def test_a_module_that_is_absent_traps_or_does_not_end(client: Client) -> None:
    await popped(client)  # Where the group begins is in the log from now on.
    await client.send(Record(body=b"late"))
    pulled = pull.PullRequest(topic="t", queue_id=0, filter_type=MODULE, filter="m")
    wanted = pop.PopRequest(consumer_group="g", topic="t", filter_type=MODULE, filter="m")
    texts = ["", LATE_TEXT.replace("(i32.eq ", "(unreachable) (i32.eq "), LATE_TEXT.replace("(i32.eq ", "(loop (br 0)) (i32.eq ")]
    for text in texts:
        if text:
            module = bytes(wasmtime.wat2wasm(text))
            await client.call(filters.DeployFilterRequest(name="m", module=module), filters.DeployFilterResponse)
        for request in (pulled, wanted):
            code, reason, metadata = await refusal(client, request)
            assert (code, reason, metadata["language"]) == (INVALID, "ILLEGAL_FILTER", "WebAssembly")
    await client.call(filters.DeployFilterRequest(name="m", module=LATE), filters.DeployFilterResponse)
    assert [record.body for record in (await popped(client, filter_type=MODULE, filter="m")).records] == [b"late"]
