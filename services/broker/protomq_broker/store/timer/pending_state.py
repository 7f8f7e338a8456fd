"""The state file of the timer: what a checkpoint knew of the delayed messages. A start reads it with the runs that it names.

    timer/pending.bin   state file (`side_files.py`): entries up to u64, removals up to u64, rows from u64, pending rows u64 and octets of
                        their records u64, log time u64, horizon (due_ms u64, position u64), next run number u64, number of runs u64,
                        then number u64 and index of the next row u64 of each run, then rows (`timer_rows.py`)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import read_cached_state, why_not, write_state_file

from .timer_rows import ROW, Key

STATE_FILE_NAME: Final = "pending.bin"

_MAGIC: Final = b"PMQTMP02"
_HEAD: Final = struct.Struct("<QQQQQQQQQQ")
_RUN: Final = struct.Struct("<QQ")
_PART_ROWS: Final = 32 << 10


class PendingState(NamedTuple):
    """What is pending at one moment.

    Attributes:
        entries_up_to, removals_up_to: what the log has below these positions is in it.
        rows_from: it knows no row before this position; see `PendingTimers`.
        pending_count, pending_bytes: rows that are pending, and the size of their records.
        log_time_ms: the latest that a record of %SYS%TIMER tells.
        horizon: all rows up to this key are in `rows`; rows behind it may stand in runs.
        next_number: of the next run.
        runs: number of each run, and index of its next row.
        rows: those that were in memory, in no order.
    """

    entries_up_to: int
    removals_up_to: int
    rows_from: int
    pending_count: int
    pending_bytes: int
    log_time_ms: int
    horizon: Key
    next_number: int
    runs: Sequence[tuple[int, int]]
    rows: Sequence[NDArray[Any]]


def write_state(disk: Disk, folder: str, state: PendingState) -> None:
    """Replaces the file, atomically and durably. Raises OSError."""
    *numbers, horizon, next_number, runs, rows = state
    head = _HEAD.pack(*numbers, *horizon, next_number, len(runs))
    parts = [
        part[start : start + _PART_ROWS].tobytes()
        for part in rows
        for start in range(0, len(part), _PART_ROWS)
    ]
    content = head + b"".join(_RUN.pack(*run) for run in runs)
    write_state_file(disk, f"{folder}/{STATE_FILE_NAME}", _MAGIC, content, *parts)


def read_state(disk: Disk, folder: str) -> PendingState | None:
    """What the file says; None if there is none that holds."""
    content = read_cached_state(disk, f"{folder}/{STATE_FILE_NAME}", _MAGIC)
    if content is None:
        return None
    entries, removals, rows_from, count, size, log_time_ms, due_ms, position, next_number, run_count = (
        _HEAD.unpack_from(content)
    )
    end = _HEAD.size + run_count * _RUN.size
    runs = [(number, index) for number, index in _RUN.iter_unpack(content[_HEAD.size : end])]
    rows = [np.frombuffer(content, ROW, offset=end)]
    horizon = Key(due_ms, position)
    return PendingState(
        entries, removals, rows_from, count, size, log_time_ms, horizon, next_number, runs, rows
    )


def why_no_state(disk: Disk, folder: str) -> str:
    """Why `read_state` gave nothing, with the path; "" if nothing was ever written."""
    return why_not(disk, f"{folder}/{STATE_FILE_NAME}", _MAGIC)


def stored_position(disk: Disk, folder: str) -> int:
    """Up to where the file says that entries are complete; 0 if there is none that holds. A start goes by this."""
    state = read_state(disk, folder)
    return state.entries_up_to if state is not None else 0


def end_position(disk: Disk, folder: str) -> int:
    """Nothing in the file comes from a record at or behind this; 0 if there is none that holds."""
    state = read_state(disk, folder)
    return max(state.entries_up_to, state.removals_up_to) if state is not None else 0
