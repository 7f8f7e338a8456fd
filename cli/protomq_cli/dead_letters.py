"""`dlq list|show|replay`: messages that groups could not process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli.connection import open_admin, open_consumer
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.groups import GroupArgument
from protomq_cli.message_text import body_fields, time_text
from protomq_cli.offsets import AtTime, OffsetRange, Place
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    OnBroker,
    Output,
    Timeout,
    times_option,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import DamagedLetters, Message, MessageQueue, PullConsumer, ReplayProgress

_LIST_COLUMNS = ("group", "messages", "replayed", "last_time")
_SHOW_COLUMNS = (
    "offset", "message_id", "origin_topic", "origin_queue_id", "origin_offset", "deliveries", "died", "error", "broker", "key", "body",
)  # fmt: skip
_SHOW_EXPENDABLE = ("body", "key", "broker", "origin_offset", "origin_queue_id", "died", "error")
_REPLAY_COLUMNS = ("group", "replayed", "known", "without_topic", "unreadable", "lost")


def list_groups(
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the groups that have dead letters."""
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        found = missing.take(admin.list_dead_letters)
    rows = [
        {
            "group": one.group,
            "messages": one.message_count,
            "replayed": one.replayed_count,
            "last_time": _time_text(one.last_time),
        }
        for one in found
    ]
    print_rows(rows, _LIST_COLUMNS, output)
    missing.check()


@contextmanager
def _dead_letters_of(group: str) -> Iterator[None]:
    """Nobody is told to create the topic of dead letters: a group that has none has none."""
    from protomq.errors import TopicNotFoundError

    try:
        yield
    except TopicNotFoundError as error:
        raise CliError(
            ExitCode.NOT_FOUND,
            error.reason,
            f"group {group!r} has no dead letters at any broker. None of its messages has died, or there is no such group; "
            "`protomq dlq list` shows the groups that have some, `protomq group list` all",
        ) from error


def show(
    group: GroupArgument,
    count: Annotated[
        int, typer.Option("--count", "-c", metavar="N", min=1, help="The newest N of each broker.")
    ] = 20,
    message_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", show_default=False, help="The one with this message id.")
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Show dead letters: where they come from, how often they were delivered, and why they failed."""
    from protomq.wire.topics import dead_letter_topic

    topic = dead_letter_topic(group)
    missing = Missing()
    messages: list[Message] = []
    damaged: list[DamagedLetters] = []
    if message_id is not None:
        with open_admin(namesrv, timeout) as admin:
            found = missing.take(lambda: admin.query_by_id(topic, message_id))
        if found is None:
            missing.check()  # Who does not answer may have it.
            raise CliError(
                ExitCode.NOT_FOUND,
                "MESSAGE_NOT_FOUND",
                f"group {group!r} has no dead letter {message_id}; `protomq dlq list` shows the groups that have some",
            )
        messages.append(found)
    else:
        with open_admin(namesrv, timeout) as admin:
            missing.note(admin.missing_brokers(topic))
        with _dead_letters_of(group), open_consumer(namesrv, auto_commit=False, request_timeout_s=timeout) as consumer:
            for queue in missing.queues(consumer, topic):
                missing.ask(queue.broker_name, partial(_read_newest, consumer, queue, count, timeout, messages, damaged))
        if not messages and not damaged:
            missing.raise_first()
    messages.sort(key=lambda message: message.store_time_ms)
    rows = [*map(_row, messages), *(row for each in damaged for row in _damaged_rows(each))]
    print_rows(rows, _SHOW_COLUMNS, output, expendable=_SHOW_EXPENDABLE)
    _say_lost(damaged)
    missing.check()
    if unreadable := [each for each in damaged if not each.is_lost]:
        raise CliError(
            ExitCode.FAILURE,
            "CORRUPT_LOG",
            f"damaged, and not shown: {_places(unreadable)}; `protomq log verify DIR` on the broker's host shows the damage",
        )


def _read_newest(
    consumer: PullConsumer,
    queue: MessageQueue,
    count: int,
    timeout_s: float,
    messages: list[Message],
    damaged: list[DamagedLetters],
) -> None:
    """Adds the newest ones of a queue. Raises TransportError if its broker does not give all of them."""
    from protomq import DamagedLetters
    from protomq.errors import CorruptLogError, RequestTimeoutError

    min_offset, end_offset = consumer.queue_range(queue)
    left = min(end_offset - min_offset, count)
    consumer.assign([queue])
    consumer.seek(queue, end_offset - left)
    while left > 0 and (at := consumer.position(queue)) < end_offset:
        try:
            part = consumer.poll(timeout_s, left)
        except CorruptLogError as error:
            first, following = (int(error.metadata.get(name, -1)) for name in ("queue_offset", "next_offset"))
            if not at <= first < following:
                raise
            if first > at:
                consumer.seek(queue, at)  # What stands before the damage comes first.
                continue
            is_lost = error.metadata.get("is_lost") == "true"
            damaged.append(DamagedLetters(queue.broker_name, first, min(following, end_offset), is_lost))
            consumer.seek(queue, following)
            left = end_offset - following
            continue
        messages += part
        left -= len(part)
        if not part and consumer.position(queue) < end_offset:
            consumer.queue_range(queue)  # A poll waits for a broker that is away, and does not say so.
            raise RequestTimeoutError(f"queue {queue.queue_id} of {queue.topic} gave nothing within {timeout_s:g} s")


def replay(
    group: GroupArgument,
    message_ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", show_default=False, help="Only the one with this message id; can be repeated."),
    ] = None,
    since: Annotated[
        OffsetRange | None,
        typer.Option(
            "--time", metavar="@TIME[:@TIME]", parser=times_option, show_default=False,
            help="Only those that died then: @-1h, @-2h:-1h, @2026-11-21.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that were not replayed yet.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Those that were replayed before, too.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Send dead letters to their original topics again.

    Their attempts begin again, their ids stay. Each is replayed once, however
    often this is said and wherever it was interrupted; --again does it again.
    All groups of the original topic get them.
    """
    said = bool(message_ids) + (since is not None) + everything
    if said != 1:
        raise typer.BadParameter(("say which" if not said else "give one of these only") + ": --all, --id ID or --time @TIME")
    begin, end = _times(since)
    missing = Missing()
    with _dead_letters_of(group), open_admin(namesrv, timeout) as admin:
        done = missing.take(
            lambda: admin.replay_dead_letters(
                group,
                message_ids=message_ids or (),
                begin=begin,
                end=end,
                again=again,
                brokers=None if broker is None else [broker],
                on_progress=_say_progress if sys.stderr.isatty() else None,
            )
        )
    row = {
        "group": group,
        "replayed": done.replayed,
        "known": done.known,
        "without_topic": done.without_topic,
        "unreadable": done.unreadable,
        "lost": done.lost,
    }
    print_rows([row], _REPLAY_COLUMNS, output)
    _say_lost(done.damaged)
    missing.check_change()
    check_replayed(done)


def check_replayed(done: ReplayProgress) -> None:
    """Raises CliError if something that was wanted is not replayed, and may be later."""
    if done.unreadable:
        places = _places([each for each in done.damaged if not each.is_lost])
        raise CliError(
            ExitCode.FAILURE,
            "CORRUPT_LOG",
            f"{done.unreadable} dead letters are left out, they are damaged: {places}; `protomq log verify DIR` on the broker's host shows "
            "the damage. When a replica has healed it, replay again",
        )
    if done.without_topic:
        raise CliError(
            ExitCode.REFUSED,
            "WITHOUT_TOPIC",
            f"{done.without_topic} dead letters stay where they are: their topic is gone, or takes no sends; `protomq dlq show "
            f"{done.group}` names it as origin_topic. `protomq topic create TOPIC` makes it, with --update --permission "
            "read-write it takes sends; then replay again",
        )
    if done.unknown_ids:
        raise CliError(
            ExitCode.NOT_FOUND, "MESSAGE_NOT_FOUND", f"group {done.group!r} has no dead letter {', '.join(done.unknown_ids)}"
        )


def _say_lost(damaged: Iterable[DamagedLetters]) -> None:
    """No failure: they never come back, and nobody can do anything about it."""
    lost = [each for each in damaged if each.is_lost]
    if lost:
        count = sum(each.end_offset - each.begin_offset for each in lost)
        sys.stderr.write(f"protomq: {count} dead letters are lost, `protomq log repair` has taken them out: {_places(lost)}\n")


def _places(damaged: Iterable[DamagedLetters]) -> str:
    """Which they are: by broker, in runs of offsets."""
    by_broker: dict[str, list[str]] = {}
    for each in damaged:
        last = each.end_offset - 1
        run = str(last) if last == each.begin_offset else f"{each.begin_offset} to {last}"
        by_broker.setdefault(each.broker_name, []).append(run)
    return "; ".join(f"offsets {', '.join(runs)} of broker {name}" for name, runs in by_broker.items())


def _times(wanted: OffsetRange | None) -> tuple[datetime | None, datetime | None]:
    if wanted is None:
        return None, None
    return _time_of(wanted.begin), None if wanted.end is None else _time_of(wanted.end)


def _time_of(place: Place) -> datetime:
    if not isinstance(place, AtTime):
        raise typer.BadParameter("a time is wanted: @-1h, @2026-11-21", param_hint="--time")
    return datetime.fromtimestamp(place.time_ms / 1000, UTC)


def _say_progress(progress: ReplayProgress) -> None:
    sys.stderr.write(f"\r{progress.looked_at} of {progress.total} dead letters looked at, {progress.replayed} replayed")
    if progress.looked_at >= progress.total:
        sys.stderr.write("\n")
    sys.stderr.flush()


def _row(message: Message) -> dict[str, Any]:
    origin = message.origin
    return {
        "offset": message.queue_offset,
        "message_id": message.message_id,
        "origin_topic": "" if origin is None else origin.topic,
        "origin_queue_id": None if origin is None else origin.queue_id,
        "origin_offset": None if origin is None else origin.queue_offset,
        "deliveries": message.attempt,
        "died": time_text(message.store_time_ms),
        "error": message.last_error,
        "broker": message.queue.broker_name,
        "key": message.key,
        **body_fields(message.body),
        "is_damaged": False,
    }


def _damaged_rows(damaged: DamagedLetters) -> Iterator[dict[str, Any]]:
    for offset in range(damaged.begin_offset, damaged.end_offset):
        yield {
            **dict.fromkeys(_SHOW_COLUMNS),
            "offset": offset,
            "broker": damaged.broker_name,
            "body": "(lost)" if damaged.is_lost else "(damaged)",
            "is_damaged": True,
        }


def _time_text(time: datetime | None) -> str:
    return "" if time is None else time.strftime("%Y-%m-%dT%H:%M:%SZ")
