"""Sending from inside DataFrame expressions and from partition functions, on executors.

    from protomq_spark import send_partition, send_udf

    send = send_udf("orders", namesrv="host:9876")
    df.select(send("body", "key").alias("sent")).select("sent.message_id", "sent.status", "sent.error")

    df.foreachPartition(send_partition("orders", namesrv="host:9876"))           # rows with body, key, tags ...
    df.mapInArrow(send_partition.arrow("orders", namesrv="host:9876"), SENT_DDL)  # the same, with results

Rules:
- One producer for each Python worker and set of options, kept from task to task: Spark keeps its workers.
- These functions are at-least-once: Spark may evaluate an expression again, and a task that runs again sends again. Where
  that matters, use `write.format("protomq")`, which is exactly-once.
- A message that cannot be sent is a row with an error, not a failed task: the caller decides. `send_partition` on its own
  (foreachPartition), which has nowhere to put a result, raises.
- At most 1 MiB or 4,096 messages are sent in one request; what is in memory is one Arrow batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import pyarrow as pa

from protomq import MessageQueue, OutgoingMessage, Producer, SendResult
from protomq.errors import BatchIncompleteError, ProtomqError

from .rows import _properties_of, _text, check_columns, parse_queue

SENT_FIELDS: Final = (
    ("message_id", pa.string()),
    ("broker", pa.string()),
    ("queue_id", pa.int32()),
    ("queue_offset", pa.int64()),
    ("status", pa.string()),
    ("error", pa.string()),
)
SENT_SCHEMA: Final = pa.schema([pa.field(name, kind) for name, kind in SENT_FIELDS])
SENT_DDL: Final = "message_id STRING, broker STRING, queue_id INT, queue_offset BIGINT, status STRING, error STRING"
"""The results as Spark's DDL: for `mapInArrow`."""

BATCH_ROWS: Final = 4096


class SendSettings(NamedTuple):
    """What a producer of a worker is made with."""

    namesrv: str
    topic: str
    timeout_s: float = 30.0
    compression: str = "none"


def send_udf(
    topic: str, *, namesrv: str, timeout_s: float = 30.0, compression: str = "none"
) -> Callable[..., Any]:
    """A function of columns (body[, key[, tags]]) that sends and answers a struct: message id, place, status, error.

    It is marked as non-deterministic: Spark then does not evaluate it twice for one use of the column.
    """
    from pyspark.sql.functions import arrow_udf  # type: ignore[attr-defined, unused-ignore]

    settings = SendSettings(namesrv, topic, timeout_s, compression)

    def send(*columns: pa.Array) -> pa.Array:
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        messages = [_message(topic, *row) for row in rows]
        return pa.StructArray.from_arrays(
            _columns_of(send_messages(settings, messages)), fields=list(SENT_SCHEMA)
        )

    def call(body: Any, key: Any = None, tags: Any = None) -> Any:
        if tags is not None and key is None:
            raise ValueError("send_udf: tags without a key: pass a null literal as key")
        columns = [column for column in (body, key, tags) if column is not None]
        return arrow_udf(send, SENT_DDL).asNondeterministic()(*columns)  # type: ignore[call-overload, unused-ignore]

    return call


class _SendPartition:
    """`send_partition`: see the module."""

    def __call__(
        self, topic: str, *, namesrv: str, timeout_s: float = 30.0, compression: str = "none"
    ) -> Callable[[Iterable[Any]], None]:
        """A function for `foreachPartition` of rows with the columns of the sink. Raises the first error."""
        return partial(_send_rows, SendSettings(namesrv, topic, timeout_s, compression))

    def arrow(
        self, topic: str, *, namesrv: str, timeout_s: float = 30.0, compression: str = "none"
    ) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """A function for `mapInArrow(..., SENT_DDL)`: one row of results for each row."""
        return partial(_send_batches, SendSettings(namesrv, topic, timeout_s, compression))

    def pandas(
        self, topic: str, *, namesrv: str, timeout_s: float = 30.0, compression: str = "none"
    ) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """The same for `mapInPandas(..., SENT_DDL)`."""
        return partial(_send_frames, SendSettings(namesrv, topic, timeout_s, compression))


send_partition: Final = _SendPartition()


def _send_rows(settings: SendSettings, rows: Iterable[Any]) -> None:
    waiting: list[OutgoingMessage] = []
    for row in rows:
        fields = row.asDict()
        if not waiting:
            check_columns(tuple(fields), settings.topic)
        waiting.append(_message_of(settings, fields))
        if len(waiting) >= BATCH_ROWS:
            _send_or_raise(settings, waiting)
            waiting = []
    if waiting:
        _send_or_raise(settings, waiting)


def _send_or_raise(settings: SendSettings, messages: Sequence[OutgoingMessage]) -> None:
    for result in send_messages(settings, messages):
        if result[-1] is not None:
            raise RuntimeError(f"a message was not sent: {result[-1]}")


def _send_batches(
    settings: SendSettings, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        check_columns(batch.schema.names, settings.topic)
        results = send_messages(settings, [_message_of(settings, row) for row in batch.to_pylist()])
        yield pa.RecordBatch.from_arrays(_columns_of(results), schema=SENT_SCHEMA)


def _send_frames(settings: SendSettings, frames: Iterator[Any]) -> Iterator[Any]:
    import pandas as pd

    for frame in frames:
        check_columns(list(frame.columns), settings.topic)
        messages = [_message_of(settings, row) for row in frame.to_dict("records")]
        yield pd.DataFrame(send_messages(settings, messages), columns=[n for n, _ in SENT_FIELDS])


# -- messages ----------------------------------------------------------------------------------------------------------


def _message(topic: str, body: Any, key: Any = None, tags: Any = None) -> OutgoingMessage:
    if body is None:
        raise ValueError("a row whose body is null: filter such rows out")
    encoded = body.encode() if isinstance(body, str) else bytes(body)
    return OutgoingMessage(topic, encoded, _text(key), (), tags or "")


def _message_of(settings: SendSettings, row: dict[str, Any]) -> OutgoingMessage:
    """A row with the columns of the sink."""
    topic = settings.topic or row["topic"]
    message = _message(topic, row["body"], row.get("key"), row.get("tags", row.get("tag")))
    properties = row.get("properties", row.get("headers"))
    if isinstance(properties, dict):
        properties = list(properties.items())
    queue = None
    if row.get("queue") is not None:
        queue = parse_queue(str(row["queue"]), topic, _write_queues(settings, topic))
    return OutgoingMessage(
        topic, message.body, message.key, (), message.tag, _properties_of(properties), row.get("sharding_key"), queue,
    )  # fmt: skip


Result = tuple[str | None, str | None, int | None, int | None, str | None, str | None]


def send_messages(settings: SendSettings, messages: Sequence[OutgoingMessage]) -> list[Result]:
    """Sends all, some thousands at a time; a row of results for each, in order."""
    results: list[Result] = [_failed("not sent")] * len(messages)
    by_topic: dict[str, list[int]] = {}
    for index, message in enumerate(messages):
        by_topic.setdefault(message.topic, []).append(index)
    for topic, indexes in by_topic.items():
        for start in range(0, len(indexes), BATCH_ROWS):
            part = indexes[start : start + BATCH_ROWS]
            for index, result in zip(
                part, _send_part(settings, topic, [messages[i] for i in part]), strict=True
            ):
                results[index] = result
    return results


def _send_part(
    settings: SendSettings, topic: str, messages: Sequence[OutgoingMessage]
) -> list[Result]:
    producer = _producer(settings._replace(topic=""))
    try:
        sent = producer.send_batch(topic, list(messages))
    except BatchIncompleteError as error:
        return _incomplete(messages, error)
    except (ProtomqError, ValueError) as error:
        return [_failed(f"{type(error).__name__}: {error}")] * len(messages)
    return [_stored(result) for result in sent]


def _columns_of(results: Sequence[Result]) -> list[pa.Array]:
    columns = list(zip(*results, strict=True)) or [()] * len(SENT_FIELDS)
    return [
        pa.array(column, field.type) for column, field in zip(columns, SENT_SCHEMA, strict=True)
    ]


def _incomplete(messages: Sequence[OutgoingMessage], error: BatchIncompleteError) -> list[Result]:
    """Some requests are stored: which messages those were cannot be told where keys spread them, so all are said to be unknown."""
    count = sum(stored.count for stored in error.stored)
    text = f"{type(error).__name__}: {count} of {len(messages)} are stored: {error}"
    return [_failed(text)] * len(messages)


def _stored(result: SendResult) -> Result:
    queue: MessageQueue = result.queue
    return (
        result.message_id, queue.broker_name, queue.queue_id, result.queue_offset, result.status.name, None,
    )  # fmt: skip


def _failed(text: str) -> Result:
    return None, None, None, None, None, text


@lru_cache(maxsize=16)
def _producer(settings: SendSettings) -> Producer:
    """The producer of this Python worker."""
    return Producer(
        "spark-udf",
        namesrv=settings.namesrv,
        send_timeout_s=settings.timeout_s,
        compression=settings.compression,  # type: ignore[arg-type]
        batch_size_max_bytes=1 << 20,
    )


def _write_queues(settings: SendSettings, topic: str) -> tuple[MessageQueue, ...]:
    from .cluster import cluster_of
    from .options import ClientOptions

    return cluster_of(ClientOptions(settings.namesrv)).write_queues(topic)
