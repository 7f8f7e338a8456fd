"""Messages that are to be given back to their brokers: what goes in which call, and what comes of an error. No I/O, time handed in.

    add(back)                failures, as they come
    begin(now)               a BackCall: of one broker, 256 at most, 1,024 that failed alike, or one; None: nothing is due
    done(call)               the broker has them
    failed(call, error, now) what to report: the broker will never take these

Rules:
- One call to a broker at a time; the brokers are independent of each other.
- A broker that is away, or refuses for now, is asked again, with pauses that double from 1 s to 30 s. While the outcome of the call is
  unknown, the bytes, and so the request id, stay the same. What fails meanwhile waits.
- A call that is refused for good is made again with one message each: one bad message costs no other. One of more than 256 messages is
  made again in calls of 256 first. If a single message is refused because the broker does not know its delay, it goes without the delay.
  For any other reason it counts as done, and is reported.
- A delay level beyond the broker's last counts as the last, as in RocketMQ. Only the broker knows which that is: its refusal says so, and
  the call is made again with it.
- A topic or queue that is said to be missing may only be late: it is asked 10 times, or until its queues go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ._message import Message
from ._send_back import ALIKE_MAX, MESSAGES_MAX, SIZE_MAX_BYTES, BackPayload
from ._types import MessageQueue
from .errors import (
    IllegalDelayError,
    ProtomqError,
    QueueNotFoundError,
    TopicNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0
MISSING_TRIES_MAX: Final = 10
GATHER_S: Final = 0.02
"""More is gathered behind a call for this time, unless the next one is full. The delays of a group are seconds.

256 a call cost a broker half of what 32 a call cost it, and 1,024 a call four fifths of that.
"""


@dataclass(slots=True, eq=False)
class Back:
    """A message to be given back. `work`: whose it is. `fields`: of its FailedMessage."""

    work: object
    message: Message
    fields: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class BackCall:
    """One call. `payload`: once it is encoded: a further try has the same."""

    broker_name: str
    backs: list[Back]
    payload: BackPayload | None = None
    tries: int = 0
    dropped: set[Back] = field(default_factory=set)
    """Those whose queues have gone since: they need not be given back."""


@dataclass(slots=True)
class _Broker:
    waiting: deque[Back] = field(default_factory=deque)
    call: BackCall | None = None
    """Under way, or to be made again."""
    is_under_way: bool = False
    paused_until_s: float = 0.0
    gathers_until_s: float = 0.0
    pause_s: float = PAUSE_MIN_S
    single_count: int = 0
    """This many of those that wait go one by one."""
    small_count: int = 0
    """This many behind them go in calls of 256."""


class BackLine:
    """All of one consumer."""

    def __init__(self) -> None:
        self._brokers: dict[str, _Broker] = {}
        self.alike_brokers: set[str] = set()
        """Names of brokers that take messages that failed alike as runs, and more of them."""
        self.refused_count = 0
        """Messages that brokers will never take."""

    def add(self, back: Back) -> None:
        """One more."""
        name = back.message.queue.broker_name
        self._brokers.setdefault(name, _Broker()).waiting.append(back)

    def has_any(self, queues: Collection[MessageQueue] | None = None) -> bool:
        """Whether there is anything of these queues, or of any, that no broker has yet."""
        for broker in self._brokers.values():
            calls = broker.call.backs if broker.call is not None else []
            if queues is None:
                if calls or broker.waiting:
                    return True
            elif any(back.message.queue in queues for back in (*calls, *broker.waiting)):
                return True
        return False

    @property
    def count(self) -> int:
        """Messages that no broker has yet."""
        return sum(
            len(broker.waiting) + (len(broker.call.backs) if broker.call is not None else 0)
            for broker in self._brokers.values()
        )

    def begin(self, now_s: float) -> BackCall | None:
        """A call that is to be made now."""
        for name, broker in self._brokers.items():
            if broker.is_under_way or self._due_s(name, broker) > now_s:
                continue
            if broker.call is None and broker.waiting:
                broker.call = BackCall(name, _cut(broker, self._most_of(name)))
            if broker.call is not None:
                broker.is_under_way = True
                broker.call.tries += 1
                return broker.call
        return None

    def next_due_in_s(self, now_s: float) -> float:
        """Until `begin` has something by the passing of time alone; infinity if it has not."""
        return min(
            [
                max(self._due_s(name, broker) - now_s, 0.0)
                for name, broker in self._brokers.items()
                if not broker.is_under_way and (broker.call is not None or broker.waiting)
            ],
            default=float("inf"),
        )

    def done(self, call: BackCall, now_s: float) -> None:
        """The broker has them all."""
        broker = self._brokers[call.broker_name]
        broker.gathers_until_s = now_s + GATHER_S
        broker.call, broker.is_under_way = None, False
        broker.pause_s = PAUSE_MIN_S

    def failed(self, call: BackCall, error: ProtomqError, now_s: float) -> Sequence[Back]:
        """Those that will never be taken: they are finished."""
        broker = self._brokers[call.broker_name]
        broker.is_under_way = False
        is_missing = isinstance(error, TopicNotFoundError | QueueNotFoundError)
        if call.dropped and self._goes_without_dropped(broker, call, error, is_missing=is_missing):
            return ()
        if error.retriable and not (is_missing and call.tries >= MISSING_TRIES_MAX):
            pause_s = max(broker.pause_s, (error.retry_delay_ms or 0) / 1000)
            broker.paused_until_s = now_s + pause_s
            broker.pause_s = min(broker.pause_s * 2, PAUSE_MAX_S)
            return ()
        broker.call = None
        broker.pause_s = PAUSE_MIN_S
        lowered = _lowered(call.backs, error)
        if lowered is not None:
            broker.waiting.extendleft(reversed(lowered))
            if len(lowered) == 1:
                broker.single_count += 1
            elif len(lowered) <= MESSAGES_MAX:
                broker.small_count += len(lowered)
            return ()
        if len(call.backs) > 1:
            broker.waiting.extendleft(reversed(call.backs))
            if len(call.backs) > MESSAGES_MAX:
                broker.small_count = len(call.backs)
            else:
                broker.single_count = len(call.backs)
            return ()
        (back,) = call.backs
        if isinstance(error, IllegalDelayError) and _delay_names(back.fields):
            fields = {key: value for key, value in back.fields.items() if key not in _DELAYS}
            broker.waiting.appendleft(Back(back.work, back.message, fields))
            broker.single_count += 1
            return ()
        self.refused_count += 1
        return (back,)

    def drop(self, queues: Collection[MessageQueue]) -> None:
        """What is of these queues and not under way is not given back."""
        for broker in self._brokers.values():
            kept = [back.message.queue not in queues for back in broker.waiting]
            behind = broker.single_count + broker.small_count
            broker.small_count = sum(kept[broker.single_count : behind])
            broker.single_count = sum(kept[: broker.single_count])
            broker.waiting = deque(back for back in broker.waiting if back.message.queue not in queues)
            if broker.call is not None:
                broker.call.dropped.update(back for back in broker.call.backs if back.message.queue in queues)
                if not broker.is_under_way and len(broker.call.dropped) == len(broker.call.backs):
                    broker.call = None

    def _goes_without_dropped(self, broker: _Broker, call: BackCall, error: ProtomqError, *, is_missing: bool) -> bool:
        """Whether a call is over, and what is left of it waits again: it has not been done, and what was dropped may be why."""
        left = [back for back in call.backs if back not in call.dropped]
        if left and error.retriable and not is_missing:
            return False  # It may have been done, so the same call is made again.
        broker.call = None
        broker.pause_s = PAUSE_MIN_S
        broker.waiting.extendleft(reversed(left))
        if len(call.backs) <= MESSAGES_MAX:
            broker.small_count += len(left)
        return True

    def _most_of(self, name: str) -> int:
        """Most messages of a call to a broker."""
        return ALIKE_MAX if name in self.alike_brokers else MESSAGES_MAX

    def _due_s(self, name: str, broker: _Broker) -> float:
        """When its next call may be made."""
        if broker.call is not None or broker.single_count or broker.small_count or len(broker.waiting) >= self._most_of(name):
            return broker.paused_until_s
        return max(broker.paused_until_s, broker.gathers_until_s)


_DELAYS: Final = ("delay_level", "delay_ms")


def _delay_names(fields: Mapping[str, Any]) -> list[str]:
    return [name for name in _DELAYS if name in fields]


def _lowered(backs: Sequence[Back], error: ProtomqError) -> list[Back] | None:
    """The same with no delay level beyond the one that the error names as the last; None if there is none."""
    if not isinstance(error, IllegalDelayError) or error.metadata.get("field") != "delay_level":
        return None
    last_level = int(error.metadata.get("limit", 0))
    if not any(back.fields.get("delay_level", 0) > last_level > 0 for back in backs):
        return None
    return [
        Back(back.work, back.message, {**back.fields, "delay_level": last_level})
        if back.fields.get("delay_level", 0) > last_level
        else back
        for back in backs
    ]


def _cut(broker: _Broker, count_max: int) -> list[Back]:
    """What goes in the next call. The route to a broker is that of a topic, so they are of one topic."""
    first = broker.waiting.popleft()
    if broker.single_count:
        broker.single_count -= 1
        return [first]
    if broker.small_count:
        count_max = min(MESSAGES_MAX, broker.small_count)
    backs, size_bytes = [first], first.message.size_bytes
    topic, is_alike = first.message.queue.topic, count_max > MESSAGES_MAX
    while broker.waiting and len(backs) < (count_max if is_alike else min(count_max, MESSAGES_MAX)):
        behind = broker.waiting[0]
        size_bytes += behind.message.size_bytes
        if size_bytes > SIZE_MAX_BYTES:
            break
        is_alike = is_alike and behind.fields == first.fields and behind.message.queue.topic == topic
        if not is_alike and len(backs) >= MESSAGES_MAX:
            break
        backs.append(broker.waiting.popleft())
    broker.small_count = max(broker.small_count - len(backs), 0)
    # Listeners are done in no order. Neighbours that stand side by side cost a broker less.
    backs.sort(key=lambda back: (back.message.queue.topic, back.message.queue.queue_id, back.message.queue_offset))
    return backs
