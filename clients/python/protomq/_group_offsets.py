"""Offsets of consumer groups, as brokers change and tell them for operators: lag, reset, clone. Used by Admin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from . import _methods
from ._checks import OFFSET_MAX, QUEUE_ID_MAX, check_count, check_group, check_past, check_topic
from ._types import MessageQueue
from .errors import ConfigurationError, GroupNotFoundError, ProtomqError, TopicNotFoundError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls

Place = Literal["earliest", "latest", "start", "end"] | datetime | int


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group is behind in one queue.

    `committed_offset` is None where it has committed nothing there; where the group pops it does not count. `lag` counts readable messages
    that it has not consumed; of a group that pops, those never handed out and those not acknowledged. `delay_s` is how long ago the first
    of them was stored, 0 if there is none.
    """

    queue: MessageQueue
    committed_offset: int | None
    end_offset: int
    lag: int
    delay_s: float


def group_lag(
    admin: AdminCalls, group: str, topic: str, brokers: Iterable[str] | None
) -> tuple[list[GroupLag], dict[str, ProtomqError]]:
    """Of each queue, and the failures by broker. Raises GroupNotFoundError if no broker knows the group.

    Without a topic: of the topics that any broker names, at all brokers. One where the group has done nothing does not know it.
    """
    from .v1 import consumer_service_pb2 as pb

    check_group(group)
    check_topic(topic)

    def ask_of(broker: Any, topic: str) -> list[GroupLag] | ProtomqError:
        request = pb.GetLagRequest(consumer_group=group, topic=topic)
        try:
            answer = admin._call(broker.address, _methods.GET_LAG, request, pb.GetLagResponse)
        except (GroupNotFoundError, TopicNotFoundError) as error:
            return error
        return [
            GroupLag(
                MessageQueue(queue.topic, broker.broker_name, queue.queue_id),
                None if queue.committed_offset < 0 else queue.committed_offset,
                queue.end_offset,
                queue.lag,
                queue.delay_ms / 1000,
            )
            for queue in answer.queues
        ]

    names = None if brokers is None else list(brokers)
    answers, failures = admin._answers(names, lambda broker: ask_of(broker, topic), topic, slave_stands_in=True)
    known = [lags for _, lags in answers if isinstance(lags, list)]
    unknown = [error for _, error in answers if isinstance(error, ProtomqError)]
    if unknown and not known and not failures:
        raise unknown[0]
    lags = [one for several in known for one in several]
    for name in sorted({one.queue.topic for one in lags} if not topic else ()):
        named_by = {one.queue.broker_name for one in lags if one.queue.topic == name}
        others = [broker.broker_name for broker, _ in answers if broker.broker_name not in named_by]
        more, late = admin._answers(others, partial(ask_of, topic=name), slave_stands_in=True) if others else ([], {})
        lags += [one for _, several in more if isinstance(several, list) for one in several]
        failures = {**late, **failures}
    return sorted(lags, key=lambda one: one.queue), failures


def reset_offsets(
    admin: AdminCalls,
    group: str,
    topic: str,
    to: Place,
    queue_ids: Iterable[int],
    brokers: Iterable[str] | None,
) -> tuple[list[str], dict[str, ProtomqError]]:
    """The brokers that did it, and the failures by broker."""
    from .v1 import consumer_service_pb2 as pb

    check_group(group)
    check_topic(topic)
    ids = [check_count("each of queue_ids", queue_id, 0, QUEUE_ID_MAX) for queue_id in queue_ids]
    request = pb.ResetOffsetsRequest(consumer_group=group, topic=topic, queue_ids=ids)
    if isinstance(to, datetime):
        check_past("to", to, 'write "latest"')
        request.store_time.FromMilliseconds(max(int(to.timestamp() * 1000), 0))
    elif to in ("latest", "end"):
        request.end = True
    elif to in ("earliest", "start"):
        request.queue_offset = 0
    elif isinstance(to, str):
        raise ConfigurationError(f'to is "earliest" (or "start"), "latest" (or "end"), a datetime or an offset, not {to!r}')
    else:
        request.queue_offset = check_count("to", to, 0, OFFSET_MAX)
    return _on_those_that_have_it(admin, _methods.RESET_OFFSETS, request, pb.ResetOffsetsResponse, brokers)


def clone_offsets(
    admin: AdminCalls, source: str, group: str, topic: str, brokers: Iterable[str] | None
) -> tuple[list[str], dict[str, ProtomqError]]:
    """The brokers that did it, and the failures by broker."""
    from .v1 import consumer_service_pb2 as pb

    check_group(source)
    check_group(group)
    if source == group:
        raise ConfigurationError(f"source and group are both {group!r}: a group goes on where another one is")
    check_topic(topic)
    request = pb.CloneOffsetsRequest(source_group=source, consumer_group=group, topic=topic)
    return _on_those_that_have_it(admin, _methods.CLONE_OFFSETS, request, pb.CloneOffsetsResponse, brokers)


def _on_those_that_have_it(
    admin: AdminCalls, method: Any, request: Any, answer_class: Any, brokers: Iterable[str] | None
) -> tuple[list[str], dict[str, ProtomqError]]:
    """Brokers that do not know the topic or the group are skipped, unless none knows it."""
    done: list[str] = []
    unknown: list[ProtomqError] = []

    def ask(broker: Any) -> None:
        try:
            admin._call(broker.address, method, request, answer_class)
        except (GroupNotFoundError, TopicNotFoundError) as error:
            unknown.append(error)
            return
        done.append(broker.broker_name)

    failures = admin._ask_each(brokers, ask, request.topic)
    if unknown and not done and not failures:
        raise unknown[0]
    return sorted(done), failures
