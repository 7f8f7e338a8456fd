"""Threads that unpack bodies for pulls that ask for plain ones: megabytes take tens of milliseconds, which a lane's other callers
would wait for.

A worker reads the regions, rewrites the records, and hands the answer to the call's lane. A caller that has gone by then, or waits no
longer, costs no reading. Work waits up to PENDING_SIZE_MAX_BYTES; beyond that calls are refused (SYSTEM_BUSY).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from protomq_runtime.errors import DEADLINE_EXCEEDED, system_busy

from .store_errors import to_service_error

if TYPE_CHECKING:
    from protomq_runtime.call import Call

PENDING_SIZE_MAX_BYTES: Final = 256 << 20
"""Of what is to be read for the calls that wait or are worked on: a second's work or so."""
CALL_OVERHEAD_BYTES: Final = 1_000
"""What a call counts besides: one small message is some work, too."""
RETRY_DELAY_MS: Final = 100

Answer = Callable[[], None]


class PlainBodyWorkers:
    """`run`: the call's lane; `close`: the broker, when no lane runs any more. Threads are made when there is something to do."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "plain-bodies")
        self._counting = threading.Lock()
        self._pending_size_bytes = 0

    def run(self, call: Call, size_bytes: int, make: Callable[[], Answer]) -> None:
        """Calls `make`, which reads `size_bytes`, on a worker, and what it returns on the call's lane; what it raises is the answer."""
        size_bytes += CALL_OVERHEAD_BYTES
        with self._counting:
            has_room = self._pending_size_bytes + size_bytes <= PENDING_SIZE_MAX_BYTES
            self._pending_size_bytes += size_bytes if has_room else 0
        if not has_room:
            call.fail(system_busy("pull", RETRY_DELAY_MS))
            return
        self._executor.submit(self._work, call, size_bytes, make)

    def close(self) -> None:
        """Ends the threads. Nobody waits for what has not begun."""
        self._executor.shutdown(cancel_futures=True)

    def _work(self, call: Call, size_bytes: int, make: Callable[[], Answer]) -> None:
        try:
            if _is_over(call):
                raise DEADLINE_EXCEEDED
            answer = make()
        except Exception as error:
            failure = to_service_error(error)

            def answer() -> None:
                call.fail(failure)

        finally:
            with self._counting:
                self._pending_size_bytes -= size_bytes

        def answer_if_awaited() -> None:
            if not call.answered:  # a call that was held is over when its caller has gone
                answer()

        call.lane.post(answer_if_awaited)


def _is_over(call: Call) -> bool:
    """Whether nobody waits for the answer any more. Asked on a worker: what it says may be old, but is true."""
    is_late = call.deadline is not None and time.monotonic() > call.deadline
    return is_late or call.answered or call.closed
