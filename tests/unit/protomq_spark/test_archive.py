"""The archive's files and versions without Spark: folders, rolling, merging, versions by several writers, clearing away."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protomq import MessageQueue
from protomq._types import QueueRange
from protomq_spark import archive_files
from protomq_spark.archive_files import (
    FileSettings,
    PartitionedWriter,
    WrittenFile,
    folder_of,
    merge_files,
    split_by_folder,
)
from protomq_spark.archive_table import (
    ArchivedFile,
    ArchiveError,
    ArchiveTable,
    Version,
    appended,
    merge_groups,
    replaced,
)
from protomq_spark.offsets import DataLossError, Positions, Seen
from protomq_spark.pipelines import archive
from protomq_spark.pipelines.__main__ import make_parser
from protomq_spark.pipelines.archive import parse_partitions, split_sql, starts
from protomq_spark.pipelines.report import RunReport


def rows(first: int, count: int, **partitions: list[str | None]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": list(range(first, first + count)), **partitions})


# -- files -------------------------------------------------------------------------------------------------------------------


def test_a_folder_is_named_as_spark_names_it() -> None:
    folder = folder_of(("topic", "day"), ("%RETRY%a/b=c:d", None))
    assert folder == "topic=%25RETRY%25a%2Fb%3Dc%3Ad/day=__HIVE_DEFAULT_PARTITION__"


def test_rows_are_split_by_their_values_in_order() -> None:
    batch = rows(0, 6, a=["x", "y", "x", None, "y", "x"], b=["1", "1", "2", "1", "1", "1"])
    found = {folder: table.column("id").to_pylist() for folder, table in split_by_folder(batch, ("a", "b"))}
    assert found == {
        "a=x/b=1": [0, 5], "a=x/b=2": [2], "a=y/b=1": [1, 4], "a=__HIVE_DEFAULT_PARTITION__/b=1": [3],
    }  # fmt: skip
    ((folder, table),) = split_by_folder(rows(0, 3), ())
    assert (folder, table.num_rows) == ("", 3)
    assert list(split_by_folder(rows(0, 0, a=[]), ("a",))) == []


def test_a_file_is_closed_at_its_size_and_never_more_are_open_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_files, "BUFFER_SIZE_BYTES", 1000)
    monkeypatch.setattr(archive_files, "OPEN_FILES_MAX", 2)
    settings = FileSettings(str(tmp_path), "v-run", ("p",), file_size_bytes=4000)
    writer = PartitionedWriter(settings, "task")
    for n in range(60):
        writer.add(rows(n * 100, 100, p=[f"{i % 5}" for i in range(100)]))
        assert len(writer._open) <= 2
    done = writer.finish()
    assert sum(file.row_count for file in done) == 6000
    assert len(done) > 5
    assert len({file.path for file in done}) == len(done)
    for file in done:
        assert (tmp_path / file.path).stat().st_size == file.size_bytes
    ids = [i for file in done for i in pq.ParquetFile(tmp_path / file.path).read().column(0).to_pylist()]
    assert sorted(ids) == list(range(6000))
    assert not list(tmp_path.rglob(".*"))


def test_what_failed_leaves_no_file(tmp_path: Path) -> None:
    writer = PartitionedWriter(FileSettings(str(tmp_path), "v", ("p",)), "task")
    writer.add(rows(0, 2, p=["a", "b"]))
    writer._write_group("p=a")
    assert len(list(tmp_path.rglob(".*.tmp"))) == 1
    writer.discard()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def written(root: Path, *ids: int, folder: str = "p=x", label: str = "1") -> WrittenFile:
    writer = PartitionedWriter(FileSettings(str(root), label, ("p",)), "0")
    writer.add(rows(0, 1, p=["x"]).slice(0, 0))
    for i in ids:
        writer.add(rows(i, 1, p=[folder.partition("=")[2]]))
    (file,) = writer.finish()
    return file


def test_merged_files_have_all_rows_in_order(tmp_path: Path) -> None:
    files = [written(tmp_path, n, n + 1, label=str(n)) for n in (0, 2, 4)]
    merged = merge_files(FileSettings(str(tmp_path), "m"), (0, [file.path for file in files]))
    assert merged.row_count == 6
    assert pq.ParquetFile(tmp_path / merged.path).read().column("id").to_pylist() == list(range(6))
    assert merged.path.startswith("p=x/part-m-")


# -- versions ----------------------------------------------------------------------------------------------------------------


def test_versions_follow_each_other_and_carry_the_state(tmp_path: Path) -> None:
    table = ArchiveTable(str(tmp_path))
    assert table.newest() == Version()
    first, second = written(tmp_path, 1), written(tmp_path, 2, label="2")
    table.update(lambda base: appended(base, [first], {"n": 1}, 5))
    version = table.update(lambda base: appended(base, [second], {"n": 2}, 6))
    assert version == table.newest()
    assert (version.number, version.row_count, version.state) == (1, 2, {"n": 2})
    assert table.paths() == [f"{tmp_path}/{file.path}" for file in (first, second)]


def test_two_writers_do_not_overwrite_each_other(tmp_path: Path) -> None:
    one = ArchiveTable(str(tmp_path))
    files = [written(tmp_path, n, label=str(n)) for n in range(3)]
    one.update(lambda base: appended(base, files[:1], {}, 0))
    asked: list[int] = []

    def late(base: Version) -> Version:
        asked.append(base.number)
        if len(asked) == 1:  # The other one publishes in between.
            ArchiveTable(str(tmp_path)).update(lambda other: appended(other, files[1:2], {}, 0))
        return appended(base, files[2:], {}, 0)

    version = one.update(late)
    assert asked == [0, 1]
    assert [file.path for file in version.files] == [file.path for file in files]
    assert not list((tmp_path / "_spark_metadata").glob(".*"))


def test_the_manifest_names_the_files_of_the_newest_version_as_they_are_on_the_disk(tmp_path: Path) -> None:
    def die(step: str) -> None:
        if step == "write manifest" and dying:
            raise InterruptedError

    dying = False
    root = tmp_path / "ä rchive"
    table = ArchiveTable(str(root), die)
    assert table.paths() == []
    table.write_manifest()
    manifest = root / "_manifest"
    assert not manifest.exists()
    hour = "p=2026-11-22 07:00 ü"
    small = [written(root, n, folder=hour, label=str(n)) for n in (1, 2)]
    table.update(lambda base: appended(base, small, {}, 0))
    assert manifest.read_text().splitlines() == table.paths() == [f"{root}/{file.path}" for file in small]
    assert pq.read_table(manifest.read_text().splitlines())["id"].to_pylist() == [1, 2]

    merged = written(root, 1, 2, folder=hour, label="3")
    dying = True
    with pytest.raises(InterruptedError):
        table.update(lambda base: replaced(base, {merged: [file.path for file in small]}, 0))
    assert len(manifest.read_text().splitlines()) == 2  # A version behind: its files are there still.
    dying = False
    assert table.vacuum(0, time.time() + 1) == 3  # The two, and the manifest that was not finished.
    assert manifest.read_text().splitlines() == [f"{root}/{merged.path}"]
    assert sorted(path.name for path in root.iterdir()) == [
        "_manifest", "_spark_metadata", folder_of(["p"], [hour.removeprefix("p=")]),
    ]  # fmt: skip


def test_a_merge_whose_files_are_gone_changes_nothing() -> None:
    files = tuple(ArchivedFile(f"p=x/{n}", 1, 1) for n in range(4))
    merged = WrittenFile("p=x/new", 2, 2)
    both = replaced(Version(3, files), {merged: ["p=x/0", "p=x/1"]}, 9)
    assert [file.path for file in both.files] == ["p=x/2", "p=x/3", "p=x/new"]
    assert replaced(Version(3, files[1:]), {merged: ["p=x/0", "p=x/1"]}, 9).files == files[1:]


def test_small_files_of_a_folder_are_grouped_up_to_the_size() -> None:
    files = [ArchivedFile(f"p={p}/{n:02}", size, 1) for p in "ab" for n, size in enumerate([30, 60, 30, 30, 30, 30, 10])]
    assert merge_groups(files, 100, 2) == [
        [f"p={p}/{n:02}" for n in group] for p in "ab" for group in ((0, 2, 3, 4), (5, 6))
    ]
    assert merge_groups(files, 100, 4) == [[f"p={p}/{n:02}" for n in (0, 2, 3, 4)] for p in "ab"]
    assert merge_groups(files[:1], 100, 1) == []


def test_a_merge_opens_no_more_files_than_a_task_may_have() -> None:
    files = [ArchivedFile(f"p=a/{n:04}", 1, 1) for n in range(600)]
    assert [len(group) for group in merge_groups(files, 1 << 20, 2)] == [256, 256, 88]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--batch-size", "0"], "--batch-size must be 1 or more"),
        (["--compact-every", "0"], "--compact-every must be 1 or more"),
        (["--file-size", "-1"], "--file-size must be 1 or more"),
        (["--min-tasks", "-1"], "--min-tasks must be 0 or more"),
        (["--interval", "0"], "--interval must be above 0"),
    ],
)
def test_numbers_with_which_nothing_would_be_stored_are_refused(
    tmp_path: Path, wrong: list[str], says: str
) -> None:
    parser = argparse.ArgumentParser()
    archive.add_arguments(parser)
    arguments = parser.parse_args(["--topic", "t", "--output", str(tmp_path), *wrong])
    with pytest.raises(ValueError, match=says):
        archive.run(None, arguments, RunReport("archive", {}))
    assert not list(tmp_path.iterdir())


def test_vacuum_keeps_what_a_version_of_the_last_hour_lists(tmp_path: Path) -> None:
    table = ArchiveTable(str(tmp_path))
    old, new, orphan = (written(tmp_path, n, label=str(n)) for n in range(3))
    table.update(lambda base: appended(base, [old], {}, 0))
    table.update(lambda base: appended(replaced(base, {}, 0), [new], {}, 0))
    table.update(lambda base: Version(base.number, base.files[1:], {}))
    (tmp_path / "p=x" / "mine.parquet").touch()
    now_s = time.time()
    assert table.vacuum(3600, now_s) == 0
    # An hour later: versions 0 and 1 are superseded for long.
    assert table.vacuum(3600, now_s + 3700) == 2
    assert sorted(os.listdir(tmp_path / "_spark_metadata")) == ["2.compact"]
    assert not (tmp_path / old.path).exists()
    assert not (tmp_path / orphan.path).exists()
    assert (tmp_path / new.path).exists()
    assert (tmp_path / "p=x" / "mine.parquet").exists()
    assert table.newest().number == 2


def test_a_folder_of_sparks_own_sink_and_one_that_was_moved_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sink" / "_spark_metadata").mkdir(parents=True)
    (tmp_path / "sink" / "_spark_metadata" / "0").write_text("v1\n")
    with pytest.raises(ArchiveError, match="Spark's file sink"):
        ArchiveTable(str(tmp_path / "sink")).newest()
    here = tmp_path / "here"
    file = written(here, 1)
    ArchiveTable(str(here)).update(lambda base: appended(base, [file], {}, 0))
    here.rename(tmp_path / "there")
    with pytest.raises(ArchiveError, match="another place"):
        ArchiveTable(str(tmp_path / "there")).newest()


# -- where to go on ------------------------------------------------------------------------------------------------------------


def test_an_archive_goes_on_behind_its_positions_and_begins_new_queues_at_their_first_message() -> None:
    known, new = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
    version = Version(0, (), {"positions": {"t": {"a:0": 7}}})
    ranges = Seen({known: QueueRange(5, 9), new: QueueRange(3, 4)})
    assert starts(version, ranges, "earliest", False) == {known: 7, new: 3}
    assert starts(version, ranges, "latest", False) == {known: 7, new: 3}
    assert starts(Version(), ranges, "latest", False) == {known: 9, new: 4}
    for there, found in ((QueueRange(8, 9), 8), (QueueRange(0, 6), 7)):
        with pytest.raises(DataLossError, match="t/a:0"):
            starts(version, Seen({known: there}), "earliest", False)
        assert starts(version, Seen({known: there}), "earliest", True) == {known: found}


def test_an_archive_of_a_topic_that_was_made_again_says_so_or_begins_with_the_new_one() -> None:
    queue = MessageQueue("t", "a", 0)
    state = {"positions": {"t": {"a:0": 7}}, "incarnations": {"t": {"a": 1}}}
    version = Version(0, (), state)
    ranges = {queue: QueueRange(0, 9)}
    assert starts(version, Seen(ranges, {("t", "a"): 1}), "earliest", False) == {queue: 7}
    again = Seen(ranges, {("t", "a"): 2})
    with pytest.raises(DataLossError, match=r"topic 't' was deleted and created again .*--skip-lost continues"):
        starts(version, again, "earliest", False)
    assert starts(version, again, "latest", True) == {queue: 0}


class FakeTopic:
    """A cluster with one queue, and the Spark that archives it: each message in `matching` is a row of the one file of a batch."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, end: int, matching: range) -> None:
        self.root, self.end, self.matching = root, end, matching
        self.batches: list[range] = []
        monkeypatch.setattr(archive, "cluster_of", lambda _: self)
        monkeypatch.setattr(archive, "show_tasks", nullcontext)
        monkeypatch.setattr(archive.Archiver, "_messages", self.messages)

    def refresh(self) -> None:
        pass

    def queues(self, _: object) -> list[MessageQueue]:
        return [QUEUE]

    all_queues = queues

    def see(self, _: object) -> Seen:
        return Seen({QUEUE: QueueRange(0, self.end)}, {("t", "a"): 1})

    def messages(self, start: Positions, end: Positions) -> FakeTopic:
        batch = range(start[QUEUE], end[QUEUE])
        assert batch not in self.batches
        self.batches.append(batch)
        return self

    def mapInArrow(self, *_: object) -> FakeTopic:
        return self

    def collect(self) -> list[WrittenFile]:
        batch = self.batches[-1]
        found = [n for n in batch if n in self.matching]
        return [written(self.root, *found, label=str(batch.start))] if found else []

    def archive(self, *more: str) -> dict[str, Any]:
        given = ["archive", "--namesrv", "h:1", "--topic", "t", "--output", str(self.root), *more]
        arguments = make_parser().parse_args(given)
        report = RunReport("archive", {})
        archive.Archiver(cast(Any, None), arguments, report, ArchiveTable(str(self.root))).run()
        return report.result


QUEUE = MessageQueue("t", "a", 0)


def test_runs_that_began_at_the_end_store_what_comes_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = FakeTopic(tmp_path, monkeypatch, 10, range(100))
    assert topic.archive("--starting", "latest")["rows_stored"] == 0
    assert ArchiveTable(str(tmp_path)).newest().files == ()
    topic.end = 15
    assert topic.archive("--starting", "latest")["rows_stored"] == 5
    assert topic.archive("--starting", "latest")["rows_stored"] == 0
    assert topic.batches == [range(10, 15)]


def test_a_run_that_follows_from_the_end_on_stores_what_comes_in_its_first_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = FakeTopic(tmp_path, monkeypatch, 10, range(100))

    def pause(_: float) -> None:
        if topic.end == 15:
            raise KeyboardInterrupt
        topic.end = 15

    monkeypatch.setattr(time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        topic.archive("--starting", "latest", "--follow")
    assert topic.batches == [range(10, 15)]


def test_batches_without_a_match_are_behind_an_archive_that_is_still_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = FakeTopic(tmp_path, monkeypatch, 30, range(25, 30))
    assert topic.archive("--tags", "x", "--batch-size", "10")["rows_stored"] == 5
    assert topic.batches == [range(10), range(10, 20), range(20, 30)]


def test_sql_is_split_at_the_commas_outside() -> None:
    assert split_sql("a, f(b, c) AS d,x[1, 2], concat('a,b', \"(\") AS e") == [
        "a", "f(b, c) AS d", "x[1, 2]", "concat('a,b', \"(\") AS e",
    ]  # fmt: skip
    assert parse_partitions(["d=to_date(t)", "q = a = b"]) == {"d": "to_date(t)", "q": "a = b"}
    for wrong in (["d"], ["=x"], ["a b=c"], ["a=1", "a=2"]):
        with pytest.raises(ValueError, match="NAME=SQL"):
            parse_partitions(wrong)


@pytest.mark.parametrize("option", ["--list-files", "--compact-only"])
def test_a_folder_without_an_archive_is_an_error_and_no_empty_archive(tmp_path: Path, option: str) -> None:
    root = tmp_path / "archvie"
    arguments = make_parser().parse_args(["archive", "--namesrv", "127.0.0.1:1", "--output", str(root), option])
    with pytest.raises(ArchiveError, match=r"there is no archive in .*archvie: is --output right\?"):
        archive.run(None, arguments, RunReport("archive", {}))
    assert not root.exists()
