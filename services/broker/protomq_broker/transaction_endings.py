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
from itertools import compress
from operator import attrgetter, ge
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq.wire.record import encode_message_id
from protomq.wire.topics import TRANSACTIONS_TOPIC
from protomq_runtime.errors import Code, ServiceError, corrupt_log

from .store.state.transactions import (
    Ending,
    HalfMessage,
    Key,
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
"""Most bytes of committed messages in one append, unless it is one message."""
TURN_SIZE_MAX_BYTES: Final = 16 << 20
"""Most bytes of messages that one turn commits, unless it is one message: sends wait some 20 ms for it."""
ENDED_COUNT_MAX: Final = 4_096
"""Most transactions in one record."""
_ENDING_NAMES: Final = {
    Ending.COMMITTED: "committed",
    Ending.ROLLED_BACK: "rolled back",
    Ending.EXPIRED: "expired",
}


class Wanted(NamedTuple):
    """A decision, on the transaction that a handle names: the fields of it, but for the broker's name."""

    key: Key
    position: int
    ending: Ending

    @property
    def message_id(self) -> str:
        """The id of the message."""
        return encode_message_id(*self.key)

    def names(self, half: HalfMessage) -> bool:
        """Whether its handle can mean this half message, which has the same key. Half messages are carried forward, never back."""
        return half.position >= self.position


class Decisions(NamedTuple):
    """Several of them as columns: so they come, and so they are looked up and recorded. `endings`: an octet for each."""

    keys: list[Key]
    positions: list[int]
    endings: bytes

    def parted(self, count: int) -> tuple[Decisions, Decisions]:
        """The first of them, and the others."""
        keys, positions, endings = self
        return Decisions(keys[:count], positions[:count], endings[:count]), Decisions(keys[count:], positions[count:], endings[count:])

    def wanted(self, index: int) -> Wanted:
        """One of them."""
        return Wanted(self.keys[index], self.positions[index], Ending(self.endings[index]))


def joined(some: Sequence[Decisions]) -> Decisions:
    """All of them, in this order."""
    if len(some) == 1:
        return some[0]
    keys = [key for each in some for key in each.keys]
    positions = [position for each in some for position in each.positions]
    return Decisions(keys, positions, b"".join(each.endings for each in some))


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

    def first_turn(self, decisions: Decisions) -> int:
        """How many of the decisions are to be ended in one turn, so that others get on in between."""
        transactions = self._store.transactions
        if transactions.size_bytes <= TURN_SIZE_MAX_BYTES:  # of all that are open
            return len(decisions.keys)
        size_bytes = 0
        for number, (key, ending) in enumerate(zip(decisions.keys, decisions.endings, strict=True)):
            half = transactions.decide(key, Ending.COMMITTED).half if ending == Ending.COMMITTED else None
            if half is not None:
                size_bytes += half.size_bytes
                if number and size_bytes > TURN_SIZE_MAX_BYTES:
                    return number
        return len(decisions.keys)

    def end(self, decisions: Decisions) -> list[Outcome]:
        """Appends what is decided; what became of each decision. Up to the end of the log of now, the outcomes are to be stored."""
        keys, positions, endings = decisions
        outcomes = [ENDED_NOW] * len(keys)
        halves = self._store.transactions.halves_of(keys) if len(set(keys)) == len(keys) else None
        repeats: dict[int, Ending] = {}
        if halves is None or not all(map(ge, map(_position_of, halves), positions)):
            halves, endings, repeats = self._sorted_out(decisions, outcomes)
        failures: dict[Key, ServiceError] = {}
        size_max_bytes = min(COMMITTED_SIZE_MAX_BYTES, self._store.append_size_max_bytes // 4)
        for part in _parts(halves, size_max_bytes):
            failures |= self._append(halves[part], endings[part])
        if failures:
            for number, key in enumerate(keys):
                if key in failures and outcomes[number] is ENDED_NOW:
                    outcomes[number] = Outcome(failures[key])
        for number, first in repeats.items():
            again = decisions.wanted(number)
            if again.key not in failures:
                is_same = first is again.ending
                outcomes[number] = _ENDED_BEFORE if is_same else Outcome(_ended(again, first))
        return outcomes

    def _sorted_out(
        self, decisions: Decisions, outcomes: list[Outcome]
    ) -> tuple[list[HalfMessage], bytes, dict[int, Ending]]:
        """The half messages whose decisions are to be appended, their endings, and which decisions repeat one of this turn, with that one's
        ending. The outcomes of those are known when that is appended; those of all others are set here.
        """
        wanted: dict[Key, Ending] = {}
        halves: list[HalfMessage] = []
        repeats: dict[int, Ending] = {}
        decide = self._store.transactions.decide
        for number in range(len(decisions.keys)):
            decision = decisions.wanted(number)
            key, _, ending = decision
            if key in wanted:
                repeats[number] = wanted[key]
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
                outcomes[number] = Outcome(self._unknown(decision))
        return halves, bytes(wanted.values()), repeats

    def _unknown(self, wanted: Wanted) -> ServiceError:
        """Why a transaction is not known here: if its half message stood in a damaged part, or was carried there, it was not read."""
        if not self._store.has_skipped(wanted.position):
            return _not_found(wanted)
        return corrupt_log(
            f"the half message {wanted.message_id} of position {wanted.position} stood in a part of the log that is damaged, or may have"
            " been carried there. Whether its transaction is open is known once that is healed: decide again then",
            {"position": wanted.position},
        )

    def _append(self, halves: Sequence[HalfMessage], endings: bytes) -> dict[Key, ServiceError]:
        """Appends these endings together. Returns the transactions that could not be ended, with the errors."""
        try:
            is_commit = map(Ending.COMMITTED.__eq__, endings)
            committed = halves if endings.count(Ending.COMMITTED) == len(halves) else list(compress(halves, is_commit))
            copies = self._store.half_copies(committed, now_ms=self._log_time.now_ms())
            damaged: dict[Key, ServiceError] = {half.key: _damaged(half) for half in copies.unreadable}
            keys = list(map(key_of, halves))
            if damaged:
                is_sound = [key not in damaged for key in keys]
                keys, endings = list(compress(keys, is_sound)), bytes(compress(endings, is_sound))
            if keys:
                record = self._store.transactions.ended_record(keys, endings)
                keep_to_queues(self._store, copies.requests)
                self._writer.append_moved(copies.requests, [(TRANSACTIONS_TOPIC, [record])])
                add_missing_topics(self._store, copies.requests)
        except Exception as error:
            failure = to_service_error(error)
            return {half.key: failure for half in halves}
        return damaged


def _parts(halves: Sequence[HalfMessage], size_max_bytes: int) -> Iterable[slice]:
    """Splits half messages into parts that fit into one append. `size_max_bytes`: of a part, unless it is one message."""
    if len(halves) <= ENDED_COUNT_MAX and sum(map(_size_of, halves)) < size_max_bytes:
        if halves:
            yield slice(len(halves))
        return
    start = size_bytes = 0
    for number, half in enumerate(halves):
        if number > start and (size_bytes + half.size_bytes > size_max_bytes or number - start >= ENDED_COUNT_MAX):
            yield slice(start, number)
            start, size_bytes = number, 0
        size_bytes += half.size_bytes
    if start < len(halves):
        yield slice(start, len(halves))


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
