"""`cluster list|status|forget`: the brokers that a name server knows, what each of them does, and those that are gone for good."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.message_text import time_text
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_object, print_rows
from protomq_cli.partial import Missing
from protomq_cli.units import format_size

if TYPE_CHECKING:
    from protomq import BrokerInfo, BrokerStatus

_COLUMNS = ("cluster", "broker", "broker_id", "grpc_address", "remoting_address", "start_time")
_LANE_COLUMNS = (
    "broker", "lane", "threads", "depth", "depth_max", "queue_time_us", "calls", "rejections", "connections",
    "holds",
)  # fmt: skip
_LANE_EXPENDABLE = ("depth_max", "threads", "queue_time_us")
_DAMAGED_QUEUE_COLUMNS = ("broker", "topic", "queue_id", "queue_offset", "reason", "obstacle")
_LOG_DAMAGE_COLUMNS = ("broker", "start_position", "end_position", "reason")


def list_brokers(
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the brokers that the name server knows.

    Shown are the addresses that they advertise. One that the name server
    has lost is listed too, with the time, until it is back or forgotten. So
    is one that a name server has refused lately, with the cause.
    """
    with open_admin(namesrv, timeout) as admin:
        there, gone, refused = admin.cluster_info(), admin.missing_brokers(), admin.refused_brokers()
    rows = [_broker_row(broker) for broker in there]
    rows += [
        _broker_row(one.broker)
        | {"missing_since": time_text(round(one.removed_time.timestamp() * 1000)), "cause": one.cause}
        for one in gone
    ]
    rows += [
        _broker_row(one.broker)
        | {"refused_time": time_text(round(one.refused_time.timestamp() * 1000)), "reason": one.reason, "cause": one.cause}
        for one in refused
    ]
    columns = (*_COLUMNS[:2], *["missing_since"] * bool(gone), *_COLUMNS[2:], *["refused_time", "cause"] * bool(refused))
    expendable = ("start_time", "cluster", "broker_id", "remoting_address", "grpc_address")
    print_rows(rows, columns, output, expendable=expendable)


def forget(
    broker: Annotated[
        str, typer.Argument(metavar="BROKER", show_default=False, help="Name of the broker.")
    ],
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Stop missing a broker that will not come back.

    Until then commands that ask all brokers end with exit code 7 and name
    it. All name servers that are given are told. What it stores stays. One
    that is registered is refused: stop it first.
    """
    from protomq.errors import BrokerNotFoundError

    with open_admin(namesrv, timeout) as admin:
        try:
            admin.forget_broker(broker)
        except BrokerNotFoundError as error:
            if any(one.broker_name == broker for one in admin.cluster_info()):
                raise CliError(
                    ExitCode.REFUSED,
                    "BROKER_ALIVE",
                    f"broker {broker} is registered, so it is not missing; to remove it, stop it first",
                ) from error
            raise
    print_rows([{"broker": broker, "forgotten": True}], ("broker", "forgotten"), output)


def status(
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker", "-b", metavar="NAME", show_default="all", help="This broker only."
        ),
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show what brokers do: log, disk, memory, lanes."""
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        states = [_status_row(one) for one in missing.take(lambda: admin.broker_status(broker))]
    if not output.is_table:
        print_rows(states, (), output)
        missing.check()
        return
    for state in states:
        lanes = state.pop("lanes")
        damaged_queues, log_damages = state.pop("damaged_queues"), state.pop("log_damages")
        state["stored"] = format_size(state["appended_position"] - state["min_position"])
        state["resident_memory"] = format_size(state.pop("resident_memory_bytes"))
        state["disk_used"] = f"{state.pop('disk_used_ratio'):.1%}"
        print_object(state, output)
        rows = [{"broker": state["broker"], **lane} for lane in lanes]
        print_rows(rows, _LANE_COLUMNS, output, expendable=_LANE_EXPENDABLE)
        for rows, columns in (
            (damaged_queues, _DAMAGED_QUEUE_COLUMNS),
            (log_damages, _LOG_DAMAGE_COLUMNS),
        ):
            if rows:
                print_rows([{"broker": state["broker"], **row} for row in rows], columns, output)
    missing.check()


def _broker_row(broker: BrokerInfo) -> dict[str, Any]:
    return {
        "cluster": broker.cluster,
        "broker": broker.broker_name,
        "broker_id": broker.broker_id,
        "grpc_address": broker.grpc_address,
        "remoting_address": broker.remoting_address,
        "start_time": time_text(broker.incarnation),
        "missing_since": None,
        "refused_time": None,
    }


def _status_row(state: BrokerStatus) -> dict[str, Any]:
    row = asdict(state)
    row["broker"] = row.pop("broker_name")
    row["start_time"] = time_text(round(state.start_time.timestamp() * 1000))
    row["disk_used_ratio"] = round(state.disk_used_ratio, 4)
    return {"broker": row.pop("broker")} | row
