"""Whether the fronts of records hold: fields 1 to 5 and nothing else, each of its type, one body in each.

All records of a request are parsed as occurrences of one field that is not repeated: protobuf merges them into one message, so nothing
is made for a record, and what does not belong into a front is left over in one place. A field behind 5 must not stand there: it would
be taken for the broker's (`transit`), or lie outside of what a reader takes for covered by the producer's CRC.
"""

from __future__ import annotations

from typing import Any, Final, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from protomq.v1 import record_pb2

_FRONT_NUMBER_MAX: Final = 5
_PACKAGE: Final = "protomq.private.front"


def fronts_hold(data: bytes | bytearray, count: int) -> bool:
    """Whether `data`, a RecordBatch of records that are fronts alone, with padding between, has `count` fronts that hold."""
    try:
        # upb reads a bytearray where it stands.
        front = _MergedBatch.FromString(cast(bytes, data)).records
    except DecodeError:
        return False
    return len(front.body) == count and not len(UnknownFieldSet(front))


def front_holds(rest: bytes | bytearray) -> bool:
    """Whether what stands behind the body of one record, up to its topic, holds."""
    try:
        front = _MergedFront.FromString(cast(bytes, rest))
    except DecodeError:
        return False
    return not front.body and not len(UnknownFieldSet(front))


def _private_classes() -> tuple[Any, Any]:
    """RecordBatch with one record, and Record with the fields of its front, the body repeated, in a pool of their own."""
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
        if field.name == "body":
            field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    record.field.extend(fields)
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
