"""Requests and replies without a broker: what the caller tells it, which call gets which reply, what a reply needs."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from protomq import _methods
from protomq._message import Message
from protomq._request_calls import RequestCalls
from protomq._requests import (
    CALLER_WAIT_S,
    HOLD_S,
    PAUSE_MIN_S,
    Reply,
    ReplyInbox,
    brokers_for,
    check_request,
    follow_steps,
    listen_steps,
    queue_at,
    reply_steps,
    reply_timeout_s,
    reply_to_of,
)
from protomq._steps import CallServer, Driver, Effect, ForgetRoute, GetRoute, Pause
from protomq._types import BrokerAddress, MessageQueue, Route
from protomq.body_codecs import CONTENT_TYPE
from protomq.errors import (
    CallerGoneError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    NoRouteError,
    NotMasterError,
    ProtomqError,
    RequestTimeoutError,
    SchemaError,
    TopicNotFoundError,
    WrongTypeError,
)
from protomq.v1 import reply_service_pb2 as pb
from protomq.wire.record import RecordTemplate, encode_front
from tests.support.fake_driver import FakeWorld

ADDRESS = BrokerAddress("b", "127.0.0.1:1", "127.0.0.1:2")
QUEUE = MessageQueue("t", "b", 0)
ROUTE = Route("t", (QUEUE,), (QUEUE,), {"b": ADDRESS}, ("b",))


def told(call: CallServer) -> pb.WaitForRepliesRequest:
    assert call.method is _methods.WAIT_FOR_REPLIES
    assert call.address == ADDRESS
    return pb.WaitForRepliesRequest.FromString(b"".join(call.payload))


def answer(*replies: tuple[int, str, bytes]) -> bytes:
    response = pb.WaitForRepliesResponse()
    for reply_id, call_id, body in replies:
        waiting = response.replies.add(reply_id=reply_id)
        waiting.reply.call_id, waiting.reply.body = call_id, body
    return response.SerializeToString()


def next_call(steps: Generator[Any, Any, Any], outcome: Any = None) -> CallServer:
    """The next call of the steps, which have the route looked up before it."""
    effect = steps.send(outcome)
    assert effect[0] == "t"
    assert isinstance(effect, GetRoute)
    call = steps.send(ROUTE)
    assert isinstance(call, CallServer)
    return call


def begun(inbox: ReplyInbox) -> tuple[str, Future[Any]]:
    future: Future[Any] = Future()
    return inbox.begin(future), future


def test_a_call_gets_its_reply_and_the_broker_is_told_with_the_next_call() -> None:
    inbox = ReplyInbox("t", "b")
    call_id, future = begun(inbox)
    steps = follow_steps(inbox, lambda: inbox.is_needed)
    first = told(next_call(steps))
    assert first.caller_id == inbox.caller_id
    assert (first.hold_ms, list(first.received_reply_ids)) == (HOLD_S * 1000, [])
    second = told(next_call(steps, answer((7, call_id, b"yes"), (8, call_id, b"again"), (9, "old", b"late"))))
    assert future.result(0)[0] == b"yes"
    assert list(second.received_reply_ids) == [7, 8]
    assert list(second.unwanted_reply_ids) == [9]
    with pytest.raises(StopIteration):  # All was said, and nobody waits.
        steps.send(answer())


def test_what_was_received_is_said_again_after_a_call_that_failed() -> None:
    inbox = ReplyInbox("t", "b")
    call_id, _ = begun(inbox)
    steps = follow_steps(inbox, lambda: inbox.is_needed)
    next_call(steps)
    next_call(steps, answer((1, call_id, b"")))
    assert steps.throw(ConnectionLostError("cut")) == ForgetRoute("t")
    pause = next(steps)
    assert pause == Pause(PAUSE_MIN_S)
    assert list(told(next_call(steps)).received_reply_ids) == [1]


@pytest.mark.parametrize("error", [ConnectionLostError("cut"), RequestTimeoutError("silent"), NotMasterError("a slave")])
def test_a_held_call_that_finds_no_master_has_the_route_looked_up_again(error: ProtomqError) -> None:
    inbox = ReplyInbox("t", "b")
    begun(inbox)
    steps = follow_steps(inbox, lambda: inbox.is_needed)
    call = next_call(steps)
    assert call.timeout_s < CALLER_WAIT_S, "a broker waits that long for a caller that has not come yet"
    assert steps.throw(error) == ForgetRoute("t")
    assert next(steps) == Pause(PAUSE_MIN_S)


class Listening:
    """A caller that makes itself known, by a clock that the test moves. Attribute: inboxes, by broker."""

    def __init__(self, route: Route, timeout_s: float, followed: Collection[str] = ()) -> None:
        self.now_s = 0.0
        self.inboxes: dict[str, ReplyInbox] = {}
        self._followed = followed
        self.steps = listen_steps(route, self.inboxes, self._inbox_at, timeout_s, lambda: self.now_s)

    def _inbox_at(self, topic: str, broker_name: str) -> tuple[ReplyInbox, bool]:
        inbox = self.inboxes.setdefault(broker_name, ReplyInbox(topic, broker_name))
        return inbox, broker_name in self._followed

    def failed(self, error: ProtomqError) -> None:
        """The call, or the look-up: what comes next is another look-up, after a pause."""
        self.paused(self.steps.throw(error))

    def paused(self, effect: Effect) -> None:
        """By this effect the route is forgotten."""
        assert effect == ForgetRoute("t")
        pause = next(self.steps)
        assert isinstance(pause, Pause)
        self.now_s += pause.seconds
        assert isinstance(next(self.steps), GetRoute)

    def found(self, answer: bytes) -> ReplyInbox:
        """What the steps return."""
        with pytest.raises(StopIteration) as ended:
            self.steps.send(answer)
        inbox: ReplyInbox = ended.value.value
        return inbox


SLAVES = Route("t", (), (QUEUE,), {"b": ADDRESS}, (), leaderless_brokers=("b",), is_write_permitted=False)


@pytest.mark.parametrize("error", [ConnectionLostError("cut"), RequestTimeoutError("silent"), NotMasterError("a slave")])
def test_a_caller_that_finds_no_master_looks_for_the_next_one(error: ProtomqError) -> None:
    listening = Listening(ROUTE, 20.0)
    assert told(next_call(listening.steps)).hold_ms == 0
    listening.failed(error)
    # Meanwhile the name server knows slaves only.
    listening.paused(listening.steps.send(SLAVES))
    assert isinstance(listening.steps.send(ROUTE), GetRoute)
    call = listening.steps.send(ROUTE)
    assert isinstance(call, CallServer)
    assert call.timeout_s <= 3.0, "a silent one leaves time for the next"
    assert listening.found(answer()) is listening.inboxes["b"]


def test_a_caller_looks_for_a_master_until_its_time_is_over() -> None:
    listening = Listening(ROUTE, 2.0)
    next_call(listening.steps)
    with pytest.raises(ConnectionLostError, match="cut"):  # noqa: PT012 - any of the tries may be the last.
        while True:
            assert listening.steps.throw(ConnectionLostError("cut")) == ForgetRoute("t")
            pause = next(listening.steps)
            assert isinstance(pause, Pause)
            listening.now_s += pause.seconds
            next(listening.steps)
            assert isinstance(listening.steps.send(ROUTE), GetRoute)
            listening.steps.send(ROUTE)
    assert 1.4 < listening.now_s < 2.0


def test_a_caller_does_not_wait_for_a_topic_that_is_not_there() -> None:
    listening = Listening(ROUTE, 20.0)
    next_call(listening.steps)
    assert listening.steps.throw(TopicNotFoundError("deleted")) == ForgetRoute("t", is_denied=True)
    with pytest.raises(TopicNotFoundError):
        next(listening.steps)
    listening = Listening(Route("t", (), (), {}, ()), 20.0)
    assert next(listening.steps) == ForgetRoute("t")
    with pytest.raises(NoRouteError, match="no queue that can be written"):
        next(listening.steps)


def test_a_caller_goes_to_another_broker_at_once_and_makes_itself_known_to_none_twice() -> None:
    route = Route("t", (), (), {"b": ADDRESS, "c": ADDRESS}, ("b", "c"))
    listening = Listening(route, 20.0)
    assert isinstance(next(listening.steps), GetRoute)
    assert isinstance(listening.steps.send(route), CallServer)
    first = next(iter(listening.inboxes))
    assert isinstance(listening.steps.throw(ConnectionLostError("cut")), GetRoute)
    assert isinstance(listening.steps.send(route), CallServer)
    assert listening.found(answer()).broker_name != first
    followed = Listening(ROUTE, 20.0, followed=["b"])
    with pytest.raises(StopIteration):
        next(followed.steps)


def test_a_call_that_ended_gets_nothing_any_more() -> None:
    inbox = ReplyInbox("t", "b")
    call_id, future = begun(inbox)
    inbox.end(call_id)
    steps = inbox.wait_steps(0, 1)
    next_call(steps)
    with pytest.raises(StopIteration):
        steps.send(answer((1, call_id, b"late")))
    assert not future.done()
    leaving = told(next_call(inbox.wait_steps(0, 1, leaves=True)))
    assert (leaving.leaves, list(leaving.unwanted_reply_ids)) == (True, [1])


def test_a_caller_whose_id_is_taken_takes_another_one_and_its_calls_fail() -> None:
    inbox = ReplyInbox("t", "b")
    before = inbox.caller_id
    _, future = begun(inbox)
    steps = follow_steps(inbox, lambda: True)
    next_call(steps)
    assert steps.throw(CallerGoneError("another one")) == GetRoute("t", 3.0)
    assert inbox.caller_id != before
    with pytest.raises(CallerGoneError):
        future.result(0)
    ids = {ReplyInbox("t", "b").caller_id for _ in range(100)}
    assert len(ids) == 100


def message(**properties: str) -> Message:
    record = RecordTemplate("t", 1, 1).encode(
        b"body", 1, 1, front=encode_front((), "", properties)
    )
    return Message.from_record(record, QUEUE, 5)


def test_a_reply_goes_to_the_broker_and_the_call_of_the_request() -> None:
    inbox = ReplyInbox("t", "b")
    asked = message(mine="x", **inbox.properties("call", 1.5))
    assert asked.properties["TTL"] == "1500"
    assert reply_to_of(asked) == ("t", "b", inbox.caller_id, "call")
    steps = reply_steps(asked, bytearray(b"yes"), {"a": "b"}, 3.0)
    call = next_call(steps)
    assert call.method is _methods.REPLY
    sent = pb.ReplyRequest.FromString(b"".join(call.payload))
    assert (sent.caller_id, sent.call_id, sent.body) == (inbox.caller_id, "call", b"yes")
    assert dict(sent.properties) == {"a": "b"}
    with pytest.raises(StopIteration):
        steps.send(b"")


GONE = CallerGoneError("waits for no reply any more")
PERHAPS_GONE = CallerGoneError("waits for no reply any more")
PERHAPS_GONE.definite = False


class Replying:
    """A reply whose broker answers when a test says so."""

    def __init__(self, timeout_s: float) -> None:
        self.now_s = 0.0
        asked = message(**ReplyInbox("t", "b").properties("call", 60.0))
        self._steps = reply_steps(asked, b"yes", None, timeout_s, lambda: self.now_s)
        self.call = next_call(self._steps)

    def refused(self, after_s: float, error: CallerGoneError) -> None:
        """The broker's answer to the call; then there is another one, or the error."""
        self.now_s += after_s
        effect = self._steps.throw(error)
        assert isinstance(effect, Pause)
        self.now_s += effect.seconds
        self.call = next_call(self._steps)

    def held_to_the_end(self, error: CallerGoneError) -> None:
        """Each call is answered when its time is nearly over, until the steps end."""
        while True:
            self.refused(self.call.timeout_s - min(0.1, self.call.timeout_s / 4), error)


@pytest.mark.parametrize("error", [GONE, PERHAPS_GONE])
def test_the_end_of_a_replys_own_time_does_not_say_that_its_caller_is_gone(error: CallerGoneError) -> None:
    replying = Replying(3.0)
    with pytest.raises(RequestTimeoutError, match="may come back") as caught:
        replying.held_to_the_end(error)
    assert not caught.value.definite
    assert replying.now_s == pytest.approx(3.0, abs=0.2)


def test_a_reply_looks_for_its_broker_each_half_second() -> None:
    world = FakeWorld(ROUTE)
    world.script.extend([ConnectionLostError("killed"), *[ConnectFailedError("restarts")] * 6])
    asked = message(**ReplyInbox("t", "b").properties("call", 60.0))
    world.driver.run(reply_steps(asked, b"yes", None, 15.0, world.now_s))
    assert world.pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5]


def test_a_caller_that_is_refused_at_once_is_gone() -> None:
    replying = Replying(3.0)
    with pytest.raises(CallerGoneError) as caught:
        replying.refused(0.01, GONE)
    assert caught.value.definite


@pytest.mark.parametrize(("first", "definite"), [(GONE, True), (PERHAPS_GONE, False)])
def test_a_caller_that_has_not_come_back_while_its_broker_waited_is_asked_for_once_more(first: CallerGoneError, definite: bool) -> None:
    replying = Replying(reply_timeout_s(3.0))
    replying.refused(10.0, first)
    assert replying.call.timeout_s == pytest.approx(5.0, abs=0.1)
    with pytest.raises(CallerGoneError) as caught:
        replying.refused(0.01, CallerGoneError("gone"))
    assert caught.value.definite is definite, "a reply that was given once may have reached its caller"


def test_values_are_encoded_in_replies_and_decoded_from_them() -> None:
    asked = message(**ReplyInbox("t", "b").properties("call", 1.5))
    call = next_call(reply_steps(asked, {"usd": 80}, {"a": "b"}, 3.0))
    sent = pb.ReplyRequest.FromString(b"".join(call.payload))
    reply = Reply(sent.body, dict(sent.properties), request=None)  # type: ignore[arg-type]
    assert (reply.body, reply.properties) == (b'{"usd":80}', {"a": "b", CONTENT_TYPE: "application/json"})
    assert reply.value(dict) == {"usd": 80}
    with pytest.raises(SchemaError, match="list: the JSON is a dict"):
        reply.value(list)


def test_what_is_no_request_gets_no_reply() -> None:
    with pytest.raises(ConfigurationError, match="asks for no reply"):
        reply_to_of(message(CORRELATION_ID="1"))
    with pytest.raises(WrongTypeError, match="Message"):
        reply_to_of(b"body")
    asked = message(**ReplyInbox("t", "b").properties("call", 1))
    with pytest.raises(WrongTypeError, match="bytes"):
        next(reply_steps(asked, 5, None, 1.0))
    with pytest.raises(ConfigurationError, match="REPLY_TO_CLIENT"):
        check_request({"REPLY_TO_CLIENT": "me"})


def test_a_caller_waits_where_it_waits_already_and_where_requests_may_go() -> None:
    brokers = dict.fromkeys("abc", ADDRESS)
    route = Route("t", (), (), brokers, ("a", "b"))
    assert set(brokers_for(route, {})) == {"a", "b"}
    assert brokers_for(route, {"b": ReplyInbox("t", "b")}) == ["b", "a"]
    queues = tuple(MessageQueue("t", name, 0) for name in "ab")
    new = Route("t", queues, queues, brokers, ("a", "b"), auto_create=True)
    assert queue_at(new, None, None, "b") == queues[1]
    assert queue_at(new, queues[0], None, "b") == queues[0]
    assert queue_at(route, None, None, "b") is None
    assert queue_at(new, None, "key", "b") is None


def test_a_request_for_which_no_thread_can_be_started_keeps_no_later_one_from_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = RequestCalls(Driver(mock.Mock()), mock.Mock())
    inbox = ReplyInbox("t", "b")

    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        with pytest.raises(RuntimeError, match="new thread"):
            calls._follow(inbox)
    assert not calls._followed
