"""A request assembled by hand has the bytes that protobuf writes; batches are cut at their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq._batching import (
    PreparedRecord,
    RecordEncoder,
    make_front,
    split_records,
)
from protomq.errors import ConfigurationError, MessageTooLargeError
from protomq.v1.record_pb2 import Attributes, Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.wire.hashing import crc32c, key_hash_of, sharding_hash_of, tag_code_of
from protomq.wire.record import RecordTemplate, encode_record_field, encode_varint

text = st.text(max_size=12)
tags = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="|"), max_size=12)
records = st.builds(
    lambda body, key, tag, flags, born: (
        body,
        key,
        tag,
        make_front(key, (), tag, None, None, "")[1],
        flags,
        born,
        0,
    ),
    st.binary(max_size=300),
    text,
    tags,
    st.integers(0, 15),
    st.integers(0, 2**63 - 1),
)


def by_protobuf(
    topic: str,
    identity: tuple[int, int],
    prepared: list[PreparedRecord],
    first_sequence: int,
    queue_id: int,
    wait_store_ok: bool,
    previous_sequence: int | None = None,
) -> bytes:
    messages = [
        Record(
            body=body, keys=[key] if key else [], tag=tag, topic=topic, tag_code=tag_code_of(tag), key_hash=key_hash_of(key),
            producer_id=identity[0], producer_epoch=identity[1], sequence=first_sequence + index, sharding_hash=0,
            crc32c=crc32c(b"\x0a" + encode_varint(len(body)) + body + front),
            born_time_ms=born, flags=flags, queue_id=0, store_time_ms=0, queue_offset=0, physical_offset=0,
        )
        for index, (body, key, tag, front, flags, born, _) in enumerate(prepared)
    ]  # fmt: skip
    request = SendRequest(
        records=messages,
        topic=topic,
        queue_id=queue_id,
        record_sizes=[message.ByteSize() for message in messages],
    )
    if not wait_store_ok:
        request.wait_store_ok = False
    if previous_sequence is not None:
        request.previous_sequence = previous_sequence
    return request.SerializeToString(deterministic=True)


@given(
    st.lists(records, min_size=1, max_size=8),
    st.text("abcXYZ09_-%", min_size=1, max_size=127),
    st.integers(1, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**62),
    st.integers(0, 1023),
    st.booleans(),
    st.none() | st.integers(0, 2**64 - 1),
)
def test_a_request_has_the_bytes_that_protobuf_writes(
    prepared: list[PreparedRecord],
    topic: str,
    producer_id: int,
    epoch: int,
    first: int,
    queue_id: int,
    wait: bool,
    previous: int | None,
) -> None:
    encoder = RecordEncoder(topic, producer_id, epoch)
    fast = b"".join(encoder.encode_request(prepared, first, queue_id, wait, previous))
    identity = (producer_id, epoch)
    assert fast == by_protobuf(topic, identity, prepared, first, queue_id, wait, previous)


@given(
    st.binary(max_size=200), st.one_of(st.none(), text), st.lists(text.filter(bool), max_size=3), tags,
    st.dictionaries(text, text, max_size=3), st.one_of(st.none(), text), text,
)  # fmt: skip
def test_a_record_with_everything_equals_the_one_of_the_template(
    body: bytes,
    key: str | None,
    keys: list[str],
    tag: str,
    properties: dict[str, str],
    sharding_key: str | None,
    born_host: str,
) -> None:
    first_key, front, flags = make_front(key, keys, tag, properties, sharding_key, born_host)
    encoder = RecordEncoder("orders", 7, 1)
    sharding_hash = sharding_hash_of(sharding_key or "")
    prepared = (body, first_key, tag, front, flags, 123, sharding_hash)
    request = encoder.encode_request([prepared], 5, 0)[0]
    record = RecordTemplate("orders", 7, 1).encode(
        body,
        5,
        123,
        key=first_key,
        tag=tag,
        sharding_key=sharding_key or "",
        front=front,
        flags=flags,
    )
    assert request.startswith(encode_record_field(record))

    parsed = SendRequest.FromString(request).records[0]
    all_keys = [key, *keys] if key else keys
    assert list(parsed.keys) == all_keys
    assert dict(parsed.properties) == properties
    assert parsed.attributes == Attributes(sharding_key=sharding_key or "", born_host=born_host)
    assert bool(parsed.flags & 8) == (len(all_keys) > 1)
    assert parsed.sharding_hash == sharding_hash
    assert parsed.key_hash == key_hash_of(all_keys[0] if all_keys else "")


def test_sizes_around_each_length_of_a_varint() -> None:
    encoder = RecordEncoder("t", 1, 0)
    for size in (0, 1, 27, 28, 29, 126, 127, 128, 16_280, 16_383, 16_384, 2_097_151, 2_097_152):
        prepared: PreparedRecord = (bytes(size), "", "", b"", 0, 0, 0)
        assert b"".join(encoder.encode_request([prepared], 0, 0)) == by_protobuf(
            "t", (1, 0), [prepared], 0, 0, True
        )


def test_long_keys_and_tags_are_written_right() -> None:
    for size in (127, 128, 300):
        _, front, _ = make_front("k" * size, (), "t" * size, None, None, "")
        record = Record.FromString(front)
        assert (record.keys[0], record.tag) == ("k" * size, "t" * size)


@pytest.mark.parametrize("tag", ["a || b", "a|b", "line\n", "\x00", "\x85"])
def test_a_tag_that_nobody_could_ask_for_is_refused(tag: str) -> None:
    for properties in (None, {"p": "v"}):
        with pytest.raises(ConfigurationError, match=r"a tag has no \|"):
            make_front("k", (), tag, properties, None, "")


@pytest.mark.parametrize("keys", [("a", ""), ("a",) * 65])
def test_keys_that_nobody_could_ask_for_and_too_many_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="at most 64 keys"):
        make_front(None, keys, "", None, None, "")


def test_more_than_32_kib_beside_the_body_is_refused() -> None:
    with pytest.raises(MessageTooLargeError):
        make_front("k", (), "", {"p": "x" * 32_768}, None, "")
    with pytest.raises(MessageTooLargeError):
        make_front(None, (), "t" * 40_000, None, None, "")


@pytest.mark.parametrize("topic", ["", "x" * 128])
def test_a_topic_that_cannot_be_is_refused(topic: str) -> None:
    with pytest.raises(ConfigurationError):
        RecordEncoder(topic, 1, 0)


@given(st.lists(st.integers(0, 400), max_size=40), st.integers(1, 2000), st.integers(1, 10))
def test_splitting_keeps_order_and_limits(sizes: list[int], size_max: int, count_max: int) -> None:
    prepared: list[PreparedRecord] = [(bytes(size), "", "", b"", 0, 0, 0) for size in sizes]
    encoder = RecordEncoder("topic", 1, 0)
    parts = list(split_records(prepared, encoder.fixed_size_bytes, size_max, count_max))
    assert [record for part in parts for record in part] == prepared
    for part in parts:
        assert 1 <= len(part) <= count_max
        written = sum(map(len, encoder.encode_request(part, 0, 0))) - len(
            encoder.encode_tail([], 0)
        )
        assert len(part) == 1 or written <= size_max
