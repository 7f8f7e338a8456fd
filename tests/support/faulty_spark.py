"""The source and sink of protomq with a fault at a chosen place: `spark.dataSource.register(FaultySource)`, format `protomq-faulty`.

Options beside those of `protomq`:

    fault.at       a stage of STAGES
    fault.do       kill: SIGKILL for the process at hand; raise: an error; wait: until the test has answered (`Fault.go_on`) or the Spark
                   that this process belongs to is gone
    fault.folder   where the test sees that the fault is there; it happens once, however often the task runs
    fault.batch    streams: not before this micro-batch (default 1: one is done already)
    fault.rows     read, write: after so many rows (default 100)

Stages, in the order of a micro-batch: `latest` (before the offset log is written), `plan` (after that), `read` and `write` (in tasks),
`written` (all tasks are done, the commit log is not written), `commit` (it is).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from protomq_spark.batches import send_batch
from protomq_spark.offsets import StreamOffset
from protomq_spark.sinks import BATCH_ID_PROPERTY, BatchSink, StreamSink
from protomq_spark.source import BatchReader, ProtomqDataSource, StreamReader
from tests.support.spark_driver import SHUFFLED

STAGES = ("latest", "plan", "read", "write", "written", "commit")


@dataclass(frozen=True)
class Fault:
    """What is to happen; the same in the test and in Spark's processes."""

    at: str
    do: str
    folder: Path
    batch: int = 1
    rows: int = 100

    def options(self) -> dict[str, str]:
        """For a reader or a writer of the format."""
        assert self.at in STAGES
        self.folder.mkdir(exist_ok=True)
        given = {"at": self.at, "do": self.do, "folder": str(self.folder)}
        given |= {"batch": str(self.batch), "rows": str(self.rows)}
        return {f"fault.{name}": value for name, value in given.items()}

    @property
    def in_source(self) -> bool:
        """Whether the source makes it happen; else the sink does."""
        return self.at in ("latest", "plan", "read", "commit")

    @property
    def happened(self) -> bool:
        """Whether it is there."""
        return (self.folder / "happened").exists()

    def go_on(self) -> None:
        """Ends a `wait`."""
        (self.folder / "go-on").touch()

    # -- in Spark's processes ------------------------------------------------------------------------------------------------

    def reach(self, stage: str, batch: int | None) -> None:
        """Called at each stage; `batch` None: no stream."""
        if stage != self.at or (batch is not None and batch < self.batch):
            return
        try:
            (self.folder / "happened").touch(exist_ok=False)
        except FileExistsError:
            return
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.do == "raise":
            raise RuntimeError("made to fail")
        parent = os.getppid()
        ends_s = time.monotonic() + 280
        while not (self.folder / "go-on").exists():
            if os.getppid() != parent or time.monotonic() > ends_s:  # A test that failed must not block the next.
                os._exit(1)
            time.sleep(0.01)

    def in_task(self, stage: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """`batches` with the fault after some rows."""
        task = TaskContext.get()
        assert task is not None
        batch_id = task.getLocalProperty(BATCH_ID_PROPERTY)
        rows = 0
        for batch in batches:
            if rows >= self.rows:
                self.reach(stage, int(batch_id) if batch_id else None)
            rows += batch.num_rows
            yield batch


class _FaultyBatchReader(BatchReader):
    fault: Fault

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.fault.in_task("read", super().read(partition))


class _FaultyStreamReader(StreamReader):
    fault: Fault
    _batches = -1

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        end = super().latestOffset(start, limit)
        if end != start:
            self._batches += 1
            self.fault.reach("latest", self._batches)
        return end

    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        self.fault.reach("plan", self._batches)
        return super().partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.fault.in_task("read", super().read(partition))

    def commit(self, end: StreamOffset) -> None:
        # The batch before the one that was planned last.
        self.fault.reach("commit", self._batches - 1)
        super().commit(end)


class _FaultyBatchSink(BatchSink):
    fault: Fault

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        return super().write(self.fault.in_task("write", iterator))


class _FaultyStreamSink(StreamSink):
    fault: Fault

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        return super().write(self.fault.in_task("write", iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.fault.reach("written", batchId)
        super().commit(messages, batchId)


class FaultySource(ProtomqDataSource):
    """The format `protomq-faulty`."""

    def __init__(self, options: dict[str, str]) -> None:
        given = {
            name.removeprefix("fault."): value
            for name, value in options.items()
            if name.startswith("fault.")
        }
        super().__init__(
            {name: value for name, value in options.items() if not name.startswith("fault.")}
        )
        self.fault = Fault(
            given["at"], given["do"], Path(given["folder"]), int(given["batch"]), int(given["rows"])
        )

    @classmethod
    def name(cls) -> str:
        return "protomq-faulty"

    def reader(self, schema: StructType) -> BatchReader:
        return self._faulty(super().reader(schema), _FaultyBatchReader)

    def streamReader(self, schema: StructType) -> StreamReader:
        return self._faulty(super().streamReader(schema), _FaultyStreamReader)

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        return self._faulty(super().writer(schema, overwrite), _FaultyBatchSink)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        return self._faulty(super().streamWriter(schema, overwrite), _FaultyStreamSink)

    def _faulty(self, made: Any, kind: type[Any]) -> Any:
        """What was made, with its methods replaced."""
        made.__class__ = kind
        made.fault = self.fault
        return made


class CopyOptions(TypedDict):
    """Formats and options of the source and the sink of a stream."""

    read_format: str
    read: dict[str, str]
    write_format: str
    write: dict[str, str]


def copy_writer(spark: SparkSession, options: CopyOptions, checkpoint: Path) -> Any:
    """The stream with these options, not started yet."""
    frame = spark.readStream.format(options["read_format"]).options(**options["read"]).load()
    if options["write_format"] == SHUFFLED:
        given = dict(options["write"])
        send = send_batch(given.pop("topic"), namesrv=given.pop("protomq.namesrv"), options=given)
        writer: Any = frame.repartition(3).writeStream.foreachBatch(send)
    else:
        writer = frame.writeStream.format(options["write_format"]).options(**options["write"])
    return writer.option("checkpointLocation", str(checkpoint))


def copy_options(namesrv: str, source: str, target: str, fault: Fault, **more: str) -> CopyOptions:
    """A stream that copies a topic in micro-batches of 400, with the fault in its source or its sink."""
    faulty, sound = ("protomq-faulty", fault.options()), ("protomq", dict[str, str]())
    (read_format, read), (write_format, write) = (
        (faulty, sound) if fault.in_source else (sound, faulty)
    )
    limits = {"maxOffsetsPerTrigger": "400", "protomq.pullCountMax": "50"}
    given = {
        "protomq.namesrv": namesrv,
        "subscribe": source,
        "startingOffsets": "earliest",
        "columns": "body",
    }
    return CopyOptions(
        read_format=read_format,
        read=given | limits | more | read,
        write_format=write_format,
        write={"protomq.namesrv": namesrv, "topic": target, "batchRows": "50"} | write,
    )
