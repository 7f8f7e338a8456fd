"""The columns of a message, for Spark and for Arrow. Pure.

The Arrow types are those that Spark's `to_arrow_schema` makes of the DDL: Spark compares them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import pyarrow as pa


class Column(NamedTuple):
    """A column that the source offers."""

    name: str
    ddl: str
    arrow: pa.DataType


_STRING_MAP: Final = pa.map_(pa.string(), pa.field("value", pa.string(), nullable=True))
_HEADER: Final = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

COLUMNS: Final[tuple[Column, ...]] = (
    Column("key", "STRING", pa.string()),
    Column("body", "BINARY", pa.binary()),
    Column("topic", "STRING", pa.string()),
    Column("broker", "STRING", pa.string()),
    Column("queue_id", "INT", pa.int32()),
    Column("queue_offset", "BIGINT", pa.int64()),
    Column("timestamp", "TIMESTAMP", pa.timestamp("us", "UTC")),
    Column("timestamp_type", "INT", pa.int32()),
    Column("tags", "STRING", pa.string()),
    Column("message_id", "STRING", pa.string()),
    Column("properties", "MAP<STRING, STRING>", _STRING_MAP),
    Column("born_host", "STRING", pa.string()),
    Column("reconsume_times", "INT", pa.int32()),
    # Only where `columns` or `includeHeaders` asks for them.
    Column("born_timestamp", "TIMESTAMP", pa.timestamp("us", "UTC")),
    Column("sharding_key", "STRING", pa.string()),
    Column(
        "headers",
        "ARRAY<STRUCT<key: STRING, value: BINARY>>",
        pa.list_(pa.field("element", _HEADER)),
    ),
    # Only where `columns` asks for them: where a message comes from that the broker moved.
    Column("origin_topic", "STRING", pa.string()),
    Column("origin_queue_id", "INT", pa.int32()),
    Column("origin_queue_offset", "BIGINT", pa.int64()),
    Column("origin_timestamp", "TIMESTAMP", pa.timestamp("us", "UTC")),
    Column("last_error", "STRING", pa.string()),
    Column("replayed_group", "STRING", pa.string()),
)
COLUMN_NAMES: Final = tuple(column.name for column in COLUMNS)
DEFAULT_COLUMNS: Final = COLUMN_NAMES[:13]
_BY_NAME: Final = {column.name: column for column in COLUMNS}

TIMESTAMP_TYPE_STORED: Final = 1
"""`timestamp` is when the broker stored the message: Kafka's LogAppendTime."""


def ddl_of(columns: Sequence[str]) -> str:
    """The Spark schema as text."""
    return ", ".join(f"{name} {_BY_NAME[name].ddl}" for name in columns)


def type_of(column: str) -> str:
    """The type of a column as Spark's `simpleString` writes it."""
    return _BY_NAME[column].ddl.lower().replace(", ", ",").replace(": ", ":")


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """The Arrow schema of the same columns."""
    return pa.schema([pa.field(name, _BY_NAME[name].arrow) for name in columns])
