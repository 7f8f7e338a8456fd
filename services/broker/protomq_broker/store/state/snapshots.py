"""Snapshots of a state beside the log: caches, so that a start need not read all of its records.

    config/<name>.json            {"position": n, …}     with a checksum: side_files.py
    config/<name>.json.previous   the snapshot before

Rules:
- Every record before `position` is in a snapshot, and nothing is in it that was not synced as a record.
- One that is lost, damaged, unreadable, ahead of the log or older than its beginning is ignored. Then the one before counts. Else the log
  is read from its beginning, which has all that is alive.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from protomq_broker.store.errors import StoreError
from protomq_broker.store.files.disk import UNREADABLE_ERRNOS, Disk, write_file_atomically
from protomq_broker.store.files.side_files import (
    SideFileDamagedError,
    read_cache,
    read_json_file,
    write_json_text,
)

log = logging.getLogger(__name__)


class SnapshotFiles:
    """The two snapshots of one state; one thread at a time."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._has_newest = False  # one that holds, so that it is worth to be kept

    def load(self, take: Callable[[Any], None], log_start: int, end_position: int) -> int:
        """Gives `take` the newest content that holds; the position up to which it is complete, 0 if there is none.

        `take` changes nothing if it raises: the content is of another form then. The log goes from `log_start` to `end_position`.
        """
        newest = self._read(self._path, take, log_start, end_position)
        self._has_newest = newest is not None
        if newest is None:
            newest = self._read(self._previous_path, take, log_start, end_position)
        return newest or 0

    def save(self, content: Any) -> None:
        """Replaces the snapshot; the one that stood there is the one before from now on."""
        self.save_text(json.dumps(content, indent=1, sort_keys=True))

    def save_text(self, text: str) -> None:
        """The same for a content that is encoded already."""
        stored = read_cache(self._disk, self._path) if self._has_newest else None
        if stored:
            # A copy: a power cut in the middle of a rename may leave neither name.
            write_file_atomically(self._disk, self._previous_path, stored)
        write_json_text(self._disk, self._path, text)
        self._has_newest = True

    @property
    def _previous_path(self) -> str:
        return f"{self._path}.previous"

    def _read(
        self, path: str, take: Callable[[Any], None], position_min: int, position_max: int
    ) -> int | None:
        try:
            content = read_json_file(self._disk, path)
            if content is None:
                return None
            # Without a position it is of an earlier version: no record reports what it says.
            is_told = "position" in content
            position = int(content["position"]) if is_told else 0
            if position > position_max:
                log.warning(
                    "%s is ahead of the log, which ends at %d: it is ignored", path, position_max
                )
            if is_told and not position_min <= position <= position_max:
                return None
            take(content)
        except SideFileDamagedError as error:
            log.warning("%s: it is ignored, since the log has the same", error)
            return None
        except (AttributeError, KeyError, TypeError, ValueError, StoreError) as error:
            log.warning("%s is of another form: it is ignored: %r", path, error)
            return None
        except OSError as error:
            if error.errno not in UNREADABLE_ERRNOS:
                raise
            log.error("%s: it is ignored, since the log has the same", error)
            return None
        return position
