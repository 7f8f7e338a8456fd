"""L2: damage that nobody noticed when it was made (D8): flipped bits, zeroed, truncated, rolled-back, swapped and missing files.

For one seed a store is filled, stopped (cleanly, by a kill or by a power cut), damaged in one place, and started:

    the log, below what is known to be synced
        The start is refused; or, where recovery did not have to read that place, whoever reads it is told. With `corruption:
        quarantine` it starts, serves nothing wrong and all the rest, takes messages, and starts again. `repair` makes a log of it
        that starts without asking.
    the log, in the tail that may be un-synced
        It is cut, and only a suffix is missing.
    anything derived
        Nothing wrong is served, and the files are as the log says after a start and a stop. Readers that are told of a consume
        queue are told only until it is healed.
    whole segments: their end zeroed, two of them swapped, one overwritten
        The start is refused, or readers are told; nothing is cut that a checkpoint knows of. In quarantine no queue ends early without a
        word, and no offset is given again.
    the log of a store that is open
        Whoever reads there is told at once.
    consume queues of a store that is open
        They heal: everything is served again as before, without a start, and the files are what they were.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from protomq.v1.record_pb2 import Record
from protomq.wire.hashing import key_hash_of
from protomq.wire.topics import OFFSETS_TOPIC, SYSTEM_PREFIX, TOPICS_TOPIC
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.tools.repair import repair
from protomq_broker.store.tools.verify import verify
from protomq_broker.testing.simdisk import SimDisk

from .checker import LogReport, Violation, check_history, check_store_files, parse_log
from .checker.log_files import SEAL_FIELD_SIZE
from .store_world import ROOT, SEGMENT_SIZE_BYTES, StoreWorld, last_scan

Baseline = dict[tuple[str, int, int], tuple[str, int]]
KINDS: Final = ("flip", "zero", "truncate", "roll back", "swap", "remove")


class Damage(NamedTuple):
    """What was done: the kind, the file, the range of it that changed."""

    kind: str
    path: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.kind} {self.path} [{self.start}, {self.end})"


@dataclass(slots=True)
class DamageReport:
    """What a run did."""

    images: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, list[Violation]]] = field(default_factory=list)


def stopped_world(seed: int) -> tuple[StoreWorld, dict[str, bytes], str]:
    """(a store that was stopped, its files as they were some time before, how it was stopped)."""
    world = StoreWorld(seed, sync_flush=bool(seed % 2))
    world.open()
    rng = world.rng
    target = rng.choice((1, 2, 4)) * SEGMENT_SIZE_BYTES
    before: dict[str, bytes] = {}
    actions = (
        world.send_some,
        world.send_some,
        world.flush,
        world.checkpoint,
        world.housekeeping,
        world.commit_offsets,
    )
    assert world.store is not None
    while world.store.appended_position < target:
        rng.choice(actions)()
        if not before and world.store.appended_position > target // 2:
            before = world.disk.files(ROOT)
    if rng.random() < 0.4:
        world.send([world.new_order(count=30, size=1)])
    how = rng.choice(("close", "kill", "power"))
    if how == "close":
        world.flush()
        world.close()
        return world, before, how
    if rng.random() < 0.7:
        world.flush()
    after = world.fork(how, rng)
    if how == "power":  # settle what is lost before anything is damaged
        after.open()
        after.scan()
        after = after.fork("kill", rng)
    return after, before, how


def run_damage(seed: int, report: DamageReport, *, tries: int = 6, only: int | None = None) -> None:
    """Several kinds of damage to one stopped store."""
    world, before, how = stopped_world(seed)
    files = world.disk.files(ROOT)
    log = parse_log({path[len(ROOT) + 1 :]: data for path, data in files.items()})
    rng = random.Random(f"damage {seed}")
    whole = world.fork("kill", rng)
    whole.open()
    whole.scan()
    baseline = _places(whole)
    for number in range(tries):
        rng = random.Random(f"damage {seed} {number}")
        image = world.fork("kill", rng)
        damage = _damage(image.disk, files, before, log, rng)
        if (
            damage is None
            or image.disk.files(ROOT) == files
            or (only is not None and only != number)
        ):
            continue
        report.images += 1
        case = f"seed {seed}, try {number}, {'sync' if world.sync_flush else 'async'} flush, after {how}: {damage}"
        if "/commitlog/" in damage.path:
            found = _check_log_damage(image, damage, log, files, baseline, rng, report)
        else:
            found = _check_derived_damage(image, damage, baseline, report)
        if found:
            report.failures.append((case, found))
    if only is None:
        for name, check in (
            ("segments are harmed", harm_segments),
            ("the log is damaged while it is open", damage_log_while_open),
            ("damaged while it is open", damage_while_open),
        ):
            found = check(world, seed, report)
            if found:
                report.failures.append((f"seed {seed}, {name}, after {how}", found))


SEGMENT_HARMS: Final = ("zero the end", "swap", "overwrite", "overwrite the last")


def harm_segments(world: StoreWorld, seed: int, report: DamageReport) -> list[Violation]:
    """What befalls whole segments, between two runs."""
    rng = random.Random(f"segments {seed}")
    files = world.disk.files(ROOT)
    log = parse_log({path[len(ROOT) + 1 :]: data for path, data in files.items()})
    whole = world.fork("kill", rng)
    whole.open()
    whole.scan()
    baseline = _places(whole)
    found: list[Violation] = []
    for harm in SEGMENT_HARMS:
        image = world.fork("kill", rng)
        if not _harm_segment(image.disk, files, log, harm, rng):
            continue
        report.images += 1
        # Messages that nothing but the log knows of go with it; but for these no queue ends early without a word.
        proved = int.from_bytes(files.get(f"{ROOT}/checkpoint", b"")[16:24], "little")
        told = {
            place
            for place, (_, position) in baseline.items()
            if position < proved or place[2] < _entries_in_files(files, place)
        }
        image.promise = replace(image.promise, holes=True)
        refusing = image.fork("kill", rng)
        try:
            refusing.open()
        except CorruptLogError:
            report.outcomes["segments: start refused"] += 1
            if refusing.log_bytes() != image.log_bytes():
                found.append(Violation("D8", f"({harm}) a start that was refused changed the log"))
        else:
            report.outcomes["segments: readers are told"] += 1
            if f"{ROOT}/abort" not in files and _has_cut(image.log_bytes(), refusing.log_bytes()):
                found.append(Violation("D8", f"({harm}) a start cut what was no torn tail"))
            found += _check_told(refusing, baseline, told, harm)
        image.config = replace(image.config, corruption="quarantine")
        image.open()
        found += _check_told(image, baseline, told, f"{harm}, quarantine")
        image.send_some(3)
        image.flush()
        known = _places_then(image)
        found += _check_told(image, {p: baseline[p] for p in told}, told, f"{harm}, sent to")
        again = image.fork("power", rng)
        again.open()
        found += _check_told(again, known, known, f"{harm}, started again")
        found += _check_told(again, {p: baseline[p] for p in told}, told, f"{harm}, and then")
    return found


def _entries_in_files(files: dict[str, bytes], place: tuple[str, int, int]) -> int:
    return len(files.get(f"{ROOT}/consumequeue/{place[0]}/{place[1]}/{0:020d}", b"")) // 20


def _has_cut(before: dict[str, bytes], after: dict[str, bytes]) -> bool:
    """Whether bytes that were there are no more."""
    return any(
        one and one != two
        for path, data in before.items()
        for one, two in zip(data, after.get(path, bytes(len(data))), strict=True)
    )


def _harm_segment(
    disk: SimDisk, files: dict[str, bytes], log: LogReport, harm: str, rng: random.Random
) -> bool:
    """Whether it was done; else there are too few segments."""
    paths = [path for path in sorted(files) if "/commitlog/" in path]
    paths = [path for path in paths if int(path.rpartition("/")[2]) < log.end]
    size = len(files[paths[-1]])
    if harm == "zero the end":
        end = log.end - int(paths[-1].rpartition("/")[2])
        at = rng.randrange(max(end - 3000, 0), end)
        disk.overwrite(paths[-1], at, bytes(end - at))
    elif len(paths) < 2:
        return False
    elif harm == "swap":
        first = rng.randrange(len(paths) - 1)
        disk.swap_files(paths[first], paths[first + 1])
    else:
        victim = paths[-1] if harm == "overwrite the last" else rng.choice(paths[1:])
        disk.overwrite(victim, 0, rng.randbytes(size))
    return True


def _check_told(
    world: StoreWorld, baseline: Baseline, told: Container[tuple[str, int, int]], name: str
) -> list[Violation]:
    """Every message that was there is served as it was, or its reader is told: for those of `told` there must be a word."""
    world.scan()
    served = _places(world)
    queues = {(q["topic"], q["queue"]): q for q in last_scan(world.history.events)["queues"]}
    found: list[Violation] = []
    for place, (id_, position) in baseline.items():
        queue = queues[place[0], place[1]]
        if place in served:
            if served[place] != (id_, position):
                found.append(Violation("D8", f"({name}) {place} is {served[place]}, it was {id_}"))
        elif place[2] not in queue["holes"] and place in told:
            found.append(
                Violation("D8", f"({name}) {id_} at {place}, position {position}: no word of it")
            )
    found += [
        Violation("D8", f"({name}) {record[1]} is served with a wrong body")
        for queue in queues.values()
        for record in queue["records"]
        if not record[2]
    ]
    return found + _check_looked_up(
        world, {place: known for place, known in baseline.items() if place in told}
    )


def damage_log_while_open(world: StoreWorld, seed: int, report: DamageReport) -> list[Violation]:
    """The log is damaged under an open store, which has read all of it before: whoever reads there is told, without waiting for a scrub."""
    rng = random.Random(f"log while open {seed}")
    image = world.fork("kill", rng)
    store = image.open()
    image.promise = replace(image.promise, holes=True)
    found: list[Violation] = []
    whole: list[tuple[str, int, bytes]] = []
    for _ in range(3):
        image.send_some(2)
        image.flush()
        image.scan()
        baseline = _places(image)
        path = rng.choice(
            [p for p in image.log_bytes() if int(p.rpartition("/")[2]) < store.appended_position]
        )
        end = min(store.appended_position - int(path.rpartition("/")[2]), SEGMENT_SIZE_BYTES)
        at = rng.randrange(end)
        kind = rng.choice(("flip", "zero", "noise"))
        size = 1 if kind == "flip" else min(rng.choice((1, 64, 512)), end - at)
        whole.append((path, at, image.log_bytes()[path][at : at + size]))
        if kind == "flip":
            image.disk.flip_bit(path, at * 8 + rng.randrange(8))
        else:
            image.disk.overwrite(path, at, bytes(size) if kind == "zero" else rng.randbytes(size))
        report.images += 1
        image.clock.advance(1000)  # so often the kernel is asked what has left the cache
        found += _check_told(image, baseline, baseline, f"{kind} while open")
        report.outcomes["log damaged while open"] += 1
        if found:
            return found
    again = image.fork("kill", rng)
    # What stands in no message nobody has met: the start does.
    again.config = replace(again.config, corruption="quarantine")
    again.open()
    kept = _places(image)
    proved = _proved_after(image, whole)
    told = {place for place, (_, position) in kept.items() if position < proved}
    return found + _check_told(again, kept, told, "started again")


def _proved_after(world: StoreWorld, whole: list[tuple[str, int, bytes]]) -> int:
    """As `_proved`: of a log that was damaged in several places, with what stood there before."""
    files = world.disk.files(ROOT)
    before = {path: bytearray(data) for path, data in files.items()}
    for path, at, data in reversed(whole):
        before[path][at : at + len(data)] = data
    log = parse_log({path[len(ROOT) + 1 :]: bytes(data) for path, data in before.items()})
    bases = [(int(path.rpartition("/")[2]) + at, len(data)) for path, at, data in whole]
    return _proved(files, log, [(first, first + size) for first, size in bases])


def damage_while_open(world: StoreWorld, seed: int, report: DamageReport) -> list[Violation]:
    """Files of consume queues are damaged under an open store, again and again, with sends in between: they heal, and nothing is lost."""
    rng = random.Random(f"damage while open {seed}")
    image = world.fork("kill", rng)
    image.open()
    for _ in range(2):
        image.send_some(2)
        image.flush()
        _turns(image, 2)
        _read_from_files(image)
        image.scan()
        baseline = _places(image)
        before = _queue_files(image)
        # Of a system topic nobody reads while the store is open: the scrub or a start comes to it (test_damaged_states.py).
        paths = sorted(path for path in before if SYSTEM_PREFIX not in path)
        for path in rng.sample(paths, min(len(paths), rng.choice((1, 1, 2, 4)))):
            _harm_in_place(image.disk, path, before[path], rng)
        harmed = _queue_files(image) != before
        report.images += harmed
        try:
            met = _scan_while_it_heals(image)
        except ConsumeQueueDamagedError as error:
            return [Violation("D8", f"a queue does not heal: {error}")]
        report.outcomes["open: healed" if met else "open: not met, or no harm"] += 1
        now = _places(image)
        found = [
            Violation("D8", f"{place} is {now.get(place)} after healing, it was {expected}")
            for place, expected in baseline.items()
            if now.get(place) != expected
        ]
        found += image.check_filters()
        if met and not found and _queue_files(image) != before:
            found.append(Violation("D8", "healed files are not what they were"))
        if found:
            return found
    image.send_some(1)
    image.retry_uncertain()
    image.flush()
    image.scan()
    found = check_history(image.history.events, image.promise)
    how = rng.choice(("close", "kill", "power"))
    if how == "close":
        image.close()
        return found + check_store_files(image.files())
    after = image.fork(how, rng)
    after.open()
    _scan_while_it_heals(after)  # what was healed and not synced was cut off with the power
    return found + after.verify()


def _turns(world: StoreWorld, count: int) -> None:
    assert world.store is not None
    for _ in range(count):
        world.clock.advance(600)
        world.store._upkeep.keeper.turn()


def _read_from_files(world: StoreWorld) -> None:
    """From here on all entries are read from files: as if the queues had rested for a while."""
    assert world.store is not None
    queues = world.store._queues
    queues.flush()
    for topic in queues.topics():
        for queue in queues.queues_of(topic).values():
            queue.release_buffer()
            queue._last = (-1, 0)


def _scan_while_it_heals(world: StoreWorld) -> bool:
    """Reads everything, with filters too; again after a turn of the housekeeper where damage is told. Whether any was met."""
    assert world.store is not None
    for number in range(20):
        try:
            world.scan()
            world.check_filters()
        except ConsumeQueueDamagedError as error:
            if number == 19 or not error.is_healing:
                raise
        if not world.store.damaged_files:
            return number > 0
        _turns(world, 1)
    raise AssertionError("damage that no reader is told of does not heal")


def _queue_files(world: StoreWorld) -> dict[str, bytes]:
    return {
        path: data
        for path, data in world.disk.files(f"{ROOT}/consumequeue").items()
        if data and not path.endswith("/table.bin")
    }


def _harm_in_place(disk: SimDisk, path: str, data: bytes, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    kind = rng.choice(("flip", "flip", "zero", "noise", "truncate", "swap"))
    if kind == "flip":
        disk.flip_bit(path, at * 8 + rng.randrange(8))
    elif kind == "truncate":
        disk.cut(path, at)
    elif kind == "swap" and len(data) >= 40:
        first, second = sorted(rng.sample(range(len(data) // 20), 2))
        disk.swap_ranges(path, first * 20, second * 20, 20)
    else:
        size = min(rng.choice((1, 16, 512)), len(data) - at)
        disk.overwrite(path, at, bytes(size) if kind == "zero" else rng.randbytes(size))


def _places(world: StoreWorld) -> Baseline:
    """What the last scan saw: place -> (id, position)."""
    return {
        (queue["topic"], queue["queue"], record[0]): (record[1], record[4])
        for queue in last_scan(world.history.events)["queues"]
        for record in queue["records"]
    }


def _damage(
    disk: SimDisk,
    files: dict[str, bytes],
    before: dict[str, bytes],
    log: LogReport,
    rng: random.Random,
) -> Damage | None:
    logs = [path for path in files if "/commitlog/" in path]
    others = [path for path in files if "/commitlog/" not in path]
    path = rng.choice(logs) if rng.random() < 0.6 else rng.choice(others)
    kind, data = rng.choice(KINDS), files[path]
    if not data:
        return None
    used = len(data)
    if path in logs:
        used = min(max(log.end - int(path.rpartition("/")[2]), 1), len(data))
    at = rng.randrange(used)
    end = at + 1
    if kind == "flip":
        disk.flip_bit(path, at * 8 + rng.randrange(8))
    elif kind == "zero":
        end = min(at + rng.choice((1, 16, 512, 4096)), len(data))
        disk.overwrite(path, at, bytes(end - at))
    elif kind == "truncate":
        end = len(data)
        disk.cut(path, at)
    elif kind == "roll back":
        old = before.get(path)
        if old is not None and path in logs:  # what a power cut took was never on the disk
            there = max(log.end - int(path.rpartition("/")[2]), 0)
            old = old[:there].ljust(len(old), b"\x00")
        if old is None or old == data:
            return None
        disk.cut(path, 0)
        _put(disk, path, old)
        at, end = _changed(data, old)
    elif kind == "swap":
        size = rng.choice((8, 64, 512))
        if used < 2 * size:
            return None
        first, second = sorted(rng.sample(range(used - size), 2)) if used - size >= 2 else (0, 0)
        if second - first < size:
            return None
        disk.swap_ranges(path, first, second, size)
        at, end = first, second + size
    else:
        at, end = 0, len(data)
        disk.remove(path)
    return Damage(kind, path, at, end)


def _put(disk: SimDisk, path: str, data: bytes) -> None:
    fd = disk.create(path)
    disk.pwrite(fd, data, 0)
    disk.fsync(fd)
    disk.close(fd)


def _changed(data: bytes, old: bytes) -> tuple[int, int]:
    width = max(len(data), len(old))
    one, two = data.ljust(width, b"\x00"), old.ljust(width, b"\x00")
    wrong = [index for index in range(width) if one[index] != two[index]]
    return wrong[0], wrong[-1] + 1


def _check_log_damage(
    image: StoreWorld,
    damage: Damage,
    log: LogReport,
    files: dict[str, bytes],
    baseline: Baseline,
    rng: random.Random,
    report: DamageReport,
) -> list[Violation]:
    first, last = _changed_in_log(image, damage, files)
    ends = sorted({log.first, *log.seal_ends})
    # Of the append that is hit first.
    start = max(end for end in ends if end <= max(first, log.first))
    # A seal that is hit takes the append behind it along: nothing else tells what that one is chained to.
    stop = min([end for end in ends if end >= last][1:], default=log.end)
    proved = _proved(files, log, [(first, last)])
    cut = start if start >= proved else None
    image.promise = replace(image.promise, holes=True)
    found: list[Violation] = []
    if start < proved and not verify(ROOT, disk=image.fork("kill", rng).disk):
        found.append(
            Violation("D8", f"verify finds nothing wrong, though the log is damaged at {first}")
        )
    refusing = image.fork("kill", rng)
    try:
        refusing.open()
    except CorruptLogError:
        report.outcomes["start refused"] += 1
        if start >= log.end:
            found.append(
                Violation(
                    "D8",
                    f"a start was refused for bytes behind the end of the log ({start} >= {log.end})",
                )
            )
    except Exception as error:
        return [*found, Violation("D8", f"the start failed with {error!r}")]
    else:
        report.outcomes["started: readers are told" if cut is None else "started: tail cut"] += 1
        found += _check_served(refusing, baseline, start, stop, cut)
        found += _check_looked_up(refusing, _kept(baseline, cut))
        if cut is None and damage.kind != "truncate":
            found += _check_scrubbed(refusing, baseline, log, report)
    for name, check in (("quarantine", _check_quarantine), ("repair", _check_repair)):
        wrong = check(image.fork("kill", rng), baseline, start, stop, cut)
        report.outcomes[name] += 1
        found += [
            Violation(violation.invariant, f"({name}) {violation.message}") for violation in wrong
        ]
    return found


def _changed_in_log(image: StoreWorld, damage: Damage, files: dict[str, bytes]) -> tuple[int, int]:
    """First and last byte of the log that are not what they were."""
    base = int(damage.path.rpartition("/")[2])
    now = image.disk.files(ROOT).get(damage.path, b"")
    start, end = damage.start, damage.end
    if damage.kind not in ("truncate", "remove"):
        start, end = _changed(files[damage.path], now)
    return base + start, base + end


def _proved(files: dict[str, bytes], log: LogReport, hits: Sequence[tuple[int, int]]) -> int:
    """What is known to be synced by what the damaged ranges left: a seal that was hit proves nothing, nor does the one chained to it."""
    epochs = files.get(f"{ROOT}/config/epochs.json", b"").split(b"\n", 2)
    own_mark = json.loads(epochs[2].rstrip()[:-1])["synced_position"] if len(epochs) == 3 else 0
    proved = max(_checkpointed(files), own_mark)
    previous_is_whole = True
    for end, synced in log.synced_by.items():
        is_whole = all(end <= first or end - SEAL_FIELD_SIZE >= last for first, last in hits)
        if is_whole and previous_is_whole:
            proved = max(proved, synced)
        previous_is_whole = is_whole
    return proved


def _checkpointed(files: dict[str, bytes]) -> int:
    data = files.get(f"{ROOT}/checkpoint", b"")
    return int.from_bytes(data[8:16], "little") if len(data) == 56 else 0


def _check_served(
    world: StoreWorld, baseline: Baseline, start: int, stop: int, cut: int | None
) -> list[Violation]:
    """After a start on a damaged log: nothing wrong, and nothing missing but what stood in the damage, or behind a cut."""
    world.scan()
    served = _places(world)
    found: list[Violation] = []
    for place, (id_, position) in baseline.items():
        if place in served:
            if served[place][0] != id_:
                found.append(
                    Violation(
                        "D8",
                        f"{place} is {served[place][0]}, it was {id_} at {position}; damaged is [{start}, {stop})",
                    )
                )
        elif not (start <= position < stop or (cut is not None and position >= cut)):
            found.append(
                Violation(
                    "D8",
                    f"{id_} at {place}, position {position}, is not served; damaged is [{start}, {stop})",
                )
            )
    for queue in last_scan(world.history.events)["queues"]:
        for _, id_, is_right, *_ in queue["records"]:
            if not is_right:
                found.append(Violation("D8", f"{id_} is served with a wrong body"))
    return found


def _kept(baseline: Baseline, cut: int | None) -> Baseline:
    """What is not cut with a torn tail."""
    return {place: known for place, known in baseline.items() if cut is None or known[1] < cut}


def _counted(world: StoreWorld, baseline: Baseline) -> Baseline:
    """What its queue still counts. Take it before more is sent: where all that told of a queue was lost, its offsets begin again."""
    assert world.store is not None
    return {
        (topic, queue, offset): known
        for (topic, queue, offset), known in baseline.items()
        if offset < world.store.queue_range(topic, queue)[1]
    }


def _check_looked_up(world: StoreWorld, baseline: Baseline) -> list[Violation]:
    """A message that its queue still counts is found by its key, or the look-up says that it is lost: it never gives nothing."""
    store = world.store
    assert store is not None
    found: list[Violation] = []
    for (topic, queue, offset), (id_, position) in _counted(world, baseline).items():
        try:
            records = map(Record.FromString, store.find_by_key_hash(topic, key_hash_of(id_)))
            if any((r.queue_id, r.queue_offset) == (queue, offset) for r in records):
                continue
        except CorruptLogError:
            continue
        found.append(
            Violation(
                "D8",
                f"a look-up of {id_} at {topic}/{queue}@{offset}, position {position}, gives nothing and no error",
            )
        )
    return found


def _check_scrubbed(
    world: StoreWorld, baseline: Baseline, log: LogReport, report: DamageReport
) -> list[Violation]:
    """Old segments are read again in the background: then nothing of a damaged one is served any more."""
    assert world.store is not None
    for _ in range(4):
        world.clock.advance(1_000)
        world.store._upkeep.keeper.turn()
    report.outcomes["scrubbed"] += 1
    world.scan()
    served = _places(world)
    current = log.end - log.end % SEGMENT_SIZE_BYTES
    return [
        Violation("D8", f"{served[place][0]} is served for {id_} at {position} after a scrub")
        for place, (id_, position) in baseline.items()
        if position < current and place in served and served[place][0] != id_
    ]


def _check_quarantine(
    world: StoreWorld, baseline: Baseline, start: int, stop: int, cut: int | None
) -> list[Violation]:
    world.config = replace(world.config, corruption="quarantine")
    if world.rng.randrange(2):  # the index is rebuilt, and cannot see what is damaged
        for path in world.disk.files(f"{ROOT}/index"):
            world.disk.remove(path)
    try:
        world.open()
        found = _check_served(world, baseline, start, stop, cut)
        counted = _counted(world, _kept(baseline, cut))
        found += _check_looked_up(world, counted)
        world.send_some(2)
        world.flush()
        again = world.fork("power", world.rng)
        again.open()
        found += _check_served(again, _places_then(world), start, stop, None)
        found += _check_looked_up(again, counted)
        again.close()
        found += _check_ends_without_caches(again)
    except Exception as error:
        return [Violation("D8", f"the store does not start or go on: {error!r}")]
    return found


def _check_ends_without_caches(world: StoreWorld) -> list[Violation]:
    """Of a store that is closed the derived files are deleted: no queue ends earlier than before, and what its readers get is the same."""
    before = {(q["topic"], q["queue"]): q for q in last_scan(world.history.events)["queues"]}
    for folder in ("consumequeue", "index", "repeatedsends", "boundaries"):
        world.disk.remove(f"{ROOT}/{folder}")
    world.open()
    world.scan()
    after = {(q["topic"], q["queue"]): q for q in last_scan(world.history.events)["queues"]}
    world.close()
    return [
        Violation("D8", f"(caches deleted) {key} is {after.get(key)}, it was {queue}"[:2000])
        for key, queue in before.items()
        if key not in after
        or (after[key]["holes"], after[key]["records"]) != (queue["holes"], queue["records"])
    ]


def _places_then(world: StoreWorld) -> Baseline:
    """What is readable now."""
    world.scan()
    return _places(world)


def _check_repair(
    world: StoreWorld, baseline: Baseline, start: int, stop: int, cut: int | None
) -> list[Violation]:
    try:
        repair(ROOT, "/kept", disk=world.disk)
        world.open()
        found = _check_served(world, baseline, start, stop, cut)
        found += _check_found_after_repair(world, baseline)
        world.send_some(1)
        world.flush()
        again = world.fork("power", world.rng)
        again.open()
        found += _check_served(again, _places_then(world), start, stop, None)
        again.close()
        found += _check_ends_without_caches(again)
    except Exception as error:
        return [Violation("D8", f"the repaired store does not start or go on: {error!r}")]
    return found + parse_log(again.files()).violations


def _check_found_after_repair(world: StoreWorld, baseline: Baseline) -> list[Violation]:
    """Every message that is served is found by its key; of the others a look-up gives nothing, and no error."""
    assert world.store is not None
    served = _places(world)
    found: list[Violation] = []
    for place, (id_, position) in baseline.items():
        try:
            records = map(
                Record.FromString, world.store.find_by_key_hash(place[0], key_hash_of(id_))
            )
            places = {(r.topic, r.queue_id, r.queue_offset) for r in records}
        except CorruptLogError as error:
            found.append(
                Violation("D8", f"a look-up of {id_} at {place}, position {position}: {error}")
            )
            continue
        if (place in served) != (place in places):
            found.append(
                Violation(
                    "D8", f"a look-up of {id_} at {place}, position {position}, gives {places}"
                )
            )
    return found


def _check_derived_damage(
    image: StoreWorld, damage: Damage, baseline: Baseline, report: DamageReport
) -> list[Violation]:
    """Nothing wrong and nothing less is served, not by filters either: readers are told, or it is as if nothing had been."""
    found: list[Violation] = []
    image.promise = replace(image.promise, holes=True)
    try:
        image.open()
        found += image.fallen_back
        found += _check_served(image, baseline, 0, 0, None)
        found += image.check_filters()
        found += image.check_look_ups()
        image.retry_uncertain()
        image.send_some(1)
        image.flush()
        image.scan()
        report.outcomes["derived: as if nothing had been"] += 1
        found += check_history(image.history.events, image.promise)
    except ConsumeQueueDamagedError:
        try:
            _scan_while_it_heals(image)
        except ConsumeQueueDamagedError as error:
            return [Violation("D8", f"{damage}: the queue does not heal: {error}")]
        report.outcomes["derived: readers are told, and it heals"] += 1
        found += _check_served(image, baseline, 0, 0, None)
        found += check_history(image.history.events, image.promise)
    except Exception as error:
        return [Violation("D8", f"{damage}: {error!r}")]
    if image.store is not None:
        image.close()
    again = image.fork("kill", image.rng)
    for topic, cache in ((OFFSETS_TOPIC, "consumerOffsets.json"), (TOPICS_TOPIC, "topics.json")):
        if topic in damage.path:  # so that the start reads there
            for path in again.disk.files(f"{ROOT}/config"):
                if cache in path:
                    again.disk.remove(path)
    try:
        again.open()
        found += _check_served(again, baseline, 0, 0, None)
        found += again.check_filters()
        found += again.fallen_back
        again.close()
    except Exception as error:
        return [Violation("D8", f"the second start: {error!r}")]
    return found + check_store_files(again.files())
