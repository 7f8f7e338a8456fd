"""A read through a filter: against a plain look at all messages, whatever the slices, the limits and the shape of the log."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker import filtered_read
from protomq_broker.filtered_read import (
    PIECE_S,
    PIECE_WORST_S,
    TAKEN_COUNT,
    FilteredRead,
    PieceSize,
)
from protomq_broker.filters.filter_book import Matches
from protomq_broker.store.queues.reading import LogRegion, ReadResult, ReadStatus

SEAL_SIZE_BYTES = 53


class Queue:
    """Messages of one octet or more in files of a log; those whose last octet is 'y' match. A look gives `run_count` of them."""

    def __init__(self, contents, gaps, run_count=3, min_offset=0):
        self.contents, self.run_count, self.min_offset = contents, run_count, min_offset
        self.files: list = []
        self.places: list = []
        self.fails_at = None
        for content, gap in zip(contents, itertools.cycle(gaps)):
            if gap < 0 or not self.files:
                self.files.append(SimpleNamespace(data=bytearray()))
            file = self.files[-1]
            file.data += b"#" * max(gap, 0)
            self.places.append((file, len(file.data)))
            file.data += content

    def look(self, queue_offset, count_max, size_max_bytes):
        end = len(self.contents)
        if queue_offset == self.fails_at:
            raise KeyError("gone")
        if not self.min_offset <= queue_offset <= end:
            return ReadResult(ReadStatus.OFFSET_ILLEGAL, self.min_offset, self.min_offset, end)
        if queue_offset == end:
            return ReadResult(ReadStatus.NO_NEW_MSG, end, self.min_offset, end)
        stop = min(queue_offset + self.run_count, end)
        sizes = np.array([len(self.contents[i]) for i in range(queue_offset, stop)], np.uint32)
        regions = [
            LogRegion(self.places[i][0], self.places[i][1], len(self.contents[i]))
            for i in range(queue_offset, stop)
        ]
        return ReadResult(
            ReadStatus.FOUND, stop, self.min_offset, end, queue_offset,
            np.cumsum(sizes, dtype=np.uint32) - sizes, sizes, None, regions, int(sizes.sum()),
        )  # fmt: skip

    @staticmethod
    def read_bytes(regions):
        return b"".join(bytes(r.file.data[r.offset : r.offset + r.size_bytes]) for r in regions)


class EndsInY:
    tags: frozenset[bytes] = frozenset()
    records_min = 4
    records_max = 8
    examined_max = 3

    def matching(self, data, starts, sizes):
        some = list(zip(starts, sizes, strict=True))[: self.examined_max]
        found = [i for i, (start, size) in enumerate(some) if data[start + size - 1 : start + size] == b"y"]
        return Matches(found, len(some))


def read_all(queue, offset=0, count_max=1_000, size_max_bytes=1 << 20, slice_s=1.0):
    clock = itertools.count()
    read = FilteredRead(
        queue.look, queue.read_bytes, EndsInY(), offset, count_max, size_max_bytes, lambda: next(clock) / 100,
        lambda: next(clock) / 10_000,
    )
    while (result := read.advance(slice_s)) is None:
        pass
    return result


@given(
    st.lists(st.sampled_from((b"y", b"n", b"aay", b"bbbn", b"y" * 9)), max_size=30),
    st.lists(st.sampled_from((0, 0, SEAL_SIZE_BYTES, 7, -1)), min_size=1),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 80),
    st.sampled_from((0.0, 0.01, 10.0)),
)
def test_pull_after_pull_gives_every_match_once_and_in_order(
    contents, gaps, run_count, count_max, size_max_bytes, slice_s
):
    queue, offset = Queue(contents, gaps, run_count), 0
    found: list[int] = []
    while True:
        result = read_all(queue, offset, count_max, size_max_bytes, slice_s)
        data = queue.read_bytes(result.regions)
        assert len(data) == result.regions_size_bytes
        offsets = (
            list(range(result.first_offset, result.first_offset + result.record_count))
            if result.queue_offsets is None
            else result.queue_offsets.tolist()
        )
        for at, size, queue_offset in zip(result.starts, result.sizes, offsets, strict=True):
            assert data[at : at + size] == contents[queue_offset]
        assert len(offsets) <= count_max
        assert result.regions_size_bytes <= size_max_bytes or len(offsets) == 1
        found += offsets
        if result.status is not ReadStatus.FOUND:
            break
        assert result.next_offset > offset
        offset = result.next_offset
    assert result.next_offset == len(contents)
    assert found == [i for i, content in enumerate(contents) if content.endswith(b"y")]


def test_neighbours_become_one_region_and_others_do_not():
    queue = Queue([b"ay", b"by", b"cy", b"dn", b"ey"], [0, 0, SEAL_SIZE_BYTES, 0, 0])
    result = read_all(queue)
    assert [region.size_bytes for region in result.regions] == [6 + SEAL_SIZE_BYTES, 2]
    assert result.starts.tolist() == [0, 2, 4 + SEAL_SIZE_BYTES, 6 + SEAL_SIZE_BYTES]
    assert result.queue_offsets is not None


def test_statuses():
    assert read_all(Queue([], [0])).status is ReadStatus.NO_NEW_MSG
    nothing = read_all(Queue([b"n"] * 5, [0]))
    assert (nothing.status, nothing.next_offset, nothing.end_offset) == (ReadStatus.NO_MATCHED_MSG, 5, 5)
    assert read_all(Queue([b"y"], [0], min_offset=1), 0).status is ReadStatus.OFFSET_ILLEGAL


def test_one_pull_does_not_look_at_everything(monkeypatch):
    monkeypatch.setattr(filtered_read, "SCAN_COUNT_MAX", 6)
    result = read_all(Queue([b"n"] * 20, [0]))
    assert (result.status, result.next_offset, result.end_offset) == (ReadStatus.NO_MATCHED_MSG, 6, 20)


def test_a_pull_that_takes_long_says_how_far_it_got():
    """So the next one goes on from there, however slow filter and machine are."""
    queue = Queue([b"n"] * 8 + [b"y"] * 12, [0])
    result = read_all(queue, slice_s=0.5)  # The clock goes 0.01 s at each look at it.
    assert (result.status, result.next_offset) == (ReadStatus.FOUND, 20)
    slow = itertools.count()
    read = FilteredRead(
        queue.look, queue.read_bytes, EndsInY(), 0, 1_000, 1 << 20, lambda: next(slow) / 2, lambda: 0.0
    )
    while (result := read.advance(0.0)) is None:
        pass
    assert (result.status, result.next_offset, result.end_offset) == (ReadStatus.NO_MATCHED_MSG, 3, 20)


def test_pieces_grow_while_they_take_little_and_shrink_when_they_take_too_long():
    piece = PieceSize(256, 1_024)
    counts = [piece.count]
    for _ in range(3):
        piece.note(PIECE_S / 10)
        counts.append(piece.count)
    piece.note(PIECE_S * 1.1)
    assert [*counts, piece.count] == [256, 512, 1_024, 1_024, 512]


def test_the_first_piece_has_the_fewest_records_that_pay():
    """512 comparisons take a quarter of a millisecond for each record."""
    assert PieceSize(4, 2_048).count == 4
    assert PieceSize(512, 16).count == 16


def sizes_of(fixed: float, each: float, pieces: int, records_min: int = 4) -> list[int]:
    """Sizes of the pieces of a filter whose costs are these parts of PIECE_S: for a piece, and for a record."""
    piece, asked = PieceSize(records_min, 1_024), []
    for _ in range(pieces):
        asked.append(piece.count)
        piece.note(PIECE_S * (fixed + each * piece.count))
    return asked


def test_pieces_do_not_shrink_where_that_saves_nothing():
    """A busy machine, on which each piece takes long, however small it is."""
    piece = PieceSize(4, 1_024)
    while piece.count < 256:
        piece.note(0.0)
    asked = []
    for _ in range(50):
        asked.append(piece.count)
        piece.note(PIECE_S * (1.1 + 0.001 * piece.count))
    assert asked == [256, 128, *[256] * 48]


def test_pieces_shrink_where_each_record_costs_much():
    assert sizes_of(0.0, 1 / 40, 6, records_min=32) == [32] * 6
    assert sizes_of(0.0, 1 / 40, 6) == [4, 8, 16, 32, 32, 32]


@pytest.mark.parametrize("records_min", [4, 512])
def test_no_piece_stays_that_takes_far_too_long(records_min):
    piece = PieceSize(records_min, 1_024)
    for _ in range(20):
        piece.note(PIECE_WORST_S * 1.1)
    assert piece.count == 1


def test_no_piece_is_smaller_than_what_pays_as_long_as_it_takes_less_than_that():
    piece = PieceSize(512, 1_024)
    for _ in range(20):
        piece.note(PIECE_S * 1.1)
    assert piece.count == 512


def test_a_piece_below_what_pays_does_not_jump_back():
    piece = PieceSize(512, 1_024)
    while piece.count > 64:
        piece.note(PIECE_WORST_S * 1.1)
    piece.note(PIECE_S * 0.6)
    assert piece.count == 64
    piece.note(PIECE_S / 10)
    assert piece.count == 128


def test_the_next_piece_has_as_many_records_as_the_filter_had_time_for():
    piece = PieceSize(512, 1_024)
    piece.stopped_at(3)
    assert piece.count == 3
    piece.note(PIECE_S / 10)
    assert piece.count == 6


class AllMatch:
    tags: frozenset[bytes] = frozenset()
    records_min = records_max = 1_000

    def matching(self, data, starts, sizes):
        return Matches(list(range(len(starts))), len(starts))


def test_many_matches_are_put_into_the_answer_in_portions():
    """2,048 of them take 3 ms."""
    queue = Queue([b"y"] * 1_000, [0], run_count=1_000)
    read = FilteredRead(
        queue.look, queue.read_bytes, AllMatch(), 0, 10_000, 1 << 20, lambda: 0.0, lambda: 0.0
    )
    counts = []
    while (result := read.advance(-1.0)) is None:
        counts.append(read.so_far().record_count)
    assert counts == [0, TAKEN_COUNT, 2 * TAKEN_COUNT, 3 * TAKEN_COUNT]
    assert (result.record_count, result.next_offset) == (1_000, 1_000)


def test_a_read_that_is_stopped_within_a_run_gives_nothing_twice():
    queue = Queue([b"y", b"n"] * 500, [0], run_count=1_000)
    for filter_ in (EndsInY(), AllMatch()):
        read = FilteredRead(
            queue.look, queue.read_bytes, filter_, 0, 10_000, 1 << 20, lambda: 0.0, lambda: 0.0
        )
        for _ in range(3):
            assert read.advance(-1.0) is None
        result = read.so_far()
        assert result.record_count
        found = range(result.first_offset, result.first_offset + result.record_count)
        last = found[-1] if result.queue_offsets is None else result.queue_offsets[-1]
        assert last < result.next_offset <= 1_000


def test_what_was_found_before_an_error_is_answered_and_the_error_comes_next():
    queue = Queue([b"y"] * 9, [0])
    queue.fails_at = 6
    result = read_all(queue)
    assert (result.record_count, result.next_offset) == (6, 6)
    with pytest.raises(KeyError):
        read_all(queue, 6)


def test_what_was_found_before_the_filter_fails_is_answered_and_its_error_comes_next():
    class FailsOfX(EndsInY):
        def matching(self, data, starts, sizes):
            if b"x" in [data[start : start + size] for start, size in zip(starts, sizes, strict=True)][: self.examined_max]:
                raise KeyError("x")
            return super().matching(data, starts, sizes)

    queue = Queue([b"y"] * 6 + [b"x", b"y"], [0])

    def read(offset):
        read = FilteredRead(queue.look, queue.read_bytes, FailsOfX(), offset, 99, 1 << 20, lambda: 0.0, lambda: 0.0)
        return read.advance(1.0)

    result = read(0)
    assert (result.record_count, result.next_offset) == (6, 6)
    with pytest.raises(KeyError):
        read(6)


def test_a_read_that_begins_again_forgets_what_it_found():
    queue = Queue([b"y"] * 4, [0])
    read = FilteredRead(queue.look, queue.read_bytes, EndsInY(), 0, 9, 99, lambda: 0.0, lambda: 0.0)
    assert read.advance(-1.0) is None
    read.advance(-1.0)
    read.restart()
    result = read.advance(1.0)
    assert result is not None
    assert result.record_count == 4
