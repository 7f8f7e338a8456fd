"""The check bits of consume queue entries: what they find for certain is proved here, not sampled."""

from __future__ import annotations

import struct
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.log_walk import RECORD_FIELD_SIZE_MAX_BYTES
from protomq_broker.store.errors import StoreError
from protomq_broker.store.queues import entry_check
from protomq_broker.store.queues.entry_check import (
    OFFSET_STEP,
    WORD_FACTORS,
    check_of,
    opened,
    opened_together,
    salt_of,
    sealed,
    sealed_together,
)
from protomq_broker.store.queues.selection import ENTRY

Row = tuple[int, int, int]
positions = st.integers(0, (1 << 56) - 1)
sizes = st.integers(0, (1 << 24) - 1)
tag_codes = st.integers(-(1 << 63), (1 << 63) - 1)
offsets = st.integers(0, 1 << 48)
salts = st.integers(0, (1 << 32) - 1).map(lambda crc: crc << 32)
rows = st.tuples(positions, sizes, tag_codes)


def encode(entries: list[Row]) -> memoryview:
    return memoryview(b"".join(struct.pack("<QIq", *entry) for entry in entries))


@given(st.lists(rows, min_size=1, max_size=40), offsets, salts)
def test_what_is_sealed_is_opened(entries: list[Row], queue_offset: int, salt: int) -> None:
    data = bytes(sealed(encode(entries), queue_offset, salt))
    found, good = opened(data, len(entries), queue_offset, salt)
    assert found.dtype == ENTRY
    assert found.tolist() == entries
    assert good == len(entries)


@given(st.lists(st.tuples(st.lists(rows, max_size=20), offsets, salts), min_size=1, max_size=9))
def test_entries_of_many_queues_are_sealed_together_as_each_by_itself(
    queues: list[tuple[list[Row], int, int]],
) -> None:
    parts, queue_offsets, queue_salts = zip(*queues, strict=True)
    together = sealed_together([encode(part) for part in parts], queue_offsets, queue_salts)
    alone = [sealed(encode(part), at, salt) for part, at, salt in queues if part]
    assert together == b"".join(alone)


@given(
    st.lists(st.tuples(st.lists(rows, min_size=1, max_size=20), offsets, salts), min_size=1, max_size=9),
    st.none() | st.tuples(st.integers(0, 8), st.integers(0, 19), st.integers(0, 159)),
)
def test_entries_of_many_queues_are_opened_together_if_all_hold(
    queues: list[tuple[list[Row], int, int]], flip: tuple[int, int, int] | None
) -> None:
    parts, queue_offsets, queue_salts = zip(*queues, strict=True)
    data = [bytearray(sealed(encode(part), at, salt)) for part, at, salt in queues]
    if flip is not None:
        part, row, bit = flip
        octets = data[part % len(data)]
        octets[row * 20 % len(octets) + bit // 8] ^= 1 << bit % 8
    found = opened_together(b"".join(data), [len(part) for part in parts], queue_offsets, queue_salts)
    if flip is not None:
        assert found is None
        return
    assert found is not None
    assert found.dtype == ENTRY
    assert found.tolist() == [row for part in parts for row in part]


def test_more_entries_are_opened_together_than_there_are_steps_at_hand() -> None:
    rows = [(number, 1, 0) for number in range(3000)]
    data = sealed(encode(rows), 5, 1 << 32) + sealed(encode(rows), 9, 2 << 32)
    found = opened_together(data, [3000, 3000], [5, 9], [1 << 32, 2 << 32])
    assert found is not None
    assert found.tolist() == rows * 2


@given(st.lists(rows, min_size=1, max_size=9), st.data())
def test_a_position_that_no_file_can_hold_is_refused_by_both(
    entries: list[Row], data: st.DataObject
) -> None:
    entries.append((data.draw(st.integers(1 << 56, (1 << 64) - 1)), 1, 0))
    with pytest.raises(StoreError, match="a log ends at"):
        sealed(encode(entries), 0, 0)
    with pytest.raises(StoreError, match="a log ends at"):
        sealed_together([encode(entries), encode([(0, 1, 0)])], (0, 0), (0, 0))


@given(st.lists(rows, min_size=1, max_size=40), offsets, salts, st.data())
def test_one_by_one_and_all_at_once_agree(
    entries: list[Row], queue_offset: int, salt: int, data: st.DataObject
) -> None:
    some = data.draw(st.integers(0, len(entries) - 1))
    few = b"".join(
        bytes(sealed(encode([entry]), queue_offset + index, salt))
        for index, entry in enumerate(entries)
    )
    many = bytearray(sealed(encode(entries), queue_offset, salt))
    assert many == few
    many[some * 20 + data.draw(st.integers(0, 19))] ^= 1 << data.draw(st.integers(0, 7))
    _, good = opened(many, len(entries), queue_offset, salt)
    firsts = [
        opened(many[index * 20 : index * 20 + 20], 1, queue_offset + index, salt)[1]
        for index in range(len(entries))
    ]
    assert good == firsts.index(0) == some


def test_any_one_or_two_flipped_bits_are_found_whatever_the_entry_holds() -> None:
    """A flip adds or takes away one known number, modulo 2**64. If every such sum is further than 2**48 from 0, the upper 16 bits change.

    A flip among the check bits themselves counts as what the sum would have to change by to make up for it.
    """
    flips = [
        (WORD_FACTORS[word] << bit) % 2**64
        for word in range(5)
        for bit in range(32)
        if word not in (1, 2) or bit < 24
    ]
    assert len(flips) == 160 - 16
    stored = [1 << 48 + bit for bit in range(16)]
    sums = [*flips]
    for one, two in combinations(flips, 2):
        sums += [one + two, one - two]
    for one in flips:
        for two in stored:
            sums += [one + two, one - two]
    distances = [min(total % 2**64, -total % 2**64) for total in sums]
    assert min(distances) >= 2**48


@given(st.lists(rows, min_size=1, max_size=12), offsets, salts, st.data())
def test_flips_are_found(
    entries: list[Row], queue_offset: int, salt: int, data: st.DataObject
) -> None:
    bits = data.draw(
        st.sets(st.integers(0, 159), min_size=1, max_size=2), label="bits of one entry"
    )
    some = data.draw(st.integers(0, len(entries) - 1))
    octets = bytearray(sealed(encode(entries), queue_offset, salt))
    for bit in bits:
        octets[some * 20 + bit // 8] ^= 1 << bit % 8
    assert opened(octets, len(entries), queue_offset, salt)[1] == some


def test_entries_that_have_changed_places_are_found() -> None:
    """Moved by n places an entry's sum would have to change by n steps: none up to 46,367 comes near to a multiple of 2**64."""
    steps = np.arange(1, 46_368, dtype=np.uint64) * np.uint64(OFFSET_STEP)
    assert int(np.minimum(steps, np.uint64(0) - steps).min()) >= 2**48


def test_each_queue_has_sums_of_its_own() -> None:
    salts_seen = {salt_of(topic, queue) for topic in ("a", "b", "a/1") for queue in range(200)}
    assert len(salts_seen) == 600
    checks = [check_of(10_000, 300, 7, 5, salt) for salt in sorted(salts_seen)]
    assert len(set(checks)) > 590


def test_a_record_fits_and_a_position_that_does_not_is_refused() -> None:
    assert RECORD_FIELD_SIZE_MAX_BYTES < 1 << entry_check.SIZE_BITS
    sealed(encode([((1 << 56) - 1, 1, 0)]), 0, 0)
    with pytest.raises(StoreError, match="ends at position"):
        sealed(encode([(1 << 56, 1, 0)]), 0, 0)
