"""Keeps the confirmed position of a broker over restarts. So a slave serves readers while its master is away, and knows what not to drop.

    config/confirmed.json    {"position": n}: the log is confirmed up to there, as the master said, or as this broker knew while it led

A confirmed position stays confirmed. If the file is old or missing, readers see less until the master sends a later position. A truncation
of the log below the position removes the file; any other keeps it. If a power cut has removed the end of the log, a start writes
the lower position before anything is appended. Without the file a slave follows a master even if that has nothing of its log, unless it has
led. With it, it follows no elected master whose log is not of its own past, however little the file says.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from .store.files.side_files import (
    CONFIRMED_NAME,
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)

if TYPE_CHECKING:
    from .store.files.disk import Disk

log = logging.getLogger("protomq.broker")


class ConfirmedFile:
    """One thread."""

    def __init__(self, disk: Disk, root: str) -> None:
        """`root`: folder of the store."""
        self._disk = disk
        self._path = f"{root}/{CONFIRMED_NAME}"
        self._written = -1
        self._has_failed = False

    def read(self) -> int:
        """Returns the position; 0 if there is no valid file."""
        try:
            content = read_json_file(self._disk, self._path)
            return 0 if content is None else max(int(content["position"]), 0)
        except (SideFileDamagedError, OSError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is ignored: %s", self._path, error)
            return 0

    def read_within(self, end_position: int) -> int:
        """Returns the position, or the end of the log if that is lower. Call it before anything is appended, also from a master.

        A power cut may have removed what was confirmed. Then the file says so at once, or is removed. Else, after a crash, it would say of
        the messages that come to stand there that they are confirmed. Raises OSError if neither is possible.
        """
        position = self.read()
        if position <= end_position:
            return position
        self.write(end_position)
        if self._has_failed:
            self._disk.unlink(self._path)
            self._disk.fsync_dir(self._path.rpartition("/")[0])
        return end_position

    def write(self, position: int) -> None:
        """Replaces the file durably if the position has changed. A disk error is only logged: what the file has stays true."""
        if position == self._written:
            return
        try:
            write_json_file(self._disk, self._path, {"position": position})
            self._written, self._has_failed = position, False
        except OSError as error:
            if not self._has_failed:
                log.warning("%s could not be written: %s", self._path, error)
            self._has_failed = True


class ConfirmedNotes:
    """Writes down now and then what an elected master has confirmed, on a thread of its own.

    It may be killed, and follow another one later. If etcd was restored from a copy meanwhile, only this file says what it must not drop.
    """

    def __init__(self, file: ConfirmedFile, confirmed: Callable[[], int], interval_s: float) -> None:
        self._file = file
        self._confirmed = confirmed
        self._interval_s = interval_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="protomq-confirmed", daemon=True)

    def start(self) -> None:
        """From now on the file is this thread's."""
        self._thread.start()

    def close(self) -> None:
        """Writes it down for the last time."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._file.write(self._confirmed())

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._file.write(self._confirmed())
