"""The formats `protomq` (source and sink) as Spark sees them. The only modules that import pyspark are this one and `sinks.py`.

Everything that is handed to executors is a small picklable value; connections are made there, lazily (`cluster_of`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from .cluster import cluster_of, spare_collections
from .offsets import (
    OffsetRange,
    Positions,
    StreamOffset,
    StreamState,
    decode_state,
    encode_state,
    pack,
    to_stream_offset,
)
from .options import OptionError, ReadOptions, parse_read_options, parse_write_options
from .planning import Planner
from .pulling import PullSettings, read_range
from .records import Decoding
from .rows import check_types
from .schema import COLUMN_NAMES, ddl_of, type_of
from .sinks import BatchSink, StreamSink


class ProtomqDataSource(DataSource):
    """spark.read.format("protomq"), readStream, write and writeStream."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "protomq"

    def schema(self) -> str:
        """The columns that the options ask for; they are checked here already."""
        # Spark asks before it says whether a batch or a stream is meant: each refuses later what is not for it.
        return ddl_of(parse_read_options(self.options).columns)

    def reader(self, schema: StructType) -> BatchReader:
        """A batch query."""
        options = parse_read_options(self.options, streaming=False)
        return BatchReader(options, _columns_of(schema))

    def streamReader(self, schema: StructType) -> StreamReader:
        """A stream query."""
        options = parse_read_options(self.options, streaming=True)
        return StreamReader(options, _columns_of(schema))

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        """A batch write."""
        _refuse_overwrite(overwrite)
        check_types(_kinds_of(schema))
        return BatchSink(parse_write_options(self.options), schema.names)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        """A stream write."""
        check_types(_kinds_of(schema))
        return StreamSink(parse_write_options(self.options), schema.names)


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise OptionError('a topic cannot be overwritten: use mode("append")')


def _kinds_of(schema: StructType) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in schema.fields}


def _columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns to make. Raises OptionError for a schema of the user's that is not the messages'."""
    unknown = [name for name in schema.names if name not in COLUMN_NAMES]
    if unknown:
        raise OptionError(
            f"the schema names {', '.join(unknown)}; there are {', '.join(COLUMN_NAMES)}. {_NO_SCHEMA}"
        )
    for field in schema.fields:
        given, kind = field.dataType.simpleString(), type_of(field.name)
        if given != kind or not field.nullable:
            null = "" if field.nullable else " NOT NULL"
            raise OptionError(
                f"the schema says that {field.name} is {given}{null}: it is {kind} and may be null. {_NO_SCHEMA}"
            )
    return tuple(schema.names)


_NO_SCHEMA = "Leave .schema(...) out: option 'columns' chooses columns, and cast() or from_json() change them after load()"


class RangePartition(InputPartition):
    """A task: a part of a queue, or of several one after the other."""

    def __init__(self, value: tuple[OffsetRange, ...]) -> None:
        super().__init__(value)
        self.value = value


def _read(
    options: ReadOptions, columns: tuple[str, ...], partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """What both readers do on an executor."""
    if partition.value is None:  # Spark makes one empty task where there is nothing to read.
        return
    settings = PullSettings(
        Decoding(columns, options.check_crc, options.corrupt_records, frozenset(options.tags)),
        options.tags,
        options.fail_on_data_loss,
        options.pull_size_max_bytes,
        options.pull_count_max,
    )
    for part in partition.value:
        yield from read_range(cluster_of(options.client), part, settings)
    spare_collections()


class BatchReader(DataSourceReader):
    """Reads what is there between two offsets of each queue."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """One task for each part of a queue."""
        planner = Planner(self._options, cluster_of(self._options.client))
        return [
            RangePartition(task)
            for task in pack(planner.plan_batch(), self._options.partitions_max)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        return _read(self._options, self._columns, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches. On the driver one object lives as long as the query; executors get pickled copies to call `read` on."""

    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._planner: Planner | None = None
        self._final: Positions | None = None
        self._committed: Positions = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None, "_final": None, "_committed": {}}

    def initialOffset(self) -> StreamOffset:
        """Where a new query starts."""
        return encode_state(self._plan.initial(self._query_of("")))

    def getDefaultReadLimit(self) -> ReadLimit:
        """What Spark hands to `latestOffset`, unless the trigger says otherwise."""
        if self._options.offsets_max is not None:
            return ReadMaxRows(self._options.offsets_max)
        if self._options.offsets_min is not None:
            return ReadMinRows(self._options.offsets_min)
        return ReadAllAvailable()

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        """The end of the next micro-batch."""
        state = decode_state(start)
        state = state._replace(query=self._query_of(state.query))
        state, latest = self._plan.latest(state)
        # Spark asks for the next micro-batch when the one before is done, and tells `commit` only when there is a next.
        self._commit(state)
        begin = state.positions
        if self._final is not None:
            # Nothing beyond what was there when Trigger.AvailableNow began.
            latest = {
                queue: max(min(end, self._final.get(queue, 0)), begin.get(queue, 0))
                for queue, end in latest.items()
                if queue in self._final or queue in begin
            }
        count_max = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        wait = not isinstance(limit, ReadAllAvailable) and self._final is None
        end = self._plan.next_end(begin, latest, count_max, time.monotonic(), wait)
        return encode_state(state._replace(positions=end))

    def _query_of(self, remembered: str) -> str:
        """What the checkpoint remembers, or a new name. Spark tells a Python source neither its query's id nor its checkpoint."""
        if self._options.group:  # Then nobody asks for it.
            return remembered
        return remembered or uuid.uuid4().hex[:12]

    def prepareForTriggerAvailableNow(self) -> None:
        """From now on there is nothing new."""
        _, latest = self._plan.latest(StreamState({}))
        self._final = latest

    def reportLatestOffset(self) -> StreamOffset | None:
        """Where the queues ended when that was last looked at; Spark shows it in the progress of the query."""
        latest = self._plan.last_seen()
        return to_stream_offset(latest) if latest else None

    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        """The tasks of a micro-batch."""
        parts = self._plan.plan_between(decode_state(start), decode_state(end))
        return [RangePartition(task) for task in pack(parts, self._options.partitions_max)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        return _read(self._options, self._columns, partition)

    def commit(self, end: StreamOffset) -> None:
        """A micro-batch is done."""
        self._commit(decode_state(end))

    def _commit(self, state: StreamState) -> None:
        """For lag tools; once for each place."""
        if state.positions != self._committed:
            self._committed = state.positions
            self._plan.commit(state, self._options.group_of(state.query))

    @property
    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options, cluster_of(self._options.client))
        return self._planner
