"""Producer: sends gather in lines, retries store once, nothing waits for ever. A cluster in memory, no sockets."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest

from protomq import (
    AsyncProducer,
    MessageQueue,
    OutgoingMessage,
    Producer,
    SendResult,
    SendStatus,
    _lines,
)
from protomq._company import Company
from protomq._outgoing import Stored
from protomq._producer_options import ProducerOptions, ProducerSettings
from protomq._routes import INVALIDATE_INTERVAL_S
from protomq._send_arguments import SendSettings
from protomq.errors import (
    BatchIncompleteError,
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    InvalidArgumentError,
    MessageTooLargeError,
    NoRouteError,
    QueueNotFoundError,
    RequestTimeoutError,
    ShuttingDownError,
    SystemBusyError,
    TopicNotFoundError,
)
from protomq.hooks import Hook, SendContext
from protomq.wire.hashing import sharded_index
from protomq.wire.recall_handle import RecallHandle, encode_handle
from protomq.wire.record import decode_message_id
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport, SendCall, after_storing
from tests.support.interrupting_lock import InterruptingLock
from tests.support.waiting import wait_for

HANDLE = encode_handle(RecallHandle("a", 1, 2, (7, 1, 0)))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def producer(cluster: FakeCluster) -> Iterator[Producer]:
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        yield producer


def two_brokers() -> FakeCluster:
    return FakeCluster({"T": {"a": 2, "b": 2}})


# -- one message -------------------------------------------------------------------------------------------------------


def test_a_result_says_where_the_message_is(cluster: FakeCluster, producer: Producer) -> None:
    first = producer.send("T", b"one", queue=MessageQueue("T", "a", 2))
    second = producer.send("T", b"two", queue=MessageQueue("T", "a", 2))
    assert (first.status, first.queue, first.queue_offset) == (SendStatus.SEND_OK, ("T", "a", 2), 0)
    assert second.queue_offset == 1
    assert not second.repeated_send
    assert decode_message_id(second.message_id) == (producer.producer_id, 0, 1)
    assert cluster.stored() == {("a", 2): [b"one", b"two"]}
    assert first != second
    assert len({first, second, first}) == 2
    assert "T/a/2@1" in repr(second)


def test_what_is_said_of_a_message_arrives(cluster: FakeCluster, producer: Producer) -> None:
    producer.send(
        "T",
        b"body",
        key="k1",
        keys=["k2"],
        tag="red",
        properties={"b": "2", "a": "1"},
        sharding_key="s",
    )
    record = cluster.calls[0].request.records[0]
    assert (record.body, list(record.keys), record.tag) == (b"body", ["k1", "k2"], "red")
    assert dict(record.properties) == {"a": "1", "b": "2"}
    assert record.attributes.sharding_key == "s"


def test_without_a_queue_the_queues_take_turns(cluster: FakeCluster, producer: Producer) -> None:
    queues = [producer.send("T", b"x").queue.queue_id for _ in range(8)]
    assert sorted(queues[:4]) == [0, 1, 2, 3]
    assert queues[4:] == queues[:4]
    assert cluster.route_calls == 1


def test_a_sharding_key_decides_the_queue(producer: Producer) -> None:
    for key in ("a", "b", "c", "d", "e"):
        assert producer.send("T", b"x", sharding_key=key).queue.queue_id == sharded_index(key, 4)


def test_an_empty_sharding_key_is_none(cluster: FakeCluster, producer: Producer) -> None:
    sent = [producer.send("T", b"x", sharding_key="").queue.queue_id for _ in range(4)]
    assert sorted(sent) == [0, 1, 2, 3]
    batches = [producer.send_batch("T", [b"x"], sharding_key="")[0] for _ in range(4)]
    assert {result.queue.queue_id for result in batches} == {0, 1, 2, 3}
    message = OutgoingMessage("T", b"x", sharding_key="")
    batches = [producer.send_batch("T", [message])[0] for _ in range(4)]
    assert {result.queue.queue_id for result in batches} == {0, 1, 2, 3}
    queue = MessageQueue("T", "a", 2)
    assert producer.send_batch("T", [b"x"], queue=queue, sharding_key="")[0].queue == queue
    assert all(not call.request.records[0].HasField("attributes") for call in cluster.calls)


def test_a_selector_decides_the_queue(producer: Producer) -> None:
    def last(queues: Sequence[MessageQueue], message: OutgoingMessage) -> MessageQueue:
        assert message.key == "k"
        return queues[-1]

    assert producer.send("T", b"x", key="k", selector=last).queue.queue_id == 3
    with pytest.raises(ConfigurationError, match="selector"):
        producer.send("T", b"x", selector=lambda queues, message: MessageQueue("T", "a", 99))
    with pytest.raises(ConfigurationError, match="the selector returned None: it returns one of the queues that it is given"):
        producer.send("T", b"x", selector=lambda queues, message: None)  # type: ignore[arg-type,return-value]


def test_a_message_object_can_be_sent(cluster: FakeCluster, producer: Producer) -> None:
    producer.send(OutgoingMessage("T", b"body", key="k", tag="t"))
    assert cluster.calls[0].request.records[0].tag == "t"


def test_large_bodies_are_compressed_and_small_ones_not(
    cluster: FakeCluster, producer: Producer
) -> None:
    producer.send("T", bytes(4097))
    producer.send("T", bytes(4096))
    flags = [call.request.records[0].flags for call in cluster.calls]
    # zlib though zstd is installed here: nobody knows what the consumers have.
    assert flags == [1, 0]
    assert producer.compression == "zlib"


def test_limits_and_types_are_checked_before_anything_is_sent(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster), compression="none") as producer:
        with pytest.raises(MessageTooLargeError):
            producer.send("T", bytes((4 << 20) + 1))
        with pytest.raises(ConfigurationError):
            producer.send("T", None)
        producer.send("T", bytes(4 << 20))
    assert len(cluster.calls) == 1


def test_a_topic_that_does_not_exist_is_an_error(producer: Producer) -> None:
    with pytest.raises(TopicNotFoundError):
        producer.send("unknown", b"x")


def test_a_topic_without_queues_to_write_is_an_error() -> None:
    cluster = FakeCluster({"T": {"a": 0}})
    with Producer(transport=FakeSyncTransport(cluster)) as producer, pytest.raises(NoRouteError):
        producer.send("T", b"x")


def test_one_way_sends_once_and_asks_for_no_answer(
    cluster: FakeCluster, producer: Producer
) -> None:
    producer.send_one_way("T", b"x", key="k")
    assert cluster.calls[0].one_way
    cluster.script("a", ConnectFailedError("down"))
    with pytest.raises(ConnectFailedError):
        producer.send_one_way("T", b"x")


def test_options_are_checked() -> None:
    for wrong in (
        {"send_timeout_s": 0.0},
        {"retries": 99},
        {"compression": "brotli"},
        {"producer_id": 0},
        {"coalesce_count_max": 0},
    ):
        with pytest.raises(ConfigurationError):
            Producer(**wrong)
    with pytest.raises(TypeError):
        Producer(retrys=3)  # type: ignore[call-arg,unused-ignore]


def test_the_settings_that_type_checkers_see_are_the_options() -> None:
    settings = ["group", *ProducerSettings.__annotations__]
    assert settings == list(ProducerOptions.__dataclass_fields__)


# -- retries -----------------------------------------------------------------------------------------------------------


def test_a_lost_answer_is_asked_for_again_with_the_same_bytes_and_stored_once(
    cluster: FakeCluster, producer: Producer
) -> None:
    cluster.script(
        "a", after_storing(ConnectionLostError("cut")), after_storing(RequestTimeoutError("slow"))
    )
    result = producer.send("T", b"once")
    assert result.repeated_send
    assert cluster.bodies() == [b"once"]
    assert len({call.payload for call in cluster.calls}) == 1


def test_a_broker_that_refuses_is_left_for_another() -> None:
    cluster = two_brokers()
    cluster.script("a", *[ShuttingDownError("bye")] * 9)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        assert {producer.send("T", b"x").queue.broker_name for _ in range(8)} == {"b"}


def test_an_unknown_outcome_asks_the_same_broker_before_another() -> None:
    cluster = two_brokers()
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        first = producer.send("T", b"first").queue.broker_name
        other = "b" if first == "a" else "a"
        for name in ("a", "b"):
            cluster.script(name, after_storing(RequestTimeoutError("lost")))
        assert producer.send("T", b"x").repeated_send
        names = [call.broker_name for call in cluster.calls[1:]]
        assert names in (["a", "a"], ["b", "b"])
        assert other in ("a", "b")


def test_the_message_keeps_its_id_when_it_goes_to_another_broker() -> None:
    cluster = two_brokers()
    lost = [RequestTimeoutError("lost"), RequestTimeoutError("lost")]
    cluster.script("a", *lost)
    cluster.script("b", *lost)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        result = producer.send("T", b"x")
    ids = {
        (record.producer_id, record.sequence)
        for call in cluster.calls
        for record in call.request.records
    }
    assert len(ids) == 1
    assert decode_message_id(result.message_id)[0] == ids.pop()[0]
    assert len({call.broker_name for call in cluster.calls}) == 2


def test_a_definite_error_after_an_unknown_outcome_is_not_definite(
    cluster: FakeCluster, producer: Producer
) -> None:
    cluster.script(
        "a", RequestTimeoutError("lost"), *[SystemBusyError("busy", retry_delay_ms=0)] * 9
    )
    with pytest.raises(SystemBusyError) as caught:
        producer.send("T", b"x")
    assert not caught.value.definite


def test_what_is_not_retriable_is_tried_once(cluster: FakeCluster, producer: Producer) -> None:
    cluster.script("a", InvalidArgumentError("no"))
    with pytest.raises(InvalidArgumentError):
        producer.send("T", b"x")
    assert len(cluster.calls) == 1


def test_no_retries_is_one_attempt(cluster: FakeCluster) -> None:
    cluster.script("a", ConnectionLostError("cut"))
    with (
        Producer(transport=FakeSyncTransport(cluster), retries=0) as producer,
        pytest.raises(ConnectionLostError),
    ):
        producer.send("T", b"x")
    assert len(cluster.calls) == 1


def test_the_time_out_covers_all_attempts(cluster: FakeCluster, producer: Producer) -> None:
    cluster.script("a", *[ConnectFailedError("down")] * 1000)
    with pytest.raises(ConnectFailedError) as caught:
        producer.send("T", b"x", timeout_s=0.05)
    assert caught.value.definite
    assert all(call.timeout_s <= 0.05 for call in cluster.calls)
    assert len(cluster.calls) < 20


def test_a_shrunk_topic_is_looked_up_again(cluster: FakeCluster, producer: Producer) -> None:
    key = next(f"k{i}" for i in range(100) if sharded_index(f"k{i}", 4) == 3)
    producer.send("T", b"x", sharding_key=key)
    cluster.topics["T"]["a"] = 2
    cluster.script("a", *[QueueNotFoundError("no queue 3")] * 3)
    assert producer.send("T", b"y", sharding_key=key).queue.queue_id == sharded_index(key, 2)
    cluster.script("a", *[QueueNotFoundError("no queue 3")] * 3)
    with pytest.raises(QueueNotFoundError):
        producer.send("T", b"z", queue=MessageQueue("T", "a", 3))


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("brokers", [{"a": 8}, {"a": 8, "b": 8}])
def test_a_topic_of_which_the_name_server_knows_other_queues_is_waited_for(brokers: dict[str, int], key: str | None) -> None:
    cluster = FakeCluster({"T": dict(brokers)})
    for name in brokers:
        cluster.script(name, *[QueueNotFoundError("it has 1")] * 4)
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        assert producer.send("T", b"x", sharding_key=key).queue_offset == 0
        for name in brokers:
            cluster.script(name, *[QueueNotFoundError("it has 1")] * 4)
        assert len(producer.send_batch("T", [b"y"])) == 1
        for name in brokers:
            cluster.script(name, *[QueueNotFoundError("it has 1")] * 999)
        with pytest.raises(QueueNotFoundError):
            producer.send("T", b"z", sharding_key=key, timeout_s=0.2)
    assert len(cluster.bodies()) == 2


def test_of_a_queue_that_went_before_the_answer_no_other_one_gets_the_message_too(
    cluster: FakeCluster, producer: Producer
) -> None:
    cluster.script("a", after_storing(ConnectionLostError("gone")), *[QueueNotFoundError("no queue")] * 3)
    with pytest.raises(QueueNotFoundError) as raised:
        producer.send("T", b"x", sharding_key="k", timeout_s=5)
    assert not raised.value.definite
    assert cluster.bodies() == [b"x"]
    assert len({call.request.records[0].sequence for call in cluster.calls}) == 1


def test_a_chosen_queue_is_looked_up_at_once_when_its_broker_is_back() -> None:
    cluster = two_brokers()
    cluster.away = {"b"}
    with Producer(transport=FakeSyncTransport(cluster), retries=0) as producer:
        producer.send("T", b"the route without b is known now, and trusted for 30 s")
        with pytest.raises(NoRouteError, match="'b'"):
            producer.send("T", b"x", queue=MessageQueue("T", "b", 1))
        let_time_pass(producer)
        cluster.away = set()
        assert producer.send("T", b"x", queue=MessageQueue("T", "b", 1)).queue_offset == 0
        assert producer.send_batch("T", [b"y"], queue=MessageQueue("T", "b", 1))[0].queue_offset == 1
        producer.send_one_way("T", b"z", queue=MessageQueue("T", "b", 1))
    assert cluster.stored()["b", 1] == [b"x", b"y", b"z"]


def test_a_send_to_a_chosen_queue_waits_for_its_broker() -> None:
    cluster = two_brokers()
    cluster.away = {"b"}
    with Producer(transport=FakeSyncTransport(cluster), send_timeout_s=30) as producer:
        producer.send("T", b"the route without b is known now")
        timer = threading.Timer(0.3, cluster.away.clear)
        timer.start()
        assert producer.send("T", b"x", queue=MessageQueue("T", "b", 1)).queue_offset == 0
        timer.join()


def test_a_broker_that_stays_away_is_waited_for_within_the_time_out() -> None:
    cluster = two_brokers()
    cluster.away = {"b"}
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        with pytest.raises(NoRouteError, match="no broker 'b'") as caught:
            producer.send("T", b"x", queue=MessageQueue("T", "b", 1), timeout_s=0.3)
        assert caught.value.definite
        assert caught.value.metadata == {"topic": "T", "broker_name": "b"}
    assert cluster.calls == []


def test_a_topic_without_queues_to_write_is_looked_up_at_once_when_it_has_some() -> None:
    cluster = FakeCluster({"T": {"a": 0}})
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        with pytest.raises(NoRouteError):
            producer.send("T", b"x", sharding_key="s")
        let_time_pass(producer)
        cluster.topics["T"]["a"] = 2
        producer.send("T", b"x", sharding_key="s")


def let_time_pass(producer: Producer) -> None:
    """Makes what is known of routes older than the interval in which they are looked up once only."""
    for entry in producer._routes._cache._entries.values():
        entry.fetched_at_s -= INVALIDATE_INTERVAL_S


def test_slow_brokers_are_left_alone_with_fault_tolerance() -> None:
    cluster = two_brokers()
    cluster.script("a", *[ShuttingDownError("bye")] * 1)
    with Producer(transport=FakeSyncTransport(cluster), fault_tolerance=True) as producer:
        names = {producer.send("T", b"x").queue.broker_name for _ in range(12)}
        asked = [call.broker_name for call in cluster.calls]
    assert names == {"b"}
    assert asked.count("a") == 1


# -- lines -------------------------------------------------------------------------------------------------------------


class Gate:
    """Holds the first request back until it is opened."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.arrived = threading.Event()
        self.open = threading.Event()
        cluster.on_send = self.wait

    def wait(self, call: SendCall) -> None:
        self.arrived.set()
        assert self.open.wait(60)


def test_messages_that_gather_while_the_line_is_busy_travel_together(
    cluster: FakeCluster, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lines, "DEADLINE_SPREAD_S", 60.0)  # On a busy machine the threads start apart.
    gate = Gate(cluster)
    results: list[SendResult] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(producer.send("T", b"%03d" % i, timeout_s=60)))
        for i in range(50)
    ]
    threads[0].start()
    assert gate.arrived.wait(60)
    for thread in threads[1:]:
        thread.start()
    line = producer._lines["T", None, None]
    while len(line._pending) < 49:
        threading.Event().wait(0.001)
    gate.open.set()
    for thread in threads:
        thread.join(60)
    assert [len(call.request.records) for call in cluster.calls] == [1, 49]
    assert len(results) == 50
    assert cluster.bodies() == [b"%03d" % i for i in range(50)]
    # Each caller got the place of its own message.
    assert len({(result.queue, result.queue_offset) for result in results}) == 50
    assert len({result.message_id for result in results}) == 50


def test_many_threads_store_every_message_once(cluster: FakeCluster, producer: Producer) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for i in range(40):
                producer.send("T", b"%d-%d" % (number, i), sharding_key="k" if i % 3 == 0 else None)
        except BaseException as error:
            errors.append(error)

    for _ in range(2):
        cluster.script("a", after_storing(ConnectionLostError("cut")), ConnectFailedError("down"))
    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert cluster.bodies() == sorted(
        b"%d-%d" % (number, i) for number in range(16) for i in range(40)
    )


def test_an_error_reaches_every_caller_of_the_request(
    cluster: FakeCluster, producer: Producer
) -> None:
    gate = Gate(cluster)
    producer_errors: list[BaseException] = []

    def send() -> None:
        try:
            producer.send("T", b"x")
        except InvalidArgumentError as error:
            producer_errors.append(error)

    threads = [threading.Thread(target=send) for _ in range(5)]
    threads[0].start()
    assert gate.arrived.wait(60)
    for thread in threads[1:]:
        thread.start()
    while len(producer._lines["T", None, None]._pending) < 4:
        threading.Event().wait(0.001)
    cluster.script("a", InvalidArgumentError("no"), InvalidArgumentError("no"))
    gate.open.set()
    for thread in threads:
        thread.join(60)
    assert len(producer_errors) == 5
    assert len(set(map(id, producer_errors))) == 5


def test_waiting_in_line_ends_with_the_time_out_and_is_definite(
    cluster: FakeCluster, producer: Producer
) -> None:
    gate = Gate(cluster)
    thread = threading.Thread(target=producer.send, args=("T", b"first"))
    thread.start()
    assert gate.arrived.wait(60)
    with pytest.raises(RequestTimeoutError) as caught:
        producer.send("T", b"second", timeout_s=0.02)
    assert caught.value.definite
    gate.open.set()
    thread.join(60)
    assert cluster.bodies() == [b"first"]


def test_an_interrupted_leader_leaves_the_line_to_the_next(
    cluster: FakeCluster, producer: Producer
) -> None:
    gate = Gate(cluster)
    outcomes: list[str] = []

    def interrupted() -> None:
        try:
            producer.send("T", b"first")
        except KeyboardInterrupt:
            outcomes.append("interrupted")

    def interrupt(call: SendCall) -> None:
        gate.wait(call)
        cluster.on_send = None
        raise KeyboardInterrupt

    cluster.on_send = interrupt
    threads = [
        threading.Thread(target=interrupted),
        threading.Thread(
            target=lambda: outcomes.append(str(producer.send("T", b"second").status.name))
        ),
    ]
    threads[0].start()
    assert gate.arrived.wait(60)
    threads[1].start()
    while not producer._lines["T", None, None]._pending:
        threading.Event().wait(0.001)
    gate.open.set()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["SEND_OK", "interrupted"]


def test_an_interrupted_follower_leaves_the_others_alone(
    cluster: FakeCluster, producer: Producer
) -> None:
    gate = Gate(cluster)
    results: list[SendResult] = []
    threads = [
        threading.Thread(target=lambda body=body: results.append(producer.send("T", body)))
        for body in (b"first", b"second")
    ]
    threads[0].start()
    assert gate.arrived.wait(60)

    def interrupt() -> None:
        while not producer._lines["T", None, None]._pending:
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        producer.send("T", b"interrupted")
    interrupter.join()
    threads[1].start()
    gate.open.set()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert cluster.bodies() == [b"first", b"second"]


class Expecting:
    """A line whose leaders wait for each other, as those of a TransactionProducer do, and threads that send."""

    def __init__(self, producer: Producer, together_s: float = 60.0) -> None:
        self.producer = producer
        self.company = producer._company = Company(together_s=together_s)
        self.outcomes: dict[bytes, object] = {}
        self._threads: list[threading.Thread] = []

    def begin(self, body: bytes) -> None:
        thread = threading.Thread(target=self._send, args=(body,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send(self, body: bytes) -> None:
        try:
            self.outcomes[body] = self.producer.send("T", body).status
        except BaseException as error:
            self.outcomes[body] = type(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


def test_a_leader_that_is_interrupted_behind_its_wait_for_company_tells_all_who_came(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expecting = Expecting(producer)
    drop_expired = producer._drop_expired

    def interrupt(_: object) -> list[_lines.Entry]:
        monkeypatch.setattr(producer, "_drop_expired", drop_expired)
        raise KeyboardInterrupt

    monkeypatch.setattr(producer, "_drop_expired", interrupt)
    expecting.company.expect(2)
    expecting.begin(b"first")
    wait_for(lambda: expecting.company._gate is not None, pause_s=0.001)
    expecting.begin(b"second")
    expecting.join()
    assert expecting.outcomes == {b"first": KeyboardInterrupt, b"second": ConnectionLostError}
    assert producer.send("T", b"later").status is SendStatus.SEND_OK


def test_an_interrupt_behind_a_cancelled_send_leaves_no_other_one_without_an_outcome(producer: Producer) -> None:
    futures: list[Future[SendResult]] = [Future(), Future()]
    batch = [_lines.Entry((b"", "", "", b"", 0, 0, 0), time.monotonic() + 60, future) for future in futures]
    futures[0].cancel()
    assert producer._drop_expired(batch) == batch[1:]
    producer._end_unknown(batch)
    assert isinstance(futures[1].exception(0), ConnectionLostError)


@pytest.mark.parametrize("place", ["leads", "follows"])
def test_a_caller_that_is_interrupted_at_its_arrival_leaves_the_line_free(
    cluster: FakeCluster, producer: Producer, place: str
) -> None:
    expecting = Expecting(producer, together_s=0.0)
    gate = Gate(cluster)
    if place == "follows":
        expecting.begin(b"first")
        assert gate.arrived.wait(60)
    expecting.company._missing = 2
    expecting.company._lock = InterruptingLock()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        producer.send("T", b"interrupted")
    gate.open.set()
    expecting.join()
    assert not producer._lines["T", None, None].busy
    assert producer.send("T", b"later").status is SendStatus.SEND_OK


def test_a_leader_that_is_interrupted_while_it_says_whom_it_wakes_tells_them_that_they_are_stored(
    producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expecting = Expecting(producer)

    def interrupt(_: Stored) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(producer, "_on_stored", interrupt)
    expecting.company.expect(2)
    expecting.begin(b"first")
    wait_for(lambda: expecting.company._gate is not None, pause_s=0.001)
    expecting.begin(b"second")
    expecting.join()
    assert expecting.outcomes == {b"first": KeyboardInterrupt, b"second": SendStatus.SEND_OK}
    assert not producer._lines["T", None, None].busy


# -- futures -----------------------------------------------------------------------------------------------------------


def test_futures_get_their_results_in_the_order_of_the_calls(
    cluster: FakeCluster, producer: Producer
) -> None:
    queue = MessageQueue("T", "a", 1)
    # More than the default, for a busy machine.
    futures = [producer.send_async("T", b"%03d" % i, queue=queue, timeout_s=60) for i in range(200)]
    assert [future.result(60).queue_offset for future in futures] == list(range(200))
    assert cluster.stored() == {("a", 1): [b"%03d" % i for i in range(200)]}


def test_a_future_has_the_error(cluster: FakeCluster, producer: Producer) -> None:
    cluster.script("a", InvalidArgumentError("no"))
    future = producer.send_async("T", b"x")
    assert isinstance(future.exception(10), InvalidArgumentError)


def test_a_cancelled_future_is_not_sent(cluster: FakeCluster, producer: Producer) -> None:
    gate = Gate(cluster)
    first = producer.send_async("T", b"first")
    assert gate.arrived.wait(60)
    second, third = producer.send_async("T", b"second"), producer.send_async("T", b"third")
    assert second.cancel()
    gate.open.set()
    wait([first, third], 10)
    with pytest.raises(CancelledError):
        second.result()
    assert cluster.bodies() == [b"first", b"third"]


def test_cancelled_and_late_futures_do_no_harm_to_the_others(
    cluster: FakeCluster, producer: Producer
) -> None:
    gate = Gate(cluster)
    first = producer.send_async("T", b"first")
    assert gate.arrived.wait(60)
    late = producer.send_async("T", b"late", timeout_s=0.001)
    both = producer.send_async("T", b"both", timeout_s=0.001)
    good = producer.send_async("T", b"good")
    assert both.cancel()
    threading.Event().wait(0.002)
    gate.open.set()
    assert good.result(10).status is SendStatus.SEND_OK
    assert isinstance(late.exception(10), RequestTimeoutError)
    assert first.result(10).status is SendStatus.SEND_OK
    assert cluster.bodies() == [b"first", b"good"]


def test_close_copes_with_cancelled_futures(cluster: FakeCluster) -> None:
    gate = Gate(cluster)
    producer = Producer(transport=FakeSyncTransport(cluster))
    futures = [producer.send_async("T", b"%d" % i) for i in range(4)]
    assert gate.arrived.wait(60)
    assert futures[1].cancel()
    with pytest.warns(RuntimeWarning, match="3 messages of send_async .*ClosedError"):
        producer.close(timeout_s=0.01)
    assert isinstance(futures[3].exception(10), ClosedError)
    gate.open.set()
    assert futures[0].result(10).status is SendStatus.SEND_OK


def test_more_than_may_be_on_its_way_waits_for_room(cluster: FakeCluster) -> None:
    gate = Gate(cluster)
    with Producer(transport=FakeSyncTransport(cluster), pending_size_max_bytes=1000) as producer:
        first = producer.send_async("T", bytes(800))
        assert gate.arrived.wait(60)
        with pytest.raises(RequestTimeoutError, match="no room") as caught:
            producer.send_async("T", bytes(800), timeout_s=0.01)
        assert caught.value.definite
        gate.open.set()
        first.result(10)
        assert producer.send_async("T", bytes(800)).result(10).status is SendStatus.SEND_OK
        # More than the limit alone: it may go when nothing else waits.
        assert producer.send_async("T", bytes(4000)).result(10).status is SendStatus.SEND_OK


def test_a_callback_may_send(cluster: FakeCluster, producer: Producer) -> None:
    done = threading.Event()

    def send_another(_: Future[SendResult]) -> None:
        producer.send("T", b"second")
        done.set()

    producer.send_async("T", b"first").add_done_callback(send_another)
    assert done.wait(60)
    assert cluster.bodies() == [b"first", b"second"]


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_one_request(cluster: FakeCluster, producer: Producer) -> None:
    result = producer.send_batch("T", [b"a", b"b", b"c"], keys=["k1", None, "k3"], tags="red")
    assert len(cluster.calls) == len(result.requests) == 1
    assert [r.queue_offset for r in result] == [0, 1, 2]
    assert [list(record.keys) for record in cluster.calls[0].request.records] == [
        ["k1"],
        [],
        ["k3"],
    ]
    assert {record.tag for record in cluster.calls[0].request.records} == {"red"}
    assert len(result) == 3
    assert result[-1] == result[2]
    assert result[1:] == [result[1], result[2]]
    with pytest.raises(IndexError):
        result[3]
    with pytest.raises(IndexError):
        result[-4]


def test_an_empty_batch_is_no_request(cluster: FakeCluster, producer: Producer) -> None:
    assert list(producer.send_batch("T", [])) == []
    assert cluster.calls == []


def test_a_batch_over_the_limit_is_split(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster), batch_size_max_bytes=5000) as producer:
        result = producer.send_batch(
            "T", [bytes([i]) * 1000 for i in range(10)], queue=MessageQueue("T", "a", 0)
        )
    assert [len(call.request.records) for call in cluster.calls] == [4, 4, 2]
    assert [r.queue_offset for r in result] == list(range(10))
    assert len({r.message_id for r in result}) == 10


def test_messages_of_a_batch_go_to_the_queue_of_their_sharding_key(
    cluster: FakeCluster, producer: Producer
) -> None:
    messages = [OutgoingMessage("T", b"%d" % i, sharding_key=f"key-{i % 7}") for i in range(50)]
    result = producer.send_batch("T", messages)
    for message, stored in zip(messages, result, strict=True):
        assert stored.queue.queue_id == sharded_index(message.sharding_key or "", 4)
        assert (
            cluster.brokers["a"].queues["T", stored.queue.queue_id][stored.queue_offset].body
            == message.body
        )
    assert len(cluster.calls) == len({stored.queue for stored in result})


def test_one_sharding_key_can_be_given_for_a_whole_batch(producer: Producer) -> None:
    assert {r.queue.queue_id for r in producer.send_batch("T", [b"x"] * 5, sharding_key="k")} == {
        sharded_index("k", 4)
    }


def test_messages_of_a_batch_have_its_sharding_key_unless_they_say_where_they_go(cluster: FakeCluster, producer: Producer) -> None:
    queue = MessageQueue("T", "a", 3)
    with_key, with_queue = OutgoingMessage("T", b"own", sharding_key="o"), OutgoingMessage("T", b"q", queue=queue)
    producer.send_batch("T", [b"body", OutgoingMessage("T", b"plain"), with_key, with_queue], sharding_key="k")
    producer.send_batch("T", [b"x"] * 2, sharding_key="k")
    stored = [record for records in cluster.brokers["a"].queues.values() for record in records]
    keys = {record.body: record.attributes.sharding_key for record in stored}
    assert keys == {b"body": "k", b"plain": "k", b"own": "o", b"q": "", b"x": "k"}


def test_a_batch_that_fails_half_way_says_what_is_stored(cluster: FakeCluster) -> None:
    with Producer(transport=FakeSyncTransport(cluster), batch_size_max_bytes=3000) as producer:
        cluster.on_send = lambda call: (
            cluster.script("a", InvalidArgumentError("no")) if len(cluster.calls) == 1 else None
        )
        with pytest.raises(BatchIncompleteError) as caught:
            producer.send_batch("T", [bytes(1000)] * 5)
    assert [stored.count for stored in caught.value.stored] == [2]
    assert isinstance(caught.value.__cause__, InvalidArgumentError)


def test_a_batch_is_checked_as_a_whole_before_it_is_sent(
    cluster: FakeCluster, producer: Producer
) -> None:
    with pytest.raises(ConfigurationError):
        producer.send_batch("T", [b"a", 5])
    with pytest.raises(ConfigurationError):
        producer.send_batch("T", [b"a", b"b"], keys=["k"])
    with pytest.raises(ConfigurationError):
        producer.send_batch("T", [OutgoingMessage("other", b"a")])
    assert cluster.calls == []


# -- life --------------------------------------------------------------------------------------------------------------


def test_a_closed_producer_sends_nothing(cluster: FakeCluster, producer: Producer) -> None:
    producer.send("T", b"x")
    producer.close()
    producer.close()
    with pytest.raises(ClosedError):
        producer.send("T", b"x")
    with pytest.raises(ClosedError):
        producer.send_async("T", b"x")
    with pytest.raises(ClosedError):
        producer.send_one_way("T", b"x")
    with pytest.raises(ClosedError):
        producer.send_batch("T", [b"x"])


def test_close_waits_for_what_is_on_its_way(cluster: FakeCluster) -> None:
    gate = Gate(cluster)
    producer = Producer(transport=FakeSyncTransport(cluster))
    futures = [producer.send_async("T", b"%d" % i) for i in range(5)]
    assert gate.arrived.wait(60)
    closing = threading.Thread(target=producer.close)
    closing.start()
    gate.open.set()
    closing.join(60)
    assert [future.result(0).status for future in futures] == [SendStatus.SEND_OK] * 5


class HeldTransport(FakeSyncTransport):
    """Holds all calls, also those to name servers, until it is opened."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.arrived = threading.Event()
        self.open = threading.Event()

    def call(self, *args: Any, **settings: Any) -> bytes:
        self.arrived.set()
        assert self.open.wait(60)
        return super().call(*args, **settings)


# Those of which no line knows, while they look for their route at least.
CALLS_OUTSIDE_OF_LINES: dict[str, Callable[[Producer], object]] = {
    "batch": lambda producer: producer.send_batch("T", [b"x", b"y"]),
    "one way": lambda producer: producer.send_one_way("T", b"x"),
    "sharding key": lambda producer: producer.send("T", b"x", sharding_key="k"),
    "future": lambda producer: producer.send_async("T", b"x", sharding_key="k").result(60),
    "selector": lambda producer: producer.send("T", b"x", selector=lambda queues, _: queues[0]),
    "recall": lambda producer: producer.recall("T", HANDLE),
}


@pytest.mark.parametrize("call", CALLS_OUTSIDE_OF_LINES.values(), ids=CALLS_OUTSIDE_OF_LINES)
def test_close_waits_for_calls_of_other_threads(cluster: FakeCluster, call: Callable[[Producer], object]) -> None:
    transport, ended = HeldTransport(cluster), list[str]()
    producer = Producer(transport=transport)

    def calls() -> None:
        call(producer)
        ended.append("call")

    def closes() -> None:
        producer.close()
        ended.append("close")

    calling, closing = threading.Thread(target=calls), threading.Thread(target=closes)
    calling.start()
    assert transport.arrived.wait(60)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "it waits"
    transport.open.set()
    calling.join(60)
    closing.join(60)
    assert sorted(ended) == ["call", "close"]


def test_close_waits_for_a_body_that_is_compressed(cluster: FakeCluster) -> None:
    compresses, goes_on = threading.Event(), threading.Event()
    producer = Producer(transport=FakeSyncTransport(cluster), compression="zlib", compress_over_bytes=10)

    def slowly(body: bytes, _: Callable[[], None]) -> bytes:
        compresses.set()
        assert goes_on.wait(60)
        return body[:5]

    producer._core.compressor = producer._core.compressor._replace(compress=slowly)
    sending = threading.Thread(target=producer.send, args=("T", bytes(1000)))
    sending.start()
    assert compresses.wait(60)
    closing = threading.Thread(target=producer.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "it waits"
    goes_on.set()
    closing.join(60)
    sending.join(60)
    assert cluster.bodies() == [bytes(5)]


def test_close_does_not_wait_for_calls_longer_than_it_is_told(cluster: FakeCluster) -> None:
    transport = HeldTransport(cluster)
    producer = Producer(transport=transport)
    calling = threading.Thread(target=producer.send_batch, args=("T", [b"x"]))
    calling.start()
    assert transport.arrived.wait(60)
    began_s = time.monotonic()
    producer.close(0)
    assert time.monotonic() - began_s < 1.0
    transport.open.set()
    calling.join(60)


def test_a_hook_that_closes_the_producer_does_not_wait_for_its_own_call(cluster: FakeCluster) -> None:
    class Closes(Hook):
        def before_send(self, context: SendContext) -> None:
            began_s = time.monotonic()
            producer.close()
            took_s.append(time.monotonic() - began_s)

    took_s: list[float] = []
    producer = Producer(transport=FakeSyncTransport(cluster), hooks=[Closes()], send_timeout_s=60.0)
    producer.send_batch("T", [b"x"])
    assert took_s[0] < 10.0


def test_a_close_that_was_interrupted_is_finished_by_the_next_one(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(transport=FakeSyncTransport(cluster))
    interrupts, closes = iter([KeyboardInterrupt]), []

    def close() -> None:
        for error in interrupts:
            raise error
        closes.append("requests")

    monkeypatch.setattr(producer._requests, "close", close)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    assert not closes
    producer.close()
    producer.close()
    assert closes == ["requests"]


def test_close_fails_what_it_cannot_send_in_time(cluster: FakeCluster) -> None:
    gate = Gate(cluster)
    producer = Producer(transport=FakeSyncTransport(cluster))
    futures = [producer.send_async("T", b"%d" % i) for i in range(3)]
    assert gate.arrived.wait(60)
    with pytest.warns(RuntimeWarning, match="3 messages of send_async .*ClosedError"):
        producer.close(timeout_s=0.01)
    assert all(isinstance(future.exception(10), ClosedError) for future in futures[1:])
    gate.open.set()
    assert futures[0].result(10).status is SendStatus.SEND_OK


@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # It has threads; the child only sends.
def test_a_forked_child_is_another_producer(cluster: FakeCluster, producer: Producer) -> None:
    producer.send("T", b"x")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            result = producer.send("T", b"y")
            os.write(
                writer, f"{producer.producer_id} {decode_message_id(result.message_id)[2]}".encode()
            )
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    child_id, sequence = os.read(reader, 100).split()
    os.close(reader)
    os.close(writer)
    assert int(child_id) != producer.producer_id
    assert int(sequence) == 0


def test_values_are_encoded_on_every_way_of_sending_and_hooks_see_bytes(cluster: FakeCluster) -> None:
    seen: list[tuple[object, object]] = []

    class Looks(Hook):
        def before_send(self, context: SendContext) -> None:
            seen.extend((message.body, message.properties) for message in context.messages)

    ways = {"content-type": "application/json"}
    queue = MessageQueue("T", "a", 0)
    for hooks in ((), [Looks()]):
        with Producer(transport=FakeSyncTransport(cluster), hooks=hooks) as producer:
            producer.send("T", {"n": 1}, queue=queue)
            producer.send("T", {"n": 2}, queue=queue, delay=None, selector=None, properties={"a": "b"})
            producer.send(OutgoingMessage("T", {"n": 3}, queue=queue))
            producer.send_async("T", {"n": 4}, queue=queue).result()
            producer.send_one_way("T", {"n": 5}, queue=queue)
            producer.send_batch("T", [{"n": 6}, b"raw", "text"], queue=queue)
    bodies = [*(b'{"n":%d}' % number for number in range(1, 7)), b"raw", b"text"]
    assert cluster.stored() == {("a", 0): bodies * 2}
    assert [body for body, _ in seen] == bodies
    assert [said for _, said in seen[:3]] == [ways, {**ways, "a": "b"}, ways]
    assert seen[6][1] is None


@pytest.mark.parametrize("client", [Producer, AsyncProducer])
def test_what_is_passed_on_to_send_is_what_send_takes(client: type) -> None:
    taken = inspect.signature(client.send, eval_str=False).parameters.values()  # type: ignore[attr-defined]
    named = {one.name for one in taken if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert named == set(SendSettings.__annotations__)
