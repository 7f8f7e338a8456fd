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

Call `append`, `find_repeated`, `append_verbatim` and `lead` on the writer thread, always the same one. Call everything else on any thread.

A store is opened to lead or to follow. A follower's log is the leader's: it stores the bytes that the leader gives. An open follower can
become the leader (`lead`); a leader becomes a follower only when it is opened again.

An append is visible when its position is published (`positions.py`), after the log and all derived structures have it. Nothing behind the
readable position leaves the store in any way.
"""

from __future__ import annotations

import logging
import os
import threading
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
"""Up to this number of requests, if they are large on average, CRC and write use views of their bytes and copy nothing. (A vectored write
takes IOV_MAX, 1,024.)
"""
_COPIED_SIZE_MAX_BYTES: Final = 8 << 10
"""Below this average size a copy costs less than a view."""
_SPACE_MIN_BYTES: Final = 1 << 20
"""Free bytes of a disk that counts as not full. Where segments are not truly preallocated, a write into one may find no space."""


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

        `queues_default`: fewest queues of a topic that is known only from the log. `draw` gives random numbers of 63 bits, never 0, for the
        store's id and for incarnations of topics. Without it they are not random, as tests need it. `on_writer` calls a function on the
        writer thread and returns when it is done; it may raise StoreError. Without it, the thread that deletes also writes. `check_plan`:
        when producers are asked about their transactions; None: RocketMQ's times. `follows`: another store leads; nothing is readable
        before `positions.note_replicated` says how far the leader's log is confirmed. `epoch`: the epoch in which the store leads, if it
        was given one; None: the next one. `waits_for_replicas`: the store leads, and nothing is readable before `positions.note_replicated`
        says so.

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
        """Connects the recovered parts; no thread runs yet."""
        disk, root, config = files.disk, files.root, files.config
        self.root = root
        self.config = config
        self.id = files.id
        """The store's random number, 1 to 2^63 - 1."""
        self.topics = files.topics
        self.on_topic_deleted: Callable[[str], None] = _ignore
        """Called with the name of a deleted topic, on the thread that deleted it."""
        self.on_housekeeping: Callable[[], None] = _nothing
        """Called several times a second and at the close, while the log takes writes."""
        self.keep_from_position: Callable[[], int | None] = _nothing
        """Called before segments are deleted. Returns the position from which a replica, a timer or an open transaction needs the log;
        None: nobody.
        """
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
        self.on_writer = on_writer
        """See `open`. Another one may be set when the store begins to lead."""
        self._queues_default = queues_default
        self._follower: Follower | None = None
        # Of the turn to lead: what a follower keeps and deletes must not go on behind it.
        self._changing = threading.Lock()
        # Where the log says that it begins, and where that record ends.
        self._told_start = (0, 0)
        self._refusal = ""
        self._full_disk = FullDisk()
        self._is_checkpoint_failed = False
        self.is_closed_clean = False
        """Whether the store was closed with everything on stable storage."""
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
        """Connects the log, its positions, and the flusher."""
        disk, config = self._disk, self.config
        self.positions = Positions(
            recovery.log.tail,
            recovery.log.synced_position,
            waits_for_flush=config.sync_flush,
            waits_for_replicas=waits_for_replicas,
        )
        """The positions of the log; listeners join here."""
        self._log = CommitLog(disk, self._folder, self.positions, epoch=epoch)
        self.append_durations = Durations(DISK_BOUNDS_S)
        """Durations of appends that were stored: from stamping until the derived structures have the records."""
        self._flusher = LogFlusher(disk, self._log, self.positions, self._monotonic)
        self.sync_durations = self._flusher.durations
        if not follows:
            self._begin_segment()

    def _wire_reading(self, recovery: Recovery) -> None:
        """Connects what knows which parts of the log are sound, and everything that reads the log."""
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
        """Brings the machines to the end of the log, and connects what carries their states forward."""
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
        """The locks of queues, with their owners."""
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
        """Half messages that are still open, and how the last closed ones ended."""
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
        """The machines of the broker's own records. A machine in this list is replayed, saved and carried forward."""
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
        """Connects what heals, deletes and saves in the background; no thread runs yet."""
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
                self._keep_time,
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
        """Records on the disk that the store is open, and starts its threads."""
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
        """Creates the log's first segment if it has none."""
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
        """The epochs of the log, and which parts of it this store wrote as the leader."""
        follower = self._follower
        return self._files.epochs if follower is None else follower.epochs

    @property
    def last_epoch(self) -> int:
        """The epoch at the log's end; 0: not known. Any thread."""
        rows = self.epochs.rows
        return rows[-1].epoch if rows else 0

    def shared_end_offset(self, topic: str, queue_id: int, epoch: int) -> int | None:
        """Up to which queue offset this log is the same as any other log that had this epoch at its end, as KIP-320 has it.

        None: this log knows no such limit, since the epoch is its last one, or a later one than it has heard of.
        """
        epochs = self.epochs
        if not epochs.rows or epoch >= epochs.rows[-1].epoch:
            return None
        known = epochs.end_of(epoch, self.appended_position)
        return self._reader.first_offset_behind(topic, queue_id, known[1] if known is not None else 0)

    def append_verbatim(self, position: int, data: bytes, *, may_end_within: bool = False) -> int:
        """Stores whole appends of the leader's log, which stand at `position` there. Returns the new appended position. The writer thread.

        `may_end_within`: the data may end with a part of one more append, which is not stored yet. An empty log begins at any segment.
        Raises NotFollowingError; ForeignBytesError: nothing is stored; DiskFullError, StoreFailedError: the appends up to the appended
        position are stored.
        """
        if self._follower is None:
            raise NotFollowingError("the store leads: it takes nobody else's bytes")
        try:
            return self._follower.append(position, data, may_end_within=may_end_within)
        except DiskFullError as error:
            self._note_disk_full(str(error))
            raise

    def lead(self, epoch: int | None = None, *, waits_for_replicas: bool = False) -> int:
        """Makes the follower lead from the end of its log on, in a new epoch. Returns the epoch, which is durable then. The writer thread.

        `epoch`: the epoch that the store was given; None: the next one. `waits_for_replicas`: unconfirmed bytes stay unreadable until
        `positions.note_replicated` confirms more. Raises StaleEpochError, OSError; then the store still follows.
        """
        with self._changing:
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

    def forget_listeners(self) -> None:
        """Whoever has served this store serves it no more: nobody is told anything, and nothing is kept for anybody."""
        positions = self.positions
        positions.on_appended, positions.on_arrival, positions.on_flushed = [], [], []
        self.topics.on_change = _nothing
        self.on_topic_deleted = _ignore
        self.on_housekeeping = _nothing
        self.keep_from_position = _nothing

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """Returns (the last epoch of the log that is not above `epoch`, where it ends); None if there is none. Any thread."""
        return self.epochs.end_of(epoch, self.positions.appended)

    def log_point(self, position: int) -> LogPoint | None:
        """Returns the end of an append at a position; None if there is none. Reads a part of a segment. Any thread."""
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
        """Makes the next opening truncate the log to a point at which it agrees with the leader's. Until then the store takes no appends.

        `START`: the logs agree nowhere, so the log begins again where the leader's does. It also begins again if its front was deleted and
        what was carried forward from there stands behind the point. Returns where the log will end. The writer thread. Raises
        NotFollowingError; LogForkError: the log has no such point; StoreFailedError, OSError: nothing has changed.
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
        """Returns the log from `start` to `end` as regions of its segments, unchecked; less if segments are gone. Any thread."""
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
        """Everything below this position is on stable storage."""
        return self.positions.flushed

    @property
    def readable_position(self) -> int:
        """Nobody gets anything at or behind this position."""
        return self.positions.readable

    @property
    def epoch(self) -> int:
        """The epoch of appends that are made now."""
        return self._log.epoch

    @property
    def append_size_max_bytes(self) -> int:
        """The most bytes that the records of one `append` may have together."""
        return self._log.append_size_max_bytes

    @property
    def log_failure(self) -> str:
        """Why the log has failed for good, so that nothing more will be flushed; "" if it has not failed."""
        return self._log.failure

    @property
    def write_refusal(self) -> str:
        """Why the store takes no writes; "" if it takes them."""
        return self._log.failure or self._refusal or self._full_disk.reason

    @property
    def damaged_ranges(self) -> Sequence[DamagedRange]:
        """Parts of the log that are in quarantine."""
        return self._quarantine.ranges

    def heal_log(self, damage: DamagedRange, data: bytes) -> None:
        """Replaces a range in quarantine by the bytes of a replica. Any thread.

        Raises HealingRefusedError if other bytes stood there (nothing has changed), OSError.
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
        """Damaged files of consume queues that are not healed yet."""
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
        """Appends all requests as one group, with one write and one seal, and sets their offsets. Returns the new appended position.

        `reserve`, `apply_state`: for `append_state` and `append_moved`. `apply_state` is called when the derived structures have the
        records.

        Raises DiskFullError, StoreFailedError, AppendTooLargeError or NotLeadingError; then nothing is stored.
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
        """Appends the broker's own records, one for each body, and applies them to the state of the system topic. Returns where they end.

        The store takes them however full the disk is: freeing a disk means deleting segments, which needs such appends. Raises what
        `append` raises.
        """
        return self._append_states((), [(topic, bodies)], reserve)

    def append_moved(
        self, copies: Sequence[AppendRequest], states: Sequence[tuple[str, Sequence[bytes]]]
    ) -> int:
        """Appends copies of messages (`log/move.py`) with the state records about them, by system topic. Returns where they end. All is one
        append with one seal: after any crash, either all of it is in the log or nothing.

        The store takes it however full the disk is, as in `append_state`. Raises what `append` raises.
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
        """Returns where this send is stored already; None if it is new: then the caller must append it next.

        `previous_sequence`: a sequence of the producer that must be stored here.

        Raises what `RepeatedSends.admit` raises, such as SendInFlightError if the same send is in the group not yet appended. Raises
        ProducerIdTakenError if other messages have its sequences, SequenceExpiredError if nobody can tell any more.
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
        """Drops the claims of sends that `find_repeated` called new and that will not be appended."""
        self._repeated.drop_claims()

    def _next_store_time_ms(self) -> int:
        return max(self._clock.now_ms(), self.positions.tail.store_time_ms)

    def request_flush(self) -> None:
        """Wakes the flusher. What is appended during a sync is covered by the next one. Any thread."""
        self._flush_thread.wake()

    def flush(self) -> int:
        """Syncs the log now, on the calling thread. Returns the flushed position."""
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
        """As `read`, but does not count the records: they may not leave the broker."""
        return self._reader.read(
            topic, queue_id, queue_offset, record_count_max, size_max_bytes, tag_codes
        )

    def is_repaired(self, position: int) -> bool:
        """Whether `protomq log repair` has taken out the damage at a position: then it never heals."""
        return self._reader.is_repaired(position)

    def count_read(self, topic: str, result: ReadResult) -> None:
        """Counts records as read."""
        counters = self.counters_of(topic)
        counters.records_out += result.record_count
        counters.bytes_out += result.regions_size_bytes

    def appended_end_offset(self, topic: str, queue_id: int) -> int:
        """One past the offset of the queue's last message, readable or not."""
        return self._queues.end_offset(topic, queue_id)

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Returns (first offset of the queue that is stored, one past the last readable offset)."""
        return self._reader.queue_range(topic, queue_id)

    def offset_at_time(self, topic: str, queue_id: int, time_ms: int) -> int:
        """Returns the queue offset of the first readable message stored at `time_ms` or later; the end if there is none."""
        return self._reader.offset_at_time(topic, queue_id, time_ms)

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Returns the store time of a message in ms since 1970. Raises KeyError if it is deleted or not readable."""
        return self._reader.store_time_of(topic, queue_id, queue_offset)

    def read_records(
        self, positions: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[bytes, NDArray[np.int64], NDArray[np.bool_]]:
        """As `LogReader.read_records`."""
        return self._reader.read_records(positions, sizes)

    def record_at(self, position: int) -> bytes | None:
        """Returns the record at a position, without tag and length; None if it is gone or damaged."""
        return self._reader.record_at(position)

    def regions_hold(self, regions: Sequence[LogRegion]) -> bool:
        """Whether regions of an earlier answer are still valid: they may have been damaged since. If not, the next `read` will find the
        damage.
        """
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

        The deletion happens between two appends: a send that found the topic is appended before it, and is deleted too. Not on the writer
        thread, unless `on_writer` allows it. Raises what `append` raises, and NoWriterError.
        """
        if self.topics.delete(topic):
            self._keep_offsets()
            self._forget_topic(topic)

    def _forget_topic(self, topic: str) -> None:
        """Forgets a deleted topic, also in derived structures."""
        self.offsets.forget_topic(topic)
        self._counters.pop(topic, None)
        self.on_topic_deleted(topic)

    def delete_segments_below(self, position: int) -> int:
        """Deletes the segments that end at or below `position`, except those that a recovery would need. Before, it appends again what is
        alive in them. Returns where the log starts now. Not on the writer thread, unless `on_writer` allows it.

        A follower deletes no more than its leader has, and appends nothing.

        A pull that is sending from a deleted segment goes on: the file stays open while something refers to it.
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
        """Makes everything durable and records that in the checkpoint. Not on the writer thread.

        Does nothing after a failed sync of the log or of derived files: then only the old checkpoint is trustworthy.
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
        # First the log must be on the disk up to the position of these snapshots.
        durable_position = max((durable_position, *(s.end_position for s in snapshots)))
        if self._flusher.flush() < durable_position or self._is_checkpoint_failed:
            return
        for snapshot in snapshots:
            snapshot.save(tail.position)
        with self._changing:  # before the walk of the next start begins behind them
            if self._follower is not None:
                self._keep_foreign_epochs(self._follower.epochs)
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
        with self._changing:
            if self._follower is not None:
                self.delete_segments_below(tail.position)

    def _keep_foreign_epochs(self, epochs: Epochs) -> None:
        """Saves the epochs of other leaders if there are new ones."""
        if epochs.rows != self._files.epochs.rows:
            first, flushed = self._folder.first_position, self.positions.flushed
            self._files.keep_epochs(epochs.between(first, epochs.rows[-1].start_position, flushed))

    def close(self) -> None:
        """Stops the threads, makes everything durable, and releases the lock. The writer must have stopped before."""
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
        """Gives each record its place and time.

        Returns (the bytes of the group in parts, number of records, whether all are plain messages).
        """
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
        """Queue offset of the first record of a request that has flags. `known`: where its queue ends with what this append has put into
        it before."""
        region = request.region
        if not is_queued(region.flags):
            assert region.flags != MIXED, "it is refused before"
            return NO_OFFSET
        if known is not None:
            return known
        return self._queues.queue(region.topic, request.queue_id).end_offset

    def _count(self, requests: Sequence[AppendRequest]) -> list[QueueKey]:
        """Counts the messages that entered queues. Returns these queues."""
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
        """Replays the state records of the log, so that all states reach its end."""
        try:
            replay_states(self._machines, self._queues, self._reader)
        except ConsumeQueueDamagedError:
            self._files.rebuild_queues(recovered)
            replay_states(self._machines, self._queues, self._reader)

    def _writer_of(self, machine: StateMachine) -> StateWriter:
        """Returns how a machine's changes get into the log."""

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
        """Restores topics that have messages but no record, and forgets offsets of deleted topics."""
        known_incarnations = self.offsets.incarnations(self.topics.deleted)
        restore_topics(self.topics, self._queues, self._queues_default, known_incarnations, self.id)
        self._keep_offsets()

    def _keep_offsets(self) -> None:
        """Forgets offsets and pops of deleted topics."""

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
        """Whether the topic of a message at a position was not deleted after it."""
        return position >= self.topics.deleted.get(topic, 0)

    def _times(self, position: int) -> tuple[int, int]:
        """Returns the store time of the last record before `position`, where a segment ends, and of the last record of the log."""
        end_ms = self.positions.tail.store_time_ms
        seal = seal_at_end(self._folder.at(position - 1))
        return (end_ms if seal is None else seal.store_time_ms), end_ms

    def _note_disk_full(self, reason: str) -> None:
        if self._full_disk.refused(reason, self._clock.monotonic_ms()):
            log.warning("writes: refused, %s", reason)

    def _look_for_space(self) -> None:
        """After a full disk refused an append: checks whether it would take the next one."""
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
        """Stops all writes because the files are gone; creates no new ones in their place."""
        log.critical("%s", reason)
        self._is_checkpoint_failed = True
        self._log.fail(reason)
        self.positions.note_failed()

    def _set_refusal(self, reason: str) -> None:
        self._refusal = reason

    def _on_writer(self, function: Callable[[], None]) -> None:
        self.on_writer(function)

    def _keep_time(self) -> None:
        self.on_housekeeping()

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
