"""Threads that unpack bodies for pulls that ask for plain ones: megabytes take tens of milliseconds, which a lane's other callers
would wait for.

A worker reads the regions, makes the records anew, and hands the answer to the call's lane. What waits for a worker is a few references;
beyond PENDING_MAX calls are refused (SYSTEM_BUSY).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from protomq_runtime.errors import system_busy

from .store_errors import to_service_error

if TYPE_CHECKING:
    from protomq_runtime.call import Call

PENDING_MAX: Final = 1_000
RETRY_DELAY_MS: Final = 100

Answer = Callable[[], None]


class PlainBodyWorkers:
    """`run`: the call's lane; `close`: the broker, when no lane runs any more. Threads are made when there is something to do."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "plain-bodies")
        self._counting = threading.Lock()
        self._pending_count = 0

    def run(self, call: Call, make: Callable[[], Answer]) -> None:
        """Calls `make` on a worker, and what it returns on the call's lane; what it raises is the answer."""
        with self._counting:
            has_room = self._pending_count < PENDING_MAX
            self._pending_count += has_room
        if not has_room:
            call.fail(system_busy("pull", RETRY_DELAY_MS))
            return
        self._executor.submit(self._work, call, make)

    def close(self) -> None:
        """Ends the threads. Nobody waits for what has not begun."""
        self._executor.shutdown(cancel_futures=True)

    def _work(self, call: Call, make: Callable[[], Answer]) -> None:
        try:
            answer = make()
        except Exception as error:
            failure = to_service_error(error)

            def answer() -> None:
                call.fail(failure)

        finally:
            with self._counting:
                self._pending_count -= 1

        def answer_if_awaited() -> None:
            if not call.answered:  # a call that was held is over when its caller has gone
                answer()

        call.lane.post(answer_if_awaited)
