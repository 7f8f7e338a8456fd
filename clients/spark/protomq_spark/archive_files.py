"""Parquet files of an archive, written on executors: rows to the folders of their partitions, small files to large ones.

A file is written under a hidden name and renamed when it is whole and, on a local disk, flushed. Its name is never used
again: it has the version that it is for, the run, the task and the attempt in it. So a task that was thought dead can harm
nothing. A file counts only once a version of the archive lists it (`archive_table`).

Memory: what is not in a row group yet, at most `BUFFER_SIZE_BYTES` and one Arrow batch, however many partitions there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

BUFFER_SIZE_BYTES: Final = 64 << 20
OPEN_FILES_MAX: Final = 64
NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
"""What Spark and Hive name the folder of rows whose partition value is null or empty."""

_ESCAPED: Final = frozenset('"#%\'*/:=?\\\x7f{[]^' + "".join(map(chr, range(1, 0x20))))

WRITTEN_DDL: Final = "path STRING, size_bytes BIGINT, row_count BIGINT"
WRITTEN_SCHEMA: Final = pa.schema(
    [("path", pa.string()), ("size_bytes", pa.int64()), ("row_count", pa.int64())]
)


class WrittenFile(NamedTuple):
    """A file that is whole. `path` is relative to the archive."""

    path: str
    size_bytes: int
    row_count: int


class FileSettings(NamedTuple):
    """How files are written. `label`: a part of the names that no other run, version or batch has."""

    root: str
    label: str
    partition_names: tuple[str, ...] = ()
    file_size_bytes: int = 128 << 20
    compression: str = "zstd"


def open_root(root: str) -> tuple[pafs.FileSystem, str]:
    """The file system and the path on it; `root` is a path of this machine or a URL that pyarrow opens."""
    if "://" not in root:
        return pafs.LocalFileSystem(), os.path.abspath(root)
    filesystem, path = pafs.FileSystem.from_uri(root)
    return filesystem, path.rstrip("/")


def uri_of(root: str) -> str:
    """The archive as Spark's URI, percent-encoded."""
    if "://" not in root:
        return "file://" + quote(os.path.abspath(root))
    return root.rstrip("/")


def escape(value: str) -> str:
    """A partition value as Spark writes it in the name of a folder."""
    return "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in value)


def folder_of(names: Sequence[str], values: Sequence[str | None]) -> str:
    """topic=orders/date=2026-11-21."""
    parts = [
        f"{escape(name)}={escape(value) if value else NULL_PARTITION}"
        for name, value in zip(names, values, strict=True)
    ]
    return "/".join(parts)


class ParquetFile:
    """One file that is being written."""

    def __init__(self, settings: FileSettings, path: str, schema: pa.Schema) -> None:
        self._filesystem, self._root = open_root(settings.root)
        self._path = path
        folder, _, name = f"{self._root}/{path}".rpartition("/")
        self._temporary = f"{folder}/.{name}.tmp"
        self._filesystem.create_dir(folder, recursive=True)
        self._stream = self._filesystem.open_output_stream(self._temporary)
        self._writer = pq.ParquetWriter(self._stream, schema, compression=settings.compression)
        self.row_count = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the row groups so far."""
        return int(self._stream.tell())

    def write(self, table: pa.Table) -> None:
        """One row group."""
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self.row_count += table.num_rows

    def close(self) -> WrittenFile:
        """The file gets its name."""
        self._writer.close()
        size_bytes = int(self._stream.tell())
        self._stream.close()
        if isinstance(self._filesystem, pafs.LocalFileSystem):
            flush(self._temporary)
        self._filesystem.move(self._temporary, f"{self._root}/{self._path}")
        return WrittenFile(self._path, size_bytes, self.row_count)

    def discard(self) -> None:
        """Something failed, a full disk perhaps: that must not hide what it was."""
        with suppress(OSError):
            self._writer.close()
        with suppress(OSError):
            self._stream.close()
        self._filesystem.delete_file(self._temporary)


def flush(path: str) -> None:
    """A file or folder of this machine is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PartitionedWriter:
    """Spreads rows over the folders of their partitions."""

    def __init__(self, settings: FileSettings, task: str) -> None:
        self._settings = settings
        self._task = task
        self._number = 0
        self._waiting: dict[str, list[pa.Table]] = {}
        self._waiting_bytes: dict[str, int] = {}
        self._open: dict[str, ParquetFile] = {}
        self._done: list[WrittenFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Rows with the partition columns (text) and those of the file."""
        for folder, rows in split_by_folder(batch, self._settings.partition_names):
            self._waiting.setdefault(folder, []).append(rows)
            size_bytes = self._waiting_bytes.get(folder, 0) + rows.nbytes
            self._waiting_bytes[folder] = size_bytes
        while sum(self._waiting_bytes.values()) > BUFFER_SIZE_BYTES:
            self._write_group(max(self._waiting_bytes, key=self._waiting_bytes.__getitem__))

    def finish(self) -> list[WrittenFile]:
        """All files, closed."""
        for folder in sorted(self._waiting):
            self._write_group(folder)
        for folder in sorted(self._open):
            self._close(folder)
        return self._done

    def discard(self) -> None:
        """Something failed: unfinished files go; those that have their names are left to `vacuum`."""
        for file in self._open.values():
            file.discard()
        self._open.clear()

    def _write_group(self, folder: str) -> None:
        table = pa.concat_tables(self._waiting.pop(folder))
        del self._waiting_bytes[folder]
        # Moved to the end: the first is then the one that was not written to for the longest time.
        file = self._open.pop(folder, None)
        if file is None:
            if len(self._open) >= OPEN_FILES_MAX:
                self._close(next(iter(self._open)))
            path = f"part-{self._settings.label}-{self._task}-{self._number:05d}.parquet"
            self._number += 1
            file = ParquetFile(
                self._settings, f"{folder}/{path}" if folder else path, table.schema
            )
        self._open[folder] = file
        file.write(table)
        if file.size_bytes >= self._settings.file_size_bytes:
            self._close(folder)

    def _close(self, folder: str) -> None:
        self._done.append(self._open.pop(folder).close())


def split_by_folder(
    batch: pa.RecordBatch, names: Sequence[str]
) -> Iterator[tuple[str, pa.Table]]:
    """(folder, rows without the partition columns), in the order of the rows within each."""
    rows = pa.Table.from_batches([batch])
    rest = rows.drop_columns(list(names))
    if not rows.num_rows:
        return
    if not names:
        yield "", rest
        return
    codes = np.zeros(rows.num_rows, np.int64)
    dictionaries: list[list[str | None]] = []
    for name in names:
        column = pc.fill_null(rows.column(name).combine_chunks().cast(pa.string()), "")
        encoded = column.dictionary_encode()
        dictionaries.append(encoded.dictionary.to_pylist())
        codes = codes * len(dictionaries[-1]) + encoded.indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    ends = [*starts[1:].tolist(), rows.num_rows]
    for code, start, end in zip(found.tolist(), starts.tolist(), ends, strict=True):
        values: list[str | None] = []
        for dictionary in reversed(dictionaries):
            code, index = divmod(code, len(dictionary))
            values.append(dictionary[index])
        folder = folder_of(names, values[::-1])
        yield folder, rest if len(found) == 1 else rest.take(pa.array(order[start:end]))


def write_partitions(
    settings: FileSettings, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow(..., WRITTEN_DDL)`: writes the rows of a task and answers its files."""
    from pyspark import TaskContext

    task = TaskContext.get()
    name = f"{task.partitionId():05d}-{task.taskAttemptId()}" if task else "0"
    writer = PartitionedWriter(settings, name)
    try:
        for batch in batches:
            writer.add(batch)
        done = writer.finish()
    except BaseException:
        writer.discard()
        raise
    columns: Mapping[str, Any] = {
        field: [getattr(file, field) for file in done] for field in WrittenFile._fields
    }
    yield pa.RecordBatch.from_pydict(dict(columns), schema=WRITTEN_SCHEMA)


def merge_files(settings: FileSettings, job: tuple[int, Sequence[str]]) -> WrittenFile:
    """Several files of one folder, in this order, as one. `job`: a number and the paths. Raises ValueError if a row is missing."""
    number, paths = job
    filesystem, root = open_root(settings.root)
    inputs = [pq.ParquetFile(filesystem.open_input_file(f"{root}/{path}")) for path in paths]
    schema = pa.unify_schemas([file.schema_arrow for file in inputs])
    folder = paths[0].rpartition("/")[0]
    name = f"part-{settings.label}-{number:05d}.parquet"
    output = ParquetFile(settings, f"{folder}/{name}" if folder else name, schema)
    try:
        waiting: list[pa.RecordBatch] = []
        size_bytes = 0
        for file in inputs:
            for batch in file.iter_batches(batch_size=65_536):
                waiting.append(batch)
                size_bytes += batch.nbytes
                if size_bytes >= BUFFER_SIZE_BYTES:
                    output.write(_table(waiting, schema))
                    waiting, size_bytes = [], 0
        if waiting:
            output.write(_table(waiting, schema))
        wanted = sum(file.metadata.num_rows for file in inputs)
        if output.row_count != wanted:
            raise ValueError(f"{output.row_count} rows of {wanted} were merged in {folder}")
    except BaseException:
        output.discard()
        raise
    finally:
        for file in inputs:
            file.close()
    return output.close()


def _table(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    return pa.concat_tables(tables, promote_options="default").cast(schema)
