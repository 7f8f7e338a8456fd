"""Reading a SendRequest: the fast way if its layout can be proved, else rewritten record by record.

The broker first parses only the header: SendRequest without `records`. The parser skips the records as unknown bytes, so four megabytes of
empty records cost nothing. Only bounded parts are parsed in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest
from protomq.wire import record as layout
from protomq.wire.hashing import crc32c, key_hash_of, sharding_hash_of, tag_code_of
from protomq.wire.varints import read_varint
from protomq_runtime.errors import Code, ServiceError, invalid_argument, unparsable

from .bare_record import bare_body_of, write_bare
from .store.log.append import RecordRegion
from .store.log.due_time_room import with_due_time
from .store.log.kinds import MIXED
from .store.log.record_region import prove_lone, prove_region, stamp_due_time
from .store.log.record_scan import record_field_at

FIELDS_BESIDE_RECORDS_MAX: Final = 64
"""Most top-level fields that a request without `record_sizes` may have beside its records."""

_EQUAL_SIZE_MIN_BYTES: Final = 2_048
"""Below this size, parsing a request is as fast as searching it."""
_FRONT_NUMBER_MAX: Final = 5
"""The producer writes the fields up to this number, and its CRC covers them."""
_TRAILER_ALLOWANCE_BYTES: Final = 512
"""Bytes allowed for a trailer in any form, when the bytes around a body are counted."""


class ProducerIdentity(NamedTuple):
    """The identity that the broker gives to messages without a producer id."""

    producer_id: int
    producer_epoch: int
    first_sequence: int


def parse_send_header(payload: bytes | bytearray) -> Any:
    """The request without its records: a message with topic, queue_id, wait_store_ok, and record_sizes as the bytes of the packed
    field (fixed32, little-endian). Raises ServiceError.
    """
    records_end = _end_of_equal_records(payload) if len(payload) >= _EQUAL_SIZE_MIN_BYTES else 0
    try:
        if records_end:
            # The parser copies unknown bytes. Skipping half a megabyte of records is worth the effort.
            header = _SendHeader.FromString(bytes(memoryview(payload)[records_end:]))
            if header.record_sizes:
                return header
        return _SendHeader.FromString(payload)
    except DecodeError as error:
        raise unparsable("protomq.v1.SendRequest") from error


def _end_of_equal_records(payload: bytes | bytearray) -> int:
    """Returns the end of the record fields at the start of a request if several have one size; else 0. The result only saves time: the
    records are proved later.
    """
    size, head = record_field_at(payload, 0, len(payload))
    stride = head + size
    if size < layout.FIXED_TRAILER_SIZE_BYTES:
        return 0
    # Each record has its size, four bytes, in `record_sizes`. The guess is right if the rest of the request is shorter than one record.
    count = len(payload) // (stride + 4)
    if count < 2:
        return 0
    end = stride * count
    for at in range(head):
        if payload[at:end:stride] != payload[at : at + 1] * count:
            return 0
    return end


def read_records(
    payload: bytes | bytearray,
    header: Any,
    *,
    now_ms: Callable[[], int],
    identify: Callable[[int], ProducerIdentity],
    due_time_ms: int | None = None,
) -> tuple[RecordRegion, bool]:
    """Returns the records of a request as a region, and whether the broker gave them their producer id.

    `header`: the result of `parse_send_header` for the same payload. The region may take over a bytearray as its data. `now_ms` gives the
    born time of messages without one. `identify(count)` gives an identity to messages without one. `due_time_ms`: replaces the due times of
    all messages. Raises ServiceError if the request is invalid.
    """
    topic, packed = header.topic, header.record_sizes
    if len(packed) > 4 * layout.RECORDS_PER_REQUEST_MAX:
        raise _too_many(len(packed) // 4, layout.RECORDS_PER_REQUEST_MAX)
    whole = payload if packed or type(payload) is bytes else bytes(payload)
    if (
        type(whole) is bytes
        and not packed
        and 0 < len(topic.encode()) <= layout.TOPIC_SIZE_MAX_BYTES
    ):
        body = bare_body_of(whole)
        if body is not None:
            return _bare_region(body, topic, now_ms(), identify(1)), True
    if len(packed) == 4:
        region = prove_lone(whole, topic, int.from_bytes(packed, "little"))
    elif packed and len(packed) % 4 == 0:
        region = prove_region(whole, topic, np.frombuffer(packed, np.uint32))
    else:
        region = prove_region(whole, topic, _find_record_sizes(whole))
    if region is not None:
        if not region.producer_id or (due_time_ms is not None and region.flags == MIXED):
            return _rewrite(bytes(region.data), topic, now_ms(), identify, due_time_ms)
        if due_time_ms is not None:
            if region.flags:
                stamp_due_time(region, due_time_ms)
            else:
                region = with_due_time(region, due_time_ms)
        return region, False
    return _rewrite(bytes(whole), topic, now_ms(), identify, due_time_ms)


def _bare_region(body: bytes, topic: str, now_ms: int, identity: ProducerIdentity) -> RecordRegion:
    data = write_bare(body, topic, *identity, now_ms)
    return RecordRegion(topic, data, 1, None, None, 0, 0, *identity)


def _find_record_sizes(payload: bytes | bytearray) -> Sequence[int]:
    """Returns the sizes of the records at the start of a request that does not state them; [] if other fields stand between them."""
    sizes: list[int] = []
    position, end = 0, len(payload)
    while position < end and payload[position] == layout.RECORD_TAG:
        size, head = record_field_at(payload, position, end)
        if size < 0:
            raise invalid_argument("records", "a record is cut short")
        sizes.append(size)
        if len(sizes) > layout.RECORDS_PER_REQUEST_MAX:
            raise _too_many(len(sizes), layout.RECORDS_PER_REQUEST_MAX)
        position += head + size
    return sizes


def _rewrite(
    payload: bytes,
    topic: str,
    now_ms: int,
    identify: Callable[[int], ProducerIdentity],
    due_time_ms: int | None,
) -> tuple[RecordRegion, bool]:
    """Rewrites each record in canonical form, and adds all missing fields."""
    spans = _check_bounds(payload)
    try:
        records = SendRequest.FromString(payload).records
    except DecodeError as error:
        raise invalid_argument("records", "a record does not parse as protomq.v1.Record") from error
    if not records:
        raise invalid_argument("records", "there must be at least one record")
    identity, identified_here = _identity_of(records, identify)
    template = layout.RecordTemplate(topic, identity.producer_id, identity.producer_epoch)
    encoded = [
        _rewrite_record(
            record,
            memoryview(payload)[slice(*spans[index])],
            index,
            topic,
            template,
            identity.first_sequence + index,
            now_ms,
            due_time_ms,
        )
        for index, record in enumerate(records)
    ]
    data = bytearray().join(layout.encode_record_field(record) for record in encoded)
    region = prove_region(data, topic, [len(record) for record in encoded])
    assert region is not None, "what the broker wrote itself must hold"
    return region, identified_here


def _rewrite_record(
    record: Record,
    raw: memoryview,
    index: int,
    topic: str,
    template: layout.RecordTemplate,
    sequence: int,
    now_ms: int,
    due_time_ms: int | None,
) -> bytes:
    where = f"records[{index}]"
    if record.HasField("topic") and record.topic != topic:
        raise invalid_argument(f"{where}.topic", f"differs from the request's topic {topic!r}")
    if len(record.body) > layout.BODY_SIZE_MAX_BYTES:
        raise _too_large(f"{where}.body", len(record.body), layout.BODY_SIZE_MAX_BYTES)
    if record.HasField("transit"):
        raise invalid_argument(f"{where}.transit", "is the broker's: it writes it when it moves a message")
    _check_flags(record.flags, f"{where}.flags")
    if record.flags & layout.FLAG_DUE_TIME and not record.HasField("due_time_ms"):
        raise invalid_argument(f"{where}.flags", "bit 4 says that there is a due_time_ms")
    if due_time_ms is None and record.HasField("due_time_ms"):
        due_time_ms = record.due_time_ms
    _check_codes(record, raw, where)
    _check_names(record, where)
    front_bytes = layout.encode_front(record.keys, record.tag, record.properties)
    if record.HasField("attributes"):
        record.attributes.DiscardUnknownFields()
        attributes = record.attributes.SerializeToString(deterministic=True)
        front_bytes += b"\x2a" + layout.encode_varint(len(attributes)) + attributes
    if len(front_bytes) > layout.FRONT_SIZE_MAX_BYTES:
        raise _too_large(f"{where}.properties", len(front_bytes), layout.FRONT_SIZE_MAX_BYTES)
    keys = record.keys
    return template.encode(
        record.body,
        sequence,
        record.born_time_ms if record.HasField("born_time_ms") else now_ms,
        key=keys[0] if keys else "",
        tag=record.tag,
        sharding_key=record.attributes.sharding_key,
        front=front_bytes,
        flags=record.flags & layout.FLAG_COMPRESSION_MASK
        | (layout.FLAG_MANY_KEYS if len(keys) > 1 else 0),
        due_time_ms=due_time_ms,
    )


def _check_flags(flags: int, where: str) -> None:
    """Raises ServiceError for flags that no producer may set."""
    codec = flags & layout.FLAG_COMPRESSION_MASK
    if codec > layout.COMPRESSION_MAX:
        raise invalid_argument(
            where,
            f"bits 0 to 2 are the compression, 0 to {layout.COMPRESSION_MAX}: {codec} is unknown to readers",
        )
    if flags & ~layout.PRODUCER_FLAGS_MASK:
        raise invalid_argument(where, "only bits 0 to 4 are a producer's")


def _check_names(record: Record, where: str) -> None:
    """Raises ServiceError for keys and tags that nobody could use to find the message."""
    if layout.NOT_IN_TAGS.search(record.tag):
        raise invalid_argument(
            f"{where}.tag",
            f"{record.tag!r} has a | (subscriptions separate tags by ||) or a control character: nobody could ask for it",
        )
    if len(record.keys) > layout.KEYS_MAX:
        raise invalid_argument(
            f"{where}.keys",
            f"has {len(record.keys)} keys, {layout.KEYS_MAX} are allowed; put further ones into properties",
        )
    if "" in record.keys:
        raise invalid_argument(f"{where}.keys", "has an empty key: leave it out")
    for field, text, code in (
        ("tag", record.tag, tag_code_of(record.tag)),
        *(("keys", key, key_hash_of(key)) for key in record.keys),
    ):
        if text and not code:
            raise invalid_argument(
                f"{where}.{field}", f"{text!r} has the code 0, which says that there is none: change it by a character"
            )


def _check_codes(record: Record, raw: memoryview, where: str) -> None:
    """Compares the codes that the producer computed with the record's content. Raises ServiceError."""
    if record.HasField("crc32c") and record.crc32c != crc32c(_front_octets(raw)):
        raise invalid_argument(
            f"{where}.crc32c", "is not the CRC-32C of fields 1 to 5: the record was damaged on its way"
        )
    if record.flags & layout.FLAG_MANY_KEYS and len(record.keys) < 2:
        raise invalid_argument(f"{where}.flags", "bit 3 says more than one key")
    key_hash = key_hash_of(record.keys[0]) if record.keys else 0
    # A client that does not know that 0 means no key writes the CRC-32C all the same.
    sharding_key = record.attributes.sharding_key
    sharding_hashes = (sharding_hash_of(sharding_key), crc32c(sharding_key.encode()))
    wrong = (
        ("tag_code", record.HasField("tag_code") and record.tag_code != tag_code_of(record.tag)),
        ("key_hash", record.HasField("key_hash") and record.key_hash != key_hash),
        ("sharding_hash", record.HasField("sharding_hash") and record.sharding_hash not in sharding_hashes),
    )
    for name, is_wrong in wrong:
        if is_wrong:
            raise invalid_argument(
                f"{where}.{name}", "is not the hash of what the record has; leave it out, and the broker fills it in"
            )


def _front_octets(raw: memoryview) -> bytes:
    """Returns fields 1 to 5 of a record in the order and form that its producer wrote."""
    parts: list[memoryview] = []
    position, end = 0, len(raw)
    while position < end:
        tag, _ = _varint_at(raw, position)
        behind = _skip_field(raw, position, end)
        if tag >> 3 <= _FRONT_NUMBER_MAX:
            parts.append(raw[position:behind])
        position = behind
    return b"".join(parts)


def _identity_of(
    records: Sequence[Record], identify: Callable[[int], ProducerIdentity]
) -> tuple[ProducerIdentity, bool]:
    first = records[0]
    if not any(record.producer_id for record in records):
        return identify(len(records)), True
    for index, record in enumerate(records):
        same_producer = (
            record.producer_id == first.producer_id
            and record.producer_epoch == first.producer_epoch
        )
        if not same_producer or record.sequence != first.sequence + index:
            raise invalid_argument(
                f"records[{index}].sequence",
                "the records of a request have one producer and consecutive sequences, or none",
            )
    return ProducerIdentity(first.producer_id, first.producer_epoch, first.sequence), False


def _check_bounds(payload: bytes) -> list[tuple[int, int]]:
    """Refuses requests that would take too much memory in the parser: counts the records, and measures the bytes around their bodies.

    Returns where each record begins and ends.
    """
    spans: list[tuple[int, int]] = []
    others = 0
    position, end = 0, len(payload)
    while position < end:
        if payload[position] == layout.RECORD_TAG:
            size, head = record_field_at(payload, position, end)
            if size < 0:
                raise invalid_argument("records", "a record is cut short")
            spans.append((position + head, position + head + size))
            if len(spans) > layout.RECORDS_WITHOUT_TRAILER_MAX:
                raise _too_many(len(spans), layout.RECORDS_WITHOUT_TRAILER_MAX)
            position += head + size
        else:
            others += 1
            if others > FIELDS_BESIDE_RECORDS_MAX:
                raise invalid_argument("", "too many fields beside the records")
            tag, value = _varint_at(payload, position)
            position = _skip_field(payload, position, end)
            if tag == layout.RECORD_TAG:  # written wider than it need be
                spans.append((_varint_at(payload, value)[1], position))
    try:
        shapes = _SendShape.FromString(payload).records
    except DecodeError as error:
        raise invalid_argument("records", "a record does not parse as protomq.v1.Record") from error
    for index, shape in enumerate(shapes):
        size_beside_body = shape.ByteSize() - len(shape.body)
        if size_beside_body > layout.FRONT_SIZE_MAX_BYTES + _TRAILER_ALLOWANCE_BYTES:
            raise _too_large(
                f"records[{index}].properties", size_beside_body, layout.FRONT_SIZE_MAX_BYTES
            )
    return spans


def _skip_field(payload: bytes | memoryview, position: int, end: int) -> int:
    """Returns the position behind the field at `position`. A SendRequest has only varint, fixed and length-delimited fields."""
    tag, position = _varint_at(payload, position)
    kind = tag & 7
    if kind == 0:
        position = _varint_at(payload, position)[1]
    elif kind == 1:
        position += 8
    elif kind == 2:
        size, position = _varint_at(payload, position)
        position += size
    elif kind == 5:
        position += 4
    else:
        raise unparsable("protomq.v1.SendRequest")
    if position > end:
        raise invalid_argument("", "the request is cut short")
    return position


def _varint_at(payload: bytes | memoryview, position: int) -> tuple[int, int]:
    try:
        return read_varint(payload, position)
    except (IndexError, ValueError):
        raise invalid_argument("", "the request is cut short") from None


def _too_large(field: str, size_bytes: int, limit_bytes: int) -> ServiceError:
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "MESSAGE_TOO_LARGE",
        f"{field} has {size_bytes} bytes, {limit_bytes} are allowed; send less, or store the payload elsewhere and send a reference",
        metadata={"field": field, "size_bytes": str(size_bytes), "limit_bytes": str(limit_bytes)},
    )


def _too_many(count: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "MESSAGE_TOO_LARGE",
        f"the request has more than {limit} records; split it",
        metadata={"field": "records", "count": str(count), "limit": str(limit)},
    )


def _private_classes() -> tuple[Any, Any]:
    """Two private classes: SendRequest without `records`, and SendRequest whose records have only a body."""
    proto = descriptor_pb2.DescriptorProto()
    SendRequest.DESCRIPTOR.CopyToProto(proto)
    file = descriptor_pb2.FileDescriptorProto(
        name="protomq/private/send.proto", package="protomq.private", syntax="proto3"
    )
    header = file.message_type.add()
    header.CopyFrom(proto)
    header.name = "SendHeader"
    del header.field[:]
    for field in proto.field:
        # Packed numbers are bytes on the wire; declared as bytes, they can be read as an array.
        if field.name == "record_sizes":
            header.field.add(
                name=field.name,
                number=field.number,
                type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
                label=1,
            )
        elif field.name != "records":
            header.field.append(field)
    body = file.message_type.add(name="RecordShape")
    body.field.add(
        name="body", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_BYTES, label=1
    )
    shape = file.message_type.add(name="SendShape")
    shape.field.add(
        name="records", number=1, type=11, label=3, type_name=".protomq.private.RecordShape"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    header_class, shape_class = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"protomq.private.{name}"))
        for name in ("SendHeader", "SendShape")
    )
    return header_class, shape_class


_SendHeader, _SendShape = _private_classes()
