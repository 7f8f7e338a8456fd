"""Bugs put into the store on purpose: the checker has to catch every one of them, else it proves nothing.

Each is a context manager that patches the store's classes, and a drill: worlds in which the bug must show. A drill returns what the checker
said; the same drills say nothing without the bug.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple
from unittest import mock

import numpy as np
from google.protobuf.message import DecodeError

from protomq.v1.state_pb2 import LocksRecord
from protomq.wire.hashing import Octets
from protomq.wire.record import FLAG_DUE_TIME
from protomq_broker.store import appending, store_files, topic_counts
from protomq_broker.store.appending import Appender
from protomq_broker.store.errors import DiskFullError, StoreError
from protomq_broker.store.files import disk as disk_module
from protomq_broker.store.files import side_files
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.housekeeping.carry_forward import CarryForward
from protomq_broker.store.index.index import MessageIndex
from protomq_broker.store.index.look_ups import MessageLookUps
from protomq_broker.store.log import checkpoint as checkpoint_module
from protomq_broker.store.log import commit_log, move, move_alike, move_one, recovery, transit
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.checked_log import CheckedLog
from protomq_broker.store.log.checkpoint import Checkpoint
from protomq_broker.store.log.commit_log import CommitLog, Reserve
from protomq_broker.store.log.flusher import LogFlusher
from protomq_broker.store.log.positions import LogTail, Positions
from protomq_broker.store.log.record_region import stamp_region
from protomq_broker.store.log.segment import SegmentFile, SegmentFolder
from protomq_broker.store.queues import (
    consume_queue,
    consume_queue_table,
    entry_check,
    healed_entries,
)
from protomq_broker.store.queues.consume_queue import ConsumeQueueDamagedError
from protomq_broker.store.queues.consume_queue_table import ConsumeQueueTable
from protomq_broker.store.queues.log_reader import LogReader
from protomq_broker.store.queues.reading import ReadResult
from protomq_broker.store.same_messages import SentAgain
from protomq_broker.store.saving import Saver
from protomq_broker.store.start import derived_recovery, log_replay
from protomq_broker.store.state.locks import LockTable
from protomq_broker.store.state.log_front import LogFront
from protomq_broker.store.state.repeated_sends import RepeatedSends
from protomq_broker.store.state.sent_runs import SentRuns
from protomq_broker.store.state.topics import TopicTable
from protomq_broker.testing.simdisk import Fault, SimDisk

from . import planted_failover, planted_follow, planted_ha, planted_leadership, planted_pops
from .checker import Violation, parse_log
from .planted_delays import BUGS as DELAY_BUGS
from .planted_retries import RETRY_BUGS
from .planted_transactions import TRANSACTION_BUGS
from .store_damage import (
    DamageReport,
    damage_log_while_open,
    damage_while_open,
    harm_segments,
    run_damage,
    stopped_world,
)
from .store_delays import check_delays
from .store_loops import STEPS, LoopReport, Plan, run_loops
from .store_moves import check_moves
from .store_pops import check_pops
from .store_repeats import check_repeats
from .store_retries import check_send_backs
from .store_states import check_states_of_log
from .store_world import ROOT, StoreWorld

Patch = Callable[[], Iterator[None]]
Drill = Callable[[int], list[Violation]]


class Planted(NamedTuple):
    """A bug: what it is, how it gets in, where it must show."""

    name: str
    plant: Callable[[], Any]
    drill: Drill
    seeds: int = 40
    """Within how many seeds the drill must show it, the first being 0. More only where what shows it is rare."""


# Drills: each brings a store into the situation in which a class of bugs shows.


def life(seed: int) -> list[Violation]:
    """Sends, reads, checkpoints; a clean stop, a kill and a power cut."""
    found: list[Violation] = []
    for sync_flush in (True, False):
        world = StoreWorld(seed, sync_flush=sync_flush)
        world.open()
        actions = (
            world.send_some,
            world.send_some,
            world.send_some,
            world.flush,
            world.checkpoint,
            world.housekeeping,
            world.poll_random,
        )
        for _ in range(14):
            world.rng.choice(actions)()
        for kind in ("kill", "power", "power"):
            found += world.fork(kind, world.rng).verify()
        found += world.verify()
    return found


def retries(seed: int) -> list[Violation]:
    """Sends whose answers got lost in a kill are sent again."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(3)
    if seed % 2:
        world.checkpoint()
    world.send(
        [
            world.new_order(sender=world.senders[0], count=2),
            world.new_order(sender=world.senders[1]),
        ]
    )
    after = world.fork("kill", world.rng)
    after.open()
    after.retry_uncertain()
    after.retry_uncertain()
    after.flush()
    found = after.verify()
    again = after.fork("kill", after.rng)
    return found + again.verify()


def failing_sync(seed: int) -> list[Violation]:
    """An fsync of the log fails and the pages are lost; what is sent afterwards must not be acknowledged."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(2)
    world.flush()
    world.send([world.new_order(size=2000)])
    world.disk.plan = lambda operation: Fault.SYNC_LOST if operation.name == "fdatasync" else None
    world.flush()
    world.disk.plan = None
    world.send([world.new_order(size=1000)])
    world.flush()
    return world.fork("power", world.rng, keep=0.0).verify()


def damage(seed: int) -> list[Violation]:
    """Damaged files."""
    report = DamageReport()
    run_damage(seed, report, tries=10)
    return [violation for _, found in report.failures for violation in found]


def loops(*steps: str, plans: tuple[Plan, ...]) -> Drill:
    """The loops over some operations and faults."""

    def drill(seed: int) -> list[Violation]:
        report = LoopReport()
        run_loops(seed, report, steps={name: STEPS[name] for name in steps}, plans=plans)
        return [violation for _, found in report.failures for violation in found]

    return drill


def torn_tail_twice(seed: int) -> list[Violation]:
    """A torn tail is cut, less than that is written over it, and the power goes again: nothing of the old tail may come back."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(1)
    world.flush()
    for size in (700, 500, 300, 100):
        world.send([world.new_order(size=size)])
    world.disk.write_back(world.rng, 0.6)
    after = world.fork("power", world.rng, keep=0.3)
    after.open()
    after.scan()
    found = parse_log(after.files()).violations
    after.send([after.new_order(size=1)])
    after.flush()
    return found + after.fork("power", after.rng).verify()


def retention(seed: int) -> list[Violation]:
    """Old segments go, and the power at once."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    for _ in range(30):
        world.send([world.new_order(size=400)])
    world.flush()
    world.checkpoint()
    world.delete_old(3)
    found = world.fork("power", world.rng).verify()
    return found + world.verify()


def settings(seed: int) -> list[Violation]:
    """Topics and offsets, and a power cut."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.create_topic()
    world.commit_offsets()
    world.create_topic()
    world.commit_offsets()
    return world.fork("power", world.rng).verify()


def whole_files(seed: int) -> list[Violation]:
    """Whatever a power cut leaves, the files of config/ are as they were or as they are to be."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.create_topic()
    world.commit_offsets()
    world.checkpoint()
    world.commit_offsets()
    world.checkpoint()
    after = world.fork("power", world.rng)
    found = []
    for path in after.disk.files(f"{ROOT}/config"):
        try:
            side_files.read_json_file(after.disk, path)
        except side_files.SideFileDamagedError as error:
            if path.endswith((".json", ".previous")):
                found.append(Violation("D4", str(error)))
    return found + after.verify()


def idle_group(seed: int) -> list[Violation]:
    """A group commits no more, the segments in which it did go, and no cache is left."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    for _ in range(3):
        world.commit_offsets()
    for _ in range(30):
        world.send([world.new_order(size=400)])
    world.flush()
    world.checkpoint()
    world.delete_old(3)
    world.flush()
    after = world.fork("kill", world.rng)
    for name in ("config/consumerOffsets.json", "checkpoint"):
        after.disk.remove(f"{ROOT}/{name}")
    return after.verify()


def rolled_back(seed: int) -> list[Violation]:
    """The log is cut back, by a fork say, to what it was before topics were made and deleted; the caches are of later."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    assert world.store is not None
    world.store.topics.create(world.topic_config("kept"))
    world.store.flush()
    before = world.fork("kill", world.rng)
    world.store.topics.delete("kept")
    world.store.topics.create(world.topic_config("later"))
    world.close()
    path = f"{ROOT}/config/topics.json"
    content = world.disk.content(path)
    if before.disk.exists(path):
        before.disk.remove(path)
    fd = before.disk.create(path)
    before.disk.pwrite(fd, content, 0)
    before.disk.close(fd)
    store = before.open()
    names = [topic.name for topic in store.topics.all()]
    return [] if names == ["kept"] else [Violation("C3", f"the log has a topic, the broker {names}")]


# Bugs.


def _patch(target: Any, name: str, value: Any) -> Any:
    return mock.patch.object(target, name, value)


def _loses_an_append() -> Any:
    """Every seventh append never reaches the log, though it is acknowledged."""
    real = CommitLog.append
    count = 0

    def append(
        self: CommitLog, parts: Sequence[Octets], record_count: int, store_time_ms: int
    ) -> LogTail:
        nonlocal count
        count += 1
        if count % 7 == 0 and record_count:
            parts = [bytes(len(part)) for part in parts]
        return real(self, parts, record_count, store_time_ms)

    return _patch(CommitLog, "append", append)


def _acknowledges_before_the_sync() -> Any:
    """The flushed position moves without a sync."""

    def flush(self: LogFlusher) -> int:
        self._positions.note_flushed(self._positions.appended)
        return self._positions.flushed

    return _patch(LogFlusher, "flush", flush)


def _retries_the_fsync() -> Any:
    """A failed fsync is tried again, and believed."""

    def flush(self: LogFlusher) -> int:
        position, start = self._positions.appended, self._positions.flushed
        for segment_file in self._log.folder.overlapping(start, position):
            for _ in range(3):
                try:
                    self._disk.fdatasync(segment_file.fd)
                except OSError:
                    plan = getattr(self._disk, "plan", None)
                    if plan is not None:
                        self._disk.plan = None  # type: ignore[attr-defined]
                    continue
                break
        self._positions.note_flushed(position)
        return position

    return _patch(LogFlusher, "flush", flush)


def _ignores_a_failed_fsync() -> Any:
    """A failed fsync is logged, and that is all."""

    def flush(self: LogFlusher) -> int:
        position = self._positions.appended
        for segment_file in self._log.folder.overlapping(self._positions.flushed, position):
            with suppress(OSError):
                self._disk.fdatasync(segment_file.fd)
        self._positions.note_flushed(position)
        return position

    return _patch(LogFlusher, "flush", flush)


def _swaps_records() -> Any:
    """Two records of a batch change places."""
    real = Appender._stamp

    def stamp(
        self: Appender, requests: Sequence[AppendRequest], position: int, store_time_ms: int
    ) -> tuple[Any, int, bool]:
        parts, count, is_plain = real(self, requests, position, store_time_ms)
        data = b"".join(map(bytes, parts))
        for request in requests:
            region = request.region
            if region.starts is not None and region.count >= 2 and region.sizes is not None:
                first, second = 0, 1
                if region.sizes[first] == region.sizes[second]:
                    start, size = int(region.starts[0]), int(region.sizes[0])
                    at = request.physical_offset - position + start
                    front = data[at : at + size - 35]
                    other = data[at + size : at + 2 * size - 35]
                    data = (
                        data[:at]
                        + other
                        + data[at + size - 35 : at + size]
                        + front
                        + data[at + 2 * size - 35 :]
                    )
        return (data,), count, is_plain

    return _patch(Appender, "_stamp", stamp)


def _same_sizes(seed: int) -> list[Violation]:
    world = StoreWorld(seed, sync_flush=False)
    world.open()
    for _ in range(4):
        world.send([world.new_order(count=3, size=50)])
    return world.verify()


def _gives_an_offset_twice() -> Any:
    """The second request of a group for one queue gets the offset of the first."""

    def stamp(
        self: Appender, requests: Sequence[AppendRequest], position: int, store_time_ms: int
    ) -> tuple[Any, int, bool]:
        count = 0
        for request in requests:
            region = request.region
            offset = self._queues.queue(region.topic, request.queue_id).end_offset
            stamp_region(region, request.queue_id, store_time_ms, offset, position)
            request.queue_offset, request.physical_offset = offset, position
            position += len(region.data)
            count += region.count
        return [bytes(request.region.data) for request in requests], count, False

    def apply(self: ConsumeQueueTable, requests: Sequence[AppendRequest]) -> None:
        for request in requests:
            region = request.region
            queue = self.queue(region.topic, request.queue_id)
            if region.starts is None:
                queue.append(request.physical_offset, len(region.data), region.tag_codes)  # type: ignore[arg-type]
            else:
                sizes: Any = region.sizes
                tag_codes: Any = region.tag_codes
                queue.append_many(region.starts + request.physical_offset, sizes, tag_codes)
            self._dirty.add(queue)

    return _both(_patch(Appender, "_stamp", stamp), _patch(ConsumeQueueTable, "apply", apply))


@contextmanager
def _both(*patches: Any) -> Iterator[None]:
    if not patches:
        yield
        return
    with patches[0], _both(*patches[1:]):
        yield


def _skips_an_offset() -> Any:
    """Every tenth append leaves a queue offset out."""
    real = ConsumeQueueTable.apply
    count = 0

    def apply(self: ConsumeQueueTable, requests: Sequence[AppendRequest]) -> None:
        nonlocal count
        count += 1
        real(self, requests)
        if count % 10 == 0:
            request = requests[-1]
            queue = self.queue(request.region.topic, request.queue_id)
            queue.append(request.physical_offset, len(request.region.data), 0)

    return _patch(ConsumeQueueTable, "apply", apply)


def _stores_repeats_again() -> Any:
    """Repeated sends are not recognised."""
    return _patch(RepeatedSends, "admit", lambda self, *args, **kwargs: None)


def _takes_anothers_message_for_a_repeat() -> Any:
    """A send is recognised by its numbers alone: another producer's with the same ones is answered as stored."""
    return _patch(SentAgain, "require_same", lambda self, *args: None)


def _takes_its_own_message_for_anothers() -> Any:
    """The messages of a repeat are compared with those that stand behind them."""
    real = SentAgain.require_same

    def require_same(self: SentAgain, region: Any, stored: Any, index: int, count: int) -> None:
        end = self._reader.read(stored.topic, stored.queue_id, 1 << 40, 1, 1).end_offset
        if stored.queue_offset + count < end:
            stored = stored._replace(queue_offset=stored.queue_offset + 1)
        real(self, region, stored, index, count)

    return _patch(SentAgain, "require_same", require_same)


def _forgets_repeats_at_a_start() -> Any:
    """The table of repeated sends does not survive a restart."""
    return _patch(RepeatedSends, "replay", lambda self, records: None)


def _forgets_producers_to_make_room() -> Any:
    """Whoever comes is taken: in a full table the others are forgotten for it, however lately they have sent."""
    return _both(
        _patch(RepeatedSends, "_require_room", lambda self, now_ms: None),
        _patch(
            SentRuns,
            "_make_room",
            lambda self, time_ms: self.table.forget_until(time_ms - 1),
        ),
    )


def _takes_the_forgotten_for_new() -> Any:
    """What a producer names as sent before is not looked at."""
    return _patch(RepeatedSends, "_require", lambda self, *args: None)


def _answers_repeats_with_another_place() -> Any:
    """A repeated send is answered with the place behind the right one."""
    real = RepeatedSends.admit

    def admit(self: RepeatedSends, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        return found if found is None else found._replace(queue_offset=found.queue_offset + 1)

    return _patch(RepeatedSends, "admit", admit)


def _cuts_corruption() -> Any:
    """RocketMQ's way: the first append that does not hold ends the log, wherever it stands."""
    real = recovery.recover_log

    def recover_log(*args: Any, **kwargs: Any) -> Any:
        with (
            _patch(recovery, "find_resync", _nothing_found),
            _patch(recovery, "find_misplaced", _nothing_found),
            mock.patch.object(recovery, "max", _small_max, create=True),
        ):
            return real(*args, **kwargs)

    return _patch(derived_recovery, "recover_log", recover_log)


def _nothing_found(*_: Any, **__: Any) -> None:
    return None


def _small_max(*args: Any, **kwargs: Any) -> Any:
    """`max` in which what is known to be synced counts for nothing."""
    if len(args) == 2 and not kwargs and isinstance(args[0], int):
        return 0
    return max(*args, **kwargs)


def _does_not_zero_the_tail() -> Any:
    """A torn tail is left as it is."""
    return _patch(SegmentFolder, "clear_from", lambda self, position: None)


def _zeroes_without_a_sync() -> Any:
    """A torn tail is zeroed in the page cache only."""

    def clear_from(self: SegmentFolder, position: int) -> None:
        found = self.at(position)
        if found is not None and position < found.end_position:
            self._disk.truncate(found.fd, position - found.base_position)

    return _patch(SegmentFolder, "clear_from", clear_from)


def _trusts_the_consume_queue_files() -> Any:
    """What the files hold is believed, the log is not asked."""

    def replay(self: ConsumeQueueTable, records: Any) -> None:
        self._covered_position = 1 << 60

    return _patch(ConsumeQueueTable, "replay", replay)


def _no_folder_sync() -> Any:
    """A new segment is never made durable in its folder."""
    return _patch(SimDisk, "fsync_dir", lambda self, path: None)


def _no_sync_of_the_root() -> Any:
    """The folders of a new store are made and everything in them is synced, but not the names of the folders themselves."""
    real = SimDisk.fsync_dir

    def fsync_dir(self: SimDisk, path: str) -> None:
        if path.startswith(f"{ROOT}/"):
            real(self, path)

    return _patch(SimDisk, "fsync_dir", fsync_dir)


def _appends_behind_half_a_record() -> Any:
    """After a short write the log goes on behind it."""

    def take_back(self: CommitLog, tail: LogTail, size: int, error: OSError) -> None:
        self.tail = LogTail(tail.position + size // 2, tail.crc32c, tail.store_time_ms)
        raise DiskFullError("no space")

    return _patch(CommitLog, "_take_back", take_back)


def _acknowledges_half_a_write() -> Any:
    """The count that a write returns is not looked at."""
    return _patch(commit_log, "write_fully", lambda *args: None)


def _checkpoint_ahead() -> Any:
    """The checkpoint says that everything appended was flushed."""
    real = Saver.checkpoint

    def checkpoint(self: Saver) -> None:
        with mock.patch.object(LogFlusher, "flush", lambda flusher_: flusher_._positions.appended):
            write = checkpoint_module.write_checkpoint

            def ahead(disk: Disk, path: str, value: Checkpoint) -> None:
                write(disk, path, replace(value, flushed_position=value.replay_position))

            with mock.patch("protomq_broker.store.saving.write_checkpoint", ahead):
                real(self)

    return _patch(Saver, "checkpoint", checkpoint)


def _reads_beyond_the_end() -> Any:
    """Under SYNC_FLUSH messages are readable before they are synced."""
    return _patch(
        Positions, "readable", property(lambda self: self.appended, lambda self, position: None)
    )


def _read_too_early(seed: int) -> list[Violation]:
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(2)
    world.flush()
    world.send_some(2)
    world.scan()
    return world.fork("power", world.rng, keep=0.0).verify()


def _skips_a_message() -> Any:
    """A read skips its last message."""
    real = LogReader.read

    def read(self: LogReader, *args: Any, **kwargs: Any) -> ReadResult:
        result = real(self, *args, **kwargs)
        if result.record_count > 2 and result.queue_offsets is None:
            keep = result.record_count - 1
            end = int(result.starts[keep - 1] + result.sizes[keep - 1])
            if len(result.regions) == 1:
                result.sizes, result.starts = result.sizes[:keep], result.starts[:keep]
                result.regions = [result.regions[0]._replace(size_bytes=end)]
        return result

    return _patch(LogReader, "read", read)


def _leaks_a_neighbour() -> Any:
    """The regions of a read begin one record too early: somebody else's bytes."""
    real = LogReader.read

    def read(self: LogReader, *args: Any, **kwargs: Any) -> ReadResult:
        result = real(self, *args, **kwargs)
        if result.regions and result.regions[0].offset > 400:
            result.regions[0] = result.regions[0]._replace(offset=result.regions[0].offset - 1)
        return result

    return _patch(LogReader, "read", read)


def _time_goes_back() -> Any:
    """Store times follow a clock that is set back."""
    real = Appender._stamp

    def stamp(
        self: Appender, requests: Sequence[AppendRequest], position: int, store_time_ms: int
    ) -> tuple[Any, int, bool]:
        return real(self, requests, position, self._clock.now_ms())

    return _patch(Appender, "_stamp", stamp)


def _clock_set_back(seed: int) -> list[Violation]:
    world = StoreWorld(seed, sync_flush=False)
    world.open()
    for _ in range(6):
        world.send_some(2)
        world.clock.wall_ms -= 60_000
    return world.verify()


def _wrong_tag_code() -> Any:
    """Consume queue entries get another tag code than the record has."""
    real = ConsumeQueueTable.apply

    def apply(self: ConsumeQueueTable, requests: Sequence[AppendRequest]) -> None:
        for request in requests:
            codes = request.region.tag_codes
            request.region.tag_codes = codes + 1 if isinstance(codes, int) else codes + np.int64(1)
        real(self, requests)

    return _patch(ConsumeQueueTable, "apply", apply)


def _file_without_a_sync() -> Any:
    """Files are replaced without a sync before the rename."""

    def write(disk: Disk, path: str, *parts: bytes) -> None:
        temporary = f"{path}.tmp"
        fd = disk.create(temporary)
        disk.truncate(fd, 0)
        disk_module.write_fully(disk, fd, b"".join(parts), 0)
        disk.close(fd)
        disk.rename(temporary, path)
        disk.fsync_dir(path.rpartition("/")[0])

    return _patch(side_files, "write_file_atomically", write)


def _idle_groups_are_forgotten() -> Any:
    """Retention deletes a segment without saying again what is alive in it."""
    return _patch(CarryForward, "forward", lambda self, cut: None)


def _topics_are_not_carried() -> Any:
    """Retention deletes the records of topics without saying them again."""
    return _patch(TopicTable, "carry", lambda self, cut: ())


def _locks_are_not_carried() -> Any:
    """Retention deletes the records of locks without saying them again."""
    return _patch(LockTable, "carry", lambda self, cut: ())


def _freed_locks_come_back() -> Any:
    """A start takes who has a queue from the log, and not that it was given up."""
    real = LockTable.apply

    def apply(self: LockTable, body: bytes, position: int) -> Sequence[str]:
        record = LocksRecord.FromString(body)
        kept = [lock for lock in record.locks if lock.token]
        del record.locks[:]
        record.locks.extend(kept)
        return real(self, record.SerializeToString(), position)

    return _patch(LockTable, "apply", apply)


def _ends_are_not_carried() -> Any:
    """Retention deletes the last messages of a queue and does not say where it ended."""
    return _patch(LogFront, "_ends_of", lambda self, queues: b"")


def _producers_are_not_carried() -> Any:
    """Retention deletes what a producer has sent a minute ago, and that it has."""
    return _patch(RepeatedSends, "producers_since", lambda self, time_ms, count_max, runs_max: [])


def _deletes_before_the_sync() -> Any:
    """Segments go before what was carried forward of them is synced."""
    return _patch(CarryForward, "_sync", lambda self: None)


def _believes_a_cache_ahead_of_the_log() -> Any:
    """The cache of the topics is believed, whatever it knows that the log does not."""
    return _patch(TopicTable, "believe", lambda self, end_position: True)


def _saves_what_is_not_synced() -> Any:
    """A snapshot is saved before the log is synced as far as it tells."""
    real = TopicTable.apply

    def apply(self: TopicTable, body: bytes, position: int) -> Sequence[str]:
        gone = real(self, body, position)
        snapshot = self.unsaved()
        assert snapshot is not None
        snapshot.save(position + 1)
        return gone

    return mock.patch.multiple(
        TopicTable, apply=apply, believe=lambda self, end_position: True
    )


def _deletions_are_not_followed() -> Any:
    """A start that finds a deletion in the log leaves what stood in front of it."""
    return _patch(log_replay, "deletions_in_block", lambda block, records: ())


def _commits_are_answered_before_they_are_appended() -> Any:
    """A commit is in memory when it is answered, and in the log some time later."""

    def append_state(self: Appender, topic: str, bodies: Sequence[bytes], *_: Any) -> int:
        for body in bodies:
            self._machine_of[topic].apply(body, self._positions.appended)
        return self._positions.appended

    return _patch(Appender, "append_state", append_state)


def _segments_deleted_in_one_go() -> Any:
    """Several segments lose their names, and the folder is synced once: any of them may come back."""

    def remove(self: SegmentFolder, base_positions: list[int]) -> None:
        files = dict(self.files)
        removed = [files.pop(base) for base in base_positions]
        self.files = files
        for found in removed:
            self._disk.unlink(found.path)

    return _patch(SegmentFolder, "remove", remove)


def _flips_a_bit_of_a_key() -> Any:
    """Memory that forgets: a bit of a key or a tag is another when the record is written, and the seal is made of that."""
    real = Appender._stamp

    def stamp(
        self: Appender, requests: Sequence[AppendRequest], position: int, store_time_ms: int
    ) -> tuple[Any, int, bool]:
        parts, count, is_plain = real(self, requests, position, store_time_ms)
        data = bytearray().join(map(bytes, parts))
        _, record = _varint(data, requests[-1].physical_offset - position + 1)
        body_size, body = _varint(data, record + 1)
        data[body + body_size + 2] ^= 1  # the first octet behind tag and length
        return (bytes(data),), count, is_plain

    return _patch(Appender, "_stamp", stamp)


def _varint(data: bytearray, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _keys_in_the_log(seed: int) -> list[Violation]:
    """The log alone, without what clients see: for what only a CRC from end to end can tell."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(2)
    world.close()
    return parse_log(world.files()).violations


def _believes_every_entry() -> Any:
    """The check bits of consume queue entries are not looked at: a flipped one is believed."""

    def opened(data: bytes, count: int, queue_offset: int, salt: int) -> tuple[Any, int]:
        return real(data, count, queue_offset, salt)[0], count

    real = entry_check.opened
    return _patch(consume_queue, "opened", opened)


def _flipped_entries(seed: int) -> list[Violation]:
    """A bit of a tag code flips in a file of a consume queue: no filter may miss a message for it, or give another."""
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(12)
    world.flush()
    world.close()
    found: list[Violation] = []
    for path, data in world.disk.files(f"{ROOT}/consumequeue").items():
        if path.endswith("/table.bin"):
            continue
        image = world.fork("kill", world.rng)
        entry = image.rng.randrange(len(data) // 20)
        image.disk.flip_bit(path, entry * 160 + 96 + image.rng.randrange(64))
        image.open()
        with suppress(ConsumeQueueDamagedError):
            found += image.check_filters()
    return found


def _restarts_on_lost_pages() -> Any:
    """After a failed fsync and a restart, pages that never reached the disk are taken for stored."""
    return _patch(derived_recovery, "rewrite_unsynced", lambda *args: None)


def _lost_pages(seed: int) -> list[Violation]:
    world = StoreWorld(seed, sync_flush=True)
    world.open()
    world.send_some(1)
    world.flush()
    world.send([world.new_order(size=2000)])
    world.disk.plan = lambda operation: Fault.SYNC_LOST if operation.name == "fdatasync" else None
    world.flush()
    world.disk.plan = None
    second = world.fork("kill", world.rng)
    second.open()
    second.scan()
    second.send([second.new_order(size=10)])
    second.flush()
    return second.fork("power", second.rng, keep=0.0).verify()


def _heals_without_the_log() -> Any:
    """What a damaged queue has lost is given up without a look into the log."""

    def take(*_: Any) -> None:
        pass

    return _patch(healed_entries.HealedEntries, "take", take)


def _heals_into_the_wrong_place() -> Any:
    """Entries that are rebuilt stand one too far."""

    def take(
        self: healed_entries.HealedEntries, queue_offsets: Any, positions: Any, *columns: Any
    ) -> None:
        real(self, queue_offsets[:-1] + 1, positions[:-1], *(column[:-1] for column in columns))

    real = healed_entries.HealedEntries.take
    return _patch(healed_entries.HealedEntries, "take", take)


def _serves_what_it_never_checked() -> Any:
    """Regions of the log are given to readers as they are on the disk."""
    return _patch(CheckedLog, "find_damage", lambda self, parts: None)


def _checks_once_for_ever() -> Any:
    """What was checked once, or written by this process, is taken for good when it has come from the disk again."""
    return _patch(SegmentFile, "is_cached", lambda self, offset, size: True)


def _log_damaged_while_open(seed: int) -> list[Violation]:
    return damage_log_while_open(stopped_world(seed)[0], seed, DamageReport())


def _starts_at_the_checkpoint() -> Any:
    """A start looks at nothing that stands in front of the checkpoint."""
    return _patch(derived_recovery, "check_before", lambda *args, **kwargs: None)


def _takes_lost_segments_for_deleted_ones() -> Any:
    """A start believes that the log begins with the first segment that it finds."""
    return mock.patch.object(store_files, "settle_front")


def _looks_past_damage() -> Any:
    """A look-up skips what is damaged."""
    return _patch(MessageLookUps, "_lost_at", lambda *args, **kwargs: None)


def _forgets_what_the_index_missed() -> Any:
    """An index that is rebuilt in a damaged log does not remember what it could not see."""
    return _patch(MessageIndex, "pass_over", lambda *args: None)


def _harmed_segments(seed: int) -> list[Violation]:
    return harm_segments(stopped_world(seed)[0], seed, DamageReport())


def _damaged_while_open(seed: int) -> list[Violation]:
    return damage_while_open(stopped_world(seed)[0], seed, DamageReport())


def _moves_in_two_appends() -> Any:
    """The copies of messages are appended, and then the record that tells of it."""

    def append_moved(
        self: Appender,
        copies: Sequence[AppendRequest],
        states: Sequence[tuple[str, Sequence[bytes]]],
        reserve: Reserve = Reserve.STATE,
    ) -> int:
        end_position = self.append(copies)
        for topic, bodies in states:
            end_position = self.append_state(topic, bodies, reserve)
        return end_position

    return _patch(Appender, "append_moved", append_moved)


def _forgets_where_a_message_stood() -> Any:
    """A copy says of each message that it was the first of its queue."""
    real = transit.origins_of

    def origins(trailers: Any) -> Any:
        found = real(trailers)
        found["queue_offset"] = 0
        return found

    def pack(*values: int) -> bytes:
        return real_one.pack(*values[:3], 0, *values[4:])

    real_one = move_one._ORIGIN
    return _both(
        mock.patch.object(move, "origins_of", origins),
        mock.patch.object(move_alike, "origins_of", origins),
        mock.patch.object(move_one, "_ORIGIN", mock.Mock(pack=pack)),
    )


def _shows_half_messages() -> Any:
    """A half message enters its queue as if it were committed."""

    def is_queued(flags: Any) -> Any:
        return flags & FLAG_DUE_TIME == 0

    return _both(
        mock.patch.object(appending, "is_queued", is_queued),
        mock.patch.object(topic_counts, "is_queued", is_queued),
        mock.patch.object(consume_queue_table, "is_queued", is_queued),
    )


def _answers_repeats_with_the_next_place() -> Any:
    """The repeat of a message that is in no queue is answered with the place of the one behind it."""
    real = LogReader.position_behind

    def position_behind(self: LogReader, position: int, count: int) -> int:
        return real(self, position, count + 1)

    return _patch(LogReader, "position_behind", position_behind)


RARE: Final = {
    "acknowledges before it writes": 80,
}
"""Bugs of replication that few seeds show, and within how many one does."""

PLANTED: Final[tuple[Planted, ...]] = (
    Planted("loses an append", _loses_an_append, life),
    Planted("acknowledges before the sync", _acknowledges_before_the_sync, life),
    Planted("retries a failed fsync", _retries_the_fsync, failing_sync),
    Planted("ignores a failed fsync", _ignores_a_failed_fsync, failing_sync),
    Planted("swaps two records", _swaps_records, _same_sizes),
    Planted("gives a queue offset twice", _gives_an_offset_twice, life),
    Planted("leaves a queue offset out", _skips_an_offset, life),
    Planted("stores repeats again", _stores_repeats_again, retries),
    Planted("forgets repeats at a start", _forgets_repeats_at_a_start, retries),
    Planted("answers a repeat with another place", _answers_repeats_with_another_place, retries),
    Planted("forgets producers to make room", _forgets_producers_to_make_room, check_repeats),
    Planted(
        "takes another's message for a repeat", _takes_anothers_message_for_a_repeat, check_repeats
    ),
    Planted(
        "takes its own message for another's", _takes_its_own_message_for_anothers, check_repeats
    ),
    Planted("takes the forgotten for new", _takes_the_forgotten_for_new, check_repeats),
    Planted("cuts corruption", _cuts_corruption, damage),
    Planted("takes lost segments for deleted ones", _takes_lost_segments_for_deleted_ones, damage),
    Planted("leaves a torn tail", _does_not_zero_the_tail, torn_tail_twice),
    Planted("zeroes a torn tail without a sync", _zeroes_without_a_sync, torn_tail_twice),
    Planted("trusts the consume queue", _trusts_the_consume_queue_files, life),
    *(Planted(*bug) for bug in planted_leadership.BUGS),
    *(Planted(*bug) for bug in planted_follow.BUGS),
    *(Planted(name, plant, planted_ha.drill, RARE.get(name, 40)) for name, plant in planted_ha.BUGS),
    Planted("never syncs a folder", _no_folder_sync, life),
    Planted("never syncs the names of its folders", _no_sync_of_the_root, life),
    Planted(
        "goes on behind half a record",
        _appends_behind_half_a_record,
        loops("append one", plans=(Plan(Fault.SHORT, True),)),
    ),
    Planted(
        "takes half a write for a whole",
        _acknowledges_half_a_write,
        loops("append one", plans=(Plan(Fault.SHORT, False),)),
    ),
    Planted("checkpoint ahead of the log", _checkpoint_ahead, life),
    Planted("readable before the sync", _reads_beyond_the_end, _read_too_early),
    Planted("skips a message", _skips_a_message, life),
    Planted("serves a neighbour's bytes", _leaks_a_neighbour, life),
    Planted("store time goes back", _time_goes_back, _clock_set_back),
    Planted("wrong tag code", _wrong_tag_code, life),
    Planted("flips a bit of a key before it is written", _flips_a_bit_of_a_key, life),
    Planted("flips a bit of a key, seen in the log", _flips_a_bit_of_a_key, _keys_in_the_log),
    Planted("renames before the sync", _file_without_a_sync, whole_files),
    Planted("forgets idle groups", _idle_groups_are_forgotten, idle_group),
    Planted("forgets topics that rest", _topics_are_not_carried, check_states_of_log),
    Planted("forgets who has a queue", _locks_are_not_carried, check_states_of_log),
    Planted("gives queues back to who gave them up", _freed_locks_come_back, check_states_of_log, seeds=120),
    Planted("forgets where queues ended", _ends_are_not_carried, check_states_of_log),
    Planted("forgets producers with their segments", _producers_are_not_carried, check_states_of_log),
    # A power cut must fall between the deletion and the next sync.
    Planted("deletes before what is carried is synced", _deletes_before_the_sync, check_states_of_log, seeds=120),
    Planted("believes a cache ahead of the log", _believes_a_cache_ahead_of_the_log, rolled_back),
    Planted("saves a cache of what is not synced", _saves_what_is_not_synced, check_states_of_log),
    Planted("does not follow deletions", _deletions_are_not_followed, check_states_of_log),
    Planted(
        "answers commits before the append",
        _commits_are_answered_before_they_are_appended,
        settings,
    ),
    Planted("deletes segments in one go", _segments_deleted_in_one_go, retention),
    Planted("believes a flipped entry", _believes_every_entry, _flipped_entries),
    Planted("heals without the log", _heals_without_the_log, _damaged_while_open),
    Planted("heals into the wrong place", _heals_into_the_wrong_place, _damaged_while_open),
    Planted("serves what it never checked", _serves_what_it_never_checked, damage),
    Planted("checks once for ever", _checks_once_for_ever, _log_damaged_while_open),
    Planted("looks past damage", _looks_past_damage, _log_damaged_while_open),
    Planted("forgets what the index missed", _forgets_what_the_index_missed, damage),
    Planted("starts at the checkpoint, blindly", _starts_at_the_checkpoint, _harmed_segments),
    Planted("starts on lost pages", _restarts_on_lost_pages, _lost_pages),
    *(Planted(name, plant, check_delays) for name, plant in DELAY_BUGS.items()),
    Planted("moves in two appends", _moves_in_two_appends, check_moves),
    Planted("forgets where a message stood", _forgets_where_a_message_stood, check_moves),
    Planted("shows half messages", _shows_half_messages, check_moves),
    Planted(
        "answers repeats with the next place", _answers_repeats_with_the_next_place, check_moves
    ),
    Planted("counts invisible times by the wall clock", planted_pops.counts_time_by_the_wall, check_pops),
    Planted("answers acks before the sync", planted_pops.answers_before_the_sync, check_pops),
    Planted("loses what is popped to retention", planted_pops.leaves_open_messages_behind, check_pops),
    Planted("forgets popped queues that rest", planted_pops.forgets_popped_queues, check_pops),
    Planted("hands out what is just acknowledged", planted_pops.hands_out_what_is_settled, check_pops),
    Planted("ignores changes of invisible times", planted_pops.ignores_changes, check_pops),
    Planted("gives back late what nobody acknowledged", planted_pops.gives_back_late, check_pops),
    Planted("takes any receipt", planted_pops.takes_any_receipt, check_pops),
    Planted("appends pops that a reset has overtaken", planted_pops.resets_under_plans, check_pops),
    Planted("leaves messages open in a reset", planted_pops.resets_leave_messages_open, check_pops),
    Planted("resets only what is committed", planted_pops.resets_only_what_is_committed, check_pops),
    Planted("gives messages of a key together", planted_pops.gives_keys_together, check_pops),
    Planted("buries too late", planted_pops.buries_too_late, check_pops),
    Planted("forgets what popped messages failed of", planted_pops.forgets_what_failed, check_pops),
    Planted("buries twice", planted_pops.buries_in_two_appends, check_pops),
    Planted("takes what is saved for done", planted_pops.begins_anew_at_a_start, check_pops),
    *(Planted(*bug) for bug in TRANSACTION_BUGS),
    *(Planted(name, plant, check_send_backs) for name, plant in RETRY_BUGS),
    *(Planted(name, plant, planted_failover.drill, 1_000) for name, plant in planted_failover.BUGS),
    *(Planted(*bug) for bug in planted_failover.BUGS_OF_FEW_FAULTS),
)

FIRST_SEEDS: Final = {
    "gives queues back to who gave them up": 51,
    "answers acks before the sync": 7,
    "deletes before what is carried is synced": 42,
    "answers decisions before they are stored": 20,
    "commits in two appends": 27,
    "truncates a slave by length": 18,
    "acknowledges before it writes": 11,
    "saves a cache of what is not synced": 6,
    "compares no in-sync set": 1,
    "does not count proposals": 16,
    "goes on where logs do not agree": 18,
    "checkpoint ahead of the log": 4,
    "takes lost segments for deleted ones": 7,
    "forgets that its log has failed once more": 2,
    "replays dead letters again": 4,
    "forgets how often it asked": 2,
    "delivers retries early": 1,
    "lets half messages go with their segments": 2,
    "forgets who has a queue": 1,
    "forgets what popped messages failed of": 1,
    "forgets endings at a start": 1,
    "takes the master key of a copy for its election": 3,
    "counts its lease by a clock that stands still in a suspend": 8,
    "cuts corruption": 1,
    "forgets producers to make room": 27,
    "forgets topics that rest": 1,
    "runs with a log whose end was cut": 13,
    "takes a replaced store for the old one": 1,
    "forgets producers with their segments": 25,
    "starts at the checkpoint, blindly": 7,
    "misses recalls meanwhile": 19,
    "gives messages of a key together": 1,
    "appends pops that a reset has overtaken": 10,
    "acknowledges behind its lease": 6,
    "trusts promises for ever": 6,
    "takes proposals for made": 8,
    "drops its log for whoever leads": 5,
    "lets a copy live beside its store": 3,
    "fail-over: takes a cut log for whole": 1,
    "fail-over: forgets at a kill that its log was cut": 1,
    "fail-over: acknowledges before it writes": 5,
    "fail-over: truncates by length": 23,
    "fail-over: a lease by the wall clock": 8,
    "fail-over: a lease that stands still in a suspend": 4,
    "fail-over: a new master shows its whole log": 3,
    "fail-over: compares no in-sync set": 11,
    "fail-over: takes a damaged log for whole": 4,
    "fail-over: anybody leads": 13,
    "fail-over: changes are answered before replicas have them": 24,
    "fail-over: refuses by what replicas do not have": 27,
}
"""The seed that showed a bug when this was written, where all lower ones do not or take long. `make test` tries it first, and then the
others.
"""


def caught_by(planted: Planted, seeds: Sequence[int]) -> tuple[int, list[Violation]] | None:
    """(the seed that showed the bug, what the checker said); None if it got away."""
    for seed in seeds:
        with planted.plant():
            try:
                found = planted.drill(seed)
            except (StoreError, OSError, AssertionError, struct.error, DecodeError) as error:
                found = [Violation("crash", repr(error))]
        if found:
            return seed, found
    return None
