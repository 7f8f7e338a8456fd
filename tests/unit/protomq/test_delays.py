"""Delays in the SDK: what of them goes over the wire, what is refused, and the handles of messages that went together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq import AsyncProducer, DelayLevel, OutgoingMessage, Producer
from protomq._batching import RecordEncoder
from protomq._delays import When, broker_of_handle, delay_flags, when_of
from protomq._lines import LINES_MAX
from protomq._methods import RECALL_MESSAGE, SEND
from protomq._one_way_failures import OneWayFailures
from protomq._outgoing import DelayedPlaces
from protomq._send_steps import recall
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    IllegalDelayError,
    NoRouteError,
    NotMasterError,
    RequestTimeoutError,
    TopicNotFoundError,
    WrongTypeError,
)
from protomq.v1.send_service_pb2 import RecallMessageResponse, SendRequest
from protomq.wire.recall_handle import RecallHandle, decode_handle, encode_handle
from protomq.wire.record import FLAG_DUE_TIME, encode_record_field
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport
from tests.support.fake_driver import FakeWorld, route_of

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_893_499_200_000


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"T": {"a": 1}})


@pytest.fixture
def producer(cluster: FakeCluster) -> Iterator[Producer]:
    with Producer(transport=FakeSyncTransport(cluster)) as producer:
        yield producer


def said(request: SendRequest) -> tuple[str | None, int, list[int]]:
    """Which delay the request has, its value, and the due times of its records."""
    which = request.WhichOneof("delay")
    value = getattr(request, which) if which else 0
    return which, value, [record.due_time_ms for record in request.records]


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (DelayLevel(3), ("delay_level", 3)),
        (5, ("delay_ms", 5_000)),
        (0.0101, ("delay_ms", 11)),
        (0, ("delay_ms", 0)),
        (timedelta(days=40), ("delay_ms", 40 * 86_400_000)),
    ],
)
def test_a_delay_is_counted_by_the_broker(
    cluster: FakeCluster, producer: Producer, delay: Any, expected: tuple[str, int]
) -> None:
    result = producer.send("T", b"x", delay=delay, key="k")
    request = cluster.calls[0].request
    assert said(request) == (*expected, [0])
    assert request.records[0].flags == FLAG_DUE_TIME
    assert result.queue_offset == -1


def test_a_time_stands_in_the_record(cluster: FakeCluster, producer: Producer) -> None:
    producer.send("T", b"x", deliver_at=NOON + timedelta(microseconds=1))
    producer.send("T", b"x", deliver_at=datetime(1960, 1, 1, tzinfo=UTC))
    assert said(cluster.calls[0].request) == (None, 0, [NOON_MS + 1])
    assert said(cluster.calls[1].request) == (None, 0, [1])


@given(
    st.lists(
        st.tuples(st.binary(max_size=200), st.text("abc", max_size=3), st.none() | st.integers(0, 2**63 - 1)),
        min_size=1,
        max_size=6,
    )
)
def test_delayed_records_are_those_that_protobuf_writes(
    messages: list[tuple[bytes, str, int | None]],
) -> None:
    encoder = RecordEncoder("topic", 7, 1)
    records = [
        (body, "", tag, b"\x1a%c%b" % (len(tag), tag.encode()) if tag else b"",
         0 if due is None else delay_flags(When(b"", due)), 5, 0)
        for body, tag, due in messages
    ]  # fmt: skip
    (payload,) = encoder.encode_request(records, 0, 0)
    request = SendRequest.FromString(payload)
    assert request.SerializeToString(deterministic=True) == payload
    for record, (body, tag, due) in zip(request.records, messages, strict=True):
        assert (record.body, record.tag) == (body, tag)
        assert (record.due_time_ms if record.HasField("due_time_ms") else None) == due
        assert bool(record.flags & FLAG_DUE_TIME) == (due is not None)
    fields = [encode_record_field(record.SerializeToString(deterministic=True)) for record in request.records]
    assert encoder.field_sizes(records) == list(map(len, fields))


@pytest.mark.parametrize("way", ["send", "send_async", "send_one_way"])
def test_every_way_to_send_takes_a_delay(
    cluster: FakeCluster, producer: Producer, way: str
) -> None:
    tomorrow = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    getattr(producer, way)("T", b"x", delay=DelayLevel(1))
    getattr(producer, way)(OutgoingMessage("T", b"x", deliver_at=tomorrow))
    producer.flush()
    asked = sorted(said(call.request)[1:] for call in cluster.calls)
    assert asked == [(0, [int(tomorrow.timestamp()) * 1000]), (1, [0])]


async def test_coroutines_that_delay_alike_share_requests(cluster: FakeCluster) -> None:
    import asyncio

    async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
        sends = [producer.send("T", b"%d" % n, delay=5 + n % 2) for n in range(10)]
        sends += [producer.send("T", b"x", deliver_at=NOON + timedelta(hours=n)) for n in range(5)]
        sends.append(producer.send("T", b"at once"))
        results = await asyncio.gather(*sends)
    assert [result.queue_offset < 0 for result in results] == [True] * 15 + [False]
    counts = sorted((said(call.request)[:2], len(call.request.records)) for call in cluster.calls if said(call.request)[0])
    assert counts == [(("delay_ms", 5000), 5), (("delay_ms", 6000), 5)]
    plain = [len(call.request.records) for call in cluster.calls if not said(call.request)[0]]
    assert sorted(plain) == [1, 5]


def test_a_batch_has_a_delay_and_its_messages_may_have_their_own(
    cluster: FakeCluster, producer: Producer
) -> None:
    result = producer.send_batch(
        "T",
        [
            b"by the batch",
            OutgoingMessage("T", b"too"),
            OutgoingMessage("T", b"own", delay=9),
            OutgoingMessage("T", b"at one time", deliver_at=NOON),
            OutgoingMessage("T", b"at another", deliver_at=NOON + timedelta(seconds=1)),
        ],
        delay=DelayLevel(2),
    )
    assert [said(call.request) for call in cluster.calls] == [
        ("delay_level", 2, [0, 0]),
        ("delay_ms", 9_000, [0]),
        (None, 0, [NOON_MS, NOON_MS + 1_000]),
    ]
    assert [one.queue_offset for one in result] == [-1] * 5
    producer.send_batch("T", [b"bodies", b"alone"], delay=1)
    assert said(cluster.calls[-1].request) == ("delay_ms", 1_000, [0, 0])
    producer.send_batch("T", [b"keyed"], keys=["k"], tags="t", deliver_at=NOON)
    assert said(cluster.calls[-1].request) == (None, 0, [NOON_MS])


@pytest.mark.parametrize(
    ("delay", "deliver_at", "error"),
    [
        (5, NOON, ConfigurationError),
        (-1, None, ConfigurationError),
        (math.nan, None, ConfigurationError),
        (timedelta(seconds=-1), None, ConfigurationError),
        (DelayLevel(0), None, ConfigurationError),
        (DelayLevel(1 << 31), None, ConfigurationError),
        (True, None, WrongTypeError),
        ("5s", None, WrongTypeError),
        (NOON, None, WrongTypeError),
        (None, 5, WrongTypeError),
        (None, NOON.replace(tzinfo=None), ConfigurationError),
    ],
)
def test_what_is_no_delay_is_refused(
    cluster: FakeCluster, producer: Producer, delay: Any, deliver_at: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        producer.send("T", b"x", delay=delay, deliver_at=deliver_at)
    with pytest.raises(error):
        producer.send_batch("T", [b"x"], delay=delay, deliver_at=deliver_at)
    with pytest.raises(error):
        producer.send_batch("T", [OutgoingMessage("T", b"x", delay=delay, deliver_at=deliver_at)])
    assert not cluster.calls
    assert when_of(None, None) is None


def test_delays_beside_a_message_are_refused_as_all_else_is(producer: Producer) -> None:
    with pytest.raises(ConfigurationError, match="delay"):
        producer.send(OutgoingMessage("T", b"x"), delay=5)


def test_many_different_delays_leave_no_lines_behind(producer: Producer) -> None:
    for at in range(LINES_MAX + 10):
        producer.send("T", b"x", delay=at / 1000)
    assert len(producer._lines) < LINES_MAX


HANDLE = encode_handle(RecallHandle("a", 1, NOON_MS, (7, 1, 0)))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_recall_waits_for_the_broker_of_its_message_as_long_as_its_time_out_allows(is_async: bool) -> None:
    cluster = FakeCluster({"T": {"a": 4, "b": 4}})

    async def ask() -> bool:
        async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as other:
            return await other.recall("T", HANDLE)

    def ask_either() -> bool:
        if is_async:
            return asyncio.run(ask())
        with Producer(transport=FakeSyncTransport(cluster)) as one:
            return one.recall("T", HANDLE)

    # The old master is gone; the new one is no master yet.
    cluster.fail("a", RECALL_MESSAGE, ConnectFailedError("gone"), *(NotMasterError("a slave") for _ in range(4)))
    assert not ask_either()
    assert cluster.tries("a", RECALL_MESSAGE) == 6
    assert cluster.tries("b", RECALL_MESSAGE) == 0, "only one broker has the message"
    assert cluster.route_calls >= 2, "where the master is now"


def test_a_recall_is_told_at_once_that_there_is_no_such_topic() -> None:
    route_calls = []
    for call in (lambda one: one.send("nope", b""), lambda one: one.recall("nope", HANDLE)):
        cluster = FakeCluster({"T": {"a": 4}})
        with Producer(transport=FakeSyncTransport(cluster)) as one, pytest.raises(TopicNotFoundError):
            call(one)
        route_calls.append(cluster.route_calls)
    assert route_calls[0] == route_calls[1], "as by a send"


def test_a_handle_that_was_cut_is_refused_or_its_broker_is_named() -> None:
    whole = encode_handle(RecallHandle("day", 1, NOON_MS, (7, 1, 0)))
    for cut in (whole[:-4], whole[:-1]):
        with pytest.raises(ValueError, match="not a handle"):
            decode_handle(cut)
    assert decode_handle(whole + "=").broker_name == "day"
    with (
        Producer(transport=FakeSyncTransport(FakeCluster({"T": {"day": 4}})), send_timeout_s=0.1) as one,
        pytest.raises(NoRouteError, match=r"the handle names broker 'd', .* 'T': it is away, or the handle is cut short"),
    ):
        one.recall("T", encode_handle(RecallHandle("d", 1, NOON_MS, (7, 1, 0))))


class RecallWorld(FakeWorld):
    """Broker "a", which takes the message back once; a clock that stands but for calls and pauses."""

    def __init__(self) -> None:
        super().__init__(route_of("T", "a", "b"), call_takes_s=0.01)
        self.is_pending = True
        self.remembers = True
        self.answers[RECALL_MESSAGE] = self._recall
        self.clock = self.now_s

    def _recall(self, server: str, request: bytes) -> bytes:
        assert server == "a"
        was_pending, self.is_pending = self.is_pending, False
        return RecallMessageResponse(recalled=was_pending, recalled_before=self.remembers and not was_pending).SerializeToString()

    def recall(self) -> bool:
        return bool(self.driver.run(recall(cast(Any, self), "T", HANDLE, self.now_s() + 3.0)))


@pytest.fixture
def recalls() -> RecallWorld:
    return RecallWorld()


def test_a_recall_that_did_not_arrive_is_made_again(recalls: RecallWorld) -> None:
    recalls.failures["a"].append(ConnectionLostError("on the way there"))
    assert recalls.recall()
    assert len(recalls.calls) == 2


def lose_one_answer(recalls: RecallWorld) -> ConnectionLostError:
    answer, lost = recalls._recall, ConnectionLostError("on the way back")

    def lose_one(server: str, request: bytes) -> bytes:
        recalls.answers[RECALL_MESSAGE] = answer
        answer(server, request)
        raise lost

    recalls.answers[RECALL_MESSAGE] = lose_one
    return lost


def test_a_recall_whose_answer_was_lost_has_won_if_the_broker_knows_it(recalls: RecallWorld) -> None:
    lose_one_answer(recalls)
    assert recalls.recall()
    assert len(recalls.calls) == 2
    assert not recalls.recall(), "this call did not take it back"


def test_a_recall_whose_answer_was_lost_is_never_told_to_have_come_too_late(recalls: RecallWorld) -> None:
    """By a broker of an earlier version, or one that has forgotten it."""
    recalls.remembers = False
    lost = lose_one_answer(recalls)
    with pytest.raises(ConnectionLostError) as caught:
        recalls.recall()
    assert (caught.value, caught.value.definite, len(recalls.calls)) == (lost, False, 2)
    assert not recalls.recall()


def test_what_ends_a_recall_whose_answer_was_lost_is_not_definite(recalls: RecallWorld) -> None:
    recalls.failures["a"] += [ConnectionLostError("on the way"), *(NotMasterError("a slave") for _ in range(40))]
    with pytest.raises(NotMasterError) as caught:
        recalls.recall()
    assert not caught.value.definite
    assert 6 <= len(recalls.calls) <= 12


def test_a_recall_looks_for_the_next_master_while_the_old_one_is_silent(recalls: RecallWorld) -> None:
    call, timeouts_s = recalls.call, list[float]()

    def be_silent_once(address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float) -> bytes:
        timeouts_s.append(timeout_s)
        if len(timeouts_s) == 1:
            recalls.advance(timeout_s)
            raise RequestTimeoutError("a stopped process")
        return call(address, method, payload, timeout_s)

    recalls.call = be_silent_once  # type: ignore[method-assign,assignment]
    assert recalls.recall()
    assert len(timeouts_s) == 2
    assert timeouts_s[0] == pytest.approx(1.5, abs=0.1)
    assert recalls.forgotten == ["T"]


handles = st.builds(
    RecallHandle,
    st.text(max_size=20),
    st.integers(0, 2**63),
    st.integers(0, 2**63),
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**62)),
)


@given(handles)
def test_a_handle_comes_back_as_it_was(handle: RecallHandle) -> None:
    text = encode_handle(handle)
    assert decode_handle(text) == handle
    assert broker_of_handle(text) == handle.broker_name


@given(st.text(max_size=80))
def test_what_is_no_handle_is_refused_and_breaks_nothing(text: str) -> None:
    try:
        decode_handle(text)
    except ValueError:
        with pytest.raises(ConfigurationError):
            broker_of_handle(text)


def test_messages_that_went_together_have_handles_of_their_own() -> None:
    first = RecallHandle("a", 1_000, 77, (5, 0, 30))
    places = DelayedPlaces(encode_handle(first), [100, 200, 300], [0, 0, 99])
    found = [decode_handle(places.handle(index)) for index in range(3)]
    assert found == [
        first,
        RecallHandle("a", 1_100, 77, (5, 0, 31)),
        RecallHandle("a", 1_300, 99, (5, 0, 32)),
    ]
    assert DelayedPlaces("", [1, 1], [0, 0]).handle(1) == ""


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"delay": timedelta(days=40, seconds=1)}, "delay is 0 seconds to 40 days, not 3456001.0"),
        ({"deliver_at": datetime.now(UTC) + timedelta(days=41)}, "deliver_at is 40 days ahead at most"),
        ({"delay": DelayLevel(0)}, "level of a delay"),
    ],
)
def test_a_one_way_message_is_refused_here_as_far_as_that_is_known_here(
    cluster: FakeCluster, producer: Producer, settings: dict[str, Any], text: str
) -> None:
    async def send() -> None:
        async with AsyncProducer(transport=FakeAsyncTransport(cluster)) as producer:
            await producer.send_one_way("T", b"x", **settings)

    for refused in (lambda: producer.send_one_way("T", b"x", **settings), lambda: asyncio.run(send())):
        with pytest.raises(ConfigurationError, match=text):
            refused()
    assert not cluster.calls
    producer.send_one_way("T", b"x", delay=timedelta(days=40))
    producer.send_one_way("T", b"x", deliver_at=datetime.now(UTC) + timedelta(days=39))
    assert [call.one_way for call in cluster.calls] == [True, True]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"deliver_at": "noon"}, WrongTypeError),
        ({"deliver_at": datetime(1, 1, 1)}, ConfigurationError),  # noqa: DTZ001
        ({"deliver_at": NOON, "delay": 1}, ConfigurationError),
    ],
)  # fmt: skip
def test_what_is_no_time_of_a_one_way_message_is_refused_as_that_of_any_other(
    cluster: FakeCluster, producer: Producer, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as one_way:
        producer.send_one_way("T", b"x", **settings)
    with pytest.raises(error) as awaited:
        producer.send("T", b"x", **settings)
    assert str(one_way.value) == str(awaited.value)
    assert not cluster.calls


def test_refused_one_way_calls_are_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times_s = [0.0, 1.0, 2.0, 60.0, 61.0, 62.0]
    failures = OneWayFailures("a:1", lambda: times_s.pop(0))
    said: list[str] = []
    while times_s:
        failures.note(SEND, IllegalDelayError("no level 99"))
        said += [record.getMessage() for record in caplog.records]
        caplog.clear()
    failures.close()
    said += [record.getMessage() for record in caplog.records]
    counts = ["a one-way call of", "3 one-way calls of", "2 one-way calls of"]
    assert [text.split(" /")[0] for text in said] == counts
    assert "no level 99" in said[0]
    assert said[2].endswith("ILLEGAL_DELAY")
