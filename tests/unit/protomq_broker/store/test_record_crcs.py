"""Whether records are what their producers wrote: one by one and together, wherever a bit flips."""

from __future__ import annotations

import numpy as np
import pytest

from protomq.wire import record as layout
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq_broker.store.log.move import move_records
from protomq_broker.store.log.record_crcs import TOGETHER_MIN, wrong_records

COUNTS = (1, TOGETHER_MIN + 6)
FRONT = {"keys": ["k1", "k2"], "tag": "t", "properties": {"a": "b"}, "sharding_key": "s", "born_host": "h"}


class Records:
    """Records in a row, as they stand in a log.

    Attributes: data: their fields; starts, sizes: of each.
    """

    def __init__(self, count: int, body_sizes: tuple[int, ...], *, is_moved: bool) -> None:
        template = RecordTemplate("topic", 7, 0)
        front = encode_front(**FRONT)  # type: ignore[arg-type]
        fields = [
            encode_record_field(
                template.encode(
                    b"%02d" % at + bytes(body_sizes[at % len(body_sizes)]), at, 5, key="k1", tag="t", sharding_key="s", front=front,
                    flags=8 | (16 if at % 2 else 0), due_time_ms=9 if at % 2 else None,
                )
            )
            for at in range(count)
        ]  # fmt: skip
        self.data = b"".join(fields)
        self.sizes = np.array([len(field) for field in fields])
        self.starts = np.cumsum(self.sizes) - self.sizes
        if is_moved:
            region = move_records(self.data, self.starts, self.sizes, "another", attempts=1, last_errors="why")
            self.data = bytes(region.data)
            starts, sizes = region.starts, region.sizes
            self.starts = np.array([0]) if starts is None else starts
            self.sizes = np.array([len(self.data)]) if sizes is None else sizes

    def wrong(self, data: bytes | bytearray) -> list[int]:
        return wrong_records(bytes(data), self.starts, self.sizes)


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize("body_sizes", [(3,), (0, 200, 20_000)])
@pytest.mark.parametrize("count", COUNTS)
def test_a_bit_that_flips_is_found_wherever_the_producer_wrote_it(count: int, body_sizes: tuple[int, ...], is_moved: bool) -> None:
    records = Records(count, body_sizes, is_moved=is_moved)
    assert records.wrong(records.data) == []
    row = count // 2
    start, end = int(records.starts[row]), int(records.starts[row] + records.sizes[row])
    head = 2 + (end - start > 130)
    front_end = layout.front_end(records.data, start + head, end)
    for at in {*range(start, min(start + 40, front_end)), *range(max(start, front_end - 40), front_end)}:
        for bit in (1, 0x80):
            data = bytearray(records.data)
            data[at] ^= bit
            assert records.wrong(data) == [row], (at - start, bit)


@pytest.mark.parametrize("count", COUNTS)
def test_a_trailer_without_its_tags_is_none(count: int) -> None:
    records = Records(count, (3, 200), is_moved=False)
    end = len(records.data)
    for at in (-layout.FIXED_TRAILER_SIZE_BYTES, layout.CRC32C_AT - 1, layout.CRC32C_AT, -layout.STAMP_SIZE_BYTES):
        data = bytearray(records.data)
        data[end + at] ^= 4
        assert records.wrong(data) == [count - 1]


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_no_record_is_wrong_whatever_it_is(count: int) -> None:
    random = np.random.default_rng(7)
    for size in (0, 1, 5, 102, 104, 300):
        data = random.integers(0, 256, size * count, np.uint8).tobytes() + b"\xff" * 200
        sizes = np.full(count, size)
        assert wrong_records(data, np.arange(count) * size, sizes) == list(range(count))


def test_no_records_are_no_wrong_ones() -> None:
    nothing = np.empty(0, np.int64)
    assert wrong_records(b"", nothing, nothing) == []
