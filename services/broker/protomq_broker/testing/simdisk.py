"""A disk in memory, with a page cache, that fails on request.

Faults it can inject:
- power cut: `crash(rng)` gives the disk as it comes up again. Of what was not synced, any subset survives. Each 512-byte sector,
  each file size and each name in a folder counts on its own (a rename is one step). Folders are names like files: making or
  removing one is certain once the folder around it is synced. With the name of a folder goes all that is in it.
  `write_back(rng)` lets some of it reach the platter early.
- kill -9: `killed()` gives the same page cache to the next process; locks and descriptors are gone.
- a planned fault at any operation that changes something (`plan`, or `fail_at`). The faults are `Fault.EIO`, `Fault.ENOSPC`,
  `Fault.SHORT` (half of a write is done), `Fault.SYNC_LOST` and `Fault.CRASH`. After `SYNC_LOST` an fsync fails, once, and the pages
  count as clean though they never reached the disk. At `CRASH` the process ends with `SimulatedCrash`; a write is done in part.
- a full disk: `capacity_bytes`.
- damage: `flip_bit`, `overwrite`, `cut`, `swap_ranges`, `swap_files` change what is stored without anybody noticing; the pages have
  left the cache, and come back so.
- what cannot be read: a file that `spoil` has made unreadable fails each read, `spoil_part` does that to some sectors.
  `fail_reads` lets the next reads of a file fail.

Operations are counted in `operations`, so "fail the n-th, for n = 1, 2, 3 …" is a loop. Everything follows from the seed of the
`rng` that is handed in. One thread at a time.
"""

from __future__ import annotations

import errno
import os
import posixpath
import random
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar, cast

from protomq_broker.store.files.disk import Disk, DiskUsage

SECTOR_SIZE_BYTES: Final = 512
CAPACITY_BYTES: Final = 1 << 40
"""Of a disk that is never full."""
_Node = TypeVar("_Node", bound="_File | _Folder")


class Fault(Enum):
    """What happens at an operation."""

    EIO = "EIO"
    ENOSPC = "ENOSPC"
    SHORT = "SHORT"
    SYNC_LOST = "SYNC_LOST"
    CRASH = "CRASH"


class SimulatedCrash(BaseException):
    """The process ends at this operation. Not an Exception, so that no handler takes it for an error of the disk."""


class Operation(NamedTuple):
    """One operation that changes something: its number from 1, its name as in `Disk`, its path."""

    number: int
    name: str
    path: str


class _File:
    """An inode: what processes see (`cached`), what is on the platter (`durable`), and which sectors differ and may be written back."""

    __slots__ = ("bad", "cached", "cold", "dirty", "durable", "failing_reads", "is_unreadable", "locked_by", "stuck")

    def __init__(self) -> None:
        self.cold: set[int] = set()  # sectors that the next read brings from the platter
        self.cached = bytearray()
        self.durable = bytearray()
        self.dirty: set[int] = set()
        self.locked_by: int | None = None
        self.is_unreadable = False
        self.bad: set[int] = set()  # sectors that no read gets, until they are written
        self.stuck: set[int] = set()  # sectors that take no write either
        self.failing_reads = 0

    def touch(self, start: int, end: int) -> None:
        self.dirty.update(
            range(start // SECTOR_SIZE_BYTES, (end + SECTOR_SIZE_BYTES - 1) // SECTOR_SIZE_BYTES)
        )

    def harm(self, start: int, end: int) -> None:
        """Sectors are not what they were: they have left the page cache, and come back so."""
        self.cold.update(
            range(start // SECTOR_SIZE_BYTES, (end + SECTOR_SIZE_BYTES - 1) // SECTOR_SIZE_BYTES)
        )

    def persist(self, sectors: set[int], size_bytes: int) -> None:
        """Writes sectors to the platter and sets the size there."""
        durable, cached = self.durable, self.cached
        if len(durable) < size_bytes:
            durable += bytes(size_bytes - len(durable))
        for sector in sectors:
            start = sector * SECTOR_SIZE_BYTES
            part = cached[start : start + SECTOR_SIZE_BYTES]
            if start < size_bytes:
                durable[start : start + len(part)] = part
        del durable[size_bytes:]

    def copy(self) -> _File:
        other = _File()
        other.cached = bytearray(self.cached)
        other.durable = bytearray(self.durable)
        other.dirty = set(self.dirty)
        other.cold = set(self.cold)
        other.is_unreadable = self.is_unreadable
        other.bad, other.stuck = set(self.bad), set(self.stuck)
        return other


class _NameChange(NamedTuple):
    """A name in a folder that was added, taken away, or moved (both at once), not yet synced."""

    added: str | None
    removed: str | None
    node: _File | _Folder


class _Folder:
    """The names in a folder as they are on the platter, and what processes have changed since."""

    __slots__ = ("changes", "durable")

    def __init__(self) -> None:
        self.durable: dict[str, _File | _Folder] = {}
        self.changes: list[_NameChange] = []

    def sync(self) -> None:
        for change in self.changes:
            _apply_name_change(self.durable, change)
        self.changes.clear()

    def forget(self, name: str) -> None:
        """A name is gone, as if it had never been."""
        self.durable.pop(name, None)
        self.changes = [change for change in self.changes if name not in change[:2]]


class SimDisk(Disk):
    """See the module's docstring."""

    __slots__ = (
        "_boot",
        "_descriptors",
        "_folders",
        "_names",
        "_next_fd",
        "capacity_bytes",
        "history",
        "operations",
        "plan",
    )

    def __init__(
        self,
        *,
        capacity_bytes: int = CAPACITY_BYTES,
        plan: Callable[[Operation], Fault | None] | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.plan = plan
        self.operations = 0
        self.history: list[Operation] | None = None
        """Set to a list to have the operations written down."""
        self._names: dict[str, _File] = {}  # as processes see them, by path; folders likewise
        self._folders: dict[str, _Folder] = {"/": _Folder()}
        self._descriptors: dict[int, tuple[_File, str]] = {}
        self._next_fd = 1000
        self._boot = 1

    # Faults.

    def fail_at(self, number: int, fault: Fault, *, for_ever: bool = False) -> None:
        """Plans a fault at the `number`-th operation from now on, once or from then on for ever."""
        first = self.operations + number

        def plan(operation: Operation) -> Fault | None:
            return (
                fault
                if operation.number == first or (for_ever and operation.number > first)
                else None
            )

        self.plan = plan

    def crash(self, rng: random.Random, *, keep: float | None = None) -> SimDisk:
        """The disk after a power cut. `keep`: share of the un-synced things that survive; drawn if None, so that all and nothing occur."""
        share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)) if keep is None else keep
        after = SimDisk(capacity_bytes=self.capacity_bytes)
        after._boot = self._boot + 1
        after._take_survivors("/", self._folders["/"], share, rng, {})
        return after

    def _take_survivors(
        self, path: str, folder: _Folder, share: float, rng: random.Random, files: dict[int, _File]
    ) -> None:
        """Fills this disk's folder at `path` with what a power cut leaves of `folder`, and all below. `files`: copies made so far."""
        names = dict(folder.durable)
        for change in folder.changes:
            if rng.random() < share:
                _apply_name_change(names, change)
        ours = self._folders[path]
        for name, node in names.items():
            child = _child(path, name)
            if isinstance(node, _Folder):
                ours.durable[name] = self._folders[child] = _Folder()
                self._take_survivors(child, node, share, rng, files)
                continue
            copy = files.get(id(node))
            if copy is None:
                copy = files[id(node)] = node.copy()
                survivors = {sector for sector in sorted(node.dirty) if rng.random() < share}
                size_bytes = len(node.cached) if rng.random() < share else len(node.durable)
                copy.persist(survivors, size_bytes)
                copy.cached = bytearray(copy.durable)
                copy.dirty = set()
            ours.durable[name] = self._names[child] = copy

    def killed(self) -> SimDisk:
        """The disk for the next process after kill -9: the page cache is the same, what was not synced still is not."""
        after = SimDisk(capacity_bytes=self.capacity_bytes)
        after._boot = self._boot
        copies: dict[int, _File | _Folder] = {}
        after._names = {path: _copy(file, copies) for path, file in self._names.items()}
        after._folders = {path: _copy(folder, copies) for path, folder in self._folders.items()}
        return after

    def write_back(self, rng: random.Random, share: float = 0.5) -> None:
        """Some of what is not synced reaches the platter by itself, as kernels do."""
        for file in self._names.values():
            sectors = {sector for sector in sorted(file.dirty) if rng.random() < share}
            file.persist(
                sectors, max(len(file.durable), len(file.cached)) if sectors else len(file.durable)
            )
            file.dirty -= sectors

    def flip_bit(self, path: str, bit: int) -> None:
        """Damages one bit, counted from the file's start, in the cache and on the platter."""
        file = self._names[path]
        for content in (file.cached, file.durable):
            if bit // 8 < len(content):
                content[bit // 8] ^= 1 << bit % 8
        file.harm(bit // 8, bit // 8 + 1)

    def flip_bit_in_cache(self, path: str, bit: int) -> None:
        """Damages one bit in the cache alone: no page leaves it, so nothing tells that another bit stands there."""
        self._names[path].cached[bit // 8] ^= 1 << bit % 8

    def overwrite(self, path: str, offset: int, data: bytes) -> None:
        """Puts other bytes into a file, in the cache and on the platter."""
        file = self._names[path]
        for content in (file.cached, file.durable):
            content[offset : offset + len(data)] = data
        file.harm(offset, offset + len(data))

    def spoil(self, path: str) -> None:
        """Makes a file unreadable, as bad sectors do: each read fails with EIO, and each write into it too."""
        self._names[path].is_unreadable = True

    def spoil_part(self, path: str, start: int, end: int, *, is_stuck: bool = False) -> None:
        """Makes the sectors of [start, end) unreadable. A write puts others into their place, unless it is `is_stuck`: then it fails, too.

        Writing a part of a sector means reading it first: that fails.
        """
        file = self._names[path]
        sectors = set(_sectors(start, end))
        file.bad |= sectors
        if is_stuck:
            file.stuck |= sectors
        file.harm(start, end)

    def mend(self, path: str) -> None:
        """All of a file can be read again, and is what it was."""
        file = self._names[path]
        file.bad, file.stuck, file.is_unreadable = set(), set(), False

    def fail_reads(self, path: str, count: int) -> None:
        """The next reads of a file fail with EIO; then it is as before."""
        self._names[path].failing_reads = count

    def cut(self, path: str, size_bytes: int) -> None:
        """Shortens a file, in the cache and on the platter."""
        file = self._names[path]
        del file.cached[size_bytes:], file.durable[size_bytes:]
        file.dirty = {sector for sector in file.dirty if sector * SECTOR_SIZE_BYTES < size_bytes}

    def swap_ranges(self, path: str, first: int, second: int, size_bytes: int) -> None:
        """Two misdirected writes: what belongs into one place stands in the other."""
        file = self._names[path]
        one, two = (bytes(file.cached[at : at + size_bytes]) for at in (first, second))
        self.overwrite(path, first, two)
        self.overwrite(path, second, one)

    def swap_files(self, first: str, second: str) -> None:
        """Two files change their contents."""
        one, two = self.content(first), self.content(second)
        for path, data in ((first, two), (second, one)):
            self.cut(path, min(len(data), len(self.content(path))))
            self.overwrite(path, 0, data)

    def content(self, path: str) -> bytes:
        """What a process would read."""
        return bytes(self._names[path].cached)

    def files(self, under: str = "/") -> dict[str, bytes]:
        """All files below a folder with their content."""
        prefix = under.rstrip("/") + "/"
        return {
            path: bytes(file.cached)
            for path, file in sorted(self._names.items())
            if path.startswith(prefix)
        }

    def remove(self, under: str) -> None:
        """Takes away a file or everything below a folder, durably and without a trace."""
        prefix = under.rstrip("/") + "/"
        self._folders[_folder_of(under)].forget(posixpath.basename(under))
        for nodes in (self._names, self._folders):
            for path in [path for path in nodes if path == under or path.startswith(prefix)]:
                del nodes[path]

    @property
    def open_descriptors(self) -> int:
        """Number of descriptors that are open."""
        return len(self._descriptors)

    # The interface of Disk.

    def open(self, path: str) -> int:
        file = self._names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._descriptor(file, path)

    def open_read_only(self, path: str) -> int:
        return self.open(path)

    def create(self, path: str) -> int:
        if path not in self._names:
            self._begin("create", path)
            folder = _folder_of(path)
            if folder not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            file = self._names[path] = _File()
            self._change_name(path, _NameChange(posixpath.basename(path), None, file))
        return self._descriptor(self._names[path], path)

    def close(self, fd: int) -> None:
        file, _ = self._descriptors.pop(fd)
        if file.locked_by == fd:
            file.locked_by = None

    def size(self, fd: int) -> int:
        return len(self._file(fd).cached)

    def name_count(self, fd: int) -> int:
        file = self._file(fd)
        return sum(named is file for named in self._names.values())

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        file = self._file(fd)
        if file.is_unreadable or (file.bad and not file.bad.isdisjoint(_sectors(position, position + size_bytes))):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if file.failing_reads:
            file.failing_reads -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if file.cold:
            end = position + size_bytes
            file.cold -= set(range(position // SECTOR_SIZE_BYTES, -(-end // SECTOR_SIZE_BYTES)))
        return bytes(memoryview(file.cached)[position : position + size_bytes])

    def is_cached(self, fd: int, offset: int, size_bytes: int) -> bool:
        file, end = self._file(fd), offset + size_bytes
        if end > len(file.cached):
            return False
        return not file.cold or file.cold.isdisjoint(
            range(offset // SECTOR_SIZE_BYTES, -(-end // SECTOR_SIZE_BYTES))
        )

    def written_ns(self, fd: int) -> int:
        return 0  # nobody else writes here: damage is done to the platter

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, position: int) -> int:  # type: ignore[override]
        return self._write("pwrite", fd, bytes(data), position)

    def pwritev(self, fd: int, parts: Sequence[bytes], position: int) -> int:  # type: ignore[override]
        return self._write("pwritev", fd, b"".join(parts), position)

    def allocate(self, fd: int, size_bytes: int) -> None:
        file, path = self._descriptors[fd]
        self._begin("allocate", path)
        added = size_bytes - len(file.cached)
        if added <= 0:
            return
        self._require_space(added)
        file.touch(len(file.cached), size_bytes)
        file.cached += bytes(added)

    def truncate(self, fd: int, size_bytes: int) -> None:
        file, path = self._descriptors[fd]
        self._begin("truncate", path)
        old = len(file.cached)
        if size_bytes < old:
            del file.cached[size_bytes:]
            file.touch(size_bytes, old)
        elif size_bytes > old:
            file.touch(old, size_bytes)
            file.cached += bytes(size_bytes - old)

    def fdatasync(self, fd: int) -> None:  # type: ignore[override]
        self._sync("fdatasync", fd)

    def fsync(self, fd: int) -> None:  # type: ignore[override]
        self._sync("fsync", fd)

    def written_ranges(self, fd: int, start: int, end: int) -> list[tuple[int, int]]:
        end = min(end, self.size(fd))
        return [(start, end)] if start < end else []

    def exists(self, path: str) -> bool:
        return path in self._names or path in self._folders

    def has_name(self, fd: int, path: str) -> bool:
        return self._names.get(path) is self._file(fd)

    def list(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        names = {
            known[len(prefix) :].split("/", 1)[0]
            for known in (*self._names, *self._folders)
            if known.startswith(prefix) and known != prefix
        }
        return sorted(names)

    def is_folder(self, path: str) -> bool:
        return path in self._folders

    def make_folder(self, path: str) -> None:
        if path in self._folders:
            return
        self.make_folder(_folder_of(path))
        self._begin("make_folder", path)
        folder = self._folders[path] = _Folder()
        self._change_name(path, _NameChange(posixpath.basename(path), None, folder))

    def rename(self, source: str, target: str) -> None:
        self._begin("rename", source)
        if source not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if _folder_of(source) != _folder_of(target):
            raise OSError(errno.EXDEV, "the simulated disk moves nothing between folders", target)
        file = self._names[target] = self._names.pop(source)
        names = posixpath.basename(target), posixpath.basename(source)
        self._change_name(target, _NameChange(*names, file))
        for fd, (file, path) in self._descriptors.items():
            if path == source:
                self._descriptors[fd] = (file, target)

    def link(self, source: str, target: str) -> None:
        self._begin("link", target)
        if source not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        if target in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        file = self._names[target] = self._names[source]
        self._change_name(target, _NameChange(posixpath.basename(target), None, file))

    def unlink(self, path: str) -> None:
        self._begin("unlink", path)
        file = self._names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        del self._names[path]
        self._change_name(path, _NameChange(None, posixpath.basename(path), file))

    def remove_folder(self, path: str) -> None:
        self._begin("remove_folder", path)
        if self.list(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        folder = self._folders.pop(path)
        self._change_name(path, _NameChange(None, posixpath.basename(path), folder))

    def fsync_dir(self, path: str) -> None:
        self._begin("fsync_dir", path)
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._folders[path].sync()

    def open_folder(self, path: str) -> int:
        if path not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self._descriptor(_File(), path)

    def sync_file_system(self, fd: int) -> None:
        _, path = self._descriptors[fd]
        fault = self._begin("sync_file_system", path)
        for file in self._names.values():
            if fault is Fault.SYNC_LOST:
                file.dirty.clear()
            else:
                file.persist(file.dirty, len(file.cached))
                file.dirty.clear()
        if fault is Fault.SYNC_LOST:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        for folder in self._folders.values():
            folder.sync()

    def lock(self, fd: int) -> bool:
        file = self._file(fd)
        if file.locked_by is not None and file.locked_by != fd:
            return False
        file.locked_by = fd
        return True

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(self.capacity_bytes, max(0, self.capacity_bytes - self._used_bytes()))

    def cache_id(self, path: str) -> str:
        return f"boot-{self._boot}"

    # Parts.

    def _change_name(self, path: str, change: _NameChange) -> None:
        self._folders[_folder_of(path)].changes.append(change)

    def _descriptor(self, file: _File, path: str) -> int:
        self._next_fd += 1
        self._descriptors[self._next_fd] = (file, path)
        return self._next_fd

    def _file(self, fd: int) -> _File:
        found = self._descriptors.get(fd)
        if found is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found[0]

    def _begin(self, name: str, path: str) -> Fault | None:
        """Counts an operation and lets its fault happen; SHORT and SYNC_LOST, and a CRASH in a write, are left to the caller."""
        self.operations += 1
        plan, history = self.plan, self.history
        if plan is None and history is None:
            return None  # Most are such: nobody looks at them.
        operation = Operation(self.operations, name, path)
        if history is not None:
            history.append(operation)
        fault = plan(operation) if plan is not None else None
        if fault is None:
            return None
        if fault is Fault.EIO or (fault is Fault.SHORT and not name.startswith("pwrite")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if fault is Fault.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if fault is Fault.CRASH and not name.startswith("pwrite"):
            raise SimulatedCrash(operation)
        if fault is Fault.SYNC_LOST and name not in ("fsync", "fdatasync", "sync_file_system"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return fault

    def _write(self, name: str, fd: int, data: bytes, position: int) -> int:
        file, path = self._descriptors[fd]
        if file.is_unreadable:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if file.bad:
            touched = set(_sectors(position, position + len(data)))
            whole = set(range(-(-position // SECTOR_SIZE_BYTES), (position + len(data)) // SECTOR_SIZE_BYTES))
            if touched & file.stuck or touched & file.bad - whole:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            file.bad -= whole
        fault = self._begin(name, path)
        if fault is not None:
            data = data[: len(data) // 2]
        end = position + len(data)
        old = len(file.cached)
        if end > old:
            self._require_space(end - old)
            file.cached += bytes(end - old)
            file.touch(old, end)
        file.cached[position:end] = data
        file.touch(position, end)
        if fault is Fault.CRASH:
            raise SimulatedCrash(Operation(self.operations, name, path))
        if fault is Fault.SHORT and not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return len(data)

    def _sync(self, name: str, fd: int) -> None:
        file, path = self._descriptors[fd]
        fault = self._begin(name, path)
        if fault is Fault.SYNC_LOST:
            file.dirty.clear()  # clean, though nothing was written
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        file.persist(file.dirty, len(file.cached))
        file.dirty.clear()

    def _used_bytes(self) -> int:
        return sum(
            len(file.cached) for file in {id(file): file for file in self._names.values()}.values()
        )

    def _require_space(self, size_bytes: int) -> None:
        # What the disk has room for by itself does not fit into memory: there is nothing to add up.
        if self.capacity_bytes < CAPACITY_BYTES and self._used_bytes() + size_bytes > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sectors(start: int, end: int) -> range:
    """Those with a part of [start, end)."""
    return range(start // SECTOR_SIZE_BYTES, -(-end // SECTOR_SIZE_BYTES))


@lru_cache(4_096)
def _folder_of(path: str) -> str:
    return posixpath.dirname(path)


def _apply_name_change(names: dict[str, _File | _Folder], change: _NameChange) -> None:
    if change.removed is not None and names.get(change.removed) is change.node:
        del names[change.removed]
    if change.added is not None:
        names[change.added] = change.node


def _child(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def _copy(node: _Node, copies: dict[int, _File | _Folder]) -> _Node:
    """A copy of a file, or of a folder with all that it has had in it; the same one for the same node."""
    known = copies.get(id(node))
    if known is None:
        if isinstance(node, _Folder):
            known = copies[id(node)] = _Folder()
            known.durable = {name: _copy(child, copies) for name, child in node.durable.items()}
            known.changes = [c._replace(node=_copy(c.node, copies)) for c in node.changes]
        else:
            known = copies[id(node)] = node.copy()
    return cast(_Node, known)
