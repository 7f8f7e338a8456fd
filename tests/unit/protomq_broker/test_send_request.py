"""Reading requests: the slow path gives the same bytes as the fast one, fills in what is missing and refuses what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.record_pb2 import Attributes, Record, RecordBatch, Transit
from protomq.v1.send_service_pb2 import SendRequest
from protomq.wire import record as layout
from protomq.wire.hashing import crc32c, key_hash_of, tag_code_of
from protomq_broker import send_request
from protomq_broker.bare_record import bare_body_of
from protomq_broker.send_request import ProducerIdentity, parse_send_header, read_records
from protomq_broker.store.log.append import RecordRegion
from protomq_runtime.errors import Code, ServiceError


def read(
    payload: bytes | bytearray, *, due_time_ms: int | None = None
) -> tuple[RecordRegion, bool]:
    return read_records(
        payload,
        parse_send_header(payload),
        now_ms=lambda: 777,
        identify=lambda count: ProducerIdentity(99, 0, 1_000),
        due_time_ms=due_time_ms,
    )


def records_of(region: RecordRegion) -> list[Record]:
    return list(RecordBatch.FromString(bytes(region.data)).records)


def whole_request(count: int, *, sizes: bool = True) -> bytes:
    template = layout.RecordTemplate("orders", 42, 1)
    records = [
        template.encode(
            b"body %d" % i,
            10 + i,
            5,
            key="k",
            tag="t",
            front=layout.encode_front(["k"], "t", {"b": "1", "a": "2"}),
        )
        for i in range(count)
    ]
    rest = SendRequest(
        topic="orders", record_sizes=[len(record) for record in records] if sizes else []
    )
    return b"".join(map(layout.encode_record_field, records)) + rest.SerializeToString()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_whole_request_is_taken_as_it_is(count: int) -> None:
    payload = whole_request(count)
    region, identified_here = read(payload)
    assert not identified_here
    assert payload.startswith(bytes(region.data))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_sizes_may_be_left_out(count: int) -> None:
    assert bytes(read(whole_request(count, sizes=False))[0].data) == bytes(
        read(whole_request(count))[0].data
    )


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_slow_path_writes_the_same_bytes(count: int) -> None:
    fast, _ = read(whole_request(count))
    scattered = SendRequest(topic="orders").SerializeToString() + whole_request(count, sizes=False)
    slow, identified_here = read(scattered)  # the topic stands first, so the layout does not hold
    assert bytes(slow.data) == bytes(fast.data)
    assert not identified_here


def test_a_record_with_a_body_alone_gets_everything_else() -> None:
    request = SendRequest(
        topic="orders", records=[Record(body=b"hello", keys=["a", "b"], tag="red"), Record()]
    )
    region, identified_here = read(request.SerializeToString())
    assert identified_here
    first, second = records_of(region)
    front = b"\x0a\x05hello" + layout.encode_front(["a", "b"], "red")
    assert (first.producer_id, first.sequence, second.sequence) == (99, 1_000, 1_001)
    assert (first.tag_code, first.key_hash) == (tag_code_of("red"), key_hash_of("a"))
    assert (first.born_time_ms, first.crc32c, first.topic) == (777, crc32c(front), "orders")
    assert first.flags == layout.FLAG_MANY_KEYS
    assert second.HasField("body")
    assert second.body == b""


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(max_size=50), st.lists(st.text(min_size=1, max_size=4), max_size=3),
                  st.text(max_size=4).filter(lambda tag: not layout.NOT_IN_TAGS.search(tag)),
                  st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3), st.text(max_size=4)),
        min_size=1, max_size=30,
    )
)  # fmt: skip
def test_what_a_naive_client_sends_is_what_is_stored(items: list) -> None:
    records = [
        Record(
            body=body,
            keys=keys,
            tag=tag,
            properties=properties,
            attributes=Attributes(sharding_key=sharding_key),
        )
        for body, keys, tag, properties, sharding_key in items
    ]
    region, _ = read(SendRequest(records=records, topic="orders").SerializeToString())
    for stored, sent in zip(records_of(region), records, strict=True):
        for name in ("body", "keys", "tag", "properties", "attributes"):
            assert getattr(stored, name) == getattr(sent, name)


def refusal(payload: bytes) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        read(payload)
    return caught.value


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (Record(body=b"x", topic="other"), "records[0].topic"),
        (Record(body=b"x", crc32c=1), "records[0].crc32c"),
        (Record(body=b"x", flags=32), "records[0].flags"),
    ],
)
def test_a_wrong_field_is_named(record: Record, field: str) -> None:
    error = refusal(SendRequest(records=[record], topic="orders").SerializeToString())
    assert error.code == Code.INVALID_ARGUMENT
    assert error.field_violations[0][0] == field


FRONT = Record(body=b"x", keys=["k"], tag="t", attributes=Attributes(sharding_key="s"))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"crc32c": 7}, "crc32c"),
        ({"tag_code": 7}, "tag_code"),
        ({"key_hash": 7}, "key_hash"),
        ({"sharding_hash": 7}, "sharding_hash"),
        ({"flags": layout.FLAG_MANY_KEYS}, "flags"),
        ({"flags": 1 << 5}, "flags"),
        ({"flags": 1 << 8}, "flags"),
        ({"flags": layout.FLAG_TRANSIT}, "flags"),
        ({"flags": 1 << 31}, "flags"),
        ({"transit": Transit()}, "transit"),
    ],
)
@pytest.mark.parametrize("index", [0, 2])
def test_what_is_not_the_producers_or_wrong_is_refused_and_named(
    wrong: dict, field: str, index: int
) -> None:
    records = [FRONT] * index + [Record(**wrong)]
    records[index].MergeFrom(FRONT)
    error = refusal(SendRequest(records=records, topic="orders").SerializeToString())
    assert error.code == Code.INVALID_ARGUMENT
    assert error.field_violations[0][0] == f"records[{index}].{field}"


CODE_0 = "vqsvpqrvuqvuuqtwvwsptqpppppppppppppppppp"
"""Its CRC-32C is 0, and its CRC-32 without the top bit."""


@pytest.mark.parametrize(("named", "field"), [({"tag": CODE_0}, "tag"), ({"keys": [CODE_0, "k"]}, "keys")])
@pytest.mark.parametrize("is_canonical", [True, False])
def test_a_tag_or_key_whose_code_says_none_is_refused(named: dict, field: str, is_canonical: bool) -> None:
    assert tag_code_of(CODE_0) == key_hash_of(CODE_0) == 0
    payload = SendRequest(records=[Record(body=b"x", **named)], topic="orders").SerializeToString()
    if is_canonical:
        key, tag = named.get("keys", [""])[0], named.get("tag", "")
        front = layout.encode_front([key] if key else [], tag, {})
        record = layout.RecordTemplate("orders", 42, 1).encode(b"x", 10, 5, key=key, tag=tag, front=front)
        rest = SendRequest(topic="orders", record_sizes=[len(record)])
        payload = layout.encode_record_field(record) + rest.SerializeToString()
    error = refusal(payload)
    assert error.code == Code.INVALID_ARGUMENT
    assert error.field_violations[0][0] == f"records[0].{field}"


def test_what_a_client_computed_itself_is_taken() -> None:
    front = FRONT.SerializeToString()
    whole = Record(
        crc32c=crc32c(front), tag_code=tag_code_of("t"), key_hash=key_hash_of("k"),
        sharding_hash=crc32c(b"s"), born_time_ms=5,
    )  # fmt: skip
    whole.MergeFrom(FRONT)
    region, _ = read(SendRequest(records=[whole], topic="orders").SerializeToString())
    (stored,) = records_of(region)
    assert (stored.crc32c, stored.born_time_ms) == (crc32c(front), 5)
    bare, _ = read(SendRequest(records=[FRONT], topic="orders").SerializeToString())
    assert (records_of(bare)[0].crc32c, records_of(bare)[0].sharding_hash) == (
        crc32c(front),
        crc32c(b"s"),
    )


ZERO_CHECKSUM = "order-43043437002"
"""A sharding key whose CRC-32C is 0."""
ZERO_CODE = "vqsvpqrvuqvuuqtwvwsptqpppppppppppppppppp"
"""A text whose hash63 is 0."""


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("of_one_size", [True, False])
def test_a_sharding_key_whose_checksum_is_0_is_stored_with_the_hash_1_whoever_sends_it(
    count: int, of_one_size: bool
) -> None:
    """Also a client that does not know of that, and writes whole records with its CRC-32C: 0."""
    template = layout.RecordTemplate("orders", 42, 1)
    bodies = [b"body" if of_one_size else bytes(1 + index % 3) for index in range(count)]
    front = layout.encode_front(sharding_key=ZERO_CHECKSUM)
    encoded = [template.encode(body, index, 5, front=front) for index, body in enumerate(bodies)]
    rest = SendRequest(topic="orders", record_sizes=list(map(len, encoded))).SerializeToString()
    whole = b"".join(map(layout.encode_record_field, encoded)) + rest
    parsed = SendRequest(topic="orders", records=map(Record.FromString, encoded)).SerializeToString()
    bare = SendRequest(
        topic="orders",
        records=[Record(body=body, attributes=Attributes(sharding_key=ZERO_CHECKSUM)) for body in bodies],
    ).SerializeToString()
    for payload in (whole, parsed, bare):
        stored = records_of(read(payload)[0])
        assert [record.body for record in stored] == bodies
        assert [record.sharding_hash for record in stored] == [1] * count


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (Record(body=b"x", tag=ZERO_CODE), "tag"),
        (Record(body=b"x", keys=[ZERO_CODE]), "keys"),
        (Record(body=b"x", keys=["k", ZERO_CODE]), "keys"),
    ],
)
def test_a_name_whose_code_says_that_there_is_none_is_refused(record: Record, field: str) -> None:
    error = refusal(SendRequest(records=[record], topic="orders").SerializeToString())
    assert error.code == Code.INVALID_ARGUMENT
    assert error.field_violations[0][0] == f"records[0].{field}"


def test_a_crc_covers_the_octets_in_the_order_in_which_they_were_sent() -> None:
    """Not in canonical order, with a field of the trailer between, and a length that is wider than it need be."""
    parts = (b"\x1a\x01t", b"\x22\x06\x0a\x01b\x12\x01x", b"\x22\x06\x0a\x01a\x12\x01y", b"\x0a\x81\x00x")
    born = Record(born_time_ms=5).SerializeToString()
    check = Record(crc32c=crc32c(b"".join(parts))).SerializeToString()
    record = b"".join((parts[0], born, *parts[1:], check))
    tail = SendRequest(topic="orders").SerializeToString()
    region, _ = read(layout.encode_record_field(record) + tail)
    (stored,) = records_of(region)
    canonical = b"\x0a\x01x" + layout.encode_front((), "t", {"a": "y", "b": "x"})
    assert (stored.crc32c, stored.born_time_ms) == (crc32c(canonical), 5)
    for at in range(len(parts[0])):
        damaged = bytearray(record)
        damaged[at] ^= 4
        error = refusal(layout.encode_record_field(bytes(damaged)) + tail)
        assert error.code == Code.INVALID_ARGUMENT


@given(
    st.permutations((("a", "1"), ("b", "2"), ("c", "3"))),
    st.booleans(),
    st.sampled_from((0, 1, 2)),
    st.integers(1, 30),
)
def test_a_crc_is_never_put_over_other_octets_than_those_it_came_with(
    properties: list[tuple[str, str]], is_right: bool, cut_count: int, count: int
) -> None:
    """With a whole trailer the octets are stored as they came, in any order, and so is the CRC; what is rewritten is compared first."""
    fronts = b"".join(layout.encode_front(properties={name: value}) for name, value in properties)
    template = layout.RecordTemplate("orders", 42, 1)
    fields = []
    for index in range(count):
        record = bytearray(template.encode(b"x", 10 + index, 5, front=fronts))
        if not is_right:
            record[layout.CRC32C_AT] ^= 1
        # Without its last fields, which the broker stamps, it is no trailer, and the record is rewritten.
        fields.append(layout.encode_record_field(bytes(record[: len(record) - 10 * cut_count])))
    payload = b"".join((*fields, SendRequest(topic="orders").SerializeToString()))
    if cut_count and not is_right:
        assert refusal(payload).field_violations[0][0] == "records[0].crc32c"
        return
    canonical = layout.encode_front(properties=dict(properties))
    front = b"\x0a\x01x" + (canonical if cut_count else fronts)
    region, _ = read(payload)
    assert bytes(region.data).count(front) == count
    assert {record.crc32c == crc32c(front) for record in records_of(region)} == {is_right}


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("wide", [False, True])
def test_due_times_are_taken_as_they_come_or_replaced_by_the_requests(
    count: int, wide: bool
) -> None:
    template = layout.RecordTemplate("orders", 42, 1)
    records = [template.encode(b"later", i, 5, due_time_ms=9) for i in range(count)]
    tail = SendRequest(topic="orders", record_sizes=[len(record) for record in records])
    whole = b"".join(map(layout.encode_record_field, records))
    payload = tail.SerializeToString() + whole if wide else whole + tail.SerializeToString()
    for wanted_ms in (None, 77):
        region, _ = read(payload, due_time_ms=wanted_ms)
        assert region.flags == layout.FLAG_DUE_TIME
        due_times_ms = [record.due_time_ms for record in records_of(region)]
        assert due_times_ms == [wanted_ms or 9] * count
        assert region.due_times_ms is not None
        assert np.array_equal(np.atleast_1d(region.due_times_ms), due_times_ms)
        assert [record.body for record in records_of(region)] == [b"later"] * count


def test_records_without_room_for_a_due_time_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    template = layout.RecordTemplate("orders", 42, 1)
    whole = [template.encode(b"later", i, 5) for i in range(30)]
    some = [template.encode(b"later", i, 5, due_time_ms=9 if i else None) for i in range(3)]
    bare = [Record(body=b"later").SerializeToString()]
    rewritten: list[int] = []
    rewrite = send_request._rewrite_record

    def counted(record: Record, raw: memoryview, index: int, *args: Any) -> bytes:
        rewritten.append(index)
        return rewrite(record, raw, index, *args)

    monkeypatch.setattr(send_request, "_rewrite_record", counted)
    for records, rewritten_count in ((whole, 0), (whole[:1], 0), (some, 3), (bare, 1)):
        rewritten.clear()
        tail = SendRequest(topic="orders", record_sizes=[len(record) for record in records])
        payload = b"".join(map(layout.encode_record_field, records)) + tail.SerializeToString()
        region, _ = read(payload, due_time_ms=77)
        assert [record.due_time_ms for record in records_of(region)] == [77] * len(records)
        assert [record.body for record in records_of(region)] == [b"later"] * len(records)
        assert len(rewritten) == rewritten_count
    by_hand = SendRequest(topic="orders", records=[Record(body=b"x", flags=layout.FLAG_DUE_TIME)])
    assert refusal(by_hand.SerializeToString()).reason == "INVALID_ARGUMENT"


def test_a_record_whose_tag_is_written_wider_than_it_need_be_is_a_record() -> None:
    check = Record(body=b"x", crc32c=crc32c(b"\x0a\x01x")).SerializeToString()
    wide = b"\x8a\x00" + layout.encode_varint(len(check)) + check
    region, _ = read(SendRequest(topic="orders").SerializeToString() + wide)
    assert [record.body for record in records_of(region)] == [b"x"]


def test_no_records_is_an_error() -> None:
    assert (
        refusal(SendRequest(topic="orders").SerializeToString()).field_violations[0][0] == "records"
    )


def test_limits_are_named() -> None:
    large = Record(body=bytes(layout.BODY_SIZE_MAX_BYTES + 1))
    error = refusal(SendRequest(records=[large], topic="orders").SerializeToString())
    assert (error.reason, error.metadata["limit_bytes"]) == (
        "MESSAGE_TOO_LARGE",
        str(layout.BODY_SIZE_MAX_BYTES),
    )
    wordy = Record(body=b"x", properties={"a": "b" * layout.FRONT_SIZE_MAX_BYTES})
    error = refusal(SendRequest(records=[wordy], topic="orders").SerializeToString())
    assert error.metadata["field"] == "records[0].properties"


def test_a_body_at_the_limit_is_taken() -> None:
    record = Record(body=bytes(layout.BODY_SIZE_MAX_BYTES))
    region, _ = read(SendRequest(records=[record], topic="orders").SerializeToString())
    assert len(records_of(region)[0].body) == layout.BODY_SIZE_MAX_BYTES


@pytest.mark.parametrize("bomb", [b"\x0a\x00", b"\x0a\x02\x0a\x00", b"\x0a\x04\x12\x00\x12\x00"])
def test_a_bomb_of_tiny_records_is_counted_before_it_is_parsed(bomb: bytes) -> None:
    assert refusal(bomb * (1 << 20)).reason == "MESSAGE_TOO_LARGE"


def test_a_record_full_of_tiny_fields_is_measured_before_it_is_parsed() -> None:
    payload = (
        layout.encode_record_field(b"\x12\x00" * (2 << 20))
        + SendRequest(topic="orders").SerializeToString()
    )
    assert refusal(payload).reason == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("payload", [b"\xff", b"\x0a\x05ab", b"\x0b" * 200, b"\x0a\x02\xff\xff"])
def test_garbage_is_invalid(payload: bytes) -> None:
    assert refusal(payload).code == Code.INVALID_ARGUMENT


def test_mixed_producers_are_refused() -> None:
    records = [
        Record(body=b"a", producer_id=1, sequence=1),
        Record(body=b"b", producer_id=1, sequence=9),
    ]
    error = refusal(SendRequest(records=records, topic="orders").SerializeToString())
    assert error.field_violations[0][0] == "records[1].sequence"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 5_000), st.integers(0, 255), st.sampled_from([1, 3, 30]))
def test_a_damaged_request_is_refused_or_reads_as_valid_records(
    position: int, octet: int, count: int
) -> None:
    payload = bytearray(whole_request(count))
    payload[position % len(payload)] = octet
    code = None
    try:
        topic = parse_send_header(bytes(payload)).topic
        if topic:  # the service has looked the topic up before it reads the records
            assert {record.topic for record in records_of(read(bytes(payload))[0])} == {topic}
    except ServiceError as error:
        code = error.code
    assert code in (None, Code.INVALID_ARGUMENT)


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_large_records_of_one_size_are_taken(count: int) -> None:
    template = layout.RecordTemplate("orders", 42, 1)
    records = [template.encode(bytes(2 << 20), i, 5) for i in range(count)]
    rest = SendRequest(topic="orders", record_sizes=[len(record) for record in records])
    region, _ = read(b"".join(map(layout.encode_record_field, records)) + rest.SerializeToString())
    assert [len(record.body) for record in records_of(region)] == [2 << 20] * count


@pytest.mark.parametrize("sizes", [True, False])
def test_one_large_record_among_many_is_taken(sizes: bool) -> None:
    template = layout.RecordTemplate("orders", 42, 1)
    bodies = [bytes(3 << 20) if i == 20 else b"small" for i in range(40)]
    records = [template.encode(body, i, 5) for i, body in enumerate(bodies)]
    rest = SendRequest(topic="orders", record_sizes=[len(record) for record in records] if sizes else [])
    region, _ = read(b"".join(map(layout.encode_record_field, records)) + rest.SerializeToString())
    assert [record.body for record in records_of(region)] == bodies
    naive = SendRequest(topic="orders", records=[Record(body=body) for body in bodies])
    assert [record.body for record in records_of(read(naive.SerializeToString())[0])] == bodies


_varints = st.integers(0, 300).map(layout.encode_varint)
_wide = st.sampled_from((b"\x80\x00", b"\x81\x80\x00"))
_pieces = st.one_of(
    st.just(b"\x22\x06orders"),
    st.just(b"\x22\x05other"),
    st.just(b"\x22\x86\x00orders"),
    st.tuples(st.sampled_from((b"\x28", b"\x38", b"\xa8\x00", b"\x78")), _varints | _wide).map(b"".join),
    st.sampled_from((b"\x0a\x00", b"\x8a\x00\x02\x0a\x00", b"\x53\x54", b"\x32\x00", b"\x32\x04\x07\x00\x00\x00")),
)  # fmt: skip
_records = st.one_of(
    st.binary(max_size=300).map(lambda body: Record(body=body).SerializeToString()),
    st.binary(max_size=9).map(lambda body: b"\x0a" + bytes((len(body) | 0x80, 0)) + body),
    st.tuples(st.binary(max_size=5), st.text(max_size=2)).map(
        lambda parts: Record(body=parts[0], tag=parts[1]).SerializeToString()
    ),
    st.binary(max_size=12),
)


def outcome(payload: bytes) -> object:
    """All that comes of reading a request: the region, or the error."""
    try:
        region, identified_here = read(payload)
    except ServiceError as error:
        return str(error), error.field_violations
    except ValueError as error:  # no topic: the service has looked at it before
        return str(error)
    assert type(region.data) is bytearray
    values = (getattr(region, name) for name in RecordRegion.__slots__)
    plain = [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    return plain, identified_here


@settings(max_examples=400, deadline=None)
@given(_records, st.lists(_pieces, max_size=4), st.booleans())
def test_a_bare_record_is_written_as_the_slow_path_writes_it(
    record: bytes, pieces: list[bytes], has_topic: bool
) -> None:
    head = b"\x0a" + layout.encode_varint(len(record))
    topic = b"\x22\x06orders" if has_topic else b""
    payload = b"".join((head, record, topic, *pieces))
    as_it_is = outcome(payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(send_request, "bare_body_of", lambda _: None)
        assert outcome(payload) == as_it_is


@pytest.mark.parametrize(
    ("record", "rest", "is_bare"),
    [
        (Record(body=b"hello"), b"\x22\x06orders", True),
        (Record(body=b""), b"\x22\x06orders\x28\x03\x38\x01", True),
        (Record(), b"\x22\x06orders", False),
        (Record(body=b"hello", tag="t"), b"\x22\x06orders", False),
        (Record(body=b"hello"), b"\x22\x06orders\x0a\x00", False),
        (Record(body=b"hello"), b"\x22\x06orders\x8a\x00\x00", False),
        (Record(body=bytes(layout.BODY_SIZE_MAX_BYTES)), b"\x22\x06orders", True),
        (Record(body=bytes(layout.BODY_SIZE_MAX_BYTES + 1)), b"\x22\x06orders", False),
    ],
)
def test_what_counts_as_a_bare_record(record: Record, rest: bytes, is_bare: bool) -> None:
    payload = layout.encode_record_field(record.SerializeToString()) + rest
    assert bare_body_of(payload) == (record.body if is_bare else None)


# What nobody could find, or read.


def canonical(count: int, *, sizes_differ: bool = False, **last: Any) -> bytes:
    """A request in canonical form, of which the last record is written with `last`."""
    template = layout.RecordTemplate("orders", 42, 1)
    records = []
    for index in range(count):
        named: dict[str, Any] = {"keys": ["k"], "tag": "tt"} | (last if index == count - 1 else {})
        keys, tag = named.pop("keys"), named.pop("tag")
        records.append(
            template.encode(
                b"b" * (9 + sizes_differ * index),
                index,
                5,
                **{
                    "key": keys[0],
                    "tag": tag,
                    "front": layout.encode_front(keys, tag),
                    "flags": layout.FLAG_MANY_KEYS if len(keys) > 1 else 0,
                }
                | named,
            )
        )
    rest = SendRequest(topic="orders", record_sizes=[len(record) for record in records])
    return b"".join(map(layout.encode_record_field, records)) + rest.SerializeToString()


@pytest.mark.parametrize("sizes_differ", [False, True])
@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize(
    ("last", "field"),
    [
        ({"tag": "a|"}, "tag"),
        ({"tag": "a\n"}, "tag"),
        ({"tag": "a\x7f"}, "tag"),
        ({"keys": [""]}, "keys"),
        ({"keys": ["k", ""]}, "keys"),
        ({"keys": ["k"] * (layout.KEYS_MAX + 1)}, "keys"),
        ({"key": ""}, "key_hash"),
        ({"tag": "tt", "front": layout.encode_front(["k"], "uu") + layout.encode_front((), "tt")}, "crc32c"),
        *(({"flags": code}, "flags") for code in range(4, 8)),
    ],
)
def test_what_makes_a_message_unfindable_or_unreadable_is_refused(
    count: int, sizes_differ: bool, last: dict[str, Any], field: str
) -> None:
    payload = canonical(count, sizes_differ=sizes_differ)
    assert read(payload)[0].count == count
    payload = canonical(count, sizes_differ=sizes_differ, **last)
    if field == "crc32c":  # two tags: the last one counts, and it is rewritten
        assert records_of(read(payload)[0])[-1].tag == "tt"
        return
    error = refusal(payload)
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert error.field_violations[0][0] == f"records[{count - 1}].{field}"


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (Record(tag="a||b"), "tag"),
        (Record(keys=["a", ""]), "keys"),
        (Record(keys=["a"] * 65), "keys"),
        (Record(flags=4), "flags"),
    ],
)
def test_so_it_is_from_a_client_that_writes_no_trailer(record: Record, field: str) -> None:
    error = refusal(SendRequest(records=[Record(), record], topic="orders").SerializeToString())
    assert error.field_violations[0][0] == f"records[1].{field}"


@pytest.mark.parametrize("sizes_differ", [False, True])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_all_keys_of_a_message_are_noted_for_the_index(count: int, sizes_differ: bool) -> None:
    keys = ["first", "second", "third"]
    region, _ = read(canonical(count, sizes_differ=sizes_differ, keys=keys))
    at = 0 if region.starts is None else int(region.starts[-1])
    assert list(region.more_keys) == [(at, key_hash_of(key)) for key in keys[1:]]
    unflagged = canonical(count, sizes_differ=sizes_differ, keys=keys, flags=0)
    written, _ = read(unflagged)  # in another form than the canonical one: the broker sets the bit
    assert list(written.more_keys) == list(region.more_keys)
    assert bytes(written.data) == bytes(region.data)
    assert list(read(canonical(count, sizes_differ=sizes_differ))[0].more_keys) == []


@pytest.mark.parametrize(
    "request_",
    [
        SendRequest(records=[Record()], topic="orders"),
        SendRequest(records=[Record(body=b"")], topic="orders"),
        SendRequest(records=[Record(keys=["k"], producer_id=3)], topic="orders"),
        SendRequest(records=[Record(tag="t", crc32c=crc32c(b"\x1a\x01t"))], topic="orders"),
    ],
)
def test_a_body_that_is_not_there_is_an_empty_one_and_is_written(request_: SendRequest) -> None:
    region, _ = read(request_.SerializeToString())
    (stored,) = records_of(region)
    assert stored.HasField("body")
    assert stored.body == b""
    assert stored.crc32c == crc32c(b"\x0a\x00" + layout.encode_front(stored.keys, stored.tag))
