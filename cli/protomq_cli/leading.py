"""`ha switch`, `ha demote`, `ha promote` and `ha cancel`: who leads a name whose master is elected in etcd."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from protomq_cli.asking import ask_to_delete
from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows

if TYPE_CHECKING:
    from protomq import Admin, HaStatus
    from protomq.errors import ProtomqError

DONE_WITHIN_S: Final = 15.0
"""For a switch: the master's last sends, and two stores that are opened again. Longer than a lease."""
LOOK_INTERVAL_S: Final = 0.1

BrokerName = Annotated[str, typer.Argument(metavar="BROKER", help="Name of the broker.")]


def switch(
    broker: BrokerName,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="ID", show_default="whichever is furthest", help="broker_id of the slave that is to lead."),
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Have the master give the lead to a slave that is in sync; nothing is lost.

    Sends wait for a second or so. If that broker leads already, all stays. While nobody who may lead is in sync, it is waited for until
    --timeout. Exit code 6: nothing was ordered since nobody was, or the master has refused, and still leads. 1: whether the switch comes is
    not known yet.
    """
    from protomq.errors import RequestTimeoutError

    with open_admin(namesrv, timeout) as admin, open_admin(namesrv, timeout, 0.0) as fresh:
        give_up_s = time.monotonic() + timeout
        before, states = _leader_before(admin, broker, to)
        # The master drops an order for a slave that is not in sync when it sees it.
        while before is None or not _can_take_over(before, states, to):
            if before is None:
                raise CliError(
                    ExitCode.FAILURE, "NO_MASTER", f"nobody leads {broker}; `protomq ha status` says why"
                )
            if _leads_already(before, to):
                _print_leader(before, output)
                return
            if time.monotonic() >= give_up_s:
                raise _nobody_in_sync(before, to, timeout)
            time.sleep(LOOK_INTERVAL_S)
            states = _states(fresh, broker)
            before = _leader(states)
        give_up_s = time.monotonic() + DONE_WITHIN_S
        is_left = True
        try:
            admin.switch_master(broker, to, timeout_s=DONE_WITHIN_S)
        except RequestTimeoutError as error:
            is_left = error.metadata.get("order") == "left"
        _wait_for_another((admin, fresh), broker, before, to, output, give_up_s=give_up_s, is_left=is_left)


def demote(
    broker: BrokerName,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Have the master give the lead away: the same as `ha switch` without --to."""
    switch(broker, None, namesrv, output, timeout)


def promote(
    broker: BrokerName,
    to: Annotated[int, typer.Option("--to", metavar="ID", help="broker_id of the one that is to lead.")],
    unclean: Annotated[
        bool,
        typer.Option("--unclean", help="Whatever it lacks is lost. Stop the old master first: alone, it would go on acknowledging."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Have one broker lead: by a switch, or with --unclean whatever it lacks.

    Without --unclean nothing is lost, and the broker must be in sync. --unclean takes the lead from nobody: stop a master that leads first.
    """
    if not unclean:
        switch(broker, to, namesrv, output, timeout)
        return
    with open_admin(namesrv, timeout) as admin, open_admin(namesrv, timeout, 0.0) as fresh:
        before, _ = _leader_before(admin, broker, to)
        if before is not None and _leads_already(before, to):
            _print_leader(before, output)
            return
        if before is not None and before.leadership is not None:
            raise CliError(
                ExitCode.REFUSED,
                "MASTER_LEADS",
                f"{before.leadership.member} leads {broker} in epoch {before.epoch}. --unclean takes the lead from nobody: that master"
                f" would go on acknowledging. Nothing was changed. If broker_id {to} is in sync, `protomq ha switch {broker} --to {to}`"
                " loses nothing. Else stop the broker that leads, wait until `protomq ha status` shows no master, and order it again",
            )
        if not yes:
            ask_to_delete(f"Is the old master of {broker} stopped, and may what broker_id {to} lacks be lost?")
        replaced = admin.promote_unclean(broker, to)
        if replaced:
            sys.stderr.write(f"this order has replaced one that nobody had taken: {replaced}\n")
        _wait_for_another((admin, fresh), broker, before, to, output)


def cancel(
    broker: BrokerName,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Take back an order about who leads that nobody has taken, of any operator.

    A switch that is under way ends, and the master takes sends again. Shown
    is the order, or nothing if none stood.
    """
    from protomq.errors import UnsupportedError

    with open_admin(namesrv, timeout) as admin:
        try:
            order = admin.withdraw_order(broker)
        except UnsupportedError as error:
            raise fixed_roles(broker) from error
    print_rows([{"broker": broker, "order": order}], ("broker", "order"), output)


def fixed_roles(broker: str) -> CliError:
    """Nobody is elected there."""
    return CliError(
        ExitCode.REFUSED,
        "ROLES_ARE_FIXED",
        f"{broker} has fixed roles (broker_role): nobody elects its master; change the roles in the files of both and restart them, or"
        " configure etcd.endpoints",
    )


def _leader_before(admin: Admin, broker: str, to: int | None) -> tuple[HaStatus | None, list[HaStatus]]:
    """Who leads now, if anybody does, and what all that answer say.

    Raises CliError if nobody is elected there, or no broker that answers has the id that is to lead.
    """
    states, failures = _states_and_failures(admin, broker)
    if not any(each.leadership for each in states):
        raise fixed_roles(broker)
    leader = _leader(states)
    if to is None or to in {each.broker_id for each in states} or (leader is not None and _is_id_of(leader, to)):
        return leader, states
    failure = failures.get(f"{broker}/{to}")
    away = next((each for state in states for each in state.away if each.broker_id == to), None)
    if failure is not None or away is not None:
        why = f"it was at {away.address}" if away is not None else failure
        text = f"broker_id {to} of {broker} does not answer: {why}; nothing was ordered. `protomq ha status` shows it as AWAY"
        raise CliError(ExitCode.UNREACHABLE, "NO_ANSWER", text)
    known = ", ".join(str(each.broker_id) for each in states)
    raise CliError(
        ExitCode.NOT_FOUND,
        "BROKER_NOT_FOUND",
        f"no broker {broker} with id {to} is registered, only {known}; `protomq ha status` shows them",
    )


def _states(admin: Admin, broker: str) -> list[HaStatus]:
    """Of the brokers that answer: one that is silent keeps no other from the lead."""
    return _states_and_failures(admin, broker)[0]


def _states_and_failures(admin: Admin, broker: str) -> tuple[list[HaStatus], dict[str, ProtomqError]]:
    """The same, and the errors of the others, by `name/id`."""
    from protomq.errors import PartialResultError

    try:
        return admin.ha_status(broker), {}
    except PartialResultError as error:
        return error.result, error.failures


def _is_id_of(leader: HaStatus, broker_id: int) -> bool:
    """A master is registered with the id 0, and has another one while it follows."""
    return broker_id == leader.broker_id or bool(leader.leadership and leader.leadership.broker_id == broker_id)


def _can_take_over(leader: HaStatus, states: list[HaStatus], to: int | None) -> bool:
    """Whether the one that is to lead is in sync and keeps up. `to` None: whether anybody is."""
    assert leader.leadership is not None
    ready = set(leader.leadership.in_sync) - {leader.leadership.member} - set(leader.leadership.late)
    if to is None:
        return bool(ready)
    return any(each.broker_id == to and each.leadership is not None and each.leadership.member in ready for each in states)


def _nobody_in_sync(leader: HaStatus, to: int | None, timeout_s: float) -> CliError:
    assert leader.leadership is not None
    what = "no slave was in sync" if to is None else f"broker_id {to} was not in sync"
    return CliError(
        ExitCode.REFUSED,
        "NOT_SWITCHED",
        f"{leader.broker_name} was not switched: {what} for {timeout_s:g} s. Nothing was ordered, and {leader.leadership.member} leads it"
        f" in epoch {leader.epoch}, as before. `protomq ha status` tells who is in sync; a longer --timeout waits longer",
    )


def _leads_already(leader: HaStatus, to: int | None) -> bool:
    """Whether the one that is to lead does so, and says it."""
    if to is None or not _is_id_of(leader, to):
        return False
    sys.stderr.write(f"broker_id {to} of {leader.broker_name} leads already: nothing was changed\n")
    return True


def _leader(states: list[HaStatus]) -> HaStatus | None:
    return next((each for each in states if each.leadership and each.leadership.state == "LEADING"), None)


def _print_leader(leader: HaStatus, output: OutputFormat) -> None:
    assert leader.leadership is not None
    row = {"broker": leader.broker_name, "member": leader.leadership.member, "epoch": leader.epoch}
    print_rows([row], ("broker", "member", "epoch"), output)


def _wait_for_another(
    admins: tuple[Admin, Admin],
    broker: str,
    before: HaStatus | None,
    to: int | None,
    output: OutputFormat,
    *,
    give_up_s: float | None = None,
    is_left: bool = True,
) -> None:
    """Until another one leads, in a later epoch; else says who does. `is_left`: whether the order has surely been left.

    The first of `admins` does not ask silent brokers again for a while. The one that begins to lead may have been silent for a moment,
    so only the first look is that one's.
    """
    from protomq.errors import ProtomqError

    admin, fresh = admins
    give_up_s = time.monotonic() + DONE_WITHIN_S if give_up_s is None else give_up_s
    while True:
        try:
            now = _leader(_states(admin, broker))
        except ProtomqError:  # stores are being opened again
            now = None
        if now is not None and (before is None or now.epoch > before.epoch):
            _check_is_ordered(now, to)
            _print_leader(now, output)
            return
        if admin is fresh and time.monotonic() >= give_up_s:
            raise _not_switched(broker, now, is_left=is_left)
        admin = fresh
        time.sleep(LOOK_INTERVAL_S)


def _check_is_ordered(now: HaStatus, to: int | None) -> None:
    """Raises CliError if it is surely another one that leads now: another operator's order came before, or nobody needed this one."""
    assert now.leadership is not None
    if to is None or not now.leadership.broker_id or _is_id_of(now, to):
        return
    raise CliError(
        ExitCode.REFUSED,
        "ANOTHER_LEADS",
        f"broker_id {now.leadership.broker_id} (store {now.leadership.member}) leads {now.broker_name} in epoch {now.epoch}, and not {to}:"
        f" it was elected by itself, or by the order of another operator. `protomq ha switch {now.broker_name} --to {to}` loses nothing",
    )


def _not_switched(broker: str, now: HaStatus | None, *, is_left: bool) -> CliError:
    who = "nobody leads it" if now is None or now.leadership is None else f"{now.leadership.member} leads it in epoch {now.epoch}"
    if now is not None and is_left:
        why = "No slave in sync could take over; `protomq ha status` tells who is"
        text = f"{broker} was not switched in {DONE_WITHIN_S:.0f} s: {who}, as before. {why}"
        return CliError(ExitCode.REFUSED, "NOT_SWITCHED", text)
    why = "" if is_left else " The order was not answered, and may still be carried out."
    text = f"it is not known yet whether {broker} is switched: now {who}.{why} `protomq ha status` tells how it ends"
    return CliError(ExitCode.FAILURE, "SWITCH_UNKNOWN", text)
