"""A switch of the master, as a program orders it: it is done when the new master takes its calls."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from protomq import Admin, BrokerInfo, KnownMember, MissingBroker, Permission, _ha_admin, _methods
from protomq.errors import (
    BrokerMissingError,
    BrokerNotFoundError,
    ConnectFailedError,
    ConnectionLostError,
    InvalidArgumentError,
    PartialResultError,
    RequestTimeoutError,
)
from protomq.v1 import ha_service_pb2 as pb


class Name:
    """Two brokers, of which the second one is to lead. Attribute: looks, at the list of the name servers since the order."""

    def __init__(self, *, registered_after: int = 0) -> None:
        self.registered_after = registered_after
        self.looks = 0
        self.orders: list[str] = []

    def _brokers_named(self, name: str | None) -> list[Any]:
        self.looks += bool(self.orders)
        is_new = self.looks > self.registered_after
        ids = {"a": 1, "b": 0} if is_new else {"a": 0, "b": 2}
        return [SimpleNamespace(broker_name="n", broker_id=number, address=address) for address, number in ids.items()]

    def _call(self, address: str, method: Any, request: Any, response: Any) -> Any:
        if method == _methods.ORDER_LEAD:
            self.orders.append(request.member)
            return response()
        if self.looks == 1:
            raise ConnectFailedError("its store is being opened again")
        leads = (address == "b") is bool(self.orders)
        state = pb.Leadership(
            member=address,
            state="LEADING" if leads else "FOLLOWING",
            epoch=8 if self.orders else 7,
            broker_id=1 if address == "a" else 2,
        )
        role = pb.BROKER_ROLE_SYNC_MASTER if leads else pb.BROKER_ROLE_SLAVE
        return pb.GetHaStatusResponse(broker_name="n", broker_id=0 if leads else 2, role=role, leadership=state)

    @staticmethod
    def _side_by_side(calls: Any) -> Any:
        return calls


def switched(name: Name, broker_id: int | None, timeout_s: float = 5.0) -> None:
    Admin.switch_master(name, "n", broker_id, timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ha_admin, "_LOOK_INTERVAL_S", 0.0)


def test_a_switch_returns_when_name_servers_have_the_new_master() -> None:
    name = Name(registered_after=5)
    switched(name, 2)
    assert name.orders == ["b"]
    assert name.looks == 6, "until then others ask the old one, which changes nothing any more"


@pytest.mark.parametrize("broker_id", [0, 1])
def test_a_switch_to_who_leads_already_orders_nothing(broker_id: int) -> None:
    """It is registered as 0, and as 1 while it follows: the switch may be made again, if its outcome is not known."""
    name = Name()
    switched(name, broker_id)
    assert not name.orders


def test_a_switch_that_the_master_drops_ends_with_the_time_out() -> None:
    name = Name(registered_after=1 << 60)
    with pytest.raises(RequestTimeoutError, match="nobody else leads n") as caught:
        switched(name, None, 0.01)
    assert caught.value.metadata == {"order": "left"}
    assert name.orders == [""]


class NameWithOneAway:
    """The broker 0, which has the id 1 while it follows, is registered and answers; 3 is registered, and does not. 2 and 3 are known."""

    def __init__(self) -> None:
        self.known = [pb.KnownMember(member=f"m{number}", broker_id=number, address=f"{number}:1") for number in (1, 2, 3)]
        self.forgotten: list[tuple[str, int]] = []
        self.silent = {"c"}

    @staticmethod
    def _brokers_named(name: str | None) -> list[Any]:
        ids = {"c": 3, "a": 0} if name == "n" else {}
        return [SimpleNamespace(broker_name="n", broker_id=number, address=address) for address, number in ids.items()]

    def _call(self, address: str, method: Any, request: Any, response: Any) -> Any:
        if address in self.silent:
            raise ConnectFailedError(f"{address} is down")
        if method == _methods.ORDER_LEAD:
            assert request.kind == pb.ORDER_KIND_WITHDRAW
            return pb.OrderLeadResponse(replaced_order=f"told by {address}")
        if method == _methods.FORGET_MEMBER:
            self.forgotten.append((address, request.broker_id))
            return response()
        state = pb.Leadership(member="m1", state="LEADING", epoch=7, broker_id=1, known=self.known)
        return pb.GetHaStatusResponse(broker_name="n", broker_id=0, role=pb.BROKER_ROLE_SYNC_MASTER, leadership=state)

    _side_by_side = staticmethod(Name._side_by_side)


def test_elected_brokers_that_do_not_answer_are_away() -> None:
    name = NameWithOneAway()
    (master,), failures = _ha_admin.states_of(name, name._brokers_named("n"))  # type: ignore[arg-type]
    assert set(failures) == {"n/3"}
    assert master.away == (KnownMember("m2", 2, "2:1"), KnownMember("m3", 3, "3:1"))
    # With an emptied folder it is another member, which the set does not have yet.
    name.known[0].member = "m0"
    (master,), _ = _ha_admin.states_of(name, name._brokers_named("n"))  # type: ignore[arg-type]
    assert [each.broker_id for each in master.away] == [2, 3]


class Listed:
    """What name servers list: `registered` by name and id, and names that are `missing`. All that are registered answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *registered: tuple[str, int], missing: str = "") -> None:
        self.brokers = [self.broker(*each) for each in registered]
        self.missing = [MissingBroker(self.broker(name, 0), datetime(2026, 1, 1, tzinfo=UTC), "it is gone") for name in missing]
        self.admin = Admin(namesrv="nobody:1")
        monkeypatch.setattr(self.admin, "_cluster", lambda *_: (self.brokers, self.missing))
        monkeypatch.setattr(self.admin, "_call", self._call)

    @staticmethod
    def broker(name: str, number: int) -> BrokerInfo:
        return BrokerInfo("c", name, number, f"{name}{number}:8081", f"{name}{number}:10911", "", 7, Permission.READ_WRITE)

    def _call(self, address: Any, method: Any, request: Any, response: Any) -> Any:
        (asked,) = [each for each in self.brokers if each.address == address]
        role = pb.BROKER_ROLE_SLAVE if asked.broker_id else pb.BROKER_ROLE_ASYNC_MASTER
        return pb.GetHaStatusResponse(broker_name=asked.broker_name, broker_id=asked.broker_id, role=role)


@pytest.mark.parametrize("name", [None, "b"])
def test_a_name_of_which_only_slaves_are_registered_makes_the_status_partial(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Listed(monkeypatch, ("a", 0), ("a", 1), ("b", 1), ("b", 2), missing="c")
    with listed.admin as admin, pytest.raises(PartialResultError, match="no master of b is registered now, only b/1, b/2") as caught:
        admin.ha_status(name)
    assert set(caught.value.failures) == ({"b", "c"} if name is None else {"b"})
    found = [(each.broker_name, each.broker_id) for each in caught.value.result]
    assert found == ([("a", 0), ("a", 1)] if name is None else []) + [("b", 1), ("b", 2)]


def test_the_status_of_names_with_masters_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Listed(monkeypatch, ("a", 0), ("b", 1), ("a", 1), missing="c")
    with listed.admin as admin:
        assert [each.broker_id for each in admin.ha_status("a")] == [0, 1]
        with pytest.raises(BrokerMissingError, match="c"):
            admin.ha_status("c")
        with pytest.raises(BrokerNotFoundError, match="no broker of that name is registered: other"):
            admin.ha_status("other")


def test_any_broker_of_the_name_forgets_one_that_was_removed() -> None:
    name = NameWithOneAway()
    Admin.forget_member(name, "n", 2)  # type: ignore[arg-type]
    assert name.forgotten == [("a", 2)]
    name.silent = {"a"}
    Admin.forget_member(name, "n", 2)  # type: ignore[arg-type]
    assert name.forgotten[1:] == [("c", 2)]
    name.silent = {"a", "c"}
    with pytest.raises(ConnectFailedError):
        Admin.forget_member(name, "n", 2)  # type: ignore[arg-type]
    with pytest.raises(BrokerNotFoundError):
        Admin.forget_member(name, "other", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [Admin.switch_master, Admin.promote_unclean])
def test_an_unknown_id_is_told_the_ids_that_there_are(order: Any) -> None:
    """Whoever is silent is not the reason."""
    name = NameWithOneAway()
    with pytest.raises(BrokerNotFoundError, match="broker_id 7 of n is not registered, only 0, 1, 3") as unknown:
        order(name, "n", 7)
    assert unknown.value.metadata == {"broker_name": "n", "broker_id": "7", "broker_ids": "0,1,3"}
    with pytest.raises(BrokerNotFoundError, match="broker_id 2 of n does not answer: it was at 2:1 last") as away:
        order(name, "n", 2)
    assert away.value.metadata["broker_ids"] == "0,1,3"
    with pytest.raises(ConnectFailedError, match="c is down"):
        order(name, "n", 3)
    name.silent = {"a", "c"}
    with pytest.raises(ConnectFailedError, match="c is down"):
        order(name, "n", 7)


def test_any_broker_of_the_name_withdraws_an_order() -> None:
    name = NameWithOneAway()
    assert Admin.withdraw_order(name, "n") == "told by a"  # type: ignore[arg-type]
    name.silent = {"a"}
    assert Admin.withdraw_order(name, "n") == "told by c"  # type: ignore[arg-type]


def test_a_withdrawal_is_one_request_at_whichever_broker_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first broker may have done it before its answer was lost."""
    name, ids = NameWithOneAway(), []

    def call(self: Any, address: str, method: Any, request: Any, response: Any) -> Any:
        ids.append(request.request_id)
        if address == "a":
            raise ConnectionLostError("the answer is lost")
        return pb.OrderLeadResponse(replaced_order="as at first")

    monkeypatch.setattr(NameWithOneAway, "_call", call)
    for count in (2, 4):
        assert Admin.withdraw_order(name, "n") == "as at first"  # type: ignore[arg-type]
        assert len(ids) == count
        assert ids[-1] == ids[-2] != ""
    assert ids[0] != ids[2]


def test_an_order_is_withdrawn_by_a_broker_that_knows_how_while_others_are_of_an_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    name, answer = NameWithOneAway(), NameWithOneAway._call
    name.silent = set()
    older = {"a"}

    def call(self: Any, address: str, method: Any, request: Any, response: Any) -> Any:
        if address in older:
            raise InvalidArgumentError("kind is needed: a switch or an unclean promotion")
        return answer(self, address, method, request, response)

    monkeypatch.setattr(NameWithOneAway, "_call", call)
    assert Admin.withdraw_order(name, "n") == "told by c"  # type: ignore[arg-type]
    older.add("c")
    with pytest.raises(InvalidArgumentError):
        Admin.withdraw_order(name, "n")  # type: ignore[arg-type]
