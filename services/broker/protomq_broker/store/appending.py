"""Appends: gives each record its place and time, writes the group with one seal, and has all that is derived from the log follow it.

    stamp     queue offset, position and store time go into the bytes of each record
    write     one write with one seal; if a derived structure cannot follow, it is taken back
    publish   the position and the queues that got messages (`positions.py`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from protomq.wire.hashing import Octets

from .errors import DiskFullError, NotLeadingError, StoreFailedError
from .housekeeping.housekeeping import Clock
from .leading import Leadership
from .log.append import AppendRequest
from .log.commit_log import Reserve
from .log.durations import DISK_BOUNDS_S, Durations
from .log.kinds import MIXED, NO_OFFSET, is_queued
from .log.positions import QueueKey
from .log.record_region import stamp_region
from .open_log import OpenLog
from .state.machine import StateMachine, positions_of, state_region
from .store_files import StoreFiles
from .topic_counts import TopicCounts

log = logging.getLogger(__name__)

_PART_SIZE_MIN_BYTES: Final = 16 << 10
_PARTS_MAX: Final = 512
"""Up to this number of requests, if they are large on average, CRC and write use views of their bytes and copy nothing. (A vectored write
takes IOV_MAX, 1,024.)
"""
_COPIED_SIZE_MAX_BYTES: Final = 8 << 10
"""Below this average size a copy costs less than a view."""


class Appender:
    """See the module's docstring. The writer thread.

    Attribute: durations: of appends that were stored, from stamping until the derived structures have the records.
    """

    def __init__(
        self,
        files: StoreFiles,
        open_log: OpenLog,
        machine_of: Mapping[str, StateMachine],
        leadership: Leadership,
        counts: TopicCounts,
        clock: Clock,
    ) -> None:
        """`machine_of`: the machines of the broker's own records, by their system topics."""
        self.durations = Durations(DISK_BOUNDS_S)
        self._log = open_log.commit_log
        self._checked = open_log.checked
        self._positions = open_log.positions
        self._refusals = open_log.refusals
        self._full_disk = open_log.refusals.full_disk
        self._queues = files.queues
        self._repeated = files.repeated
        self._derived = files.derived
        self._apply_derived = tuple(each.apply for each in files.derived)
        self._apply_plain = tuple(each.apply for each in files.derived if each.takes_plain)
        self._machine_of = machine_of
        self._leadership = leadership
        self._count = counts.count_appended
        self._clock = clock
        self._monotonic = clock.monotonic

    def append(
        self,
        requests: Sequence[AppendRequest],
        reserve: Reserve = Reserve.MESSAGES,
        apply_state: Callable[[], None] | None = None,
    ) -> int:
        """Appends all requests as one group, with one write and one seal, and sets their offsets. Returns the new appended position.

        `reserve`, `apply_state`: for `append_state` and `append_moved`. `apply_state` is called when the derived structures have the
        records.

        Raises DiskFullError, StoreFailedError, AppendTooLargeError or NotLeadingError; then nothing is stored.
        """
        assert requests, "an append has records"
        commit_log = self._log
        if (
            self._leadership.follower is not None
            or commit_log.failure
            or (self._refusals.by_housekeeping and reserve is Reserve.MESSAGES)
        ):
            self._repeated.drop_claims()
            raise self._refusal()
        try:
            position = commit_log.position_for(
                len(requests[0].region.data)
                if len(requests) == 1
                else sum(len(r.region.data) for r in requests),
                reserve,
            )
            before = commit_log.tail
            began_s = self._monotonic()
            if before.position >= self._checked.next_note:
                self._checked.note_append(before)
            store_time_ms = max(self._clock.now_ms(), before.store_time_ms)
            parts, count, is_plain = self._stamp(requests, position, store_time_ms)
            tail = commit_log.append(parts, count, store_time_ms)
            try:
                for apply in self._apply_plain if is_plain else self._apply_derived:
                    apply(requests)
                if apply_state is not None:
                    apply_state()
            except Exception as error:
                reason = f"what is derived from the log could not follow it: {error!r}"
                log.exception("%s", reason)
                commit_log.take_back(before, reason)
                raise StoreFailedError(reason) from error
        except Exception as error:
            self._repeated.drop_claims()
            if isinstance(error, DiskFullError):
                self._refusals.note_full(str(error))
            raise
        if self._full_disk.was_full and reserve is Reserve.MESSAGES:  # others may use what is kept from messages
            self._refusals.note_stored()
        self.durations.observe(self._monotonic() - began_s)
        self._positions.publish(tail, self._count(requests))
        return tail.position

    def append_state(
        self, topic: str, bodies: Sequence[bytes], reserve: Reserve = Reserve.STATE
    ) -> int:
        """Appends the broker's own records, one for each body, and applies them to the state of the system topic. Returns where they end.

        The store takes them however full the disk is: freeing a disk means deleting segments, which needs such appends. Raises what
        `append` raises.
        """
        return self._append_states((), [(topic, bodies)], reserve)

    def append_moved(
        self,
        copies: Sequence[AppendRequest],
        states: Sequence[tuple[str, Sequence[bytes]]],
        reserve: Reserve = Reserve.STATE,
    ) -> int:
        """Appends copies of messages (`log/move.py`) with the state records about them, by system topic. Returns where they end. All is one
        append with one seal: after any crash, either all of it is in the log or nothing.

        The store takes it however full the disk is, as in `append_state`. Raises what `append` raises.
        """
        return self._append_states(copies, states, reserve)

    def next_store_time_ms(self) -> int:
        """The store time of an append that is made now."""
        return max(self._clock.now_ms(), self._positions.tail.store_time_ms)

    def _append_states(
        self,
        copies: Sequence[AppendRequest],
        states: Sequence[tuple[str, Sequence[bytes]]],
        reserve: Reserve,
    ) -> int:
        now_ms = self._clock.now_ms()
        records = [AppendRequest(state_region(topic, bodies, now_ms), 0) for topic, bodies in states]

        def apply() -> None:
            for (topic, bodies), request in zip(states, records, strict=True):
                machine = self._machine_of[topic]
                for body, position in zip(bodies, positions_of(request), strict=True):
                    for gone in machine.apply(body, position):
                        for derived in self._derived:
                            derived.remove_topic(gone)

        return self.append([*copies, *records], reserve, apply)

    def _refusal(self) -> NotLeadingError | StoreFailedError | DiskFullError:
        if self._leadership.follower is not None:
            return NotLeadingError("the store follows another one: ask the leader")
        if self._log.failure:
            return StoreFailedError(self._log.failure)
        return DiskFullError(self._refusals.by_housekeeping)

    def _stamp(
        self, requests: Sequence[AppendRequest], position: int, store_time_ms: int
    ) -> tuple[Sequence[Octets], int, bool]:
        """Gives each record its place and time.

        Returns (the bytes of the group in parts, number of records, whether all are plain messages).
        """
        start = position
        if len(requests) == 1:
            request = requests[0]
            region = request.region
            if region.flags:
                offset = self._next_offset(request, None)
            else:
                offset = self._queues.queue(region.topic, request.queue_id).end_offset
            stamp_region(region, request.queue_id, store_time_ms, offset, position)
            request.queue_offset, request.physical_offset = offset, position
            request.store_time_ms = store_time_ms
            data = region.data
            octets = bytes(data) if len(data) < _COPIED_SIZE_MAX_BYTES else np.frombuffer(data, np.uint8)
            return (octets,), region.count, not region.flags
        ends: dict[QueueKey, int] = {}
        count = 0
        is_plain = True
        for request in requests:
            region = request.region
            key = (region.topic, request.queue_id)
            known = ends.get(key)
            if region.flags:
                is_plain = False
                offset = self._next_offset(request, known)
            else:
                offset = self._queues.queue(*key).end_offset if known is None else known
            stamp_region(region, request.queue_id, store_time_ms, offset, position)
            request.queue_offset, request.physical_offset = offset, position
            request.store_time_ms = store_time_ms
            if offset >= 0:
                ends[key] = offset + region.count
            count += region.count
            position += len(region.data)
        datas = [request.region.data for request in requests]
        if position - start >= len(datas) * _PART_SIZE_MIN_BYTES and len(datas) <= _PARTS_MAX:
            return [np.frombuffer(data, np.uint8) for data in datas], count, is_plain
        return (b"".join(datas),), count, is_plain

    def _next_offset(self, request: AppendRequest, known: int | None) -> int:
        """Queue offset of the first record of a request that has flags. `known`: where its queue ends with what this append has put into
        it before."""
        region = request.region
        if not is_queued(region.flags):
            assert region.flags != MIXED, "it is refused before"
            return NO_OFFSET
        if known is not None:
            return known
        return self._queues.queue(region.topic, request.queue_id).end_offset
