"""`group set|show`: how the messages of a consumer group are delivered."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from protomq_cli.connection import open_admin
from protomq_cli.groups import GroupArgument
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    OnBroker,
    Output,
    Timeout,
    option_parser,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing
from protomq_cli.units import parse_duration

if TYPE_CHECKING:
    from protomq import Admin, GroupSettings

_COLUMNS = ("group", "orderly", "retries", "delays", "consume", "broadcast", "version")
_EXPENDABLE = ("version", "broadcast", "delays")
_DEFAULT = "default"


def _parse_retries(text: str) -> str:
    if text != _DEFAULT and not text.isdecimal():
        raise ValueError(f"a number, or {_DEFAULT}, not {text!r}")
    return text


def _parse_delays(text: str) -> str:
    if text != _DEFAULT:
        for part in text.split(","):
            if parse_duration(part) < 0.001:
                raise ValueError(f"a retry waits for 1ms at least, not {part}: what fails would come again at once")
    return text


def set_group(
    group: GroupArgument,
    retries: Annotated[
        str | None,
        typer.Option(
            "--retries", metavar="N", parser=option_parser(_parse_retries), show_default=False,
            help="Retries before a message is a dead letter; default: 16, without limit for an orderly group.",
        ),
    ] = None,
    delays: Annotated[
        str | None,
        typer.Option(
            "--delays", metavar="TIME,...", parser=option_parser(_parse_delays), show_default=False,
            help="How long each retry waits: 10s,30s,1m. The last is for all further ones; default: the broker's levels.",
        ),
    ] = None,
    orderly: Annotated[
        bool | None,
        typer.Option(
            "--orderly/--no-orderly", show_default=False, help="Its members consume in order: no limit of retries unless it is set."
        ),
    ] = None,
    consume: Annotated[
        bool | None, typer.Option("--consume/--no-consume", show_default=False, help="Whether it may pull.")
    ] = None,
    broadcast: Annotated[
        bool | None,
        typer.Option(
            "--broadcast/--no-broadcast", show_default=False, help="Whether its members may get all messages each."
        ),
    ] = None,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Set a group up, or change its settings.

    What is not given stays as it is. All brokers get the same settings;
    one that is down gets them when this is said again.
    """
    if all(each is None for each in (retries, delays, orderly, consume, broadcast)):
        raise typer.BadParameter(
            "nothing is set: give --retries, --delays, --orderly, --consume or --broadcast; `protomq group show` shows the settings",
            param_hint="GROUP",
        )
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        settings = missing.take(
            lambda: admin.set_group(
                group,
                orderly=orderly,
                retry_count_max=_retry_count(retries),
                retry_delays_ms=_delays_ms(delays),
                consume_enabled=consume,
                broadcast_enabled=broadcast,
                brokers=None if broker is None else [broker],
            )
        )
    print_rows([_row(settings)], _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check_change()


def show(
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", show_default="all that were set up", help="Consumer group.")
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Show settings of groups.

    A group that nobody has set up has the defaults, and version 0. If no
    broker knows the group at all, stderr says so.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        names = [group] if group is not None else missing.take(admin.list_group_settings)
        found = [missing.take(lambda name=name: admin.get_group(name)) for name in names]  # type: ignore[misc]
        if group is not None and not found[0].version and not _is_in_use(admin, group, missing):
            sys.stderr.write(
                f"protomq: no broker knows the group {group!r}: these are the defaults; `protomq group list` shows the groups\n"
            )
    rows = [_row(settings) for settings in found]
    print_rows(rows, _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check()


def _is_in_use(admin: Admin, group: str, missing: Missing) -> bool:
    """Whether it has committed, popped, or has members."""
    return any(one.name == group for one in missing.take(admin.list_groups)) or bool(missing.take(lambda: admin.group_members(group)))


def _retry_count(text: str | None) -> int | Literal["default"] | None:
    if text is None or text == _DEFAULT:
        return None if text is None else "default"
    return int(text)


def _delays_ms(text: str | None) -> list[int] | None:
    if text is None:
        return None
    return [] if text == _DEFAULT else [round(parse_duration(part) * 1000) for part in text.split(",")]


def _row(settings: GroupSettings) -> dict[str, Any]:
    return {
        "group": settings.name,
        "orderly": settings.orderly,
        "retries": "without limit" if settings.retry_limit is None else settings.retry_limit,
        "delays": " ".join(map(_duration, settings.delays_ms)),
        "delays_ms": list(settings.delays_ms),
        "consume": settings.consume_enabled,
        "broadcast": settings.broadcast_enabled,
        "version": settings.version,
    }


def _duration(milliseconds: int) -> str:
    """As delay levels are written: 10s, 2h; the largest unit that leaves no rest."""
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if milliseconds and milliseconds % size_ms == 0:
            return f"{milliseconds // size_ms}{unit}"
    return f"{milliseconds}ms"
