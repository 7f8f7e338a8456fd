"""What the methods of producers are given: arguments to messages, messages to targets. Values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from ._batching import PreparedRecord
from ._checks import check_topic
from ._connection_options import ConnectionOptions
from ._delays import When, when_of
from ._hook_points import HookPoints
from ._outgoing import OutgoingMessage
from ._types import PEER_TIMEOUT_S, Body, Delay, MessageQueue, Target
from .errors import ConfigurationError

if TYPE_CHECKING:
    from datetime import datetime

    from ._selectors import QueueSelector


class SendSettings(TypedDict, total=False):
    """Keyword arguments of `send` (a test compares them), for those who pass them on."""

    key: str | None
    keys: Sequence[str]
    tag: str
    properties: Mapping[str, str] | None
    queue: MessageQueue | None
    sharding_key: str | None
    selector: QueueSelector | None
    delay: Delay | None
    deliver_at: datetime | None
    timeout_s: float | None


def as_message(
    topic: str | OutgoingMessage,
    body: Body,
    key: str | None,
    keys: Sequence[str],
    tag: str,
    properties: Mapping[str, str] | None,
    queue: MessageQueue | None,
    sharding_key: str | None,
    delay: Delay | None = None,
    deliver_at: datetime | None = None,
) -> OutgoingMessage:
    """The arguments of a send as a message. What stands beside an OutgoingMessage would be lost: ConfigurationError."""
    if isinstance(topic, OutgoingMessage):
        check_topic(topic.topic)
        beside = {
            "body": body != b"",
            "key": key is not None,
            "keys": keys != (),
            "tag": tag != "",
            "properties": properties is not None,
            "queue": queue is not None,
            "sharding_key": sharding_key is not None,
            "delay": delay is not None,
            "deliver_at": deliver_at is not None,
        }
        if any(beside.values()):
            names = ", ".join(name for name, given in beside.items() if given)
            raise ConfigurationError(
                f"an OutgoingMessage is sent as it is, {names} beside it would be lost: give them to the message"
            )
        return topic
    check_topic(topic)
    return OutgoingMessage(
        topic, body, key, keys, tag, properties, sharding_key, queue, delay, deliver_at
    )


def refuse_settings_beside_transport(
    connection: ConnectionOptions | None, client_id: str, peer_timeout_s: float, spin: bool = True
) -> None:
    """A transport that is handed in has its own settings: those beside it would be lost."""
    if connection is not None or client_id or peer_timeout_s != PEER_TIMEOUT_S or not spin:
        raise ConfigurationError(
            "connection, client_id, peer_timeout_s and spin belong to the transport: give them to its ConnectionOptions"
        )


def refuse_call_hooks(hooks: HookPoints) -> None:
    """Calls of a transport that is handed in are others', too."""
    if hooks.call:
        raise ConfigurationError(
            "hooks of calls need connections of the client's own: give it a connection, not a transport"
        )


def refuse_beside_message(
    index: int, keys: Sequence[str | None] | None, tags: str | Sequence[str]
) -> None:
    """`keys` and `tags` of a batch go with its bodies."""
    if (keys is not None and keys[index]) or (tags if isinstance(tags, str) else tags[index]):
        raise ConfigurationError(
            f"message {index} of the batch is an OutgoingMessage and has its own keys and tag: those beside it would be lost"
        )


def is_at_once(message: OutgoingMessage) -> bool:
    """Whether a message says nothing of when it is delivered."""
    return message.delay is None and message.deliver_at is None


def when_of_message(message: OutgoingMessage) -> When | None:
    """When the message is delivered, by what it says itself."""
    return when_of(message.delay, message.deliver_at)


def field_of(when: When | None) -> bytes | None:
    """What of it the messages of a request have in common."""
    return None if when is None else when.field


def group_by_target(
    records: Sequence[PreparedRecord], targets: Iterable[Target]
) -> tuple[dict[Target, list[PreparedRecord]], list[tuple[Target, int]]]:
    """Records by target, and for each record its target and its index there."""
    groups: dict[Target, list[PreparedRecord]] = {}
    places: list[tuple[Target, int]] = []
    for record, target in zip(records, targets, strict=True):
        group = groups.setdefault(target, [])
        places.append((target, len(group)))
        group.append(record)
    return groups, places
