"""A program that knows nothing of the tree: writes ids, copies them as a stream, sends them by a UDF, reads all back, prints what it saw.

spark_copy_job.py NAMESRV SOURCE TARGET UDF_TARGET COUNT CHECKPOINT

For spark-submit, and for Spark Connect (SPARK_REMOTE names the server, or the master of one in this process's own JVM).
"""

import json
import sys
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.functions import udf

from protomq_spark import send_udf


def places(_: int) -> tuple[str, str, str]:
    """The folder of this executor, and where it has the packages from."""
    import os

    import protomq
    import protomq_spark

    return os.getcwd(), protomq.__file__, protomq_spark.__file__


def main() -> None:
    namesrv, source, target, udf_target, count, checkpoint = sys.argv[1:]
    spark = SparkSession.builder.appName("protomq-copy").getOrCreate()
    client = {"protomq.namesrv": namesrv}
    frame = spark.range(0, int(count), 1, 4).selectExpr("CAST(id AS STRING) AS body")
    frame.write.format("protomq").options(topic=source, **client).mode("append").save()

    options = {"subscribe": source, "startingOffsets": "earliest", **client}
    copied = spark.readStream.format("protomq").options(**options).load().select("body")
    writer = copied.writeStream.format("protomq").options(topic=target, **client)
    query = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    assert query.awaitTermination(120)

    def read(topic: str) -> Any:
        return spark.read.format("protomq").options(subscribe=topic, **client).load()

    send = send_udf(udf_target, namesrv=namesrv)
    sent = read(target).select(send("body").alias("sent")).groupBy("sent.status").count().collect()
    seen = read(udf_target).select("body").collect()
    place = udf(places, "folder STRING, sdk STRING, source STRING")
    found = spark.range(0, 8, 1, 8).select(place("id").alias("place")).select("place.*").collect()
    answer = {
        "session": type(spark).__module__,
        "ids": sorted(int(bytes(row.body)) for row in seen),
        "sent": {row["status"]: row["count"] for row in sent},
        "places": sorted({tuple(row) for row in found}),
    }
    print(json.dumps(answer))
    spark.stop()


main()
