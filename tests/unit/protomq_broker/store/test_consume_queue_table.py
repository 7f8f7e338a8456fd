from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.wire.topics import TOPICS_TOPIC
from protomq_broker.store.files.side_files import read_state_file, write_state_file
from protomq_broker.store.queues import consume_queue, consume_queue_table, queue_flush
from protomq_broker.store.queues.consume_queue import ConsumeQueue
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable, has_table
from protomq_broker.store.queues.queue_flush import flush_together
from protomq_broker.store.start.settings import make_folders
from protomq_broker.testing.simdisk import Fault, Operation, SimDisk
from tests.unit.protomq_broker.store.derived_helpers import (
    ListLog,
    Send,
    use_small_files,
    verify_queue,
)

FOLDER = "/s/consumequeue"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_files(monkeypatch.setattr)


def make_table(
    disk: SimDisk, log: ListLog | None = None, *, files_max: int = 64
) -> ConsumeQueueTable:
    """A table that has recovered with what the log has."""
    make_folders(disk, "/s")
    table = ConsumeQueueTable(disk, FOLDER, files_max=files_max)
    table.load()
    if log is not None:
        catch_up(table, log)
    return table


def catch_up(table: ConsumeQueueTable, log: ListLog) -> None:
    for block_start, block_end in zip(log.boundaries, log.boundaries[1:], strict=False):
        if block_end > table.replay_from:
            table.replay(log.scanned(block_start, block_end))
    if table.needs_rebuild:
        table.start_rebuild()
        table.replay(log.scanned())
    table.truncate(log.end)
    assert not table.needs_rebuild


def append(table: ConsumeQueueTable, log: ListLog, *sends: Send) -> None:
    table.apply(log.append(*sends))


def expect_all(table: ConsumeQueueTable, log: ListLog) -> None:
    """Each record has exactly one entry, and each entry one record."""
    for topic, queue_id in log.queues():
        records = log.of_queue(topic, queue_id)
        queue = table.find(topic, queue_id)
        if queue is None:
            assert not records
            continue
        expected = [(r.position, r.size, r.tag_code) for r in records]
        assert queue.end_offset == (records[-1].queue_offset + 1 if records else 0)
        assert queue.entries(0, 10_000).tolist() == expected
    for topic in table.topics():
        for queue_id, queue in table.queues_of(topic).items():
            assert queue.end_offset == log.next_offset(topic, queue_id)


def queue_files(disk: SimDisk) -> dict[str, bytes]:
    return {
        path: data for path, data in disk.files(FOLDER).items() if not path.endswith("table.bin")
    }


def test_a_group_for_several_queues_is_entered():
    log, table = ListLog(), make_table(SimDisk())
    append(table, log, Send("a", 0, 3), Send("b", 1), Send("a", 0), Send("a", 5, 2, tag_code=-9))
    expect_all(table, log)
    assert table.end_offset("a", 0) == 4
    assert table.end_offset("a", 7) == table.end_offset("z", 0) == 0
    assert set(table.queues_of("a")) == {0, 5}
    assert table.queue_count() == 3


def test_without_a_table_everything_is_rebuilt_and_the_files_are_the_same():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    for turn in range(10):
        append(table, log, Send("a", turn % 3, 1 + turn), Send("b", 0))
    table.checkpoint(log.end)
    files = queue_files(disk)
    disk.remove(FOLDER)
    again = make_table(disk, log)
    assert again.replay_from == 0
    expect_all(again, log)
    again.checkpoint(log.end)
    assert queue_files(disk) == files


def test_a_clean_start_replays_nothing():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20), Send("b", 1, 3))
    table.checkpoint(log.end)
    again = make_table(disk)
    assert again.replay_from == log.end
    expect_all(again, log)
    append(again, log, Send("a", 0, 2))
    expect_all(again, log)


def test_what_lies_behind_the_checkpoint_comes_again_from_the_log():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 5))
    table.checkpoint(log.end)
    position = log.end
    append(table, log, Send("a", 0, 30), Send("new", 0, 3))
    table.flush()
    again = make_table(disk)
    assert again.replay_from == position
    assert again.end_offset("a", 0) == 5
    assert again.find("new", 0) is None
    assert len(b"".join(queue_files(disk).values())) == 38 * 20, "only they tell how far the queues went, should the log have lost it"
    catch_up(again, log)
    expect_all(again, log)
    again.keep_ends([], {}, log.end)
    assert len(b"".join(queue_files(disk).values())) == 5 * 20
    again.flush()
    assert len(b"".join(queue_files(disk).values())) == 38 * 20
    expect_all(again, log)


def test_a_checkpoint_in_the_middle_of_what_was_applied_covers_only_its_position():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 5), Send("b", 0))
    position = log.end
    append(table, log, Send("a", 0, 5), Send("c", 0))
    table.checkpoint(position)
    log.cut(position)
    again = make_table(disk, log)
    assert again.replay_from == position
    expect_all(again, log)


@pytest.mark.parametrize("damage", ["gone", "short", "torn", "zeros"])
def test_a_damaged_file_is_made_good_from_the_log(damage: str):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    for _ in range(5):
        append(table, log, Send("a", 0, 6), Send("b", 0, 2))
    table.checkpoint(log.end)
    files = queue_files(disk)
    path = f"{FOLDER}/a/0/{320:020d}"
    if damage == "gone":
        disk.unlink(path)
    elif damage == "short":
        disk.cut(path, 100)
    elif damage == "torn":
        disk.cut(path, 47)
    else:
        disk.overwrite(path, 100, bytes(20))
        broken = make_table(disk, log)
        assert list(verify_queue(broken.queue("a", 0)))
        broken.checkpoint(log.end)
    again = make_table(disk)
    assert 0 < again.replay_from < log.end
    catch_up(again, log)
    expect_all(again, log)
    again.checkpoint(log.end)
    assert queue_files(disk) == files


@pytest.mark.parametrize(("start", "size"), [(9, 91), (0, 100), (20, 20), (61, 3), (300, 60)])
def test_entries_that_were_damaged_after_the_checkpoint_are_made_good_by_the_next_start(
    start: int, size: int
):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20), Send("b", 0, 2))
    table.checkpoint(log.end)
    files = queue_files(disk)
    path = f"{FOLDER}/a/0/{start // 160 * 160:020d}"
    disk.overwrite(path, start % 160, bytes(min(size, 160 - start % 160)))
    broken = make_table(disk, log)
    assert list(verify_queue(broken.queue("a", 0)))
    broken.checkpoint(log.end)
    again = make_table(disk, log)
    expect_all(again, log)
    again.checkpoint(log.end)
    assert queue_files(disk) == files
    assert make_table(disk).replay_from == log.end


def test_a_queue_whose_files_are_all_gone_is_rebuilt():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 6), Send("b", 0, 2))
    table.checkpoint(log.end)
    disk.remove(f"{FOLDER}/a")
    again = make_table(disk)
    assert again.replay_from == 0
    catch_up(again, log)
    expect_all(again, log)


@pytest.mark.parametrize("bit", [0, 100, 300, 500])
def test_a_damaged_table_is_no_table(bit: int):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 6), Send("b", 0, 2))
    table.checkpoint(log.end)
    disk.flip_bit(f"{FOLDER}/table.bin", bit)
    again = make_table(disk, log)
    assert again.replay_from == 0
    expect_all(again, log)


def test_queues_of_another_version_are_made_anew_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 6), Send("b", 0, 2))
    table.checkpoint(log.end)
    files, path = queue_files(disk), f"{FOLDER}/a/0/{0:020d}"
    payload = read_state_file(disk, f"{FOLDER}/table.bin", b"PMQCQT02")
    assert payload is not None
    write_state_file(disk, f"{FOLDER}/table.bin", b"PMQCQT01", payload)
    disk.overwrite(path, 7, b"\x00")  # as without check bits
    assert not has_table(disk, FOLDER)
    with caplog.at_level("WARNING"):
        again = make_table(disk, log)
    assert "another version" in again.damage
    assert again.replay_from == 0
    expect_all(again, log)
    again.checkpoint(log.end)
    assert queue_files(disk) == files
    caplog.clear()
    make_table(SimDisk())
    assert not caplog.text, "a new store has nothing to say"


def test_a_log_that_ends_earlier_cuts_the_queues_and_their_offsets_are_given_again():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    for _ in range(4):
        append(table, log, Send("a", 0, 6), Send("b", 0, 2))
    table.checkpoint(log.end)
    end = log.boundaries[2]
    log.cut(end)
    table.truncate(end)
    expect_all(table, log)
    append(table, log, Send("a", 0, 9, tag_code=4))
    table.flush()
    again = make_table(disk)
    assert again.replay_from == end
    catch_up(again, log)
    expect_all(again, log)


def test_a_record_that_the_log_has_lost_keeps_its_offset():
    disk, log = SimDisk(), ListLog()
    for _ in range(3):
        log.append(Send("a", 0, 4))
    lost = {r.position for r in log.records if 4 <= r.queue_offset < 8}
    log.records = [r for r in log.records if r.position not in lost]
    table = make_table(disk, log)
    entries = table.queue("a", 0).entries(0, 100)
    assert table.end_offset("a", 0) == 12
    assert entries["size"].tolist()[4:8] == [0] * 4
    assert entries["size"].all() == 0
    table.checkpoint(log.end)
    assert make_table(disk).queue("a", 0).entries(0, 100).tolist() == entries.tolist()


def test_a_log_that_begins_later_gives_queues_that_begin_later():
    log = ListLog()
    for _ in range(3):
        log.append(Send("a", 0, 4))
    start = log.boundaries[1]
    log.records = [r for r in log.records if r.position >= start]
    table = make_table(SimDisk(), log)
    queue = table.queue("a", 0)
    assert (queue.min_offset(start), queue.end_offset) == (4, 12)
    assert queue.entries(4, 100)["position"].tolist() == [r.position for r in log.records]


def test_files_go_with_the_log_but_never_the_last_one():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    for _ in range(10):
        append(table, log, Send("a", 0, 4), Send("b", 0))
    table.checkpoint(log.end)
    table.delete_below(log.boundaries[5])
    queue = table.queue("a", 0)
    assert queue.min_offset(log.boundaries[5]) == 20
    killed = ConsumeQueueTable(disk.killed(), FOLDER)
    killed.load(log.boundaries[5])
    assert killed.replay_from == log.end
    assert killed.queue("a", 0).entries(20, 100).tolist() == queue.entries(20, 100).tolist()
    assert disk.list(f"{FOLDER}/a/0") == [f"{160 * n:020d}" for n in (2, 3, 4)]
    table.delete_below(log.end)
    assert queue.min_offset(log.end) == queue.end_offset == 40
    table.checkpoint(log.end)
    again = ConsumeQueueTable(disk, FOLDER)
    again.load(log.end)
    assert again.replay_from == log.end
    assert again.end_offset("a", 0) == 40
    append(again, log, Send("a", 0, 3))
    assert again.queue("a", 0).min_offset(log.boundaries[-2]) == 40
    assert len(again.queue("a", 0).entries(40, 10)) == 3


def test_reading_while_files_are_deleted_gives_nothing_and_no_error():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20))
    append(table, log, Send("a", 0, 20))
    table.checkpoint(log.end)
    table.flush()
    table.delete_below(log.boundaries[1])
    assert len(table.queue("a", 0).entries(0, 5)) == 0


def test_a_removed_topic_is_gone_and_begins_anew():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20), Send("b", 0, 3))
    table.checkpoint(log.end)
    table.remove_topic("a")
    log.restart("a")
    assert table.find("a", 0) is None
    append(table, log, Send("a", 0, 2))
    expect_all(table, log)
    table.flush()
    assert disk.list(f"{FOLDER}/a/0") == [f"{0:020d}"]
    again = make_table(disk, log)
    expect_all(again, log)
    again.checkpoint(log.end)
    expect_all(make_table(disk, log), log)
    disk.remove(FOLDER)
    expect_all(make_table(disk, log), log)


def test_a_topic_removed_without_a_follower_leaves_no_files():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20), Send("b", 0, 3))
    table.checkpoint(log.end)
    table.remove_topic("a")
    table.remove_topic("unknown")
    table.flush()
    assert disk.list(FOLDER) == ["b", "table.bin"]
    assert make_table(disk).topics() == ["b"]
    assert table.queue_count() == 1


def test_names_of_topics_that_are_gone_take_no_room_in_the_table():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("stays", 0), Send("another", 1))
    sizes = set()
    for number in range(100, 120):
        topic = f"passing-{number}"
        append(table, log, Send(topic, 0), Send(topic, 3))
        table.checkpoint(log.end)
        sizes.add(len(disk.content(f"{FOLDER}/table.bin")))
        table.remove_topic(topic)
        table.flush()
    assert len(sizes) == 1
    append(table, log, Send("last", 2, 4), Send("stays", 1))
    table.checkpoint(log.end)
    later = make_table(disk)
    assert sorted((queue.topic, queue.queue_id, queue.end_offset) for queue in later.all()) == [
        ("another", 1, 1), ("last", 2, 4), ("stays", 0, 1), ("stays", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(1, 12))
def test_a_disk_that_fails_once_keeps_no_files_of_a_removed_topic(number: int):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("gone", 0, 20), Send("gone", 1), Send("stays", 0))
    table.checkpoint(log.end)
    table.remove_topic("gone")
    log.restart("gone")
    append(table, log, Send("gone", 1, 2))
    disk.fail_at(number, Fault.ENOSPC)
    for _ in range(3):
        with suppress(OSError):
            table.flush()
    assert disk.list(f"{FOLDER}/gone") == ["1"]
    queue = table.find("gone", 1)
    assert queue is not None
    assert queue.entries(0, 9).shape == (2,)
    table.checkpoint(log.end)
    later = make_table(disk.killed())
    assert later.end_offset("gone", 1) == 2
    assert later.find("gone", 0) is None


@pytest.mark.parametrize("number", range(1, 10))
def test_a_topic_that_begins_anew_while_files_of_others_go_keeps_its_files(number: int):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("other", 0, 2), Send("again", 0, 2), Send("again", 1, 2))
    table.checkpoint(log.end)
    table.remove_topic("other")
    log.restart("other")
    first = disk.operations

    def writer(operation: Operation) -> None:
        if operation.number == first + number:
            table.remove_topic("again")
            log.restart("again")
            append(table, log, Send("again", 0, 20))

    disk.plan = writer
    table.flush()
    disk.plan = None
    for _ in range(2):
        append(table, log, Send("again", 0))
        table.flush()
        table.flush()
    expect_all(table, log)
    table.checkpoint(log.end)
    expect_all(make_table(disk.killed(), log), log)


@pytest.mark.parametrize("number", range(1, 9))
def test_a_topic_that_begins_anew_during_a_checkpoint_hides_nothing_if_its_deletion_is_lost(number: int):
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("again", 0, 2), Send("again", 1, 2))
    table.checkpoint(log.end)
    append(table, log, Send("again", 0))
    before, first = deepcopy(log), disk.operations

    def writer(operation: Operation) -> None:
        if operation.number == first + number:
            append(table, log, Send(TOPICS_TOPIC))
            table.remove_topic("again")
            log.restart("again")
            append(table, log, Send("again", 0, 3))

    disk.plan = writer
    table.checkpoint(before.end)
    disk.plan = None
    image = disk.killed()
    later = ConsumeQueueTable(image, FOLDER)
    later.load()
    for _ in range(2):
        later.replay(before.scanned())
        later.truncate(before.end)
        if later.needs_rebuild:
            later.start_rebuild()
    expect_all(later, before)
    assert later.queue_count() == 2


def test_files_of_a_removed_topic_that_never_go_hold_up_no_other_queue():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("gone", 0, 20), Send("stays", 0))
    table.checkpoint(log.end)
    table.remove_topic("gone")
    append(table, log, Send("stays", 0, 3))
    stuck = f"{FOLDER}/gone"
    disk.plan = lambda operation: Fault.EIO if operation.path.startswith(stuck) else None
    with pytest.raises(OSError, match="gone"):
        table.flush()
    table.checkpoint(log.end)
    assert make_table(disk.killed()).end_offset("stays", 0) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=12),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from((1, 100, 1_000, 1 << 20)),
)
def test_queues_flushed_together_have_the_files_of_queues_flushed_one_by_one(
    turns: list[list[tuple[int, int]]], together_size_bytes: int
) -> None:
    def one_by_one(
        queues: Sequence[ConsumeQueue], on_written: Callable[[ConsumeQueue], None]
    ) -> None:
        for queue in queues:
            queue.flush()
            on_written(queue)

    files = []
    for flush in (flush_together, one_by_one):
        with pytest.MonkeyPatch.context() as patch:
            use_small_files(patch.setattr)
            patch.setattr(consume_queue_table, "flush_together", flush)
            patch.setattr(queue_flush, "TOGETHER_SIZE_BYTES", together_size_bytes)
            disk, log = SimDisk(), ListLog()
            table = make_table(disk)
            for turn in turns:
                append(table, log, *(Send("t", queue_id, count) for queue_id, count in turn))
                table.flush()
                assert all(
                    queue.flushed_offset == queue.end_offset
                    for queue in table.queues_of("t").values()
                )
            table.checkpoint(log.end)
            expect_all(make_table(disk), log)
            files.append(disk.files(FOLDER))
    assert files[0] == files[1]


def test_a_full_disk_loses_nothing():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20), Send("b", 0, 3))
    disk.capacity_bytes = 100
    with pytest.raises(OSError):
        table.flush()
    with pytest.raises(OSError):
        table.checkpoint(log.end)
    expect_all(table, log)
    disk.capacity_bytes = 1 << 30
    table.checkpoint(log.end)
    expect_all(make_table(disk), log)


def test_queues_at_rest_give_their_memory_back_and_are_read_from_files():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 5), Send("b", 0))
    table.flush()
    assert len(table.queue("a", 0)._buffer[1])
    append(table, log, Send("b", 0))
    table.flush()
    assert not len(table.queue("a", 0)._buffer[1])
    assert len(table.queue("b", 0)._buffer[1])
    expect_all(table, log)


def test_no_more_files_are_open_than_allowed():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk, files_max=4)
    append(table, log, *(Send("a", queue_id, 20) for queue_id in range(30)))
    table.checkpoint(log.end)
    expect_all(table, log)
    assert disk.open_descriptors <= 5
    table.close()
    assert disk.open_descriptors == 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(5, 40))
def test_after_any_history_of_power_cuts_the_queues_are_what_the_log_says(seed: int, steps: int):
    with pytest.MonkeyPatch.context() as patch:
        use_small_files(patch.setattr)
        rng = random.Random(seed)
        disk, log = SimDisk(), ListLog()
        table = make_table(disk)
        durable = removed = 0
        for _ in range(steps):
            action = rng.choice(
                ["append"] * 6
                + [
                    "flush",
                    "flush",
                    "checkpoint",
                    "power cut",
                    "kill",
                    "cut",
                    "remove",
                    "write back",
                    "damage",
                ]
            )
            if action == "append":
                sends = [
                    Send(
                        rng.choice("abc"),
                        rng.randrange(2),
                        rng.randint(1, 9),
                        tag_code=rng.randrange(3),
                    )
                    for _ in range(3)
                ]
                append(table, log, *sends)
            elif action == "flush":
                table.flush()
            elif action == "checkpoint":
                durable = rng.choice([b for b in log.boundaries if b >= durable])
                table.checkpoint(durable)
            elif action == "write back":
                disk.write_back(rng)
            elif action == "cut":
                end = rng.choice([b for b in log.boundaries if b >= removed])
                log.cut(end)
                durable = min(durable, end)
                table.truncate(end)
            elif action == "remove":
                topic = rng.choice("abc")
                log.restart(topic)
                table.remove_topic(topic)
                append(table, log, Send(topic, 0), Send(topic, 1))
                # What was removed must not come back: no cut goes behind it.
                durable = removed = log.end
                table.checkpoint(durable)
            elif action == "damage":
                durable = log.end
                table.checkpoint(durable)
                files = {path: data for path, data in queue_files(disk).items() if data}
                if files:
                    path = rng.choice(sorted(files))
                    at = rng.randrange(len(files[path]) // 20)
                    disk.overwrite(path, 20 * at, bytes(20 * rng.randint(1, 8 - at)))
                    disk.cut(path, len(files[path]))
                    table = make_table(disk, log)
                    queues = [
                        queue
                        for topic in table.topics()
                        for queue in table.queues_of(topic).values()
                    ]
                    if [damage for queue in queues for damage in verify_queue(queue)]:
                        table.checkpoint(log.end)
                        table = make_table(disk, log)
            elif action == "kill":
                disk = disk.killed()
                table = make_table(disk, log)
            else:
                disk = disk.crash(rng)
                log.cut(rng.choice([b for b in log.boundaries if b >= durable]))
                table = make_table(disk, log)
            expect_all(table, log)
        table.checkpoint(log.end)
        expect_all(make_table(disk.crash(rng)), log)


def many_sends(table: ConsumeQueueTable, log: ListLog, count: int) -> None:
    for number in range(count):
        append(table, log, Send(f"t{number}", 0, 2), Send(f"t{number}", 1))


def test_many_queues_are_synced_all_at_once_and_few_one_by_one():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    many_sends(table, log, 40)
    disk.history = []
    table.checkpoint(log.end)
    names = [operation.name for operation in disk.history]
    assert (names.count("sync_file_system"), names.count("fdatasync")) == (1, 0)
    many_sends(table, log, 3)
    disk.history = []
    table.checkpoint(log.end)
    names = [operation.name for operation in disk.history]
    assert (names.count("sync_file_system"), names.count("fdatasync")) == (0, 6)
    after = ConsumeQueueTable(disk.crash(random.Random(1), keep=0.0), FOLDER)
    after.load()
    assert after.replay_from == log.end
    assert all(
        after.end_offset(f"t{number}", 0) == (4 if number < 3 else 2) for number in range(40)
    )
    table.close()


def test_after_a_sync_of_many_that_was_lost_no_entry_of_theirs_is_believed():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    many_sends(table, log, 40)
    table.checkpoint(log.end)
    many_sends(table, log, 40)
    disk.plan = lambda operation: Fault.SYNC_LOST if operation.name == "sync_file_system" else None
    with pytest.raises(OSError):
        table.checkpoint(log.end)
    disk.plan = None
    table.checkpoint(log.end)
    after = make_table(disk.crash(random.Random(1), keep=0.0), log)
    for number in range(40):
        for queue_id in (0, 1):
            expected = table.queue(f"t{number}", queue_id)
            found = after.queue(f"t{number}", queue_id)
            assert found.entries(0, 10).tolist() == expected.entries(0, 10).tolist()


def test_where_a_sync_of_all_says_nothing_of_failures_each_file_is_synced():
    class OldDisk(SimDisk):
        can_sync_file_system = False

    disk, log = OldDisk(), ListLog()
    table = make_table(disk)
    many_sends(table, log, 40)
    disk.history = []
    table.checkpoint(log.end)
    assert [operation.name for operation in disk.history].count("fdatasync") == 80


def test_a_reader_that_looks_for_an_entry_deleted_for_its_age_just_now_goes_on_with_the_oldest():
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    for _ in range(10):
        append(table, log, Send("a", 0, 4))
    table.checkpoint(log.end)
    table.flush()
    queue = table.queue("a", 0)
    old = queue.min_offset(0)
    table.delete_below(log.boundaries[5])
    assert queue.entry(old) == (0, 0, -1)
    assert queue.min_offset(0) == 20, "a reader that saw the log's old start gets the new one"
    assert not table._home.damaged_queues()

    looked = 0
    real = queue.entry

    # Housekeeping comes in between.
    def entry(queue_offset: int) -> tuple[int, int, int]:
        nonlocal looked
        looked += 1
        if looked == 2:
            table.delete_below(log.boundaries[7])
        return real(queue_offset)

    position = log.records[30].position
    table.checkpoint(log.end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consume_queue.ConsumeQueue, "entry", lambda self, offset: entry(offset))
        assert queue.first_at_or_beyond(position) == 30
    assert looked > 2
    assert not table._home.damaged_queues()


def test_a_checkpoint_reads_nothing_of_queues_that_were_written_and_gave_their_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, log = SimDisk(), ListLog()
    table = make_table(disk)
    append(table, log, Send("a", 0, 20), Send("b", 1, 8), Send("c", 0))
    table.flush()
    table.flush()
    assert not len(table.queue("a", 0)._buffer[1])
    with monkeypatch.context() as patch:
        patch.setattr(SimDisk, "pread", lambda *_: pytest.fail("it was read"))
        table.checkpoint(log.end)
    again = make_table(disk)
    assert again.replay_from == log.end
    expect_all(again, log)
