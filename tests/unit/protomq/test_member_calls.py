"""The calls of a membership: whatever one ends with, the next one is made. From a thread and from tasks, without brokers."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, cast

import pytest

from protomq import MessageQueue, _member_stand_in, _member_thread
from protomq._async_transport import AsyncTransport
from protomq._member_stand_in import MemberStandIn
from protomq._member_tasks import MemberTasks
from protomq._member_thread import MemberThread
from protomq._membership_logic import CLAIM_HOLD_MS, MembershipState
from protomq._pull_multiplexer import Outcome, PullMultiplexer
from protomq._remoting_sync import PipelinedConnection
from protomq._transport import SyncTransport
from protomq._transport_options import TransportOptions
from protomq._types import BrokerAddress, MethodInfo
from protomq.allocation import Average
from protomq.errors import ConnectFailedError, ConnectionLostError, MemberUnknownError
from protomq.v1 import membership_service_pb2 as pb
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport
from tests.support.waiting import async_wait_for, wait_for

A = BrokerAddress("a", "a:1", "a:2")
B = BrokerAddress("b", "b:1", "b:2")
PATIENCE_S = 10.0
NO_PROTOBUF = b"\xff\xff"


def member_state() -> MembershipState:
    state = MembershipState("g", "m", Average())
    state.want({"T": ""}, {"a": A}, {"T": 1})
    return state


def accepted(request: bytes) -> bytes:
    """The broker's answer: this member is known."""
    member = pb.HoldMembershipRequest.FromString(request).member
    return pb.HoldMembershipResponse(version=2, broker_start=1, expiry_ms=25_000, members=[member]).SerializeToString()


def test_a_member_leaves_brokers_that_may_know_it_and_waits_for_none_that_is_away() -> None:
    state = member_state()
    assert state.leave_requests() == []
    ticket, _, request, _ = state.begin("a", 1.0)
    (leaving,) = state.leave_requests()
    assert leaving.address == A
    state.answered(ticket, accepted(request), 2.0)
    assert state.leave_requests() == [leaving]
    ticket, *_ = state.begin("a", 3.0)
    state.failed(ticket, ConnectFailedError("down"), 4.0)
    state.begin("a", 5.0)
    assert state.leave_requests() == []


def test_a_member_with_locks_leaves_a_broker_that_was_away_too_for_it_may_be_back_and_have_them() -> None:
    state = MembershipState("g", "m", Average(), locks_queues=True)
    state.want({"T": ""}, {"a": A, "b": B}, {"T": 1})
    for address in (A, B):
        ticket, _, request, _ = state.begin(address.broker_name, 1.0)
        state.answered(ticket, accepted(request), 1.0)
    ticket, *_ = state.begin("a", 3.0)
    state.failed(ticket, ConnectionLostError("broken"), 4.0)
    assert [(leave.address, leave.is_away) for leave in state.leave_requests()] == [(B, False), (A, True)]
    ticket, *_ = state.begin("a", 5.0)
    state.failed(ticket, MemberUnknownError("its locks ended with that"), 6.0)
    assert [leave.address for leave in state.leave_requests()] == [B]


def is_brief(request: bytes) -> bool:
    """Whether the member wants an answer at once."""
    return pb.HoldMembershipRequest.FromString(request).hold_ms == CLAIM_HOLD_MS


class FakeCalls:
    """In place of a PullMultiplexer. The outcomes of the first calls; then the first is answered well, and others are held."""

    outcomes: ClassVar[deque[bytes | Exception]] = deque()
    is_known: ClassVar[bool] = False

    def __init__(self, *_: object) -> None:
        self._woken = threading.Semaphore(0)
        self._ended: list[Outcome] = []

    def send(self, _: BrokerAddress, ticket: Any, payload: bytes, __: float) -> None:
        outcome = self.outcomes.popleft() if self.outcomes else None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            if FakeCalls.is_known and not is_brief(payload):
                return
            outcome, FakeCalls.is_known = accepted(payload), True
        self._ended.append(Outcome(ticket, outcome))

    def wait(self, timeout_s: float, _: int) -> list[Outcome]:
        if not self._ended:
            self._woken.acquire(timeout=min(timeout_s, 0.05))
        ended, self._ended = self._ended, []
        return ended

    def wake(self) -> None:
        self._woken.release()

    def close(self) -> None: ...


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> type[FakeCalls]:
    monkeypatch.setattr(_member_thread, "PullMultiplexer", FakeCalls)
    monkeypatch.setattr(_member_thread, "RESTART_S", 0.01)
    FakeCalls.outcomes.clear()
    FakeCalls.is_known = False
    return FakeCalls


FAILURES = pytest.mark.parametrize("outcome", [RuntimeError("can't start new thread"), NO_PROTOBUF], ids=["raises", "does not parse"])


@FAILURES
def test_a_thread_goes_on_whatever_a_call_ends_with(calls: type[FakeCalls], outcome: bytes | Exception) -> None:
    calls.outcomes.append(outcome)
    member = MemberThread(member_state(), FakeSyncTransport(FakeCluster()), lambda: None)
    member.poke()
    wait_for(member.state.is_known_everywhere, PATIENCE_S, pause_s=0.001)
    wait_for(lambda: calls.is_known, PATIENCE_S, pause_s=0.001)
    assert not calls.outcomes, "no call ended so"
    member.abandon()


def test_a_thread_waits_for_the_answer_of_a_broker_that_is_asked(calls: type[FakeCalls]) -> None:
    member = MemberThread(member_state(), FakeSyncTransport(FakeCluster()), lambda: None)
    member.poke()
    member.wait_known(PATIENCE_S)
    with member.lock:
        member.state.ask("a", A)
    assert not member.state.is_answered("a")
    member.wait_answered("a", PATIENCE_S)
    assert member.state.is_answered("a")
    member.abandon()


def test_tasks_wait_for_the_answer_of_a_broker_that_is_asked() -> None:
    class Transport(AsyncTransport):
        async def call(
            self, _: BrokerAddress, __: MethodInfo, payload: Sequence[bytes], ___: float, *, one_way: bool = False, long_hold: Any = None
        ) -> bytes:
            request = b"".join(payload)
            if member.state.is_known_everywhere() and not is_brief(request):
                await asyncio.sleep(3600)
            return accepted(request)

    async def run() -> None:
        member.poke()
        await member.wait_known(PATIENCE_S)
        member.state.ask("a", A)
        assert not member.state.is_answered("a")
        await member.wait_answered("a", PATIENCE_S)
        assert member.state.is_answered("a")
        member.abandon()

    member = MemberTasks(member_state(), Transport(), lambda: None)
    asyncio.run(run())


@pytest.mark.parametrize("wait", ["wait_known", "wait_granted", "wait_answered"])
def test_who_waits_for_a_thread_that_ends_goes_on(
    calls: type[FakeCalls], monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    monkeypatch.setattr(calls, "send", lambda *_: None)  # The broker never answers.
    state = member_state()
    member = MemberThread(state, FakeSyncTransport(FakeCluster()), lambda: None)
    waits = threading.Event()

    def waits_on() -> bool:
        waits.set()
        return False

    monkeypatch.setattr(state, "is_known_everywhere", waits_on)
    monkeypatch.setattr(state, "has_open_claims", lambda: not waits_on())
    monkeypatch.setattr(state, "is_answered", lambda _: waits_on())
    member.poke()
    arguments = ("a", 3_600.0) if wait == "wait_answered" else (3_600.0,)
    waiter = threading.Thread(target=getattr(member, wait), args=arguments, daemon=True)
    waiter.start()
    assert waits.wait(PATIENCE_S)
    with member.lock:  # It is free only while the other one waits.
        pass
    member.abandon()
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


@pytest.mark.parametrize("wait", ["wait_known", "wait_granted", "wait_answered"])
def test_who_waits_for_tasks_that_end_goes_on(wait: str) -> None:
    class Transport(AsyncTransport):
        async def call(
            self, _: BrokerAddress, __: MethodInfo, payload: Sequence[bytes], ___: float, *, one_way: bool = False, long_hold: Any = None
        ) -> bytes:
            await asyncio.sleep(3600)
            return b""

    async def run() -> None:
        state = member_state()
        member = MemberTasks(state, Transport(), lambda: None)
        state.has_open_claims = lambda: True  # type: ignore[method-assign]
        state.is_answered = lambda broker_name: False  # type: ignore[method-assign]
        member.poke()
        arguments = ("a", 3_600.0) if wait == "wait_answered" else (3_600.0,)
        waiter = asyncio.ensure_future(getattr(member, wait)(*arguments))
        await asyncio.sleep(0)
        assert not waiter.done()
        member.abandon()
        await asyncio.wait_for(waiter, PATIENCE_S)

    asyncio.run(run())


def test_a_thread_goes_on_though_it_gets_no_descriptors_for_a_while(
    calls: type[FakeCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = deque([OSError(errno.EMFILE, "too many open files")] * 2)
    calls.outcomes.append(RuntimeError("the first calls end"))
    member = MemberThread(member_state(), FakeSyncTransport(FakeCluster()), lambda: None)

    def make(*_: object) -> FakeCalls:
        if not calls.outcomes and refusals:
            raise refusals.popleft()
        return FakeCalls()

    monkeypatch.setattr(_member_thread, "PullMultiplexer", make)
    member.poke()
    wait_for(lambda: calls.is_known, PATIENCE_S, pause_s=0.001)
    member.abandon()
    assert not refusals


def test_a_thread_that_cannot_be_started_is_started_by_the_next_look(
    calls: type[FakeCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = MemberThread(member_state(), FakeSyncTransport(FakeCluster()), lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            member.poke()
    member.poke()
    wait_for(lambda: calls.is_known, PATIENCE_S, pause_s=0.001)
    member.abandon()


@pytest.mark.parametrize("refusals", [(), (RuntimeError("can't start new thread"), OSError(errno.EMFILE, "x"))], ids=["", "raises"])
def test_a_thread_makes_the_calls_of_a_loop_that_is_blocked_and_the_loop_goes_on_when_it_runs(
    calls: type[FakeCalls], monkeypatch: pytest.MonkeyPatch, refusals: tuple[Exception, ...]
) -> None:
    """The member is given up after a second; its loop is blocked until a thread has called four times, for longer than that."""
    expiry_s = 1.0

    class Transport(AsyncTransport):
        async def call(
            self, _: BrokerAddress, __: MethodInfo, payload: Sequence[bytes], ___: float, *, one_way: bool = False, long_hold: Any = None
        ) -> bytes:
            requests.append(b"".join(payload))
            if len(requests) != 1:
                await asyncio.sleep(3600)
            return brief(requests[0])

    def brief(request: bytes) -> bytes:
        answer = pb.HoldMembershipResponse.FromString(accepted(request))
        answer.expiry_ms = int(expiry_s * 1000)
        return answer.SerializeToString()

    def send(self: FakeCalls, _: BrokerAddress, ticket: Any, payload: bytes, __: float) -> None:
        if to_raise:
            raise to_raise.popleft()
        stood_in.append(pb.HoldMembershipRequest.FromString(payload).member)
        if len(stood_in) == 1:
            self._ended.append(Outcome(ticket, brief(payload)))
        elif len(stood_in) == 4:
            is_kept.set()

    async def run() -> None:
        state = member.state
        member.poke()
        await async_wait_for(lambda: len(requests) == 2, PATIENCE_S)
        began_s = time.monotonic()
        with member.lock:
            state.claim([MessageQueue("T", "a", 0)])
        asked_count = len(requests)
        assert is_kept.wait(PATIENCE_S), "nobody calls while the loop is blocked"
        assert time.monotonic() - began_s > expiry_s
        with member.lock:
            state.check_expiry(time.monotonic())
            assert state.take_lost() == set()
            assert state.stands("a", time.monotonic())
        assert [[topic.queue_ids for topic in said.topics] for said in stood_in] == [[[0]]] * 4
        assert len({said.member_epoch for said in stood_in}) == 1
        await async_wait_for(lambda: len(requests) > asked_count, PATIENCE_S)
        member.abandon()

    monkeypatch.setattr(_member_stand_in, "PullMultiplexer", FakeCalls)
    monkeypatch.setattr(_member_stand_in, "RESTART_S", 0.01)
    monkeypatch.setattr(FakeCalls, "send", send)
    to_raise = deque(refusals)
    requests: list[bytes] = []
    stood_in: list[pb.GroupMember] = []
    is_kept = threading.Event()
    member = MemberTasks(member_state(), Transport(), lambda: None)
    asyncio.run(run())


def test_a_thread_makes_no_calls_of_a_loop_that_is_closed_before_it_runs_again(
    calls: type[FakeCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Transport(AsyncTransport):
        async def call(
            self, _: BrokerAddress, __: MethodInfo, payload: Sequence[bytes], ___: float, *, one_way: bool = False, long_hold: Any = None
        ) -> bytes:
            if member.state.is_known_everywhere():
                is_held.set()
                await asyncio.sleep(3600)
            answer = pb.HoldMembershipResponse.FromString(accepted(b"".join(payload)))
            answer.expiry_ms = 500
            return answer.SerializeToString()

    async def run() -> None:
        member.poke()
        await is_held.wait()
        assert stands_in.wait(PATIENCE_S)
        raise KeyboardInterrupt

    is_held, stands_in, has_ended = asyncio.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(_member_stand_in, "PullMultiplexer", FakeCalls)
    monkeypatch.setattr(FakeCalls, "send", lambda *_: stands_in.set())
    monkeypatch.setattr(FakeCalls, "close", lambda _: has_ended.set())
    member = MemberTasks(member_state(), Transport(), lambda: None)
    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(run())
    loop.close()
    assert has_ended.wait(PATIENCE_S)
    for task in member._tasks:
        cast(Coroutine[Any, Any, None], task.get_coro()).close()
    member._tasks.clear()


def test_the_member_of_a_loop_that_is_stopped_and_kept_leaves_in_the_end_and_joins_again_when_the_loop_runs(
    calls: type[FakeCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Transport(AsyncTransport):
        async def call(
            self, _: BrokerAddress, __: MethodInfo, payload: Sequence[bytes], ___: float, *, one_way: bool = False, long_hold: Any = None
        ) -> bytes:
            said.append(pb.HoldMembershipRequest.FromString(b"".join(payload)))
            if len(said) == 2:
                await asyncio.sleep(3600)
            answer = pb.HoldMembershipResponse.FromString(accepted(b"".join(payload)))
            answer.expiry_ms = 500
            if len(said) > 2:
                await asyncio.sleep(0.05)
            return answer.SerializeToString()

    class StandInTransport:
        def call(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], _: float) -> bytes:
            left.append((address.broker_name, method.path.rpartition("/")[2], pb.LeaveGroupRequest.FromString(b"".join(payload)).nonce))
            return b""

        def close(self) -> None:
            is_closed.set()

    async def run(count: int) -> None:
        member.poke()
        await async_wait_for(lambda: len(said) >= count, PATIENCE_S)

    said: list[pb.HoldMembershipRequest] = []
    left: list[tuple[str, str, int]] = []
    is_closed = threading.Event()
    monkeypatch.setattr(_member_stand_in, "PullMultiplexer", FakeCalls)
    monkeypatch.setattr(_member_stand_in, "SyncTransport", lambda _: StandInTransport())
    monkeypatch.setattr(_member_stand_in, "STOPPED_MAX_S", 0.05)
    monkeypatch.setattr(FakeCalls, "send", lambda *_: None)
    member = MemberTasks(member_state(), Transport(), lambda: None)
    state, loop = member.state, asyncio.new_event_loop()
    loop.run_until_complete(run(2))
    with member.lock:
        state.claim([MessageQueue("T", "a", 0)])
    assert is_closed.wait(PATIENCE_S), "nobody leaves for a loop that is stopped"
    assert left == [("a", "LeaveGroup", state.key[1])]
    with member.lock:
        assert not state.stands("a", time.monotonic())
        assert state.take_lost() == {"a"}
    loop.run_until_complete(run(3))
    assert said[2].member.member_epoch > said[1].member.member_epoch
    assert not said[2].member.topics[0].queue_ids
    member.abandon()
    loop.run_until_complete(asyncio.gather(*member._tasks, return_exceptions=True))
    loop.close()


@pytest.mark.parametrize("is_named", [True, False])
def test_who_leaves_for_a_stopped_loop_names_its_membership_and_stops_leaving_when_the_loop_runs(
    monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    class Transport:
        def call(self, address: BrokerAddress, _: MethodInfo, payload: Sequence[bytes], __: float) -> bytes:
            left.append((address.broker_name, pb.LeaveGroupRequest.FromString(b"".join(payload)).member_epoch))
            runs.set()
            return b""

        def close(self) -> None: ...

    class Member:
        def news(self) -> None: ...

    monkeypatch.setattr(_member_stand_in, "SyncTransport", lambda _: Transport())
    state, member, runs = MembershipState("g", "m", Average()), Member(), threading.Event()
    state.is_named = is_named
    state.want({"T": ""}, {"a": A, "b": BrokerAddress("b", "b:1", "b:2")}, {"T": 1})
    joined: dict[str, int] = {}
    for name in "ab":
        ticket, _, request, _ = state.begin(name, 0.0)
        joined[name] = pb.HoldMembershipRequest.FromString(request).member.member_epoch
        state.answered(ticket, accepted(request), 0.0)
    left: list[tuple[str, int]] = []
    MemberStandIn(state, threading.RLock(), TransportOptions(), member.news)._leave(runs)
    assert left == [("a", joined["a"])], "the loop runs, and joins again at b"
    assert bool(joined["a"]) is is_named


def test_a_loop_and_a_member_that_nobody_has_any_more_are_not_kept_by_the_thread_that_watches() -> None:
    class Loop:
        pass

    class Member:
        def news(self) -> None: ...

    loop, member = Loop(), Member()
    gone: list[Callable[[], object]] = [weakref.ref(loop), weakref.ref(member)]
    watch = MemberStandIn(member_state(), threading.RLock(), TransportOptions(), member.news)
    watch.start(cast(asyncio.AbstractEventLoop, loop))
    del loop, member

    def is_gone() -> bool:
        # The thread may have the loop in hand for a moment, on a busy machine for a long one.
        gc.collect()
        return [one() for one in gone] == [None, None]

    wait_for(is_gone, PATIENCE_S)
    watch.close()
    assert is_gone()


@FAILURES
def test_tasks_go_on_too(outcome: bytes | Exception) -> None:
    class Transport(AsyncTransport):
        async def call(
            self, _: BrokerAddress, __: MethodInfo, payload: Sequence[bytes], ___: float, *, one_way: bool = False, long_hold: Any = None
        ) -> bytes:
            if not outcomes:
                is_asked_again.set()
                await asyncio.sleep(3600)
            found = outcomes.popleft()
            if isinstance(found, Exception):
                raise found
            return found or accepted(b"".join(payload))

    async def run() -> None:
        member = MemberTasks(member_state(), Transport(), lambda: None)
        member.poke()
        await async_wait_for(is_asked_again.is_set, PATIENCE_S)
        member.abandon()

    outcomes: deque[bytes | Exception] = deque([outcome, b""])
    is_asked_again = asyncio.Event()
    asyncio.run(run())
    assert is_asked_again.is_set()
    assert not outcomes


def test_a_connection_that_no_thread_could_open_is_opened_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transport(SyncTransport):
        def open_pipelined(self, address: BrokerAddress, lane: int, timeout_s: float) -> PipelinedConnection:
            raise ConnectFailedError("it was tried")

    calls = PullMultiplexer(Transport())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        calls.send(A, "first", b"", 1.0)
    calls.send(A, "second", b"", 1.0)
    outcomes: list[Outcome] = []

    def has_ended() -> bool:
        outcomes.extend(calls.wait(0.1, 1))
        return len(outcomes) == 2

    wait_for(has_ended, PATIENCE_S)
    calls.close()
    assert [(ticket, str(result)) for ticket, result in outcomes] == [("first", "a: can't start new thread"), ("second", "it was tried")]
    assert {type(result) for _, result in outcomes} == {ConnectFailedError}


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
