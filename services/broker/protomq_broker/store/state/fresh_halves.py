"""Half messages that were sent just now, as they stand in the log: nearly all are committed within milliseconds, and copied from here.

What is not here is read back from the log. It is damaged there, came before the start, had to make room, or is a rare kind of message. So
nothing depends on what is here but how much a commit costs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Final

import numpy as np

from protomq.wire.record import FLAG_DUE_TIME, FLAG_TRANSIT
from protomq_broker.store.log.append import AppendRequest, RecordRegion
from protomq_broker.store.log.first_copies import ROWS_MIN, first_copies, first_copies_of_rows

from .transactions import HalfMessage

FRESH_SIZE_MAX_BYTES: Final = 4 << 20
"""Of all that is kept."""
KEPT_SIZE_MAX_BYTES: Final = 64 << 10
"""Of one request: to read a large one again costs little beside what its copy costs."""

_position_of: Final[Callable[[HalfMessage], int]] = attrgetter("position")


class _Sent:
    """A request that is kept while one of its half messages is. Its bytes are those that were appended: nobody writes into them again.

    Attributes: positions: of its half messages; left: how many of them are kept; stride: their size, if all have one, else 0.
    """

    __slots__ = ("data", "left", "positions", "stride")

    def __init__(self, data: bytearray, positions: Sequence[int], stride: int) -> None:
        self.data = data
        self.positions = positions
        self.left = len(positions)
        self.stride = stride

    def copies(self, halves: Sequence[HalfMessage]) -> RecordRegion | None:
        """The copies of some of its half messages, in the order of the log; None if arrays are of no use."""
        count, stride = len(halves), self.stride
        if count < ROWS_MIN or not stride:
            return None
        rows = np.frombuffer(self.data, np.uint8).reshape(len(self.positions), stride)
        first = halves[0]
        if count < len(rows):
            at = [(half.position - self.positions[0]) // stride for half in halves]
            rows = rows[at]
        times_ms = [first.store_time_ms] * count
        return first_copies_of_rows(first.topic, first.queue_id, rows, times_ms)

    def field(self, half: HalfMessage) -> bytearray:
        """The record field of one of its half messages."""
        start = half.position - self.positions[0]
        return self.data[start : start + half.size_bytes]


class FreshHalves:
    """The writer thread."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, _Sent] = OrderedDict()
        """By the position of the first half message."""
        self._sent: dict[int, _Sent] = {}
        """By the position of each half message: where it was."""
        self._size_bytes = 0

    def note(self, request: AppendRequest, halves: Sequence[HalfMessage]) -> None:
        """Keeps the half messages of a request that was appended."""
        region = request.region
        data = region.data
        is_rare = region.more_keys or region.identities is not None or region.flags & (FLAG_DUE_TIME | FLAG_TRANSIT)
        if is_rare or len(data) > KEPT_SIZE_MAX_BYTES:
            return
        positions = list(map(_position_of, halves))
        sent = _Sent(data, positions, region.stride)
        self._requests[positions[0]] = sent
        self._sent.update(zip(positions, repeat(sent), strict=False))
        self._size_bytes += len(data)
        while self._size_bytes > FRESH_SIZE_MAX_BYTES:
            _, oldest = self._requests.popitem(last=False)
            self._size_bytes -= len(oldest.data)
            for position in oldest.positions:
                self._sent.pop(position, None)

    def copies(self, halves: Sequence[HalfMessage]) -> list[AppendRequest] | None:
        """The copies of half messages that are committed, and kept no longer; None if one is not here. In each queue they are in the order
        of the log.
        """
        ordered = sorted(halves, key=_position_of)
        positions = list(map(_position_of, ordered))
        try:
            sent_of = list(map(self._sent.__getitem__, positions))
        except KeyError:
            return None
        if positions == sent_of[0].positions:  # all of one request
            region = sent_of[0].copies(ordered)
            if region is not None:
                self._drop(sent_of[0], ordered)
                return [AppendRequest(region, ordered[0].queue_id)]
        targets: dict[tuple[str, int], list[tuple[_Sent, list[HalfMessage]]]] = {}
        start = 0
        for sent, same in groupby(sent_of):
            end = start + len(list(same))
            first = ordered[start]
            targets.setdefault((first.topic, first.queue_id), []).append((sent, ordered[start:end]))
            start = end
        requests = []
        for (topic, queue_id), parts in targets.items():
            region = parts[0][0].copies(parts[0][1]) if len(parts) == 1 else None
            if region is None:
                fields = [sent.field(half) for sent, chosen in parts for half in chosen]
                times_ms = [half.store_time_ms for _, chosen in parts for half in chosen]
                region = first_copies(topic, queue_id, fields, times_ms)
            requests.append(AppendRequest(region, queue_id))
        for parts in targets.values():
            for sent, chosen in parts:
                self._drop(sent, chosen)
        return requests

    def _drop(self, sent: _Sent, halves: Sequence[HalfMessage]) -> None:
        deque(map(self._sent.__delitem__, map(_position_of, halves)), maxlen=0)
        sent.left -= len(halves)
        if not sent.left:
            del self._requests[sent.positions[0]]
            self._size_bytes -= len(sent.data)
