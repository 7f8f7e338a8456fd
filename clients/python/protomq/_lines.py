"""Lines: where concurrent sends gather while a request is on its way. One kind for threads, one for coroutines.

A line belongs to a queue, or of all queues of a topic for messages that may go to any. While it is idle, a message
goes out at once, alone: there is no linger. While it is busy, messages gather, and what has gathered goes out as one request when
a request returns. So a line grows its batches exactly as fast as its callers outrun the broker.

- A line has one request in flight at most. So the messages of one producer to one chosen queue keep the order of their calls; and
  it is the fastest as well. On two cores, broker included, 64 threads send 20,000 messages a second with a request each, 44,000
  with one in flight. 64 coroutines send 68,000 with two in flight, 89,000 with one.
- Threads: no thread of our own is in between. The caller that finds the line free is the leader. It makes the request and waits for
  the answer. Then it hands the line over to one of the callers that gathered meanwhile, and wakes those whose messages it carried.
- Waking is a chain, two of them: the leader wakes two callers, and each, before it does anything else, wakes the next. Threads
  that are all woken at once only fight for the GIL: 64 callers get 30,000 messages a second that way, and 44,000 this way.
- The lock of a line is held for a few list operations, never over a call.
- Ctrl-C may come at any place: also between a line's word that the caller leads, and the `try` that would give the line back. So a line
  knows its leader by name, and whoever is interrupted looks whether it still is (`LineSender._interrupted`).
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ._company import Company
from ._types import Target
from .errors import ProtomqError, RequestTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from ._batching import PreparedRecord
    from ._outgoing import SendResult, Stored
    from ._types import MessageQueue

DEADLINE_SPREAD_S: Final = 0.5
"""A request has the deadline of the first of its callers to give up; none is to lose more of its time than this."""

LINES_MAX: Final = 4_096
"""If a producer has this many lines, it drops idle ones of delays."""

CHAINS: Final = 2
"""Chains in which callers are woken; 1 to 4 measure about alike."""

_RECORD_OVERHEAD_BYTES: Final = 256
"""What a record is counted with beyond its body."""


class Entry:
    """One message of one caller: of a thread that waits for `wakeup`, or of a future."""

    __slots__ = (
        "batch",
        "deadline_s",
        "error",
        "future",
        "index",
        "is_in_line",
        "next_to_wake",
        "record",
        "stored",
        "wakeup",
    )

    def __init__(
        self, record: PreparedRecord, deadline_s: float, future: Future[SendResult] | None = None
    ) -> None:
        self.record = record
        self.deadline_s = deadline_s
        self.future = future
        self.wakeup: threading.Lock | None = None
        self.batch: list[Entry] | None = None
        """Set when this caller is to lead these messages, or leads them: its own among them."""
        self.is_in_line = False
        """Whether a line has it, or has had it: then somebody sees to its outcome."""
        self.stored: Stored | None = None
        self.index = 0
        self.error: BaseException | None = None

        self.next_to_wake: Entry | None = None

    @property
    def resolved(self) -> bool:
        """Whether the outcome is there."""
        return self.stored is not None or self.error is not None

    def pass_on(self) -> None:
        """Wakes the next caller of the chain; to be called first thing after being woken."""
        if self.next_to_wake is not None and self.next_to_wake.wakeup is not None:
            wake(self.next_to_wake.wakeup)
            self.next_to_wake = None


def wake(wakeup: threading.Lock) -> None:
    """Wakes who waits for it; after an interrupt somebody may have done so already."""
    try:
        wakeup.release()
    except RuntimeError:
        pass


class Line:
    """The line of a queue, or of a topic where `queue` is None; for threads. Any thread."""

    __slots__ = (
        "_count_max", "_drained", "_is_newly_led", "_leader", "_lock", "_pending", "_size_max_bytes", "_unled", "company", "queue",
        "target", "topic",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        queue: MessageQueue | None,
        delay_field: bytes | None = None,
        *,
        count_max: int,
        size_max_bytes: int,
        company: Company | None = None,
    ) -> None:
        """`company`: whom its leaders wait for; None: nobody."""
        self.company = company
        self.topic = topic
        self.queue = queue
        self.target = Target(queue, delay_field)
        self._count_max = count_max
        self._size_max_bytes = size_max_bytes
        self._leader: object = None
        """The first message that is on its way, or is to be: an Entry, or the record of a caller that was alone. None: the line is free."""
        self._unled: list[Entry] | None = None
        """Messages of which none has a thread that waits: for a worker that leads them."""
        self._is_newly_led = False
        """Whether the leader found the line free, and has not been counted among its company."""
        self._pending: list[Entry] = []
        """A list: some are taken out by one instruction, so that Ctrl-C finds all of that done, or nothing."""
        self._lock = threading.Lock()
        self._drained: threading.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether somebody leads it."""
        return self._leader is not None

    def is_led_by(self, leader: object) -> bool:
        """Whether nobody has come after this one, who called `try_to_lead` or `enter`."""
        return self._leader is leader

    def try_to_lead(self, leader: PreparedRecord) -> bool:
        """True: the line was free and is the caller's now, until it calls `leave`."""
        with self._lock:
            if self._leader is not None:
                return False
            self._leader = leader
            return True

    def take_unled(self, batch: list[Entry]) -> bool:
        """Whether a worker leads these messages: one does."""
        with self._lock:
            is_first = self._unled is batch
            if is_first:
                self._unled = None
            return is_first

    @property
    def unled(self) -> list[Entry] | None:
        """Messages that are next, and wait for a worker to lead them."""
        return self._unled

    def wake_leader(self) -> None:
        """Whoever was to wake the next leader was interrupted."""
        leader = self._leader
        if isinstance(leader, Entry) and leader.wakeup is not None and leader.batch is not None:
            wake(leader.wakeup)

    def enter(self, entry: Entry) -> bool:
        """True: the line was free, the caller leads its message, and calls `gather`. False: the message waits in line, and the caller calls
        `arrive`.

        Nothing here waits for the company: a caller that Ctrl-C meets there is to see to it that the line goes on.
        """
        with self._lock:
            is_free = self._leader is None
            if is_free:
                entry.batch = [entry]
                self._leader, self._is_newly_led, entry.is_in_line = entry, True, True
                if entry.future is not None:
                    self._unled = entry.batch
            else:
                if entry.future is None:
                    entry.wakeup = wakeup = threading.Lock()
                    wakeup.acquire()
                entry.is_in_line = True
                self._pending.append(entry)
        return is_free

    def arrive(self) -> None:
        """A caller whose message waits in line has come."""
        if self.company is not None:
            self.company.arrive()

    def gather(self, batch: list[Entry]) -> None:
        """Adds to a leader's messages those of callers that come at about the same time. Waits only for its company.

        To the list itself: what has left the line is in it whatever interrupts the leader.
        """
        if self._is_newly_led:
            self._is_newly_led = False
            self.arrive()
        if self.company is None or not self.company.is_expected:
            return
        self.company.wait()
        with self._lock:
            pending, length = self._pending, len(batch)
            count = batch_count(pending, self._count_max, self._size_max_bytes, batch)
            # No call from here on: no interrupt comes in between.
            batch[length:] = pending[:count]
            del pending[:count]

    def leave(self) -> tuple[list[Entry], Entry | None]:
        """A leader's request has returned: the messages to send next, [] if none wait, and who is to lead them.

        The next leader is the first of their callers that is a thread; its entry has `batch` set. None: they are all futures.
        """
        with self._lock:
            self._unled = None
            if not self._pending:
                self._leader = None
                if self._drained is not None:
                    self._drained.set()
                return [], None
            pending = self._pending
            count = batch_count(pending, self._count_max, self._size_max_bytes)
            batch = pending[:count]
            leader = None
            for entry in batch:
                if entry.wakeup is not None:
                    leader = entry
                    break
            # No call from here on: no interrupt comes in between.
            if leader is not None:
                leader.batch, self._leader = batch, leader
            else:
                self._leader, self._unled = batch[0], batch
            del pending[:count]
            return batch, leader

    def withdraw(self, entry: Entry) -> bool:
        """Takes back a message that still waits in line; False if it is on its way, or its caller is to lead."""
        with self._lock:
            try:
                index = self._pending.index(entry)
            except ValueError:
                return False
            del self._pending[index]
            entry.is_in_line = False
            return True

    def drain(self, timeout_s: float) -> list[Entry]:
        """Waits until nothing waits or is in flight; what still waits after that time is taken out and returned."""
        with self._lock:
            if self._leader is None:
                return []
            drained = self._drained = threading.Event()
        drained.wait(timeout_s)
        with self._lock:
            left = list(self._pending)
            self._pending.clear()
        return left


_ErrorT = TypeVar("_ErrorT", bound=BaseException | None)


def own_error(error: _ErrorT, index: int = 1) -> _ErrorT:
    """For the caller of this number, of whom the first has the error itself.

    Who raises an exception object writes into its traceback, which is not for the others.
    """
    if not index or not isinstance(error, ProtomqError):
        return error
    own = copy.copy(error).with_traceback(error.__traceback__)
    own.__cause__, own.__context__, own.__suppress_context__ = error.__cause__, error.__context__, error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        own.__notes__ = list(notes)
    return own


def resolve_batch(batch: list[Entry], stored: Stored | None, error: BaseException | None) -> None:
    """Gives each message its outcome and wakes its caller; futures come last, since their callbacks may take long."""
    waiting: list[Entry] = []
    for index, entry in enumerate(batch):
        if stored is not None:
            entry.index = index
            entry.stored = stored
        else:
            entry.error = own_error(error, index)
        if entry.wakeup is not None and entry.batch is None:
            waiting.append(entry)
    # Every outcome is in its place before the first caller is woken.
    for entry, follower in zip(waiting, waiting[CHAINS:], strict=False):
        entry.next_to_wake = follower
    for entry in waiting[:CHAINS]:
        assert entry.wakeup is not None
        wake(entry.wakeup)
    for entry in batch:
        future = entry.future
        # One that is not running yet may have been cancelled.
        if future is not None and (future.running() or future.set_running_or_notify_cancel()):
            if entry.stored is not None:
                future.set_result(entry.stored.result(entry.index))
            else:
                future.set_exception(entry.error)


class Waiting(Protocol):
    """What `take_batch` reads of a message in line."""

    record: PreparedRecord
    deadline_s: float


WaitingT = TypeVar("WaitingT", bound=Waiting)


def take_batch(pending: deque[WaitingT], count_max: int, size_max_bytes: int) -> list[WaitingT]:
    """Takes from the front what goes into one request; see `batch_count`."""
    return [pending.popleft() for _ in range(batch_count(pending, count_max, size_max_bytes))]


def batch_count(pending: Iterable[Waiting], count_max: int, size_max_bytes: int, batch: Sequence[Waiting] = ()) -> int:
    """How many of those in front go into one request: its limits kept, and only callers whose deadlines are near each other.

    `batch`: what the request has already. The first one always goes.
    """
    size = 0
    deadline_s: float | None = None
    for entry in batch:
        size += len(entry.record[0]) + len(entry.record[3]) + _RECORD_OVERHEAD_BYTES
        deadline_s = deadline_s or entry.deadline_s
    room, count = count_max - len(batch), 0
    for entry in pending:
        size += len(entry.record[0]) + len(entry.record[3]) + _RECORD_OVERHEAD_BYTES
        if deadline_s is None:
            deadline_s = entry.deadline_s
        elif count >= room or size > size_max_bytes or abs(entry.deadline_s - deadline_s) > DEADLINE_SPREAD_S:
            break
        count += 1
    return count


class Room:
    """Bounds the bytes that wait to be sent. Any thread."""

    def __init__(self, size_max_bytes: int) -> None:
        self._left = size_max_bytes
        self._size_max = size_max_bytes
        self._changed = threading.Condition()

    def take(self, size_bytes: int, deadline_s: float) -> None:
        """Waits for room; a single large message has room whenever nothing else waits."""
        size_bytes = min(size_bytes, self._size_max)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._left >= size_bytes, max(deadline_s - time.monotonic(), 0.0)
            ):
                error = RequestTimeoutError(
                    f"no room for the message: {self._size_max} bytes are on their way already"
                )
                error.definite = True
                raise error
            self._left -= size_bytes

    def give_back(self, size_bytes: int) -> None:
        """The message has its outcome."""
        with self._changed:
            self._left += min(size_bytes, self._size_max)
            self._changed.notify_all()
