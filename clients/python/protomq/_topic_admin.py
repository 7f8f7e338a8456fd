"""Topics over all brokers: each has its own configuration and its own queues of one. Used by Admin."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from . import _methods
from ._admin_values import (
    BrokerInfo,
    QueueStatus,
    TopicConfig,
    TopicDescription,
    datetime_of,
    topic_config_of,
    topic_of_config,
)
from ._checks import OFFSET_MAX, check_count, check_flag, check_topic
from ._retry import is_away
from ._types import MessageQueue, Permission, QueueRange, TopicType
from ._warnings import warn
from .errors import NoRouteError, ProtomqError, TopicNotFoundError, WrongTypeError
from .wire.topics import QUEUES_MAX

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls

logger = logging.getLogger("protomq")

_GROUPS_NAMED_MAX: Final = 10


def create_topic(
    admin: AdminCalls,
    topic: str,
    *,
    write_queues: int,
    read_queues: int,
    permission: Permission,
    update: bool,
    brokers: Iterable[str] | None,
    incarnation: int,
    kind: TopicType,
    closed_from: Permission,
    only_if: TopicConfig | None,
) -> tuple[dict[str, TopicConfig], dict[str, ProtomqError]]:
    """The configuration by broker, and the brokers that did not answer."""
    from .v1 import admin_service_pb2 as pb
    from .v1 import topic_pb2

    check_topic(topic)
    for name, count in (("write_queues", write_queues), ("read_queues", read_queues)):
        check_count(name, count, 0, QUEUES_MAX)
    if not isinstance(permission, Permission):
        raise WrongTypeError(f"permission is a Permission, Permission.READ for instance, not {permission!r}")
    if only_if is not None and not isinstance(only_if, TopicConfig):
        raise WrongTypeError(f"only_if is a TopicConfig, as describe_topic has it, not {only_if!r}")
    if not isinstance(closed_from, Permission):
        raise WrongTypeError(f"closed_from is a Permission, Permission.READ_WRITE for instance, not {closed_from!r}")
    check_flag("update", update)
    check_count("incarnation", incarnation, 0, OFFSET_MAX)
    if not isinstance(kind, TopicType):
        raise WrongTypeError(f"type is a TopicType, TopicType.FIFO for instance, not {kind!r}")
    type_number: Any = int(kind)
    number: Any = int(permission)
    former_number: Any = int(closed_from)
    wanted = topic_pb2.Topic(
        name=topic,
        write_queues=write_queues,
        read_queues=read_queues or write_queues,
        permission=number,
        incarnation=incarnation,
        type=type_number,
        closed_from=former_number,
    )
    request = pb.CreateTopicRequest(topic=wanted, update=update, only_if=None if only_if is None else topic_of_config(only_if))
    configs: dict[str, TopicConfig] = {}
    unread: dict[str, str] = {}

    def ask(broker: BrokerInfo) -> None:
        answer = admin._call(
            broker.address, _methods.CREATE_TOPIC, request, pb.CreateTopicResponse
        )
        configs[broker.broker_name] = config = topic_config_of(answer.topic)
        if answer.unread:
            unread[broker.broker_name] = _unread_text(config, broker.broker_name, answer.unread)

    failures = admin._ask_each(brokers, ask, first=partial(_brokers_of, admin, topic))
    admin._routes.invalidate(topic, is_denied=True)
    for _, text in sorted(unread.items()):
        warn(logger, text, 3)
    return configs, failures


def _brokers_of(admin: AdminCalls, topic: str) -> Collection[str]:
    """Names of the brokers that have the topic, as a name server knows: what they refuse is then done nowhere."""
    admin._routes.invalidate(topic, is_denied=True)
    try:
        route = admin._routes.get(topic, admin._request_timeout_s)
    except TopicNotFoundError:
        return ()
    except NoRouteError as error:
        if not is_away(error):
            raise
        return ()
    return () if route.auto_create else route.brokers


def _unread_text(topic: TopicConfig, broker_name: str, unread: Iterable[Any]) -> str:
    """What groups cannot consume since the topic has fewer read queues."""
    told = [f"{each.consumer_group} {each.message_count}" for each in unread]
    names = ", ".join((*told[:_GROUPS_NAMED_MAX], "…") if len(told) > _GROUPS_NAMED_MAX else told)
    return (
        f"topic {topic.name} has {topic.read_queues} read queues at {broker_name} now. Nobody can read what groups have not consumed in the"
        f" others, in messages: {names}. Give it as many read queues as before until they have"
    )


def describe_topic(
    admin: AdminCalls, topic: str, brokers: Iterable[str] | None
) -> tuple[TopicDescription, dict[str, ProtomqError]]:
    """Configuration and queues, and the brokers that did not answer. Raises TopicNotFoundError."""
    from .v1 import admin_service_pb2 as pb

    check_topic(topic)
    configs: dict[str, TopicConfig] = {}
    queues: list[QueueStatus] = []

    def ask(broker: BrokerInfo) -> pb.DescribeTopicResponse | None:
        try:
            return admin._call(
                broker.address,
                _methods.DESCRIBE_TOPIC,
                pb.DescribeTopicRequest(topic=topic),
                pb.DescribeTopicResponse,
            )
        except TopicNotFoundError:
            return None

    answers, failures = admin._answers(brokers, ask, topic, slave_stands_in=True)
    for broker, answer in answers:
        if answer is None:
            continue
        configs[broker.broker_name] = topic_config_of(answer.topic)
        queues.extend(
            QueueStatus(
                MessageQueue(topic, broker.broker_name, item.queue_id),
                QueueRange(item.min_offset, item.end_offset),
                datetime_of(item.last_store_time) if item.HasField("last_store_time") else None,
            )
            for item in answer.queues
        )
    if not configs:
        raise next(iter(failures.values()), no_broker_has(topic))
    return TopicDescription(topic, configs, tuple(queues)), failures


def delete_topic(
    admin: AdminCalls, topic: str, brokers: Iterable[str] | None
) -> tuple[list[str], dict[str, ProtomqError]]:
    """The brokers that had it, and those that did not answer. Raises TopicNotFoundError if none had."""
    from .v1 import admin_service_pb2 as pb

    check_topic(topic)
    deleted: list[str] = []

    def ask(broker: BrokerInfo) -> None:
        try:
            admin._call(
                broker.address,
                _methods.DELETE_TOPIC,
                pb.DeleteTopicRequest(topic=topic),
                pb.DeleteTopicResponse,
            )
        except TopicNotFoundError:
            return
        deleted.append(broker.broker_name)

    failures = admin._ask_each(brokers, ask, topic)
    admin._routes.invalidate(topic, is_denied=True)
    if not deleted:
        raise next(iter(failures.values()), no_broker_has(topic))
    return deleted, failures


def list_topics(
    admin: AdminCalls, brokers: Iterable[str] | None, *, group_topics: bool
) -> tuple[dict[str, list[TopicConfig]], dict[str, ProtomqError]]:
    """The topics by broker, and the brokers that did not answer."""
    from .v1 import admin_service_pb2 as pb

    def ask(broker: BrokerInfo) -> list[TopicConfig]:
        request = pb.ListTopicsRequest(group_topics=group_topics)
        pages = admin._pages(broker, _methods.LIST_TOPICS, request, pb.ListTopicsResponse)
        return [topic_config_of(one) for page in pages for one in page.topics]

    answers, failures = admin._answers(brokers, ask, slave_stands_in=True)
    return {broker.broker_name: topics for broker, topics in answers}, failures


def no_broker_has(topic: str) -> TopicNotFoundError:
    """The error of a call about a topic that all brokers have answered, and none has."""
    return TopicNotFoundError(f"no broker has the topic {topic!r}", metadata={"topic": topic})
