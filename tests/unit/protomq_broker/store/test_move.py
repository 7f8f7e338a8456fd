"""A message that moves is stamped, not rebuilt: its front, its id and its CRC stay, and it says where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.wire.hashing import crc32c
from protomq.wire.record import (
    FLAG_COMMITTED,
    FLAG_DUE_TIME,
    FLAG_EXPIRED,
    FLAG_KIND_COPY,
    FLAG_KIND_HALF,
    FLAG_MANY_KEYS,
    FLAG_TRANSIT,
    RecordTemplate,
    encode_front,
    encode_record_field,
    front_end,
)
from protomq_broker.store.log.append import RecordRegion
from protomq_broker.store.log.first_copies import ROWS_MIN, first_copies
from protomq_broker.store.log.move import move_records
from protomq_broker.store.log.record_region import prove_region, set_kind, stamp_region
from protomq_broker.store.log.transit import LAST_ERROR_SIZE_MAX_BYTES
from tests.support.moves import move_record
from tests.support.region_parts import parts_of

from .log_helpers import scan_records

WORDS = st.text("abcäß ", min_size=1, max_size=20)
CODED = ("crc32c", "producer_id", "producer_epoch", "sequence", "born_time_ms", "key_hash", "tag_code", "sharding_hash")  # fmt: skip


class Message(NamedTuple):
    """What a producer says."""

    body: bytes
    keys: list[str]
    tag: str
    properties: dict[str, str]
    sharding_key: str
    due_time_ms: int | None


MESSAGES = st.builds(
    Message,
    st.binary(max_size=40) | st.binary(min_size=120, max_size=140) | st.just(bytes(20_000)),
    st.lists(WORDS, max_size=3),
    st.sampled_from(["", "t", "tag"]),
    st.dictionaries(WORDS, WORDS, max_size=2),
    st.sampled_from(["", "shard"]),
    st.none() | st.integers(1, 1 << 60),
)
TOPICS = st.text("abc%", min_size=1, max_size=127)


def stored(messages: Sequence[Message], topic: str, kind: int, queue_offset: int) -> bytes:
    """The record fields as they stand in the log, for queue 3 and the time 77."""
    template = RecordTemplate(topic, 7, 1)
    records = [
        template.encode(
            m.body,
            10 + index,
            5,
            key=m.keys[0] if m.keys else "",
            tag=m.tag,
            sharding_key=m.sharding_key,
            front=encode_front(m.keys, m.tag, m.properties, m.sharding_key),
            flags=FLAG_MANY_KEYS if len(m.keys) > 1 else 0,
            due_time_ms=m.due_time_ms,
        )
        for index, m in enumerate(messages)
    ]
    region = prove_region(
        bytearray().join(map(encode_record_field, records)), topic, [len(r) for r in records]
    )
    assert region is not None
    parts = parts_of(region)
    for part in parts:
        set_kind(part, kind)
        stamp_region(part, 3, 77, queue_offset, 1000)
    return bytes(bytearray().join(part.data for part in parts))


def places(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and sizes of record fields that follow one another."""
    found = scan_records(data, 0)
    return found.positions, found.sizes


def octets_of(data: bytes) -> list[bytes]:
    """Fields 1 to 5 of each record, as they stand."""
    starts, sizes = places(data)
    fields = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    records = [encode_back(field) for field in fields]
    return [record[: front_end(record, 0, len(record))] for record in records]


def encode_back(field: bytes) -> bytes:
    """The record of a field."""
    for head in (2, 3, 4, 5):
        if encode_record_field(field[head:]) == field:
            return field[head:]
    raise AssertionError("no canonical head")


def records_of(region: RecordRegion) -> list[Record]:
    """As a reader gets them."""
    return list(RecordBatch.FromString(bytes(region.data)).records)


@given(
    st.lists(MESSAGES, min_size=1, max_size=6),
    TOPICS,
    TOPICS,
    TOPICS,
    st.sampled_from([0, FLAG_KIND_HALF]),
    st.integers(0, 200),
    st.text(max_size=300) | st.none(),
    st.booleans(),
    st.sampled_from([0, FLAG_COMMITTED, FLAG_EXPIRED]),
)
def test_moved_twice_a_message_is_what_it_was_and_says_where_it_stood_first(
    messages: list[Message],
    topic: str,
    retry: str,
    target: str,
    kind: int,
    attempts: int,
    error: str | None,
    has_delay: bool,
    marks: int,
) -> None:
    data = stored(messages, topic, kind, 9 if kind == 0 else -1)
    before = RecordBatch.FromString(data).records
    fronts = octets_of(data)
    due = np.arange(100, 100 + len(messages), dtype=np.uint64) if has_delay else None
    errors = None if error is None else [error] * len(messages)
    first = move_records(
        data, *places(data), retry, due_times_ms=due, attempts=attempts, last_errors=errors, marks=marks
    )
    stamp_region(first, 1, 88, 20, 2000)
    second = move_records(bytes(first.data), *places(bytes(first.data)), target)
    for region, name in ((first, retry), (second, target)):
        assert octets_of(bytes(region.data)) == fronts
        assert list(map(crc32c, fronts)) == [record.crc32c for record in before]
        scanned = scan_records(bytes(region.data), 0)
        assert scanned.key_hashes.tolist() == np.atleast_1d(region.key_hashes).tolist()
        assert scanned.tag_codes.tolist() == np.atleast_1d(region.tag_codes).tolist()
        assert list(scanned.more_keys) == list(region.more_keys)
        assert region.identities is not None
        assert region.identities.tolist() == [[7, 1, 10 + index] for index in range(len(messages))]
        for old, new in zip(before, records_of(region), strict=True):
            assert new.topic == name
            assert [getattr(old, field) for field in CODED] == [getattr(new, field) for field in CODED]  # fmt: skip
            assert new.flags & ~FLAG_DUE_TIME == (old.flags & 0xF) | FLAG_KIND_COPY | FLAG_TRANSIT | marks
            assert new.transit.origin_topic == topic
            assert new.transit.origin_queue_id == 3
            assert new.transit.origin_queue_offset == old.queue_offset
            assert new.transit.first_store_time_ms == 77
            assert new.transit.attempt == attempts
            wanted = (error or "").encode()[:LAST_ERROR_SIZE_MAX_BYTES].decode(errors="ignore")
            assert new.transit.last_error == wanted
    assert [record.due_time_ms for record in records_of(first)] == (
        [0] * len(messages) if due is None else due.tolist()
    )
    assert first.flags == FLAG_KIND_COPY | (FLAG_DUE_TIME if has_delay else 0)
    assert second.flags == FLAG_KIND_COPY
    assert not any(record.HasField("due_time_ms") for record in records_of(second))


@given(
    st.lists(MESSAGES, min_size=2, max_size=5),
    TOPICS,
    TOPICS,
    st.integers(0, 3),
    st.none() | st.text(max_size=5),
    st.none() | st.integers(0, 1 << 62),
    st.sampled_from([{}, {"is_half": True}, {"replayed_group": "group"}, {"marks": FLAG_EXPIRED}]),
)
def test_one_by_one_gives_the_copies_of_the_batch(
    messages: list[Message],
    topic: str,
    target: str,
    attempts: int,
    error: str | None,
    due_time_ms: int | None,
    more: dict[str, Any],
) -> None:
    data, twice = stored(messages, topic, 0, 0), False
    while True:
        starts, sizes = places(data)
        count = len(messages)
        together = move_records(
            data, starts, sizes, target, attempts=attempts,
            due_times_ms=None if due_time_ms is None else np.full(count, due_time_ms, np.uint64),
            last_errors=None if error is None else [error] * count, **more,
        )  # fmt: skip
        assert together.starts is not None
        assert together.sizes is not None
        assert together.identities is not None
        more_keys: dict[int, list[int]] = {start: [] for start in together.starts.tolist()}
        for start, key_hash in together.more_keys:
            more_keys[start].append(key_hash)
        for row, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            alone = move_record(
                data[start : start + size], target, attempts=attempts, due_time_ms=due_time_ms, last_error=error, **more
            )
            at = int(together.starts[row])
            assert alone.data == together.data[at : at + int(together.sizes[row])]
            assert (alone.starts, alone.sizes, alone.due_times_ms) == (None, None, due_time_ms)
            assert [key_hash for _, key_hash in alone.more_keys] == more_keys[at]
            assert (alone.flags, alone.topic, alone.count) == (together.flags, target, 1)
            assert alone.tag_codes == np.atleast_1d(together.tag_codes)[row]
            assert alone.key_hashes == np.atleast_1d(together.key_hashes)[row]
            assert alone.identities is not None
            assert alone.identities.tolist() == [together.identities[row].tolist()]
        if twice:
            return
        # Moved once, each has transit.
        stamp_region(together, 1, 88, 20, 2000)
        data, twice = bytes(together.data), True


def alike_messages(message: Message, count: int) -> list[Message]:
    """Messages of one size and one shape whose octets differ."""
    return [message._replace(body=bytes((row,)) + message.body[1:]) for row in range(count)]


@given(MESSAGES, st.integers(3, 6), TOPICS, TOPICS, st.integers(0, 2), st.none() | st.just("why"), st.booleans())
def test_copies_of_records_that_are_alike_are_those_of_each(
    message: Message, count: int, topic: str, target: str, attempts: int, error: str | None, are_delayed: bool
) -> None:
    data = stored(alike_messages(message, count), topic, 0, 4)
    due_times_ms = np.arange(70, 70 + count, dtype=np.uint64) if are_delayed else None
    for _ in range(2):  # the second time each has transit
        starts, sizes = places(data)
        together = move_records(data, starts, sizes, target, due_times_ms=due_times_ms, attempts=attempts, last_errors=error)
        alone = [
            move_record(
                data[start : start + size],
                target,
                due_time_ms=None if due_times_ms is None else int(due_times_ms[row]),
                attempts=attempts,
                last_error=error,
            )
            for row, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True))
        ]
        assert together.data == b"".join(each.data for each in alone)
        for name in ("identities", "key_hashes", "tag_codes"):
            assert np.array_equal(getattr(together, name), np.vstack([getattr(each, name) for each in alone]).squeeze())
        assert {each.flags for each in alone} == {together.flags}
        stamp_region(together, 1, 88, 20, 2000)
        data = bytes(together.data)


class Failed(NamedTuple):
    """How the deliveries of a message failed; `was_moved`: it was moved before."""

    message: Message
    was_moved: bool
    attempts: int
    error: str | None


SMALL_MESSAGES = MESSAGES.filter(lambda m: len(m.body) < 200)
FAILED = st.builds(Failed, SMALL_MESSAGES, st.booleans(), st.integers(0, 2), st.none() | st.sampled_from(["", "why", "ä" * 300]))
FAILED_ALIKE = st.tuples(FAILED, st.integers(2, 5)).map(lambda m: [m[0]] * m[1])


@given(st.lists(FAILED, min_size=2, max_size=5) | FAILED_ALIKE, TOPICS, TOPICS, st.booleans())
def test_each_copy_of_a_batch_says_what_happened_to_its_own_message(
    failed: list[Failed], topic: str, target: str, says_errors: bool
) -> None:
    fields = []
    for one in failed:
        field = stored([one.message], topic, 0, 0)
        if one.was_moved:
            region = move_record(field, "between", attempts=1, last_error="the first")
            stamp_region(region, 1, 88, 20, 2000)
            field = bytes(region.data)
        fields.append(field)
    data = b"".join(fields)
    attempts = [one.attempts for one in failed]
    errors = [one.error for one in failed] if says_errors else None
    starts, sizes = places(data)
    together = move_records(data, starts, sizes, target, attempts=attempts, last_errors=errors)
    alone = [
        move_record(field, target, attempts=one.attempts, last_error=one.error if says_errors else None)
        for field, one in zip(fields, failed, strict=True)
    ]
    assert together.data == b"".join(region.data for region in alone)
    for region in (together, *alone):
        stamp_region(region, 3, 88, 5, 3000)
    for one, record in zip(failed, records_of(together), strict=True):
        wanted = one.error if says_errors and one.error is not None else "the first" if one.was_moved else ""
        assert record.transit.last_error == wanted.encode()[:LAST_ERROR_SIZE_MAX_BYTES].decode(errors="ignore")
        assert record.transit.attempt == one.attempts + one.was_moved
        assert record.transit.origin_topic == topic
    assert {record.queue_offset for record in records_of(together)} == {5 + row for row in range(len(failed))}


FIRST_MOVES = MESSAGES.map(lambda m: m._replace(keys=m.keys[:1], due_time_ms=None))


ALIKE = st.tuples(FIRST_MOVES, st.integers(ROWS_MIN, ROWS_MIN + 5)).map(lambda m: [m[0]] * m[1])


@given(st.lists(FIRST_MOVES, min_size=1, max_size=ROWS_MIN + 1) | ALIKE, TOPICS)
def test_the_short_way_of_a_first_move_gives_what_the_long_one_gives(
    messages: list[Message], topic: str
) -> None:
    data = stored(messages, topic, FLAG_KIND_HALF, -1)
    starts, sizes = places(data)
    fields = [
        data[start : start + size]
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]
    long = move_records(data, starts, sizes, topic, marks=FLAG_COMMITTED)
    short = first_copies(topic, 3, fields, [77] * len(fields))
    for region in (long, short):
        stamp_region(region, 3, 88, 5, 3000)
    assert short.data == long.data
    for name in ("starts", "sizes", "tag_codes", "key_hashes", "identities"):
        wanted, given_ = getattr(long, name), getattr(short, name)
        assert type(given_) is type(wanted)
        assert np.array_equal(given_, wanted)
    for name in ("topic", "count", "producer_id", "flags", "due_times_ms"):
        assert getattr(short, name) == getattr(long, name)


def test_copies_that_are_made_together_have_the_times_of_each() -> None:
    data = stored([Message(b"body", [], "tag", {}, "", None)], "topic", FLAG_KIND_HALF, -1)
    times_ms = [77 + number // 2 for number in range(ROWS_MIN + 3)]
    together = first_copies("topic", 3, [data] * len(times_ms), times_ms)
    each = [first_copies("topic", 3, [data], [time_ms]) for time_ms in times_ms]
    assert together.data == b"".join(region.data for region in each)
    assert together.stride == len(each[0].data)
    found = [record.transit.first_store_time_ms for record in records_of(together)]
    assert found == times_ms


def test_attempts_add_up_and_the_last_error_stays_until_there_is_another() -> None:
    message = Message(b"body", [], "", {}, "", None)
    region = move_record(stored([message], "t", 0, 0), "r", attempts=1, last_error="first")
    region = move_record(bytes(region.data), "r")
    region = move_record(bytes(region.data), "r", attempts=1)
    (record,) = records_of(region)
    assert (record.transit.attempt, record.transit.last_error) == (2, "first")
    region = move_record(bytes(region.data), "dlq", attempts=1, last_error="ä" * 600)
    (record,) = records_of(region)
    assert record.transit.attempt == 3
    assert record.transit.last_error == "ä" * (LAST_ERROR_SIZE_MAX_BYTES // 2)


@given(st.lists(MESSAGES, min_size=1, max_size=2), st.data())
def test_what_is_no_record_is_refused_or_gives_a_record_of_the_right_shape(
    messages: list[Message], data: st.DataObject
) -> None:
    field = bytearray(stored(messages[:1], "topic", 0, 0))
    at = data.draw(st.integers(0, len(field) - 1))
    field[at] ^= data.draw(st.integers(1, 255))
    try:
        region = move_record(bytes(field), "target")
    except ValueError:  # DecodeError is one
        return
    assert region.count == 1


def test_cut_short_is_refused() -> None:
    field = stored([Message(b"body", ["k"], "", {}, "", None)], "topic", 0, 0)
    for size in range(len(field)):
        with pytest.raises(ValueError, match=r"record|field"):
            move_record(field[:size], "target")


def test_records_that_are_alike_are_copied_as_those_that_are_not() -> None:
    alike = [Message(bytes([n]) * 300, ["k"], "t", {}, "", 99) for n in range(5)]
    other = Message(b"longer" * 99, ["k"], "t", {}, "", 99)

    def copies(messages: list[Message]) -> bytes:
        data = stored(messages, "from", 0, 7)
        return bytes(move_records(data, *places(data), "to").data)

    together = copies(alike)
    assert copies([*alike, other])[: len(together)] == together
    assert len(RecordBatch.FromString(together).records) == 5
