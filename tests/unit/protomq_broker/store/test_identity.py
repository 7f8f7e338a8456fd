"""A store has one number for as long as it lives."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from protomq_broker.store.files.disk import READ_RETRIES, Disk
from protomq_broker.store.files.identity import store_id


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "config").mkdir()
    return str(tmp_path)


def test_the_number_is_drawn_once(root: str) -> None:
    numbers = itertools.count(7)
    drawn = [store_id(Disk(), root, lambda: next(numbers)) for _ in range(3)]
    assert drawn == [7, 7, 7]


def test_the_largest_number_reads_back(root: str) -> None:
    largest = (1 << 63) - 1
    assert store_id(Disk(), root, lambda: largest) == largest
    assert store_id(Disk(), root, lambda: 1) == largest


@pytest.mark.parametrize("bit", range(20 * 8))
def test_a_damaged_number_is_never_used(
    root: str, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    store_id(Disk(), root, lambda: 7)
    path = Path(root) / "config/storeId"
    content = bytearray(path.read_bytes())
    assert len(content) == 20
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert store_id(Disk(), root, lambda: 8) == 8
    assert "is damaged: the store gets a new number" in caplog.text
    assert store_id(Disk(), root, lambda: 9) == 8


class UnreadableForAMoment(Disk):
    """The first reads fail, as those that the disk repeats may: one more than are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 1 + READ_RETRIES

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, size_bytes, position)


def test_a_number_that_cannot_be_read_for_a_moment_is_not_replaced(root: str) -> None:
    store_id(Disk(), root, lambda: 7)
    with pytest.raises(OSError, match="storeId"):
        store_id(UnreadableForAMoment(), root, lambda: 8)
    assert store_id(Disk(), root, lambda: 9) == 7
