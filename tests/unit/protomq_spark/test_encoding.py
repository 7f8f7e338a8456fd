"""Requests made of columns: the bytes are those that the SDK writes message by message."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq._batching import PreparedRecord, RecordEncoder
from protomq._compression import CompressionName, make_compressor
from protomq._producer_options import ProducerOptions
from protomq._send_core import SendCore
from protomq.v1 import send_service_pb2 as pb
from protomq_spark.encoding import TopicEncoder
from protomq_spark.rows import rows_of

BORN_MS = 1_700_000_000_123
TEXTS = st.none() | st.text(max_size=140)
BODIES = st.binary(max_size=300) | st.integers(4000, 20_000).map(lambda size: b"ab" * (size // 2))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "body": BODIES,
            "key": TEXTS,
            "tags": st.none() | st.sampled_from(["", "A", "länger"]),
            "properties": st.none() | st.dictionaries(st.text(min_size=1, max_size=9), st.text(max_size=9), max_size=3),
            "sharding_key": st.none() | st.text(max_size=5),
        }
    ),
    min_size=1,
    max_size=40,
)  # fmt: skip
COLUMN_SETS = [
    ("body",),
    ("body", "key"),
    ("body", "tags"),
    ("body", "key", "tags"),
    ("body", "key", "tags", "properties", "sharding_key"),
]
TYPES = {
    "body": pa.binary(),
    "key": pa.string(),
    "tags": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "sharding_key": pa.string(),
}


def batch_of(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> pa.RecordBatch:
    schema = pa.schema([(name, TYPES[name]) for name in columns])
    return pa.RecordBatch.from_pylist(
        [
            {
                name: list(row[name].items()) if isinstance(row[name], dict) else row[name]
                for name in columns
            }
            for row in rows
        ],
        schema=schema,
    )


def written_by_the_sdk(
    rows: list[dict[str, Any]], columns: tuple[str, ...], compression: CompressionName
) -> bytes:
    core = SendCore(ProducerOptions(producer_id=7, compression=compression))
    records: list[PreparedRecord] = []
    for row in rows:
        given = {name: row[name] for name in columns}
        prepared = core.prepare(
            given["body"], given.get("key"), (), given.get("tags") or "",
            given.get("properties"), given.get("sharding_key"),
        )  # fmt: skip
        records.append((*prepared[:5], BORN_MS, prepared[6]))
    return b"".join(RecordEncoder("orders", 7, 0).encode_request(records, 1 << 40, 3, False))


@settings(deadline=None)
@given(ROWS, st.sampled_from(COLUMN_SETS), st.sampled_from(["none", "zlib"]), st.booleans())
def test_the_bytes_are_those_of_the_sdk(
    rows: list[dict[str, Any]],
    columns: tuple[str, ...],
    compression: CompressionName,
    one_size: bool,
) -> None:
    if one_size:
        rows = [row | {"body": bytes(70), "key": "k", "tags": None} for row in rows]
    batch = batch_of(rows, columns)
    made = rows_of(batch, "orders", make_compressor(compression))
    encoded = TopicEncoder("orders", 7).encode(made, 1 << 40, BORN_MS, 3, False)
    assert b"".join(encoded.payload) == written_by_the_sdk(rows, columns, compression)
    # A part of the rows is a view into the same buffers.
    part = made.part(len(rows) // 2, len(rows))
    encoded = TopicEncoder("orders", 7).encode(part, 1 << 40, BORN_MS, 3, False)
    expected = written_by_the_sdk(rows[len(rows) // 2 :], columns, compression)
    assert b"".join(encoded.payload) == expected


def test_a_request_says_of_each_row_what_its_record_says() -> None:
    rows = [{"body": b"x" * n, "key": f"k{n}"} for n in range(1, 5)]
    made = rows_of(batch_of(rows, ("body", "key")), "orders", make_compressor("none"))
    encoded = TopicEncoder("orders", 7).encode(made, 100, BORN_MS, 3, True)
    parsed = pb.SendRequest.FromString(b"".join(encoded.payload))
    for name in ("producer_id", "sequence", "crc32c"):
        expected = [getattr(record, name) for record in parsed.records]
        assert encoded.trailers[name].tolist() == expected
