"""Damaged files of the timer: they are rebuilt from the log while messages come, and nobody misses one, or gets one twice or early."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from protomq_broker.store.store import Store
from protomq_broker.store.timer import rebuild, timer_runs
from protomq_broker.store.timer.pending import PendingLimits
from protomq_broker.store.timer.timer_runs import TimerDamagedError
from protomq_broker.testing.simdisk import SimDisk
from tests.support.delay_world import SEGMENT, World, reason
from tests.unit.protomq_broker.store.store_helpers import open_store
from tests.unit.protomq_broker.store.test_following import log_of

SMALL = PendingLimits(near=8, fresh=3, far=5, runs_per_level=3)
TIMER = "/s/timer"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few rows, and a rebuild in many steps."""
    monkeypatch.setattr(timer_runs, "BLOCK_ROWS", 4)
    monkeypatch.setattr(rebuild, "SLICE_SIZE_BYTES", 3_000)
    monkeypatch.setattr(rebuild, "BLOCK_SIZE_BYTES", 1_024)
    monkeypatch.setattr(rebuild, "RECORDS_PER_SLICE", 2)


def started(seed: int = 1, count: int = 60) -> tuple[World, dict[bytes, int], dict[bytes, str]]:
    """A world whose timer has files; the due time of each message that is pending, and its handle."""
    rng = random.Random(seed)
    world = World().start()
    world.store.pending._limits = SMALL
    dues_ms: dict[bytes, int] = {}
    handles: dict[bytes, str] = {}
    for number in range(count):
        send(world, rng, b"%d" % number, dues_ms, handles)
    world.store.pending.flush()
    assert files(world), "the test needs files"
    return world, dues_ms, handles


def send(
    world: World, rng: random.Random, body: bytes, dues_ms: dict[bytes, int], handles: dict[bytes, str]
) -> None:
    delay_ms = rng.randrange(1_000, 100_000)
    handles[body] = world.send(body, delay_ms=delay_ms).recall_handle
    dues_ms[body] = world.log_time.now_ms() + delay_ms


def files(world: World) -> list[str]:
    return [path for path in world.disk.files(TIMER) if "/run." in path]


def damage(world: World) -> None:
    """In the rows of every block of every file."""
    for path in files(world):
        size_bytes = len(world.disk.content(path)) - 20
        blocks = -(-size_bytes // (4 * 24 + 20))
        for start in range(0, size_bytes - 20 * blocks, 4 * 24):
            world.disk.flip_bit(path, 8 * start + 77)


def deliver_until_damage(world: World, dues_ms: dict[bytes, int]) -> None:
    """Time passes until a damaged file is met."""
    while world.store.pending.count:
        try:
            deliver_due(world, dues_ms, 1_000)
        except TimerDamagedError:
            return
    pytest.fail("no damage was met")


def deliver_due(world: World, dues_ms: dict[bytes, int], after_ms: int) -> None:
    """Nothing comes early."""
    before = len(world.delivered())
    world.deliver(after_ms)
    for body in world.delivered()[before:]:
        assert dues_ms[body] <= world.log_time.now_ms()


def heal(world: World, between: Callable[[], None] = lambda: None) -> int:
    """To the end; how many steps it took."""
    steps = 0
    while not steps or world.store.pending.is_rebuilding:
        world.store._upkeep.heal(world.clock.monotonic_ms())
        steps += 1
        between()
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_made_anew_while_messages_come(seed: int) -> None:
    rng = random.Random(seed)
    world, dues_ms, handles = started(seed)
    for body in rng.sample(sorted(dues_ms), 10):
        assert world.recall(handles[body])
        del dues_ms[body]
    deliver_due(world, dues_ms, 10_000)
    damage(world)
    deliver_until_damage(world, dues_ms)
    numbers = iter(range(1_000, 2_000))
    pending = world.store.pending
    begun: list[int] = []

    def meanwhile() -> None:
        if not pending.is_rebuilding:
            return
        begun.append(pending.count)
        send(world, rng, b"%d" % next(numbers), dues_ms, handles)
        before = world.delivered()
        assert world.deliver(500) == before, "nothing falls due meanwhile"

    assert heal(world, meanwhile) > 3
    assert begun[0] < 60, "those that are gone are not counted while they come back"
    assert pending.count == len(dues_ms) - len(world.delivered())
    assert world.store.timer_rebuilt_count == 1
    left = set(dues_ms) - set(world.delivered())
    recalled = rng.sample(sorted(left), 3)
    for body in recalled:
        assert world.recall(handles[body])
    for _ in range(220):
        deliver_due(world, dues_ms, 1_000)
    assert sorted(world.delivered()) == sorted(set(dues_ms) - set(recalled))
    assert pending.count == pending.size_bytes == 0
    assert sorted(world.restart().deliver(200_000)) == sorted(set(dues_ms) - set(recalled))


def test_a_rebuild_that_misses_a_part_of_the_log_has_it_when_a_replica_has_given_it_back() -> None:
    world, dues_ms, _ = started()
    world.store.flush()
    log = log_of(world.disk, 0, world.store.appended_position, SEGMENT)
    pending = [int(position) for rows in world.store.pending.below(1 << 60) for position in rows["position"]]
    assert len(pending) == len(dues_ms)
    damage(world)
    world.disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (min(pending) + 30))
    deliver_until_damage(world, dues_ms)
    heal(world)
    (missing,) = world.store.damaged_ranges
    world.store.heal_log(missing, log[missing.start_position : missing.end_position])
    assert world.store.has_healed_skipped_parts
    world.restart()
    assert world.store.damaged_ranges == []
    assert sorted(world.deliver(200_000)) == sorted(dues_ms)


def test_a_recall_waits_for_the_rebuild_and_no_segment_goes() -> None:
    world, dues_ms, handles = started()
    for _ in range(60):
        world.send(bytes(5_000), topic="filler")
    world.store.checkpoint()
    damage(world)
    with pytest.raises(TimerDamagedError):
        world.store.pending.due(world.clock.time_ms + 200_000, 1_000)
    world.store._upkeep.heal(world.clock.monotonic_ms())
    assert world.store.pending.is_rebuilding
    (first, *_) = handles.values()
    assert reason(lambda: world.recall(first), definite=False)[0] == "QUEUE_HEALING"
    with pytest.raises(TimerDamagedError):
        world.store.delete_segments_below(world.store.appended_position)
    assert world.store.min_position == 0
    world.store.checkpoint()
    heal(world)
    assert world.recall(first)
    assert world.store.delete_segments_below(world.store.appended_position) >= SEGMENT
    del dues_ms[next(iter(handles))]
    assert sorted(world.deliver(200_000)) == sorted(dues_ms)


def test_damage_that_is_met_while_messages_are_carried_or_files_merged_is_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for meet in (
        lambda world: list(world.store.pending.below(1 << 40)),
        lambda world: world.store.pending.flush(),
    ):
        world, dues_ms, _ = started()
        damage(world)
        world.store.pending._limits = SMALL._replace(runs_per_level=1)
        with pytest.raises(TimerDamagedError):
            meet(world)
        world.store.pending._limits = SMALL
        heal(world)
        assert sorted(world.deliver(200_000)) == sorted(dues_ms)


def test_a_batch_that_was_taken_before_is_not_delivered_behind_the_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, dues_ms, _ = started()
    read_records = world.store.read_records
    met: list[str] = []

    def read_slowly(positions: object, sizes: object) -> object:
        found = read_records(positions, sizes)  # type: ignore[arg-type]
        if not met:
            met.append("")
            world.store.pending.met_damage = "somebody has met damage"
            heal(world)
        return found

    monkeypatch.setattr(world.store, "read_records", read_slowly)
    assert sorted(world.deliver(200_000)) == sorted(dues_ms)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_follower_does_not_bring_back_what_its_leader_ends_meanwhile(steps: int) -> None:
    """The record of the end comes before the message has been found again. Who leads next would deliver that message twice."""
    world, dues_ms, handles = started()
    disk = SimDisk()
    follower = open_store(disk, clock=world.clock, segment=SEGMENT, follows=True)
    follower.pending._limits = SMALL
    follow_world(world, follower)
    follower.pending.met_damage = "damage was met"
    for _ in range(steps):
        follower._upkeep.heal(world.clock.monotonic_ms())
    assert follower.pending.is_rebuilding
    deliver_due(world, dues_ms, 50_000)
    recalled = sorted(set(dues_ms) - set(world.delivered()))[0]
    assert world.recall(handles[recalled])
    follow_world(world, follower)
    while follower.pending.is_rebuilding:
        follower._upkeep.heal(world.clock.monotonic_ms())
    assert rows_of(follower) == rows_of(world.store)
    assert follower.pending.count == len(rows_of(follower))
    follower.close()
    world.store, world.disk = follower, disk
    world.start()
    assert sorted(world.deliver(200_000)) == sorted(set(dues_ms) - {recalled})


def follow_world(world: World, follower: Store) -> None:
    """The follower gets all that the world's store has and it has not."""
    start = follower.appended_position
    world.store.flush()
    follower.append_verbatim(start, log_of(world.disk, start, world.store.appended_position, SEGMENT))
    follower.positions.note_replicated(world.store.readable_position)


def rows_of(store: Store) -> list[tuple[int, ...]]:
    return sorted(row for part in store.pending.below(1 << 60) for row in part.tolist())


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
@pytest.mark.parametrize("power", [False, True])
def test_a_crash_in_the_middle_costs_nothing(steps: int, power: bool) -> None:
    world, dues_ms, _ = started()
    world.store.checkpoint()
    damage(world)
    deliver_until_damage(world, dues_ms)
    world.store.flush()
    for _ in range(steps):
        world.store._upkeep.heal(world.clock.monotonic_ms())
    disk = world.disk.crash(random.Random(steps)) if power else world.disk.killed()
    world.restart(disk)
    assert sorted(world.deliver(200_000)) == sorted(dues_ms)


def test_what_fails_is_tried_again_a_minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    world, dues_ms, _ = started()
    damage(world)
    deliver_until_damage(world, dues_ms)
    pending = world.store.pending

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pending, "_write_run", full)
        with pytest.raises(OSError, match="no space"):
            heal(world)
        world.store._upkeep.heal(world.clock.monotonic_ms())
        assert pending.met_damage
    world.clock.time_ms += rebuild.RETRY_INTERVAL_MS
    heal(world)
    assert not pending.met_damage
    assert sorted(world.deliver(200_000)) == sorted(dues_ms)


def test_a_log_that_has_lost_a_part_gives_back_the_rest() -> None:
    world, dues_ms, _ = started()
    world.store.checkpoint()
    damage(world)
    with pytest.raises(TimerDamagedError):
        world.store.pending.due(world.clock.time_ms + 200_000, 1_000)
    segment = next(path for path in world.disk.files("/s/commitlog"))
    world.disk.flip_bit(segment, 8 * 3_000)
    heal(world)
    assert len(world.store.damaged_ranges) == 1
    found = world.deliver(200_000)
    assert len(found) == len(set(found))
    assert len(dues_ms) - 3 <= len(found) < len(dues_ms)
    assert world.store.pending.count == world.store.pending.size_bytes == 0, "what is lost is not counted, as at a start"


def test_a_follower_that_has_lost_a_part_of_the_log_counts_what_it_has_found_again() -> None:
    """Its leader tells of the end of messages that it does not know of."""
    world, dues_ms, handles = started()
    disk = SimDisk()
    follower = open_store(disk, clock=world.clock, segment=SEGMENT, follows=True)
    follower.pending._limits = SMALL
    follow_world(world, follower)
    for body in sorted(handles)[:10]:
        assert world.recall(handles[body])
    follow_world(world, follower)
    in_first = [row for row in rows_of(follower) if row[1] < SEGMENT]
    for _, position, *_ in (in_first[0], in_first[-1]):
        disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (position + 30))
    follower.pending.met_damage = "damage was met"
    follower._upkeep.heal(world.clock.monotonic_ms())
    assert follower.pending.is_rebuilding
    assert follower.pending.count == world.store.pending.count, "until all are here, it counts what it knew of"
    deliver_due(world, dues_ms, 50_000)
    follow_world(world, follower)
    while follower.pending.is_rebuilding:
        follower._upkeep.heal(world.clock.monotonic_ms())
    assert len(follower.damaged_ranges) == 2
    follower.pending.due(world.clock.time_ms + 200_000, 1_000)
    assert follower.pending.count == len(rows_of(follower)) == len(rows_of(world.store)) - 1, "the other one has ended"
    deliver_due(world, dues_ms, 60_000)
    assert not world.store.pending.count
    follow_world(world, follower)
    follower.pending.due(world.clock.time_ms + 200_000, 1_000)
    assert rows_of(follower) == []
    assert follower.pending.count == follower.pending.size_bytes == 0


def test_a_timer_that_is_made_anew_counts_nothing_of_which_only_the_end_is_left() -> None:
    """The log has lost the message with its segment, and tells still that it was delivered."""
    world = World().start()
    world.send(b"gone" * 250, delay_ms=1_000)
    for _ in range(40):
        world.send(b"x" * 2_000)
    world.deliver(1_001)
    for _ in range(10):
        world.send(b"x" * 2_000)
    world.store.checkpoint()
    assert world.store.delete_segments_below(SEGMENT) == SEGMENT
    world.store.close()
    world.disk.remove(TIMER)
    world.start()
    assert world.store.pending.count == world.store.pending.size_bytes == 0
    world.send(b"later", delay_ms=10)
    assert world.deliver(11)[-1] == b"later"
