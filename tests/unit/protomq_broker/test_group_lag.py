"""How long ago the first message was stored that a group has not consumed, also where the log has lost it."""

from __future__ import annotations

import pytest

from protomq_broker.group_lag import lag_of
from protomq_broker.store.log.recovery import DamagedRange
from protomq_broker.store.state.popped_queue import QueueOfGroup
from protomq_broker.store.store import Store
from protomq_broker.store.tools.repair import repair
from protomq_broker.testing.simdisk import SimDisk
from tests.support.retry_world import ROOT, TOPIC, RetryWorld

COUNT = 8


def filled() -> tuple[RetryWorld, int]:
    """A message each second, each an append of its own; and when the first one was stored."""
    world = RetryWorld()
    first_ms = world.clock.time_ms
    for number in range(COUNT):
        world.send(b"%d" % number)
        world.clock.time_ms += 1000
    return world, first_ms


def spans(store: Store) -> list[tuple[int, int]]:
    """Where the messages of queue 0 stand."""
    regions = [store.read(TOPIC, 0, offset, 1, 1).regions[0] for offset in range(COUNT)]
    starts = [region.file.base_position + region.offset for region in regions]
    return [(start, start + region.size_bytes) for start, region in zip(starts, regions, strict=True)]


def delay_s(world: RetryWorld, committed: int, first_ms: int) -> float:
    """The delay from that second on in which the first message was stored."""
    lag = lag_of(world.store, QueueOfGroup("g", TOPIC, 0), 1, committed, first_ms)
    assert lag.lag == COUNT - committed
    lag = lag_of(world.store, QueueOfGroup("g", TOPIC, 0), 1, committed, world.clock.time_ms)
    return lag.delay_ms / 1000


def damage(world: RetryWorld, first: int, last: int) -> None:
    """These messages are found damaged."""
    places = spans(world.store)
    world.store._quarantine.add(DamagedRange(places[first][0], places[last][1], 0, "a flipped bit"))


def test_an_unreadable_message_is_as_old_as_the_next_one_that_can_be_read() -> None:
    world, first_ms = filled()
    assert delay_s(world, 2, first_ms) == COUNT - 2
    damage(world, 2, 3)
    assert delay_s(world, 2, first_ms) == delay_s(world, 3, first_ms) == COUNT - 4


@pytest.mark.parametrize("is_lost", [False, True])
def test_if_none_behind_it_can_be_read_it_is_as_old_as_the_one_before(is_lost: bool) -> None:
    world, first_ms = filled()
    damage(world, 5, COUNT - 1)
    assert delay_s(world, 6, first_ms) == COUNT - 4
    if is_lost:
        world.store._quarantine.add(DamagedRange(0, world.store.positions.appended, 0, "a flipped bit"))
        assert delay_s(world, 6, first_ms) == 0


def test_what_a_repair_has_taken_out_is_as_old_as_the_next_one() -> None:
    world, first_ms = filled()
    start, _ = spans(world.store)[2]
    world.store.close()
    disk: SimDisk = world.disk
    disk.flip_bit(f"{ROOT}/commitlog/{0:020d}", (start + 40) * 8)
    repair(ROOT, "/kept", disk=disk)
    world.start()
    assert delay_s(world, 2, first_ms) == COUNT - 3
    world.store.close()
    for path in disk.files(f"{ROOT}/consumequeue"):
        disk.remove(path)
    world.start()
    assert delay_s(world, 2, first_ms) == COUNT - 3
