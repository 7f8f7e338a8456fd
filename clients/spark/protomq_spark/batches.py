"""Micro-batches behind a shuffle, exactly once: a function for `foreachBatch`.

    from protomq_spark import send_batch

    totals.writeStream.outputMode("update").foreachBatch(send_batch("totals", namesrv="host:9876")).start()

The sink recognises a row of a micro-batch that is replayed by its number in its partition. Behind a shuffle (groupBy, join,
repartition) Spark may give the same rows in another order, and on a stream it refuses `sortWithinPartitions`. Here the order
follows from the rows:

- They are spread over a fixed number of partitions by the column that chooses the queue (`shardBy`). So one task sends what
  must keep its order. Rows without that column are spread by all their columns.
- There they are sorted by `order_by` and then by all columns. Equal rows need no order.
- They are written under the query's id and the micro-batch's number, as the sink of a stream writes them.

What Spark computes must be the same again: a sum of floats, `collect_list` or `current_timestamp()` may not be. Then the write
fails with ReplayMismatchError; nothing is stored twice or lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .options import OptionError, parse_write_options
from .rows import COLUMNS, check_columns, shard_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

PARTITIONS: Final = 4
"""Each is a task, which costs Spark some 30 ms; rows of a micro-batch are mostly few."""
_QUERY_ID: Final = "sql.streaming.queryId"
_OURS: Final = ("writeid", "batchid")


def send_batch(
    topic: str = "",
    *,
    namesrv: str,
    order_by: str | Sequence[str] = (),
    partitions: int = PARTITIONS,
    query_id: str = "",
    options: Mapping[str, str] | None = None,
) -> Callable[[DataFrame, int], None]:
    """A function for `foreachBatch` of DataFrames with the columns of the sink; without `topic` they need a column of that name.

    `order_by` names columns by which rows that share a queue are sorted; those that the sink does not know are left out of the
    messages. `partitions` (1 or more) must not change between the attempts at a micro-batch. `query_id`: a name that only this
    function has, and keeps. It is needed if two of one query send to one topic, and in Spark Connect, which does not provide the
    query's id. `options`: those of the sink. Raises OptionError.
    """
    given = dict(options or {}) | {"protomq.namesrv": namesrv}
    if topic:
        given["topic"] = topic
    for name in given:
        if name.lower() in _OURS:
            raise OptionError(f"send_batch sets the option {name!r} itself")
    if partitions < 1:
        raise OptionError(f"'partitions' must be 1 or more, not {partitions}")
    parse_write_options(given)
    names = (order_by,) if isinstance(order_by, str) else tuple(order_by)
    return _SendBatch(given, names, partitions, query_id)


@dataclass(frozen=True, slots=True)
class _SendBatch:
    options: dict[str, str]
    order_by: tuple[str, ...]
    partitions: int
    query_id: str

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Sends a micro-batch, and waits until it is stored."""
        options = parse_write_options(self.options)
        unknown = [name for name in self.order_by if name not in batch.columns]
        if unknown:
            raise OptionError(f"order_by: there is no column {', '.join(map(repr, unknown))}")
        extra = [name for name in self.order_by if name not in COLUMNS]
        check_columns([name for name in batch.columns if name not in extra], options.topic, options.shard_by)
        shard = shard_column(batch.columns, options.shard_by)
        rows = in_order_of_content(batch, shard, self.order_by, self.partitions).drop(*extra)
        writer = rows.write.format("protomq").options(**self.options)
        writer = writer.options(writeId=self.query_id or _query_id(batch), batchId=str(batch_id))
        writer.mode("append").save()


def in_order_of_content(
    rows: DataFrame, shard: str | None, order_by: Sequence[str], partitions: int
) -> DataFrame:
    """The rows in partitions and an order that follow from what is in them, however they came."""
    from pyspark.sql import functions as f

    columns = [_sortable(rows, name) for name in sorted(rows.columns)]
    place: Column = f.xxhash64(*columns)
    if shard is not None:
        text = f.col(shard).cast("string")
        place = f.when(f.length(text) > 0, f.xxhash64(text)).otherwise(place)
    return rows.repartition(partitions, place).sortWithinPartitions(
        *(f.col(name) for name in order_by), *columns
    )


def _sortable(rows: DataFrame, name: str) -> Any:
    """The column, or for a map, which has no order in Spark, its sorted entries."""
    from pyspark.sql import functions as f

    if dict(rows.dtypes)[name].startswith("map<"):
        return f.to_json(f.array_sort(f.map_entries(name)))
    return f.col(name)


def _query_id(batch: DataFrame) -> str:
    """The id of the query that called `foreachBatch`: the one in its checkpoint. Raises OptionError where Spark does not tell it."""
    context = getattr(batch.sparkSession, "_sc", None)  # Spark Connect has none.
    query_id = None if context is None else context.getLocalProperty(_QUERY_ID)
    if not query_id:
        raise OptionError(
            "send_batch is for foreachBatch. If Spark does not provide the query's id (Spark Connect), give query_id=:"
            " a name that this query alone has, and keeps when it starts again"
        )
    return str(query_id)
