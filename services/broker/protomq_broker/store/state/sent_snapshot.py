"""The file of the table of repeated sends, written at checkpoints.

    repeatedsends/table.bin   state file (`side_files.py`): position u64, covered position u64, forgotten i64, runs forgotten i64,
                              producers u32, queues u32, older runs u64, names (u32 size, UTF-8, lines "topic/queue"), producers
                              (`producer_table.ROW`), older runs of all producers: first, end, queue, queue offset u64

A queue that is gone has an empty line for its name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import read_cached_state, why_not, write_state_file

from .producer_runs import RUN_FIELDS
from .producer_table import ROW

_MAGIC: Final = b"PMQRPS02"
_HEAD: Final = struct.Struct("<QQqqIIQI")
_PIECE_SIZE_BYTES: Final = 512 << 10


class SnapshotHead(NamedTuple):
    """What belongs to a snapshot beside the rows."""

    covered_position: int
    forgotten_ms: int
    runs_forgotten_ms: int
    queue_names: list[tuple[str, int] | None]


def path_in(folder: str) -> str:
    """Where the file is."""
    return f"{folder}/table.bin"


def write_snapshot(
    disk: Disk,
    folder: str,
    position: int,
    head: SnapshotHead,
    rows: Sequence[bytes],
    older: Sequence[bytes],
) -> None:
    """Writes it durably: `rows` of the table and their `older` runs, each in the parts in which they were taken. Raises OSError."""
    names = "\n".join(
        "" if name is None else f"{name[0]}/{name[1]}" for name in head.queue_names
    ).encode()
    fixed = _HEAD.pack(
        position,
        head.covered_position,
        head.forgotten_ms,
        head.runs_forgotten_ms,
        sum(map(len, rows)) // ROW.itemsize,
        len(head.queue_names),
        sum(map(len, older)) // (8 * RUN_FIELDS),
        len(names),
    )
    disk.make_folder(folder)
    write_state_file(disk, path_in(folder), _MAGIC, *_gathered((fixed, names, *rows, *older)))


def read_snapshot(
    disk: Disk, folder: str
) -> tuple[int, SnapshotHead, NDArray[Any], memoryview] | str:
    """(position, what belongs to it, rows of the table, their older runs), or why there is none that can be used; "" if there is none."""
    payload = read_cached_state(disk, path_in(folder), _MAGIC)
    if payload is None:
        return why_not(disk, path_in(folder), _MAGIC)
    position, covered, forgotten_ms, runs_forgotten_ms, row_count, queue_count, _, names_size = (
        _HEAD.unpack_from(payload)
    )
    at = _HEAD.size
    lines = payload[at : at + names_size].decode().split("\n")[:queue_count]
    at += names_size
    rows = np.frombuffer(payload, ROW, row_count, at)
    names: list[tuple[str, int] | None] = []
    for line in lines:
        topic, _, queue_id = line.partition("/")
        names.append((topic, int(queue_id)) if topic else None)
    head = SnapshotHead(covered, forgotten_ms, runs_forgotten_ms, names)
    return position, head, rows, memoryview(payload)[at + rows.nbytes :]


def stored_position(disk: Disk, folder: str) -> int:
    """Up to where the file says that it had covered the log durably; 0 if there is none that holds. A start goes by this."""
    payload = read_cached_state(disk, path_in(folder), _MAGIC)
    return int(_HEAD.unpack_from(payload)[0]) if payload is not None else 0


def end_position(disk: Disk, folder: str) -> int:
    """Nothing in the file comes from a record at or behind this; 0 if there is none that holds."""
    payload = read_cached_state(disk, path_in(folder), _MAGIC)
    return max(_HEAD.unpack_from(payload)[:2]) if payload is not None else 0


def _gathered(parts: Sequence[bytes]) -> list[bytes]:
    """The parts in pieces that are worth a write each."""
    pieces: list[bytes] = []
    piece: list[bytes] = []
    size = 0
    for part in parts:
        piece.append(part)
        size += len(part)
        if size >= _PIECE_SIZE_BYTES:
            pieces.append(b"".join(piece))
            piece, size = [], 0
    return [*pieces, b"".join(piece)]
