"""What is missing in a consume queue file, where it is looked for, and what comes of it: against what stood there before."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq_broker.store.queues.consume_queue import LOST_TAG_CODE, first_disorder
from protomq_broker.store.queues.entry_check import salt_of, sealed, which_hold
from protomq_broker.store.queues.healed_entries import Bounds, HealedEntries, Span, merged
from protomq_broker.store.queues.selection import ENTRY, ENTRY_SIZE_BYTES

SALT = salt_of("topic", 3)
FIRST = 17
BEFORE = 1_000


def entries_of(count: int, seed: int = 0):
    """Entries as a queue has them, other records between them."""
    rng = random.Random(seed)
    rows, position = [], BEFORE
    for _ in range(count):
        position += rng.choice((0, 53, 400))
        size = rng.randrange(60, 500)
        rows.append((position, size, rng.getrandbits(63) - (1 << 62)))
        position += size
    return np.array(rows, ENTRY), Bounds(BEFORE, position + rng.choice((0, 77)))


def file_of(entries) -> bytearray:
    return sealed(memoryview(entries.tobytes()), FIRST, SALT)


def healed_of(data: bytes | bytearray, count: int, bounds: Bounds) -> HealedEntries:
    return HealedEntries(bytes(data), count, FIRST, SALT, bounds)


def replay(healed: HealedEntries, entries, spans: list[Span]) -> None:
    """Hands in what stands in those parts of the log, as the healer does."""
    for span in spans:
        inside = (entries["position"] >= span.start) & (entries["position"] < span.end)
        rows = np.flatnonzero(inside)
        columns = [
            entries[name][rows].astype(np.int64) for name in ("position", "size", "tag_code")
        ]
        healed.take(rows + FIRST, *columns)


def test_a_file_that_holds_has_nothing_missing():
    entries, bounds = entries_of(40)
    healed = healed_of(file_of(entries), 40, bounds)
    assert healed.is_complete
    assert healed.spans() == []
    assert (healed.entries == entries).all()


@given(
    count=st.integers(1, 60),
    seed=st.integers(0, 1 << 20),
    flips=st.lists(st.integers(0, 1 << 30), max_size=12),
    kept=st.integers(0, 60),
    zeros=st.tuples(st.integers(0, 1200), st.integers(0, 200)),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_damaged_comes_back_from_between_the_neighbours(
    count, seed, flips, kept, zeros
):
    entries, bounds = entries_of(count, seed)
    whole = file_of(entries)
    data = bytearray(whole)
    for flip in flips:
        data[flip // 8 % len(data)] ^= 1 << flip % 8
    at, size = zeros[0] % len(data), zeros[1]
    data[at : at + size] = bytes(len(data[at : at + size]))
    del data[max(0, len(data) - kept) :]
    healed = healed_of(data, count, bounds)
    replay(healed, entries, healed.spans())
    # One in 65,536 wild entries passes its check.
    if not healed.is_complete or not healed.is_in_order:
        healed.widen()
        replay(healed, entries, healed.spans())
    assert healed.is_complete
    assert healed.is_in_order
    assert (healed.entries == entries).all()
    assert file_of(healed.entries) == whole


def test_a_neighbour_that_passes_and_is_wrong_is_found_out_by_a_wider_look():
    entries, bounds = entries_of(30)
    wrong = entries.copy()
    # Sealed again: its check bits hold.
    wrong["position"][11] += int(entries["size"][11] + entries["size"][12]) + 900
    data = file_of(wrong)
    data[12 * ENTRY_SIZE_BYTES] ^= 1
    healed = healed_of(data, 30, bounds)
    replay(healed, entries, healed.spans())
    assert not (healed.is_complete and healed.is_in_order) or (healed.entries == entries).all()
    healed.widen()
    assert healed.spans() == [Span(0, bounds.after)]
    replay(healed, entries, healed.spans())
    assert (healed.entries == entries).all()


@pytest.mark.parametrize("rows", [[0], [4, 5, 6], [9], [0, 9], list(range(10))])
def test_what_the_log_has_lost_is_entered_as_lost_and_in_order(rows):
    entries, bounds = entries_of(10)
    data = file_of(entries)
    for row in rows:
        data[row * ENTRY_SIZE_BYTES] ^= 4
    healed = healed_of(data, 10, bounds)
    there = np.delete(entries, rows)
    for row in set(range(10)) - set(rows):
        assert healed.known[row]
    assert all(
        not ((there["position"] >= s.start) & (there["position"] < s.end)).any()
        for s in healed.spans()
    )
    healed.fill_lost()
    assert healed.is_in_order
    assert first_disorder(healed.entries) is None
    assert [row for row in range(10) if not healed.entries["size"][row]] == rows
    assert set(healed.entries["tag_code"][rows].tolist()) == {LOST_TAG_CODE}
    good = np.setdiff1d(np.arange(10), rows)
    assert (healed.entries[good] == entries[good]).all()


def test_entries_beyond_the_log_or_of_another_place_are_not_believed():
    entries, bounds = entries_of(10)
    assert not healed_of(file_of(entries), 10, Bounds(BEFORE, bounds.after - 200)).known[-1]
    moved = bytearray(file_of(entries))
    moved[:20], moved[20:40] = moved[20:40], moved[:20]
    assert healed_of(moved, 10, bounds).known.tolist() == [False] * 2 + [True] * 8


def test_of_very_many_gaps_only_the_ends_are_told():
    entries, bounds = entries_of(400)
    data = file_of(entries)
    for row in range(1, 399, 2):
        data[row * ENTRY_SIZE_BYTES] ^= 1
    healed = healed_of(data, 400, bounds)
    (span,) = healed.spans()
    assert span.start <= int(entries["position"][1])
    assert span.end >= int(entries["position"][397] + entries["size"][397])
    replay(healed, entries, [span])
    assert (healed.entries == entries).all()


@given(data=st.binary(max_size=400), count=st.integers(0, 20))
def test_which_hold_agrees_with_entry_by_entry(data, count):
    entries, _ = entries_of(max(count, 1))
    content = (bytes(file_of(entries))[: count * ENTRY_SIZE_BYTES // 2] + data)[
        : count * ENTRY_SIZE_BYTES
    ]
    _, holds = which_hold(content, count, FIRST, SALT)
    for row in range(count):
        part = content[row * ENTRY_SIZE_BYTES : (row + 1) * ENTRY_SIZE_BYTES]
        expected = len(part) == ENTRY_SIZE_BYTES and bool(
            which_hold(part, 1, FIRST + row, SALT)[1][0]
        )
        assert bool(holds[row]) == expected


def test_parts_of_the_log_are_merged():
    spans = [Span(50, 60), Span(0, 10), Span(10, 20), Span(55, 58), Span(59, 70)]
    assert merged(spans) == [Span(0, 20), Span(50, 70)]
    assert merged([]) == []
