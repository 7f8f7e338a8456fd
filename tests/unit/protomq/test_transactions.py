"""What a local execution says of its transaction, how decisions are told, and what is read of the answer."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext, suppress
from dataclasses import FrozenInstanceError

import pytest

from protomq import MessageQueue, SendStatus, TransactionDecision, TransactionProducer
from protomq._async_transaction_producer import AsyncTransaction
from protomq._half_core import HalfResult
from protomq._outgoing import Stored
from protomq._told_ends import ToldEnds
from protomq._transaction_producer import Transaction
from protomq._transactions import (
    End,
    TransactionResult,
    _end_field,
    _end_fields,
    _outcomes,
    decision_of,
    refuse_never_run,
    result_of,
)
from protomq.errors import ProtocolError, RequestTimeoutError, TransactionEndedError, WrongTypeError
from protomq.v1 import transaction_service_pb2 as pb
from protomq.wire.record import encode_message_id

COMMIT, ROLL_BACK = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK


@pytest.mark.parametrize("returned", [None, TransactionDecision.COMMIT])
def test_it_commits_by_returning_nothing(returned: object) -> None:
    assert decision_of(returned) is TransactionDecision.COMMIT


@pytest.mark.parametrize("returned", [False, True, 0, 1, 5, "ROLL_BACK", "row 7", object()])
def test_what_is_no_decision_decides_nothing(returned: object) -> None:
    with pytest.raises(WrongTypeError, match=r"execute returns None, which commits, or a TransactionDecision.*left open"):
        decision_of(returned)


@pytest.mark.parametrize("returned", [TransactionDecision.ROLL_BACK, TransactionDecision.UNKNOWN])
def test_another_decision_is_taken(returned: TransactionDecision) -> None:
    assert decision_of(returned) is returned


def test_work_that_nobody_awaits_commits_nothing() -> None:
    async def book() -> None: ...

    with pytest.raises(WrongTypeError, match="AsyncTransactionProducer"):
        refuse_never_run(book())
    with pytest.raises(WrongTypeError, match="a generator, which nobody runs, so nothing was done"):
        refuse_never_run(one for one in "17A")
    refuse_never_run("17A")


@pytest.mark.parametrize("size", [0, 1, 44, 121, 122, 123, 126, 127, 128, 200])
@pytest.mark.parametrize("decision", [TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK])
def test_a_decision_is_written_as_protobuf_writes_it(
    size: int, decision: TransactionDecision
) -> None:
    end = pb.TransactionEnd(transaction_handle="h" * size, decision=pb.TransactionDecision.ValueType(decision))
    written = _end_field(b"h" * size, decision)
    assert pb.EndTransactionRequest.FromString(written) == pb.EndTransactionRequest(ends=[end])
    if size:
        assert written == pb.EndTransactionRequest(ends=[end]).SerializeToString()


def test_decisions_of_one_kind_are_written_as_protobuf_writes_them() -> None:
    commit, roll_back = TransactionDecision.COMMIT, TransactionDecision.ROLL_BACK
    for handles in (["ab", "cd", "ef"], ["h" * 200], ["ab", "c", "def"], ["ä", "ab"]):
        for decisions in ([commit] * 3, [roll_back] * 3, [commit, roll_back, commit]):
            told = list(zip(handles, decisions, strict=False))
            ends = [
                pb.TransactionEnd(transaction_handle=handle, decision=pb.TransactionDecision.ValueType(decision))
                for handle, decision in told
            ]
            written = _end_fields([End("T", "a", *one) for one in told])
            assert written == pb.EndTransactionRequest(ends=ends).SerializeToString()


def test_threads_whose_half_messages_came_together_are_expected_together_and_so_are_those_whose_decisions_did() -> None:
    def check(_: object) -> TransactionDecision:
        return TransactionDecision.UNKNOWN

    producer = TransactionProducer("desk", check, namesrv="127.0.0.1:1")
    ends, halves = producer._line_of("a"), producer._producer._line("T", None, None)
    queue = MessageQueue("T", "a", 0)
    producer._producer._on_stored(Stored(SendStatus.SEND_OK, queue, -1, 0, False, (7, 1), 0, 2))
    assert ends.company.is_expected
    assert halves.company is not None
    assert not halves.company.is_expected
    ends._on_told(2)
    assert halves.company.is_expected
    producer.close()


def test_threads_that_wait_for_no_answer_to_their_decisions_are_expected_to_send_again() -> None:
    def check(_: object) -> TransactionDecision:
        return TransactionDecision.UNKNOWN

    producer = TransactionProducer("desk", check, namesrv="127.0.0.1:1")
    halves = producer._producer._line("T", None, None)
    stored = Stored(SendStatus.SEND_OK, MessageQueue("T", "a", 0), -1, 0, False, (7, 1), 0, 2)
    assert halves.company is not None
    producer._producer._on_stored(stored)
    assert not halves.company.is_expected  # it is not known yet what they do
    producer._told["a"] = ToldEnds(producer._call_end)
    producer._producer._on_stored(stored)
    assert halves.company.is_expected
    producer.close()


def test_close_waits_for_decisions_that_threads_are_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, goes_on = threading.Event(), threading.Event()

    def call_end(*_: object) -> list[bool]:
        arrived.set()
        assert goes_on.wait(60)
        return [False]

    producer = TransactionProducer("desk", lambda _: TransactionDecision.UNKNOWN, namesrv="127.0.0.1:1")
    monkeypatch.setattr(producer, "_call_end", call_end)
    told: list[bool] = []
    end = End("T", "a", "handle", TransactionDecision.COMMIT)
    telling = threading.Thread(target=lambda: told.append(producer._end(end, None)))
    telling.start()
    assert arrived.wait(60)
    closing = threading.Thread(target=producer.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "it waits"
    goes_on.set()
    closing.join(60)
    telling.join(60)
    assert told == [False]


def answer(*results: pb.TransactionEnded) -> bytes:
    return pb.EndTransactionResponse(results=results).SerializeToString()


def test_of_each_decision_it_is_known_what_became_of_it() -> None:
    ends = [End("t", "b", "h", TransactionDecision.COMMIT)] * 3
    taken = [pb.TransactionEnded(message_id=encode_message_id(7, 1, n)) for n in range(3)]
    assert _outcomes(ends, answer(*taken)) == [False] * 3
    assert _outcomes(ends, answer(*taken[:2], pb.TransactionEnded(repeated_decision=True))) == [False, False, True]
    # As long as an id, and something else.
    again = pb.TransactionEnded(message_id="0" * 38, repeated_decision=True)
    assert _outcomes(ends, answer(taken[0], again, taken[2])) == [False, True, False]
    refused = pb.TransactionEnded(error_reason="TRANSACTION_ENDED", error_message="m" * 21)
    assert len(answer(refused)) == len(answer(taken[0]))
    found = _outcomes(ends, answer(taken[0], refused, taken[2]))
    assert (found[0], found[2]) == (False, False)
    assert isinstance(found[1], TransactionEndedError)
    for wrong in (answer(*taken[:2]), answer(*taken, taken[0]), answer(*taken)[:-1], b"", answer(*taken)[:-1] + b"\xff"):
        with pytest.raises(ProtocolError):
            _outcomes(ends, wrong)


def test_a_result_that_is_made_by_its_slots_is_one_of_the_class() -> None:
    half = HalfResult(SendStatus.SEND_OK, MessageQueue("T", "a", 0), -1, 7, False, (1, 0, 5))
    made = result_of(half, TransactionDecision.COMMIT, True)
    assert made == TransactionResult(half, TransactionDecision.COMMIT, True)
    assert (made.half, made.decision, made.is_ended) == (half, TransactionDecision.COMMIT, True)
    with pytest.raises(FrozenInstanceError):
        made.is_ended = False  # type: ignore[misc]


class Decisions:
    """The end of a producer's transactions: the broker's first answers are lost."""

    def __init__(self, lost_count: int) -> None:
        self.told: list[TransactionDecision] = []
        self._lost_count = lost_count

    def end(self, _half: object, decision: TransactionDecision, *, timeout_s: float | None) -> None:
        self.told.append(decision)
        if len(self.told) <= self._lost_count:
            raise RequestTimeoutError("silent")


class AsyncDecisions(Decisions):
    async def end(self, half: object, decision: TransactionDecision, *, timeout_s: float | None) -> None:  # type: ignore[override]
        super().end(half, decision, timeout_s=timeout_s)


def told_by_block(flavour: str, name: str, *, lost_count: int, is_caught: bool) -> list[TransactionDecision]:
    """What a broker is told whose first answers are lost: by a call in a `with` block, and by the end of the block."""
    if flavour == "threads":
        decisions = Decisions(lost_count)
        with suppress(RequestTimeoutError), Transaction(decisions, half()) as transaction:  # type: ignore[arg-type]
            with suppress(RequestTimeoutError) if is_caught else nullcontext():
                getattr(transaction, name)()
        return decisions.told

    async def run() -> list[TransactionDecision]:
        decisions = AsyncDecisions(lost_count)
        with suppress(RequestTimeoutError):
            async with AsyncTransaction(decisions, half()) as transaction:  # type: ignore[arg-type]
                with suppress(RequestTimeoutError) if is_caught else nullcontext():
                    await getattr(transaction, name)()
        return decisions.told

    return asyncio.run(run())


def half() -> HalfResult:
    return HalfResult(SendStatus.SEND_OK, MessageQueue("T", "b", 0), -1, 0, False, (7, 0, 1))


@pytest.mark.parametrize("flavour", ["threads", "coroutines"])
def test_the_end_of_a_block_never_decides_otherwise_than_the_program_has(flavour: str) -> None:
    # The work is done, and the broker may have the decision: it asks if it has not.
    assert told_by_block(flavour, "commit", lost_count=1, is_caught=False) == [COMMIT]
    assert told_by_block(flavour, "commit", lost_count=1, is_caught=True) == [COMMIT, COMMIT]
    for is_caught in (False, True):
        for lost_count in (1, 2):
            assert told_by_block(flavour, "roll_back", lost_count=lost_count, is_caught=is_caught) == [ROLL_BACK, ROLL_BACK]
    for name, decision in (("commit", COMMIT), ("roll_back", ROLL_BACK)):
        assert told_by_block(flavour, name, lost_count=0, is_caught=False) == [decision]
