"""Hooks: what they see, what they may change, and that they break nothing. The clients around them are real, brokers are not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from protomq import AsyncProducer, OutgoingMessage, Producer, Reject, Retry
from protomq._hook_points import HookPoints
from protomq._hooked_calls import (
    HookedMultiplexer,
    HookedTransport,
    multiplexer_with,
    transport_with,
)
from protomq._hooked_consuming import (
    HELD_MAX,
    NOT_HANDED_ON,
    HandedOut,
    HeldMessages,
    hooked_listener,
)
from protomq._loops import Loop
from protomq._message import Message
from protomq._methods import WAIT_FOR_CHECKS
from protomq._push_results import Listener
from protomq._transactions import End, TransactionDecision
from protomq._types import BrokerAddress, MessageQueue, MethodInfo, PoppedQueue, Route
from protomq.errors import ClosedError, ConfigurationError, InvalidArgumentError, WrongTypeError
from protomq.hooks import CallContext, ConsumeContext, EndTransactionContext, Hook, SendContext
from tests.support.fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport


class Recorder(Hook):
    """Writes down what it is told, and marks what is sent."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def before_send(self, context: SendContext) -> None:
        self.events.append(("before", *[message.body for message in context.messages]))
        context.notes[self] = len(self.events)
        context.messages = [
            OutgoingMessage(message.topic, message.body, properties={"marked": "1"}) for message in context.messages
        ]

    def after_send(self, context: SendContext) -> None:
        outcome = type(context.error).__name__ if context.error else [result.status.name for result in context.results]
        self.events.append(("after", *[message.body for message in context.messages], outcome))
        assert context.notes[self]
        assert context.duration_s > 0


class Broken(Hook):
    """Each of its methods raises."""

    def fail(self, *_: object) -> Any:
        raise RuntimeError("a defect of the hook")

    before_send = after_send = before_consume = after_consume = keeps = fail  # type: ignore[assignment]
    before_end_transaction = after_end_transaction = before_call = after_call = fail  # type: ignore[assignment]


SEEN = [
    ("before", b"a"), ("after", b"a", ["SEND_OK"]),
    ("before", b"b", b"c"), ("after", b"b", b"c", ["SEND_OK", "SEND_OK"]),
    ("before", b"d"), ("after", b"d", []),
    ("before", b"e"), ("after", b"e", "InvalidArgumentError"),
]  # fmt: skip


def all_are_marked(cluster: FakeCluster) -> bool:
    return all(record.properties["marked"] == "1" for call in cluster.calls for record in call.request.records)


def test_hooks_see_and_change_what_threads_send() -> None:
    cluster, hook = FakeCluster(), Recorder()
    with Producer(transport=FakeSyncTransport(cluster), hooks=[hook]) as producer:
        producer.send("T", b"a")
        producer.send_batch("T", [b"b", b"c"])
        producer.send_one_way("T", b"d")
        cluster.script("a", InvalidArgumentError("no"))
        with pytest.raises(InvalidArgumentError):
            producer.send("T", b"e")
        producer.send_async("T", b"f").result(10)
    assert hook.events == [*SEEN, ("before", b"f"), ("after", b"f", ["SEND_OK"])]
    assert all_are_marked(cluster)


async def test_hooks_see_and_change_what_coroutines_send() -> None:
    cluster, hook = FakeCluster(), Recorder()
    async with AsyncProducer(transport=FakeAsyncTransport(cluster), hooks=[hook]) as producer:
        await producer.send("T", b"a")
        await producer.send_batch("T", [b"b", b"c"])
        await producer.send_one_way("T", b"d")
        cluster.script("a", InvalidArgumentError("no"))
        with pytest.raises(InvalidArgumentError):
            await producer.send("T", b"e")
    assert hook.events == SEEN
    assert all_are_marked(cluster)


def test_a_send_that_is_refused_here_is_told_to_the_hooks() -> None:
    class Ends(Hook):
        def __init__(self) -> None:
            self.errors: list[str] = []

        def after_send(self, context: SendContext) -> None:
            self.errors.append(type(context.error).__name__)

    hook, wrong = Ends(), OutgoingMessage("T", b"x", tag=5)  # type: ignore[arg-type]
    with Producer(transport=FakeSyncTransport(FakeCluster()), hooks=[hook]) as producer:
        for send in (producer.send, producer.send_async, producer.send_one_way):
            with pytest.raises(TypeError):
                send(wrong)
        with pytest.raises(TypeError):
            producer.send_batch("T", [wrong])
    assert hook.errors == ["WrongTypeError"] * 4


def test_hooks_are_given_bodies_as_they_are_sent() -> None:
    hook = Recorder()
    with Producer(transport=FakeSyncTransport(FakeCluster()), hooks=[hook]) as producer:
        producer.send("T", "text")
        producer.send_batch("T", ["more", b"x"])
    assert [event[1:] for event in hook.events if event[0] == "before"] == [(b"text",), (b"more", b"x")]


def test_a_hook_that_raises_breaks_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster, watching = FakeCluster(), Recorder()
    with Producer(transport=FakeSyncTransport(cluster), hooks=[watching]) as producer:
        producer._hooks.add(Broken())
        producer._hooks.call = ()  # The transport is not its own.
        for _ in range(3):
            producer.send("T", b"x")
    assert cluster.bodies() == [b"x"] * 3
    assert len(watching.events) == 6
    assert [record.getMessage().split(" of ")[0] for record in caplog.records] == ["before_send", "after_send"]


@pytest.mark.parametrize("wrong", [[], [b"x"], [OutgoingMessage("other", b"x")], None])
def test_what_a_hook_makes_of_the_messages_counts_only_if_it_can_be_sent(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Hook):
        def before_send(self, context: SendContext) -> None:
            context.messages = wrong

    cluster = FakeCluster()
    with Producer(transport=FakeSyncTransport(cluster), hooks=[Wrong()]) as producer:
        producer.send("T", b"as it was")
    assert cluster.bodies() == [b"as it was"]
    assert len(caplog.records) == 1


def test_hooks_are_called_in_turn_and_back_again() -> None:
    turns: list[str] = []

    class Named(Hook):
        def __init__(self, name: str) -> None:
            self.name = name

        def before_send(self, context: SendContext) -> None:
            turns.append(f"{self.name} before")

        def after_send(self, context: SendContext) -> None:
            turns.append(f"{self.name} after")

    with Producer(transport=FakeSyncTransport(FakeCluster()), hooks=[Named("a"), Named("b")]) as producer:
        producer.send("T", b"x")
    assert turns == ["a before", "b before", "b after", "a after"]


def test_a_hook_is_asked_only_where_it_has_something_to_say() -> None:
    class Counts(Hook):
        def after_call(self, context: CallContext) -> None:
            raise AssertionError

    points = HookPoints("g", [Hook(), Counts(), Broken()])
    assert list(map(len, (points.send, points.consume, points.filter, points.end, points.call))) == [1, 1, 1, 1, 2]
    assert not HookPoints("g", [Counts()]).send


def test_coroutine_functions_are_no_hooks() -> None:
    class Waits(Hook):
        async def before_send(self, context: SendContext) -> None:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(WrongTypeError, match=r"before_send of .* is a coroutine function"):
        Producer(hooks=[Waits()])


def test_a_hook_that_cannot_be_called_is_refused_where_it_is_given() -> None:
    class NoContext(Hook):
        def before_send(self) -> None:  # type: ignore[override]
            raise AssertionError

    class TwoMessages(Hook):
        def keeps(self, message: Message, other: Message) -> bool:  # type: ignore[override]
            raise AssertionError

    class Defaults(Hook):
        def before_send(self, context: SendContext, more: int = 0) -> None:
            raise AssertionError

    with pytest.raises(ConfigurationError, match=r"before_send of .*NoContext.* is called with one context, which .* does not take"):
        Producer(hooks=[NoContext()])
    with pytest.raises(ConfigurationError, match=r"keeps of .*TwoMessages.* is called with one message, which .* does not take"):
        Producer(hooks=[TwoMessages()])
    Producer(hooks=[Defaults()]).close()


def test_hooks_of_calls_need_connections_of_the_clients_own() -> None:
    with pytest.raises(ConfigurationError, match="give it a connection, not a transport"):
        Producer(transport=FakeSyncTransport(FakeCluster()), hooks=[Broken()])


# -- what is consumed --------------------------------------------------------------------------------------------------------


class Consumed(Hook):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def before_consume(self, context: ConsumeContext) -> None:
        self.events.append(("before", context.listener, len(context.messages)))

    def after_consume(self, context: ConsumeContext) -> None:
        self.events.append((*context.failures, type(context.error).__name__ if context.error else ""))


def messages(count: int) -> list[Message]:
    made = []
    for offset in range(count):
        message = Message.__new__(Message)
        message._queue = PoppedQueue("T", "a", 0)
        message._queue.receipt = b"r"
        message._queue_offset = offset
        made.append(message)
    return made


@pytest.mark.parametrize(
    ("result", "seen"),
    [
        (None, (None, "")),
        (5, (None, "")),
        (Retry(error="not yet"), ("not yet", "")),
        (Reject, ("to be retried", "")),
        (ValueError("no"), ("ValueError: no", "ValueError")),
    ],
)
def test_the_outcome_of_a_listener_is_told(result: Any, seen: tuple[object, ...]) -> None:
    hook = Consumed()

    def listen(_: object) -> object:
        if isinstance(result, ValueError):
            raise result
        return result

    async def listen_async(message: object) -> object:
        return listen(message)

    for call in (listen, listen_async):
        hooked = hooked_listener(Listener.of(call), HookPoints("g", [hook]))
        assert (hooked.name, hooked.function) == (Listener.of(call).name, call)
        with pytest.raises(ValueError, match="no") if isinstance(result, ValueError) else nullcontext():
            got = hooked.call(messages(1)[0])
            assert (asyncio.run(got) if hooked.is_coroutine else got) is result
        assert hook.events[-2:] == [("before", hooked.name, 1), seen]


def test_each_message_of_a_batch_has_its_outcome() -> None:
    hook = Consumed()
    listener = Listener.of(lambda _: [None, Retry(error="x")], batch_size=2)
    hooked_listener(listener, HookPoints("g", [hook])).call(messages(2))
    assert hook.events[1] == (None, "x", "")


def test_a_listener_without_hooks_is_as_it_was() -> None:
    listener = Listener.of(print)
    assert hooked_listener(listener, HookPoints("g", [Recorder()])) is listener


def test_what_poll_gave_is_done_when_the_program_comes_back() -> None:
    hook = Consumed()
    handed = HandedOut(HookPoints("g", [hook]))
    handed.gave(messages(2))
    handed.came_back()
    handed.came_back()
    handed.gave([])
    handed.gave(messages(1))
    handed.ended("closed")
    assert hook.events == [("before", "", 2), (None, None, ""), ("before", "", 1), ("closed", "")]


@pytest.mark.parametrize("is_left", [False, True])
def test_what_a_loop_was_given_is_done_when_it_has_handed_on_all_or_is_left(is_left: bool) -> None:
    hook = Consumed()
    handed, loop = HandedOut(HookPoints("g", [hook])), Loop()
    given = messages(3)
    handed.gave(given, loop)
    loop.fill(given)
    next(loop.left)
    handed.gave(messages(1))  # By a `poll` in the midst of the loop, which may go on.
    handed.came_back()
    assert hook.events[2:] == [(None, "")]
    if is_left:
        assert len(loop.take_unseen()) == 2
    else:
        assert len(list(loop.left)) == 2
    handed.came_back()
    assert hook.events[3:] == [((None, NOT_HANDED_ON, NOT_HANDED_ON, "") if is_left else (None, None, None, ""))]


def test_a_close_in_a_loop_says_what_was_not_handed_on() -> None:
    hook = Consumed()
    handed, loop = HandedOut(HookPoints("g", [hook])), Loop()
    given = messages(2)
    handed.gave(given, loop)
    loop.fill(given)
    next(loop.left)
    handed.ended()
    handed.ended()
    assert hook.events[1:] == [(None, NOT_HANDED_ON, "")]


def test_what_receive_gave_is_done_when_it_is_acknowledged() -> None:
    hook = Consumed()
    held = HeldMessages(HookPoints("g", [hook]))
    first, second, third = messages(3)
    held.gave([first, second, third])
    held.settled([second], None)
    held.settled([second], None)
    held.settled([first], "given back")
    assert hook.events[3:] == [(None, ""), ("given back", "")]


def test_what_is_never_acknowledged_is_forgotten_at_last() -> None:
    held = HeldMessages(HookPoints("g", [Consumed()]))
    held.gave(messages(HELD_MAX + 5))
    assert len(held._contexts) == HELD_MAX


def test_a_filter_keeps_what_all_hooks_keep(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Hook):
        def keeps(self, message: Message) -> bool:
            return message.queue_offset % 2 == 1

    points = HookPoints("g", [Broken(), Odd()])
    assert [message.queue_offset for message in points.kept(messages(4))] == [1, 3]
    assert len(caplog.records) == 1, "said once; what a broken hook is asked for is kept"


# -- decisions and calls -----------------------------------------------------------------------------------------------------


def test_a_decision_is_told_with_its_outcome() -> None:
    seen: list[EndTransactionContext] = []

    class Ends(Hook):
        def after_end_transaction(self, context: EndTransactionContext) -> None:
            seen.append(context)

    points = HookPoints("desk", [Ends()])
    context = points.before_end(End("T", "a", "h", TransactionDecision.COMMIT, "id", True))
    error = InvalidArgumentError("no")
    points.after_end(context, error)
    assert seen == [context]
    assert (context.group, context.message_id, context.is_check, context.error) == ("desk", "id", True, error)


class Calls(Hook):
    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def after_call(self, context: CallContext) -> None:
        self.seen.append(
            (context.server, context.method, context.request_size_bytes, context.answer_size_bytes, context.error)
        )


ADDRESS = BrokerAddress("a", "", "h:1")
METHOD = MethodInfo("/s/M", 1, 1)


def test_a_call_is_told_with_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    hook, error = Calls(), InvalidArgumentError("no")
    answers: list[bytes | Exception] = [b"four", error]

    def answer(*_: object, **__: object) -> bytes:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("protomq._transport.SyncTransport.call", answer)
    transport = transport_with(None, HookPoints("", [hook]))
    assert transport.call(ADDRESS, METHOD, [b"a", b"b"], 1.0) == b"four"
    with pytest.raises(InvalidArgumentError):
        transport.call(ADDRESS, METHOD, [b""], 1.0)
    assert hook.seen == [("a", "/s/M", 2, 4, None), ("a", "/s/M", 0, 0, error)]
    transport.close()


def test_held_calls_are_told_when_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Calls()
    transport = transport_with(None, HookPoints("", [hook]))
    assert isinstance(transport, HookedTransport)
    calls = multiplexer_with(transport, METHOD)
    assert isinstance(calls, HookedMultiplexer)
    error = InvalidArgumentError("refused")
    monkeypatch.setattr("protomq._transport.SyncTransport.open_pipelined", lambda *_: error)
    calls.send(ADDRESS, "ticket", b"abc", 1.0)
    outcomes: Sequence[Any] = ()
    while not outcomes:
        outcomes = calls.wait(10.0, 1)
    assert hook.seen == [("a", "/s/M", 3, 0, error)]
    calls.close()
    transport.close()


def test_held_calls_are_told_when_their_client_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = Calls()
    transport = transport_with(None, HookPoints("", [hook]))
    assert isinstance(transport, HookedTransport)
    connects, held, ends = threading.Event(), threading.Event(), threading.Event()

    def connect(*_: object) -> InvalidArgumentError:
        connects.wait(10.0)
        return InvalidArgumentError("too late")

    def hold(*_: object, **__: object) -> bytes:
        held.set()
        ends.wait(10.0)
        return b""

    monkeypatch.setattr("protomq._transport.SyncTransport.open_pipelined", connect)
    monkeypatch.setattr("protomq._transport.SyncTransport.call", hold)
    calls = multiplexer_with(transport, METHOD)
    calls.send(ADDRESS, "ticket", b"abc", 1.0)
    calls.close()
    connects.set()
    calls.close()
    thread = threading.Thread(target=transport.call, args=(ADDRESS, WAIT_FOR_CHECKS, [b"ab"], 1.0))
    thread.start()
    assert held.wait(10.0)
    transport.close()
    ends.set()
    thread.join()
    transport.close()
    assert [(method, size, type(error)) for _, method, size, _, error in hook.seen] == [
        ("/s/M", 3, ClosedError), (WAIT_FOR_CHECKS.path, 2, ClosedError),
    ]  # fmt: skip


def test_a_child_tells_nothing_of_held_calls_of_its_parent() -> None:
    hook = Calls()
    transport = transport_with(None, HookPoints("", [hook]))
    calls = multiplexer_with(transport, METHOD)
    assert isinstance(calls, HookedMultiplexer)
    calls._contexts["ticket"] = CallContext("a", "/s/M", 3, 1.0, False)
    calls.abandon()
    transport.close()
    assert hook.seen == []


def test_without_hooks_of_calls_transports_are_as_they_were() -> None:
    transport = transport_with(None, HookPoints("", [Recorder()]))
    calls = multiplexer_with(transport)
    assert (type(transport).__name__, type(calls).__name__) == ("SyncTransport", "PullMultiplexer")
    calls.close()
    transport.close()


class Raising(Hook):
    """All its methods raise this."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def keeps(self, message: Message) -> bool:
        raise self._error

    def before_consume(self, context: ConsumeContext) -> None:
        raise self._error

    def before_send(self, context: SendContext) -> None:
        raise self._error


EXITS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()]


def told(error: BaseException) -> tuple[list[Message], ConsumeContext, SendContext]:
    points, kept = HookPoints("g", [Raising(error)]), messages(1)
    return points.kept(kept), points.before_consume(kept), points.before_send("T", [])


@pytest.mark.parametrize("error", EXITS, ids=type)
def test_on_a_thread_of_a_client_a_hook_may_raise_anything(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as pool:
        kept, consumed, sent = pool.submit(told, error).result(10)
    assert len(kept) == 1
    assert consumed.messages == kept
    assert sent.topic == "T"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["keeps", "before_consume", "before_send"]


@pytest.mark.parametrize("error", EXITS[:2], ids=type)
def test_on_the_main_thread_an_interrupt_and_an_exit_are_the_programs(error: BaseException) -> None:
    with pytest.raises(type(error)):
        told(error)


@pytest.mark.parametrize("error", EXITS[2:], ids=type)
def test_on_the_main_thread_all_else_is_the_hooks(error: BaseException) -> None:
    kept, _, _ = told(error)
    assert len(kept) == 1


@pytest.mark.parametrize("error", [EXITS[0], *EXITS[2:]], ids=type)
async def test_in_a_loop_an_exit_is_the_hooks(error: BaseException) -> None:
    kept, _, _ = told(error)
    assert len(kept) == 1


async def test_in_a_loop_an_interrupt_is_the_programs() -> None:
    with pytest.raises(KeyboardInterrupt):
        told(KeyboardInterrupt())


def test_a_broker_is_where_the_last_route_says_and_several_are_nowhere() -> None:
    points = HookPoints("g")
    a, b = MessageQueue("T", "a", 0), MessageQueue("T", "b", 0)
    assert points.server_of([a]) == ""
    brokers = {"a": BrokerAddress("a", "h:2", "h:1"), "b": BrokerAddress("b", "h:4", "")}
    kinds = {"a": "remoting"}
    routes = {"T": Route("T", brokers=brokers)}
    points.located_by(routes.get, lambda address: kinds.get(address.broker_name, ""))
    assert [points.server_of([a, a]), points.server_of([b]), points.server_of([a, b]), points.server_of([])] == ["h:1", "h:4", "", ""]
    assert points.server_of([MessageQueue("other", "a", 0)]) == points.server_of([MessageQueue("T", "c", 0)]) == ""
    kinds["a"] = "grpc"
    assert points.server_of([a]) == "h:2"
