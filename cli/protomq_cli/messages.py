"""`pull`, `consume` and `message query`: messages that are read, and how they are printed."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.message_text import (
    MOVED_COLUMNS,
    TABLE_COLUMNS,
    TEMPLATE_HELP,
    Template,
    message_row,
    origin_text,
)
from protomq_cli.offsets import START, AtTime, FromEnd, FromStart, OffsetRange
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    Offsets,
    Output,
    Timeout,
    TopicArgument,
    TransportName,
    count_option,
    offsets_option,
    option_parser,
    timeout_option,
)
from protomq_cli.output import OutputFormat, RowStream, flush_stdout, require_stdout, stdout_named
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Message

_PULLED_DEFAULT: Final = 32
"""RocketMQ's maxNums."""

QueueIds = Annotated[
    list[int] | None,
    typer.Option(
        "--queue", "-q", metavar="N", min=0, show_default="all", help="From this queue only; can be repeated."
    ),
]
OneBroker = Annotated[
    str | None,
    typer.Option(
        "--broker", "-b", metavar="NAME", show_default="all", help="From this broker only."
    ),
]
Tags = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        "-g",
        metavar="TAG",
        show_default="all",
        help="With this tag only; can be repeated.",
    ),
]
Sql = Annotated[
    str | None,
    typer.Option(
        "--sql",
        metavar="CONDITION",
        show_default="all",
        help="Only messages for which this is true, in SQL92: \"delay > 30 AND TAGS = 'UA'\".",
    ),
]
Cel = Annotated[
    str | None,
    typer.Option(
        "--cel",
        metavar="CONDITION",
        show_default="all",
        help="The same in CEL: \"int(properties.delay) > 30 && TAGS == 'UA'\".",
    ),
]
Module = Annotated[
    str | None,
    typer.Option(
        "--module",
        metavar="NAME",
        show_default="all",
        help="Only messages for which this module is true (`protomq filter`).",
    ),
]
Format = Annotated[
    Template | None,
    typer.Option(
        "--format", "-f", parser=option_parser(Template), metavar="TEMPLATE", show_default=False,
        help=f"Write messages by a template instead: {TEMPLATE_HELP}.",
    ),
]  # fmt: skip


def pull(
    topic: TopicArgument,
    offset: Offsets = None,
    count: Annotated[
        int,
        typer.Option("--count", "-c", parser=count_option, metavar="N", help="Maximum number of messages; 0: all."),
    ] = _PULLED_DEFAULT,
    queue: QueueIds = None,
    broker: OneBroker = None,
    tag: Tags = None,
    sql: Sql = None,
    cel: Cel = None,
    module: Module = None,
    template: Format = None,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.JSONL,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", parser=timeout_option, metavar="TIME", show_default="60s", help="Give up after this time."
        ),
    ] = 60.0,
) -> None:  # fmt: skip
    """Print messages that are there, then end.

    They come in the order in which they were stored.

    \b
      protomq pull flights                     the first 32
      protomq pull flights -O -3 -o table      the last 3 of each queue
      protomq pull flights -O @-1h -c 0        all of the last hour
      protomq pull flights -q 0 -O 10:20 -f '%o %v\\n'
    """
    from protomq_cli.reading import TopicReader

    with (
        TopicReader(
            namesrv,
            topic,
            offset or START,
            broker_name=broker,
            queue_ids=queue or (),
            tags=tag or (),
            sql=sql,
            cel=cel,
            module=module,
            transport=transport,
            timeout_s=timeout,
        ) as reader,
        MessagePrinter(output, template) as printer,
    ):
        for message in reader.messages(count):
            printer.print(message)
            if count and printer.count == count:
                break
    reader.check()
    if tag and printer.count == 0 and reader.count:
        sys.stderr.write(f"none of {reader.count:,} messages has the tag {' or '.join(tag)}\n")
    if any(each is not None for each in (sql, cel, module)) and printer.count == 0 and reader.count:
        sys.stderr.write(f"none of {reader.count:,} messages matches\n")
    if count and printer.count == count < reader.count and sys.stderr.isatty():
        sys.stderr.write(f"{count} of {reader.count:,}; --count 0 shows all\n")


def consume(
    topic: TopicArgument,
    group: Annotated[
        str | None,
        typer.Option("--group", "-G", metavar="NAME", show_default="none", help="Continue at the group's offsets, and commit."),
    ] = None,
    offset: Offsets = None,
    count: Annotated[
        int,
        typer.Option(
            "--count", "-c", parser=count_option, metavar="N", show_default="no end", help="End after N messages; 0: no end."
        ),
    ] = 0,
    exit_at_end: Annotated[
        bool, typer.Option("--exit", "-e", help="End at the end of the queues as it is now.")
    ] = False,
    tag: Tags = None,
    sql: Sql = None,
    cel: Cel = None,
    module: Module = None,
    template: Format = None,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.JSONL,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Print messages as they arrive, until Ctrl-C.

    With --group it goes on where the group has committed, else at the
    start, and commits what was printed. --offset seeks its first queues.
    Without a group it starts at the end (--offset start: at the start), and
    nothing is committed.
    """
    from protomq_cli.following import follow

    if group is not None and (not group or group.startswith("-")):
        raise typer.BadParameter(f"a name is expected, this is {group!r}", param_hint="--group")
    with MessagePrinter(output, template) as printer:
        follow(
            namesrv,
            topic,
            printer.print,
            printer.flush,
            group=group or "",
            wanted=offset,
            count_max=count,
            exit_at_end=exit_at_end,
            tags=tag or (),
            sql=sql,
            cel=cel,
            module=module,
            transport=transport,
            timeout_s=timeout,
        )


def query(
    topic: TopicArgument,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", show_default=False, help="With this key.")
    ] = None,
    message_id: Annotated[
        str | None, typer.Option("--id", "-i", metavar="ID", show_default=False, help="Or with this message id.")
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-c", metavar="N", min=1, max=256, help="Maximum number from each broker.")
    ] = _PULLED_DEFAULT,
    offset: Annotated[
        OffsetRange | None,
        typer.Option(
            "--offset", "-O", parser=offsets_option, metavar="@TIME", show_default="any time",
            help="Stored in this time: @date, @-1h, @a:b.",
        ),
    ] = None,
    template: Format = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.JSONL,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Find messages by key or by message id, newest first."""
    if (key is None) == (message_id is None):
        raise typer.BadParameter("give one of --key and --id")
    if not (key or message_id):
        hint = "--id" if key is None else "--key"
        raise typer.BadParameter("it is empty; no message has an empty key or id", param_hint=hint)
    missing = Missing()
    with open_admin(namesrv, timeout) as admin, MessagePrinter(output, template) as printer:
        if key is not None:
            begin, end = _times(offset)
            found = missing.take(
                lambda: admin.query_by_key(topic, key, begin=begin, end=end, count_max=count)
            )
        else:
            one = missing.take(lambda: admin.query_by_id(topic, message_id or ""))
            found = [] if one is None else [one]
        if not found:
            missing.take(lambda: admin.describe_topic(topic))  # Is it the topic that is not there?
        for message in found:
            printer.print(message)
    missing.check()
    if printer.count == 0:
        what = f"key {key!r}" if key is not None else f"id {message_id}"
        raise CliError(
            ExitCode.NOT_FOUND, "MESSAGE_NOT_FOUND", f"no message with {what} in topic {topic!r}"
        )


class MessagePrinter:
    """Prints messages: by a template if there is one, else in the format asked for."""

    def __init__(self, output: OutputFormat, template: Template | None) -> None:
        """Raises CliError if there is nothing to print to, or if both a template and another format are asked for."""
        require_stdout()
        if template is not None and output is not OutputFormat.JSONL:
            raise typer.BadParameter("--format writes messages by its template: leave --output out", param_hint="--format")
        self._template = template
        self._output = output
        self._stream = _stream_of(TABLE_COLUMNS, output)
        self.count = 0

    def print(self, message: Message) -> None:
        """One more."""
        if self._template is not None:
            text = self._template.write(message)
            with stdout_named():
                sys.stdout.buffer.write(text)
        else:
            row = message_row(message)
            if self._output in (OutputFormat.TABLE, OutputFormat.WIDE):
                if self.count == 0 and any(row.get(name) for name in MOVED_COLUMNS):
                    # The first one tells for all: retries and dead letters have topics of their own.
                    *columns, body = TABLE_COLUMNS.items()
                    self._stream = _stream_of(dict([*columns, *MOVED_COLUMNS.items(), body]), self._output)
                row["origin"] = origin_text(row)
            self._stream.print(row)
        self.count += 1

    def flush(self) -> None:
        """Let the reader see it."""
        flush_stdout()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._template is None:
            self._stream.__exit__(kind, error, trace)


def _stream_of(columns: dict[str, int], output: OutputFormat) -> RowStream:
    return RowStream(columns, output, expendable=("keys", "store_time", "tag", "attempt", "last_error"))


def _times(wanted: OffsetRange | None) -> tuple[datetime | None, datetime | None]:
    """Begin and end of a range of times. Offsets make no sense here: the index of keys has none."""
    times: list[datetime | None] = []
    for place in () if wanted is None else (wanted.begin, wanted.end):
        if isinstance(place, AtTime):
            times.append(datetime.fromtimestamp(place.time_ms / 1000, UTC))
        elif place in (None, FromStart(), FromEnd()):
            times.append(None)
        else:
            raise typer.BadParameter("here it is a time: @date, @-1h, @a:b", param_hint="--offset")
    begin, end = times or (None, None)
    return begin, end
