"""What is known of a segment, against a naive model: for each position whether it holds."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.log.checked_segment import CheckedSegment, Stretch

BASE, SIZE = 1_000, 64
PIECE = 16


def stretch(start: int, end: int) -> Stretch:
    return Stretch(start, start, end, end)  # The CRC at a position is the position here.


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("walk"), st.integers(0, SIZE - 1), st.integers(1, 24)),
            st.tuples(st.just("boundary"), st.integers(1, SIZE - 1), st.just(0)),
            st.tuples(st.just("doubt"), st.integers(0, SIZE - 1), st.integers(1, 24)),
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
        else:
            gone = range(BASE + at, min(BASE + at + size, BASE + SIZE))
            ends = [*segment.pieces.positions[1:], BASE + SIZE]
            for first, end in zip(segment.pieces.positions, ends, strict=True):
                if any(first <= position < end for position in gone):
                    holds.difference_update(range(first - BASE, end - BASE))
            segment.doubt(gone.start, gone.stop)
        pieces = segment.pieces
        parts = pieces.good_parts(BASE + 5, BASE + SIZE - 5)
        assert {p for start, end in parts for p in range(start - BASE, end - BASE)} == {
            p for p in holds if 5 <= p < SIZE - 5
        }
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


def test_who_has_walked_in_front_of_a_doubt_has_shown_nothing_behind_it() -> None:
    segment = CheckedSegment(0, 1_024, 0)
    before = segment.doubt_count
    segment.doubt(0, 1_024)
    segment.note(stretch(0, 512), 512, before)
    assert segment.pieces.first_unknown(0, 1) == 0
    assert segment.pieces.positions == [0, 512], "the boundary is noted all the same"
    segment.note(stretch(0, 512), 512, segment.doubt_count)
    assert segment.pieces.first_unknown(0, 512) is None
