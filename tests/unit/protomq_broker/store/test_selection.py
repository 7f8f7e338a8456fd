from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.queues.selection import (
    ENTRY,
    Selection,
    _select_few,
    _select_many,
    likely_count,
    select,
)

SEGMENT = 4096


def make_entries(rows: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, ENTRY)


def as_plain(selection: Selection) -> tuple:
    offsets = selection.queue_offsets
    return (
        selection.record_count,
        selection.first_offset,
        selection.next_offset,
        selection.starts.tolist(),
        selection.sizes.tolist(),
        None if offsets is None else offsets.tolist(),
        selection.regions,
        selection.size_bytes,
    )


def select_naively(rows, queue_offset, count_max, size_max, tag_codes, end_position):
    """One record at a time, from the definition."""
    chosen: list[tuple[int, int, int]] = []  # offset, position, size
    next_offset = queue_offset

    def regions_of(records):
        regions: list[list[int]] = []
        for _, position, size in records:
            last_end = regions[-1][1] if regions else -1
            same_segment = regions and regions[-1][0] // SEGMENT == position // SEGMENT
            if same_segment and position - last_end in (0, SEAL_SIZE_BYTES):
                regions[-1][1] = position + size
            else:
                regions.append([position, position + size])
        return [(start, end - start) for start, end in regions]

    for offset, (position, size, tag) in enumerate(rows, queue_offset):
        if end_position is not None and position + size > end_position:
            break
        if size and (not tag_codes or tag in tag_codes):
            wanted = [*chosen, (offset, position, size)]
            if chosen and (
                len(wanted) > count_max or sum(s for _, s in regions_of(wanted)) > size_max
            ):
                break
            chosen = wanted
        next_offset = offset + 1
    regions = regions_of(chosen)
    starts = []
    for _, position, _ in chosen:
        before = 0
        for start, size in regions:
            if start <= position < start + size:
                starts.append(before + position - start)
                break
            before += size
    offsets = [offset for offset, _, _ in chosen]
    dense = not offsets or offsets == list(range(offsets[0], offsets[0] + len(offsets)))
    return (
        len(chosen),
        offsets[0] if offsets else next_offset,
        next_offset,
        starts,
        [size for _, _, size in chosen],
        None if dense else offsets,
        regions,
        sum(size for _, size in regions),
    )


@st.composite
def entry_rows(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    position = draw(st.integers(0, 2 * SEGMENT))
    rows = []
    for _ in range(draw(st.integers(0, 60))):
        position += draw(
            st.sampled_from([0, 0, 0, SEAL_SIZE_BYTES, SEAL_SIZE_BYTES, 1, 52, 54, 700])
        )
        size = draw(st.sampled_from([0, 100, 101, 250, 1500]))
        rows.append((position, size, draw(st.sampled_from([0, 5, -7, 9])) if size else -1))
        position += size
    return rows


@pytest.mark.slow
@given(
    entry_rows(),
    st.integers(0, 1 << 40),
    st.integers(1, 70),
    st.integers(1, 20_000),
    st.sets(st.sampled_from([5, -7, 9, 11]), max_size=3),
    st.none() | st.integers(0, 30_000),
)
def test_both_ways_choose_what_the_definition_says(
    rows, queue_offset, count_max, size_max, tags, end_position
):
    expected = select_naively(rows, queue_offset, count_max, size_max, tags, end_position)
    tag_codes = frozenset(tags)
    few = _select_few(rows, queue_offset, count_max, size_max, SEGMENT, tag_codes, end_position)
    assert as_plain(few) == expected
    if rows:
        many = _select_many(
            make_entries(rows), queue_offset, count_max, size_max, SEGMENT, tag_codes, end_position
        )
        assert as_plain(many) == expected
    either = select(
        make_entries(rows),
        queue_offset,
        record_count_max=count_max,
        size_max_bytes=size_max,
        segment_size_bytes=SEGMENT,
        tag_codes=tag_codes,
        end_position=end_position,
    )
    assert as_plain(either) == expected


def test_as_many_entries_are_read_as_are_likely_to_fit_and_some_more():
    assert likely_count(32_768, 4 << 20, 0) == 32_768
    assert 4_096 < likely_count(32_768, 4 << 20, 1 << 10) < 5_000
    assert likely_count(100, 4 << 20, 1 << 10) == 100
    assert likely_count(32_768, 1, 1 << 20) > 1


@pytest.mark.parametrize(
    "choose", [_select_few, lambda rows, *a: _select_many(make_entries(rows), *a)]
)
def test_a_region_goes_on_over_a_seal_and_nothing_else(choose):
    rows = [(0, 100, 0), (100, 100, 0), (253, 100, 0), (407, 100, 0)]
    selection = choose(rows, 7, 10, 1 << 20, SEGMENT, frozenset(), None)
    assert selection.regions == [(0, 353), (407, 100)]
    assert selection.starts.tolist() == [0, 100, 253, 353]
    assert selection.starts.dtype == selection.sizes.dtype == np.uint32
    assert (selection.first_offset, selection.next_offset, selection.queue_offsets) == (7, 11, None)


@pytest.mark.parametrize(
    "choose", [_select_few, lambda rows, *a: _select_many(make_entries(rows), *a)]
)
def test_a_region_never_crosses_segments(choose):
    rows = [(SEGMENT - 253, 200, 0), (SEGMENT, 200, 0), (SEGMENT + 200, 100, 0)]
    assert choose(rows, 0, 10, 1 << 20, SEGMENT, frozenset(), None).regions == [
        (SEGMENT - 253, 200),
        (SEGMENT, 300),
    ]


def test_one_record_is_chosen_however_large_it_is():
    selection = select(
        make_entries([(0, 4 << 20, 0), (4 << 20, 100, 0)]),
        3,
        record_count_max=10,
        size_max_bytes=1,
        segment_size_bytes=1 << 30,
    )
    assert (selection.record_count, selection.next_offset, selection.size_bytes) == (1, 4, 4 << 20)


def test_entries_that_do_not_match_are_not_looked_at_twice():
    rows = [(i * 100, 100, 5 if i in (2, 50) else 6) for i in range(100)]
    selection = select(
        make_entries(rows),
        1000,
        record_count_max=1,
        size_max_bytes=1 << 20,
        segment_size_bytes=1 << 30,
        tag_codes=frozenset({5}),
    )
    assert (selection.first_offset, selection.next_offset) == (1002, 1050)
    rest = select(
        make_entries(rows[51:]),
        1051,
        record_count_max=1,
        size_max_bytes=1 << 20,
        segment_size_bytes=1 << 30,
        tag_codes=frozenset({5}),
    )
    assert (rest.record_count, rest.next_offset, rest.regions) == (0, 1100, [])


def test_what_is_not_readable_yet_is_not_passed_over():
    rows = [(0, 100, 5), (100, 100, 6), (200, 100, 6)]
    for filler in (0, 60):
        entries = make_entries(rows + [(300 + 100 * i, 100, 6) for i in range(filler)])
        selection = select(
            entries,
            0,
            record_count_max=10,
            size_max_bytes=1 << 20,
            segment_size_bytes=1 << 30,
            tag_codes=frozenset({9}),
            end_position=299,
        )
        assert (selection.record_count, selection.next_offset) == (0, 2)


def test_nothing_comes_of_no_entries():
    selection = select(
        np.empty(0, ENTRY), 12, record_count_max=1, size_max_bytes=1, segment_size_bytes=1 << 30
    )
    assert as_plain(selection) == (0, 12, 12, [], [], None, [], 0)
