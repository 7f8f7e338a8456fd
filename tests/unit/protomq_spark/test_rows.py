"""Rows to messages, and the identity that makes a repeated task recognisable."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, IntegerType, LongType, StringType, StructField, StructType

from protomq._compression import make_compressor
from protomq._types import MessageQueue
from protomq.errors import ConfigurationError, MessageTooLargeError
from protomq.v1.record_pb2 import Record
from protomq.wire.hashing import hash63, key_hash_of, sharding_hash_of, tag_code_of
from protomq_spark.options import OptionError
from protomq_spark.rows import (
    BadRowError,
    ShardBy,
    check_columns,
    check_types,
    joined,
    parse_queue,
    rows_of,
    windows,
)
from protomq_spark.sender import SEQUENCES_PER_BATCH, Identity
from protomq_spark.source import ProtomqDataSource

PLAIN = make_compressor("none")


def batch_of(**columns: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize(
    ("names", "topic", "named"),
    [
        (["key"], "t", "'body'"),
        (["body"], "", "'topic'"),
        (["body", "colour", "size"], "t", "'colour', 'size'"),
        (["body", "delay"], "t", "'delay'"),
        (["body", "tags", "tag"], "t", "'tag' and 'tags'|'tags' and 'tag'"),
        (["body", "properties", "headers"], "t", "'properties' and 'headers'"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_by_name(
    names: list[str], topic: str, named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        check_columns(names, topic)


@pytest.mark.parametrize(
    "kinds", [{"body": "int"}, {"body": "string", "key": "bigint"}, {"body": "binary", "tags": "array<string>"}]
)
def test_a_column_of_another_type_is_refused_before_any_task(kinds: dict[str, str]) -> None:
    name, kind = list(kinds.items())[-1]
    with pytest.raises(OptionError, match=f"column '{name}' is {kind}: it must be string or binary"):
        check_types(kinds)
    types = {"int": IntegerType(), "bigint": LongType(), "array<string>": ArrayType(StringType())}
    schema = StructType([StructField(name, types.get(kind, StringType())) for name, kind in kinds.items()])
    source = ProtomqDataSource({"protomq.namesrv": "127.0.0.1:1", "topic": "t"})
    for writer in (source.writer, source.streamWriter):
        with pytest.raises(OptionError, match=f"column '{name}' is {kind}"):
            writer(schema, False)


def test_texts_of_every_kind_may_be_written() -> None:
    check_types({"body": "binary", "key": "string collate UNICODE", "tags": "varchar(9)", "queue": "int", "topic": "char(3)"})


def test_rows_become_records_with_all_their_parts() -> None:
    batch = pa.RecordBatch.from_pylist(
        [{"body": "text", "key": b"k", "tags": "T", "sharding_key": "s", "properties": [("a", "1")]}],
        schema=pa.schema(
            [("body", pa.string()), ("key", pa.binary()), ("tags", pa.string()), ("sharding_key", pa.string()),
             ("properties", pa.map_(pa.string(), pa.string()))]
        ),
    )  # fmt: skip
    rows = rows_of(batch, "t", PLAIN)
    assert rows.fronts is not None
    parsed = Record.FromString(rows.fronts[0].as_py())
    assert (rows.bodies.to_pylist(), rows.flags.tolist()) == ([b"text"], [0])
    assert (rows.key_hashes[0], rows.tag_codes[0]) == (key_hash_of("k"), tag_code_of("T"))
    assert (list(parsed.keys), parsed.tag, dict(parsed.properties)) == (["k"], "T", {"a": "1"})
    assert parsed.attributes.sharding_key == "s"
    assert rows.places is None
    assert rows.shards is not None
    assert rows.shards.tolist() == [hash63(b"s")]
    assert rows.sharding_hashes.tolist() == [sharding_hash_of("s")]


def test_kafkas_headers_are_properties() -> None:
    batch = batch_of(body=[b"x", b"y"], headers=[[{"key": "a", "value": b"1"}], None])
    fronts = rows_of(batch, "t", PLAIN).fronts
    assert fronts is not None
    first, second = fronts.to_pylist()
    assert dict(Record.FromString(first).properties) == {"a": "1"}
    assert second == b""


def test_rows_that_may_go_anywhere_have_no_places() -> None:
    assert rows_of(batch_of(body=["x"], topic=["u"]), "t", PLAIN).places is None
    assert rows_of(batch_of(body=["x"], topic=["u"]), "", PLAIN).places == [("u", None)]
    assert rows_of(batch_of(body=["x"], queue=[3]), "t", PLAIN).places == [("t", "3")]


@pytest.mark.parametrize(
    ("shard_by", "columns", "texts"),
    [
        ("", {"key": ["k", None, ""]}, ["k", "", ""]),
        ("", {"key": ["k", "k", "k"], "sharding_key": ["s", None, ""]}, ["s", "", ""]),
        ("key", {"key": ["k", None, "l"], "sharding_key": ["s", "s", "s"]}, ["k", "", "l"]),
        ("sharding_key", {"key": ["k", "k", "k"], "sharding_key": ["s", "t", None]}, ["s", "t", ""]),
        ("key", {"key": ["k", "ü", "l"], "properties": [[("a", "1")], None, None]}, ["k", "ü", "l"]),
    ],
)
def test_a_column_chooses_the_queue(
    shard_by: ShardBy, columns: dict[str, list[Any]], texts: list[str]
) -> None:
    batch = batch_of(body=["a", "b", "c"], **columns)
    rows = rows_of(batch, "t", PLAIN, shard_by)
    assert rows.shards is not None
    assert rows.shards.tolist() == [hash63(text.encode()) if text else 0 for text in texts]
    assert joined([rows.part(0, 1), rows.pick([1, 2])]).shards.tolist() == rows.shards.tolist()  # type: ignore[union-attr]


def test_without_a_column_that_chooses_queues_are_taken_in_turn() -> None:
    assert rows_of(batch_of(body=["x"], key=["k"]), "t", PLAIN, "none").shards is None
    assert rows_of(batch_of(body=["x"], tags=["A"]), "t", PLAIN).shards is None
    with pytest.raises(OptionError, match="'shardBy' is 'key', but there is no such column"):
        check_columns(["body"], "t", "key")


@pytest.mark.parametrize(
    "columns",
    [{"body": [bytes((4 << 20) + 1)]}, {"body": [b""], "key": ["k" * 40_000]},
     {"body": [b""], "properties": [[{"key": "a", "value": b"v" * 40_000}]]}],
)  # fmt: skip
def test_what_the_broker_would_refuse_is_refused_before_it_is_sent(
    columns: dict[str, list[Any]],
) -> None:
    with pytest.raises(MessageTooLargeError):
        rows_of(batch_of(**columns), "t", PLAIN)


@pytest.mark.parametrize(
    "batch",
    [
        {"body": [b"x", None]},
        {"body": [b"x"], "topic": [None]},
        {"body": [b"x"], "headers": [[{"key": "a", "value": None}]]},
        {"body": [b"x"], "headers": [[{"key": "", "value": b"1"}]]},
        {"body": [b"x"], "headers": [[{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]]},
        {"body": [b"x"], "key": [b"\xff"]},
        {"body": [1]},
    ],
)
def test_a_row_that_cannot_be_a_message_is_an_error(batch: dict[str, list[Any]]) -> None:
    with pytest.raises(BadRowError):
        rows_of(batch_of(**batch), "" if "topic" in batch else "t", PLAIN)


def cut_one_by_one(bodies: list[bytes], rows_max: int, size_max_bytes: int) -> list[list[bytes]]:
    """As the first version did it: what it has sent must be cut in the same way when it is sent again."""
    cut: list[list[bytes]] = []
    window: list[bytes] = []
    size = 0
    for body in bodies:
        row_size = len(body) + 160
        if window and (len(window) >= rows_max or size + row_size > size_max_bytes):
            cut.append(window)
            window, size = [], 0
        window.append(body)
        size += row_size
    return [*cut, window] if window else cut


@given(
    st.lists(st.binary(max_size=400) | st.just(bytes(2500)), max_size=60),
    st.lists(st.integers(1, 20), max_size=10),
)
def test_windows_do_not_depend_on_sparks_batches(bodies: list[bytes], cuts: list[int]) -> None:
    def batches() -> list[pa.RecordBatch]:
        made, at = [], 0
        for cut in [*cuts, 10_000]:
            made.append(
                pa.RecordBatch.from_arrays([pa.array(bodies[at : at + cut], pa.binary())], ["body"])
            )
            at += cut
        return made

    def cut(parts: list[pa.RecordBatch]) -> list[list[bytes]]:
        return [window.bodies.to_pylist() for window in windows(parts, "t", PLAIN, 7, 2000)]

    whole = [pa.RecordBatch.from_arrays([pa.array(bodies, pa.binary())], ["body"])]
    assert cut(batches()) == cut(whole)
    assert [body for window in cut(whole) for body in window] == bodies
    assert cut(whole) == cut_one_by_one(bodies, 7, 2000)


def test_an_identity_is_the_same_in_every_attempt_and_differs_by_task() -> None:
    one = Identity("query\0q", 3, 5)
    assert one.producer_id == Identity("query\0q", 3, 6).producer_id
    others = {Identity("query\0q", 4, 5).producer_id, Identity("query\0r", 3, 5).producer_id}
    assert one.producer_id not in others
    assert one.first_sequence == 5 * SEQUENCES_PER_BATCH
    with pytest.raises(ValueError):
        _ = Identity("q", 0, 1 << 31).first_sequence


def test_a_queue_is_named_with_its_broker_or_without() -> None:
    queues = [MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)]
    assert parse_queue("1", "t", queues) == queues[1]
    assert parse_queue("b:0", "t", queues) == queues[2]
    with pytest.raises(ConfigurationError, match="several brokers"):
        parse_queue("0", "t", queues)
    with pytest.raises(ConfigurationError, match="not there"):
        parse_queue("b:9", "t", queues)
