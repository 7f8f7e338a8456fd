"""`make demo-spark`: delays per carrier and airport from the flights that `make demo` left in its store, growing as Spark reads.

    broker as a child process on the demo's store -> Spark reads the topic in micro-batches -> table (Parquet) and topic
    `flight-delays` -> the table is printed from both, and they must agree

Needs pyspark, a JDK 17 or newer, and a store that `make demo` made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from protomq import Admin
from protomq.testing import Broker, BrokerStartError
from protomq_spark.pipelines import flights
from protomq_spark.pipelines.report import RunReport

if TYPE_CHECKING:
    from pyspark.sql import Column

OUTPUT_TOPIC = "flight-delays"


def write(text: str) -> None:
    """A line on the terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def growth() -> list[Column]:
    """What is shown of the table after each micro-batch."""
    from pyspark.sql import functions as f

    airports = [f.sum(f.when(f.col("origin") == name, f.col("flights"))).alias(name) for name in ("EWR", "JFK", "LGA")]
    return [
        f.count(f.lit(1)).alias("table rows"),
        f.countDistinct("window_start").alias("days"),
        f.sum("flights").alias("flights"),
        *airports,
        f.sum("cancelled").alias("cancelled"),
        f.round(f.max("departure_delay_min"), 1).alias("worst delay"),
    ]


def main() -> int:
    """The whole demo; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="build/demo-store", help="what `make demo` left")
    parser.add_argument("--data", default="build/flights", help="the CSV files")
    parser.add_argument("--batch-size", type=int, default=50_000)
    parser.add_argument("--report", default="build/demo-spark", help="report.json and report.png")
    given = parser.parse_args()
    store = Path(given.store)
    if not (store / "commitlog").is_dir():
        sys.exit(f"{store} holds no flights yet: run make demo")
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        sys.exit("Spark needs a JDK 17 or newer (apt-get install openjdk-17-jre-headless)")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    with (
        tempfile.TemporaryDirectory(prefix="protomq-demo-spark-") as scratch,
        Broker(arguments=("--data-dir", str(store))) as broker,
    ):
        with Admin(namesrv=broker.remoting_address) as admin:
            if OUTPUT_TOPIC in admin.list_topic_names():
                admin.delete_topic(OUTPUT_TOPIC)
            admin.create_topic(OUTPUT_TOPIC, write_queues=4)
        spark = (
            SparkSession.builder.master("local[2]")
            .appName("protomq demo")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        arguments = argparse.Namespace(
            namesrv=broker.remoting_address, topic="flights", data=given.data, table=f"{scratch}/table",
            checkpoint=f"{scratch}/checkpoint", output_topic=OUTPUT_TOPIC, window="1 day", watermark="400 days", mode="update",
            batch_size=given.batch_size, follow=False,
        )  # fmt: skip
        report = RunReport("flights", vars(arguments))
        began_s = time.monotonic()

        def show_growth(number: int) -> None:
            """The table as it is now."""
            now = flights.latest(spark.read.parquet(arguments.table)).persist()
            (sums,) = now.agg(*growth()).collect()
            now.unpersist()
            if not number:
                write("".join(f"{name:>14}" for name in sums.asDict()))
            cells = [f"{value:,}" if isinstance(value, int) else str(value) for value in sums]
            write("".join(f"{cell:>14}" for cell in cells))

        flights.run(spark, arguments, report, show_growth)
        elapsed_s = time.monotonic() - began_s
        write(f"{report.result['flights']:,} flights in {elapsed_s:.1f} s\n")

        written = spark.read.parquet(f"{scratch}/table")
        table = flights.latest(written).persist()
        write("Where they flew from:")
        busiest = table.groupBy("airline", "airport").sum("flights")
        busiest.orderBy("sum(flights)", ascending=False).show(5, truncate=False)
        write("The worst days:")
        columns = (
            "window_start",
            "airline",
            "airport",
            "flights",
            "departure_delay_min",
            "wind_speed_mph",
        )
        worst = table.where("flights >= 50").orderBy("departure_delay_min", ascending=False)
        worst.select(*columns).show(5, truncate=False)
        topic = spark.read.format("protomq").option("protomq.namesrv", broker.remoting_address)
        sent, rows = topic.option("subscribe", OUTPUT_TOPIC).load().count(), written.count()
        ((counted,),) = table.agg({"flights": "sum"}).collect()
        spark.stop()
        report.write(given.report)
        if sent != rows or counted != report.result["flights"]:
            sys.exit(
                f"{rows:,} rows in the table and {sent:,} messages in {OUTPUT_TOPIC} must be the same number, and"
                f" the {counted:,} flights in the table the {report.result['flights']:,} that were read"
            )
        write(
            f"checked: all {counted:,} flights are in the table, its {rows:,} rows in the topic {OUTPUT_TOPIC};"
            f" {given.report}/report.png shows the run"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokerStartError as error:
        sys.exit(str(error))
