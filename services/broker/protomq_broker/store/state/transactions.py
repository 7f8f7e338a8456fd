"""Transactions: which half messages are open, when their producers are asked, and what a decision does. Values in, values out.

    half message     stored, and visible to nobody, until its producer commits it (a copy goes to its queue) or rolls it back
    check            the broker asks any live producer of the group what has become of a half message that nobody has ended
    ending           committed, rolled back, or expired: asked as often as allowed, and nobody could say

Rules:
- A transaction is named by its message's identity. It stays the same when the half message is carried forward to the end of the log.
- Half messages come from the log by `open`, all else by records of %SYS%TRANSACTIONS by `apply`. Same log, same state: who asks
  for checks reads the clock, and the time of a check stands in its record.
- A decision that is given again is answered as the first time. One that contradicts the first is refused, and changes nothing.
- Cost follows what is open. Of what has ended, the last `ENDED_MAX` are remembered, so that a decision that comes twice or late is known.

Source of the numbers: RocketMQ 5.3, BrokerConfig: transactionTimeOut 6 s, transactionCheckInterval 30 s, transactionCheckMax 15.
"""

from __future__ import annotations

import enum
import heapq
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1.state_pb2 import TransactionsRecord
from protomq.wire.topics import TRANSACTIONS_TOPIC

log = logging.getLogger(__name__)

ENDED_MAX: Final = 100_000
"""Endings that are remembered, the newest; a decision on an older one finds nothing."""


class Ending(enum.IntEnum):
    """How a transaction ended; the values stand in records."""

    COMMITTED = 1
    ROLLED_BACK = 2
    EXPIRED = 3


_CHECKED: Final = 4
_CARRIED: Final = 5
"""Stand where an ending would: the transaction was checked, or carried forward with its half message, and stays open."""


class TransactionKey(NamedTuple):
    """The identity of a half message; its producer has an id, or the message is refused."""

    producer_id: int
    producer_epoch: int
    sequence: int


class HalfMessage(NamedTuple):
    """Where a half message stands, and where it goes when it is committed."""

    key: TransactionKey
    position: int
    size_bytes: int
    topic: str
    queue_id: int
    store_time_ms: int


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """When a producer is asked.

    Attributes: immunity_ms: from the store time to the first check; interval_ms: between two checks; check_count_max: then it expires.
    """

    immunity_ms: int = 6_000
    interval_ms: int = 30_000
    check_count_max: int = 15


class Verdict(enum.Enum):
    """What a decision does."""

    END = "the transaction is open: the decision is to be appended"
    REPEATED = "it has ended so before: the same answer, nothing is appended"
    CONTRADICTED = "it has ended otherwise: refused"
    UNKNOWN = "there is none: never was, or ended long ago"


class Decision(NamedTuple):
    """A verdict with what it is about: the half message where it is open, the ending where it has one."""

    verdict: Verdict
    half: HalfMessage | None = None
    ending: Ending | None = None


class Due(NamedTuple):
    """Whose time has come: producers to be asked, and transactions that expire, since theirs were asked as often as allowed."""

    to_check: list[HalfMessage]
    to_expire: list[HalfMessage]


class _Open:
    """An open transaction. `due_ms`: when it is to be checked, or expires."""

    __slots__ = ("check_count", "due_ms", "half")

    def __init__(self, half: HalfMessage, due_ms: int) -> None:
        self.half = half
        self.check_count = 0
        self.due_ms = due_ms


class Transactions:
    """The machine. One thread at a time.

    Attributes: counts: how many have ended in each way, as far back as the log goes.
    """

    def __init__(self, plan: CheckPlan) -> None:
        self._plan = plan
        self._open: dict[TransactionKey, _Open] = {}
        # (due, whose): one that is due at another time by now, or has ended, is left out when it comes up.
        self._due: list[tuple[int, TransactionKey]] = []
        self._ended: OrderedDict[TransactionKey, Ending] = OrderedDict()
        self.counts: dict[Ending, int] = dict.fromkeys(Ending, 0)

    # The log.

    def open(self, halves: Iterable[HalfMessage]) -> None:
        """Half messages, in the order of the log. One that is open already was carried forward: it stands elsewhere now."""
        for half in halves:
            known = self._open.get(half.key)
            if known is not None:
                known.half = half
            elif half.key not in self._ended:
                due_ms = half.store_time_ms + self._plan.immunity_ms
                self._open[half.key] = _Open(half, due_ms)
                heapq.heappush(self._due, (due_ms, half.key))

    def apply(self, body: bytes, position: int) -> None:
        """Takes the body of the record of %SYS%TRANSACTIONS at `position`; one that does not hold changes nothing, and is said."""
        try:
            record = TransactionsRecord.FromString(body)
        except DecodeError:
            record = None
        if record is None or not _holds(record):
            log.error("the record of %s at position %d does not hold", TRANSACTIONS_TOPIC, position)
            return
        carried = zip(record.check_counts, record.due_times_ms, strict=True)
        for producer_id, epoch, sequence, event in zip(
            record.producer_ids,
            record.producer_epochs,
            record.sequences,
            record.events,
            strict=True,
        ):
            key = TransactionKey(producer_id, epoch, sequence)
            if event == _CHECKED:
                self._wait(key, None, record.time_ms + self._plan.interval_ms)
            elif event == _CARRIED:
                self._wait(key, *next(carried))
            else:
                self._end(key, Ending(event))

    # Questions.

    @property
    def open_count(self) -> int:
        """Number of open transactions."""
        return len(self._open)

    def decide(self, key: TransactionKey, wanted: Ending) -> Decision:
        """What a decision of a producer or an operator does."""
        known = self._open.get(key)
        if known is not None:
            return Decision(Verdict.END, known.half)
        ending = self._ended.get(key)
        if ending is None:
            return Decision(Verdict.UNKNOWN)
        verdict = Verdict.REPEATED if ending is wanted else Verdict.CONTRADICTED
        return Decision(verdict, None, ending)

    def due(self, now_ms: int, count_max: int) -> Due:
        """At most `count_max` whose time has come, the longest due first. They stay due until the log says what was done."""
        found: list[tuple[int, TransactionKey]] = []
        due = Due([], [])
        while len(found) < count_max and (next_ms := self.next_due_ms()) is not None:
            if next_ms > now_ms:
                break
            found.append(heapq.heappop(self._due))
            known = self._open[found[-1][1]]
            may_check = known.check_count < self._plan.check_count_max
            (due.to_check if may_check else due.to_expire).append(known.half)
        for entry in found:
            heapq.heappush(self._due, entry)
        return due

    def next_due_ms(self) -> int | None:
        """When `due` gives something next; None if nothing is open."""
        while self._due:
            due_ms, key = self._due[0]
            known = self._open.get(key)
            if known is not None and known.due_ms == due_ms:
                return due_ms
            heapq.heappop(self._due)
        return None

    def halves(self) -> Iterator[tuple[HalfMessage, int]]:
        """All open ones with the number of their checks, in the order in which they were opened."""
        for known in self._open.values():
            yield known.half, known.check_count

    def below(self, position: int) -> list[HalfMessage]:
        """The open ones that stand in front of `position`, which are to be carried forward before the log is cut there."""
        return [known.half for known in self._open.values() if known.half.position < position]

    def carried_record(self, keys: Sequence[TransactionKey]) -> bytes:
        """The body of a record that goes with half messages that are appended again: how often they were checked, and when they are due."""
        known = [self._open[key] for key in keys]
        return _record(
            keys,
            bytes([_CARRIED]) * len(keys),
            check_counts=[one.check_count for one in known],
            due_times_ms=[one.due_ms for one in known],
        )

    # Parts.

    def _wait(self, key: TransactionKey, check_count: int | None, due_ms: int) -> None:
        """An open transaction is due then; it was checked so often, or with None once more."""
        known = self._open.get(key)
        if known is None:
            return
        known.check_count = known.check_count + 1 if check_count is None else check_count
        if known.due_ms != due_ms:
            known.due_ms = due_ms
            heapq.heappush(self._due, (due_ms, key))

    def _end(self, key: TransactionKey, ending: Ending) -> None:
        if self._open.pop(key, None) is not None:
            self.counts[ending] += 1
        # The log may be cut between a half message and its ending: the ending is known all the same.
        self._ended.setdefault(key, ending)
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


def ended_record(endings: Sequence[tuple[TransactionKey, Ending]]) -> bytes:
    """The body of a record that says how transactions ended; it stands in one append with the copies of those committed."""
    return _record([key for key, _ in endings], bytes(ending for _, ending in endings))


def checked_record(keys: Sequence[TransactionKey], time_ms: int) -> bytes:
    """The body of a record that says which transactions are checked at `time_ms`."""
    return _record(keys, bytes([_CHECKED]) * len(keys), time_ms=time_ms)


def _record(keys: Sequence[TransactionKey], events: bytes, **more: Any) -> bytes:
    record = TransactionsRecord(
        producer_ids=[key.producer_id for key in keys],
        producer_epochs=[key.producer_epoch for key in keys],
        sequences=[key.sequence for key in keys],
        events=events,
        **more,
    )
    return record.SerializeToString()


def _holds(record: TransactionsRecord) -> bool:
    """Whether the columns belong together."""
    count, carried = len(record.producer_ids), record.events.count(_CARRIED)
    return (
        len(record.producer_epochs) == len(record.sequences) == len(record.events) == count
        and len(record.check_counts) == len(record.due_times_ms) == carried
        and all(1 <= event <= _CARRIED for event in record.events)
    )
