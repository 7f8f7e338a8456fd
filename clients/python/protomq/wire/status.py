"""google.rpc.Status with ErrorInfo, RetryInfo and BadRequest, without a dependency.

The classes are built in a private descriptor pool: wire-compatible with googleapis-common-protos, which the application may
have in any version, or not at all. Rules: AIP-193. The domain is always "protomq".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message_factory

DOMAIN: Final = "protomq"
GRPC_STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
POOL: Final = descriptor_pool.DescriptorPool()
"""Where google.rpc.Status and its details are described; a server's reflection hands them out, so that tools can show errors."""


@dataclass(frozen=True, slots=True)
class RpcStatus:
    """An error as it crosses the wire.

    `code` is a gRPC status code. `reason` is a value of ErrorReason without prefix, "" if the peer gave none. `retry_delay_ms`
    is None without a RetryInfo. `field_violations` are pairs (field, description).
    """

    code: int
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry_delay_ms: int | None = None
    field_violations: Sequence[tuple[str, str]] = ()


def encode_status(status: RpcStatus) -> bytes:
    """Serialised google.rpc.Status."""
    message = _Status(code=status.code, message=status.message)
    if status.reason:
        _pack(
            message, _ErrorInfo(reason=status.reason, domain=DOMAIN, metadata=dict(status.metadata))
        )
    if status.retry_delay_ms is not None:
        seconds, rest_ms = divmod(status.retry_delay_ms, 1000)
        _pack(message, _RetryInfo(retry_delay={"seconds": seconds, "nanos": rest_ms * 1_000_000}))
    if status.field_violations:
        violations = [
            {"field": name, "description": text} for name, text in status.field_violations
        ]
        _pack(message, _BadRequest(field_violations=violations))
    encoded: bytes = message.SerializeToString()
    return encoded


def decode_status(data: bytes) -> RpcStatus:
    """What `encode_status` made, or any peer's google.rpc.Status. Raises google.protobuf.message.DecodeError for garbage."""
    message = _Status.FromString(data)
    reason, metadata, retry_delay_ms = "", {}, None
    violations: list[tuple[str, str]] = []
    for detail in message.details:
        name = detail.type_url.rpartition("/")[2]
        if name == "google.rpc.ErrorInfo":
            info = _ErrorInfo.FromString(detail.value)
            reason, metadata = info.reason, dict(info.metadata)
        elif name == "google.rpc.RetryInfo":
            delay = _RetryInfo.FromString(detail.value).retry_delay
            retry_delay_ms = delay.seconds * 1000 + delay.nanos // 1_000_000
        elif name == "google.rpc.BadRequest":
            violations = [
                (v.field, v.description)
                for v in _BadRequest.FromString(detail.value).field_violations
            ]
    return RpcStatus(
        message.code, message.message, reason, metadata, retry_delay_ms, tuple(violations)
    )


def _pack(status: Any, detail: Any) -> None:
    # add(), not append(): the Any of the private pool is another class than any_pb2's.
    status.details.add(
        type_url=f"type.googleapis.com/{detail.DESCRIPTOR.full_name}",
        value=detail.SerializeToString(),
    )


def _build_classes(pool: descriptor_pool.DescriptorPool) -> tuple[Any, ...]:
    field_type = descriptor_pb2.FieldDescriptorProto
    for dependency in (any_pb2, duration_pb2):
        pool.AddSerializedFile(dependency.DESCRIPTOR.serialized_pb)
    file = descriptor_pb2.FileDescriptorProto(
        name="google/rpc/protomq_mirror.proto",
        package="google.rpc",
        syntax="proto3",
        dependency=[any_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name],
    )

    def add(
        message: Any,
        name: str,
        number: int,
        kind: int,
        *,
        repeated: bool = False,
        type_name: str = "",
    ) -> None:
        label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
        message.field.add(
            name=name, number=number, type=kind, label=label, type_name=type_name or None
        )

    status = file.message_type.add(name="Status")
    add(status, "code", 1, field_type.TYPE_INT32)
    add(status, "message", 2, field_type.TYPE_STRING)
    add(
        status,
        "details",
        3,
        field_type.TYPE_MESSAGE,
        repeated=True,
        type_name=".google.protobuf.Any",
    )
    info = file.message_type.add(name="ErrorInfo")
    add(info, "reason", 1, field_type.TYPE_STRING)
    add(info, "domain", 2, field_type.TYPE_STRING)
    entry = info.nested_type.add(name="MetadataEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, field_type.TYPE_STRING)
    add(entry, "value", 2, field_type.TYPE_STRING)
    add(
        info,
        "metadata",
        3,
        field_type.TYPE_MESSAGE,
        repeated=True,
        type_name=".google.rpc.ErrorInfo.MetadataEntry",
    )
    retry = file.message_type.add(name="RetryInfo")
    add(retry, "retry_delay", 1, field_type.TYPE_MESSAGE, type_name=".google.protobuf.Duration")
    bad = file.message_type.add(name="BadRequest")
    violation = bad.nested_type.add(name="FieldViolation")
    add(violation, "field", 1, field_type.TYPE_STRING)
    add(violation, "description", 2, field_type.TYPE_STRING)
    add(
        bad,
        "field_violations",
        1,
        field_type.TYPE_MESSAGE,
        repeated=True,
        type_name=".google.rpc.BadRequest.FieldViolation",
    )
    pool.Add(file)
    names = ("Status", "ErrorInfo", "RetryInfo", "BadRequest")
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"google.rpc.{name}"))
        for name in names
    )


_Status, _ErrorInfo, _RetryInfo, _BadRequest = _build_classes(POOL)
