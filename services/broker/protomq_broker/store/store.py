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
      LogReader, MessageLookUps   records by queue and offset; by key and id      queues/, index/
      Appender              stamps and writes groups of requests            appending.py
      SentAgain             finds sends that are stored already             same_messages.py
      Leadership, Follower  another leader's bytes, while this one follows  leading.py, following.py
      Saver, CarryForward   checkpoints; what goes before segments go       saving.py, carry_forward.py
      Upkeep                threads that sync, save, delete and heal        upkeep.py

This module only connects these parts. A function of the face that one part has is an attribute: look there for what it does.

Call `append`, `find_repeated`, `append_verbatim` and `lead` on the writer thread, always the same one. Call everything else on any thread.

A store is opened to lead or to follow. A follower's log is the leader's: it stores the bytes that the leader gives. An open follower can
become the leader (`lead`); a leader becomes a follower only when it is opened again.

An append is visible when its position is published (`positions.py`), after the log and all derived structures have it. Nothing behind the
readable position leaves the store in any way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from protomq.wire.record import SEAL_SIZE_BYTES
from protomq.wire.topics import POP_TOPIC, QUEUES_DEFAULT, TOPICS_TOPIC

from .appending import Appender
from .config import StoreConfig
from .errors import DiskFullError, NoWriterError, StoreFailedError
from .files.disk import Disk, if_there_is_room, remove_file
from .files.lock import StoreLock
from .following import Follower, LogFollowers
from .housekeeping.carry_forward import CarryForward
from .housekeeping.housekeeping import Clock
from .housekeeping.pop_carrying import PopCarrier
from .index.look_ups import MessageLookUps
from .leading import Leadership
from .log.checked_log import CheckedLog
from .log.commit_log import CommitLog, Reserve
from .log.epochs import Epochs
from .log.flusher import LogFlusher
from .log.positions import Positions, QueueKey
from .log.recovery import DamagedRange, RecoveredLog, StartPoint, seal_at_end
from .log.seals import seal_before
from .open_log import OpenLog
from .queues.consume_queue import ConsumeQueueDamagedError, DamagedFile
from .queues.log_reader import LogReader, ReadBound
from .queues.quarantine import Quarantine
from .queues.reading import StoredPlace, TopicCounters
from .refusals import Refusals
from .same_messages import Appended, SentAgain
from .saving import Saver
from .start.restored_topics import restore_topics
from .start.settings import RESTORED_SLAVE_NAME, begin_folder, check_may_lead
from .state.groups import GroupTable
from .state.half_copies import HalfCopies, half_copies
from .state.half_messages import TransactionState
from .state.locks import LockTable
from .state.log_front import LogFront
from .state.machine import StateAppend, StateMachine, replay_states
from .state.new_queues import Growth, begin_at_first
from .state.offsets import ConsumerOffsets
from .state.pop import PopState
from .state.transactions import CheckPlan, HalfMessage
from .store_files import Recovery, StoreFiles
from .timer.timer import TimerState
from .topic_counts import TopicCounts
from .upkeep import Upkeep

__all__ = ["QueueKey", "Store", "StoredPlace", "TopicCounters"]

log = logging.getLogger(__name__)


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

        Raises StaleEpochError, NotAStoreError, StoreLockedError, StoreSettingsError, CorruptLogError, OSError; then everything is
        closed again.
        """
        disk = disk or Disk()
        root = os.path.abspath(root)
        config = config or StoreConfig()
        begin_folder(disk, root)
        if not follows:
            check_may_lead(disk, root)
        lock = StoreLock(disk, root)
        try:
            files = StoreFiles(disk, root, config, clock, lock, draw, check_plan or CheckPlan())
            recovery = files.recover()
            files.settle_epochs(recovery.log)
            end = recovery.log.tail.position
            epoch = files.end_epoch(recovery.log) if follows else files.begin_epoch(end, epoch)
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
        self.root = files.root
        self.config = files.config
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
        self._is_restored_note_over = False
        self._disk = files.disk
        self._folder = files.folder
        self._queues, self._index, self._repeated = files.queues, files.index, files.repeated
        self._clock = clock
        self.on_writer = on_writer
        """See `open`. Another one may be set when the store begins to lead."""
        self._queues_default = queues_default
        self.is_closed_clean = False
        """Whether the store was closed with everything on stable storage."""
        self._counts = TopicCounts()
        self._healed_before = (0, 0, 0)
        """Ranges, files and rebuilds of the timer that stores of this folder had healed which this process had open before."""
        self._wire_log(recovery, epoch, follows=follows, waits_for_replicas=waits_for_replicas)
        self._wire_reading(recovery)
        self._wire_states(recovery)
        self.positions.expect([(queue.topic, queue.queue_id) for queue in self._queues.all()])
        self._wire_leading(follows=follows)
        self._wire_writing()
        self._wire_upkeep(recovery)

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
        self._has_cut_its_end = recovery.log.was_cut
        tail = recovery.log.tail
        seal = seal_before(self._folder, tail.position)
        self._has_lost_its_end = tail.position > 0 and (seal is None or seal.crc32c != tail.crc32c)
        self._log = CommitLog(
            disk,
            self._folder,
            self.positions,
            epoch=epoch,
            keep_front=self._files.keep_front,
            refuse_ratio=config.disk_refuse_ratio,
        )
        self._flusher = LogFlusher(disk, self._log, self.positions, self._clock.monotonic)
        self.flush = self._flusher.flush
        self.sync_durations = self._flusher.durations
        self._refusals = Refusals(disk, self.root, self._log, self._clock.monotonic_ms)
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
            recovery.start.point,
            self._quarantine,
            self._files.boundaries,
            clock.monotonic_ms,
            lambda: self._log.written_ms,
        )
        self._checked.begin(recovery.walked)
        reader = self._reader = self._new_reader(self.positions)
        self._open_log = OpenLog(
            self._log,
            self.positions,
            self._flusher,
            self._refusals,
            recovery.start,
            self._quarantine,
            self._checked,
            reader,
        )
        look_ups = MessageLookUps(self._folder, self._queues, self._index, reader, self.positions)
        # Any thread.
        self.read = reader.read
        self.regions_hold = reader.regions_hold
        self.queue_range = reader.queue_range
        self.offset_at_time = reader.offset_at_time
        self.store_time_of = reader.store_time_of
        self.record_at = reader.record_at
        self.read_records = reader.read_records
        self.read_to_copy = reader.read_to_copy
        self.octets_to_copy = reader.octets_to_copy
        self.entries_at = reader.entries_at
        self.entries_together = reader.entries_together
        self.is_repaired = reader.is_repaired
        self.find_by_key_hash = look_ups.by_key_hash
        self.find_by_message_id = look_ups.by_message_id
        self.find_everywhere = look_ups.everywhere
        self.appended_end_offset = self._queues.end_offset
        self.counters_of = self._counts.of
        self.count_read = self._counts.count_read

    def _new_reader(self, bound: ReadBound) -> LogReader:
        return LogReader(self._folder, self._queues, self._checked, bound, self._quarantine)

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
            append_size_max_bytes=self.append_size_max_bytes,
            end_position=self.positions.appended,
            times=self._times,
            first_position=lambda: self._folder.first_position,
        )
        self.pending = files.pending
        """Delayed messages that are not delivered yet."""
        self.timer = TimerState(self.pending)
        self.transactions = files.transactions
        """Half messages that are still open, and how the last closed ones ended."""
        transaction_state = TransactionState(
            disk, files.transactions_folder, files.transactions, files.halves
        )
        self.popped.deleted = lambda: self.topics.deleted
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
        """The machines of the broker's own records. A machine in this list is replayed, saved and carried forward. Topics come first."""
        self._machine_of = {machine.topic: machine for machine in self._machines}
        self._replay_states(recovery.log)
        transaction_state.end_replay()
        self.timer.begin_counting()
        self.popped.begin_counting()

    def _wire_leading(self, *, follows: bool) -> None:
        """Connects what takes another leader's log, and what compares the two."""
        leadership = self._leadership = Leadership(self._files, self._open_log, self._front)
        # The writer thread.
        self.append_verbatim = leadership.append_verbatim
        self.truncate_to = leadership.truncate_to
        # Any thread.
        self.check_room = leadership.check_room
        self.lack_of_room = self._refusals.lack_of_room
        self.epoch_end = leadership.epoch_end
        self.shared_end_offset = leadership.shared_end_offset
        self.log_point = leadership.log_point
        self.log_regions = leadership.log_regions
        self.prove_again = leadership.prove_again
        self.sound_end = leadership.sound_end
        if follows:
            followers = LogFollowers(
                self._files.derived,
                self._machine_of,
                self._queues,
                self._repeated,
                self.pending,
                self._forget_topic,
            )
            leadership.follower = Follower(
                self._log,
                self._checked,
                self.positions,
                followers,
                self._files.epochs,
                self._clock.now_ms,
                self._counts.count_appended,
                self._quarantine.add_repaired,
                self._open_log.start.move,
            )
        else:
            self._restore_topics()

    def _wire_writing(self) -> None:
        """Connects what appends: sends, the machines' records, and what is carried forward."""
        appender = Appender(
            self._files,
            self._open_log,
            self._machine_of,
            self._leadership,
            self._counts,
            self._clock,
        )
        sent_again = SentAgain(
            self._repeated,
            self._queues,
            self._new_reader(Appended(self.positions)),
            appender.next_store_time_ms,
        )
        # The writer thread.
        self.append = appender.append
        self.append_state = appender.append_state
        self.append_moved = appender.append_moved
        self.next_store_time_ms = appender.next_store_time_ms
        self.find_repeated = sent_again.find
        self.drop_claims = self._repeated.drop_claims
        # Any thread.
        self.append_durations = appender.durations
        self.topics.append = self._append_of(self.topics)
        self.topics.before_growth = self._begin_new_queues
        self.groups.append = self._append_of(self.groups)
        pop_carrier = PopCarrier(
            self.popped,
            self._queues,
            self.topics,
            self.read_records,
            self._on_writer,
            partial(self.append_moved, reserve=Reserve.CARRIED),
            self.append_size_max_bytes,
        )
        self._carried = CarryForward(
            self, self._folder, self._machines, self._front, pop_carrier, self._on_writer
        )

    def _wire_upkeep(self, recovery: Recovery) -> None:
        """Connects what heals, deletes and saves in the background; no thread runs yet."""
        saver = self._saver = Saver(
            self._files,
            self._open_log,
            recovery.replay_position,
            self._machines,
            self._leadership,
            self._carried,
        )
        upkeep = self._upkeep = Upkeep(
            self._files,
            self._open_log,
            self.timer,
            saver,
            self._clock,
            on_writer=self._on_writer,
            keep_from_position=self._keep_from,
            keep_time=self._keep_time,
            write_notes=self._write_notes,
        )
        # Not on the writer thread.
        self.checkpoint = saver.checkpoint
        self.delete_segments_below = saver.delete_segments_below
        # Any thread.
        self.request_flush = upkeep.request_flush
        self.heal_log = upkeep.log_healer.heal

    def _run(self, background: bool) -> None:
        """Records on the disk that the store is open, and starts its threads."""
        with if_there_is_room():
            self._files.abort.write()
        self._files.lock.publish_where_room_is(self._disk.cache_id(self.root))
        if self.is_leading:
            self._carried.tell_untold()
        if self.config.sync_flush:
            self._flusher.flush()
        if background:
            self._upkeep.start()

    def _begin_segment(self) -> None:
        """Creates the log's first segment if it has none."""
        try:
            # The first one is made however full the disk is: who appends to it asks again.
            self._log.position_for(0, Reserve.MESSAGES if self._folder.files else Reserve.CARRIED)
        except DiskFullError as error:  # what is there can be read, and deleted
            self._refusals.note_full(str(error))
        self.positions.publish(self._log.tail, ())

    # Leading and following.

    @property
    def is_leading(self) -> bool:
        """Whether the log continues with this store's own appends."""
        return self._leadership.follower is None

    @property
    def epochs(self) -> Epochs:
        """The epochs of the log, and which parts of it this store wrote as the leader."""
        return self._leadership.epochs

    @property
    def last_epoch(self) -> int:
        """The epoch at the log's end; 0: not known. Any thread."""
        return self.epochs.last.epoch

    def lead(self, epoch: int | None = None, *, waits_for_replicas: bool = False) -> int:
        """Makes the follower lead from the end of its log on, in a new epoch. Returns the epoch, which is durable then. The writer thread.

        `epoch`: the epoch that the store was given; None: the next one. `waits_for_replicas`: unconfirmed bytes stay unreadable until
        `positions.note_replicated` confirms more. Raises StoreFailedError, StaleEpochError, OSError; then the store still follows.

        A store that knows nothing of records that are in its log again might give their queue offsets to new messages. So it raises
        StoreFailedError if `has_healed_skipped_parts`.
        """
        if self.has_healed_skipped_parts:
            raise StoreFailedError("a replica has healed parts of the log that its start had skipped: open the store again")
        self._leadership.lead(epoch)
        self.note_role_taken()
        self._repeated.end_partial()
        self._log.date_head(self._clock.now_ms())
        self._begin_segment()
        self._restore_topics()
        self.positions.wait_for_replicas(waits_for_replicas)
        self._carried.tell_untold()
        return self._log.epoch

    def note_role_taken(self) -> None:
        """Notes that the store follows a master whose log agrees with it, or was given an epoch to lead in. From now on a restored slave is
        as any other store. If the disk does not take that, housekeeping tries it again, and says so.
        """
        self._is_restored_note_over = True
        with suppress(OSError):
            self._remove_restored_note()

    def _remove_restored_note(self) -> None:
        path = f"{self.root}/{RESTORED_SLAVE_NAME}"
        if self._disk.exists(path):
            remove_file(self._disk, path)
        self._is_restored_note_over = False

    def forget_listeners(self) -> None:
        """Whoever has served this store serves it no more: nobody is told anything, and nothing is kept for anybody.

        There is no writer, so housekeeping appends nothing beside `lead`. The next broker sets `on_writer`.
        """
        positions = self.positions
        positions.on_appended, positions.on_arrival, positions.on_flushed = [], [], []
        self.topics.on_change = self.topics.on_applied = _nothing
        self.on_topic_deleted = _ignore
        self.on_housekeeping = _nothing
        self.keep_from_position = _nothing
        self.on_writer = _no_writer

    # Positions.

    @property
    def min_position(self) -> int:
        """Where the oldest segment starts."""
        return self._folder.first_position

    @property
    def start_point(self) -> StartPoint:
        """Where the oldest segment starts, and the CRC with which the chain of seals comes there, if that is known. Any thread."""
        return self._open_log.start.point()

    @property
    def appended_position(self) -> int:
        """End of the log."""
        return self.positions.appended

    @property
    def flushed_position(self) -> int:
        """Everything below this position is on stable storage."""
        return self.positions.flushed

    @property
    def has_lost_its_end(self) -> bool:
        """Whether this start found damage at the end of the log, so that nobody knew where it ended before that, and with which CRC.

        It stays so until the next start, even if a replica heals these bytes meanwhile: what follows from them is missing.
        """
        return self._has_lost_its_end

    @property
    def has_cut_its_end(self) -> bool:
        """Whether this start has cut a torn tail. Damage of the last appends looks alike."""
        return self._has_cut_its_end

    @property
    def has_dated_head(self) -> bool:
        """Whether the log begins with a head that says when: no log that was begun apart has the same. Only `lead` sets the time."""
        head = seal_before(self._folder, SEAL_SIZE_BYTES)
        return head is not None and head.store_time_ms > 0

    @property
    def leader_synced_position(self) -> int:
        """Up to where its leader had the log on stable storage when it wrote the last append; 0: nothing tells."""
        seal = seal_before(self._folder, self.appended_position)
        return seal.synced_position if seal is not None else 0

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
        return self._refusals.reason

    @property
    def last_refusal(self) -> str:
        """Why the last append was refused; "" if it was stored."""
        return self._refusals.last_refusal

    @property
    def checkpoint_failure(self) -> str:
        """Why no checkpoint is written; "" if they are written."""
        return self._saver.obstacle

    @property
    def damaged_ranges(self) -> Sequence[DamagedRange]:
        """Parts of the log that are in quarantine."""
        return self._quarantine.ranges

    @property
    def left_quarantine_count(self) -> int:
        """How often a part of the log has left quarantine since the store was opened, healed or deleted."""
        return self._quarantine.left_count

    @property
    def unhealed_ranges(self) -> Sequence[DamagedRange]:
        """Parts of the log in quarantine whose bytes a replica may heal."""
        return self._upkeep.log_healer.ranges()

    @property
    def skipped_ranges(self) -> Sequence[DamagedRange]:
        """Damaged parts of the log of which this start knows no record, healed since or not: what follows from them is missing.

        If the end of the log is lost, it is not among them. No replica can heal it, and who follows begins again before it.
        """
        end = self.appended_position
        ranges = self._upkeep.log_healer.skipped_ranges()
        return [damage for damage in ranges if damage.end_position < end or not self.has_lost_its_end]

    def has_skipped(self, position: int) -> bool:
        """Whether this start could not read what stood at a position, so that nothing is known of it before a replica has healed it.

        What stood before the log's first position was carried forward, to nobody knows where: any such part may have it.
        """
        start, end = self.min_position, self.appended_position
        return any(
            (position < start or damage.start_position <= position < damage.end_position)
            and (damage.end_position < end or not self.has_lost_its_end)
            and self._upkeep.log_healer.has_skipped(damage)
            for damage in self.damaged_ranges
        )

    @property
    def has_healed_what_was_skipped(self) -> bool:
        """Whether the next start finds all that this one has skipped."""
        return not set(self.skipped_ranges) & set(self.unhealed_ranges)

    @property
    def has_healed_skipped_parts(self) -> bool:
        """Whether the next start finds something that this one has skipped."""
        return bool(self.healed_skipped_ranges)

    @property
    def healed_skipped_ranges(self) -> Sequence[DamagedRange]:
        """Parts of the log that this start has skipped, and that a replica has healed: the next start serves them."""
        return self._upkeep.log_healer.healed_skipped_ranges()

    def go_on_counting(self, before: Store) -> None:
        """Counts go on from those of the closed store that this process had open here before: its monitoring sees one process.

        To be called before anything is served.
        """
        self._healed_before = (before.healed_range_count, before.healed_file_count, before.timer_rebuilt_count)
        self._counts.go_on(before._counts)

    @property
    def healed_range_count(self) -> int:
        """Damaged ranges of the log that were healed from a replica since the process started."""
        return self._healed_before[0] + self._upkeep.log_healer.healed_count

    @property
    def damaged_files(self) -> Sequence[DamagedFile]:
        """Damaged files of consume queues that are not healed yet."""
        return self._queues.damaged_files()

    @property
    def healed_file_count(self) -> int:
        """Consume queue files that were healed from the log since the process started."""
        return self._healed_before[1] + self._upkeep.queue_healer.healed_count

    @property
    def timer_rebuilt_count(self) -> int:
        """How often the timer's files were rebuilt from the log since the process started."""
        return self._healed_before[2] + self._upkeep.timer_rebuild.rebuilt_count

    def disk_used_ratio(self) -> float:
        """Used part of the disk of the store, from 0.0 to 1.0."""
        return self._disk.usage(self.root).used_ratio

    # Administration.

    def delete_topic(self, topic: str, later: Callable[[Callable[[], None]], None] = _call) -> None:
        """Deletes a topic with its queues and committed offsets. Its records stay in the log until their segments go.

        The deletion happens between two appends: a send that found the topic is appended before it, and is deleted too. The writer thread.
        `later` has a function called on another thread, or here: it looks at all offsets. Raises what `append` raises.

        What members hold of popped messages may stand in the topic alone, if it has the retries of their group. That goes with it: offsets
        there mean other messages in the next topic of this name.
        """
        lost = self.popped.lost_with(topic)

        def append(body: bytes) -> int:
            return self.append_moved((), [(POP_TOPIC, [lost]), (TOPICS_TOPIC, [body])])

        if self.topics.delete(topic, append if lost else None):
            later(partial(self._forget_deleted, topic))

    def _forget_deleted(self, topic: str) -> None:
        self._keep_offsets()  # and those of the next topic of this name, if there is one already
        self._tell_deleted(topic)

    def _forget_topic(self, topic: str) -> None:
        """A follower has applied the deletion of a topic, and nothing behind it."""
        self.offsets.forget_topic(topic)
        self.popped.forget_topic(topic)
        self._tell_deleted(topic)

    def _tell_deleted(self, topic: str) -> None:
        self._counts.forget(topic)
        self.on_topic_deleted(topic)

    def close(self) -> None:
        """Stops the threads, makes everything durable, and releases the lock. The writer must have stopped before."""
        self._upkeep.stop()
        try:
            self._saver.checkpoint_last()
            self._checked.save(self.positions.flushed, is_last=True)
            self._upkeep.keeper.save()
            if not self._log.failure and not self._saver.failure:
                self._files.abort.remove()
                self.is_closed_clean = True
        except OSError as error:
            log.error(
                "the store closes without a last checkpoint; the next start recovers: %s", error
            )
        finally:
            for derived in self._files.derived:
                derived.close()
            self._log.close()
            self._files.lock.release()

    # Recovery and background.

    def _replay_states(self, recovered: RecoveredLog) -> None:
        """Replays the state records of the log, so that all states reach its end."""
        try:
            replay_states(self._machines, self._queues, self._reader)
        except ConsumeQueueDamagedError:
            self._files.rebuild_queues(recovered)
            replay_states(self._machines, self._queues, self._reader)

    def _append_of(self, machine: StateMachine) -> StateAppend:
        """Returns how a machine's changes get into the log."""
        return lambda body: self.append_state(machine.topic, [body])

    def _begin_new_queues(self, growths: Sequence[Growth]) -> None:
        """Topics are about to get queues: their groups begin there with the first message. The writer thread."""
        for growth in growths:
            known = (state.groups_of(growth.topic, growth.incarnation) for state in (self.offsets, self.popped))
            # Each by itself, for all of them may be more than an append takes. After a crash in between the next growth tells the rest.
            for body in begin_at_first(growth, *known):
                self.append_state(self.offsets.topic, [body])

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

        deleted = self.topics.deleted
        self.offsets.keep(incarnation_of, deleted)
        self.popped.keep(incarnation_of, deleted)

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
        seal = seal_at_end(self._folder.at(position - 1), unreadable_is_damage=True)
        return (end_ms if seal is None else seal.store_time_ms), end_ms

    def _on_writer(self, function: Callable[[], None]) -> None:
        self.on_writer(function)

    def _keep_time(self) -> None:
        self.on_housekeeping()

    def _write_notes(self) -> None:
        self._quarantine.save_again()
        if self._is_restored_note_over:
            self._remove_restored_note()

    def _keep_from(self) -> int | None:
        return self.keep_from_position()

    def _sync_to(self, position: int) -> None:
        if position > self.positions.flushed:
            self._flusher.flush()


def _no_writer(_: object) -> None:
    raise NoWriterError("the store changes its broker")


def _ignore(_: object) -> None:
    pass


def _nothing() -> None:
    return None
