"""`ha status`: masters and slaves, who is in sync, and how far each is behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli.connection import open_admin
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import HaStatus

_COLUMNS = (
    "broker", "broker_id", "role", "epoch", "end_position", "confirmed_position", "in_sync", "lag_bytes", "problem",
)  # fmt: skip
_EXPENDABLE = ("epoch", "confirmed_position")


def status(
    broker: Annotated[
        str | None,
        typer.Option("--broker", "-b", metavar="NAME", show_default="all", help="Brokers of this name only."),
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Show how replication stands: a row for each master and slave.

    Of a master `in_sync` counts copies, its own among them, out of those
    that a send waits for; `lag_bytes` is that of its slowest slave. Of a
    slave, `problem` says why it does not follow its master now. Of a
    master it says why it takes no sends, such as a full disk. Where the
    master is elected, `problem` also says what is wrong with that.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        states = missing.take(lambda: admin.ha_status(broker))
    rows = [_row(state, as_table=output.is_table) for state in states]
    print_rows(rows, _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check()


def _row(state: HaStatus, *, as_table: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "broker": state.broker_name,
        "broker_id": state.broker_id,
        "role": state.role.name,
        "epoch": state.epoch,
        "end_position": state.end_position,
        "confirmed_position": state.confirmed_position,
        "in_sync": _in_sync(state),
        "lag_bytes": state.lag_bytes,
        "problem": _problem(state),
    }
    if as_table:
        return row
    return row | {
        "in_sync": state.in_sync_count,
        "in_sync_replicas": state.in_sync_replicas,
        "min_in_sync_replicas": state.min_in_sync_replicas,
        "first_position": state.first_position,
        "flushed_position": state.flushed_position,
        "master_address": state.master_address,
        "master_silence_ms": state.master_silence_ms,
        "leadership": state.leadership and {
            "member": state.leadership.member,
            "state": state.leadership.state,
            "epoch": state.leadership.epoch,
            "master": state.leadership.master,
            "in_sync": list(state.leadership.in_sync),
            "problems": list(state.leadership.problems),
            "broker_id": state.leadership.broker_id,
        },
        "replicas": [
            {
                "broker_id": each.broker_id,
                "address": each.address,
                "in_sync": each.in_sync,
                "written_position": each.written_position,
                "flushed_position": each.flushed_position,
                "lag_bytes": each.lag_bytes,
                "silence_ms": each.silence_ms,
            }
            for each in state.replicas
        ],
    }


def _problem(state: HaStatus) -> str:
    said = state.leadership.problems if state.leadership is not None else ()
    return "; ".join([*([state.problem] if state.problem else []), *said])


def _in_sync(state: HaStatus) -> str:
    if state.role.name == "SLAVE":
        return ""
    wanted = f" of {state.in_sync_replicas}" if state.in_sync_replicas else ""
    return f"{state.in_sync_count}{wanted}"
