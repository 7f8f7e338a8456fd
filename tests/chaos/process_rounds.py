"""L3: rounds with a real broker process, by seed. Each function runs some rounds and returns what is wrong.

kill_rounds         kill -9 under load; clients wait it out and retry, or the files are recovered aside and checked
power_cut_rounds    the power of the disk is cut under load
proxy_rounds        retried sends through a proxy that loses answers and cuts connections: stored once
full_disk           a file system without space: refused, read, and taken again when there is space
damaged_files       torn, zeroed, flipped, rolled-back, swapped and overwritten files between two runs; the log under a running broker
damaged_queues      files of consume queues are damaged under a running broker: they heal, without a restart
second_broker       the lock
hostile_round       a hostile client beside honest ones
failed_sync         an fsync fails: no more writes, and it says so; a restart loses nothing that was acknowledged
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from protomq import Producer
from protomq.errors import ProtomqError
from protomq.testing import Broker, BrokerStartError, FaultProxy
from protomq_broker.store.tools.verify import FindingKind, verify

from .checker import LogReport, Violation, parse_log
from .checker.log_files import read_files
from .failing_sync import build_shim
from .hostile import ATTACKS, STATUSES_ALLOWED, Enemy
from .loop_disk import LoopDisk
from .real_world import RealWorld, outcomes

SENDS_MIN = 30
"""Answered sends before a kill."""
DISK_SIZE_BYTES = 48 << 20
RSS_GROWTH_MAX_BYTES = 64 << 20
"""Measured: 44 MiB for 40 unfinished sends of 4 MiB, up to 25 MiB for gRPC calls of up to 6 MiB, one after the other."""


@contextmanager
def real_world(seed: int, **arguments: object) -> Iterator[RealWorld]:
    """A world that is closed at the end."""
    world = RealWorld(seed, **arguments)  # type: ignore[arg-type]
    try:
        yield world
    finally:
        world.close()


def kill_rounds(
    seed: int, rounds: int, counts: Counter[str], *, sync_flush: bool
) -> list[Violation]:
    """kill -9 under load, again and again on the same store; SIGSTOP in between."""
    found: list[Violation] = []
    with real_world(seed, sync_flush=sync_flush) as world:
        rng = world.rng
        world.start()
        for number in range(rounds):
            under_load = rng.random() < 0.5
            world.begin_load(timeout_s=6.0 if under_load else 1.0)
            world.wait_for_sends(SENDS_MIN)
            time.sleep(rng.uniform(0.15, 0.6))
            if rng.random() < 0.25:
                world.pause(rng.uniform(0.05, 0.4))
                counts["pauses"] += 1
            if rng.random() < 0.2:
                world.stop()
                counts["stops"] += 1
            else:
                world.kill()
                counts["kills"] += 1
            if under_load:  # the clients go on trying, and are answered by the next process
                world.start()
                time.sleep(rng.uniform(0.1, 0.3))
                world.kill()
                counts["kills"] += 1
            world.end_load()
            found += _check_files(world, counts, rebuild=number % 4 == 0)
            if rng.random() < 0.3:
                world.forget_caches()
                counts["starts without caches"] += 1
            world.start()
            world.look_at_commits()
            if number % 5 == 4 or number == rounds - 1:
                world.scan()
                found += world.check()
            if found:
                break
        _count(world, counts)
    return found


def power_cut_rounds(
    seed: int, rounds: int, counts: Counter[str], *, sync_flush: bool
) -> list[Violation]:
    """The power goes under load. Under SYNC_FLUSH nothing is lost; under ASYNC_FLUSH only a suffix of the last moments."""
    found: list[Violation] = []
    with (
        LoopDisk(DISK_SIZE_BYTES) as disk,
        real_world(seed, sync_flush=sync_flush, folder=disk.mount_point) as world,
    ):
        for _ in range(rounds):
            world.start()
            world.scan()
            found += world.check()
            if found:
                break
            with world.load(timeout_s=0.6):
                time.sleep(world.rng.uniform(0.3, 0.8))
                world.history.fact("crash", kind="power", flushed=None)
                disk.cut_power()
                world.broker.kill()
            disk.unmount()
            disk.mount()
            counts["power cuts"] += 1
            found += _check_files(world, counts)
        if not found:
            world.start()
            world.scan()
            found += world.check()
            world.broker.kill()
            found += _check_files(world, counts, rebuild=True)
        _count(world, counts)
        world.close()
    return found


def proxy_rounds(seed: int, rounds: int, counts: Counter[str]) -> list[Violation]:
    """Answers are lost and connections are cut, so that every producer has to send again: each message is stored once."""
    with (
        FaultProxy(seed=seed) as proxy,
        real_world(seed, sync_flush=False, environment=proxy.advertised()) as world,
    ):
        world.start()
        proxy.target = world.broker.remoting_address
        rng = world.rng
        for _ in range(rounds):
            with world.load(timeout_s=4.0, producers=4):
                end = time.monotonic() + 0.8
                while time.monotonic() < end:
                    fault = rng.choice(("cut", "lose", "cut often", "half"))
                    counts[f"proxy: {fault}"] += 1
                    if fault == "cut":
                        proxy.cut()
                    elif fault == "lose":
                        proxy.set(drop_answers=True)
                    elif fault == "cut often":
                        proxy.set(cut_probability=0.3)
                    else:
                        proxy.set(cut_after_answer_bytes=rng.randrange(10, 400))
                    time.sleep(rng.uniform(0.02, 0.1))
                    proxy.heal()
                    time.sleep(rng.uniform(0.0, 0.05))
        world.scan()
        counts["repeats recognised"] += sum(
            bool(event.result.get("repeated"))
            for event in world.history.events
            if event.op == "send" and event.type == "ok"
        )
        _count(world, counts)
        found = world.check()
        world.kill()
        return found + _check_files(world, counts)


def full_disk(seed: int, counts: Counter[str]) -> list[Violation]:
    """No space for the next segment: sends are refused for good, reads go on, and sends are taken when there is space again."""
    found: list[Violation] = []
    rng = random.Random(seed)
    with (
        LoopDisk(24 << 20) as disk,
        real_world(seed, sync_flush=bool(seed % 2), folder=disk.mount_point) as world,
    ):
        world.start()
        with Producer(namesrv=world.broker.namesrv, send_timeout_s=1.0, retries=0) as producer:
            for _ in range(20):
                world.send_once(producer, "p0", rng)
            filler = disk.fill(leave_bytes=rng.choice((0, 0, 200_000)))
            refused = 0
            for _ in range(4000):
                refused += world.send_once(producer, "p0", rng, count=20) == "fail"
                if refused >= 5:
                    break
            if refused < 5:
                found.append(
                    Violation(
                        "I1", f"the disk is full, and only {refused} of 4,000 sends were refused"
                    )
                )
            world.scan()
            filler.unlink()
            end = time.monotonic() + 10  # ext4 gives freed blocks back with its next commit
            while world.send_once(producer, "p0", rng, count=2) != "ok" and time.monotonic() < end:
                time.sleep(0.1)
            taken = sum(world.send_once(producer, "p0", rng, count=2) == "ok" for _ in range(10))
            if taken < 10:
                found.append(
                    Violation(
                        "I2",
                        f"there is space again, and only {taken} of 10 sends are taken: {world.history.events[-1].result}",
                    )
                )
        world.scan()
        found += world.check()
        world.kill()
        found += _check_files(world, counts, rebuild=True)
        world.start()
        world.scan()
        found += world.check()
        counts["full disks"] += 1
        _count(world, counts)
        world.close()
    return found


def failed_sync(seed: int, folder: Path, counts: Counter[str]) -> list[Violation]:
    """An fsync fails while messages are sent: nothing is acknowledged any more, the reason is told, reading goes on."""
    environment, trigger = build_shim(folder)
    found: list[Violation] = []
    with real_world(seed, sync_flush=True, environment=environment) as world:
        world.start()
        rng = world.rng
        with world.load(timeout_s=1.0):
            time.sleep(0.4)
            trigger.touch()
            time.sleep(0.6)
        failed_ns = trigger.stat().st_mtime_ns
        trigger.unlink()
        del failed_ns
        with Producer(namesrv=world.broker.namesrv, send_timeout_s=1.0, retries=0) as producer:
            for _ in range(5):
                if world.send_once(producer, "late", rng) == "ok":
                    found.append(
                        Violation("A8", "a send was acknowledged though an fsync had failed")
                    )
            try:
                producer.send("chaos-topic", b"")
            except ProtomqError as error:
                if error.reason != "STORE_FAILED" or "fsync" not in error.message:
                    found.append(
                        Violation("A8", f"the reason is not told: {error.reason}: {error.message}")
                    )
        world.scan()
        world.kill()
        found += _check_files(world, counts, rebuild=True)
        world.start()
        world.scan()
        found += world.check()
        with Producer(namesrv=world.broker.namesrv, send_timeout_s=2.0) as producer:
            if world.send_once(producer, "p9", rng, count=2) != "ok":
                found.append(Violation("I2", "after a restart no sends are taken"))
        counts["failed syncs"] += 1
        _count(world, counts)
    return found


def _check_files(
    world: RealWorld, counts: Counter[str], *, rebuild: bool = False
) -> list[Violation]:
    """The files of a broker that is dead: its seals, what is derived, and, where protoc is there, what that says."""
    found, parsed = world.check_files(rebuild=rebuild)
    counts["stores checked"] += 1
    counts["parsed by protoc"] += parsed
    return found


def _count(world: RealWorld, counts: Counter[str]) -> None:
    for outcome, count in outcomes(world.history.events).items():
        counts[f"sends {outcome}"] += count


def damaged_files(seed: int, counts: Counter[str]) -> list[Violation]:
    """Files are damaged between two runs: in the log below the synced position, in its tail, in whole segments, in what is derived; or
    the log is damaged under the broker, where its pages have left the cache."""
    found: list[Violation] = []
    rng = random.Random(f"damage {seed}")
    kind = rng.choice(("flip", "zero", "truncate", "roll back"))
    where = rng.choice(("log", "log", "tail", "derived", "segments", "segments", "running"))
    with real_world(seed, sync_flush=True, segment_size_bytes=256 << 10) as world:
        world.start()
        with world.load():
            time.sleep(0.4)
        old = read_files(world.store_folder)
        with world.load():
            time.sleep(0.4)
        world.scan()
        if where == "running":
            files = read_files(world.store_folder)
            path, at = _victim(files, parse_log(files), "log", rng)
            _harm_and_evict(world.store_folder / path, at, rng)
            counts["under the broker"] += 1
            world.promise = replace(world.promise, holes=True)
            time.sleep(1.1)  # so often the kernel is asked what has left the cache
            world.scan(holes=True)  # no restart, no scrub
            found += world.check()
            world.environment["PROTOMQ_STORE_CORRUPTION"] = "quarantine"
        if where != "segments" and rng.random() < 0.5:
            world.history.fact("crash", kind="kill", flushed=None)
            world.broker.kill()
        else:
            world.stop()
        files = read_files(world.store_folder)
        log = parse_log(files) if where != "running" else LogReport()
        if where == "segments":
            counts[_harm_segments(world.store_folder, files, log, rng)] += 1
        elif where != "running":
            path, at = _victim(files, log, where, rng)
            _harm(world.store_folder / path, files[path], old.get(path, b""), kind, at)
            counts[f"{kind} in {where}"] += 1
        in_log = where != "derived"
        if in_log:
            world.promise = replace(world.promise, holes=True)
        if where == "tail":  # nothing proves that the last append was synced: it may be cut
            world.promise = replace(world.promise, suffix_loss=True, loss_window_ns=None)
            last = max(end for end in log.seal_ends if end < log.end)
            world.history.fact("crash", kind="power", flushed=last)
        try:
            world.start()
        except BrokerStartError as error:
            counts["start refused"] += 1
            if not in_log:
                found.append(
                    Violation("D8", f"a start was refused for what is derived: {str(error)[-500:]}")
                )
            if "commitlog" not in str(error) or "position" not in str(error):
                found.append(
                    Violation(
                        "D8",
                        f"the refusal does not say what is wrong and where: {str(error)[-500:]}",
                    )
                )
            world.environment["PROTOMQ_STORE_CORRUPTION"] = "quarantine"
            world.renew_broker()
            world.start()
        world.scan(holes=in_log)
        found += world.check()
        with world.load(readers=0):
            time.sleep(0.2)
        world.kill()
        world.start()
        world.scan(holes=in_log)
        found += world.check()
        world.kill()
        # No parser gets through the damage; `verify` does, and around it all has to agree.
        if in_log:
            counts["damaged logs verified"] += 1
            found += [
                Violation("D1", f"{finding.path}: {finding.explanation}")
                for finding in verify(world.store_folder)
                if finding.kind in (FindingKind.WRONG_STAMP, FindingKind.WRONG_ENTRY)
            ]
        else:
            found += _check_files(world, counts, rebuild=True)
        _count(world, counts)
    return found


def damaged_queues(seed: int, rounds: int, counts: Counter[str]) -> list[Violation]:
    """Files of consume queues are damaged while the broker runs and its clients work: readers are told to wait, and it heals.

    Only those of clients' topics: damage is met by who reads, and a queue of the system is read when consumerOffsets.json is lost.
    """
    found: list[Violation] = []
    with real_world(seed, sync_flush=bool(seed % 2), segment_size_bytes=256 << 10) as world:
        rng = world.rng
        world.start()
        with world.load():
            time.sleep(0.5)
        for number in range(rounds):
            with world.load():
                for _ in range(3):
                    files = {
                        path: data
                        for path, data in read_files(world.store_folder).items()
                        if path.startswith("consumequeue/")
                        and not path.startswith("consumequeue/%")
                        # A file that is being written is renamed at any time.
                        and not path.endswith(("table.bin", ".tmp"))
                        and data
                    }
                    for path in rng.sample(
                        sorted(files), min(len(files), rng.choice((1, 1, 2, 4)))
                    ):
                        kind = rng.choice(("flip", "flip", "zero", "noise", "truncate", "remove"))
                        _harm_in_place(world.store_folder / path, len(files[path]), kind, rng)
                        counts[f"{kind} under a running broker"] += 1
                    world.read_all()
                    time.sleep(0.2)
            world.scan()
            status = world.status()
            if status.damaged_queue_files or status.log_damages:
                found.append(Violation("D8", f"it does not heal: {status}"))
            counts["files healed"] += status.healed_queue_files
            found += world.check()
            if found:
                return found
            if rng.random() < 0.5:
                world.kill()
            else:
                world.stop()
            world.start()
            world.scan()  # now all is read from files: what was in memory until then may hide damage
            found += world.check()
            counts["files healed"] += world.status().healed_queue_files
            world.kill()
            found += _check_files(world, counts, rebuild=True)
            if found:
                return found
            if number < rounds - 1:
                world.start()
        counts["answers that say wait"] += sum(
            event.result.get("reason") == "QUEUE_HEALING" for event in world.history.events
        )
        _count(world, counts)
        return found


def _harm_in_place(path: Path, size_bytes: int, kind: str, rng: random.Random) -> None:
    """Other bytes in a file that a broker has open; `remove`: another file of that name, with half of it."""
    at = rng.randrange(size_bytes)
    if kind == "remove":
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:at])
        return
    if kind == "truncate":
        os.truncate(path, at)
        return
    count = 1 if kind == "flip" else min(rng.choice((1, 20, 512)), size_bytes - at)
    with path.open("r+b") as file:
        file.seek(at)
        data = file.read(count)
        file.seek(at)
        if kind == "flip":
            file.write(bytes([data[0] ^ 1 << rng.randrange(8)]) if data else b"")
        else:
            file.write(bytes(count) if kind == "zero" else rng.randbytes(count))


def _victim(
    files: dict[str, bytes], log: LogReport, where: str, rng: random.Random
) -> tuple[str, int]:
    """(the file to be damaged, where in it)."""
    if where == "derived":
        paths = [
            path
            for path in files
            if path.split("/")[0] in ("consumequeue", "index", "repeatedsends", "checkpoint")
            and files[path]
        ]
        path = rng.choice(paths)
        return path, rng.randrange(len(files[path]))
    size = len(next(data for path, data in files.items() if path.startswith("commitlog/")))
    last = max(end for end in log.seal_ends if end < log.end)  # where the last append starts
    position = (
        rng.randrange(log.first, max(log.synced, 1))
        if where == "log"
        else rng.randrange(last, log.end)
    )
    base = position - position % size
    return f"commitlog/{base:020d}", position - base


def _harm(path: Path, data: bytes, old: bytes, kind: str, at: int) -> None:
    content = bytearray(data)
    if kind == "flip":
        content[at] ^= 1 << at % 8
    elif kind == "zero":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    elif kind == "truncate":
        del content[at:]
    elif old:
        content[:] = old
    path.write_bytes(content)


def _harm_and_evict(path: Path, at: int, rng: random.Random) -> None:
    """As if the disk had: other bytes, and the page cache does not have the page any more."""
    with path.open("r+b") as file:
        size = min(rng.choice((1, 100, 3000)), path.stat().st_size - at)
        file.seek(at)
        file.write(rng.randbytes(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _harm_segments(
    folder: Path, files: dict[str, bytes], log: LogReport, rng: random.Random
) -> str:
    """What befalls whole segments between two runs; its name."""
    paths = sorted(path for path in files if path.startswith("commitlog/"))
    paths = [path for path in paths if int(path.rpartition("/")[2]) < log.end]
    harm = rng.choice(("zero the end", "swap segments", "overwrite a segment"))
    last = folder / paths[-1]
    if harm == "zero the end" or len(paths) < 2:
        end = log.end - int(paths[-1].rpartition("/")[2])
        size = min(3000, end)
        _overwrite(last, end - size, bytes(size))
        return "zero the end"
    if harm == "swap segments":
        _overwrite(last, 0, files[paths[-2]])
        _overwrite(folder / paths[-2], 0, files[paths[-1]])
    else:
        victim = rng.choice(paths)
        _overwrite(folder / victim, 0, rng.randbytes(len(files[victim])))
    return harm


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def second_broker(seed: int, counts: Counter[str]) -> list[Violation]:
    """Another process on the same store is refused by the lock, and does no harm."""
    with real_world(seed, sync_flush=False) as world:
        world.start()
        found = []
        with world.load(pace_s=0.02):
            for _ in range(2):
                try:
                    with Broker(data_dir=world.folder, environment=world.environment):
                        found.append(Violation("I2", "two brokers have one store open"))
                except BrokerStartError as error:
                    counts["second brokers refused"] += 1
                    if str(world.broker.process_id) not in str(error):
                        found.append(
                            Violation(
                                "I2", f"the refusal does not name the holder: {str(error)[-400:]}"
                            )
                        )
        world.scan()
        found += world.check()
        world.kill()
        return found + _check_files(world, counts)


def hostile_round(seed: int, counts: Counter[str]) -> list[Violation]:
    """All attacks while honest clients work: they are served, the broker lives, its memory is bounded."""
    found: list[Violation] = []
    with real_world(seed, sync_flush=False) as world:
        world.start()
        with world.load():
            time.sleep(0.8)
        before = world.rss_bytes()
        with world.load(producers=2, pace_s=0.02):
            for attack in ATTACKS:
                enemy = Enemy(world.broker.remoting_address, world.broker.grpc_address, seed)
                attack(enemy)
                counts[f"attack: {attack.__name__}"] += 1
                grown = world.rss_bytes() - before
                wrong = sorted({*enemy.statuses} - STATUSES_ALLOWED)
                if wrong:
                    found.append(Violation("I1", f"{attack.__name__}: answers with status {wrong}"))
                if grown > RSS_GROWTH_MAX_BYTES:
                    found.append(
                        Violation("I1", f"{attack.__name__}: {grown >> 20} MiB more memory")
                    )
                if not world.broker.running:
                    return [
                        *found,
                        Violation(
                            "I1",
                            f"{attack.__name__}: the broker is dead: {world.broker.log_text()[-1000:]}",
                        ),
                    ]
        world.scan()
        found += world.check()
        ended = outcomes(world.history.events)
        if (
            ended.get("ok", 0) < 50
            or ended.get("fail", 0) + ended.get("info", 0) > ended.get("ok", 0) // 20
        ):
            found.append(Violation("I1", f"honest clients were not served: {ended}"))
        if "Traceback" in world.broker.log_text():
            found.append(
                Violation("I1", f"a traceback in the log: {world.broker.log_text()[-2000:]}")
            )
        world.kill()
        found += _check_files(world, counts)
        _count(world, counts)
    return found
