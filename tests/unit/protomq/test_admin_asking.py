"""How Admin asks many brokers: side by side, and who is silent is waited for once."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from threading import Barrier

import pytest

from protomq import Admin, _admin_calls, _methods
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import (
    ConnectFailedError,
    NotPermittedError,
    PartialResultError,
    ProtomqError,
    RequestTimeoutError,
    SystemBusyError,
)
from protomq.v1.route_service_pb2 import Broker, GetClusterInfoResponse, RefusedBroker
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport

BROKERS = 3
MEETING_S = 5.0


class MeetingTransport(FakeSyncTransport):
    """Each question to a broker waits until all brokers are asked."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.barrier = Barrier(BROKERS, timeout=MEETING_S)

    def call(self, address: BrokerAddress, method: MethodInfo, *others: object, **options: object) -> bytes:
        if address.broker_name:
            self.barrier.wait()
        return super().call(address, method, *others, **options)  # type: ignore[arg-type]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({"T": {"a": 1, "b": 1, "c": 1}})


@pytest.fixture
def clock() -> list[float]:
    """The time, which a test sets."""
    return [100.0]


@pytest.fixture
def admin(cluster: FakeCluster, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    monkeypatch.setattr(_admin_calls, "SyncTransport", lambda _: FakeSyncTransport(cluster))
    with Admin(namesrv="n:1", silence_s=60.0) as admin:
        monkeypatch.setattr(admin, "_monotonic_s", lambda: clock[0])
        yield admin


def test_all_brokers_are_asked_at_the_same_time(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_admin_calls, "SyncTransport", lambda _: MeetingTransport(cluster))
    with Admin(namesrv="n:1") as admin:
        assert [state.broker_name for state in admin.broker_status()] == ["a", "b", "c"]
        assert admin.list_group_settings() == []


def test_what_is_not_for_this_caller_is_raised_as_it_is(cluster: FakeCluster, admin: Admin) -> None:
    cluster.fail("b", _methods.GET_BROKER_STATUS, NotPermittedError("not you"))
    with pytest.raises(NotPermittedError, match="not you"):
        admin.broker_status()


def test_who_is_silent_is_asked_again_when_the_time_is_over(cluster: FakeCluster, admin: Admin, clock: list[float]) -> None:
    cluster.fail("b", _methods.GET_BROKER_STATUS, RequestTimeoutError("no answer in time"))
    for _ in range(2):
        with pytest.raises(PartialResultError) as caught:
            admin.broker_status()
        assert [state.broker_name for state in caught.value.result] == ["a", "c"]
        assert "no answer in time" in str(caught.value.failures["b"])
    assert cluster.tries("b", _methods.GET_BROKER_STATUS) == 1
    clock[0] += 61.0
    assert len(admin.broker_status()) == BROKERS


def test_who_answers_with_an_error_is_asked_again_at_once(cluster: FakeCluster, admin: Admin) -> None:
    cluster.fail("b", _methods.GET_BROKER_STATUS, *(SystemBusyError("later") for _ in range(3)))
    with pytest.raises(PartialResultError):
        admin.broker_status()
    assert len(admin.broker_status()) == BROKERS


def test_brokers_that_are_changed_one_by_one_are_waited_for_at_the_same_time(cluster: FakeCluster, admin: Admin) -> None:
    for name in "bc":
        cluster.fail(name, _methods.PING, RequestTimeoutError("no answer in time"))
    with pytest.raises(PartialResultError) as caught:
        admin.delete_group("g")
    assert caught.value.result == ["a"]
    assert list(caught.value.failures) == ["b", "c"]
    assert cluster.tries("b", _methods.DELETE_GROUP) == 0


def test_slaves_that_stand_in_are_asked_at_the_same_time(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.leaderless = {"a", "b", "c"}
    monkeypatch.setattr(_admin_calls, "SyncTransport", lambda _: MeetingTransport(cluster))
    with Admin(namesrv="n:1") as admin, pytest.raises(PartialResultError) as caught:
        admin.list_group_settings()
    assert caught.value.result == []
    assert list(caught.value.failures) == ["a", "b", "c"], "their masters, which may know more"


def test_of_a_change_that_was_not_sent_to_a_silent_broker_the_error_says_so(cluster: FakeCluster, admin: Admin) -> None:
    cluster.fail("b", _methods.PING, RequestTimeoutError("no answer in time"))
    with pytest.raises(PartialResultError) as caught:
        admin.delete_group("g")
    error = caught.value.failures["b"]
    assert isinstance(error, ConnectFailedError), "the class that says that nothing was sent"
    assert error.definite
    assert str(error) == "nothing was sent to it, because it has just been silent: no answer in time"
    assert error.metadata["broker_name"] == "b"


def test_each_call_that_a_silent_broker_does_not_get_raises_an_error_of_its_own(cluster: FakeCluster, admin: Admin) -> None:
    cluster.fail("b", _methods.GET_BROKER_STATUS, RequestTimeoutError("no answer in time"))
    errors = []
    for _ in range(3):
        with pytest.raises(RequestTimeoutError) as caught:
            admin.broker_status("b")
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == len(errors)
    assert {str(error) for error in errors} == {"no answer in time"}
    depths = [len(list(traceback.walk_tb(error.__traceback__))) for error in errors]
    assert depths[1] == depths[2], "a traceback that is raised again grows"


def test_of_a_broker_that_several_name_servers_refuse_the_latest_refusal_is_told(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """One name server may be down, and another one may know more than the first that answers."""

    def answer(*refused: tuple[str, str, int]) -> bytes:
        info = GetClusterInfoResponse()
        for name, address, time_s in refused:
            broker = Broker(cluster="c", broker_name=name, grpc_address=address)
            row = RefusedBroker(broker=broker, reason="NAME_TAKEN", cause=f"at {time_s}")
            row.refused_time.FromSeconds(time_s)
            info.refused_brokers.append(row)
        return info.SerializeToString()

    down = ConnectFailedError("n:1 is down")
    answers: list[bytes | ProtomqError] = [
        down, answer(("b", "b:1", 5), ("a", "a:1", 7)), answer(("a", "a:1", 9), ("a", "a:0", 3)), answer(("b", "b:1", 4)),
    ]  # fmt: skip
    monkeypatch.setattr(admin._routes, "ask_all", lambda *_: answers)
    found = admin.refused_brokers()
    assert [(each.broker.grpc_address, each.cause) for each in found] == [("a:0", "at 3"), ("a:1", "at 9"), ("b:1", "at 5")]
    assert found[0].refused_time.timestamp() == 3
    answers[:] = [down]
    with pytest.raises(ConnectFailedError, match="n:1 is down"):
        admin.refused_brokers()
