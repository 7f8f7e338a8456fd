"""Threads that unpack bodies for pulls that ask for plain ones. Megabytes take tens of milliseconds, which would delay a lane's other
callers.

A worker reads the regions, rewrites the records, and hands the answer to the call's lane. The worker reads nothing for a caller that has
gone or waits no longer. Waiting work is limited to PENDING_SIZE_MAX_BYTES; above that, calls are refused (SYSTEM_BUSY).
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
"""Most bytes to be read for calls that wait or are worked on: about one second of work."""
CALL_OVERHEAD_BYTES: Final = 1_000
"""Bytes that a call counts besides: even one small message is some work."""
RETRY_DELAY_MS: Final = 100

Answer = Callable[[], None]


class PlainBodyWorkers:
    """Call `run` on the call's lane, and `close` when no lane runs any more. Threads start when there is something to do."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, "plain-bodies")
        self._counting = threading.Lock()
        self._pending_size_bytes = 0

    def run(self, call: Call, size_bytes: int, make: Callable[[], Answer]) -> None:
        """Calls `make`, which reads `size_bytes`, on a worker, then its result on the call's lane. An error of `make` becomes the answer.
        """
        size_bytes += CALL_OVERHEAD_BYTES
        with self._counting:
            has_room = self._pending_size_bytes + size_bytes <= PENDING_SIZE_MAX_BYTES
            self._pending_size_bytes += size_bytes if has_room else 0
        if not has_room:
            call.fail(system_busy("pull", RETRY_DELAY_MS))
            return
        self._executor.submit(self._work, call, size_bytes, make)

    def close(self) -> None:
        """Ends the threads. Work that has not begun is dropped."""
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
    """Whether nobody waits for the answer any more. Called on a worker: it may see a change late, but is never wrong when True."""
    is_late = call.deadline is not None and time.monotonic() > call.deadline
    return is_late or call.answered or call.closed
