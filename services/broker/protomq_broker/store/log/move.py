"""Moving messages: the record that stands in the log is written again for another queue. Pure: bytes in, bytes out.

    stored   0A size | front: fields 1 to 5 | [transit] | topic          [due time] | trailer
    copy     0A size | the same octets      |  transit  | target's topic [due time] | the same, but flags and stamps

- The front is not opened: body, keys, tag and properties stay, octet by octet, and the producer's CRC-32C holds. The message id, the codes
  of tag and keys, the sharding hash and the time of birth stay too.
- `transit` says where the message stood first. The first move writes it, and later ones keep it. A move after a failed delivery raises
  `attempt` and may add the error. If its group had the message in another topic than that, this move says in which one.
- `flags` say: copy, with transit, with or without a due time. What the original was (half, delayed) is gone. Only a half message that is
  carried forward stays one: half, with transit. How a transaction ended stays: `flags` of each further copy say it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protomq.wire import record as layout
from protomq.wire.trailer_arrays import FIXED_TRAILER_DTYPE
from protomq.wire.varint_arrays import read_lengths

from .append import MoreKey, RecordRegion
from .move_alike import ALIKE_MIN, move_alike, rows_of
from .move_one import move_one
from .record_arrays import opaque, topic_field_of, trailer_dtype, windows
from .record_crcs import front_spans
from .record_scan import hashes_of_more_keys, record_head
from .transit import KEPT_FLAGS, ORIGIN, origins_of, raised_transit, transit_head, transit_tail

ReadRecords = Callable[
    [NDArray[np.int64], NDArray[np.int64]], tuple[bytes, NDArray[np.int64], NDArray[np.bool_]]
]
"""As `LogReader.read_records`: who makes copies reads what is to be moved."""


def move_records(
    data: bytes,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    topic: str,
    *,
    due_times_ms: NDArray[np.uint64] | None = None,
    attempts: int | Sequence[int] = 0,
    last_errors: str | Sequence[str | None] | None = None,
    replayed_group: str = "",
    is_half: bool = False,
    marks: int = 0,
) -> RecordRegion:
    """Copies for one queue of `topic` of the record fields that stand at `starts` of `data` with `sizes`: at least one; not stamped.

    `due_times_ms`: when each copy may be delivered; None: at once. `attempts`: deliveries since the records were written, of all or of
    each; below 0 where another group begins to count. `last_errors`: why the last delivery failed, in the consumer's words, of all or of
    each. None: as the record says.
    `replayed_group`: the records are dead letters of this group, and their attempts begin again. `is_half`: half messages that are
    carried forward, and stay so. `marks`: bits of `flags` that the copies get: FLAG_COMMITTED or FLAG_EXPIRED, as all copies of theirs, or
    FLAG_KEPT.

    Raises ValueError for what is no record of a log.
    """
    kind = layout.FLAG_KIND_HALF | layout.FLAG_TRANSIT if is_half else layout.FLAG_KIND_COPY
    if len(starts) == 1:
        start = int(starts[0])
        return move_one(
            data[start : start + int(sizes[0])],
            topic,
            kind,
            due_time_ms=None if due_times_ms is None else int(due_times_ms[0]),
            attempts=attempts if isinstance(attempts, int) else attempts[0],
            last_error=_first_of(last_errors),
            replayed_group=replayed_group,
            marks=marks,
        )
    if len(starts) >= ALIKE_MIN and _is_of_all(attempts) and _is_of_all(last_errors):
        rows = rows_of(data, starts, sizes)
        region = None if rows is None else move_alike(
            rows,
            topic,
            kind,
            due_times_ms=due_times_ms,
            attempts=attempts if isinstance(attempts, int) else attempts[0],
            last_error=_first_of(last_errors),
            replayed_group=replayed_group,
            marks=marks,
        )
        if region is not None:
            return region
    octets = np.frombuffer(data, np.uint8)
    ends = starts + sizes
    try:
        front_starts, front_ends = front_spans(octets, starts, ends)
        trailers = windows(data, opaque(layout.FIXED_TRAILER_SIZE_BYTES))[
            ends - layout.FIXED_TRAILER_SIZE_BYTES
        ].view(FIXED_TRAILER_DTYPE)
        topic_starts = front_ends.copy()
        moved_before = np.flatnonzero(trailers["flags"] & layout.FLAG_TRANSIT)
        transit_sizes, transit_starts = read_lengths(octets, front_ends[moved_before] + 1)
        topic_starts[moved_before] = transit_starts + transit_sizes
        topic_ends = topic_starts + 2 + octets[topic_starts + 1]
    except IndexError:
        raise ValueError("a record that is cut short") from None
    if (octets[topic_starts] != layout.TOPIC_TAG).any() or (topic_ends >= ends).any():
        raise ValueError("a record without its topic")
    tails = _tails(topic, trailers, due_times_ms, kind | marks)
    is_opened = bool(attempts) or last_errors is not None or bool(replayed_group)
    count = len(starts)
    more = [attempts] * count if isinstance(attempts, int) else attempts
    errors = [last_errors] * count if last_errors is None or isinstance(last_errors, str) else last_errors
    carried = set(moved_before.tolist())
    added = (
        [b"" if row in carried else transit_tail(more[row], errors[row], replayed_group) for row in range(count)]
        if is_opened
        else [b""] * count
    )
    pieces = _Pieces(data, tails)
    origin_octets = origins_of(trailers).tobytes() if len(carried) < count else b""
    spans = zip(
        front_starts.tolist(),
        front_ends.tolist(),
        topic_starts.tolist(),
        topic_ends.tolist(),
        strict=True,
    )
    for row, (front_start, front_end, topic_start, topic_end) in enumerate(spans):
        if row in carried:
            transit = data[front_end:topic_start]
            if more[row] or errors[row] is not None or replayed_group:
                stored_topic = data[topic_start + 2 : topic_end]
                transit = raised_transit(transit, stored_topic, more[row], errors[row], replayed_group)
        else:
            tail, at = added[row], row * ORIGIN.itemsize
            transit = transit_head(data[topic_start + 2 : topic_end], len(tail))
            transit += origin_octets[at : at + ORIGIN.itemsize] + tail
        pieces.add(row, front_start, front_end, transit)
    joined = pieces.joined()
    more_keys = _more_keys(data, front_starts, front_ends, trailers["flags"], joined.starts)
    return _region(topic, joined, trailers, more_keys, due_times_ms, kind)


class _Joined(NamedTuple):
    """The octets of all copies, and where each begins and how long it is."""

    data: bytearray
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]


def _is_of_all(values: int | str | Sequence[object] | None) -> bool:
    """Whether all records have the same."""
    return values is None or isinstance(values, int | str) or all(value == values[0] for value in values)


def _first_of(errors: str | Sequence[str | None] | None) -> str | None:
    return errors if errors is None or isinstance(errors, str) else errors[0]


class _Pieces:
    """What the copies are put together from: few slices for each, joined once."""

    def __init__(self, data: bytes, tails: NDArray[np.void]) -> None:
        self.parts: list[Any] = []
        self.sizes: list[int] = []
        self._data = memoryview(data)
        self._tails = tails.tobytes()
        self._tail_size = tails.itemsize

    def add(self, row: int, front_start: int, front_end: int, transit: bytes) -> None:
        """The next copy."""
        tail_size = self._tail_size
        size = front_end - front_start + len(transit) + tail_size
        head = record_head(size)
        self.parts += (
            head,
            self._data[front_start:front_end],
            transit,
            self._tails[row * tail_size : (row + 1) * tail_size],
        )
        self.sizes.append(len(head) + size)

    def joined(self) -> _Joined:
        """All of them."""
        sizes = np.array(self.sizes, np.int64)
        return _Joined(bytearray().join(self.parts), np.cumsum(sizes) - sizes, sizes)


def _more_keys(
    data: bytes,
    front_starts: NDArray[np.int64],
    front_ends: NDArray[np.int64],
    flags: NDArray[np.uint32],
    starts: NDArray[np.int64],
) -> list[MoreKey]:
    """The keys behind the first one of each copy, which begin at `starts`."""
    found: list[MoreKey] = []
    for row in np.flatnonzero(flags & layout.FLAG_MANY_KEYS).tolist():
        try:
            hashes = hashes_of_more_keys(data[int(front_starts[row]) : int(front_ends[row])])
        except DecodeError as error:
            raise ValueError("a record that does not parse") from error
        found += [(int(starts[row]), key_hash) for key_hash in hashes]
    return found


def _region(
    topic: str,
    joined: _Joined,
    trailers: NDArray[np.void],
    more_keys: Sequence[MoreKey],
    due_times_ms: NDArray[np.uint64] | None,
    kind: int,
) -> RecordRegion:
    count = len(trailers)
    octets, starts, sizes = joined
    identities = np.empty((count, 3), np.uint64)
    for place, name in enumerate(("producer_id", "producer_epoch", "sequence")):
        identities[:, place] = trailers[name]
    tag_codes = trailers["tag_code"].astype(np.int64)
    key_hashes = trailers["key_hash"].astype(np.uint64)
    return RecordRegion(
        topic,
        octets,
        count,
        starts,
        sizes,
        tag_codes,
        key_hashes,
        producer_id=0,
        producer_epoch=0,
        first_sequence=0,
        due_times_ms=due_times_ms,
        more_keys=more_keys,
        flags=kind | (layout.FLAG_DUE_TIME if due_times_ms is not None else 0),
        identities=identities,
    )


def _tails(
    topic: str, trailers: NDArray[np.void], due_times_ms: NDArray[np.uint64] | None, kind: int
) -> NDArray[np.void]:
    """Of each copy what stands behind `transit`."""
    topic_bytes = topic.encode()
    tails = np.zeros(len(trailers), trailer_dtype(len(topic_bytes), due_times_ms is not None))
    tails["topic_field"] = np.void(topic_field_of(topic_bytes))
    for name in FIXED_TRAILER_DTYPE.names or ():
        tails[name] = trailers[name]
    flags = trailers["flags"] & KEPT_FLAGS | kind | layout.FLAG_TRANSIT
    if due_times_ms is not None:
        tails["due_time_tag"] = layout.DUE_TIME_TAG
        tails["due_time_ms"] = due_times_ms
        flags |= layout.FLAG_DUE_TIME
    tails["flags"] = flags
    return tails
