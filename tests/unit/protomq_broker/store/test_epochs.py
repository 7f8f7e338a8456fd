"""Which epochs a log has, and which of its seals tell of this store's disk."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq.wire.log_walk import Seal
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.errors import CorruptLogError, DiskFullError
from protomq_broker.store.log.epochs import (
    EPOCHS_NAME,
    UNKNOWN_EPOCHS,
    EpochRow,
    Epochs,
    epoch_at_end,
    find_epochs,
    read_epochs,
    write_epochs,
)
from protomq_broker.store.tools.offline import dump
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import Fault, Operation, SimDisk

from .log_helpers import Log, make_record, make_request, recover
from .store_helpers import open_store
from .test_following import disk_of, fill, follow

PATH = f"/s/{EPOCHS_NAME}"
SEGMENT_0 = f"/s/commitlog/{0:020d}"


def seal(epoch: int, position: int, synced: int) -> Seal:
    return Seal(epoch, position, 10, 1, 5, synced, 0)


def epochs_of(disk: SimDisk) -> list[tuple[int, int, bool]]:
    """The rows that the store has written down."""
    content = json.loads(b"".join(disk.content(PATH).splitlines()[2:-1]))
    return [tuple(row) for row in content["rows"]]


# The values.


def test_a_seal_counts_only_where_this_store_led() -> None:
    epochs = (
        Epochs()
        .begin(0, 1, is_led=True)
        .begin(100, 1, is_led=False)
        .begin(200, 2, is_led=False)
        .begin(300, 3, is_led=True)
    )
    assert epochs.synced_by([seal(1, 50, 40)]) == 40
    assert epochs.synced_by([seal(1, 100, 90)]) == 0
    assert epochs.synced_by([seal(2, 250, 240)]) == 0
    assert epochs.synced_by([seal(3, 300, 290), seal(3, 350, 310)]) == 310
    assert epochs.synced_by([seal(1, 90, 80), seal(1, 150, 140), seal(2, 200, 190)]) == 80
    assert epochs.synced_by([seal(4, 400, 390)]) == 0, "an epoch without a row"


def test_what_is_not_known_counts() -> None:
    assert UNKNOWN_EPOCHS.synced_by([seal(7, 10, 9), seal(1, 20, 5)]) == 9


def test_an_epoch_without_an_append_leaves_no_row_and_is_not_given_again() -> None:
    epochs = Epochs().begin(0, 1, is_led=True).begin(100, 2, is_led=True).begin(100, 3, is_led=True)
    assert epochs.rows == (EpochRow(0, 1, True), EpochRow(100, 3, True))
    assert epochs.between(0, 99, 99).rows == (EpochRow(0, 1, True),)
    assert epochs.between(0, 99, 99).highest_epoch == 3


def test_rows_go_with_the_front_of_the_log() -> None:
    epochs = Epochs().begin(0, 1, is_led=True).begin(100, 2, is_led=True).begin(200, 3, is_led=True)
    assert epochs.between(150, 300, 300).rows == epochs.rows[1:]
    assert epochs.between(200, 300, 300).rows == epochs.rows[2:]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=20
    )
)
def test_rows_tell_for_each_position_what_was_begun_last_at_or_below_it(
    steps: list[tuple[int, int, bool]],
) -> None:
    epochs, position, epoch = Epochs(), 0, 0
    naive: dict[int, tuple[int, bool]] = {}
    for forward, up, is_led in steps:
        position, epoch = position + forward, epoch + up
        epochs = epochs.begin(position, epoch, is_led=is_led)
        naive[position] = epoch, is_led
    for at in range(position + 2):
        expected = next((naive[start] for start in range(at, -1, -1) if start in naive), None)
        row = epochs.row_at(at)
        assert (None if row is None else (row.epoch, row.is_led)) == expected
    assert epochs.highest_epoch == epoch


# The file.


def test_the_file_gives_back_what_was_written_and_is_never_believed_in_part() -> None:
    disk = SimDisk()
    disk.make_folder("/s/config")
    epochs = Epochs((EpochRow(0, 1, True), EpochRow(53, 4, False)), 9, 700)
    write_epochs(disk, PATH, epochs)
    assert read_epochs(disk, PATH) == epochs
    for at in range(len(disk.content(PATH))):
        harmed = disk.killed()
        harmed.flip_bit(PATH, at * 8)
        assert read_epochs(harmed, PATH) == UNKNOWN_EPOCHS
    disk.remove(PATH)
    assert read_epochs(disk, PATH) == UNKNOWN_EPOCHS


# Recovery.


def test_a_torn_tail_of_another_leaders_bytes_is_cut_though_its_seals_say_more_was_synced() -> None:
    log = Log()
    first = log.append(make_record(b"a" * 50))
    log.append(make_record(b"b" * 50))
    log.append(make_record(b"c"))
    log.sync()  # on the disk of the leader
    log.append(make_record(b"d"))
    disk = log.disk.killed()
    disk.flip_bit(SEGMENT_0, (first.position + 20) * 8)
    followed = Epochs().begin(0, 0, is_led=False)
    recovered, fields, _ = recover(disk.killed(), epochs=followed)
    assert fields == [make_record(b"a" * 50)]
    assert recovered.tail.position == first.position
    for epochs in (UNKNOWN_EPOCHS, Epochs().begin(0, 0, is_led=True)):
        with pytest.raises(CorruptLogError):
            recover(disk.killed(), epochs=epochs)


def test_what_a_follower_had_synced_itself_is_not_cut() -> None:
    log = Log()
    first = log.append(make_record(b"a" * 50))
    second = log.append(make_record(b"b" * 50))
    disk = log.disk.killed()
    disk.flip_bit(SEGMENT_0, (first.position + 20) * 8)
    epochs = Epochs(synced_position=second.position).begin(0, 0, is_led=False)
    with pytest.raises(CorruptLogError, match=f"synced up to {second.position}"):
        recover(disk, epochs=epochs)


# Stores.


@pytest.mark.parametrize(
    ("walked", "expected"),
    [
        ([(2, 60)], [(0, 1, True), (60, 2, False), (200, 3, True)]),  # the row of epoch 2 was made behind the damage
        ([(2, 60), (2, 90), (2, 100), (3, 200), (3, 250)], [(0, 1, True), (60, 2, False), (200, 3, True)]),
        ([(1, 60), (2, 100)], [(0, 1, True), (100, 2, False), (200, 3, True)]),
        ([(3, 150)], [(0, 1, True), (100, 2, False), (150, 3, False), (200, 3, True)]),
        ([(4, 150)], [(0, 1, True), (100, 2, False), (200, 3, True)]),  # no log is so
        ([(4, 250)], [(0, 1, True), (100, 2, False), (200, 3, True), (250, 4, False)]),
    ],
)
def test_an_epoch_begins_where_its_first_append_was_walked(
    walked: list[tuple[int, int]], expected: list[tuple[int, int, bool]]
) -> None:
    epochs = Epochs((EpochRow(0, 1, True), EpochRow(100, 2, False), EpochRow(200, 3, True)), 3)
    found = epochs.note_walked(seal(epoch, position, 0) for epoch, position in walked)
    assert list(found.rows) == expected


def test_what_a_start_walks_of_one_epoch_is_compared_with_the_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    note = Epochs._note_walked

    def count(epochs: Epochs, position: int, epoch: int) -> Epochs:
        looks.append(position)
        return note(epochs, position, epoch)

    monkeypatch.setattr(Epochs, "_note_walked", count)
    epochs = Epochs((EpochRow(0, 1, True), EpochRow(100, 2, False)), 3)
    found = epochs.note_walked(seal(1 + (position >= 90), position, 0) for position in range(10, 200, 10))
    assert list(found.rows) == [(0, 1, True), (90, 2, False)]
    assert looks == [10, 90]


def test_every_opening_begins_an_epoch_that_its_seals_have() -> None:
    disk = SimDisk()
    starts = []
    for number in range(1, 4):
        store = open_store(disk)
        starts.append(store.epochs.rows[-1].start_position)
        end = store.append([make_request([b"x" * 100])])
        assert epoch_at_end(store._folder, end) == number
        store.close()
    assert epochs_of(disk) == [(starts[0], 1, True), (starts[1], 2, True), (starts[2], 3, True)]
    found = {
        item.seal.start_position: item.seal.epoch for item in dump("/s", disk=disk) if item.seal
    }
    assert sorted(set(found.values())) == [1, 2, 3]
    for position, epoch in found.items():
        assert epoch == 1 + sum(position >= start for start in starts[1:])
    assert verify("/s", disk=disk) == []


def test_an_epoch_is_durable_before_the_store_is_open() -> None:
    """A power cut right behind the opening: the next one does not give the same epoch again."""
    disk = SimDisk()
    open_store(disk).close()
    for _ in range(2):
        open_store(disk)
        disk = disk.crash(random.Random(1), keep=0.0)
    assert epochs_of(disk)[-1][1] == 3


def test_no_opening_leads_if_its_epoch_cannot_be_written() -> None:
    disk = SimDisk()
    open_store(disk).close()
    disk.plan = lambda operation: Fault.EIO if EPOCHS_NAME in operation.path else None
    with pytest.raises(OSError, match="Input/output"):
        open_store(disk)


def test_a_full_disk_leaves_the_store_in_its_epoch() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"x"])])
    store.close()
    disk.plan = lambda operation: Fault.ENOSPC if EPOCHS_NAME in operation.path else None
    store = open_store(disk)
    store.append([make_request([b"y"])])
    store.close()
    assert epochs_of(disk) == [(0, 1, True)]
    disk.plan = None
    open_store(disk).close()
    assert [row[1] for row in epochs_of(disk)] == [1, 2]


def test_a_leader_whose_log_was_cut_back_before_its_epoch_leads_when_there_is_room_for_a_new_one() -> None:
    """What is gone had its epoch: consumers and replicas may have it, and must be told."""
    disk = SimDisk()
    master, slave = open_store(SimDisk()), open_store(disk, follows=True)
    for _ in range(3):
        master.append([make_request([b"x"])])
    assert isinstance(master._disk, SimDisk)
    log = master._disk.content(f"/s/commitlog/{0:020d}")[: master.appended_position]
    slave.append_verbatim(0, log)
    assert slave.lead() == 2
    slave.append([make_request([b"y"])])
    disk = disk.crash(random.Random(1), keep=0.0)
    assert epochs_of(disk)[-1] == (len(log), 2, True)
    disk.plan = has_no_room_for_epochs
    with pytest.raises(OSError, match="No space"):
        open_store(disk)
    disk.plan = None
    again = open_store(disk)
    assert again.appended_position < len(log)
    assert again.last_epoch == 3


def has_no_room_for_epochs(operation: Operation) -> Fault | None:
    return Fault.ENOSPC if EPOCHS_NAME in operation.path else None


def test_a_store_that_has_led_opens_to_follow_on_a_full_disk_and_stores_nothing_before_it_has_written_that() -> None:
    disk = SimDisk()
    open_store(disk, follows=True).close()
    disk.plan = has_no_room_for_epochs
    open_store(disk, follows=True).close()
    disk.plan = None
    leader = open_store(disk)
    leader.append([make_request([b"x"])])
    leader.close()
    written = epochs_of(disk)
    disk.plan = has_no_room_for_epochs
    follower = open_store(disk, follows=True)
    assert follower.epochs.rows[-1][1:] == (1, False)
    # Else seals of its next leader would count as its own.
    with pytest.raises(DiskFullError, match="no room to store another log's bytes"):
        follower.append_verbatim(follower.appended_position, b"")
    assert epochs_of(disk) == written
    disk.plan = None
    follower.append_verbatim(follower.appended_position, b"")
    assert epochs_of(disk) == list(follower.epochs.rows)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_an_epoch_that_stands_in_the_file_is_the_one_that_is_led_though_the_disk_is_full(keep: float) -> None:
    """The file is replaced, and then the folder cannot be synced: what the file says and what the seals say must be one epoch."""
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"x"])])
    store.close()
    replaced: list[str] = []

    def fault_at(operation: Operation) -> Fault | None:
        if operation.name == "rename":
            replaced.append(operation.path)
        fails = operation.name == "fsync_dir" and replaced and EPOCHS_NAME in replaced[-1]
        return Fault.ENOSPC if fails else None

    disk.plan = fault_at
    store = open_store(disk)
    disk.plan = None
    store.append([make_request([b"y"])])
    store.flush()
    led = store.epochs.rows[-1]
    disk = disk.crash(random.Random(1), keep=keep)
    open_store(disk).close()
    assert (led.start_position, led.epoch) in [row[:2] for row in epochs_of(disk)]
    assert led.epoch == 2


def test_without_the_file_the_epochs_are_found_in_the_log_and_none_counts_as_led() -> None:
    disk = SimDisk()
    starts = []
    for _ in range(4):
        store = open_store(disk)
        starts.append(store.epochs.rows[-1].start_position)
        for _ in range(9):
            store.append([make_request([b"x" * 700])])
        store.close()
    disk.remove(PATH)
    open_store(disk).close()
    rows = epochs_of(disk)
    assert [row[1:] for row in rows] == [(1, False), (2, False), (3, False), (4, False), (5, True)]
    assert [row[0] for row in rows[:4]] == starts


def test_a_store_of_an_earlier_version_has_the_epoch_0_and_goes_on_with_1() -> None:
    log = Log()
    log.append(make_record(b"a" * 50))
    log.append(make_record(b"b" * 50))
    log.sync()
    tail = log.append(make_record(b"c"))
    disk = log.disk
    assert find_epochs(disk, log.folder, tail.position).rows == (EpochRow(0, 0, False),)
    store = open_store(disk, segment=log.folder.segment_size_bytes)
    store.append([make_request([b"d"])])
    store.close()
    assert epochs_of(disk) == [(0, 0, False), (tail.position, 1, True)]


@pytest.mark.parametrize("knows_epochs", [True, False])
def test_damage_of_the_last_seal_makes_up_no_epoch(knows_epochs: bool) -> None:
    """A slave with an epoch of its own invention would follow nobody ever again."""
    master = open_store(SimDisk())
    fill(master, 3)
    slave = open_store(SimDisk(), follows=True)
    follow(master, slave)
    slave.checkpoint()
    end, epoch = slave.appended_position, slave.epoch
    slave.close()
    if not knows_epochs:
        disk_of(slave).unlink(f"/s/{EPOCHS_NAME}")
    for at in range(end - SEAL_SIZE_BYTES, end):
        disk = disk_of(slave).killed()
        disk.flip_bit(f"/s/commitlog/{0:020}", 8 * at + at % 8)
        damaged = open_store(disk, follows=True, corruption="quarantine")
        assert damaged.damaged_ranges
        assert (damaged.epoch, damaged.epochs.highest_epoch) == (epoch, epoch), f"octet {at - end}"
        damaged.close()


def test_verify_tells_of_an_epoch_that_falls() -> None:
    log = Log()
    log.log.epoch = 4
    log.append(make_record(b"a"))
    log.log.epoch = 3
    tail = log.append(make_record(b"b"))
    store = open_store(log.disk.killed(), segment=log.folder.segment_size_bytes)
    store.close()
    start = tail.position - SEAL_SIZE_BYTES - len(make_record(b"b"))
    found = [(f.start_position, f.explanation) for f in verify("/s", disk=store._disk)]
    assert (start, "an append of epoch 3, behind one of epoch 4") in found
