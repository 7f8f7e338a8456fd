"""A small ext4 of its own on a loop device: for a power cut, and for a disk that is truly full. Needs root and a loop device.

`cut_power` is the shutdown ioctl of ext4 without a flush of its log: what was not synced is gone, as after a power cut; everything on
the file system fails until it is mounted again.

The ioctl takes a millisecond or two, and a bare fdatasync that returns meanwhile may report success for what is gone afterwards (9
times in 160 tries, without protomq). So what is acknowledged after the cut has begun proves nothing; the checker knows that.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Final

EXT4_IOC_SHUTDOWN: Final = 0x8004587D
NO_LOG_FLUSH: Final = 2


class LoopDisk:
    """An image file, formatted and mounted for as long as the `with` block lasts."""

    def __init__(self, size_bytes: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="protomq-disk-"))
        self.image = self._folder / "image"
        self.mount_point = self._folder / "disk"
        self.mount_point.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self.image))

    def mount(self) -> None:
        """Mounts it; the journal is replayed if need be."""
        _run("mount", "-o", "loop", str(self.image), str(self.mount_point))

    def unmount(self) -> None:
        """Unmounts it; waits for processes that are on their way out."""
        for _ in range(50):
            done = subprocess.run(
                ["umount", str(self.mount_point)], capture_output=True, check=False
            )
            if done.returncode == 0 or not os.path.ismount(self.mount_point):
                return
            time.sleep(0.1)
        _run("umount", "-l", str(self.mount_point))

    def cut_power(self) -> None:
        """Now."""
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def fill(self, *, leave_bytes: int = 0) -> Path:
        """Takes the free space with a file; remove it to give the space back."""
        filler = self.mount_point / "filler"
        free = shutil.disk_usage(self.mount_point).free - leave_bytes
        with _opened_when_there_is_room(filler) as file:
            block = bytes(64 << 10)
            try:
                while free > 0:
                    free -= file.write(block[: min(free, len(block))])
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                pass
        return filler

    def __enter__(self) -> LoopDisk:
        self.mount()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unmount()
        shutil.rmtree(self._folder, ignore_errors=True)


def _opened_when_there_is_room(path: Path) -> IO[bytes]:
    """A broker that prepares its next segment may have all space for a moment, until it finds that this is too little."""
    gives_up_s = time.monotonic() + 5.0
    while True:
        try:
            return open(path, "wb")
        except OSError as error:
            if error.errno != errno.ENOSPC or time.monotonic() > gives_up_s:
                raise
            time.sleep(0.01)


@functools.cache
def why_no_loop_disk() -> str:
    """Why there can be none here; "" if there can."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    if shutil.which("mkfs.ext4") is None:
        return "mkfs.ext4 is not installed"
    try:
        with LoopDisk(8 << 20) as disk:
            disk.cut_power()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no loop device with ext4 and its shutdown ioctl here: {error}"
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
