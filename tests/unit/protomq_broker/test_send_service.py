"""SendService over a store on a simulated disk, without lanes and sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from protomq.v1 import send_service_pb2
from protomq.v1.admin_service_pb2 import DeleteTopicRequest
from protomq.v1.record_pb2 import Attributes, Record
from protomq.v1.send_service_pb2 import SendRequest, SendResponse, SendStatus
from protomq.wire.hashing import crc32c, sharded_index
from protomq.wire.record import RecordTemplate, encode_front
from protomq_broker.config import BrokerConfig
from protomq_broker.send_service import SendService
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.testing.simdisk import Fault, Operation, SimDisk
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.testing import FakeCall, FakeServer
from tests.support.lost_files import lose

from .fake_broker import ADMIN, SEND, FakeBroker, send_service, told
from .store.log_helpers import ManualClock
from .store.store_helpers import open_store, read_all


class Broker(NamedTuple):
    """A SendService, its store and what is below."""

    service: SendService
    store: Store
    disk: SimDisk
    clock: ManualClock

    def send(self, *requests: SendRequest) -> list[Any]:
        """The outcomes of requests that arrive together."""
        table = DispatchTable()
        table.add_service(send_service_pb2.DESCRIPTOR.services_by_name["SendService"], self.service)
        calls = FakeServer(table).call_together(SEND, requests)
        return [call.error or call.response() for call in calls]


def make_service(store: Store, config: BrokerConfig, clock: ManualClock) -> SendService:
    writer, waiting = SystemWriter(WritePermit()), WaitingAnswers(store, clock)
    return send_service(store, config, clock, waiting, writer)


def make_broker(disk: SimDisk | None = None, **settings: Any) -> Broker:
    disk, clock = disk or SimDisk(), ManualClock()
    store = open_store(disk, clock=clock, segment=1 << 16)
    return Broker(
        make_service(store, BrokerConfig(**settings), clock),
        store,
        disk,
        clock,
    )


def request(topic: str = "topic", body: bytes = b"body", **fields: Any) -> SendRequest:
    return SendRequest(topic=topic, records=[Record(body=body)], **fields)


def reason(outcome: SendResponse | ServiceError) -> str:
    assert isinstance(outcome, ServiceError), outcome
    return outcome.reason


# Topics that are made by their first message.


def test_a_topic_of_a_first_send_has_an_incarnation_of_its_store() -> None:
    def send_first(number: int) -> tuple[SimDisk, int]:
        disk, clock = SimDisk(), ManualClock()
        config = StoreConfig(segment_size_bytes=1 << 16)
        store = Store.open(
            "/s", config, clock=clock, disk=disk, background=False, draw=lambda: number
        )
        service = make_service(store, BrokerConfig(), clock)
        broker = Broker(service, store, disk, clock)
        broker.send(request("new"))
        return disk, incarnation_in(store)

    def incarnation_in(store: Store) -> int:
        topic = store.topics.find("new")
        assert topic is not None
        return topic.incarnation

    disk, first = send_first(1000)
    _, other = send_first(1001)
    assert other != first
    for lost in ((), ("config",), ("config", "checkpoint", "consumequeue", "index")):
        killed = disk.killed()
        lose(killed, *lost)
        assert incarnation_in(open_store(killed, segment=1 << 16)) == first


def test_a_topic_that_the_log_took_no_record_of_has_the_same_incarnation_after_a_start() -> None:
    broker = make_broker(default_queues=3)
    writes = []

    def no_second_write(operation: Operation) -> Fault | None:
        writes.append(operation)
        return Fault.ENOSPC if len(writes) > 1 else None

    broker.disk.plan = no_second_write
    stored = broker.send(request("new", queue_id=2))[0]
    broker.disk.plan = None
    assert isinstance(stored, SendResponse)
    made = broker.store.topics.find("new")
    assert made is not None
    killed = broker.disk.killed()
    for _ in range(2):  # the first start appends the record
        again = open_store(killed, segment=1 << 16)
        found = again.topics.find("new")
        assert found is not None
        assert found.incarnation == made.incarnation
        assert read_all(again, "new", 2) == [(0, b"body")]
        killed = killed.killed()
        lose(killed, "config")


@pytest.mark.parametrize(
    "refused",
    [
        SendRequest(topic="new"),
        SendRequest(topic="new", records=[Record(body=b"x", topic="another")]),
        SendRequest(topic="new", records=[Record(body=b"x")], queue_id=8),
        SendRequest(topic="new", records=[Record(body=b"x", flags=1 << 20)]),
    ],
)
def test_a_send_that_is_refused_makes_no_topic(refused: SendRequest):
    broker = make_broker()
    version = broker.store.topics.snapshot().version
    assert isinstance(broker.send(refused)[0], ServiceError)
    assert broker.store.topics.find("new") is None
    assert broker.store.topics.snapshot().version == version


def test_a_send_that_the_disk_has_no_room_for_makes_no_topic():
    broker = make_broker()
    broker.store._refusals.refuse("the disk is full")
    assert reason(broker.send(request("new"))[0]) == "DISK_FULL"
    assert broker.store.topics.find("new") is None


def test_a_refused_send_beside_one_that_is_stored_is_refused_alone():
    broker = make_broker()
    refused, stored = broker.send(SendRequest(topic="one"), request("two"))
    assert reason(refused) == "INVALID_ARGUMENT"
    assert isinstance(stored, SendResponse)
    assert [topic.name for topic in broker.store.topics.all()] == ["two"]


def test_the_first_send_to_a_topic_waits_for_no_sync():
    broker = make_broker()
    seen = broker.disk.history = []
    assert isinstance(broker.send(request("new"))[0], SendResponse)
    assert {operation.name for operation in seen} <= {"pwrite", "pwritev"}
    assert broker.store.topics.find("new") is not None


def test_a_topic_of_a_first_send_is_in_the_log_with_its_settings():
    broker = make_broker(default_queues=3)
    broker.send(request("new"))
    killed = broker.disk.killed()
    lose(killed, "config")
    again = open_store(killed, segment=1 << 16)
    assert [(topic.name, topic.write_queues) for topic in again.topics.all()] == [("new", 3)]
    assert again.topics.snapshot().version == broker.store.topics.snapshot().version
    again.close()


def test_a_deleted_topic_does_not_come_back_at_a_start():
    broker = make_broker()
    broker.send(request("gone"), request("kept"))
    broker.store.delete_topic("gone")
    again = open_store(broker.disk.killed(), segment=1 << 16)
    assert [topic.name for topic in again.topics.all()] == ["kept"]
    again.close()


@pytest.mark.parametrize("auto_create", [False, True])
def test_a_topic_is_deleted_between_two_appends(auto_create: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A send that has found it is answered while it is there; no later one gets into what is left of it, nor is one lost with it."""
    broker = FakeBroker(auto_create_topics=auto_create)
    store, real = broker.store, broker.store.append
    deletions: list[FakeCall] = []

    def append(requests: Sequence[AppendRequest]) -> int:
        # Now, that the topic was looked up.
        deletions.append(broker.server.call(ADMIN + "DeleteTopic", DeleteTopicRequest(topic="topic")))
        broker.server.lanes["admin"].run()
        return real(requests)

    with monkeypatch.context() as patch:
        patch.setattr(store, "append", append)
        stored = broker.server.call(SEND, request(queue_id=0)).response()
    assert (stored.status, stored.queue_offset) == (SendStatus.SEND_STATUS_SEND_OK, 0)
    assert store.topics.find("topic") is not None, "the send was stored in a topic that is gone"
    broker.server.run()
    deletions[0].response()
    after = broker.call(SEND, request(body=b"new", queue_id=0))
    if auto_create:
        assert after.response().queue_offset == 0
    else:
        assert after.error is not None
        assert told(after.error)[:2] == ("NOT_FOUND", "TOPIC_NOT_FOUND")
    left = [(0, b"new")] if auto_create else []
    for found in (store, open_store(broker.disk.killed(), segment=1 << 20)):
        assert (found.topics.find("topic") is not None) == auto_create
        assert read_all(found) == left


def test_messages_to_a_new_topic_in_one_turn_make_it_once():
    broker = make_broker()
    outcomes = broker.send(*(request("new") for _ in range(3)))
    assert all(isinstance(outcome, SendResponse) for outcome in outcomes)
    assert broker.store.topics.snapshot().version.counter == 1


# What is sent again, and in which order.


def numbered(sequence: int, previous: int | None = None, *, producer_id: int = 7) -> SendRequest:
    """A message of a producer; `previous`: what it says it has sent before."""
    record = Record(body=b"%d" % sequence, producer_id=producer_id, sequence=sequence)
    return SendRequest(topic="topic", records=[record], queue_id=0, previous_sequence=previous)


def test_a_producer_that_is_not_known_is_told_so_and_nothing_is_stored():
    broker = make_broker()
    outcome = broker.send(numbered(5, 4))[0]
    assert reason(outcome) == "SEQUENCE_EXPIRED"
    assert (outcome.metadata["sequence"], outcome.metadata["previous_sequence"]) == ("5", "4")
    assert outcome.metadata["producer_id"] == f"{7:016X}"
    assert broker.store.appended_position == broker.store.min_position + 53


def test_who_names_a_message_before_names_its_producer():
    broker = make_broker()
    refused = broker.send(SendRequest(topic="topic", records=[Record(body=b"a")], queue_id=0, previous_sequence=4))[0]
    assert reason(refused) == "INVALID_ARGUMENT"
    assert refused.message.startswith("records[0].producer_id: is 0, and previous_sequence names an earlier message")


@pytest.mark.parametrize("first", [2**63 - 1, 2**63, 2**64 - 2])
@pytest.mark.parametrize("is_whole", [False, True])
def test_sequences_that_could_not_be_recognised_again_are_refused(first: int, is_whole: bool):
    broker = make_broker()
    records = [Record(body=b"x", producer_id=7, sequence=first + index) for index in range(2)]
    if is_whole:
        template = RecordTemplate("topic", 7, 0)
        records = [Record.FromString(template.encode(b"x", each.sequence, 5)) for each in records]
    request = SendRequest(topic="topic", records=records, queue_id=0)
    outcome = broker.send(request)[0]
    assert reason(outcome) == "INVALID_ARGUMENT"
    assert "records[0].sequence" in str(outcome)
    assert read_all(broker.store) == []
    assert broker.send(numbered(2**63 - 1))[0].queue_offset == 0
    assert broker.send(numbered(2**63 - 1))[0].repeated_send


def test_sequences_of_another_topic_are_refused_for_good():
    broker = make_broker()
    broker.send(numbered(5))
    again = numbered(5)
    again.topic = "other"
    outcome = broker.send(again)[0]
    assert reason(outcome) == "PRODUCER_ID_TAKEN"
    assert (outcome.metadata["sequence"], outcome.metadata["definite"]) == ("5", "true")
    assert broker.store.topics.find("other") is None


def test_of_two_producers_with_one_id_the_second_is_told_so_and_nothing_of_it_is_stored():
    broker = make_broker()
    first, second = numbered(0), numbered(0)
    second.records[0].body = b"another"
    outcomes = broker.send(first, second, first, second)  # in one turn
    assert [getattr(outcome, "repeated_send", None) for outcome in outcomes] == [
        False, None, True, None,
    ]  # fmt: skip
    assert [reason(outcome) for outcome in outcomes[1::2]] == ["PRODUCER_ID_TAKEN"] * 2
    assert outcomes[1].metadata == {
        "definite": "true", "producer_id": f"{7:016X}", "producer_epoch": "0", "sequence": "0",
    }  # fmt: skip
    assert read_all(broker.store) == [(0, b"0")]
    second.records[0].sequence = 1
    assert broker.send(second)[0].queue_offset == 1


def test_a_repeat_is_known_though_its_queue_is_gone_and_beside_a_new_send_that_is_refused():
    broker = make_broker(default_queues=4)
    first, new = numbered(0), numbered(1, 0)
    first.queue_id = new.queue_id = 3
    stored = broker.send(first)[0]
    topic = broker.store.topics.find("topic")
    assert topic is not None
    broker.store.topics.put([replace(topic, write_queues=2)])
    end = broker.store.appended_position
    refused, repeated = broker.send(new, first)
    assert (reason(refused), refused.metadata["definite"]) == ("QUEUE_NOT_FOUND", "true")
    assert (repeated.repeated_send, repeated.queue_id, repeated.queue_offset) == (True, 3, stored.queue_offset)
    assert broker.store.appended_position == end
    new.queue_id = 1
    assert not broker.send(new)[0].repeated_send


@pytest.mark.parametrize("limits", [{"delayed_count_max": 1}, {"delayed_size_max_bytes": 1}])
def test_a_repeat_of_the_delayed_message_that_filled_the_broker_is_known(limits: dict[str, Any]):
    broker = make_broker(**limits)
    first, other = numbered(0), numbered(1, 0)
    first.delay_ms = other.delay_ms = 60_000
    stored = broker.send(first)[0]
    refused, repeated = broker.send(other, first)
    assert reason(refused) == "TOO_MANY"
    assert (repeated.repeated_send, repeated.recall_handle) == (True, stored.recall_handle)
    assert broker.store.pending.count == 1
    # The refused one is not taken for stored.
    assert reason(broker.send(numbered(2, 1))[0]) == "SEND_OUT_OF_ORDER"


@pytest.mark.parametrize("is_given", [False, True])
def test_a_repeat_is_known_whether_or_not_its_producer_gives_a_crc(is_given: bool):
    broker = make_broker()
    send = numbered(0)
    send.records[0].properties["a"] = "1"  # of several nobody knows the order in which they are written
    if is_given:
        octets = Record(body=b"0", properties=send.records[0].properties)
        send.records[0].crc32c = crc32c(octets.SerializeToString())
    broker.send(send)
    broker.clock.time_ms += 5  # it has no born time either: the broker gives it another one
    assert broker.send(send)[0].repeated_send
    send.records[0].properties["a"] = "other"
    send.records[0].ClearField("crc32c")
    assert reason(broker.send(send)[0]) == "PRODUCER_ID_TAKEN"


def test_what_is_pipelined_behind_a_refused_send_is_refused_too():
    broker = make_broker()
    broker.send(numbered(0))
    too_large = numbered(1, 0)
    too_large.records[0].properties["k"] = "v" * 40_000
    outcomes = broker.send(too_large, numbered(2, 1), numbered(3, 2))
    assert [reason(outcome) for outcome in outcomes] == [
        "MESSAGE_TOO_LARGE", "SEND_OUT_OF_ORDER", "SEND_OUT_OF_ORDER",
    ]  # fmt: skip
    again = broker.send(numbered(1, 0), numbered(2, 1), numbered(3, 2))
    assert [outcome.queue_offset for outcome in again] == [1, 2, 3]


def test_pipelined_sends_in_one_turn_are_stored_in_order():
    broker = make_broker()
    outcomes = broker.send(numbered(0), *(numbered(n, n - 1) for n in range(1, 50)))
    assert [outcome.queue_offset for outcome in outcomes] == list(range(50))


def test_a_repeat_is_known_after_a_day_of_the_log_or_told_to_be_unknown():
    broker = make_broker()
    broker.send(numbered(0), numbered(1, 0))
    broker.clock.time_ms += 48 * 3_600_000
    assert broker.send(numbered(1, 0))[0].repeated_send  # nothing was stored since
    broker.send(numbered(0, producer_id=8))
    assert reason(broker.send(numbered(1, 0))[0]) == "SEQUENCE_EXPIRED"
    assert len(read_all(broker.store)) == 3


def test_when_a_million_have_sent_nobody_new_is_taken():
    broker = make_broker()
    broker.store._repeated._producers_max = 3
    for producer_id in (1, 2, 3):
        broker.send(numbered(0, producer_id=producer_id))
    refused = broker.send(numbered(0, producer_id=4))[0]
    assert reason(refused) == "TOO_MANY"
    assert refused.metadata["limit"] == "3"
    assert broker.send(numbered(1, 0, producer_id=1))[0].queue_offset == 3
    broker.clock.time_ms += 15 * 60_000 + 1_000
    assert broker.send(numbered(0, producer_id=4))[0].queue_offset == 4


# Through a fake lane: what callers are answered, and when.


def send(**fields: Any) -> SendRequest:
    return SendRequest(**{"topic": "topic", "queue_id": 0, "records": [Record(body=b"body")], **fields})


def test_a_send_is_answered_with_its_place() -> None:
    broker = FakeBroker()
    broker.fill([b"before"])
    response = broker.call(SEND, send(records=[Record(body=b"a"), Record(body=b"b")])).response()
    assert (response.status, response.queue_id) == (SendStatus.SEND_STATUS_SEND_OK, 0)
    assert (response.queue_offset, response.record_count) == (1, 2)
    assert len(response.message_id) == 40  # the broker has given it: the producer has not
    assert read_all(broker.store) == [(0, b"before"), (1, b"a"), (2, b"b")]


def test_queues_are_taken_in_turn_where_none_is_named() -> None:
    broker = FakeBroker()
    request = SendRequest(topic="topic", records=[Record(body=b"x")])
    assert [broker.call(SEND, request).response().queue_id for _ in range(4)] == [0, 1, 0, 1]


def keyed(*keys: str, **fields: Any) -> SendRequest:
    """A request that names no queue, of a message for each key; an empty one is none."""
    records = [Record(body=b"x", attributes=Attributes(sharding_key=key)) for key in keys]
    return SendRequest(**{"topic": "topic", "records": records, **fields})


def whole(*keys: str, first_sequence: int = 0, **fields: Any) -> SendRequest:
    """The same, as a fast client writes it: whole records with their sizes."""
    request = SendRequest(**{"topic": "topic", **fields})
    template = RecordTemplate(request.topic, 7, 0)
    for index, key in enumerate(keys):
        octets = template.encode(b"x", first_sequence + index, 5, sharding_key=key, front=encode_front(sharding_key=key))
        request.records.append(Record.FromString(octets))
        request.record_sizes.append(len(octets))
    return request


KEYS = [f"order-{number}" for number in range(40)]


@pytest.mark.parametrize("fields", [{}, {"delay_ms": 1_000}, {"topic": "new"}], ids=["now", "delayed", "new topic"])
def test_where_no_queue_is_named_the_sharding_key_chooses_it_as_in_the_sdk(fields: dict[str, Any]) -> None:
    broker = make_broker(default_queues=8)
    broker.store.topics.put([TopicConfig("topic", write_queues=8, read_queues=8)])
    sequence = 0
    for key in KEYS:
        for count in (1, 2, 30):
            requests = [keyed(*[key] * count, **fields), whole(*[key] * count, first_sequence=sequence, **fields)]
            sequence += count
            answers = broker.send(*requests)
            assert [(answer.queue_id, answer.repeated_send) for answer in answers] == [(sharded_index(key, 8), False)] * 2


def test_a_half_message_goes_to_the_queue_of_its_sharding_key() -> None:
    broker = FakeBroker()
    broker.store.topics.put([TopicConfig("topic", write_queues=8, read_queues=8)])
    for sequence, key in enumerate(KEYS):
        request = keyed(key, half=True)
        request.records[0].producer_id, request.records[0].sequence = 7, sequence
        assert broker.call(SEND, request).response().queue_id == sharded_index(key, 8)


def test_messages_without_a_sharding_key_go_along_with_those_of_one() -> None:
    broker = make_broker()
    broker.store.topics.put([TopicConfig("topic", write_queues=8, read_queues=8)])
    for keys in (("a", ""), ("", "a"), ("", "a", "") * 10):
        assert broker.send(keyed(*keys))[0].queue_id == sharded_index("a", 8)


@pytest.mark.parametrize("write", [keyed, whole])
def test_different_sharding_keys_without_a_queue_are_refused(write: Callable[..., SendRequest]) -> None:
    broker = make_broker()
    request = write("a", "", "b")
    outcome = broker.send(request)[0]
    assert (reason(outcome), outcome.field_violations[0][0]) == ("INVALID_ARGUMENT", "queue_id")
    assert read_all(broker.store) == []
    request.queue_id = 0
    assert broker.send(request)[0].record_count == 3


def test_the_queue_that_is_named_goes_before_the_sharding_key() -> None:
    broker = make_broker()
    broker.store.topics.put([TopicConfig("topic", write_queues=8, read_queues=8)])
    for queue_id in range(8):
        assert broker.send(keyed("a", queue_id=queue_id))[0].queue_id == queue_id


def test_a_repeated_send_is_answered_with_the_queue_that_its_sharding_key_had_then() -> None:
    broker = make_broker()
    key = next(key for key in KEYS if sharded_index(key, 16) != sharded_index(key, 8))
    broker.store.topics.put([TopicConfig("topic", write_queues=8, read_queues=8)])
    request = whole(key)
    first, together = broker.send(request, request)
    broker.store.topics.put([TopicConfig("topic", write_queues=16, read_queues=16)])
    again = broker.send(request)[0]
    assert [answer.queue_id for answer in (first, together, again)] == [sharded_index(key, 8)] * 3
    assert [answer.repeated_send for answer in (first, together, again)] == [False, True, True]


def test_sharding_keys_take_no_turn_from_messages_without_one() -> None:
    broker = make_broker()
    broker.store.topics.put([TopicConfig("topic", write_queues=4, read_queues=4)])
    plain = SendRequest(topic="topic", records=[Record(body=b"x")])
    queue_ids = []
    for _ in range(4):
        queue_ids += [answer.queue_id for answer in broker.send(plain, keyed("a"))[:1]]
    assert queue_ids == [0, 1, 2, 3]


def test_sends_of_one_turn_are_one_append() -> None:
    broker = FakeBroker()
    seen = broker.disk.history = []
    calls = broker.server.call_together(SEND, [send() for _ in range(10)])
    assert [call.response().queue_offset for call in calls] == list(range(10))
    writes = [operation.name for operation in seen if "commitlog" in operation.path]
    assert writes == ["pwritev"]


def test_under_sync_flush_a_send_is_answered_when_it_is_on_the_disk() -> None:
    broker = FakeBroker(sync_flush=True)
    waiting = broker.call(SEND, send())
    hurried = broker.call(SEND, send(wait_store_ok=False))
    assert (waiting.answered, hurried.answered) == (False, True)
    assert hurried.response().status == SendStatus.SEND_STATUS_SEND_OK  # its log has it, the disk has not
    broker.store.flush()
    broker.server.run()
    assert waiting.response().status == SendStatus.SEND_STATUS_SEND_OK


@pytest.mark.parametrize(("timeout_s", "wait_ms"), [(None, 5_000), (1.0, 900)])
def test_a_send_that_the_disk_does_not_confirm_in_time_has_a_status(
    timeout_s: float | None, wait_ms: int
) -> None:
    broker = FakeBroker(sync_flush=True)
    call = broker.call(SEND, send(), timeout_s=timeout_s)
    broker.advance(wait_ms - 200)
    assert not call.answered
    broker.advance(200)
    response = call.response()
    assert response.status == SendStatus.SEND_STATUS_FLUSH_DISK_TIMEOUT
    assert response.queue_offset == 0
    broker.store.flush()
    broker.server.run()
    assert read_all(broker.store) == [(0, b"body")]  # it is stored all the same


def test_a_send_that_the_disk_loses_is_doubtful_and_so_are_all_after_it() -> None:
    broker = FakeBroker(sync_flush=True)
    call = broker.call(SEND, send())
    broker.disk.fail_at(1, Fault.SYNC_LOST)
    broker.store.flush()
    broker.server.run()
    assert call.error is not None
    assert (call.error.reason, call.error.metadata["definite"]) == ("STORE_FAILED", "false")
    assert broker.refusal(SEND, send()).reason == "STORE_FAILED"


def test_an_answer_to_a_caller_that_has_gone_harms_nobody() -> None:
    broker = FakeBroker(sync_flush=True)
    gone, there = broker.call(SEND, send()), broker.call(SEND, send())
    gone.hang_up()
    broker.store.flush()
    broker.server.run()
    assert there.response().queue_offset == 1


def test_a_broker_whose_name_is_taken_stores_nothing() -> None:
    broker = FakeBroker()
    broker.send.refusal = ServiceError(Code.FAILED_PRECONDITION, "NAME_TAKEN", "it is another's")
    assert broker.refusal(SEND, send()).reason == "NAME_TAKEN"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"topic": ""}, ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})),
        ({"topic": "no/topic"}, ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})),
        ({"records": []}, ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})),
        *(
            (
                {"queue_id": queue_id},
                (
                    "NOT_FOUND",
                    "QUEUE_NOT_FOUND",
                    {"topic": "topic", "queue_id": str(queue_id), "write_queues": "2"},
                ),
            )
            for queue_id in (-1, 2)
        ),
        ({"records": [Record(tag="a|b")]}, ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})),
        ({"records": [Record(crc32c=1, body=b"x")]}, ("INVALID_ARGUMENT", "INVALID_ARGUMENT", {})),
    ],
)  # fmt: skip
def test_a_send_that_is_refused_says_why_and_stores_nothing(
    fields: dict[str, Any], expected: tuple[str, str, dict[str, str]]
) -> None:
    assert told(FakeBroker().refusal(SEND, send(**fields))) == expected


def test_a_send_that_does_not_parse_is_refused() -> None:
    assert FakeBroker().refusal(SEND, b"\xff\xff").reason == "INVALID_ARGUMENT"


def test_a_topic_that_may_not_be_written_is_not_written() -> None:
    broker = FakeBroker()
    broker.store.topics.create(TopicConfig("sealed", 1, 1, writable=False))
    error = broker.refusal(SEND, send(topic="sealed"))
    assert told(error) == ("PERMISSION_DENIED", "NOT_PERMITTED", {"topic": "sealed"})


def test_a_broker_that_makes_no_topics_tells_which_is_missing() -> None:
    broker = FakeBroker(auto_create_topics=False)
    assert told(broker.refusal(SEND, send(topic="other"))) == (
        "NOT_FOUND", "TOPIC_NOT_FOUND", {"topic": "other"},
    )  # fmt: skip
