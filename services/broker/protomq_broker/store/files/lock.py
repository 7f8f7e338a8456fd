"""The files `lock` and `abort` in the root of a store.

`lock` is held with flock by the process that has the store open, and says who that is: {"pid": …, "cache_id": …}. The lock goes with the
process, however it dies; the content stays. The cache id names the boot and the mount under which the store was last opened. While it is
the same, the page cache has kept all that was written, synced or not. It is written only when recovery is through, since a recovery that
is interrupted must decide the same the next time.

`abort` is there from start to clean stop. Found at a start, it says that the process did not stop cleanly. It is for people and tools:
recovery does not ask it, since a disk that loses an fsync may as well lose a file.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from protomq_broker.store.errors import StoreLockedError

from .disk import (
    Disk,
    if_there_is_room,
    path_named,
    read_file,
    read_fully,
    read_json,
    remove_file,
    write_file_atomically,
    write_fully,
)

LOCK_SIZE_BYTES: Final = 512


class StoreLock:
    """The lock of one store. `previous_cache_id` is what the last process to recover it left there."""

    def __init__(self, disk: Disk, root: str, pid: int | None = None) -> None:
        """Takes the lock; StoreLockedError if another process has it."""
        self._disk = disk
        self._path = f"{root}/lock"
        self._pid = os.getpid() if pid is None else pid
        self._fd = disk.create(self._path)
        try:
            content = self._read()
            if not disk.lock(self._fd):
                holder = content.get("pid", 0)
                raise StoreLockedError(root, holder if isinstance(holder, int) else 0)
            cache_id = self._read().get("cache_id", "")
            self.previous_cache_id: str = cache_id if isinstance(cache_id, str) else ""
            self.publish_where_room_is(self.previous_cache_id)
        except (OSError, StoreLockedError):
            disk.close(self._fd)
            raise

    def publish(self, cache_id: str) -> None:
        """Writes who holds the lock and under which page cache. Need not be durable: after a power cut it differs anyway."""
        content = json.dumps({"pid": self._pid, "cache_id": cache_id}).encode()
        with path_named(self._path):
            write_fully(self._disk, self._fd, content.ljust(LOCK_SIZE_BYTES - 1) + b"\n", 0)

    def publish_where_room_is(self, cache_id: str) -> None:
        """The same; a full disk leaves what stands there. An older id, or none, proves less of the next start's log, and nothing wrong."""
        with if_there_is_room():
            self.publish(cache_id)

    def release(self) -> None:
        """Gives the lock back. The file stays."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _read(self) -> dict[str, Any]:
        try:
            with path_named(self._path):
                content = json.loads(read_fully(self._disk, self._fd, LOCK_SIZE_BYTES, 0))
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


def may_be_lock(disk: Disk, path: str) -> bool:
    """Whether a file is the lock of a store, or the beginning of one: a crash may have left it empty, or all zeros."""
    if disk.is_folder(path):
        return False
    content = read_file(disk, path) or b""
    return len(content) <= LOCK_SIZE_BYTES and (content.startswith(b'{"pid": ') or not content.strip(b"\0"))


def previous_cache_id(disk: Disk, root: str) -> str:
    """The id of the page cache under which the store was last recovered, whoever has the lock; "" if nobody knows."""
    content = read_json(disk, f"{root}/lock")
    found = content.get("cache_id") if isinstance(content, dict) else None
    return found if isinstance(found, str) else ""


def is_locked(disk: Disk, root: str) -> bool:
    """Whether a process has the store open."""
    try:
        fd = disk.open(f"{root}/lock")
    except FileNotFoundError:
        return False
    try:
        return not disk.lock(fd)
    finally:
        disk.close(fd)


class AbortFile:
    """The file `abort`. `found`: the last process left it."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._path = f"{root}/abort"
        self.found = disk.exists(self._path)

    def write(self) -> None:
        """The store is open from here on."""
        write_file_atomically(self._disk, self._path, b"")

    def remove(self) -> None:
        """The store was closed cleanly."""
        remove_file(self._disk, self._path)
