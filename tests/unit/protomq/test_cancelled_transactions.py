"""A transactional send that is cancelled, in each turn of the loop: the broker asks, and is told what was done. A broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from protomq import (
    AsyncTransactionProducer,
    SendResult,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
    _methods,
)
from protomq._transport_options import LongHold
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import RequestTimeoutError
from protomq.hooks import Hook
from tests.support.asking_broker import AskingBroker
from tests.support.fake_cluster import FakeAsyncTransport, FakeSyncTransport
from tests.support.waiting import async_wait_for, wait_for

from .test_transaction_checks import broker

__all__ = ["broker"]

COMMIT, ROLL_BACK = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK
PATIENCE_S = 5.0
TURNS_MAX = 100


class SlowTransport(FakeAsyncTransport):
    """Takes some turns of the loop before the broker has a call, and before its caller has the answer."""

    async def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
        long_hold: LongHold | None = None,
    ) -> bytes:
        await asyncio.sleep(0)
        answer = await super().call(address, method, payload, timeout_s, one_way=one_way, long_hold=long_hold)
        await asyncio.sleep(0)
        return answer


class Desk:
    """A producer whose local work is known to its check listener, and what became of one send of it."""

    def __init__(self, broker: AskingBroker, work: Callable[[Desk], Any], hooks: Sequence[Hook], *, waits: bool) -> None:
        self.broker = broker
        self.is_done = False
        self.is_asked = False
        self._work = work
        self._waits = waits
        self.producer = AsyncTransactionProducer("g", self._check, transport=SlowTransport(broker), hooks=hooks)

    async def _execute(self, half: SendResult) -> TransactionDecision | None:
        await asyncio.sleep(0)
        returned: TransactionDecision | None = self._work(self)
        await asyncio.sleep(0)
        return returned

    def _check(self, check: TransactionCheck) -> TransactionDecision:
        self.is_asked = True
        return COMMIT if self.is_done else ROLL_BACK

    async def send_for(self, turns: int) -> bool:
        """Sends, and cancels that after so many turns of the loop. Returns whether it was still on its way."""
        task = asyncio.create_task(self.producer.send("T", b"", execute=self._execute, wait_for_end=self._waits))
        for _ in range(turns):
            await asyncio.sleep(0)
        was_cut = task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled() == was_cut
        assert was_cut or task.exception() is None or isinstance(task.exception(), ZeroDivisionError)
        return was_cut

    async def settle(self) -> list[tuple[str, int]]:
        """What the broker is told of the half message in the end, if it has one: by the send, or because it asks."""
        for _ in range(TURNS_MAX):  # What was on its way arrives.
            await asyncio.sleep(0)
        if self.stored and not self.broker.told:
            self.broker.ask("half")
            await async_wait_for(lambda: self.broker.told, PATIENCE_S)
        return self.broker.told

    @property
    def stored(self) -> int:
        return len(self.broker.calls)


def is_idle(producer: AsyncTransactionProducer) -> bool:
    """Whether no decision is on its way."""
    return not any(line._task or line._waiting for line in producer._lines.values())


def books(desk: Desk) -> None:
    desk.is_done = True


def refuses(_: Desk) -> TransactionDecision:
    return ROLL_BACK


def fails(_: Desk) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("hooks", [(), (Hook(),)], ids=["plain", "hooked"])
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "unawaited"])
@pytest.mark.parametrize("work", [books, refuses, fails])
async def test_a_send_that_is_cancelled_at_any_time_is_settled_by_what_was_done(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Desk], Any], waits: bool, hooks: Sequence[Hook]
) -> None:
    for name in ("PAUSE_S", "SEARCH_DELAY_S"):
        monkeypatch.setattr(f"protomq._async_transaction_producer.{name}", 0.01)
    cuts_by_outcome = {"nothing stored": 0, "asked": 0, "told": 0}
    for turns in range(TURNS_MAX):
        desk = Desk(AskingBroker(), work, hooks, waits=waits)
        async with desk.producer as producer:
            was_cut = await desk.send_for(turns)
            told = await desk.settle()
            assert told == ([("half", COMMIT if desk.is_done else ROLL_BACK)] if desk.stored else [])
            assert not producer._producer._pending_size
            await async_wait_for(partial(is_idle, producer), PATIENCE_S)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left behind"
        if not was_cut:
            break
        cuts_by_outcome["nothing stored" if not desk.stored else "asked" if desk.is_asked else "told"] += 1
    else:
        pytest.fail(f"a send takes more than {TURNS_MAX} turns")
    assert cuts_by_outcome["nothing stored"]
    assert cuts_by_outcome["asked"]


def test_a_loop_that_ends_leaves_no_task_of_a_send_that_it_has_cancelled() -> None:
    """Nobody would wait for it: asyncio says that it was destroyed."""
    loop: list[asyncio.AbstractEventLoop] = []

    class Silent(FakeAsyncTransport):
        async def call(self, address: BrokerAddress, method: MethodInfo, *given: Any, **named: Any) -> bytes:
            answer = await super().call(address, method, *given, **named)
            if method == _methods.SEND:
                is_sent.set()
                await asyncio.Event().wait()
            return answer

    async def send() -> None:
        try:
            await producers[0].send("T", b"", execute=lambda half: None)
        finally:
            cancelled.append(True)

    async def main() -> None:
        loop.append(asyncio.get_running_loop())
        producers.append(AsyncTransactionProducer("g", lambda _: ROLL_BACK, transport=Silent(AskingBroker())))
        sending.append(asyncio.create_task(send()))
        await is_sent.wait()

    producers: list[AsyncTransactionProducer] = []
    sending: list[asyncio.Task[None]] = []
    cancelled: list[bool] = []
    is_sent = asyncio.Event()
    asyncio.run(main())
    assert cancelled
    assert asyncio.all_tasks(loop[0]) == set()


def test_a_half_message_whose_answer_was_lost_is_asked_about(broker: AskingBroker) -> None:
    """No other send of this producer follows."""

    class Lossy(FakeSyncTransport):
        def call(self, address: BrokerAddress, method: MethodInfo, *given: Any, **named: Any) -> bytes:
            answer = super().call(address, method, *given, **named)
            if method == _methods.SEND:
                raise RequestTimeoutError("no answer in time")
            return answer

    with TransactionProducer("g", lambda _: ROLL_BACK, transport=Lossy(broker), retries=0) as producer:
        with pytest.raises(RequestTimeoutError):
            producer.send("T", b"", execute=lambda half: None)
        broker.ask("half")
        wait_for(lambda: broker.told, PATIENCE_S)
    assert broker.told == [("half", ROLL_BACK)]
