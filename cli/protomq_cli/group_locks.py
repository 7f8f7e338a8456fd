"""`group locks`: which member has which queue of a group to itself."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from protomq_cli.connection import open_admin
from protomq_cli.group_members import check_known
from protomq_cli.groups import GroupArgument
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, OnBroker, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import Admin, MessageQueue

_COLUMNS: Final = ("topic", "broker", "queue_id", "owner", "token", "age_s", "left_s", "is_member")


def locks(
    group: GroupArgument,
    free: Annotated[
        bool, typer.Option("--free", help="Only queues that no member has locked, of topics with locks.")
    ] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List who has locked which queue of a group, with token and age.

    Consumers in order lock their queues. AGE-S is how long the owner has had
    the queue, LEFT-S when the lock ends unless it is renewed. IS-MEMBER is no
    for an owner that holds no call now: it may be dead. A queue without an
    owner, of a topic with locks, is listed without one.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = None if broker is None else [broker]
        found = {lock.queue: lock for lock in missing.take(lambda: admin.queue_locks(group, brokers=brokers))}
        if not found:
            missing.check()  # Who does not answer may know the group.
            check_known(admin, group)
        queues = sorted(found.keys() | set(_queues_of(admin, missing, {queue.topic for queue in found}, brokers)))
    rows = []
    for queue in queues:
        lock = found.get(queue)
        if lock is not None and free:
            continue
        rows.append(
            {
                "topic": queue.topic,
                "broker": queue.broker_name,
                "queue_id": queue.queue_id,
                "owner": lock.client_id if lock else None,
                "token": f"{lock.token:016x}" if lock else None,
                "age_s": round(lock.age_s, 1) if lock and lock.age_s is not None else None,
                "left_s": round(lock.left_s, 1) if lock else None,
                "is_member": lock.is_member if lock else None,
            }
        )
    print_rows(rows, _COLUMNS, output, expendable=("left_s", "token"))
    missing.check()


def _queues_of(admin: Admin, missing: Missing, topics: set[str], brokers: list[str] | None) -> list[MessageQueue]:
    from protomq.errors import TopicNotFoundError

    found: list[MessageQueue] = []
    for topic in sorted(topics):
        try:
            described = missing.take(partial(admin.describe_topic, topic, brokers=brokers))
        except TopicNotFoundError:  # It was deleted; its locks end as all others do.
            continue
        found += [one.queue for one in described.queues]
    return found
