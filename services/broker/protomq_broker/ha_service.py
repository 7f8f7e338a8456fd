"""HaService on a master: gives its log to the slaves that fetch it, and takes what they acknowledge.

A fetch that finds nothing new is held: an entry in a deque, not a thread. The service answers it when the log grows, when the confirmed
position or the start of the log has moved, and at the heartbeat. Where nobody waits for slaves, the log is gathered for some milliseconds.
`protomq_ha.replicas` decides who is in sync.

Everything runs on the ha lane, one thread. Any thread may use `order_lead`, `forget_member`, `signal`, `kept_position`, `views` and
`verdict`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from google.protobuf.message import DecodeError

from protomq.v1 import ha_service_pb2 as ha
from protomq.wire.record import encode_varint
from protomq_ha.cluster_state import PROMOTE_UNCLEAN, SWITCH
from protomq_ha.replicas import (
    ImpossibleAckError,
    Limits,
    ReplicaTable,
    ReplicaTakenError,
    ReplicaView,
    Verdict,
)
from protomq_ha.roles import BrokerRole
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import Code, ServiceError, invalid_argument, too_many, unparsable
from protomq_runtime.regions import RecentRegion

from .leadership_driver import (
    NO_STANDING,
    OrderPendingError,
    OrderRefusedError,
    OrderUncertainError,
    UnknownMemberError,
)
from .slave_gate import leads_another_epoch, master_is_elected
from .store.errors import CorruptLogError
from .store.log.agreement import LogPoint
from .store_errors import tells_store_errors, to_service_error

if TYPE_CHECKING:
    from protomq_runtime.call import Call, CallContext, CallLane
    from protomq_runtime.clock import Clock
    from protomq_runtime.principals import Principal
    from protomq_runtime.regions import Region
    from protomq_runtime.timers import Timer

    from .config import BrokerConfig
    from .ha_follower import MasterView
    from .leadership_driver import LeadershipDriver, Standing
    from .log_time import LogTime
    from .store.store import Store

log = logging.getLogger("protomq.broker")

FETCHES_MAX: Final = 4
"""Most fetches that one session may have under way."""
GRPC_SIZE_MAX_BYTES: Final = 3 << 20
"""Most bytes of the log in an answer over gRPC, whose clients take 4 MiB."""
TICK_MS: Final = 250
REQUEST_ID_MAX_LENGTH: Final = 64
ADDRESS_MAX_LENGTH: Final = 300
"""Of a slave, which each status shows. Names of hosts have 253 characters."""
SILENT_HEARTBEATS: Final = 3
"""Where the master is elected: a slave that stays silent for this many heartbeats does not keep up."""
NEWS_DELAY_MS: Final = 20
"""How long a slave may wait for news: a later confirmed position, or a later start of the log. An append in that time carries the news with
it.
"""
GATHER_MS: Final = 40
"""How long the log is gathered for a slave where nobody waits for slaves: an answer costs the master as much as some sends.

It begins with each answer that has a part of the log, for all slaves. So an answer goes at once if the last one is older than this.
RocketMQ's asynchronous master looks each 100 ms (HAConnection).
"""
GATHER_SIZE_MAX_BYTES: Final = 4 << 20
"""If this much of the log is there, it does not wait. That is what fast senders append in the time above."""
RECENT_SIZE_MAX_BYTES: Final = 32 << 20
"""What stands so near the end of the log was just written, and is in memory still."""
ENDED_MAX: Final = 64
"""Slaves of which the master remembers how far their last session came."""
_LOG_TAG: Final = bytes((ha.FetchResponse.LOG_FIELD_NUMBER << 3 | 2,))

ROLES: Final = {
    BrokerRole.ASYNC_MASTER: ha.BROKER_ROLE_ASYNC_MASTER,
    BrokerRole.SYNC_MASTER: ha.BROKER_ROLE_SYNC_MASTER,
    BrokerRole.SLAVE: ha.BROKER_ROLE_SLAVE,
}


class _Fetch(NamedTuple):
    """A fetch that is held."""

    call: Call
    size_max_bytes: int
    timer: Timer


class _Feed:
    """State of a slave's session on this master."""

    __slots__ = ("asked_bytes", "begun_position", "held", "last_call", "principal", "sent_position", "session", "slave", "told")

    def __init__(self, session: int, call: Call, slave: tuple[int, int], begun_position: int) -> None:
        """`slave`: its id and its store's."""
        self.session = session
        self.slave = slave
        self.begun_position = self.sent_position = begun_position
        self.principal: Principal = call.principal
        self.last_call = call
        """The last fetch, answered or not. On the remoting port its connection tells whether the slave is there."""
        self.asked_bytes = GATHER_SIZE_MAX_BYTES
        """The most that its last fetch asked for. A slave on a slow link asks for little at a time."""
        self.held: deque[_Fetch] = deque()
        self.told = (-1, -1)
        """The last (confirmed position, first position) that the slave was told."""


class HaService:
    """See the module's docstring."""

    def __init__(
        self,
        store: Store,
        config: BrokerConfig,
        clock: Clock,
        broker_name: str,
        draw: Callable[[], int],
        on_verdict: Callable[[Verdict], None],
        master_view: Callable[[], MasterView] | None = None,
        leadership: LeadershipDriver | None = None,
        log_time: LogTime | None = None,
    ) -> None:
        """`draw` gives random numbers, never 0, for sessions. `on_verdict` is called on the ha lane when the verdict for sends changes.
        `master_view`: given on a slave, returns what it knows of its master; a slave serves only the status. `leadership`: given where the
        master is elected, says what is confirmed. `log_time`: of a master, which its slaves go on with; None: they are not told.
        """
        self._leadership = leadership
        self.name_problem: Callable[[], str] = lambda: ""
        """Returns why name servers refuse the broker its name, "" if they do not. Set by the broker."""
        self.standing = NO_STANDING
        """The last standing that the leadership gave."""
        self._store = store
        self._positions = store.positions
        self._config = config.ha
        self._broker_name = broker_name
        self._cluster = config.cluster
        self._now_ms = clock.monotonic_ms
        self._log_time = log_time
        self._role = config.role
        self._broker_id = config.broker_id
        self._master_view = master_view
        self._draw = draw
        self._on_verdict = on_verdict
        is_sync = config.role is BrokerRole.SYNC_MASTER
        self._table = ReplicaTable(
            Limits(
                copies_wanted=config.ha.in_sync_replicas if is_sync else 1,
                copies_min=config.ha.min_in_sync_replicas if is_sync else 1,
                gap_max_bytes=config.ha.gap_max_bytes,
                timeout_ms=config.ha.timeout_ms,
                counts_flushed=config.store.sync_flush,
            )
        )
        self._counts_flushed = config.store.sync_flush
        self._late_max_ms = min(config.ha.timeout_ms, config.etcd.member_timeout_ms)
        """Where the master is elected: a slave that is later does not keep up."""
        self._feeds: dict[int, _Feed] = {}
        self._lane: CallLane | None = None
        self._is_posted = self._is_news_due = self._is_gathering = self._stopping = False
        self._wake_position = 0
        """An append that ends before this position wakes nobody: what is gathered goes soon. 0: each wakes."""
        self._held_count = 0
        self._ended: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        """Where the last session of a slave began, and up to where it has sent the log."""
        self.verdict = (
            self._table.verdict(self._positions.appended, self._now_ms())
            if leadership is None
            else self.verdict_of(NO_STANDING)
        )
        """The last verdict for sends."""
        self.views: Sequence[ReplicaView] = ()
        """The slaves that follow, as of the last look."""
        self.kept_position: int | None = None
        """Slaves that follow need the log from this position on; None: no slave needs any."""

    def begin(self, lane: CallLane) -> None:
        """Starts the service. The lanes run already."""
        self._lane = lane
        if self._leadership is not None:
            self._leadership.on_standing = self._post_judge
        self._positions.on_appended.append(self.signal)
        self._positions.on_flushed.append(self.signal)
        lane.post(self._tick)

    def stop(self) -> None:
        """Answers all held fetches, because the server stops. Any thread."""
        self._stopping = True
        if self._lane is not None:
            self._lane.post(self._release)

    def _post_judge(self) -> None:
        """Posts a new judgement, because the leadership may have changed its word. Any thread."""
        if self._lane is not None and not self._stopping:
            self._lane.post(self._look)

    def signal(self, position: int) -> None:
        """Called when a position of the log has moved. Any thread; costs nothing while no fetch is held, or while the log is gathered."""
        if (
            self._held_count
            and position >= self._wake_position
            and not self._is_posted
            and self._lane is not None
        ):
            self._is_posted = True
            self._lane.post(self._wake)

    @raw
    def fetch(self, call: Call) -> None:
        """Answers with a part of the log, or holds the call."""
        try:
            request = ha.FetchRequest.FromString(bytes(call.payload))
            self._check_fields(request)
            if request.session:
                self._go_on(call, request)
            else:
                self._begin_session(call, request)
        except DecodeError:
            call.fail(unparsable("protomq.v1.FetchRequest"))
        except Exception as error:
            call.fail(to_service_error(error))

    @raw
    def acknowledge(self, call: Call) -> None:
        """Notes which positions a slave has written and flushed."""
        try:
            request = ha.AcknowledgeRequest.FromString(bytes(call.payload))
            if self._feed_of(request.session, call) is not None:
                self._note(
                    request.session,
                    request.written_position,
                    request.flushed_position,
                    request.heard_ms,
                )
        except DecodeError:
            call.fail(unparsable("protomq.v1.AcknowledgeRequest"))
        except Exception as error:
            call.fail(to_service_error(error))
        else:
            call.answer(ha.AcknowledgeResponse().SerializeToString())

    @tells_store_errors
    def compare_log(
        self, request: ha.CompareLogRequest, context: CallContext
    ) -> ha.CompareLogResponse:
        """Returns where an epoch ends, or which append ends at a position."""
        self._check_name(request.broker_name, request.cluster)
        response = ha.CompareLogResponse(first_position=self._store.min_position)
        question = request.WhichOneof("question")
        if question is None:
            raise invalid_argument("question", "is needed: an epoch or a position")
        if question == "epoch":
            end = self._store.epoch_end(request.epoch)
            if end is not None:
                response.epoch, response.epoch_end_position = end
        else:
            point = self._store.log_point(request.position)
            if point is not None:
                response.point.MergeFrom(
                    ha.LogPoint(position=point.position, epoch=point.epoch, crc32c=point.crc32c)
                )
        return response

    def get_ha_status(
        self, request: ha.GetHaStatusRequest, context: CallContext
    ) -> ha.GetHaStatusResponse:
        """Returns the state of replication."""
        positions, now_ms = self._positions, self._now_ms()
        response = ha.GetHaStatusResponse(
            role=ROLES[self._role],
            broker_name=self._broker_name,
            broker_id=self._broker_id,
            epoch=self._store.epoch,
            first_position=self._store.min_position,
            end_position=positions.appended,
            flushed_position=positions.flushed,
            confirmed_position=positions.confirmed,
        )
        if self._leadership is not None:
            view = self._leadership.view()
            known = [ha.KnownMember(member=member, **name._asdict()) for member, name in view.known]
            response.leadership.MergeFrom(ha.Leadership(**{**view._asdict(), "known": known}))
        if self._master_view is not None:
            master = self._master_view()
            response.master_address = master.address
            response.problem = "; ".join(filter(None, (self.name_problem(), master.problem)))
            response.master_end_position = master.end_position
            if master.heard_ms is not None:
                response.master_silence_ms = now_ms - master.heard_ms
            return response
        response.problem = "; ".join(filter(None, [self.name_problem(), self._store.write_refusal, self._shortage()]))
        response.in_sync_count = self.in_sync_count
        if self._role is BrokerRole.SYNC_MASTER:
            response.in_sync_replicas = self._config.in_sync_replicas
            response.min_in_sync_replicas = self._config.min_in_sync_replicas
        response.replicas.extend(
            ha.ReplicaStatus(
                broker_id=each.replica_id,
                address=each.address,
                in_sync=each.is_in_sync,
                written_position=each.written_position,
                flushed_position=each.flushed_position,
                lag_bytes=each.lag_bytes,
                silence_ms=each.silence_ms,
            )
            for each in self._table.views(positions.appended, now_ms)
        )
        return response

    @property
    def in_sync_count(self) -> int:
        """Copies that are in sync and keep up now, the master's own among them. Sends also wait for members of the set that are late."""
        return self.verdict.in_sync_count - self.standing.late

    def _shortage(self) -> str:
        """Says why sends are refused: too few copies are in sync, or this broker does not lead now."""
        if not self.verdict.refuses:
            return ""
        count, wanted = self.verdict.in_sync_count, self._config.min_in_sync_replicas
        if count >= wanted:
            return "this broker does not lead yet, or not any more: it takes no messages"
        return f"{count} copies are in sync, and min_in_sync_replicas is {wanted}: no messages are taken until slaves are back"

    @tells_store_errors
    def order_lead(
        self, request: ha.OrderLeadRequest, context: CallContext
    ) -> ha.OrderLeadResponse:
        """Writes an order into etcd, or takes one away. Runs on the admin lane: etcd may take seconds, and fetches must not wait for it."""
        leadership = self._election_of(request.broker_name)
        is_switch = request.kind == ha.ORDER_KIND_SWITCH
        is_withdrawal = request.kind == ha.ORDER_KIND_WITHDRAW
        if not is_switch and not is_withdrawal and request.kind != ha.ORDER_KIND_PROMOTE_UNCLEAN:
            raise invalid_argument("kind", "is needed: a switch, an unclean promotion, or that an order is withdrawn")
        if len(request.request_id) > REQUEST_ID_MAX_LENGTH:
            raise invalid_argument("request_id", f"has {len(request.request_id)} characters; {REQUEST_ID_MAX_LENGTH} are the most")
        if not is_switch and not is_withdrawal and not request.member:
            raise invalid_argument("member", "is needed for an unclean promotion")
        try:
            if is_withdrawal:
                replaced = leadership.withdraw_order(request.request_id)
            else:
                replaced = leadership.order(SWITCH if is_switch else PROMOTE_UNCLEAN, request.member)
        except OrderPendingError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "ORDER_PENDING",
                str(error),
                metadata={"broker_name": self._broker_name},
            ) from None
        except OrderRefusedError as error:
            is_definite = not isinstance(error, OrderUncertainError)
            raise ServiceError(
                Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", str(error), definite=is_definite
            ) from None
        return ha.OrderLeadResponse(replaced_order=replaced)

    @tells_store_errors
    def forget_member(
        self, request: ha.ForgetMemberRequest, context: CallContext
    ) -> ha.ForgetMemberResponse:
        """Takes a broker that was removed for good out of what etcd knows. Runs on the admin lane, as `order_lead` does."""
        leadership = self._election_of(request.broker_name)
        try:
            leadership.forget(request.broker_id)
        except UnknownMemberError as error:
            raise ServiceError(
                Code.NOT_FOUND,
                "BROKER_NOT_FOUND",
                str(error),
                metadata={"broker_name": self._broker_name, "broker_id": str(request.broker_id)},
            ) from None
        except OrderRefusedError as error:
            raise ServiceError(Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", str(error)) from None
        return ha.ForgetMemberResponse()

    def _election_of(self, broker_name: str) -> LeadershipDriver:
        self._check_name(broker_name)
        if self._leadership is None:
            raise ServiceError(
                Code.UNIMPLEMENTED,
                "UNSUPPORTED",
                f"{self._broker_name} elects nobody: its roles are in the configuration, and change with a restart (docs/ha.md)",
                metadata={"field": "broker_name"},
            )
        return self._leadership

    # Sessions.

    def _check_fields(self, request: ha.FetchRequest) -> None:
        for field in ("size_max_bytes", "hold_ms", "flushed_position"):
            if getattr(request, field) < 0:
                raise invalid_argument(field, "must be 0 or above")
        if len(request.address) > ADDRESS_MAX_LENGTH:
            raise invalid_argument("address", f"has {len(request.address)} characters; {ADDRESS_MAX_LENGTH} are the most")

    def _check_name(self, broker_name: str, cluster: str = "") -> None:
        if broker_name != self._broker_name:
            raise ServiceError(
                Code.NOT_FOUND,
                "BROKER_NOT_FOUND",
                f"this is broker {self._broker_name}, not {broker_name!r}: a slave has the name of its master",
                metadata={"broker_name": broker_name},
            )
        if cluster not in ("", self._cluster):
            raise ServiceError(
                Code.NOT_FOUND,
                "BROKER_NOT_FOUND",
                f"this is broker {self._broker_name} of cluster {self._cluster}, not of {cluster!r}: a slave has the cluster of its master",
                metadata={"broker_name": broker_name},
            )

    def _begin_session(self, call: Call, request: ha.FetchRequest) -> None:
        self._check_name(request.broker_name, request.cluster)
        if self._leadership is not None and not request.epoch:
            raise master_is_elected(self._broker_name, self._broker_id)
        if self._leadership is not None and request.epoch != self._store.epoch:
            raise leads_another_epoch(self._broker_name, self._broker_id, self._store.epoch, request.epoch)
        if request.broker_id <= 0:
            raise invalid_argument("broker_id", "of a slave is above 0")
        if not request.store_id:
            raise invalid_argument("store_id", "is needed: a random number of the slave's store")
        end = LogPoint(request.end.position, request.end.epoch, request.end.crc32c)
        first = self._store.start_point
        if end.position and self._store.log_point(end.position) != end:
            call.answer(self._header(ha.FETCH_STATUS_DIVERGED, 0, end.position).SerializeToString())
            return
        position = end.position or first.position
        self._look_why_it_stands(request, position)
        session = self._draw()
        try:
            ended = self._table.join(
                request.broker_id, request.store_id, session, request.address, position, self._now_ms()
            )
        except ReplicaTakenError as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "NAME_TAKEN",
                f"{error}; give each slave of a master a broker_id and a data_dir of its own",
                metadata={
                    "broker_name": self._broker_name,
                    "broker_id": str(request.broker_id),
                    "grpc_address": error.address,
                },
            ) from None
        for each in ended:
            self._end_feed(each)
        slave = request.broker_id, request.store_id
        feed = self._feeds[session] = _Feed(session, call, slave, position)
        log.info(
            "slave %d follows from position %d (%s)", request.broker_id, position, request.address or call.peer
        )  # fmt: skip
        self._note(session, position, min(request.flushed_position, position), 0)
        # What stood before is gone here, so an empty slave can prove the first head by nothing else.
        self._answer(call, feed, request.size_max_bytes, first.crc32c if not end.position and position else None)

    def _look_why_it_stands(self, request: ha.FetchRequest, position: int) -> None:
        """Reads again what a slave was sent, if it is where it was before: the log here may be damaged, and only the slave noticed."""
        slave = request.broker_id, request.store_id
        # A new session may come before the end of the one before.
        sessions = [(feed.begun_position, feed.sent_position) for feed in self._feeds.values() if feed.slave == slave]
        begun_position, sent_position = sessions[-1] if sessions else self._ended.get(slave, (position, position))
        if begun_position == position < sent_position:
            self._store.prove_again(position, sent_position)

    def _go_on(self, call: Call, request: ha.FetchRequest) -> None:
        feed = self._feed_of(request.session, call)
        if feed is None:
            call.answer(self._header(ha.FETCH_STATUS_SESSION_ENDED, 0, 0).SerializeToString())
            return
        feed.last_call = call
        feed.asked_bytes = request.size_max_bytes or GATHER_SIZE_MAX_BYTES
        self._note(
            request.session, request.written_position, request.flushed_position, request.heard_ms
        )
        if len(feed.held) >= FETCHES_MAX:
            message = f"{FETCHES_MAX} fetches of this session are held already"
            raise too_many("held fetches of a session", FETCHES_MAX, message, retry_delay_ms=TICK_MS)
        if not feed.held and (self._stopping or (self._has_more(feed) and not self._gathers(feed))):
            self._answer(call, feed, request.size_max_bytes)
            return
        self._hold(call, feed, request)

    def _feed_of(self, session: int, call: Call) -> _Feed | None:
        """Returns the session if it still lasts and belongs to the caller."""
        feed = self._feeds.get(session)
        return feed if feed is not None and feed.principal == call.principal else None

    def _note(
        self, session: int, written_position: int, flushed_position: int, heard_ms: int
    ) -> None:
        """Notes which positions a slave has. Raises ServiceError for impossible positions; then nothing has changed."""
        log_end = self._positions.appended
        try:
            # An acknowledgement counts as a whole or not at all.
            self._table.check_heard(session, heard_ms)
            self._table.note_acknowledged(
                session, written_position, flushed_position, log_end, self._now_ms()
            )
            self._table.note_heard(session, heard_ms)
        except ImpossibleAckError as error:
            raise invalid_argument(error.field, str(error)) from None
        self._judge()

    def _hold(self, call: Call, feed: _Feed, request: ha.FetchRequest) -> None:
        longest_ms = self._config.heartbeat_interval_ms
        hold_ms = call.hold_time_ms(min(request.hold_ms or longest_ms, longest_ms))
        timer = call.lane.call_later(hold_ms, lambda: self._expire(feed))
        fetch = _Fetch(call, request.size_max_bytes, timer)
        feed.held.append(fetch)
        self._held_count += 1
        call.hold(lambda: self._lose(feed, fetch))
        # It may ask for less than the fetch before it.
        self._wake_position = min(self._wake_position, _full_position(feed))
        # The log may have grown between the look and the entry into the deque, before anybody signalled this fetch.
        self._give(feed)

    def _lose(self, feed: _Feed, fetch: _Fetch) -> None:
        """Forgets a held fetch: the slave has closed its connection."""
        if fetch in feed.held:
            feed.held.remove(fetch)
            self._held_count -= 1
            fetch.timer.cancel()
        self._end_gone(feed)

    def _end_gone(self, feed: _Feed) -> None:
        if feed.session in self._feeds:
            replica = self._table.find(feed.session)
            log.warning("slave %d has gone", replica.replica_id if replica is not None else -1)
            self._end_session(feed.session)

    def _look(self) -> None:
        """Ends the sessions whose connections have closed while none of their fetches was held, and judges."""
        for feed in list(self._feeds.values()):
            if feed.last_call.transport != "grpc" and feed.last_call.closed:
                self._end_gone(feed)
        self._judge()

    def _end_session(self, session: int) -> None:
        self._table.leave(session)
        self._end_feed(session)
        self._judge()

    def _end_feed(self, session: int) -> None:
        feed = self._feeds.pop(session, None)
        if feed is not None:
            self._ended[feed.slave] = feed.begun_position, feed.sent_position
            self._ended.move_to_end(feed.slave)
            if len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        while feed is not None and feed.held:
            call = self._take(feed).call
            call.answer(self._header(ha.FETCH_STATUS_SESSION_ENDED, 0, 0).SerializeToString())

    # Answers.

    def _has_more(self, feed: _Feed) -> bool:
        replica = self._table.find(feed.session)
        return replica is not None and replica.sent_position < self._positions.appended

    def _news(self) -> tuple[int, int]:
        return self._positions.confirmed, self._store.min_position

    def _take(self, feed: _Feed) -> _Fetch:
        fetch = feed.held.popleft()
        self._held_count -= 1
        fetch.timer.cancel()
        return fetch

    def _give(self, feed: _Feed) -> None:
        """Answers held fetches as far as there is more log that is not gathered, and schedules the news."""
        while feed.held and self._has_more(feed):
            if self._gathers(feed):
                # What is gathered brings the news.
                return
            self._answer_held(feed)
        if feed.held and feed.told != self._news() and not self._is_news_due:
            self._is_news_due = True
            feed.held[0].call.lane.call_later(NEWS_DELAY_MS, self._tell_news)

    def _gathers(self, feed: _Feed) -> bool:
        """Whether the slave waits for its next part of the log."""
        return (
            self._is_gathering
            and not self._positions.waits_for_replicas
            and self._positions.appended < _full_position(feed)
        )

    def _gather(self, lane: CallLane) -> None:
        """Begins to gather, or goes on: until then no append wakes the lane, unless it makes the next part of a slave large."""
        if not self._is_gathering:
            self._is_gathering = True
            lane.call_later(GATHER_MS, self._end_gathering)
        log_end = self._positions.appended
        # A slave that is further behind is given all that it asks for.
        full = [_full_position(feed) for feed in self._feeds.values()]
        self._wake_position = min(
            (position for position in full if position > log_end), default=log_end + GATHER_SIZE_MAX_BYTES
        )

    def _end_gathering(self) -> None:
        self._is_gathering, self._wake_position = False, 0
        self._wake()

    def _tell_news(self) -> None:
        self._is_news_due = False
        for feed in list(self._feeds.values()):
            if feed.held and feed.told != self._news() and not (self._has_more(feed) and self._gathers(feed)):
                self._expire(feed)

    def _expire(self, feed: _Feed) -> None:
        """Answers the oldest held fetch without log, because its heartbeat or news are due."""
        if feed.held:
            self._answer_held(feed)

    def _answer_held(self, feed: _Feed) -> None:
        fetch = self._take(feed)
        self._answer(fetch.call, feed, fetch.size_max_bytes)

    def _header(self, status: ha.FetchStatus.ValueType, session: int, position: int) -> ha.FetchResponse:
        confirmed, first = self._news()
        return ha.FetchResponse(
            status=status,
            session=session,
            position=position,
            confirmed_position=confirmed,
            first_position=first,
            end_position=self._positions.appended,
            segment_size_bytes=self._store.config.segment_size_bytes,
            counts_flushed=self._counts_flushed,
            heartbeat_interval_ms=self._config.heartbeat_interval_ms,
        )

    def _answer(self, call: Call, feed: _Feed, size_max_bytes: int, previous_crc32c: int | None = None) -> None:
        """Answers with the next part of the log, or with none."""
        replica = self._table.find(feed.session)
        assert replica is not None, "a session that lasts has its slave"
        start, log_end = replica.sent_position, self._positions.appended
        largest = self._config.transfer_size_bytes
        size_bytes = min(size_max_bytes or largest, largest)
        if call.transport == "grpc":
            size_bytes = min(size_bytes, GRPC_SIZE_MAX_BYTES)
        end = min(start + size_bytes, log_end)
        try:
            end = self._store.sound_end(start, end)
        except CorruptLogError as error:
            # The slave would refuse it, and begin one session after another.
            call.fail(to_service_error(error))
            self._end_session(feed.session)
            return
        regions = self._store.log_regions(start, end)
        if sum(region.size_bytes for region in regions) < end - start:
            # Retention has deleted that part. The slave begins a new session where the log begins.
            call.answer(self._header(ha.FETCH_STATUS_SESSION_ENDED, 0, 0).SerializeToString())
            self._end_session(feed.session)
            return
        feed.told = self._news()
        fields = self._header(ha.FETCH_STATUS_OK, feed.session, start)
        if previous_crc32c is not None:
            fields.previous_crc32c = previous_crc32c
        if self._log_time is not None:
            fields.log_time_ms = self._log_time.now_ms()
        if self._leadership is not None:
            fields.said_ms = self._leadership.now_ms()
            self._table.note_said(feed.session, fields.said_ms)
        header = fields.SerializeToString()
        if end > start:
            self._table.note_sent(feed.session, end, log_end, self._now_ms())
            feed.sent_position = end
            if not self._positions.waits_for_replicas:
                self._gather(call.lane)
            header += _LOG_TAG + encode_varint(end - start)
        # All these regions have the same three fields.
        if log_end - start <= RECENT_SIZE_MAX_BYTES:
            call.answer(header, cast("list[Region]", [RecentRegion(*region) for region in regions]), end - start)
        else:
            call.answer(header, cast("list[Region]", regions), end - start)

    def _wake(self) -> None:
        # This stands before the look, so that a later move posts again.
        self._is_posted = False
        # The first answer begins to gather. What is due now goes to all slaves, else one that fetches fast would hold up the others.
        due = [feed for feed in self._feeds.values() if self._has_more(feed) and not self._gathers(feed)]
        for feed in due:
            # An answer may end its session.
            if feed.held:
                self._answer_held(feed)
        for feed in list(self._feeds.values()):
            self._give(feed)

    def _release(self) -> None:
        for feed in list(self._feeds.values()):
            while feed.held:
                self._expire(feed)

    def _tick(self) -> None:
        """Runs at intervals: takes slaves that are silent or gone out of the in-sync set."""
        for session in self._table.silent(self._now_ms()):
            replica = self._table.find(session)
            log.warning("slave %d is silent", replica.replica_id if replica is not None else -1)
            self._end_session(session)
        self._look()
        if self._lane is not None and not self._stopping:
            self._lane.call_later(TICK_MS, self._tick)

    def _judge(self) -> None:
        """Publishes the verdict that follows from the table."""
        now_ms, log_end = self._now_ms(), self._positions.appended
        verdict = self._verdict(log_end, now_ms)
        self.views = self._table.views(log_end, now_ms)
        self.kept_position = self._table.kept_position()
        if verdict != self.verdict:
            self.verdict = verdict
            if verdict.waits:
                self._wake_position = 0
            self._on_verdict(verdict)

    def _verdict(self, log_end: int, now_ms: int) -> Verdict:
        if self._leadership is None:
            return self._table.verdict(log_end, now_ms)
        silence_max_ms = SILENT_HEARTBEATS * self._config.heartbeat_interval_ms
        reports = self._table.reports(log_end, now_ms, silence_max_ms, self._late_max_ms)
        self.standing = self._leadership.report(log_end, reports)
        return self.verdict_of(self.standing)

    def verdict_of(self, standing: Standing) -> Verdict:
        """Returns what the leadership's standing means for sends. Any thread."""
        limits = self._table.limits
        return Verdict(
            standing.copies,
            True,
            standing.confirmed_position,
            standing.copies < limits.copies_wanted,
            standing.copies < limits.copies_min or not standing.takes_sends,
        )


def _full_position(feed: _Feed) -> int:
    """Where the next part of the log for a slave is large enough to go at once."""
    return feed.sent_position + min(feed.asked_bytes, GATHER_SIZE_MAX_BYTES)
