"""What a broker does with a name server, and how it gets over every way of losing one."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import tenacity

from protomq.v1.route_service_pb2 import (
    Broker,
    HeartbeatRequest,
    HeartbeatResponse,
    HoldRegistrationRequest,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from protomq.v1.topic_pb2 import DataVersion, Topic
from protomq_broker import registration
from protomq_broker.name_server_connections import NameServer
from protomq_broker.registration import (
    HEARTBEAT_INTERVAL_MS,
    BrokerRegistration,
    BrokerTopics,
    SessionState,
    Step,
    next_step,
)
from protomq_runtime.clock import SystemClock
from protomq_runtime.errors import Code, ServiceError
from tests.support.waiting import wait_for

V1, V2 = DataVersion(counter=1), DataVersion(counter=2)
BROKER = Broker(cluster="c", broker_name="b", grpc_address="h:1", incarnation=5)
PATIENCE_S = 60.0
PAUSE_MS = 20


def registered(*, at_ms: int = 0, holding: bool = True, version: DataVersion = V1) -> SessionState:
    return SessionState(version, at_ms + PAUSE_MS, at_ms + HEARTBEAT_INTERVAL_MS, holding)


def test_first_step_is_to_register() -> None:
    assert next_step(SessionState(), V1, 0) == (Step.REGISTER, 0)


def test_hold_is_opened_after_registering() -> None:
    assert next_step(registered(holding=False), V1, 0) == (Step.HOLD, 0)


def test_broker_that_holds_waits_for_the_next_heartbeat() -> None:
    assert next_step(registered(), V1, 10_000) == (Step.WAIT, 20_000)
    assert next_step(registered(), V1, 30_000) == (Step.HEARTBEAT, 0)


def test_heartbeat_goes_before_a_hold() -> None:
    assert next_step(registered(holding=False), V1, 30_000) == (Step.HEARTBEAT, 0)


def test_changed_topics_are_registered_at_once() -> None:
    assert next_step(registered(), V2, 1_000) == (Step.REGISTER, 0)


def test_changes_in_quick_succession_are_sent_together() -> None:
    assert next_step(registered(at_ms=1_000), V2, 1_001) == (Step.WAIT, PAUSE_MS - 1)
    assert next_step(registered(at_ms=1_000), V2, 1_000 + PAUSE_MS) == (Step.REGISTER, 0)


class FakeNameServer:
    """A name server in the same process that notes what it is told.

    Faults: `refuse_connections`, `fail_next(error)` for the next call, `lose()` for the connection, `end_hold(error)`,
    `silent_until` for one that does not answer until that event.
    """

    def __init__(self) -> None:
        self.refuse_connections = False
        self.silent_until: threading.Event | None = None
        self.register_again = False
        self.calls: queue.Queue[str] = queue.Queue()
        self.connections: list[FakeConnection] = []
        self._next_error: Exception | None = None
        self.taken: ServiceError | None = None
        """What every registration is refused with."""
        self.returning: list[bool] = []
        self.elections: list[int] = []
        self.on_hold: Callable[[], None] = lambda: None
        self.tells_routes = False

    def as_name_server(self) -> NameServer:
        return NameServer("fake", self._connect)

    def fail_next(self, error: Exception) -> None:
        self._next_error = error

    def note(self, call: str) -> None:
        self.calls.put(call)
        error, self._next_error = self._next_error, None
        if error is not None:
            raise error

    def wait_for(self, call: str, count: int = 1) -> None:
        while count:
            count -= self.calls.get(timeout=PATIENCE_S) == call

    def next_calls(self, count: int) -> list[str]:
        return [self.calls.get(timeout=PATIENCE_S) for _ in range(count)]

    def _connect(self, client_id: str) -> FakeConnection:
        self.calls.put("connect")
        if self.silent_until is not None:
            self.silent_until.wait()
        if self.refuse_connections:
            raise ConnectionRefusedError("refused")
        self.connections.append(FakeConnection(self))
        return self.connections[-1]


class FakeConnection:
    def __init__(self, server: FakeNameServer) -> None:
        self._server = server
        self._ends: queue.Queue[Exception | bool] = queue.Queue()
        self.closed = threading.Event()
        self._changed_topics: list[str] = []

    def register_broker(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse:
        self._server.note(
            f"register {request.data_version.counter} {[topic.name for topic in request.topics]}"
        )
        if self._server.taken is not None:
            raise self._server.taken
        self._server.returning.append(request.returning)
        self._server.elections.append(request.broker.election_id)
        return RegisterBrokerResponse(tells_routes=self._server.tells_routes)

    def unregister_broker(self, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
        self._server.note(f"unregister {request.broker_name} {request.incarnation}")
        return UnregisterBrokerResponse()

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        self._server.note(f"heartbeat {request.data_version.counter}")
        again, self._server.register_again = self._server.register_again, False
        return HeartbeatResponse(register_again=again)

    def open_hold(self, request: HoldRegistrationRequest) -> None:
        self._server.on_hold()
        self._server.note("hold")

    def wait(self, timeout_s: float) -> bool:
        try:
            end = self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if isinstance(end, Exception):
            raise end
        return end

    def wake(self) -> None:
        self._ends.put(False)

    def close(self) -> None:
        self.closed.set()

    def end_hold(self, error: Exception | None = None, changed_topics: Sequence[str] = ()) -> None:
        self._changed_topics += changed_topics
        self._ends.put(error or True)

    def take_changed_topics(self) -> Sequence[str]:
        topics, self._changed_topics = self._changed_topics, []
        return topics


class Topics:
    """The broker's topics, as the store would have them."""

    def __init__(self) -> None:
        self.now = BrokerTopics(V1, (Topic(name="t"),))

    def __call__(self) -> BrokerTopics:
        return self.now


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "RECONNECT_PAUSE_S", 0.0)
    monkeypatch.setattr(registration, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(registration, "RETRY_PAUSE_MAX_S", 0.001)


@contextmanager
def registering(
    *servers: FakeNameServer,
    topics: Callable[[], BrokerTopics] | None = None,
    heartbeat_interval_ms: int = 30_000,
    on_name_refusal: Callable[[ServiceError | None], None] = lambda refusal: None,
    on_routes_changed: Callable[[Collection[str] | None], None] = lambda topics: None,
    may_have_lost_lead: Callable[[], bool] = lambda: False,
) -> Iterator[BrokerRegistration]:
    subject = BrokerRegistration(
        BROKER,
        topics or Topics(),
        [server.as_name_server() for server in servers],
        SystemClock(),
        heartbeat_interval_ms=heartbeat_interval_ms,
        on_name_refusal=on_name_refusal,
        on_routes_changed=on_routes_changed,
        may_have_lost_lead=may_have_lost_lead,
    )
    subject.start()
    try:
        yield subject
    finally:
        subject.stop(PATIENCE_S)


def test_broker_registers_holds_and_unregisters_at_the_stop() -> None:
    server = FakeNameServer()
    with registering(server) as subject:
        assert subject.wait_registered(PATIENCE_S)
        assert server.next_calls(3) == ["connect", "register 1 ['t']", "hold"]
    assert server.next_calls(1) == ["unregister b 5"]
    assert server.connections[0].closed.is_set()
    assert subject.registered_count() == 0


def test_a_name_server_holds_the_broker_before_anybody_hears_that_it_is_registered() -> None:
    server, counts = FakeNameServer(), list[int]()
    server.silent_until = threading.Event()
    with registering(server) as subject:
        server.on_hold = lambda: counts.append(subject.registered_count())
        server.silent_until.set()
        assert subject.wait_registered(PATIENCE_S)
    assert counts == [0]


def test_changed_topics_reach_every_name_server() -> None:
    servers = [FakeNameServer(), FakeNameServer()]
    topics = Topics()
    with registering(*servers, topics=topics) as subject:
        assert subject.wait_registered(PATIENCE_S)
        topics.now = BrokerTopics(V2, (Topic(name="t"), Topic(name="u")))
        subject.notify_changed()
        assert subject.wait_announced(PATIENCE_S)
        for server in servers:
            assert "register 2 ['t', 'u']" in server.next_calls(4)


def test_unreachable_name_server_holds_up_neither_the_others_nor_an_announcement() -> None:
    good, bad = FakeNameServer(), FakeNameServer()
    bad.refuse_connections = True
    with registering(good, bad) as subject:
        assert good.next_calls(3) == ["connect", "register 1 ['t']", "hold"]
        assert bad.next_calls(3) == ["connect", "connect", "connect"], "it keeps trying"
        assert not subject.wait_registered(0)
        assert subject.registered_count() == 1
        assert subject.wait_announced(PATIENCE_S)
        bad.refuse_connections = False
        assert subject.wait_registered(PATIENCE_S)


def test_routes_that_change_are_told_and_any_may_have_changed_while_nobody_could_tell() -> None:
    server, told = FakeNameServer(), queue.Queue[Collection[str] | None]()
    with registering(server, on_routes_changed=told.put):
        assert told.get(timeout=PATIENCE_S) is None
        server.wait_for("hold")
        server.connections[0].end_hold(changed_topics=["t"])
        assert told.get(timeout=PATIENCE_S) == ["t"]
        server.wait_for("hold")
        forgotten = ServiceError(Code.NOT_FOUND, "BROKER_NOT_FOUND", "register first")
        for error in (forgotten, ConnectionResetError("gone")):
            server.connections[-1].end_hold(error)
            assert told.get(timeout=PATIENCE_S) is None


@pytest.mark.parametrize("tells", [(True, True), (True, False), (False, False)])
def test_routes_are_told_if_all_name_servers_that_are_there_tell_them(tells: tuple[bool, bool]) -> None:
    servers, away = [FakeNameServer(), FakeNameServer()], FakeNameServer()
    away.refuse_connections = True
    for server, tells_routes in zip(servers, tells, strict=True):
        server.tells_routes, server.silent_until = tells_routes, threading.Event()
    with registering(*servers, away) as subject:
        assert not subject.tells_routes(), "it is known nowhere"
        for server in servers:
            assert server.silent_until is not None
            server.silent_until.set()
            server.wait_for("hold")
        wait_for(lambda: subject.registered_count() == 2, PATIENCE_S)
        assert subject.tells_routes() is all(tells)


def test_answered_hold_is_opened_again() -> None:
    server = FakeNameServer()
    with registering(server):
        server.next_calls(3)
        server.connections[0].end_hold()
        assert server.next_calls(1) == ["hold"]


def test_name_server_that_has_forgotten_the_broker_is_told_again() -> None:
    server = FakeNameServer()
    with registering(server):
        server.next_calls(3)
        server.connections[0].end_hold(ServiceError(Code.NOT_FOUND, "BROKER_NOT_FOUND", "who?"))
        assert server.next_calls(2) == ["register 1 ['t']", "hold"]
    assert len(server.connections) == 1


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError("gone"), ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "stopping")],
)
def test_lost_connection_is_made_anew(error: Exception) -> None:
    server = FakeNameServer()
    with registering(server):
        server.next_calls(3)
        server.connections[0].end_hold(error)
        assert server.next_calls(3) == ["connect", "register 1 ['t']", "hold"]
    assert server.connections[0].closed.is_set()


def test_defect_in_the_connection_does_not_end_the_registration(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = FakeNameServer()
    with registering(server):
        server.next_calls(3)
        server.connections[0].end_hold(KeyError("a defect"))
        assert server.next_calls(3) == ["connect", "register 1 ['t']", "hold"]
    assert "begins again" in caplog.text


def test_refused_registration_is_tried_again_on_a_new_connection() -> None:
    server = FakeNameServer()
    server.fail_next(
        ServiceError(Code.FAILED_PRECONDITION, "STALE_REGISTRATION", "a later one is there")
    )
    with registering(server) as subject:
        assert subject.wait_registered(PATIENCE_S)
        register = "register 1 ['t']"
        assert server.next_calls(5) == ["connect", register, "connect", register, "hold"]
    assert all(connection.closed.is_set() for connection in server.connections)


def test_heartbeats_follow_and_register_again_when_told() -> None:
    server = FakeNameServer()
    with registering(server, heartbeat_interval_ms=1):
        server.next_calls(2)
        assert "heartbeat 1" in server.next_calls(2)
        server.register_again = True
        calls = []
        while "register 1 ['t']" not in calls:
            calls = server.next_calls(1)


def test_stop_while_a_name_server_is_unreachable_ends_its_thread() -> None:
    server = FakeNameServer()
    server.refuse_connections = True
    with registering(server):
        server.next_calls(2)
    assert not [thread for thread in threading.enumerate() if thread.name == "registration fake"]


def test_a_server_that_is_no_name_server_is_named_so(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeNameServer()
    server.fail_next(ServiceError(Code.UNIMPLEMENTED, "UNKNOWN_METHOD", "this server has no lane of number 1"))
    with registering(server) as subject:
        assert subject.wait_registered(PATIENCE_S)
    assert "name server fake: this is no name server; namesrv names the port of one (this server has no lane" in caplog.text


def test_same_complaint_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeNameServer()
    server.refuse_connections = True
    with registering(server):
        server.next_calls(5)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "refused" in caplog.text


def name_taken() -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "NAME_TAKEN", "another one has it")


def test_a_name_that_is_taken_is_known_after_the_first_try() -> None:
    refusing, silent = FakeNameServer(), FakeNameServer()
    refusing.taken = name_taken()
    silent.refuse_connections = True
    with registering(refusing, silent) as subject:
        subject.wait_tried(PATIENCE_S)
        assert [refusal.reason for refusal in subject.refusals()] == ["NAME_TAKEN"]


def test_a_start_waits_for_a_name_whose_owner_is_gone_and_for_no_other() -> None:
    server = FakeNameServer()
    server.taken = name_taken()
    server.taken.retry_delay_ms = 500
    with registering(server) as subject:
        subject.wait_tried(PATIENCE_S)
        waiter = threading.Thread(target=subject.wait_for_name, args=(10 * PATIENCE_S,), daemon=True)
        waiter.start()
        server.next_calls(2)
        assert waiter.is_alive()
        server.taken = None
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
        assert subject.refusals() == []
    server.taken = name_taken()  # Its owner is alive.
    with registering(server) as subject:
        subject.wait_tried(PATIENCE_S)
        subject.wait_for_name(10 * PATIENCE_S)
        assert [refusal.reason for refusal in subject.refusals()] == ["NAME_TAKEN"]


def test_a_refusal_is_not_kept_waiting_by_a_silent_name_server() -> None:
    refusing, silent = FakeNameServer(), FakeNameServer()
    refusing.taken = name_taken()
    silent.silent_until = threading.Event()
    with registering(refusing, silent) as subject:
        waiter = threading.Thread(target=subject.wait_tried, args=(10 * PATIENCE_S,), daemon=True)
        waiter.start()
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
        assert [refusal.reason for refusal in subject.refusals()] == ["NAME_TAKEN"]
        silent.silent_until.set()


def test_who_is_refused_everywhere_is_told_and_told_again_when_it_has_the_name() -> None:
    server, told = FakeNameServer(), queue.Queue[ServiceError | None]()
    server.taken = name_taken()
    with registering(server, on_name_refusal=told.put) as subject:
        assert told.get(timeout=PATIENCE_S) is server.taken
        server.taken = None
        assert told.get(timeout=PATIENCE_S) is None
        assert subject.wait_registered(PATIENCE_S)
        assert subject.name_refusal() is None


def test_a_master_that_may_have_lost_the_lead_is_not_advised_to_stop_the_one_that_has_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """As one that was stopped, and has not heard of the next one yet. Where it does lead, the advice is right."""
    server, told, lost = FakeNameServer(), queue.Queue[ServiceError | None](), [True]
    with registering(server, on_name_refusal=told.put, may_have_lost_lead=lambda: lost[0]) as subject:
        assert subject.wait_registered(PATIENCE_S)
        caplog.clear()
        server.taken = name_taken()
        server.connections[-1].end_hold(ConnectionResetError("lost"))
        assert told.get(timeout=PATIENCE_S) is server.taken
        server.wait_for("connect", 3)
        records = [record for record in caplog.records if "another" in record.getMessage()]
        assert [record.levelname for record in records] == ["WARNING"]
        assert "it does not take b from this broker, since another one may lead by now" in caplog.text
        assert "another one has it" not in caplog.text
        lost[0] = False
        server.wait_for("connect", 2)
        assert [record.levelname for record in caplog.records if "another one has it" in record.getMessage()] == ["ERROR"]


def test_one_name_server_that_accepts_is_enough_to_own_the_name() -> None:
    refusing, accepting = FakeNameServer(), FakeNameServer()
    refusing.taken = name_taken()
    with registering(refusing, accepting) as subject:
        subject.wait_tried(PATIENCE_S)
        assert len(subject.refusals()) == 1
        assert subject.name_refusal() is None


def test_a_lost_connection_says_nothing_of_the_name() -> None:
    refusing, accepting = FakeNameServer(), FakeNameServer()
    refusing.taken = name_taken()
    with registering(refusing, accepting) as subject:
        subject.wait_tried(PATIENCE_S)
        accepting.refuse_connections = True
        accepting.connections[-1].end_hold(ConnectionResetError("lost"))
        accepting.wait_for("connect", 3)  # as often in vain
        assert subject.name_refusal() is None


def test_a_registration_says_whether_that_name_server_has_accepted_it_before() -> None:
    first, second = FakeNameServer(), FakeNameServer()
    second.refuse_connections = True
    with registering(first, second) as subject:
        first.wait_for("hold")
        first.connections[-1].end_hold(ConnectionResetError("restarted"))
        first.wait_for("hold")
        second.refuse_connections = False  # it is reached for the first time
        assert subject.wait_registered(PATIENCE_S)
    assert first.returning == [False, True]
    assert second.returning == [False]


def test_without_name_servers_there_is_nothing_to_wait_for() -> None:
    with registering() as subject:
        assert subject.wait_registered(0)
        assert subject.wait_announced(0)


def test_an_election_that_becomes_known_is_told_as_a_name_that_nobody_has_had_yet() -> None:
    server = FakeNameServer()

    def told(election_id: int) -> bool:
        return server.elections[-1] == election_id

    with registering(server) as subject:
        server.wait_for("hold")
        for election_id in (7, 7, 8):
            subject.tell_election(election_id)
            wait_for(partial(told, election_id), PATIENCE_S)
        server.connections[-1].end_hold(ConnectionResetError("restarted"))
        server.wait_for("hold")
    assert server.elections == [0, 7, 8, 8]
    # With another number it has its name still: its etcd has lost its data.
    assert server.returning == [False, False, True, True]


@pytest.mark.parametrize(
    ("retry_delay_ms", "pause_s"),
    [(0, registration.NAME_PAUSE_S), (1_500, 1.5), (None, 3.0), (100_000, 3.0)],
)
def test_a_name_that_is_about_to_be_free_is_asked_for_in_time(
    monkeypatch: pytest.MonkeyPatch, retry_delay_ms: int | None, pause_s: float
) -> None:
    """The start of a broker waits 5 s for it. The longest pause between two tries was 3 s whatever the name server had said."""
    monkeypatch.setattr(registration, "RETRY_PAUSE_S", 0.25)
    monkeypatch.setattr(registration, "RETRY_PAUSE_MAX_S", 3.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    error = name_taken()
    error.retry_delay_ms = retry_delay_ms
    retry = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    retry.attempt_number = 20
    retry.set_exception((ServiceError, error, None))
    assert registration._retry_pause_s(retry) == pause_s
