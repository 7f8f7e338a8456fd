"""Which failures are tried again, where, and what the last error says."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protomq._retry import (
    ATTEMPT_TIMEOUT_MIN_S,
    AWAY_PAUSE_S,
    BACKOFF_MAX_S,
    NextStep,
    RetryPlan,
    RetryPolicy,
    attempt_timeout,
    backoff_delay,
)
from protomq._send_steps import route_for
from protomq._steps import ForgetRoute, GetRoute, Pause
from protomq.errors import (
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    MessageTooLargeError,
    NotMasterError,
    ProtomqError,
    RequestTimeoutError,
    ShuttingDownError,
    SystemBusyError,
    TopicNotFoundError,
)
from tests.support.fake_driver import route_of

SAME, OTHER, END = NextStep.SAME_BROKER, NextStep.ANOTHER_BROKER, NextStep.GIVE_UP


def steps(
    errors: list[ProtomqError], *, others: bool = True, policy: RetryPolicy | None = None
) -> list[NextStep]:
    plan = RetryPlan(policy or RetryPolicy())
    return [plan.next_step(error, has_other_broker=others) for error in errors]


def test_what_can_never_succeed_is_not_tried_again() -> None:
    assert steps([MessageTooLargeError("x")]) == [END]


def test_after_a_definite_error_other_brokers_are_tried_twice() -> None:
    assert steps([ShuttingDownError("x")] * 3) == [OTHER, OTHER, END]


def test_with_an_unknown_outcome_the_same_broker_is_asked_first() -> None:
    assert steps([RequestTimeoutError("x")] * 6) == [SAME, OTHER, SAME, OTHER, SAME, END]


def test_another_broker_can_be_ruled_out_while_the_outcome_is_unknown() -> None:
    policy = RetryPolicy(retry_another_broker=False)
    assert steps([RequestTimeoutError("x")] * 4, policy=policy) == [SAME, SAME, SAME, END]
    # Even a definite error later leaves the first outcome unknown.
    assert steps([RequestTimeoutError("x"), SystemBusyError("x")], policy=policy) == [SAME, SAME]
    assert steps([SystemBusyError("x")], policy=policy) == [OTHER]


def test_the_only_broker_is_waited_for_while_it_cannot_be_reached() -> None:
    assert (
        steps([ConnectFailedError("x"), ConnectionLostError("x")] * 10, others=False) == [SAME] * 20
    )
    assert steps([ShuttingDownError("x"), NotMasterError("x")] * 10, others=False) == [SAME] * 20
    assert steps([SystemBusyError("x")] * 3, others=False) == [SAME, SAME, END]


def test_a_topic_whose_brokers_are_all_away_is_asked_for_until_the_time_is_over() -> None:
    now_s = 0.0
    core: Any = SimpleNamespace(clock=lambda: now_s)
    away = TopicNotFoundError("nobody has it now", metadata={"topic": "T", "missing_brokers": "a"})
    found = route_for(core, "T", None, 1.0)
    for _ in range(3):
        assert isinstance(next(found), GetRoute)
        assert found.throw(away) == Pause(AWAY_PAUSE_S)
        assert next(found) == ForgetRoute("T")
    # Back are two slaves, of which one is going to lead.
    slaves = replace(route_of("T", "a"), write_queues=(), writable_brokers=(), leaderless_brokers=("a",))
    assert isinstance(next(found), GetRoute)
    assert found.send(slaves) == ForgetRoute("T")
    assert isinstance(next(found), GetRoute)
    assert found.send(slaves) == Pause(AWAY_PAUSE_S)
    assert next(found) == ForgetRoute("T")
    assert isinstance(next(found), GetRoute)
    with pytest.raises(StopIteration) as over:
        found.send(route_of("T", "a"))
    assert over.value.value == route_of("T", "a")
    found = route_for(core, "T", None, 1.0)
    next(found)
    with pytest.raises(TopicNotFoundError):
        found.throw(TopicNotFoundError("nobody ever had it", metadata={"topic": "T", "missing_brokers": ""}))
    found = route_for(core, "T", None, 1.0)
    next(found)
    now_s = 0.95
    with pytest.raises(TopicNotFoundError, match="nobody has it now"):
        found.throw(away)


def test_no_retries_means_one_attempt() -> None:
    for error in (ShuttingDownError("x"), RequestTimeoutError("x"), ConnectFailedError("x")):
        for others in (True, False):
            assert steps([error], others=others, policy=RetryPolicy(retries=0)) == [END]
    with pytest.raises(ConfigurationError):
        RetryPolicy(retries=-1)


def test_the_last_error_is_definite_only_if_all_were() -> None:
    plan = RetryPlan(RetryPolicy())
    plan.next_step(SystemBusyError("x"), has_other_broker=True)
    assert plan.final_error(SystemBusyError("x")).definite
    plan.next_step(RequestTimeoutError("x"), has_other_broker=True)
    assert not plan.final_error(SystemBusyError("x")).definite
    assert SystemBusyError.definite


def test_an_attempt_leaves_time_for_another() -> None:
    assert attempt_timeout(3.0) == 1.5
    assert attempt_timeout(0.8) == ATTEMPT_TIMEOUT_MIN_S
    assert attempt_timeout(0.2) == 0.2
    assert attempt_timeout(-1.0) > 0


def test_delays_grow_and_follow_what_the_server_asks_for() -> None:
    rng = random.Random(1)
    error = ConnectFailedError("x")
    delays = [backoff_delay(attempt, error, SAME, rng) for attempt in range(1, 12)]
    assert delays[0] <= 0.01
    assert delays[-1] > BACKOFF_MAX_S / 2
    assert max(delays) <= BACKOFF_MAX_S
    assert 0.2 <= backoff_delay(1, SystemBusyError("x", retry_delay_ms=200), SAME, rng) <= 0.3
    assert backoff_delay(5, error, OTHER, rng) == 0.0
