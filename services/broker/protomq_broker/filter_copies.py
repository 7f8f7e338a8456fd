"""Decides which filter modules a slave takes over from its master, and which it removes. Pure, but for the file of what it knows.

    the master has it, in this version     nothing to do
    the master has it                      it is fetched, in place of another version
    its file is damaged at the master      nothing to do
    the master lacks it                    it is removed if this very version is known to be the master's; else it stays

    config/filter_copies.json    {"store_id": n, "modules": {name: crc32c}}: what this store of a master had, and was here too

What is known of one store says nothing of another. So an emptied replica that was promoted takes no module from the others. `filter list`
shows where they are, and a user deploys them again.

A broker that leads follows nobody, and users deploy and delete at it. What it knew of a master is out of date, and is forgotten. So a
former master that follows again removes no module that was deployed at it while it led. It removes only what its new master has had.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from .filter_modules import ModuleInfo, is_module_name
from .store.files.side_files import SideFileDamagedError, read_json_file, write_json_file

if TYPE_CHECKING:
    from .store.files.disk import Disk

log = logging.getLogger("protomq.broker")

COPIES_NAME: Final = "config/filter_copies.json"


class KnownCopies(NamedTuple):
    """Modules of a master that were here too: their checksums by name. `store_id`: of the master's store; 0: nothing is known."""

    store_id: int
    modules: Mapping[str, int]


NOTHING_KNOWN: Final = KnownCopies(0, {})


class Change(NamedTuple):
    """A module to fetch, or to remove if `wanted` is None. `here_crc32c`: of the one that is here; None: none is."""

    name: str
    here_crc32c: int | None
    wanted: ModuleInfo | None


def plan_changes(
    here: Iterable[ModuleInfo], there: Iterable[ModuleInfo], known: KnownCopies, store_id: int
) -> list[Change]:
    """Returns what makes the modules here those of the master. Removals come first: they make room.

    `there`: what the master has, whose store has the id `store_id`.
    """
    checksums = {module.name: module.crc32c for module in here if module.size_bytes}
    wanted = {module.name: module for module in there if is_module_name(module.name)}
    its = known.modules if store_id and known.store_id == store_id else {}
    removed = [
        Change(name, crc, None)
        for name, crc in checksums.items()
        if name not in wanted and its.get(name) == crc
    ]
    fetched = [
        Change(name, checksums.get(name), module)
        for name, module in wanted.items()
        if module.size_bytes and checksums.get(name) != module.crc32c
    ]
    return removed + fetched


def known_after(
    here: Iterable[ModuleInfo], there: Iterable[ModuleInfo], store_id: int
) -> KnownCopies:
    """Returns what is known when the changes are made: modules that are the same here and there."""
    if not store_id:
        return NOTHING_KNOWN
    theirs = {module.name: module.crc32c for module in there if module.size_bytes}
    same = {module.name: module.crc32c for module in here if theirs.get(module.name) == module.crc32c}
    return KnownCopies(store_id, same)


class CopiesFile:
    """Keeps what is known over restarts. Without the file nothing is removed. One thread."""

    def __init__(self, disk: Disk, root: str) -> None:
        """`root`: folder of the store."""
        self._disk = disk
        self._path = f"{root}/{COPIES_NAME}"
        self._known: KnownCopies | None = None

    def read(self) -> KnownCopies:
        """Returns what is known."""
        if self._known is None:
            self._known = self._read()
        return self._known

    def write(self, known: KnownCopies) -> None:
        """Replaces the file durably if something has changed. Raises OSError."""
        if known != self.read():
            write_json_file(
                self._disk, self._path, {"store_id": known.store_id, "modules": dict(known.modules)}
            )
            self._known = known

    def clear(self) -> None:
        """Forgets durably what is known. It needs no room on the disk. Raises OSError."""
        if self._disk.exists(self._path):
            self._disk.unlink(self._path)
            self._disk.fsync_dir(self._path.rpartition("/")[0])
        self._known = NOTHING_KNOWN

    def _read(self) -> KnownCopies:
        try:
            content = read_json_file(self._disk, self._path)
            if content is None:
                return NOTHING_KNOWN
            modules = {str(name): int(crc) for name, crc in content["modules"].items()}
            return KnownCopies(int(content["store_id"]), modules)
        except (SideFileDamagedError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is ignored: %s", self._path, error)
            return NOTHING_KNOWN
