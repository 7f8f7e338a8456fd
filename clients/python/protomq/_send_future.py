"""The future of a message of `send_async`, and the count of failures that nobody has seen.

A future that fails without anybody asking it would let its message vanish. So a failure counts as seen when somebody asks for the
outcome, or gets it in a callback. `flush`, `close` and the end of the interpreter report the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from ._outgoing import SendResult


class UnseenFailures:
    """Counts a producer's failed futures that nobody has looked at. Any thread."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets everything. In a forked child the lock may be held by a thread that is not there: it gets a new one."""
        # A signal handler may look at a future in the midst of this: the lock is to let its thread in again.
        self._lock = threading.RLock()
        self._unseen = 0
        self._first_error: BaseException | None = None
        self._round = 0
        """How often `take` was called: what was told is not counted again, and not taken off."""

    def failed(self, future: SendFuture, error: BaseException | None) -> None:
        """The future is about to fail."""
        with self._lock:
            if future.seen:
                return
            future.counted_in = self._round
            self._unseen += 1
            if self._first_error is None:
                self._first_error = error

    def looked_at(self, future: SendFuture) -> None:
        """Somebody has asked for the outcome, or will be called with it."""
        with self._lock:
            if future.seen:
                return
            future.seen = True
            if future.counted_in == self._round:
                self._unseen -= 1
                if not self._unseen:
                    self._first_error = None

    def take(self, undecided: Iterable[SendFuture] = ()) -> tuple[int, BaseException | None]:
        """How many messages failed unseen since the last call, and the first error; those without an outcome count, too."""
        with self._lock:
            count, error = self._unseen, self._first_error
            for future in undecided:
                if not future.seen and future.counted_in is None and not future.done():
                    future.seen = True  # Told now, whatever becomes of it.
                    count += 1
            self._unseen, self._first_error = 0, None
            self._round += 1
            return count, error


class SendFuture(Future[SendResult]):
    """Knows whether anybody has asked for its outcome."""

    def __init__(self, failures: UnseenFailures) -> None:
        super().__init__()
        self._failures = failures
        self.seen = False
        self.counted_in: int | None = None
        """The round of `UnseenFailures` that counted its failure; None: it has not failed unseen."""

    def result(self, timeout: float | None = None) -> SendResult:
        """See Future. Whoever waits here sees the outcome, or the end of the wait."""
        self._failures.looked_at(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See Future."""
        self._failures.looked_at(self)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[SendResult]], object]) -> None:
        """See Future."""
        self._failures.looked_at(self)
        super().add_done_callback(fn)

    def set_exception(self, exception: BaseException | None) -> None:
        """See Future. Counted before anybody who waits for the outcome wakes: `flush` is to find it."""
        self._failures.failed(self, exception)
        super().set_exception(exception)


def unseen_text(count: int, error: BaseException | None) -> str:
    """The warning about messages that failed, or have no outcome yet, while nobody looked at their futures."""
    why = f"the first error: {error!r}" if error is not None else "their time was up before the answer"
    return (
        f"{count} message{'s' if count > 1 else ''} of send_async {'were' if count > 1 else 'was'} not stored, or nobody knows, "
        f"and nobody has looked at the futures; {why}. Ask each future for its result() or exception(), or give it a callback"
    )
