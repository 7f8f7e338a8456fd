"""Messages decoded by position are those that protobuf decodes, whatever stands in them."""

from __future__ import annotations

import pickle
import zlib
from datetime import UTC, datetime
from functools import partial
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protomq import _pull_answer, _record_columns
from protomq._message import DamagedMessage, Message, StoredMessage
from protomq._pull_answer import (
    AnswerMessages,
    PullAnswer,
    _parse_pull_answer,
    decode_messages,
    decode_pull_answer,
    decode_records,
)
from protomq._record_columns import RecordsOfOneSize
from protomq._types import MessageQueue, PullStatus
from protomq.errors import CompressionError, CorruptMessageError, ProtocolError, ProtomqError
from protomq.v1 import pull_service_pb2, record_pb2
from protomq.wire.record import (
    COMPRESSION_ZLIB,
    FLAG_TRANSIT,
    FLAGS_AT,
    RecordTemplate,
    encode_front,
    encode_record_field,
    encode_seal,
    front_end,
    trailer_size_bytes,
)
from tests.support.fake_server import encode_pull_answer

QUEUE = MessageQueue("topic", "broker-a", 3)
TEXTS = st.text(max_size=20)
BODIES = st.one_of(st.binary(max_size=200), st.integers(0, 40_000).map(bytes))


def make_record(
    body: bytes = b"body",
    *,
    keys: list[str] | None = None,
    tag: str = "",
    properties: dict[str, str] | None = None,
    sharding_key: str = "",
    born_host: str = "",
    flags: int = 0,
    sequence: int = 0,
    due_time_ms: int | None = None,
) -> bytes:
    keys = keys or []
    front = encode_front(keys, tag, properties, sharding_key, born_host)
    template = RecordTemplate("topic", 0xABCDEF, 5)
    return template.encode(
        body,
        sequence,
        1_700_000_000_123,
        key=keys[0] if keys else "",
        tag=tag,
        sharding_key=sharding_key,
        front=front,
        flags=flags,
        due_time_ms=due_time_ms,
    )


records = st.builds(
    make_record,
    BODIES,
    keys=st.lists(TEXTS.filter(bool), max_size=3),
    tag=TEXTS,
    properties=st.dictionaries(TEXTS, st.text(max_size=300), max_size=4),
    sharding_key=TEXTS,
    born_host=TEXTS,
    sequence=st.integers(0, 2**64 - 1),
)


records_of_one_size = st.integers(0, 300).flatmap(
    lambda size_bytes: st.lists(
        st.builds(
            make_record,
            st.binary(min_size=size_bytes, max_size=size_bytes),
            keys=st.sampled_from([["k1"], ["k2"]]),
            sequence=st.integers(0, 2**64 - 1),
        ),
        min_size=2,
        max_size=6,
    )
)


def decode(answer: bytes) -> list[Message]:
    return decode_messages(decode_pull_answer(answer), QUEUE)


def state_of(message: Message) -> tuple[object, ...]:
    rest = message._rest
    return type(message), message.stored_body, rest, message.queue_offset, message.queue


@settings(max_examples=80, deadline=None)
@example([make_record(bytes(252), keys=["k1"])] * 2, 0, (262, 0x10))  # the octet that names the topic
@example([make_record(bytes(250), keys=["k1"]), make_record(bytes(252), keys=["k1"])], 0, (260, 0x20))
@given(
    st.one_of(st.lists(records, min_size=1, max_size=6), records_of_one_size),
    st.integers(0, 10_000),
    st.one_of(st.none(), st.tuples(st.integers(0, 10_000), st.integers(1, 255))),
)
def test_the_columns_and_the_loop_agree(
    encoded: list[bytes], offset: int, damage: tuple[int, int] | None
) -> None:
    fields = [(offset + i, encode_record_field(record)) for i, record in enumerate(encoded)]
    answer = decode_pull_answer(encode_pull_answer(1, offset + len(fields), 0, 99, fields))
    if damage is not None:
        raw = bytearray(answer.raw)
        raw[answer.base + damage[0] % (len(raw) - answer.base)] ^= damage[1]
        answer = answer._replace(raw=bytes(raw))
    with (
        mock.patch.object(_pull_answer, "_COLUMNS_COUNT_MIN", 1),
        mock.patch.object(_record_columns, "_RUN_COUNT_MIN", 1),
    ):
        messages = AnswerMessages(answer, QUEUE)
    half = len(fields) // 2
    for start, stop in ((0, len(fields)), (half, len(fields))):
        part = slice(start, stop)
        one_by_one = partial(
            decode_records, answer.raw, answer.base,
            answer.starts[part], answer.sizes[part], answer.queue_offsets[part], QUEUE,
        )  # fmt: skip
        fast = messages._cut(start, stop) if messages._columns is not None else None
        if fast is not None:
            assert list(map(state_of, fast)) == list(map(state_of, one_by_one()))
        elif damage is None:
            assert any(isinstance(message, StoredMessage) for message in one_by_one())


@settings(max_examples=80, deadline=None)
@example([make_record(bytes(200), keys=["k1"])] * 3, (210, 0x01))  # the second octet of the second record's length
@given(
    st.one_of(st.lists(records, min_size=1, max_size=6), records_of_one_size),
    st.one_of(st.none(), st.tuples(st.integers(0, 10_000), st.integers(1, 255))),
)
def test_the_loop_says_of_each_record_what_it_says_of_it_alone(
    encoded: list[bytes], damage: tuple[int, int] | None
) -> None:
    """It reads the head of a record that looks like the one before no second time."""
    fields = list(map(encode_record_field, encoded))
    raw = bytearray(b"".join(fields))
    if damage is not None:
        raw[damage[0] % len(raw)] ^= damage[1]
    sizes = list(map(len, fields))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]

    def decoded(part: slice) -> list[tuple[object, ...]] | None:
        offsets = range(len(sizes))[part]
        try:
            messages = decode_records(bytes(raw), 0, starts[part], sizes[part], offsets, QUEUE)
        except ProtocolError:
            return None
        return list(map(state_of, messages))

    alone = [decoded(slice(index, index + 1)) for index in range(len(sizes))]
    whole = decoded(slice(None))
    assert whole == (None if None in alone else [state for some in alone if some for state in some])


@pytest.mark.parametrize("run", [1, 2, 7, 8, 9, 64, 65, 100, 200])
def test_records_of_one_size_are_cut_wherever_they_stand(run: int) -> None:
    """With a seal behind each run, as a broker writes it behind each append."""
    seal = encode_seal(
        0, b"x", epoch=1, start_position=0, record_count=1, store_time_ms=1, synced_position=0
    )
    regions, starts, sizes = b"", [], []
    for i in range(200):
        field = encode_record_field(make_record(b"body-%03d" % i, keys=[f"k{i:03d}"], sequence=i))
        starts.append(len(regions))
        sizes.append(len(field))
        regions += field + (seal if i % run == run - 1 else b"")
    answer = PullAnswer(
        PullStatus.FOUND, 300, 0, 300, b"header" + regions, 6, starts, sizes, range(100, 300)
    )
    messages = AnswerMessages(answer, QUEUE)
    assert isinstance(messages._columns, RecordsOfOneSize) == (run >= 8)
    got = [m for start in range(0, 200, 33) for m in messages.part(start, min(start + 33, 200))]
    assert [message.body for message in got] == [b"body-%03d" % i for i in range(200)]
    assert [message.key for message in got] == [f"k{i:03d}" for i in range(200)]
    assert [message.queue_offset for message in got] == list(range(100, 300))
    one_by_one = decode_records(answer.raw, 6, starts, sizes, range(100, 300), QUEUE)
    assert list(map(state_of, messages.part(0, 200))) == list(map(state_of, one_by_one))


def test_many_messages_with_one_damaged_one() -> None:
    fields = [(i, encode_record_field(make_record(b"body-%d" % i, sequence=i))) for i in range(200)]
    answer = encode_pull_answer(1, 200, 0, 200, fields).replace(b"body-77", b"bodY-77")
    messages = decode(answer)
    assert [message.stored_body for message in messages[76:79]] == [
        b"body-76",
        b"bodY-77",
        b"body-78",
    ]
    with pytest.raises(CorruptMessageError):
        _ = messages[77].body
    assert messages[78].body == b"body-78"


def test_a_popped_message_that_retention_has_moved_has_one_place() -> None:
    """It stands in queue 0 of %RETRY%<group>, whose number its record has, and is the message of its first place all the same."""
    message = Message.from_record(make_record(), QUEUE, 7)
    assert record_pb2.Record.FromString(message.record).queue_id == 0
    assert (message.topic, message.queue_id, message.queue_offset) == (*QUEUE[::2], 7)
    assert "topic/broker-a/3@7" in repr(message)


def assert_same(message: Message, record: record_pb2.Record) -> None:
    assert message.body == record.body == message.stored_body
    assert message.keys == tuple(record.keys)
    assert message.key == (record.keys[0] if record.keys else "")
    assert message.tag == record.tag
    assert message.properties == dict(record.properties)
    assert message.sharding_key == record.attributes.sharding_key
    assert message.born_host == record.attributes.born_host
    assert message.topic == QUEUE.topic
    assert message.queue_id == QUEUE.queue_id
    for name in (
        "tag_code", "key_hash", "producer_id", "producer_epoch", "sequence", "sharding_hash", "crc32c", "born_time_ms", "flags",
        "store_time_ms", "physical_offset",
    ):  # fmt: skip
        assert getattr(message, name) == getattr(record, name), name
    assert record_pb2.Record.FromString(message.record) == record


@settings(max_examples=40, deadline=None)
@given(st.lists(records, min_size=1, max_size=6), st.booleans(), st.booleans())
def test_messages_are_what_protobuf_parses(encoded: list[bytes], dense: bool, sealed: bool) -> None:
    fields = [encode_record_field(record) for record in encoded]
    offsets = (
        list(range(40, 40 + len(fields))) if dense else [40 + i * i + i for i in range(len(fields))]
    )
    if sealed:
        seal = encode_seal(
            0, b"x", epoch=1, start_position=0, record_count=1, store_time_ms=1, synced_position=0
        )
        regions, starts = b"", []
        for field in fields:
            starts.append(len(regions))
            regions += field + seal
        header = pull_service_pb2.PullResponse(
            status=pull_service_pb2.PULL_STATUS_FOUND, next_offset=offsets[-1] + 1, regions_size_bytes=len(regions),
            record_starts=starts, record_sizes=[len(field) for field in fields],
            queue_offsets=[] if dense else offsets, first_offset=offsets[0],
        )  # fmt: skip
        answer = header.SerializeToString() + regions
    else:
        answer = encode_pull_answer(
            1, offsets[-1] + 1, 7, 99, list(zip(offsets, fields, strict=True))
        )
    parsed = pull_service_pb2.PullResponse.FromString(answer)
    messages = decode(answer)
    assert [message.queue_offset for message in messages] == offsets
    assert len(parsed.records) == len(messages)
    for message, record in zip(messages, parsed.records, strict=True):
        assert_same(message, record)
        assert_same(pickle.loads(pickle.dumps(message)), record)


@settings(max_examples=30, deadline=None)
@given(st.lists(records, max_size=4), st.integers(0, 2**62), st.integers(0, 4))
def test_an_answer_in_any_order_of_fields_gives_the_same(
    encoded: list[bytes], offset: int, status: int
) -> None:
    parsed = [record_pb2.Record.FromString(record) for record in encoded]
    for i, record in enumerate(parsed):
        record.queue_offset = offset + i
    naive = pull_service_pb2.PullResponse(
        records=parsed, status=status, next_offset=offset + len(parsed), min_offset=1, end_offset=offset + 10,  # type: ignore[arg-type]
    )  # fmt: skip
    answer = decode_pull_answer(naive.SerializeToString())
    assert answer[:4] == (PullStatus(status), offset + len(parsed), 1, offset + 10)
    messages = decode_messages(answer, QUEUE)
    assert [message.queue_offset for message in messages] == [
        offset + i for i in range(len(parsed))
    ]
    for message, record in zip(messages, parsed, strict=True):
        assert_same(message, record)


def same_answer(one: PullAnswer, other: PullAnswer) -> bool:
    def view(answer: PullAnswer) -> object:
        starts = [answer.base + start for start in answer.starts]
        cut = [answer.raw[at : at + size] for at, size in zip(starts, answer.sizes, strict=True)]
        return answer[:4], cut, list(answer.queue_offsets)

    return view(one) == view(other)


def test_the_fast_and_the_slow_way_agree_on_the_answer() -> None:
    fields = []
    for i in range(5):
        record = record_pb2.Record.FromString(make_record(bytes(i * 100), keys=["k"], tag="t"))
        record.queue_offset = 12 + i
        fields.append((12 + i, encode_record_field(record.SerializeToString())))
    answer = encode_pull_answer(1, 17, 3, 20, fields)
    assert same_answer(decode_pull_answer(answer), _parse_pull_answer(answer))


def test_an_answer_cut_anywhere_is_an_error_not_a_wrong_message() -> None:
    fields = [
        (i, encode_record_field(make_record(b"b" * 50, keys=["key"], sequence=i))) for i in range(3)
    ]
    answer = encode_pull_answer(1, 3, 0, 3, fields)
    whole = [message.body for message in decode(answer)]
    assert whole == [b"b" * 50] * 3
    for cut in range(len(answer)):
        try:
            messages = decode(answer[:cut])
            bodies = [message.body for message in messages]
        except (ProtocolError, CorruptMessageError):
            continue
        assert bodies == []  # Only an answer without any message may pass: its header ended early.


TOUCHES = ("body", "key", "keys", "tag", "properties", "sharding_key", "born_host")


def assert_damaged(message: Message) -> None:
    for name in TOUCHES:
        with pytest.raises(CorruptMessageError) as caught:
            getattr(message, name)
        assert caught.value.metadata["queue_offset"] == str(message.queue_offset)


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("flags", [0, COMPRESSION_ZLIB])
def test_a_flipped_bit_anywhere_in_what_is_the_producers_is_found(count: int, flags: int) -> None:
    record = make_record(
        zlib.compress(b"x" * 64), keys=["key1", "key2"], tag="tag", properties={"name": "value"},
        sharding_key="shard", born_host="host", flags=flags,
    )  # fmt: skip
    end = len(record) - trailer_size_bytes(b"topic")
    field = encode_record_field(record)
    answer = bytearray(encode_pull_answer(1, count, 0, count, [(i, field) for i in range(count)]))
    victim = len(answer) - (count // 2 + 1) * len(field) + len(field) - len(record)
    victim_index = count - count // 2 - 1
    for bit in range(8 * end) if count == 1 else range(0, 8 * end, 5):
        answer[victim + bit // 8] ^= 1 << bit % 8
        messages = decode(bytes(answer))
        damaged = [isinstance(message, DamagedMessage) for message in messages]
        assert damaged == [index == victim_index for index in range(count)], bit
        message = messages[victim_index]
        assert_damaged(message)
        assert message.record == bytes(answer[victim : victim + len(record)])
        assert (message.queue_offset, message.message_id[:16]) == (victim_index, "0000000000ABCDEF")
        assert isinstance(pickle.loads(pickle.dumps(message)), DamagedMessage)
        answer[victim + bit // 8] ^= 1 << bit % 8
    assert [message.tag for message in decode(bytes(answer))] == ["tag"] * count


@pytest.mark.parametrize("count", [1, 100])
def test_messages_with_due_times_and_copies_are_read(count: int) -> None:
    """Fields between front and trailer that the producer's CRC does not cover."""
    transit = record_pb2.Record(
        transit=record_pb2.Transit(origin_topic="orders", attempt=2)
    ).SerializeToString()
    fields = []
    for i in range(count):
        record = make_record(b"b", keys=["k"], tag="t", due_time_ms=i if i % 2 else None, sequence=i)
        if i % 3 == 0:
            at = front_end(record, 0, len(record))
            moved = bytearray(record[:at] + transit + record[at:])
            moved[len(moved) + FLAGS_AT + 1] |= (FLAG_TRANSIT | 0x200) >> 8
            record = bytes(moved)
        fields.append((i, encode_record_field(record)))
    messages = decode(encode_pull_answer(1, count, 0, count, fields))
    for message, (_, field) in zip(messages, fields, strict=True):
        assert_same(message, record_pb2.RecordBatch.FromString(field).records[0])


def test_a_message_of_a_topic_that_is_not_the_queues_is_read_all_the_same() -> None:
    other = MessageQueue("another-topic", "broker-a", 0)
    message = Message.from_record(make_record(b"b", keys=["k"]), other)
    assert (message.body, message.key) == (b"b", "k")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_damaged_in_a_record_the_error_is_ours(data: st.DataObject) -> None:
    record = bytearray(
        make_record(
            b"body" * 5, keys=["k", "ä" * 70], tag="tag", properties={"a": "ü"}, born_host="h"
        )
    )
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    try:
        message = Message.from_record(bytes(record), QUEUE, 1)
        _ = (
            message.body,
            message.key,
            message.keys,
            message.tag,
            message.properties,
            message.born_host,
            message.record,
        )
        _ = (repr(message), message.message_id, message.flags, message.compression)
    except ProtomqError:
        return


def test_a_compressed_body_is_unpacked_when_it_is_touched() -> None:
    text = b"compress me " * 1000
    stored = zlib.compress(text)
    message = Message.from_record(make_record(stored, flags=COMPRESSION_ZLIB), QUEUE)
    assert message.compression == "zlib"
    assert message.body == text
    assert message.body is message.body
    assert message.stored_body == stored
    assert pickle.loads(pickle.dumps(message)).body == text


def test_a_body_that_unpacks_to_too_much_is_refused() -> None:
    bomb = zlib.compress(bytes(33 << 20))
    message = Message.from_record(make_record(bomb, flags=COMPRESSION_ZLIB), QUEUE)
    with pytest.raises(CompressionError):
        _ = message.body


def test_decoding_stops_where_it_is_told_to() -> None:
    fields = [(i, encode_record_field(make_record(b"%d" % i, sequence=i))) for i in range(10)]
    answer = decode_pull_answer(encode_pull_answer(1, 10, 0, 10, fields))
    messages = AnswerMessages(answer, QUEUE)
    assert [message.body for message in messages.part(3, 6)] == [b"3", b"4", b"5"]
    assert [message.queue_offset for message in messages.part(8, 10)] == [8, 9]


def test_unknown_header_fields_are_passed_over() -> None:
    field = encode_record_field(make_record(b"1"))
    answer = encode_pull_answer(1, 1, 0, 1, [(0, field)])
    header, regions = answer[: -len(field)], answer[-len(field) :]
    later = (
        header
        + b"\xa0\x06\x05"
        + b"\xaa\x06\x03abc"
        + b"\xa5\x06abcd"
        + b"\xa1\x06abcdefgh"
        + regions
    )
    assert [message.body for message in decode(later)] == [b"1"]


def test_a_record_without_the_stored_layout_is_refused() -> None:
    field = encode_record_field(record_pb2.Record(keys=["k"], body=b"").SerializeToString())
    with pytest.raises(ProtocolError):
        decode(encode_pull_answer(1, 1, 0, 1, [(0, field)]))


@pytest.mark.parametrize("born_time_ms", [253_402_300_799_999, 253_402_300_800_000, 1_700_000_000_123_456, 2**64 - 1])
def test_a_born_time_that_is_no_datetime_is_the_last_one(born_time_ms: int) -> None:
    record = RecordTemplate("topic", 7, 0).encode(b"x", 1, born_time_ms)
    message = Message.from_record(record, QUEUE, 9)
    assert message.born_time_ms == born_time_ms
    assert message.born_time.replace(microsecond=0) == datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_times_are_datetimes_in_utc() -> None:
    message = Message.from_record(make_record(b""), QUEUE, 9)
    assert message.born_time == datetime.fromtimestamp(1_700_000_000.123, UTC)
    assert message.message_id == "0000000000ABCDEF" + "00000005" + "0000000000000000"
    assert message.queue_offset == 9
    assert "topic/broker-a" in repr(message)


def test_fields_refuse_assignment_and_an_assigned_body_is_no_part_of_the_record() -> None:
    plain = Message.from_record(make_record(b"body", keys=["k"]), QUEUE, 7)
    stored = Message.from_record(make_record(zlib.compress(b"body"), flags=COMPRESSION_ZLIB), QUEUE, 7)
    assert (type(plain), type(stored)) == (Message, StoredMessage)
    for message in (plain, stored):
        size_bytes, record, stored_body = message.size_bytes, message.record, message.stored_body
        for name in ("queue", "queue_offset", "key", "properties", "stored_body"):
            with pytest.raises(AttributeError):
                setattr(message, name, None)
        message.body = b"unpacked further"
        assert (message.body, message.value(str)) == (b"unpacked further", "unpacked further")
        assert (message.size_bytes, message.record, message.stored_body) == (size_bytes, record, stored_body)
        assert pickle.loads(pickle.dumps(message)).body == b"body"
        message._forget_assigned()
        assert message.body == b"body"
