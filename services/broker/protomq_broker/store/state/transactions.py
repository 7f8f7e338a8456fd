"""Transactions: which half messages are open, when their producers are asked, and what a decision does. Values in, values out.

    half message     stored, and visible to nobody, until its producer commits it (a copy goes to its queue) or rolls it back
    check            the broker asks any live producer of the group what has become of a half message that nobody has ended
    ending           committed, rolled back, or expired: asked as often as allowed, and nobody could say

Rules:
- A transaction is named by its message's identity. It stays the same when the half message is carried forward to the end of the log.
- Half messages come from the log by `open`, all else by records of %SYS%TRANSACTIONS by `apply`, both in the order of the log. Same log,
  same state: who asks for checks reads the clock, and the time of a check stands in its record.
- A decision that is given again is answered as the first time. One that contradicts the first is refused, and changes nothing.
- Cost follows what is open. The last `ENDED_MAX` endings are remembered, as far back as the log goes. So a decision that comes twice or
  late is known.
- A topic that is deleted takes its open transactions with it.
- Half messages and endings come by tens. What they change goes by maps and zips over all of them: a step of the interpreter for each costs
  more than all that.

Source of the numbers: RocketMQ 5.3, BrokerConfig: transactionTimeOut 6 s, transactionCheckInterval 30 s, transactionCheckMax 15.
"""

from __future__ import annotations

import enum
import heapq
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.v1.state_pb2 import TransactionsRecord
from protomq.wire.record import encode_varint
from protomq.wire.topics import TRANSACTIONS_TOPIC

from .ended_transactions import EndedTransactions, rows_of

log = logging.getLogger(__name__)

ENDED_MAX: Final = 100_000
"""Endings that are remembered, the newest; a decision on an older one finds nothing."""


class Ending(enum.IntEnum):
    """How a transaction ended; the values stand in records."""

    COMMITTED = 1
    ROLLED_BACK = 2
    EXPIRED = 3


_ENDINGS: Final = tuple(Ending)
_COLUMNS: Final = (
    (TransactionsRecord.PRODUCER_IDS_FIELD_NUMBER << 3 | 2, "Q"),
    (TransactionsRecord.PRODUCER_EPOCHS_FIELD_NUMBER << 3 | 2, "I"),
    (TransactionsRecord.SEQUENCES_FIELD_NUMBER << 3 | 2, "Q"),
)
"""Tags and kinds of the fields that have a key."""
_CHECKED: Final = 4
_CARRIED: Final = 5
"""Stand where an ending would: the transaction was checked, or its record says when it is due, and stays open. The latter is said where
its half message is carried forward, and where its store time does not tell.
"""
APART_MIN_MS: Final = 100
"""Times that are closer to each other are the same."""


Key = tuple[int, int, int]
"""What a TransactionKey is to a dict."""


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

    Attributes: immunity_ms: from the half message to the first check; interval_ms: between two checks; check_count_max: then it expires.
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


class OpenTransaction(NamedTuple):
    """One that nobody has ended. `check_count`: how often its producer was asked; `due_ms`: when it is asked next, or expires."""

    half: HalfMessage
    check_count: int
    due_ms: int


# As the classes make them, but without a call of Python for each.
new_key: Final[Callable[[Iterable[int]], TransactionKey]] = partial(tuple.__new__, TransactionKey)
new_half: Final[Callable[[Iterable[Any]], HalfMessage]] = partial(tuple.__new__, HalfMessage)
_new_open: Final[Callable[[Iterable[Any]], OpenTransaction]] = partial(tuple.__new__, OpenTransaction)
key_of: Final[Callable[[HalfMessage], TransactionKey]] = attrgetter("key")
_time_of: Final[Callable[[HalfMessage], int]] = attrgetter("store_time_ms")
_half_of: Final[Callable[[OpenTransaction], HalfMessage]] = attrgetter("half")
_size_of: Final[Callable[[OpenTransaction], int]] = attrgetter("half.size_bytes")


class Known(NamedTuple):
    """All that is known at one moment. `end_position`: it reports no record at or behind it."""

    open: list[OpenTransaction]
    ended: NDArray[Any]
    end_position: int


class _Made(NamedTuple):
    """A record that was made here, and what it says."""

    body: bytes
    keys: Sequence[TransactionKey]
    events: bytes


class Transactions:
    """The machine. The writer's thread; `known`, `open_transactions` and the numbers: any thread.

    Attributes:
        counts: how many have ended in each way since `start_counting`.
        size_bytes: how much of the log the open half messages have.
    """

    topic = TRANSACTIONS_TOPIC

    def __init__(self, plan: CheckPlan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._made: _Made | None = None
        self.forget_all()

    def forget_all(self) -> None:
        """Nothing is known."""
        self._open: dict[Key, OpenTransaction] = {}
        # (due, whose): one that is due at another time by now, or has ended, is left out when it comes up.
        self._due: list[tuple[int, Key]] = []
        # The same of those that are due for the first time, which come in their order: a heap would keep each for its six seconds.
        self._first_due: deque[tuple[int, Key]] = deque()
        self._ended = EndedTransactions(ENDED_MAX)
        self._end_position = 0
        self.size_bytes = 0
        self.counts: dict[Ending, int] = dict.fromkeys(Ending, 0)

    # The log.

    def open(self, halves: Sequence[HalfMessage]) -> None:
        """Half messages, in the order of the log. One that is open already was carried forward: it stands elsewhere now."""
        immunity_ms, all_open, first_due = self._plan.immunity_ms, self._open, self._first_due
        dues_ms = list(map(immunity_ms.__add__, map(_time_of, halves)))
        opened = map(_new_open, zip(halves, repeat(0), dues_ms, strict=False))
        new: dict[Key, OpenTransaction] = dict(zip(map(key_of, halves), opened, strict=True))
        with self._lock:
            if len(new) == len(halves) and all_open.keys().isdisjoint(new):  # nearly always
                all_open.update(new)
                first_due.extend(zip(dues_ms, new, strict=True))
                self.size_bytes += sum(map(_size_of, new.values()))
                if halves:
                    self._end_position = halves[-1].position + halves[-1].size_bytes
                return
            for half in halves:
                key = half.key
                known = all_open.pop(key, None)
                if known is not None:
                    all_open[key] = known._replace(half=half)
                    self.size_bytes += half.size_bytes - known.half.size_bytes
                else:
                    due_ms = half.store_time_ms + immunity_ms
                    all_open[key] = OpenTransaction(half, 0, due_ms)
                    first_due.append((due_ms, key))
                    self.size_bytes += half.size_bytes
                self._end_position = half.position + half.size_bytes

    def apply(self, body: bytes, position: int) -> Sequence[str]:
        """Takes the body of the record of %SYS%TRANSACTIONS at `position`; no topic goes with it. One that does not hold changes nothing,
        and is said.
        """
        made, self._made = self._made, None
        if made is not None and made.body is body:
            with self._lock:
                self._end(made.keys, made.events, position)
                self._end_apply(position)
            return ()
        try:
            record = TransactionsRecord.FromString(body)
        except DecodeError:
            record = None
        identities = None if record is None else _identities(record)
        if record is None or identities is None:
            log.error("the record of %s at position %d is damaged", TRANSACTIONS_TOPIC, position)
            return ()
        events = record.events
        keys = list(map(new_key, zip(*identities, strict=True)))
        with self._lock:
            if not events or max(events) < _CHECKED:
                self._end(keys, events, position)
            else:
                carried = zip(record.check_counts, record.due_times_ms, strict=True)
                for key, event in zip(keys, events, strict=True):
                    if event == _CHECKED:
                        self._wait(key, None, record.time_ms + self._plan.interval_ms)
                    elif event == _CARRIED:
                        self._wait(key, *next(carried))
                    else:
                        self._end([key], bytes([event]), position)
            self._end_apply(position)
        return ()

    def ended_record(self, keys: Sequence[TransactionKey], endings: bytes) -> bytes:
        """See the function. `apply` takes this very object without parsing it: it is appended at once, as a rule."""
        self._made = _Made(ended_record(keys, endings), keys, endings)
        return self._made.body

    def forget_topic(self, topic: str, end_position: int | None = None) -> None:
        """The topic is deleted: its half messages before `end_position` are nobody's; all of them without one."""
        with self._lock:
            gone = [
                known
                for known in self._open.values()
                if known.half.topic == topic
                and (end_position is None or known.half.position < end_position)
            ]
            for known in gone:
                del self._open[known.half.key]
                self.size_bytes -= known.half.size_bytes

    def forget_below(self, position: int) -> None:
        """The log begins there now: what ended before is not known any more."""
        with self._lock:
            self._ended.forget_below(position)

    def start_counting(self) -> None:
        """From here on `counts` counts."""
        self.counts = dict.fromkeys(Ending, 0)

    def load(self, known: Known) -> None:
        """Takes over what `known` gave."""
        self.forget_all()
        for one in known.open:
            self._open[one.half.key] = one
            self._due.append((one.due_ms, one.half.key))
            self.size_bytes += one.half.size_bytes
        heapq.heapify(self._due)
        self._ended.load(known.ended)
        self._end_position = known.end_position

    # Questions.

    def known(self) -> Known:
        """All that is known at this moment."""
        with self._lock:
            all_open, ended, end_position = list(self._open.values()), self._ended.runs(), self._end_position
        return Known(all_open, rows_of(ended), end_position)

    def open_transactions(self) -> list[OpenTransaction]:
        """All open ones, in the order in which their half messages stand in the log."""
        with self._lock:
            return list(self._open.values())

    def knows(self, key: TransactionKey) -> bool:
        """Whether it is open, or is remembered as ended."""
        return key in self._open or self._ended.get(key) is not None

    def knows_any(self, producer_id: int, producer_epoch: int, sequences: range) -> bool:
        """Whether it `knows` one of these."""
        producer = repeat(producer_id), repeat(producer_epoch)
        keys = list(zip(*producer, sequences, strict=False))
        return not self._open.keys().isdisjoint(keys) or self._ended.has_any(producer_id, producer_epoch, sequences)

    def find(self, key: TransactionKey) -> OpenTransaction | None:
        """An open one."""
        return self._open.get(key)

    def halves_of(self, keys: Sequence[Key]) -> list[HalfMessage] | None:
        """Their half messages; None unless all of them are open."""
        try:
            return list(map(_half_of, map(self._open.__getitem__, keys)))
        except KeyError:
            return None

    @property
    def open_count(self) -> int:
        """Number of open transactions."""
        return len(self._open)

    def decide(self, key: Key, wanted: Ending) -> Decision:
        """What a decision of a producer or an operator does."""
        known = self._open.get(key)
        if known is not None:
            return Decision(Verdict.END, known.half)
        found = self._ended.get(key)
        if found is None:
            return Decision(Verdict.UNKNOWN)
        verdict = Verdict.REPEATED if found == wanted else Verdict.CONTRADICTED
        return Decision(verdict, None, Ending(found))

    def due(self, now_ms: int, count_max: int) -> Due:
        """At most `count_max` whose time has come, the longest due first. They stay due until the log says what was done."""
        found: dict[tuple[int, Key], None] = {}
        due = Due([], [])
        while len(found) < count_max and (next_ms := self.next_due_ms()) is not None:
            if next_ms > now_ms:
                break
            entry = heapq.heappop(self._due)
            if entry in found:  # it got another time, and then this one again
                continue
            found[entry] = None
            known = self._open[entry[1]]
            may_check = known.check_count < self._plan.check_count_max
            (due.to_check if may_check else due.to_expire).append(known.half)
        for entry in found:
            heapq.heappush(self._due, entry)
        return due

    def next_due_ms(self) -> int | None:
        """When `due` gives something next; None if nothing is open."""
        others, first = self._due, self._first_due
        while others or first:
            if first and (not others or first[0] < others[0]):
                heapq.heappush(others, first.popleft())
            due_ms, key = others[0]
            known = self._open.get(key)
            if known is not None and known.due_ms == due_ms:
                return due_ms
            heapq.heappop(others)
        return None

    def below(self, position: int, count_max: int) -> list[HalfMessage]:
        """The first of the open ones that stand before `position`, which are to be carried forward before the log is cut there."""
        found: list[HalfMessage] = []
        with self._lock:
            for known in self._open.values():  # in the order of the log
                if known.half.position >= position or len(found) == count_max:
                    break
                found.append(known.half)
        return found

    def carried_record(self, keys: Sequence[TransactionKey]) -> bytes:
        """The body of a record that goes with half messages that are appended again: how often they were checked, and when they are due."""
        return due_record([self._open[key] for key in keys])

    def begun_record(self, keys: Sequence[TransactionKey], now_ms: int) -> bytes:
        """The body of a record that goes with half messages that are sent at `now_ms`, whatever their store time is."""
        count = len(keys)
        dues_ms = [now_ms + self._plan.immunity_ms] * count
        return _record(keys, bytes([_CARRIED]) * count, check_counts=[0] * count, due_times_ms=dues_ms)

    def amended(self, keys: Sequence[TransactionKey], now_ms: int, apart_ms: int) -> list[OpenTransaction]:
        """Those of the open transactions at a start that are due at another time by its clock, with that time.

        None is due later than if it began, or was checked, now. `apart_ms`: store times of this moment are behind the clock by that. So
        may be those that alone tell when a transaction has begun.
        """
        plan = self._plan
        found = []
        for key in keys:
            known = self.find(key)
            if known is None:
                continue
            due_ms = known.due_ms
            if not known.check_count and due_ms == known.half.store_time_ms + plan.immunity_ms:
                due_ms += apart_ms
            due_ms = min(due_ms, now_ms + (plan.interval_ms if known.check_count else plan.immunity_ms))
            if max(due_ms, now_ms) != max(known.due_ms, now_ms) and abs(due_ms - known.due_ms) >= APART_MIN_MS:
                found.append(known._replace(due_ms=due_ms))
        return found

    def checked_too_often(self) -> list[TransactionKey]:
        """Those that were to expire and could not be read: only then does the count of checks pass its limit."""
        count_max = self._plan.check_count_max
        return [known.half.key for known in self.open_transactions() if known.check_count > count_max]

    # Parts, with the lock held.

    def _wait(self, key: TransactionKey, check_count: int | None, due_ms: int) -> None:
        """Sets when an open transaction is due and how often it was checked; None: once more."""
        known = self._open.get(key)
        if known is None:
            return
        count = known.check_count + 1 if check_count is None else check_count
        self._open[key] = OpenTransaction(known.half, count, due_ms)
        if known.due_ms != due_ms:
            heapq.heappush(self._due, (due_ms, key))

    def _end_apply(self, position: int) -> None:
        # Those at the front that have ended: what has ended costs no memory.
        first_due = self._first_due
        if not self._open:  # often, where a few callers end what they begin
            first_due.clear()
        while first_due and first_due[0][1] not in self._open:
            first_due.popleft()
        self._end_position = position + 1

    def _end(self, keys: Sequence[TransactionKey], endings: bytes, position: int) -> None:
        """The record at a position ends these; of those that have ended already, the first ending counts."""
        all_open, counted = self._open, endings
        before = len(all_open)
        found: list[Any] = list(map(all_open.pop, keys, repeat(None)))
        if before - len(all_open) == len(keys):  # nearly always
            known = found
        else:
            counted = bytes(e for e, one in zip(endings, found, strict=True) if one is not None)
            known = [one for one in found if one is not None]
        self.size_bytes -= sum(map(_size_of, known))
        for ending in _ENDINGS:
            if ending in counted:
                self.counts[ending] += counted.count(ending)
        # The log may be cut between a half message and its ending: the ending is known all the same.
        self._ended.add_all(keys, endings, position)


def ended_record(keys: Sequence[TransactionKey], endings: bytes) -> bytes:
    """The body of a record that says how transactions ended, by an octet each; in one append with the copies of those committed."""
    return _record(keys, endings)


def checked_record(keys: Sequence[TransactionKey], time_ms: int) -> bytes:
    """The body of a record that says which transactions are checked at `time_ms`."""
    return _record(keys, bytes([_CHECKED]) * len(keys), time_ms=time_ms)


def due_record(all_open: Sequence[OpenTransaction]) -> bytes:
    """The body of a record that says how often open transactions were checked, and when they are due."""
    return _record(
        [one.half.key for one in all_open],
        bytes([_CARRIED]) * len(all_open),
        check_counts=[one.check_count for one in all_open],
        due_times_ms=[one.due_ms for one in all_open],
    )


def _record(keys: Sequence[TransactionKey], events: bytes, **more: Any) -> bytes:
    rest = TransactionsRecord(events=events, **more).SerializeToString()
    if not keys:
        return rest
    # The columns as protobuf packs them; it would look at each value by itself.
    columns = zip(_COLUMNS, zip(*keys, strict=True), strict=True)
    return b"".join([_packed(tag, of_values, column) for (tag, of_values), column in columns]) + rest


def _packed(tag: int, of_values: str, values: Sequence[int]) -> bytes:
    octets = struct.pack(f"<{len(values)}{of_values}", *values)
    return b"%c%b%b" % (tag, encode_varint(len(octets)), octets)


def _identities(record: TransactionsRecord) -> tuple[list[int], ...] | None:
    """Producer ids, epochs and sequences, as lists; None unless all columns belong together."""
    # A slice gives all values at once.
    found = record.producer_ids[:], record.producer_epochs[:], record.sequences[:]
    events = record.events
    count, carried = len(events), events.count(_CARRIED)
    if (
        any(len(column) != count for column in found)
        or len(record.check_counts) != carried
        or len(record.due_times_ms) != carried
        or (count and not 1 <= min(events) <= max(events) <= _CARRIED)
    ):
        return None
    return found
