"""Registers the broker with its name servers. Each name server has its own thread; no thread waits for another.

Per name server, `next_step` decides and the thread does it:

    register     first, after a change of the topics, or when told to; changes that come in quick succession are sent together
    heartbeat    every 30 s (RocketMQ's registerNameServerPeriod)
    hold         a call kept open, so that the name server notices within seconds when this process is gone
    wait         for the end of the hold, a change, the next heartbeat or the stop; the end of a hold names changed routes

A lost connection is opened again, with growing random pauses while that fails; the broker serves on meanwhile. At the stop
the broker unregisters from those it is connected to.

A name server that knows a live broker of the same name with another store refuses this one (NAME_TAKEN). The refusal stands until that name
server accepts the broker, even if the connection is lost in between. A broker that some refuse and none has accepted does not own its name:
`name_refusal`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import tenacity

from protomq.v1.route_service_pb2 import (
    Broker,
    HeartbeatRequest,
    HoldRegistrationRequest,
    RegisterBrokerRequest,
    UnregisterBrokerRequest,
)
from protomq.v1.topic_pb2 import DataVersion, Topic
from protomq_runtime.clock import Clock
from protomq_runtime.errors import ServiceError

from .name_server_connections import NameServer, NameServerConnection

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_MS: Final = 30_000
REGISTER_PAUSE_MIN_MS: Final = 5
"""Shortest time between two registrations, so that a thousand topics created in a row are not sent a thousand times."""
REGISTER_PAUSE_FACTOR: Final = 4
"""The pause is also this multiple of the time that the last one took: 10,000 topics take some 50 ms on both sides."""
RECONNECT_PAUSE_S: Final = 0.25
"""Pause before the first attempt after a lost connection: well within the 3 s of grace that a name server gives."""
RETRY_PAUSE_S: Final = 0.25
RETRY_PAUSE_MAX_S: Final = 3.0
"""Longest pause between two tries. RocketMQ's 30 s would be too long: a restarted name server knows nothing until its brokers are back."""

NAME_PAUSE_S: Final = 0.1
"""Shortest pause before a name is asked for that is due to be free. A name server frees it when it looks (`scan_interval_ms`)."""


class BrokerTopics(NamedTuple):
    """The topics of a broker at one moment. Equal versions mean equal topics."""

    version: DataVersion
    topics: Sequence[Topic]


class Step(Enum):
    """What to do next with a name server."""

    REGISTER = "register"
    HEARTBEAT = "heartbeat"
    HOLD = "hold"
    WAIT = "wait"


@dataclass(slots=True)
class SessionState:
    """What is known of one connection to a name server."""

    registered_version: DataVersion | None = None
    """Version of the topics that the name server has; None: the broker must register."""
    register_from_ms: int = 0
    """The broker may send changed topics again from this time on."""
    heartbeat_due_ms: int = 0
    holding: bool = False


def next_step(state: SessionState, version: DataVersion, now_ms: int) -> tuple[Step, int]:
    """Returns what to do now; for WAIT also the longest wait in milliseconds."""
    wait_ms = max(0, state.heartbeat_due_ms - now_ms)
    if state.registered_version is None:
        return Step.REGISTER, 0
    if state.registered_version != version:
        pause_ms = state.register_from_ms - now_ms
        if pause_ms <= 0:
            return Step.REGISTER, 0
        wait_ms = min(wait_ms, pause_ms)
    if state.heartbeat_due_ms <= now_ms:
        return Step.HEARTBEAT, 0
    if not state.holding:
        return Step.HOLD, 0
    return Step.WAIT, wait_ms


class BrokerRegistration:
    """Keeps a broker registered with each of its name servers. Any thread may call."""

    def __init__(
        self,
        broker: Broker,
        topics: Callable[[], BrokerTopics],
        name_servers: Sequence[NameServer],
        clock: Clock,
        *,
        heartbeat_interval_ms: int = HEARTBEAT_INTERVAL_MS,
        client_id: str = "",
        on_name_refusal: Callable[[ServiceError | None], None] = lambda refusal: None,
        on_routes_changed: Callable[[Collection[str] | None], None] = lambda topics: None,
        may_have_lost_lead: Callable[[], bool] = lambda: False,
    ) -> None:
        """`broker` holds the advertised addresses, the incarnation and the store's id.

        The registration's threads call `topics`, and call `on_name_refusal` at each change of `name_refusal`. They call
        `on_routes_changed` with topics of the broker whose routes other brokers have changed; None: it may be any. They ask
        `may_have_lost_lead` when the name is refused: whether that may be since another member leads.
        """
        self._on_name_refusal = on_name_refusal
        self._told_refusal: ServiceError | None = None
        self._is_stopped = False
        self._config = config = _SessionConfig(
            broker=broker,
            topics=topics,
            clock=clock,
            heartbeat_interval_ms=heartbeat_interval_ms,
            client_id=client_id
            or f"{socket.gethostname()}@{os.getpid()} broker {broker.broker_name}",
            on_verdict=self._note_verdict,
            on_routes_changed=on_routes_changed,
            may_have_lost_lead=may_have_lost_lead,
        )
        self._topics = topics
        self._announced = threading.Condition()
        self._sessions = [_Session(config, server, self._announced) for server in name_servers]

    def start(self) -> None:
        """Starts the threads; returns at once."""
        for session in self._sessions:
            session.start()

    def notify_changed(self) -> None:
        """Tells every name server that the topics have changed. Returns at once."""
        for session in self._sessions:
            session.wake()

    def tell_election(self, election_id: int) -> None:
        """Has every name server know by which election the broker leads, or follows. Returns at once."""
        if election_id == self._config.broker.election_id:
            return
        broker = Broker()
        broker.CopyFrom(self._config.broker)
        broker.election_id = election_id
        self._config.broker = broker
        for session in self._sessions:
            session.wake()

    @property
    def name_server_count(self) -> int:
        """Number of name servers."""
        return len(self._sessions)

    def registered_count(self) -> int:
        """Number of name servers that know this broker right now."""
        return sum(session.known_version is not None for session in self._sessions)

    def tells_routes(self) -> bool:
        """Whether name servers say when routes change: all that know this broker, and there is one. Any thread."""
        told = [session.tells_routes for session in self._sessions if session.known_version is not None]
        return bool(told) and all(told)

    def wait_registered(self, timeout_s: float) -> bool:
        """Waits until all name servers know this broker, or until `stop`. Returns whether they did within `timeout_s`."""
        with self._announced:
            self._announced.wait_for(
                lambda: self._is_stopped or self.registered_count() == len(self._sessions), timeout_s
            )
            return self.registered_count() == len(self._sessions)

    def wait_tried(self, timeout_s: float) -> None:
        """Waits until the broker has asked each name server once, at most `timeout_s`. A refusal or `stop` ends the wait."""
        with self._announced:
            self._announced.wait_for(
                lambda: self._is_stopped
                or bool(self.refusals())
                or all(each.has_tried for each in self._sessions),
                timeout_s,
            )

    def wait_for_name(self, timeout_s: float) -> None:
        """Waits while the name belongs to a broker that has gone and is about to be given up, at most `timeout_s`."""

        def is_settled() -> bool:
            refusals = self.refusals()
            return self._is_stopped or not refusals or any(each.retry_delay_ms is None for each in refusals)

        with self._announced:
            self._announced.wait_for(is_settled, timeout_s)

    def refusals(self) -> list[ServiceError]:
        """The errors of the name servers that refuse the broker its name."""
        return [each.verdict for each in self._sessions if isinstance(each.verdict, ServiceError)]

    def name_refusal(self) -> ServiceError | None:
        """Why the broker does not own its name; None: it does, or no name server has answered yet."""
        refusals = self.refusals()
        accepted = any(each.verdict is True for each in self._sessions)
        return refusals[0] if refusals and not accepted else None

    def _note_verdict(self) -> None:
        with self._announced:
            refusal = self.name_refusal()
            if refusal is self._told_refusal:
                return
            self._told_refusal = refusal
            self._on_name_refusal(refusal)

    def wait_announced(self, timeout_s: float) -> bool:
        """Waits until all reachable name servers know the present topics. Returns whether they did within `timeout_s`."""
        version = self._topics().version
        with self._announced:
            return self._announced.wait_for(lambda: self._is_announced(version), timeout_s)

    def stop(self, timeout_s: float = 1.0) -> None:
        """Unregisters where there is a connection, and ends the threads. Returns within `timeout_s`, even if name servers are silent."""
        with self._announced:
            self._is_stopped = True
            self._announced.notify_all()
        for session in self._sessions:
            session.request_stop()
        deadline = time.monotonic() + timeout_s
        for session in self._sessions:
            session.join(max(deadline - time.monotonic(), 0.0))

    def _is_announced(self, version: DataVersion) -> bool:
        known = [session.known_version for session in self._sessions]
        return all(each is None or each.counter >= version.counter for each in known)


@dataclass(slots=True)
class _SessionConfig:
    broker: Broker
    """Replaced by another one when the election is known."""
    topics: Callable[[], BrokerTopics]
    clock: Clock
    heartbeat_interval_ms: int
    client_id: str
    on_verdict: Callable[[], None]
    on_routes_changed: Callable[[Collection[str] | None], None]
    may_have_lost_lead: Callable[[], bool]


def _retry_pause_s(retry: tenacity.RetryCallState) -> float:
    """Returns the pause before the next try to register. It is random and grows, but a name that is about to be free is asked for in time.
    The start of a broker waits for that, and not for long (`wait_for_name`).
    """
    pause_s = tenacity.wait_random_exponential(multiplier=RETRY_PAUSE_S, max=RETRY_PAUSE_MAX_S)(retry)
    error = retry.outcome.exception() if retry.outcome is not None else None
    if isinstance(error, ServiceError) and error.reason == "NAME_TAKEN" and error.retry_delay_ms is not None:
        return min(pause_s, max(error.retry_delay_ms / 1_000, NAME_PAUSE_S))
    return pause_s


class _Session(threading.Thread):
    """One name server. Everything but `wake` and `request_stop` runs on this thread."""

    def __init__(
        self, config: _SessionConfig, server: NameServer, announced: threading.Condition
    ) -> None:
        super().__init__(name=f"registration {server.label}", daemon=True)
        self.known_version: DataVersion | None = None
        """Version of the topics that the name server has; None: it does not know this broker. Changes wake `announced`."""
        self.has_tried = False
        """Whether the thread has asked the name server and got an answer or an error."""
        self.verdict: ServiceError | bool = False
        """True: the name server has accepted the broker under its name. An error: it refuses the name. False: it has said neither."""
        self.tells_routes = False
        """Whether the name server says when routes change."""
        self._accepted: Broker | None = None
        """The broker as the name server accepted it last."""
        self._config = config
        self._server = server
        self._announced = announced
        self._stopping = threading.Event()
        self._connection: NameServerConnection | None = None
        self._last_complaint = ""

    def wake(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.wake()

    def request_stop(self) -> None:
        self._stopping.set()
        self.wake()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._connect_and_keep()
            except tenacity.RetryError:
                return  # Stopped while it was connecting.
            except Exception:
                # A defect, here or in what the name server answers. Without its registration the broker is no use.
                logger.exception(
                    "registration with name server %s failed; it begins again", self._server.label
                )
                self._stopping.wait(RETRY_PAUSE_MAX_S)
            self._stopping.wait(RECONNECT_PAUSE_S)

    def _connect_and_keep(self) -> None:
        state = SessionState()
        connection = self._connect(state)
        try:
            self._keep(connection, state)
            self._unregister(connection)
        except (OSError, ServiceError) as error:
            self._complain(error)
        finally:
            self._connection = None
            self._publish(None)
            connection.close()

    def _connect(self, state: SessionState) -> NameServerConnection:
        """Connects, registers the broker, and returns the connection. Raises RetryError when stopped."""
        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((OSError, ServiceError)),
            wait=_retry_pause_s,
            stop=tenacity.stop_when_event_set(self._stopping),
            sleep=tenacity.sleep_using_event(self._stopping),
            before_sleep=lambda retry: self._complain(
                retry.outcome.exception() if retry.outcome else None
            ),
        ):
            with attempt:
                return self._connect_once(state)
        raise AssertionError("tenacity ends with a result or a RetryError")

    def _connect_once(self, state: SessionState) -> NameServerConnection:
        connection = self._server.connect(self._config.client_id)
        try:
            if self._stopping.is_set():
                raise ConnectionAbortedError("the broker is stopping")
            self._register(connection, state)
        except BaseException:
            connection.close()
            raise
        self._connection = connection  # From here on it may be woken; the loop looks at everything before it waits.
        logger.info("registered with name server %s", self._server.label)
        self._last_complaint = ""
        return connection

    def _keep(self, connection: NameServerConnection, state: SessionState) -> None:
        while not self._stopping.is_set():
            if self._accepted is not self._config.broker:
                state.registered_version = None
            step, wait_ms = next_step(state, self._config.topics().version, self._now_ms())
            if step is Step.REGISTER:
                self._register(connection, state)
            elif step is Step.HEARTBEAT:
                self._heartbeat(connection, state)
            elif step is Step.HOLD:
                self._hold(connection, state)
            else:
                self._wait(connection, state, wait_ms)

    def _register(self, connection: NameServerConnection, state: SessionState) -> None:
        started_ms = self._now_ms()
        version, topics = self._config.topics()
        broker, accepted = self._config.broker, self._accepted
        # What was accepted before it named its election is no sign that this election has the name.
        has_its_name = accepted is not None and (accepted.election_id != 0 or broker.election_id == 0)
        request = RegisterBrokerRequest(
            broker=broker,
            data_version=version,
            topics=topics,
            returning=self.verdict is True and has_its_name,
        )
        self.tells_routes = connection.register_broker(request).tells_routes
        self._accepted = broker
        if not state.holding:
            # Before anybody hears that the broker is registered: one that is killed without a hold keeps its name until it expires.
            self._hold(connection, state)
        self._judge(True)
        now_ms = self._now_ms()
        pause_ms = max(REGISTER_PAUSE_MIN_MS, REGISTER_PAUSE_FACTOR * (now_ms - started_ms))
        is_new_there = state.registered_version is None
        state.registered_version = version
        state.register_from_ms = now_ms + pause_ms
        state.heartbeat_due_ms = now_ms + self._config.heartbeat_interval_ms
        self._publish(version)
        if is_new_there:
            # What has changed before, nobody has told.
            self._config.on_routes_changed(None)

    def _hold(self, connection: NameServerConnection, state: SessionState) -> None:
        connection.open_hold(HoldRegistrationRequest(**self._identity()))
        state.holding = True

    def _heartbeat(self, connection: NameServerConnection, state: SessionState) -> None:
        version = self._config.topics().version
        response = connection.heartbeat(HeartbeatRequest(data_version=version, **self._identity()))
        state.heartbeat_due_ms = self._now_ms() + self._config.heartbeat_interval_ms
        if response.register_again:
            state.registered_version = None

    def _wait(self, connection: NameServerConnection, state: SessionState, wait_ms: int) -> None:
        try:
            if connection.wait(wait_ms / 1_000):
                state.holding = False
            if topics := connection.take_changed_topics():
                self._config.on_routes_changed(topics)
        except ServiceError as error:
            if error.reason != "BROKER_NOT_FOUND":
                raise
            # The name server was restarted, or took this broker for dead: register again.
            state.holding = False
            state.registered_version = None

    def _unregister(self, connection: NameServerConnection) -> None:
        connection.unregister_broker(UnregisterBrokerRequest(**self._identity()))

    def _publish(self, version: DataVersion | None) -> None:
        with self._announced:
            self.known_version = version
            self.has_tried = True
            self._announced.notify_all()

    def _judge(self, verdict: ServiceError | bool) -> None:
        is_news = (verdict is True) is not (self.verdict is True) or self.verdict is False
        self.verdict = verdict
        if is_news:
            self._config.on_verdict()
        with self._announced:
            self._announced.notify_all()

    def _now_ms(self) -> int:
        return self._config.clock.monotonic_ms()

    def _identity(self) -> dict[str, Any]:
        broker = self._config.broker
        return {
            "cluster": broker.cluster,
            "broker_name": broker.broker_name,
            "broker_id": broker.broker_id,
            "incarnation": broker.incarnation,
            "store_id": broker.store_id,
        }

    def _complain(self, error: BaseException | None) -> None:
        """Notes what went wrong, and logs a repeated problem once."""
        at_start = not self.has_tried
        level, complaint, text = logging.WARNING, str(error), str(error)
        if isinstance(error, ServiceError) and error.reason == "NAME_TAKEN":
            # The text of the error says how long the other broker may still be waited for. It changes each time although the problem is the
            # same.
            level, complaint, text = logging.ERROR, error.reason, error.message
            if self._config.may_have_lost_lead():
                # Etcd will say so. To stop the other one, as the refusal advises, would be wrong.
                level, complaint = logging.WARNING, "lead"
                text = f"it does not take {self._config.broker.broker_name} from this broker, since another one may lead by now"
            self._judge(error)
            if at_start:
                self._last_complaint = complaint  # The broker that starts ends with it, and says it then.
        elif isinstance(error, ServiceError) and error.reason == "UNKNOWN_METHOD":
            complaint = text = f"this is no name server; namesrv names the port of one ({error.message})"
        self._publish(None)
        if complaint != self._last_complaint and not self._stopping.is_set():
            logger.log(
                level, "name server %s: %s; the broker continues and tries again", self._server.label, text
            )
            self._last_complaint = complaint
