"""JSON and protobuf bodies as columns, with a real Spark and a real broker; and that Spark's own protobuf functions want a jar."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import array, col, from_json, lit, struct, to_json
from pyspark.sql.protobuf.functions import from_protobuf

from protomq.testing import Broker
from protomq_spark import protobuf_udf, send_udf
from tests.support.shop_descriptors import ORDER, shop_descriptor_set
from tests.support.spark import SPARK_MARKS

pytestmark = SPARK_MARKS

Read = Callable[..., DataFrame]
Write = Callable[..., None]


@pytest.fixture
def descriptors(tmp_path: Path) -> Path:
    path = tmp_path / "shop.binpb"
    path.write_bytes(shop_descriptor_set())
    return path


def orders(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).select(
        "id",
        (col("id") / 2).alias("total"),
        lit("STATUS_PAID").alias("status"),
        lit(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)).alias("at"),
        struct(lit("a").alias("sku"), col("id").alias("count")).alias("first"),
        array(struct(lit("b").alias("sku"), lit(2).alias("count"))).alias("items"),
    )


def test_rows_are_sent_as_protobuf_and_come_back_as_columns(
    spark: SparkSession, read: Read, write: Write, protomq_topic: str, descriptors: Path
) -> None:
    encode = protobuf_udf.encode(descriptors, ORDER)
    decode = protobuf_udf.decode(str(descriptors), ORDER)
    table = orders(spark, 5000)
    write(table.select(encode(struct(*table.columns)).alias("body")), protomq_topic)
    descriptors.unlink()  # It has travelled with the functions.
    back = read(protomq_topic, columns="body").select(decode("body").alias("order"))
    assert back.schema["order"].dataType.simpleString().startswith("struct<id:bigint,total:double,")
    rows = back.select("order.*").where("id % 1000 = 7").orderBy("id").collect()
    assert [row.id for row in rows] == [7, 1007, 2007, 3007, 4007]
    row = rows[1]
    assert (row.total, row.status, row["first"].asDict()) == (503.5, "STATUS_PAID", {"sku": "a", "count": 1007})
    assert [item.asDict() for item in row["items"]] == [{"sku": "b", "count": 2}]
    assert row.at.astimezone(UTC) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert (row.note, row.discount, row.labels) == (None, None, {})
    assert back.where("order.items[0].count = 2").count() == 5000


def test_a_poisoned_body_fails_the_query_or_is_null(
    spark: SparkSession, read: Read, write: Write, protomq_topic: str, descriptors: Path
) -> None:
    encode = protobuf_udf.encode(descriptors, ORDER)
    write(orders(spark, 10).select(encode(struct("id")).alias("body")), protomq_topic)
    write(spark.sql("SELECT X'FFFF' AS body"), protomq_topic)
    bodies = read(protomq_topic, columns="body")
    lenient = protobuf_udf.decode(descriptors, ORDER, mode="PERMISSIVE")
    rows = bodies.select(lenient("body").alias("order")).collect()
    assert sorted(row.order.id for row in rows if row.order) == list(range(10))
    assert len([row for row in rows if row.order is None]) == 1
    strict = protobuf_udf.decode(descriptors, ORDER)
    with pytest.raises(Exception, match=r"no shop\.v1\.Order"):
        bodies.select(strict("body").alias("order")).collect()


def test_an_expression_encodes_and_sends(
    spark: SparkSession, read: Read, protomq_server: Broker, protomq_topic: str, descriptors: Path
) -> None:
    encode = protobuf_udf.encode(descriptors, ORDER)
    send = send_udf(protomq_topic, namesrv=protomq_server.namesrv)
    table = orders(spark, 100).select(encode(struct("id", "total")).alias("body"))
    sent = table.select(send("body").alias("sent")).select("sent.status", "sent.error").collect()
    assert {(row.status, row.error) for row in sent} == {("SEND_OK", None)}
    decode = protobuf_udf.decode(descriptors, ORDER)
    ids = read(protomq_topic, columns="body").select(decode("body").id.alias("id")).collect()
    assert sorted(row.id for row in ids) == list(range(100))


def test_a_json_body_is_decoded_by_sparks_own_function(
    spark: SparkSession, read: Read, write: Write, protomq_topic: str
) -> None:
    write(orders(spark, 50).select(to_json(struct("id", "total")).alias("body")), protomq_topic)
    text = col("body").cast("string")
    order = from_json(text, "id BIGINT, total DOUBLE").alias("order")
    rows = read(protomq_topic, columns="body").select(order).select("order.*").collect()
    assert sorted((row.id, row.total) for row in rows) == [(n, n / 2) for n in range(50)]


def test_sparks_own_protobuf_functions_want_a_jar(spark: SparkSession, descriptors: Path) -> None:
    """If this fails, PySpark brings spark-protobuf now, and docs/spark.md may say so."""
    bodies = spark.sql("SELECT X'' AS body")
    with pytest.raises(AnalysisException, match=r"(?i)protobuf"):
        bodies.select(from_protobuf("body", ORDER, descFilePath=str(descriptors))).collect()
