"""`group list|offsets|commit|delete`: which consumer groups there are, where they stand, setting that, and forgetting it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protomq_cli import completion
from protomq_cli.asking import ask_to_delete
from protomq_cli.connection import open_admin, open_consumer
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.offsets import OffsetRange
from protomq_cli.options import (
    DEFAULT_TIMEOUT_S,
    Namesrv,
    OnBroker,
    OnQueues,
    Output,
    Timeout,
    TopicArgument,
    offsets_option,
    option_parser,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing
from protomq_cli.places import refuse_ahead, resolve_in_queue

if TYPE_CHECKING:
    from protomq import Admin, GroupLag, MessageQueue, PullConsumer

_COLUMNS = (
    "group", "topic", "broker", "queue_id", "min_offset", "committed_offset", "end_offset", "lag",
)  # fmt: skip
_EXPENDABLE = ("min_offset", "group", "topic", "end_offset", "committed_offset")



def parse_group(text: str) -> str:
    """The name of a group. Raises ValueError for what cannot be one."""
    from protomq.wire.topics import group_of, why_no_group

    if not text:
        raise ValueError("a group has a name, this is ''")
    if group := group_of(text):
        raise ValueError(f"{text} is a topic of a group: name the group, {group}")
    if reason := why_no_group(text):
        raise ValueError(reason)
    return text


GroupArgument = Annotated[
    str,
    typer.Argument(
        metavar="GROUP", parser=option_parser(parse_group), show_default=False, help="Consumer group."
    ),
]


def list_groups(
    topic: Annotated[
        str | None,
        typer.Option(
            "--topic", "-t", metavar="TOPIC", autocompletion=completion.complete_topics, show_default="all",
            help="Only groups that have committed or popped in this topic.",
        ),
    ] = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """List consumer groups with their lag in each topic.

    Those that have committed offsets or popped: no others are known. A queue
    in which a group has done neither lags by all that is stored. Of a group
    that pops, LAG counts messages that were never handed out, and those that
    are not acknowledged.
    """
    rows = []
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        for group in missing.take(lambda: admin.list_groups(topic or "")):
            for name in (topic,) if topic else group.topics:
                lags = _lags(admin, group.name, name, missing)
                if lags:
                    rows.append({"group": group.name, "topic": name, "lag": sum(one.lag for one in lags)})
    print_rows(rows, ("group", "topic", "lag"), output)
    missing.check()


def _lags(admin: Admin, group: str, topic: str, missing: Missing) -> list[GroupLag]:
    """By queue. Nothing if none of the brokers that answer has the topic: it was deleted, or only a silent one has it."""
    from protomq.errors import TopicNotFoundError

    try:
        return missing.take(partial(admin.group_lag, group, topic, brokers=missing.answering(admin)))
    except TopicNotFoundError:
        return []


def offsets(
    group: GroupArgument,
    topic: TopicArgument,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show offsets and lag of a group in a topic.

    A queue in which the group has not committed or popped lags by all that is
    stored. Of a group that pops, LAG counts messages that were never handed
    out, and those that are not acknowledged; COMMITTED-OFFSET does not count.
    Queues that the topic has no more are there if something is left in them.
    """
    missing = _missing(namesrv, timeout, topic)
    with (
        open_consumer(namesrv, group, auto_commit=False, request_timeout_s=timeout) as consumer,
        open_admin(namesrv, timeout) as admin,
    ):
        rows = _offset_rows(admin, consumer, topic, missing.queues(consumer, topic), missing, shows_gone=True)
        is_known = any(row["committed_offset"] is not None for row in rows) or any(
            one.name == group for one in missing.take(lambda: admin.list_groups(topic))
        )
    if not rows:
        missing.raise_first()
    if not is_known:
        missing.check()  # Who does not answer may know the group.
        raise CliError(
            ExitCode.NOT_FOUND,
            "GROUP_NOT_FOUND",
            f"group {group!r} has committed and popped nothing in topic {topic!r}; `protomq group list` shows the groups",
        )
    print_rows(rows, _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check()


def commit(
    group: GroupArgument,
    topic: TopicArgument,
    offset: Annotated[
        OffsetRange,
        typer.Option(
            "--offset", "-O", parser=offsets_option, metavar="OFFSET", show_default=False,
            help="Where to continue: start, end, 47, +2, -3, @ms, @date, @-1h.",
        ),
    ],
    queue: OnQueues = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:  # fmt: skip
    """Set where a group goes on.

    Consumers of the group that are running go on there, too, as with
    `protomq group reset`, which takes no +2 and -3. A group that has committed
    nothing yet comes into being, which is said.
    """
    if offset.end is not None:
        raise typer.BadParameter("one place is wanted, not a range", param_hint="--offset")
    refuse_ahead(offset.begin, "--offset")
    with open_admin(namesrv, timeout) as admin:
        silent = Missing()
        groups = silent.take(admin.list_groups)
    missing = _missing(namesrv, timeout, topic)
    missing.expect(silent)
    with open_consumer(namesrv, group, auto_commit=False, request_timeout_s=timeout) as consumer:
        known = missing.queues(consumer, topic)
        unknown = sorted(set(queue or ()) - {found.queue_id for found in known})
        if unknown or not known:
            missing.raise_first()
            raise CliError(
                ExitCode.NOT_FOUND,
                "QUEUE_NOT_FOUND",
                f"topic {topic!r} has no queue {', '.join(map(str, unknown))}, nothing was changed; "
                f"`protomq topic describe {topic}` shows them",
            )
        places = {}
        for found in known:
            if not queue or found.queue_id in queue:
                place = missing.ask(found.broker_name, partial(_place_in, consumer, found, offset))
                if place is not None:
                    places[found] = place
        with open_admin(namesrv, timeout) as admin:
            # As a reset: a commit is refused where a member has the lock, and members that run would commit over it.
            done = [
                found
                for found, queue_offset in places.items()
                if missing.ask(found.broker_name, partial(_reset, admin, group, found, queue_offset)) is not None
            ]
            if not done:
                missing.raise_first()
            rows = _offset_rows(admin, consumer, topic, done, missing)
    if group not in {one.name for one in groups} and not silent.reasons():
        sys.stderr.write(
            f"protomq: group {group!r} is new; `protomq group list` shows all there are\n"
        )
    print_rows(rows, _COLUMNS, output, expendable=_EXPENDABLE)
    missing.check_change()


def _place_in(consumer: PullConsumer, queue: MessageQueue, offset: OffsetRange) -> int:
    """Raises OffsetOutOfRangeError for one beyond the end, where a reset would take the end."""
    from protomq.errors import OffsetOutOfRangeError

    queue_range = consumer.queue_range(queue)
    place, _ = resolve_in_queue(consumer, queue, offset, queue_range)
    min_offset, end_offset = queue_range
    if place > end_offset:
        raise OffsetOutOfRangeError(
            f"queue {queue.queue_id} of {queue.topic!r} at {queue.broker_name} has no offset {place}, and nothing was changed. "
            f"It begins at {min_offset} and ends at {end_offset}: commit an offset from 0 to {end_offset}"
        )
    return place


def _reset(admin: Admin, group: str, queue: MessageQueue, queue_offset: int) -> list[str]:
    """The broker, if it did."""
    return admin.reset_offsets(group, queue.topic, queue_offset, queue_ids=(queue.queue_id,), brokers=(queue.broker_name,))


def _missing(namesrv: str | None, timeout_s: float, topic: str) -> Missing:
    """With the brokers that had the topic and are gone."""
    missing = Missing()
    with open_admin(namesrv, timeout_s) as admin:
        missing.note(admin.missing_brokers(topic))
    return missing


def delete(
    group: GroupArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it although it has members or had pulls within the last minute.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Forget all offsets that a group has committed.

    If the group comes back, it is a new group. Refused while its members pull,
    and for a minute after that: stop them first. Asks first; where nobody can
    answer (no terminal) it wants --yes.
    """
    missing = Missing()
    if not yes:
        ask_to_delete(f"Delete all committed offsets of group {group}{f' on {broker}' if broker else ''}?")
    brokers = None if broker is None else [broker]
    with open_admin(namesrv, timeout) as admin:
        deleted = missing.take(lambda: admin.delete_group(group, brokers=brokers, force=force))
    rows = [{"group": group, "broker": name, "deleted": True} for name in deleted]
    print_rows(rows, ("group", "broker", "deleted"), output)
    missing.check_change()


def _offset_rows(
    admin: Admin,
    consumer: PullConsumer,
    topic: str,
    queues: Iterable[MessageQueue],
    missing: Missing,
    *,
    shows_gone: bool = False,
) -> list[dict[str, Any]]:
    """A row for each queue whose broker answers. `shows_gone`: `queues` are all, and what is left in queues that the topic has no more is
    shown, too.
    """
    lags = {one.queue: one for one in missing.take(lambda: admin.group_lag(consumer.group, topic))}
    rows = []
    for queue in queues:
        found = missing.ask(queue.broker_name, partial(consumer.queue_range, queue))
        if found is not None and queue in lags:
            rows.append(_offset_row(consumer.group, lags[queue], min_offset=found[0]))
    if shows_gone:
        last_ids: dict[str, int] = {}
        for queue in queues:
            last_ids[queue.broker_name] = max(last_ids.get(queue.broker_name, 0), queue.queue_id)
        gone = [one for one in lags.values() if one.queue.queue_id > last_ids.get(one.queue.broker_name, one.queue.queue_id)]
        rows += [_offset_row(consumer.group, one, min_offset=None) for one in gone]
    return rows


def _offset_row(group: str, found: GroupLag, min_offset: int | None) -> dict[str, Any]:
    queue, committed, end_offset = found.queue, found.committed_offset, found.end_offset
    if committed is not None and committed > end_offset:
        sys.stderr.write(
            f"protomq: {group} has committed {committed} in queue {queue.queue_id} of {queue.topic} at {queue.broker_name}, "
            f"beyond its end {end_offset}: set it with `protomq group commit`, or messages are skipped\n"
        )
    return {
        "group": group,
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue_id": queue.queue_id,
        "min_offset": min_offset,
        "committed_offset": committed,
        "end_offset": end_offset,
        "lag": found.lag,
    }
