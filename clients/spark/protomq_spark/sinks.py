"""The sinks as Spark sees them: what the driver decides for all tasks, and what a task does.

A writer is made on the driver and pickled. So the queues and, for a batch write, its id are the same in all tasks and
attempts.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from protomq import MessageQueue

from .cluster import cluster_of, spare_collections
from .options import WriteOptions
from .rows import check_columns
from .sender import Identity, RowSender, SentRows

logger = logging.getLogger("protomq_spark")

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"


@dataclass
class SentMessage(WriterCommitMessage):
    """What a task tells the driver."""

    partition: int
    sent: SentRows


class _Sink:
    """What both have in common."""

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        check_columns(columns, options.topic, options.shard_by)
        self._options = options
        self._queues: dict[str, tuple[MessageQueue, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For the tasks. To end a micro-batch Spark makes a writer that has none: it must not wait for a broker that is away."""
        topic = self._options.topic
        if topic and topic not in self._queues:
            self._queues[topic] = cluster_of(self._options.client).write_queues(topic)
        return self.__dict__

    def _send(self, identity: Identity, batches: Iterator[pa.RecordBatch]) -> SentMessage:
        cluster = cluster_of(self._options.client)
        sender = RowSender(cluster, self._options, identity, self._queues)
        sent = sender.send(batches)
        if sent.repeated_rows:
            logger.info(
                "partition %d: %d rows were stored already", identity.partition, sent.repeated_rows
            )
        spare_collections()
        return SentMessage(identity.partition, sent)


class BatchSink(_Sink, DataSourceArrowWriter):
    """df.write.format("protomq"): one id for the whole write, all attempts of its tasks included.

    Writes of one name that follow each other are numbered, as the micro-batches of a stream are: they are the same producers then.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._scope = f"write\0{options.topic}\0{options.write_id or uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentMessage:
        """On an executor: one attempt of one task."""
        identity = Identity(self._scope, _task().partitionId(), self._options.batch_id)
        return self._send(identity, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done; there is nothing left to do: what is stored is stored."""
        logger.info("%d rows sent", _rows(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A task has failed for good. What others stored stays; the same write again with the same writeId goes on from there."""
        logger.warning("the write failed after %d rows of finished tasks", _rows(messages))


class StreamSink(_Sink, DataSourceStreamArrowWriter):
    """df.writeStream.format("protomq"): the query's id and the batch's number come with the task."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentMessage:
        """On an executor: one attempt of one task of a micro-batch."""
        task = _task()
        query_id = task.getLocalProperty(QUERY_ID_PROPERTY)
        batch_id = task.getLocalProperty(BATCH_ID_PROPERTY)
        if not query_id or not batch_id:
            raise RuntimeError("this task belongs to no streaming query: Spark gave it no query id")
        identity = Identity(f"query\0{query_id}", task.partitionId(), int(batch_id))
        return self._send(identity, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """The micro-batch is done."""
        logger.info("batch %d: %d rows sent", batchId, _rows(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """The micro-batch failed; Spark will run it again, and what is stored is recognised then."""
        logger.warning("batch %d failed after %d rows of finished tasks", batchId, _rows(messages))


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise RuntimeError("the sink writes in Spark tasks only")
    return task


def _rows(messages: Sequence[WriterCommitMessage | None]) -> int:
    return sum(message.sent.rows for message in messages if isinstance(message, SentMessage))
