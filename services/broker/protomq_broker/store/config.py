"""Configuration of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from .errors import StoreSettingsError
from .log.recovery import CorruptionMode

FORMAT_VERSION: Final = 2
"""Version of the format on disk. 2: the fields of a record have new numbers, and its CRC covers all the producer's fields."""
SEGMENT_SIZE_MIN_BYTES: Final = 4096
SEGMENT_SIZE_MAX_BYTES: Final = 64 << 30
"""A file of this size fits on every file system. A segment is deleted as a whole: few want more than 1 GiB."""
BACKUP_NAME: Final = "backup.json"
"""A file that marks a folder as a backup (tools/backup.py), or as a restore that is not finished."""
BACKUP_MARK: Final = "is_backup"
"""In config/store.json of a backup: true. So it is known as one even if it has lost the file above."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Defaults are RocketMQ's MessageStoreConfig unless a reason stands beside them. Nothing here changes at run time.

    Attributes:
        segment_size_bytes: size of a segment of the log. Shapes the data on disk: kept in config/store.json and must match.
            An append must fit into a segment, so production wants at least 64 MiB; tests may go down to 4 KiB. 4 KiB to 64 GiB.
        sync_flush: answer a send only when it is on stable storage (flushDiskType SYNC_FLUSH).
        flush_interval_ms: time between two syncs under ASYNC_FLUSH (flushIntervalCommitLog). A power cut may take that, and the
            sync that runs.
        checkpoint_interval_ms: time between two checkpoints. This and the next setting limit how much a start after a crash reads.
        checkpoint_size_bytes: a checkpoint is written when this many bytes were appended since the last one.
        corruption: what a start does when stored bytes do not hold any more: "refuse", or "quarantine" the range and go on.
        scrub_bytes_per_s: how fast the log and its queues are read again, once a day, to find damage where nobody reads; 0: not at all.
        retention_hours: how long messages are kept (fileReservedTime).
        delete_hour: hour of the day, local time, at which old segments are deleted (deleteWhen).
        disk_delete_ratio: used part of the disk from which old segments are deleted at any hour (diskMaxUsedSpaceRatio).
        disk_force_ratio: from here on the oldest segments go, whatever their age (diskSpaceCleanForciblyRatio).
        disk_refuse_ratio: from here on writes are refused (diskSpaceWarningLevelRatio).
    """

    segment_size_bytes: int = 1 << 30
    sync_flush: bool = False
    flush_interval_ms: int = 500
    checkpoint_interval_ms: int = 5_000
    checkpoint_size_bytes: int = 256 << 20
    corruption: CorruptionMode = "refuse"
    scrub_bytes_per_s: int = 8 << 20
    retention_hours: int = 72
    delete_hour: int = 4
    disk_delete_ratio: float = 0.75
    disk_force_ratio: float = 0.85
    disk_refuse_ratio: float = 0.90

    def __post_init__(self) -> None:
        if not SEGMENT_SIZE_MIN_BYTES <= self.segment_size_bytes <= SEGMENT_SIZE_MAX_BYTES:
            raise ValueError(
                f"segment_size_bytes must be {SEGMENT_SIZE_MIN_BYTES} (4KiB) to {SEGMENT_SIZE_MAX_BYTES} (64GiB),"
                f" not {self.segment_size_bytes}"
            )
        for name in (
            "flush_interval_ms",
            "checkpoint_interval_ms",
            "checkpoint_size_bytes",
            "retention_hours",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.scrub_bytes_per_s < 0:
            raise ValueError(f"scrub_bytes_per_s must be at least 0, not {self.scrub_bytes_per_s}")
        if self.corruption not in ("refuse", "quarantine"):
            raise ValueError(f"corruption must be refuse or quarantine, not {self.corruption!r}")
        if not 0 <= self.delete_hour <= 23:
            raise ValueError(f"delete_hour must be 0 to 23, not {self.delete_hour}")
        if not 0 < self.disk_delete_ratio <= self.disk_force_ratio <= self.disk_refuse_ratio <= 1:
            raise ValueError(
                f"disk_delete_ratio is {self.disk_delete_ratio}, disk_force_ratio {self.disk_force_ratio} and disk_refuse_ratio"
                f" {self.disk_refuse_ratio}; each must be above 0 and at most 1, and none below the one before"
            )


def check_format(path: str, stored: Mapping[str, Any]) -> None:
    """Raises StoreSettingsError if `stored`, the settings in the file `path`, names another format than this version's."""
    version = stored.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreSettingsError(
            f"{path}: the store has format_version = {version}, this version of protomq reads and writes {FORMAT_VERSION} alone."
            " Read it with the version that wrote it, or begin with an empty data folder"
        )
