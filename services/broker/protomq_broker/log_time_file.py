"""Keeps log time for the next start on the same boot of the machine.

    config/logTime    magic (8 octets), boot id (36, ASCII), CLOCK_BOOTTIME in ms (u64), log time in ms (u64), own time in ms (u64),
                      CRC-32C of all of it

Own time is what log time would be without a master (see `LogTime`). Earlier versions did not keep it: then it is log time.


A start cannot ask the wall clock how long no broker ran: somebody may have set it. CLOCK_BOOTTIME tells, as long as the machine was not
started again. So log time continues at what it was, plus the time that has passed. After another boot only the wall clock is left.

The file is written several times a second and never synced: a killed process loses nothing of it, and another boot does not read it.
"""

from __future__ import annotations

import logging
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq.wire.hashing import crc32c

from .store.files.disk import write_fully
from .store.files.side_files import read_state_file, size_of_file, why_not
from .store.timer.log_time import KeptTime

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store.files.disk import Disk

log = logging.getLogger("protomq.broker")

MAGIC: Final = b"PMQLOGT1"
_FIELDS: Final = struct.Struct("<36sQQQ")
_EARLIER_FIELDS: Final = struct.Struct("<36sQQ")


class KeptTimes(NamedTuple):
    """What was kept of log time and of own time."""

    log: KeptTime
    own: KeptTime


class LogTimeFile:
    """`load` before `save`; one thread at a time."""

    def __init__(
        self, disk: Disk, root: str, boot_id: str, boottime_ms: Callable[[], int]
    ) -> None:
        """`root`: folder of the store. `boot_id`: id of this boot of the machine; "": unknown, so nothing is kept."""
        self._disk = disk
        self._path = f"{root}/config/logTime"
        self._boot_id = boot_id.encode("ascii").ljust(36)[:36] if boot_id else b""
        self._boottime_ms = boottime_ms

    def load(self) -> KeptTimes | None:
        """Returns what was kept; None if this boot of the machine has kept nothing. Logs a damaged file."""
        try:
            payload = read_state_file(self._disk, self._path, MAGIC)
            if payload is None and size_of_file(self._disk, self._path) is not None:
                log.info(
                    "%s (a power cut may do that): log time begins at the wall clock",
                    why_not(self._disk, self._path, MAGIC),
                )
        except OSError as error:
            log.warning("%s cannot be read: log time begins at the wall clock: %s", self._path, error)
            return None
        if payload is None or len(payload) not in (_FIELDS.size, _EARLIER_FIELDS.size):
            return None
        boot_id, boottime_ms, log_time_ms = _EARLIER_FIELDS.unpack_from(payload)
        own_time_ms = log_time_ms if len(payload) == _EARLIER_FIELDS.size else _FIELDS.unpack(payload)[3]
        passed_ms = self._boottime_ms() - boottime_ms
        # The clock goes back only where a container has a boot time of its own: then the file says nothing.
        if boot_id != self._boot_id or passed_ms < 0:
            return None
        return KeptTimes(KeptTime(log_time_ms, passed_ms), KeptTime(own_time_ms, passed_ms))

    def save(self, log_time_ms: int, own_time_ms: int) -> None:
        """Raises OSError."""
        if not self._boot_id:
            return
        content = MAGIC + _FIELDS.pack(self._boot_id, self._boottime_ms(), log_time_ms, own_time_ms)
        fd = self._disk.create(self._path)
        try:
            write_fully(self._disk, fd, content + crc32c(content).to_bytes(4, "little"), 0)
        finally:
            self._disk.close(fd)
