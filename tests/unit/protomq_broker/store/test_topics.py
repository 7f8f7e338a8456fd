from __future__ import annotations

import pytest

from protomq.testing.simdisk import Fault, Operation, SimDisk
from protomq_broker.store.files.side_files import write_json_file
from protomq_broker.store.state.topics import (
    IncarnationGivenError,
    InvalidNameError,
    TopicConfig,
    TopicTable,
    require_group_name,
    require_topic_name,
)

PATH = "/s/config/topics.json"


def make_table(disk: SimDisk | None = None, now_ms: int = 1_000) -> TopicTable:
    disk = disk or SimDisk()
    disk.make_folder("/s/config")
    return TopicTable(disk, PATH, lambda: now_ms)


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


def test_topics_are_there_again_after_a_restart():
    disk = SimDisk()
    table = make_table(disk)
    table.create(TopicConfig("b", 4, 16, readable=False))
    table.create(TopicConfig("a"))
    table.put([TopicConfig("a", writable=False)])
    again = make_table(disk)
    assert again.all() == [
        TopicConfig("a", writable=False),
        TopicConfig("b", 4, 16, readable=False),
    ]
    assert again.snapshot().version == table.snapshot().version == (1_000, 3)
    assert not again.was_lost


def test_create_keeps_what_is_there_and_put_replaces_it():
    table = make_table()
    first = table.create(TopicConfig("a", 1, 1))
    assert table.create(TopicConfig("a", 2, 2)) is first
    table.put([TopicConfig("a", 2, 2)])
    assert table.find("a") == TopicConfig("a", 2, 2)


def test_the_version_rises_with_each_change_and_its_time_never_falls():
    disk = SimDisk()
    make_table(disk, now_ms=5_000).create(TopicConfig("a"))
    table = make_table(disk, now_ms=1_000)
    table.put([TopicConfig("a")])
    assert table.snapshot().version == (5_000, 1)
    table.delete("a")
    table.delete("a")
    assert table.snapshot().version == (5_000, 2)


def test_each_change_is_told_once():
    table = make_table()
    told = []
    table.on_change = lambda: told.append(table.snapshot().version.counter)
    table.create(TopicConfig("a"))
    table.create(TopicConfig("a"))
    table.put([TopicConfig("a")])
    table.put([TopicConfig("a", 3, 3)])
    table.delete("a")
    table.delete("a")
    assert told == [1, 2, 3]


def test_a_snapshot_stays_as_it_was():
    table = make_table()
    table.create(TopicConfig("a"))
    snapshot = table.snapshot()
    table.delete("a")
    assert snapshot.topics == [TopicConfig("a")]
    with pytest.raises(TypeError):
        snapshot.by_name["b"] = TopicConfig("b")  # type: ignore[index]


def test_what_the_disk_refuses_has_not_happened():
    disk = SimDisk()
    table = make_table(disk)
    table.create(TopicConfig("a"))
    disk.capacity_bytes = 0
    for change in (
        lambda: table.create(TopicConfig("b")),
        lambda: table.delete("a"),
        lambda: table.put([TopicConfig("a", 1, 1)]),
    ):
        with pytest.raises(OSError):
            change()
    assert table.all() == [TopicConfig("a")] == make_table(disk).all()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"topics": [{"name": "../a"}], "version": {"time_ms": 1, "counter": 1}}',
        b'{"topics": 3}',
    ],
)
def test_a_damaged_file_is_a_lost_one_and_the_topics_are_restored_from_the_queues(content: bytes):
    disk = SimDisk()
    disk.make_folder("/s/config")
    disk.overwrite(disk_file(disk, content), 0, content)
    table = make_table(disk)
    assert table.was_lost
    assert table.all() == []
    restored = table.restore({"a": 3, "b": 20, "%SYS%OFFSETS": 1, "../x": 2})
    assert restored == table.all() == [TopicConfig("a", 8, 8), TopicConfig("b", 20, 20)]
    assert not table.was_lost
    assert make_table(disk).all() == restored


def disk_file(disk: SimDisk, content: bytes) -> str:
    fd = disk.create(PATH)
    disk.pwrite(fd, content, 0)
    disk.close(fd)
    return PATH


def test_settings_of_a_later_version_are_passed_over():
    disk = SimDisk()
    disk.make_folder("/s/config")
    topic = {"name": "a", "write_queues": 1, "read_queues": 2, "incarnation": 7, "later": 5}
    write_json_file(disk, PATH, {"topics": [topic], "version": {"time_ms": 1, "counter": 9}})
    assert make_table(disk).all() == [TopicConfig("a", 1, 2)]


def test_a_stored_topic_with_fewer_read_than_write_queues_is_loaded_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SimDisk()
    make_table(disk).put([TopicConfig("bad", 4, 2), TopicConfig("good", 2, 4)])
    assert make_table(disk).find("bad") == TopicConfig("bad", 4, 2)
    (said,) = {record.getMessage() for record in caplog.records}
    assert "'bad' has 4 write queues and 2 read queues" in said
    assert "raise its read queues to 4" in said


def test_no_flipped_bit_of_the_file_gives_other_topics(caplog: pytest.LogCaptureFixture):
    disk = SimDisk()
    table = make_table(disk)
    table.put([TopicConfig("a", 3, 4), TopicConfig("b", incarnation=9)])
    table.delete("b", 77)
    whole = disk.content(PATH)
    for bit in range(len(whole) * 8):
        disk.flip_bit(PATH, bit)
        caplog.clear()
        read = make_table(disk)
        assert (read.was_lost, read.all(), dict(read.deleted)) == (True, [], {}), bit
        assert f"{PATH} is damaged" in caplog.text
        disk.flip_bit(PATH, bit)
    assert make_table(disk).all() == [TopicConfig("a", 3, 4)]
    assert make_table(disk).deleted == {"b": 77}


def test_many_topics_are_one_change() -> None:
    table = make_table()
    changes: list[int] = []
    table.on_change = lambda: changes.append(len(table.all()))
    table.put([TopicConfig(f"t{i}") for i in range(100)])
    table.put([TopicConfig("t5"), TopicConfig("t6")])  # as they are: no change
    assert changes == [100]
    assert table.snapshot().version.counter == 1
    with pytest.raises(InvalidNameError):
        table.put([TopicConfig("good"), TopicConfig("not good")])
    assert table.find("good") is None


def test_an_added_topic_is_there_at_once_and_in_the_file_when_it_is_saved():
    disk = SimDisk()
    table = make_table(disk)
    table.add(TopicConfig("a", 3, 3))
    assert table.find("a") == TopicConfig("a", 3, 3)
    assert make_table(disk).all() == []
    table.save()
    again = make_table(disk)
    assert again.all() == [TopicConfig("a", 3, 3)]
    assert again.snapshot().version == table.snapshot().version


def test_any_change_takes_what_was_added_along():
    disk = SimDisk()
    table = make_table(disk)
    table.add(TopicConfig("a"))
    table.create(TopicConfig("b"))
    assert [topic.name for topic in make_table(disk).all()] == ["a", "b"]
    written = disk.operations
    table.save()
    assert disk.operations == written


def test_a_save_that_fails_is_made_up_for():
    disk = SimDisk()
    table = make_table(disk)
    table.add(TopicConfig("a"))
    disk.fail_at(1, Fault.EIO)
    with pytest.raises(OSError):
        table.save()
    table.save()
    assert make_table(disk).all() == [TopicConfig("a")]


def test_a_topic_added_while_another_is_being_written_stays():
    disk = SimDisk()
    table = make_table(disk)

    def add(operation: Operation) -> None:
        disk.plan = None
        table.add(TopicConfig("added"))

    disk.plan = add
    table.create(TopicConfig("created"))
    assert [topic.name for topic in table.all()] == ["added", "created"]
    table.save()
    assert [topic.name for topic in make_table(disk).all()] == ["added", "created"]


def test_an_incarnation_lasts_until_the_topic_is_deleted():
    disk = SimDisk()
    disk.make_folder("/s/config")
    numbers = iter((11, 22, 33))
    table = TopicTable(disk, PATH, lambda: 1_000, lambda: next(numbers))
    assert table.create(TopicConfig("a")).incarnation == 11
    assert table.put([TopicConfig("a", 2, 2), TopicConfig("b")])[0].incarnation == 11
    assert table.create(TopicConfig("a")).incarnation == 11
    assert [topic.incarnation for topic in make_table(disk).all()] == [11, 22]
    table.delete("a")
    assert table.put([TopicConfig("a", 2, 2)])[0].incarnation == 33


def test_a_given_incarnation_is_taken_for_a_new_topic_only():
    table = make_table()
    assert table.put([TopicConfig("a", incarnation=5)])[0].incarnation == 5
    with pytest.raises(IncarnationGivenError, match="delete it first"):
        table.put([TopicConfig("b"), TopicConfig("a", 2, 2, incarnation=6)])
    assert [(topic.name, topic.write_queues) for topic in table.all()] == [("a", 8)]


def test_what_goes_with_a_topic_is_gone_before_another_one_can_be_made():
    table = make_table()
    table.create(TopicConfig("a"))
    seen: list[object] = []
    table.delete("a", 0, lambda: seen.append((table.find("a"), table._lock.locked())))
    assert seen == [(None, True)]


@pytest.mark.parametrize("change", ["create", "put"])
def test_a_topic_that_its_first_message_makes_meanwhile_keeps_its_incarnation(change: str):
    disk = SimDisk()
    table = make_table(disk)
    by_first_message = TopicConfig("a", 1, 1, incarnation=77)
    draw = table._next_incarnation

    def draw_while_a_message_comes() -> int:
        table.add(by_first_message)
        return draw()

    table._draw_incarnation = draw_while_a_message_comes
    wanted = TopicConfig("a", 2, 2)
    made = table.create(wanted) if change == "create" else table.put([wanted])[0]

    assert made.incarnation == 77
    table.save()
    for seen in (table, make_table(disk)):
        found = seen.find("a")
        assert found is not None
        assert (found, found.incarnation) == (wanted, 77)
