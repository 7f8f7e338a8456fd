"""The error that a service raises, and how it crosses the wire.

A service raises ServiceError. Both transports turn it into the same google.rpc.Status (AIP-193): a gRPC status code and
an ErrorInfo with a reason of proto/protomq/v1/error.proto. RetryInfo or BadRequest are added where they help. This
module knows no gRPC: `Code` repeats its seventeen codes, which are fixed for ever.

RULES is the one place that says what each reason means for a caller. The table in docs/wire.md repeats it, and
tests/unit/test_error_reasons.py compares it with that table, with error.proto, with the SDK's classes and with whoever raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from protomq.wire.status import RpcStatus, encode_status


class Code(IntEnum):
    """The gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


DEFINITE_KEY: Final = "definite"
"""In the metadata of every ErrorInfo: "true" or "false"."""


@dataclass(frozen=True, slots=True)
class ReasonRule:
    """What a reason promises.

    Attributes:
        code: its status code, always the same.
        definite: what was asked has not happened and will not; False: it may have happened, or may yet. It is about this request: an
            earlier attempt of the same send may have been stored. A single error may say otherwise.
        metadata: keys that always stand in the metadata, besides `definite`.
        optional: keys that stand there where they apply.
    """

    code: Code
    definite: bool
    metadata: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


RULES: Final[Mapping[str, ReasonRule]] = {
    "CALLER_GONE": ReasonRule(Code.NOT_FOUND, True, ("caller_id",)),
    "INVALID_ARGUMENT": ReasonRule(
        Code.INVALID_ARGUMENT, True, optional=("topic", "write_queues", "read_queues", "read_queues_min")
    ),
    "ILLEGAL_FILTER": ReasonRule(
        Code.INVALID_ARGUMENT, True, ("language", "position", "line", "column", "expected"), ("topic", "queue_id", "queue_offset")
    ),
    "MESSAGE_TOO_LARGE": ReasonRule(
        Code.INVALID_ARGUMENT,
        True,
        optional=("field", "size_bytes", "limit_bytes", "count", "limit"),
    ),
    "TOPIC_NOT_FOUND": ReasonRule(Code.NOT_FOUND, True, ("topic",), ("missing_brokers", "registered_brokers")),
    "QUEUE_NOT_FOUND": ReasonRule(
        Code.NOT_FOUND, True, ("topic", "queue_id"), ("queue_ids", "read_queues", "write_queues")
    ),
    "TOPIC_EXISTS": ReasonRule(Code.ALREADY_EXISTS, True, ("topic",), ("wanted", "current")),
    "TOPIC_RECREATED": ReasonRule(Code.FAILED_PRECONDITION, True, ("topic", "wanted", "current")),
    "GROUP_NOT_FOUND": ReasonRule(Code.NOT_FOUND, True, ("consumer_group",)),
    "GROUP_IN_USE": ReasonRule(Code.FAILED_PRECONDITION, True, ("consumer_group", "member")),
    "TOPIC_TYPE_MISMATCH": ReasonRule(
        Code.FAILED_PRECONDITION, True, ("topic", "topic_type", "message_type")
    ),
    "GROUP_DISABLED": ReasonRule(Code.FAILED_PRECONDITION, True, ("consumer_group",)),
    "NOT_PERMITTED": ReasonRule(Code.PERMISSION_DENIED, True, ("topic",)),
    "SYSTEM_BUSY": ReasonRule(Code.RESOURCE_EXHAUSTED, True, ("lane",)),
    "DISK_FULL": ReasonRule(Code.RESOURCE_EXHAUSTED, True),
    # The write that failed may be on the disk all the same, and a start finds it there.
    "STORE_FAILED": ReasonRule(Code.FAILED_PRECONDITION, False),
    "SHUTTING_DOWN": ReasonRule(Code.UNAVAILABLE, True),
    "SEQUENCE_EXPIRED": ReasonRule(
        Code.FAILED_PRECONDITION,
        False,
        ("producer_id", "producer_epoch", "sequence"),
        ("previous_sequence",),
    ),
    "SEND_OUT_OF_ORDER": ReasonRule(
        Code.FAILED_PRECONDITION, True, ("producer_id", "producer_epoch", "previous_sequence")
    ),
    "PRODUCER_FENCED": ReasonRule(
        Code.FAILED_PRECONDITION, True, ("producer_id", "producer_epoch", "newer_epoch")
    ),
    "PRODUCER_ID_TAKEN": ReasonRule(
        Code.ALREADY_EXISTS, True, ("producer_id", "producer_epoch", "sequence")
    ),
    "DEADLINE_EXCEEDED": ReasonRule(Code.DEADLINE_EXCEEDED, True),
    "CANCELLED": ReasonRule(Code.CANCELLED, False),
    "UNKNOWN_METHOD": ReasonRule(Code.UNIMPLEMENTED, True, optional=("method", "lane", "lanes")),
    "UNSUPPORTED": ReasonRule(Code.UNIMPLEMENTED, True, ("field",)),
    "CORRUPT_LOG": ReasonRule(
        Code.DATA_LOSS, True, optional=("position", "topic", "queue_id", "queue_offset", "next_offset", "is_lost", "found_count")
    ),
    "OFFSET_OUT_OF_RANGE": ReasonRule(
        Code.OUT_OF_RANGE,
        True,
        ("topic", "queue_id", "queue_offset", "min_offset", "end_offset"),
    ),
    # No server answers it: a queue without a committed offset is left out of GetOffsets.
    "OFFSET_NOT_FOUND": ReasonRule(Code.NOT_FOUND, True),
    "INTERNAL": ReasonRule(Code.INTERNAL, False),
    "BROKER_NOT_FOUND": ReasonRule(Code.NOT_FOUND, True, ("broker_name",), ("broker_id",)),
    "TOO_MANY": ReasonRule(Code.RESOURCE_EXHAUSTED, True, ("what", "limit")),
    "STALE_REGISTRATION": ReasonRule(
        Code.FAILED_PRECONDITION,
        True,
        ("broker_name", "broker_id", "incarnation", "incarnation_min"),
    ),
    "NAME_TAKEN": ReasonRule(
        Code.FAILED_PRECONDITION, True, ("broker_name", "broker_id", "grpc_address")
    ),
    # Not definite, since the answer to a repeated send looks at the queue: the message is stored then.
    "QUEUE_HEALING": ReasonRule(Code.UNAVAILABLE, False, ("queue_offset",)),
    "STALE_RECEIPT": ReasonRule(
        Code.FAILED_PRECONDITION, True, ("topic", "queue_id", "queue_offset", "never_acknowledged")
    ),
    "ILLEGAL_RECEIPT": ReasonRule(Code.INVALID_ARGUMENT, True, ("field", "value")),
    "ILLEGAL_DELAY": ReasonRule(Code.INVALID_ARGUMENT, True, ("field", "value", "limit")),
    "QUEUE_NOT_OWNED": ReasonRule(
        Code.FAILED_PRECONDITION, True, ("consumer_group", "topic", "queue_ids", "owner")
    ),
    "MEMBER_UNKNOWN": ReasonRule(Code.FAILED_PRECONDITION, True, ("consumer_group", "client_id")),
    "TRANSACTION_NOT_FOUND": ReasonRule(Code.NOT_FOUND, True, ("message_id",)),
    "TRANSACTION_ENDED": ReasonRule(Code.FAILED_PRECONDITION, True, ("message_id", "ending")),
    "NOT_MASTER": ReasonRule(Code.FAILED_PRECONDITION, True, (), ("broker_name", "broker_id")),
    "REPLICA_BEHIND": ReasonRule(
        Code.UNAVAILABLE, True, ("topic", "queue_id", "queue_offset", "end_offset")
    ),
    "NOT_ENOUGH_REPLICAS": ReasonRule(
        Code.UNAVAILABLE, True, ("in_sync_count", "min_in_sync_replicas")
    ),
    "ORDER_PENDING": ReasonRule(Code.FAILED_PRECONDITION, True, ("broker_name",)),
}
"""By reason, every value of ErrorReason."""


class ServiceError(Exception):
    """A refusal that goes to the caller. Never holds a trace or anything else that is not meant for the caller.

    The metadata say whether it is definite: as RULES has it, or as `definite` says. If a peer's answer is passed on, as the peer said.
    """

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_delay_ms: int | None = None,
        field_violations: Sequence[tuple[str, str]] = (),
        definite: bool | None = None,
    ) -> None:
        assert code != Code.OK, "an error is not OK"
        super().__init__(message)
        self.code = Code(code)
        self.reason = reason
        self.message = message
        rule = RULES.get(reason)
        if definite is None:
            definite = rule is not None and rule.definite
        self.metadata: Mapping[str, str] = {
            DEFINITE_KEY: "true" if definite else "false",
            **(metadata or {}),
        }
        self.retry_delay_ms = retry_delay_ms
        self.field_violations = tuple(field_violations)
        self._encoded: bytes | None = None

    def to_status(self) -> RpcStatus:
        """The error as it crosses the wire."""
        return RpcStatus(
            int(self.code),
            self.message,
            self.reason,
            self.metadata,
            self.retry_delay_ms,
            self.field_violations,
        )

    def encode(self) -> bytes:
        """Serialised google.rpc.Status; made once, since one refusal may be the answer to thousands of calls."""
        if self._encoded is None:
            self._encoded = encode_status(self.to_status())
        return self._encoded

    def __str__(self) -> str:
        return f"{self.code.name}/{self.reason}: {self.message}"


def invalid_argument(
    field: str, description: str, *, metadata: Mapping[str, str] | None = None
) -> ServiceError:
    """INVALID_ARGUMENT that names the field, by its name in the .proto file ("": the whole request). `metadata`: the values that the
    description uses.
    """
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        f"{field}: {description}" if field else description,
        metadata=metadata,
        field_violations=((field, description),),
    )


def unsupported(field: str, message: str) -> ServiceError:
    """UNIMPLEMENTED for what a field asks for."""
    return ServiceError(Code.UNIMPLEMENTED, "UNSUPPORTED", message, metadata={"field": field})


def unparsable(message_name: str) -> ServiceError:
    """INVALID_ARGUMENT for bytes that are not a message of that type."""
    return ServiceError(
        Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", f"the request does not parse as {message_name}"
    )


def system_busy(lane: str, retry_delay_ms: int) -> ServiceError:
    """RESOURCE_EXHAUSTED: the lane is full or the queue time stays too long; nothing was done."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "SYSTEM_BUSY",
        f"the lane {lane} is overloaded; try again after the delay, or another broker",
        metadata={"lane": lane},
        retry_delay_ms=retry_delay_ms,
    )


def request_too_large(method: str, size_bytes: int, limit_bytes: int) -> ServiceError:
    """INVALID_ARGUMENT: the method takes no requests of that size."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "MESSAGE_TOO_LARGE",
        f"a request of {size_bytes} bytes: {method} takes {limit_bytes} at most; send less at a time",
        metadata={"size_bytes": str(size_bytes), "limit_bytes": str(limit_bytes)},
    )


def too_many(
    what: str, limit: int, message: str, *, retry_delay_ms: int | None = None
) -> ServiceError:
    """RESOURCE_EXHAUSTED: there is the most of `what` already that is allowed, `limit`."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "TOO_MANY",
        message,
        metadata={"what": what, "limit": str(limit)},
        retry_delay_ms=retry_delay_ms,
    )


def corrupt_log(message: str, known: Mapping[str, object] = MappingProxyType({})) -> ServiceError:
    """DATA_LOSS: what was asked for is damaged on disk. `known`: what is known of the place, by the keys of docs/wire.md."""
    return ServiceError(
        Code.DATA_LOSS,
        "CORRUPT_LOG",
        message,
        metadata={key: str(value) for key, value in known.items()},
    )


def no_request(flags: int, status: int) -> ServiceError:
    """INVALID_ARGUMENT: a frame has flags that are not known, or the status of an answer."""
    if status:
        return invalid_argument("status", f"is {status}: a request has the status 0")
    return invalid_argument(
        "flags", f"are {flags:#04x}: only bit 1 (one-way) is known in a request, all others are 0"
    )


def unknown_method(name: str) -> ServiceError:
    """UNIMPLEMENTED: this server has no such method."""
    return ServiceError(
        Code.UNIMPLEMENTED,
        "UNKNOWN_METHOD",
        f"this server has no method {name}",
        metadata={"method": name},
    )


def internal() -> ServiceError:
    """INTERNAL: a defect; the trace is in the server's log and nowhere else."""
    return ServiceError(Code.INTERNAL, "INTERNAL", "a defect of the server; its log has the trace")


SHUTTING_DOWN = ServiceError(
    Code.UNAVAILABLE, "SHUTTING_DOWN", "the server is stopping; use another one"
)
DEADLINE_EXCEEDED = ServiceError(
    Code.DEADLINE_EXCEEDED,
    "DEADLINE_EXCEEDED",
    "the deadline had passed before the call was started; it was dropped",
)
CANCELLED = ServiceError(Code.CANCELLED, "CANCELLED", "its caller has given the call up")
