"""How plain TCP moves regions of files: by sendfile, and recent ones from a mapping."""

from __future__ import annotations

import errno
import mmap
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from protomq_runtime import regions as regions_module
from protomq_runtime.byte_stream import TcpStream
from protomq_runtime.regions import RecentRegion, Region, ShortFileError

WINDOW_BYTES = 4 * mmap.PAGESIZE
DATA = random.Random(5).randbytes(3 * WINDOW_BYTES + 100)


class Pair:
    """A stream, and what its peer receives."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        ours.setblocking(False)
        self.stream = TcpStream(ours)

    def send_all(self, region: Region | RecentRegion) -> tuple[bytes, list[int]]:
        """Sends a region as a connection does: (what arrived, how much was taken each time)."""
        arrived, taken = b"", []
        while region.size_bytes:
            sent = self.stream.send_region(region)
            taken.append(sent)
            arrived += self._theirs.recv(sent, socket.MSG_WAITALL)
            region = region._replace(offset=region.offset + sent, size_bytes=region.size_bytes - sent)
        return arrived, taken

    def close(self) -> None:
        self.stream.close()
        self._theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


@pytest.fixture
def sendfiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what was left to sendfile."""
    noted: list[int] = []
    real = os.sendfile

    def sendfile(out: int, file: int, offset: int, count: int) -> int:
        noted.append(count)
        return real(out, file, offset, count)

    monkeypatch.setattr("protomq_runtime.byte_stream.os.sendfile", sendfile)
    monkeypatch.setattr(regions_module, "WINDOW_SIZE_BYTES", WINDOW_BYTES)
    return noted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "segment"
    made.write_bytes(DATA)
    return made


def mapped_bytes(path: Path) -> int:
    """How much of a file this process has mapped."""
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def test_recent_regions_are_sent_from_a_mapping_of_a_window(pair: Pair, path: Path, sendfiles: list[int]) -> None:
    with path.open("r+b") as file:
        at = 0
        for size_bytes in (100, 1, WINDOW_BYTES - 50, 2 * WINDOW_BYTES + 49):
            arrived, taken = pair.send_all(RecentRegion(file, at, size_bytes))
            assert arrived == DATA[at : at + size_bytes]
            assert max(taken) <= WINDOW_BYTES
            assert 0 < mapped_bytes(path) <= WINDOW_BYTES
            at += size_bytes
        assert at == len(DATA)
        # What is written later is seen, and so is what lies before the window.
        os.pwrite(file.fileno(), b"new", at - 3)
        assert pair.send_all(RecentRegion(file, at - 4, 4))[0] == DATA[-4:-3] + b"new"
        assert pair.send_all(RecentRegion(file, 7, 5))[0] == DATA[7:12]
    assert not sendfiles


def test_another_file_and_sendfile_end_the_mapping(pair: Pair, path: Path, sendfiles: list[int], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(DATA[::-1])
    with path.open("rb") as one, other.open("rb") as two:
        assert pair.send_all(RecentRegion(one, 0, 500))[0] == DATA[:500]
        assert pair.send_all(RecentRegion(two, 0, 500))[0] == DATA[::-1][:500]
        assert (mapped_bytes(path), mapped_bytes(other)) == (0, WINDOW_BYTES)
        assert not sendfiles
        assert pair.send_all(Region(one, 3, 5))[0] == DATA[3:8]
        assert sendfiles == [5]
        assert mapped_bytes(other) == 0
        pair.send_all(RecentRegion(two, 0, 500))
        pair.stream.close()
        assert mapped_bytes(other) == 0


def test_a_file_that_ends_before_a_recent_region_is_an_error(pair: Pair, path: Path, sendfiles: list[int]) -> None:
    with path.open("rb") as file:
        with pytest.raises(ShortFileError):
            pair.send_all(RecentRegion(file, len(DATA) - 2, 3))
        with pytest.raises(ShortFileError):
            pair.send_all(RecentRegion(file, len(DATA) + WINDOW_BYTES, 3))
        # A file that was cut while it is mapped is no signal, either.
        pair.send_all(RecentRegion(file, 0, 10))
        os.truncate(path, 0)
        with pytest.raises(OSError, match="Bad address"):
            pair.send_all(RecentRegion(file, 20, 10))


class Segment:
    """A file that notes failed reads."""

    def __init__(self, file: BinaryIO) -> None:
        self.fileno = file.fileno
        self.failed_count = 0

    def note_failed_read(self) -> None:
        self.failed_count += 1


@pytest.mark.parametrize(("number", "is_noted"), [(errno.EIO, True), (errno.EPIPE, False)])
def test_a_segment_is_told_what_the_disk_cannot_read(
    pair: Pair, path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_noted: bool
) -> None:
    def fail(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("protomq_runtime.byte_stream.os.sendfile", fail)
    with path.open("rb") as file:
        segment = Segment(file)
        for each in (segment, file):  # a file object is not told
            with pytest.raises(OSError, match=os.strerror(number)):
                pair.stream.send_region(Region(each, 0, 10))
    assert segment.failed_count == int(is_noted)


def test_a_segment_is_told_that_a_page_of_its_mapping_is_lost(pair: Pair, path: Path) -> None:
    with path.open("rb") as file:
        segment = Segment(file)
        region = RecentRegion(segment, 0, mmap.PAGESIZE)
        pair.send_all(region)
        os.truncate(path, 0)  # as with a lost page, the kernel cannot read the mapping
        with pytest.raises(OSError, match="Bad address"):
            pair.stream.send_region(region)
    assert segment.failed_count == 1
