"""What a backup, or a restore that is not finished, has: `backup.json`, and where a restored log may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from protomq_broker.store.config import BACKUP_NAME
from protomq_broker.store.errors import BackupError
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.side_files import SideFileDamagedError, read_json_file
from protomq_broker.store.log.agreement import START, LogPoint


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup has.

    Attributes:
        broker_name: whose log it is; "" as long as all runs were of a store whose broker was stopped, which does not have the name.
        segment_size_bytes: of the log.
        first_position: where the copy begins.
        end: where it ends.
        end_time_ms: store time of its last append.
        complete_from: it tells everything if it is cut at this position or behind it.
        complete_time_ms: store time of the append that ends there; 0 while the copy has not come that far.
        is_restore: the folder is to become a store.
    """

    broker_name: str
    segment_size_bytes: int
    first_position: int
    complete_from: int
    end: LogPoint = START
    end_time_ms: int = 0
    complete_time_ms: int = 0
    is_restore: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it can be restored."""
        return self.end.position >= self.complete_from


class Cut(NamedTuple):
    """Where a restored log ends: with the last append that ends at or before a position, and was stored at or before a time."""

    position: int = 1 << 62
    time_ms: int = 1 << 62


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a run did. Attributes: manifest: as it is now; copied_bytes: of the log; linked_bytes: in segments that are hard links."""

    manifest: Manifest
    copied_bytes: int
    linked_bytes: int


def read_manifest(root: Path | str, *, disk: Disk | None = None) -> Manifest | None:
    """What a backup has; None if the folder is none. Raises BackupError if the file is damaged."""
    disk = disk or Disk()
    path = f"{str(root).rstrip('/')}/{BACKUP_NAME}"
    try:
        content = read_json_file(disk, path)
        if content is None:
            return None
        return Manifest(**{**content, "end": LogPoint(*content["end"])})
    except (SideFileDamagedError, KeyError, TypeError, ValueError) as error:
        raise BackupError(
            f"{path} does not hold: {error}: begin another backup in another folder"
        ) from error
