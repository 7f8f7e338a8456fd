"""A folder of Parquet files with versions: every reader sees the files of one version, whole.

    root/topic=orders/date=2026-11-21/hour=07/part-….parquet     data; a file counts if the newest version lists it
    root/_spark_metadata/12.compact                              version 12: all its files, and where the archive stands
    root/_manifest                                               the files of the newest version, a path a line

The versions have the form of the log of Spark's own file sink: a line `v1`, then one JSON object for each file. (See
CompactibleFileStreamLog and FileStreamSinkLog of apache/spark.) There a `.compact` file holds everything. So a plain
`spark.read.parquet(root)` of any Spark sees exactly the newest version. The first object has one field more, `archive`, for the
archive's own state; Spark ignores it. It changes together with the files, in one step. A version without files has one object for
the root itself, so that the state has a place: Spark leaves folders out (MetadataLogFileIndex).

Other readers take the paths of `_manifest`, which follows each version: one that is a version behind names files that are still there.
A glob over the folder is wrong: files that were merged stay beside the merged one for a while, and their rows would come twice.

On local disks a hard link publishes a version; it fails if somebody else has published that number. On object stores a rename
does, so there only one job may write to an archive. Nothing is changed in place. What no kept version lists is removed by
`vacuum`, some time after it was last needed.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote

import pyarrow.fs as pafs

from .archive_files import WrittenFile, flush, open_root, uri_of

METADATA: Final = "_spark_metadata"
MANIFEST: Final = "_manifest"
_SUFFIX: Final = ".compact"
_URI_SAFE: Final = "/="


class ArchiveError(RuntimeError):
    """The archive is not what it should be, or somebody else writes to it."""


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A file of a version. `path` is relative to the archive."""

    path: str
    size_bytes: int
    row_count: int
    modified_ms: int = 0

    @property
    def folder(self) -> str:
        """Of its partition."""
        return self.path.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Version:
    """What an archive holds. Number -1: nothing yet."""

    number: int = -1
    files: tuple[ArchivedFile, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_count(self) -> int:
        """Rows of all files."""
        return sum(file.row_count for file in self.files)


def nothing(_step: str) -> None:
    """No test looks."""


class ArchiveTable:
    """The versions of one archive. One thread; other processes may do the same."""

    def __init__(self, root: str, on_step: Callable[[str], None] = nothing) -> None:
        """`on_step` is told before each step that changes something: tests stop there."""
        self.root = root
        self._filesystem, self._path = open_root(root)
        self._uri = uri_of(root)
        self._on_step = on_step

    # -- reading -----------------------------------------------------------------------------------------------------------

    def newest(self) -> Version:
        """The newest version."""
        while numbers := self._numbers():
            try:
                return self._load(numbers[-1])
            except FileNotFoundError:
                continue  # It was removed after newer ones came.
        return Version()

    def paths(self) -> list[str]:
        """The files of the newest version as they are named on the disk (or under the URL), for readers that are given names."""
        return self._paths_of(self.newest())

    def _paths_of(self, version: Version) -> list[str]:
        root = self.root.rstrip("/") if "://" in self.root else self._path
        return [f"{root}/{file.path}" for file in version.files]

    def _numbers(self) -> list[int]:
        infos = self._list(f"{self._path}/{METADATA}", recursive=False)
        names = [info.base_name for info in infos if info.type == pafs.FileType.File]
        known = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
        foreign = [name for name in names if name.isdecimal()]
        if foreign:
            raise ArchiveError(
                f"{self.root} was written by Spark's file sink, not by this pipeline: its log has {foreign[0]}"
            )
        return sorted(int(name) for name in known if name.isdecimal())

    def _load(self, number: int) -> Version:
        name = f"{self._path}/{METADATA}/{number}{_SUFFIX}"
        with self._filesystem.open_input_stream(name) as stream:
            head, *lines = stream.read().decode().splitlines()
        if head != "v1":
            raise ArchiveError(f"{name} begins with {head!r}, not with v1")
        entries = [json.loads(line) for line in lines if line]
        files = tuple(
            ArchivedFile(
                self._relative(entry["path"]), entry["size"], entry["rowCount"], entry["modificationTime"]
            )
            for entry in entries
            if not entry["isDir"]
        )  # fmt: skip
        return Version(number, files, entries[0]["archive"] if entries else {})

    def _relative(self, uri: str) -> str:
        prefix = self._uri + "/"
        if not uri.startswith(prefix):
            raise ArchiveError(
                f"{self.root} holds the files of {uri}: an archive cannot be read from another place than it was written to"
            )
        return unquote(uri[len(prefix) :])

    # -- changing ----------------------------------------------------------------------------------------------------------

    def update(self, change: Callable[[Version], Version]) -> Version:
        """Publishes what `change` makes of the newest version; asks again if somebody else was faster. Raises what it raises."""
        while True:
            base = self.newest()
            changed = change(base)
            version = Version(base.number + 1, changed.files, changed.state)
            if self._publish(version, {file.path for file in base.files}):
                self.write_manifest()
                return version

    def write_manifest(self) -> None:
        """Makes `_manifest` that of the newest version, whoever else publishes meanwhile."""
        written = -1
        while (version := self.newest()).number != written:
            # Named so that `vacuum` finds it, should this process die here.
            temporary = f"{self._path}/.part-manifest-{uuid.uuid4().hex}.tmp"
            with self._filesystem.open_output_stream(temporary) as stream:
                stream.write("".join(f"{path}\n" for path in self._paths_of(version)).encode())
            self._on_step("write manifest")
            self._filesystem.move(temporary, f"{self._path}/{MANIFEST}")
            written = version.number

    def _publish(self, version: Version, known: Set[str]) -> bool:
        """Whether nobody has published that number before."""
        folder = f"{self._path}/{METADATA}"
        self._filesystem.create_dir(folder, recursive=True)
        name = f"{folder}/{version.number}{_SUFFIX}"
        temporary = f"{folder}/.{version.number}.{uuid.uuid4().hex}.tmp"
        self._on_step("write version")
        with self._filesystem.open_output_stream(temporary) as stream:
            stream.write(self._encode(version).encode())
        self._on_step("publish version")
        if isinstance(self._filesystem, pafs.LocalFileSystem):
            flush(temporary)
            self._flush_folders(file for file in version.files if file.path not in known)
            try:
                os.link(temporary, name)
            except FileExistsError:
                return False
            finally:
                os.unlink(temporary)
            flush(folder)
        elif self._filesystem.get_file_info(name).type != pafs.FileType.NotFound:
            self._filesystem.delete_file(temporary)
            return False
        else:
            self._filesystem.move(temporary, name)
        self._on_step("version is published")
        return True

    def _flush_folders(self, files: Iterable[ArchivedFile]) -> None:
        """That new files have their names must be on the disk before a version lists them."""
        folders = {file.folder for file in files}
        for folder in sorted(folders | {parent for f in folders for parent in _parents(f)}):
            flush(f"{self._path}/{folder}")

    def _encode(self, version: Version) -> str:
        prefix = self._uri + "/"
        entries = [
            _entry(prefix + quote(file.path, safe=_URI_SAFE), file) for file in version.files
        ] or [_entry(self._uri, None)]
        entries[0]["archive"] = version.state
        return "\n".join(["v1", *(json.dumps(entry, separators=(",", ":")) for entry in entries)])

    # -- clearing away -----------------------------------------------------------------------------------------------------

    def vacuum(self, keep_s: float, now_s: float) -> int:
        """Removes versions that were followed by another one more than `keep_s` ago, and files that no version lists any more.

        A reader that began before that must be done by then, and a writer must publish within that time. How many data files
        were removed.
        """
        self.write_manifest()  # Should a run have died before it could: what it named must not go before it is named no more.
        metadata = f"{self._path}/{METADATA}"
        ages_s = {
            info.base_name: now_s - info.mtime_ns / 1e9 for info in self._list(metadata, False)
        }
        numbers = self._numbers()
        kept = numbers[-1:]
        # No gap may be left: Spark takes the distance of the last two as the interval at which such files are written.
        for number in reversed(numbers[:-1]):
            if ages_s.get(f"{number + 1}{_SUFFIX}", 0.0) > keep_s:
                break
            kept.append(number)
        for number in numbers:
            if number not in kept:
                self._on_step("remove version")
                self._filesystem.delete_file(f"{metadata}/{number}{_SUFFIX}")
        for name, age_s in ages_s.items():
            if name.endswith(".tmp") and age_s > keep_s:
                self._filesystem.delete_file(f"{metadata}/{name}")
        listed = {file.path for number in kept for file in self._load(number).files}
        removed = 0
        for info in self._list(self._path, True):
            path = info.path[len(self._path) + 1 :]
            if info.type != pafs.FileType.File or path.startswith(METADATA + "/"):
                continue
            name = info.base_name
            ours = name.startswith(("part-", ".part-")) and name.endswith((".parquet", ".tmp"))
            if ours and path not in listed and now_s - info.mtime_ns / 1e9 > keep_s:
                self._on_step("remove file")
                self._filesystem.delete_file(info.path)
                removed += 1
        return removed

    def _list(self, folder: str, recursive: bool) -> Sequence[pafs.FileInfo]:
        selector = pafs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        found: list[pafs.FileInfo] = self._filesystem.get_file_info(selector)
        return found


def _entry(uri: str, file: ArchivedFile | None) -> dict[str, Any]:
    """A file, or a folder, as Spark's log has it."""
    return {
        "path": uri,
        "size": file.size_bytes if file else 0,
        "isDir": file is None,
        "modificationTime": file.modified_ms if file else 0,
        "blockReplication": 1,
        "blockSize": 128 << 20,
        "action": "add",
        "rowCount": file.row_count if file else 0,
    }


def _parents(folder: str) -> list[str]:
    """a/b/c: "", a, a/b."""
    parts = folder.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts))]


# -- changes -----------------------------------------------------------------------------------------------------------------


def appended(
    base: Version, written: Iterable[WrittenFile], state: Mapping[str, Any], now_ms: int
) -> Version:
    """The version with more files and another state."""
    new = [ArchivedFile(*file, modified_ms=now_ms) for file in written]
    return Version(base.number, (*base.files, *new), state)


def replaced(
    base: Version, merged: Mapping[WrittenFile, Sequence[str]], now_ms: int
) -> Version:
    """The version with some files merged into others. Groups whose files are not all there any more are left out."""
    there = {file.path for file in base.files}
    new: list[ArchivedFile] = []
    gone: set[str] = set()
    for file, paths in merged.items():
        if there.issuperset(paths):
            new.append(ArchivedFile(*file, modified_ms=now_ms))
            gone.update(paths)
    kept = [file for file in base.files if file.path not in gone]
    return Version(base.number, (*kept, *new), base.state)


MERGED_FILES_MAX: Final = 256
"""Most files that become one: a task has all of them open."""


def merge_groups(
    files: Iterable[ArchivedFile], file_size_bytes: int, count_min: int
) -> list[list[str]]:
    """Which files to merge: small ones (below half of `file_size_bytes`) of one folder, at least `count_min` into one."""
    by_folder: dict[str, list[ArchivedFile]] = {}
    for file in files:
        if file.size_bytes < file_size_bytes // 2:
            by_folder.setdefault(file.folder, []).append(file)
    groups: list[list[str]] = []
    for folder in sorted(by_folder):
        group: list[str] = []
        size_bytes = 0
        for file in sorted(by_folder[folder], key=lambda file: file.path):
            group.append(file.path)
            size_bytes += file.size_bytes
            if size_bytes >= file_size_bytes or len(group) == MERGED_FILES_MAX:
                groups.append(group)
                group, size_bytes = [], 0
        groups.append(group)
    return [group for group in groups if len(group) >= max(count_min, 2)]
