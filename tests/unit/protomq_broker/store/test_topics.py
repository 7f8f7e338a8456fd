from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protomq.v1.state_pb2 import EarlierDeletion, TopicsRecord
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.files.side_files import write_json_file
from protomq_broker.store.state import topics as topics_module
from protomq_broker.store.state.topics import (
    IncarnationGivenError,
    InvalidNameError,
    TopicConfig,
    TopicTable,
    require_group_name,
    require_topic_name,
)
from protomq_broker.testing.simdisk import SimDisk

PATH = "/s/config/topics.json"


class Log:
    """Records of topics: where they stand and what they say; one that has no room takes none."""

    def __init__(self) -> None:
        self.records: list[tuple[int, bytes]] = []
        self.is_full = False

    @property
    def end_position(self) -> int:
        return self.records[-1][0] + 10 if self.records else 0

    def open(
        self,
        disk: SimDisk | None = None,
        now_ms: int = 1_000,
        draw: Callable[[], int] | None = None,
        start: int = 0,
    ) -> TopicTable:
        """A table that has read the log."""
        disk = disk or SimDisk()
        disk.make_folder("/s/config")
        table = TopicTable(disk, PATH, lambda: now_ms, draw, log_start=start)
        table.believe(self.end_position)
        for position, body in self.records:
            if position >= max(start, table.replay_from):
                table.apply(body, position)

        def append(body: bytes) -> int:
            if self.is_full:
                raise DiskFullError("no space")
            position = self.end_position
            self.records.append((position, body))
            table.apply(body, position)
            return position + 10

        table.append = append
        return table


def make_table() -> TopicTable:
    return Log().open()


def test_of_two_deletions_the_later_one_counts_in_whatever_order_they_are_told() -> None:
    """What only a file of an earlier version reports is told when the front of the log goes; by then the topic may be deleted again."""
    log = Log()
    table = log.open()
    for _ in range(2):
        table.create(TopicConfig("a"))
        table.delete("a")
    position = table.deleted["a"]
    assert table.append is not None
    earlier = EarlierDeletion(topic="a", end_position=position - 1)
    table.append(TopicsRecord(earlier_deletions=[earlier]).SerializeToString())
    assert table.deleted == log.open().deleted == {"a": position}


def test_a_topic_that_two_first_messages_make_is_that_of_the_first() -> None:
    """A start that finds no record of it counts from the first message, too."""
    table = make_table()
    table.add([TopicConfig("a", incarnation=7), TopicConfig("a", incarnation=9)])
    found = table.find("a")
    assert found is not None
    assert found.incarnation == 7


def save(table: TopicTable, position: int) -> None:
    snapshot = table.unsaved()
    assert snapshot is not None
    snapshot.save(position)


def tell(table: TopicTable, cut: int) -> int:
    """Carries forward what stands in front of `cut`; how many records that takes."""
    assert table.append is not None
    bodies = list(filter(None, (carry() for carry in table.carry(cut))))
    for body in bodies:
        table.append(body)
    return len(bodies)


@pytest.mark.parametrize("name", ["a", "A-Z_09", "x" * 127, "-", "_"])
def test_good_topic_names_are_taken(name: str):
    require_topic_name(name)
    table = make_table()
    table.create(TopicConfig(name))
    assert table.find(name) == TopicConfig(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 128,
        ".",
        "..",
        "a/b",
        "../a",
        "a.b",
        "a b",
        "a\n",
        "\n",
        "a\0",
        "ä",
        "٣",
        "%SYS%OFFSETS",
        "a%",
        "a\\b",
        "table.bin",
    ],
)
def test_bad_topic_names_are_refused_everywhere(name: str):
    table = make_table()
    for refuse in (
        lambda: require_topic_name(name),
        lambda: table.create(TopicConfig(name)),
        lambda: table.put([TopicConfig(name)]),
    ):
        with pytest.raises(InvalidNameError):
            refuse()
    assert table.find(name) is None
    assert table.all() == []


def test_a_group_name_leaves_room_for_its_retry_topic():
    require_group_name("g" * 120)
    for name in ("g" * 121, "", "a/b", "%RETRY%g"):
        with pytest.raises(InvalidNameError):
            require_group_name(name)
    assert len("%RETRY%" + "g" * 120) == 127


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_queue_counts_have_limits(count: int):
    with pytest.raises(ValueError):
        TopicConfig("a", write_queues=count)
    with pytest.raises(ValueError):
        TopicConfig("a", read_queues=count)


@pytest.mark.parametrize("saved", [False, True])
def test_topics_are_there_again_after_a_restart(saved: bool):
    disk, log = SimDisk(), Log()
    table = log.open(disk)
    table.create(TopicConfig("b", 4, 16, readable=False))
    table.create(TopicConfig("a"))
    if saved:
        save(table, log.end_position)
    table.put([TopicConfig("a", writable=False)])
    again = log.open(disk)
    assert again.all() == [
        TopicConfig("a", writable=False),
        TopicConfig("b", 4, 16, readable=False),
    ]
    assert again.snapshot().version == table.snapshot().version == (1_000, 3)


def test_create_keeps_what_is_there_and_put_replaces_it():
    table = make_table()
    first = table.create(TopicConfig("a", 1, 1))
    assert table.create(TopicConfig("a", 2, 2)) is table.find("a")
    assert table.find("a") == first
    table.put([TopicConfig("a", 2, 2)])
    assert table.find("a") == TopicConfig("a", 2, 2)


def test_the_version_rises_with_each_change_and_its_time_never_falls():
    log = Log()
    log.open(now_ms=5_000).create(TopicConfig("a"))
    table = log.open(now_ms=1_000)
    table.put([TopicConfig("a")])
    assert table.snapshot().version == (5_000, 1)
    assert table.delete("a")
    assert not table.delete("a")
    assert table.snapshot().version == (5_000, 2)


def test_each_change_is_told_once():
    table = make_table()
    told = []
    table.on_change = lambda: told.append(table.snapshot().version.counter)
    table.create(TopicConfig("a"))
    table.create(TopicConfig("a"))
    table.put([TopicConfig("a")])
    table.put([TopicConfig("a", 3, 3)])
    table.add([TopicConfig("a"), TopicConfig("b")])
    table.add([TopicConfig("b")])
    table.delete("a")
    table.delete("a")
    assert told == [1, 2, 3, 4]


def test_each_record_that_a_slave_applies_is_told_when_the_table_has_it() -> None:
    log = Log()
    master = log.open()
    master.create(TopicConfig("a"))
    slave = Log().open()
    told: list[list[str]] = []
    slave.on_applied = lambda: told.append([topic.name for topic in slave.all()])
    master.create(TopicConfig("b"))
    master.delete("a")
    for position, body in log.records:
        slave.apply(body, position)
    assert told == [["a"], ["a", "b"], ["b"]]


def test_a_snapshot_stays_as_it_was():
    table = make_table()
    table.create(TopicConfig("a"))
    snapshot = table.snapshot()
    assert table.snapshot() is snapshot
    table.delete("a")
    assert snapshot.topics == [TopicConfig("a")]
    with pytest.raises(TypeError):
        snapshot.by_name["b"] = TopicConfig("b")  # type: ignore[index]


def test_what_the_log_refuses_has_not_happened():
    log = Log()
    table = log.open()
    table.create(TopicConfig("a"))
    log.is_full = True
    for change in (
        lambda: table.create(TopicConfig("b")),
        lambda: table.delete("a"),
        lambda: table.put([TopicConfig("a", 1, 1)]),
    ):
        with pytest.raises(DiskFullError):
            change()
    assert table.all() == [TopicConfig("a")] == log.open().all()


def test_a_topic_of_which_only_messages_tell_gets_a_record():
    log = Log()
    table = log.open()
    restored = table.restore({"a": 3, "b": 20, "%SYS%OFFSETS": 1, "../x": 2})
    assert restored == table.all() == [TopicConfig("a", 8, 8), TopicConfig("b", 20, 20)]
    assert log.open().all() == []
    assert tell(table, 0) == 1
    assert tell(table, 0) == 0
    assert log.open().all() == restored


def test_a_topic_that_its_first_message_makes_is_there_even_if_the_log_takes_no_record():
    log = Log()
    table = log.open()
    log.is_full = True
    assert table.add([TopicConfig("a", 3, 3, incarnation=7)]) == 0
    assert table.find("a") == TopicConfig("a", 3, 3)
    log.is_full = False
    assert tell(table, 0) == 1
    found = log.open().find("a")
    assert found is not None
    assert found.incarnation == 7


@pytest.mark.parametrize(
    "content",
    [
        {"topics": [{"name": "../a"}], "version": {"time_ms": 1, "counter": 1}},
        {"topics": 3},
        {"topics": [{"name": "a"}], "version": {"time_ms": 1, "counter": 1}},
        [],
    ],
)
def test_a_file_of_another_form_is_left_aside(content: object):
    disk, log = SimDisk(), Log()
    log.open(disk).create(TopicConfig("a"))
    write_json_file(disk, PATH, content)
    assert log.open(disk).all() == [TopicConfig("a")]


def test_settings_of_a_later_version_are_passed_over():
    disk = SimDisk()
    disk.make_folder("/s/config")
    topic = {"name": "a", "write_queues": 1, "read_queues": 2, "incarnation": 7, "later": 5}
    write_json_file(disk, PATH, {"topics": [topic], "version": {"time_ms": 1, "counter": 9}})
    assert Log().open(disk).all() == [TopicConfig("a", 1, 2)]


def earlier_file(disk: SimDisk) -> None:
    """As versions without records wrote it."""
    disk.make_folder("/s/config")
    topics = [
        {"name": name, "write_queues": 3, "read_queues": 4, "writable": False, "incarnation": at}
        for at, name in enumerate("abc", 1)
    ]
    version = {"time_ms": 70, "counter": 9}
    write_json_file(
        disk, PATH, {"topics": topics, "version": version, "deleted": {"b": 500, "gone": 300}}
    )


def test_what_a_file_of_an_earlier_version_tells_gets_records(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topics_module, "CARRIED_COUNT", 2)
    disk, log = SimDisk(), Log()
    earlier_file(disk)
    table = log.open(disk)
    assert tell(table, 0) == 2
    assert tell(table, 0) == 0
    for found in (table, log.open(), log.open(disk)):
        assert [(t.name, t.read_queues, t.writable, t.incarnation) for t in found.all()] == [
            ("a", 4, False, 1), ("b", 4, False, 2), ("c", 4, False, 3),
        ]  # fmt: skip
        assert dict(found.deleted) == {"b": 500, "gone": 300}
        assert found.snapshot().version == (70, 9)


def test_an_earlier_file_that_was_told_in_part_is_told_in_whole_by_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topics_module, "CARRIED_COUNT", 1)
    disk, log = SimDisk(), Log()
    earlier_file(disk)
    table = log.open(disk)
    first, *_ = table.carry(0)
    assert table.append is not None
    table.append(first())
    table.delete("c")
    again = log.open(disk)
    assert [topic.name for topic in again.all()] == ["a", "b"]
    assert tell(again, 0) == 1
    assert [topic.name for topic in log.open().all()] == ["a", "b"]


def test_a_stored_topic_with_fewer_read_than_write_queues_is_loaded_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, log = SimDisk(), Log()
    table = log.open(disk)
    table.put([TopicConfig("bad", 4, 2), TopicConfig("good", 2, 4)])
    save(table, log.end_position)
    assert log.open(disk).find("bad") == TopicConfig("bad", 4, 2)
    (said,) = {record.getMessage() for record in caplog.records}
    assert "'bad' has 4 write queues and 2 read queues" in said
    assert "raise its read queues to 4" in said


def test_no_flipped_bit_of_the_file_gives_other_topics(caplog: pytest.LogCaptureFixture):
    disk, log = SimDisk(), Log()
    table = log.open(disk)
    table.put([TopicConfig("a", 3, 4), TopicConfig("b", incarnation=9)])
    table.delete("b")
    save(table, log.end_position)
    whole = disk.content(PATH)
    for bit in range(len(whole) * 8):
        disk.flip_bit(PATH, bit)
        caplog.clear()
        read = log.open(disk)
        assert (read.all(), dict(read.deleted)) == ([TopicConfig("a", 3, 4)], {"b": 10}), bit
        assert f"{PATH} is damaged" in caplog.text
        disk.flip_bit(PATH, bit)


def test_a_file_that_is_ahead_of_the_log_is_left_aside():
    disk, log = SimDisk(), Log()
    table = log.open(disk)
    table.create(TopicConfig("a"))
    lost = Log()
    lost.records = list(log.records)
    table.delete("a")
    table.create(TopicConfig("b"))
    save(table, log.end_position)
    assert lost.open(disk).all() == [TopicConfig("a")]
    assert not lost.open(disk).deleted


def test_many_topics_are_one_change() -> None:
    log = Log()
    table = log.open()
    changes: list[int] = []
    table.on_change = lambda: changes.append(len(table.all()))
    table.put([TopicConfig(f"t{i}") for i in range(100)])
    table.put([TopicConfig("t5"), TopicConfig("t6")])  # as they are: no change
    assert changes == [100]
    assert table.snapshot().version.counter == len(log.records) == 1
    with pytest.raises(InvalidNameError):
        table.put([TopicConfig("good"), TopicConfig("not good")])
    assert table.find("good") is None


def test_an_incarnation_lasts_until_the_topic_is_deleted():
    numbers = iter((11, 22, 33))
    log = Log()
    table = log.open(draw=lambda: next(numbers))
    assert table.create(TopicConfig("a")).incarnation == 11
    assert table.put([TopicConfig("a", 2, 2), TopicConfig("b")])[0].incarnation == 11
    assert table.create(TopicConfig("a")).incarnation == 11
    assert [topic.incarnation for topic in log.open().all()] == [11, 22]
    table.delete("a")
    assert table.put([TopicConfig("a", 2, 2)])[0].incarnation == 33


def test_a_given_incarnation_is_taken_for_a_new_topic_only():
    table = make_table()
    assert table.put([TopicConfig("a", incarnation=5)])[0].incarnation == 5
    with pytest.raises(IncarnationGivenError, match="delete it first"):
        table.put([TopicConfig("b"), TopicConfig("a", 2, 2, incarnation=6)])
    assert [(topic.name, topic.write_queues) for topic in table.all()] == [("a", 8)]


def test_a_record_that_is_none_changes_nothing_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = make_table()
    table.create(TopicConfig("a"))
    assert table.apply(b"\x0a\x05abc", 20) == ()
    assert table.all() == [TopicConfig("a")]
    assert "position 20" in caplog.text


Change = tuple[str, str, int]


@settings(max_examples=100, deadline=None)
@example([("put", "b", 1), ("save", "a", 1), ("delete", "b", 1), ("put", "a", 1), ("cut", "a", 1)])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "add", "delete", "cut", "save", "carry"]),
            st.sampled_from("abc"),
            st.integers(1, 4),
        ),
        max_size=30,
    )
)
def test_the_log_has_all_topics_from_its_first_segment_on(changes: list[Change]) -> None:
    """However often its front is deleted, with caches or without: a new broker needs nothing else. Deletions need no carrying."""
    disk, log, start = SimDisk(), Log(), 0
    numbers = iter(range(1, 100))
    table = log.open(disk, draw=lambda: next(numbers))
    for what, name, count in changes:
        if what == "put":
            table.put([TopicConfig(name, count, count)])
        elif what == "add":
            table.add([TopicConfig(name, count, count)])
        elif what == "delete":
            table.delete(name)
        elif what == "save" and table.unsaved() is not None:
            save(table, log.end_position)
        elif what in ("carry", "cut") and log.records:
            cut = log.records[min(count * 3, len(log.records)) - 1][0]
            tell(table, cut)
            if what == "cut":
                start = max(start, cut)
                log.records = [record for record in log.records if record[0] >= start]
    table.forget_deleted(start)
    for again in (log.open(disk, start=start), log.open(start=start)):
        found = [(t, t.incarnation) for t in again.all()]
        assert found == [(t, t.incarnation) for t in table.all()]
        again.forget_deleted(start)  # a deletion at the very start has nothing in front of it
        assert dict(again.deleted) == dict(table.deleted)
