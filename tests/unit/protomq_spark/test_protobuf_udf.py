"""Protobuf columns without Spark: types, presence, what does not fit, and bytes that are no message."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from protomq_spark import protobuf_udf
from protomq_spark.protobuf_udf import (
    BodyError,
    MessageType,
    arrow_type_of,
    decode_bodies,
    encode_rows,
    message_class,
)
from tests.support.shop_descriptors import ORDER, shop_descriptor_set

WANTED = MessageType(shop_descriptor_set(), ORDER)
FULL: dict[str, Any] = {
    "id": -(2**63), "total": 1.5, "weight": 0.25, "paid": True, "name": "Ünal", "raw": b"\x00\xff", "small": -5,
    "unsigned": 2**32 - 1, "huge": Decimal(2**64 - 1), "status": "STATUS_PAID", "first": {"sku": "a", "count": 3},
    "at": datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "took": timedelta(days=-1, microseconds=7),
    "discount": 0.0, "items": [{"sku": "b", "count": 1}, {"sku": "", "count": 0}], "codes": [1, -1],
    "labels": [("x", {"sku": "c", "count": 9})], "note": "",
}  # fmt: skip


def rows_of(*rows: dict[str, Any] | None) -> pa.Array:
    return pa.array(list(rows), arrow_type_of(WANTED))


def test_every_kind_of_field_goes_there_and_back() -> None:
    bodies = encode_rows(WANTED, rows_of(FULL, None))
    message: Any = message_class(WANTED).FromString(bodies[0].as_py())
    assert (message.id, message.huge, message.status) == (-(2**63), 2**64 - 1, 1)
    assert (message.at.seconds, message.at.nanos) == (-1, 999_999_000)
    assert (message.took.seconds, message.took.nanos) == (-86399, -999_993_000)
    assert message.HasField("discount")
    assert message.labels["x"].count == 9
    assert decode_bodies(WANTED, bodies).to_pylist() == [FULL, None]


def test_an_empty_message_has_defaults_and_nulls() -> None:
    (row,) = decode_bodies(WANTED, pa.array([b""], pa.binary())).to_pylist()
    unset = {"first", "at", "took", "discount", "note"}
    assert {name for name, value in row.items() if value is None} == unset
    assert (row["id"], row["status"], row["items"], row["labels"]) == (0, "STATUS_UNSPECIFIED", [], [])
    assert encode_rows(WANTED, rows_of({})).to_pylist() == [b""]


def test_a_message_that_is_set_but_empty_is_not_null() -> None:
    kind = pa.struct([("first", pa.struct([("sku", pa.string())]))])
    bodies = encode_rows(WANTED, pa.array([{"first": {"sku": None}}, {"first": None}], kind))
    decoded = decode_bodies(WANTED, bodies).to_pylist()
    assert [row["first"] for row in decoded] == [{"sku": "", "count": 0}, None]


def test_other_types_that_mean_the_same_are_taken() -> None:
    kind = pa.struct([("total", pa.int64()), ("status", pa.int32()), ("at", pa.timestamp("us")), ("id", pa.int8())])
    row = {"total": 2, "status": 1, "at": datetime(2020, 1, 1), "id": 3}  # noqa: DTZ001  Without a zone it is UTC.
    (body,) = encode_rows(WANTED, pa.array([row], kind)).to_pylist()
    message: Any = message_class(WANTED).FromString(body)
    assert (message.total, message.status, message.id) == (2.0, 1, 3)
    assert message.at.seconds == int(datetime(2020, 1, 1, tzinfo=UTC).timestamp())


def test_an_enum_number_without_a_name_is_kept() -> None:
    message: Any = message_class(WANTED)(status=77)
    decoded = decode_bodies(WANTED, pa.array([message.SerializeToString()]))
    assert decoded[0].as_py()["status"] == "77"
    assert encode_rows(WANTED, decoded).to_pylist() == [message.SerializeToString()]


@pytest.mark.parametrize(
    ("field", "kind", "value", "named"),
    [
        ("colour", pa.string(), "red", "no field colour"),
        ("small", pa.int64(), 2**31, "shop.v1.Order.small"),
        ("id", pa.float64(), 1.5, "not a whole number"),
        ("status", pa.string(), "PAID", "STATUS_PAID"),
        ("name", pa.int64(), 5, "shop.v1.Order.name"),
        ("items", pa.list_(pa.struct([("price", pa.int32())])), [{"price": 1}], "no field price"),
        ("first", pa.struct([("price", pa.int32())]), {"price": 1}, "no field price"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_field(
    field: str, kind: pa.DataType, value: Any, named: str
) -> None:
    with pytest.raises(BodyError, match=named):
        encode_rows(WANTED, pa.array([{field: value}], pa.struct([(field, kind)])))
    with pytest.raises(BodyError, match="made of a struct"):
        encode_rows(WANTED, pa.array([1]))


def test_bytes_that_are_no_message_fail_or_are_null() -> None:
    bodies = pa.array([b"", b"\xff\xff", None], pa.binary())
    with pytest.raises(BodyError, match=r"row 1 .*shop.v1.Order.* 2 bytes, ffff"):
        decode_bodies(WANTED, bodies)
    decoded = decode_bodies(WANTED, bodies, "PERMISSIVE").to_pylist()
    assert [row is None for row in decoded] == [False, True, True]


@pytest.mark.parametrize(
    ("field", "seconds"),
    [("at", 1 << 62), ("at", -(1 << 62)), ("at", 253_402_300_800), ("took", 1 << 62), ("took", 9_223_372_036_855)],
)
def test_times_that_no_column_can_hold_are_treated_as_bytes_that_are_no_message(
    field: str, seconds: int
) -> None:
    wild: Any = message_class(WANTED)()
    getattr(wild, field).seconds = seconds
    good = encode_rows(WANTED, rows_of(FULL))[0].as_py()
    bodies = pa.array([good, good, wild.SerializeToString(), None, good], pa.binary())
    with pytest.raises(BodyError, match=r"row 2 .*shop.v1.Order"):
        decode_bodies(WANTED, bodies)
    decoded = decode_bodies(WANTED, bodies, "PERMISSIVE")
    assert decoded.type == arrow_type_of(WANTED)
    assert decoded.to_pylist() == [FULL, FULL, None, None, FULL]


def test_equal_rows_are_equal_bytes() -> None:
    labels = [(f"k{n}", {"sku": str(n), "count": n}) for n in range(50)]
    one = encode_rows(WANTED, rows_of({"labels": labels}))
    assert one == encode_rows(WANTED, rows_of({"labels": labels[::-1]}))


def test_a_set_without_googles_files_is_enough() -> None:
    bare = shop_descriptor_set(with_imports=False)
    assert protobuf_udf.schema_of(bare, ORDER) == protobuf_udf.schema_of(WANTED.descriptor_set, ORDER)


def test_the_schema_is_as_the_docstring_says() -> None:
    assert protobuf_udf.schema_of(WANTED.descriptor_set, ORDER) == (
        "STRUCT<`id`: BIGINT, `total`: DOUBLE, `weight`: FLOAT, `paid`: BOOLEAN, `name`: STRING, `raw`: BINARY, `small`: INT,"
        " `unsigned`: BIGINT, `huge`: DECIMAL(20, 0), `status`: STRING, `first`: STRUCT<`sku`: STRING, `count`: BIGINT>,"
        " `at`: TIMESTAMP, `took`: INTERVAL DAY TO SECOND, `discount`: DOUBLE,"
        " `items`: ARRAY<STRUCT<`sku`: STRING, `count`: BIGINT>>, `codes`: ARRAY<INT>,"
        " `labels`: MAP<STRING, STRUCT<`sku`: STRING, `count`: BIGINT>>, `note`: STRING>"
    )


def test_wrong_sets_and_names_are_said_on_the_driver(tmp_path: Path) -> None:
    whole = WANTED.descriptor_set
    for message, named in (("shop.v1.Orders", "it has .*shop.v1.Order"), ("shop.v1.Tree", "itself"), ("shop.v1.Empty", "no fields")):
        with pytest.raises(ValueError, match=named):
            protobuf_udf.decode(whole, message)
    for wrong in (b"", b"\xff", b"no descriptor set"):
        with pytest.raises(ValueError, match="no descriptor set"):
            protobuf_udf.encode(wrong, ORDER)
    lacking = descriptor_pb2.FileDescriptorSet()
    lacking.file.add(name="a.proto", dependency=["b.proto"])
    with pytest.raises(ValueError, match=r"lacks b\.proto"):
        protobuf_udf.encode(lacking.SerializeToString(), ORDER)
    with pytest.raises(FileNotFoundError):
        protobuf_udf.encode(tmp_path / "none.binpb", ORDER)
    with pytest.raises(ValueError, match="FAILFAST"):
        protobuf_udf.decode(whole, ORDER, mode="LENIENT")  # type: ignore[arg-type]
