"""What has left the page cache, or was written to by somebody else, is checked again: on a real disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.files.page_cache import is_cached
from protomq_broker.store.queues.reading import ReadStatus
from protomq_broker.store.store import Store
from protomq_runtime.clock import SystemClock

from .log_helpers import make_request


class LaterClock(SystemClock):
    """A clock that may be put forward."""

    later_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.later_ms


def test_pages_that_are_dropped_are_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file:
        fd = file.fileno()
        assert is_cached(fd, 0, 1 << 20)
        assert is_cached(fd, 5000, 1)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if is_cached(fd, 0, 1 << 20):
            pytest.skip("this file system keeps its pages, or the kernel has no cachestat(2)")
        os.pread(fd, 1, 0)
        assert is_cached(fd, 0, 1)


@pytest.mark.parametrize("segment", [0, 1], ids=["a full segment", "the one being written"])
def test_what_somebody_else_writes_into_a_segment_is_never_served(
    tmp_path: Path, segment: int
) -> None:
    size = 1 << 20
    config = StoreConfig(segment_size_bytes=size)
    clock = LaterClock()
    store = Store.open(tmp_path, config, clock=clock, background=False)
    for index in range(150):
        store.append([make_request([bytes([index]) * 10_000])])
    store.flush()
    assert store.read("topic", 0, 0, 1000, 16 << 20).status is ReadStatus.FOUND
    offset = 5 if segment == 0 else 148
    region = store.read("topic", 0, offset, 1, 1).regions[0]
    assert region.file.base_position == segment * size
    # By its clock the file was written to long after the last append.
    with open(region.file.path, "r+b") as file:
        file.seek(region.offset + 500)
        file.write(b"not what was sent")
    later_ns = os.stat(region.file.path).st_mtime_ns + 60_000_000_000
    os.utime(region.file.path, ns=(later_ns, later_ns))
    clock.later_ms = 1000
    with pytest.raises(CorruptLogError) as caught:
        store.read("topic", 0, offset, 1, 1)
    assert caught.value.next_offset == offset + 1
    assert store.read("topic", 0, offset - 1, 1, 1).status is ReadStatus.FOUND
    store.close()
