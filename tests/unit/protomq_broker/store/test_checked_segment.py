"""What is known of a segment, against a naive model: for each position whether it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.checked_segment import CheckedSegment, Stretch

BASE, SIZE = 1_000, 64
PIECE = 16


def stretch(start: int, end: int) -> Stretch:
    return Stretch(start, start, end, end)  # The CRC at a position is the position here.


def cached_but_for(gone: range) -> Callable[[int, int], bool]:
    return lambda start, end: end <= gone.start or gone.stop <= start


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("walk"), st.integers(0, SIZE - 1), st.integers(1, 24)),
            st.tuples(st.just("boundary"), st.integers(1, SIZE - 1), st.just(0)),
            st.tuples(st.just("distrust"), st.just(0), st.just(0)),
            st.tuples(st.just("evict"), st.integers(0, SIZE - 1), st.integers(1, 24)),
        ),
        max_size=40,
    )
)
def test_what_holds_is_what_was_walked_since_the_last_doubt(
    steps: list[tuple[str, int, int]],
) -> None:
    segment = CheckedSegment(BASE, BASE + SIZE, 0)
    holds: set[int] = set()
    for what, at, size in steps:
        if what == "walk":
            end = min(at + size, SIZE)
            segment.note(stretch(BASE + at, BASE + end), PIECE)
            holds.update(range(at, end))
        elif what == "boundary":
            segment.add(BASE + at, BASE + at)
        elif what == "evict":
            gone = range(BASE + at, min(BASE + at + size, BASE + SIZE))
            ends = [*segment.pieces.positions[1:], BASE + SIZE]
            for first, end in zip(segment.pieces.positions, ends, strict=True):
                if any(first <= position < end for position in gone):
                    holds.difference_update(range(first - BASE, end - BASE))
            segment.distrust(segment.pieces.lost(BASE, BASE + SIZE, cached_but_for(gone)))
        else:
            segment.distrust()
            holds.clear()
        pieces = segment.pieces
        assert pieces.positions[0] == BASE
        assert pieces.positions == sorted(set(pieces.positions))
        assert all(crc in (None, at) for at, crc in zip(pieces.positions, pieces.crcs, strict=True))
        for position in range(SIZE):
            known = pieces.first_unknown(BASE + position, BASE + position + 1) is None
            assert known == (position in holds)


def test_a_walk_in_small_steps_leaves_no_more_boundaries_than_one_in_large_steps() -> None:
    segment = CheckedSegment(BASE, BASE + 1_024, 0)
    for at in range(BASE, BASE + 1_024, 4):
        segment.note(stretch(at, at + 4), PIECE)
    positions = segment.pieces.positions
    assert len(positions) <= 2 * 1_024 // PIECE
    assert all(b - a <= PIECE for a, b in itertools.pairwise(positions))


def test_few_questions_find_the_pieces_that_have_left_the_cache() -> None:
    segment = CheckedSegment(0, 1 << 20, 0)
    for at in range(0, 1 << 20, 1 << 10):
        segment.note(stretch(at, at + (1 << 10)), 1 << 10)
    asked: list[tuple[int, int]] = []

    def is_cached(first: int, end: int) -> bool:
        asked.append((first, end))
        return not (first < 5_000 < end or first < 900_000 < end)

    assert segment.pieces.lost(0, 1 << 20, is_cached) == [4_096, 899_072]
    assert len(asked) < 50
    asked.clear()
    assert segment.pieces.lost(4_500, 4_900, is_cached) == []
    assert asked == [(4_500, 4_900)], "no more than the part that is read"
    segment.distrust([4_096, 899_072])
    assert [
        p for p in (0, 4_096, 5_120, 899_072) if segment.pieces.first_unknown(p, p + 1) is None
    ] == [0, 5_120]
