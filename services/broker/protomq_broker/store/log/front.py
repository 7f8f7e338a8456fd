"""Whether the fronts of records hold: fields 1 to 5 and nothing else, each of its type, one body in each.

All records of a request are parsed as occurrences of one field that is not repeated. Protobuf merges them into one message, so it
makes no object for a record. What does not belong in a front is left over in one place. A field behind 5 must not stand there. It
would be taken for the broker's (`transit`), or lie outside of what a reader takes for covered by the producer's CRC.
"""

from __future__ import annotations

from typing import Any, Final, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from protomq.v1 import record_pb2
from protomq.wire.record import NOT_IN_TAGS

_FRONT_NUMBER_MAX: Final = 5
_KEY_TAG: Final = 0x12
_TAG_TAG: Final = 0x1A
_PACKAGE: Final = "protomq.private.front"


def fronts_of(data: bytes | bytearray, count: int) -> Any | None:
    """The fronts in `data`, merged into one message. `data` is a RecordBatch of records that are fronts alone, with padding between.
    None unless there are `count` fronts that hold.
    """
    try:
        # upb reads a bytearray where it stands.
        front = _MergedBatch.FromString(cast(bytes, data)).records
    except DecodeError:
        return None
    return None if len(front.body) != count or len(UnknownFieldSet(front)) else front


def front_of(rest: bytes | bytearray) -> Any | None:
    """What stands behind the body of one record, up to its topic; None if it does not hold."""
    try:
        front = _MergedFront.FromString(cast(bytes, rest))
    except DecodeError:
        return None
    return None if front.body or len(UnknownFieldSet(front)) else front


def producer_groups_of(data: bytes | bytearray) -> set[str]:
    """The groups of producers that the records in `data`, which hold, name: for a look at all at once."""
    return set(_MergedBatch.FromString(cast(bytes, data)).records.attributes.producer_group)


def sharding_keys_of(data: bytes | bytearray) -> set[str]:
    """The sharding keys that the records in `data`, which hold, have."""
    return set(filter(None, _MergedBatch.FromString(cast(bytes, data)).records.attributes.sharding_key))


def is_plain(rest: bytes | bytearray, has_key: bool, has_tag: bool) -> bool:
    """Whether `rest`, as of `front_of`, is the key and the tag whose codes the trailer has, short and in ASCII. Then it holds, and so do
    its names. Most messages are told by this, without a parser.
    """
    if not rest.isascii():  # so that each length is one octet, and all text is UTF-8
        return False
    size, at = len(rest), 0
    if has_key:
        if rest[0] != _KEY_TAG or size < 3 or not rest[1]:
            return False
        at = 2 + rest[1]
    if not has_tag:
        return at == size
    tag = rest[at + 2 :]
    return at + 2 < size and rest[at] == _TAG_TAG and rest[at + 1] == len(tag) and tag.isalnum()


def names_hold(front: Any, key_count: int, tag_count: int, sharding_count: int) -> bool:
    """Whether messages have codes for all their keys, tags and sharding keys: the trailers give the number of codes that are not 0.
    And whether nobody is kept from asking for a tag.
    """
    if len(front.keys) > key_count:
        return False
    sharding_keys = front.attributes.sharding_key
    if len(sharding_keys) > sharding_count and sum(map(bool, sharding_keys)) > sharding_count:
        return False
    tags = front.tag
    if not tags:
        return True
    if len(tags) > tag_count:
        return False
    text = tags[0] if len(tags) == 1 else "".join(tags)
    # The usual case first, which costs less than a search.
    return ("|" not in text and text.isprintable()) or not NOT_IN_TAGS.search(text)


def _private_classes() -> tuple[Any, Any]:
    """RecordBatch with one record, and Record with the fields of its front, in a pool of their own. Body, tag, sharding key and group of
    the producer are repeated.
    """
    file = descriptor_pb2.FileDescriptorProto()
    record_pb2.DESCRIPTOR.CopyToProto(file)
    public = f".{file.package}."
    file.name, file.package = f"{_PACKAGE}.proto", _PACKAGE
    messages = {message.name: message for message in file.message_type}
    for message in file.message_type:
        for field in message.field:
            if field.type_name.startswith(public):
                field.type_name = f".{_PACKAGE}.{field.type_name.removeprefix(public)}"
    record = messages["Record"]
    fields = [field for field in record.field if field.number <= _FRONT_NUMBER_MAX]
    del record.field[:], record.oneof_decl[:]  # `optional` of proto3 is a oneof by another name
    for field in fields:
        field.ClearField("oneof_index")
        field.ClearField("proto3_optional")
        if field.name in ("body", "tag"):
            field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    record.field.extend(fields)
    for field in messages["Attributes"].field:
        if field.name in ("sharding_key", "producer_group"):
            field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    (records,) = (field for field in messages["RecordBatch"].field if field.name == "records")
    records.label = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    batch, front = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in ("RecordBatch", "Record")
    )
    return batch, front


_MergedBatch, _MergedFront = _private_classes()
