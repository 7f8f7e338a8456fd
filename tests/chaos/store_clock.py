"""A wall clock that jumps back and forward: nothing is deleted before its time, store times and offsets stay in order."""

from __future__ import annotations

from .checker import Violation
from .store_world import SEGMENT_SIZE_BYTES, StoreWorld

DAY_MS = 86_400_000
JUMPS_MS = (-400 * DAY_MS, -DAY_MS, -1, 60_000, 10 * DAY_MS, 365 * DAY_MS)


def check_clock(seed: int) -> list[Violation]:
    """Housekeeping and sends while the clock is set to and fro; then a restart, which nobody has watched, and more of it."""
    world = StoreWorld(seed, sync_flush=bool(seed % 2))
    world.open()
    found: list[Violation] = []
    for _ in range(2):
        for _ in range(8):
            world.clock.wall_ms = max(world.clock.wall_ms + world.rng.choice(JUMPS_MS), DAY_MS)
            for _ in range(3):
                world.send([world.new_order(size=400)])
                world.clock.advance(11_000)  # retention looks every 10 s
                assert world.store is not None
                world.store._upkeep.keeper.turn()
            found += _check_order(world)
        world = world.fork("kill", world.rng)
        world.open()
        world.clock.advance(11_000)
    assert world.store is not None
    if world.store.min_position:
        found.append(
            Violation(
                "B1",
                f"segments below {world.store.min_position} went though less than an hour has passed",
            )
        )
    if world.store.appended_position < 3 * SEGMENT_SIZE_BYTES:
        found.append(Violation("B1", "too little was written to tell"))
    return found + world.verify()


def _check_order(world: StoreWorld) -> list[Violation]:
    """Looking up by time agrees with the store times."""
    assert world.store is not None
    world.flush()
    found = []
    for topic, queue in (("orders", 0), ("payments", 1)):
        start, end = world.store.queue_range(topic, queue)
        times = [world.store.store_time_of(topic, queue, offset) for offset in range(start, end)]
        if times != sorted(times):
            found.append(Violation("B5", f"store times of {topic}/{queue} are not in order"))
        for time_ms in {*times, 0, world.clock.wall_ms + DAY_MS}:
            expected = next(
                (start + index for index, value in enumerate(times) if value >= time_ms), end
            )
            actual = world.store.offset_at_time(topic, queue, time_ms)
            if actual != expected:
                found.append(
                    Violation(
                        "B5",
                        f"{topic}/{queue}: the first message of {time_ms} or later is {expected}, not {actual}",
                    )
                )
    return found
