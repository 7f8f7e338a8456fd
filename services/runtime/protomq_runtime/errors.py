"""The error that a service raises, and how it crosses the wire.

A service raises ServiceError; both transports turn it into the same google.rpc.Status (AIP-193): a gRPC status code, an
ErrorInfo with a reason of proto/protomq/v1/error.proto, and RetryInfo or BadRequest where they help. This module knows
no gRPC: `Code` repeats its seventeen codes, which are fixed for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

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


class ServiceError(Exception):
    """A refusal that the caller is told of. Never holds a trace or anything else that is not meant for the caller."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_delay_ms: int | None = None,
        field_violations: Sequence[tuple[str, str]] = (),
    ) -> None:
        assert code != Code.OK, "an error is not OK"
        super().__init__(message)
        self.code = Code(code)
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = metadata or {}
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


def invalid_argument(field: str, description: str) -> ServiceError:
    """INVALID_ARGUMENT that names the field, by its name in the .proto file."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        f"{field}: {description}",
        field_violations=((field, description),),
    )


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
