"""A program for spark-submit: a batch write and a stream, each with a task whose first attempt stalls until its speculative twin is done.

spark_speculation_job.py NAMESRV BATCH_TARGET SOURCE STREAM_TARGET COUNT FOLDER [BUG]
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.support.recorded_sink import RecordedSource, task

STALLS = 0
"""The partition whose first attempt does."""


def stalling(folder: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: the rows as they are. The first attempt of a task hands over some, and the rest when its twin has handed over all."""

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        first = task().partitionId() == STALLS and task().attemptNumber() == 0
        count = 0
        for batch in batches:
            if first and count >= 500 and not (folder / "stalled").exists():
                (folder / "stalled").touch()
                ends_s = time.monotonic() + 60
                while not (folder / "twin-done").exists() and time.monotonic() < ends_s:
                    time.sleep(0.005)
            count += batch.num_rows
            yield batch
        if task().partitionId() == STALLS and not first:
            (folder / "twin-done").touch()

    return rows


def main() -> None:
    namesrv, batch_target, source, stream_target, count, base, *bug = sys.argv[1:]
    spark = SparkSession.builder.appName("protomq-speculation").getOrCreate()
    spark.dataSource.register(RecordedSource)
    folders = {name: Path(base) / name for name in ("batch", "stream")}
    for folder in folders.values():
        folder.mkdir()

    def sink(name: str, target: str) -> dict[str, str]:
        found = {"protomq.namesrv": namesrv, "topic": target, "batchRows": "50"}
        return found | {"record.folder": str(folders[name]), "record.bug": "".join(bug)}

    # Large enough to leave the buffers between the two Python processes of a task while it still runs.
    padded = spark.range(0, int(count), 1, 4).selectExpr("lpad(id, 400, '0') AS body")
    written = padded.mapInArrow(stalling(folders["batch"]), "body STRING").write
    written.format("protomq-recorded").options(**sink("batch", batch_target)).mode("append").save()

    given = {"protomq.namesrv": namesrv, "subscribe": source, "startingOffsets": "earliest"}
    given |= {"columns": "body", "protomq.pullCountMax": "100"}
    read = spark.readStream.format("protomq").options(**given).load()
    copied = read.mapInArrow(stalling(folders["stream"]), "body BINARY").writeStream
    copied = copied.format("protomq-recorded").options(**sink("stream", stream_target))
    copied = copied.option("checkpointLocation", f"{base}/checkpoint").trigger(availableNow=True)
    assert copied.start().awaitTermination(120)
    spark.stop()


main()
