"""What the derived structures need of the disk: state files that are whole or absent, and a bounded set of open files.

Everything that is derived can be rebuilt from the log. So a state file that is missing, torn or from another version
is simply not there (None), and its owner starts from nothing. So it is where the disk cannot read it (`read_cache`, `read_cached_state`).
What only the file itself tells is different: there an error of the disk, which may pass, goes to the caller (`read_state_file`).

    state file   magic (8 bytes), payload, CRC-32C of both (u32, little-endian)

The JSON files under config/ are for people to read too. Their checksum covers the octets of the content, from its first one to the line
feed behind it. A file that does not hold is never believed in part: `SideFileDamagedError`, and its reader decides what to do.

    JSON file    {"crc32c": "<8 hex digits>",
                 "content":
                 <JSON>
                 }
"""

from __future__ import annotations

import json
import logging
import resource
import threading
from typing import Any, Final

from protomq.wire.hashing import crc32c, extend_crc32c
from protomq_broker.store.errors import StoreError

from .disk import UNREADABLE_ERRNOS, Disk, read_file, read_fully, write_file_atomically

log = logging.getLogger(__name__)

OPEN_FILES_MIN: Final = 256
"""Descriptors that one set keeps open whatever the limit of the process: the usual one is 1,024."""
OPEN_FILES_MAX: Final = 16_384
"""Where the limit allows it, ten thousand queues keep their files open: opening and closing one costs more than writing to it."""
OTHER_DESCRIPTORS: Final = 11_000
"""Left to connections, of which the remoting port takes 10,000, and to all else."""

_MAGIC_SIZE_BYTES: Final = 8
_CRC_SIZE_BYTES: Final = 4


def write_state_file(disk: Disk, path: str, magic: bytes, *payload: bytes) -> None:
    """Replaces a state file, atomically and durably. A large payload comes in parts of about a MiB. Each costs a write, and between
    parts other threads run.
    """
    assert len(magic) == _MAGIC_SIZE_BYTES
    crc = crc32c(magic)
    for part in payload:
        crc = extend_crc32c(crc, part)
    end = crc.to_bytes(_CRC_SIZE_BYTES, "little")
    if len(payload) == 1:
        write_file_atomically(disk, path, b"".join((magic, *payload, end)))
    else:
        write_file_atomically(disk, path, magic, *payload, end)


def read_cache(disk: Disk, path: str) -> bytes | None:
    """As `read_file`, for what can be had elsewhere. Where the disk cannot read it, it is empty, and does not hold; this is logged."""
    try:
        return read_file(disk, path)
    except OSError as error:
        if error.errno not in UNREADABLE_ERRNOS:
            raise
        log.error("a file that can be made again is unreadable, and does not count: %s", error)
        return b""


def read_entries(disk: Disk, fd: int, size_bytes: int, position: int) -> bytes:
    """As `read_fully`, for what the log tells too. Where the disk cannot read it, there is nothing, as behind the end of the file."""
    try:
        return read_fully(disk, fd, size_bytes, position)
    except OSError as error:
        if error.errno not in UNREADABLE_ERRNOS:
            raise
        return b""


def read_state_file(disk: Disk, path: str, magic: bytes) -> bytes | None:
    """The payload of a state file that nothing else tells; None if there is no file that holds. Raises OSError, which may pass."""
    return _payload_in(read_file(disk, path), magic)


def read_cached_state(disk: Disk, path: str, magic: bytes) -> bytes | None:
    """The payload of a state file that can be had elsewhere; None if there is no file that holds, or the disk cannot read it."""
    return _payload_in(read_cache(disk, path), magic)


def _payload_in(content: bytes | None, magic: bytes) -> bytes | None:
    if content is None or len(content) < _MAGIC_SIZE_BYTES + _CRC_SIZE_BYTES:
        return None
    covered, crc = content[:-_CRC_SIZE_BYTES], content[-_CRC_SIZE_BYTES:]
    if not covered.startswith(magic) or crc32c(covered).to_bytes(_CRC_SIZE_BYTES, "little") != crc:
        return None
    return covered[_MAGIC_SIZE_BYTES:]


def why_not(disk: Disk, path: str, magic: bytes) -> str:
    """What is wrong with a state file that does not hold, with its path."""
    content = read_cache(disk, path)
    if content is None:
        return f"{path} is gone"
    if not content:
        return f"{path} is empty, or unreadable"
    if not content.startswith(magic):
        return f"{path} begins with {content[: len(magic)]!r}, not {magic!r}: it is damaged, or of another version"
    return f"{path} does not hold: its CRC-32C is another one"


TAIL_NAME: Final = "config/tail.json"
START_NAME: Final = "config/start.json"
"""Whether the end of the log may be lost, as `protomq_broker.tail_file` has it. A repair removes it: then nothing is known."""

CONFIRMED_NAME: Final = "config/confirmed.json"
"""Up to where the log is confirmed, as `protomq_broker.confirmed_file` has it. A truncation to there or behind it keeps it."""


class SideFileDamagedError(StoreError):
    """A JSON file of the store is not what was written to it.

    Attributes: path: the file; reason: what does not hold.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is damaged: {reason}")
        self.path = path
        self.reason = reason


_JSON_HEAD: Final = b'{"crc32c": "%08x",\n"content":\n'
_JSON_HEAD_SIZE_BYTES: Final = len(_JSON_HEAD % 0)
_JSON_TAIL: Final = b"}\n"


def write_json_file(disk: Disk, path: str, value: Any) -> None:
    """Replaces a JSON file with a checksum, atomically and durably."""
    write_json_text(disk, path, json.dumps(value, indent=1, sort_keys=True))


def write_json_text(disk: Disk, path: str, text: str) -> None:
    """The same for a value that is encoded already."""
    content = text.encode() + b"\n"
    write_file_atomically(disk, path, _JSON_HEAD % crc32c(content) + content + _JSON_TAIL)


def read_json_file(disk: Disk, path: str) -> Any | None:
    """The value in a JSON file with a checksum; None if there is no file. Raises SideFileDamagedError if it does not hold."""
    data = read_file(disk, path)
    if data is None:
        return None
    content = data[_JSON_HEAD_SIZE_BYTES : -len(_JSON_TAIL)]
    if data != _JSON_HEAD % crc32c(content) + content + _JSON_TAIL:
        raise SideFileDamagedError(path, "its checksum is wrong")
    return json.loads(content)


def size_of_file(disk: Disk, path: str) -> int | None:
    """Size of a file in bytes, None if there is none."""
    try:
        fd = disk.open_read_only(path)
    except FileNotFoundError:
        return None
    try:
        return disk.size(fd)
    finally:
        disk.close(fd)


def cut_file(disk: Disk, path: str, size_bytes: int) -> None:
    """Shortens a file; nothing happens if there is none, or if it is not longer."""
    try:
        fd = disk.open(path)
    except FileNotFoundError:
        return
    try:
        if disk.size(fd) > size_bytes:
            disk.truncate(fd, size_bytes)
    finally:
        disk.close(fd)


def remove_tree(disk: Disk, path: str) -> None:
    """Removes a folder and all that is in it; nothing happens if there is none."""
    empty_folder(disk, path)
    if disk.is_folder(path):
        disk.remove_folder(path)


def empty_folder(disk: Disk, path: str) -> None:
    """Removes all that is in a folder. The folder stays, so that what is made in it now is not in one whose name may be lost."""
    for name in disk.list(path):
        child = f"{path}/{name}"
        if disk.is_folder(child):
            remove_tree(disk, child)
        else:
            disk.unlink(child)


_PLACE_STEP: Final = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: its multiples come everywhere, in no order that a caller could have."""
_PLACE_MAX: Final = (1 << 64) - 1


class OpenFile:
    """An open file that closes itself when nobody refers to it any more: so one can be forgotten while another thread reads it."""

    __slots__ = ("_disk", "fd")

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk = disk
        self.fd = fd

    def fileno(self) -> int:
        """The descriptor."""
        return self.fd

    def __del__(self) -> None:
        self._disk.close(self.fd)


def open_files_max() -> int:
    """How many files of consume queues may stay open, by the limit of the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES_MAX
    return max(OPEN_FILES_MIN, min(OPEN_FILES_MAX, soft - OTHER_DESCRIPTORS))


class OpenFiles:
    """Open files by path, a bounded number. Any thread; a lock is held for a look-up, never while a file is read or written.

    When there are too many, any one of them goes. To close the one used longest ago would be wrong for the flusher. It goes through
    all queues in turn, and would find none of them open.
    """

    def __init__(self, disk: Disk, files_max: int = OPEN_FILES_MIN) -> None:
        self.disk = disk
        self._files_max = files_max
        self._files: dict[str, tuple[OpenFile, int]] = {}  # with their index in `_paths`
        self._paths: list[str] = []
        self._place = 0  # of the next to go, as a part of 2**64
        self._lock = threading.Lock()

    def get(self, path: str, *, create: bool = False) -> OpenFile:
        """The open file; FileNotFoundError if there is none and `create` is not set.

        Hold the result for as long as its descriptor is used.
        """
        with self._lock:
            found = self._files.get(path)
        if found is not None:
            return found[0]
        opened = OpenFile(self.disk, self.disk.create(path) if create else self.disk.open(path))
        dropped = None  # closed at the end, outside the lock
        with self._lock:
            found = self._files.get(path)
            if found is not None:  # another thread was faster
                return found[0]
            if len(self._paths) >= self._files_max:
                self._place = (self._place + _PLACE_STEP) & _PLACE_MAX
                dropped = self._remove(self._paths[self._place * len(self._paths) >> 64])
            self._files[path] = (opened, len(self._paths))
            self._paths.append(path)
        del dropped
        return opened

    def forget(self, path: str) -> None:
        """Drops a file, if it is open; it is closed when its last user is done."""
        with self._lock:
            dropped = self._remove(path) if path in self._files else None
        del dropped

    def forget_below(self, folder: str) -> None:
        """Drops all files in a folder and below it; "" is the root of all."""
        with self._lock:
            prefix = f"{folder}/" if folder else ""
            dropped = [self._remove(path) for path in self._paths[:] if path.startswith(prefix)]
        del dropped

    def unlink(self, path: str) -> None:
        """Drops and unlinks a file."""
        self.forget(path)
        self.disk.unlink(path)

    def remove_folder(self, folder: str) -> None:
        """Drops all files below a folder, and removes it; nothing happens if there is none."""
        self.forget_below(folder)
        remove_tree(self.disk, folder)

    def __len__(self) -> int:
        return len(self._paths)

    def _remove(self, path: str) -> OpenFile:
        file, index = self._files.pop(path)
        last = self._paths.pop()
        if last != path:
            self._paths[index] = last
            self._files[last] = (self._files[last][0], index)
        return file
