"""`send`, `pull`, `consume` and `message query`: messages in and out."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Self, cast

import typer

from protomq_cli import delays
from protomq_cli.connection import name_broker, open_admin, open_producer
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.message_text import (
    TABLE_COLUMNS,
    TEMPLATE_HELP,
    Template,
    message_row,
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
from protomq_cli.output import Discarded, OutputFormat, RowStream
from protomq_cli.partial import Missing
from protomq_cli.units import format_size

if TYPE_CHECKING:
    from protomq import Message, MessageQueue, SendResult
    from protomq.errors import NoRouteError, TopicNotFoundError

_SENT_COLUMNS: Final = {
    "topic": 16, "broker": 16, "queue_id": 8, "queue_offset": 12, "status": 12, "message_id": 40,
}  # fmt: skip
_HANDLE_COLUMN: Final = {"recall_handle": 64}
_BATCH_COUNT: Final = 512
_READ_SIZE_BYTES: Final = 256 << 10
_PULLED_DEFAULT: Final = 32
"""RocketMQ's maxNums."""


class CompressionName(StrEnum):
    """How bodies over 4 KiB travel and are stored."""

    ZLIB = "zlib"
    ZSTD = "zstd"
    LZ4 = "lz4"
    NONE = "none"


Keys = Annotated[
    list[str] | None,
    typer.Option("--key", "-k", metavar="KEY", help="Key to find it by; can be repeated."),
]
Properties = Annotated[
    list[str] | None,
    typer.Option("--property", "-p", metavar="NAME=VALUE", help="User property; can be repeated."),
]
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
Format = Annotated[
    Template | None,
    typer.Option(
        "--format", "-f", parser=option_parser(Template), metavar="TEMPLATE", show_default=False,
        help=f"Write messages by a template instead: {TEMPLATE_HELP}.",
    ),
]  # fmt: skip


def send(
    topic: TopicArgument,
    body: Annotated[
        str | None, typer.Argument(metavar="[BODY]", show_default="each line of stdin", help="Body.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-F", metavar="FILE", show_default=False, help="One body from a file; '-': stdin whole."),
    ] = None,
    key: Keys = None,
    tag: Annotated[str, typer.Option("--tag", "-g", metavar="TAG", show_default="none", help="Tag.")] = "",
    properties: Properties = None,
    sharding_key: Annotated[
        str | None,
        typer.Option("--sharding-key", "-s", metavar="KEY", show_default="none", help="One queue for all messages of this key."),
    ] = None,
    queue: Annotated[
        int | None, typer.Option("--queue", "-q", metavar="N", min=0, show_default="in turn", help="Queue.")
    ] = None,
    broker: Annotated[
        str | None, typer.Option("--broker", "-b", metavar="NAME", show_default="any", help="To this broker only.")
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option("--key-separator", "-K", metavar="TEXT", show_default=False,
                     help="Lines of stdin are KEY, this text, BODY."),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-c", parser=count_option, metavar="N", help="Send it N times.")
    ] = 1,
    delay: delays.DelayOption = None,
    deliver_at: delays.DeliverAtOption = None,
    delay_level: delays.DelayLevelOption = None,
    compression: Annotated[
        CompressionName,
        typer.Option(
            "--compression", "-z", help="Codec of bodies over 4 KiB. Every consumer reads zlib; for zstd and lz4 it needs the codec."
        ),
    ] = CompressionName.ZLIB,
    quiet: Annotated[bool, typer.Option("--quiet", "-Q", help="Print nothing.")] = False,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Send messages.

    One given here, one from a file, or each line of stdin.

    \b
      protomq send flights hello
      protomq send flights '{"tail": "N14228"}' --key N14228 --tag UA
      seq 1000 | protomq send numbers
    """
    from protomq import OutgoingMessage
    from protomq.errors import NoRouteError, TopicNotFoundError, TransportError

    if body is not None and file is not None:
        raise typer.BadParameter("give a body or --file, not both")
    if count == 0:
        raise typer.BadParameter("send it once at least", param_hint="--count")
    user_properties = properties_of(properties)
    keys = key or []
    delivery = delays.delivery(delay, deliver_at, delay_level)

    def message(line_key: str | None, content: bytes) -> OutgoingMessage:
        all_keys = [line_key, *keys] if line_key else keys
        return OutgoingMessage(
            topic, content, all_keys[0] if all_keys else None, tuple(all_keys[1:]), tag, user_properties,
            sharding_key, next(chosen), *delivery,
        )  # fmt: skip

    if broker is not None and queue is None and sharding_key:
        raise typer.BadParameter("a sharding key chooses among all brokers", param_hint="--broker")
    chosen: Iterator[MessageQueue | None] = itertools.repeat(None)
    if queue is not None or broker is not None:
        chosen = itertools.cycle(_choose_queues(namesrv, timeout, topic, queue, broker))
    with (
        open_producer(namesrv, send_timeout_s=timeout, compression=compression.value) as producer,
        RowStream(
            _SENT_COLUMNS | (_HANDLE_COLUMN if delivery.is_later else {}),
            output,
            Discarded() if quiet else None,
            expendable=("topic", "broker", "queue_offset", "recall_handle"),
            reports_work=True,
        ) as stream,
    ):
        if producer.compression != compression:
            raise CliError(
                ExitCode.USAGE,
                "NOT_INSTALLED",
                f'{compression} is not installed here; pip install "protomq[compression]", or leave --compression out',
            )
        for batch in _batches(body, file, key_separator, count):
            messages = [message(*content) for content in batch]
            try:
                results = producer.send_batch(topic, messages)
            except (NoRouteError, TopicNotFoundError) as error:
                raise _why_no_route(namesrv, timeout, topic, error) from error
            except TransportError as error:
                name_broker(error, broker)
                raise
            for result in results:
                stream.print(_sent_row(result))
            stream.flush()


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
    if sql is not None and printer.count == 0 and reader.count:
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
            "--count", "-c", parser=count_option, metavar="N", show_default="no end", help="End after N messages."
        ),
    ] = 0,
    exit_at_end: Annotated[
        bool, typer.Option("--exit", "-e", help="End at the end of the queues as it is now.")
    ] = False,
    tag: Tags = None,
    sql: Sql = None,
    template: Format = None,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.JSONL,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Print messages as they arrive, until Ctrl-C.

    With --group it goes on where the group has committed, else at the
    start, and commits what was printed; --offset seeks first. Without a
    group it starts at the end (--offset start: at the start), and nothing
    is committed.
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
        self._template = template
        self._stream = RowStream(
            TABLE_COLUMNS, output, expendable=("keys", "store_time", "tag")
        )
        self.count = 0

    def print(self, message: Message) -> None:
        """One more."""
        if self._template is not None:
            sys.stdout.buffer.write(self._template.write(message))
        else:
            self._stream.print(message_row(message))
        self.count += 1

    def flush(self) -> None:
        """Let the reader see it."""
        sys.stdout.flush()

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


Content = tuple[str | None, bytes]
"""Key or None, body."""


def _batches(
    body: str | None, file: Path | None, key_separator: str | None, count: int
) -> Iterator[list[Content]]:
    """The messages to send, as many at a time as go together."""
    if body is None and file is None:
        yield from _stdin_batches(key_separator)
        return
    if body is not None:
        content = body.encode("utf-8", "surrogateescape")
    elif str(file) == "-":
        content = _read_body(sys.stdin.buffer, "stdin")
    else:
        assert file is not None
        with file.open("rb") as opened:
            content = _read_body(opened, str(file))
    for start in range(0, count, _BATCH_COUNT):
        yield [(None, content)] * min(_BATCH_COUNT, count - start)


def _read_body(source: BinaryIO, name: str) -> bytes:
    """All that is there, unless it is more than any message may have: then nobody has to hold it in memory."""
    from protomq.records import DECOMPRESSED_SIZE_MAX_BYTES as SIZE_MAX_BYTES

    content = source.read(SIZE_MAX_BYTES + 1)
    _check_body_size(len(content), name)
    return content


def _check_body_size(size_bytes: int, name: str) -> None:
    from protomq.records import DECOMPRESSED_SIZE_MAX_BYTES as SIZE_MAX_BYTES

    if size_bytes > SIZE_MAX_BYTES:
        raise CliError(
            ExitCode.USAGE,
            "MESSAGE_TOO_LARGE",
            f"{name} has more than {format_size(SIZE_MAX_BYTES)}, the most that a message may have before it is compressed",
        )


def _stdin_batches(key_separator: str | None) -> Iterator[list[Content]]:
    """A message a line. What has come so far goes at once: whoever writes slowly into a pipe waits for nothing."""
    if sys.stdin.isatty():
        sys.stderr.write("one message a line, Ctrl-D ends\n")
    stdin = cast(io.BufferedReader, sys.stdin.buffer)
    numbers = itertools.count(1)
    rest = b""
    while chunk := stdin.read1(_READ_SIZE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for start in range(0, len(lines), _BATCH_COUNT):
            batch: list[Content] = []
            for line in lines[start : start + _BATCH_COUNT]:
                try:
                    batch.append(_content_of(line, next(numbers), key_separator))
                except CliError:
                    if batch:
                        yield batch
                    raise
            yield batch
        _check_body_size(len(rest), "a line of stdin")
    if rest:
        yield [_content_of(rest, next(numbers), key_separator)]
    if next(numbers) == 1:
        raise CliError(
            ExitCode.USAGE,
            "NOTHING_TO_SEND",
            "nothing was sent: stdin is empty; give a BODY, --file FILE, or a message a line on stdin ('' sends an empty body)",
        )


def _content_of(line: bytes, number: int, key_separator: str | None) -> Content:
    if key_separator is None:
        return None, line
    key, found, body = line.partition(key_separator.encode())
    if not found:
        raise CliError(
            ExitCode.USAGE,
            "NO_KEY",
            f"no {key_separator!r} in line {number}, {line[:80].decode('utf-8', 'replace')!r}; "
            "what stands before it was sent, the rest was not",
        )
    return key.decode("utf-8", "replace"), body


def properties_of(texts: list[str] | None) -> dict[str, str]:
    """The properties of `--property NAME=VALUE`."""
    found: dict[str, str] = {}
    for name, value in map(_parse_property, texts or ()):
        if name in found:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--property")
        found[name] = value
    return found


def _parse_property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--property")
    return name, value


def _choose_queues(
    namesrv: str | None, timeout_s: float, topic: str, queue_id: int | None, broker: str | None
) -> list[MessageQueue]:
    """The queue of that number, or without one all queues of the broker."""
    from protomq.errors import NoRouteError
    from protomq_cli.reading import unknown_broker

    with open_producer(namesrv, send_timeout_s=timeout_s) as producer:
        known = producer.queues(topic)
    if not known:
        nowhere = NoRouteError(f"topic {topic!r} has no queue that can be written")
        raise _why_no_route(namesrv, timeout_s, topic, nowhere)
    if broker is not None and broker not in {queue.broker_name for queue in known}:
        with open_admin(namesrv, timeout_s) as admin:
            for gone in admin.missing_brokers(topic):
                if gone.broker.broker_name == broker:
                    raise gone.error
        raise unknown_broker(broker, topic, known)
    queues = [
        queue
        for queue in known
        if queue_id in (None, queue.queue_id) and broker in (None, queue.broker_name)
    ]
    if not queues:
        where = f" on broker {broker!r}" if broker else ""
        raise CliError(
            ExitCode.NOT_FOUND,
            "QUEUE_NOT_FOUND",
            f"topic {topic!r} has no queue {queue_id}{where}; `protomq topic describe {topic}` shows its queues",
        )
    if queue_id is not None and len(queues) > 1:
        names = ", ".join(queue.broker_name for queue in queues)
        raise CliError(
            ExitCode.USAGE,
            "AMBIGUOUS_QUEUE",
            f"several brokers have a queue {queue_id}; add --broker: {names}",
        )
    return queues


def _why_no_route(
    namesrv: str | None, timeout_s: float, topic: str, error: NoRouteError | TopicNotFoundError
) -> Exception:
    """The error itself, or the better one if a broker that had the topic is missing, or nobody may write to it."""
    from protomq.errors import ProtomqError

    try:
        with open_admin(namesrv, timeout_s) as admin:
            if error.reason == "TOPIC_NOT_FOUND":
                return next((gone.error for gone in admin.missing_brokers(topic)), error)
            configs = admin.describe_topic(topic).configs
    except (ProtomqError, CliError):
        return error
    if any(config.permission.writable for config in configs.values()):
        return error
    return CliError(
        ExitCode.NOT_PERMITTED,
        "NOT_PERMITTED",
        f"topic {topic!r} may not be written; `protomq topic create {topic} --update --permission read-write` allows it",
    )


def _sent_row(result: SendResult) -> dict[str, Any]:
    row = {
        "topic": result.queue.topic,
        "broker": result.queue.broker_name,
        "queue_id": result.queue.queue_id,
        "queue_offset": result.queue_offset,
        "status": result.status.name,
        "message_id": result.message_id,
    }
    return row | {"recall_handle": result.recall_handle} if result.recall_handle else row


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
