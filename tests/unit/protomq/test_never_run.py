"""Listeners whose call runs nothing: generator functions are refused where they are given, what comes back and never runs is a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from protomq import AsyncPushConsumer, AsyncSimpleConsumer, PushConsumer, SimpleConsumer
from protomq._push_results import judge
from protomq.asgi import Messaging
from protomq.errors import ConfigurationError, WrongTypeError
from protomq.testing import FakeGroup
from tests.unit.protomq.test_pop_handling import Brokers

NOWHERE = "127.0.0.1:1"


def generator(message: object) -> Iterator[None]:
    yield


async def async_generator(message: object) -> AsyncIterator[None]:
    yield


async def coroutine(message: object) -> None: ...


class Generating:
    def __call__(self, message: object) -> Iterator[None]:
        yield


class Method:
    def listen(self, message: object) -> Iterator[None]:
        yield


LISTENERS = [generator, async_generator, Generating(), Method().listen, partial(generator)]


@pytest.mark.parametrize("listener", LISTENERS)
def test_generator_functions_are_refused_by_every_consumer(listener: Any) -> None:
    consumers = (PushConsumer("g"), AsyncPushConsumer("g"), Messaging().consumer("g"))
    for consumer in consumers:
        for batch_size in (None, 4):
            with pytest.raises(WrongTypeError, match=r"has a yield, so a call of it runs nothing"):
                consumer.subscribe("t", listener, batch_size=batch_size)
    with SimpleConsumer("g", namesrv=NOWHERE) as simple, pytest.raises(WrongTypeError, match="has a yield"):
        simple.handle("t", listener)

    async def handle() -> None:
        async with AsyncSimpleConsumer("g", namesrv=NOWHERE) as simple:
            await simple.handle("t", listener)

    with pytest.raises(WrongTypeError, match="has a yield"):
        asyncio.run(handle())


class Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: coroutine(0), "a coroutine, which nobody awaits"),
        (Awaitable, "an awaitable, which nobody awaits"),
        (lambda: generator(0), "a generator, which nobody runs"),
        (lambda: async_generator(0), "a generator, which nobody runs"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_comes_back_and_never_runs_is_a_failure(make: Any, text: str) -> None:
    said = f"the listener returned {text}"
    failures, told = judge(make(), 2)
    assert [one.error for one in failures if one is not None] == [said] * 2
    assert told == f"returned {text}: it is taken as failed; write async def, with await"
    failures, _ = judge([None, make()], 2)
    assert [one and one.error for one in failures] == [None, said]
    failure = Brokers().handling.judged(make())
    assert failure is not None
    assert (failure.error, failure.is_dead_letter) == (said, False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("client", [PushConsumer, AsyncPushConsumer])
def test_a_message_whose_listener_returns_a_coroutine_comes_again(client: Any, batch_size: int | None) -> None:
    consumer = client("g")
    consumer.subscribe("t", lambda given: coroutine([given]), batch_size=batch_size)
    group = FakeGroup(consumer)
    group.send("t", b"x")
    assert group.deliver() == 1
    assert group.done == []
    assert [message.last_error for message in group.waiting] == ["the listener returned a coroutine, which nobody awaits"]


def test_a_listener_that_wants_an_argument_by_name_is_refused() -> None:
    def bill(message: object, *, session: object) -> None: ...

    def cheap(message: object, *, session: object = None, **more: object) -> None: ...

    with pytest.raises(ConfigurationError, match="bill wants session=, a listener is given no argument by name"):
        PushConsumer("g").subscribe("t", bill)
    PushConsumer("g").subscribe("t", cheap)
