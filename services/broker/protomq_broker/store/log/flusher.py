"""Making the log durable, and the two background threads of a store.

Rules:
- An fsync covers what was written before it began, so the position is taken first.
- A failed fsync is fatal: the kernel may have marked the pages clean, so trying again proves nothing. The log takes no more appends;
  the flushed position stays where it was, and the next start rewrites what is behind it (`recovery.rewrite_unsynced`). (A log that
  failed for another reason is still synced: what it has is to be kept.)
- Under SYNC_FLUSH every request wakes the thread; what was appended while a sync was running is covered by the next one, together
  (group commit).

Two threads, not one: consume queues of ten thousand topics take a while to sync, and no send under SYNC_FLUSH may wait for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from protomq_broker.store.files.disk import Disk

from .commit_log import CommitLog
from .durations import DISK_BOUNDS_S, Durations
from .positions import Positions
from .segment import SegmentFile

log = logging.getLogger(__name__)


class LogFlusher:
    """Syncs the log. `flush` may be called by any thread, one at a time gets through.

    `monotonic` reads a clock, in seconds. Attribute: durations, of the syncs of a segment that did not fail.
    """

    def __init__(
        self,
        disk: Disk,
        commit_log: CommitLog,
        positions: Positions,
        monotonic: Callable[[], float],
    ) -> None:
        self.durations = Durations(DISK_BOUNDS_S)
        self._disk = disk
        self._log = commit_log
        self._positions = positions
        self._monotonic = monotonic
        self._has_failed = False
        self._lock = threading.Lock()

    def flush(self) -> int:
        """Syncs what has been appended by now; the flushed position, which never moves again after a sync has failed."""
        with self._lock:
            commit_log = self._log
            position, start = self._positions.appended, self._positions.flushed
            if position <= start or self._has_failed:
                return start
            try:
                for segment in () if commit_log.has_lost_sync else commit_log.folder.overlapping(start, position):
                    began_s = self._monotonic()
                    self._disk.fdatasync(segment.fd)
                    self.durations.observe(self._monotonic() - began_s)
            except OSError as error:
                reason = (
                    f"an fsync of the log failed, what was appended from position {start} on may not be on disk: {error}. "
                    "Check the disk, then restart the broker: it recovers from the log"
                )
                log.critical("%s", reason)
                commit_log.fail_sync(reason)
            if commit_log.has_lost_sync:
                self._note_failed()
                return start
            self._positions.note_flushed(position)
            return position

    def sync_healed(self, segment: SegmentFile) -> None:
        """Syncs a segment into which a healer has written. Raises OSError: if not all of it was flushed before, no flush succeeds any more.

        The kernel reports an error once. A flush that came in between would hear nothing of what this one has lost.
        """
        if self._log.is_flushed(segment):
            # It reports nothing but the healed bytes. No flush waits until a bad sector is given up.
            self._disk.fsync(segment.fd)
            return
        with self._lock:
            try:
                self._disk.fsync(segment.fd)
            except OSError as error:
                if not self._log.is_flushed(segment):
                    self._log.fail_sync(f"an fsync of {segment.path} failed: {error}")
                    self._note_failed()
                raise

    def _note_failed(self) -> None:
        self._has_failed = True
        self._positions.note_failed()


class BackgroundThread:
    """Calls `work` every `interval_ms`, and at once when woken. An exception ends it, and `on_crash` is told."""

    def __init__(
        self,
        name: str,
        interval_ms: int,
        work: Callable[[], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._interval_s = interval_ms / 1000
        self._work = work
        self._on_crash = on_crash
        self._wanted = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Has the work done as soon as possible; any thread, does not wait."""
        if not self._wanted.is_set():
            self._wanted.set()

    def stop(self) -> None:
        """Ends the thread after the work that is being done, and waits for that."""
        self._stopping = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wanted.wait(self._interval_s)
            self._wanted.clear()
            if self._stopping:
                return
            try:
                self._work()
            except Exception as error:
                log.exception("the thread %s has ended", self._thread.name)
                self._on_crash(error)
                return
