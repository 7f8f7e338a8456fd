"""L2: every operation of the store x every input and output in it x every fault x several damages.

For one seed: a store is brought into a state that follows from the seed; then each operation is done again and again, with a
fault at its first I/O, its second, … until it finishes without having met the fault. What comes after the operation follows
from the seed too: the disk is well again or is not, more is sent or is not. Then crash images are taken: a kill, and power cuts
that leave different parts of what was not synced. Each is started, read to the end, written to, closed, and checked; and the
same recovery, interrupted at one of its own I/Os and started again, must end with the same bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_broker.store.errors import StoreError, WritesRefusedError
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import Fault, Operation, SimulatedCrash

from .checker import Violation, parse_log
from .store_world import ROOT, SEGMENT_SIZE_BYTES, TOPICS, StoreOpener, StoreWorld


class Plan(NamedTuple):
    """A fault, and whether it stays."""

    fault: Fault
    for_ever: bool

    def __str__(self) -> str:
        return f"{self.fault.value}{' for ever' if self.for_ever else ''}"


PLANS: Final = (
    Plan(Fault.CRASH, False),
    Plan(Fault.EIO, False),
    Plan(Fault.EIO, True),
    Plan(Fault.ENOSPC, False),
    Plan(Fault.ENOSPC, True),
    Plan(Fault.SHORT, False),
    Plan(Fault.SHORT, True),
    Plan(Fault.SYNC_LOST, False),
    Plan(Fault.SYNC_LOST, True),
)


def _reopen_after(kind: str) -> Callable[[StoreWorld], StoreWorld]:
    """The operation "start after a crash": its prefix is the crash."""

    def crash(world: StoreWorld) -> StoreWorld:
        world.send_some(2)
        return world.fork(kind, world.rng)

    return crash


def _same(world: StoreWorld) -> StoreWorld:
    return world


def _fill_segment(world: StoreWorld) -> StoreWorld:
    """The next send has to go on in another segment."""
    assert world.store is not None
    while SEGMENT_SIZE_BYTES - world.store.appended_position % SEGMENT_SIZE_BYTES > 900:
        world.send([world.new_order(size=300)])
    return world


def _has_news(world: StoreWorld) -> StoreWorld:
    """Something is there to be synced."""
    world.send_some(1)
    return world


def _has_long_queues(world: StoreWorld) -> StoreWorld:
    """Files of consume queues that are longer than a sector, so that what is written later does not write it again."""
    world.send([world.new_order(count=40, size=1)])
    world.send_some(2)
    return world


def _is_long(world: StoreWorld) -> StoreWorld:
    """Several segments, all synced."""
    assert world.store is not None
    while world.store.appended_position - world.store.min_position < 4 * SEGMENT_SIZE_BYTES:
        world.send([world.new_order(size=400, count=2)])
    world.flush()
    return world


def _is_uncertain(world: StoreWorld) -> StoreWorld:
    """Sends whose outcome nobody knows, behind a kill."""
    world.send_some(2)
    after = world.fork("kill", world.rng)
    after.open()
    after.senders[0].uncertain.append(after.new_order(sender=after.senders[0], count=2))
    return after


def _start(world: StoreWorld) -> None:
    """What is lost is settled by a scan before anything new takes its place."""
    world.open()
    world.scan()


def _empty(world: StoreWorld) -> StoreWorld:
    """A disk with nothing on it."""
    return StoreWorld(world.rng.getrandbits(32), sync_flush=world.sync_flush, opener=world.opener)


def _first_start(world: StoreWorld) -> None:
    """A new store, and what is acknowledged by it."""
    world.open()
    world.send_some(1)
    world.flush()


def _without_derived(world: StoreWorld) -> StoreWorld:
    """Nothing that comes from the log is there, or the tables do not hold: a start rebuilds it all."""
    world.send_some(2)
    world.checkpoint()
    after = world.fork("kill", world.rng)
    for name in ("config/consumerOffsets.json", "checkpoint"):
        if world.rng.random() < 0.5:
            after.disk.remove(f"{ROOT}/{name}")
    for name in ("consumequeue", "index", "repeatedsends"):
        if world.rng.random() < 0.5:
            after.disk.remove(f"{ROOT}/{name}")
        for path in after.disk.files(f"{ROOT}/{name}"):
            if path.endswith(".bin"):
                after.disk.flip_bit(path, 70)
    return after


class Step(NamedTuple):
    """An operation: how the world is prepared for it, and what is done."""

    prepare: Callable[[StoreWorld], StoreWorld]
    do: Callable[[StoreWorld], object]


STEPS: Final[dict[str, Step]] = {
    "append one": Step(_same, lambda w: w.send([w.new_order()])),
    "append a group": Step(_same, lambda w: w.send([w.new_order(count=c) for c in (1, 3, 1)])),
    "append many": Step(_same, lambda w: w.send([w.new_order(count=30, size=1)])),
    "append into the next segment": Step(_fill_segment, lambda w: w.send([w.new_order(size=800)])),
    "flush": Step(_has_news, StoreWorld.flush),
    "checkpoint": Step(_has_long_queues, StoreWorld.checkpoint),
    "housekeeping": Step(_fill_segment, StoreWorld.housekeeping),
    "delete segments": Step(_is_long, lambda w: w.delete_old(3)),
    "create a topic": Step(_same, StoreWorld.create_topic),
    "commit offsets": Step(_same, StoreWorld.commit_offsets),
    "repeat a send": Step(_is_uncertain, StoreWorld.retry_uncertain),
    "close": Step(_same, StoreWorld.close),
    "start after a kill": Step(_reopen_after("kill"), _start),
    "start after a power cut": Step(_reopen_after("power"), _start),
    "first start": Step(_empty, _first_start),
    "start without anything derived": Step(_without_derived, _start),
}


@dataclass(slots=True)
class LoopReport:
    """What a run of the loops did, and what is wrong."""

    images: int = 0
    faults: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, list[Violation]]] = field(default_factory=list)


def prepared_world(
    seed: int, step: Step, *, sync_flush: bool, opener: StoreOpener = Store.open
) -> StoreWorld:
    """The state from which the operation is tried: always the same for a seed."""
    world = StoreWorld(seed, sync_flush=sync_flush, opener=opener)
    store = world.open()
    store.topics.put(list(map(world.topic_config, TOPICS)))  # else starts append records of them
    store.flush()
    actions = (
        world.send_some, world.send_some, world.flush, world.checkpoint, world.housekeeping, world.commit_offsets, world.create_topic,
    )  # fmt: skip
    for _ in range(world.rng.randrange(2, 8)):
        world.rng.choice(actions)()
    return step.prepare(world)


def run_loops(
    seed: int,
    report: LoopReport,
    *,
    steps: dict[str, Step] | None = None,
    plans: tuple[Plan, ...] = PLANS,
    cuts: int = 2,
    opener: StoreOpener = Store.open,
    images_max: int = 1 << 60,
    only: str = "",
) -> None:
    """All operations and faults for one seed; failures are written into the report with the case that replays them."""
    sync_flush = bool(seed % 2)
    for name, step in (steps or STEPS).items():
        for plan in plans:
            number = 0
            while report.images < images_max:
                number += 1
                case = f"seed {seed}, {'sync' if sync_flush else 'async'} flush, {name}, I/O {number}, {plan}"
                if only and only != case:
                    if number > 40:
                        break
                    continue
                if not _try_case(seed, step, plan, number, case, report, sync_flush, cuts, opener):
                    break


def _try_case(
    seed: int,
    step: Step,
    plan: Plan,
    number: int,
    case: str,
    report: LoopReport,
    sync_flush: bool,
    cuts: int,
    opener: StoreOpener,
) -> bool:
    """One operation with one fault; False if the operation was over before the fault."""
    world = prepared_world(seed, step, sync_flush=sync_flush, opener=opener)
    disk = world.disk
    first = disk.operations + number
    met: list[Operation] = []

    def fault_at(operation: Operation) -> Fault | None:
        if operation.number == first or (plan.for_ever and operation.number > first):
            if plan.fault is not Fault.SYNC_LOST or operation.name in ("fsync", "fdatasync"):
                met.append(operation)
                return plan.fault
        return None

    disk.plan = fault_at
    rng = random.Random(f"{seed}/{number}/{plan}")
    try:
        step.do(world)
        if disk.operations < first:
            return False
        if not met:
            return True  # no sync there
        if rng.random() < 0.6:
            disk.plan = None
        _go_on(world, rng)
    except (SimulatedCrash, StoreError, OSError):
        pass
    report.faults += 1
    report.fired[f"{plan.fault.value} at {met[0].name}" if met else "none"] += 1
    disk.plan = None
    for image, kind in _images(world, rng, cuts):
        report.images += 1
        violations = verify_image(image, rng, kind)
        if violations:
            report.failures.append((f"{case}, {kind}", violations))
            return True
    return True


def _go_on(world: StoreWorld, rng: random.Random) -> None:
    """What else happens before the crash."""
    for _ in range(rng.randrange(4)):
        if world.store is None:
            return
        action = rng.choice(
            (
                world.checkpoint,
                world.checkpoint,
                world.send_some,
                world.flush,
                world.housekeeping,
                world.retry_uncertain,
            )
        )
        try:
            action()
        except (WritesRefusedError, OSError):
            pass


def _images(world: StoreWorld, rng: random.Random, cuts: int) -> Iterator[tuple[StoreWorld, str]]:
    """Crash images: what a process finds after a kill, and after power cuts that left all, nothing or something."""
    yield world.fork("kill", rng), "kill"
    if rng.random() < 0.3:
        second = _killed_then_cut(world, rng)
        if second is not None:
            yield second, "kill, start, flush, power cut that leaves 0.0"
    if rng.random() < 0.3:
        world.disk.write_back(rng)
    shares: list[float | None] = [0.0, None, None, 1.0]
    for share in shares[:cuts]:
        yield (
            world.fork("power", rng, keep=share),
            f"power cut that leaves {'some' if share is None else share}",
        )


def _killed_then_cut(world: StoreWorld, rng: random.Random) -> StoreWorld | None:
    """A process that goes on after a kill with the page cache of the one before, and a power cut: what it synced must be there."""
    second = world.fork("kill", rng)
    try:
        second.open()
        second.scan()
        second.flush()
        if rng.random() < 0.5:
            second.send_some(1)
            second.checkpoint()
    except (StoreError, OSError):
        return None  # the image "kill" will say so
    return second.fork("power", rng, keep=0.0)


def verify_image(image: StoreWorld, rng: random.Random, kind: str) -> list[Violation]:
    """Starts the image and checks all; sometimes the recovery is interrupted first, and must decide the same."""
    found: list[Violation] = []
    if rng.random() < 0.35:
        found = check_interrupted_recovery(image, rng, kind)
    return found or image.verify()


def check_interrupted_recovery(image: StoreWorld, rng: random.Random, kind: str) -> list[Violation]:
    """D4: the bytes of the log after a recovery are the same if that was killed at some I/O (or power was cut) and done again."""
    whole = image.fork("kill", rng)
    count = whole.disk.operations
    try:
        whole.open()
    except (StoreError, OSError) as error:
        return [Violation("D4", f"the start failed though nothing was damaged: {error!r}")]
    count = whole.disk.operations - count
    expected = whole.log_bytes()
    if not count:
        return []
    number = rng.randrange(1, count + 1)
    broken = image.fork("kill", rng)
    broken.disk.fail_at(number, Fault.CRASH)
    try:
        broken.open()
    except SimulatedCrash:
        pass
    except (StoreError, OSError) as error:
        return [Violation("D4", f"the start failed though nothing was damaged: {error!r}")]
    if kind != "kill":  # else what was not synced may still go
        kind = rng.choice(("kill", "power"))
    again = broken.fork(kind, rng)
    try:
        again.open()
    except (StoreError, OSError) as error:
        return [
            Violation("D4", f"after a recovery that ended at its I/O {number} by {kind}: {error!r}")
        ]
    assert whole.store is not None
    end = whole.store.epochs.rows[-1].start_position
    actual, expected = _recovered(again.log_bytes(), end), _recovered(expected, end)
    if actual != expected:
        return [
            Violation(
                "D4",
                f"a recovery that ended at its I/O {number} by {kind} and was done again left other bytes",
            )
        ]
    return []


def _recovered(segments: dict[str, bytes], end: int) -> dict[str, bytes]:
    """What a start has made of a log that ended at `end`. Behind that stand its own appends: their seals are left out, which have its epoch
    and the synced position of then; so is a segment that holds its head only."""
    kept = {path: bytearray(data) for path, data in segments.items() if any(data[SEAL_SIZE_BYTES:])}
    size_bytes = len(next(iter(segments.values()), b""))
    log = parse_log({path[len(ROOT) + 1 :]: data for path, data in segments.items()})
    for behind in log.seal_ends:
        at = behind - SEAL_SIZE_BYTES
        path = f"{ROOT}/commitlog/{at - at % size_bytes:020d}"
        if behind > end and path in kept:
            at %= size_bytes
            kept[path][at : at + SEAL_SIZE_BYTES] = bytes(SEAL_SIZE_BYTES)
    return {path: bytes(data) for path, data in kept.items()}
