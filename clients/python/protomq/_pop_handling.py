"""Handlers of popped messages: for how long each is held, and what is said of it in the end. Values and steps, no thread and no clock.

    receive ──▶ handler runs ──▶ returns                 ack
                    │            raises, Retry(delay)    nack, with the error's text
                    │            Reject()                sent to the dead letters, then ack
                    └ half of the invisible time is over, again and again: renewed, up to a limit

Rules:
- A renewal that fails, for a broker is away, is tried again; one that is refused never is: somebody else has the message. Its handler is
  told (`Hold.is_lost`), and what it says in the end counts no more.
- Messages may wait for a handler, renewed like those that are handled: as many as handlers have lately finished in AHEAD_S. So quick
  handlers need not wait for a broker, and slow ones keep nothing from other members.
- A receipt is good until somebody else has the message, also behind its time. So an end is always told to the broker, which knows, except
  where a renewal was refused before. Behind its time nobody but the broker knows, so its handler is told that it is lost.
- Times count on a clock that goes on while the machine sleeps, as the broker's does meanwhile.
- When the consumer is closed, nothing is told any more, and all that it has is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ._checks import check_count, check_seconds
from ._delays import delay_of_level_s
from ._message import Message
from ._pop_steps import (
    COUNT_MAX,
    INVISIBLE_DEFAULT_S,
    INVISIBLE_MAX_S,
    PopSteps,
    PopWish,
)
from ._pull_logic import DELETED_AFTER_S
from ._push_results import Failure, Said, failure_of, judge
from ._retry import CALL
from ._seldom import SaidSeldom
from ._steps import Steps
from ._types import PoppedQueue
from .errors import ConfigurationError, NotFoundError, ProtomqError, StaleReceiptError

logger = logging.getLogger("protomq")

CONCURRENCY_DEFAULT: Final = 20
"""RocketMQ's consumeThreadMax."""
CONCURRENCY_MAX: Final = 1_024
RENEW_LIMIT_DEFAULT_S: Final = 900.0
"""RocketMQ's consumeTimeout, 15 minutes."""
DRAIN_TIMEOUT_DEFAULT_S: Final = 10.0
RECEIVE_HOLD_S: Final = 2.0
"""For which a `receive` of `handle` is held: a stop waits for it."""
RECEIVE_AGAIN_S: Final = 1.0
"""After a `receive` that failed."""
AHEAD_S: Final = 0.25
"""What waits is work for this time, at the pace of the handlers: some round trips."""
AHEAD_DEFAULT: Final = 256
AHEAD_SIZE_MAX_BYTES: Final = 4 << 20
"""Of what waits: beyond that nothing is received, so that there are twice as much at most."""
RENEW_AT: Final = 0.5
"""Of the invisible time: three more tries fit in before it is over, at 65, 80 and 95 percent."""
RENEW_AGAIN_AT: Final = 0.15
FIRST_RETRY_LEVEL: Final = 3
"""Of the first failure, at brokers of earlier versions; others know their levels, and the group's settings."""
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Linux: CLOCK_MONOTONIC stands still there while the machine sleeps."""


def clock_s() -> float:
    """The time by which messages are held."""
    return time.clock_gettime(_CLOCK)


class HandledCounts(NamedTuple):
    """What came of `handle`.

    Attributes:
        done: messages that were acknowledged.
        failed: that were given back, or became dead letters.
        refused: what was said of them came too late, or the broker did not take it: they come again, or somebody else has them.
    """

    done: int
    failed: int
    refused: int


@dataclass(frozen=True, slots=True)
class HandlingOptions:
    """How messages are handled: see SimpleConsumer.handle."""

    concurrency: int = CONCURRENCY_DEFAULT
    invisible_s: float = INVISIBLE_DEFAULT_S
    renew_limit_s: float = RENEW_LIMIT_DEFAULT_S
    drain_timeout_s: float = DRAIN_TIMEOUT_DEFAULT_S
    ahead: int = AHEAD_DEFAULT

    def __post_init__(self) -> None:
        check_count("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        check_seconds("renew_limit_s", self.renew_limit_s, zero=True)
        check_seconds("drain_timeout_s", self.drain_timeout_s, zero=True)
        check_count("ahead", self.ahead, 0, COUNT_MAX)


class Hold:
    """For how long a message that is being handled is nobody else's. Any thread.

    Attributes:
        is_refused: the broker refused to renew: somebody else has the message, or it is a dead letter. What the handler says counts no
            more.
        is_being_renewed: the broker is asked, and has not answered yet.
        is_begun: its handler was called.
        renewed_count: how often its time was renewed.
    """

    __slots__ = ("_began_s", "_holds", "_next_s", "_until_s", "is_begun", "is_being_renewed", "is_refused", "message", "renewed_count")

    def __init__(self, message: Message, holds: Holds, began_s: float) -> None:
        self.message = message
        self.is_refused = self.is_being_renewed = self.is_begun = False
        self.renewed_count = 0
        self._holds = holds
        self._began_s = began_s
        self._is_held_from(began_s)

    def _is_held_from(self, now_s: float) -> None:
        invisible_s = self._holds.invisible_s
        self._next_s, self._until_s = now_s + invisible_s * RENEW_AT, now_s + invisible_s

    def begin(self, now_s: float) -> None:
        """A handler has it from now on, which may have it as long as it may."""
        self._began_s = now_s

    @property
    def is_lost(self) -> bool:
        """Whether somebody else has the message, or may have it: the broker refused to renew it, its time is up, or its consumer was
        closed.

        Where its time is up, a renewal may still succeed. Then it is not lost.
        """
        return bool(self._why_lost())

    def check(self) -> None:
        """Raises StaleReceiptError where it is lost: call it before what must not be done twice."""
        if why := self._why_lost():
            raise StaleReceiptError(f"message {self.message.message_id} of {self.message.topic!r} is not held any more: {why}")

    def _why_lost(self) -> str:
        """Looks at the clock itself: the thread that renews may have been stopped, too."""
        if self.is_refused:
            return "somebody else has it"
        if self._holds.is_closed:
            return "its consumer was closed, so nobody renews it, and somebody else gets it"
        late_s = self._holds.clock() - self._until_s
        if late_s >= 0:
            return f"its time was up {late_s:.3f} s ago, and it has not been renewed; somebody else may have it"
        return ""


class Holds:
    """The messages that are being handled. Any thread.

    Attributes:
        is_closed: nobody renews them any more.
        invisible_s: for how long the broker holds a message at a time.
    """

    def __init__(self, options: HandlingOptions, clock: Callable[[], float] = clock_s) -> None:
        self._options = options
        self.clock = clock
        self.is_closed = False
        self.invisible_s = options.invisible_s
        self._lock = threading.Lock()
        self._holds: dict[int, Hold] = {}

    def begin(self, message: Message, now_s: float) -> Hold:
        """The message has just been received, and goes to a handler, or waits for one."""
        hold = Hold(message, self, now_s)
        with self._lock:
            self._holds[id(message)] = hold
        return hold

    def find(self, message: Message) -> Hold | None:
        """None: no handler has it."""
        return self._holds.get(id(message))

    def end(self, hold: Hold) -> None:
        """Its handler is done with it: no renewal of it begins any more."""
        with self._lock:
            self._holds.pop(id(hold.message), None)

    def all(self) -> list[Hold]:
        """Those that are being handled."""
        with self._lock:
            return list(self._holds.values())

    def due(self, broker_name: str, now_s: float) -> list[Hold]:
        """Those of a broker that are being renewed from now on. One that has reached the limit is not any more, which is logged."""
        found: list[Hold] = []
        with self._lock:
            due = [hold for hold in self._at(broker_name) if hold._next_s <= now_s]
            for hold in due:
                if now_s - hold._began_s < self._options.renew_limit_s:
                    hold.is_being_renewed = True
                    found.append(hold)
        for hold in due:
            if not hold.is_being_renewed:
                hold._next_s = float("inf")
                logger.warning(
                    "message %s of %s is handled for %.0f s: it is renewed no more, and somebody else gets it soon",
                    hold.message.message_id, hold.message.topic, now_s - hold._began_s,
                )  # fmt: skip
        return found

    def next_due_in_s(self, broker_name: str, now_s: float) -> float:
        """Until `due` has something. What is received meanwhile is not due before that either."""
        received_now_s = now_s + self._options.invisible_s * RENEW_AT
        with self._lock:
            next_s = min([received_now_s, *(hold._next_s for hold in self._at(broker_name))])
        return max(next_s - now_s, 0.0)

    def _at(self, broker_name: str) -> Iterator[Hold]:
        return (hold for hold in self._holds.values() if hold.message.queue.broker_name == broker_name)

    def renewed(self, holds: Iterable[Hold], stale: Sequence[Message], asked_s: float) -> None:
        """The broker has renewed them, but for those that are `stale`. `asked_s`: when it was asked to."""
        lost = {id(message) for message in stale}
        for hold in holds:
            hold.is_being_renewed = False
            if id(hold.message) not in lost:
                hold.renewed_count += 1
                hold._is_held_from(asked_s)
                continue
            hold._next_s = float("inf")
            if id(hold.message) in self._holds:  # Else it was acknowledged meanwhile.
                hold.is_refused = True
                logger.warning(
                    "message %s of %s is handled, and held no more: somebody else has it", hold.message.message_id, hold.message.topic
                )

    def not_renewed(self, holds: Iterable[Hold], now_s: float) -> None:
        """The broker could not be asked: it is tried again soon."""
        for hold in holds:
            hold.is_being_renewed = False
            hold._next_s = now_s + self._options.invisible_s * RENEW_AGAIN_AT


class Ahead:
    """Messages that wait for a handler, and how many to receive. Whoever has the driver's lock, or its loop.

    Attributes:
        busy_count: handlers that run.
    """

    def __init__(self, options: HandlingOptions) -> None:
        self._options = options
        self._waiting: deque[Hold] = deque()
        self._size_bytes = 0
        self.busy_count = 0
        self._window_s = float("-inf")
        self._ended_count = self._ended_before = 0

    def room(self, now_s: float) -> int:
        """How many messages to receive now; 0: none, before a handler has ended."""
        free_count = self._options.concurrency - self.busy_count
        if self._size_bytes >= AHEAD_SIZE_MAX_BYTES:
            return 0
        ahead = self._pace(now_s)
        if len(self._waiting) > ahead // 2:
            ahead = 0  # There is enough for now: the next call is to bring many.
        return min(max(free_count + ahead - len(self._waiting), 0), COUNT_MAX)

    def begins(self, hold: Hold, *, stops: bool) -> bool:
        """Whether a handler is free for what was received; else it waits."""
        if self.busy_count < self._options.concurrency and not stops:
            self.busy_count += 1
            return True
        self._waiting.append(hold)
        self._size_bytes += hold.message.size_bytes
        return False

    def ended(self, now_s: float) -> None:
        """A handler is done with a message."""
        if now_s - self._window_s >= AHEAD_S:
            self._ended_before = self._pace(now_s)
            self._window_s, self._ended_count = now_s, 0
        self._ended_count += 1

    def next(self, now_s: float, *, stops: bool) -> Hold | None:
        """What the handler that has ended goes on with; None: nothing, and it is free."""
        while self._waiting and not stops:
            hold = self._waiting.popleft()
            self._size_bytes -= hold.message.size_bytes
            if not hold.is_refused:
                hold.begin(now_s)
                return hold
        self.busy_count -= 1
        return None

    def clear(self) -> list[Hold]:
        """What waits, which no handler gets any more."""
        holds = [hold for hold in self._waiting if not hold.is_refused]
        self._waiting.clear()
        self._size_bytes = 0
        return holds

    def _pace(self, now_s: float) -> int:
        """Messages that handlers have lately finished in AHEAD_S, as far as they may wait."""
        if now_s - self._window_s >= 2 * AHEAD_S:
            return 0
        return min(max(self._ended_count, self._ended_before), self._options.ahead)


class Handling:
    """Any thread. What the drivers of both flavours share: the wish, the holds, and what came of messages."""

    def __init__(
        self, steps: PopSteps, wish: PopWish, options: HandlingOptions, name: str, clock: Callable[[], float] = clock_s
    ) -> None:
        """`name`: of the handler, for the log."""
        self.wish = wish
        self.options = options
        self.holds = Holds(options, clock)
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = HandledCounts(0, 0, 0)
        self._steps = steps
        self._seldom = SaidSeldom(clock)
        self._is_failing = self._was_there = False
        self._missing_since_s: float | None = None

    @property
    def counts(self) -> HandledCounts:
        """What came of the messages so far."""
        return self._counts

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.holds.is_closed

    def close(self) -> None:
        """Nothing is told any more, and all messages are lost. Takes no lock: a signal's handler may have it called."""
        self.holds.is_closed = True

    def say_closed(self, count: int) -> None:
        """`count` handlers ran when the consumer was closed."""
        if count:
            logger.warning(
                "%d messages are still with %s, and its consumer is closed: they come to others when their time is up; "
                "request_stop() waits for handlers",
                count, self.name,
            )  # fmt: skip

    def handed_out_s(self, asked_s: float) -> float:
        """When the broker handed out what a `receive` has just returned that began at `asked_s`, at the latest.

        It is now, unless this process stood still while its answer was there.
        """
        return min(self._clock(), asked_s + self.wish.hold_s)

    def judged(self, result: object) -> Failure | None:
        """What a handler's result means; None: done."""
        if result is None:
            return None
        judgement = judge(result, 1)
        if judgement.nonsense and self._seldom.is_due("nonsense"):
            logger.warning("%s %s", self.name, judgement.nonsense)
        return judgement.failures[0]

    def raised(self, error: BaseException) -> Failure:
        """A handler's message comes again, or is a dead letter: a body that does not decode."""
        failure = failure_of(error)
        if not isinstance(error, Said) and self._seldom.is_due(type(error).__name__):
            logger.warning(
                "%s raised %s: its message %s (a further one of this kind is not logged for a minute)",
                self.name, type(error).__name__, "is a dead letter" if failure.is_dead_letter else "comes again", exc_info=error,
            )  # fmt: skip
        return failure

    def received(self, error: ProtomqError | None) -> None:
        """Of a `receive`. Raises the error where another try is of no use; others are logged, once while they go on."""
        if error is None:
            if self._is_failing:
                logger.info("messages of %s are received again", self.wish.topic)
            self._is_failing, self._was_there, self._missing_since_s = False, True, None
            return
        if not error.retriable:
            raise error
        if isinstance(error, NotFoundError):  # It may be that of a name server that has just started.
            now_s = self._clock()
            if self._missing_since_s is None:
                self._missing_since_s = now_s
            if not self._was_there or now_s - self._missing_since_s >= DELETED_AFTER_S:
                raise error
        if not self._is_failing:
            logger.warning("no messages of %s could be received: %r; it is tried again", self.wish.topic, error)
        self._is_failing = True

    def renew(self, holds: Sequence[Hold]) -> Steps[None]:
        """Holds messages of one broker for longer."""
        if self.is_closed:
            return
        asked_s = self._clock()
        messages = [hold.message for hold in holds]
        try:
            # Holds has tries of its own, and other messages come due meanwhile.
            stale = yield from self._steps.change_invisible(messages, self.options.invisible_s, retries=CALL)
        except StaleReceiptError:
            stale = messages
        except BaseException as error:
            # Also where its task was cancelled: nobody is to wait for a renewal that has ended.
            self.holds.not_renewed(holds, self._clock())
            if not isinstance(error, Exception):
                raise
            if not self.is_closed:
                logger.warning("%d messages could not be held for longer: %r; it is tried again", len(holds), error)
            return
        self.holds.renewed(holds, stale, asked_s)

    def acknowledge(self, holds: Sequence[Hold]) -> Steps[None]:
        """Their handlers have returned. All are of one broker."""
        if self.is_closed:
            self._count(refused=len(holds))
            return
        messages = [hold.message for hold in holds]
        try:
            stale = yield from self._steps.ack(messages)
        except StaleReceiptError:
            stale = messages
        except ProtomqError as error:
            self._count(refused=len(holds))
            what = "are not acknowledged, and come again" if error.definite else "may not be acknowledged, and then come again"
            logger.warning("%d messages that %s has handled %s: %r", len(holds), self.name, what, error)
            return
        self._count(done=len(holds) - len(stale))
        for message in stale:
            self._say_refused(message)

    def fail(self, hold: Hold, failure: Failure) -> Steps[None]:
        """Its handler has not done it."""
        if self.is_closed:
            self._count(refused=1)
            return
        message = hold.message
        delay_s = delay_s_of(message, failure)
        if delay_s > INVISIBLE_MAX_S:
            if self._seldom.is_due("delay"):
                text = "%s wants its message again after %.0f s: a popped one comes after %.0f s (12 h), the longest a broker holds it"
                logger.warning(text, self.name, delay_s, INVISIBLE_MAX_S)
            delay_s = INVISIBLE_MAX_S
        try:
            if failure.is_dead_letter:
                stale = yield from self._steps.reject(message, failure.error)
            else:
                stale = yield from self._steps.nack(message, delay_s, failure.error, retry_level_of(failure))
        except StaleReceiptError:
            stale = [message]
        except ProtomqError as error:
            self._count(refused=1)
            logger.warning("%s has failed, and the broker was not told: %r; its message comes again in time", self.name, error)
            return
        if stale:
            self._say_refused(message)
        else:
            self._count(failed=1)

    def give_back(self, holds: Sequence[Hold]) -> Steps[None]:
        """What was received, and is not handled: the consumer stops. Somebody else may have it at once.

        That of which no handler has seen anything counts as no delivery.
        """
        if self.is_closed:
            return
        unseen = [hold.message for hold in holds if not hold.is_begun]
        if unseen:
            yield from self._steps.give_back(unseen)
        begun = [hold.message for hold in holds if hold.is_begun]
        if not begun:
            return
        text = "the consumer has stopped"
        try:
            yield from self._steps.change_invisible(begun, 0.0, text, retries=CALL)
        except ProtomqError as error:
            logger.info("%d messages that nobody has handled come again when their time is up: %r", len(begun), error)

    def lost(self, hold: Hold) -> None:
        """Its handler has ended, and it was lost before."""
        self._say_refused(hold.message)

    def _count(self, done: int = 0, failed: int = 0, refused: int = 0) -> None:
        with self._lock:
            self._counts = HandledCounts(self._counts.done + done, self._counts.failed + failed, self._counts.refused + refused)

    def _say_refused(self, message: Message) -> None:
        self._count(refused=1)
        logger.warning(
            "what %s said of message %s of %s is refused: it is done already, or somebody else has it by now. A handler calls no "
            "ack() of its own",
            self.name, message.message_id, message.topic,
        )  # fmt: skip


def check_alone(handling: Handling, others: Iterable[Handling]) -> None:
    """Raises ConfigurationError where another call of `handle` gets these messages already: each would go to one of the two by chance."""
    topic, queue = handling.wish.topic, handling.wish.queue
    for other in others:
        if other.wish.topic == topic and (queue is None or other.wish.queue in (None, queue)):
            raise ConfigurationError(
                f"{other.name} handles {topic!r} here already, so a message would go to it or to {handling.name}, by chance. Call `handle` "
                "once, with a higher `concurrency` or a function that tells the messages apart, or call `request_stop` first. Another "
                "group gets all messages once more"
            )


def hold_of(message: Message, handlings: Iterable[Handling]) -> Hold:
    """Raises ConfigurationError for a message that no handler has."""
    for handling in handlings:
        hold = handling.holds.find(message)
        if hold is not None:
            return hold
    raise ConfigurationError(f"{message!r} is not being handled")


def retry_level_of(failure: Failure) -> int | None:
    """What says when a message that failed comes again: a delay level; 0: the group's settings; None: the handler did, in seconds."""
    return None if "delay_ms" in failure.fields else int(failure.fields.get("delay_level", 0))


def delay_s_of(message: Message, failure: Failure) -> float:
    """When a message that failed comes again: what the handler said, else later with each delivery."""
    if "delay_ms" in failure.fields:
        return float(failure.fields["delay_ms"]) / 1000
    assert isinstance(message.queue, PoppedQueue)
    level = failure.fields.get("delay_level", FIRST_RETRY_LEVEL - 1 + max(message.queue.attempt, 1))
    return delay_of_level_s(int(level))
