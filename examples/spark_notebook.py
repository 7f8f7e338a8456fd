"""A topic in a notebook: fill it, query it, stream it, send from an expression. Runs cell by cell (`# %%`), or as a script.

Needs `pip install ./clients/python ./clients/spark pyspark`, a JDK 17 or newer and a server: protomq standalone
"""

# %% A session: nothing to register, no jar. Executors use the Python that has the packages.
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from protomq import Admin
from protomq_spark import protobuf_udf, send_udf

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
scratch = Path(tempfile.mkdtemp(prefix="protomq-notebook-"))
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.sql.shuffle.partitions", "2")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")
at = {"protomq.namesrv": NAMESRV}

# %% Topics.
with Admin(namesrv=NAMESRV) as admin:
    for topic in {"nb-orders", "nb-large", "nb-protobuf"} - set(admin.list_topic_names()):
        admin.create_topic(topic, write_queues=4)

# %% A thousand orders as JSON. With a writeId, this cell may be run again: nothing is stored twice.
orders = spark.range(1000).select(
    "id",
    f.concat(f.lit("customer-"), f.col("id") % 7).alias("customer"),
    (f.col("id") * 0.25).alias("total"),
    f.timestamp_seconds(f.lit(1_760_000_000) + f.col("id") * 60).alias("ordered_at"),
)
messages = orders.select(
    f.to_json(f.struct("*")).alias("body"),
    f.col("customer").alias("key"),
    f.when(f.col("total") >= 200, "large").otherwise("small").alias("tags"),
)
messages.write.format("protomq").options(**at, topic="nb-orders", writeId="notebook-1").mode("append").save()

# %% The topic as a table. `columns` is the only pruning that the API has: name what you need.
stored = spark.read.format("protomq").options(**at, subscribe="nb-orders", columns="body,tags,queue_id").load()
decoded = stored.select(
    "tags", f.from_json(f.col("body").cast("string"), "id BIGINT, customer STRING, total DOUBLE").alias("order")
).select("tags", "order.*")
decoded.groupBy("tags").agg(f.count("*").alias("orders"), f.sum("total").alias("total")).orderBy("tags").show()

# %% Only what the broker's own tag filter lets through.
large = spark.read.format("protomq").options(**at, subscribe="nb-orders", tags="large", columns="body").load()
print("large orders:", large.count())

# %% A stream: large orders to a topic of their own, exactly once. Its place is in the checkpoint: run again, it does nothing.
def copy_large_orders() -> int:
    copied = (
        spark.readStream.format("protomq")
        .options(**at, subscribe="nb-orders", tags="large", startingOffsets="earliest", columns="body,key")
        .option("maxOffsetsPerTrigger", "400")
        .load()
        .writeStream.format("protomq")
        .options(**at, topic="nb-large", checkpointLocation=str(scratch / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    copied.awaitTermination()
    return sum(progress["numInputRows"] for progress in copied.recentProgress)


print("copied:", copy_large_orders(), "and then:", copy_large_orders())
large_orders = spark.read.format("protomq").options(**at, subscribe="nb-large", columns="body,key").load()
print("in nb-large:", large_orders.count())

# %% Protobuf bodies: a descriptor set, as `buf build` or `protoc --include_imports --descriptor_set_out` makes it, and no jar.
here = Path(__file__).parent
buf = Path(sys.executable).with_name("buf")  # pip install buf-bin
subprocess.run([str(buf), "build", str(here / "shop"), "-o", str(scratch / "shop.binpb")], check=True)
encode = protobuf_udf.encode(scratch / "shop.binpb", "shop.v1.Order")
decode = protobuf_udf.decode(scratch / "shop.binpb", "shop.v1.Order")
encoded = orders.select(encode(f.struct("*")).alias("body"))
encoded.write.format("protomq").options(**at, topic="nb-protobuf", writeId="notebook-1").mode("append").save()
bodies = spark.read.format("protomq").options(**at, subscribe="nb-protobuf", columns="body").load()
columns = bodies.select(decode("body").alias("order")).select("order.*")
columns.where("id % 400 = 100").orderBy("id").show(truncate=False)

# %% A column that sends, and says where each message is.
send = send_udf("nb-orders", namesrv=NAMESRV)
late = spark.sql("SELECT 'late' AS body, 'customer-0' AS key")
late.select(send("body", "key").alias("sent")).select("sent.status", "sent.error").show()

# %% The end.
spark.stop()
