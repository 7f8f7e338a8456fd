"""The template writes what protobuf writes; the seal has the size and the bytes that the format page says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.record_pb2 import Attributes, Record, RecordBatch, Seal
from protomq.wire import record as layout
from protomq.wire.hashing import crc32c, extend_crc32c, hash63, key_hash_of, tag_code_of

text = st.text(max_size=20)


@given(
    st.binary(max_size=400), st.lists(text, max_size=3), text, st.dictionaries(text, text, max_size=3), text, text,
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(0, 15),
)  # fmt: skip
def test_the_template_writes_the_bytes_that_protobuf_writes(
    body: bytes, keys: list[str], tag: str, properties: dict[str, str], sharding_key: str, born_host: str,
    producer_id: int, epoch: int, sequence: int, flags: int,
) -> None:  # fmt: skip
    fast = layout.RecordTemplate("orders", producer_id, epoch).encode(
        body, sequence, 1_700_000_000_000, key=keys[0] if keys else "", tag=tag,
        front=layout.encode_front(keys, tag, properties, sharding_key, born_host), flags=flags,
    )  # fmt: skip
    slow = Record(
        body=body, keys=keys, tag=tag, topic="orders", tag_code=tag_code_of(tag),
        key_hash=key_hash_of(keys[0]) if keys else 0, producer_id=producer_id, producer_epoch=epoch, sequence=sequence,
        body_crc32c=crc32c(body), born_time_ms=1_700_000_000_000, flags=flags, queue_id=0, store_time_ms=0, queue_offset=0,
        physical_offset=0,
    )  # fmt: skip
    if sharding_key or born_host:
        slow.attributes.CopyFrom(Attributes(sharding_key=sharding_key, born_host=born_host))
    slow.properties.update(properties)
    assert Record.FromString(fast) == slow
    if (
        len(properties) < 2
    ):  # upb sorts "ab" before "a"; ours is the order of the octets, which all languages can make
        assert fast == slow.SerializeToString(deterministic=True)
        batch = RecordBatch(records=[slow]).SerializeToString(deterministic=True)
        assert layout.encode_record_field(fast) == batch


@pytest.mark.parametrize("topic", ["", "x" * 128, "ä" * 64])
def test_a_topic_that_does_not_fit_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match="a topic has"):
        layout.RecordTemplate(topic, 1, 1)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 2**32, 2**63])
def test_varints_are_the_shortest(value: int) -> None:
    encoded = layout.encode_varint(value)
    decoded = sum((octet & 0x7F) << 7 * index for index, octet in enumerate(encoded))
    assert decoded == value
    assert len(encoded) == max(1, -(-value.bit_length() // 7))


def test_a_seal_is_a_field_of_a_batch_and_covers_itself() -> None:
    append = layout.encode_record_field(layout.RecordTemplate("t", 1, 1).encode(b"x", 0, 0))
    encoded = layout.encode_seal(
        0xDEADBEEF,
        append,
        epoch=3,
        start_position=4096,
        record_count=1,
        store_time_ms=99,
        synced_position=4000,
    )
    assert len(encoded) == layout.SEAL_SIZE_BYTES == 53
    batch = RecordBatch.FromString(append + encoded)
    crc = extend_crc32c(extend_crc32c(crc32c(bytes.fromhex("efbeadde")), append), encoded[:49])
    assert list(batch.seals) == [
        Seal(
            epoch=3, start_position=4096, size_bytes=len(append), record_count=1, store_time_ms=99, synced_position=4000,
            crc32c=crc,
        )
    ]  # fmt: skip
    assert RecordBatch(seals=batch.seals).SerializeToString(deterministic=True) == encoded


def test_message_ids_read_back_and_garbage_is_refused() -> None:
    identity = (2**64 - 1, 2**32 - 1, 7)
    assert layout.decode_message_id(layout.encode_message_id(*identity)) == identity
    for wrong in ("", "1", "g" * 40, "0" * 41):
        with pytest.raises(ValueError):
            layout.decode_message_id(wrong)


def test_hashes_have_known_values() -> None:
    # CRC-32C and CRC-32 of "123456789" are the check values of both algorithms (RFC 3720 and ITU-T V.42).
    assert hash63(b"123456789") == 0xE3069283 | (0xCBF43926 & 0x7FFFFFFF) << 32
    assert (tag_code_of(""), key_hash_of("")) == (0, 0)
