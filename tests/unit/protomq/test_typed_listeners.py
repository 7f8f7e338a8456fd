"""Listeners get what their type hints say; what does not decode is a dead letter at once, and nobody else's trouble."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, List  # noqa: UP035 - of listeners.

import pydantic
import pytest
from google.protobuf.duration_pb2 import Duration

from protomq import AsyncPushConsumer, Message, PushConsumer, Reject, Retry
from protomq._message import DamagedMessage, StoredMessage
from protomq._push_results import Listener
from protomq._typed_listeners import MESSAGES, Taken, taken_by
from protomq.body_codecs import SCHEMA
from protomq.errors import CompressionError, ConfigurationError
from protomq.hooks import ConsumeContext, Hook
from protomq.testing import FakeGroup

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]

    import protomq as sdk


class Order(pydantic.BaseModel):
    number: int


BAD = b'{"number":"x"}'
BAD_TEXT = "SchemaError: Order: number: Input should be a valid integer, unable to parse string as an integer"
Consumer = PushConsumer | AsyncPushConsumer


def no_hint(message): ...
def any_(message: Any) -> None: ...
def message_(message: Message) -> None: ...
def only_for_type_checkers(message: sdk.Message, attempts: int = 3) -> None: ...
def qualified(messages: Sequence[sdk.Message]) -> None: ...
def order_(order: Order) -> None: ...
def both(order: Order, message: Message) -> None: ...
def both_for_type_checkers(order: Order, message: sdk.Message) -> None: ...
def with_default(order: Order, attempts: Unknown = 3) -> None: ...
def raw(body: bytes) -> None: ...
def text(body: str) -> None: ...
def row(row: dict[str, Any]) -> None: ...
def duration(duration: Duration) -> None: ...
def union(either: Order | Duration) -> None: ...
def unknown(order: Unknown) -> None: ...
def number(number: int) -> None: ...
def orders(orders: list[Order]) -> None: ...
def orders_both(orders: Sequence[Order], messages: list[Message]) -> None: ...
def messages_(messages: Iterable[Message]) -> None: ...
def anything(messages: list) -> None: ...
def anything_bare(messages: List) -> None: ...  # noqa: UP006
def numbers(numbers: list[int]) -> None: ...
def star(*args: Order) -> None: ...
def orders_both_for_type_checkers(orders: Sequence[Order], messages: list[sdk.Message]) -> None: ...
def unknown_second(order: Order, message: Unknown) -> None: ...
def injected(order: Order, database: dict) -> None: ...
def injected_both(order: Order, message: Message, database: dict) -> None: ...
def two_of_them(message, context): ...


class Handler:
    def __call__(self, order: Order) -> None: ...

    def method(self, order: Order) -> None: ...


@functools.wraps(order_)
def wrapped(*args: Any) -> None: ...


@pytest.mark.parametrize(
    ("listener", "taken"),
    [
        (no_hint, MESSAGES),
        (any_, MESSAGES),
        (message_, MESSAGES),
        (only_for_type_checkers, MESSAGES),
        (star, MESSAGES),
        ([].append, MESSAGES),
        (print, MESSAGES),
        (order_, Taken(Order)),
        (wrapped, Taken(Order)),
        (Handler(), Taken(Order)),
        (Handler().method, Taken(Order)),
        (functools.partial(order_), Taken(Order)),
        (both, Taken(Order, True)),
        (both_for_type_checkers, Taken(Order, True)),
        (with_default, Taken(Order)),
        (raw, Taken(bytes)),
        (text, Taken(str)),
        (row, Taken(dict[str, Any])),
        (duration, Taken(Duration)),
    ],
)
def test_a_listener_takes_what_its_hint_says(listener: Callable[..., Any], taken: Taken) -> None:
    assert taken_by(listener, "f", is_batch=False) == taken


@pytest.mark.parametrize(
    ("listener", "taken"),
    [
        (no_hint, MESSAGES),
        (qualified, MESSAGES),
        (messages_, MESSAGES),
        (anything, MESSAGES),
        (anything_bare, MESSAGES),
        (orders, Taken(Order)),
        (orders_both, Taken(Order, True)),
        (orders_both_for_type_checkers, Taken(Order, True)),
    ],
)
def test_a_listener_of_batches_takes_lists(listener: Callable[..., Any], taken: Taken) -> None:
    assert taken_by(listener, "f", is_batch=True) == taken


class Desk:
    def bill(self, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("listener", "batch_size", "says"),
    [
        (number, None, "number takes int, which no body codec decodes"),
        (union, None, "no body codec decodes"),
        (unknown, None, r"unknown takes 'Unknown', which is not known where it stands \(name 'Unknown' is not defined\)"),
        (orders, None, "it is given one message a call: subscribe it with batch_size=N"),
        (lambda: None, None, "takes no argument, a listener is given its message"),
        (injected, None, r"injected wants 2 arguments; .* injected\(order: Order, message: Message\)$"),
        (injected_both, None, r"injected_both wants 3 arguments; a listener is a function such as injected_both\(message\), "),
        (two_of_them, None, "two_of_them wants 2 arguments"),
        (unknown_second, None, r"unknown_second takes 'Unknown', which is not known where it stands \(name 'Unknown' is not defined\)"),
        (Desk.bill, None, r"Desk.bill is a method of no object: bind it, as in subscribe\(topic, my_object.bill\)"),
        (lambda order, session: None, 5, r"messages\) or .*\(orders: list\[Order\], messages: list\[Message\]\)$"),
        (order_, 10, r"order_ takes Order, but it is given lists: hint list\[...\], or leave batch_size out"),
        (numbers, 10, r"numbers takes a list of int, which no body codec decodes: hint list\[...\] of Message, bytes, "),
    ],
)
def test_what_nobody_could_give_is_refused_when_it_subscribes(
    listener: Callable[..., Any], batch_size: int | None, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        PushConsumer("g").subscribe("orders", listener, batch_size=batch_size)


def test_a_listener_without_a_type_is_called_as_it_is() -> None:
    assert Listener.of(message_).call is message_


@pytest.mark.parametrize("make", [PushConsumer, AsyncPushConsumer])
def test_values_arrive_and_what_does_not_decode_is_a_dead_letter_at_once(make: type[Consumer]) -> None:
    seen: list[Any] = []
    consumer = make("g")

    @consumer.on("orders")
    def listen(order: Order, message: Message) -> Any:
        seen.append((order, message.key))
        return Retry(delay=1) if order.number == 2 else None

    group = FakeGroup(consumer)
    group.send("orders", Order(number=1), key="a")
    group.send("orders", BAD, key="b")
    group.send("orders", {"number": 2}, key="c")
    assert group.deliver() == 3
    assert seen == [(Order(number=1), "a"), (Order(number=2), "c")]
    assert [(dead.message.key, dead.error) for dead in group.dead_letters] == [("b", BAD_TEXT)]
    assert [message.key for message in group.waiting] == ["c"]


def test_coroutines_are_given_values() -> None:
    seen: list[Any] = []
    consumer = AsyncPushConsumer("g")

    @consumer.on("orders")
    async def listen(order: Order) -> None:
        seen.append(order.number)

    @consumer.on("batches", batch_size=8)
    async def listen_to_many(orders: list[Order], messages: list[Message]) -> list[Any]:
        seen.append([(order.number, message.key) for order, message in zip(orders, messages, strict=True)])
        return [Reject("no 3") if order.number == 3 else None for order in orders]

    group = FakeGroup(consumer)
    group.send("orders", Order(number=1))
    group.send("orders", BAD)
    for key, body in (("a", Order(number=2)), ("b", BAD), ("c", Order(number=3))):
        group.send("batches", body, key=key)
    group.deliver()
    assert seen == [1, [(2, "a"), (3, "c")]]
    assert sorted((dead.message.key, dead.error) for dead in group.dead_letters) == [("", BAD_TEXT), ("b", BAD_TEXT), ("c", "no 3")]
    assert [message.key for message in group.done] == ["", "a"]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (None, None),
        (Retry(delay=5, error="later"), "later"),
        (ValueError("broken"), "ValueError: broken"),
        ([None], "ValueError: the listener returned 1 results for 2 messages"),
    ],
)
def test_a_batch_with_bad_bodies_has_the_listeners_result_for_the_others(says: Any, error: str | None) -> None:
    consumer = PushConsumer("g")

    @consumer.on("t", batch_size=8)
    def listen(orders: list[Order]) -> Any:
        if isinstance(says, Exception):
            raise says
        return says

    group = FakeGroup(consumer)
    for body in (Order(number=1), BAD, Order(number=2)):
        group.send("t", body)
    group.deliver()
    assert [dead.error for dead in group.dead_letters] == [BAD_TEXT]
    assert len(group.done) == (2 if error is None else 0)
    assert [message.last_error for message in group.waiting] == ([] if error is None else [error, error])


@pytest.mark.parametrize(
    ("says", "text"),
    [
        (ValueError("broken"), "listen raised ValueError: its message comes again while its group has retries left"),
        ([None], "listen returned 1 results for 2 messages: they come again"),
        (Retry(delay=5), "listen is not given what does not decode, it is a dead letter: "),
    ],
)
def test_the_log_says_what_a_listener_did_that_was_not_given_all_of_its_batch(
    says: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = PushConsumer("g")
    consumed: list[ConsumeContext] = []

    class Notes(Hook):
        def after_consume(self, context: ConsumeContext) -> None:
            consumed.append(context)

    def listen(orders: list[Order]) -> Any:
        if isinstance(says, Exception):
            raise says
        return says

    for made in (consumer, PushConsumer("g", hooks=[Notes()])):
        caplog.clear()
        made.subscribe("t", listen, batch_size=8)
        group = FakeGroup(made)
        for body in (Order(number=1), BAD, Order(number=2)):
            group.send("t", body)
        group.deliver()
        assert [message.partition("<locals>.")[2] for message in caplog.messages if text in message]
        assert (caplog.records[-1].exc_info is not None) == isinstance(says, ValueError)
    (context,) = consumed
    assert context.error is (says if isinstance(says, ValueError) else None)


class Unreadable(StoredMessage):
    """Its codec is not installed here."""

    @property  # type: ignore[misc]
    def body(self) -> bytes:  # type: ignore[override]
        raise CompressionError("no such codec")


def change(group: FakeGroup, message: Message, into: type[Message], *more: object) -> None:
    """What its listener is to get is not what was sent."""
    (waiting,) = [one for stored in group._stored.values() for one in stored if one.message is message]
    waiting.message = into(message.stored_body, message._rest, message.queue_offset, message.queue, *more)


@pytest.mark.parametrize("returns_list", [False, True])
def test_a_message_that_cannot_be_read_fails_alone_in_its_batch(returns_list: bool) -> None:
    for orderly in (False, True):
        consumer = PushConsumer("g", orderly=orderly)
        seen: list[list[int]] = []

        @consumer.on("t", batch_size=8)
        def listen(orders: list[Order], seen: list[list[int]] = seen) -> Any:
            seen.append([order.number for order in orders])
            return [None, Reject("no 2")] if returns_list else None

        group = FakeGroup(consumer)
        sent = [group.send("t", Order(number=number)) for number in (1, 3, 2)]
        if orderly:
            change(group, sent[1], DamagedMessage, sent[1].record)
        else:
            change(group, sent[1], Unreadable)
        group.deliver()
        assert seen == [[1, 2]]
        if orderly:  # Its queue waits for it.
            assert [(message.is_damaged, message.own_tries) for message in group.waiting] == [(True, 1), (False, 0)]
        else:
            assert [message.last_error for message in group.waiting] == ["CompressionError: no such codec"]
            assert [dead.error for dead in group.dead_letters] == (["no 2"] if returns_list else [])


def test_a_batch_of_bad_bodies_calls_nobody() -> None:
    consumer = PushConsumer("g")

    @consumer.on("t", batch_size=8)
    def listen(orders: list[Order]) -> None:
        raise AssertionError

    group = FakeGroup(consumer)
    for _ in range(3):
        group.send("t", BAD)
    group.deliver()
    assert [dead.error for dead in group.dead_letters] == [BAD_TEXT] * 3


def test_a_listener_that_decodes_by_itself_has_the_same_outcome(caplog: pytest.LogCaptureFixture) -> None:
    consumer = PushConsumer("g", orderly=True)
    seen = []

    @consumer.on("t")
    def listen(message: Message) -> None:
        seen.append(message.value(Duration).seconds)

    group = FakeGroup(consumer)
    group.send("t", b"", properties={SCHEMA: "shop.v1.Order"})
    group.send("t", Duration(seconds=3))
    group.deliver()
    assert seen == [3]
    assert [dead.error for dead in group.dead_letters] == [
        "SchemaError: Duration: the body is shop.v1.Order, not google.protobuf.Duration"
    ]
    assert "raised SchemaError: its message is a dead letter" in caplog.text
