"""The calls of a lane: which are started, when, and how. The loop (`lane.py`) hands over frames and takes the turn's time.

    frames of the lane's connections ──┐                        ┌─▶ plain and raw methods: at once
    calls that other threads submit ───┴─▶ refused, shed, late? ┴─▶ drained methods: collected, handed over at the turn's end

Lane thread only, but for `submitted`, to which any thread appends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from protomq.wire.frames import CANCEL_METHOD_ID, ECHO_METHOD_ID, FLAG_ONE_WAY

from .admission import AdmissionConfig, QueueTimeRule
from .call import Call
from .connection import PENDING_SIZE_MAX_BYTES, Connection, ConnectionLane
from .dispatch import BoundMethod, PoolMethods, Style
from .errors import DEADLINE_EXCEEDED, ServiceError, no_request, system_busy, unknown_method
from .execution import run_drained, run_plain, run_raw
from .framing import LARGE_SIZE_BYTES, MARKS_MAX, Frame
from .remoting_call import ForeignCall, RemotingCall

DRAINED_COUNT_MAX: Final = 4096
DRAINED_SIZE_MAX_BYTES: Final = 64 << 20
"""Collected calls above these are handed over before the turn ends: memory is bounded, and no append grows without end."""
BUSY_RETRY_DELAY_MS: Final = 100


class CallingLane(ConnectionLane, Protocol):
    """The lane of these calls."""

    call_count: int
    rejection_count: int


class OtherLane(CallingLane, Protocol):
    """A lane that runs a call of another one's connection."""

    @property
    def busy_error(self) -> ServiceError: ...

    def has_room(self) -> bool: ...

    def submit(self, call: Call) -> None: ...


class LaneCalls:
    """From frames and submitted calls to methods that run."""

    def __init__(
        self,
        lane: CallingLane,
        methods: PoolMethods,
        admission: AdmissionConfig,
        pick_lane: Callable[[str], OtherLane],
    ) -> None:
        """`pick_lane` gives the lane of the pool of that name which runs the next call of another one's connection."""
        self._lane = lane
        self._pick_lane = pick_lane
        self.busy_error = system_busy(methods.pool_name, BUSY_RETRY_DELAY_MS)
        """The refusal of this lane."""
        self.submitted: deque[Call] = deque()
        """Calls from other threads that are not started yet."""
        self.rule = QueueTimeRule(admission, time.thread_time)
        self._pool_methods = methods
        self._methods: Mapping[int, BoundMethod] = methods.own
        """What is served here; empty once everything is refused, so that the hot path need not ask."""
        self._refusal: ServiceError | None = None
        self._drained: dict[BoundMethod, list[Call]] = {}
        self._drained_size_bytes = 0
        self._turn_at = 0.0
        """When the poll of this turn returned, in seconds of time.monotonic()."""
        self._waited = 0.0
        """How long what this turn reads may have lain in the sockets."""
        self._resumes = False
        """Whether this turn serves frames that an earlier one has read."""

    @property
    def depth(self) -> int:
        """Calls that wait to be started. Any thread."""
        return len(self.submitted) + sum(map(len, tuple(self._drained.values())))

    def refuse(self, refusal: ServiceError) -> None:
        """From now on every new call is answered with this error."""
        self._refusal = refusal
        self._methods = {}

    def begin_turn(self, turn_at: float, waited: float) -> None:
        """Notes when the poll returned, and how long what it found may have lain there."""
        self._turn_at = turn_at
        self._waited = waited
        self._resumes = False
        if self.submitted:
            waited = max(waited, turn_at - self.submitted[0].received)
        self.rule.observe(turn_at, waited)

    def start_submitted(self) -> None:
        """Starts what other threads have submitted."""
        submitted = self.submitted
        now = self._turn_at
        shed_after = self.rule.shed_after if self.rule.overloaded else None
        for _ in range(len(submitted)):
            call = submitted.popleft()
            self._lane.call_count += 1
            if self._refusal is not None:
                call.fail(self._refusal)
            elif shed_after is not None and call.bound.may_be_shed and now - call.received > shed_after:
                self._reject(call)
            elif call.deadline is not None and now > call.deadline:
                call.fail(DEADLINE_EXCEEDED)
            elif call.is_overloaded:
                self._reject(call)
            else:
                self._start(call)

    def _start(self, call: Call) -> None:
        style = call.bound.style
        if style is Style.DRAINED:
            calls = self._drained.setdefault(call.bound, [])
            calls.append(call)
            if len(calls) >= DRAINED_COUNT_MAX:
                self.run_drained()
        elif style is Style.RAW:
            run_raw(call)
        else:
            run_plain(call)

    def _reject(self, call: Call) -> None:
        self._lane.rejection_count += 1
        call.fail(self.busy_error)

    def serve(self, connection: Connection, frames: Sequence[Frame], read_at: float | None = None) -> None:
        """Starts the calls of these frames; `read_at`: when an earlier turn has read them. The hot path: small drained calls."""
        methods = self._methods
        drained = self._drained
        # Deadlines count from the reading: nobody knows when the bytes came, and a call must not be dropped while its caller waits.
        received = turn_at = self._turn_at
        if read_at is not None:
            received, self._resumes = read_at, True
        shed_at = turn_at - self._waited + self.rule.shed_after if self.rule.overloaded else None
        served = 0
        cancelled = connection.cancelled
        remaining = iter(frames)
        for frame in remaining:
            request_id, method_id, flags, timeout_ms, payload = frame
            bound = methods.get(method_id)
            if bound is None or flags > MARKS_MAX:
                self._serve_foreign(connection, frame, received)
                continue
            served += 1
            if cancelled and not flags:
                cancelled.pop(request_id, None)  # That was of an earlier call, which is over.
            call = RemotingCall(
                connection,
                self._lane,
                bound,
                payload,
                request_id,
                flags,
                received,
                received + timeout_ms / 1000 if timeout_ms else None,
            )
            if shed_at is not None and bound.may_be_shed and time.monotonic() > shed_at:
                self._reject(call)
            elif bound.style is Style.DRAINED:
                calls = drained.get(bound)
                if calls is None:
                    drained[bound] = calls = [call]
                else:
                    calls.append(call)
                if len(payload) > LARGE_SIZE_BYTES:
                    self._drained_size_bytes += len(payload)
                if (
                    len(calls) >= DRAINED_COUNT_MAX
                    or self._drained_size_bytes > DRAINED_SIZE_MAX_BYTES
                ):
                    self.run_drained()
                    drained = self._drained
            elif timeout_ms and time.monotonic() > received + timeout_ms / 1000:
                call.fail(DEADLINE_EXCEEDED)
            elif bound.style is Style.RAW:
                run_raw(call)
            else:
                run_plain(call)
            if connection.out_size_bytes > PENDING_SIZE_MAX_BYTES:
                # Answers pile up within one turn: leave the other frames until these have been sent.
                connection.backlog, connection.backlog_read_at = list(remaining), received
                break
        self._lane.call_count += served

    def _serve_foreign(self, connection: Connection, frame: Frame, read_at: float) -> None:
        """A call that is for another pool, unknown or refused. Or a frame that is no call: an echo, or one that gives a call up."""
        request_id, method_id, flags, timeout_ms, payload = frame
        if method_id == CANCEL_METHOD_ID and flags == FLAG_ONE_WAY:
            connection.cancel(request_id)
            return
        if method_id == ECHO_METHOD_ID and not flags:
            # Also of one that stops: it is there.
            connection.send_answer(request_id, ECHO_METHOD_ID, b"")
            return
        bound = self._pool_methods.by_id.get(method_id)
        if self._refusal is not None:
            error = self._refusal
        elif flags > MARKS_MAX:
            error = no_request(flags & 0xFF, flags >> 8)
        elif bound is None:
            error = unknown_method(f"number {method_id:#06x}")
        else:
            lane = self._pick_lane(bound.method.lane)
            if lane.has_room():
                self._lane.foreign_count += 1
                deadline = read_at + timeout_ms / 1000 if timeout_ms else None
                if not flags:
                    connection.cancelled.pop(request_id, None)
                # It reaches the lane's queue now. What it has waited here, in the sockets and in this turn, says nothing of that lane.
                lane.submit(
                    ForeignCall(
                        connection, lane, bound, payload, request_id, flags, time.monotonic(), deadline
                    )
                )
                return
            error = lane.busy_error
            lane.rejection_count += 1
        if not flags & FLAG_ONE_WAY:
            connection.send_error(request_id, method_id, error)

    def run_drained(self) -> None:
        """Hands over what was collected, once for each method."""
        if not self._drained:
            return
        groups, self._drained = self._drained, {}
        self._drained_size_bytes = 0
        now = time.monotonic()
        # A deadline has a resolution of 1 ms: within a turn shorter than that none can have passed unseen.
        slow = self._resumes or now - self._turn_at > 0.001
        for bound, calls in groups.items():
            if slow:
                calls = _drop_expired(calls, now)
            if calls:
                run_drained(bound, calls)


def _drop_expired(calls: list[Call], now: float) -> list[Call]:
    """Answers the calls whose deadline has passed; the others."""
    alive = []
    for call in calls:
        if call.deadline is not None and now > call.deadline:
            call.fail(DEADLINE_EXCEEDED)
        else:
            alive.append(call)
    return alive
