"""The cache of the state of transactions: so that a start need not read the whole log for the few that are open.

    transactions/open.bin   state file (`side_files.py`): position u64, end position u64, open u32, topics u32, octets of their names u32,
                            names (UTF-8, one a line), open transactions (`OPEN_ROW`), ended ones (`ENDED_ROW`), the oldest first

Every record before `position` is in it, none at or behind the end position, which may be further.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import read_cached_state, why_not, write_state_file

from .ended_transactions import ENDED_ROW
from .transactions import HalfMessage, Known, OpenTransaction, TransactionKey

OPEN_ROW: Final = np.dtype(
    [
        ("producer_id", "<u8"),
        ("producer_epoch", "<u4"),
        ("sequence", "<u8"),
        ("position", "<u8"),
        ("size_bytes", "<u4"),
        ("topic", "<u4"),
        ("queue_id", "<u4"),
        ("store_time_ms", "<u8"),
        ("check_count", "<u4"),
        ("due_ms", "<u8"),
    ]
)
"""`topic`: number of its name."""

_MAGIC: Final = b"PMQTXN01"
_HEAD: Final = struct.Struct("<QQIII")
_FILE_NAME: Final = "open.bin"


class Saved(NamedTuple):
    """What a file holds. `position`: every record before it is in `known`."""

    known: Known
    position: int


def save_transactions(disk: Disk, folder: str, known: Known, position: int) -> None:
    """Replaces the file, durably. Every record before `position` is in `known`. Raises OSError."""
    numbers: dict[str, int] = {}
    rows = np.array(
        [
            (*half.key, half.position, half.size_bytes, numbers.setdefault(half.topic, len(numbers)),
             half.queue_id, half.store_time_ms, check_count, due_ms)
            for half, check_count, due_ms in known.open
        ],
        OPEN_ROW,
    )  # fmt: skip
    names = "\n".join(numbers).encode()
    # What is in it counts as seen: an event that is applied twice would be counted twice.
    position = max(position, known.end_position)
    head = _HEAD.pack(position, known.end_position, len(rows), len(numbers), len(names))
    disk.make_folder(folder)
    write_state_file(
        disk, f"{folder}/{_FILE_NAME}", _MAGIC, head + names, rows.tobytes(), known.ended.tobytes()
    )


def load_transactions(disk: Disk, folder: str) -> Saved | str:
    """What the file holds; why it does not."""
    path = f"{folder}/{_FILE_NAME}"
    content = read_cached_state(disk, path, _MAGIC)
    if content is None:
        return why_not(disk, path, _MAGIC)
    position, end_position, open_count, topic_count, names_size = _HEAD.unpack_from(content)
    at = _HEAD.size + names_size
    names = content[_HEAD.size : at].decode().split("\n")[:topic_count]
    rows = np.frombuffer(content, OPEN_ROW, open_count, at)
    ended = np.frombuffer(content, ENDED_ROW, offset=at + rows.nbytes)
    open_ = [
        OpenTransaction(
            HalfMessage(
                TransactionKey(producer_id, epoch, sequence),
                at_position,
                size_bytes,
                names[topic],
                queue_id,
                store_time_ms,
            ),
            check_count,
            due_ms,
        )
        for producer_id, epoch, sequence, at_position, size_bytes, topic, queue_id, store_time_ms,
            check_count, due_ms in rows.tolist()
    ]  # fmt: skip
    return Saved(Known(open_, ended, end_position), position)


def end_position(disk: Disk, folder: str) -> int:
    """Nothing in the file comes from a record at or behind this; 0 if there is none that holds."""
    saved = load_transactions(disk, folder)
    return 0 if isinstance(saved, str) else saved.position
