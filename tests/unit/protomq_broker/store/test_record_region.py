"""The proof of layout: what it accepts reads back as what was meant, what it must not accept it refuses."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.record_pb2 import Record, RecordBatch, Transit
from protomq.wire import record as layout
from protomq_broker.store.log import front as fronts
from protomq_broker.store.log.append import CorruptRecordError, RecordRegion
from protomq_broker.store.log.record_region import prove_region, stamp_region
from protomq_broker.store.log.record_scan import record_field_at

from .log_helpers import scan_records

TOPIC = "flights"
COUNTS = (1, 2, 24, 25, 60)  # one; few, record by record; many, by arrays

messages = st.tuples(
    st.binary(max_size=300),
    st.lists(st.text(min_size=1, max_size=8), max_size=3),
    st.text(max_size=5).filter(lambda tag: not layout.NOT_IN_TAGS.search(tag)),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)


def encode(
    bodies: list[bytes], topic: str = TOPIC, first_sequence: int = 5, **options: Any
) -> list[bytes]:
    template = layout.RecordTemplate(topic, 77, 3)
    options = codes_of(options.get("front", b"")) | options
    return [
        template.encode(body, first_sequence + i, 1_000 + i, **options)
        for i, body in enumerate(bodies)
    ]


def codes_of(front: bytes) -> dict[str, Any]:
    """What `RecordTemplate.encode` is given beside a front."""
    names = Record.FromString(front)
    many = layout.FLAG_MANY_KEYS if len(names.keys) > 1 else 0
    return {"key": names.keys[0] if names.keys else "", "tag": names.tag, "flags": many}


def join(records: list[bytes]) -> bytes:
    return b"".join(map(layout.encode_record_field, records))


def prove(records: list[bytes], topic: str = TOPIC, tail: bytes = b"") -> RecordRegion | None:
    return prove_region(join(records) + tail, topic, [len(record) for record in records])


@pytest.mark.parametrize("size_bytes", [0, 1, 126, 127, 128, 129, 16_383, 16_384, 2_097_151, 2_097_152])
def test_a_lone_body_is_proved_whatever_the_width_of_its_length(size_bytes: int) -> None:
    (record,) = encode([bytes(size_bytes)])
    region = prove([record])
    assert region is not None
    assert bytes(region.data) == join([record])


@pytest.mark.parametrize("size_bytes", [0, 1, 126, 127])
def test_a_length_that_is_wider_than_it_need_be_is_read_as_the_parser_reads_it(size_bytes: int) -> None:
    (record,) = encode([bytes(size_bytes)])
    wide = bytes((layout.BODY_TAG, size_bytes | 0x80, 0)) + record[2:]
    region = prove([wide])
    assert region is not None
    assert [each.body for each in RecordBatch.FromString(bytes(region.data)).records] == [bytes(size_bytes)]


@pytest.mark.parametrize("size_bytes", [2, 127, 129, 16_385])
def test_an_octet_that_belongs_to_no_field_is_refused(size_bytes: int) -> None:
    (record,) = encode([bytes(size_bytes)])
    length = layout.encode_varint(size_bytes)
    shorter = layout.encode_varint(size_bytes - 1)
    assert len(shorter) == len(length)
    assert prove([record[:1] + shorter + record[1 + len(length) :]]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, min_size=1, max_size=40))
def test_stamped_region_reads_back_as_what_was_sent_and_stamped(items: list) -> None:
    template = layout.RecordTemplate(TOPIC, 77, 3)
    records = [
        template.encode(
            body,
            i,
            1_000,
            front=layout.encode_front(keys, tag, properties),
            **codes_of(layout.encode_front(keys, tag)),
        )
        for i, (body, keys, tag, properties) in enumerate(items)
    ]
    region = prove(records, tail=b"\x22\x07flights")
    assert region is not None
    stamp_region(region, queue_id=6, store_time_ms=99, queue_offset=1_000, physical_offset=5_000)
    batch = RecordBatch.FromString(bytes(region.data))
    for i, (record, (body, keys, tag, properties)) in enumerate(
        zip(batch.records, items, strict=True)
    ):
        assert (record.body, list(record.keys), record.tag, dict(record.properties)) == (
            body,
            keys,
            tag,
            properties,
        )
        assert (record.topic, record.queue_id, record.store_time_ms) == (TOPIC, 6, 99)
        assert (record.queue_offset, record.sequence) == (1_000 + i, i)
    scanned = scan_records(bytes(region.data), 5_000)
    assert scanned.positions.tolist() == [record.physical_offset for record in batch.records]
    assert scanned.queue_offsets.tolist() == [record.queue_offset for record in batch.records]
    assert scanned.tag_codes.tolist() == [record.tag_code for record in batch.records]
    assert scanned.key_hashes.tolist() == [record.key_hash for record in batch.records]
    assert scanned.topics == (TOPIC,)


@pytest.mark.parametrize("count", COUNTS)
def test_region_holds_the_codes_of_each_record(count: int) -> None:
    records = [
        layout.RecordTemplate(TOPIC, 9, 2).encode(b"x" * i, 50 + i, 1, key=f"k{i}", tag=f"t{i % 3}")
        for i in range(count)
    ]
    region = prove(records)
    assert region is not None
    parsed = [Record.FromString(record) for record in records]
    assert np.atleast_1d(region.tag_codes).tolist() == [record.tag_code for record in parsed]
    assert np.atleast_1d(region.key_hashes).tolist() == [record.key_hash for record in parsed]
    assert (region.producer_id, region.producer_epoch, region.first_sequence, region.count) == (
        9,
        2,
        50,
        count,
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("topic", ["t", "tt", "ttt", "x" * 100])
@pytest.mark.parametrize("size", [0, 1, 5, 40, 130, 20_000])
def test_records_of_one_size_are_proved_and_stamped(count: int, topic: str, size: int) -> None:
    for front in (b"", layout.encode_front(["key"], "tag")):
        records = encode([bytes([65 + i % 20]) * size for i in range(count)], topic, front=front)
        region = prove(records, topic)
        assert region is not None
        assert bytes(region.data) == join(records)
        stamp_region(region, 3, 99, 500, 4_000)
        parsed = RecordBatch.FromString(bytes(region.data)).records
        assert [(r.queue_id, r.store_time_ms, r.queue_offset) for r in parsed] == [
            (3, 99, 500 + i) for i in range(count)
        ]
        assert [r.topic for r in parsed] == [topic] * count


def test_records_of_one_size_with_bodies_of_different_sizes_are_proved() -> None:
    template = layout.RecordTemplate(TOPIC, 1, 1)
    records = [
        template.encode(
            b"b" * (10 + i % 3), i, 1, key="k", front=layout.encode_front(["k" * (5 - i % 3)])
        )
        for i in range(30)
    ]
    assert len({len(record) for record in records}) == 1
    region = prove(records)
    assert region is not None
    assert [len(r.body) for r in RecordBatch.FromString(bytes(region.data)).records] == [
        10 + i % 3 for i in range(30)
    ]


@pytest.mark.parametrize("count", COUNTS)
def test_proof_leaves_the_bytes_as_they_were(count: int) -> None:
    records = encode([bytes([i]) * (i * 40) for i in range(count)])
    region = prove(records)
    assert region is not None
    assert bytes(region.data) == join(records)


@pytest.mark.parametrize("count", COUNTS)
def test_a_bytearray_is_taken_over_and_cut(count: int) -> None:
    records = encode([b"body"] * count)
    payload = bytearray(join(records) + b"\x22\x07flights")
    region = prove_region(payload, TOPIC, [len(record) for record in records])
    assert region is not None
    assert region.data is payload
    assert bytes(payload) == join(records)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("victim", [0, -1])
def test_a_trailer_hidden_in_a_field_is_refused(count: int, victim: int) -> None:
    """The real topic says "other"; the bytes at the end, which say "flights", are the inside of an unknown field."""
    records = encode([b"body"] * count)
    smuggled = layout.RecordTemplate("other", 77, 3).encode(b"evil", 1, 1)
    fake = records[victim][-layout.trailer_size_bytes(TOPIC.encode()) :]
    hidden = smuggled + b"\xa2\x06" + layout.encode_varint(len(fake)) + fake
    assert Record.FromString(hidden).topic == "other"
    records[victim] = hidden
    assert prove(records) is None


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize(
    "smuggled",
    [
        Record(transit=Transit(origin_topic="other", attempt=3)).SerializeToString(),
        Record(topic="other", queue_offset=7, physical_offset=8).SerializeToString(),
        Record(due_time_ms=8).SerializeToString(),
        Record(body=b"another").SerializeToString(),
        b"\xa2\x06\x03new",
        b"\x11" + bytes(8),
    ],
    ids=["transit", "trailer", "due time", "second body", "unknown field", "keys of another type"],
)
def test_what_is_no_front_is_refused_in_front_of_the_topic(
    count: int, victim: int, smuggled: bytes
) -> None:
    for front in (b"", layout.encode_front(["key"], "tag", {"a": "1"})):
        records = encode([b"body"] * count, front=front)
        assert prove(records) is not None
        parsed = Record.FromString(records[victim])
        records[victim] = layout.RecordTemplate(TOPIC, 77, 3).encode(
            b"body", parsed.sequence, parsed.born_time_ms, front=front + smuggled
        )
        assert prove(records) is None
        # All alike, so that records have one size.
        for index, record in enumerate(map(Record.FromString, encode([b"body"] * count))):
            records[index] = layout.RecordTemplate(TOPIC, 77, 3).encode(
                b"body", record.sequence, record.born_time_ms, front=front + smuggled
            )
        assert prove(records) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(messages, st.none() | st.integers(0, 2**64 - 1)), min_size=1, max_size=40),
    st.booleans(),
)
def test_due_times_stand_where_they_are_expected(items: list, of_one_size: bool) -> None:
    template = layout.RecordTemplate(TOPIC, 77, 3)
    records, due_times = [], []
    for i, ((body, keys, tag, properties), due_time_ms) in enumerate(items):
        front = layout.encode_front(keys, tag, properties)
        if of_one_size:
            body, front = bytes(20 if due_time_ms is None else 11), b""
        due_times.append(due_time_ms)
        records.append(
            template.encode(body, i, 1_000, front=front, due_time_ms=due_time_ms, **codes_of(front))
        )
    region = prove(records, tail=b"\x22\x07flights")
    assert region is not None
    assert bytes(region.data) == join(records)
    if any(due_time is not None for due_time in due_times):
        assert np.atleast_1d(cast(Any, region.due_times_ms)).tolist() == [
            due or 0 for due in due_times
        ]
    else:
        assert region.due_times_ms is None
    stamp_region(region, queue_id=6, store_time_ms=99, queue_offset=1_000, physical_offset=5_000)
    stamped = RecordBatch.FromString(bytes(region.data)).records
    for i, (record, due_time) in enumerate(zip(stamped, due_times, strict=True)):
        assert record.due_time_ms == (due_time or 0)
        assert record.HasField("due_time_ms") == (due_time is not None)
        assert bool(record.flags & layout.FLAG_DUE_TIME) == (due_time is not None)
        assert (record.topic, record.queue_id, record.queue_offset) == (TOPIC, 6, 1_000 + i)
    scanned = scan_records(bytes(region.data), 5_000)
    assert scanned.positions.tolist() == [record.physical_offset for record in stamped]
    assert scanned.topics == (TOPIC,)


@pytest.mark.parametrize("count", COUNTS)
def test_due_times_of_all_records_are_proved_by_arrays(count: int) -> None:
    template = layout.RecordTemplate(TOPIC, 77, 3)
    for step in (0, 1):
        records = [
            template.encode(b"b" * (30 + i * step), i, 1, due_time_ms=5_000 + i)
            for i in range(count)
        ]
        region = prove(records)
        assert region is not None
        assert np.atleast_1d(cast(Any, region.due_times_ms)).tolist() == [
            5_000 + i for i in range(count)
        ]
        at = len(records[-1]) + layout.DUE_TIME_MS_AT - 1
        broken = [*records[:-1], records[-1][:at] + b"\x39" + records[-1][at + 1 :]]
        assert prove(broken) is None


def test_scan_reads_a_record_that_was_moved() -> None:
    """`transit` stands between front and topic: nothing that is counted from the end moves."""
    transit = Record(transit=Transit(origin_topic="t", origin_queue_offset=9)).SerializeToString()
    plain = layout.RecordTemplate("retry", 1, 1).encode(b"b", 4, 1, due_time_ms=5)
    at = len(plain) - layout.trailer_size_bytes(b"retry", has_due_time=True)
    flags_at = len(plain) + layout.FLAGS_AT
    moved = bytearray(plain[:at] + transit + plain[at:])
    moved[flags_at + len(transit) + 1] = (layout.FLAG_TRANSIT | 0x200) >> 8
    scanned = scan_records(join([plain, bytes(moved)]), 0)
    assert (scanned.topics, scanned.sequences.tolist()) == (("retry",), [4, 4])
    assert Record.FromString(bytes(moved)).transit.origin_queue_offset == 9


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("another topic", lambda r: r.replace(b"flights", b"flightz")),
        ("a broken front", lambda r: r[:7] + b"\xff\xff" + r[9:]),
        ("broker flags", lambda r: r[: layout.FLAGS_AT] + b"\x20" + r[layout.FLAGS_AT + 1 :]),
        (
            "a kind",
            lambda r: r[: layout.FLAGS_AT + 1] + b"\x01" + r[layout.FLAGS_AT + 2 :],
        ),
        (
            "a due time that is not there",
            lambda r: r[: layout.FLAGS_AT] + b"\x10" + r[layout.FLAGS_AT + 1 :],
        ),
        ("no body", lambda r: r[6:]),
        (
            "a gap in the sequence",
            lambda r: r[: layout.SEQUENCE_AT] + b"\x99" + r[layout.SEQUENCE_AT + 1 :],
        ),
        ("a missing octet", lambda r: r[:-1]),
    ],
)
def test_what_does_not_hold_is_refused(count: int, name: str, damage: object) -> None:
    records = encode([b"body"] * count, front=layout.encode_front(["key"]))
    records[-1] = damage(records[-1])  # type: ignore[operator]
    if count == 1 and name == "a gap in the sequence":
        assert prove(records) is not None  # one record may have any
    else:
        assert prove(records) is None


@pytest.mark.parametrize("count", COUNTS)
def test_wrong_sizes_are_refused(count: int) -> None:
    records = encode([b"body"] * count)
    sizes = [len(record) for record in records]
    for wrong in (
        [*sizes[:-1], sizes[-1] + 1],
        [*sizes[:-1], 0],
        [*sizes, sizes[0]],
        [-1, *sizes[1:]],
        [],
    ):
        assert prove_region(join(records), TOPIC, wrong) is None


def test_properties_over_the_limit_are_refused() -> None:
    front = layout.encode_front(properties={"a": "b" * layout.FRONT_SIZE_MAX_BYTES})
    for count in COUNTS:
        assert prove(encode([b"x"] * count, front=front)) is None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 7), st.sampled_from(COUNTS))
def test_a_flipped_bit_never_gives_a_region_that_reads_differently(
    position: int, bit: int, count: int
) -> None:
    records = encode(
        [bytes([65 + i % 20]) * 20 for i in range(count)], front=layout.encode_front(["key"], "tag")
    )
    data = bytearray(join(records))
    data[position % len(data)] ^= 1 << bit
    region = prove_region(bytes(data), TOPIC, [len(record) for record in records])
    if region is None:
        return
    stamp_region(region, 4, 5, 600, 7_000)
    parsed = RecordBatch.FromString(bytes(region.data)).records
    assert [record.topic for record in parsed] == [TOPIC] * count
    assert [record.queue_offset for record in parsed] == list(range(600, 600 + count))
    assert [record.queue_id for record in parsed] == [4] * count
    assert parsed[0].physical_offset == 7_000


def test_scan_tells_topics_apart_whose_names_end_alike() -> None:
    names = [
        "t",
        "at",
        ":" + "\x31".join("ab"),
        "x" * 36,
        "x" * 37,
        "y" + ":%" + "z" * 37,
        "z" * 37,
        "long" * 31,
    ]
    records = [
        layout.RecordTemplate(name, 1, 1).encode(b"b", i, 1) for i, name in enumerate(names * 3)
    ]
    scanned = scan_records(join(records), 0)
    assert [scanned.topics[i] for i in scanned.topic_indexes] == names * 3


def test_a_record_without_its_trailer_is_named_by_its_position() -> None:
    good = join(encode([b"a", b"b"]))
    with pytest.raises(CorruptRecordError) as caught:
        scan_records(good + layout.encode_record_field(b"z" * 200), 1_000)
    assert caught.value.position == 1_000 + len(good)


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        st.binary(min_size=1, max_size=12),
        st.lists(
            st.one_of(st.sampled_from([0x12, 0x1A, 0, 1, 2, 3, 65, 66]), st.integers(0, 255)),
            min_size=1,
            max_size=9,
        ).map(bytes),
        st.tuples(st.text(max_size=3), st.text(max_size=3)).map(
            lambda names: layout.encode_front(names[:1], names[1])
        ),
    ),
    st.booleans(),
    st.booleans(),
)
def test_what_is_taken_without_the_parser_the_parser_takes_too(
    rest: bytes, has_key: bool, has_tag: bool
) -> None:
    if rest and fronts.is_plain(rest, has_key, has_tag):
        parsed = fronts.front_of(rest)
        assert parsed is not None
        assert (len(parsed.keys), len(parsed.tag)) == (has_key, has_tag)
        assert fronts.names_hold(parsed, has_key, has_tag, False)
        assert "" not in parsed.keys


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("alike", [True, False])
def test_a_sharding_key_without_its_hash_is_refused(count: int, victim: int, alike: bool) -> None:
    bodies = [b"body" if alike else b"b" * (1 + index % 3) for index in range(count)]
    front = layout.encode_front(sharding_key="s")
    records = encode(bodies, front=front, sharding_key="s")
    assert prove(records) is not None
    records[victim] = encode(bodies, front=front)[victim]
    assert prove(records) is None


@pytest.mark.parametrize("count", COUNTS)
def test_an_empty_sharding_key_is_none(count: int) -> None:
    assert prove(encode([b"body"] * count, front=b"\x2a\x02\x0a\x00")) is not None


def test_a_short_key_and_tag_need_no_parser() -> None:
    for keys, tag in ((["k"], ""), (["order-1"], "red"), ([], "red")):
        assert fronts.is_plain(layout.encode_front(keys, tag), bool(keys), bool(tag))
    assert not fronts.is_plain(layout.encode_front(["k"], "a|b"), True, True)
    assert not fronts.is_plain(layout.encode_front(["k"], "red"), True, False)


@pytest.mark.parametrize("size", [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, 0x1FFFFF, 0x200000])
def test_a_record_field_is_found_whole_or_not_at_all(size: int) -> None:
    head = b"\x0a" + layout.encode_varint(size)
    data = b"??" + head + bytes(size) + b"!"
    end = len(data) - 1
    assert record_field_at(data, 2, end) == (size, len(head))
    assert record_field_at(data, 2, len(data)) == (size, len(head))
    assert record_field_at(data, 1, end) == (-1, 0), "another tag"
    for cut in {2, 3, 2 + len(head) - 1, end - 1} - {end}:
        assert record_field_at(data, 2, cut) == (-1, 0)
        assert record_field_at(data[:cut], 2, cut) == (-1, 0)


def test_a_length_may_be_written_wider_than_it_need_be_up_to_five_octets() -> None:
    for padded in (b"\x83\x00", b"\x83\x80\x00", b"\x83\x80\x80\x80\x00"):
        data = b"\x0a" + padded + b"abc"
        assert record_field_at(data, 0, len(data)) == (3, 1 + len(padded))
    data = b"\x0a\x83\x80\x80\x80\x80\x00abc"
    assert record_field_at(data, 0, len(data)) == (-1, 0)
