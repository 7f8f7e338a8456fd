"""The Spark programs of the README and of docs/spark.md are run as they stand there, but for addresses and folders."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json, struct

from protomq import Producer
from protomq.testing import Broker
from protomq_spark.archive_files import FileSettings, PartitionedWriter
from protomq_spark.archive_table import ArchiveTable, appended, replaced
from protomq_spark.protobuf_udf import encode
from tests.support.shop_descriptors import ORDER, shop_descriptor_set
from tests.support.spark import ROOT, SPARK_MARKS
from tests.support.topics import drain, fill, make_topic

pytestmark = SPARK_MARKS


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_shown(program: str, names: dict[str, Any]) -> None:
    """Runs it; a table that is shown as an expression is computed, as whoever types it in a shell would."""
    for statement in ast.parse(program).body:
        if isinstance(statement, ast.Expr):
            code = compile(ast.Expression(statement.value), "docs", "eval")
            value = eval(code, names)
            if isinstance(value, DataFrame) and not value.isStreaming:
                value.write.format("noop").mode("overwrite").save()
        else:
            exec(compile(ast.Module([statement], []), "docs", "exec"), names)


def finish_queries(spark: SparkSession) -> None:
    """All that there is goes through; then they end."""
    try:
        for query in spark.streams.active:
            query.processAllAvailable()
    finally:
        for query in spark.streams.active:
            query.stop()


def placed(program: str, places: dict[str, str]) -> str:
    for shown, used in places.items():
        program = program.replace(shown, used)
    return program


def test_the_spark_program_of_the_readme_works(
    spark: SparkSession, protomq_server: Broker, tmp_path: Path
) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        producer.send("greetings", b"hello", key="k1", tag="en")
        producer.send("greetings", b"hallo", key="k2", tag="de")
    _first, program = programs("README.md")
    places = {"127.0.0.1:10911": protomq_server.namesrv, "/tmp/checkpoints": str(tmp_path)}
    assert all(shown in program for shown in places)
    try:
        exec(placed(program, places), {"spark": spark})
        finish_queries(spark)
    finally:
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    (message,) = drain(protomq_server, "loud")
    assert (message.key, message.body) == ("k1", b"HELLO")


def right_half(program: str) -> str:
    """Of two programs side by side the one of protomq."""
    head = program.splitlines()[0]
    at = head.index("# protomq")
    return "\n".join(line[at:] for line in program.splitlines())


def make_archive(root: Path) -> None:
    """Two files that were merged into one, and are there still."""
    table = ArchiveTable(str(root))
    files = []
    for label in ("1", "2", "merged"):
        writer = PartitionedWriter(FileSettings(str(root), label, ("topic",)), "0")
        for _ in range(2 if label == "merged" else 1):
            writer.add(pa.RecordBatch.from_pydict({"topic": ["orders"], "id": [1]}))
        files += writer.finish()
    first, second, merged = files
    table.update(lambda base: appended(base, [first, second], {}, 0))
    table.update(lambda base: replaced(base, {merged: [first.path, second.path]}, 0))


@pytest.mark.long
def test_the_programs_of_the_page_about_spark_work(
    spark: SparkSession, protomq_server: Broker, protomq_producer: Producer, tmp_path: Path
) -> None:
    shop = tmp_path / "shop.binpb"
    shop.write_bytes(shop_descriptor_set())
    make_archive(tmp_path / "archive")
    for topic in ("orders", "totals", "copy"):
        make_topic(protomq_server, topic, 2)
    make_topic(protomq_server, "orders-eu", 1)  # A queue without a message of that time or later would be an error.
    table = spark.range(0, 90, 1, 2).selectExpr("id", "id * 0.5 AS total")
    orders = table.select(encode(str(shop), ORDER)(struct("id", "total")).alias("body"))
    sink = {"protomq.namesrv": protomq_server.namesrv, "topic": "orders"}
    orders.selectExpr("body", "'new' AS tags").write.format("protomq").options(**sink).mode("append").save()
    fill(protomq_producer, "orders-eu", 5)

    *blocks, beside_kafka = programs("docs/spark.md")
    store = str(protomq_server.data_dir / "store")
    places = {
        "127.0.0.1:10911": protomq_server.namesrv, "host:9876": protomq_server.namesrv, "shop.binpb": str(shop),
        "/var/lib/protomq/store": store, "s3://backup/store": store, "/tmp/archive": str(tmp_path / "archive"),
        "/tmp/checkpoints": str(tmp_path / "ck"), '"/ck"': f'"{tmp_path}/copy"',
    }  # fmt: skip
    shown = "".join(blocks) + beside_kafka
    assert all(place in shown for place in places)
    df = spark.range(0, 10, 1, 2).selectExpr("CAST(id AS STRING) AS body", "'k' AS key", "'sent' AS tags")
    names: dict[str, Any] = {"spark": spark, "df": df, "table": table}
    for block in blocks:
        run_shown(placed(block, places), names)
    finish_queries(spark)
    late = names["late"](names["orders"])
    assert late.columns == ["body", "key", "tags"]
    assert names["ds"].dataset(names["files"]).count_rows() == 2

    names |= {"col": col, "from_json": from_json, "ddl": "id BIGINT", "df": table}
    run_shown(placed(right_half(beside_kafka), places), names)
    finish_queries(spark)

    # 90 orders; ten rows written, and sent by three functions with their tags and by one without; and what the last program stored.
    tags = Counter(message.tag for message in drain(protomq_server, "orders"))
    assert tags == {"new": 90, "sent": 10 * 4, "": 10 + 90}
    totals = {message.key: int(message.body) for message in drain(protomq_server, "totals")}
    assert totals["new"] == 90
    assert 10 <= totals["sent"] <= 40  # Sent while the query ran.
    assert len(drain(protomq_server, "copy")) == 230
