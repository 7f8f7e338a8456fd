"""Records whether the end of a store's log may be lost. The machine had not written it to the disk, or a start has cut it.

    config/tail.json    {"boot_id": "...", "is_clean": false, "may_be_lost": true, "syncs": false, "was_cut": false}
    config/start.json   {"number": 7}

A killed process loses nothing that it has written; a crashed machine may, under ASYNC_FLUSH. So the end may be lost if three things are
true. The machine was restarted, the store was not closed cleanly, and the last run did not sync (`syncs`; absent: it did not). This stays
true until the store is out of the in-sync set (`settle`). If the file is missing, as after a repair of the log, the end may be lost. It is
lost if the log ends with a damaged range. If a full disk does not take the file, a start removes it.

A start cuts what looks like a torn write, and damage of the last appends looks alike (`was_cut`). The start notes that here before it cuts
(`store.start.cut_note`), and it stays true until the store has caught up with its master, or leads.

Etcd has the number of the store's start, too. A folder with a lower one is an older copy of itself (`protomq_ha.leadership`). It has a file
of its own: brokers of earlier versions write `tail.json` without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .store.files.disk import DISK_FULL_ERRNOS, remove_file
from .store.files.side_files import (
    START_NAME,
    TAIL_NAME,
    SideFileDamagedError,
    read_json_file,
    write_json_file,
)

if TYPE_CHECKING:
    from .store.files.disk import Disk


class TailFile:
    """One thread."""

    def __init__(self, disk: Disk, root: str, boot_id: str) -> None:
        """`root`: folder of the store. `boot_id`: id of this start of the machine; "": unknown, so each start may have lost the end."""
        self._disk = disk
        self._path = f"{root}/{TAIL_NAME}"
        self._start_path = f"{root}/{START_NAME}"
        self._boot_id = boot_id
        self._syncs = False
        self.may_be_lost = self.was_cut = False
        self.start_number = 0

    def open(self, *, syncs: bool, is_lost: bool, was_cut: bool = False) -> bool:
        """Called when the store is open. Returns whether the end of its log may be lost. `syncs`: this run acknowledges only synced bytes.
        `is_lost`: the log ends with damage. `was_cut`: this start has cut its end. Raises OSError.
        """
        known = self._read(self._path)
        is_same_boot = bool(self._boot_id) and known.get("boot_id") == self._boot_id
        was_kept = known.get("is_clean") is True or is_same_boot or known.get("syncs") is True
        self.may_be_lost = known.get("may_be_lost") is not False or not was_kept or is_lost
        self.was_cut = was_cut or known.get("was_cut") is True
        self._syncs = syncs
        number = self._read(self._start_path).get("number")
        self.start_number = number if type(number) is int else 0
        if known != self._content(is_clean=False):  # a full disk could not take it
            try:
                self._write(is_clean=False)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS:
                    raise
                # What it says of the run before must not count for this one.
                remove_file(self._disk, self._path)
        return self.may_be_lost

    def note_start(self, number: int, *, is_older_copy: bool) -> None:
        """Called before this process stands for its store. Raises OSError; then the folder has the number that it had."""
        if is_older_copy:
            self.doubt()  # first: with the number the folder is no older copy any more
        write_json_file(self._disk, self._start_path, {"number": number})
        self.start_number = number

    def doubt(self) -> None:
        """Called when the log has failed: its end may be lost. Raises OSError."""
        self.may_be_lost = True
        self._write(is_clean=False)

    def cut(self) -> None:
        """Called when the store was opened again, and that has cut its end: the start has noted it already."""
        self.was_cut = True

    def settle(self) -> None:
        """Called when the store is out of the in-sync set. Raises OSError."""
        self.may_be_lost = False
        self._write(is_clean=False)

    def settle_cut(self) -> None:
        """Called when the store has caught up with its master, or leads. Raises OSError."""
        self.was_cut = False
        self._write(is_clean=False)

    def close(self, *, is_clean: bool) -> None:
        """Called when the store was closed. `is_clean`: all of it is on stable storage. Raises OSError."""
        self._write(is_clean=is_clean)

    def _read(self, path: str) -> dict[str, Any]:
        try:
            return read_json_file(self._disk, path) or {}
        except SideFileDamagedError:
            return {}

    def _content(self, *, is_clean: bool) -> dict[str, Any]:
        return {
            "boot_id": self._boot_id,
            "is_clean": is_clean,
            "may_be_lost": self.may_be_lost,
            "syncs": self._syncs,
            "was_cut": self.was_cut,
        }

    def _write(self, *, is_clean: bool) -> None:
        write_json_file(self._disk, self._path, self._content(is_clean=is_clean))
