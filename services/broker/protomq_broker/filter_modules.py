"""The WebAssembly modules that users have deployed: a file each, whole or absent.

    <root>/config/filters/<name>     "PMQWASM" 01, the module, CRC-32C of both

Modules stand in no log. A user deploys a module at every broker of the topic, and a slave copies those of its master
(`filter_follower.py`). Any thread.
"""

from __future__ import annotations

import re
import threading
from typing import Final, NamedTuple

from protomq.wire.hashing import crc32c

from .filters.errors import FilterError
from .store.files.disk import Disk, sync_names_above
from .store.files.side_files import read_cached_state, read_state_file, write_state_file

MODULES_MAX: Final = 100
_MAGIC: Final = b"PMQWASM\x01"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ModuleInfo(NamedTuple):
    """A module that is there."""

    name: str
    size_bytes: int
    crc32c: int


class FilterModules:
    """See the module's docstring."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._lock = threading.Lock()

    def all(self) -> list[ModuleInfo]:
        """The modules by name. One whose file is damaged or unreadable has the size 0: no slave must take it for deleted."""
        found = []
        for name in self._names():
            module = self._readable(name)
            found.append(ModuleInfo(name, 0, 0) if module is None else ModuleInfo(name, len(module), crc32c(module)))
        return found

    def find(self, name: str) -> bytes | None:
        """Returns the bytes of a module; None if no module has that name. Raises OSError where the disk cannot read it, which may pass."""
        if not is_module_name(name):
            return None
        return read_state_file(self._disk, self._path(name), _MAGIC)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a module. Raises FilterError if no module has that name, and OSError."""
        if not name:
            raise FilterError("the name of the module is empty; `protomq filter list` shows the modules")
        module = self.find(name)
        if module is None:
            raise FilterError(f"no module {name[:64]!r} is deployed here; `protomq filter deploy` deploys one, as FilterService does")
        return module

    def write(self, name: str, module: bytes) -> bool:
        """Stores a module durably. Returns False if the broker already has its maximum of modules."""
        assert is_module_name(name)
        with self._lock:
            return self._write(name, module)

    def delete(self, name: str) -> bool:
        """Deletes a module. Returns whether it existed."""
        with self._lock:
            return self._delete(name)

    def swap(self, name: str, expected_crc32c: int | None, module: bytes | None) -> bool:
        """Replaces a module by another one or by none, if the one that is here has this checksum (None: none is readable here).

        Returns whether it did.
        So a copy never takes the place of what a user has deployed since the copy was planned.
        """
        assert is_module_name(name)
        with self._lock:
            here = self._readable(name)
            if (None if here is None else crc32c(here)) != expected_crc32c:
                return False
            return self._delete(name) if module is None else self._write(name, module)

    def _readable(self, name: str) -> bytes | None:
        return read_cached_state(self._disk, self._path(name), _MAGIC)

    def _write(self, name: str, module: bytes) -> bool:
        names = self._names()
        if name not in names and len(names) >= MODULES_MAX:
            return False
        if not self._disk.exists(self._folder):
            self._disk.make_folder(self._folder)
            sync_names_above(self._disk, self._folder)
        write_state_file(self._disk, self._path(name), _MAGIC, module)
        return True

    def _delete(self, name: str) -> bool:
        if name not in self._names():
            return False
        self._disk.unlink(self._path(name))
        self._disk.fsync_dir(self._folder)
        return True

    def _names(self) -> list[str]:
        if not self._disk.exists(self._folder):
            return []
        return sorted(filter(is_module_name, self._disk.list(self._folder)))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def is_module_name(name: str) -> bool:
    """Whether a module can have this name. The name is also its file's name."""
    return _NAME.fullmatch(name) is not None
