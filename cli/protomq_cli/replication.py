"""`ha status`: masters and slaves, who is in sync, and how far each is behind. `ha forget`: one that was removed is missed no more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.leading import fixed_roles
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import HaStatus, KnownMember, RefusedBroker

_COLUMNS = (
    "broker", "broker_id", "role", "epoch", "end_position", "confirmed_position", "in_sync", "lag_bytes", "problem",
)  # fmt: skip
_EXPENDABLE = ("epoch", "confirmed_position")
BROKER_ID_MAX: Final = (1 << 31) - 1
"""As brokers take it in their configuration."""
AWAY: Final = "AWAY"
REFUSED: Final = "REFUSED"
"""In the place of the role: of an elected broker that does not answer, and of one that a name server refuses."""


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

    A broker of role AWAY does not answer, and others know of it: one that
    etcd elects. One of role REFUSED may not register at a name server, so
    nobody asks it; `problem` says why. Of a master `in_sync` counts copies,
    its own among them, out of those that a send waits for. Its `lag_bytes`
    is that of its slowest slave, also of one that is AWAY and in the in-sync
    set still. Of a slave, `problem` says why it does not
    follow its master now. Of a master it says why it takes no sends, such
    as a full disk. Where the master is elected, `problem` also says what is
    wrong with that.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        states = missing.take(lambda: admin.ha_status(broker))
        refused = [each for each in admin.refused_brokers() if broker in (None, each.broker.broker_name)]
    rows = [_row(state, as_table=output.is_table) for state in states] + _away_rows(states, as_table=output.is_table)
    unknown: dict[str, Any] = dict.fromkeys(rows[0] if rows else _COLUMNS)
    rows += [unknown | _refused_row(each) for each in refused]
    rows.sort(key=lambda row: (row["broker"], row["broker_id"]))
    print_rows(rows, _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check()


def forget(
    broker: Annotated[str, typer.Argument(metavar="BROKER", show_default=False, help="Name of the broker.")],
    broker_id: Annotated[int, typer.Option("--id", min=0, max=BROKER_ID_MAX, metavar="ID", help="broker_id of the one that was removed.")],
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Stop missing a broker of an elected name that was removed for good.

    Until then `ha status` lists it as AWAY. What it stores stays. One that
    runs is refused, and one that is in the in-sync set.
    """
    from protomq.errors import BrokerNotFoundError, UnsupportedError

    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        states = missing.take(lambda: admin.ha_status(broker))
        if any(state.leadership is not None and state.leadership.broker_id == broker_id for state in states):
            raise CliError(ExitCode.REFUSED, "BROKER_ALIVE", f"broker_id {broker_id} of {broker} runs: stop it first")
        try:
            admin.forget_member(broker, broker_id)
        except BrokerNotFoundError as error:
            if any(member.broker_id == broker_id for state in states for member in state.away):
                text = f"{error}: it may have what nobody else has. Start it, or have another one lead"
                raise CliError(ExitCode.REFUSED, "STILL_NEEDED", text) from error
            raise
        except UnsupportedError as error:
            raise fixed_roles(broker) from error
    print_rows([{"broker": broker, "broker_id": broker_id, "forgotten": True}], ("broker", "broker_id", "forgotten"), output)


def _away_rows(states: Iterable[HaStatus], *, as_table: bool) -> list[dict[str, Any]]:
    """Of elected brokers that do not answer. Of each name the broker tells that knows most: who leads, or has heard of the last lead."""
    best: dict[str, HaStatus] = {}
    for state in sorted(states, key=_knowledge):
        best[state.broker_name] = state
    return [_away_row(state, member, as_table=as_table) for state in best.values() for member in state.away]


def _knowledge(state: HaStatus) -> tuple[int, bool]:
    leadership = state.leadership
    return (leadership.epoch, leadership.state == "LEADING") if leadership is not None else (0, False)


def _away_row(state: HaStatus, member: KnownMember, *, as_table: bool) -> dict[str, Any]:
    name, leadership = state.broker_name, state.leadership
    if leadership is not None and member.member in leadership.in_sync:
        problem = f"it does not answer, and is in the in-sync set still; last at {member.address}"
    else:
        problem = (
            f"it does not answer, and is out of the in-sync set; last at {member.address}. If it was removed for good:"
            f" protomq ha forget {name} --id {member.broker_id}"
        )
    known = {"broker": name, "broker_id": member.broker_id, "role": AWAY, "problem": problem}
    unknown: dict[str, Any] = dict.fromkeys(_row(state, as_table=as_table))
    return unknown | known | {"member": member.member, "address": member.address}


def _refused_row(refused: RefusedBroker) -> dict[str, Any]:
    broker = refused.broker
    address = broker.remoting_address or broker.grpc_address
    problem = f"a name server refuses it, so nobody finds it; it is at {address}. {refused.cause}"
    return {"broker": broker.broker_name, "broker_id": broker.broker_id, "role": REFUSED, "problem": problem, "address": address}


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
            "late": list(state.leadership.late),
            "etcd_problem": state.leadership.etcd_problem,
            "known": [
                {"member": each.member, "broker_id": each.broker_id, "address": each.address} for each in state.leadership.known
            ],
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
