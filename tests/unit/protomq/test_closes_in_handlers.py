"""A signal's handler may close a client on the thread that has one of its locks: that must not wait for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from protomq import PushConsumer, _methods
from protomq._member_thread import MemberThread
from protomq._membership_logic import MembershipState
from protomq._races import Races
from protomq._routes import Routes
from protomq._trace import Tracer
from protomq.allocation import Average

SOON_S = 10.0


def close_a_member() -> None:
    member = MemberThread(MembershipState("g", "m", Average()), cast(Any, None), lambda: None)
    with member.lock:
        member.leave("m")


def ask_for_a_route() -> None:
    routes = Routes(cast(Any, None))
    with routes._own_lock():
        routes.invalidate("T")


def close_races() -> None:
    races = Races(cast(Any, None), _methods.POP, lambda *_: None)
    with races._lock:
        races.close(0.0)


def close_a_trace() -> None:
    tracer = Tracer("g", lambda: "m", cast(Any, None))
    with tracer._lock:
        tracer.close()


def stop_who_is_about_to_wait() -> None:
    consumer = PushConsumer("g")
    stops = consumer._stop_wanted
    with getattr(stops, "_changed", None) or stops._cond:  # type: ignore[attr-defined]
        consumer.request_stop()
    assert stops.wait(SOON_S)


@pytest.mark.parametrize("work", [close_a_member, ask_for_a_route, close_races, close_a_trace, stop_who_is_about_to_wait])
def test_a_close_does_not_wait_for_the_thread_that_it_interrupts(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
