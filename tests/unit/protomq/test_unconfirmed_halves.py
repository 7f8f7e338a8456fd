"""Half messages that a fail-over or a power cut may take back, or has taken back: no work is done for them, and nobody is told that the
broker will ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from protomq import (
    AsyncTransactionProducer,
    SendStatus,
    TransactionDecision,
    TransactionProducer,
    TransactionResult,
    _async_transaction_producer,
    _methods,
    _transaction_producer,
)
from protomq.errors import (
    ConnectionLostError,
    InvalidArgumentError,
    NotConfirmedError,
    ProtomqError,
    TransactionEndedError,
    TransactionNotFoundError,
)
from protomq.hooks import EndTransactionContext, Hook
from tests.support.asking_broker import AskingBroker, begin, begin_async
from tests.support.fake_cluster import FakeAsyncTransport, FakeSyncTransport
from tests.support.waiting import async_wait_for, wait_for

COMMIT, ROLL_BACK = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK
PATIENCE_S = 5.0
NONE_OPEN = "there is no open transaction here"

Send = Callable[..., TransactionResult]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> AskingBroker:
    for module in (_transaction_producer, _async_transaction_producer):
        monkeypatch.setattr(module, "PAUSE_S", 0.01)
    return AskingBroker()


def send(broker: AskingBroker, execute: Callable[[Any], Any], *, told: int = 0, **settings: Any) -> TransactionResult:
    """`told`: closes the producer when the broker has been told of so many decisions."""
    hooks = settings.pop("hooks", ())
    with TransactionProducer("g", lambda _: COMMIT, transport=FakeSyncTransport(broker), hooks=hooks) as producer:
        result = producer.send("T", b"", execute=execute, **settings)
        wait_for(lambda: broker.tries("a", _methods.END_TRANSACTION) >= told, PATIENCE_S, pause_s=0.001)
        return result


def send_async(broker: AskingBroker, execute: Callable[[Any], Any], *, told: int = 0, **settings: Any) -> TransactionResult:
    hooks = settings.pop("hooks", ())

    async def run() -> TransactionResult:
        transport = FakeAsyncTransport(broker)
        async with AsyncTransactionProducer("g", lambda _: COMMIT, transport=transport, hooks=hooks) as producer:
            result = await producer.send("T", b"", execute=execute, **settings)
            await async_wait_for(lambda: broker.tries("a", _methods.END_TRANSACTION) >= told, PATIENCE_S)
            return result

    return asyncio.run(run())


BOTH_SENDS = pytest.mark.parametrize("do", [send, send_async])
BOTH_BEGIN = pytest.mark.parametrize("do", [begin, begin_async])
UNCONFIRMED = pytest.mark.parametrize("status", [SendStatus.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT])
CONFIRMED = pytest.mark.parametrize("status", [SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE])


@BOTH_SENDS
@UNCONFIRMED
@pytest.mark.parametrize("waits", [True, False])
def test_no_work_is_done_for_a_half_message_that_may_be_taken_back_and_it_is_rolled_back(
    broker: AskingBroker, do: Send, status: SendStatus, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[object] = []
    broker.half_status = int(status)  # type: ignore[assignment]
    result = do(broker, done.append, told=1, wait_for_end=waits)
    assert done == []
    assert (result.half.status, result.decision, result.is_ended) == (status, ROLL_BACK, waits)
    assert broker.told == [("half", ROLL_BACK)]
    assert f"answered {status.name}. The local work is not done, and it is rolled back" in caplog.text


@BOTH_SENDS
@CONFIRMED
def test_the_work_is_done_where_all_copies_that_may_lead_have_the_half_message(broker: AskingBroker, do: Send, status: SendStatus) -> None:
    done: list[object] = []
    broker.half_status = int(status)  # type: ignore[assignment]
    result = do(broker, done.append)
    assert done == [result.half]
    assert (result.half.status, result.decision, result.is_ended) == (status, COMMIT, True)
    assert broker.told == [("half", COMMIT)]


@BOTH_BEGIN
@UNCONFIRMED
def test_no_block_begins_with_a_half_message_that_may_be_taken_back(
    broker: AskingBroker, do: Callable[..., None], status: SendStatus
) -> None:
    done: list[object] = []
    broker.half_status = int(status)  # type: ignore[assignment]
    with pytest.raises(NotConfirmedError, match=f"answered {status.name}, so no transaction is begun: it is rolled back") as caught:
        do(broker, done.append)
    assert (done, broker.told) == ([], [("half", ROLL_BACK)])
    assert (caught.value.definite, caught.value.retriable, caught.value.reason) == (True, True, "NOT_CONFIRMED")
    assert caught.value.metadata["status"] == status.name
    assert caught.value.metadata["topic"] == "T"


@BOTH_BEGIN
@CONFIRMED
def test_a_block_begins_where_all_copies_that_may_lead_have_the_half_message(
    broker: AskingBroker, do: Callable[..., None], status: SendStatus
) -> None:
    broker.half_status = int(status)  # type: ignore[assignment]
    do(broker, lambda _: None)
    assert broker.told == [("half", COMMIT)]


def test_what_is_not_known_to_be_rolled_back_is_not_told_to_be(broker: AskingBroker, caplog: pytest.LogCaptureFixture) -> None:
    broker.half_status = int(SendStatus.FLUSH_SLAVE_TIMEOUT)  # type: ignore[assignment]
    broker.fail("a", _methods.END_TRANSACTION, *[ConnectionLostError("silent")] * 99)
    with (
        TransactionProducer("g", lambda _: COMMIT, transport=FakeSyncTransport(broker)) as producer,
        pytest.raises(NotConfirmedError, match="the broker may not know yet, and ask the check listener") as caught,
    ):
        producer.begin("T", b"", timeout_s=0.2)
    assert not caught.value.definite
    assert not send(broker, lambda _: None, timeout_s=0.2).is_ended
    assert "may not know yet that the transaction" in caplog.text


REFUSALS = pytest.mark.parametrize("refusal", [TransactionEndedError("it was committed"), InvalidArgumentError("not so")])


@BOTH_BEGIN
@REFUSALS
def test_no_block_begins_where_the_roll_back_is_refused_either(
    broker: AskingBroker, do: Callable[..., None], refusal: ProtomqError, caplog: pytest.LogCaptureFixture
) -> None:
    broker.half_status = int(SendStatus.FLUSH_SLAVE_TIMEOUT)  # type: ignore[assignment]
    broker.fail("a", _methods.END_TRANSACTION, refusal)
    with pytest.raises(NotConfirmedError, match=f"so no transaction is begun.*{refusal}") as caught:
        do(broker, lambda _: None)
    assert caught.value.__cause__ is not None
    assert not caught.value.definite
    assert str(refusal) in caplog.text


@BOTH_SENDS
@REFUSALS
def test_the_error_of_the_work_is_raised_where_its_roll_back_is_refused(
    broker: AskingBroker, do: Send, refusal: ProtomqError, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("no seat is left")

    broker.fail("a", _methods.END_TRANSACTION, refusal)
    with pytest.raises(ValueError, match="no seat"):
        do(broker, fail)
    assert str(refusal) in caplog.text


class Ends(Hook):
    def __init__(self) -> None:
        self.decisions: list[object] = []

    def after_end_transaction(self, context: EndTransactionContext) -> None:
        self.decisions.append(context.decision)


@BOTH_SENDS
def test_hooks_are_told_of_the_roll_back(broker: AskingBroker, do: Send) -> None:
    hook = Ends()
    broker.half_status = int(SendStatus.FLUSH_SLAVE_TIMEOUT)  # type: ignore[assignment]
    do(broker, lambda _: None, hooks=[hook])
    assert hook.decisions == [ROLL_BACK]


LOST = pytest.mark.parametrize("lost", [0, 1])
"""Answers of earlier tries: they may have been those of a master that is gone."""


def refuse(broker: AskingBroker, lost: int) -> None:
    broker.fail(
        "a", _methods.END_TRANSACTION, *[ConnectionLostError("the master is gone")] * lost, TransactionNotFoundError(NONE_OPEN)
    )


@BOTH_SENDS
@LOST
def test_work_whose_message_a_fail_over_has_taken_back_ends_with_an_error_that_says_so(
    broker: AskingBroker, do: Send, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(broker, lost)
    with pytest.raises(TransactionNotFoundError, match=r"is to COMMIT.*a fail-over has taken.*Nobody is asked.*" + NONE_OPEN) as caught:
        do(broker, lambda _: None)
    assert caught.value.definite is not bool(lost)
    assert "it will ask" not in caplog.text


@BOTH_SENDS
@LOST
def test_what_was_to_be_rolled_back_and_is_not_there_has_ended(
    broker: AskingBroker, do: Send, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(broker, lost)
    result = do(broker, lambda _: ROLL_BACK)
    assert (result.decision, result.is_ended) == (ROLL_BACK, True)
    assert "it will ask" not in caplog.text

    def fail(_: object) -> None:
        raise ValueError("no seat is left")

    refuse(broker, lost)
    with pytest.raises(ValueError, match="no seat"):
        do(broker, fail)


@BOTH_BEGIN
@LOST
def test_the_error_of_a_block_is_raised_where_its_half_message_is_not_there(
    broker: AskingBroker, do: Callable[..., None], lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("no seat is left")

    refuse(broker, lost)
    with pytest.raises(ValueError, match="no seat"):
        do(broker, fail)
    assert "was not rolled back" not in caplog.text


@BOTH_SENDS
@pytest.mark.parametrize(
    ("refusal", "said"),
    [(TransactionNotFoundError(NONE_OPEN), "Nobody is asked"), (TransactionEndedError("expired"), "has ended otherwise")],
)
def test_of_a_decision_that_nobody_waits_for_the_log_says_what_is_known(
    broker: AskingBroker, do: Send, refusal: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker.fail("a", _methods.END_TRANSACTION, refusal)  # type: ignore[arg-type]
    assert not do(broker, lambda _: None, told=1, wait_for_end=False).is_ended
    assert said in caplog.text
    assert "it will ask" not in caplog.text
