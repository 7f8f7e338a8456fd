"""What the table of consume queues says of each queue, as it stands in its state file.

    consumequeue/table.bin   state file (`side_files.py`): position u64, topics u32, rows u32, names (u32 size, UTF-8, one a line),
                             rows: topic u32, queue u32, min offset u64, end offset u64, damaged u32,
                             then for each row the position of its last entry's record u64, 0: not known. Earlier versions have none

A queue keeps its row, so that a checkpoint changes the rows of those that have changed and copies the rest as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

_HEAD: Final = struct.Struct("<QIII")
_ROW: Final = np.dtype(
    [
        ("topic", "<u4"),
        ("queue", "<u4"),
        ("min_offset", "<u8"),
        ("end_offset", "<u8"),
        ("damaged", "<u4"),
    ]
)
_NO_TOPIC: Final = 0xFFFFFFFF
"""In a row that belongs to no queue any more."""
_GONE: Final = 2
"""In the field `damaged` of a row. Versions that do not know that a queue is gone take it for damaged, and read the log."""
_ROWS_MIN: Final = 64


class QueueRow(NamedTuple):
    """A queue as of the table's position.

    Attributes:
        topic, queue_id: the queue.
        min_offset, end_offset: its entries.
        damaged: what comes behind `end_offset` was found not to hold: the log must be read from there.
        last_position: where the record of the last entry stands; 0: not known.
        is_gone: its topic was deleted behind the table's position, and its files are removed.
    """

    topic: str
    queue_id: int
    min_offset: int
    end_offset: int
    damaged: bool
    last_position: int
    is_gone: bool = False


class QueueRows:
    """The rows. The owner keeps threads apart."""

    def __init__(self) -> None:
        self._rows = np.zeros(_ROWS_MIN, _ROW)
        self._lasts = np.zeros(_ROWS_MIN, "<u8")
        self._count = 0
        self._free: list[int] = []
        self._topics: dict[str, int] = {}
        self._names: list[str] = []  # of the topics; "" where there is none any more
        self._counts: list[int] = []  # rows of each topic
        self._free_topics: list[int] = []

    def __len__(self) -> int:
        return self._count - len(self._free)

    def add(self, topic: str, queue_id: int) -> int:
        """Makes a row for an empty queue; its index."""
        if self._free:
            index = self._free.pop()
        else:
            index = self._count
            if index == len(self._rows):
                self._rows = np.concatenate((self._rows, np.zeros(index, _ROW)))
                self._lasts = np.concatenate((self._lasts, np.zeros(index, "<u8")))
            self._count = index + 1
        number = self._number_of(topic)
        self._counts[number] += 1
        self._rows[index] = (number, queue_id, 0, 0, 0)
        self._lasts[index] = 0
        return index

    def _number_of(self, topic: str) -> int:
        number = self._topics.get(topic)
        if number is not None:
            return number
        if self._free_topics:
            number = self._free_topics.pop()
            self._names[number] = topic
        else:
            number = len(self._names)
            self._names.append(topic)
            self._counts.append(0)
        self._topics[topic] = number
        return number

    def set(self, index: int, min_offset: int, end_offset: int, damaged: bool, last_position: int = 0) -> None:
        """Changes a row."""
        row = self._rows[index]
        row["min_offset"], row["end_offset"], row["damaged"] = min_offset, end_offset, damaged
        self._lasts[index] = last_position

    def set_gone(self, index: int) -> None:
        """The queue is gone, and so are its files; the deletion of its topic may be taken back."""
        self.set(index, 0, 0, damaged=True)
        self._rows[index]["damaged"] = _GONE

    def is_blank(self, index: int) -> bool:
        """Whether a row says nothing: all that the queue has stands behind the table's position."""
        row = self._rows[index]
        return not (row["end_offset"] or row["damaged"])

    def bounds(self, index: int) -> tuple[int, int]:
        """(min_offset, end_offset) of a row."""
        row = self._rows[index]
        return int(row["min_offset"]), int(row["end_offset"])

    def set_all(self, rows: Sequence[tuple[int, int, int, bool, int]]) -> None:
        """Changes many: (index, min_offset, end_offset, damaged, last_position) of each."""
        if not rows:
            return
        indexes, min_offsets, end_offsets, damaged, lasts = (
            np.array(column) for column in zip(*rows, strict=True)
        )
        self._rows["min_offset"][indexes] = min_offsets
        self._rows["end_offset"][indexes] = end_offsets
        self._rows["damaged"][indexes] = damaged
        self._lasts[indexes] = lasts

    def raise_min_offset(self, index: int, min_offset: int) -> int:
        """Raises the first offset, as far as the row reaches; what it is then."""
        row = self._rows[index]
        row["min_offset"] = max(int(row["min_offset"]), min(min_offset, int(row["end_offset"])))
        return int(row["min_offset"])

    def remove(self, index: int) -> None:
        """Takes a row away, and the name of its topic with the last one."""
        number = int(self._rows[index]["topic"])
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._topics[self._names[number]]
            self._names[number] = ""
            self._free_topics.append(number)
        self._rows[index] = (_NO_TOPIC, 0, 0, 0, 0)
        self._free.append(index)

    def encode(self, position: int) -> bytes:
        """The payload of the state file."""
        names = "\n".join(self._names).encode()
        head = _HEAD.pack(position, len(self._names), self._count, len(names))
        return b"".join((head, names, self._rows[: self._count].tobytes(), self._lasts[: self._count].tobytes()))


def decode_rows(payload: bytes) -> tuple[int, list[QueueRow]]:
    """(position, the queues) of the payload of a state file."""
    position, topic_count, row_count, names_size = _HEAD.unpack_from(payload)
    names = payload[_HEAD.size : _HEAD.size + names_size].decode().split("\n")[:topic_count]
    rows = np.frombuffer(payload, _ROW, row_count, _HEAD.size + names_size)
    lasts_at = _HEAD.size + names_size + rows.nbytes
    has_lasts = len(payload) >= lasts_at + 8 * row_count
    lasts = np.frombuffer(payload, "<u8", row_count, lasts_at) if has_lasts else np.zeros(row_count, "<u8")
    is_used = rows["topic"] != _NO_TOPIC
    return position, [
        QueueRow(names[topic], queue_id, min_offset, end_offset, bool(damaged), last_position, damaged == _GONE)
        for (topic, queue_id, min_offset, end_offset, damaged), last_position in zip(
            rows[is_used].tolist(), lasts[is_used].tolist(), strict=True
        )
    ]
