"""What a slave does with its log when its master has another one, with stores on simulated disks and no network."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protomq.v1 import ha_service_pb2 as ha
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker import follow_pauses, ha_follower
from protomq_broker.config import BrokerConfig
from protomq_broker.confirmed_file import ConfirmedFile
from protomq_broker.fetch_answers import AnswerMemory
from protomq_broker.follower_writer import FollowerWriter
from protomq_broker.ha_follower import HaFollower, OtherPastError, SkippedPartsError, TruncatedError
from protomq_broker.ha_service import HaService
from protomq_broker.ha_session import FollowSession
from protomq_broker.log_time import LogTime
from protomq_broker.slave_gate import not_master
from protomq_broker.store.log.epochs import RESTORED_EPOCHS
from protomq_broker.store.start.truncation import TRUNCATION_NAME
from protomq_broker.store.store import Store
from protomq_broker.store.timer.log_time import UnreadAnswers
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.intake import LogPart
from protomq_ha.leadership_values import Follow
from protomq_ha.part_size import PartSize
from protomq_runtime.addresses import Address
from protomq_runtime.remoting_client import Answer, WokenError

from .store.log_helpers import ManualClock
from .store.store_helpers import SEGMENT, open_store, read_all
from .store.test_following import disk_of, fill, follow, log_of, pair

NOW_MS = ManualClock().time_ms
HOUR_MS = 3_600_000


class _Line:
    """A connection to a master that is asked where both logs agree."""

    address = Address("master", 1)

    def __init__(self, master: Store) -> None:
        config = BrokerConfig(broker_name="b", broker_role="ASYNC_MASTER")
        self._service = HaService(master, config, ManualClock(), "b", lambda: 7, lambda verdict: None)

    def call(self, method_id: int, payload: bytes, timeout_s: float, *, until_woken: bool) -> bytes:
        assert until_woken
        request = ha.CompareLogRequest.FromString(payload)
        return self._service.compare_log(request, None).SerializeToString()  # type: ignore[arg-type]


def follower_of(store: Store, *, leadership: Any = None, now_ms: int = NOW_MS) -> HaFollower:
    config = BrokerConfig(broker_name="b", broker_role="SLAVE", broker_id=1)
    confirmed_file = ConfirmedFile(disk_of(store), "/s")
    return HaFollower(
        store, config, "b", ManualClock(now_ms), FollowerWriter(), confirmed_file, lambda: None, leadership
    )


def truncated_to(master: Store, slave: Store, *, elected: Follow | None = None, now_ms: int = NOW_MS) -> int | None:
    """Where the slave's log ends after it has come to this master; None: nothing is dropped. `elected`: whom the election names."""
    follower = follower_of(slave, leadership=SimpleNamespace() if elected else None, now_ms=now_ms)
    follower._target = elected
    with pytest.raises((TruncatedError, OtherPastError)) as told:
        follower._truncate(_Line(master))  # type: ignore[arg-type]
    is_intended = disk_of(slave).exists(f"/s/{TRUNCATION_NAME}")
    assert is_intended is bool(slave.log_failure) is isinstance(told.value, TruncatedError)
    if not is_intended:
        return None
    slave.close()
    return open_store(disk_of(slave), follows=True).appended_position


def drops_its_log_for(master: Store, slave: Store, *, elected: Follow | None = None, now_ms: int = NOW_MS) -> bool:
    """Whether all of the slave's log goes when it comes to this master; else nothing does."""
    end = truncated_to(master, slave, elected=elected, now_ms=now_ms)
    assert not end, "not even the head of its first segment is left"
    return end == 0


def with_messages(count: int, first: int = 0) -> Store:
    """A master of its own past."""
    store = open_store(SimDisk())
    fill(store, count, first)
    return store


def elected_with_messages(count: int, first: int = 0, *, begun_ms: int = NOW_MS) -> Store:
    """A master that was elected to begin a log: its head says when."""
    store = open_store(SimDisk(), clock=ManualClock(begun_ms), follows=True)
    store.lead(1)
    fill(store, count, first)
    return store


def of_another_past(count: int, first: int = 100) -> Store:
    """The same, at another time."""
    return elected_with_messages(count, first, begun_ms=NOW_MS + 1)


def slave_of(master: Store, *, confirmed: bool = True) -> Store:
    slave = open_store(SimDisk(), follows=True)
    follow(master, slave, confirmed=confirmed)
    return slave


def without_its_front(master: Store) -> Store:
    """Retention has been there."""
    master.checkpoint()
    master.delete_segments_below(master.appended_position)
    assert master.min_position > 0
    return master


@pytest.mark.parametrize("starts", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_master_that_has_lost_its_log_makes_no_slave_drop_what_was_confirmed(count: int, starts: int) -> None:
    """Both logs begin with the same bytes, the head of the first segment."""
    slave = slave_of(with_messages(20))
    before = read_all(slave)
    master = with_messages(0)
    for _ in range(1, starts):
        master.close()
        master = open_store(disk_of(master))
    fill(master, count, 100)
    assert not drops_its_log_for(master, slave)
    assert read_all(slave) == before


def master_with_an_older_copy() -> tuple[Store, SimDisk]:
    """A master that has synced all that it has but the last message, and its folder as it was some time before."""
    master = with_messages(10)
    master.flush()
    older = disk_of(master).killed()
    fill(master, 10, 10)
    master.flush()
    fill(master, 1, 20)
    return master, older


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("starts", [0, 2])
def test_an_older_copy_of_the_masters_folder_makes_no_slave_drop_what_was_confirmed(count: int, starts: int) -> None:
    """No power cut takes back what was synced. Nobody but the slave has it."""
    master, older = master_with_an_older_copy()
    slave = slave_of(master)
    before = read_all(slave)
    for _ in range(starts):
        open_store(older).close()
    restored = open_store(older)
    fill(restored, count, 100)
    assert truncated_to(restored, slave) is None
    assert read_all(slave) == before


def test_an_older_copy_of_before_a_change_of_roles_makes_no_slave_drop_what_was_confirmed_since() -> None:
    """The slave has led for a while. What the master wrote after that, nobody else has."""
    master = with_messages(10)
    master.flush()
    slave = slave_of(master)
    slave.close()
    slave = open_store(disk_of(slave))
    fill(slave, 5, 10)
    slave.flush()
    older = disk_of(master).killed()
    master.close()
    master = open_store(disk_of(master), follows=True)
    follow(slave, master)
    master.close()
    master = open_store(disk_of(master))
    fill(master, 10, 15)
    master.flush()
    fill(master, 1, 25)
    slave.close()
    slave = open_store(disk_of(slave), follows=True)
    follow(master, slave)
    before = read_all(slave)
    assert truncated_to(open_store(older), slave) is None
    assert read_all(slave) == before


def test_what_a_power_cut_took_from_a_master_is_dropped() -> None:
    """It was written, as ASYNC_FLUSH has it, and not synced."""
    master, _ = master_with_an_older_copy()
    synced = master.flushed_position
    slave = slave_of(master)
    assert slave.positions.confirmed > synced
    after = open_store(disk_of(master).crash(random.Random(1), keep=0.0))
    fill(after, 5, 100)
    assert truncated_to(after, slave) == synced


def test_what_was_not_confirmed_is_dropped_for_an_older_copy() -> None:
    master, older = master_with_an_older_copy()
    assert truncated_to(open_store(older), slave_of(master, confirmed=False))


def test_a_restored_master_is_followed() -> None:
    """`protomq restore` was told to: its epochs begin far above those of the backup."""
    master, older = master_with_an_older_copy()
    slave = slave_of(master)
    restored = open_store(older, follows=True)
    shared = restored.appended_position
    restored.lead(restored.epochs.highest_epoch + RESTORED_EPOCHS)
    assert truncated_to(restored, slave) == shared


def test_a_second_restore_of_the_same_backup_is_not_followed_by_who_followed_the_first() -> None:
    """It has the epoch of the first one, and lacks what was confirmed since: it may as well be an older copy of that."""
    _, older = master_with_an_older_copy()
    first, second = (open_store(older.killed(), follows=True) for _ in range(2))
    for restored in (first, second):
        restored.lead(restored.epochs.highest_epoch + RESTORED_EPOCHS)
    fill(first, 3, 200)
    first.flush()
    fill(first, 1, 300)
    assert truncated_to(second, slave_of(first)) is None


def test_the_way_out_of_an_older_copy_is_to_change_the_roles() -> None:
    """The slave leads, and who was the master drops what it has taken meanwhile: only it was the leader of that."""
    master, older = master_with_an_older_copy()
    slave = slave_of(master)
    shared = open_store(older.killed(), follows=True).appended_position
    restored = open_store(older)
    fill(restored, 5, 100)
    restored.flush()
    restored.positions.note_replicated(restored.appended_position)
    assert truncated_to(restored, slave) is None
    slave.close()
    restored.close()
    assert truncated_to(open_store(disk_of(slave)), open_store(disk_of(restored), follows=True)) == shared


def test_what_was_never_confirmed_is_dropped_for_the_log_of_a_master() -> None:
    """As when roles have changed: what a master that had lost its log has stored alone before it follows."""
    assert drops_its_log_for(with_messages(20), slave_of(with_messages(5, 100), confirmed=False))


@pytest.mark.parametrize("count", [0, 1, 40])
def test_what_a_master_of_another_past_took_alone_is_not_dropped(count: int) -> None:
    """The store of an unrelated master, which never had a slave that could confirm anything."""
    other = with_messages(3, 100)
    other.close()
    slave = open_store(disk_of(other), follows=True)
    assert slave.positions.confirmed == 0
    end = slave.appended_position
    before = log_of(disk_of(slave), 0, end)
    assert not drops_its_log_for(with_messages(count), slave)
    assert log_of(disk_of(slave), 0, end) == before


def test_a_master_that_took_nothing_follows_any_other() -> None:
    """It was started with an empty folder before its role was changed."""
    empty = with_messages(0)
    empty.close()
    slave = open_store(disk_of(empty), follows=True)
    assert any(row.is_led for row in slave.epochs.rows)
    assert 0 < slave.appended_position <= SEAL_SIZE_BYTES
    end = truncated_to(with_messages(3), slave)
    assert end is not None, "it follows"


def that_has_led(old: Store) -> Store:
    """It was killed while it led, so it has not written down what was confirmed."""
    slave = slave_of(old, confirmed=False)
    slave.lead(2)
    fill(slave, 10, 20)
    slave.close()
    return open_store(disk_of(slave), follows=True)


def that_was_killed_soon(old: Store) -> Store:
    """It has written down only what it was told first: that the head of the log is confirmed."""
    slave = slave_of(old, confirmed=False)
    slave.positions.note_replicated(SEAL_SIZE_BYTES)
    return slave


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("make_slave", [that_has_led, that_was_killed_soon, slave_of])
@pytest.mark.parametrize("is_dated", [True, False])
def test_an_elected_master_of_another_past_is_followed_by_order_only(
    is_dated: bool, make_slave: Callable[[Store], Store], count: int
) -> None:
    """As where etcd has lost its data, and an empty member was elected."""
    slave = make_slave(elected_with_messages(20) if is_dated else with_messages(20))
    other = of_another_past if is_dated else with_messages
    before = slave.appended_position
    elected = Follow("m", "m:1", 9)
    for unclean_epoch in (0, slave.epoch):
        assert not drops_its_log_for(other(count, 100), slave, elected=elected._replace(unclean_epoch=unclean_epoch))
        assert slave.appended_position == before
    end = truncated_to(other(count, 100), slave, elected=elected._replace(unclean_epoch=slave.epoch + 1))
    assert end == (0 if is_dated or count else SEAL_SIZE_BYTES), "a head without a time is that of any log"


@pytest.mark.parametrize("hours", [0, 71, 73])
def test_an_elected_master_whose_front_is_gone_is_followed_if_nothing_here_would_be_kept(hours: int) -> None:
    """Nothing shows then whether both logs were one: etcd may have lost its data."""
    slave = slave_of(elected_with_messages(20))
    master = without_its_front(of_another_past(60, 1_000))
    assert slave.appended_position < master.min_position
    elected = Follow("m", "m:1", 9)
    assert drops_its_log_for(master, slave, elected=elected, now_ms=NOW_MS + hours * HOUR_MS) is (hours == 73)
    slave = slave_of(elected_with_messages(20))
    assert drops_its_log_for(master, slave, elected=elected._replace(unclean_epoch=slave.epoch + 1))


@pytest.mark.parametrize("epoch", [None, 9, 1])
def test_a_slave_behind_whose_end_the_master_has_deleted_all_is_given_an_empty_folder(epoch: int | None) -> None:
    """A full disk makes a master delete. To let this slave lead would lose what the master has."""
    slave = slave_of(elected_with_messages(20))
    master = without_its_front(of_another_past(60, 1_000))
    follower = follower_of(slave, leadership=SimpleNamespace() if epoch else None)
    follower._target = Follow("m", "m:1", epoch) if epoch else None
    with pytest.raises(OtherPastError) as told:
        follower._truncate(_Line(master))  # type: ignore[arg-type]
    # As where etcd was restored from a copy: it gives an epoch again that this log has from another master.
    is_etcd_older = epoch == slave.epoch
    assert ("unclean promotion" in str(told.value)) is is_etcd_older
    if not is_etcd_older:
        assert f"begins at position {master.min_position}, and this one ends at {slave.appended_position}" in str(told.value)
        assert "give this broker an empty folder" in str(told.value)


def test_a_young_cluster_loses_its_master_before_it_has_acknowledged_anything() -> None:
    """Its members share the head of the log, and nothing else. The master and one slave have a message that was not acknowledged."""
    master = elected_with_messages(0)
    slave, heir = slave_of(master), slave_of(master)
    assert slave.positions.confirmed == heir.appended_position == SEAL_SIZE_BYTES
    fill(master, 1)
    follow(master, slave, confirmed=False)
    heir.lead(2)
    fill(heir, 1, 50)
    master.close()
    for each in (slave, open_store(disk_of(master), follows=True)):
        assert truncated_to(heir, each, elected=Follow("m", "m:1", 2)) == SEAL_SIZE_BYTES


def longer_than_its_master(*, confirmed: bool) -> tuple[Store, Store, int]:
    """A master, a slave that has more of the same past, and what they share. Nothing more was confirmed, or all of it."""
    old = with_messages(20)
    slave = slave_of(old)
    heir = slave_of(old)
    shared = heir.appended_position
    fill(old, 5, 20)
    follow(old, slave, confirmed=confirmed)
    heir.lead(old.epoch + 1)
    fill(heir, 5, 100)
    return heir, slave, shared


def test_what_was_not_confirmed_is_dropped_for_an_elected_master() -> None:
    master, slave, shared = longer_than_its_master(confirmed=False)
    assert truncated_to(master, slave, elected=Follow("m", "m:1", master.epoch)) == shared
    slave = slave_of(with_messages(5, 200), confirmed=False)
    assert drops_its_log_for(master, slave, elected=Follow("m", "m:1", master.epoch))


def test_what_was_confirmed_is_dropped_for_an_elected_master_by_order_only() -> None:
    """As where etcd was restored from a copy: it names a set of an earlier time."""
    master, slave, shared = longer_than_its_master(confirmed=True)
    elected = Follow("m", "m:1", master.epoch)
    assert truncated_to(master, slave, elected=elected) is None
    assert truncated_to(master, slave, elected=elected._replace(unclean_epoch=master.epoch)) == shared


def damaged_at(slave: Store, *positions: int) -> Store:
    """As a start opens it after a bit was flipped near each of these positions."""
    slave.checkpoint()
    slave.close()
    disk = disk_of(slave)
    for position in positions:
        path = f"/s/commitlog/{position // SEGMENT * SEGMENT:020}"
        disk.flip_bit(path, (position % SEGMENT + 100) * 8)
    slave = open_store(disk, follows=True, corruption="quarantine")
    assert len(slave.skipped_ranges) == len(positions)
    return slave


def fork_of(master: Store, slave: Store) -> int | None:
    """Where this damaged log is to end, as it is told; None: it is not."""
    told: list[int] = []
    leadership = SimpleNamespace(on_fork=lambda point: told.append(point.position))
    follower = follower_of(slave, leadership=leadership)
    follower._target = Follow("m", "m:1", master.epoch)
    with pytest.raises((SkippedPartsError, OtherPastError)) as raised:
        follower._leave_fork(_Line(master))  # type: ignore[arg-type]
    assert not told or isinstance(raised.value, SkippedPartsError)
    return told[0] if told else None


def test_damage_in_what_the_master_never_had_goes_with_the_fork_and_what_is_left_is_healed() -> None:
    master, slave, shared = longer_than_its_master(confirmed=False)
    in_both = slave.min_position + 2_000
    slave = damaged_at(slave, in_both, shared + 50)
    assert fork_of(master, slave) == shared
    slave.truncate_to(slave.log_point(shared))  # type: ignore[arg-type]
    slave.close()
    left = open_store(disk_of(slave), follows=True, corruption="quarantine")
    assert left.appended_position == shared
    (damage,) = left.unhealed_ranges
    assert damage.start_position <= in_both + 100 < damage.end_position
    left.heal_log(damage, log_of(disk_of(master), damage.start_position, damage.end_position))
    left.close()
    whole = open_store(disk_of(left), follows=True)
    assert not whole.damaged_ranges
    follow(master, whole)
    end = master.appended_position
    assert log_of(disk_of(whole), 0, end) == log_of(disk_of(master), 0, end)


def test_damage_before_the_fork_is_healed_first() -> None:
    master, slave, shared = longer_than_its_master(confirmed=False)
    assert fork_of(master, damaged_at(slave, shared - 1_000)) is None


def test_a_damaged_log_that_the_master_has_is_not_truncated() -> None:
    master = with_messages(20)
    slave = slave_of(master)
    middle = slave.appended_position // 2
    assert fork_of(master, damaged_at(slave, middle)) is None


def test_a_damaged_fork_with_sound_parts_that_were_confirmed_stays() -> None:
    """As where etcd was restored from a copy."""
    master, slave, shared = longer_than_its_master(confirmed=True)
    confirmed = slave.positions.confirmed
    slave = damaged_at(slave, shared + 50)
    slave.positions.note_replicated(confirmed)
    assert fork_of(master, slave) is None


def test_what_was_confirmed_and_healed_is_sound() -> None:
    """The start has skipped it: it stays in quarantine until the next one."""
    master, slave, shared = longer_than_its_master(confirmed=True)
    end = slave.appended_position
    octets = log_of(disk_of(slave), 0, end)
    slave = damaged_at(slave, shared + 50)
    (damage,) = slave.unhealed_ranges
    slave.truncate_to(slave.log_point(damage.end_position))  # type: ignore[arg-type]
    slave.close()
    slave = open_store(disk_of(slave), follows=True, corruption="quarantine")
    slave.heal_log(damage, octets[damage.start_position : damage.end_position])
    assert slave.skipped_ranges
    assert not slave.unhealed_ranges
    slave.positions.note_replicated(slave.appended_position)
    assert truncated_to(master, slave, elected=Follow("m", "m:1", master.epoch)) is None


def damaged_at_its_end(slave: Store) -> Store:
    """Opened again, with a flipped bit in its last seal, but not in its CRC."""
    end = slave.appended_position
    slave.checkpoint()
    slave.close()
    disk = disk_of(slave)
    disk.flip_bit(f"/s/commitlog/{0:020}", (end - SEAL_SIZE_BYTES) * 8)
    slave = open_store(disk, follows=True, corruption="quarantine")
    assert slave.has_lost_its_end
    return slave


def test_damage_at_the_end_does_not_drop_what_was_confirmed_before_it() -> None:
    """As where etcd was restored from a copy. The end is no fork that was skipped, so the log counts as whole."""
    master, slave, shared = longer_than_its_master(confirmed=True)
    end = slave.appended_position
    slave = damaged_at_its_end(slave)
    assert not slave.skipped_ranges
    slave.positions.note_replicated(end)
    (damage,) = slave.damaged_ranges
    assert damage.start_position > shared
    elected = Follow("m", "m:1", master.epoch)
    assert truncated_to(master, slave, elected=elected) is None
    assert truncated_to(master, slave, elected=elected._replace(unclean_epoch=master.epoch)) == shared


def test_a_log_that_ends_with_damage_begins_again_before_it_even_if_the_crc_at_its_end_is_known() -> None:
    """The flipped bit is in the last seal, but not in its CRC: the master has that point."""
    master = with_messages(20)
    slave = slave_of(master)
    end = slave.appended_position
    slave = damaged_at_its_end(slave)
    assert slave.positions.tail.crc32c == master.positions.tail.crc32c
    follower = follower_of(slave)
    with pytest.raises(TruncatedError):
        follower._check_whole(_Line(master))  # type: ignore[arg-type]
    slave.close()
    assert open_store(disk_of(slave), follows=True).appended_position < end


def test_a_log_whose_damaged_end_was_healed_is_opened_again_before_it_goes_on() -> None:
    """The start knows no record of the healed part, so nothing may be stored behind it."""
    master = with_messages(20)
    slave = slave_of(master)
    end = slave.appended_position
    octets = log_of(disk_of(slave), 0, end)
    slave = damaged_at_its_end(slave)
    (damage,) = slave.damaged_ranges
    slave.heal_log(damage, octets[damage.start_position : damage.end_position])
    follower = follower_of(slave)
    with pytest.raises(TruncatedError):
        follower._check_whole(_Line(master))  # type: ignore[arg-type]
    slave.close()
    slave = open_store(disk_of(slave), follows=True, corruption="quarantine")
    assert not slave.damaged_ranges
    assert not slave.has_lost_its_end
    assert slave.appended_position == end
    follow(master, slave)
    assert read_all(slave) == read_all(master)


def test_a_master_of_an_epoch_that_this_log_has_from_another_one_is_followed_by_order_only() -> None:
    """Each epoch has one writer. So etcd was restored from a copy that did not know of the epoch, and gave it again."""
    old = elected_with_messages(5)
    heir = slave_of(old)
    slave = slave_of(old)
    for leads in (heir, slave):
        leads.lead(2)
        fill(leads, 3, 100 if leads is heir else 200)
    slave.close()
    slave = open_store(disk_of(slave), follows=True)
    assert slave.positions.confirmed < heir.appended_position
    assert truncated_to(heir, slave, elected=Follow("m", "m:1", 2)) is None
    shared = old.appended_position
    assert truncated_to(heir, slave, elected=Follow("m", "m:1", 3, unclean_epoch=3)) == shared


def test_what_an_earlier_master_wrote_alone_is_dropped_for_the_next_one() -> None:
    """As after each fail-over: nobody had acknowledged it."""
    old = elected_with_messages(5)
    heir, shared = slave_of(old), old.appended_position
    fill(old, 3, 200)
    old.close()
    heir.lead(2)
    assert truncated_to(heir, open_store(disk_of(old), follows=True), elected=Follow("m", "m:1", 2)) == shared


@pytest.mark.parametrize("hours", [0, 71, 73])
@pytest.mark.parametrize("is_of_one_past", [True, False])
def test_a_master_whose_log_begins_behind_the_slaves_is_followed_if_nothing_here_would_be_kept(is_of_one_past: bool, hours: int) -> None:
    """Nothing that both still have shows that both logs were one."""
    master = with_messages(10)
    slave = slave_of(master)
    if is_of_one_past:
        fill(master, 100, 10)
    else:
        master = with_messages(110, 300)
    without_its_front(master)
    assert slave.appended_position < master.min_position
    assert drops_its_log_for(master, slave, now_ms=NOW_MS + hours * HOUR_MS) is (hours == 73)


def test_who_has_led_drops_nothing_for_a_master_that_has_lost_its_front() -> None:
    """The store of another master became a slave by a mistake in its configuration."""
    other = with_messages(3, 100)
    other.close()
    slave = open_store(disk_of(other), follows=True)
    assert not drops_its_log_for(without_its_front(with_messages(110)), slave)


def test_what_was_never_confirmed_is_dropped_for_a_master_that_has_lost_its_front() -> None:
    assert drops_its_log_for(without_its_front(with_messages(110)), slave_of(with_messages(5, 100), confirmed=False))


@pytest.mark.parametrize("hours", [0, 73])
def test_a_master_whose_log_begins_where_the_slaves_ends_shows_no_common_past_either(hours: int) -> None:
    master, slave = pair()
    fill(master, 100)
    end = SEGMENT
    slave.append_verbatim(0, log_of(disk_of(master), 0, end))
    slave.positions.note_replicated(end)
    master.checkpoint()
    master.delete_segments_below(end)
    assert master.min_position == slave.appended_position == slave.positions.confirmed == end
    assert drops_its_log_for(master, slave, now_ms=NOW_MS + hours * HOUR_MS) is (hours == 73)


def test_a_master_of_another_past_whose_log_begins_within_what_was_confirmed_is_not_followed() -> None:
    slave = slave_of(with_messages(200))
    master = without_its_front(with_messages(100, 300))
    assert master.min_position < slave.positions.confirmed
    assert not drops_its_log_for(master, slave)


@pytest.mark.parametrize("elected", [None, Follow("m", "m:1", 2)])
def test_a_log_of_which_nothing_holds_keeps_no_slave_from_its_master(elected: Follow | None) -> None:
    master = with_messages(10)
    slave = slave_of(master)
    slave.close()
    disk = disk_of(slave)
    disk.unlink("/s/commitlog/" + "0" * 20)
    slave = open_store(disk, follows=True, corruption="quarantine")
    slave.positions.note_replicated(slave.appended_position)
    assert slave.positions.confirmed > 0
    assert drops_its_log_for(master, slave, elected=elected)


def test_what_was_confirmed_first_is_written_down_at_once() -> None:
    """First the head of the log is, then what comes next; more of it now and then."""
    master = with_messages(0)
    slave = open_store(SimDisk(), follows=True)
    follower = follower_of(slave)
    session: Any = SimpleNamespace(end_position=0)
    written = ConfirmedFile(disk_of(slave), "/s")
    follower._note(session)
    assert written.read() == 0
    first = 0
    for count, is_written in ((0, True), (1, True), (5, False)):
        fill(master, count, first)
        first += count
        follow(master, slave)
        follower._note(session)
        assert (written.read() == master.appended_position) is is_written


def test_a_slave_takes_the_log_time_that_its_master_says() -> None:
    slave = slave_of(with_messages(1))
    follower, session = follower_of(slave), FollowSession(slave, lambda function: function())
    follower._log_time = LogTime(ManualClock(NOW_MS), 0)
    for log_time_ms, now_ms in ((0, NOW_MS), (NOW_MS - HOUR_MS, NOW_MS - HOUR_MS), (0, NOW_MS - HOUR_MS)):
        session.log_time_ms = log_time_ms
        follower._note(session)
        assert follower._log_time.now_ms() == now_ms
    # A master that has lost power has set its log time back. What it said before counts no more.
    session = FollowSession(slave, lambda function: function())
    for late_ms in (50, 20, 70):
        session.log_time_ms = NOW_MS - 2 * HOUR_MS - late_ms
        follower._note(session)
        assert follower._log_time.now_ms() == NOW_MS - 2 * HOUR_MS - (50 if late_ms == 50 else 20)


def test_a_slave_whose_disk_has_no_room_to_note_where_its_log_ends_keeps_it_and_says_so() -> None:
    """It looks again now and then. Meanwhile it stores nothing, and shows nothing that was not confirmed."""
    master, slave, shared = longer_than_its_master(confirmed=False)
    disk, end, readable = disk_of(slave), slave.appended_position, slave.readable_position
    follower = follower_of(slave)
    room, disk.capacity_bytes = disk.capacity_bytes, 1
    for _ in range(2):
        with pytest.raises(OSError, match=f"the log has to end at {shared}.* cannot be written down: No space left") as told:
            follower._truncate(_Line(master))  # type: ignore[arg-type]
        assert told.value.errno == errno.ENOSPC
        assert not slave.log_failure
        assert not disk.exists(f"/s/{TRUNCATION_NAME}")
        assert (slave.appended_position, slave.readable_position) == (end, readable)
    disk.capacity_bytes = room
    assert truncated_to(master, slave) == shared


class _SilentMaster:
    """A connection to a master that answers nothing until the slave is woken. Attribute: is_asked, set with the first question."""

    address = Address("master", 1)

    def __init__(self, *, answers_hello: bool = True) -> None:
        self.is_asked, self._is_woken = threading.Event(), threading.Event()
        self._answers_hello = answers_hello

    def connect(self, *_: Any, on_connecting: Callable[[Any], None] = lambda line: None, **options: Any) -> _SilentMaster:
        on_connecting(self)
        if not self._answers_hello:
            self.ask(0, b"", 0, until_woken=True)
        return self

    def __enter__(self) -> _SilentMaster:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wake(self) -> None:
        self._is_woken.set()

    def ask(self, method_id: int, payload: bytes, timeout_s: float, *, until_woken: bool = False) -> Answer:
        self.is_asked.set()
        is_over = self._is_woken.wait(10) and until_woken
        raise WokenError("woken") if is_over else TimeoutError("it was waited for all the same")

    def call(self, method_id: int, payload: bytes, timeout_s: float, *, until_woken: bool = False) -> bytes:
        return self.ask(method_id, payload, timeout_s, until_woken=until_woken).unwrap()


@pytest.mark.parametrize("asks", ["to be connected", "where it is to begin", "where both logs agree"])
def test_a_slave_that_is_to_stop_waits_for_no_answer_of_its_master(monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    """Whoever runs for the lead waits for that."""
    line = _SilentMaster(answers_hello=asks != "to be connected")
    monkeypatch.setattr(ha_follower, "RemotingClient", line.connect)
    target = Follow("m", "m:1", 2)
    leadership = SimpleNamespace(target=target, may_speak=lambda asked: True, is_damaged=False)
    follower = follower_of(slave_of(with_messages(5)), leadership=leadership)
    if asks == "where both logs agree":
        monkeypatch.setattr(follower, "_follow_once", lambda: _compare_only(follower, line))
    said: list[BaseException] = []
    monkeypatch.setattr(follower, "_complain", said.append)
    follower.start("here:1")
    assert line.is_asked.wait(60)
    assert follower.stop()
    assert [type(each) for each in said] == [WokenError]


@pytest.mark.parametrize("is_elected", [True, False])
def test_a_former_master_that_refuses_a_slave_is_no_advice_to_ask_the_master_where_it_is_elected(is_elected: bool) -> None:
    follower = follower_of(slave_of(with_messages(5)), leadership=SimpleNamespace() if is_elected else None)
    follower.view = follower.view._replace(address="former:1")
    follower._complain(not_master("b", 2))
    assert ("ask the master" not in follower.view.problem) is is_elected
    assert ("the broker at former:1 does not lead b" in follower.view.problem) is is_elected


class _SlowLine:
    """A connection on which a piece of an answer comes with each wait, `pieces` times. Attribute: told, what the master was told."""

    address = Address("master", 1)

    def __init__(self, pieces: int) -> None:
        self.received_count = self.waits = self.started = 0
        self.pieces = pieces
        self.told: list[ha.AcknowledgeRequest] = []

    def start(self, method_id: int, payload: bytes, timeout_s: float) -> int:
        self.started += 1
        return self.started

    def wait(self, request_ids: set[int], timeout_s: float) -> Answer | None:
        self.waits += 1
        self.received_count = min(self.waits, self.pieces)
        return None

    def tell(self, method_id: int, payload: bytes, timeout_s: float) -> None:
        self.told.append(ha.AcknowledgeRequest.FromString(payload))


@pytest.mark.parametrize("is_elected", [False, True])
@pytest.mark.parametrize("pieces", [0, 1, 500])
def test_a_master_is_silent_when_nothing_comes_and_hears_of_the_slave_while_something_does(pieces: int, is_elected: bool) -> None:
    """However long a part of the log takes. Long before the session would end: a new connection may be well."""
    master = with_messages(5)
    slave = slave_of(master)
    leadership = SimpleNamespace(target=None, may_speak=lambda asked: True, heard=lambda *said, **more: None)
    follower, line = follower_of(slave, leadership=leadership if is_elected else None), _SlowLine(pieces)
    if is_elected:
        follower._target = Follow("m", "m:1", 2)
        follower._config = replace(follower._config, ha=replace(follower._config.ha, heartbeat_interval_ms=500))
    session = FollowSession(slave, lambda function: function())
    end = slave.appended_position
    begins = ha.FetchResponse(status=ha.FETCH_STATUS_OK, session=7, position=end, segment_size_bytes=slave.config.segment_size_bytes)
    assert session.began(begins, LogPart(memoryview(b"")))
    with pytest.raises(TimeoutError, match="is silent"):
        follower._fetch(line, session, AnswerMemory(), PartSize(1 << 20), UnreadAnswers(NOW_MS))  # type: ignore[arg-type]
    assert [(each.session, each.written_position) for each in line.told] == [(7, end)] * pieces
    silence_s = (line.waits - pieces) * ha_follower.SIGN_INTERVAL_S
    assert silence_s == (3 if is_elected else 10)


class _StoppedClock(ManualClock):
    """That of a machine that may sleep: only its monotonic clock stands still then."""

    slept_ms = 0

    def monotonic_ms(self) -> int:
        return self.time_ms - self.slept_ms


class _StoppedLine:
    """A connection to a master that answers each fetch after a second. It ends behind the answers that are there behind a stop.

    The slave has two fetches under way when it is stopped, which may be while it waits, or while it stores an answer.
    """

    address = Address("master", 1)
    received_count = 0

    def __init__(self, clock: _StoppedClock, stop_ms: int, *, sleeps: bool, late_answers: int, behind_ms: int = 0) -> None:
        """`late_answers`: how many of the two come after all. `behind_ms`: the master's log time goes back by so much meanwhile."""
        self.clock, self.stop_ms, self.sleeps, self.late_answers, self.behind_ms = clock, stop_ms, sleeps, late_answers, behind_ms
        self.asked: dict[int, int] = {}
        self.answered = self.behind = 0

    def start(self, method_id: int, payload: bytes, timeout_s: float) -> int:
        request_id = len(self.asked) + 1
        self.asked[request_id] = self.clock.time_ms
        return request_id

    def stop(self) -> None:
        self.clock.time_ms += self.stop_ms
        if self.sleeps:
            self.clock.slept_ms += self.stop_ms

    def wait(self, request_ids: set[int], timeout_s: float) -> Answer | None:
        request_id = min(request_ids)
        if self.answered == 20:
            if not self.behind:
                self.stop()
            if self.behind == self.late_answers:
                raise ConnectionResetError
            self.behind += 1
        else:
            self.answered += 1
            self.clock.time_ms += 500
        # Both that were under way when it was stopped were answered soon after that.
        is_old = self.answered == 20 and self.behind and self.behind <= ha_follower.FETCHES
        said_ms = self.clock.time_ms - (self.stop_ms if is_old else self.behind_ms if self.behind else 0)
        answer = ha.FetchResponse(status=ha.FETCH_STATUS_OK, session=7, log_time_ms=said_ms)
        return Answer(request_id, 0, answer.SerializeToString())


def log_time_behind_a_stop(stop_ms: int, *, sleeps: bool, late_answers: int, behind_ms: int = 0) -> int:
    """How far the log time of a slave is ahead of the right one behind a stop, and its master's death."""
    slave = slave_of(with_messages(1))
    follower, session, clock = follower_of(slave), FollowSession(slave, lambda function: function()), _StoppedClock(NOW_MS)
    follower._clock = clock
    # Its wall clock is an hour behind: log time would follow that, if it were not for the master.
    own = SimpleNamespace(now_ms=lambda: clock.time_ms - HOUR_MS, monotonic_ms=clock.monotonic_ms)
    log_time = follower._log_time = LogTime(own, 0, None, clock.now_ms)
    end = slave.appended_position
    begins = ha.FetchResponse(
        status=ha.FETCH_STATUS_OK, session=7, position=end, segment_size_bytes=slave.config.segment_size_bytes, log_time_ms=NOW_MS,
    )  # fmt: skip
    assert session.began(begins, LogPart(memoryview(b"")))
    line = _StoppedLine(clock, stop_ms, sleeps=sleeps, late_answers=late_answers, behind_ms=behind_ms)
    with pytest.raises(ConnectionResetError):
        follower._fetch(line, session, AnswerMemory(), PartSize(1 << 20), UnreadAnswers(NOW_MS))  # type: ignore[arg-type]
    return log_time.now_ms() - clock.time_ms


@pytest.mark.parametrize("late_answers", [1, 2])
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("stop_ms", [3_000, 12_000, HOUR_MS])
def test_a_slave_that_stood_still_goes_on_with_the_log_time_it_knew_and_not_with_an_answer_that_lay_unread(
    stop_ms: int, sleeps: bool, late_answers: int
) -> None:
    """Its master dies meanwhile, and it leads: what is due must not be late by as much as it was stopped."""
    assert log_time_behind_a_stop(stop_ms, sleeps=sleeps, late_answers=late_answers) == 0


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_slave_that_stood_still_does_go_by_what_its_master_says_behind_that(sleeps: bool) -> None:
    behind_ms = 30_000
    assert log_time_behind_a_stop(HOUR_MS, sleeps=sleeps, late_answers=3, behind_ms=behind_ms) == -behind_ms


@pytest.mark.parametrize("stop_ms", [12_000, HOUR_MS])
def test_what_a_master_says_first_in_a_session_may_have_lain_unread_too(stop_ms: int) -> None:
    slave = slave_of(with_messages(1))
    follower, clock = follower_of(slave), ManualClock(NOW_MS)
    follower._log_time = LogTime(clock, 0)
    for _ in range(2):
        session = FollowSession(slave, lambda function: function())
        for unread_ms, behind_ms in ((0, 0), (stop_ms, 0), (0, HOUR_MS)):
            clock.time_ms += stop_ms
            session.log_time_ms = clock.time_ms - unread_ms - behind_ms
            follower._note(session, unread_ms)
            assert follower._log_time.now_ms() == clock.time_ms - behind_ms
        # This one knows that the master has set its log time back, however long its answer has lain there.
        session = FollowSession(slave, lambda function: function())
        session.log_time_ms = clock.time_ms - 20 * HOUR_MS
        follower._note(session, stop_ms)
        assert follower._log_time.now_ms() == clock.time_ms - 20 * HOUR_MS


@pytest.mark.parametrize("lasts_ms", [0, 5_000])
def test_a_session_that_ends_as_soon_as_it_has_begun_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch, lasts_ms: int) -> None:
    """As where two stores follow with one id: each session ends the other's."""
    follower = follower_of(slave_of(with_messages(5)))
    done: list[str] = []

    def follow_once() -> None:
        done.append("session")
        follower._clock.time_ms += lasts_ms  # type: ignore[attr-defined]
        if len(done) >= 4:
            follower._stopping.set()

    def pause(pause_s: float) -> None:
        done.append("pause")

    monkeypatch.setattr(follower, "_follow_once", follow_once)
    monkeypatch.setattr(follower, "_hurrying", SimpleNamespace(wait=pause, clear=lambda: None))
    follower._run()
    assert done[:4] == (["session"] * 4 if lasts_ms else ["session", "pause"] * 2)


def test_a_master_that_does_not_answer_is_asked_less_and_less_often_until_it_does_or_another_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody may lead for hours. A new master is there within some hundredths of a second, and its sends wait for its slaves."""
    follower = follower_of(slave_of(with_messages(5)), leadership=SimpleNamespace(target=Follow("m", "m:1", 2)))
    pauses: list[float] = []

    def follow_once() -> None:
        if len(pauses) == 10:
            follower.view = follower.view._replace(heard_ms=1)
        raise ConnectionRefusedError

    def is_woken_in(pause_s: float) -> bool:
        pauses.append(pause_s)
        if len(pauses) == 16:
            follower._stopping.set()
        return len(pauses) == 13

    monkeypatch.setattr(follower, "_follow_once", follow_once)
    monkeypatch.setattr(follower, "_hurrying", SimpleNamespace(wait=is_woken_in, clear=lambda: None))
    follower._run()
    first, last = follow_pauses.ELECTED_PAUSE_S, follow_pauses.ELECTED_PAUSE_MAX_S
    assert last <= 0.25
    rising = [first, 2 * first, 4 * first, 8 * first]
    assert pauses == [*rising, *[last] * 6, *rising[:3], *rising[:3]]


def test_a_slave_without_a_master_begins_as_soon_as_one_is_elected(monkeypatch: pytest.MonkeyPatch) -> None:
    line = _SilentMaster()
    monkeypatch.setattr(ha_follower, "RemotingClient", line.connect)
    monkeypatch.setattr(follow_pauses, "ELECTED_PAUSE_S", 600)
    leadership = SimpleNamespace(target=None, may_speak=lambda asked: True, is_damaged=False)
    follower = follower_of(slave_of(with_messages(5)), leadership=leadership)
    has_complained = threading.Event()
    monkeypatch.setattr(follower, "_complain", lambda error: has_complained.set())
    follower.start("here:1")
    assert has_complained.wait(60)
    leadership.target = Follow("m", "m:1", 2)
    follower.go_on()
    assert line.is_asked.wait(60)
    assert follower.stop()


def _compare_only(follower: HaFollower, line: Any) -> None:
    follower._client = line
    follower._target = Follow("m", "m:1", 2)
    follower._truncate(line)
