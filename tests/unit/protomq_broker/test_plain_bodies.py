"""Answers to pulls that ask for plain bodies."""

from __future__ import annotations

import random
import zlib
from unittest import mock

import numpy as np
import pytest

from protomq._compression import compress_body, make_compressor
from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire import codecs
from protomq.wire.hashing import crc32c
from protomq.wire.record import (
    BODY_SIZE_MAX_BYTES,
    CRC32C_AT,
    RecordTemplate,
    encode_front,
    encode_record_field,
    front_end,
)
from protomq_broker.plain_bodies import plain_field, with_plain_bodies
from protomq_broker.store.queues.reading import ReadResult, ReadStatus

TEMPLATE = RecordTemplate("flights", 7, 1)


def stored(body: bytes, codec: str = "none", **fields: object) -> bytes:
    """A record field as a broker has it."""
    packed, flag = compress_body(make_compressor(codec), body)
    return encode_record_field(TEMPLATE.encode(packed, 5, 6, flags=flag, **fields))  # type: ignore[arg-type]


def result_of(fields: list[bytes], queue_offsets: list[int] | None = None) -> ReadResult:
    sizes = np.array([len(field) for field in fields], np.uint32)
    return ReadResult(
        ReadStatus.FOUND,
        next_offset=100 + len(fields),
        min_offset=0,
        end_offset=1000,
        first_offset=100,
        starts=(np.cumsum(sizes) - sizes).astype(np.uint32),
        sizes=sizes,
        queue_offsets=None if queue_offsets is None else np.array(queue_offsets, np.uint64),
        regions_size_bytes=int(sizes.sum()),
    )


def read(field: bytes) -> Record:
    (record,) = RecordBatch.FromString(field).records
    return record


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_body_comes_plain_and_all_else_as_it_was(codec: str, size: int) -> None:
    body = bytes(size)
    front = encode_front(["k"], "t", {"a": "b"}, "s")
    field = stored(body, codec, key="k", tag="t", sharding_key="s", front=front, due_time_ms=9)
    before, after = read(field), read(plain_field(field))
    assert before.flags & 7
    assert after.body == body
    assert after.flags == before.flags & ~7
    for record in (before, after):
        record.ClearField("body")
        record.ClearField("flags")
        record.ClearField("crc32c")
    assert after == before
    # Byte for byte what a producer that does not compress would have sent: its CRC too.
    assert plain_field(field) == stored(
        body, key="k", tag="t", sharding_key="s", front=front, due_time_ms=9
    )


def test_the_crc_is_that_of_the_plain_front() -> None:
    field = plain_field(stored(bytes(300), "zlib", tag="t", front=encode_front((), "t")))
    record = field[3:]  # Tag, and a length of two octets.
    assert crc32c(record[: front_end(record, 0, len(record))]) == read(field).crc32c


def test_what_cannot_be_unpacked_stays_as_it_is() -> None:
    field = stored(bytes(5000), "zlib")
    packed = read(field).body
    bomb = encode_record_field(
        TEMPLATE.encode(zlib.compress(bytes(BODY_SIZE_MAX_BYTES + 1)), 5, 6, flags=1)
    )
    damaged = encode_record_field(TEMPLATE.encode(packed[:-3], 5, 6, flags=1))
    unknown = encode_record_field(TEMPLATE.encode(packed, 5, 6, flags=7))
    for odd in (bomb, damaged, unknown):
        assert plain_field(odd) == odd
    lz4 = stored(bytes(5000), "lz4")
    with mock.patch.object(codecs, "lz4_module", return_value=None):
        assert plain_field(lz4) == lz4


@pytest.mark.parametrize("codec", ["zlib", "lz4", "zstd"])
def test_a_body_that_goes_on_behind_its_end_stays_as_it_is(codec: str) -> None:
    packed, flag = compress_body(make_compressor(codec), bytes(5000))
    for tail in (packed, b"junk"):
        field = encode_record_field(TEMPLATE.encode(packed + tail, 5, 6, flags=flag))
        assert plain_field(field) == field


def test_a_record_whose_crc_does_not_hold_goes_out_as_it_is_stored() -> None:
    front = encode_front(["account-1"], "t", {"to": "bob"})
    good = stored(bytes(5000), "zlib", key="account-1", tag="t", front=front)
    assert plain_field(good) != good
    for changed in (b"account-2", b"account-1"[::-1]):
        harmed = good.replace(b"account-1", changed)
        assert plain_field(harmed) == harmed
    wrong_crc = bytearray(good)
    wrong_crc[len(good) + CRC32C_AT] ^= 1
    assert plain_field(bytes(wrong_crc)) == wrong_crc


def test_the_largest_body_that_could_have_been_sent_plain_is_unpacked() -> None:
    assert read(plain_field(stored(bytes(BODY_SIZE_MAX_BYTES), "zlib"))).body == bytes(
        BODY_SIZE_MAX_BYTES
    )


def test_an_answer_without_a_compressed_body_is_not_touched() -> None:
    fields = [stored(b"a"), stored(b"b")]
    assert with_plain_bodies(result_of(fields), b"".join(fields), 1000) is None


def test_an_answer_keeps_its_size_and_says_where_to_go_on() -> None:
    fields = [stored(b"first"), *(stored(bytes(10_000), "zlib") for _ in range(9))]
    for offsets in (None, [3 * n for n in range(10)]):
        made = with_plain_bodies(result_of(fields, offsets), b"".join(fields), 35_000)
        assert made is not None
        answered, data = made
        assert (answered.record_count, len(data)) == (4, answered.regions_size_bytes)
        assert len(data) <= 35_000
        assert answered.next_offset == (104 if offsets is None else 12)
        bodies = [record.body for record in RecordBatch.FromString(data).records]
        assert bodies == [b"first", *[bytes(10_000)] * 3]
        for start, size in zip(answered.starts, answered.sizes, strict=True):
            assert RecordBatch.FromString(data[start : start + size]).records
        if offsets is not None:
            assert answered.queue_offsets is not None
            assert answered.queue_offsets.tolist() == [0, 3, 6, 9]
    # One is always given.
    made = with_plain_bodies(result_of(fields[1:]), b"".join(fields[1:]), 1)
    assert made is not None
    assert made[0].record_count == 1


def test_seals_between_records_are_left_out() -> None:
    one, two = stored(bytes(5000), "zlib"), stored(b"x")
    seal = b"\x12\x33" + bytes(51)
    result = result_of([one, two])
    result.starts = np.array([0, len(one) + len(seal)], np.uint32)
    made = with_plain_bodies(result, one + seal + two, 100_000)
    assert made is not None
    batch = RecordBatch.FromString(made[1])
    assert [record.body for record in batch.records] == [bytes(5000), b"x"]
    assert not batch.seals


def test_random_bodies_come_as_they_were() -> None:
    rng = random.Random(7)
    for _ in range(50):
        bodies = [
            rng.randbytes(rng.randrange(20)) * rng.randrange(300) for _ in range(rng.randrange(1, 9))
        ]
        fields = [stored(body, rng.choice(("none", "zlib", "zstd"))) for body in bodies]
        made = with_plain_bodies(result_of(fields), b"".join(fields), 1 << 20)
        data = b"".join(fields) if made is None else made[1]
        assert [record.body for record in RecordBatch.FromString(data).records] == bodies
