"""The consumers that are open in this process: who shares a queue with whom, and who has something to commit when the interpreter ends.

A broker notices two members of a group after some pulls; of its own process a consumer knows it at once.

Any thread.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from typing import Final, Protocol

from ._name_servers import NameServerList
from ._types import MessageQueue
from ._warnings import warn
from .errors import ProtomqError

logger = logging.getLogger("protomq")

COMMITS_AT_EXIT_S: Final = 3.0
"""What all commits may take together when the interpreter ends."""


class Member(Protocol):
    """A consumer and its queues."""

    @property
    def group(self) -> str:
        """Whose offsets are committed; "": nobody's."""

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues being consumed."""


class OpenConsumer(Member, Protocol):
    """A consumer that may have something to commit."""

    @property
    def end_call(self) -> str:
        """What its program calls to end it: "close" or "stop"."""

    def finish_at_exit(self, timeout_s: float) -> int:
        """Commits what may be committed, within the time; of how many queues something is left that comes again."""


_open: Final[dict[int, tuple[weakref.ref[OpenConsumer], NameServerList]]] = {}
"""By id: a dict of immutable values needs no lock, which a forked child could find locked."""


def opened(consumer: OpenConsumer, name_servers: NameServerList) -> None:
    """The consumer is open until `closed`, or until nobody has it any more. Two of one cluster have a name server in common."""
    key = id(consumer)
    _open[key] = weakref.ref(consumer, lambda _: _open.pop(key, None)), name_servers


def closed(consumer: OpenConsumer) -> None:
    """It consumes nothing any more."""
    _open.pop(id(consumer), None)


def shared_queue(consumer: Member) -> MessageQueue | None:
    """A queue that another consumer of the same group consumes in this process, too; None: there is none."""
    own = _open.get(id(consumer))
    if not consumer.group or own is None:
        return None
    queues = set(consumer.assignment())
    servers = set(own[1].in_order())
    for reference, name_servers in list(_open.values()):
        other = reference()
        if other is None or other is consumer or other.group != consumer.group:
            continue
        if servers.isdisjoint(name_servers.in_order()):
            continue
        for queue in other.assignment():
            if queue in queues:
                return queue
    return None


def share_s(ends_s: float, left_count: int, now_s: float) -> float:
    """The share of the time left that the next consumer may take, in seconds: a silent broker leaves the others theirs."""
    return max((ends_s - now_s) / left_count, 0.001)


def shared_queue_text(group: str, queue: MessageQueue) -> str:
    """The warning about it."""
    return (
        f"group {group} has another consumer in this process that consumes {queue.topic}/{queue.broker_name}/{queue.queue_id} too: "
        "both get every message of it. Call subscribe(), so that the group shares its queues, or assign() other queues to each"
    )


def uncommitted_text(consumer: OpenConsumer, queue_count: int, when: str) -> str:
    """The warning about messages that were handed out, and whose offsets nobody committed."""
    ended = {"close": "closed", "stop": "stopped"}[consumer.end_call]
    why = f"{when}, and the consumer was not {ended}; use `with`, or call {consumer.end_call}()"
    return _comes_again(consumer.group, queue_count, why)


def not_taken_text(consumer: OpenConsumer, queue_count: int, error: ProtomqError) -> str:
    """The warning of `close` where brokers did not take their offsets; `error`: the first of them."""
    why = f"the last commit, on {consumer.end_call}, failed: {error!r}"
    if consumer.end_call == "close":  # Else the SDK alone commits.
        why += "; call commit() before close() where you want the error"
    return _comes_again(consumer.group, queue_count, why)


def _comes_again(group: str, queue_count: int, why: str) -> str:
    queues = f"{queue_count} queue{'s' if queue_count > 1 else ''}"
    return f"messages of {queues} that were handed out to group {group} are not committed, and will come again: {why}"


@atexit.register
def _at_exit() -> None:
    """All consumers commit before the first warning: where warnings are errors, it ends this."""
    ends_s = time.monotonic() + COMMITS_AT_EXIT_S
    consumers = [consumer for reference, _ in list(_open.values()) if (consumer := reference())]
    texts: list[str] = []
    for i, consumer in enumerate(consumers):
        try:
            count = consumer.finish_at_exit(share_s(ends_s, len(consumers) - i, time.monotonic()))
        except Exception as error:
            logger.exception("group %s could not commit at exit", consumer.group)
            texts.append(f"group {consumer.group} could not commit when the interpreter ended: {error!r}")
            continue
        if count:
            texts.append(uncommitted_text(consumer, count, "the interpreter ended"))
    for text in texts:
        warn(logger, text)
