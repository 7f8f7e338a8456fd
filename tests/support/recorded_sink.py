"""The sink of protomq that writes down what each attempt of a task has sent: format `protomq-recorded`, for programs on a cluster.

Options beside those of `protomq`:

    record.folder  a file for each attempt that came to its end: PARTITION-ATTEMPT.json with its `rows` and `repeated_rows`
    record.bug     a bug of BUGS, put in on purpose
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from protomq_spark.sender import Identity
from protomq_spark.sinks import BatchSink, SentMessage, StreamSink
from protomq_spark.source import ProtomqDataSource

BUGS = ("numbers its attempts apart", "trusts the first attempt")
"""Each attempt numbers its rows as its own, as a sink without a producer's sequence would. Or: what has begun before sends nothing."""


def task() -> TaskContext:
    """The task that this process works on."""
    found = TaskContext.get()
    assert found is not None
    return found


class _Recorded:
    """Mixed into both sinks."""

    folder: Path
    bug: str

    def _send(self, identity: Identity, batches: Iterator[pa.RecordBatch]) -> SentMessage:
        self.folder.mkdir(exist_ok=True)
        attempt = task().attemptNumber()
        if self.bug == BUGS[0]:
            identity = replace(identity, scope=f"{identity.scope}\0{uuid.uuid4()}")
        if self.bug == BUGS[1] and self._has_begun(identity):
            batches = iter(())
        message: SentMessage = super()._send(identity, batches)  # type: ignore[misc]
        name = f"{identity.partition}-{attempt}.json"
        (self.folder / name).write_text(json.dumps(asdict(message.sent)))
        return message


    def _has_begun(self, identity: Identity) -> bool:
        try:
            (self.folder / f"{identity.partition} of {identity.batch_id}").touch(exist_ok=False)
        except FileExistsError:
            return True
        return False


class _RecordedBatchSink(_Recorded, BatchSink):
    pass


class _RecordedStreamSink(_Recorded, StreamSink):
    pass


class RecordedSource(ProtomqDataSource):
    """The format `protomq-recorded`."""

    def __init__(self, options: dict[str, str]) -> None:
        own = {name: value for name, value in options.items() if name.startswith("record.")}
        super().__init__({name: value for name, value in options.items() if name not in own})
        self._folder = Path(own["record.folder"])
        self._bug = own.get("record.bug", "")
        assert self._bug in ("", *BUGS)

    @classmethod
    def name(cls) -> str:
        return "protomq-recorded"

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        return self._recorded(super().writer(schema, overwrite), _RecordedBatchSink)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        return self._recorded(super().streamWriter(schema, overwrite), _RecordedStreamSink)

    def _recorded(self, made: Any, kind: type[Any]) -> Any:
        made.__class__ = kind
        made.folder, made.bug = self._folder, self._bug
        return made
