"""Following a topic with a pull consumer: what `consume` does.

- What was printed is committed, where the user wanted to begin, and what a filter left out. That is done every second, when a queue goes,
  and at the end.
- Where to begin and to end in each queue is looked up once, for all queues of the topic. A member of a group seeks the queues of its first
  share, which may come long after the start. Where later ones are the group has said since.
- The end is reached when all queues are at theirs. Of a queue of this member its position tells; of one that others have, what the group
  has committed. That says nothing of a queue that may still come and be sought.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from protomq import QueueListener
from protomq.errors import MemberUnknownError, ProtomqError, QueueNotOwnedError, TopicRecreatedError
from protomq_cli.connection import open_admin, open_calls, open_consumer, warnings_shown
from protomq_cli.offsets import OffsetRange
from protomq_cli.partial import Missing
from protomq_cli.permits import check_permitted
from protomq_cli.places import resolve_in_queue
from protomq_cli.side_by_side import side_by_side

if TYPE_CHECKING:
    from protomq import Message, MessageQueue, PullConsumer
    from protomq.calls import Calls

_POLL_COUNT: Final = 512
_COMMIT_INTERVAL_S: Final = 1.0
_OTHERS_INTERVAL_S: Final = 1.0
_OTHERS_TOLD_S: Final = 3.0
"""As long as a member usually waits for its first queues, after another one has left."""
_SHARE_S: Final = 3.0
"""As long as the queues of its first share may come after the first of them: other members give them up one by one."""
_POSITIONS_PAUSE_S: Final = 10.0
_BATCH_S: Final = 5.0
"""Of a batch that takes longer the rest is pulled again: the process or its reader was stopped (SIGSTOP), and others may have it."""
_CHECK_TIMEOUT_S: Final = 1.0
"""For a broker to say which topic it has: meanwhile nothing is printed."""
_CHECK_TRIES: Final = 3
_CHECK_PAUSE_S: Final = 0.1
"""Before a broker that did not say it is asked again."""
_SIGNALLED: Final = 128
"""A shell's exit code is this and the number of the signal."""
_HOLD_MS: Final = 15_000
_HOLD_TO_END_MS: Final = 100


class Span(NamedTuple):
    """What the user wants of one queue, in offsets."""

    begin: int | None
    """None: where the group is, or where the consumer begins."""
    end: int | None
    """Not included; None: no end."""
    min_offset: int
    end_offset: int
    """Of the queue, when it was looked up."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is wanted of the queue."""
        begin = self.min_offset if self.begin is None else max(self.begin, self.min_offset)
        return self.end is not None and begin >= self.end


class Follower(QueueListener):
    """Reads a topic. `show` is given each message, `flush` ends each batch. It is the listener of its consumer."""

    def __init__(
        self,
        show: Callable[[Message], None],
        flush: Callable[[], None],
        *,
        is_filtered: bool = False,
        check: Callable[[], Collection[str]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """`check`: raises TopicRecreatedError if the topic is another one than at the start; returns the brokers that do not say it."""
        self._show = show
        self._check = check
        self._wait = wait
        self._is_in_doubt = False
        """Queues came or went: the topic may have been made again."""
        self._silent: frozenset[str] = frozenset()
        """The brokers that have not said since then that it was not: nothing of theirs is shown."""
        self._told: set[str] = set()
        """The silent ones that the user knows of."""
        self._flush = flush
        self._is_filtered = is_filtered
        self._clock = clock
        self._consumer: PullConsumer
        self._spans: Mapping[MessageQueue, Span] = {}
        self._has_end = False
        self._unsought: set[MessageQueue] = set()
        self._share_until_s: float | None = None
        """When all queues of the first share are here; None: none has come yet."""
        self._open: set[MessageQueue] = set()
        """Queues that are not known to be at their ends."""
        self._printed: dict[MessageQueue, int] = {}
        self._has_shown_all = True
        """Whether nothing of the last poll is left to be shown."""
        self._count = 0
        self._others_s = self._others_told_s = self._positions_s = 0.0

    def run(
        self,
        consumer: PullConsumer,
        subscribe: Callable[[], None],
        spans: Mapping[MessageQueue, Span],
        *,
        has_end: bool,
        count_max: int,
    ) -> None:
        """Until `count_max` messages (0: no limit) were shown, or, if `has_end`, until all queues are at their ends."""
        self._consumer, self._spans, self._has_end = consumer, spans, has_end
        self._unsought = {queue for queue, span in spans.items() if span.begin is not None}
        self._open = {queue for queue, span in spans.items() if span.end is not None and not span.is_empty}
        # Where an end is to be seen, positions have to be looked at often.
        poll_s = _HOLD_TO_END_MS / 1000 if has_end else 1.0
        committed_s = now_s = self._clock()
        self._others_s, self._others_told_s = now_s + _OTHERS_INTERVAL_S, now_s + _OTHERS_TOLD_S
        try:
            subscribe()
            while not self._is_at_end() and (self._count < count_max or not count_max):
                left = count_max - self._count if count_max else _POLL_COUNT
                messages = consumer.poll(poll_s, min(left, _POLL_COUNT))
                self._has_shown_all = False
                self._take_in_time(self._certain(messages))
                self._flush()
                self._has_shown_all = True
                if self._clock() - committed_s >= _COMMIT_INTERVAL_S:
                    self._commit_or_later()
                    committed_s = self._clock()
            if has_end:
                self._check_topic()
        finally:
            try:
                self._commit()
            finally:
                # The consumer says that its queues go when it closes: there is nothing more to do.
                self._printed, self._has_shown_all = {}, False

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        """Goes where the user wants to begin, in queues of the first share."""
        if self._share_until_s is None:
            self._share_until_s = self._clock() + _SHARE_S
        self._end_first_share()
        self._is_in_doubt = True
        for queue in queues:
            if queue not in self._unsought:
                continue
            self._unsought.discard(queue)
            span = self._spans[queue]
            assert span.begin is not None
            begin = min(span.begin, span.end_offset)
            self._consumer.seek(queue, begin)
            self._printed[queue] = begin
            if span.begin > span.end_offset and not span.is_empty:
                sys.stderr.write(
                    f"protomq: queue {queue.queue_id} of {queue.topic} at {queue.broker_name} ends at {span.end_offset}: "
                    f"waiting for offset {span.begin}\n"
                )

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        """Commits what was printed of them, for the member that gets them now."""
        try:
            self._commit()
        except ProtomqError as error:
            sys.stderr.write(f"protomq: the next owner of {_queues(len(queues))} may print messages again: {error}\n")
        self.on_lost(queues)

    def on_lost(self, queues: Sequence[MessageQueue]) -> None:
        """They are another member's: nothing more is committed there."""
        self._is_in_doubt = True
        for queue in queues:
            self._printed.pop(queue, None)

    def _certain(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages that are surely of the topic that it was at the start. Those of silent brokers are pulled again."""
        if self._is_in_doubt:
            self._check_topic()
        elif self._silent and any(message.queue.broker_name in self._silent for message in messages):
            self._wait(_CHECK_PAUSE_S)
            self._check_topic()
        if not self._silent:
            return messages
        held = [message for message in messages if message.queue.broker_name in self._silent]
        self._put_back(held)
        for broker_name in sorted({message.queue.broker_name for message in held} - self._told):
            self._told.add(broker_name)
            sys.stderr.write(f"protomq: broker {broker_name} does not say whether it has the same topic still, so its messages wait\n")
        return [message for message in messages if message.queue.broker_name not in self._silent]

    def _check_topic(self) -> None:
        self._is_in_doubt = False
        try:
            self._silent = frozenset(self._check())
            self._told &= self._silent
        except TopicRecreatedError:
            # Offsets of the old topic say nothing of the new one.
            self._printed, self._has_shown_all = {}, False
            raise

    def _end_first_share(self) -> None:
        if self._share_until_s is not None and self._clock() >= self._share_until_s:
            self._unsought.clear()

    def _take_in_time(self, messages: Sequence[Message]) -> None:
        """Takes them, as long as they are surely this member's; the rest is pulled again, if a poll finds that it still is."""
        ends_s = self._clock() + _BATCH_S if self._consumer.group else math.inf
        for index, message in enumerate(messages):
            if self._clock() > ends_s:
                self._put_back(messages[index:])
                return
            self._take(message)

    def _put_back(self, messages: Sequence[Message]) -> None:
        first: dict[MessageQueue, int] = {}
        for message in messages:
            first.setdefault(message.queue, message.queue_offset)
        for queue, queue_offset in first.items():
            self._consumer.seek(queue, queue_offset)

    def _take(self, message: Message) -> None:
        span = self._spans.get(message.queue)
        if span is not None:
            # A queue that did not reach to where the user wants to begin is read from its end.
            if span.begin is not None and message.queue_offset < span.begin:
                return
            if span.end is not None and message.queue_offset >= span.end:
                return
        self._show(message)
        self._count += 1
        self._printed[message.queue] = message.queue_offset + 1

    def _is_at_end(self) -> bool:
        if not self._has_end:
            return False
        self._end_first_share()
        mine = self._open.intersection(self._consumer.assignment())
        reached = {queue for queue in mine if self._consumer.position(queue) >= self._end(queue)}
        self._open -= reached
        if self._consumer.group and self._open and mine == reached and self._clock() >= self._others_s:
            self._look_at_others()
        return not self._open

    def _look_at_others(self) -> None:
        """Queues that other members have, or that nobody has yet: how far the group is there."""
        silent: set[str] = set()
        for queue in sorted(self._open - self._unsought):
            if queue.broker_name in silent:
                continue
            try:
                committed = self._consumer.committed(queue)
            except ProtomqError as error:
                if not error.retriable:
                    raise
                silent.add(queue.broker_name)
                continue
            if committed is not None and committed >= self._end(queue):
                self._open.discard(queue)
        now_s = self._clock()
        self._others_s = now_s + _OTHERS_INTERVAL_S
        if self._open and now_s >= self._others_told_s:
            self._others_told_s = float("inf")
            sys.stderr.write(
                f"protomq: waiting for {_queues(len(self._open))} that this member of group {self._consumer.group} does not have "
                f"(`protomq group members {self._consumer.group}` shows who has them)\n"
            )

    def _end(self, queue: MessageQueue) -> int:
        end = self._spans[queue].end
        assert end is not None
        return end

    def _commit_or_later(self) -> None:
        """While a broker is down its offsets wait; the consumer goes on with the others, and the log says it."""
        try:
            self._commit()
        except (MemberUnknownError, QueueNotOwnedError):
            pass  # The process was stopped for long, say. The next poll gives up what it has lost.
        except ProtomqError as error:
            if not error.retriable:
                raise

    def _commit(self) -> None:
        if not self._consumer.group:
            return
        # Also what was committed before: an operator may have reset it since.
        offsets = self._printed | self._positions()
        if offsets:
            self._flush()
            self._consumer.commit(offsets)
        self._printed = {}

    def _positions(self) -> dict[MessageQueue, int]:
        """Where a filter has left out what comes last; nothing if a message is still to be shown, or while a broker is away."""
        if not self._is_filtered or not self._has_shown_all or self._clock() < self._positions_s:
            return {}
        try:
            found = {queue: self._consumer.position(queue) for queue in self._consumer.assignment()}
        except ProtomqError as error:
            if not error.retriable:
                raise
            self._positions_s = self._clock() + _POSITIONS_PAUSE_S
            return {}
        ends = {queue: span.end for queue, span in self._spans.items() if span.end is not None}
        return {queue: min(offset, ends.get(queue, offset)) for queue, offset in found.items() if offset}


def _queues(count: int) -> str:
    return "1 queue" if count == 1 else f"{count} queues"


def find_spans(
    consumer: PullConsumer,
    queues: Sequence[MessageQueue],
    wanted: OffsetRange | None,
    missing: Missing,
    *,
    exit_at_end: bool,
) -> dict[MessageQueue, Span]:
    """What the user wants of each queue whose broker answers. Raises the error of the first one if none does."""

    def span(queue: MessageQueue) -> Span:
        begin, end = None, None
        min_offset, end_offset = queue_range = consumer.queue_range(queue)
        if wanted is not None:
            begin, end = resolve_in_queue(consumer, queue, wanted, queue_range)
        if exit_at_end:
            end = end_offset if end is None else min(end, end_offset)
        return Span(begin, end, min_offset, end_offset)

    found = {queue: missing.ask(queue.broker_name, partial(span, queue)) for queue in queues}
    spans = {queue: span for queue, span in found.items() if span is not None}
    if queues and not spans:
        missing.raise_first()
    return spans


class TopicCheck:
    """Whether a topic is still the one that it was when its brokers first answered."""

    def __init__(self, calls: Calls, topic: str) -> None:
        self._calls = calls
        self._topic = topic
        self._known: dict[str, int] = {}
        self.broker_names: set[str] = set()
        """Those that are asked."""

    def __call__(self) -> set[str]:
        """Asks all of them at the same time. Raises TopicRecreatedError; returns those that do not answer."""
        names = sorted(self.broker_names)
        silent = set()
        for broker_name, said in zip(names, side_by_side([partial(self.ask, name) for name in names]), strict=True):
            try:
                said()
            except TopicRecreatedError:
                raise
            except ProtomqError:
                silent.add(broker_name)
        return silent

    def ask_each(self, missing: Missing) -> None:
        """All of them, for the first time; those that do not answer are noted."""
        missing.ask_each({name: partial(self.ask, name) for name in sorted(self.broker_names)})

    def ask(self, broker_name: str) -> None:
        """One broker. Its first answer counts as the topic at the start: nothing of its topic may be used before."""
        found = self._calls.queue_ranges(self._topic, broker_name, topic_incarnation=self._known.get(broker_name, 0))
        self._known[broker_name] = found.topic_incarnation


def follow(
    namesrv: str | None,
    topic: str,
    show: Callable[[Message], None],
    flush: Callable[[], None],
    *,
    group: str,
    wanted: OffsetRange | None,
    count_max: int,
    exit_at_end: bool,
    tags: Sequence[str],
    sql: str | None,
    cel: str | None,
    module: str | None,
    transport: str,
    timeout_s: float,
) -> None:
    """What `consume` does; `timeout_s` is for the calls before the first message. Raises TopicNotFoundError."""
    calls = open_calls(namesrv, transport, tries_max=_CHECK_TRIES)
    calls.timeout_s = timeout_s
    check = TopicCheck(calls, topic)
    follower = Follower(show, flush, check=check, is_filtered=bool(tags) or any(each is not None for each in (sql, cel, module)))
    has_end = exit_at_end or (wanted is not None and wanted.end is not None)
    with (
        _ended_by_sigterm(),
        warnings_shown(),
        closing(calls),
        open_consumer(
            namesrv,
            group,
            begin="earliest" if group or exit_at_end else "latest",
            # Of tags that nobody sent the broker says nothing until the hold is over: no long holds where an end is to be seen.
            hold_ms=_HOLD_MS if wanted is None and not exit_at_end else _HOLD_TO_END_MS,
            auto_commit=False,
            transport=transport,
            request_timeout_s=timeout_s,
            listener=follower,
        ) as consumer,
    ):
        # The route of a topic that is not there yet has queues, too. One broker that has it is enough to begin.
        missing = Missing()
        with open_admin(namesrv, timeout_s) as admin:
            gone = admin.missing_brokers(topic)
        missing.note(gone)
        queues = missing.queues(consumer, topic)
        if not queues:
            check_permitted(namesrv, timeout_s, topic, "read")
        check.broker_names |= {queue.broker_name for queue in queues}
        if wanted is None and not exit_at_end:
            spans: Mapping[MessageQueue, Span] = {}
            calls.timeout_s = min(timeout_s, _CHECK_TIMEOUT_S)
            if queues and check() == check.broker_names:
                calls.timeout_s = timeout_s
                check.ask_each(missing)
                if all(name in missing for name in check.broker_names):
                    missing.raise_first()
                missing.clear()  # What the others have comes when they answer.
        else:
            # Before the offsets are looked up: they mean nothing in a topic that is made again from now on.
            check.ask_each(missing)
            spans = find_spans(consumer, queues, wanted, missing, exit_at_end=exit_at_end)
        if not has_end:
            missing.forget(gone)
            for one in gone:
                sys.stderr.write(f"protomq: {one.error}; what it has comes when it is back\n")
        calls.timeout_s = _CHECK_TIMEOUT_S

        def begin() -> None:
            if group or not has_end or not spans:
                consumer.subscribe(topic, tags, sql=sql, cel=cel, module=module)
            else:
                # Of brokers that do not answer nothing is waited for.
                consumer.assign(list(spans), tags, sql=sql, cel=cel, module=module)
                follower.on_assigned(list(spans))

        follower.run(
            consumer,
            begin,
            spans,
            has_end=has_end,
            count_max=count_max,
        )
        missing.check()


class _Terminated(KeyboardInterrupt):
    """By SIGTERM. What lets Ctrl-C through lets this through."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, once what was printed is committed; only the exit code differs."""

    def end(_: int, __: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        raise typer.Exit(_SIGNALLED + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, before)
