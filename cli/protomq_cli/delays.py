"""Delayed messages: what `send` says of when they are delivered, and `recall`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from protomq_cli.connection import open_producer
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    Output,
    Timeout,
    TopicArgument,
    duration_option,
    option_parser,
)
from protomq_cli.output import OutputFormat, print_object

if TYPE_CHECKING:
    from datetime import timedelta

    from protomq import DelayLevel


def parse_moment(text: str) -> datetime:
    """A date with a time, in UTC unless it names a zone. Raises ValueError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is no time; write 2030-01-31T12:00, or with a zone 2030-01-31T12:00+01:00") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


DelayOption = Annotated[
    float | None,
    typer.Option(
        "--delay", "-d", parser=duration_option, metavar="TIME", show_default="none",
        help="Delay before it is delivered: 500ms, 30s, 2h, 40d at most.",
    ),
]  # fmt: skip
DeliverAtOption = Annotated[
    datetime | None,
    typer.Option(
        "--deliver-at", parser=option_parser(parse_moment), metavar="TIME", show_default="at once",
        help="Deliver it then: 2030-01-31T12:00, in UTC unless it names a zone.",
    ),
]  # fmt: skip
DelayLevelOption = Annotated[
    int | None,
    typer.Option(
        "--delay-level", metavar="N", min=1, show_default="none", help="Deliver it later by this delay level of the broker."
    ),
]  # fmt: skip


class Delivery(NamedTuple):
    """When messages are delivered, as the SDK takes it."""

    delay: timedelta | float | DelayLevel | None
    deliver_at: datetime | None

    @property
    def is_later(self) -> bool:
        """Whether that is not at once."""
        return self != (None, None)


def delivery(
    delay: float | None, deliver_at: datetime | None, delay_level: int | None
) -> Delivery:
    """What the options say together. Raises BadParameter for more than one."""
    from protomq import DelayLevel

    if sum(option is not None for option in (delay, deliver_at, delay_level)) > 1:
        raise typer.BadParameter("give one of --delay, --deliver-at and --delay-level")
    return Delivery(DelayLevel(delay_level) if delay_level is not None else delay, deliver_at)


def recall(
    topic: TopicArgument,
    handle: Annotated[
        str, typer.Argument(metavar="HANDLE", show_default=False, help="The recall_handle that send printed.")
    ],
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Take a delayed message back before it is delivered.

    Exit code 4 if it is too late, or somebody has done it before.

    \b
      protomq send orders hello --delay 1h -o json
      protomq recall orders HANDLE
    """
    with open_producer(namesrv, send_timeout_s=timeout) as producer:
        recalled = producer.recall(topic, handle)
    if not recalled:
        raise CliError(
            ExitCode.NOT_FOUND,
            "NOT_PENDING",
            "the message is not pending any more: it was delivered, or recalled before",
        )
    print_object({"topic": topic, "recalled": True}, output)
