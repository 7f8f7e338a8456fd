"""`ha wait`: until a broker's copies are in sync, so that the next one may be stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from protomq_cli.connection import open_admin
from protomq_cli.draining import BrokerArgument, Wait
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows

if TYPE_CHECKING:
    from protomq import HaStatus, LeadershipStatus

LOOK_INTERVAL_S: Final = 0.2
_COLUMNS: Final = ("broker", "in_sync", "lag_bytes")


def wait_in_sync(
    broker: BrokerArgument,
    copies: Annotated[
        int, typer.Option("--copies", "-c", min=1, metavar="N", help="How many copies, the master's own among them.")
    ],
    wait: Wait = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Wait until a master leads and so many copies are in sync.

    Between the restarts of a rolling upgrade, and after a replica was
    replaced: then the next one may be stopped. Where etcd elects the
    master, no member of the in-sync set may be away or late, and etcd has
    to take writes. Else sends would wait, or nobody could take over.
    """
    from protomq.errors import PartialResultError, ProtomqError

    # Who was silent at one look may answer at the next one.
    with open_admin(namesrv, timeout, 0.0) as admin:

        def look() -> tuple[HaStatus | None, str]:
            try:
                return judged(admin.ha_status(broker), copies)
            except PartialResultError as error:
                # The master knows how many are in sync, whoever else is silent.
                state, left = judged(error.result, copies)
                return state, left and f"{left}; {error}"
            except ProtomqError as error:  # it is being started
                return None, str(error)

        state, left = wait_until(look, wait, lambda text: sys.stderr.write(f"{broker}: {text}\n"))
    if state is None or left:
        raise CliError(ExitCode.REFUSED, "NOT_IN_SYNC", f"{left}; `protomq ha status` says more, and stop nothing now")
    row = {"broker": broker, "in_sync": state.in_sync_count, "lag_bytes": state.lag_bytes}
    print_rows([row], _COLUMNS, output)


def judged(states: Iterable[HaStatus], copies: int) -> tuple[HaStatus | None, str]:
    """The master's state, and what is left; "" if nothing is."""
    masters = [each for each in states if each.broker_id == 0]
    if not masters:
        return None, "nobody leads"
    master = masters[0]
    if master.in_sync_count < copies:
        return master, f"{master.in_sync_count} of {copies} copies in sync"
    return master, _left_in(master.leadership) if master.leadership is not None else ""


def _left_in(leadership: LeadershipStatus) -> str:
    """Why nobody may be stopped, however many are in sync: sends wait for one that is late, or nobody can take over."""
    if leadership.etcd_problem:
        return leadership.etcd_problem
    known = {each.member: f"broker_id {each.broker_id} at {each.address}" for each in leadership.known}
    late = ", ".join(known.get(each, f"store {each}") for each in leadership.late)
    return late and f"{late} is in the in-sync set, and does not keep up: sends wait for it"


def wait_until(
    look: Callable[[], tuple[HaStatus | None, str]],
    wait_s: float | None,
    say: Callable[[str], object],
    monotonic_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[HaStatus | None, str]:
    """Looks until nothing is left, or the time is over. Says what is left whenever that changes."""
    ends_s = None if wait_s is None else monotonic_s() + wait_s
    said = ""
    while True:
        state, left = look()
        if not left or (ends_s is not None and monotonic_s() >= ends_s):
            return state, left
        if left != said:
            said = left
            say(left)
        pause(LOOK_INTERVAL_S)
