"""Bugs of transactions that are put in on purpose: (name, patch, drill) for `planted.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from protomq_broker.store.housekeeping.carry_forward import CarryForward
from protomq_broker.store.state import half_messages
from protomq_broker.store.state.ended_transactions import EndedTransactions
from protomq_broker.store.state.transactions import (
    CheckPlan,
    Decision,
    Ending,
    HalfMessage,
    TransactionKey,
    Transactions,
    Verdict,
)
from protomq_broker.system_writer import SystemWriter
from protomq_broker.transaction_checks import TransactionChecks
from protomq_broker.waiting_answers import WaitingAnswers

from .checker import Violation
from .planted_retries import recalls_take_whatever_waits
from .store_transactions import check_transactions


def commits_in_two_appends() -> Any:
    """The record that says how transactions ended is appended, and then the copies."""

    def append_moved(self: SystemWriter, copies: Sequence[Any], states: Sequence[Any]) -> int:
        assert self._store is not None
        end_position = 0
        for topic, bodies in states:
            end_position = self._store.append_state(topic, bodies)
        return self._store.append(copies) if copies else end_position

    return mock.patch.object(SystemWriter, "append_moved", append_moved)


def _half_messages_go_with_their_segments() -> Any:
    """What is open is not carried forward."""
    return mock.patch.object(CarryForward, "_carry_halves", return_value=None)


def _forgets_how_often_it_asked() -> Any:
    """A half message that is carried forward is asked about from the beginning."""
    real = Transactions.carried_record

    def carried_record(self: Transactions, keys: Sequence[TransactionKey]) -> bytes:
        for key in keys:
            self._open[key] = self._open[key]._replace(check_count=0)
        return real(self, keys)

    return mock.patch.object(Transactions, "carried_record", carried_record)


def _the_last_decision_counts() -> Any:
    """A transaction that has ended can be ended otherwise."""
    real_decide, real_end = Transactions.decide, Transactions._end
    halves: dict[TransactionKey, HalfMessage] = {}

    def end(
        self: Transactions, keys: Sequence[TransactionKey], endings: bytes, position: int
    ) -> None:
        halves.update((key, known.half) for key in keys if (known := self._open.get(key)))
        real_end(self, keys, endings, position)

    def decide(self: Transactions, key: TransactionKey, wanted: Ending) -> Decision:
        found = real_decide(self, key, wanted)
        if found.verdict is Verdict.CONTRADICTED and key in halves:
            return Decision(Verdict.END, halves[key])
        return found

    return _all(
        mock.patch.object(Transactions, "decide", decide),
        mock.patch.object(Transactions, "_end", end),
    )


def _forgets_endings_at_a_start() -> Any:
    """How transactions ended is not in the cache."""
    return mock.patch.object(EndedTransactions, "load", return_value=None)


def _answers_before_it_is_stored() -> Any:
    """A decision is answered before the disk has it."""
    return mock.patch.object(WaitingAnswers, "is_stored", return_value=True)


def _asks_at_once() -> Any:
    """Nobody gets the six seconds."""
    real = Transactions.__init__

    def init(self: Transactions, plan: CheckPlan) -> None:
        real(self, CheckPlan(0, plan.interval_ms, plan.check_count_max))

    return mock.patch.object(Transactions, "__init__", init)


def _store_times_tell_when_half_messages_began() -> Any:
    """They do, too, where the wall clock was set back, and store times stand still."""
    return mock.patch.object(TransactionChecks, "begun_record", return_value=None)


def _records_before_half_messages() -> Any:
    """A start takes what became of half messages before it has them."""
    real = half_messages.HalfMessages.open_replayed

    def open_replayed(self: half_messages.HalfMessages, position: int | None = None) -> None:
        if position is None:
            real(self)

    return mock.patch.object(half_messages.HalfMessages, "open_replayed", open_replayed)


@contextmanager
def _all(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


TRANSACTION_BUGS: Final[
    tuple[tuple[str, Callable[[], Any], Callable[[int], list[Violation]]], ...]
] = (
    ("commits in two appends", commits_in_two_appends, check_transactions),
    ("lets half messages go with their segments", _half_messages_go_with_their_segments, check_transactions),
    ("forgets how often it asked", _forgets_how_often_it_asked, check_transactions),
    ("lets the last decision count", _the_last_decision_counts, check_transactions),
    ("forgets endings at a start", _forgets_endings_at_a_start, check_transactions),
    ("answers decisions before they are stored", _answers_before_it_is_stored, check_transactions),
    ("asks producers at once", _asks_at_once, check_transactions),
    ("goes by store times that stand still", _store_times_tell_when_half_messages_began, check_transactions),
    ("takes endings before half messages", _records_before_half_messages, check_transactions),
    ("recalls what is committed", recalls_take_whatever_waits, check_transactions),
)  # fmt: skip
