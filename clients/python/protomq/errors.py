"""Every exception that the SDK raises, on one page.

    ProtomqError
    ├── ClientError                     nothing was asked of a server
    │   ├── ConfigurationError          a wrong argument or setting (also a ValueError)
    │   │   └── WrongTypeError          an argument of the wrong type (also a TypeError)
    │   ├── ClosedError                 the producer, consumer or transport is closed
    │   ├── OffsetIllegalError          a consumer's position is outside its queue, and its `offset_reset` is "error"
    │   ├── NoRouteError                no name server answers and no route is known, no queue fits, or all brokers of the topic are away
    │   │   └── BrokerMissingError      a broker was registered and is not any more; `metadata` says since when and why
    │   ├── CompressionError            a codec is not installed, or a body does not decompress within its limit
    │   ├── NotConfirmedError           what was sent is appended, and neither replicas nor disk confirmed it in time
    │   ├── BatchIncompleteError        some requests of a batch are stored, another failed; `stored` tells which
    │   └── PartialResultError          some of several brokers did not answer; `result` is what the others said
    ├── TransportError                  the network, not the server, is the reason
    │   ├── ConnectFailedError          no connection: nothing was sent
    │   │   └── ForeignProtocolError    the port speaks another protocol: most likely it is a gRPC port
    │   ├── ConnectionLostError         the connection broke before the answer: what was asked may have happened
    │   ├── RequestTimeoutError         no answer in time: what was asked may have happened (also a TimeoutError)
    │   └── ProtocolError               the peer speaks something else, or its answer does not parse
    ├── CorruptMessageError             a received message is not what its producer wrote: the CRC-32C does not hold
    ├── SchemaError                     a received body is not what its consumer asks for (also a ValueError)
    └── ServerError                     a server answered with google.rpc.Status; one class per ErrorReason
        ├── InvalidArgumentError        INVALID_ARGUMENT; `field_violations` name the fields
        │   ├── MessageTooLargeError    MESSAGE_TOO_LARGE
        │   ├── IllegalFilterError      ILLEGAL_FILTER; `metadata` holds line, column, position and what was expected
        │   ├── IllegalDelayError       ILLEGAL_DELAY; `metadata` holds field, value and limit
        │   └── IllegalReceiptError     ILLEGAL_RECEIPT: no receipt of this broker, group and topic
        ├── NotFoundError
        │   ├── TopicNotFoundError      TOPIC_NOT_FOUND
        │   ├── QueueNotFoundError      QUEUE_NOT_FOUND
        │   ├── OffsetNotFoundError     OFFSET_NOT_FOUND
        │   ├── GroupNotFoundError      GROUP_NOT_FOUND
        │   ├── BrokerNotFoundError     BROKER_NOT_FOUND
        │   ├── CallerGoneError         CALLER_GONE: nobody waits for a reply any more
        │   └── TransactionNotFoundError  TRANSACTION_NOT_FOUND
        ├── TopicExistsError            TOPIC_EXISTS
        ├── OffsetOutOfRangeError       OFFSET_OUT_OF_RANGE: an offset to be committed; `metadata` holds the range of its queue
        ├── TopicRecreatedError         TOPIC_RECREATED: the topic was deleted and created again; `metadata` holds both incarnations
        ├── TopicTypeMismatchError      TOPIC_TYPE_MISMATCH: the topic does not take messages of this type; `metadata` holds both
        ├── GroupInUseError             GROUP_IN_USE: a group with members was to be deleted; `metadata` names one
        ├── QueueNotOwnedError          QUEUE_NOT_OWNED: a commit for a queue that is not the consumer's; `metadata` names the owner
        ├── MemberUnknownError          MEMBER_UNKNOWN: a member of a group was not heard of in time, and is none any more
        ├── GroupDisabledError          GROUP_DISABLED: the settings of the group forbid it to consume
        ├── TransactionEndedError       TRANSACTION_ENDED: it has ended otherwise; `metadata` says how
        ├── StaleReceiptError           STALE_RECEIPT: popped messages are done, dead, or somebody else has them
        ├── NotPermittedError           NOT_PERMITTED
        ├── BusyError                   the server is there, but cannot now
        │   ├── SystemBusyError         SYSTEM_BUSY; `retry_delay_ms` says when
        │   ├── DiskFullError           DISK_FULL
        │   ├── TooManyError            TOO_MANY
        │   ├── ShuttingDownError       SHUTTING_DOWN
        │   ├── NotEnoughReplicasError  NOT_ENOUGH_REPLICAS: too few slaves are in sync for a send
        │   ├── ReplicaBehindError      REPLICA_BEHIND: this slave does not have that yet
        │   └── QueueHealingError       QUEUE_HEALING; `retry_delay_ms` says when
        ├── StoreFailedError            STORE_FAILED
        ├── SequenceExpiredError        SEQUENCE_EXPIRED
        ├── SendOutOfOrderError         SEND_OUT_OF_ORDER
        ├── ProducerFencedError         PRODUCER_FENCED
        ├── ProducerIdTakenError        PRODUCER_ID_TAKEN: another producer has this id and epoch
        ├── DeadlineExceededError       DEADLINE_EXCEEDED: dropped before it was started; not definite: not on disk in time
        ├── UnknownMethodError          UNKNOWN_METHOD
        ├── UnsupportedError            UNSUPPORTED
        ├── CorruptLogError             CORRUPT_LOG; `metadata` holds position and queue offset
        ├── NotMasterError              NOT_MASTER: a slave was asked to change something
        ├── OrderPendingError           ORDER_PENDING: another order about who leads has not been taken yet
        ├── CallCancelledError          CANCELLED: this call was held, and its caller has given it up
        ├── StaleRegistrationError      STALE_REGISTRATION
        ├── NameTakenError              NAME_TAKEN: the broker's name belongs to another one
        └── InternalError               INTERNAL, and any reason that this version does not know

What a handler reads are attributes, not classes:

- `reason`: UPPER_SNAKE, stable; for a ServerError a value of protomq.v1.ErrorReason without prefix.
- `retriable`: the same request may succeed later or at another broker.
- `definite`: the request did not happen and will not; a server says it with each error. It is about all tries of a call. False after a
  time-out: the message may be stored all the same. The SDK's own retries are safe: the broker recognises a repeated send by its sequence
  number.
- `stale_route`: the route may be out of date: look it up again before the next try.
- `code`: gRPC status code as a number (0 where no code fits). `metadata`: values that the message names.
  `retry_delay_ms`: how long the server asks to wait, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ._outgoing import Stored
    from .wire.status import RpcStatus

__all__ = [
    "ProtomqError",
    "ClientError",
    "ConfigurationError",
    "WrongTypeError",
    "ClosedError",
    "OffsetIllegalError",
    "NoRouteError",
    "BrokerMissingError",
    "CompressionError",
    "NotConfirmedError",
    "BatchIncompleteError",
    "PartialResultError",
    "TransportError",
    "ConnectFailedError",
    "ForeignProtocolError",
    "ConnectionLostError",
    "RequestTimeoutError",
    "ProtocolError",
    "CorruptMessageError",
    "SchemaError",
    "ServerError",
    "InvalidArgumentError",
    "MessageTooLargeError",
    "IllegalDelayError",
    "IllegalReceiptError",
    "IllegalFilterError",
    "NotFoundError",
    "TopicNotFoundError",
    "QueueNotFoundError",
    "OffsetNotFoundError",
    "GroupNotFoundError",
    "BrokerNotFoundError",
    "TopicExistsError",
    "OffsetOutOfRangeError",
    "TopicRecreatedError",
    "TransactionEndedError",
    "CallCancelledError",
    "CallerGoneError",
    "TransactionNotFoundError",
    "StaleReceiptError",
    "GroupInUseError",
    "QueueNotOwnedError",
    "MemberUnknownError",
    "GroupDisabledError",
    "TopicTypeMismatchError",
    "NotPermittedError",
    "BusyError",
    "SystemBusyError",
    "DiskFullError",
    "TooManyError",
    "ShuttingDownError",
    "QueueHealingError",
    "StoreFailedError",
    "SequenceExpiredError",
    "SendOutOfOrderError",
    "ProducerFencedError",
    "ProducerIdTakenError",
    "DeadlineExceededError",
    "UnknownMethodError",
    "UnsupportedError",
    "CorruptLogError",
    "StaleRegistrationError",
    "NameTakenError",
    "InternalError",
    "error_from_status",
    "NotMasterError",
    "ReplicaBehindError",
    "NotEnoughReplicasError",
    "OrderPendingError",
]

# gRPC status codes, so that this module needs no grpc.
_INVALID_ARGUMENT: Final = 3
_DEADLINE_EXCEEDED: Final = 4
_NOT_FOUND: Final = 5
_ALREADY_EXISTS: Final = 6
_PERMISSION_DENIED: Final = 7
_RESOURCE_EXHAUSTED: Final = 8
_FAILED_PRECONDITION: Final = 9
_UNIMPLEMENTED: Final = 12
_INTERNAL: Final = 13
_UNAVAILABLE: Final = 14
_DATA_LOSS: Final = 15
_CANCELLED: Final = 1


class ProtomqError(Exception):
    """Base of all. The class attributes are the usual values; an instance may carry its own."""

    reason: str = "UNKNOWN"
    code: int = 0
    retriable: bool = False
    definite: bool = True
    stale_route: bool = False

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_delay_ms: int | None = None,
        field_violations: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: Mapping[str, str] = metadata if metadata is not None else {}
        self.retry_delay_ms = retry_delay_ms
        self.field_violations = tuple(field_violations)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[ProtomqError], message: str, state: dict[str, object]) -> ProtomqError:
    """Unpickles an error: Spark and process pools carry exceptions between processes."""
    error = cls(message)
    error.__dict__.update(state)
    return error


class ClientError(ProtomqError):
    """Nothing was asked of a server."""

    reason = "CLIENT"


class ConfigurationError(ClientError, ValueError):
    """A wrong argument or setting."""

    reason = "CONFIGURATION"
    code = _INVALID_ARGUMENT


class WrongTypeError(ConfigurationError, TypeError):
    """An argument of the wrong type; the message says what to pass."""


class ClosedError(ClientError):
    """The producer, consumer or transport is closed."""

    reason = "CLOSED"
    code = _CANCELLED


class OffsetIllegalError(ClientError):
    """A consumer's position is outside its queue, and its `offset_reset` is "error"; `metadata` holds the range. Seek, then go on."""

    reason = "OFFSET_ILLEGAL"
    code = 11  # OUT_OF_RANGE


class NoRouteError(ClientError):
    """No name server answers and no route is known, or the topic has no queue that fits, or all brokers that had it are away.

    These may be back in a moment, or another master is elected: the topic was not deleted. Then `metadata` has missing_brokers, their
    names with commas.
    """

    reason = "NO_ROUTE"
    code = _UNAVAILABLE
    retriable = True
    stale_route = True


class BrokerMissingError(NoRouteError):
    """A broker is no longer registered at the name server: nobody can reach the messages that it stores.

    `metadata`: broker_name, grpc_address and remoting_address as they were last, removed_time (ISO 8601) and cause.
    """

    reason = "BROKER_MISSING"


class CompressionError(ClientError):
    """A codec is not installed, or a body does not decompress within its limit."""

    reason = "COMPRESSION"


class NotConfirmedError(ClientError):
    """What was sent was answered FLUSH_SLAVE_TIMEOUT or FLUSH_DISK_TIMEOUT: a fail-over or a power cut may take it back.

    Of `TransactionProducer.begin`: nothing is begun, and the half message is rolled back. If the error is not `definite`, the broker has
    not answered that yet: it may ask the check listener. `metadata`: topic, broker_name, message_id, status.
    """

    reason = "NOT_CONFIRMED"
    code = _UNAVAILABLE
    retriable = True


class BatchIncompleteError(ClientError):
    """A batch went out in several requests: those in `stored` are stored, the one after them failed (`__cause__`).

    Send only the messages again that were not stored; sending the whole batch again would store the first part twice.
    """

    reason = "BATCH_INCOMPLETE"
    definite = False

    def __init__(self, message: str, stored: Sequence[Stored] = ()) -> None:
        super().__init__(message)
        self.stored = tuple(stored)


class PartialResultError(ClientError):
    """Several brokers were asked and some did not answer.

    `result`: what the method would have returned for the brokers that answered. `failures`: the errors of the others, by broker name. A
    change is done at the brokers in `result`.
    """

    reason = "PARTIAL_RESULT"
    code = _UNAVAILABLE
    retriable = True
    definite = False

    def __init__(
        self, message: str, result: object = None, failures: Mapping[str, ProtomqError] | None = None
    ) -> None:
        super().__init__(message)
        # Any: a caller knows what the method that it has called returns.
        self.result: Any = result
        self.failures = dict(failures or {})


class TransportError(ProtomqError):
    """The network, not the server, is the reason."""

    reason = "TRANSPORT"
    code = _UNAVAILABLE
    retriable = True
    definite = False


class ConnectFailedError(TransportError):
    """No connection could be made: nothing was sent."""

    reason = "CONNECT_FAILED"
    definite = True
    stale_route = True


class ForeignProtocolError(ConnectFailedError):
    """What is named as a remoting port answers in another protocol: most likely it is a gRPC port."""


class ConnectionLostError(TransportError):
    """The connection broke before the answer: what was asked may have happened."""

    reason = "CONNECTION_LOST"
    stale_route = True


class RequestTimeoutError(TransportError, TimeoutError):
    """No answer in time: what was asked may have happened."""

    reason = "REQUEST_TIMEOUT"
    code = _DEADLINE_EXCEEDED


class ProtocolError(TransportError):
    """The peer speaks something else, or its answer does not parse."""

    reason = "PROTOCOL"
    code = _INTERNAL
    retriable = False


class CorruptMessageError(ProtomqError):
    """The CRC-32C of a received body is not the one that its producer computed; `metadata` says which message."""

    reason = "CORRUPT_MESSAGE"
    code = _DATA_LOSS


class SchemaError(ProtomqError, ValueError):
    """A received body is not what its consumer asks for: another content type or schema, or what the type's codec refuses.

    If a listener raises it, the message becomes a dead letter at once, with this text: another try would fail, too.
    """

    reason = "SCHEMA"
    code = _INVALID_ARGUMENT
    definite = True


class ServerError(ProtomqError):
    """A server answered with google.rpc.Status."""

    reason = "SERVER"
    definite = True


class InvalidArgumentError(ServerError):
    """The request does not parse, or a field has a value that it may not have; `field_violations` name the fields."""

    reason = "INVALID_ARGUMENT"
    code = _INVALID_ARGUMENT


class MessageTooLargeError(InvalidArgumentError):
    """Body, properties, request or number of messages over the limit named in `metadata`."""

    reason = "MESSAGE_TOO_LARGE"


class IllegalFilterError(InvalidArgumentError):
    """The expression is invalid in its language, or a module failed at a message. `metadata` holds line, column and position, and of that
    message topic, queue_id and queue_offset."""

    reason = "ILLEGAL_FILTER"


class IllegalDelayError(InvalidArgumentError):
    """The delay level does not exist, or the delay is below zero or longer than 40 days; `metadata` holds field, value and limit."""

    reason = "ILLEGAL_DELAY"


class IllegalReceiptError(InvalidArgumentError):
    """No broker has given this receipt, or it belongs to another broker, group or topic. `metadata` holds field and value."""

    reason = "ILLEGAL_RECEIPT"


class NotFoundError(ServerError):
    """What was named does not exist."""

    reason = "NOT_FOUND"
    code = _NOT_FOUND


class TopicNotFoundError(NotFoundError):
    """The topic does not exist at that broker or name server. While all brokers are away that had it, the error is NoRouteError."""

    reason = "TOPIC_NOT_FOUND"
    retriable = True
    stale_route = True


class QueueNotFoundError(NotFoundError):
    """The topic has no queue of that number on that broker."""

    reason = "QUEUE_NOT_FOUND"
    retriable = True
    stale_route = True


class OffsetNotFoundError(NotFoundError):
    """The consumer group has not committed an offset for that queue."""

    reason = "OFFSET_NOT_FOUND"


class GroupNotFoundError(NotFoundError):
    """The consumer group has committed and popped nothing there, and may have no settings."""

    reason = "GROUP_NOT_FOUND"


class BrokerNotFoundError(NotFoundError):
    """No broker of that name is registered."""

    reason = "BROKER_NOT_FOUND"
    retriable = True
    stale_route = True


class CallerGoneError(NotFoundError):
    """Nobody waits for the reply any more: the caller has gone, or its time is up. Drop the reply. If not `definite`, the caller may have
    it.
    """

    reason = "CALLER_GONE"


class TransactionNotFoundError(NotFoundError):
    """The handle names no open transaction. There never was one, its topic was deleted, or a fail-over took its half message back. Or it
    ended before the last 100,000 endings that the broker remembers. No broker asks about it.
    """

    reason = "TRANSACTION_NOT_FOUND"


class TransactionEndedError(ServerError):
    """The transaction has ended in another way: by another decision, or because no producer could say. `metadata` holds message_id and
    ending.
    """

    reason = "TRANSACTION_ENDED"
    code = _FAILED_PRECONDITION


class TopicExistsError(ServerError):
    """The topic exists with another configuration."""

    reason = "TOPIC_EXISTS"
    code = _ALREADY_EXISTS


class OffsetOutOfRangeError(ServerError):
    """A commit named an offset below 0 or beyond the end of its queue. Nothing was committed. `metadata` holds the range."""

    reason = "OFFSET_OUT_OF_RANGE"
    code = 11  # OUT_OF_RANGE


class TopicRecreatedError(ServerError):
    """The topic was deleted and created again: offsets of the old one mean nothing in the new one.

    Messages of the old topic that nobody consumed are gone. To go on with the new topic from its beginning, call `subscribe` (or `assign`)
    again. `metadata` holds topic, wanted and current incarnation.
    """

    reason = "TOPIC_RECREATED"
    code = _FAILED_PRECONDITION


class StaleReceiptError(ServerError):
    """None of these popped messages is held any more: each is done, dead, or handed out to another member. `metadata` names the first one.
    """

    reason = "STALE_RECEIPT"
    code = _FAILED_PRECONDITION


class GroupInUseError(ServerError):
    """The group cannot be deleted: it has members, or somebody has pulled for it within the last minute. `metadata` names one."""

    reason = "GROUP_IN_USE"
    code = _FAILED_PRECONDITION


class QueueNotOwnedError(ServerError):
    """A commit for a queue that its group has not given to the consumer, or whose lock the consumer has lost. `metadata`: consumer_group,
    topic, queue_ids (with commas), owner.
    """

    reason = "QUEUE_NOT_OWNED"
    code = _FAILED_PRECONDITION


class MemberUnknownError(ServerError):
    """The broker has not heard of this member in time and has removed it; the member joins again. `metadata`: consumer_group, client_id."""

    reason = "MEMBER_UNKNOWN"
    code = _FAILED_PRECONDITION


class TopicTypeMismatchError(ServerError):
    """The topic takes messages of one type (`Admin.create_topic`), and these have another type. Nothing was stored."""

    reason = "TOPIC_TYPE_MISMATCH"
    code = _FAILED_PRECONDITION


class GroupDisabledError(ServerError):
    """The settings of the consumer group forbid it to consume (`Admin.set_group`): an operator has switched it off."""

    reason = "GROUP_DISABLED"
    code = _FAILED_PRECONDITION
    retriable = True


class NotPermittedError(ServerError):
    """The topic or the broker does not allow it; another broker may."""

    reason = "NOT_PERMITTED"
    code = _PERMISSION_DENIED
    retriable = True
    stale_route = True


class BusyError(ServerError):
    """The server is there, but cannot do this now."""

    reason = "BUSY"
    code = _RESOURCE_EXHAUSTED
    retriable = True


class SystemBusyError(BusyError):
    """The lane is full or the queue time too long; `retry_delay_ms` says when to try again."""

    reason = "SYSTEM_BUSY"


class DiskFullError(BusyError):
    """The broker's disk is full beyond the limit; another broker may take the message."""

    reason = "DISK_FULL"


class TooManyError(BusyError):
    """Too many connections or held pulls of one kind."""

    reason = "TOO_MANY"


class ShuttingDownError(BusyError):
    """The server is stopping: use another broker."""

    reason = "SHUTTING_DOWN"
    code = _UNAVAILABLE
    stale_route = True


class QueueHealingError(BusyError):
    """Entries of the queue were found damaged; the broker heals them from its log. `retry_delay_ms` says when to try again."""

    reason = "QUEUE_HEALING"
    code = _UNAVAILABLE
    definite = False


class ReplicaBehindError(BusyError):
    """A slave does not have yet what was asked for; its master, or another slave, may. `retry_delay_ms` says when to try again."""

    reason = "REPLICA_BEHIND"
    code = _UNAVAILABLE
    stale_route = True


class NotEnoughReplicasError(BusyError):
    """Fewer slaves are in sync than a send needs; another broker may take the message."""

    reason = "NOT_ENOUGH_REPLICAS"
    code = _UNAVAILABLE


class NotMasterError(ServerError):
    """The request went to a slave, which changes nothing. Look the route up again: its master may be back."""

    reason = "NOT_MASTER"
    code = _FAILED_PRECONDITION
    retriable = True
    stale_route = True


class CallCancelledError(ServerError):
    """This call was held, and its caller has given it up. Over the remoting port only."""

    reason = "CANCELLED"
    code = _CANCELLED
    definite = False


class OrderPendingError(ServerError):
    """The order was not left, because nobody has taken an earlier order yet."""

    reason = "ORDER_PENDING"
    code = _FAILED_PRECONDITION


class StoreFailedError(ServerError):
    """A write or an fsync of the broker's log failed: it takes no more writes, and cannot say whether this one is stored."""

    reason = "STORE_FAILED"
    code = _FAILED_PRECONDITION
    retriable = True
    definite = False


class SequenceExpiredError(ServerError):
    """The broker cannot tell whether it has the message: it has forgotten the sequence number, and perhaps the producer."""

    reason = "SEQUENCE_EXPIRED"
    code = _FAILED_PRECONDITION
    definite = False


class SendOutOfOrderError(ServerError):
    """The broker lacks the message before this one (`previous_sequence`), and has not stored this one."""

    reason = "SEND_OUT_OF_ORDER"
    code = _FAILED_PRECONDITION


class ProducerFencedError(ServerError):
    """Another producer with the same id and a higher epoch has written since."""

    reason = "PRODUCER_FENCED"
    code = _FAILED_PRECONDITION


class ProducerIdTakenError(ServerError):
    """The message is not stored, because another message has its sequence: two producers have this id and epoch. `metadata` names both.

    Give each producer its own id (the default). A producer that starts again with its old id needs a higher epoch.
    """

    reason = "PRODUCER_ID_TAKEN"
    code = _ALREADY_EXISTS


class DeadlineExceededError(ServerError):
    """The deadline had passed before the server started the request, which was dropped. If not `definite`: it was done, but may not be on
    disk.
    """

    reason = "DEADLINE_EXCEEDED"
    code = _DEADLINE_EXCEEDED
    retriable = True


class UnknownMethodError(ServerError):
    """The server has no such method, or not by this transport."""

    reason = "UNKNOWN_METHOD"
    code = _UNIMPLEMENTED


class UnsupportedError(ServerError):
    """The server's version does not support what a field asks for; `metadata` names the field. Nothing was stored."""

    reason = "UNSUPPORTED"
    code = _UNIMPLEMENTED


class CorruptLogError(ServerError):
    """The requested messages are damaged on the broker's disk, or may be. `metadata` holds the position and, where they are known, topic,
    queue_id, queue_offset, next_offset (behind the damage) and is_lost. If that is "true", they never come back. For a look-up it has
    found_count, the number of newer messages found before it."""

    reason = "CORRUPT_LOG"
    code = _DATA_LOSS


class StaleRegistrationError(ServerError):
    """A registration with a higher epoch or newer start is in place."""

    reason = "STALE_REGISTRATION"
    code = _FAILED_PRECONDITION


class NameTakenError(ServerError):
    """The broker's name belongs to another broker with another store, so this one takes no sends. The route leads to the other one."""

    reason = "NAME_TAKEN"
    code = _FAILED_PRECONDITION
    retriable = True
    stale_route = True


class InternalError(ServerError):
    """A defect of protomq (the server's log has the trace), or a reason that this version does not know."""

    reason = "INTERNAL"
    code = _INTERNAL
    definite = False


_BY_REASON: Final[dict[str, type[ServerError]]] = {
    cls.reason: cls
    for cls in (
        InvalidArgumentError, MessageTooLargeError, IllegalFilterError, IllegalDelayError, IllegalReceiptError,
        StaleReceiptError, TopicNotFoundError, QueueNotFoundError, OffsetNotFoundError,
        GroupNotFoundError, BrokerNotFoundError, TopicExistsError, OffsetOutOfRangeError,
        TopicRecreatedError, GroupInUseError, QueueNotOwnedError, MemberUnknownError, TopicTypeMismatchError, GroupDisabledError,
        NotPermittedError,
        SystemBusyError, DiskFullError, TooManyError,
        ShuttingDownError, QueueHealingError, StoreFailedError, SequenceExpiredError, SendOutOfOrderError, ProducerFencedError,
        ProducerIdTakenError,
        DeadlineExceededError, UnknownMethodError, UnsupportedError, CorruptLogError, StaleRegistrationError, NameTakenError, InternalError,
        TransactionNotFoundError, TransactionEndedError, NotMasterError, ReplicaBehindError, NotEnoughReplicasError,
        CallerGoneError, CallCancelledError, OrderPendingError,
    )
}  # fmt: skip

# A status without ErrorInfo comes from gRPC itself or from a proxy: the code is all there is.
_BY_CODE: Final[dict[int, type[ProtomqError]]] = {
    _CANCELLED: ConnectionLostError,
    _INVALID_ARGUMENT: InvalidArgumentError,
    _DEADLINE_EXCEEDED: RequestTimeoutError,
    _NOT_FOUND: NotFoundError,
    _ALREADY_EXISTS: TopicExistsError,
    _PERMISSION_DENIED: NotPermittedError,
    _RESOURCE_EXHAUSTED: BusyError,
    _UNIMPLEMENTED: UnknownMethodError,
    _UNAVAILABLE: ConnectionLostError,
    _DATA_LOSS: CorruptLogError,
}


def error_from_status(status: RpcStatus) -> ProtomqError:
    """The exception for an error status: by its reason, else by its code."""
    by_reason = _BY_REASON.get(status.reason)
    cls: type[ProtomqError] = by_reason or _BY_CODE.get(status.code, InternalError)
    error = cls(
        status.message or status.reason or f"status code {status.code}",
        metadata={key: value for key, value in status.metadata.items() if key != "definite"},
        retry_delay_ms=status.retry_delay_ms,
        field_violations=status.field_violations,
    )
    error.code = status.code
    definite = status.metadata.get("definite")
    if definite in ("true", "false"):  # An older server, or a proxy, does not say it.
        error.definite = definite == "true"
    if status.reason and by_reason is None:
        error.reason = status.reason
    return error
