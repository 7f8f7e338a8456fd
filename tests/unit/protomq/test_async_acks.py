"""Acknowledgements of many coroutines: how many calls they are, and that each caller learns what it would have learned alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protomq import Message
from protomq._async_acks import AckGatherer
from protomq._pop_steps import decode_pop_answer
from protomq.errors import (
    IllegalReceiptError,
    ProtomqError,
    StaleReceiptError,
    SystemBusyError,
    WrongTypeError,
)

from .test_pop_steps import answer_of


class Consumer:
    """A gatherer, and the calls that it makes: by broker the offsets. `stale` are not held any more, `wrong` is refused, `busy` fails."""

    def __init__(self) -> None:
        self.acks = AckGatherer(self, self)  # type: ignore[arg-type]
        self.calls: list[list[tuple[str, bytes]]] = []
        self.stale: set[bytes] = set()
        self.wrong: set[bytes] = set()
        self.busy = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.called = asyncio.Event()

    def ack(self, messages: list[Message]) -> list[Message]:
        """As PopSteps.ack: what it gives, `__call__` drives."""
        return messages

    async def __call__(self, messages: Any) -> Any:
        self.calls.append([(message.queue.broker_name, message.body) for message in messages])
        self.called.set()
        await self.goes_on.wait()
        if self.busy:
            self.busy -= 1
            error = SystemBusyError("busy")
            error.add_note("of all")
            raise error from OSError("why")
        if any(message.body in self.wrong for message in messages):
            raise IllegalReceiptError("no receipt")
        stale = [message for message in messages if message.body in self.stale]
        if len(stale) == len(messages):
            raise StaleReceiptError("nobody holds it")
        return stale


def messages(count: int, broker_name: str = "a", first: int = 0) -> list[Message]:
    bodies = [b"%s%d" % (broker_name.encode(), number) for number in range(first, first + count)]
    return decode_pop_answer(answer_of(bodies), "T", broker_name)


async def test_acks_of_one_turn_are_one_call_for_each_broker() -> None:
    consumer = Consumer()
    both = [*messages(3), *messages(2, "b")]
    assert await asyncio.gather(*[consumer.acks.ack(message) for message in both]) == [[]] * 5
    assert consumer.calls == [[("a", b"a0"), ("a", b"a1"), ("a", b"a2")], [("b", b"b0"), ("b", b"b1")]]
    assert await consumer.acks.ack(both) == []
    assert len(consumer.calls) == 4
    assert await consumer.acks.ack([]) == []
    with pytest.raises(WrongTypeError):
        await consumer.acks.ack(5)  # type: ignore[arg-type]


async def test_what_comes_while_a_call_is_under_way_is_the_next_one() -> None:
    consumer = Consumer()
    consumer.goes_on.clear()
    first = asyncio.create_task(consumer.acks.ack(messages(1)))
    await consumer.called.wait()
    others = [asyncio.create_task(consumer.acks.ack(message)) for message in messages(9, first=1)]
    await asyncio.sleep(0)
    others[0].cancel()  # It is told all the same.
    consumer.goes_on.set()
    await asyncio.gather(first, *others[1:])
    assert [len(call) for call in consumer.calls] == [1, 9]


async def test_each_caller_gets_what_is_its_own() -> None:
    consumer = Consumer()
    some = messages(5)
    consumer.stale = {b"a1", b"a4"}
    given: list[Any] = [some[0], some[1:3], some[3], some[4]]
    found = await asyncio.gather(*[consumer.acks.ack(each) for each in given], return_exceptions=True)
    assert found[:3] == [[], [some[1]], []]
    assert isinstance(found[3], StaleReceiptError)  # As if it had been alone.
    assert [len(call) for call in consumer.calls] == [5, 1]


@pytest.mark.parametrize(("attribute", "kind"), [("wrong", IllegalReceiptError), ("stale", StaleReceiptError)])
async def test_what_one_caller_is_to_blame_for_harms_no_other(attribute: str, kind: type[ProtomqError]) -> None:
    consumer = Consumer()
    some = messages(3)
    setattr(consumer, attribute, {b"a1"})
    found = await asyncio.gather(*[consumer.acks.ack(message) for message in some], return_exceptions=True)
    assert (found[0], found[2]) == ([], [])
    assert isinstance(found[1], kind)


async def test_an_outage_is_told_to_all_of_them_once() -> None:
    consumer = Consumer()
    consumer.busy = 1
    found = await asyncio.gather(*[consumer.acks.ack(message) for message in messages(3)], return_exceptions=True)
    assert [type(each) for each in found] == [SystemBusyError] * 3
    assert len(consumer.calls) == 1
    first, *others = [each for each in found if isinstance(each, SystemBusyError)]
    assert len({id(each) for each in found}) == 3, "tasks would write into each other's traceback"
    first.add_note("of the first")
    assert [(str(each.__cause__), each.__notes__) for each in others] == [("why", ["of all"])] * 2
