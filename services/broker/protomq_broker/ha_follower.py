"""A slave follows its master: one thread that fetches the log, has each seal checked, and stores the same bytes at the same positions.

    find the master    by the configuration, else by the name servers: the broker of the same name with id 0. Where it is elected: as told
    agree              the master has the point at which our log ends; else we truncate our log to the last point that both have. We
                       drop nothing that was confirmed: the master, or etcd, may have lost its data. An operator can order it
    fetch              two fetches are under way; each says what we have, and is answered with the log or, at a heartbeat, without. It asks
                       for as much as the link brings soon. If a part takes long all the same, each side hears from the other meanwhile

Where a start has skipped damaged parts of an elected member's log, it stores nothing. What comes behind a missing part would not fit to
what is derived from the log. It only compares the logs. If the damage lies in what the master's log never had, no replica can heal it. So
that goes (`LeadershipDriver.on_fork`), and what is left may be healed.

Any error ends the connection; the thread makes another one after a pause. After a truncation the store must be opened again, so the thread
calls `on_truncated` and ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from google.protobuf.message import DecodeError

from protomq.v1 import ha_service_pb2 as ha
from protomq.v1 import options_pb2
from protomq.wire.record import SEAL_SIZE_BYTES
from protomq_ha.cluster_state import LogEnd
from protomq_ha.leadership_values import OwnLog
from protomq_ha.part_size import PartSize
from protomq_runtime.addresses import Address, parse_address_list
from protomq_runtime.config import ConfigError
from protomq_runtime.errors import ServiceError
from protomq_runtime.remoting_client import Answer, OtherProtocolError, RemotingClient

from .fetch_answers import AnswerMemory
from .follow_pauses import FollowPauses
from .ha_session import FollowSession, OtherSegmentsError
from .name_server_connections import get_cluster_info
from .store.errors import DiskFullError, StoreError
from .store.files.disk import DISK_FULL_ERRNOS
from .store.log.agreement import START, LogPoint, last_agreed
from .store.log.epochs import RESTORED_EPOCHS
from .store.timer.log_time import UnreadAnswers

if TYPE_CHECKING:
    from protomq_ha.leadership_values import Follow
    from protomq_runtime.clock import Clock

    from .config import BrokerConfig
    from .confirmed_file import ConfirmedFile
    from .follower_writer import FollowerWriter
    from .leadership_driver import LeadershipDriver
    from .log_time import LogTime
    from .store.store import Store

log = logging.getLogger("protomq.broker")

CALL_TIMEOUT_S: Final = 10.0
CHECK_TIMEOUT_S: Final = 1.0
ELECTED_CALL_TIMEOUT_S: Final = 2.0
SESSION_SHORT_MS: Final = 1_000
"""A session that its master ends earlier is followed by the pause, too."""
HOUR_MS: Final = 3_600_000
EPOCH_MAX: Final = (1 << 63) - 1
"""No log has a higher one."""
SIGN_INTERVAL_S: Final = 0.5
"""While a part of the log comes, the master is told so often that it does."""
NOTE_INTERVAL_MS: Final = 1_000
"""While the master confirms more and more, that is written down so often, or with each heartbeat. In a silence it is written at once."""
HEARTBEATS_UNTIL_SILENT: Final = 2
"""A silence of this many heartbeats makes a slave connect again. The old connection may have died without a word."""
FETCHES: Final = 2
"""Fetches under way at a time. While the slave stores one answer, the next one travels."""

_BEGIN: Final = 0
"""In place of the id of the request that begins a session; no request has it."""

_SERVICE: Final = ha.DESCRIPTOR.services_by_name["HaService"]
_FETCH, _ACKNOWLEDGE, _COMPARE = (
    int(_SERVICE.methods_by_name[name].GetOptions().Extensions[options_pb2.remoting].method_id)
    for name in ("Fetch", "Acknowledge", "CompareLog")
)


class NoMasterError(Exception):
    """No name server knows the master, or nobody leads."""


class SilencedError(Exception):
    """The session ended because the slave must follow another master, or none."""


class TruncatedError(Exception):
    """The store must be opened again: its log was longer than the part that it shares with the master's."""


class OtherPastError(Exception):
    """The master lacks what was confirmed here: only an operator knows which log is right."""


class SkippedPartsError(Exception):
    """The start has skipped parts of this log: nothing is stored behind them."""


_EXPECTED: Final = (
    OSError, ServiceError, NoMasterError, SilencedError, OtherSegmentsError, OtherPastError, SkippedPartsError, StoreError, DecodeError,
    ValueError,
)  # fmt: skip
"""Errors that end a session without being a defect."""


class MasterView(NamedTuple):
    """What a slave knows of its master.

    Attributes: address; end_position: end of its log in its last answer, which came at heard_ms (None: there was none); problem: why the
        slave does not follow now, "" if it does.
    """

    address: str = ""
    end_position: int = 0
    heard_ms: int | None = None
    problem: str = "it has not begun to follow"


class RemoteLog:
    """The master's log, as `last_agreed` asks about it. Attribute: first_position, where it began at the last answer."""

    def __init__(self, client: RemotingClient, broker_name: str) -> None:
        self.first_position = 0
        self._client = client
        self._broker_name = broker_name

    def epoch_end(self, epoch: int) -> tuple[int, int] | None:
        """See LogView."""
        response = self._ask(ha.CompareLogRequest(broker_name=self._broker_name, epoch=epoch))
        return (response.epoch, response.epoch_end_position) if response.HasField("epoch") else None

    def log_point(self, position: int) -> LogPoint | None:
        """See LogView."""
        response = self._ask(ha.CompareLogRequest(broker_name=self._broker_name, position=position))
        point = response.point
        if not response.HasField("point"):
            return None
        return LogPoint(point.position, point.epoch, point.crc32c)

    def _ask(self, request: ha.CompareLogRequest) -> ha.CompareLogResponse:
        # A master may have to walk a segment for it. Who is to follow another one, or to run, need not wait for that.
        payload = self._client.call(_COMPARE, request.SerializeToString(), CALL_TIMEOUT_S, until_woken=True)
        response = ha.CompareLogResponse.FromString(payload)
        self.first_position = response.first_position
        return response


def check_master(config: BrokerConfig, broker_name: str) -> None:
    """Raises ConfigError if what stands at `ha.master` is there, and is the master of no slave of this name and cluster.

    Who is not there may come.
    """
    address = parse_address_list(config.ha.master)[0]
    client_id = f"slave {config.broker_id} of {broker_name}"
    try:
        with RemotingClient(address, options_pb2.LANE_HA, client_id, timeout_s=CHECK_TIMEOUT_S) as client:
            request = ha.CompareLogRequest(broker_name=broker_name, cluster=config.cluster)
            client.call(_COMPARE, request.SerializeToString(), CHECK_TIMEOUT_S)
    except OtherProtocolError as error:
        raise ConfigError(
            f"ha.master: {address} is no remoting port; it may be a gRPC port. Give the remoting port of the master"
        ) from error
    except ServiceError as error:
        if error.reason in ("BROKER_NOT_FOUND", "UNKNOWN_METHOD"):
            raise ConfigError(f"ha.master: {address} is not the master of {broker_name}: {error.message}") from error
    except (OSError, DecodeError):
        return


class HaFollower:
    """See the module's docstring. `start`, `close`, `view`: any thread."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        broker_name: str,
        clock: Clock,
        writer: FollowerWriter,
        confirmed_file: ConfirmedFile,
        on_truncated: Callable[[], None],
        leadership: LeadershipDriver | None = None,
        log_time: LogTime | None = None,
    ) -> None:
        """`on_truncated`: called on the follower's thread when the store has to be opened again. `leadership`, if given, says whom to
        follow. `log_time` takes that of the master.
        """
        self._leadership = leadership
        self._target: Follow | None = None
        self._store = store
        self._config = config
        self._broker_name = broker_name
        self._clock = clock
        self._writer = writer
        self._log_time = log_time
        self._timed_session: FollowSession | None = None
        """That in which the master has said its log time last, in an answer that was read as it came."""
        self._confirmed_file = confirmed_file
        self._confirmed_due_ms = self._confirmed_noted = 0
        self._on_truncated = on_truncated
        self._own_address = ""
        self._client: RemotingClient | None = None
        self._stopping = threading.Event()
        self._hurrying = threading.Event()
        """Ends the pause before the next try."""
        self._complaint = ""
        # An operator, or a replica that heals this log.
        self._has_disk_failed = self._needs_others = False
        self._pauses = FollowPauses(is_elected=leadership is not None)
        self._thread: threading.Thread | None = None
        self.on_following: Callable[[Address], None] = lambda master: None
        """Called on the follower's thread when a session with this master has begun. It must not wait."""
        self.view = MasterView()
        """The present view of the master. The follower replaces it, and never changes it in place."""

    def start(self, own_address: str) -> None:
        """Begins to follow. `own_address`: the address of this broker; the master shows it in its status."""
        self._own_address = own_address
        positions = self._store.positions
        # If a power cut removed the end of the log, the master has to confirm what is fetched in its place.
        positions.note_replicated(self._confirmed_file.read_within(positions.appended))
        self._begin()

    def go_on(self) -> None:
        """Begins again after `close`, when the election names a first or another master."""
        if self._thread is not None and not self._stopping.is_set():
            self._wake()
        elif self._own_address:
            self._stopping.clear()
            self._begin()

    def _begin(self) -> None:
        self._hurrying.clear()
        self._thread = threading.Thread(target=self._run, name="protomq-follower", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        self._hurrying.set()
        client = self._client
        if client is not None:
            client.wake()

    def stop(self) -> bool:
        """Ends the thread, after it has stored what it was storing. Returns whether it ran."""
        self._stopping.set()
        self._wake()
        thread = self._thread
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            return False
        thread.join()
        return True

    def close(self) -> None:
        """The same, and the next start knows what is confirmed."""
        if self.stop():
            self._confirmed_file.write(self._store.positions.confirmed)

    def _run(self) -> None:
        self._pauses.begin_again()
        while not self._stopping.is_set():
            failure: Exception | None = None
            begun_ms = self._clock.monotonic_ms()
            try:
                self._follow_once()
            except TruncatedError as error:
                self._complain(error)
                self._on_truncated()
                return
            except Exception as error:
                failure = error
            pause_s = self._pause_after(failure, begun_ms)
            if not pause_s:
                continue
            if self._hurrying.wait(pause_s):
                self._pauses.begin_again()
            self._hurrying.clear()

    def _pause_after(self, failure: Exception | None, begun_ms: int) -> float:
        """The pause after a try that began then, in seconds. `failure`: why it has failed; None: the master has ended the session."""
        if failure is None:
            self._needs_others = self._has_disk_failed = False
            # A session that ends as soon as it has begun may be ended by another store with our id.
            if self._clock.monotonic_ms() - begun_ms >= SESSION_SHORT_MS:
                return 0
        elif isinstance(failure, _EXPECTED):
            self._needs_others = isinstance(failure, OtherPastError | SkippedPartsError)
            self._has_disk_failed = isinstance(failure, DiskFullError) or (
                isinstance(failure, OSError) and failure.errno in DISK_FULL_ERRNOS
            )
            self._complain(failure)
        else:
            log.error("following the master failed; it begins again", exc_info=failure)
            self._complain(failure)
        needs_others = bool(self._store.log_failure) or self._has_disk_failed or self._needs_others
        return self._pauses.after(self.view.heard_ms, needs_others=needs_others)

    def _follow_once(self) -> None:
        """Runs one session. Returns if the master has ended it, or after `close`."""
        address = self._find_master()
        self.view = self.view._replace(address=str(address))
        client_id = f"slave {self._config.broker_id} of {self._broker_name}"
        timeout_s = CALL_TIMEOUT_S if self._leadership is None else ELECTED_CALL_TIMEOUT_S
        memory = AnswerMemory()
        try:
            with RemotingClient(
                address, options_pb2.LANE_HA, client_id, timeout_s=timeout_s, lend=memory.lend, on_connecting=self._connecting
            ) as client:
                self._check_whole(client)
                session = FollowSession(self._store, self._writer.run)
                part_size = PartSize(self._config.ha.transfer_size_bytes)
                request = session.begin_request(
                    self._broker_name,
                    self._config.broker_id,
                    self._own_address,
                    self._target.epoch if self._target is not None else 0,
                )
                request.size_max_bytes = part_size.size_bytes
                request.cluster = self._config.cluster
                self._check_may_speak()
                unread = UnreadAnswers(self._boottime_ms())
                answer = client.ask(_FETCH, request.SerializeToString(), timeout_s, until_woken=True)
                response, part = memory.read(answer.unwrap_octets())
                if session.began(response, part):
                    try:
                        self._fetch(client, session, memory, part_size, unread)
                    finally:
                        self._note_confirmed()
                elif response.status == ha.FETCH_STATUS_DIVERGED:
                    self._truncate(client)
        finally:
            self._client = None

    def _connecting(self, client: RemotingClient) -> None:
        """`_wake` ends what this client waits for from now on. One that came before is not lost."""
        self._client = client
        if self._hurrying.is_set():
            client.wake()

    # Finding the master, and where both logs agree.

    def _check_may_speak(self) -> None:
        """Raises SilencedError if this slave may say nothing more to this master."""
        target = self._target
        if self._leadership is not None and not (target and self._leadership.may_speak(target)):
            raise SilencedError("another master is to be followed, or none")

    def _find_master(self) -> Address:
        if self._leadership is not None:
            self._target = target = self._leadership.target
            if target is None:
                raise NoMasterError(f"nobody leads {self._broker_name}, as far as this broker knows")
            return parse_address_list(target.address)[0]
        if self._config.ha.master:
            return parse_address_list(self._config.ha.master)[0]
        failure: Exception | None = None
        for name_server in self._config.name_server_addresses:
            try:
                info = get_cluster_info(name_server, f"slave of {self._broker_name}")
            except (OSError, ServiceError) as error:
                failure = error
                continue
            for broker in info.brokers:
                if broker.broker_name == self._broker_name and broker.broker_id == 0:
                    return parse_address_list(broker.remoting_address)[0]
        why = f": {failure}" if failure is not None else ""
        raise NoMasterError(f"no name server knows the master of {self._broker_name}{why}")

    def _truncate(self, client: RemotingClient) -> None:
        """Truncates the log to the last point that both logs have, then raises TruncatedError. OtherPastError: nothing is dropped."""
        store = self._store
        master = RemoteLog(client, self._broker_name)
        point = last_agreed(store, master, store.epoch) or START
        if self._leadership is not None:
            self._check_elected_lacks_nothing(point, master.first_position, client.address)
        # All logs begin with the same head.
        elif point.position <= SEAL_SIZE_BYTES:
            self._check_may_drop(point.position, master.first_position, client.address)
        else:
            self._check_is_no_older_copy(point.position, master, client.address)
        try:
            kept = self._writer.run(lambda: store.truncate_to(point))
        except OSError as error:
            # Nothing has changed, and nothing of the master's log is stored before it has.
            what = f"the log has to end at {point.position}, where it agrees with the master's, and that cannot be written down"
            raise OSError(error.errno, f"{what}: {error.strerror}", error.filename) from error
        raise TruncatedError(
            f"the log ends at {store.appended_position}, and agrees with the master's up to {kept.position}: it is truncated"
        )

    def _check_whole(self, client: RemotingClient) -> None:
        """Raises TruncatedError or SkippedPartsError if what the master sends would not fit behind this log, though its end may."""
        self._check_may_speak()
        if self._leadership is not None and self._leadership.is_damaged:
            self._leave_fork(client)
        # The CRC at the end may be known all the same, so that the master agrees. But the start has skipped what stands before it.
        if self._store.has_lost_its_end:
            self._truncate(client)

    def _leave_fork(self, client: RemotingClient) -> None:
        """Says where this log is to end, if it has damage in what the master's log never had. Raises SkippedPartsError; OtherPastError: the
        master lacks what was confirmed here.
        """
        assert self._leadership is not None
        store, target = self._store, self._target
        assert target is not None, "it is followed"
        master = RemoteLog(client, self._broker_name)
        point = last_agreed(store, master, store.epoch)
        if point is not None and any(damage.end_position > point.position for damage in store.unhealed_ranges):
            shares_past = point.position > SEAL_SIZE_BYTES or (point.position > 0 and store.has_dated_head)
            shared = max(point.position, master.first_position) if shares_past else 0
            own = OwnLog(store.appended_position, store.epoch, store.positions.confirmed, _has_led(store))
            confirmed = own.kept_for(target, shares_past=shares_past)
            if _sound_bytes(store, shared, confirmed):
                raise OtherPastError(
                    f"the start has skipped damaged parts of this log. The master at {client.address} has it up to position {shared} only,"
                    f" and what was confirmed here ends at {confirmed}: nothing is dropped"
                )
            if shared < store.appended_position:
                self._leadership.on_fork(point)
        raise SkippedPartsError("the start has skipped damaged parts of this log: nothing is stored behind them")

    def _check_may_drop(self, position: int, first_position: int, address: Address) -> None:
        """Raises OtherPastError if this log may be the last copy of something that was acknowledged at or behind `position`.

        `first_position`: where the master's log begins.
        """
        store = self._store
        if self._may_retention_have_deleted(first_position):
            return
        is_led = _has_led(store)
        # Whoever leads acknowledges, and asks nobody to confirm it where there is no slave.
        kept = store.appended_position if is_led else store.positions.confirmed
        # A log of which nothing holds is no copy, and the head that all logs have is no message.
        if kept <= max(position, SEAL_SIZE_BYTES) or not _has_sound_part(store):
            return
        if store.appended_position <= first_position:
            raise OtherPastError(self._front_is_gone(first_position, address))
        what = f"has {kept} bytes, and was a master's" if is_led else f"had {kept} bytes confirmed"
        # Any log may have had at its beginning what is here.
        begins = f" begins at position {first_position}, and" if first_position else ""
        raise OtherPastError(
            f"the log of the master at {address}{begins} shares nothing with this one, which {what}; nothing is dropped. If the master has"
            " lost its log, let this broker lead: change broker_role and broker_id of both. Else give this broker an empty folder"
        )

    def _check_is_no_older_copy(self, position: int, master: RemoteLog, address: Address) -> None:
        """Raises OtherPastError if a master with a fixed role has this log up to `position` only, though it was kept safely behind that.

        That does not count if the master was restored: `protomq restore` was told to.
        """
        kept = kept_safely(self._store, position)
        newest = master.epoch_end(EPOCH_MAX) if kept else None
        if newest is None or newest[0] - self._store.epochs.highest_epoch > RESTORED_EPOCHS // 2:
            return
        raise OtherPastError(
            f"the master at {address} has this log up to position {position} only. A master had all up to {kept} on its disk, and said that"
            " it was confirmed: nothing is dropped. Was the master's folder replaced by an older copy, or does a broker lead that lacks"
            " messages? If this store has the right ones, let this broker lead: change broker_role and broker_id of both. Else give this"
            " broker an empty folder"
        )

    def _check_elected_lacks_nothing(self, point: LogPoint, first_position: int, address: Address) -> None:
        """Raises OtherPastError if an elected master has this log up to `point` only, more was confirmed, and no order explains that.

        As long as etcd keeps its data, a master without what was confirmed leads by an unclean promotion only. `first_position`: where
        the master's log begins.
        """
        store, target = self._store, self._target
        assert target is not None, "it is followed"
        shared = point.position
        shares_past = shared > SEAL_SIZE_BYTES or (shared > 0 and store.has_dated_head)
        if shares_past:
            shared = max(shared, first_position)
        # Nothing shows that the master's log is of the same past. It may have deleted what both had; but so may any log.
        elif self._may_retention_have_deleted(first_position):
            return
        own = OwnLog(store.appended_position, store.epoch, store.positions.confirmed, _has_led(store))
        confirmed = own.kept_for(target, shares_past=shares_past)
        if not _sound_bytes(store, shared, confirmed):
            return
        if not shares_past and own.end <= first_position and own.epoch < target.epoch:
            raise OtherPastError(self._front_is_gone(first_position, address))
        raise OtherPastError(
            f"the master at {address} has this log up to position {shared} only, and what was confirmed here ends at {confirmed}: nothing"
            " is dropped. Has etcd lost its data, or was it restored from a copy? If this store has the right messages, stop that master,"
            " and order the unclean promotion of this one. Else give this broker an empty folder"
        )

    def _front_is_gone(self, first_position: int, address: Address) -> str:
        """Says that the master has deleted everything by which one could see that both logs are one."""
        return (
            f"the log of the master at {address} begins at position {first_position}, and this one ends at {self._store.appended_position}:"
            " the master has deleted what stood before, as it does when its disk is full. So nothing shows that both logs are one, and"
            " nothing is dropped. The master has the newer messages: give this broker an empty folder, and it fetches what the master has"
        )

    def _may_retention_have_deleted(self, first_position: int) -> bool:
        """Whether a log that begins there may have had all that is here, and this store would keep none of its messages any more."""
        store = self._store
        age_ms = self._clock.now_ms() - store.positions.tail.store_time_ms
        return store.appended_position <= first_position and age_ms > store.config.retention_hours * HOUR_MS

    # Fetching.

    def _fetch(
        self, client: RemotingClient, session: FollowSession, memory: AnswerMemory, part_size: PartSize, unread: UnreadAnswers
    ) -> None:
        """Fetches until the master ends the session, or until `close`. `unread` was made before the session was asked for."""
        unread.turn(self._boottime_ms(), (_BEGIN,))
        self._complaint = ""
        self._store.note_role_taken()
        log.info("following the master at %s from position %d", client.address, session.position)
        self._note(session, unread.unread_ms(_BEGIN))
        self._heard(session)
        self.on_following(client.address)
        hold_ms = self._config.ha.heartbeat_interval_ms
        timeout_s, silence_s = self._config.ha.timeout_ms / 1_000, self._silence_max_ms / 1_000
        under_way: set[int] = set()
        while not self._stopping.is_set():
            # Before the next are asked for, since those are new.
            unread.turn(self._boottime_ms(), under_way)
            while len(under_way) < FETCHES:
                self._check_may_speak()
                request = session.fetch_request(hold_ms)
                request.size_max_bytes = part_size.size_bytes
                under_way.add(client.start(_FETCH, request.SerializeToString(), timeout_s))
            answer = self._wait(client, session, under_way, silence_s, unread)
            if answer is None:
                if self._stopping.is_set():
                    return
                self._check_may_speak()
                raise TimeoutError(f"the master at {client.address} is silent")
            response, part = memory.read(answer.unwrap_octets())
            part_size.note(part.size_bytes, answer.took_s)
            if not session.took(response, part):
                return
            self._heard(session)
            unread.turn(self._boottime_ms(), under_way)
            under_way.remove(answer.request_id)
            self._note(session, unread.unread_ms(answer.request_id))

    @property
    def _silence_max_ms(self) -> int:
        """How long the slave waits for a sign of its master before it makes a new connection.

        A master that is elected takes a silent slave out of the in-sync set after `member_timeout_ms`: sends suffer until it is back.
        """
        config = self._config
        silence_ms = HEARTBEATS_UNTIL_SILENT * config.ha.heartbeat_interval_ms
        if self._leadership is not None:
            silence_ms = max(silence_ms, config.etcd.member_timeout_ms)
        return min(silence_ms, config.ha.timeout_ms)

    def _wait(
        self, client: RemotingClient, session: FollowSession, under_way: set[int], timeout_s: float, unread: UnreadAnswers
    ) -> Answer | None:
        """Returns the next answer; None if nothing at all has come for `timeout_s`, or when woken.

        While an answer comes, neither side is silent. A link that has become slow may need long for a part that was asked for before.
        """
        quiet_s, received_count = 0.0, client.received_count
        while quiet_s < timeout_s and not self._hurrying.is_set():
            wait_s = min(SIGN_INTERVAL_S, timeout_s - quiet_s)
            answer = client.wait(under_way, wait_s)
            unread.turn(self._boottime_ms(), under_way)
            if answer is not None:
                return answer
            # This may be the last of its master, and of this process.
            self._note_confirmed()
            self._check_may_speak()
            quiet_s += wait_s
            if client.received_count != received_count:
                quiet_s, received_count = 0.0, client.received_count
                client.tell(_ACKNOWLEDGE, session.acknowledgement().SerializeToString(), timeout_s)
        return None

    def _heard(self, session: FollowSession) -> None:
        """Tells the leadership, before the next fetch, that the master has said something and that it is stored."""
        if self._leadership is not None:
            store = self._store
            end = LogEnd(store.epoch, store.appended_position)
            self._leadership.heard(store.epochs.highest_epoch, end, has_caught_up=session.has_caught_up)

    def _boottime_ms(self) -> int:
        return self._clock.monotonic_ms() if self._log_time is None else self._log_time.boottime_ms()

    def _note(self, session: FollowSession, unread_ms: int = 0) -> None:
        """Updates the view after an answer of the master. `unread_ms`: so long it may have lain unread; its log time is old then."""
        now_ms = self._clock.monotonic_ms()
        self.view = MasterView(self.view.address, session.end_position, now_ms, "")
        if self._log_time is not None and session.log_time_ms:
            is_first = not unread_ms and session is not self._timed_session
            self._log_time.follow(session.log_time_ms, is_first=is_first, unread_ms=unread_ms)
            if is_first:
                self._timed_session = session
        # The first ones are written at once, that of the head and that of the first append behind it: a slave that knows of none drops
        # its log for any master.
        confirmed = self._store.positions.confirmed
        is_first = self._confirmed_noted <= SEAL_SIZE_BYTES < confirmed
        if confirmed and (is_first or now_ms >= self._confirmed_due_ms):
            self._confirmed_due_ms = now_ms + min(self._config.ha.heartbeat_interval_ms, NOTE_INTERVAL_MS)
            self._note_confirmed()

    def _note_confirmed(self) -> None:
        """Writes down what is confirmed, if that is more than before: this slave may serve it after a start without its master."""
        confirmed = self._store.positions.confirmed
        if confirmed:
            self._confirmed_noted = confirmed
            self._confirmed_file.write(confirmed)

    def _complain(self, error: BaseException) -> None:
        """Notes what is wrong, and logs a repeated problem once."""
        text = str(error) or type(error).__name__
        if self._leadership is not None and isinstance(error, ServiceError) and error.reason == "NOT_MASTER":
            # The route has no other one either.
            text = f"the broker at {self.view.address} does not lead {self._broker_name} any more, and this one knows of no other master"
        self.view = self.view._replace(problem=text)
        if text != self._complaint and not self._stopping.is_set():
            log.warning("the master of %s is not followed: %s", self._broker_name, text)
            self._complaint = text


def _has_led(store: Store) -> bool:
    """Whether this store wrote some of its log as the leader."""
    return any(row.is_led for row in store.epochs.rows)


def kept_safely(store: Store, position: int) -> int:
    """Up to where the log behind `position` was on the disk of the leader that wrote it, and confirmed; 0: nothing of it.

    No crash takes that back, and no power cut. What stands before the end of what this store wrote itself does not count: an operator has
    changed the roles since then.
    """
    rows = store.epochs.rows
    ends = [*(row.start_position for row in rows[1:]), store.appended_position]
    led_end = max((end for row, end in zip(rows, ends, strict=False) if row.is_led), default=0)
    kept = min(store.positions.confirmed, store.leader_synced_position)
    return kept if _sound_bytes(store, max(position, led_end), kept) else 0


def _has_sound_part(store: Store) -> bool:
    """Whether some of the log is not in quarantine."""
    position = store.min_position
    for damage in store.damaged_ranges:
        if damage.start_position > position:
            return True
        position = max(position, damage.end_position)
    return position < store.appended_position


def _sound_bytes(store: Store, start: int, end: int) -> int:
    """How many bytes of a part of the log are not damaged. Where this log is damaged, it agrees with no other."""
    damaged = sum(
        max(min(damage.end_position, end) - max(damage.start_position, start), 0) for damage in store.unhealed_ranges
    )
    return max(end - start, 0) - damaged
