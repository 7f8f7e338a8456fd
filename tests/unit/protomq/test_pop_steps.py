"""What simple consumers ask of which broker, and what they make of the answers: steps, driven by the test."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from protomq import _methods
from protomq._hook_points import HookPoints
from protomq._message import Message
from protomq._pop_race import AGAIN_S, APART_S, CALL_EXTRA_S, FAILED_S, PopRace
from protomq._pop_steps import PopSteps, decode_pop_answer, incarnation_in
from protomq._steps import CallRace, CallServer, Each, ForgetRoute, GetRoute, Pause, Race
from protomq._types import BrokerAddress, MessageQueue, PoppedQueue, Route
from protomq.errors import (
    ClosedError,
    ConnectFailedError,
    ConnectionLostError,
    DeadlineExceededError,
    GroupDisabledError,
    NoRouteError,
    NotMasterError,
    NotPermittedError,
    ProtocolError,
    ProtomqError,
    RequestTimeoutError,
    ShuttingDownError,
    StaleReceiptError,
    StoreFailedError,
    SystemBusyError,
    TopicNotFoundError,
    TopicRecreatedError,
)
from protomq.hooks import Hook
from protomq.v1.group_service_pb2 import SendBackResponse, SentBack
from protomq.v1.pop_service_pb2 import (
    AckRequest,
    AckResponse,
    ChangeInvisibleRequest,
    ChangeInvisibleResponse,
    PopRequest,
    PopResponse,
    PopStart,
)
from protomq.wire.record import RecordTemplate, encode_record_field


class Clock:
    """Calls take the time that they are held for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Brokers:
    """Answers the effects of steps: pops from `messages` of each broker; `failures`: raised first, in turn."""

    def __init__(self, *names: str) -> None:
        queues = tuple(MessageQueue("T", name, queue_id) for name in names for queue_id in (0, 1))
        addresses = {name: BrokerAddress(name, "", f"{name}:1") for name in names}
        self.route = Route("T", read_queues=queues, brokers=addresses)
        self.cached_route: Route | None = None
        """From before it changed: used until it is looked up again."""
        self.clock = Clock()
        self.steps = PopSteps("group", 5.0, self.clock)
        self.messages: dict[str, list[bytes]] = {name: [] for name in names}
        self.failures: dict[str, list[Exception]] = {name: [] for name in names}
        self.asked: list[tuple[str, int]] = []
        self.acks: list[AckRequest] = []
        self.ack_failures: list[Exception] = []
        self.ack_answer = AckResponse()
        self.change_answer = ChangeInvisibleResponse()
        self.route_failures: list[Exception] = []
        self.silent: set[str] = set()
        self.dead_connections = 0
        """Calls that get no answer for as long as they may take."""
        self.arrivals: dict[float, list[tuple[str, bytes]]] = {}
        """When which messages come to held pops, or later ones."""
        self.given_up: list[list[str]] = []
        """Of each race that is over: whose calls were under way."""
        self.given_back: list[ChangeInvisibleRequest] = []

    def run(self, steps: Any) -> Any:
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = self._do(effect)
                except (Exception, asyncio.CancelledError) as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(outcome)
        except StopIteration as done:
            return done.value

    def _do(self, effect: Any) -> Any:
        match effect:
            case GetRoute():
                if self.route_failures:
                    raise self.route_failures.pop(0)
                return self.cached_route or self.route
            case Each(several):
                return [self.run(steps) for steps in several]
            case Pause(seconds):
                self.clock.now_s += seconds
            case ForgetRoute(_, may_be_old):
                self.cached_route = self.cached_route if may_be_old else None
            case CallServer(_, _, _, timeout_s) if self.dead_connections:
                self.dead_connections -= 1
                self.clock.now_s += timeout_s
                raise RequestTimeoutError("silent") from TimeoutError()
            case CallServer(address, method, payload, _):
                return self._call(address.broker_name, method, b"".join(payload))
            case Race(race):
                self._race(race)
        return None

    def _race(self, race: CallRace) -> None:
        """As a driver does; what is held without a message takes time together with others."""
        held: dict[str, float] = {}
        starts = race.begin()
        while True:
            for name, call in starts:
                request = PopRequest.FromString(b"".join(call.payload))
                if name in self.silent or (request.hold_ms and not self.messages[name] and not self.failures[name]):
                    self.asked.append((name, request.hold_ms))
                    held[name] = self.clock.now_s + (call.timeout_s if name in self.silent else request.hold_ms / 1000)
            answered = [(name, call) for name, call in starts if name not in held]
            starts = []
            for name, call in answered:
                try:
                    outcome: bytes | ProtomqError = self._call(name, call.method, b"".join(call.payload))
                except ProtomqError as error:
                    outcome = error
                starts += race.ended(name, outcome)
            if race.is_over:
                self.given_up.append(sorted(held))
                return
            if starts:
                continue
            self.clock.now_s = min([self.clock.now_s + race.wait_s(), *held.values(), *self.arrivals])
            for name in [name for name, end_s in held.items() if end_s <= self.clock.now_s]:
                del held[name]
                starts += race.ended(name, RequestTimeoutError("silent") if name in self.silent else answer_of([]))
            for arrival_s in [moment for moment in self.arrivals if moment <= self.clock.now_s]:
                for name, body in self.arrivals.pop(arrival_s):
                    if held.pop(name, None) is None:
                        self.messages[name].append(body)
                    else:
                        starts += race.ended(name, answer_of([body]))
            starts += race.due()
            if race.is_over:
                self.given_up.append(sorted(held))
                return

    def _call(self, name: str, method: Any, payload: bytes) -> bytes:
        if method is _methods.ACK:
            self.acks.append(AckRequest.FromString(payload))
            if self.ack_failures:
                raise self.ack_failures.pop(0)
        if self.failures[name]:
            raise self.failures[name].pop(0)
        if method is _methods.ACK:
            return self.ack_answer.SerializeToString()
        if method is _methods.SEND_BACK:
            return SendBackResponse(results=[SentBack()]).SerializeToString()
        if method is _methods.CHANGE_INVISIBLE:
            self.given_back.append(ChangeInvisibleRequest.FromString(payload))
            return self.change_answer.SerializeToString()
        request = PopRequest.FromString(payload)
        self.asked.append((name, request.hold_ms))
        taken, self.messages[name] = self.messages[name][:2], self.messages[name][2:]
        if not taken:
            self.clock.now_s += request.hold_ms / 1000
        return answer_of(taken)

    def receive(self, **wish: Any) -> list[Message]:
        fields = {
            "invisible_s": 60.0, "hold_s": 0.0, "queue": None, "tags": (), "sql": None, "cel": None, "module": None,
            "fifo": False, "start": "earliest",
        }  # fmt: skip
        found: list[Message] = self.run(self.steps.receive(self.steps.wish("T", 32, **{**fields, **wish})))
        return found


def answer_of(bodies: list[bytes], tag: str = "") -> bytes:
    template = RecordTemplate("T", 7, 0)
    fields = [encode_record_field(template.encode(body, number, 1, tag=tag)) for number, body in enumerate(bodies)]
    response = PopResponse(status=1 if bodies else 2, regions_size_bytes=sum(map(len, fields)))  # type: ignore[arg-type]
    start = 0
    for number, field in enumerate(fields):
        response.hand_outs.add(queue_id=1, record_count=1, attempt=number + 1, receipt=b"r%d" % number)
        response.record_starts.append(start)
        response.record_sizes.append(len(field))
        response.queue_offsets.append(40 + number)
        start += len(field)
    return response.SerializeToString() + b"".join(fields)


def test_a_broker_that_comes_is_asked_two_seconds_later_though_the_route_is_trusted_for_longer() -> None:
    brokers = Brokers("a")
    forgotten: list[float] = []
    do = brokers._do

    def noted(effect: Any) -> Any:
        if isinstance(effect, ForgetRoute):
            assert effect == ForgetRoute("T", may_be_old=True), "nobody waits for the name server"
            forgotten.append(brokers.clock.now_s)
        return do(effect)

    brokers._do = noted  # type: ignore[method-assign]
    for _ in range(5):
        brokers.receive(hold_s=0.5)
        brokers.clock.now_s += 0.25
    assert forgotten == [0.0, 2.25]


def test_of_one_broker_all_is_asked_in_one_call() -> None:
    brokers = Brokers("a")
    assert brokers.receive(hold_s=15.0) == []
    assert brokers.asked == [("a", 15_000)]
    brokers.messages["a"] = [b"x", b"y"]
    messages = brokers.receive()
    assert [(m.body, m.queue_offset, m.queue) for m in messages] == [
        (b"x", 40, ("T", "a", 1)), (b"y", 41, ("T", "a", 1))
    ]  # fmt: skip
    queues = [message.queue for message in messages]
    assert [(q.receipt, q.attempt) for q in queues if isinstance(q, PoppedQueue)] == [(b"r0", 1), (b"r1", 2)]


def test_an_empty_list_is_acknowledged_without_a_call() -> None:
    brokers = Brokers("a")
    brokers.failures["a"] = [TopicNotFoundError("nobody calls")] * 9
    assert brokers.run(brokers.steps.ack([])) == []
    assert brokers.run(brokers.steps.nack([], 1)) == []


def test_several_brokers_are_asked_in_turn_and_then_hold_side_by_side() -> None:
    brokers = Brokers("a", "b")
    assert brokers.receive(hold_s=3.0) == []
    assert brokers.asked == [("a", 0), ("b", 0), ("a", 3_000), ("b", 3_000)]
    assert brokers.clock.now_s == pytest.approx(3.0)
    brokers.asked.clear()
    brokers.messages["a"] = [b"x"]
    assert [message.body for message in brokers.receive(hold_s=3.0)] == [b"x"]
    assert brokers.asked == [("b", 0), ("a", 0)]


def test_the_first_of_several_that_has_messages_is_taken_and_the_others_are_given_up() -> None:
    brokers = Brokers("a", "b", "c")
    brokers.arrivals = {1.0: [("b", b"x")]}
    assert [(m.body, m.queue.broker_name) for m in brokers.receive(hold_s=15.0)] == [(b"x", "b")]
    assert (brokers.clock.now_s, brokers.given_up) == (1.0, [["a", "c"]])


def test_what_several_bring_at_one_moment_is_given_as_far_as_it_was_asked_for() -> None:
    brokers = Brokers("a", "b", "c")
    brokers.arrivals = {1.0: [("b", b"x"), ("a", b"y"), ("c", b"z")]}
    wish = brokers.steps.wish(
        "T", 2, invisible_s=60.0, hold_s=15.0, queue=None, tags=(), sql=None, cel=None, module=None, fifo=False, start="earliest"
    )
    assert [message.body for message in brokers.run(brokers.steps.receive(wish))] == [b"x", b"y"]
    assert [(request.unseen, request.invisible_ms) for request in brokers.given_back] == [(True, 0)]


@pytest.mark.parametrize(("tags", "method"), [((), _methods.CHANGE_INVISIBLE), (("wanted",), _methods.ACK)], ids=["surplus", "unwanted"])
def test_of_a_receive_that_is_cancelled_while_it_tells_brokers_all_that_it_has_found_is_abandoned(tags: Any, method: Any) -> None:
    brokers = Brokers("a", "b")
    brokers.arrivals = {1.0: [("b", b"x"), ("a", b"y")]}
    abandoned: list[list[Message]] = []
    brokers.steps.on_abandoned = abandoned.append
    do = brokers._do

    def cancelled(effect: Any) -> Any:
        if isinstance(effect, CallServer) and effect.method is method:
            raise asyncio.CancelledError
        return do(effect)

    brokers._do = cancelled  # type: ignore[method-assign]
    wish = brokers.steps.wish(
        "T", 1, invisible_s=60.0, hold_s=15.0, queue=None, tags=tags, sql=None, cel=None, module=None, fifo=False, start="earliest"
    )
    if tags:
        wish = replace(wish, count=2)
    with pytest.raises(asyncio.CancelledError):
        brokers.run(brokers.steps.receive(wish))
    assert [[message.body for message in messages] for messages in abandoned] == [[b"x", b"y"]]


def test_the_failure_of_a_broker_that_has_left_the_route_says_nothing_of_those_that_are_there() -> None:
    brokers = Brokers("a", "b", "c")
    of_all, do = brokers.route, brokers._do
    a_and_b, b_and_c = (
        replace(of_all, read_queues=tuple(queue for queue in of_all.read_queues if queue.broker_name in names)) for names in ("ab", "bc")
    )
    brokers.failures = {"a": [StoreFailedError("disk")], "b": [StoreFailedError("disk")] * 99, "c": []}
    seen: list[Route] = []

    def noted(effect: Any) -> Any:
        if not isinstance(effect, GetRoute):
            return do(effect)
        seen.append(b_and_c if seen else a_and_b)
        return seen[-1]

    brokers._do = noted  # type: ignore[method-assign]
    assert brokers.receive(hold_s=3.0) == [], "c has nothing, and has not failed"
    assert ("c", 0) in brokers.asked


def test_a_race_with_a_failed_and_a_silent_broker_is_over_soon_after_the_failure() -> None:
    clock = Clock()
    race = PopRace(["a", "b"], lambda name, hold_ms: CallServer(None, None, (), 0.0), lambda name, data: [], 15.0, clock)  # type: ignore[arg-type]
    race.begin()
    clock.now_s = APART_S
    assert [start.name for start in race.due()] == ["b"]
    race.ended("b", RequestTimeoutError("it fails"))
    clock.now_s += race.wait_s()
    race.due()
    assert race.is_over
    assert clock.now_s == pytest.approx(APART_S + FAILED_S)


def test_brokers_over_grpc_are_asked_in_turn_and_never_held_since_what_is_on_its_way_would_be_lost() -> None:
    clock = Clock()
    asked: list[tuple[str, int]] = []

    def make(name: str, hold_ms: int) -> CallServer:
        asked.append((name, hold_ms))
        return CallServer(None, None, (), 0.0)  # type: ignore[arg-type]

    race = PopRace(["a", "b"], make, lambda name, data: [], 1.0, clock, may_hold=lambda name: name == "a")
    starts = race.begin()
    while not race.is_over:
        assert len(starts) <= 1
        starts = race.ended(starts[0].name, b"") if starts else race.due()
        if not starts and not race.is_over:
            assert 0 < race.wait_s() <= AGAIN_S + 1e-9
            clock.now_s += race.wait_s()
    assert {hold_ms for _, hold_ms in asked} == {0}
    assert [name for name, _ in asked[:4]] == ["a", "b", "a", "b"]
    assert 2 * 9 <= len(asked) <= 2 * 11
    assert clock.now_s == pytest.approx(1.0)


def test_over_grpc_a_slow_broker_is_waited_for_and_nothing_spins_when_others_may_be_asked_again() -> None:
    clock = Clock()

    def make(name: str, hold_ms: int) -> CallServer:
        return CallServer(None, None, (), 0.0)  # type: ignore[arg-type]

    race = PopRace(["a", "b"], make, lambda name, data: [], 1.0, clock, may_hold=lambda name: False)
    race.begin()
    clock.now_s = 0.9 * AGAIN_S
    assert [start.name for start in race.ended("a", b"")] == ["b"]
    clock.now_s = AGAIN_S + 0.001
    assert race.due() == []
    assert race.wait_s() == pytest.approx(0.9 * AGAIN_S + APART_S - clock.now_s)
    clock.now_s += race.wait_s() + 1e-9
    assert [start.name for start in race.due()] == ["a"]


def test_a_silent_broker_holds_no_other_back() -> None:
    brokers = Brokers("a", "b")
    brokers.silent = {"a"}
    brokers.messages["b"] = [b"%d" % number for number in range(40)]
    for _ in range(20):
        assert len(brokers.receive(hold_s=2.0)) == 2
    # It is asked again from time to time.
    assert 0.1 <= brokers.clock.now_s < 0.5
    brokers.arrivals = {brokers.clock.now_s + 1.5: [("b", b"x")]}
    began_s = brokers.clock.now_s
    assert [message.body for message in brokers.receive(hold_s=15.0)] == [b"x"]
    assert brokers.clock.now_s - began_s == pytest.approx(1.5)
    began_s = brokers.clock.now_s
    assert brokers.receive(hold_s=2.0) == []
    assert brokers.clock.now_s - began_s <= 2.0 + CALL_EXTRA_S
    brokers.silent.clear()
    brokers.messages["a"] = [b"y"]
    assert [message.body for message in brokers.receive(hold_s=15.0)] == [b"y"]
    assert not brokers.steps._rests


def test_what_passes_fails_no_broker_that_was_not_asked_yet() -> None:
    brokers = Brokers("a", "b")
    brokers.failures["a"] = [ConnectFailedError("away")] * 9
    brokers.messages["b"] = [b"x"]
    assert [message.body for message in brokers.receive(hold_s=0.0)] == [b"x"]


def test_a_broker_that_fails_is_passed_over_and_if_all_do_it_is_said() -> None:
    brokers = Brokers("a", "b")
    brokers.failures["a"] = [TopicNotFoundError("gone")] * 9
    brokers.messages["b"] = [b"x"]
    assert len(brokers.receive()) == 1
    brokers.failures = {name: [TopicNotFoundError("gone")] * 9 for name in "ab"}
    with pytest.raises(TopicNotFoundError):
        brokers.receive(hold_s=3.0)
    brokers.route = Route("T")
    with pytest.raises(NoRouteError):
        brokers.receive()


PASSING = [
    ConnectFailedError("refused"), ConnectionLostError("lost"), RequestTimeoutError("silent"), NotMasterError("a slave"),
    ShuttingDownError("stops"), SystemBusyError("busy"),
]  # fmt: skip


@pytest.mark.parametrize("names", ["a", "ab"])
def test_what_fails_since_the_program_has_closed_the_consumer_is_no_outage(names: str, caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers(*names)
    brokers.failures = {name: [ConnectionLostError("closed")] for name in names}
    call = brokers._call

    def closed_meanwhile(*arguments: Any) -> bytes:
        brokers.steps.is_closed = True
        return call(*arguments)

    brokers._call = closed_meanwhile  # type: ignore[method-assign, assignment]
    with pytest.raises(ClosedError, match="closed while this call waited"):
        brokers.receive(hold_s=15.0)
    assert caplog.messages == []


def test_a_broker_that_held_a_pop_was_not_silent_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers("a")
    brokers.failures["a"] = [ConnectionLostError("restarts")]
    assert brokers.receive(hold_s=15.0) == []
    assert caplog.messages[1] == "broker a answers again, after 0.1 s"


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_what_passes_is_waited_for_within_the_hold_and_said_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x"]
    brokers.failures["a"] = [error] * 12
    assert [message.body for message in brokers.receive(hold_s=15.0)] == [b"x"]
    assert 2.0 < brokers.clock.now_s < 6.0
    ((_, hold_ms),) = brokers.asked
    assert hold_ms == pytest.approx(15_000 - brokers.clock.now_s * 1_000, abs=1), "what is left of the hold"
    assert len(caplog.messages) == 2
    assert "trying again" in caplog.messages[0]
    assert "answers again" in caplog.messages[1]
    began_s = brokers.clock.now_s
    brokers.failures["a"] = [error] * 99
    assert brokers.receive(hold_s=3.0) == []
    assert brokers.clock.now_s - began_s == pytest.approx(3.0, abs=0.2)
    assert brokers.receive(hold_s=0.0) == []


def test_a_route_from_before_reading_was_permitted_raises_nothing() -> None:
    brokers = Brokers("a")
    brokers.cached_route = Route("T", brokers=brokers.route.brokers, is_read_permitted=False)
    brokers.messages["a"] = [b"1"]
    assert [message.body for message in brokers.receive()] == [b"1"]
    brokers.route = Route("T", brokers=brokers.route.brokers, is_read_permitted=False)
    with pytest.raises(NotPermittedError):
        brokers.receive()


@pytest.mark.parametrize("error", [TopicNotFoundError("gone"), NotPermittedError("no"), GroupDisabledError("off")])
def test_what_no_waiting_mends_is_raised_also_during_a_fail_over(error: ProtomqError) -> None:
    brokers = Brokers("a", "b")
    brokers.failures = {"a": [NotMasterError("a slave")] * 2 + [error] * 3, "b": [ConnectFailedError("away")] * 99}
    with pytest.raises(type(error)):
        brokers.receive(hold_s=15.0)
    assert brokers.clock.now_s < 2.0


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_log_that_has_failed_is_said_when_the_hold_is_over(names: str) -> None:
    brokers = Brokers(*names)
    for name in names:
        brokers.failures[name] = [StoreFailedError("a write failed")] * 99
    with pytest.raises(StoreFailedError):
        brokers.receive(hold_s=3.0)
    assert brokers.clock.now_s == pytest.approx(3.0, abs=0.2), "another broker may be elected meanwhile"
    with pytest.raises(StoreFailedError):
        brokers.receive(hold_s=0.0)


def test_a_log_that_has_failed_is_waited_for_while_another_broker_takes_over_or_answers() -> None:
    elected = Brokers("a")
    elected.failures["a"] = [StoreFailedError("a write failed")] * 3 + [NotMasterError("a slave")] * 3
    elected.messages["a"] = [b"x"]
    assert [message.body for message in elected.receive(hold_s=15.0)] == [b"x"]
    elected.failures["a"] = [StoreFailedError("a write failed")] * 3 + [NotMasterError("a slave")] * 99
    assert elected.receive(hold_s=3.0) == []
    several = Brokers("a", "b")
    several.failures["a"] = [StoreFailedError("a write failed")] * 99
    for _ in range(3):
        assert several.receive(hold_s=3.0) == []


def test_a_broker_that_fails_rests_while_another_answers() -> None:
    brokers = Brokers("a", "b")
    brokers.failures["a"] = [ConnectFailedError("away")] * 1_000
    for _ in range(10):
        assert brokers.receive(hold_s=6.0) == []
    assert brokers.clock.now_s == pytest.approx(60.0, abs=3.0)
    tries = 1_000 - len(brokers.failures["a"])
    assert tries < 60
    brokers.failures["a"].clear()
    brokers.messages["a"] = [b"x"]
    assert len(brokers.receive(hold_s=6.0)) == 1
    assert not brokers.steps._rests


def test_while_all_brokers_of_a_topic_are_away_the_route_is_looked_up_again() -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x"]
    brokers.route_failures = [TopicNotFoundError("away", metadata={"missing_brokers": "a"})] * 5
    assert len(brokers.receive(hold_s=15.0)) == 1
    brokers.route_failures = [TopicNotFoundError("away", metadata={"missing_brokers": "a"})] * 99
    assert brokers.receive(hold_s=3.0) == []


def test_a_name_server_that_knows_no_broker_says_nothing_of_the_topic() -> None:
    """It has just started. TopicNotFoundError is for a wrong name."""
    nobody = TopicNotFoundError("no broker is registered", metadata={"missing_brokers": "", "registered_brokers": "0"})
    brokers = Brokers("a")
    brokers.route_failures = [nobody]
    with pytest.raises(NoRouteError, match="no broker is registered"):
        brokers.receive()
    brokers.route_failures = [TopicNotFoundError("no topic", metadata={"missing_brokers": "", "registered_brokers": "1"})]
    with pytest.raises(TopicNotFoundError):
        brokers.receive()


def test_where_no_route_leads_is_said_when_the_hold_is_over() -> None:
    brokers = Brokers("a")
    with pytest.raises(NoRouteError):
        brokers.receive(queue=MessageQueue("T", "x", 0), hold_s=3.0)
    assert brokers.clock.now_s == pytest.approx(3.0, abs=0.2)
    brokers.route_failures = [NoRouteError("no name server answers")]
    with pytest.raises(NoRouteError):
        brokers.receive(hold_s=3.0)
    assert brokers.clock.now_s == pytest.approx(3.0, abs=0.2), "nothing was ever known"


@pytest.mark.parametrize("call", ["ack", "nack", "change_invisible", "reject"])
def test_what_becomes_of_messages_is_told_again_as_long_as_the_call_may_take(call: str) -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x"]
    (message,) = brokers.receive()
    tell: dict[str, Any] = {
        "ack": lambda: brokers.steps.ack([message]),
        "nack": lambda: brokers.steps.nack([message], 1.0),
        "change_invisible": lambda: brokers.steps.change_invisible([message], 30.0),
        "reject": lambda: brokers.steps.reject(message, "no"),
    }
    began_s = brokers.clock.now_s
    brokers.failures["a"] = [ConnectFailedError("away")] * 9
    assert brokers.run(tell[call]()) == []
    assert 1.0 < brokers.clock.now_s - began_s < 5.0
    began_s = brokers.clock.now_s
    brokers.failures["a"] = [ConnectFailedError("away")] * 99
    with pytest.raises(ConnectFailedError):
        brokers.run(tell[call]())
    assert 4.0 < brokers.clock.now_s - began_s <= 5.0


@pytest.mark.parametrize("dead_connections", [1, 2])
@pytest.mark.parametrize("call", ["ack", "nack", "change_invisible"])
def test_a_connection_that_is_dead_without_a_word_leaves_time_for_another_one(call: str, dead_connections: int) -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x"]
    (message,) = brokers.receive()
    began_s = brokers.clock.now_s
    brokers.dead_connections = dead_connections
    steps = brokers.steps
    tell = {
        "ack": lambda: steps.ack([message]),
        "nack": lambda: steps.nack([message], 1.0),
        "change_invisible": lambda: steps.change_invisible([message], 30.0),
    }
    assert brokers.run(tell[call]()) == []
    assert brokers.dead_connections == 0
    assert brokers.clock.now_s - began_s < 4.5


def test_an_ack_whose_answer_was_lost_is_said_again() -> None:
    """The broker answers what it has done as it did at first. So what is stale then was never done."""
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x", b"y"]
    messages = brokers.receive()
    brokers.failures["a"] = [ConnectionLostError("lost")]
    assert brokers.run(brokers.steps.ack(messages)) == []
    assert len(brokers.acks) == 2
    assert [(m.receipt, list(m.offset_runs)) for m in brokers.acks[1].messages] == [(b"r0", [40, 1]), (b"r1", [41, 1])]
    for failures in ([], [ConnectionLostError("lost")]):
        never = StaleReceiptError("not yours", metadata={"never_acknowledged": "true"})
        brokers.failures["a"] = [*failures, never]
        with pytest.raises(StaleReceiptError) as caught:
            brokers.run(brokers.steps.ack(messages))
        assert caught.value.definite
    brokers.failures["a"] = [ConnectionLostError("lost")]
    brokers.ack_answer.stale_messages.add(receipt=b"r1", offset_runs=[41, 1])
    brokers.ack_answer.never_acknowledged = True
    assert brokers.run(brokers.steps.ack(messages)) == messages[1:]


def test_an_ack_whose_answer_was_lost_stays_unknown_where_the_broker_has_forgotten_it() -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x", b"y"]
    messages = brokers.receive()
    brokers.failures["a"] = [ConnectionLostError("lost"), StaleReceiptError("done, or not yours")]
    with pytest.raises(ConnectionLostError, match=r"^lost\. A further try found the receipts stale, .* acknowledged or not") as caught:
        brokers.run(brokers.steps.ack(messages))
    assert not caught.value.definite
    assert caught.value.metadata["acknowledged"] == "unknown"
    brokers.failures["a"] = [ConnectionLostError("lost")]
    brokers.ack_answer.stale_messages.add(receipt=b"r1", offset_runs=[41, 1])
    with pytest.raises(ConnectionLostError, match="A further try found the receipts stale") as caught:
        brokers.run(brokers.steps.ack(messages))
    assert (caught.value.retriable, caught.value.metadata["acknowledged"]) == (True, "unknown")
    brokers.failures["a"] = [deadline := DeadlineExceededError("not on disk in time", metadata={"limit": "5"}), StaleReceiptError("gone")]
    deadline.definite = False
    with pytest.raises(DeadlineExceededError, match="may be acknowledged") as late:
        brokers.run(brokers.steps.ack(messages))
    assert late.value.metadata == {"limit": "5", "acknowledged": "unknown"}
    brokers.failures["a"] = [StaleReceiptError("not yours")]
    with pytest.raises(StaleReceiptError):
        brokers.run(brokers.steps.ack(messages))


def test_a_change_whose_answer_was_lost_holds_nothing_that_is_stale_by_now() -> None:
    """A change that was made leaves the receipt good: so somebody else has them, unless they were given back at once."""
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x", b"y"]
    messages = brokers.receive()
    brokers.failures["a"] = [ConnectionLostError("lost"), StaleReceiptError("not yours")]
    with pytest.raises(StaleReceiptError):
        brokers.run(brokers.steps.change_invisible(messages, 60.0))
    brokers.change_answer.stale_messages.add(receipt=b"r1", offset_runs=[41, 1])
    brokers.failures["a"] = [ConnectionLostError("lost")]
    assert brokers.run(brokers.steps.change_invisible(messages, 60.0)) == messages[1:]
    brokers.failures["a"] = [ConnectionLostError("lost")]
    assert brokers.run(brokers.steps.nack(messages, 0.0)) == []
    brokers.failures["a"] = [ConnectionLostError("lost"), StaleReceiptError("not yours")]
    assert brokers.run(brokers.steps.change_invisible(messages, 0.0)) == []


def test_messages_that_were_wanted_are_given_though_the_others_could_not_be_acknowledged() -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x", b"y"]
    brokers.steps = PopSteps("group", 5.0, brokers.clock, HookPoints("group", [Wanted()]))
    brokers.ack_failures = [TopicNotFoundError("gone")] * 9
    assert [message.body for message in brokers.receive()] == [b"y"]


class Wanted(Hook):
    """Leaves out what is not."""

    def keeps(self, message: Message) -> bool:
        return message.body == b"y"


def test_what_has_another_tag_in_spite_of_the_brokers_hash_is_acknowledged_and_not_given() -> None:
    brokers = Brokers("a")
    brokers.messages["a"] = [b"x"]
    assert brokers.receive(tags=["wanted"]) == []
    assert len(brokers.acks) == 1


def test_a_damaged_message_comes_to_whoever_wants_tags_and_holds_up_no_other() -> None:
    brokers = Brokers("a")
    answer = answer_of([b"well", b"broken", b"well"]).replace(b"broken", b"bruken")
    messages = decode_pop_answer(answer, "T", "a")
    assert [message.is_damaged for message in messages] == [False, True, False]
    wish = brokers.steps.wish(
        "T", 32, invisible_s=60.0, hold_s=0.0, queue=None, tags=["x"], sql=None, cel=None, module=None, fifo=False, start="earliest"
    )
    for tag, wanted in (("", messages), ("x", messages[1:2])):
        assert brokers.run(brokers.steps._wanted(replace(wish, tags=(tag,)), messages)) == wanted
    assert len(brokers.acks) == 1


def test_an_answer_that_is_cut_is_told_so() -> None:
    whole = answer_of([b"x", b"y"])
    assert len(decode_pop_answer(whole, "T", "a")) == 2
    for end in range(len(whole) - 250, len(whole)):  # in its records
        with pytest.raises(ProtocolError):
            decode_pop_answer(whole[:end], "T", "a")


class TopicThatIsMadeAgain:
    """Each broker has the topic in an incarnation, tells it, and refuses another one."""

    def __init__(self, brokers: Brokers) -> None:
        self.incarnations = dict.fromkeys(brokers.messages, 1)
        self.starts: list[tuple[str, int, int]] = []
        """(broker, start, incarnation) of each pop that it takes."""
        self._answer = brokers._call
        brokers._call = self._call  # type: ignore[method-assign]

    def _call(self, name: str, method: Any, payload: bytes) -> bytes:
        request = PopRequest.FromString(payload)
        current = self.incarnations[name]
        if request.topic_incarnation not in (0, current):
            raise TopicRecreatedError("made again")
        self.starts.append((name, request.start, request.topic_incarnation))
        answer = self._answer(name, method, payload)
        head = PopResponse(status=1, topic_incarnation=current).SerializeToString()  # type: ignore[arg-type]
        return head + answer


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
@pytest.mark.parametrize("hold_s", [0.0, 5.0])
def test_who_receives_from_the_end_on_gets_all_of_a_topic_that_is_made_again(names: list[str], hold_s: float) -> None:
    brokers = Brokers(*names)
    topic = TopicThatIsMadeAgain(brokers)
    assert brokers.receive(start="latest") == []
    assert topic.starts == [(name, PopStart.POP_START_END, 0) for name in names]
    topic.incarnations["a"] = 2
    brokers.messages["a"] = [b"new"]
    topic.starts.clear()
    assert [message.body for message in brokers.receive(start="latest", hold_s=hold_s)] == [b"new"]
    assert [start for start in topic.starts if start[0] == "a"] == [("a", PopStart.POP_START_UNSPECIFIED, 0)]
    # Other queues may not have begun yet; the other broker has its topic still.
    topic.starts.clear()
    assert brokers.receive(start="latest") == []
    expected = {("a", PopStart.POP_START_UNSPECIFIED, 2), ("b", PopStart.POP_START_END, 1)}
    assert set(topic.starts) == {start for start in expected if start[0] in names}


def test_who_receives_from_the_first_message_on_names_no_incarnation() -> None:
    brokers = Brokers("a")
    topic = TopicThatIsMadeAgain(brokers)
    for incarnation in (1, 2):
        topic.incarnations["a"] = incarnation
        assert brokers.receive() == []
    assert topic.starts == [("a", PopStart.POP_START_UNSPECIFIED, 0)] * 2


def test_the_incarnation_is_read_from_the_front_of_an_answer() -> None:
    assert incarnation_in(PopResponse(status=2, topic_incarnation=(1 << 63) - 1).SerializeToString()) == (1 << 63) - 1  # type: ignore[arg-type]
    assert incarnation_in(answer_of([b"body"])) == 0
    assert incarnation_in(b"") == 0


def test_a_topic_that_was_made_again_while_a_pop_was_held_is_known_by_the_answer() -> None:
    brokers = Brokers("a")
    topic = TopicThatIsMadeAgain(brokers)
    assert brokers.receive(start="latest") == []
    answer = brokers._call

    def made_again_meanwhile(name: str, method: Any, payload: bytes) -> bytes:
        answer(name, method, payload)
        topic.incarnations["a"] = 2
        return PopResponse(status=2, topic_incarnation=2).SerializeToString()  # type: ignore[arg-type]

    brokers._call = made_again_meanwhile  # type: ignore[method-assign]
    assert brokers.receive(start="latest") == []
    brokers._call = answer  # type: ignore[method-assign]
    topic.starts.clear()
    assert brokers.receive(start="latest") == []
    assert topic.starts == [("a", PopStart.POP_START_UNSPECIFIED, 2)]
