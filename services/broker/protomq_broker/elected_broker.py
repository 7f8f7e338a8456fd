"""A broker whose master is elected in etcd: one process, which opens its store to follow or to lead as the election says.

    FOLLOWING   the store is open as a slave's, and follows whoever leads; its id is the configured one
    LEADING     the store is open as a SYNC_MASTER's with id 0, in the epoch of its election

A change of role stops the server, and starts another one at the same ports. So a `Broker` object is a slave or a master for its whole
life, and a new role never answers calls of the old one. The store of a slave that is to lead stays open meanwhile: it has all that follows
from the log. Else it is closed and opened again. `leadership_driver` says what to do; one task does it, step by step.

A store whose log has failed (a full or broken disk) takes nothing more until it is opened again. So a master gives the lead away. A slave
leaves the in-sync set, and opens its store again as soon as that works. A member that has won the election gives the lead back if its disk
does not take the new epoch. It stays a slave, and runs again when the disk has taken the file of epochs.

A start may skip damaged parts of a log. Then this member follows nobody, and leads only as the last member of the in-sync set. When a
replica has healed them, the store is opened again, with what follows from them. If the damage lies in what the master's log never had, no
replica can heal it: then this log ends before that. The damage may reach into what was acknowledged. So the member leaves the set before.
One that is to lead before that opens its store again first, if anything was healed: it must give no queue offset twice. The same holds for
what came back in place of the padding of `protomq log repair`; such a member is in sync meanwhile.

A start may cut the end of the log, which looked like a torn write, and may have been acknowledged all the same. Then this member leads
only if nobody in the in-sync set has more, until it has caught up again.

A full disk breaks no log. A master whose disk stays full gives the lead to a member in sync whose disk has room, if there is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from protomq_ha.cluster_state import LogEnd
from protomq_ha.leadership import may_forget_cut, may_forget_doubt
from protomq_ha.leadership_values import (
    CutSettled,
    Effect,
    ElectionKnown,
    Follow,
    Lead,
    NoteStart,
    Role,
    Settings,
    StopFollowing,
    StopLeading,
    TailSettled,
)
from protomq_ha.roles import BrokerRole
from protomq_runtime.clock import SystemClock, boottime_ms
from protomq_runtime.errors import Code, ServiceError

from .broker import Election
from .broker_process import BrokerProcess, with_ports_of
from .config import BrokerConfig, DecidedElection, EtcdConfig
from .etcd_gateway import ANSWER_TIMEOUT_S, HttpEtcd
from .failed_opens import FailedOpens
from .healed_reopens import HealedReopens
from .leadership_driver import LeadershipDriver
from .store.errors import StoreError, StoreFailedError
from .store.files.disk import DISK_FULL_ERRNOS, Disk, read_boot_id
from .store.log.agreement import LogPoint
from .store.log.recovery import DamagedRange
from .store.store import Store
from .tail_file import TailFile

log = logging.getLogger("protomq.broker")

CHANGE_GRACE_S: Final = 0.3
"""Time to finish calls when the role changes. Calls that wait for other copies are answered "try again"."""
HEARTBEATS_OF_A_LEASE: Final = 6
"""A slave sends at least this many heartbeats in the time of one lease. They allow a master that has lost etcd to go on."""
LEASE_LATE_MS: Final = 1_500
"""A lease may last so much longer than it says, since etcd looks now and then."""
ID_LOOK_S: Final = 0.1
"""Between two looks at whether another process has this broker's id."""
FAILURE_LOOK_S: Final = 1.0
"""Between two looks at whether the log has failed, and between two tries to open the store again."""


FULL_LOOKS: Final = 3
"""So many looks in a row have to find a master's disk full, or a disk no more full, until others are told. A slave tells at once that its
disk is full. Where several have one disk, the master has to know that before it gives the lead away.
"""


class LogFailed(NamedTuple):
    """The log of this process has failed."""

    process: BrokerProcess


class StoppedError(Exception):
    """The broker ends before its store could be opened again."""


class TryRoom(NamedTuple):
    """Look whether the log could be opened to lead now."""


class LookForRoom(NamedTuple):
    """Look whether the disk is full."""


class CutFork(NamedTuple):
    """The damaged log of this process is to end at this point: what stands behind it, the master's log never had."""

    process: BrokerProcess
    point: LogPoint


Item = Effect | BrokerProcess | LogFailed | CutFork | TryRoom | LookForRoom


def new_name_wait_ms(etcd: EtcdConfig) -> int:
    """How long an empty member waits where etcd knows nothing of the name.

    A member with messages that runs has told etcd by then: one reading may hang, the next one and the claim are answered.
    """
    return etcd.read_interval_ms + int(2 * 1_000 * ANSWER_TIMEOUT_S)


class ElectedBroker:
    """The object that protomq_runtime.lifecycle runs. Attribute: process, the broker process that runs now."""

    def __init__(self, config: BrokerConfig) -> None:
        """Raises what BrokerProcess raises."""
        self._config = config
        self._settings = config.etcd
        self._on_fatal: Callable[[BaseException], None] = lambda error: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._todo: asyncio.Queue[Item | None] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._is_open = True
        """Whether `process` has not been stopped."""
        self._other_looks = 0
        """How many looks in a row found the disk other than the election knows it."""
        self._healed_reopens = HealedReopens()
        self._start_time_ms = SystemClock().now_ms()
        etcd = config.etcd
        prefix = f"{etcd.prefix}/{config.cluster}/{config.broker_name}"
        self.leadership = LeadershipDriver(HttpEtcd(etcd.urls, prefix), boottime_ms, self._do_soon, config.broker_id)
        self.leadership.on_fork = lambda point: self._do_soon(CutFork(self.process, point))
        self.process = self._make(self._config, None)
        self._tail = TailFile(Disk(), self.process.broker.store.root, read_boot_id())

    def set_on_fatal(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Implements the hook of protomq_runtime.lifecycle."""
        self._on_fatal = on_fatal
        self.process.set_on_fatal(on_fatal)

    async def start(self) -> None:
        """Serves as a slave, and takes part in the election."""
        self._loop = asyncio.get_running_loop()
        new_election = secrets.randbits(63) or 1
        member, process, place = str(self.process.broker.store.id), secrets.token_hex(8), _place_of(self.process.broker.store.root)
        try:
            await asyncio.to_thread(self.leadership.find_election, new_election)
            await self._wait_for_id(member, process, place)
        except BaseException:
            await asyncio.to_thread(self.leadership.close)
            await asyncio.to_thread(self.process.broker.close)
            raise
        await self.process.start()
        self._config = with_ports_of(self.process, self._config)
        broker, etcd = self.process.broker, self._settings
        store = broker.store
        tail_may_be_lost = await asyncio.to_thread(
            self._tail.open, syncs=store.config.sync_flush, is_lost=store.has_lost_its_end, was_cut=store.has_cut_its_end
        )
        self.leadership.begin(
            Settings(
                member,
                str(broker.advertised_addresses(self.process.server).remoting),
                lease_ttl_ms=etcd.lease_ttl_ms,
                renew_interval_ms=etcd.renew_interval_ms,
                read_interval_ms=etcd.read_interval_ms,
                member_timeout_ms=etcd.member_timeout_ms,
                member_lost_timeout_ms=etcd.member_lost_timeout_ms,
                hand_over_timeout_ms=etcd.hand_over_timeout_ms,
                new_name_wait_ms=new_name_wait_ms(etcd),
                broker_id=self._config.broker_id,
                new_election=new_election,
                process=process,
                place=place,
            ),
            store.epochs.highest_epoch,
            end_position=store.appended_position,
            tail_may_be_lost=tail_may_be_lost,
            is_damaged=_has_skipped(store),
            cut_end=_cut_end_of(store) if self._tail.was_cut else None,
            start_number=self._tail.start_number,
        )
        self._worker = asyncio.create_task(self._work())
        self._watcher = asyncio.create_task(self._watch_log())

    async def _wait_for_id(self, member: str, process: str, place: str) -> None:
        """Waits until no other process lives with this store, or with this broker's id. One that has ended does so until its lease has run
        out. Raises ServiceError NAME_TAKEN if it goes on for longer.
        """
        deadline_ms = boottime_ms() + self._settings.lease_ttl_ms + LEASE_LATE_MS
        while (other := await asyncio.to_thread(self.leadership.in_the_way, member, process, place)) is not None:
            if boottime_ms() >= deadline_ms:
                config = self._config
                is_copy = other.member == member
                what = "a store of the same number (one is a copy of the other)" if is_copy else f"another store, {other.member}"
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "NAME_TAKEN",
                    f"a broker of {config.broker_name} at {other.address} is alive (etcd), which has {what}, and this one has broker_id"
                    f" {config.broker_id}. Give each broker a broker_id and a data_dir of its own, or stop the other one",
                    metadata={"broker_name": config.broker_name, "broker_id": str(config.broker_id), "grpc_address": other.address},
                )
            await asyncio.sleep(ID_LOOK_S)

    async def stop(self, grace_s: float) -> None:
        """Stops. A master hands over first, if a member is in sync; else the lease expires by itself."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._worker is not None:
            self._is_stopping = True
            timeout_s = self._settings.hand_over_timeout_ms / 1_000
            if await asyncio.to_thread(self.leadership.hand_over, timeout_s):
                log.info("another member leads %s", self._config.broker_name)
                # Nothing that waits for other copies is confirmed here any more: its callers are to ask the new master now.
                grace_s = min(grace_s, CHANGE_GRACE_S)
            self._todo.put_nowait(None)
            await self._worker
        await asyncio.to_thread(self.leadership.close)
        if self._is_open:
            await self.process.stop(grace_s)
        if self._worker is not None:
            is_clean = self.process.broker.store.is_closed_clean
            with suppress(OSError):  # then the next start takes this stop for a crash
                await asyncio.to_thread(self._tail.close, is_clean=is_clean)

    def _do_soon(self, item: Item) -> None:
        """Any thread."""
        if self._loop is None:
            return
        # The loop may be closed already; then nobody is left to do it.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._todo.put_nowait, item)

    def _make(
        self, config: BrokerConfig, epoch: int | None, store: Store | None = None
    ) -> BrokerProcess:
        """Opens the store to lead in this epoch, or to follow; `store`: it is open so."""
        heartbeat_ms = self._settings.lease_ttl_ms // HEARTBEATS_OF_A_LEASE
        role = BrokerRole.SLAVE if epoch is None else BrokerRole.SYNC_MASTER
        config = replace(
            config,
            etcd=DecidedElection.of(config.etcd),
            broker_role=role.value,
            broker_id=config.broker_id if epoch is None else 0,
            ha=replace(config.ha, heartbeat_interval_ms=min(heartbeat_ms, config.ha.heartbeat_interval_ms)),
        )
        process = BrokerProcess(
            config,
            on_truncated=self._truncated,
            election=Election(self.leadership, epoch),
            store=store,
            start_time_ms=self._start_time_ms,
        )
        process.set_on_fatal(self._on_fatal)
        return process

    def _truncated(self) -> None:
        """Called on the follower's thread when its store has to be opened again."""
        self._do_soon(self.process)

    async def _work(self) -> None:
        try:
            while (item := await self._todo.get()) is not None:
                await self._do(item)
        except StoppedError as error:
            log.warning("%s", error)
        except Exception as error:
            log.critical("the change of role failed: %s", error)
            self._on_fatal(error)

    async def _watch_log(self) -> None:
        """Reports a log that has failed and stays so: one that is to be truncated is opened again by itself. Looks for room to lead."""
        failed: BrokerProcess | None = None
        while True:
            await asyncio.sleep(FAILURE_LOOK_S)
            process = self.process
            has_failed = bool(process.broker.store.log_failure)
            if has_failed and process is failed:
                self._do_soon(LogFailed(process))
            failed = process if has_failed else None
            if await self._is_healed(process.broker.store):
                self._do_soon(process)
            if self.leadership.is_unable and self.leadership.role is Role.FOLLOWING:
                self._do_soon(TryRoom())
            if self._todo.empty():  # a change of role goes first
                self._do_soon(LookForRoom())

    async def _is_healed(self, store: Store) -> bool:
        """Whether a slave has parts of its log again that it would know after another start, and is to make that start now."""
        is_damaged = self.leadership.is_damaged
        if self.leadership.role is not Role.FOLLOWING or not (is_damaged or store.has_healed_skipped_parts):
            return False
        try:
            return await asyncio.to_thread(is_to_be_reopened, store, self._healed_reopens, boottime_ms())
        except (OSError, ValueError) as error:  # It cannot be read now, or is being closed.
            log.warning("whether the log of %s is whole again is not known: %s", self._config.broker_name, error)
            return False

    async def _leave_failed_log(self, process: BrokerProcess) -> None:
        log.error("the log of %s has failed: %s", self._config.broker_name, process.broker.store.log_failure)
        if self.leadership.role is Role.FOLLOWING:
            await asyncio.to_thread(process.broker.stop_following)
            await self._doubt_tail()
            await self._open_again()
            log.warning("the store is open again")
            return
        timeout_s = self._settings.hand_over_timeout_ms / 1_000
        if not await asyncio.to_thread(self.leadership.hand_over, timeout_s):
            log.error("nobody in sync can lead %s: start this broker again when its disk is well", self._config.broker_name)

    async def _cut_fork(self, item: CutFork) -> None:
        """A slave's log is truncated, so that it has no damage that nobody can heal."""
        process, leadership = self.process, self.leadership
        if item.process is not process or not leadership.is_damaged:
            return
        await asyncio.to_thread(process.broker.stop_following)
        # The damage may begin in what was acknowledged, and then this log lacks it, and does not look damaged any more.
        await self._doubt_tail()
        if leadership.role is not Role.FOLLOWING:
            return
        store, end = process.broker.store, process.broker.store.appended_position
        try:
            kept = await asyncio.to_thread(store.truncate_to, item.point)
        except (OSError, StoreError) as error:
            log.warning("the log cannot be truncated to position %d, where it agrees with the master's: %s", item.point.position, error)
            process.broker.go_on_following()
            return
        log.warning(
            "the log ends at %d, and agrees with the master's up to %d. It is damaged behind that, where no other log goes on so: it is"
            " truncated",
            end, kept.position,
        )  # fmt: skip
        await self._open_again()

    async def _doubt_tail(self) -> None:
        """The slave leaves the set before it may run."""
        self.leadership.tail_may_be_lost()
        with suppress(OSError):  # then this process remembers it, and a crash of it is one more fault
            await asyncio.to_thread(self._tail.doubt)

    async def _do(self, item: Item) -> None:
        if self._is_stopping:
            return
        process, leadership = self.process, self.leadership
        if isinstance(item, LogFailed):
            if item.process is process:
                await self._leave_failed_log(process)
            return
        if isinstance(item, CutFork):
            await self._cut_fork(item)
        elif isinstance(item, TryRoom):
            await self._try_room(process.broker.store)
        elif isinstance(item, LookForRoom):
            await self._look_for_room(process.broker.store)
        elif isinstance(item, BrokerProcess):
            if item is process:
                await self._open_again()
                log.warning("the store is open again")
        elif isinstance(item, Follow):
            log.info("member %s leads in epoch %d: it is followed at %s", *item[:1], item.epoch, item.address)
            process.broker.go_on_following()
        elif isinstance(item, ElectionKnown):
            process.broker.tell_election(item.number)
        elif isinstance(item, StopFollowing):
            await asyncio.to_thread(process.broker.stop_following)
            leadership.following_stopped(process.broker.store.epochs.highest_epoch)
        elif isinstance(item, Lead):
            if await self._lead(item.epoch):
                log.warning("this broker leads %s in epoch %d", self._config.broker_name, item.epoch)
                if leadership.leads_with_cut_log:
                    log.error(
                        "its start had cut the end of its log, and nobody in the in-sync set had more. If that was damage, and no torn"
                        " write, messages that were acknowledged last are lost"
                    )
        elif isinstance(item, StopLeading):
            log.warning("this broker does not lead %s any more", self._config.broker_name)
            await self._open_again()
        elif isinstance(item, NoteStart):
            await self._note_start(item)
        elif isinstance(item, TailSettled) and may_forget_doubt(leadership):
            with suppress(OSError):  # then the next start leaves the set once more
                await asyncio.to_thread(self._tail.settle)
        elif isinstance(item, CutSettled) and may_forget_cut(leadership):
            with suppress(OSError):  # then the next start waits for others once more
                await asyncio.to_thread(self._tail.settle_cut)

    async def _note_start(self, item: NoteStart) -> None:
        if item.is_older_copy:
            log.error(
                "etcd knows start %d of this store, and the folder %s start %d: it is an older copy, or config/start.json was removed. The"
                " store leaves the in-sync set first, and joins again when it has what the others have",
                item.number - 1, self._config.data_dir, self._tail.start_number,
            )  # fmt: skip
        with suppress(OSError):  # then the folder has the number that it had
            await asyncio.to_thread(self._tail.note_start, item.number, is_older_copy=item.is_older_copy)
        self.leadership.start_noted(self._tail.start_number)

    async def _lead(self, epoch: int) -> bool:
        """The store that follows leads in this epoch, as it is. One that has failed, is to be truncated, or was healed since its start is
        opened again before that. Returns whether it leads; else the lead is given back, and this broker is a slave.
        """
        store = self.process.broker.store
        if (store.log_failure or store.has_healed_skipped_parts) and not await self._open_to_lead(epoch):
            return False
        begun_ms = boottime_ms()
        store = await self.process.give_up_store(CHANGE_GRACE_S)
        stopped_ms = boottime_ms()
        try:
            await asyncio.to_thread(store.lead, epoch, waits_for_replicas=True)
        except (OSError, StoreFailedError) as error:
            self._give_back(epoch, str(error))
            if store.log_failure:
                self._is_open = False
                await asyncio.to_thread(store.close)
                await self._open_until_it_works()
            else:
                self.process = self._make(self._config, None, store)
                await self.process.start()
            return False
        durable_ms = boottime_ms()
        self.leadership.opened(epoch, store.appended_position)
        self.process = self._make(self._config, epoch, store)
        await self.process.start()
        log.info(
            "the slave's services ended in %d ms, the epoch was durable in %d ms, and sends are taken after %d ms more",
            stopped_ms - begun_ms, durable_ms - stopped_ms, boottime_ms() - durable_ms,
        )  # fmt: skip
        return True

    async def _open_to_lead(self, epoch: int) -> bool:
        """The store is opened again before it leads in this epoch. Returns whether it may lead.

        A log that was healed may have other damage still: it was elected with that.
        """
        store = self.process.broker.store
        is_healed = not store.log_failure
        had_lost_its_end = is_healed and store.has_lost_its_end
        skipped: Collection[DamagedRange] = ()
        with suppress(OSError):
            skipped = await asyncio.to_thread(lambda: store.skipped_ranges) if is_healed else ()
        self._is_open = False
        await self.process.stop(CHANGE_GRACE_S)
        try:
            await self._open(is_end_known_lost=had_lost_its_end)
        except OSError as error:
            self._give_back(epoch, str(error))
            await self._open_until_it_works()
            return False
        store = self.process.broker.store
        if store.has_lost_its_end and not had_lost_its_end:
            self._give_back(epoch, "its log was opened again, and ends with damage")
        elif await asyncio.to_thread(_has_skipped_more, store, skipped):
            self._give_back(epoch, "its log was opened again, and is damaged")
        elif store.has_cut_its_end:
            self._give_back(epoch, "its log was opened again, and its end was cut")
        else:
            return True
        return False

    def _give_back(self, epoch: int, why: str) -> None:
        log.critical(
            "this broker was elected to lead %s in epoch %d, and cannot: %s. It gives the lead back and stays a slave. It runs again when"
            " it can open its log",
            self._config.broker_name, epoch, why,
        )  # fmt: skip
        self.leadership.unable(epoch, why)

    async def _try_room(self, store: Store) -> None:
        """Lets this member run again if the disk takes now what it did not take."""
        try:
            await asyncio.to_thread(store.check_room)
        except (OSError, StoreFailedError):
            return
        if self.leadership.is_unable:
            self.leadership.able()
            log.warning("this broker can lead %s again: its disk has room", self._config.broker_name)

    async def _look_for_room(self, store: Store) -> None:
        """Tells the election when the disk has been full for a while, or has had room again."""
        if store.log_failure:
            return
        leadership = self.leadership
        lack = await asyncio.to_thread(_lack_of_room, store, is_known=leadership.is_full)
        self._other_looks = self._other_looks + 1 if bool(lack) is not leadership.is_full else 0
        if self._other_looks < (1 if lack and not store.is_leading else FULL_LOOKS):
            return
        self._other_looks = 0
        leadership.full(lack)
        name = self._config.broker_name
        if not lack:
            log.warning("the disk has room again: this broker can lead %s", name)
        elif store.is_leading:
            log.error("sends are refused: %s. A member of %s leads that is in sync and has room, if there is one", lack, name)
        else:
            log.error("this broker does not lead %s if another one can: %s", name, lack)

    async def _open_again(self) -> None:
        """The store is closed, and opened to follow."""
        has_failed = bool(self.process.broker.store.log_failure)
        self._is_open = False
        await self.process.stop(CHANGE_GRACE_S)
        await self._open_until_it_works(also_if_broken=has_failed)

    async def _open_until_it_works(self, *, also_if_broken: bool = True) -> None:
        """Opens the store to follow as soon as its disk has room; `also_if_broken`: as soon as its disk is well. Raises StoppedError."""
        failed_opens = FailedOpens(self._config.data_dir)
        while True:
            try:
                await self._open()
                return
            except OSError as error:
                if not (also_if_broken or error.errno in DISK_FULL_ERRNOS):
                    raise
                failed_opens.say(error)
                if self._is_stopping:
                    raise StoppedError(f"the store could not be opened again before the broker was stopped: {error}") from error
            await asyncio.sleep(FAILURE_LOOK_S)

    async def _open(self, *, is_end_known_lost: bool = False) -> None:
        """Opens the store to follow, and serves. Raises OSError if that cannot be done now; then nothing is open. `is_end_known_lost`:
        this member was elected with that.
        """
        before = self.process.broker.store
        self.process = await asyncio.to_thread(self._make, self._config, None)
        self.process.broker.store.go_on_counting(before)
        # At once: the task that looks for healed logs must not take this store for the last one's.
        self.leadership.damaged(_has_skipped(self.process.broker.store))
        if self.process.broker.store.has_lost_its_end and not is_end_known_lost:
            await self._doubt_tail()
        if self.process.broker.store.has_cut_its_end:
            self._tail.cut()
        if self._tail.was_cut:
            self.leadership.end_was_cut(_cut_end_of(self.process.broker.store))
        await self.process.start()
        self._is_open = True


def _place_of(root: str) -> str:
    """Tells a folder from any other one, on this start of the machine."""
    found = os.stat(root)
    return f"{read_boot_id()} {found.st_dev} {found.st_ino}"


def _cut_end_of(store: Store) -> LogEnd:
    """Where a log ends whose end a start has cut."""
    return LogEnd(store.epoch, store.appended_position, is_cut=True)


def _has_skipped(store: Store) -> bool:
    """Whether the start has skipped parts of the log that are still wanted; one that cannot be read counts as that."""
    try:
        return bool(store.skipped_ranges)
    except OSError as error:
        log.warning("parts of the log were skipped, and cannot be read: %s", error)
        return True


def is_to_be_reopened(store: Store, reopens: HealedReopens, now_ms: int) -> bool:
    """Whether a slave opens its store again now, since its log was healed. One on a full disk could not open it. Raises OSError."""
    healed, is_whole = store.healed_skipped_ranges, store.has_healed_what_was_skipped
    if not reopens.is_due(healed, is_whole=is_whole, now_ms=now_ms) or _lack_of_room(store, is_known=True):
        return False
    reopens.note_opening(now_ms)
    return True


def _has_skipped_more(store: Store, known: Collection[DamagedRange]) -> bool:
    """Whether the start has skipped other parts of the log than these; what cannot be read counts as that."""
    try:
        return any(damage not in known for damage in store.skipped_ranges)
    except OSError:
        return True


def _lack_of_room(store: Store, *, is_known: bool) -> str:
    """Why the disk takes no messages; "" if it does. A master's has room while it takes sends. `is_known`: it was full, so try a write."""
    if store.is_leading:
        return store.last_refusal
    try:
        lack = store.lack_of_room()
        if is_known and not lack:
            store.check_room()
    except (OSError, StoreFailedError) as error:
        return str(error)
    return lack
