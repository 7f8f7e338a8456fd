"""`ha switch`, `ha demote` and `ha promote`: who leads a name whose master is elected in etcd."""

from __future__ import annotations

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

    Sends wait for a second or so.
    """
    with open_admin(namesrv, timeout) as admin:
        states = admin.ha_status(broker)
        before = _leader(states)
        if before is None and states and not any(each.leadership for each in states):
            raise CliError(
                ExitCode.REFUSED,
                "ROLES_ARE_FIXED",
                f"{broker} has fixed roles (broker_role): nobody elects its master; only with etcd.endpoints can it be switched",
            )
        if before is None:
            raise CliError(
                ExitCode.FAILURE, "NO_MASTER", f"nobody leads {broker}; `protomq ha status` says why"
            )
        admin.switch_master(broker, to)
        _wait_for_another(admin, broker, before, output)


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

    Without --unclean nothing is lost, and the broker must be in sync.
    """
    if not unclean:
        switch(broker, to, namesrv, output, timeout)
        return
    if not yes:
        ask_to_delete(f"Is the old master of {broker} stopped, and may what broker_id {to} lacks be lost?")
    with open_admin(namesrv, timeout) as admin:
        before = _leader(admin.ha_status(broker))
        admin.promote_unclean(broker, to)
        _wait_for_another(admin, broker, before, output)


def _leader(states: list[HaStatus]) -> HaStatus | None:
    return next((each for each in states if each.leadership and each.leadership.state == "LEADING"), None)


def _wait_for_another(
    admin: Admin, broker: str, before: HaStatus | None, output: OutputFormat
) -> None:
    """Until another one leads, in a later epoch; else says so."""
    from protomq.errors import ProtomqError

    give_up_s = time.monotonic() + DONE_WITHIN_S
    while time.monotonic() < give_up_s:
        try:
            now = _leader(admin.ha_status(broker))
        except ProtomqError:  # stores are being opened again
            now = None
        if now is not None and (before is None or now.epoch > before.epoch):
            assert now.leadership is not None
            row = {"broker": broker, "member": now.leadership.member, "epoch": now.epoch}
            print_rows([row], ("broker", "member", "epoch"), output)
            return
        time.sleep(LOOK_INTERVAL_S)
    raise CliError(
        ExitCode.FAILURE,
        "NOT_SWITCHED",
        f"nobody else leads {broker} after {DONE_WITHIN_S:.0f} s; `protomq ha status` tells who is in sync",
    )
