"""Half messages that were sent just now, as they stand in the log: nearly all are committed within milliseconds, and copied from here.

What is not here is read back from the log. It is damaged there, came before the start, had to make room, or is a rare kind of message. So
nothing depends on what is here but how much a commit costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from protomq.wire.record import FLAG_DUE_TIME, FLAG_TRANSIT
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.first_copies import first_copies

from .transactions import HalfMessage

FRESH_SIZE_MAX_BYTES: Final = 4 << 20
"""Of all that is kept."""
KEPT_SIZE_MAX_BYTES: Final = 64 << 10
"""Of one request: to read a large one again costs little beside what its copy costs."""


class FreshHalves:
    """The writer thread."""

    def __init__(self) -> None:
        self._fields: OrderedDict[int, bytes] = OrderedDict()
        self._size_bytes = 0

    def note(self, request: AppendRequest, halves: Sequence[HalfMessage]) -> None:
        """Keeps the half messages of a request that was appended."""
        region, at = request.region, request.physical_offset
        data = region.data
        is_rare = region.more_keys or region.identities is not None or region.flags & (FLAG_DUE_TIME | FLAG_TRANSIT)
        if is_rare or len(data) > KEPT_SIZE_MAX_BYTES:
            return
        fields = self._fields
        for half in halves:
            start = half.position - at
            fields[half.position] = bytes(data[start : start + half.size_bytes])
        self._size_bytes += len(data)
        while self._size_bytes > FRESH_SIZE_MAX_BYTES:
            self._size_bytes -= len(fields.popitem(last=False)[1])

    def copies(self, halves: Sequence[HalfMessage]) -> list[AppendRequest] | None:
        """The copies of half messages that are committed, and kept no longer; None if one is not here. In each queue they are in the order
        of the log.
        """
        fields = self._fields
        if any(half.position not in fields for half in halves):
            return None
        targets: dict[tuple[str, int], list[HalfMessage]] = {}
        for half in sorted(halves, key=_position_of):
            targets.setdefault((half.topic, half.queue_id), []).append(half)
        requests = []
        for (topic, queue_id), chosen in targets.items():
            stored = [fields.pop(half.position) for half in chosen]
            self._size_bytes -= sum(map(len, stored))
            times_ms = [half.store_time_ms for half in chosen]
            requests.append(AppendRequest(first_copies(topic, queue_id, stored, times_ms), queue_id))
        return requests


def _position_of(half: HalfMessage) -> int:
    return half.position
