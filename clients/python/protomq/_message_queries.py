"""Messages by key or by id, in the logs of all brokers. Used by Admin."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from . import _methods
from ._admin_values import BrokerInfo
from ._checks import check_count, check_time, check_topic, check_wanted
from ._decoding import decoded
from ._fields import field_values
from ._message import Message
from ._types import MessageQueue
from .errors import NotFoundError, ProtomqError

if TYPE_CHECKING:
    from ._admin_calls import AdminCalls


def query_by_key(
    admin: AdminCalls,
    topic: str,
    key: str,
    *,
    begin: datetime | None,
    end: datetime | None,
    count_max: int,
) -> tuple[list[Message], dict[str, ProtomqError]]:
    """The messages, newest first, and the brokers that did not answer."""
    from .v1 import admin_service_pb2 as pb

    check_topic(topic)
    check_wanted("key", key)
    check_count("count_max", count_max, 1, 256)
    request = pb.QueryMessagesRequest(topic=topic, key=key, record_count_max=count_max)
    if begin is not None:
        check_time("begin", begin)
        request.begin_time.FromMilliseconds(int(begin.timestamp() * 1000))
    if end is not None:
        check_time("end", end)
        request.end_time.FromMilliseconds(int(end.timestamp() * 1000))
    return _query(admin, request, count_max)


def query_by_id(
    admin: AdminCalls, topic: str, message_id: str
) -> tuple[Message | None, dict[str, ProtomqError]]:
    """The message, and if it was not found, the brokers that did not answer."""
    from .v1 import admin_service_pb2 as pb

    check_topic(topic)
    check_wanted("message_id", message_id)
    request = pb.QueryMessagesRequest(topic=topic, message_id=message_id, record_count_max=1)
    found, failures = _query(admin, request, 1)
    return (found[0], {}) if found else (None, failures)


def _query(
    admin: AdminCalls, request: Any, count_max: int
) -> tuple[list[Message], dict[str, ProtomqError]]:
    from .v1 import admin_service_pb2 as pb

    payload = request.SerializeToString()

    def ask(broker: BrokerInfo) -> list[Message]:
        try:
            data = admin._ask(broker.address, _methods.QUERY_MESSAGES, (payload,))
        except NotFoundError:
            return []
        answer = decoded(data, pb.QueryMessagesResponse.FromString)
        # Take the records as they stand in the answer: their CRC covers these bytes, and another serialisation may differ.
        return [
            Message.from_record(octets, MessageQueue(record.topic, broker.broker_name, record.queue_id), record.queue_offset)
            for record, octets in zip(answer.records, field_values(data, 1), strict=True)
        ]

    answers, failures = admin._answers(None, ask, request.topic, slave_stands_in=True)
    found = [message for _, messages in answers for message in messages]
    found.sort(key=lambda message: message.store_time_ms, reverse=True)
    return found[:count_max], failures
