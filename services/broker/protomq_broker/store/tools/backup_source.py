"""Where the log of a backup comes from: a folder, a running broker, or both on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from protomq.wire.log_walk import Seal
from protomq_broker.store.errors import StoreInUseError
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.files.lock import is_locked
from protomq_broker.store.log.epochs import EPOCHS_NAME, read_epochs

from .backup_manifest import read_manifest
from .offline import open_offline


class SourceLook(NamedTuple):
    """How far a log goes.

    Attributes:
        broker_name: "" if it is not known.
        first_position: where it begins.
        end_position: where it ends, as far as it may be copied.
        problem: what is wrong with what is written there; "" if nothing is.
        epoch: the last one that its store has begun, even if nothing is written in it yet; 0: not known.
        epoch_position: where that epoch begins.
    """

    broker_name: str
    segment_size_bytes: int
    first_position: int
    end_position: int
    problem: str = ""
    epoch: int = 0
    epoch_position: int = 0


class LogSource(Protocol):
    """A log that is copied."""

    def look(self) -> SourceLook:
        """How far it goes now; where it begins is looked at first."""

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """The log from a position on, as much as it likes to give; b"": it has that no more."""

    def sealed_path(self, base_position: int) -> str:
        """The file of a segment that nobody writes any more, to be linked; "" if its files are elsewhere."""


class FolderSource:
    """A backup, or a store whose broker is stopped. A LogSource."""

    def __init__(
        self, root: Path | str, broker_name: str = "", *, disk: Disk | None = None
    ) -> None:
        """`broker_name`: of a store, which does not have it. Raises StoreSettingsError, StoreInUseError."""
        disk, self._root = disk or Disk(), str(root).rstrip("/")
        self._manifest = read_manifest(self._root, disk=disk)
        self._broker_name = broker_name
        if self._manifest is None and is_locked(disk, self._root):
            raise StoreInUseError(f"a broker is running on {self._root}: name it with --broker")
        self._store = open_offline(self._root, disk)
        self._epochs = read_epochs(disk, f"{self._root}/{EPOCHS_NAME}")
        self._end: int | None = self._manifest.end.position if self._manifest is not None else None
        self._problem = ""

    def look(self) -> SourceLook:
        """See LogSource."""
        store, folder = self._store, self._store.folder
        if self._end is None:
            checkpoint = store.checkpoint
            walker = store.walk(store.start(checkpoint.replay_position if checkpoint else 0))
            for _ in walker:
                pass
            self._end = walker.position
            self._problem = "" if walker.ended_cleanly else walker.problem
        epoch_position, epoch, _ = self._epochs.last
        return SourceLook(
            self._broker_name, folder.segment_size_bytes, folder.first_position, self._end, self._problem, epoch, epoch_position
        )

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """See LogSource."""
        segment = self._store.folder.at(position)
        if segment is None:
            return b""
        size_bytes = min(size_max_bytes, segment.end_position - position)
        return segment.read(position - segment.base_position, size_bytes)

    def path_at(self, position: int) -> str:
        """The file in which a position lies, or should."""
        return self._store.folder.path_at(position)

    def first_append(self) -> Seal | None:
        """The first append that is not the empty head of a segment, as far as the log holds; None if there is none."""
        store = self._store
        for block in store.walk(store.start()):
            for seal in block.seals:
                if not seal.is_head:
                    return seal
        return None

    def sealed_path(self, base_position: int) -> str:
        """See LogSource. What is restored is never a link: its store may write there."""
        return self._store.folder.path_at(base_position) if self._manifest is None else ""


class LinkingSource:
    """A running broker, and the folder of its store on this machine: sealed segments are linked, the rest is asked of the broker."""

    def __init__(self, source: LogSource, store_root: Path | str) -> None:
        self._source = source
        self._folder = f"{str(store_root).rstrip('/')}/commitlog"

    def look(self) -> SourceLook:
        """See LogSource."""
        return self._source.look()

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """See LogSource."""
        return self._source.read(position, size_max_bytes)

    def sealed_path(self, base_position: int) -> str:
        """See LogSource."""
        return f"{self._folder}/{base_position:020d}"
