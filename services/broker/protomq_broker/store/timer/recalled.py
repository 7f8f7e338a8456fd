"""The messages that were recalled of late. A recall whose answer was lost is made again, and is told that the first one has won.

    timer/recalled.bin   state file (`side_files.py`): keys, the oldest first

    key   due_ms u64 | producer id u64 | producer epoch u32 | sequence u64, little-endian

It is saved right before the timer's state. What it lacks after a crash is told as not pending, no more.
"""

from __future__ import annotations

import struct
from typing import Final

from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import read_cached_state, write_state_file

RECALLED_FILE_NAME: Final = "recalled.bin"
RECALLED_COUNT_MAX: Final = 16_384
"""As many are remembered, which takes some 2.5 MiB."""

_MAGIC: Final = b"PMQTMR01"
_KEY: Final = struct.Struct("<QQIQ")


def recalled_key(due_time_ms: int, message_id: tuple[int, int, int]) -> bytes:
    """Names a message by its due time and its producer id, epoch and sequence."""
    return _KEY.pack(due_time_ms, *message_id)


class RecalledMessages:
    """`in`: any thread. All else: one thread at a time, by the lock of its owner."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._path = f"{folder}/{RECALLED_FILE_NAME}"
        self._keys: dict[bytes, None] = {}
        self._frozen = self._saved = b""

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def note(self, key: bytes) -> None:
        """It was recalled now. The oldest are forgotten."""
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > RECALLED_COUNT_MAX:
            del self._keys[next(iter(self._keys))]

    def freeze(self) -> None:
        """The next `save` writes what is here now."""
        self._frozen = b"".join(self._keys)

    def save(self) -> None:
        """Makes durable what was there at `freeze`. Raises OSError."""
        if self._frozen != self._saved:
            write_state_file(self._disk, self._path, _MAGIC, self._frozen)
            self._saved = self._frozen

    def forget_file(self) -> None:
        """The file is gone."""
        self._saved = b""

    def clear(self) -> None:
        """Forgets everything."""
        self._keys = {}
        self._frozen = self._saved = b""

    def load(self) -> None:
        """Takes over what the file holds; nothing if it does not hold."""
        content = read_cached_state(self._disk, self._path, _MAGIC) or b""
        size = _KEY.size
        self._keys = dict.fromkeys(content[start : start + size] for start in range(0, len(content), size))
        self._frozen = self._saved = content
