"""Lanes: the threads on which services run, each with its own event loop and its own connections.

A pool of lanes stands for RocketMQ's thread pool of a request code. A lane owns the remoting connections whose hello named its
service. It reads, executes and answers their calls on one thread. Calls from gRPC and from connections of other lanes are put on
its queue. One turn of the loop:

    poll -> run what other threads posted -> take submitted calls -> read every ready connection, decode its frames
         -> run plain and raw methods at once, collect the calls of drained ones -> due timers
         -> hand over the collected calls, once for each method -> flush every connection that was answered to, once
         -> hand answers for gRPC and for other lanes back, once for each of them

Rules. Nothing in a turn waits, except for the disk. The hot path takes no lock: queues are deques, whose append and popleft are
atomic. Another thread writes to the wake-up descriptor only while the lane sleeps. A connection, its calls and their answers
are touched by their lane only. An exception in a method, a timer or a posted function is logged and harms only its call. One in
the loop itself is fatal for the process.

This module is the loop. Which connections there are stands in `connection_table.py`, how calls are started in `lane_calls.py`, how a lane
ends in `lane_shutdown.py`.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from .admission import AdmissionConfig
from .byte_stream import ByteStream
from .call import AnswerSink, Call
from .connection import Connection
from .connection_table import ConnectionTable
from .dispatch import PoolMethods
from .errors import ServiceError
from .framing import SHARED_BUFFER_SIZE_BYTES, FrameError
from .lane_calls import LaneCalls
from .lane_shutdown import LaneShutdown, Stage
from .principals import Principal
from .regions import ShortFileError
from .timers import Timer, Timers
from .wake_up import WakeUp

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S: Final = 5.0
NO_WAIT_S: Final = 0.000_3
"""A poll that took less than this found something there already, which may have lain there since the poll before. It is more than the
GIL's switch interval, since the thread may have had to wait for the GIL after the poll."""
EVENT_S: Final = 0.000_005
"""So much more for each event: looking through that many connections takes 1 to 2.5 microseconds each, with cold caches."""
EVENTS_MAX: Final = 1024
READS_PER_TURN_MAX: Final = 4
"""Of one connection in one turn, and only while no frame is complete."""

PostedFunction: TypeAlias = Callable[[], None]
_EPOLLIN: Final = select.EPOLLIN
_EPOLLOUT: Final = select.EPOLLOUT


class Lane(threading.Thread):
    """One thread of a pool. `post`, `submit` and `deliver`: any thread; `adopt`: the acceptor; everything else: the lane's own."""

    def __init__(
        self,
        methods: PoolMethods,
        index: int,
        admission: AdmissionConfig,
        *,
        pick_lane: Callable[[str], Lane],
        frame_size_max_bytes: int,
        on_connection_closed: Callable[[str], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """`pick_lane` gives the lane of the pool of that name which runs the next call of another one's connection."""
        super().__init__(name=f"lane-{methods.pool_name}-{index}", daemon=True)
        self.pool_name = methods.pool_name
        self.answer_count = 0
        """Calls that are over, for the count of open ones."""
        self.call_count = 0
        self.rejection_count = 0
        self.holds = 0
        """Calls that are held now, whatever brought them; they count themselves (`Call.hold`)."""
        self.foreign_count = 0
        """Calls of this lane's connections that other lanes are busy with."""
        self.dirty: list[Connection] = []
        """Connections that were answered to in this turn."""
        self._admission = admission
        self._calls = LaneCalls(self, methods, admission, pick_lane)
        self._frame_size_max_bytes = frame_size_max_bytes
        self._on_fatal = on_fatal
        self._posted: deque[PostedFunction] = deque()
        self._submitted = self._calls.submitted
        self._asleep = False
        self._poll = select.epoll()
        self._wake_up = WakeUp()
        self._poll.register(self._wake_up.descriptor, _EPOLLIN)
        self._table = ConnectionTable(self.name, self._poll, on_connection_closed)
        self._shared = memoryview(bytearray(SHARED_BUFFER_SIZE_BYTES))
        self._timers = Timers()
        self._outboxes: dict[AnswerSink, list[Any]] = {}
        self._turn_at = time.monotonic()
        """When the poll of this turn returned."""
        self._request_sizes_max_bytes = methods.request_sizes_max_bytes
        self._shutdown = LaneShutdown()

    # Any thread.

    def post(self, function: PostedFunction) -> None:
        """Has the function called on the lane's thread, in the order of posting."""
        self._posted.append(function)
        if self._asleep:
            self._wake()

    def submit(self, call: Call) -> None:
        """Puts a call on the queue. Ask `has_room` before."""
        self._submitted.append(call)
        if self._asleep:
            self._wake()

    def submit_all(self, calls: Iterable[Call]) -> None:
        """Puts several calls on the queue, with one wake-up."""
        self._submitted.extend(calls)
        if self._asleep:
            self._wake()

    def has_room(self, more: int = 0) -> bool:
        """Whether another call, behind `more` that are about to be submitted, may be put on the queue; else it must be refused."""
        return len(self._submitted) + more < self._admission.depth_max

    @property
    def busy_error(self) -> ServiceError:
        """The refusal of this lane."""
        return self._calls.busy_error

    def adopt(
        self, stream: ByteStream, peer: str, client_id: str, principal: Principal, begun: bytes
    ) -> None:
        """Takes over a connection that has said hello; `begun` is what it has sent behind that. Acceptor only."""
        self._table.expect()
        self.post(lambda: self._adopt(stream, peer, client_id, principal, begun))

    def deliver(self, answers: list[PostedFunction]) -> None:
        """As AnswerSink: answers of another lane for connections of this one."""

        def send() -> None:
            for answer in answers:
                answer()

        self.post(send)

    @property
    def connection_count(self) -> int:
        """Connections of the lane, with those that it has been given and not taken yet."""
        return self._table.count

    @property
    def open_call_count(self) -> int:
        """Calls that were taken and are not answered."""
        return self.call_count - self.answer_count

    @property
    def depth(self) -> int:
        """Calls that wait to be started."""
        return self._calls.depth

    def queue_time_us(self) -> int:
        return self._calls.rule.queue_time_us(time.monotonic())

    def refuse(self, error: ServiceError) -> None:
        """From now on every new call is answered with this error."""
        self.post(lambda: self._set_refusal(error))

    def finish(self, grace_s: float) -> None:
        """Ends the thread when all calls are answered and sent, or when the grace is over."""
        self.post(lambda: self._begin_finish(grace_s))

    # The lane's own thread.

    def call_later(self, delay_ms: float, function: Callable[[], None]) -> Timer:
        """Has the function called after the delay, unless the timer is cancelled."""
        return self._timers.add(time.monotonic() + delay_ms / 1000, function)

    def hand_back(self, sink: AnswerSink, answer: Any) -> None:
        """Passes an answer on at the end of the turn."""
        box = self._outboxes.get(sink)
        if box is None:
            self._outboxes[sink] = [answer]
        else:
            box.append(answer)

    def run(self) -> None:
        try:
            self._timers.add(time.monotonic() + SWEEP_INTERVAL_S, self._sweep)
            while self._shutdown.stage is not Stage.OVER:
                self.turn()
        except BaseException as error:
            logger.critical("%s: the event loop failed", self.name, exc_info=True)
            self._on_fatal(error)
        finally:
            self._table.close_all(self._shared)
            self._poll.close()

    def turn(self) -> None:
        """One turn of the loop; sleeps until there is something to do."""
        events = self._wait()
        calls = self._calls
        posted = self._posted
        for _ in range(len(posted)):
            try:
                posted.popleft()()
            except Exception:
                logger.exception("%s: a posted function failed", self.name)
        if self._submitted:
            calls.start_submitted()
        if self._table.resumable:
            self._resume()
        connections = self._table.by_descriptor
        for descriptor, mask in events:
            connection = connections.get(descriptor)
            if connection is None:
                if descriptor == self._wake_up.descriptor:
                    self._wake_up.clear()
                continue
            if not connection.is_direct:
                mask = connection.stream.ready(mask)
                if connection.backlog:
                    mask &= ~_EPOLLIN
            if mask & _EPOLLOUT:
                self._write(connection)
            if mask & ~_EPOLLOUT and not connection.closed:
                self._read(connection)
        next_at = self._timers.next_at()
        if next_at is not None and next_at <= time.monotonic():
            self._run_timers()
        calls.run_drained()
        if self.dirty:
            self._flush()
        if self._outboxes:
            outboxes, self._outboxes = self._outboxes, {}
            for sink, answers in outboxes.items():
                sink.deliver(answers)
        if self._shutdown.finish_by is not None:
            self._shutdown.end_if(self._is_idle(), time.monotonic())

    def _wait(self) -> list[tuple[int, int]]:
        """Sleeps until there is something to do, and notes how long it may have been there."""
        before = time.monotonic()
        next_at = self._timers.next_at()
        timeout = -1.0 if next_at is None else max(next_at - before, 0.0)
        # First `asleep`, then the look at the queues: whoever appends after the look sees `asleep` and wakes the lane.
        self._asleep = True
        if self._posted or self._submitted or self._table.resumable:
            timeout = 0.0
        events = self._poll.poll(timeout, EVENTS_MAX)
        self._asleep = False
        now = time.monotonic()
        has_slept = now - before >= NO_WAIT_S + len(events) * EVENT_S
        self._calls.begin_turn(now, 0.0 if has_slept else now - self._turn_at)
        self._turn_at = now
        return events

    def _wake(self) -> None:
        self._asleep = False
        self._wake_up.set()

    def _read(self, connection: Connection) -> None:
        """Receives, and starts the calls of the frames that are complete."""
        reader = connection.reader
        shared = self._shared
        try:
            for _ in range(READS_PER_TURN_MAX):
                target = reader.target(shared)
                wanted = len(target)
                count = connection.recv_into(target)
                del target  # The reader may have to resize what it shows.
                if not count:
                    self._table.close(connection)
                    return
                frames = reader.received(shared, count)
                if reader.in_frame and connection.queue is None:
                    # A busy peer's frames hardly ever end with a read. One that takes no answers is judged by these.
                    connection.progress_at = self._turn_at
                if frames:
                    self._calls.serve(connection, frames)
                    break
                if count < wanted:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self._table.close(connection, error)
        except FrameError as error:
            self._end_broken(connection, error)
        if not connection.is_direct and not connection.closed:
            self._table.update_poll(connection)  # it may wait for something else now

    def _end_broken(self, connection: Connection, error: FrameError) -> None:
        """Serves what came before the frame that is none, and closes: how the bytes were cut on their way makes no difference."""
        self._calls.serve(connection, error.frames)
        logger.warning("%s: %s from %s: closed", self.name, error, connection.peer)
        self._table.close(connection)

    def _run_timers(self) -> None:
        for callback in self._timers.due(time.monotonic()):
            try:
                callback()
            except Exception:
                logger.exception("%s: a timer failed", self.name)

    def _flush(self) -> None:
        now = self._turn_at
        dirty = self.dirty
        for connection in dirty:
            if connection.closed or not connection.out:
                continue
            try:
                done = connection.flush(now)
            except (OSError, ShortFileError) as error:
                self._table.close(connection, error)
                continue
            if not done or connection.backlog or connection.poll_mask != _EPOLLIN:
                self._table.update_poll(connection)
        dirty.clear()

    def _write(self, connection: Connection) -> None:
        try:
            connection.pump(self._turn_at)
        except (OSError, ShortFileError) as error:
            self._table.close(connection, error)
            return
        self._table.update_poll(connection)

    def _resume(self) -> None:
        """Goes on where no event of the kernel says so."""
        for connection in self._table.take_resumable():
            frames, connection.backlog = connection.backlog, []
            if frames:
                self._calls.serve(connection, frames, connection.backlog_read_at)
            elif not connection.is_direct and not connection.is_clogged:
                self._read(connection)
            if not connection.closed:
                self._table.update_poll(connection)

    def _adopt(
        self, stream: ByteStream, peer: str, client_id: str, principal: Principal, begun: bytes
    ) -> None:
        connection = Connection(
            stream,
            peer,
            client_id,
            principal,
            self,
            self._frame_size_max_bytes,
            self._request_sizes_max_bytes,
        )
        self._table.add(connection, self._turn_at)
        if begun:
            connection.reader.target(self._shared)[: len(begun)] = begun
            try:
                frames = connection.reader.received(self._shared, len(begun))
            except FrameError as error:
                self._end_broken(connection, error)
                return
            self._calls.serve(connection, frames)

    def _sweep(self) -> None:
        self._table.sweep(self._turn_at)
        self._timers.add(self._turn_at + SWEEP_INTERVAL_S, self._sweep)

    def _set_refusal(self, error: ServiceError) -> None:
        self._shutdown.refuse(error)
        assert self._shutdown.refusal is not None
        self._calls.refuse(self._shutdown.refusal)

    def _begin_finish(self, grace_s: float) -> None:
        finish_by = self._turn_at + grace_s
        self._shutdown.finish(finish_by)
        self._timers.add(finish_by, lambda: None)

    def _is_idle(self) -> bool:
        """Whether nothing that has begun is left to do."""
        return not (
            self.open_call_count
            or self.foreign_count
            or self._posted
            or self._submitted
            or self._table.has_unsent()
        )
