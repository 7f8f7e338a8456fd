"""Ends transactions on the send lane: the copy that a commit makes and the record of the commit are one append.

Rules:
- All decisions of a turn are appended together, in parts that an append takes.
- The first decision counts. A repeat of it gets the same answer; a different one is refused, and changes nothing.
- A committed message keeps id, keys, tag, properties and queue. If its due time is in the future, it is kept; otherwise the message is
  delivered at once. If the topic has fewer queues by then, it goes to another one (`topic_access.keep_to_queues`).
- A half message that is damaged cannot be committed: its transaction stays open. It can be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter, ge
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from protomq.wire.record import encode_message_id
from protomq.wire.topics import TRANSACTIONS_TOPIC
from protomq_runtime.errors import Code, ServiceError, corrupt_log

from .store.state.transactions import (
    Ending,
    HalfMessage,
    TransactionKey,
    Verdict,
    key_of,
)
from .store_errors import to_service_error
from .topic_access import add_missing_topics, keep_to_queues

if TYPE_CHECKING:
    from .log_time import LogTime
    from .store.store import Store
    from .system_writer import SystemWriter

COMMITTED_SIZE_MAX_BYTES: Final = 4 << 20
"""Most bytes of committed messages in one append, not counting the last one."""
ENDED_COUNT_MAX: Final = 4_096
"""Most transactions in one record."""
_COMMITTED: Final = Ending.COMMITTED
_ENDING_NAMES: Final = {
    Ending.COMMITTED: "committed",
    Ending.ROLLED_BACK: "rolled back",
    Ending.EXPIRED: "expired",
}


class Wanted(NamedTuple):
    """A decision, on the transaction that a handle names: the fields of it, but for the broker's name."""

    key: TransactionKey
    position: int
    ending: Ending

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return encode_message_id(*self.key)

    def names(self, half: HalfMessage) -> bool:
        """Whether its handle can mean this half message, which has the same key. Half messages are carried forward, never back."""
        return half.position >= self.position


new_wanted: Final[Callable[[Iterable[Any]], Wanted]] = partial(tuple.__new__, Wanted)
"""As the class makes it, but without a call of Python for each."""
_position_of: Final[Callable[[HalfMessage], int]] = attrgetter("position")
_size_of: Final[Callable[[HalfMessage], int]] = attrgetter("size_bytes")


class Outcome(NamedTuple):
    """The result of a decision. `error`: why it was refused; `repeated`: the transaction had ended this way before."""

    error: ServiceError | None = None
    repeated: bool = False


ENDED_NOW: Final = Outcome()
"""It is taken: the usual one, and recognised by `is`."""
_ENDED_BEFORE: Final = Outcome(repeated=True)


class TransactionEndings:
    """The send lane."""

    def __init__(self, store: Store, writer: SystemWriter, log_time: LogTime) -> None:
        self._store = store
        self._writer = writer
        self._log_time = log_time

    def end(self, decisions: Sequence[Wanted]) -> list[Outcome]:
        """Appends what is decided; what became of each decision. Up to the end of the log of now, the outcomes are to be stored."""
        outcomes = [ENDED_NOW] * len(decisions)
        keys, positions, endings = zip(*decisions, strict=True)
        wanted: dict[TransactionKey, Ending] = dict(zip(keys, endings, strict=True))
        halves = self._store.transactions.halves_of(keys) if len(wanted) == len(keys) else None
        repeats: Sequence[int] = ()
        if halves is None or not all(map(ge, map(_position_of, halves), positions)):
            wanted, halves, repeats = self._sorted_out(decisions, outcomes)
        failures: dict[TransactionKey, ServiceError] = {}
        size_max_bytes = min(COMMITTED_SIZE_MAX_BYTES, self._store.append_size_max_bytes // 4)
        for part in _parts(halves, size_max_bytes):
            failures |= self._append(part, wanted)
        if failures:
            for number, key in enumerate(keys):
                if key in failures and outcomes[number] is ENDED_NOW:
                    outcomes[number] = Outcome(failures[key])
        for number in repeats:
            again = decisions[number]
            first = wanted[again.key]
            if again.key not in failures:
                is_same = first is again.ending
                outcomes[number] = _ENDED_BEFORE if is_same else Outcome(_ended(again, first))
        return outcomes

    def _sorted_out(
        self, decisions: Sequence[Wanted], outcomes: list[Outcome]
    ) -> tuple[dict[TransactionKey, Ending], list[HalfMessage], list[int]]:
        """The decisions that are to be appended, their half messages, and which decisions repeat one of this turn. The outcomes of those
        are known when that is appended; those of all others are set here.
        """
        wanted: dict[TransactionKey, Ending] = {}
        halves: list[HalfMessage] = []
        repeats: list[int] = []
        decide = self._store.transactions.decide
        for number, decision in enumerate(decisions):
            key, _, ending = decision
            if key in wanted:
                repeats.append(number)
                continue
            verdict, half, known = decide(key, ending)
            if half is not None and decision.names(half):
                wanted[key] = ending
                halves.append(half)
            elif verdict is Verdict.REPEATED:
                outcomes[number] = _ENDED_BEFORE
            elif known is not None:
                outcomes[number] = Outcome(_ended(decision, known))
            else:
                outcomes[number] = Outcome(_not_found(decision))
        return wanted, halves, repeats

    def _append(
        self, halves: Sequence[HalfMessage], wanted: dict[TransactionKey, Ending]
    ) -> dict[TransactionKey, ServiceError]:
        """Appends these endings together. Returns the transactions that could not be ended, with the errors."""
        try:
            keys = list(map(key_of, halves))
            chosen = list(map(wanted.__getitem__, keys))
            endings = list(zip(keys, chosen, strict=True))
            committed = list(compress(halves, map(_COMMITTED.__eq__, chosen)))
            copies = self._store.half_copies(committed, now_ms=self._log_time.now_ms())
            damaged = {half.key: _damaged(half) for half in copies.unreadable}
            if damaged:
                endings = [each for each in endings if each[0] not in damaged]
            if endings:
                states = [(TRANSACTIONS_TOPIC, [self._store.transactions.ended_record(endings)])]
                keep_to_queues(self._store, copies.requests)
                self._writer.append_moved(copies.requests, states)
                add_missing_topics(self._store, copies.requests)
        except Exception as error:
            failure = to_service_error(error)
            return {half.key: failure for half in halves}
        return damaged


def _parts(halves: Sequence[HalfMessage], size_max_bytes: int) -> Iterable[list[HalfMessage]]:
    """Splits half messages into parts that fit into one append. `size_max_bytes`: size of a part, not counting its last message."""
    if len(halves) <= ENDED_COUNT_MAX and sum(map(_size_of, halves)) < size_max_bytes:
        if halves:
            yield list(halves)
        return
    part: list[HalfMessage] = []
    size_bytes = 0
    for half in halves:
        part.append(half)
        size_bytes += half.size_bytes
        if size_bytes >= size_max_bytes or len(part) >= ENDED_COUNT_MAX:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def _not_found(wanted: Wanted) -> ServiceError:
    return ServiceError(
        Code.NOT_FOUND,
        "TRANSACTION_NOT_FOUND",
        f"there is no open transaction of message {wanted.message_id} here. There never was, its topic was deleted, or it ended longer ago"
        " than the broker remembers. Look whether the message was delivered",
        metadata={"message_id": wanted.message_id},
    )


def _ended(wanted: Wanted, ending: Ending) -> ServiceError:
    name = _ENDING_NAMES[ending]
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "TRANSACTION_ENDED",
        f"the transaction of message {wanted.message_id} has {'' if ending is Ending.EXPIRED else 'been '}{name}; nothing was changed",
        metadata={"message_id": wanted.message_id, "ending": name},
    )


def _damaged(half: HalfMessage) -> ServiceError:
    return corrupt_log(
        f"the half message {encode_message_id(*half.key)} at position {half.position} is damaged: it cannot be committed before it can be"
        " read; it can be rolled back",
        {"position": half.position},
    )
