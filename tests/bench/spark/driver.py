"""A Spark session that is told what to run, line by line. The first line of input has its settings.

It runs in either of the two Sparks, so nothing but pyspark is imported. Each line is a JSON object with `do` and what that needs; the
answer is one line, {"messages": ..., "seconds": ...}, or {"error": ...}.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr


def start(settings: dict[str, Any]) -> SparkSession:
    """local[2], as the issue has it."""
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("bench-spark")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", settings["folder"] + "/warehouse")
    )
    if settings["jars"]:
        builder = builder.config("spark.jars", ",".join(settings["jars"]))
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    session.range(2_000_000).selectExpr("sum(id * 2)").collect()
    return session


class Driver:
    """What can be done. Each method answers how many messages there were."""

    def __init__(self, session: SparkSession, folder: str) -> None:
        self._session = session
        self._folder = folder

    def read(self, format: str, options: dict[str, str], sums: list[str]) -> int:
        """A batch query over all messages: a count and some sums."""
        frame = self._session.read.format(format).options(**options).load()
        row = frame.selectExpr("count(*) AS n", *sums).collect()[0]
        return int(row["n"])

    def stream(self, format: str, options: dict[str, str]) -> int:
        """A new query with Trigger.AvailableNow, from the first message to the last, into nothing."""
        frame = self._session.readStream.format(format).options(**options).load()
        checkpoint = tempfile.mkdtemp(prefix="checkpoint-", dir=self._folder)
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        shutil.rmtree(checkpoint, ignore_errors=True)
        return sum(progress.numInputRows for progress in query.recentProgress)

    def write(
        self, format: str, options: dict[str, str], column: str, rows: int, size: int, mode: str
    ) -> int:
        """Rows of one size: the number of the row, filled up with letters."""
        made = f"CAST(rpad(CAST(id AS STRING), {size}, 'abcdefghijklmnop') AS BINARY)"
        frame: DataFrame = self._session.range(0, rows, 1, 4).select(expr(made).alias(column))
        frame.write.format(format).options(**options).mode(mode).save()
        return rows


def main() -> None:
    """Serve until the input ends."""
    settings = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the JVM prints is no answer.
    session = start(settings)
    driver = Driver(session, settings["folder"])
    print(json.dumps({"version": session.version}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        do = getattr(driver, command.pop("do"))
        begin = time.perf_counter()
        try:
            messages = do(**command)
            answer: dict[str, Any] = {
                "messages": messages,
                "seconds": time.perf_counter() - begin,
            }
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(answer), file=answers, flush=True)
    session.stop()


if __name__ == "__main__":
    main()
