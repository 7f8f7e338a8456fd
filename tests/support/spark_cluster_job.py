"""A program for spark-submit that knows nothing of the tree: writes ids, copies them as a stream, reads them back, prints what it saw.

spark_cluster_job.py NAMESRV SOURCE TARGET COUNT CHECKPOINT
"""

import json
import sys
from collections.abc import Iterator

from pyspark.sql import SparkSession


def seen_from(_: object) -> Iterator[tuple[str, ...]]:
    """The folder of this executor, and where it has the package from."""
    import os

    import protomq
    import protomq_spark

    yield os.getcwd(), protomq.__file__, protomq_spark.__file__


def main() -> None:
    namesrv, source, target, count, checkpoint = sys.argv[1:]
    spark = SparkSession.builder.appName("protomq-cluster").getOrCreate()
    client = {"protomq.namesrv": namesrv}
    frame = spark.range(0, int(count), 1, 4).selectExpr("CAST(id AS STRING) AS body")
    frame.write.format("protomq").options(topic=source, **client).mode("append").save()
    reader = spark.readStream.format("protomq").options(
        subscribe=source, startingOffsets="earliest", **client
    )
    writer = (
        reader.load().select("body").writeStream.format("protomq").options(topic=target, **client)
    )
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    read = spark.read.format("protomq").options(subscribe=target, columns="body", **client).load()
    ids = sorted(int(bytes(row.body)) for row in read.collect())
    places = spark.sparkContext.parallelize(range(8), 8).mapPartitions(seen_from).collect()
    print(json.dumps({"ids": ids, "places": sorted(set(places))}))


main()
