"""`ha switch` and `ha promote`: what is answered at once, and with which exit code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from protomq import BrokerRole, HaStatus, LeadershipStatus
from protomq.errors import PartialResultError, RequestTimeoutError
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
        self.is_stuck = False

    def ha_status(self, broker: str) -> list[HaStatus]:
        assert broker == "pair"
        return self.states

    def switch_master(self, broker: str, broker_id: int | None, timeout_s: float = 0.0) -> None:
        if self.is_stuck:
            raise RequestTimeoutError("nobody else leads pair")
        self.orders.append(broker_id)
        led = replace(FOLLOWS, state="LEADING", epoch=4)
        self.states = [replace(status(0, BrokerRole.SYNC_MASTER, led), epoch=4)]

    promote_unclean: Callable[..., None] = switch_master


class RememberingAdmin:
    """It finds nobody once an order was given."""

    def __init__(self, real: FakeAdmin) -> None:
        self._real = real
        self.switch_master = self.promote_unclean = real.switch_master

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
    assert "m1" in run(*command, "1").stdout
    assert admin.orders == [1]


@pytest.mark.parametrize("command", [SWITCH, UNCLEAN])
def test_a_new_master_that_was_silent_for_a_moment_is_asked_again(
    admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Its ports are closed while it begins to lead. An Admin that remembers who was silent finds nobody for a minute."""
    remembering = RememberingAdmin(admin)

    def open_admin(namesrv: str | None, timeout_s: float, silence_s: float = 60.0) -> Any:
        return nullcontext(remembering if silence_s else admin)

    monkeypatch.setattr(leading, "open_admin", open_admin)
    monkeypatch.setattr(leading, "DONE_WITHIN_S", 0.5)
    assert "m1" in run(*command, "1").stdout


def test_a_switch_that_does_not_come_is_a_failure(admin: FakeAdmin) -> None:
    admin.is_stuck = True
    assert "tells who is in sync" in run(*SWITCH, "1", code=1).stderr


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
def test_where_roles_are_fixed_all_commands_say_what_to_do(admin: FakeAdmin, command: tuple[str, ...]) -> None:
    admin.states = [replace(each, leadership=None) for each in admin.states]
    said = run(*command, "1", code=6).stderr
    assert "pair has fixed roles (broker_role): nobody elects its master; change the roles in the files" in said
    assert not admin.orders
