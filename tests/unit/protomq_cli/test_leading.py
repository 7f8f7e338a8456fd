"""`ha switch` and `ha promote`: what is answered at once, and with which exit code."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from protomq import BrokerRole, HaStatus, KnownMember, LeadershipStatus
from protomq.errors import (
    ConnectFailedError,
    PartialResultError,
    ProtomqError,
    RequestTimeoutError,
    UnsupportedError,
)
from protomq_cli import leading
from tests.support.cli import run

SWITCH = ("ha", "switch", "pair", "--to")
PROMOTE = ("ha", "promote", "pair", "--to")
UNCLEAN = ("ha", "promote", "pair", "--unclean", "--yes", "--to")


def status(broker_id: int, role: BrokerRole, leadership: LeadershipStatus | None) -> HaStatus:
    return HaStatus("pair", broker_id, role, 3, 0, 9, 9, 9, (), 2, 2, 1, "", 9, 0, "", leadership)


LEADS = LeadershipStatus("m2", "LEADING", 3, "m2", ("m1", "m2"), (), 2)
FOLLOWS = LeadershipStatus("m1", "FOLLOWING", 3, "m2", ("m1", "m2"), (), 1)


class FakeAdmin:
    """The broker with the id 2 leads until it is told otherwise; 1 follows."""

    def __init__(self) -> None:
        self.states = [status(0, BrokerRole.SYNC_MASTER, LEADS), status(1, BrokerRole.SLAVE, FOLLOWS)]
        self.orders: list[int | None] = []
        self.timeout: RequestTimeoutError | None = None
        """Of a switch."""
        self.is_done_late = False
        self.stands = ""
        """An order that nobody takes."""
        self.silent: dict[str, ProtomqError] = {}
        """By name and id."""
        self.looks = 0

    def ha_status(self, broker: str) -> list[HaStatus]:
        assert broker == "pair"
        self.looks += 1
        if self.silent:
            raise PartialResultError("some brokers did not answer", self.states, self.silent)
        return self.states

    def switch_master(self, broker: str, broker_id: int | None, timeout_s: float = 0.0) -> None:
        if self.timeout is not None and not self.is_done_late:
            raise self.timeout
        self.orders.append(broker_id)
        led = replace(FOLLOWS, state="LEADING", epoch=4)
        self.states = [replace(status(0, BrokerRole.SYNC_MASTER, led), epoch=4)]
        if self.timeout is not None:
            raise self.timeout

    def promote_unclean(self, broker: str, broker_id: int | None) -> str:
        self.switch_master(broker, broker_id)
        return self.stands

    def withdraw_order(self, broker: str) -> str:
        assert broker == "pair"
        order, self.stands = self.stands, ""
        return order


class RememberingAdmin:
    """It finds nobody once an order was given."""

    def __init__(self, real: FakeAdmin) -> None:
        self._real = real
        self.switch_master, self.promote_unclean = real.switch_master, real.promote_unclean

    def ha_status(self, broker: str) -> list[HaStatus]:
        if self._real.orders:
            raise PartialResultError("some brokers did not answer", [])
        return self._real.ha_status(broker)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    admin = FakeAdmin()
    monkeypatch.setattr(leading, "open_admin", lambda *_: nullcontext(admin))
    return admin


@pytest.mark.parametrize("command", [SWITCH, PROMOTE, UNCLEAN])
def test_a_slave_is_ordered_to_lead(admin: FakeAdmin, command: tuple[str, ...]) -> None:
    if command == UNCLEAN:
        del admin.states[0]
    assert "m1" in run(*command, "1").stdout
    assert admin.orders == [1]


def test_an_unclean_promotion_takes_the_lead_from_nobody_and_says_what_to_do(admin: FakeAdmin) -> None:
    """A master that leads would drop the order."""
    said = run(*UNCLEAN, "1", code=6).stderr
    assert "m2 leads pair in epoch 3" in said
    assert "`protomq ha switch pair --to 1` loses nothing. Else stop the broker that leads" in said
    assert not admin.orders


def test_an_unclean_promotion_says_which_order_it_has_replaced(admin: FakeAdmin) -> None:
    del admin.states[0]
    admin.stands = "switch to store m2"
    done = run(*UNCLEAN, "1")
    assert done.stderr == "this order has replaced one that nobody had taken: switch to store m2\n"
    assert "m1" in done.stdout


def test_an_order_that_nobody_takes_is_taken_back(admin: FakeAdmin) -> None:
    admin.stands = "promotion of store m2"
    assert "promotion of store m2" in run("ha", "cancel", "pair").stdout
    assert '"order": ""' in run("ha", "cancel", "pair", "-o", "json").stdout, "none stands any more"


@pytest.mark.parametrize("command", [SWITCH, UNCLEAN])
def test_an_order_is_not_done_when_another_one_leads(admin: FakeAdmin, command: tuple[str, ...]) -> None:
    """Two operators promote, each another one: both orders were left, and one of them was taken."""
    if command == UNCLEAN:
        del admin.states[0]
    third = status(3, BrokerRole.SLAVE, replace(FOLLOWS, member="m3", broker_id=3))
    in_sync = replace(LEADS, in_sync=("m1", "m2", "m3"))
    admin.states = [replace(each, leadership=in_sync) if each.leadership is LEADS else each for each in admin.states]
    admin.states.append(third)
    said = run(*command, "3", code=6)
    assert "broker_id 1 (store m1) leads pair in epoch 4, and not 3" in said.stderr
    assert not said.stdout


def no_answer() -> RequestTimeoutError:
    return RequestTimeoutError("m2: no answer to OrderLead in time")


def nobody_else() -> RequestTimeoutError:
    error = RequestTimeoutError("nobody else leads pair")
    error.metadata = {"order": "left"}
    return error


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "DONE_WITHIN_S", 0.0)


ALONE = (replace(LEADS, in_sync=("m2",)), replace(LEADS, late=("m1",)))
"""Nobody is in sync, or keeps up: the master would drop an order."""


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize(
    ("command", "what"),
    [
        ((*SWITCH, "1"), "broker_id 1 was not in sync"),
        ((*PROMOTE, "1"), "broker_id 1 was not in sync"),
        (("ha", "switch", "pair"), "no slave was in sync"),
        (("ha", "demote", "pair"), "no slave was in sync"),
    ],
)
def test_a_switch_that_nobody_can_take_is_ordered_to_nobody_and_ends_within_the_time_out(
    admin: FakeAdmin, alone: LeadershipStatus, command: tuple[str, ...], what: str
) -> None:
    admin.states[0] = status(0, BrokerRole.SYNC_MASTER, alone)
    begun_s = time.monotonic()
    said = run(*command, "--timeout", "0.3", code=6).stderr
    assert time.monotonic() - begun_s < 3
    assert f"pair was not switched: {what} for 0.3 s. Nothing was ordered, and m2 leads it in epoch 3" in said
    assert not admin.orders


@pytest.mark.parametrize("to", [(), ("--to", "1")])
def test_a_slave_that_comes_in_sync_within_the_time_out_is_ordered_to_lead(admin: FakeAdmin, to: tuple[str, ...]) -> None:
    in_sync = admin.states
    behind = [status(0, BrokerRole.SYNC_MASTER, ALONE[0]), in_sync[1]]
    looks = iter([behind, behind, behind])
    ordered = admin.ha_status
    admin.ha_status = lambda broker: next(looks, None) or ordered(broker)  # type: ignore[method-assign]
    assert "m1" in run("ha", "switch", "pair", *to).stdout
    assert admin.orders == [1 if to else None]


def test_another_slave_in_sync_is_not_the_one_that_was_named(admin: FakeAdmin) -> None:
    admin.states.append(status(3, BrokerRole.SLAVE, replace(FOLLOWS, member="m3", broker_id=3)))
    assert "broker_id 3 was not in sync" in run(*SWITCH, "3", "--timeout", "0.2", code=6).stderr
    assert not admin.orders


@pytest.mark.usefixtures("no_time")
def test_a_switch_that_the_master_has_dropped_is_refused(admin: FakeAdmin) -> None:
    admin.timeout = nobody_else()
    said = run(*SWITCH, "1", code=6).stderr
    assert "pair was not switched in 0 s: m2 leads it in epoch 3, as before. No slave in sync could take over" in said
    assert admin.looks == 2, "before it, and who leads now"


@pytest.mark.usefixtures("no_time")
def test_a_switch_whose_order_was_not_answered_is_not_known_yet(admin: FakeAdmin) -> None:
    admin.timeout = no_answer()
    said = run(*SWITCH, "1", code=1).stderr
    assert "not known yet whether pair is switched: now m2 leads it in epoch 3." in said
    assert "may still be carried out" in said


@pytest.mark.usefixtures("no_time")
def test_a_switch_while_nobody_leads_is_not_known_yet(admin: FakeAdmin) -> None:
    admin.timeout = nobody_else()
    admin.states.append(admin.states.pop(0))
    looked = iter([admin.states])
    admin.ha_status = lambda broker: next(looked, admin.states[:1])  # type: ignore[method-assign]
    assert "not known yet whether pair is switched: now nobody leads it." in run(*SWITCH, "1", code=1).stderr


@pytest.mark.usefixtures("no_time")
@pytest.mark.parametrize("timeout", [no_answer, nobody_else])
def test_a_switch_that_comes_behind_the_time_out_is_done(admin: FakeAdmin, timeout: Callable[[], RequestTimeoutError]) -> None:
    admin.timeout, admin.is_done_late = timeout(), True
    assert "m1" in run(*SWITCH, "1").stdout


@pytest.mark.parametrize("command", [SWITCH, UNCLEAN])
def test_a_new_master_that_was_silent_for_a_moment_is_asked_again(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Its ports are closed while it begins to lead. An Admin that remembers who was silent finds nobody for a minute."""
    remembering = RememberingAdmin(admin)

    def open_admin(namesrv: str | None, timeout_s: float, silence_s: float = 60.0) -> Any:
        return nullcontext(remembering if silence_s else admin)

    if command == UNCLEAN:
        del admin.states[0]
    monkeypatch.setattr(leading, "open_admin", open_admin)
    monkeypatch.setattr(leading, "DONE_WITHIN_S", 0.5)
    assert "m1" in run(*command, "1").stdout


@pytest.mark.parametrize("broker_id", ["0", "2"])
@pytest.mark.parametrize("command", [SWITCH, PROMOTE, UNCLEAN])
def test_who_leads_already_goes_on(admin: FakeAdmin, command: tuple[str, ...], broker_id: str) -> None:
    done = run(*command, broker_id)
    assert done.stderr == f"broker_id {broker_id} of pair leads already: nothing was changed\n"
    assert "m2" in done.stdout
    assert not admin.orders


@pytest.mark.parametrize("command", [SWITCH, PROMOTE, UNCLEAN])
def test_an_unknown_id_is_not_found(admin: FakeAdmin, command: tuple[str, ...]) -> None:
    said = run(*command, "7", code=4).stderr
    assert "no broker pair with id 7 is registered, only 0, 1" in said
    admin.states = admin.states[1:]
    assert "only 1" in run(*command, "7", code=4).stderr
    assert not admin.orders


@pytest.mark.parametrize("command", [SWITCH, PROMOTE, UNCLEAN])
def test_who_is_silent_does_not_answer(admin: FakeAdmin, command: tuple[str, ...]) -> None:
    """It is registered still, or etcd knows it."""
    away = KnownMember("m4", 4, "there:4")
    admin.states = [replace(each, away=(away,)) for each in admin.states]
    admin.silent = {"pair/3": ConnectFailedError("there:3 does not answer")}
    assert "broker_id 3 of pair does not answer: there:3 does not answer; nothing was ordered" in run(*command, "3", code=3).stderr
    assert "broker_id 4 of pair does not answer: it was at there:4; nothing was ordered" in run(*command, "4", code=3).stderr
    assert "no broker pair with id 7 is registered" in run(*command, "7", code=4).stderr
    assert not admin.orders


@pytest.mark.parametrize("command", [SWITCH, PROMOTE, UNCLEAN])
def test_where_roles_are_fixed_all_commands_say_what_to_do(admin: FakeAdmin, command: tuple[str, ...]) -> None:
    admin.states = [replace(each, leadership=None) for each in admin.states]
    said = run(*command, "1", code=6).stderr
    assert "pair has fixed roles (broker_role): nobody elects its master; change the roles in the files" in said
    assert not admin.orders


def test_where_roles_are_fixed_there_is_no_order_to_cancel(admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    def withdraw_order(broker: str) -> str:
        raise UnsupportedError("pair elects nobody", metadata={"field": "broker_name"})

    monkeypatch.setattr(admin, "withdraw_order", withdraw_order)
    assert "pair has fixed roles (broker_role)" in run("ha", "cancel", "pair", code=6).stderr
