"""A caller, its broker and repliers together, in memory, over lost answers, restarts and callers that gave up.

What a replier is told to be delivered has reached its caller, whatever happened between. The caller is the SDK's `ReplyInbox`, the broker
the service's `ReplyCalls`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq._requests import ReplyInbox
from protomq._steps import CallServer, GetRoute
from protomq._types import BrokerAddress, Route
from protomq.errors import ConnectionLostError
from protomq.v1.reply_service_pb2 import (
    ReplyRequest,
    WaitForRepliesRequest,
    WaitForRepliesResponse,
)
from protomq_broker.reply_calls import GRACE_MS, Delivered, Effect, Given, Refused, ReplyCalls

ROUTE = Route("T", brokers={"a": BrokerAddress("a", "", "a:1")})


class Outcome:
    """The future of a call."""

    def __init__(self) -> None:
        self.body: bytes | None = None

    def done(self) -> bool:
        return self.body is not None

    def set_result(self, result: Any, /) -> None:
        self.body = result[0]

    def set_exception(self, error: BaseException, /) -> None:
        raise AssertionError(error)


class World:
    """`ids_begin_anew`: as a broker did that numbered its replies from 1 after each start."""

    def __init__(self, ids_begin_anew: bool = False) -> None:
        self.ids_begin_anew = ids_begin_anew
        self.now_ms = 0
        self.start_count = 0
        self.inbox = ReplyInbox("T", "a")
        self.calls: dict[str, Outcome] = {}
        self.pending: dict[int, str] = {}
        """Replies without an outcome: number, and the call that they are for."""
        self.delivered: set[str] = set()
        self.reply_count = 0
        self.restart()

    def restart(self) -> None:
        """The broker starts again; repliers send again what has no outcome."""
        self.start_count += 1
        first_id = 1 if self.ids_begin_anew else self.start_count << 32
        self.broker = ReplyCalls(self.now_ms, first_id=first_id)
        pending, self.pending = self.pending, {}
        for call_id in reversed(pending.values()):
            self.reply(call_id)

    def begin(self) -> None:
        """A call; its request is with a replier."""
        outcome = Outcome()
        self.calls[self.inbox.begin(outcome)] = outcome

    def reply(self, call_id: str) -> None:
        """A replier answers a call."""
        self.reply_count += 1
        number = self.reply_count
        self.pending[number] = call_id
        request = ReplyRequest(caller_id=self.inbox.caller_id, call_id=call_id, body=call_id.encode())
        self._told(self.broker.reply(self.inbox.caller_id, request.SerializeToString(), number, self.now_ms))

    def wait(self, *, is_request_lost: bool = False, is_answer_lost: bool = False) -> None:
        """The caller asks once."""
        steps = self.inbox.wait_steps(0.0, 1.0)
        try:
            assert isinstance(next(steps), GetRoute)
            call = steps.send(ROUTE)
            assert isinstance(call, CallServer)
            if is_request_lost:
                steps.throw(ConnectionLostError("lost"))
            request = WaitForRepliesRequest.FromString(b"".join(call.payload))
            effects = self.broker.wait(
                request.caller_id, "wait", self.now_ms, is_held=False,
                received=request.received_reply_ids, unwanted=request.unwanted_reply_ids,
            )  # fmt: skip
            answer = WaitForRepliesResponse()
            for effect in effects:
                if isinstance(effect, Given):
                    for reply_id, payload in effect.replies:
                        answer.replies.add(reply_id=reply_id, reply=ReplyRequest.FromString(payload))
            self._told(effects)
            if is_answer_lost:
                steps.throw(ConnectionLostError("lost"))
            steps.send(answer.SerializeToString())
        except (StopIteration, ConnectionLostError):
            return

    def give_up(self, call_id: str) -> None:
        """The time of a call is up."""
        self.inbox.end(call_id)

    def replier_goes(self, number: int) -> None:
        """One of those that wait for the outcome of a reply does so no more."""
        if self.pending:
            waiter = list(self.pending)[number % len(self.pending)]
            del self.pending[waiter]
            self.broker.replier_left(waiter)

    def time_passes(self, time_ms: int) -> None:
        """Replies that wait for too long are refused, as their lanes do."""
        self.now_ms += time_ms
        if time_ms >= GRACE_MS:
            for number in list(self.pending):
                self._told(self.broker.reply_ends(number))

    def _told(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Delivered):
                call_id = self.pending.pop(effect.waiter)  # type: ignore[call-overload]
                assert self.calls[call_id].done(), "a reply is said to be delivered, and its caller has none"
                self.delivered.add(call_id)
            elif isinstance(effect, Refused):
                self.pending.pop(effect.waiter)  # type: ignore[call-overload]


def a_restart_between_two_waits(world: World) -> None:
    """The caller has a reply of the first start, and tells the second one; there another reply waits."""
    world.begin()
    world.begin()
    first, second = world.calls
    world.reply(first)
    world.wait()
    assert world.calls[first].body == first.encode()
    world.pending.clear()  # Its replier has gone.
    world.restart()
    world.reply(second)
    world.wait()
    world.wait()
    assert world.calls[second].body == second.encode()
    assert second in world.delivered


def test_what_was_received_before_a_restart_says_nothing_of_other_replies() -> None:
    a_restart_between_two_waits(World())
    with pytest.raises(AssertionError, match="its caller has none"):
        a_restart_between_two_waits(World(ids_begin_anew=True))


EVENTS = (
    "begin", "reply", "reply", "wait", "wait", "lost request", "lost answer", "give up", "replier goes", "restart", "restart", "time",
)  # fmt: skip
STORIES = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 20)), min_size=20, max_size=80)


@given(STORIES)
@settings(max_examples=100, deadline=None)
def test_what_is_said_to_be_delivered_has_reached_its_caller(events: list[tuple[str, int]]) -> None:
    run(World(), events)


def test_the_stories_find_ids_that_begin_anew() -> None:
    """Seeded: what the property above would say of a broker that numbers its replies from 1 after each start."""
    rng = random.Random(7)

    def run_until_one_fails() -> None:
        for _ in range(2_000):
            run(World(ids_begin_anew=True), [(rng.choice(EVENTS), rng.randrange(21)) for _ in range(80)])

    with pytest.raises(AssertionError, match="its caller has none"):
        run_until_one_fails()


def run(world: World, events: list[tuple[str, int]]) -> None:
    """Everything that is told must hold, and in the end what waits reaches its caller."""
    given_up: set[str] = set()
    for event, number in events:
        calls = list(world.calls)
        if event == "begin":
            world.begin()
        elif event == "wait":
            world.wait()
        elif event == "lost request":
            world.wait(is_request_lost=True)
        elif event == "lost answer":
            world.wait(is_answer_lost=True)
        elif event == "restart":
            world.restart()
        elif event == "replier goes":
            world.replier_goes(number)
        elif event == "time":
            world.time_passes(number * 1_000)
        elif calls and event == "reply":
            world.reply(calls[number % len(calls)])
        elif calls:
            given_up.add(calls[number % len(calls)])
            world.give_up(calls[number % len(calls)])
    replied = set(world.pending.values())
    for _ in range(3):
        world.wait()
    for call_id, outcome in world.calls.items():
        assert outcome.body in (None, call_id.encode())
        if call_id in replied - given_up:
            assert outcome.done(), "a reply that waits reaches its caller in the end"
    assert not world.pending
