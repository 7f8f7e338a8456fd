"""Decoding records into Arrow: the same as protobuf's own parse, whatever the records hold."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq._types import MessageQueue
from protomq.errors import CorruptMessageError
from protomq.v1.record_pb2 import Record, Transit
from protomq.wire import record as layout
from protomq.wire.hashing import crc32c
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq_spark.layout import UnusualRecordError, locate, read_fronts, read_transits
from protomq_spark.records import Decoding, decode_records
from protomq_spark.schema import COLUMN_NAMES, arrow_schema

QUEUE = MessageQueue("orders", "broker-a", 3)
texts = st.text(max_size=20)
names = st.text(min_size=1, max_size=20)


@st.composite
def transits(draw: st.DrawFn) -> Transit:
    return Transit(
        origin_topic=draw(texts),
        origin_queue_id=draw(st.integers(0, 99)),
        origin_queue_offset=draw(st.integers(0, 2**40) | st.just(layout.NO_QUEUE_OFFSET)),
        attempt=draw(st.integers(0, 9) | st.integers(0, 2**32 - 1)),
        first_store_time_ms=draw(st.integers(0, 2**41)),
        last_error=draw(texts),
        replayed_group=draw(texts),
        consumed_topic=draw(texts),
    )


def with_transit(record: bytes, transit: Transit, *, zeros: bool = False, more: bytes = b"") -> bytes:
    """As a copy that the broker moved. `zeros`: as at the first move, where 0 is written, too; `more`: octets behind the rest."""
    octets = transit.SerializeToString()
    if zeros and not transit.attempt:
        topic = Transit(origin_topic=transit.origin_topic).SerializeToString()
        rest = Transit(last_error=transit.last_error, replayed_group=transit.replayed_group)
        octets = topic + struct.pack(
            "<BIBQBQ", 0x15, transit.origin_queue_id, 0x19, transit.origin_queue_offset, 0x29, transit.first_store_time_ms
        ) + rest.SerializeToString()  # fmt: skip
    octets += more
    at = layout.front_end(record, 0, len(record))
    field = bytes((layout.TRANSIT_TAG,)) + layout.encode_varint(len(octets)) + octets
    moved = bytearray(record[:at] + field + record[at:])
    moved[len(moved) + layout.FLAGS_AT + 1] = (layout.FLAG_TRANSIT | layout.FLAG_KIND_COPY) >> 8
    return bytes(moved)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    keys = draw(st.lists(names, max_size=3))
    tag = draw(texts)
    front = encode_front(
        keys, tag, draw(st.dictionaries(texts, texts, max_size=4)), draw(texts), draw(texts)
    )
    template = RecordTemplate("orders", draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 9)))
    body = draw(st.binary(max_size=300))
    key = keys[0] if keys else ""
    record = template.encode(
        body,
        draw(st.integers(0, 2**40)),
        draw(st.integers(0, 2**41)),
        key=key,
        tag=tag,
        front=front,
        due_time_ms=draw(st.none() | st.integers(0, 2**40)),
    )
    if draw(st.booleans()):  # A copy that the broker moved.
        record = with_transit(record, draw(transits()), zeros=draw(st.booleans()))
    values = (3, draw(st.integers(0, 2**41)), 0, 0)
    pairs = zip(layout.STAMP_TAGS, values, strict=True)
    stamp = layout.STAMP.pack(*(part for pair in pairs for part in pair))
    return record[: -len(stamp)] + stamp


def with_crc(record: bytes) -> bytes:
    """As its producer would have sent it."""
    changed = bytearray(record)
    crc = crc32c(record[: layout.front_end(record, 0, len(record))])
    struct.pack_into("<I", changed, len(record) + layout.CRC32C_AT, crc)
    return bytes(changed)


def decode(raw_records: list[bytes], **settings_: Any) -> pa.RecordBatch:
    raw, starts, ends = b"\x1a\x01\x00", [], []  # Something in front, as an answer's header.
    for record in raw_records:
        starts.append(len(raw))
        raw += encode_record_field(record)
        ends.append(len(raw))
        raw += b"\x1a\x00"  # And between, as a seal.
    decoding = Decoding(**({"columns": COLUMN_NAMES} | settings_))
    offsets = np.arange(100, 100 + len(raw_records))
    return decode_records(
        raw, np.array(starts, np.int64), np.array(ends, np.int64), offsets, QUEUE, decoding
    )


def expected_row(data: bytes, offset: int) -> dict[str, Any]:
    record = Record.FromString(data)
    properties = dict(record.properties)
    return {
        "key": record.keys[0] if record.keys else None,
        "body": record.body,
        "topic": record.topic,
        "broker": "broker-a",
        "queue_id": record.queue_id,
        "queue_offset": offset,
        "timestamp": record.store_time_ms,
        "timestamp_type": 1,
        "tags": record.tag or None,
        "message_id": f"{record.producer_id:016X}{record.producer_epoch:08X}{record.sequence:016X}",
        "properties": properties,
        "born_host": record.attributes.born_host or None,
        "reconsume_times": min(record.transit.attempt, 2**31 - 1),
        "born_timestamp": record.born_time_ms,
        "sharding_key": record.attributes.sharding_key or None,
        "headers": {name: value.encode() for name, value in properties.items()} or None,
        **expected_origin(record),
    }


def expected_origin(record: Record) -> dict[str, Any]:
    names = ("origin_topic", "origin_queue_id", "origin_queue_offset", "origin_timestamp", "last_error", "replayed_group")
    if not record.HasField("transit"):
        return dict.fromkeys(names)
    transit = record.transit
    offset = transit.origin_queue_offset
    values = (
        transit.origin_topic,
        transit.origin_queue_id,
        None if offset == layout.NO_QUEUE_OFFSET else offset,
        transit.first_store_time_ms,
        transit.last_error,
        transit.replayed_group,
    )
    return dict(zip(names, values, strict=True))


def actual_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = batch.to_pylist()
    for name in ("timestamp", "born_timestamp", "origin_timestamp"):
        micros = batch.column(name).cast(pa.int64()).to_pylist()
        for row, value in zip(rows, micros, strict=True):
            row[name] = None if value is None else value // 1000
    for row in rows:
        row["properties"] = dict(row["properties"])
        if row["headers"] is not None:
            row["headers"] = {entry["key"]: entry["value"] for entry in row["headers"]}
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(records(), min_size=1, max_size=12))
def test_columns_are_what_protobuf_parses(raw_records: list[bytes]) -> None:
    batch = decode(raw_records)
    batch.validate(full=True)
    assert batch.schema.equals(arrow_schema(COLUMN_NAMES))
    expected = [expected_row(data, 100 + n) for n, data in enumerate(raw_records)]
    # An empty text is written by nobody, but "" and nothing are the same to protobuf.
    assert [without_empty(row) for row in actual_rows(batch)] == [
        without_empty(row) for row in expected
    ]


def without_empty(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value not in ("", None)}


@settings(max_examples=30, deadline=None)
@given(st.lists(records(), min_size=1, max_size=6), st.data())
def test_records_in_another_order_of_fields_are_parsed_by_protobuf(
    raw_records: list[bytes], data: st.DataObject
) -> None:
    strange = []
    for record in raw_records:
        parsed = Record.FromString(record)
        body_end = len(record) - len(parsed.body)
        assert body_end >= 0
        if data.draw(st.booleans()):
            # A property without a value, as a foreign serialiser may write it, at the end of the front.
            at = layout.front_end(record, 0, len(record))
            record = with_crc(record[:at] + b"\x22\x03\x0a\x01x" + record[at:])
        strange.append(record)
    batch = decode(strange)
    expected = [expected_row(record, 100 + n) for n, record in enumerate(strange)]
    assert [without_empty(row) for row in actual_rows(batch)] == [
        without_empty(row) for row in expected
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(records(), min_size=1, max_size=6), transits())
def test_a_transit_with_a_field_of_a_later_version_is_parsed_by_protobuf(raw_records: list[bytes], transit: Transit) -> None:
    strange = [*raw_records, with_transit(FULL, transit, more=b"\x42\x01x")]
    expected = [expected_row(record, 100 + n) for n, record in enumerate(strange)]
    assert [without_empty(row) for row in actual_rows(decode(strange))] == [
        without_empty(row) for row in expected
    ]


def plain(body: bytes, tag: str = "", flags: int = 0) -> bytes:
    front = encode_front((), tag)
    return RecordTemplate("orders", 7, 0).encode(body, 1, 2, tag=tag, front=front, flags=flags)


def test_only_the_columns_asked_for_are_made() -> None:
    batch = decode([plain(b"a"), plain(b"b")], columns=("queue_offset", "body"))
    assert batch.to_pylist() == [
        {"queue_offset": 100, "body": b"a"},
        {"queue_offset": 101, "body": b"b"},
    ]


def test_compressed_bodies_are_unpacked_and_others_stay() -> None:
    packed = zlib.compress(b"x" * 5000)
    batch = decode(
        [plain(b"a"), plain(packed, flags=layout.COMPRESSION_ZLIB), plain(b"")], columns=("body",)
    )
    assert batch.column(0).to_pylist() == [b"a", b"x" * 5000, b""]


def damaged(body: bytes) -> bytes:
    record = bytearray(plain(body))
    record[len(record) + layout.CRC32C_AT] ^= 1
    return bytes(record)


FULL = RecordTemplate("orders", 7, 0).encode(
    b"body", 1, 2, key="key", tag="tag",
    front=encode_front(["key"], "tag", {"name": "value"}, "shard", "host"),
)  # fmt: skip
OF_PRODUCER = ("key", "body", "tags", "properties", "born_host", "sharding_key", "headers")


@pytest.mark.parametrize("bit", range(0, 8 * layout.front_end(FULL, 0, len(FULL)), 3))
def test_a_flipped_bit_anywhere_in_what_is_the_producers_is_found(bit: int) -> None:
    damaged = bytearray(FULL)
    damaged[bit // 8] ^= 1 << bit % 8
    rows = [FULL, bytes(damaged), FULL]
    for name in OF_PRODUCER:
        with pytest.raises(CorruptMessageError, match="orders/broker-a/3@101"):
            decode(rows, columns=(name,))
    whole, nulled, last = decode(rows, corrupt_records="null").to_pylist()
    assert whole == {**last, "queue_offset": 100}
    assert {nulled.pop(name) for name in OF_PRODUCER} == {None}
    assert nulled == {name: last[name] for name in nulled} | {"queue_offset": 101}
    skipped = decode(rows, corrupt_records="skip").column("queue_offset").to_pylist()
    assert skipped == [100, 102]
    filtered = decode(rows, columns=("key",), tags=frozenset({"tag"}), corrupt_records="null")
    assert filtered.column(0).to_pylist() == ["key", None, "key"]
    # Numbers are the broker's, and not under that CRC.
    assert decode(rows, columns=("queue_offset",)).num_rows == 3


MOVED = with_transit(
    FULL, Transit(origin_topic="orders", origin_queue_id=2, origin_queue_offset=70, attempt=3, first_store_time_ms=9, last_error="no")
)  # fmt: skip


def test_a_retry_of_a_dead_letter_is_read_by_arrays_like_all_others() -> None:
    """`consumed_topic` is no column."""
    retry = with_transit(FULL, Transit(origin_topic="orders", attempt=1, replayed_group="g", consumed_topic="%DLQ%other"))
    raw = encode_record_field(retry)
    groups = read_transits(locate(raw, np.array([0]), np.array([len(raw)]), 6)).replayed_groups
    assert raw[int(groups.starts[0]) : int(groups.ends[0])] == b"g"


@pytest.mark.parametrize("bit", range(0, 8 * layout.front_end(MOVED, 0, len(MOVED)), 3))
def test_a_flipped_bit_in_a_message_that_was_moved_is_found_in_that_message(bit: int) -> None:
    damaged = bytearray(MOVED)
    damaged[bit // 8] ^= 1 << bit % 8
    rows = [MOVED, bytes(damaged), MOVED]
    with pytest.raises(CorruptMessageError, match="orders/broker-a/3@101"):
        decode(rows, columns=("body",))
    whole, nulled, last = decode(rows, corrupt_records="null").to_pylist()
    assert whole == {**last, "queue_offset": 100}
    assert {nulled[name] for name in OF_PRODUCER} == {None}
    # Where it comes from is the broker's word, but a length that is damaged hides it.
    assert nulled["reconsume_times"] in (3, None)
    assert nulled["origin_queue_offset"] in (70, None)
    assert (nulled["reconsume_times"] is None) == (nulled["origin_topic"] is None)


def test_attempts_and_origin_are_made_without_what_the_producer_wrote() -> None:
    rows = [FULL, MOVED, damaged(b"b")]
    columns = ("reconsume_times", "origin_topic", "origin_queue_id", "origin_queue_offset", "last_error", "replayed_group")
    assert [tuple(row.values()) for row in decode(rows, columns=columns).to_pylist()] == [
        (0, None, None, None, None, None),
        (3, "orders", 2, 70, "no", None),
        (0, None, None, None, None, None),
    ]


def test_a_damaged_body_is_an_error_that_says_where() -> None:
    with pytest.raises(CorruptMessageError, match="orders/broker-a/3@101") as caught:
        decode([plain(b"a"), damaged(b"b")], columns=("body",))
    assert caught.value.metadata["queue_offset"] == "101"


def test_a_damaged_body_may_be_null_or_left_out() -> None:
    rows = [plain(b"a"), damaged(b"b"), plain(b"c")]
    nulled = decode(rows, columns=("body",), corrupt_records="null")
    assert nulled.column(0).to_pylist() == [b"a", None, b"c"]
    skipped = decode(rows, columns=("body", "queue_offset"), corrupt_records="skip")
    assert skipped.column("queue_offset").to_pylist() == [100, 102]


def test_a_body_that_does_not_decompress_is_damaged_too() -> None:
    batch = decode([plain(b"no zlib", flags=1)], columns=("body",), corrupt_records="null")
    assert batch.column(0).to_pylist() == [None]


def test_the_check_may_be_left_out() -> None:
    batch = decode([damaged(b"b")], columns=("body",), check_crc=False)
    assert batch.column(0).to_pylist() == [b"b"]


def test_tags_are_compared_themselves() -> None:
    batch = decode(
        [plain(b"a", "x"), plain(b"b", "y"), plain(b"c")], columns=("body",), tags=frozenset("y")
    )
    assert batch.column(0).to_pylist() == [b"b"]


def test_what_is_no_record_is_refused() -> None:
    raw = encode_record_field(plain(b"abc"))
    with pytest.raises(UnusualRecordError):
        locate(raw[:-1], np.array([0]), np.array([len(raw)]), 6)
    with pytest.raises(UnusualRecordError):
        locate(b"\x0b" + raw[1:], np.array([0]), np.array([len(raw)]), 6)
    with pytest.raises(UnusualRecordError):
        locate(b"\x0a" + b"\xff" * 200, np.array([0]), np.array([201]), 6)


def test_a_cut_field_in_the_front_is_noticed() -> None:
    record = RecordTemplate("orders", 7, 0).encode(b"", 1, 2, front=b"\x12\x7fk")
    raw = encode_record_field(record)
    located = locate(raw, np.array([0]), np.array([len(raw)]), 6)
    with pytest.raises(UnusualRecordError):
        read_fronts(located)
