"""Makes the calls of a membership while the event loop that makes them is blocked: by a listener, or a program, that does not wait.

    MemberTasks ── its loop runs ──▶ calls
                   no call for 0.7 of the time after which a broker gives it up, and the loop gives no sign of life ──▶ a thread calls
                   the loop runs again ──▶ it calls again, and the thread rests
                   the loop was stopped, is kept, and nobody runs it for 15 minutes ──▶ the member leaves, until it runs again

So a member is not given up for what its program does, as with a thread (`_member_thread.py`). Its queues, its locks and what it has done
stay its own. Else a message whose listener blocks for longer would come again for ever.
The change of queues waits for the loop all the same.

The thread's connections stay open for the next time: a broker takes a member for gone when the connection of its last call closes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from . import _methods
from ._member_driver import leaves, take_outcome
from ._membership_logic import MembershipState
from ._pull_multiplexer import PullMultiplexer
from ._transport import SyncTransport
from ._transport_options import TransportOptions
from .errors import ProtomqError

logger = logging.getLogger("protomq")

ANSWER_PART: Final = 0.05
"""Of the time after which a broker gives a member up: for how long a loop may take to give a sign of life."""
ANSWER_MAX_S: Final = 1.0
STOPPED_MAX_S: Final = 900.0
"""As RocketMQ's consumeTimeout: a program that runs its loop from time to time is a member all along."""
STOPPED_LOOK_S: Final = 1.0
RESTART_S: Final = 1.0
"""After a defect of ours, or for want of threads or descriptors."""
WAIT_S: Final = 0.25
"""For which an answer is waited for before the loop is looked at."""
ANSWER_MAX_BYTES: Final = 16 << 20


class _LoopGoneError(Exception):
    """The loop is closed, or nobody has it any more."""


class MemberStandIn:
    """Of one member. `start` and `close` come from its loop.

    It keeps neither the loop nor the member: whoever drops both without a close is no member for ever.
    """

    def __init__(
        self, state: MembershipState, lock: AbstractContextManager[Any], options: TransportOptions, on_answer: Callable[[], None]
    ) -> None:
        """`on_answer`: a method, called in the loop when it runs again."""
        self._state = state
        self._lock = lock
        self._options = options
        self._on_answer = weakref.WeakMethod(on_answer)
        self._loop: weakref.ref[AbstractEventLoop] | None = None
        self._closed = threading.Event()
        self._woken = threading.Event()
        self._transport: SyncTransport | None = None
        self._calls: PullMultiplexer | None = None

    def start(self, loop: AbstractEventLoop) -> None:
        """Watches the loop until `close`. Raises RuntimeError where no thread can be started."""
        self._loop = weakref.ref(loop)
        threading.Thread(target=self._watch, name="protomq-member-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the thread; does not wait."""
        self._closed.set()
        self._woken.set()

    def look(self) -> None:
        """Calls were made, or answered: another one may be overdue first."""
        self._woken.set()

    def _watch(self) -> None:
        try:
            while not self._closed.is_set():
                with self._lock:
                    wait_s = self._state.overdue_in_s(time.monotonic())
                    answer_s = min(self._state.shortest_expiry_s() * ANSWER_PART, ANSWER_MAX_S)
                if wait_s > 0:
                    self._woken.wait(min(wait_s, threading.TIMEOUT_MAX))
                    self._woken.clear()
                    continue
                runs = threading.Event()
                self._post(runs.set)
                if not runs.wait(answer_s):
                    self._stand_in(runs)
                else:  # It is the broker that is slow.
                    self._closed.wait(answer_s)
        except _LoopGoneError:
            return
        finally:
            self._close_calls()
            if self._transport is not None:
                self._transport.close()

    def _found_loop(self) -> AbstractEventLoop:
        """Raises _LoopGoneError."""
        loop = self._loop() if self._loop is not None else None
        if loop is None or loop.is_closed():
            raise _LoopGoneError
        return loop

    def _post(self, call: Callable[[], object]) -> None:
        """The loop is to call it. Raises _LoopGoneError."""
        try:
            self._found_loop().call_soon_threadsafe(call)
        except RuntimeError:  # It is closed.
            raise _LoopGoneError from None

    def _post_answer(self) -> None:
        on_answer = self._on_answer()
        if on_answer is not None:
            self._post(on_answer)

    def _stand_in(self, runs: threading.Event) -> None:
        """Makes the calls until the loop runs."""
        logger.warning(
            "the event loop of a member of group %s is blocked: a thread makes its calls, so that it keeps its queues", self._state.group
        )
        stopped_s: float | None = None
        while not (runs.is_set() or self._closed.is_set()):
            # A loop that is closed drops what it was to call.
            is_stopped = not self._found_loop().is_running()
            stopped_s = (stopped_s or time.monotonic()) if is_stopped else None
            if stopped_s is not None and time.monotonic() - stopped_s >= STOPPED_MAX_S:
                self._leave(runs)
                continue
            try:
                self._call()
            except _LoopGoneError:
                raise
            except Exception:
                logger.exception("the calls of a member of group %s failed, it makes them again", self._state.group)
                self._close_calls()
                with self._lock:
                    self._state.lose_calls(time.monotonic())
                self._closed.wait(RESTART_S)
        with self._lock:
            self._state.call_anew()
        self._post_answer()

    def _leave(self, runs: threading.Event) -> None:
        """The member is none until the loop runs."""
        logger.warning(
            "the event loop of a member of group %s is stopped, and nobody has run it for %.0f s: the member leaves. It joins again when "
            "the loop runs",
            self._state.group, STOPPED_MAX_S,
        )  # fmt: skip
        self._close_calls()
        with self._lock:
            requests = self._state.leave_requests(is_final=False)
            # What it had, others may have from now on.
            self._state.restart()
        transport = self._transport = self._transport or SyncTransport(self._options)
        for address, payload, timeout_s in leaves(requests):
            if runs.is_set():
                break  # It joins again, and a broker of an earlier version would take that for what ends.
            # Who does not hear it finds out: the connection closes, too.
            with contextlib.suppress(ProtomqError, OSError, RuntimeError):
                transport.call(address, _methods.LEAVE_GROUP, (payload,), timeout_s)
        self._transport = None
        transport.close()
        while not (runs.wait(STOPPED_LOOK_S) or self._closed.is_set()):
            self._found_loop()

    def _close_calls(self) -> None:
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()

    def _call(self) -> None:
        if self._calls is None:
            self._transport = self._transport or SyncTransport(self._options)
            self._calls = PullMultiplexer(self._transport, _methods.HOLD_MEMBERSHIP)
        calls, state = self._calls, self._state
        with self._lock:
            if self._closed.is_set():
                return
            now_s = time.monotonic()
            state.call_anew(now_s)
            # Only the loop can say how the member stands.
            due = [state.begin(name, now_s, describes=False) for name in state.due(now_s)]
            wait_s = state.next_due_in_s(now_s)
        for ticket, address, request, timeout_s in due:
            calls.send(address, ticket, request, timeout_s)
        for ticket, result in calls.wait(min(wait_s, WAIT_S), ANSWER_MAX_BYTES):
            with self._lock:
                before = state.news
                take_outcome(state, ticket, result)
                has_news = state.news != before
            if has_news:
                self._post_answer()
