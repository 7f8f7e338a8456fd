"""One of two brokers is away, and the name server has taken it off the routes: nothing is left out, and no row goes elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from pyspark.sql import SparkSession

from protomq import Admin
from tests.support.cli import run
from tests.support.ha_brokers import HaBroker, running
from tests.support.namesrv import running_namesrv
from tests.support.spark import SPARK_MARKS, numbers
from tests.support.waiting import wait_for

pytestmark = SPARK_MARKS
COUNT = 1000


def test_a_write_and_a_read_while_one_of_two_brokers_is_away_say_so_and_rows_are_stored_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        a, b = (HaBroker(tmp_path / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv]) for name in "ab")

        def known() -> set[str]:
            with Admin(namesrv=namesrv) as admin:
                return {broker.broker_name for broker in admin.cluster_info()}

        def write(name: str) -> None:
            given = {"protomq.namesrv": namesrv, "protomq.timeoutMs": "1000", "topic": "t", "batchRows": "50", "writeId": name}
            numbers(spark, COUNT, 2).write.format("protomq").options(**given).mode("append").save()

        def read(**options: str) -> list[int]:
            given = {"protomq.namesrv": namesrv, "protomq.timeoutMs": "1000", "subscribe": "t", "columns": "body,broker"}
            rows = spark.read.format("protomq").options(**(given | options)).load().collect()
            return sorted(int(row.body) for row in rows)

        with running(a, b):
            wait_for(lambda: known() == {"a", "b"})
            run("topic", "create", "t", "-q", "2", namesrv=namesrv)
            write("w")
            b.kill()
            wait_for(lambda: known() == {"a"})
            for action in (lambda: write("w"), read):
                with pytest.raises(Exception, match="broker b is not registered any more"):
                    action()
            assert 0 < len(read(failOnDataLoss="false")) < COUNT
            b.start()
            wait_for(lambda: known() == {"a", "b"})
            write("w")
            assert read() == list(range(COUNT))
            b.kill()
            wait_for(lambda: known() == {"a"})
            run("cluster", "forget", "b", namesrv=namesrv)
            assert 0 < len(read()) < COUNT
