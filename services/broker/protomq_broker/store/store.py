"""The store of one broker: the log and everything that is derived from it, behind one face.

    Store
      CommitLog             the truth                                       log/
      CheckedLog            what of it holds, as far as is known            log/
      ConsumeQueueTable     queue offset -> position, derived               queues/
      MessageIndex          key or id -> position, derived                  index/
      RepeatedSends         producer, sequence -> place, derived            state/
      PendingTimers         due time -> position, derived                   timer/
      Transactions          half messages that are open, derived            state/
      state machines        offsets, topics, groups, pops: records of the log     state/
      LogFlusher, checkpoints                                               log/
      CarryForward          appends again what is alive before segments go      carry_forward.py
      Follower              another leader's bytes, while this one follows  following.py
      QueueHealer           heals damaged consume queue files               queues/
      LogHealer             heals damage of the log from a replica          log_healing.py

Who may call: `append`, `find_repeated`, `append_verbatim`, `lead` on the writer thread, one and always the same. Everything else on any
thread.

A store is opened to lead, or to follow: then its log is the leader's, who gives it the bytes. A follower that is open can be made the
leader (`lead`); a leader becomes a follower when it is opened again.

An append is visible when its position is published (`positions.py`), after the log and all derived structures have it. Nothing beyond
the readable position leaves the store by any way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protomq.wire.hashing import Octets
from protomq.wire.topics import QUEUES_DEFAULT

from .carry_forward import CarryForward
from .config import StoreConfig
from .errors import (
    DiskFullError,
    LogForkError,
    NotFollowingError,
    NotLeadingError,
    StoreFailedError,
)
from .files.disk import Disk
from .files.lock import StoreLock
from .following import Follower, LogFollowers
from .full_disk import FullDisk
from .housekeeping import Clock, Housekeeper, StoreActions
from .index.look_ups import Identity, MessageLookUps, Places
from .log.agreement import START, LogPoint
from .log.append import AppendRequest
from .log.checked_log import CheckedLog
from .log.checkpoint import Checkpoint, write_checkpoint
from .log.commit_log import DISK_FULL_ERRNOS, CommitLog, Reserve
from .log.durations import DISK_BOUNDS_S, Durations
from .log.epochs import Epochs
from .log.flusher import BackgroundThread, LogFlusher
from .log.kinds import MIXED, NO_OFFSET, is_queued
from .log.positions import LogTail, Positions, QueueKey
from .log.record_region import stamp_region
from .log.recovery import (
    DamagedRange,
    RecoveredLog,
    chain_at_end,
    seal_at_end,
    skips_of,
)
from .log.seals import LogWalker
from .log_healing import LogHealer
from .opening import (
    make_folders,
    restore_topics,
)
from .pop_carrying import PopCarrier
from .queues.consume_queue import ConsumeQueueDamagedError, DamagedFile
from .queues.heal import LogState, QueueHealer
from .queues.log_reader import LogReader
from .queues.quarantine import Quarantine
from .queues.reading import LogRegion, ReadResult, StoredPlace, TopicCounters
from .queues.selection import NO_TAGS
from .same_messages import SentAgain
from .scrub import Scrubber
from .state.groups import GroupTable
from .state.half_copies import (
    HalfCopies,
    half_copies,
)
from .state.half_messages import TransactionState
from .state.locks import LockTable
from .state.log_front import LogFront
from .state.machine import (
    StateMachine,
    StateWriter,
    positions_of,
    replay_states,
    state_region,
)
from .state.offsets import ConsumerOffsets
from .state.pop import PopState
from .state.send_errors import PartlyStoredError
from .state.transactions import CheckPlan, HalfMessage
from .store_files import Recovery, StoreFiles
from .timer.rebuild import TimerRebuild
from .timer.timer import TimerState
from .truncation import intend_truncation

__all__ = ["QueueKey", "Store", "StoredPlace", "TopicCounters"]

log = logging.getLogger(__name__)

_PART_SIZE_MIN_BYTES: Final = 16 << 10
_PARTS_MAX: Final = 512
"""Requests this large on average, and no more of them than a vectored write takes (IOV_MAX is 1,024), are not copied together: views
of their bytes do for CRC and write."""
_COPIED_SIZE_MAX_BYTES: Final = 8 << 10
"""Below it a copy costs less than a view."""
_SPACE_MIN_BYTES: Final = 1 << 20
"""A disk that is not full: where segments are not truly preallocated, a write into one may find no space."""


def _call(function: Callable[[], None]) -> None:
    function()


class Store:
    """See the module's docstring. Made by `Store.open`."""

    @classmethod
    def open(
        cls,
        root: Path | str,
        config: StoreConfig | None = None,
        *,
        clock: Clock,
        disk: Disk | None = None,
        background: bool = True,
        queues_default: int = QUEUES_DEFAULT,
        draw: Callable[[], int] | None = None,
        on_writer: Callable[[Callable[[], None]], None] = _call,
        check_plan: CheckPlan | None = None,
        follows: bool = False,
        epoch: int | None = None,
        waits_for_replicas: bool = False,
    ) -> Store:
        """Takes the lock, recovers, and starts the background threads (`background`: without them the caller flushes).

        `queues_default`: queues of a topic of which only the log tells, at least. `draw` gives random numbers of 63 bits, never 0: the
        store's own, and incarnations of topics; without it they are not random, which tests want. `on_writer` has a function called on
        the writer thread, and returns when it is done; it may raise StoreError. Without it, who deletes writes. `check_plan`: when
        producers are asked about their transactions; RocketMQ's where it is None. `follows`: another store leads; nothing is readable
        before `positions.note_replicated` says up to where that one's log is confirmed. `epoch`: in which it leads, one that was given to
        it; None: the next one. `waits_for_replicas`: it leads, and nothing is readable before `positions.note_replicated` says so.

        Raises StaleEpochError, StoreLockedError, StoreSettingsError, CorruptLogError, OSError; then everything is closed again.
        """
        disk = disk or Disk()
        root = os.path.abspath(root)
        config = config or StoreConfig()
        make_folders(disk, root)
        lock = StoreLock(disk, root)
        try:
            files = StoreFiles(disk, root, config, clock, lock, draw, check_plan or CheckPlan())
            recovery = files.recover()
            files.settle_epochs(recovery.log)
            end = recovery.log.tail.position
            epoch = files.end_epoch(end) if follows else files.begin_epoch(end, epoch)
            store = cls(
                files,
                recovery,
                epoch,
                clock,
                on_writer,
                queues_default,
                follows=follows,
                waits_for_replicas=follows or waits_for_replicas,
            )
            store._run(background)
        except BaseException:
            lock.release()
            raise
        return store

    def __init__(
        self,
        files: StoreFiles,
        recovery: Recovery,
        epoch: int,
        clock: Clock,
        on_writer: Callable[[Callable[[], None]], None],
        queues_default: int,
        *,
        follows: bool,
        waits_for_replicas: bool,
    ) -> None:
        """Wires what was recovered; nothing runs yet."""
        disk, root, config = files.disk, files.root, files.config
        self.root = root
        self.config = config
        self.id = files.id
        """The store's random number, 1 to 2^63 - 1."""
        self.topics = files.topics
        self.on_topic_deleted: Callable[[str], None] = _ignore
        """Told the name of a topic that is gone, on the thread that deleted it."""
        self.keep_from_position: Callable[[], int | None] = _nothing
        """Asked before segments are deleted: what the log has from there on is needed (by a replica, a timer, an open transaction)."""
        self._files = files
        self._disk = disk
        self._folder = files.folder
        self._queues, self._index, self._repeated = files.queues, files.index, files.repeated
        self._derived = files.derived
        self._apply_derived = tuple(structure.apply for structure in files.derived)
        self._apply_plain = tuple(
            structure.apply for structure in files.derived if structure.takes_plain
        )
        self._clock = clock
        self._monotonic = clock.monotonic
        self._on_writer = on_writer
        self._queues_default = queues_default
        self._follower: Follower | None = None
        self._told_start = (0, 0)  # where the log says that it begins, and where that record ends
        self._refusal = ""
        self._full_disk = FullDisk()
        self._is_checkpoint_failed = False
        self.is_closed_clean = False
        """All of it is on stable storage, and it was closed."""
        self._checkpointed_position = recovery.replay_position
        self._start = recovery.start
        self._counters: dict[str, TopicCounters] = {}
        self._wire_log(
            recovery, epoch, follows=follows, waits_for_replicas=waits_for_replicas
        )
        self._wire_reading(recovery)
        self._wire_states(recovery)
        if follows:
            self._follower = self._new_follower()
        else:
            self._restore_topics()
        self._wire_upkeep()

    def _wire_log(
        self, recovery: Recovery, epoch: int, *, follows: bool, waits_for_replicas: bool
    ) -> None:
        """The log, its positions, and who syncs it."""
        disk, config = self._disk, self.config
        self.positions = Positions(
            recovery.log.tail,
            recovery.log.synced_position,
            waits_for_flush=config.sync_flush,
            waits_for_replicas=waits_for_replicas,
        )
        """Where the log stands; listeners join here."""
        self._log = CommitLog(disk, self._folder, self.positions, epoch=epoch)
        self.append_durations = Durations(DISK_BOUNDS_S)
        """Of appends that were stored: from their stamping until what is derived from the log has them."""
        self._flusher = LogFlusher(disk, self._log, self.positions, self._monotonic)
        self.sync_durations = self._flusher.durations
        if not follows:
            self._begin_segment()

    def _wire_reading(self, recovery: Recovery) -> None:
        """What of the log is sound, and all ways to read it."""
        disk, clock = self._disk, self._clock
        self._quarantine = Quarantine(
            disk,
            f"{self.root}/config/quarantine.json",
            self._folder,
            self._queues,
            recovery.log.damaged,
            self._sync_to,
        )
        self._checked = CheckedLog(
            disk,
            self._folder,
            lambda: self._log.tail,
            self._start.point,
            self._quarantine,
            self._files.boundaries,
            clock.monotonic_ms,
            lambda: self._log.written_ms,
        )
        self._checked.begin(recovery.walked)
        self._reader = LogReader(
            self._folder, self._queues, self._checked, self.positions, self._quarantine
        )
        self._sent_again = SentAgain(self._reader, lambda: self.positions.appended)
        self._look_ups = MessageLookUps(
            self._folder, self._queues, self._index, self._reader, self.positions
        )

    def _wire_states(self, recovery: Recovery) -> None:
        """The machines, brought to the end of the log, and how what they know outlives the segments that tell of it."""
        disk, root, files = self._disk, self.root, self._files
        self.offsets = ConsumerOffsets(
            disk,
            f"{root}/config/consumerOffsets.json",
            self._folder.first_position,
            self.positions.appended,
        )
        self.groups = GroupTable(
            disk,
            f"{root}/config/groups.json",
            self._folder.first_position,
            self.positions.appended,
        )
        self.popped = PopState(
            disk, f"{root}/config/popState.json", self._folder.first_position, self.positions.appended
        )
        """What groups have popped."""
        self.locks = LockTable(
            disk, f"{root}/config/locks.json", self._folder.first_position, self.positions.appended
        )
        """Which members have which queues to themselves."""
        self._front = LogFront(
            self._queues,
            self._repeated,
            end_position=self.positions.appended,
            times=self._times,
        )
        self.pending = files.pending
        """Delayed messages that are not delivered yet."""
        self.timer = TimerState(self.pending)
        self.transactions = files.transactions
        """Half messages that nobody has committed or rolled back, and how the last others ended."""
        transaction_state = TransactionState(
            disk, files.transactions_folder, files.transactions, files.halves
        )
        self._machines: tuple[StateMachine, ...] = (
            self.topics,
            self.offsets,
            self.groups,
            self.timer,
            transaction_state,
            self.popped,
            self.locks,
            self._front,
        )
        """What stands in the log of the broker itself: what joins here is replayed, saved and carried forward."""
        self._machine_of = {machine.topic: machine for machine in self._machines}
        self._replay_states(recovery.log)
        transaction_state.end_replay()
        self.timer.begin_counting()
        self.topics.writer = self._writer_of(self.topics)
        self.groups.writer = self._writer_of(self.groups)
        pop_carrier = PopCarrier(
            self.popped,
            self._queues,
            self.topics,
            self.read_records,
            self._on_writer,
            self.append_moved,
            self.append_size_max_bytes,
        )
        self._carried = CarryForward(
            self, self._folder, self._machines, self._front, pop_carrier, self._on_writer
        )

    def _wire_upkeep(self) -> None:
        """Who mends, deletes and saves in the background; no thread runs yet."""
        disk, root, config = self._disk, self.root, self.config
        self._log_healer = LogHealer(
            disk,
            self._log,
            self._quarantine,
            self._checked,
            self._start.point,
        )
        self._scrubber = Scrubber(
            disk,
            self._folder,
            config.scrub_bytes_per_s,
            self._start.point,
            self._quarantine,
            self._checked,
        )
        self._healer = QueueHealer(
            disk,
            self._folder,
            self._queues,
            LogState(
                lambda: self._log.tail.position,
                lambda: self.positions.flushed,
                lambda: self.topics.deleted,
                self._quarantine,
            ),
        )
        self._timer_rebuild = TimerRebuild(
            disk,
            self._folder,
            self.pending,
            self.timer,
            self._queues,
            self._reader,
            self._quarantine,
            start_point=self._start.point,
            end_position=lambda: self.positions.appended,
            on_writer=self._on_writer,
        )
        self._keeper = Housekeeper(
            disk,
            root,
            config,
            self._clock,
            self._log,
            self._derived,
            StoreActions(
                self.checkpoint,
                lambda: self.positions.appended - self._checkpointed_position,
                self.delete_segments_below,
                self._keep_from,
                self._set_refusal,
                self._scrub,
                self._heal,
                self._look_for_space,
                self._fail_lost,
            ),
        )
        self._flush_thread = BackgroundThread(
            "protomq-flush", config.flush_interval_ms, self._flush_turn, self._crashed
        )
        self._keep_thread = BackgroundThread(
            "protomq-housekeeping", config.flush_interval_ms, self._keeper.turn, self._crashed
        )
        self._queues.watch_damage(self._keep_thread.wake)

    def _run(self, background: bool) -> None:
        """The store is open: says so on the disk, and starts its threads."""
        try:
            self._files.abort.write()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            log.warning("the disk is full: %s", error)
        self._files.lock.publish(self._disk.cache_id(self.root))
        if self.is_leading:
            self._carried.tell_untold()
        if self.config.sync_flush:
            self._flusher.flush()
        if background:
            self._flush_thread.start()
            self._keep_thread.start()

    def _begin_segment(self) -> None:
        """Makes the log's first segment, if it has none."""
        try:
            self._log.position_for(0)
        except DiskFullError as error:  # what is there can be read, and deleted
            self._note_disk_full(str(error))
        self.positions.publish(self._log.tail, ())

    # Leading and following.

    @property
    def is_leading(self) -> bool:
        """Whether the log continues with this store's own appends."""
        return self._follower is None

    @property
    def epochs(self) -> Epochs:
        """Which epochs the log has, and which parts of it this store wrote as the leader."""
        follower = self._follower
        return self._files.epochs if follower is None else follower.epochs

    def append_verbatim(self, position: int, data: bytes, *, may_end_within: bool = False) -> int:
        """Stores whole appends of the leader's log, which stand at `position` there; the new appended position. The writer thread.

        `may_end_within`: the beginning of one more may stand behind them, which is not stored yet.
        An empty log begins at any segment. Raises NotFollowingError; ForeignBytesError: nothing of them is stored; DiskFullError,
        StoreFailedError: they are stored up to the appended position.
        """
        if self._follower is None:
            raise NotFollowingError("the store leads: it takes nobody else's bytes")
        try:
            return self._follower.append(position, data, may_end_within=may_end_within)
        except DiskFullError as error:
            self._note_disk_full(str(error))
            raise

    def lead(self, epoch: int | None = None, *, waits_for_replicas: bool = False) -> int:
        """The follower leads from the end of its log on, in a new epoch, which is durable when this returns; the epoch. The writer thread.

        `epoch`: the one that it was given; None: the next one. `waits_for_replicas`: what is not confirmed yet stays unreadable until
        `positions.note_replicated` says more. Raises StaleEpochError, OSError: then it follows on.
        """
        follower = self._follower
        assert follower is not None, "a follower becomes the leader"
        if self._log.failure:
            raise StoreFailedError(self._log.failure)
        self._files.epochs = follower.epochs
        self._log.epoch = self._files.begin_epoch(self.positions.appended, epoch)
        self._follower = None
        self._repeated.end_partial()
        self._begin_segment()
        self._restore_topics()
        self.positions.wait_for_replicas(waits_for_replicas)
        self._carried.tell_untold()
        return self._log.epoch

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """(the last epoch not above `epoch` that the log has, where it ends there); None if it has none. Any thread."""
        return self.epochs.end_of(epoch, self.positions.appended)

    def log_point(self, position: int) -> LogPoint | None:
        """The end of an append at a position; None if there is none. Any thread; a part of a segment is read."""
        if not 0 < position <= self.positions.appended:
            return START if position == self._folder.first_position == 0 else None
        segment = self._folder.at(position - 1)
        if segment is None:
            return None
        base = segment.base_position
        hints = [at for at in self._files.boundaries.read(base) if at[0] < position]
        skips = skips_of(self._quarantine.ranges)
        for start, crc in (*hints[-1:], (base, None)):
            walker = LogWalker(
                self._disk, self._folder, start, crc, skips=skips, end_position=position
            )
            for _ in walker:
                pass
            last = walker.last_seal
            if last is not None and last.end_position == position:
                return LogPoint(position, last.epoch, last.crc32c)
        return None

    def truncate_to(self, point: LogPoint) -> LogPoint:
        """The next opening truncates the log to a point at which it agrees with the leader's; until then nothing is stored any more.

        `START` if they agree nowhere: then the log begins again, wherever the leader's does. So it does if its front was deleted, and what
        was carried forward from there stands behind the point. The result is where the log will end. The writer thread.
        Raises NotFollowingError, LogForkError: the log has no such point; StoreFailedError, OSError: then nothing has changed.
        """
        if self._follower is None:
            raise NotFollowingError("the store leads: nobody says where its log ends")
        if point != START and self.log_point(point.position) != point:
            raise LogForkError(self.positions.appended, f"it has no {point}")
        if not self._front.is_told(self._folder.first_position, point.position, self._reader):
            point = START
        if self.flush() < point.position:
            raise StoreFailedError(self._log.failure)
        intend_truncation(self._disk, self.root, point)
        self._log.fail(f"the log is to be truncated to position {point.position}: open the store again")
        return point

    def _new_follower(self) -> Follower:
        followers = LogFollowers(
            self._derived, self._machine_of, self._queues, self._repeated, self._forget_topic
        )
        return Follower(
            self._log,
            self._checked,
            self.positions,
            followers,
            self._files.epochs,
            self._clock.now_ms,
            self._count,
        )

    def log_regions(self, start: int, end: int) -> list[LogRegion]:
        """The log from `start` to `end` as it stands in its segments, unchecked; less where segments are gone. Any thread."""
        regions: list[LogRegion] = []
        for segment in self._folder.overlapping(start, end):
            first = max(start, segment.base_position)
            if first != start + sum(region.size_bytes for region in regions):
                break
            last = min(end, segment.end_position)
            regions.append(LogRegion(segment, first - segment.base_position, last - first))
        return regions

    # Positions.

    @property
    def min_position(self) -> int:
        """Where the oldest segment starts."""
        return self._folder.first_position

    @property
    def appended_position(self) -> int:
        """End of the log."""
        return self.positions.appended

    @property
    def flushed_position(self) -> int:
        """Everything below is on stable storage."""
        return self.positions.flushed

    @property
    def readable_position(self) -> int:
        """Nothing at or beyond it is given to anybody."""
        return self.positions.readable

    @property
    def epoch(self) -> int:
        """Of the appends that are made now."""
        return self._log.epoch

    @property
    def append_size_max_bytes(self) -> int:
        """The most that the records of one `append` may have together."""
        return self._log.append_size_max_bytes

    @property
    def log_failure(self) -> str:
        """Why the log has failed for good: what is not flushed by now never will be; "" if it has not."""
        return self._log.failure

    @property
    def write_refusal(self) -> str:
        """Why no writes are taken; "" if they are."""
        return self._log.failure or self._refusal or self._full_disk.reason

    @property
    def damaged_ranges(self) -> Sequence[DamagedRange]:
        """Parts of the log that are in quarantine."""
        return self._quarantine.ranges

    def heal_log(self, damage: DamagedRange, data: bytes) -> None:
        """Puts the bytes of a replica in the place of a range in quarantine. Any thread.

        Raises HealingRefusedError if they are not those that stood there: nothing is changed. OSError.
        """
        self._log_healer.heal(damage, data)

    @property
    def unhealed_ranges(self) -> Sequence[DamagedRange]:
        """Parts of the log in quarantine whose bytes a replica may heal."""
        return self._log_healer.ranges()

    @property
    def healed_range_count(self) -> int:
        """Damaged ranges of the log that were healed from a replica since the start."""
        return self._log_healer.healed_count

    @property
    def damaged_files(self) -> Sequence[DamagedFile]:
        """Files of consume queues in which damage was met, and which are not healed."""
        return self._queues.damaged_files()

    @property
    def healed_file_count(self) -> int:
        """Consume queue files that were healed from the log since the start."""
        return self._healer.healed_count

    @property
    def timer_rebuilt_count(self) -> int:
        """How often the timer's files were rebuilt from the log since the start."""
        return self._timer_rebuild.rebuilt_count

    # Writing: the writer thread.

    def append(
        self,
        requests: Sequence[AppendRequest],
        reserve: Reserve = Reserve.MESSAGES,
        apply_state: Callable[[], None] | None = None,
    ) -> int:
        """Appends all of them as one group, one write and one seal; sets their offsets; the new appended position.

        `reserve`, `apply_state`: of `append_state` and `append_moved`; the latter is called when what is derived has the records.

        Raises DiskFullError, StoreFailedError, AppendTooLargeError or NotLeadingError: then nothing of it is stored.
        """
        assert requests, "an append has records"
        if self._follower is not None or self._log.failure or (self._refusal and apply_state is None):
            self._repeated.drop_claims()
            if self._follower is not None:
                raise NotLeadingError("the store follows another one: ask the leader")
            raise (
                StoreFailedError(self._log.failure)
                if self._log.failure
                else DiskFullError(self._refusal)
            )
        commit_log = self._log
        try:
            position = commit_log.position_for(
                len(requests[0].region.data)
                if len(requests) == 1
                else sum(len(r.region.data) for r in requests),
                reserve,
            )
            before = commit_log.tail
            began_s = self._monotonic()
            if before.position >= self._checked.next_note:
                self._checked.note_append(before)
            store_time_ms = max(self._clock.now_ms(), before.store_time_ms)
            parts, count, is_plain = self._stamp(requests, position, store_time_ms)
            tail = commit_log.append(parts, count, store_time_ms)
            try:
                for apply in self._apply_plain if is_plain else self._apply_derived:
                    apply(requests)
                if apply_state is not None:
                    apply_state()
            except Exception as error:
                reason = f"what is derived from the log could not follow it: {error!r}"
                log.exception("%s", reason)
                commit_log.take_back(before, reason)
                raise StoreFailedError(reason) from error
        except Exception as error:
            self._repeated.drop_claims()
            if isinstance(error, DiskFullError):
                self._note_disk_full(str(error))
            raise
        if self._full_disk.was_full and self._full_disk.stored():
            _say_writes_are_taken()
        self.append_durations.observe(self._monotonic() - began_s)
        self.positions.publish(tail, self._count(requests))
        return tail.position


    def append_state(
        self, topic: str, bodies: Sequence[bytes], reserve: Reserve = Reserve.STATE
    ) -> int:
        """Appends the broker's own records, one for each body, and applies them to the state that the system topic holds; where they end.

        Taken as long as the disk takes them, however full it is: a disk is freed by deleting segments, which needs such appends.
        Raises what `append` raises.
        """
        return self._append_states((), [(topic, bodies)], reserve)

    def append_moved(
        self, copies: Sequence[AppendRequest], states: Sequence[tuple[str, Sequence[bytes]]]
    ) -> int:
        """Appends copies of messages (`log/move.py`) together with what the states, by their system topics, have to know of that; where
        all of it ends. One append with one seal: either all of it is in the log or nothing, whatever happens to the process or the power.

        It is taken however full the disk is, as in `append_state`. Raises what `append` raises.
        """
        return self._append_states(copies, states, Reserve.STATE)

    def _append_states(
        self,
        copies: Sequence[AppendRequest],
        states: Sequence[tuple[str, Sequence[bytes]]],
        reserve: Reserve,
    ) -> int:
        now_ms = self._clock.now_ms()
        records = [AppendRequest(state_region(topic, bodies, now_ms), 0) for topic, bodies in states]

        def apply() -> None:
            for (topic, bodies), request in zip(states, records, strict=True):
                machine = self._machine_of[topic]
                for body, position in zip(bodies, positions_of(request), strict=True):
                    for gone in machine.apply(body, position):
                        for derived in self._derived:
                            derived.remove_topic(gone)

        return self.append([*copies, *records], reserve, apply)

    def find_repeated(
        self, request: AppendRequest, previous_sequence: int | None = None
    ) -> StoredPlace | None:
        """The place of the first time if this send is stored already; None if it is new: then the caller appends it next.

        `previous_sequence`: a sequence of the producer that must be stored here.

        Raises what `RepeatedSends.admit` raises: SendInFlightError if the same send is part of the group not yet appended. And
        ProducerIdTakenError where other messages have its sequences, SequenceExpiredError where that cannot be told any more.
        """
        region = request.region
        if not region.producer_id:
            return None
        try:
            found = self._repeated.admit(
                region.producer_id,
                region.producer_epoch,
                region.first_sequence,
                region.count,
                topic=region.topic,
                previous_sequence=previous_sequence,
                now_ms=self._next_store_time_ms,
            )
        except PartlyStoredError as error:
            index = error.first_known - region.first_sequence
            self._sent_again.require_same(region, error.part, index, error.count)
            raise
        if found is None:
            return None
        self._sent_again.require_same(region, found, 0, region.count)
        if found.queue_offset == NO_OFFSET:
            position = self._reader.position_behind(found.position, found.ahead)
            return StoredPlace(found.topic, found.queue_id, NO_OFFSET, position)
        queue = self._queues.find(found.topic, found.queue_id)
        position = 0
        if queue is not None and queue.known_min_offset <= found.queue_offset < queue.end_offset:
            position = queue.entry(found.queue_offset)[0]
        return StoredPlace(found.topic, found.queue_id, found.queue_offset, position)

    def drop_claims(self) -> None:
        """What `find_repeated` said is new is not appended."""
        self._repeated.drop_claims()

    def _next_store_time_ms(self) -> int:
        return max(self._clock.now_ms(), self.positions.tail.store_time_ms)

    def request_flush(self) -> None:
        """Wakes the flusher; any thread. What is appended while it syncs is covered by its next sync."""
        self._flush_thread.wake()

    def flush(self) -> int:
        """Syncs the log now, on the calling thread; the flushed position."""
        return self._flusher.flush()

    # Reading: any thread.

    def read(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        record_count_max: int,
        size_max_bytes: int,
        tag_codes: frozenset[int] = NO_TAGS,
    ) -> ReadResult:
        """The records of a queue from `queue_offset` on; at least one if there is one that matches, however large.

        Raises CorruptLogError for records that stand in a damaged part of the log.
        """
        result = self._reader.read(
            topic, queue_id, queue_offset, record_count_max, size_max_bytes, tag_codes
        )
        if result.regions_size_bytes:
            self.count_read(topic, result)
        return result

    def look(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        record_count_max: int,
        size_max_bytes: int,
        tag_codes: frozenset[int] = NO_TAGS,
    ) -> ReadResult:
        """As `read`, for records of which it is not sure yet that they leave the broker: they are not counted."""
        return self._reader.read(
            topic, queue_id, queue_offset, record_count_max, size_max_bytes, tag_codes
        )

    def count_read(self, topic: str, result: ReadResult) -> None:
        """Counts records as read."""
        counters = self.counters_of(topic)
        counters.records_out += result.record_count
        counters.bytes_out += result.regions_size_bytes

    def appended_end_offset(self, topic: str, queue_id: int) -> int:
        """One past the last offset that a message of the queue has, readable or not."""
        return self._queues.end_offset(topic, queue_id)

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """(first queue offset that is there, one past the last that may be read)."""
        return self._reader.queue_range(topic, queue_id)

    def offset_at_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """Queue offset of the first readable message stored at `time_ms` or later; the end if there is none."""
        return self._reader.offset_at_time(topic, queue_id, time_ms)

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Store time of a message that is there; KeyError if it is not, or may not be read."""
        return self._reader.store_time_of(topic, queue_id, queue_offset)

    def read_records(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[bytes, NDArray[np.int64], NDArray[np.bool_]]:
        """As `LogReader.read_records`."""
        return self._reader.read_records(positions, sizes)

    def record_at(self, position: int) -> bytes | None:
        """The record (without tag and length) at a position, None if it is gone or damaged."""
        return self._reader.record_at(position)

    def regions_hold(self, regions: Sequence[LogRegion]) -> bool:
        """Whether regions of an earlier answer hold now: they can be damaged behind it. If not, the next `read` knows it."""
        return self._reader.regions_hold(regions)

    def find_by_key_hash(
        self,
        topic: str,
        key_hash: int,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        *,
        check_time: Callable[[], None] = lambda: None,
    ) -> Iterator[bytes]:
        """As `MessageLookUps.by_key_hash`."""
        return self._look_ups.by_key_hash(topic, key_hash, begin_ms, end_ms, check_time=check_time)

    def find_by_message_id(self, topic: str, identity: Identity) -> Iterator[bytes]:
        """As `MessageLookUps.by_message_id`."""
        return self._look_ups.by_message_id(topic, identity)

    def find_everywhere(self, identity: Identity, count_max: int) -> Places:
        """As `MessageLookUps.everywhere`."""
        return self._look_ups.everywhere(identity, count_max)

    def counters_of(self, topic: str) -> TopicCounters:
        """Counters of a topic since the start."""
        counters = self._counters.get(topic)
        return (
            counters if counters is not None else self._counters.setdefault(topic, TopicCounters())
        )

    def disk_used_ratio(self) -> float:
        """Used part of the disk of the store, from 0.0 to 1.0."""
        return self._disk.usage(self.root).used_ratio

    # Administration: any thread.

    def delete_topic(self, topic: str) -> None:
        """Deletes a topic with its queues and committed offsets. Its records stay in the log until their segments go.

        It goes between two appends: a send that found it is appended before, and gone with it. Not the writer thread, unless `on_writer`
        says so. Raises what `append` raises, and NoWriterError.
        """
        if self.topics.delete(topic):
            self._keep_offsets()
            self._forget_topic(topic)

    def _forget_topic(self, topic: str) -> None:
        """The topic is gone, from all that is derived too."""
        self.offsets.forget_topic(topic)
        self._counters.pop(topic, None)
        self.on_topic_deleted(topic)

    def delete_segments_below(self, position: int) -> int:
        """Deletes the segments that end at or below `position`, except those that a recovery would
        need; where the log starts now. What is alive in them is appended again before. Not the writer thread, unless `on_writer` says so.

        A follower deletes no more than its leader has, and appends nothing.

        A pull that is sending from one of them goes on: its file is open until the last reference goes.
        """
        follower = self._follower
        if follower is not None:
            position = min(position, follower.deletable_below())
        cut = self._log.start_without(min(position, self._checkpointed_position))
        if cut > self._folder.first_position and follower is None:
            if cut > self._told_start[0]:
                self._carried.forward(cut)
                self._told_start = cut, self.positions.appended
            if self.positions.waits_for_replicas and self.positions.confirmed < self._told_start[1]:
                return self._folder.first_position  # a replica that leads must have what was carried
        removed = self._log.remove_segments_below(cut)
        first = self._folder.first_position
        if removed:
            log.info("%d segments below position %d are deleted", len(removed), first)
            self._start.move(chain_at_end(removed[-1]))
            self._quarantine.forget_below(first)
            for derived in self._derived:
                derived.delete_below(first)
            self._files.boundaries.remove_below(first)
        return first

    def checkpoint(self) -> None:
        """Makes everything durable and says so in the checkpoint; not the writer thread.

        Nothing happens after a sync has failed, of the log or of derived files: then only the old checkpoint can be believed.
        """
        tail = self.positions.tail
        frozen_position = self._repeated.freeze()
        try:
            self._checkpoint(tail, max(tail.position, frozen_position))
        finally:
            self._repeated.thaw()

    def _checkpoint(self, tail: LogTail, durable_position: int) -> None:
        found = [machine.unsaved() for machine in self._machines]
        snapshots = [snapshot for snapshot in found if snapshot is not None]
        # What is in them must be on the disk first.
        durable_position = max((durable_position, *(s.end_position for s in snapshots)))
        if self._flusher.flush() < durable_position or self._is_checkpoint_failed:
            return
        for snapshot in snapshots:
            snapshot.save(tail.position)
        follower = self._follower
        if follower is not None:  # before the walk of the next start begins behind them
            self._keep_foreign_epochs(follower.epochs)
        try:
            for derived in self._derived:
                derived.checkpoint(tail.position)
        except OSError as error:
            self._is_checkpoint_failed = error.errno not in DISK_FULL_ERRNOS
            raise
        write_checkpoint(
            self._disk,
            f"{self.root}/checkpoint",
            Checkpoint(
                self.positions.flushed,
                tail.position,
                tail.crc32c,
                self._log.epoch,
                tail.store_time_ms,
                *self._start.checkpointed(),
            ),
        )
        self._checkpointed_position = tail.position
        self._checked.save(tail.position)
        if follower is not None:
            self.delete_segments_below(tail.position)

    def _keep_foreign_epochs(self, epochs: Epochs) -> None:
        """Writes down the epochs of other leaders, if there are new ones."""
        if epochs.rows != self._files.epochs.rows:
            first, flushed = self._folder.first_position, self.positions.flushed
            self._files.keep_epochs(epochs.between(first, epochs.rows[-1].start_position, flushed))

    def close(self) -> None:
        """Stops the threads, makes everything durable, and gives the lock back. The writer has stopped before."""
        self._flush_thread.stop()
        self._keep_thread.stop()
        try:
            self.checkpoint()
            self._checked.save(self.positions.flushed, is_last=True)
            self._keeper.save()
            if not self._log.failure and not self._is_checkpoint_failed:
                self._files.abort.remove()
                self.is_closed_clean = True
        except OSError as error:
            log.error(
                "the store closes without a last checkpoint; the next start recovers: %s", error
            )
        finally:
            for derived in self._derived:
                derived.close()
            self._log.close()
            self._files.lock.release()

    # Parts of append.

    def _stamp(
        self, requests: Sequence[AppendRequest], position: int, store_time_ms: int
    ) -> tuple[Sequence[Octets], int, bool]:
        """Gives each record its place and time; (the bytes of the group in parts, number of records, whether all are plain messages)."""
        start = position
        if len(requests) == 1:
            request = requests[0]
            region = request.region
            if region.flags:
                offset = self._next_offset(request, None)
            else:
                offset = self._queues.queue(region.topic, request.queue_id).end_offset
            stamp_region(region, request.queue_id, store_time_ms, offset, position)
            request.queue_offset, request.physical_offset = offset, position
            request.store_time_ms = store_time_ms
            data = region.data
            octets = bytes(data) if len(data) < _COPIED_SIZE_MAX_BYTES else np.frombuffer(data, np.uint8)
            return (octets,), region.count, not region.flags
        ends: dict[QueueKey, int] = {}
        count = 0
        is_plain = True
        for request in requests:
            region = request.region
            key = (region.topic, request.queue_id)
            known = ends.get(key)
            if region.flags:
                is_plain = False
                offset = self._next_offset(request, known)
            else:
                offset = self._queues.queue(*key).end_offset if known is None else known
            stamp_region(region, request.queue_id, store_time_ms, offset, position)
            request.queue_offset, request.physical_offset = offset, position
            request.store_time_ms = store_time_ms
            if offset >= 0:
                ends[key] = offset + region.count
            count += region.count
            position += len(region.data)
        datas = [request.region.data for request in requests]
        if position - start >= len(datas) * _PART_SIZE_MIN_BYTES and len(datas) <= _PARTS_MAX:
            return [np.frombuffer(data, np.uint8) for data in datas], count, is_plain
        return (b"".join(datas),), count, is_plain

    def _next_offset(self, request: AppendRequest, known: int | None) -> int:
        """Queue offset of the first record of a request that has flags; `known`: where its queue ends with what this append has put into
        it before."""
        region = request.region
        if not is_queued(region.flags):
            assert region.flags != MIXED, "it is refused before"
            return NO_OFFSET
        if known is not None:
            return known
        return self._queues.queue(region.topic, request.queue_id).end_offset

    def _count(self, requests: Sequence[AppendRequest]) -> list[QueueKey]:
        """Counts what entered queues; the queues it went to."""
        keys: list[QueueKey] = []
        counters = self._counters
        for request in requests:
            region = request.region
            if region.flags and not is_queued(region.flags):
                continue  # nobody can read it there
            topic = region.topic
            keys.append((topic, request.queue_id))
            counter = counters.get(topic)
            if counter is None:
                counter = self.counters_of(topic)
            counter.records_in += region.count
            counter.bytes_in += len(region.data)
        return keys

    # Recovery and background.

    def _replay_states(self, recovered: RecoveredLog) -> None:
        """Brings the states to the end of the log by the records that it has of them."""
        try:
            replay_states(self._machines, self._queues, self._reader)
        except ConsumeQueueDamagedError:
            self._files.rebuild_queues(recovered)
            replay_states(self._machines, self._queues, self._reader)

    def _writer_of(self, machine: StateMachine) -> StateWriter:
        """How the machine's changes get into the log."""

        def append(body: bytes) -> int:
            return self.append_state(machine.topic, [body])

        def change(make: Callable[[], bytes]) -> None:
            end_position = 0

            def change_here() -> None:
                nonlocal end_position
                body = make()
                if body:
                    end_position = append(body)

            self._on_writer(change_here)
            if end_position > self.positions.readable and self.flush() < end_position:
                raise StoreFailedError(self._log.failure)

        return StateWriter(append, change)

    def _restore_topics(self) -> None:
        """Topics of which no record tells, by their messages; and offsets of topics that are gone are forgotten."""
        known_incarnations = self.offsets.incarnations(self.topics.deleted)
        restore_topics(self.topics, self._queues, self._queues_default, known_incarnations, self.id)
        self._keep_offsets()

    def _keep_offsets(self) -> None:
        """Forgets the offsets of topics that are gone, and what was popped of them."""

        def incarnation_of(name: str) -> int | None:
            topic = self.topics.find(name)
            return topic.incarnation if topic is not None else None

        self.offsets.keep(incarnation_of)
        self.popped.keep(incarnation_of)

    def half_copies(
        self,
        halves: Sequence[HalfMessage],
        *,
        is_half: bool = False,
        now_ms: int = 0,
        topic: str = "",
    ) -> HalfCopies:
        """Copies of half messages; see `half_copies`. Those that are committed: the writer thread."""
        if halves and not is_half and not topic:
            fresh = self._files.halves.fresh.copies(halves)
            if fresh is not None:
                return HalfCopies(fresh, list(halves), [])
        return half_copies(halves, self.read_records, is_half=is_half, now_ms=now_ms, topic=topic)

    def has_topic_of(self, topic: str, queue_id: int, position: int) -> bool:
        """Whether the topic of a message that stands at a position was not deleted since."""
        return position >= self.topics.deleted.get(topic, 0)

    def _times(self, position: int) -> tuple[int, int]:
        """Store time of the last record in front of `position`, where a segment ends, and of the last one of all."""
        end_ms = self.positions.tail.store_time_ms
        seal = seal_at_end(self._folder.at(position - 1))
        return (end_ms if seal is None else seal.store_time_ms), end_ms

    def _note_disk_full(self, reason: str) -> None:
        if self._full_disk.refused(reason, self._clock.monotonic_ms()):
            log.warning("writes: refused, %s", reason)

    def _look_for_space(self) -> None:
        """After an append was refused for a full disk: whether the next one would be, which somebody may wait for."""
        if not self._full_disk.is_look_due(self._clock.monotonic_ms()):
            return
        if self._log.has_next_segment:
            has_space = self._disk.usage(self.root).free_bytes >= _SPACE_MIN_BYTES
        else:
            has_space = self._log.prepare_next_segment()
        if has_space:
            self._full_disk.found_space()
            _say_writes_are_taken()

    def _fail_lost(self, reason: str) -> None:
        """The files are gone: nothing is written any more, nor created in their place."""
        log.critical("%s", reason)
        self._is_checkpoint_failed = True
        self._log.fail(reason)
        self.positions.note_failed()

    def _set_refusal(self, reason: str) -> None:
        self._refusal = reason

    def _keep_from(self) -> int | None:
        return self.keep_from_position()

    def _scrub(self, now_ms: int) -> None:
        if self.config.scrub_bytes_per_s:
            self._scrubber.step(now_ms, self.positions.flushed)

    def _heal(self, now_ms: int) -> None:
        self._healer.step(now_ms)
        self._timer_rebuild.step(now_ms)

    def _sync_to(self, position: int) -> None:
        if position > self.positions.flushed:
            self._flusher.flush()

    def _flush_turn(self) -> None:
        self._flusher.flush()

    def _crashed(self, error: BaseException) -> None:
        self._log.fail(f"a background thread of the store has ended: {error!r}")
        self.positions.note_failed()


def _ignore(_: object) -> None:
    pass


def _nothing() -> None:
    return None


def _say_writes_are_taken() -> None:
    log.warning("writes: accepted again, there is space")
