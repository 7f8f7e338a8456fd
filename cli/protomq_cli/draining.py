"""`cluster drain`: a broker is emptied, so that it can be removed and nobody misses a message.

    close     no topic of the broker takes messages any more; producers go to the other brokers
    wait      until every group has consumed what it has there, all dead letters are replayed or read, no topic has messages that
              no group reads, no transaction is open, no message waits for its time, and its slaves have its whole log
    remove    stop it, and `protomq cluster forget BROKER`: that is the operator's

From its start on the broker may be away, as long as a name server knows it, and another member may lead. Interrupted, it is run again: what
is closed stays closed. Each topic notes the permission that it had, and `--undo` gives it that back. A topic that was closed by somebody
else stays closed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout, duration_option
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Admin, ConsumerGroup, Permission, TopicConfig

LOOK_INTERVAL_S: Final = 1.0
UNDO_LOOKS_MAX: Final = 10
"""An undo looks again while somebody changes topics between its look at them and their change."""
Closed = tuple[str, int]
"""Name and incarnation of a topic that is closed: a new one of the same name is another."""
_COLUMNS: Final = (
    "broker",
    "closed_topics",
    "messages",
    "groups_behind",
    "unread_topics",
    "open_transactions",
    "delayed_messages",
    "replica_lag_bytes",
    "silent_slaves",
    "may_be_removed",
)


@dataclass(frozen=True, slots=True)
class Rest:
    """What still keeps a broker from being removed.

    Attributes:
        behind: messages that each group has not consumed there.
        open_transactions: half messages that wait for their end.
        delayed_messages: that wait for their time, delayed ones and failed ones until their next delivery.
        replica_lag_bytes: of its log, that its slowest slave has not.
        unread: messages there, by topic, that no group has read, without replayed dead letters.
        silent_slaves: those registered that do not answer, as `name/id`. What they lack is not known.
        open_topics: those that were made since it looked.
    """

    behind: dict[str, int] = field(default_factory=dict)
    open_transactions: int = 0
    delayed_messages: int = 0
    replica_lag_bytes: int = 0
    unread: dict[str, int] = field(default_factory=dict)
    silent_slaves: tuple[str, ...] = ()
    open_topics: tuple[str, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether the broker may be removed."""
        return self == Rest()

    def __str__(self) -> str:
        parts = [f"{group}: {lag} messages" for group, lag in sorted(self.behind.items())]
        parts += [f"{topic}: {count} messages that no group has read" for topic, count in sorted(self.unread.items())]
        if self.open_transactions:
            parts.append(f"{self.open_transactions} open transactions")
        if self.delayed_messages:
            parts.append(f"{self.delayed_messages} messages wait for their time")
        if self.replica_lag_bytes:
            parts.append(f"its slave lacks {self.replica_lag_bytes} bytes")
        parts += [f"its slave {slave} does not answer" for slave in self.silent_slaves]
        parts += [f"topic {topic} was made meanwhile" for topic in self.open_topics]
        return ", ".join(parts)


BrokerArgument = Annotated[
    str, typer.Argument(metavar="BROKER", show_default=False, help="Name of the broker.")
]
Wait = Annotated[
    float | None,
    typer.Option("--wait", parser=duration_option, metavar="TIME", show_default="as long as it takes", help="Give up after this time."),
]  # fmt: skip


def drain(
    broker: BrokerArgument,
    undo: Annotated[
        bool, typer.Option("--undo", help="Open the topics again, and do not wait.")
    ] = False,
    wait: Wait = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Empty a broker, to remove it.

    Its topics take no messages any more; producers go to other brokers.
    Then it waits until all groups have consumed what is there, delayed
    messages included, and says what is left. Messages that no group reads
    count, and dead letters that nobody has replayed or read. Another broker
    that does not answer is a warning. --undo gives each topic the permission
    that it had before.
    """
    if undo and wait is not None:
        raise typer.BadParameter("--undo does not wait: leave --wait out", param_hint="--wait")
    with open_admin(namesrv, timeout) as admin, open_admin(namesrv, timeout, 0.0) as fresh:
        if undo:
            topics = reopen(admin, broker)
            print_rows(
                [{"broker": broker, "opened_topics": topics}], ("broker", "opened_topics"), output
            )
            return
        closed = 0
        known: set[Closed] = set()
        missing = Missing()
        asked = admin

        def look() -> Rest:
            nonlocal closed, asked
            # `admin` does not ask silent brokers again for a while. If this look fails, the next one asks whoever leads by then.
            admin_now, asked = asked, fresh
            # Each time: topics that are created meanwhile are open.
            closed = close(admin_now, broker, known)
            rest = rest_of(admin_now, broker, missing)
            if not rest.silent_slaves:
                asked = admin
            return rest

        def look_again(rest: Rest) -> Rest:
            # They may be back.
            rest = rest_of(fresh, broker, missing) if missing.reasons() else rest
            return replace(rest, open_topics=still_open(fresh, broker, known)) if rest.is_nothing else rest

        is_known = any(one.broker_name == broker for one in admin.cluster_info())
        rest = wait_until_drained(look, wait, lambda text: _say(broker, text), look_again=look_again, is_known=is_known)
    print_rows([_row(broker, closed, rest)], _COLUMNS, output)
    for name, why in missing.reasons().items():
        sys.stderr.write(f"protomq: {name} was not asked which groups it knows: {why}; a group that only it knows may lack messages here\n")
    if not rest.is_nothing:
        raise CliError(
            ExitCode.REFUSED,
            "NOT_DRAINED",
            f"{broker} is not empty: {rest}; run it again, or open it again with --undo",
        )
    sys.stderr.write(f"{broker} may be removed: stop it, then `protomq cluster forget {broker}`\n")


def close(admin: Admin, broker: str, known: set[Closed]) -> int:
    """No topic of the broker takes messages; how many topics it has. Each notes the permission that it had.

    `known`: gets those that are closed. Raises CliError if one of those is open again.
    """
    from protomq import Permission

    closed = {Permission.READ_WRITE: Permission.READ, Permission.WRITE: Permission.NONE}
    topics = _topics_of(admin, broker)
    opened = _open_topics(broker, topics, known)
    # What somebody has changed since the look at it is left for the next look.
    changed = [
        topic.name for topic in opened if not _permit(admin, broker, topic, closed[topic.permission], closed_from=topic.permission)
    ]
    known.update((topic.name, topic.incarnation) for topic in topics if topic.name not in changed)
    return len(topics)


def still_open(admin: Admin, broker: str, known: set[Closed]) -> tuple[str, ...]:
    """Topics of the broker that take messages since they were made. Raises CliError if one that was closed is open again."""
    return tuple(topic.name for topic in _open_topics(broker, _topics_of(admin, broker), known))


def _open_topics(broker: str, topics: list[TopicConfig], known: set[Closed]) -> list[TopicConfig]:
    from protomq import Permission

    opened = [topic for topic in topics if topic.permission in (Permission.READ_WRITE, Permission.WRITE)]
    again = [topic.name for topic in opened if (topic.name, topic.incarnation) in known]
    if again:
        raise CliError(
            ExitCode.REFUSED,
            "OPENED_AGAIN",
            f"{', '.join(again)} at {broker} was closed, and somebody has opened it meanwhile (`--undo`, or `topic create -u`). This drain"
            " leaves that as it is: run it again if the broker is to be removed",
        )
    return opened


def reopen(admin: Admin, broker: str) -> int:
    """The topics that were closed have the permission of before; how many were opened."""
    from protomq import Permission

    count = 0
    for _ in range(UNDO_LOOKS_MAX):
        closed = [topic for topic in _topics_of(admin, broker) if topic.closed_from is not Permission.UNSPECIFIED]
        opened = [_permit(admin, broker, topic, topic.closed_from, closed_from=Permission.UNSPECIFIED) for topic in closed]
        count += sum(opened)
        if all(opened):
            return count
    raise CliError(ExitCode.REFUSED, "TOPIC_EXISTS", f"somebody goes on changing topics of {broker}: {count} were opened; run it again")


def _topics_of(admin: Admin, broker: str) -> list[TopicConfig]:
    return admin.list_topics(broker)[broker]


def rest_of(admin: Admin, broker: str, missing: Missing) -> Rest:
    """What is left to do before the broker may be removed. `missing`: gets the other brokers that do not say which groups they know."""
    from protomq.errors import GroupNotFoundError, TopicNotFoundError

    # Asked before the lag, what ends or falls due meanwhile is in the lag; asked again behind it, so is what was sent back and committed.
    transactions = len(admin.list_transactions(brokers=[broker]))
    delayed = _delayed_messages(admin, broker)
    here = {topic.name for topic in admin.list_topics(broker, group_topics=True)[broker]}
    behind: dict[str, int] = {}
    read: set[str] = set()
    for group in _groups(admin, broker, missing):
        lag = 0
        for topic in here.intersection(group.topics):
            try:
                # Of a topic that is named, queues in which the group has committed nothing count, too.
                lag += sum(
                    each.lag for each in admin.group_lag(group.name, topic, brokers=[broker])
                )
            except (GroupNotFoundError, TopicNotFoundError):
                continue
            read.add(topic)
        if lag:
            behind[group.name] = lag
    unread = _unread_messages(admin, broker, here - read)
    delayed = max(delayed, _delayed_messages(admin, broker))
    lag_bytes, silent_slaves = _replication(admin, broker)
    return Rest(behind, transactions, delayed, lag_bytes, unread, silent_slaves)


def _replication(admin: Admin, broker: str) -> tuple[int, tuple[str, ...]]:
    """What the slowest slave lacks, as the master says, and the slaves that do not answer."""
    from protomq.errors import PartialResultError

    try:
        states, failures = admin.ha_status(broker), {}
    except PartialResultError as error:
        states, failures = error.result, error.failures
        if broker in failures:
            raise failures[broker] from error
    lags = [state.lag_bytes for state in states if not state.broker_id]
    return max(lags, default=0), tuple(sorted(failures))


def _groups(admin: Admin, broker: str, missing: Missing) -> list[ConsumerGroup]:
    """Whoever has committed here is known here. Other brokers know who has not begun here; one that is away keeps nobody waiting."""
    missing.clear()  # Who is back by now has said it.
    groups = missing.take(admin.list_groups)
    if broker in missing:
        missing.raise_first(broker)
    return groups


def _unread_messages(admin: Admin, broker: str, topics: set[str]) -> dict[str, int]:
    """How many messages the broker has of those topics. Replayed dead letters do not count, nor do traces, which nobody consumes."""
    from protomq.errors import TopicNotFoundError
    from protomq.wire.topics import TRACE_TOPIC, TopicClass, class_of, dead_letter_topic

    counts: dict[str, int] = {}
    for letters in admin.list_dead_letters(brokers=[broker]):
        topic = dead_letter_topic(letters.group)
        if topic in topics:
            counts[topic] = letters.message_count - letters.replayed_count
    for topic in topics - {TRACE_TOPIC}:
        if class_of(topic) is TopicClass.DEAD_LETTER:
            continue
        try:
            counts[topic] = admin.describe_topic(topic, brokers=[broker]).message_count
        except TopicNotFoundError:
            continue
    return {topic: count for topic, count in counts.items() if count}


def _delayed_messages(admin: Admin, broker: str) -> int:
    return sum(state.delayed_messages for state in admin.broker_status(broker))


def wait_until_drained(
    look: Callable[[], Rest],
    wait_s: float | None,
    say: Callable[[str], None],
    monotonic_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
    look_again: Callable[[Rest], Rest] = lambda rest: rest,
    *,
    is_known: bool = False,
) -> Rest:
    """Looks until nothing is left, or the time is over; what was left then. Says what is left whenever that changes.

    `look_again`: what is really left, where it would end. `is_known`: a name server knows the broker. Such a one, or one that has answered,
    may be away for a while: another member may lead soon.
    """
    from protomq.errors import ProtomqError

    ends_s = math.inf if wait_s is None else monotonic_s() + wait_s
    said = ""
    while True:
        try:
            rest = look()
            is_known = True
            is_over = monotonic_s() >= ends_s
            if rest.is_nothing or is_over:
                rest = look_again(rest)
                if rest.is_nothing or is_over:
                    return rest
            text = str(rest)
        except ProtomqError as error:
            # Whom nobody knows may have a mistyped name.
            if not is_known or not error.retriable or monotonic_s() >= ends_s:
                raise
            text = f"asked again, since it did not answer: {error}"
        if text != said:
            said = text
            say(said)
        pause(LOOK_INTERVAL_S)


def _say(broker: str, text: str) -> None:
    sys.stderr.write(f"{broker}: {text}\n")


def _permit(
    admin: Admin, broker: str, topic: TopicConfig, permission: Permission, *, closed_from: Permission
) -> bool:
    """Gives a topic that permission, unless somebody has changed or deleted it since the look at it; whether it has it."""
    from protomq.errors import TopicExistsError, TopicNotFoundError

    try:
        admin.create_topic(
            topic.name,
            write_queues=topic.write_queues,
            read_queues=topic.read_queues,
            permission=permission,
            closed_from=closed_from,
            update=True,
            brokers=[broker],
            only_if=topic,
        )
    except (TopicExistsError, TopicNotFoundError):
        return False
    return True


def _row(broker: str, closed: int, rest: Rest) -> dict[str, Any]:
    return {
        "broker": broker,
        "closed_topics": closed,
        "messages": sum(rest.behind.values()) + sum(rest.unread.values()),
        "groups_behind": sorted(rest.behind),
        "unread_topics": sorted(rest.unread),
        "open_transactions": rest.open_transactions,
        "delayed_messages": rest.delayed_messages,
        "replica_lag_bytes": rest.replica_lag_bytes,
        "silent_slaves": list(rest.silent_slaves),
        "may_be_removed": rest.is_nothing,
    }
