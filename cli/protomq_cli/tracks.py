"""`message track`: where a message was sent, delayed, retried, committed or dead-lettered, and who has consumed it."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli.connection import open_admin, warnings_shown
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.message_text import origin_field, origin_text, time_text
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Admin, MessagePlace, MessageTrack

_COLUMNS = ("kind", "topic", "broker", "queue", "offset", "store_time", "attempt", "groups", "origin", "last_error")
_TRACE_COLUMNS = ("kind", "time", "duration_ms", "topic", "broker", "queue", "offset", "group", "client", "error")
_EXPENDABLE = ("last_error", "origin", "attempt", "broker")
_MESSAGES_MAX = 10
"""With one key."""


def track(
    message_id: Annotated[
        str, typer.Argument(metavar="[ID]", show_default=False, help="The message id.")
    ] = "",
    key: Annotated[
        str, typer.Option("--key", "-k", metavar="KEY", show_default=False, help="Or the newest messages with this key.")
    ] = "",
    topic: Annotated[
        str, typer.Option("--topic", "-t", metavar="TOPIC", show_default=False, help="The topic of that key.")
    ] = "",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Show where a message went, and which groups have consumed it.

    \b
      protomq message track 0000000000000007000000010000000000000000
      protomq message track --key order-17 --topic orders

    A message keeps its id wherever it is moved. One that waits for its delay
    is in no queue yet, and is shown with the time when it comes there.
    """
    if bool(message_id) == bool(key):
        raise typer.BadParameter("give a message id, or --key and --topic")
    if key and not topic:
        raise typer.BadParameter("--key needs the topic of its messages", param_hint="--topic")
    missing = Missing()
    rows: list[dict[str, Any]] = []
    damaged_count = unsearched_count = 0
    with open_admin(namesrv, timeout) as admin:
        ids = [message_id] if message_id else _ids_of(admin, missing, topic, key)
        for each in ids:
            found: MessageTrack = missing.take(partial(admin.track_message, each))
            rows += [{"message_id": found.message_id} | _row(place) for place in found.places]
            damaged_count += found.damaged_count
            unsearched_count = max(unsearched_count, found.unsearched_count)
    columns = _COLUMNS if len(ids) == 1 else ("message_id", *_COLUMNS)
    if output in (OutputFormat.TABLE, OutputFormat.WIDE):
        for row in rows:
            row["origin"] = origin_text(row)
    print_rows(rows, columns, output, expendable=_EXPENDABLE)
    if unsearched_count:
        sys.stderr.write(
            f"{unsearched_count:,} messages wait for a delay or a retry and were not searched: the message may be one of them\n"
        )
    missing.check()
    if damaged_count:
        raise CliError(
            ExitCode.FAILURE,
            "CORRUPT_LOG",
            f"{damaged_count} more places stand in damaged parts of the log; `protomq cluster status` shows them",
        )
    if not rows:
        what = f"key {key!r} in topic {topic!r}" if key else f"id {message_id}"
        raise CliError(ExitCode.NOT_FOUND, "MESSAGE_NOT_FOUND", f"no broker has a message with {what}")


def trace(
    message_id: Annotated[str, typer.Argument(metavar="ID", show_default=False, help="The message id.")],
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Show what clients with trace=True did with a message.

    Times are those of the clients' clocks. A trace comes a second or so after
    what it tells.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin, warnings_shown("protomq.trace"):
        events = missing.take(lambda: admin.trace_of(message_id))
    rows = [
        {
            "kind": event.kind,
            "time": time_text(round(event.time.timestamp() * 1000)),
            "duration_ms": round(event.duration_s * 1000, 3),
            "topic": event.queue.topic,
            "broker": event.queue.broker_name,
            "queue": event.queue.queue_id,
            "offset": event.queue_offset,
            "group": event.group,
            "client": event.client,
            "attempt": event.attempt,
            "error": event.error,
        }
        for event in events
    ]
    print_rows(rows, _TRACE_COLUMNS, output, expendable=("client", "error", "broker"))
    missing.check()
    if not rows:
        raise CliError(
            ExitCode.NOT_FOUND,
            "MESSAGE_NOT_FOUND",
            f"no client told anything about message {message_id}: do its producers and consumers have trace=True?",
        )


def _ids_of(admin: Admin, missing: Missing, topic: str, key: str) -> list[str]:
    found = missing.take(lambda: admin.query_by_key(topic, key, count_max=_MESSAGES_MAX))
    return list(dict.fromkeys(message.message_id for message in found))


def _row(place: MessagePlace) -> dict[str, Any]:
    kind = str(place.kind)
    if place.check_count:
        kind += f", checked {place.check_count} times"
    if place.due_time is not None:
        kind += f" until {time_text(round(place.due_time.timestamp() * 1000))}"
    return {
        "kind": kind,
        "topic": place.queue.topic,
        "broker": place.queue.broker_name,
        "queue": place.queue.queue_id,
        "offset": place.queue_offset,
        "store_time": time_text(round(place.store_time.timestamp() * 1000)),
        "attempt": place.attempt,
        "groups": ", ".join(f"{group} {state}" for group, state in place.groups.items()),
        "group": place.group,
        "last_error": place.last_error,
        **(origin_field(place.origin_topic, place.origin_queue_id, place.origin_offset) if place.origin_topic else {}),
    }
