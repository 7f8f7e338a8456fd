import errno
import os
import random

import pytest

from protomq_runtime.regions import (
    GAP_SIZE_MAX_BYTES,
    SPAN_SIZE_MAX_BYTES,
    Region,
    SharedBytes,
    ShortFileError,
    read_regions,
)

SIZE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def data():
    return random.Random(3).randbytes(SIZE_BYTES)


@pytest.fixture(scope="module")
def files(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("regions") / "file"
    path.write_bytes(data)
    with path.open("rb") as one, path.open("rb") as two:
        yield one, two


@pytest.fixture
def reads(monkeypatch):
    """(offset, size) of every pread."""
    import os

    noted: list[tuple[int, int]] = []
    real = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        noted.append((offset, size))
        return real(descriptor, size, offset)

    monkeypatch.setattr("protomq_runtime.regions.os.pread", pread)
    return noted


def test_neighbours_are_read_at_once(files, data, reads):
    regions = [Region(files[0], 10, 5), Region(files[0], 15, 5), Region(files[0], 100, 7)]
    assert b"".join(read_regions(regions)) == data[10:20] + data[100:107]
    assert reads == [(10, 97)]


def test_what_lies_apart_is_read_apart(files, data, reads):
    far = 10 + GAP_SIZE_MAX_BYTES + 1
    regions = [
        Region(files[0], 0, 10),
        Region(files[0], far, 10),
        Region(files[1], far + 10, 10),
        Region(files[1], 0, 10),
    ]
    assert b"".join(read_regions(regions)) == data[:10] + data[far : far + 20] + data[:10]
    assert len(reads) == 4


def test_a_span_has_a_limit(files, data, reads):
    regions = [Region(files[0], index * 10_000, 5_000) for index in range(100)]
    assert b"".join(read_regions(regions)) == b"".join(
        data[r.offset : r.offset + r.size_bytes] for r in regions
    )
    assert max(size for _, size in reads) <= SPAN_SIZE_MAX_BYTES
    assert len(reads) < 6


def test_any_regions_are_read_as_a_simple_reader_would(files, data):
    rng = random.Random(4)
    for _ in range(100):
        regions = []
        for _ in range(rng.randrange(8)):
            offset = rng.randrange(SIZE_BYTES)
            size = rng.randrange(min(SIZE_BYTES - offset, rng.choice([1, 50, 300_000])) + 1)
            regions.append(Region(rng.choice(files), offset, size))
        assert b"".join(read_regions(regions)) == b"".join(
            data[r.offset : r.offset + r.size_bytes] for r in regions
        )


def test_a_file_that_is_too_short_is_an_error(files):
    with pytest.raises(ShortFileError, match="the file ends after 4 of them"):
        read_regions([Region(files[0], SIZE_BYTES - 4, 5)])


def test_another_named_tuple_will_do(files, data):
    from collections import namedtuple

    other = namedtuple("other", ["file", "offset", "size_bytes"])
    assert b"".join(read_regions([other(files[0], 3, 4)])) == data[3:7]  # type: ignore[list-item]


def test_bytes_that_are_shared_are_one_region_as_long_as_somebody_uses_it() -> None:
    region = SharedBytes("shared", bytes(range(256)) * 1_000).region
    assert b"".join(read_regions([region])) == bytes(range(256)) * 1_000
    descriptor = region.file.fileno()
    assert os.fstat(descriptor).st_size == region.size_bytes == 256_000
    del region
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(("number", "is_noted"), [(errno.EIO, True), (errno.EBADF, False)])
def test_a_segment_is_told_what_the_disk_cannot_read(files, monkeypatch, number: int, is_noted: bool) -> None:
    class Segment:
        failed_count = 0

        def fileno(self) -> int:
            return files[0].fileno()

        def note_failed_read(self) -> None:
            self.failed_count += 1

    def fail(*_: int) -> bytes:
        raise OSError(number, os.strerror(number))

    segment = Segment()
    monkeypatch.setattr("protomq_runtime.regions.os.pread", fail)
    for file in (segment, files[0]):
        with pytest.raises(OSError, match=os.strerror(number)):
            read_regions([Region(file, 0, 10)])
    assert segment.failed_count == int(is_noted)
