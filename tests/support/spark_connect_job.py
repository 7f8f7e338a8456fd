"""A program of Spark Connect: writes ids, copies them as a stream, reads them back, prints them as JSON.

spark_connect_job.py NAMESRV SOURCE TARGET COUNT CHECKPOINT
"""

import json
import sys

from pyspark.sql import SparkSession


def main() -> None:
    namesrv, source, target, count, checkpoint = sys.argv[1:]
    # A Connect server of its own in a JVM; this process speaks gRPC with it and has no JVM objects.
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    client = {"protomq.namesrv": namesrv}
    frame = spark.range(0, int(count), 1, 2).selectExpr("CAST(id AS STRING) AS body")
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
    print(json.dumps({"session": type(spark).__module__, "ids": ids}))
    spark.stop()


main()
