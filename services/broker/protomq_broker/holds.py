"""Held pulls: waiting for the arrival of a message without a thread.

Each pull lane has its own `LaneHolds`, touched by that lane's thread only, except for `signal`, which the writer calls. A hold is a small
object in a dictionary by queue. The order of steps makes this safe without a lock. A lane first enters the hold, then looks again whether a
message has arrived. The writer first publishes the message, then looks for holds.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from .pull_requests import request_of

if TYPE_CHECKING:
    from protomq.v1.pull_service_pb2 import PullRequest
    from protomq_runtime.call import Call
    from protomq_runtime.timers import Timer

    from .filters.filter_book import Filter

log = logging.getLogger("protomq.broker")

QueueKey = tuple[str, int]
"""Topic and queue id."""


class Hold:
    """One held pull.

    Attributes:
        key: the queue.
        call: to be answered.
        group: of the request.
        first_offset: the offset that was asked for.
        tag_codes: wanted tags, empty for all.
        queue_offset: where the next look begins, behind all messages that did not match.
        began_s: when it began, in seconds of a clock that never goes back.
        ends_s: when it ends at the latest, by the same clock.
        timer: ends the hold, perhaps together with others.
        filter: what messages have to match besides their tags. Only with a filter: `is_searching`: a search is under way; `is_signalled`:
            more messages came meanwhile; `is_expired`: the hold's time is up, so the search's result is the answer.
    """

    __slots__ = (
        "_on_drop",
        "_on_expiry",
        "began_s",
        "call",
        "ends_s",
        "filter",
        "first_offset",
        "group",
        "is_expired",
        "is_searching",
        "is_signalled",
        "key",
        "queue_offset",
        "tag_codes",
        "timer",
    )

    def __init__(
        self,
        key: QueueKey,
        call: Call,
        request: PullRequest,
        tag_codes: frozenset[int],
        queue_offset: int,
        began_s: float,
        filter_: Filter | None = None,
        *,
        on_expiry: Callable[[Hold], None],
        on_drop: Callable[[Hold], None],
    ) -> None:
        self.key = key
        self.call = call
        self.group = sys.intern(request.consumer_group)
        self.first_offset = request.queue_offset
        self.tag_codes = tag_codes
        self.queue_offset = queue_offset
        self.began_s = self.ends_s = began_s
        self.timer: Timer | CommonEnd | None = None
        self.filter = filter_
        self.is_searching = self.is_signalled = self.is_expired = False
        self._on_expiry = on_expiry
        self._on_drop = on_drop

    @property
    def request(self) -> PullRequest:
        """What was asked for, read again."""
        return request_of(self.call)

    def expire(self) -> None:
        """Its time is up."""
        self._on_expiry(self)

    def cancel_timer(self) -> None:
        """It does not end by its time. Harmless if it has no timer."""
        timer, self.timer = self.timer, None
        if isinstance(timer, CommonEnd):
            timer.remove(self)
        elif timer is not None:
            timer.cancel()

    def __call__(self) -> None:
        """Its caller is gone: the hold is itself what `Call.hold` takes. A bound method of each would cost 80 octets."""
        self._on_drop(self)


class CommonEnd:
    """Ends all holds of a lane that end at the same moment: they have one timer. At rest there are thousands of holds."""

    __slots__ = ("_ends", "_ends_ms", "_holds", "timer")

    def __init__(self, ends: dict[int, CommonEnd], ends_ms: int) -> None:
        """Stands in `ends`, by its moment, as long as it has holds."""
        self._ends = ends
        self._ends_ms = ends_ms
        self._holds: set[Hold] = set()
        self.timer: Timer | None = None

    def add(self, hold: Hold) -> None:
        """It ends with the others."""
        self._holds.add(hold)
        hold.timer = self

    def remove(self, hold: Hold) -> None:
        """It has ended already. Harmless if it is not among them."""
        self._holds.discard(hold)
        if not self._holds:
            self._forget()

    def expire(self) -> None:
        """The moment has come."""
        self._forget()
        for hold in list(self._holds):
            # An answer that closes the connection drops others.
            if hold not in self._holds:
                continue
            try:
                hold.expire()
            except Exception:
                log.exception("a held pull of queue %d of topic %s could not be ended", hold.key[1], hold.key[0])

    def _forget(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            del self._ends[self._ends_ms]


WAKE_COUNT_MAX: Final = 500
"""Holds that one turn of the lane examines. Ten thousand at once would keep its other callers waiting for 0.3 s."""


class LaneHolds:
    """The holds of one lane. `post` runs a function on the lane's thread. There `wake` gets the holds whose queues got messages."""

    __slots__ = ("_arrived", "_by_queue", "_due", "_ends", "_post", "_posted", "_wake")

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        wake: Callable[[LaneHolds, Sequence[Hold]], None],
    ) -> None:
        self._by_queue: dict[QueueKey, dict[Hold, None]] = {}
        self._arrived: deque[QueueKey] = deque()
        self._due: deque[Hold] = deque()
        self._ends: dict[int, CommonEnd] = {}
        self._post = post
        self._posted = False
        self._wake = wake

    def add(self, hold: Hold) -> None:
        """Enters a hold. Lane only; look for messages once more afterwards."""
        of_queue = self._by_queue.get(hold.key)
        if of_queue is None:
            self._by_queue[hold.key] = {hold: None}
            return
        # One key for all of a queue: those at rest at one topic have thousands.
        hold.key = next(iter(of_queue)).key
        of_queue[hold] = None

    def end_together(self, hold: Hold, ends_ms: int, call_later: Callable[[Callable[[], None]], Timer]) -> None:
        """Has a hold end at a moment, together with others. `call_later` makes the timer for the first of them. Lane only."""
        common = self._ends.get(ends_ms)
        if common is None:
            common = self._ends[ends_ms] = CommonEnd(self._ends, ends_ms)
            common.timer = call_later(common.expire)
        common.add(hold)

    def remove(self, hold: Hold) -> bool:
        """Takes a hold out. Returns False if it was not entered. Lane only."""
        holds = self._by_queue.get(hold.key)
        if holds is None or hold not in holds:
            return False
        del holds[hold]
        if not holds:
            del self._by_queue[hold.key]
        return True

    def all(self) -> list[Hold]:
        """All holds. Lane only."""
        return [hold for holds in self._by_queue.values() for hold in holds]

    def signal(self, keys: Iterable[QueueKey]) -> None:
        """Says that messages of these queues are readable now. Any thread. Many signals wake the lane once."""
        by_queue = self._by_queue
        arrived = [key for key in keys if key in by_queue]
        if not arrived:
            return
        self._arrived.extend(arrived)
        if not self._posted:
            self._posted = True
            self._post(self._run)

    def _run(self) -> None:
        self._posted = (
            False  # before the queue is drained: what is signalled from here on posts again
        )
        arrived, due = self._arrived, self._due
        for key in dict.fromkeys(arrived.popleft() for _ in range(len(arrived))):
            due.extend(self._by_queue.get(key, ()))
        slice_ = [due.popleft() for _ in range(min(len(due), WAKE_COUNT_MAX))]
        self._wake(self, [hold for hold in slice_ if hold in self._by_queue.get(hold.key, ())])
        if due and not self._posted:
            self._posted = True
            self._post(self._run)
