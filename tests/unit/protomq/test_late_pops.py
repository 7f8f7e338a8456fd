"""Answers to pops that come when their `receive` is over: the next one takes them, or they are given back. Calls are fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from protomq import AsyncSimpleConsumer, SimpleConsumer, _late_pops, _methods
from protomq._async_steps import AsyncDriver
from protomq._async_transport import AsyncTransport
from protomq._steps import CallServer, Driver
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import UnknownMethodError
from protomq.v1.pop_service_pb2 import (
    ChangeInvisibleRequest,
    ChangeInvisibleResponse,
    GiveUpPopRequest,
    PopRequest,
)
from tests.support.fake_driver import address_of, route_of

from .test_pop_steps import Brokers, answer_of

LONG_S = 30.0


def request(**fields: Any) -> Sequence[bytes]:
    found = {"consumer_group": "group", "topic": "T", "record_count_max": 32, "size_max_bytes": 4 << 20, "invisible_ms": 60_000, **fields}
    return (PopRequest(**found).SerializeToString(),)


def test_a_receive_takes_what_came_late_for_the_one_before_and_asks_nobody() -> None:
    brokers = Brokers("a", "b")
    late = brokers.steps.keep_late(request(hold_ms=9_000, record_count_max=7), "b", answer_of([b"late"]))
    assert late is not None
    assert [(message.body, message.queue.broker_name) for message in brokers.receive()] == [(b"late", "b")]
    assert brokers.asked == []
    assert late.over.is_set()
    brokers.run(brokers.steps.give_back_kept(late))
    assert brokers.given_back == []


def test_a_broker_whose_late_messages_are_taken_is_asked_again_by_the_next_receive() -> None:
    brokers = Brokers("a", "b")
    brokers.silent = {"a"}
    brokers.messages["b"] = [b"1", b"2", b"3", b"4"]
    for _ in range(2):
        assert len(brokers.receive()) == 2
    assert "a" in brokers.steps._rests
    assert brokers.steps.keep_late(request(), "a", answer_of([b"late"])) is not None
    assert [message.body for message in brokers.receive()] == [b"late"]
    assert "a" not in brokers.steps._rests


@pytest.mark.parametrize("fields", [{"invisible_ms": 61_000}, {"tags": ["red"]}, {"fifo": True}, {"queue_id": 1}, {"topic": "U"}])
def test_what_came_late_for_another_wish_is_not_taken(fields: dict[str, Any]) -> None:
    brokers = Brokers("a", "b")
    late = brokers.steps.keep_late(request(**fields), "b", answer_of([b"late"]))
    assert late is not None
    assert brokers.receive() == []
    brokers.run(brokers.steps.give_back_kept(late))
    assert [given.unseen for given in brokers.given_back] == [True]


def test_what_came_late_beyond_the_count_is_given_back() -> None:
    brokers = Brokers("a", "b")
    for name in "ab":
        assert brokers.steps.keep_late(request(), name, answer_of([b"%d" % number for number in range(20)])) is not None
    assert len(brokers.receive()) == 32
    (given,) = brokers.given_back
    assert given.unseen
    assert sum(runs for each in given.messages for runs in each.offset_runs[1::2]) == 8


@pytest.mark.parametrize(("waited_s", "taken"), [(0.049, [b"late"]), (0.05, [])])
def test_what_came_late_is_not_taken_when_half_of_its_invisible_time_is_over(waited_s: float, taken: list[bytes]) -> None:
    brokers = Brokers("a", "b")
    late = brokers.steps.keep_late(request(invisible_ms=100), "b", answer_of([b"late"]))
    assert late is not None
    brokers.clock.now_s += waited_s
    assert [message.body for message in brokers.receive(invisible_s=0.1)] == taken
    brokers.run(brokers.steps.give_back_kept(late))
    assert [given.unseen for given in brokers.given_back] == [True] * (not taken)


def test_what_came_late_waits_no_longer_than_half_of_its_invisible_time() -> None:
    steps = Brokers("a", "b").steps
    kept = [steps.keep_late(request(invisible_ms=each), "b", answer_of([b"late"])) for each in (0, 300, 60_000)]
    assert [late.kept_s for late in kept if late is not None] == [0.2, 0.15, 0.2], "0: the time of the broker, a minute"


def test_an_answer_without_messages_is_not_kept() -> None:
    steps = Brokers("a", "b").steps
    assert steps.keep_late(request(), "a", answer_of([])) is None
    assert steps.keep_late(request(), "a", b"\xff") is None
    assert not steps.late


class _Told:
    """In place of a transport: who was told what of messages that nobody has seen."""

    def __init__(self) -> None:
        self.given_back: list[str] = []
        self.is_told = asyncio.Event()

    def call(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, **_: Any) -> bytes:
        assert method is _methods.CHANGE_INVISIBLE
        assert ChangeInvisibleRequest.FromString(b"".join(payload)).unseen
        self.given_back.append(address.broker_name)
        self.is_told.set()
        data: bytes = ChangeInvisibleResponse().SerializeToString()
        return data

    def get(self, topic: str, timeout_s: float) -> Any:
        return route_of(topic, "a", "b")


def test_from_threads_nobody_keeps_what_came_late_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_late_pops, "KEPT_S", 0.0)
    told, consumer = _Told(), SimpleConsumer("group", namesrv="127.0.0.1:1")
    consumer._driver = Driver(told, told)  # type: ignore[arg-type]
    consumer._came_late(CallServer(address_of("b"), _methods.POP, request(), 1.0), answer_of([b"late"]))
    assert told.given_back == ["b"]


def test_from_threads_a_close_gives_back_at_once_what_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_late_pops, "KEPT_S", LONG_S)
    told, consumer = _Told(), SimpleConsumer("group", namesrv="127.0.0.1:1")
    consumer._driver = Driver(told, told)  # type: ignore[arg-type]
    call = CallServer(address_of("b"), _methods.POP, request(), 1.0)
    keeping = threading.Thread(target=consumer._came_late, args=(call, answer_of([b"late"])))
    keeping.start()
    consumer.close()
    keeping.join(LONG_S / 2)
    assert told.given_back == ["b"]


class _AsyncTold(AsyncTransport):
    def __init__(self, told: _Told) -> None:
        super().__init__()
        self._told = told

    async def call(self, *arguments: Any, **options: Any) -> bytes:
        return self._told.call(*arguments, **options)


async def _kept_by_coroutines(told: _Told) -> AsyncSimpleConsumer:
    consumer = AsyncSimpleConsumer("group", namesrv="127.0.0.1:1")

    class Routes:
        async def get(self, topic: str, timeout_s: float) -> Any:
            return told.get(topic, timeout_s)

    consumer._driver = AsyncDriver(_AsyncTold(told), Routes())  # type: ignore[arg-type]
    consumer._came_late(address_of("b"), request(), answer_of([b"late"]))
    return consumer


async def test_in_coroutines_nobody_keeps_what_came_late_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_late_pops, "KEPT_S", 0.0)
    told = _Told()
    consumer = await _kept_by_coroutines(told)
    await asyncio.wait_for(told.is_told.wait(), LONG_S)
    assert told.given_back == ["b"]
    await consumer.close()


async def test_in_coroutines_a_close_gives_back_at_once_what_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_late_pops, "KEPT_S", LONG_S)
    told = _Told()
    consumer = await _kept_by_coroutines(told)
    await consumer.close()
    assert told.given_back == ["b"]


class _Link:
    """In place of a channel: hears which pops are given up, and fails if it is to."""

    def __init__(self, failure: Exception | None) -> None:
        self.given_up: list[bytes] = []
        self.is_told = asyncio.Event()
        self._failure = failure

    async def call(self, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, one_way: bool) -> bytes:
        assert method is _methods.GIVE_UP_POP
        self.given_up.append(GiveUpPopRequest.FromString(b"".join(payload)).hold_id)
        self.is_told.set()
        if self._failure is not None:
            raise self._failure
        return b""


HOLD_ID = b"0123456789abcdef"


@pytest.mark.parametrize("failure", [None, UnknownMethodError("unknown method")])
@pytest.mark.parametrize("hold_ms", [0, 9_000])
async def test_over_grpc_a_pop_goes_on_when_its_caller_is_cancelled_and_the_broker_hears_of_it(
    hold_ms: int, failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC drops the answer to a call that is cancelled, even if it is here. A broker of an earlier version cannot end the hold."""
    transport, link, answer = AsyncTransport(), _Link(failure), asyncio.get_running_loop().create_future()
    monkeypatch.setattr(transport, "_grpc_link", lambda address: link)
    late: list[bytes] = []
    transport.is_replaced = lambda address, silent_s: False
    transport.on_late = lambda address, payload, data: late.append(data)

    async def call() -> bytes:
        data: bytes = await answer
        return data

    payload = request(hold_ms=hold_ms, hold_id=HOLD_ID) if hold_ms else request()
    task = asyncio.create_task(transport._watched(address_of("b"), _methods.POP, payload, call()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (left,) = transport._late
    if hold_ms:
        await asyncio.wait_for(link.is_told.wait(), LONG_S)
    is_cancelled = bool(hold_ms and failure)
    if not is_cancelled:
        answer.set_result(b"messages")
    await asyncio.wait((left,))
    await asyncio.sleep(0)
    assert answer.cancelled() is is_cancelled, "what is held would take what comes later"
    assert late == ([] if is_cancelled else [b"messages"])
    assert link.given_up == ([HOLD_ID] if hold_ms else [])
