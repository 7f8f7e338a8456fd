"""Protobuf bodies in DataFrame expressions: a struct to bytes and back, from a descriptor set.

    from protomq_spark import protobuf_udf

    decode = protobuf_udf.decode("shop.binpb", "shop.v1.Order")
    encode = protobuf_udf.encode("shop.binpb", "shop.v1.Order")
    orders.select(decode("body").alias("order")).select("order.id", "order.total")
    table.select(encode(struct("id", "total")).alias("body"))

The descriptor set is what `buf build -o shop.binpb` or `protoc --include_imports --descriptor_set_out=shop.binpb` writes. It is
read on the driver and travels with the function: executors need the packages and no file. Spark's own from_protobuf and
to_protobuf do the same by a jar that PySpark does not bring (spark-protobuf, by --packages); here there is none.

How fields become columns:

    double, float, bool, string, bytes    DOUBLE, FLOAT, BOOLEAN, STRING, BINARY
    32 bits: signed, unsigned             INT, BIGINT
    64 bits: signed, unsigned             BIGINT, DECIMAL(20, 0)
    enum                                  STRING, its name; a number that has none: the number as text
    message, map, repeated                STRUCT, MAP, ARRAY
    Timestamp, Duration                   TIMESTAMP, INTERVAL DAY TO SECOND (microseconds)
    google.protobuf.*Value                its value, nullable

A field that knows whether it is set is null where it is not: `optional`, messages, members of a oneof, all of proto2. Any other
has its default. `encode` leaves out what is null, so that the default counts. A message that contains itself cannot be a column.

Vectorised: functions of Arrow columns (`arrow_udf`), a column at a time; the messages themselves are protobuf's own C code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

Mode = Literal["FAILFAST", "PERMISSIVE"]

_F: Final = FieldDescriptor
_SCALARS: Final[dict[int, tuple[str, pa.DataType]]] = {
    _F.CPPTYPE_DOUBLE: ("DOUBLE", pa.float64()),
    _F.CPPTYPE_FLOAT: ("FLOAT", pa.float32()),
    _F.CPPTYPE_BOOL: ("BOOLEAN", pa.bool_()),
    _F.CPPTYPE_INT32: ("INT", pa.int32()),
    _F.CPPTYPE_UINT32: ("BIGINT", pa.int64()),
    _F.CPPTYPE_INT64: ("BIGINT", pa.int64()),
    _F.CPPTYPE_UINT64: ("DECIMAL(20, 0)", pa.decimal128(20, 0)),
    _F.CPPTYPE_ENUM: ("STRING", pa.string()),
}
_TIMESTAMP: Final = "google.protobuf.Timestamp"
_DURATION: Final = "google.protobuf.Duration"
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class MessageType(NamedTuple):
    """Which message: the descriptor set itself, as bytes, and a full name. Picklable; what is made of it is cached."""

    descriptor_set: bytes
    name: str


class BodyError(ValueError):
    """A body is no such message, or a value does not fit into its field."""


# -- functions of columns ------------------------------------------------------------------------------------------------------


def decode(
    descriptor_set: str | os.PathLike[str] | bytes, message: str, *, mode: Mode = "FAILFAST"
) -> Callable[[Any], Any]:
    """A function of a column of bytes that answers a struct. `mode`: what to do with bytes that are no such message, or hold a
    time that the column cannot: fail, or answer null (PERMISSIVE). Null stays null. Raises ValueError if the set is none or does not have
    the message.
    """
    if mode not in ("FAILFAST", "PERMISSIVE"):
        raise ValueError(f"mode is FAILFAST or PERMISSIVE, not {mode!r}")
    wanted = message_type(descriptor_set, message)

    def call(column: Any) -> Any:
        from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined, unused-ignore]

        def decode_column(bodies: pa.Array) -> pa.Array:
            return decode_bodies(wanted, bodies, mode)

        return arrow_udf(decode_column, ddl_of(wanted))(column)

    return call


def encode(
    descriptor_set: str | os.PathLike[str] | bytes, message: str
) -> Callable[[Any], Any]:
    """A function of a struct column that answers bytes. Columns of the struct are fields of the message, in any order. A column
    that the message does not have is an error, and so is a value that does not fit. Null stays null. Raises as `decode`.
    """
    wanted = message_type(descriptor_set, message)

    def call(column: Any) -> Any:
        from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined, unused-ignore]

        def encode_column(rows: pa.Array) -> pa.Array:
            return encode_rows(wanted, rows)

        return arrow_udf(encode_column, "BINARY")(column)

    return call


def schema_of(descriptor_set: str | os.PathLike[str] | bytes, message: str) -> str:
    """The struct that `decode` answers, as Spark's DDL."""
    return ddl_of(message_type(descriptor_set, message))


def message_type(descriptor_set: str | os.PathLike[str] | bytes, message: str) -> MessageType:
    """Read and checked. Raises ValueError, or OSError where the file cannot be read."""
    if isinstance(descriptor_set, bytes):
        content = descriptor_set
    else:
        with open(descriptor_set, "rb") as file:
            content = file.read()
    wanted = MessageType(content, message)
    ddl_of(wanted)  # Raises what is wrong.
    return wanted


# -- descriptors ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def message_class(wanted: MessageType) -> type[Message]:
    """The class, in a pool of its own: nothing of the user's can clash with what else is loaded."""
    pool = _pool(wanted.descriptor_set)
    try:
        descriptor = pool.FindMessageTypeByName(wanted.name)
    except KeyError:
        names = ", ".join(sorted(_message_names(wanted.descriptor_set))[:10])
        raise ValueError(
            f"the descriptor set has no message {wanted.name!r}; it has {names}"
        ) from None
    return message_factory.GetMessageClass(descriptor)


def _descriptor(wanted: MessageType) -> Descriptor:
    descriptor: Any = message_class(wanted).DESCRIPTOR
    return descriptor  # type: ignore[no-any-return, unused-ignore]


def _inner(field: FieldDescriptor) -> Descriptor:
    """Of a field that is a message."""
    assert field.message_type is not None
    return field.message_type


@lru_cache(maxsize=16)
def _pool(content: bytes) -> descriptor_pool.DescriptorPool:
    files = {file.name: file for file in _parse(content).file}
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        file = files.get(name)
        if file is None:
            file = _well_known(name)
        for needed in file.dependency:
            add(needed)
        pool.Add(file)

    for name in files:
        add(name)
    return pool


def _parse(content: bytes) -> descriptor_pb2.FileDescriptorSet:
    try:
        parsed = descriptor_pb2.FileDescriptorSet.FromString(content)
    except DecodeError:
        parsed = descriptor_pb2.FileDescriptorSet()
    if not any(file.name for file in parsed.file):
        raise ValueError(
            "this is no descriptor set: make one by `buf build -o NAME.binpb` or `protoc --descriptor_set_out`"
        )
    return parsed


def _well_known(name: str) -> descriptor_pb2.FileDescriptorProto:
    """google/protobuf/timestamp.proto and the like, which `protoc` leaves out without --include_imports."""
    from google.protobuf import duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2

    file = descriptor_pb2.FileDescriptorProto()
    for module in (duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2, descriptor_pb2):
        if module.DESCRIPTOR.name == name:
            module.DESCRIPTOR.CopyToProto(file)
            return file
    raise ValueError(f"the descriptor set lacks {name}: make it with --include_imports")


def _message_names(content: bytes) -> list[str]:
    return [
        f"{file.package}.{message.name}".lstrip(".")
        for file in _parse(content).file
        for message in file.message_type
        if not file.name.startswith("google/protobuf/")
    ]


# -- types ---------------------------------------------------------------------------------------------------------------------


def ddl_of(wanted: MessageType) -> str:
    """The message as Spark's DDL. Raises ValueError for one that contains itself or is empty."""
    return _message_types(_descriptor(wanted), ())[0]


def arrow_type_of(wanted: MessageType) -> pa.DataType:
    """The same as Arrow's type."""
    return _message_types(_descriptor(wanted), ())[1]


def _message_types(descriptor: Descriptor, outer: tuple[str, ...]) -> tuple[str, pa.DataType]:
    name = descriptor.full_name
    if name == _TIMESTAMP:
        return "TIMESTAMP", pa.timestamp("us", tz="UTC")
    if name == _DURATION:
        return "INTERVAL DAY TO SECOND", pa.duration("us")
    if name in _WRAPPERS:
        return _value_types(descriptor.fields_by_name["value"], outer)
    if name in outer:
        raise ValueError(f"message {name} contains itself: it cannot be a column")
    if not descriptor.fields:
        raise ValueError(f"message {name} has no fields: it cannot be a column")
    found = [(field, *_field_types(field, (*outer, name))) for field in descriptor.fields]
    ddl = ", ".join(f"`{field.name}`: {text}" for field, text, _ in found)
    return f"STRUCT<{ddl}>", pa.struct([pa.field(field.name, kind) for field, _, kind in found])


def _field_types(field: FieldDescriptor, outer: tuple[str, ...]) -> tuple[str, pa.DataType]:
    if _is_map(field):
        entry = _inner(field).fields_by_name
        key, value = _value_types(entry["key"], outer), _value_types(entry["value"], outer)
        return f"MAP<{key[0]}, {value[0]}>", pa.map_(key[1], value[1])
    ddl, kind = _value_types(field, outer)
    if field.is_repeated:
        return f"ARRAY<{ddl}>", pa.list_(kind)
    return ddl, kind


def _value_types(field: FieldDescriptor, outer: tuple[str, ...]) -> tuple[str, pa.DataType]:
    if field.message_type is not None:
        return _message_types(field.message_type, outer)
    if field.cpp_type == _F.CPPTYPE_STRING:
        is_text = field.type == _F.TYPE_STRING
        return ("STRING", pa.string()) if is_text else ("BINARY", pa.binary())
    return _SCALARS[field.cpp_type]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


# -- bytes to columns ----------------------------------------------------------------------------------------------------------


def decode_bodies(wanted: MessageType, bodies: pa.Array, mode: Mode = "FAILFAST") -> pa.Array:
    """A struct for each body. Raises BodyError."""
    parse = message_class(wanted).FromString
    contents = bodies.to_pylist()

    def refused(index: int, error: Exception) -> None:
        if mode == "FAILFAST":
            body = contents[index]
            start = f"{body[:16].hex()}{'...' if len(body) > 16 else ''}"
            raise BodyError(
                f"row {index} of this batch is no {wanted.name} ({error}): {len(body)} bytes, {start}"
            ) from None

    messages: list[Message | None] = []
    for index, body in enumerate(contents):
        try:
            messages.append(None if body is None else parse(body))
        except DecodeError as error:
            refused(index, error)
            messages.append(None)
    descriptor, kind = _descriptor(wanted), arrow_type_of(wanted)

    def rows(start: int, end: int) -> pa.Array:
        try:
            return _struct_array(messages[start:end], descriptor, kind)
        except (ValueError, OverflowError) as error:  # A time that no column can hold.
            if end - start == 1:
                refused(start, error)
                return pa.nulls(1, kind)
        middle = (start + end) // 2
        return pa.concat_arrays([rows(start, middle), rows(middle, end)])

    return rows(0, len(messages))


def _struct_array(
    messages: Sequence[Message | None], descriptor: Descriptor, kind: pa.DataType
) -> pa.Array:
    present = [message for message in messages if message is not None]
    if len(present) == len(messages):
        columns = [
            _column(present, field, kind.field(index).type)
            for index, field in enumerate(descriptor.fields)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(kind))
    # The columns of those that are there, then each in its place.
    whole = _struct_array(present, descriptor, kind)
    places = iter(range(len(present)))
    return whole.take(pa.array([None if m is None else next(places) for m in messages], pa.int64()))


def _column(messages: Sequence[Any], field: FieldDescriptor, kind: pa.DataType) -> pa.Array:
    name = field.name
    if _is_map(field):
        key, value = (_inner(field).fields_by_name[part] for part in ("key", "value"))
        to_key, to_value = _to_python(key), _to_python(value)
        return pa.array(
            [[(to_key(k), to_value(v)) for k, v in getattr(m, name).items()] for m in messages], kind
        )
    convert = _to_python(field)
    if field.is_repeated:
        return pa.array([[convert(v) for v in getattr(m, name)] for m in messages], kind)
    if field.has_presence:
        values = [getattr(m, name) if m.HasField(name) else None for m in messages]
        if field.message_type is not None and pa.types.is_struct(kind):
            return _struct_array(values, field.message_type, kind)
        return pa.array([None if v is None else convert(v) for v in values], kind)
    if convert is _same:
        return pa.array([getattr(m, name) for m in messages], kind)
    return pa.array([convert(getattr(m, name)) for m in messages], kind)


def _same(value: Any) -> Any:
    return value


def _to_python(field: FieldDescriptor) -> Callable[[Any], Any]:
    """From what protobuf answers to what Arrow takes, for one value."""
    if field.enum_type is not None:
        known = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda number: known.get(number, str(number))
    if field.cpp_type == _F.CPPTYPE_UINT64:
        return Decimal
    if field.message_type is None:
        return _same
    name = field.message_type.full_name
    if name == _TIMESTAMP:
        return lambda m: _EPOCH + timedelta(seconds=m.seconds, microseconds=m.nanos // 1000)
    if name == _DURATION:
        return lambda m: timedelta(seconds=m.seconds, microseconds=int(m.nanos / 1000))
    if name in _WRAPPERS:
        inner = _to_python(field.message_type.fields_by_name["value"])
        return lambda m: inner(m.value)
    return _to_dict(field.message_type)


def _to_dict(descriptor: Descriptor) -> Callable[[Any], Any]:
    """For messages in lists and maps."""
    parts = [(field, _part_to_python(field)) for field in descriptor.fields]

    def convert(message: Any) -> dict[str, Any]:
        return {
            field.name: None
            if field.has_presence and not message.HasField(field.name)
            else part(getattr(message, field.name))
            for field, part in parts
        }

    return convert


def _part_to_python(field: FieldDescriptor) -> Callable[[Any], Any]:
    if _is_map(field):
        key, value = (_inner(field).fields_by_name[part] for part in ("key", "value"))
        to_key, to_value = _to_python(key), _to_python(value)
        return lambda values: [(to_key(k), to_value(v)) for k, v in values.items()]
    convert = _to_python(field)
    if field.is_repeated:
        return lambda values: [convert(value) for value in values]
    return convert


# -- columns to bytes ----------------------------------------------------------------------------------------------------------


def encode_rows(wanted: MessageType, rows: pa.Array) -> pa.Array:
    """The bytes of each struct. Raises BodyError."""
    if not pa.types.is_struct(rows.type):
        raise BodyError(f"{wanted.name} is made of a struct, not of {rows.type}: struct('a', 'b')")
    present = rows.is_valid().to_pylist()
    made = message_class(wanted)
    messages = [made() if there else None for there in present]
    _fill(messages, rows, _descriptor(wanted))
    # Maps in one order: equal rows are equal bytes, which a task that runs again relies on.
    return pa.array(
        [None if m is None else m.SerializeToString(deterministic=True) for m in messages],
        pa.binary(),
    )


def _fill(messages: Sequence[Any], rows: pa.Array, descriptor: Descriptor) -> None:
    known = descriptor.fields_by_name
    unknown = [field.name for field in rows.type if field.name not in known]
    if unknown:
        raise BodyError(
            f"{descriptor.full_name} has no field {', '.join(unknown)}; it has {', '.join(known)}"
        )
    for index, column_field in enumerate(rows.type):
        _fill_field(messages, rows.field(index), known[column_field.name])


def _fill_field(messages: Sequence[Any], column: pa.Array, field: FieldDescriptor) -> None:
    name = field.name
    nested = field.message_type is not None and not field.is_repeated
    if nested and pa.types.is_struct(column.type) and not _is_special(field):
        # A level at a time, by columns.
        inner = [
            getattr(message, name) if message is not None and there else None
            for message, there in zip(messages, column.is_valid().to_pylist(), strict=True)
        ]
        for message in inner:
            if message is not None:
                message.SetInParent()
        _fill(inner, column, _inner(field))
        return
    put = _setter(field)
    for message, value in zip(messages, _values(column), strict=True):
        if message is None or value is None:
            continue
        try:
            put(message, value)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BodyError(
                f"field {field.full_name} cannot hold {value!r}: {error}"
            ) from None


def _values(column: pa.Array) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return values


def _is_special(field: FieldDescriptor) -> bool:
    return _inner(field).full_name in {_TIMESTAMP, _DURATION} | _WRAPPERS


def _setter(field: FieldDescriptor) -> Callable[[Any, Any], None]:
    """Puts a value of Arrow's into a field of a message."""
    name = field.name
    if _is_map(field):
        key, value = (_inner(field).fields_by_name[part] for part in ("key", "value"))
        to_key, to_value = _from_python(key), _from_python(value)

        def put_map(message: Any, values: Iterable[tuple[Any, Any]]) -> None:
            target = getattr(message, name)
            for k, v in values:
                if value.message_type is None:
                    target[to_key(k)] = to_value(v)
                else:
                    target[to_key(k)].CopyFrom(to_value(v))

        return put_map
    convert = _from_python(field)
    if field.is_repeated:
        return lambda message, values: getattr(message, name).extend(map(convert, values))
    if field.message_type is not None:
        return lambda message, value: getattr(message, name).CopyFrom(convert(value))
    return lambda message, value: setattr(message, name, convert(value))


def _from_python(field: FieldDescriptor) -> Callable[[Any], Any]:
    """From what Arrow answers to what protobuf takes, for one value."""
    if field.enum_type is not None:
        numbers = {value.name: value.number for value in field.enum_type.values}
        return lambda value: value if isinstance(value, int) else _enum_number(numbers, value)
    if field.message_type is None:
        whole = (_F.CPPTYPE_INT32, _F.CPPTYPE_INT64, _F.CPPTYPE_UINT32, _F.CPPTYPE_UINT64)
        return _whole_number if field.cpp_type in whole else _same
    descriptor = field.message_type
    made: Any = message_factory.GetMessageClass(descriptor)
    if descriptor.full_name == _TIMESTAMP:
        return lambda value: _seconds_and_nanos(made(), _utc(value) - _EPOCH)
    if descriptor.full_name == _DURATION:
        return lambda value: _duration(made(), value)
    if descriptor.full_name in _WRAPPERS:
        inner = _from_python(descriptor.fields_by_name["value"])
        return lambda value: made(value=inner(value))
    setters = {part.name: _setter(part) for part in descriptor.fields}

    def convert(value: dict[str, Any]) -> Message:
        message: Message = made()
        for name, part in value.items():
            if name not in setters:
                raise ValueError(f"{descriptor.full_name} has no field {name}")
            if part is not None:
                setters[name](message, part)
        return message

    return convert


def _whole_number(value: Any) -> int:
    if value != int(value):
        raise ValueError("not a whole number")
    return int(value)


def _enum_number(numbers: dict[str, int], name: str) -> int:
    if name in numbers:
        return numbers[name]
    if name.lstrip("-").isdecimal():
        return int(name)
    raise ValueError(f"the enum has {', '.join(numbers)}")


def _utc(value: datetime) -> datetime:
    return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


def _seconds_and_nanos(message: Any, value: timedelta) -> Any:
    """Seconds rounded down, so that nanoseconds are never negative: the rule of Timestamp."""
    microseconds = value // _MICROSECOND
    message.seconds, rest = divmod(microseconds, 1_000_000)
    message.nanos = rest * 1000
    return message


def _duration(message: Any, value: timedelta) -> Any:
    """Seconds and nanoseconds of the same sign: the rule of Duration."""
    microseconds = value // _MICROSECOND
    sign = -1 if microseconds < 0 else 1
    seconds, rest = divmod(abs(microseconds), 1_000_000)
    message.seconds, message.nanos = sign * seconds, sign * rest * 1000
    return message
