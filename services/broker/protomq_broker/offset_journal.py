"""Consumer offsets in the log: what must survive a fail-over is a record.

Every few seconds the offsets that have changed are appended to a system topic, one record a group, as CommitOffsetsRequest. Side files are
caches of it. The send lane does it, since it is the only writer.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from protomq.wire.record import RecordTemplate, encode_record_field

from .store.append import AppendRequest
from .store.errors import WritesRefusedError
from .store.offsets import OFFSETS_TOPIC
from .store.record_region import prove_region

if TYPE_CHECKING:
    from protomq_runtime.clock import Clock
    from protomq_runtime.lane import Lane, Timer

    from .store.store import Store

log = logging.getLogger("protomq.broker")


class OffsetJournal:
    """Appends changed offsets at an interval. Send lane only."""

    def __init__(self, store: Store, clock: Clock, lane: Lane, interval_ms: int) -> None:
        self._store = store
        self._clock = clock
        self._lane = lane
        self._interval_ms = interval_ms
        self._template = RecordTemplate(OFFSETS_TOPIC, secrets.randbits(63) | 1, 0)
        self._next_sequence = 0
        self._timer: Timer | None = None

    def start(self) -> None:
        """Begins; runs until `stop`."""
        self._timer = self._lane.call_later(self._interval_ms, self._run)

    def stop(self) -> None:
        """Writes what has changed since the last time, and ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.write()

    def write(self) -> None:
        """Appends what has changed; what is refused stays changed and is tried again the next time."""
        changed = self._store.offsets.changed_since_last()
        if not changed:
            return
        records = []
        for body in changed:
            records.append(self._template.encode(body, self._next_sequence, self._clock.now_ms()))
            self._next_sequence += 1
        data = b"".join(map(encode_record_field, records))
        region = prove_region(data, OFFSETS_TOPIC, [len(record) for record in records])
        assert region is not None, "what the broker wrote itself must hold"
        try:
            self._store.append([AppendRequest(region, 0)])
        except WritesRefusedError as error:
            log.warning("consumer offsets are not in the log yet: %s", error)
            self._store.offsets.mark_changed(changed)

    def _run(self) -> None:
        self.write()
        self.start()
