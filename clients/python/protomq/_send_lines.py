"""Carrying what stands in lines, from threads: who leads a request, who follows, who is next. The lines themselves: `_lines.py`.

    send ──▶ a line that is free: its caller leads ──▶ a request ──▶ hands the line over to one of those that gathered meanwhile
         └─▶ a line that is busy: its caller follows, until it has its outcome, or is to lead

Where nobody who waits could lead, as after `send_async`, one of WORKERS_MAX threads does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Final

from ._batching import PreparedRecord
from ._checks import check_queue, check_topic
from ._company import Company
from ._delays import When
from ._interrupts import is_interrupt
from ._lines import LINES_MAX, Entry, Line, resolve_batch, wake
from ._methods import SEND
from ._of_one_process import OfOneProcess
from ._outgoing import SendResult, Stored
from ._producer_options import ProducerOptions
from ._retry import attempt_timeout
from ._routes import Routes
from ._send_arguments import field_of
from ._send_core import SendCore
from ._send_request import address_of, fits
from ._send_steps import route_for, send_again
from ._steps import Driver
from ._transport import SyncTransport
from ._types import MessageQueue, Route, Target
from .errors import ClosedError, ConnectionLostError, ProtomqError, RequestTimeoutError

WORKERS_MAX: Final = 4
"""Threads that lead the requests of `send_async` when no thread that sends could; started on first use."""


class LineSender(OfOneProcess):
    """The part of a producer that carries records. Any thread. The producer makes its fields."""

    options: ProducerOptions
    _core: SendCore
    _transport: SyncTransport
    _routes: Routes
    _driver: Driver
    _closed: bool
    _lines: dict[tuple[str, MessageQueue | None, bytes | None], Line]
    _workers: ThreadPoolExecutor | None
    _workers_lock: threading.Lock
    _company: Company | None = None
    """Whom the leaders of lines wait for."""

    # -- lines -----------------------------------------------------------------------------------------------------------

    def _send_record(
        self, topic: str, record: PreparedRecord, queue: MessageQueue | None, deadline_s: float
    ) -> SendResult:
        line = self._lines.get((topic, queue, None)) or self._line(topic, queue, None)
        return self._send_in(line, record, deadline_s)

    def _send_in(self, line: Line, record: PreparedRecord, deadline_s: float) -> SendResult:
        company = line.company
        if company is None or not company.is_expected:
            try:
                if line.try_to_lead(record):
                    return self._lead_alone(line, record, deadline_s)
            except BaseException as error:
                if is_interrupt(error):
                    self._interrupted(line, Entry(record, deadline_s), record)
                raise
        entry = Entry(record, deadline_s)
        try:
            if line.enter(entry):
                assert entry.batch is not None
                self._lead(line, entry.batch)
            else:
                self._follow(line, entry)
        except BaseException as error:
            if is_interrupt(error):
                self._interrupted(line, entry, entry)
            raise
        if entry.stored is None:
            assert entry.error is not None
            raise entry.error
        return entry.stored.result(entry.index)

    def _line(self, topic: str, queue: MessageQueue | None, when: When | None) -> Line:
        line = self._lines.get((topic, queue, field_of(when)))
        if line is not None:
            return line
        check_topic(topic)
        check_queue(topic, queue)
        options = self.options
        line = Line(
            topic,
            queue,
            field_of(when),
            count_max=options.coalesce_count_max,
            size_max_bytes=options.coalesce_size_max_bytes,
            company=self._company,
        )
        if when is not None:
            self._drop_idle_lines()
        return self._lines.setdefault((topic, queue, field_of(when)), line)

    def _drop_idle_lines(self) -> None:
        """Where there are many: delays may be of any number, unlike queues. What is delayed has no order to keep."""
        if len(self._lines) >= LINES_MAX:
            for key, line in list(self._lines.items()):
                if key[2] is not None and not line.busy:
                    self._lines.pop(key, None)

    # -- leading and following -----------------------------------------------------------------------------------------

    def _lead_alone(self, line: Line, record: PreparedRecord, deadline_s: float) -> SendResult:
        """The short way of `_lead` for a caller that found the line free: most sends of one thread go here."""
        try:
            route = self._route(line.topic, deadline_s, line.queue)
            return self._dispatch(route, (record,), line.target, deadline_s).result(0)
        finally:
            following = self._hand_over(line)
            if following:
                self._lead(line, following)

    def _lead(self, line: Line, batch: list[Entry]) -> None:
        """Sends a batch, hands the line over, gives everyone the outcome; what follows too, where nobody else can lead it."""
        while batch:
            batch = self._lead_once(line, batch)

    def _lead_once(self, line: Line, batch: list[Entry]) -> list[Entry]:
        """One batch; answers the next one if this thread is to lead it."""
        stored: Stored | None = None
        error: BaseException | None = None
        try:
            line.gather(batch)
            batch = self._drop_expired(batch)
            if batch:
                records = [entry.record for entry in batch]
                deadline_s = min(entry.deadline_s for entry in batch)
                route = self._route(line.topic, deadline_s, line.queue)
                stored = self._dispatch(route, records, line.target, deadline_s)
                self._on_stored(stored)
        except BaseException as caught:
            error = caught
        following = self._hand_over(line)
        if error is None or not is_interrupt(error):
            resolve_batch(batch, stored, error)
            return following
        # What a signal has raised is for this thread; nobody knows what became of a request without an answer.
        stopped = f"the thread that carried the message was stopped by {error!r}"
        resolve_batch([entry for entry in batch if not entry.resolved], stored, ConnectionLostError(stopped))
        if following:
            self._fail_the_rest(line, following)
        raise error

    def _on_stored(self, stored: Stored) -> None:
        """A request is stored, and its callers are about to be woken."""

    def _hand_over(self, line: Line) -> list[Entry]:
        """The request has returned: the line goes to one of those who gathered, or to a worker, or is free.

        Answers the messages that are next where the caller must lead them itself: no worker takes anything any more.
        """
        following, leader = line.leave()
        if leader is not None and leader.wakeup is not None:
            wake(leader.wakeup)
        elif following and not self._submit(line, following):
            return following
        return []

    def _follow(self, line: Line, entry: Entry) -> None:
        """Waits in line: until the message has its outcome, or is to be led by this thread."""
        assert entry.wakeup is not None
        line.arrive()
        if not entry.wakeup.acquire(timeout=max(entry.deadline_s - time.monotonic(), 0.0)) and line.withdraw(entry):
            entry.error = RequestTimeoutError(
                f"topic {line.topic}: the message was still waiting in line when its time was up"
            )
            entry.error.definite = True
            return
        self._finish_following(line, entry)

    def _interrupted(self, line: Line, entry: Entry, leader: object) -> None:
        """Ctrl-C has come, nobody knows where: others may depend on this thread to wake them or to lead them.

        `leader`: by what name the line knows it. What is to be done for them is done by a thread to which no Ctrl-C comes.
        """
        if entry.future is not None or line.is_led_by(leader) or not line.withdraw(entry):
            threading.Thread(
                target=self._clean_up, args=(line, entry, leader), name="protomq-interrupted", daemon=True
            ).start()

    def _clean_up(self, line: Line, entry: Entry, leader: object) -> None:
        unled = line.unled
        if unled is not None:
            self._submit(line, unled)
        if entry.future is not None:
            if not entry.is_in_line:
                entry.future.cancel()
        elif line.is_led_by(leader):
            following = self._hand_over(line)
            self._end_unknown(entry.batch or ())
            if following:
                self._lead(line, following)
        elif entry.batch is not None:
            self._end_unknown(entry.batch)
        elif entry.is_in_line:
            self._finish_following(line, entry)
        line.wake_leader()

    @staticmethod
    def _end_unknown(batch: Sequence[Entry]) -> None:
        """Their leader was interrupted. Those that have their outcomes may have been woken, or not."""
        unknown = ConnectionLostError("the thread that carried the message was stopped by an interrupt")
        resolve_batch([entry for entry in batch if not entry.resolved], None, unknown)
        for entry in batch:
            if entry.wakeup is not None:
                wake(entry.wakeup)

    def _finish_following(self, line: Line, entry: Entry) -> None:
        """Until it has its outcome, or is to lead: it is on its way, and its leader's deadline is near ours."""
        assert entry.wakeup is not None
        while entry.batch is None and not entry.resolved:
            entry.wakeup.acquire(timeout=0.1)
        if entry.batch is not None:
            self._lead(line, entry.batch)
        else:
            entry.pass_on()

    def _drop_expired(self, batch: list[Entry]) -> list[Entry]:
        """Without those whose future was cancelled or whose time was up while they waited."""
        for entry in batch:
            if entry.future is not None and not entry.future.set_running_or_notify_cancel():
                entry.error = CancelledError()
        batch = [entry for entry in batch if entry.error is None]
        now_s = time.monotonic()
        expired = [entry for entry in batch if entry.deadline_s <= now_s]
        if not expired:
            return batch
        error = RequestTimeoutError("the message was still waiting in line when its time was up")
        error.definite = True
        resolve_batch(expired, None, error)
        return [entry for entry in batch if entry.deadline_s > now_s]

    def _submit(self, line: Line, batch: list[Entry]) -> bool:
        """Has a worker lead a batch that no waiting thread can lead; False: the caller must."""
        with self._workers_lock:
            if self._workers is None:
                self._workers = ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="protomq-send")
            workers = self._workers
        try:
            workers.submit(self._lead_unled, line, batch)
        except RuntimeError:
            line.take_unled(batch)
            if not self._closed:
                return False  # The interpreter ends, its thread pools take no more work.
            self._fail_the_rest(line, batch)
        return True

    def _lead_unled(self, line: Line, batch: list[Entry]) -> None:
        if line.take_unled(batch):
            self._lead(line, batch)

    def _fail_the_rest(self, line: Line, batch: list[Entry]) -> None:
        """Nobody leads the line any more: what waits in it fails."""
        while batch:
            resolve_batch(
                batch, None, ClosedError("the producer was closed before the message was sent")
            )
            batch, leader = line.leave()
            if leader is not None and leader.wakeup is not None:
                wake(leader.wakeup)
                return

    # -- requests ------------------------------------------------------------------------------------------------------

    def _dispatch(
        self,
        route: Route,
        records: Sequence[PreparedRecord],
        target: Target,
        deadline_s: float,
    ) -> Stored:
        """One request, with all its tries: the first here, without detours."""
        core = self._core
        request = core.make_request(route, records, *target)
        started_s = time.monotonic()
        try:
            answer = self._transport.call(
                address_of(request), SEND, request.payload, attempt_timeout(deadline_s - started_s)
            )
            return core.answered(request, answer, started_s)
        except ProtomqError as error:
            core.failed(request, started_s)
            return self._driver.run(send_again(core, request, route, deadline_s, error))

    def _route(self, topic: str, deadline_s: float, queue: MessageQueue | None = None) -> Route:
        """See `route_for`; mostly it is known."""
        route = self._routes.cached(topic)
        if route is not None and fits(route, queue):
            return route
        return self._driver.run(route_for(self._core, topic, queue, deadline_s))
