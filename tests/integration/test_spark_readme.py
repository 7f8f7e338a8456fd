"""The README's Spark program is run as it stands there, but for addresses and folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import SparkSession

from protomq import Producer
from protomq.testing import Broker
from tests.support.spark import ROOT, SPARK_MARKS
from tests.support.topics import drain

pytestmark = SPARK_MARKS


def test_the_spark_program_of_the_readme_works(
    spark: SparkSession, protomq_server: Broker, tmp_path: Path
) -> None:
    with Producer(namesrv=protomq_server.namesrv) as producer:
        producer.send("greetings", b"hello", key="k1", tag="en")
        producer.send("greetings", b"hallo", key="k2", tag="de")
    _first, program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for shown, used in (
        ("127.0.0.1:10911", protomq_server.namesrv),
        ("/tmp/checkpoints", str(tmp_path)),
    ):
        assert shown in program
        program = program.replace(shown, used)
    try:
        exec(program, {"spark": spark})
        (query,) = spark.streams.active
        query.processAllAvailable()
    finally:
        for query in spark.streams.active:
            query.stop()
        spark.conf.unset("spark.sql.streaming.checkpointLocation")
    (message,) = drain(protomq_server, "loud")
    assert (message.key, message.body) == ("k1", b"HELLO")
