"""`pop`: messages for members of a group who share them, printed and acknowledged."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer

from protomq_cli.connection import open_admin, open_simple_consumer
from protomq_cli.groups import parse_group
from protomq_cli.messages import Cel, Format, MessagePrinter, Module, Sql, Tags
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    Output,
    TopicArgument,
    TransportName,
    count_option,
    duration_option,
    option_parser,
)
from protomq_cli.output import OutputFormat
from protomq_cli.partial import Missing
from protomq_cli.sending import why_no_route

_AT_ONCE_MAX: Final = 256
_HOLD_MAX_S: Final = 60.0
_LAST_LOOK_S: Final = 1.0


def pop(
    topic: TopicArgument,
    group: Annotated[
        str,
        typer.Option(
            "--group", "-G", metavar="NAME", parser=option_parser(parse_group), show_default=False,
            help="The group whose members share them.",
        ),
    ],
    count: Annotated[
        int, typer.Option("--count", "-c", parser=count_option, metavar="N", help="At most N messages; 0: all.")
    ] = 32,
    hold: Annotated[
        float, typer.Option("--hold", parser=duration_option, metavar="TIME", show_default="none", help="How long to wait for more.")
    ] = 0.0,
    invisible: Annotated[
        float,
        typer.Option(
            "--invisible", parser=duration_option, metavar="TIME", show_default="60s",
            help="How long nobody else gets them: 10s to 12h.",
        ),
    ] = 60.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not acknowledge: they come again when --invisible is over.")
    ] = False,
    fifo: Annotated[
        bool, typer.Option("--fifo", help="One message of each sharding key at a time.")
    ] = False,
    tag: Tags = None,
    sql: Sql = None,
    cel: Cel = None,
    module: Module = None,
    template: Format = None,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.JSONL,
) -> None:  # fmt: skip
    """Print messages that no other member of the group gets, and acknowledge
    them.

    Where it ends since there are no more, and a broker of the topic does not
    answer, the exit code is 7.

    \b
      protomq pop flights -G clerks             32 messages
      protomq pop flights -G clerks --keep      and give them to others later
    """
    from protomq.errors import NoRouteError, TopicNotFoundError

    missing = Missing()
    is_last_look = False
    with (
        open_simple_consumer(namesrv, group, transport=transport) as consumer,
        MessagePrinter(output, template) as printer,
    ):
        deadline_s = time.monotonic() + hold
        while not count or printer.count < count:
            at_once = min(count - printer.count, _AT_ONCE_MAX) if count else _AT_ONCE_MAX
            try:
                messages = consumer.receive(
                    topic,
                    at_once,
                    invisible_s=invisible,
                    hold_s=min(max(deadline_s - time.monotonic(), 0.0), _HOLD_MAX_S),
                    tags=tag or (),
                    sql=sql,
                    cel=cel,
                    module=module,
                    fifo=fifo,
                )
            except (NoRouteError, TopicNotFoundError) as error:
                raise why_no_route(namesrv, DEFAULT_TIMEOUT_S, topic, error) from error
            for message in messages:
                printer.print(message)
            printer.flush()
            if messages and not keep:
                consumer.ack(messages)
            if messages:
                deadline_s = time.monotonic() + hold
            elif time.monotonic() >= deadline_s:
                if is_last_look or not _note_silent(missing, namesrv, topic):
                    break
                # The others were perhaps given no time beside these.
                is_last_look, deadline_s = True, time.monotonic() + _LAST_LOOK_S
    missing.check()


def _note_silent(missing: Missing, namesrv: str | None, topic: str) -> bool:
    """Notes the brokers of the topic that do not answer: nobody knows what they have. Whether there are any; raises if none answers."""
    from protomq.errors import TopicNotFoundError

    with open_admin(namesrv, DEFAULT_TIMEOUT_S) as admin:
        try:
            missing.take(lambda: admin.describe_topic(topic))
        except TopicNotFoundError:  # It is made with the first message.
            return False
    return bool(missing.reasons())
