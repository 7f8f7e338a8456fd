"""Topic to topic through a function of yours, exactly once.

--function names a module and a function in it. The function gets the messages as a streaming DataFrame, with the columns of
the source. It returns one with the columns of the sink (body, key, tags ...). Row-by-row transformations keep the order. One
that groups, joins or repartitions needs --shuffled. Then its rows are sorted by what is in them (`send_batch`), and rows of a
group that changed are sent again. The module is looked for in the working folder, too.

    # my_functions.py
    def big_orders(messages):
        return messages.where("length(body) > 100").select("body", "key", "tags")
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from protomq_spark.batches import send_batch

from .report import RunReport, end_of, progress_of, say

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The pipeline's own arguments."""
    parser.add_argument("--topic", required=True, help="topics, separated by commas")
    parser.add_argument("--output-topic", required=True)
    parser.add_argument(
        "--output-namesrv", default="", help="of another cluster; --namesrv if not given"
    )
    parser.add_argument("--function", required=True, metavar="MODULE:NAME")
    parser.add_argument(
        "--checkpoint", required=True, help="folder in which Spark keeps how far it is"
    )
    parser.add_argument("--batch-size", type=int, default=100_000, help="messages in a micro-batch")
    parser.add_argument("--tags", default="", help="only messages with these tags")
    parser.add_argument(
        "--starting", choices=("earliest", "latest"), default="earliest", help="first run only"
    )
    parser.add_argument("--group", default="", help="consumer group to commit offsets to")
    parser.add_argument(
        "--shuffled", action="store_true", help="the function groups, joins or repartitions"
    )
    parser.add_argument(
        "--follow", action="store_true", help="do not end when all messages are read"
    )


def run(spark: SparkSession, arguments: argparse.Namespace, report: RunReport) -> None:
    """Until all messages are read, or, with --follow, for ever."""
    function = load_function(arguments.function)
    reader = (
        spark.readStream.format("protomq")
        .option("protomq.namesrv", arguments.namesrv)
        .option("subscribe", arguments.topic)
        .option("startingOffsets", arguments.starting)
        .option("maxOffsetsPerTrigger", str(arguments.batch_size))
    )
    if arguments.tags:
        reader = reader.option("tags", arguments.tags)
    if arguments.group:
        reader = reader.option("protomq.group.id", arguments.group)
    namesrv, topic = arguments.output_namesrv or arguments.namesrv, arguments.output_topic
    writer = function(reader.load()).writeStream.option("checkpointLocation", arguments.checkpoint)
    if arguments.shuffled:
        writer = writer.outputMode("update").foreachBatch(send_batch(topic, namesrv=namesrv))
    else:
        writer = writer.format("protomq").option("protomq.namesrv", namesrv).option("topic", topic)
    query = (writer if arguments.follow else writer.trigger(availableNow=True)).start()
    count = 0
    try:
        for progress in progress_of(query):
            count += progress["numInputRows"]
            rows = progress["numInputRows"]
            report.batch(progress["batchId"], ended_at=end_of(progress), messages=rows)
    finally:
        query.stop()
        report.result = {"messages_read": count}
    say(f"{count:,} messages of {arguments.topic} went through {arguments.function}")


def load_function(name: str) -> Callable[[DataFrame], DataFrame]:
    """The function that MODULE:NAME names. Raises ValueError, or what the import raises."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"--function must be MODULE:NAME, not {name!r}")
    if os.getcwd() not in sys.path:  # spark-submit leaves it out.
        sys.path.append(os.getcwd())
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise ValueError(f"module {module_name} has no function {function_name}")
    return function  # type: ignore[no-any-return, unused-ignore]
