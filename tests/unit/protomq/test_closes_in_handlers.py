"""A signal's handler may close a client on the thread that has one of its locks: that must not wait for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from protomq import Producer, PushConsumer, _methods
from protomq._member_thread import MemberThread
from protomq._membership_logic import MembershipState
from protomq._name_servers import NameServerList, ask_one
from protomq._races import Races
from protomq._routes import Routes
from protomq._steps import CallServer
from protomq._trace import Tracer
from protomq.allocation import Average
from protomq.errors import ClosedError, ConnectFailedError
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport

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


def stop_who_looks_at_its_state() -> None:
    consumer = PushConsumer("g")
    with consumer._lock:
        consumer._drain(0.0)


class Interrupted(FakeSyncTransport):
    """A signal's handler closes the producer while it asks a name server, and takes all the time for that."""

    producer: Producer

    def call(self, *asked: Any, **options: Any) -> bytes:
        self.producer.close(0.0)
        self.close()  # A producer closes its own one.
        raise ConnectFailedError("no answer to the hello: timed out")


@pytest.mark.parametrize("send", [Producer.send, Producer.send_batch, Producer.queues])
def test_a_send_whose_look_up_a_close_has_interrupted_says_that_it_is_closed(send: Callable[..., object]) -> None:
    transport = Interrupted(FakeCluster())
    transport.producer = Producer(transport=transport, send_timeout_s=0.5)
    with pytest.raises(ClosedError) as raised:
        send(transport.producer, "T", *([] if send is Producer.queues else [[b"x"]] if send is Producer.send_batch else [b"x"]))
    assert raised.value.definite


def test_a_name_server_is_asked_within_a_time_out_that_a_socket_takes() -> None:
    now_s = [0.0]

    def clock() -> float:
        # The handler comes behind each look at the clock.
        now_s[0] += 5.0
        return now_s[0]

    steps = ask_one(NameServerList("n:1"), _methods.GET_ROUTE, b"", 3.0, clock)
    effect = next(steps)
    assert isinstance(effect, CallServer)
    assert effect.timeout_s > 0


@pytest.mark.parametrize(
    "work", [close_a_member, ask_for_a_route, close_races, close_a_trace, stop_who_is_about_to_wait, stop_who_looks_at_its_state]
)
def test_a_close_does_not_wait_for_the_thread_that_it_interrupts(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
