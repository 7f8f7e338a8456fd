"""Delivers due messages: appends a copy of each to its queue and a record that says so, both in one append.

    thread "protomq-timer"    takes what is due < reads the records < makes the copies
    send lane                                                                          appends them, unless one was recalled meanwhile

Rules:
- A message is due when log time has come to its due time, not before.
- One batch is under way at a time, of a few milliseconds' work: sends get on in between. While there are any, a pause follows each batch.
- A batch that took all that was due is followed by a longer pause: a few large batches cost less than many small ones.
- A batch is prepared again, not appended, if meanwhile one of its messages was recalled or carried forward, or a topic was deleted.
- A message whose queue takes no more messages, since its topic has fewer now, goes to another one (`topic_access.keep_to_queues`).
- A record that cannot be read is left out and logged; its message is set aside. A part of the log may leave quarantine, healed or deleted.
  Then what stands in no damage any more is looked at again. The next start looks at all of it. What a repair has taken out is dropped.
- What cannot be appended (a full disk) is tried again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from protomq.v1.state_pb2 import TimerEnd
from protomq.wire.topics import TIMER_TOPIC
from protomq_runtime.clock import thread_cpu_s

from .said_once import SaidOnce
from .store.errors import NoWriterError
from .store.log.durations import LATE_BOUNDS_S, Durations
from .store.timer.carrying import Copies, copies_of, first_rows
from .store.timer.timer import Watch, timer_record
from .store.timer.timer_runs import TimerDamagedError
from .topic_access import add_missing_topics, keep_to_queues

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .log_time import LogTime
    from .store.store import Store
    from .system_writer import SystemWriter

log = logging.getLogger("protomq.broker")

BATCH_COUNT_MAX: Final = 1024
BATCH_SIZE_MAX_BYTES: Final = 1 << 20
"""Most bytes of a batch: some 15 ms to make on its own thread, 1 ms to append on the send lane."""
LOOK_INTERVAL_S: Final = 0.05
"""Interval between two looks while anything is pending. A message may be late by this and by the time of its batch."""
IDLE_INTERVAL_S: Final = 0.5
"""Interval between two looks while nothing is pending."""
RETRY_INTERVAL_S: Final = 1.0
GIVES_WAY_FACTOR: Final = 0.9
"""Pause after a batch while others append too, as a multiple of the CPU time of the batch. On two cores it leaves sends 0.6 of their rate,
and delivers more than 100,000 messages a second beside them (docs/profiles.md).
"""


class TimerMover:
    """`start`, `close`: the broker. All else: its own thread, and the send lane."""

    def __init__(self, store: Store, writer: SystemWriter, log_time: LogTime) -> None:
        self._store = store
        self._writer = writer
        self._log_time = log_time
        self._stopping = threading.Event()
        self._seen_position = store.appended_position
        self._said = SaidOnce()
        self._left_quarantine_count = -1  # when it last looked at what is set aside; another mover may have set that aside
        self._thread = threading.Thread(target=self._run, name="protomq-timer", daemon=True)
        self.has_more = False
        """Whether more was due than the last batch took."""
        self.unreadable_count = 0
        """Delayed messages that were skipped since the start because they cannot be read."""
        self.lateness = Durations(LATE_BOUNDS_S)
        """Time from a message's due time to its append, in log time."""

    def start(self) -> None:
        """Begins to deliver. The writer has started."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. A batch that is under way is appended as a whole, or not at all. Close the writer before."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            began_s = thread_cpu_s()
            others_append = self.others_append
            try:
                if not self.deliver() or not self.has_more:
                    wait_s = self._pause_s()
                else:
                    wait_s = (thread_cpu_s() - began_s) * GIVES_WAY_FACTOR if others_append else 0.0
            except NoWriterError:
                wait_s = RETRY_INTERVAL_S
            except TimerDamagedError:  # the store logs it, and rebuilds the files
                wait_s = RETRY_INTERVAL_S
            except Exception as error:
                if self._said.is_due(type(error).__name__):
                    log.exception("delayed messages could not be delivered; the broker tries again each second")
                wait_s = RETRY_INTERVAL_S

    @property
    def others_append(self) -> bool:
        """Whether anything was appended since the last batch."""
        return self._store.appended_position != self._seen_position

    def _pause_s(self) -> float:
        return LOOK_INTERVAL_S if self._store.pending.count else IDLE_INTERVAL_S

    def deliver(self) -> bool:
        """Delivers one batch of due messages. Returns whether any were due."""
        store = self._store
        self.has_more = False
        self._take_back()
        with store.timer.watch() as watch:
            due = store.pending.due(self._log_time.now_ms(), BATCH_COUNT_MAX)
            if not len(due):
                return False
            # Copies are larger than their originals, and a record goes with them. All of it must fit into a small segment, too.
            size_max_bytes = min(BATCH_SIZE_MAX_BYTES, store.append_size_max_bytes // 4)
            rows = first_rows(due, BATCH_COUNT_MAX, size_max_bytes)
            self.has_more = len(due) == BATCH_COUNT_MAX or len(rows) < len(due)
            deleted = store.topics.deleted
            copies = copies_of(rows, store.read_records, store.has_topic_of, keeps_due_times=False)
            is_lost = self._are_lost(copies.unreadable)
            lost = copies.unreadable[is_lost]
            self._leave_aside(copies.unreadable[~is_lost])
            self._writer.run(lambda: self._append(copies, lost, watch, deleted))
        return True

    def _append(
        self, copies: Copies, lost: NDArray[Any], watch: Watch, deleted: Mapping[str, int]
    ) -> None:
        """Appends a batch on the send lane. `deleted`: the deleted topics when the copies were made; the store replaces this mapping and
        never changes it.
        """
        ends = (
            (copies.rows, TimerEnd.TIMER_END_DELIVERED),
            (copies.dropped, TimerEnd.TIMER_END_DROPPED),
            (lost, TimerEnd.TIMER_END_DROPPED),
        )
        if self._store.topics.deleted is not deleted or any(watch.has_ended(rows).any() for rows, _ in ends):
            self.has_more = True
            return
        now_ms = self._log_time.now_ms()
        bodies = [timer_record(rows, end, now_ms) for rows, end in ends if len(rows)]
        if not bodies:
            return
        keep_to_queues(self._store, copies.requests)
        self._store.append_moved(copies.requests, [(TIMER_TOPIC, bodies)])
        self._seen_position = self._store.appended_position
        # Now it is known that they are said once: what cannot be appended is prepared again.
        if (count := np.count_nonzero(lost["position"] >= self._store.min_position)):
            log.error("%d delayed messages are lost: `protomq log repair` has taken them out", count)
        if len(copies.rows):
            late_ms = np.maximum(now_ms - copies.rows["due_ms"].astype(np.int64), 0)
            self.lateness.observe_all(late_ms / 1_000)
        add_missing_topics(self._store, copies.requests)

    def _take_back(self) -> None:
        """What was set aside falls due again, where the log is healed or gone. What heals while a batch is prepared, the next look sees."""
        store = self._store
        left_count = store.left_quarantine_count
        if left_count == self._left_quarantine_count:
            return
        start = store.min_position
        damaged = [(max(each.start_position, start), each.end_position) for each in store.damaged_ranges]
        count = store.pending.take_back(damaged)
        self._left_quarantine_count = left_count
        if count:
            log.warning("%d delayed messages that could not be read are looked at again: their parts of the log are healed or gone", count)

    def _are_lost(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of these can never be read: retention has deleted them, or `protomq log repair` has taken them out."""
        is_deleted: NDArray[np.bool_] = rows["position"] < self._store.min_position
        is_repaired = np.array([self._store.is_repaired(position) for position in rows["position"].tolist()], np.bool_)
        return is_deleted | is_repaired

    def _leave_aside(self, rows: NDArray[Any]) -> None:
        if not len(rows):
            return
        self._store.pending.set_aside(rows)
        self.unreadable_count += len(rows)
        log.error(
            "%d delayed messages cannot be read (the first stands at position %d): they are not delivered until they can be",
            len(rows),
            int(rows["position"][0]),
        )
