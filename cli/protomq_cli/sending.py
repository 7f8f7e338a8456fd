"""`send`: messages that are given, read from a file, or one a line of stdin."""

from __future__ import annotations

import io
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, cast

import typer

from protomq_cli import delays
from protomq_cli.connection import name_broker, open_admin, open_producer
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    Output,
    Timeout,
    TopicArgument,
    count_option,
)
from protomq_cli.output import Discarded, OutputFormat, RowStream
from protomq_cli.permits import check_permitted
from protomq_cli.piped import chunks
from protomq_cli.units import format_size

if TYPE_CHECKING:
    from protomq import MessageQueue, SendResult
    from protomq.errors import NoRouteError, TopicNotFoundError

_SENT_COLUMNS: Final = {
    "topic": 16, "broker": 16, "queue_id": 8, "queue_offset": 12, "status": 12, "message_id": 40,
}  # fmt: skip
_HANDLE_COLUMN: Final = {"recall_handle": 64}
_BATCH_COUNT: Final = 512
_READ_SIZE_BYTES: Final = 256 << 10


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
    quiet: Annotated[bool, typer.Option("--quiet", "-Q", help="Print no rows.")] = False,
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
    from protomq import BatchResult, OutgoingMessage, SendStatus
    from protomq.errors import (
        BatchIncompleteError,
        NoRouteError,
        TopicNotFoundError,
        TransportError,
    )

    if body is not None and file is not None:
        raise typer.BadParameter("give a body or --file, not both")
    if count == 0:
        raise typer.BadParameter("send it once at least", param_hint="--count")
    user_properties = properties_of(properties)
    keys = key or []
    if "" in keys:
        raise typer.BadParameter("a key is expected, this is empty; leave --key out for none", param_hint="--key")
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
        sent_count = 0
        doubtful: Counter[SendStatus] = Counter()

        def show(results: Sequence[SendResult]) -> None:
            nonlocal sent_count
            rows = list(map(_sent_row, results))
            doubtful.update(result.status for result in results if result.status is not SendStatus.SEND_OK)
            sent_count += len(rows)
            try:
                for row in rows:
                    stream.print(row)
                stream.flush()
            except CliError as error:
                # Who takes it for the broker's error sends once more.
                error.message += f"; {sent_count:,} message{'s were' if sent_count > 1 else ' was'} sent"
                raise

        try:
            for batch in _batches(body, file, key_separator, count):
                messages = [message(*content) for content in batch]
                try:
                    show(producer.send_batch(topic, messages))
                except BatchIncompleteError as error:
                    # Whoever sends the others again has to know these.
                    show(BatchResult(error.stored))
                    raise
                except (NoRouteError, TopicNotFoundError) as error:
                    raise why_no_route(namesrv, timeout, topic, error) from error
                except TransportError as error:
                    name_broker(error, broker)
                    raise
        finally:
            for status, stored_count in doubtful.items() if quiet else ():
                what, them = ("1 message is", "it") if stored_count == 1 else (f"{stored_count:,} messages are", "them")
                sys.stderr.write(f"protomq: {what} stored with {status}: a power cut or a fail-over may take {them} back\n")


Content = tuple[str | None, bytes]
"""Key or None, body."""


def _batches(
    body: str | None, file: Path | None, key_separator: str | None, count: int
) -> Iterator[list[Content]]:
    """The messages to send, as many at a time as go together."""
    if key_separator is not None and (body is not None or file is not None):
        raise typer.BadParameter("it divides the lines of stdin; a body or a file is sent as it is", param_hint="--key-separator")
    if key_separator == "":
        raise typer.BadParameter("it is empty; leave it out to send lines as they are", param_hint="--key-separator")
    if body is None and file is None:
        yield from _stdin_batches(key_separator)
        return
    if body is not None:
        content = octets_of(body)
    elif str(file) == "-":
        content = _read_body(sys.stdin.buffer, "stdin")
    else:
        assert file is not None
        with file.open("rb") as opened:
            content = _read_body(opened, str(file))
    for start in range(0, count, _BATCH_COUNT):
        yield [(None, content)] * min(_BATCH_COUNT, count - start)


def octets_of(argument: str) -> bytes:
    """What was written on the command line, octet by octet."""
    return argument.encode("utf-8", "surrogateescape")


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
    for chunk in chunks(stdin, _READ_SIZE_BYTES):
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
    key, found, body = line.partition(octets_of(key_separator))
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
        check_permitted(namesrv, timeout_s, topic, "written")
        raise NoRouteError(f"topic {topic!r} has no queue that can be written")
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


def why_no_route(
    namesrv: str | None, timeout_s: float, topic: str, error: NoRouteError | TopicNotFoundError
) -> Exception:
    """The error itself, or the better one if a broker that had the topic is missing."""
    from protomq.errors import NoRouteError, ProtomqError

    if isinstance(error, NoRouteError) and not error.metadata.get("missing_brokers"):
        return error  # No name server answers, or the topic has no queue.
    try:
        with open_admin(namesrv, timeout_s) as admin:
            return next((gone.error for gone in admin.missing_brokers(topic)), error)
    except (ProtomqError, CliError):
        return error


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
