"""CRCs by arrays, beside those of the library."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.crc_arrays import TABLES_MAX, crcs_of_rows, without_end
from protomq.wire.hashing import crc32c


def rows_of(parts: list[bytes], size: int) -> np.ndarray:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), size)


@given(st.data(), st.integers(0, TABLES_MAX + 8), st.integers(1, 5))
def test_the_crc_of_each_row(data: st.DataObject, size: int, count: int) -> None:
    rows = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(count)]
    assert crcs_of_rows(rows_of(rows, size)).tolist() == list(map(crc32c, rows))


@given(st.data(), st.sampled_from([0, 1, 2, 3, 7, 12, 31, 64, 65, 255, 1_000]), st.integers(1, 4))
def test_the_crc_of_what_stands_in_front(data: st.DataObject, size: int, count: int) -> None:
    fronts = [data.draw(st.binary(max_size=40)) for _ in range(count)]
    ends = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(count)]
    crcs = [crc32c(front + end) for front, end in zip(fronts, ends, strict=True)]
    found = without_end(np.array(crcs, np.uint32), rows_of(ends, size))
    assert found.tolist() == list(map(crc32c, fronts))


@pytest.mark.parametrize("bit", range(32))
def test_a_crc_that_is_wrong_in_any_bit_leaves_a_wrong_one(bit: int) -> None:
    whole = np.array([crc32c(b"body" + b"front"), crc32c(b"body" + b"front") ^ 1 << bit], np.uint32)
    found = without_end(whole, rows_of([b"front", b"front"], 5)).tolist()
    assert found[0] == crc32c(b"body") != found[1]
