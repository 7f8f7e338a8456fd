"""The template writes what protobuf writes; the seal has the size and the bytes that the format page says."""

from __future__ import annotations

import re
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.v1.record_pb2 import Attributes, Record, RecordBatch, Seal
from protomq.wire import record as layout
from protomq.wire.hashing import (
    crc32c,
    extend_crc32c,
    hash63,
    key_hash_of,
    sharding_hash_of,
    tag_code_of,
)

text = st.text(max_size=20)


@given(
    st.binary(max_size=400), st.lists(text, max_size=3), text, st.dictionaries(text, text, max_size=3), text, text,
    st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(0, 15),
    st.none() | st.integers(0, 2**64 - 1),
)  # fmt: skip
def test_the_template_writes_the_bytes_that_protobuf_writes(
    body: bytes, keys: list[str], tag: str, properties: dict[str, str], sharding_key: str, born_host: str,
    producer_id: int, epoch: int, sequence: int, flags: int, due_time_ms: int | None,
) -> None:  # fmt: skip
    fast = layout.RecordTemplate("orders", producer_id, epoch).encode(
        body, sequence, 1_700_000_000_000, key=keys[0] if keys else "", tag=tag,
        front=layout.encode_front(keys, tag, properties, sharding_key, born_host), flags=flags,
        sharding_key=sharding_key, due_time_ms=due_time_ms,
    )  # fmt: skip
    slow = Record(
        body=body, keys=keys, tag=tag, topic="orders", tag_code=tag_code_of(tag),
        key_hash=key_hash_of(keys[0]) if keys else 0, producer_id=producer_id, producer_epoch=epoch, sequence=sequence,
        sharding_hash=sharding_hash_of(sharding_key), born_time_ms=1_700_000_000_000, flags=flags, queue_id=0, store_time_ms=0,
        queue_offset=0, physical_offset=0,
    )  # fmt: skip
    if sharding_key or born_host:
        slow.attributes.CopyFrom(Attributes(sharding_key=sharding_key, born_host=born_host))
    slow.properties.update(properties)
    if due_time_ms is not None:
        slow.due_time_ms, slow.flags = due_time_ms, flags | layout.FLAG_DUE_TIME
    front = b"\x0a" + layout.encode_varint(len(body)) + body + layout.encode_front(keys, tag, properties, sharding_key, born_host)
    assert layout.front_end(fast, 0, len(fast)) == len(front)
    assert fast.startswith(front)
    slow.crc32c = crc32c(front)
    assert Record.FromString(fast) == slow
    # upb sorts "ab" before "a"; ours is the order of the octets, which all languages can make.
    if len(properties) < 2:
        assert fast == slow.SerializeToString(deterministic=True)
        batch = RecordBatch(records=[slow]).SerializeToString(deterministic=True)
        assert layout.encode_record_field(fast) == batch


def test_the_example_of_the_wire_page_is_checked_by_hand() -> None:
    """With nothing but protobuf and a CRC, as the page says: made from a message of five fields, checked by a walk."""
    page = (Path(__file__).parents[3] / "docs/wire.md").read_text()
    octets = bytes.fromhex("".join(re.findall(r"```front\n(.*?)```", page, re.DOTALL)[0].split()))
    told = re.findall(r"CRC-32C of these octets is `([0-9A-F]{8})`", page)
    front = Record(body=b"hello", keys=["k1"], tag="en", properties={"a": "b"})
    front.attributes.sharding_key = "s"
    assert front.SerializeToString(deterministic=True) == octets
    assert f"{google_crc32c.value(octets):08X}" == told[0]
    whole = Record(crc32c=int(told[0], 16), topic="t", flags=0)
    whole.MergeFrom(front)
    record, at = whole.SerializeToString(), 0
    while record[at] >> 3 <= 5:
        at += 2 + record[at + 1]
    assert google_crc32c.value(record[:at]) == whole.crc32c


@pytest.mark.parametrize("topic", ["", "x" * 128, "ä" * 64])
def test_a_topic_that_does_not_fit_is_refused(topic: str) -> None:
    with pytest.raises(ValueError, match="a topic has"):
        layout.RecordTemplate(topic, 1, 1)


@given(st.binary(max_size=60), st.lists(st.text(max_size=4), max_size=3), st.integers(0, 200))
def test_a_front_that_is_cut_is_no_front(body: bytes, keys: list[str], cut: int) -> None:
    record = layout.RecordTemplate("orders", 1, 1).encode(
        body, 0, 0, front=layout.encode_front(keys)
    )
    end = layout.front_end(record, 0, len(record))
    cut %= end
    bounds = {0, 2 + len(body)}
    for key in keys:
        bounds.add(max(bounds) + 2 + len(key.encode()))
    if cut in bounds:
        assert layout.front_end(record, 0, cut) == cut
    else:
        with pytest.raises(ValueError, match=r"does not end|outside"):
            layout.front_end(record, 0, cut)


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
    parts = append[:5], append[5:]
    assert layout.seal_of(parts, len(append), 0xDEADBEEF, 3, 4096, 1, 99, 4000) == (encoded, crc)


def test_message_ids_read_back_and_garbage_is_refused() -> None:
    identity = (2**64 - 1, 2**32 - 1, 7)
    assert layout.decode_message_id(layout.encode_message_id(*identity)) == identity
    for wrong in ("", "1", "g" * 40, "0" * 41, "0x" + "0" * 38, "+" + "0" * 39, "0_" * 20, " " + "0" * 39, "٣" * 40):
        with pytest.raises(ValueError, match="hex digits"):
            layout.decode_message_id(wrong)


def test_hashes_have_known_values() -> None:
    # CRC-32C and CRC-32 of "123456789" are the check values of both algorithms (RFC 3720 and ITU-T V.42).
    assert hash63(b"123456789") == 0xE3069283 | (0xCBF43926 & 0x7FFFFFFF) << 32
    assert (tag_code_of(""), key_hash_of("")) == (0, 0)


def test_a_sharding_key_whose_checksum_is_0_has_the_hash_1() -> None:
    """0 says that there is no key."""
    assert crc32c(b"order-43043437002") == 0
    assert (sharding_hash_of(""), sharding_hash_of("order-43043437002")) == (0, 1)
    assert sharding_hash_of("s") == crc32c(b"s")
