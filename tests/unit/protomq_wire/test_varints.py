"""Numbers of variable length: as protobuf writes them, one by one and many at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.record import encode_varint
from protomq.wire.varint_arrays import read_lengths
from protomq.wire.varints import LENGTH_SIZE_MAX_BYTES, read_varint


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_what_is_written_is_read(value: int, before: bytes, behind: bytes) -> None:
    encoded = encode_varint(value)
    data = before + encoded + behind
    end = len(before) + len(encoded)
    for octets in (data, bytearray(data), memoryview(data)):
        assert read_varint(octets, len(before)) == (value, end)
    for cut in range(len(encoded)):
        with pytest.raises(IndexError):
            read_varint(data[: len(before) + cut], len(before))


def test_lengths_wider_than_they_need_be_are_read_and_those_of_too_many_octets_refused() -> None:
    assert read_varint(b"\x81\x80\x80\x80\x00", 0, LENGTH_SIZE_MAX_BYTES) == (1, 5)
    with pytest.raises(ValueError, match="more than 5"):
        read_varint(b"\x81\x80\x80\x80\x80\x00", 0, LENGTH_SIZE_MAX_BYTES)
    with pytest.raises(ValueError, match="more than 10"):
        read_varint(b"\xff" * 11, 0)


@given(st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=9))
def test_many_at_once_are_read_as_one_by_one(values: list[int]) -> None:
    parts = list(map(encode_varint, values))
    data = b"".join(parts)
    starts = np.cumsum([0, *map(len, parts)])[:-1]
    found, behind = read_lengths(np.frombuffer(data, np.uint8), starts)
    one_by_one = [read_varint(data, start) for start in starts.tolist()]
    assert list(zip(found.tolist(), behind.tolist(), strict=True)) == one_by_one


def test_one_that_is_too_long_among_many_is_refused_or_marked() -> None:
    data = np.frombuffer(b"\x05" + b"\xff" * 6, np.uint8)
    with pytest.raises(IndexError):
        read_lengths(data, np.array([0, 1]))
    assert read_lengths(data, np.array([0, 1]), too_long=99)[0].tolist() == [5, 99]
    with pytest.raises(IndexError):
        read_lengths(data, np.array([7]))
