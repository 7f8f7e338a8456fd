"""CRC-32C of many pieces at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.wire.hashing import crc32c

pytest.importorskip("pyarrow", reason="the Spark package needs it")

from protomq_spark import checksums
from protomq_spark.checksums import crc32c_of_pieces

RUNS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50), st.integers(0, 9)), max_size=12)


@settings(deadline=None)
@given(RUNS, st.integers())
def test_every_piece_has_the_checksum_that_it_has_alone(
    runs: list[tuple[int, int, int]], seed: int
) -> None:
    """Runs of (rows, size, gap behind each): long and short ones, empty pieces, neighbours that differ in one thing only."""
    starts, ends, position = [], [], 3
    for rows, size, gap in runs:
        for _ in range(rows):
            starts.append(position)
            ends.append(position + size)
            position += size + gap
    raw = random.Random(seed).randbytes(position)
    expected = [crc32c(raw[start:end]) for start, end in zip(starts, ends, strict=True)]
    for buffer in (raw, memoryview(raw)):
        found = crc32c_of_pieces(buffer, np.array(starts, np.int64), np.array(ends, np.int64))
        assert found.dtype == np.uint32
        assert found.tolist() == expected


def test_records_of_one_size_are_looked_at_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def note(piece: object) -> int:
        seen.append(piece)
        return 0

    monkeypatch.setattr(checksums, "crc32c", note)
    raw = bytes(10_000)
    starts = np.arange(0, 9_000, 90)
    crc32c_of_pieces(raw, starts, starts + 80)
    assert len(seen) == 100
    data = np.frombuffer(raw, np.uint8)
    assert all(isinstance(piece, np.ndarray) and np.shares_memory(piece, data) for piece in seen)
