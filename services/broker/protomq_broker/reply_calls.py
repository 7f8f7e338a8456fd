"""Knows which callers wait for replies, and which replies wait for callers. No I/O, no clock: the driver gives the time, and each method
returns the effects to do.

    caller   wait ──────────▶ held until there are replies; then given, and the caller says with its next wait which of them it has
    replier  reply ─────────▶ held until the caller has it (Delivered), wants it no more or does not come (Refused)

Rules:
- A reply is delivered when its caller confirms it. If the caller's next wait does not name a given reply, its answer was lost, and the
  reply is given again.
- A caller counts as present while it waits, and `grace_ms` longer: its connection may have broken, or it may be working on a reply. Replies
  wait for it.
- Callers may also name replies from an earlier start of the broker: ids are never used twice.
- For `settle_ms` after the start, an unknown caller may be one that has not come back yet: replies wait for it, too. A caller that has said
  goodbye since the start is known to be gone.
- Of two held waits of one caller the later one counts.
- What waits is bounded: callers, replies of a caller, and bytes over all.

A waiter is whatever the driver names it by (its call): it is compared by identity, and comes back in the effects. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

GRACE_MS: Final = 10_000
"""How long a reply waits for its caller to come back. A client replaces a broken connection in less time."""
SETTLE_MS: Final = 10_000
CALLERS_MAX: Final = 10_000
REPLIES_MAX: Final = 1_000
"""Most replies that wait for one caller."""
REPLIES_SIZE_MAX_BYTES: Final = 64 << 20
"""Most bytes of replies that wait, over all callers."""
ANSWER_SIZE_MAX_BYTES: Final = 3 << 20
"""Most bytes of replies in one answer; one reply is always given. gRPC clients take 4 MiB by default."""
REPLY_OVERHEAD_BYTES: Final = 500
FORGOTTEN_AT_ONCE: Final = 100
"""Most callers that one call examines to forget those that are gone."""


class WaitingReply(NamedTuple):
    """A reply as its caller gets it: its number at this broker, and the encoded ReplyRequest."""

    reply_id: int
    reply: bytes


class Given(NamedTuple):
    """The wait is answered with these replies; there may be none."""

    waiter: Hashable
    replies: Sequence[WaitingReply]


class Replaced(NamedTuple):
    """The wait is refused: another one of the same caller has come."""

    waiter: Hashable
    caller_id: str


class Delivered(NamedTuple):
    """The caller has the reply of this waiter."""

    waiter: Hashable


class Refused(NamedTuple):
    """The caller is gone. `was_given`: nobody knows whether it got the reply."""

    waiter: Hashable
    caller_id: str
    was_given: bool


class TooMany(NamedTuple):
    """There is no room. `what`: the thing of which there are too many; the limit stands beside it."""

    waiter: Hashable
    what: str
    limit: int


Effect = Given | Replaced | Delivered | Refused | TooMany


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    delivered: int = 0
    refused: int = 0


@dataclass(slots=True, eq=False)
class _Reply:
    reply_id: int
    caller_id: str
    payload: bytes
    waiter: Hashable
    was_given: bool = False


@dataclass(slots=True, eq=False)
class _Caller:
    waiter: Hashable | None = None
    seen_ms: int = 0
    replies: dict[int, _Reply] = field(default_factory=dict)
    """By reply id, in the order in which they came."""


class ReplyCalls:
    """The callers of one broker. `now_ms`: time by one monotonic clock. `start_ms`: when the broker started, by the same clock."""

    def __init__(
        self,
        start_ms: int,
        *,
        callers_max: int = CALLERS_MAX,
        replies_max: int = REPLIES_MAX,
        size_max_bytes: int = REPLIES_SIZE_MAX_BYTES,
        first_id: int = 1,
    ) -> None:
        """`first_id`: id of the first reply. Each start must give another one, so that a new reply is not taken for an old one."""
        self._settled_ms = start_ms + SETTLE_MS
        self._callers_max = callers_max
        self._replies_max = replies_max
        self._size_max_bytes = size_max_bytes
        self._callers: dict[str, _Caller] = {}
        """The caller that was seen last stands last."""
        self._left: dict[str, None] = {}
        """Callers that have said goodbye, as long as replies wait for unknown ones. The last `callers_max` of them."""
        self._replies: dict[Hashable, _Reply] = {}
        self._next_id = first_id
        self._size_bytes = 0
        self.counts = Counts()

    # Callers.

    def wait(
        self,
        caller_id: str,
        waiter: Hashable,
        now_ms: int,
        *,
        is_held: bool = True,
        received: Iterable[int] = (),
        unwanted: Iterable[int] = (),
        leaves: bool = False,
    ) -> list[Effect]:
        """A caller waits for replies. `is_held`: hold the call until there is a reply; otherwise answer at once. `received` and `unwanted`
        name replies that it was given.

        `leaves`: the caller goes away instead of waiting, and gets nothing any more.
        """
        effects: list[Effect] = []
        self._note(caller_id, now_ms, leaves)
        caller = self._callers.pop(caller_id, None)
        if caller is None:
            self._forget_gone(now_ms)
            if len(self._callers) >= self._callers_max:
                return [TooMany(waiter, "callers", self._callers_max)]
            caller = _Caller()
        self._callers[caller_id] = caller
        caller.seen_ms = now_ms
        if caller.waiter is not None and (is_held or leaves):
            effects.append(Replaced(caller.waiter, caller_id))
            caller.waiter = None
        for reply_id in received:
            if reply := caller.replies.get(reply_id):
                self._remove(caller, reply)
                self.counts.delivered += 1
                effects.append(Delivered(reply.waiter))
        for reply_id in [*unwanted, *(caller.replies if leaves else ())]:
            if reply := caller.replies.get(reply_id):
                self._remove(caller, reply)
                self.counts.refused += 1
                was_given = leaves and reply.was_given
                effects.append(Refused(reply.waiter, caller_id, was_given=was_given))
        if leaves:
            del self._callers[caller_id]
            effects.append(Given(waiter, ()))
        elif not is_held and caller.waiter is not None:
            effects.append(Given(waiter, ()))  # The other one gets what comes.
        elif caller.replies or not is_held:
            effects.append(self._give(caller, waiter))
        else:
            caller.waiter = waiter
        return effects

    def wait_ends(self, caller_id: str, waiter: Hashable, now_ms: int) -> list[Effect]:
        """Ends a wait whose time is up: answers it without replies."""
        return [Given(waiter, ())] if self.waiter_left(caller_id, waiter, now_ms) else []

    def waiter_left(self, caller_id: str, waiter: Hashable, now_ms: int) -> bool:
        """Notes that the connection of a wait is gone. Returns False if it was not waiting any more."""
        caller = self._callers.get(caller_id)
        if caller is None or caller.waiter is not waiter:
            return False
        self._callers[caller_id] = self._callers.pop(caller_id)
        caller.waiter, caller.seen_ms = None, now_ms
        return True

    # Replies.

    def reply(
        self, caller_id: str, payload: bytes, waiter: Hashable, now_ms: int
    ) -> list[Effect]:
        """A reply for a caller. `payload`: the encoded ReplyRequest. Held where no effect names `waiter`, for `GRACE_MS` at most."""
        caller = self._callers.get(caller_id)
        if caller is not None and self._is_gone(caller, now_ms):
            caller = None
        if caller is None:
            self._forget_gone(now_ms)
            if now_ms >= self._settled_ms or caller_id in self._left:
                self.counts.refused += 1
                return [Refused(waiter, caller_id, was_given=False)]
            if len(self._callers) >= self._callers_max:
                return [TooMany(waiter, "callers", self._callers_max)]
            caller = self._callers[caller_id] = _Caller(seen_ms=now_ms)
        size_bytes = len(payload) + REPLY_OVERHEAD_BYTES
        if len(caller.replies) >= self._replies_max:
            return [TooMany(waiter, "replies of a caller", self._replies_max)]
        if self._size_bytes + size_bytes > self._size_max_bytes:
            return [TooMany(waiter, "bytes of replies", self._size_max_bytes)]
        reply = _Reply(self._next_id, caller_id, payload, waiter)
        self._next_id += 1
        caller.replies[reply.reply_id] = self._replies[waiter] = reply
        self._size_bytes += size_bytes
        if caller.waiter is None:
            return []
        given = self._give(caller, caller.waiter)
        caller.waiter, caller.seen_ms = None, now_ms
        self._callers[caller_id] = self._callers.pop(caller_id)
        return [given]

    def reply_ends(self, waiter: Hashable) -> list[Effect]:
        """Ends a reply whose time is up."""
        reply = self._replies.get(waiter)
        if reply is None:
            return []
        self.replier_left(waiter)
        self.counts.refused += 1
        return [Refused(waiter, reply.caller_id, reply.was_given)]

    def replier_left(self, waiter: Hashable) -> None:
        """Takes a reply back, because its replier has gone, unless the caller has the reply already."""
        reply = self._replies.get(waiter)
        if reply is not None:
            self._remove(self._callers[reply.caller_id], reply)

    # Numbers.

    def caller_count(self, now_ms: int) -> int:
        """Number of callers that are present."""
        self._forget_gone(now_ms)
        return len(self._callers)

    @property
    def reply_count(self) -> int:
        """Number of replies that wait for their callers."""
        return len(self._replies)

    @property
    def size_bytes(self) -> int:
        """Bytes of the waiting replies, with the overhead of each."""
        return self._size_bytes

    # Inside.

    def _note(self, caller_id: str, now_ms: int, leaves: bool) -> None:
        """Notes whether a caller has left, as long as that matters."""
        left = self._left
        if now_ms >= self._settled_ms:
            left.clear()
            return
        left.pop(caller_id, None)
        if leaves:
            left[caller_id] = None
            if len(left) > self._callers_max:
                del left[next(iter(left))]

    def _give(self, caller: _Caller, waiter: Hashable) -> Given:
        given: list[WaitingReply] = []
        size_bytes = 0
        for reply in caller.replies.values():
            size_bytes += len(reply.payload)
            if given and size_bytes > ANSWER_SIZE_MAX_BYTES:
                break
            reply.was_given = True
            given.append(WaitingReply(reply.reply_id, reply.payload))
        return Given(waiter, given)

    def _remove(self, caller: _Caller, reply: _Reply) -> None:
        del caller.replies[reply.reply_id], self._replies[reply.waiter]
        self._size_bytes -= len(reply.payload) + REPLY_OVERHEAD_BYTES

    def _is_gone(self, caller: _Caller, now_ms: int) -> bool:
        return caller.waiter is None and now_ms - caller.seen_ms > GRACE_MS

    def _forget_gone(self, now_ms: int) -> None:
        """Forgets callers that were silent longest, a few at a time. Callers that still wait move to the end."""
        for caller_id in tuple(islice(self._callers, FORGOTTEN_AT_ONCE)):
            caller = self._callers[caller_id]
            if now_ms - caller.seen_ms <= GRACE_MS:
                break
            del self._callers[caller_id]
            if caller.waiter is not None:
                caller.seen_ms = now_ms
            elif not caller.replies:  # Else it goes when their time is up.
                continue
            self._callers[caller_id] = caller
