"""Why a store takes no writes: its log has failed, housekeeping refuses them, or the last append found the disk full.

After a full disk, housekeeping looks for space (`look_for_space`), so that people and clients learn that writes are taken again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from .files.disk import Disk
from .housekeeping.full_disk import FullDisk
from .log.commit_log import CommitLog

log = logging.getLogger(__name__)

_SPACE_MIN_BYTES: Final = 1 << 20
"""Free bytes of a disk that counts as not full. Where segments are not truly preallocated, a write into one may find no space."""


class Refusals:
    """See the module's docstring. Any thread.

    Attributes:
        by_housekeeping: why messages are refused, though not the broker's own records; "" if they are taken.
        full_disk: whether the last append found the disk full.
    """

    def __init__(
        self, disk: Disk, root: str, commit_log: CommitLog, monotonic_ms: Callable[[], int]
    ) -> None:
        self.by_housekeeping = ""
        self.full_disk = FullDisk()
        self._disk = disk
        self._root = root
        self._log = commit_log
        self._monotonic_ms = monotonic_ms

    @property
    def reason(self) -> str:
        """Why the store takes no writes; "" if it takes them."""
        return self._log.failure or self.by_housekeeping or self.full_disk.reason

    @property
    def last_refusal(self) -> str:
        """Why the last append was refused; "" if it was stored. A look at the disk changes nothing in that: it may be wrong."""
        return self.reason or ("the last append found the disk full" if self.full_disk.was_full else "")

    def lack_of_room(self) -> str:
        """Why the store takes no writes, or will take none soon; "" if its disk has room. Raises OSError."""
        if self.reason:
            return self.reason
        needed_bytes = self._log.folder.segment_size_bytes if self._log.is_next_segment_due() else _SPACE_MIN_BYTES
        free_bytes = self._disk.usage(self._root).free_bytes
        return f"its disk has {free_bytes} bytes left" if free_bytes < needed_bytes else ""

    def refuse(self, reason: str) -> None:
        """Refuses messages from now on; "" takes them again."""
        self.by_housekeeping = reason

    def note_full(self, reason: str) -> None:
        """Notes that an append found no space."""
        if self.full_disk.refused(reason, self._monotonic_ms()):
            log.warning("writes: refused, %s", reason)

    def note_stored(self) -> None:
        """Notes that an append was stored. Needed only if one was refused before (`full_disk.was_full`)."""
        if self.full_disk.stored():
            _say_writes_are_taken()

    def look_for_space(self) -> None:
        """After a full disk refused an append: checks whether it would take the next one."""
        if not self.full_disk.is_look_due(self._monotonic_ms()):
            return
        if self._log.has_next_segment:
            has_space = self._disk.usage(self._root).free_bytes >= _SPACE_MIN_BYTES
        else:
            has_space = self._log.prepare_next_segment()
        if has_space:
            self.full_disk.found_space()
            _say_writes_are_taken()


def _say_writes_are_taken() -> None:
    log.warning("writes: accepted again, there is space")
