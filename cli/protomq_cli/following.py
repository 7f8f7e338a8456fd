"""Following a topic with a pull consumer: what `consume` does.

What was printed is committed, nothing else: offsets are counted here and committed every second and at the end, whatever ends it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from protomq_cli.connection import open_admin, open_consumer
from protomq_cli.offsets import OffsetRange
from protomq_cli.partial import Missing
from protomq_cli.places import resolve_in_queue

if TYPE_CHECKING:
    from protomq import Message, MessageQueue, PullConsumer

_POLL_COUNT: Final = 512
_COMMIT_INTERVAL_S: Final = 1.0
_HOLD_MS: Final = 15_000
_HOLD_TO_END_MS: Final = 100


class Follower:
    """Reads a topic with a consumer that is open already. `show` is given each message, `flush` ends each batch."""

    def __init__(
        self,
        consumer: PullConsumer,
        topic: str,
        show: Callable[[Message], None],
        flush: Callable[[], None],
        *,
        wanted: OffsetRange | None = None,
        tags: Sequence[str] = (),
        sql: str | None = None,
        exit_at_end: bool = False,
    ) -> None:
        self._consumer = consumer
        self._show = show
        self._flush = flush
        self._printed: dict[MessageQueue, int] = {}
        self._begins: dict[MessageQueue, int] = {}
        """Of queues that do not reach to where the user wants to begin: what comes before that is not shown."""
        self._count = 0
        self.missing = Missing()
        consumer.subscribe(topic, tags, sql=sql)
        self._ends = self._seek(wanted, exit_at_end)
        # Where an end is to be seen, positions have to be looked at often.
        self._poll_s = _HOLD_TO_END_MS / 1000 if self._ends else 1.0

    @property
    def has_end(self) -> bool:
        """Whether it ends by itself, where the queues end."""
        return bool(self._ends)

    def run(self, count_max: int) -> None:
        """Until `count_max` messages (0: no limit) were shown, or all queues are at their ends, if there are any."""
        committed_at_s = time.monotonic()
        try:
            while not self._at_end() and (self._count < count_max or not count_max):
                left = count_max - self._count if count_max else _POLL_COUNT
                for message in self._consumer.poll(self._poll_s, min(left, _POLL_COUNT)):
                    self._take(message)
                self._flush()
                if time.monotonic() - committed_at_s >= _COMMIT_INTERVAL_S:
                    self._commit_or_later()
                    committed_at_s = time.monotonic()
        finally:
            self._commit()

    def _seek(self, wanted: OffsetRange | None, exit_at_end: bool) -> dict[MessageQueue, int]:
        """Goes where the user wants to begin; the ends of the queues, empty if there are none."""
        ends: dict[MessageQueue, int] = {}
        consumer = self._consumer
        if wanted is None and not exit_at_end:
            return ends
        for queue in consumer.assignment():
            found = self.missing.ask(queue.broker_name, partial(self._look_up, queue, wanted))
            if found is None:
                continue
            begin, end, end_now = found
            if begin is not None:
                consumer.seek(queue, min(begin, end_now))
                if begin > end_now and not exit_at_end:
                    self._begins[queue] = begin
                    sys.stderr.write(
                        f"protomq: queue {queue.queue_id} of {queue.topic} at {queue.broker_name} ends at {end_now}: "
                        f"waiting for offset {begin}\n"
                    )
            if exit_at_end:
                end = end_now if end is None else min(end, end_now)
            if end is not None:
                ends[queue] = end
        if exit_at_end and not ends:
            self.missing.raise_first()
        return ends

    def _look_up(
        self, queue: MessageQueue, wanted: OffsetRange | None
    ) -> tuple[int | None, int | None, int]:
        """Where to begin in the queue and where to end (None: nothing was said about it), and where the queue ends now."""
        begin, end = None, None
        if wanted is not None:
            begin, end = resolve_in_queue(self._consumer, queue, wanted)
        return begin, end, self._consumer.end_offset(queue)

    def _take(self, message: Message) -> None:
        if message.queue_offset < self._begins.get(message.queue, 0):
            return
        if message.queue_offset < self._ends.get(message.queue, message.queue_offset + 1):
            self._show(message)
            self._count += 1
            self._printed[message.queue] = message.queue_offset + 1

    def _at_end(self) -> bool:
        return bool(self._ends) and all(
            self._consumer.position(queue) >= end for queue, end in self._ends.items()
        )

    def _commit_or_later(self) -> None:
        """While a broker is down its offsets wait; the consumer goes on with the others, and the log says it."""
        from protomq.errors import ProtomqError

        try:
            self._commit()
        except ProtomqError as error:
            if not error.retriable:
                raise

    def _commit(self) -> None:
        if self._printed and self._consumer.group:
            self._flush()
            self._consumer.commit(self._printed)
            self._printed = {}


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
    transport: str,
    timeout_s: float,
) -> None:
    """What `consume` does; `timeout_s` is for the calls before the first message. Raises TopicNotFoundError."""
    with (
        _warnings_shown(),
        open_consumer(
            namesrv,
            group,
            begin="earliest" if group or exit_at_end else "latest",
            # Of tags that nobody sent the broker says nothing until the hold is over: no long holds where an end is to be seen.
            hold_ms=_HOLD_MS if wanted is None and not exit_at_end else _HOLD_TO_END_MS,
            auto_commit=False,
            transport=transport,
            request_timeout_s=timeout_s,
        ) as consumer,
    ):
        # The route of a topic that is not there yet has queues, too. One broker that has it is enough to begin.
        missing = Missing()
        with open_admin(namesrv, timeout_s) as admin:
            gone = admin.missing_brokers(topic)
        missing.note(gone)
        queues = missing.queues(consumer, topic)
        if queues and not any(
            missing.ask(queue.broker_name, partial(consumer.queue_range, queue)) for queue in queues
        ):
            missing.raise_first()
        follower = Follower(
            consumer, topic, show, flush, wanted=wanted, tags=tags, sql=sql, exit_at_end=exit_at_end
        )
        if follower.has_end:
            follower.missing.note(gone)
        else:
            for one in gone:
                sys.stderr.write(f"protomq: {one.error}; what it has comes when it is back\n")
        follower.run(count_max)
        follower.missing.check()


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """What the SDK warns of goes to stderr: a broker that is gone, one that is back, another member of the group."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("protomq: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("protomq")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
