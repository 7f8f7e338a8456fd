"""Errors on the gRPC port: a ServiceError as a status with its details, and what of a call's context needs care."""

from __future__ import annotations

from typing import Any, Final, NoReturn, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from protomq.wire.status import GRPC_STATUS_DETAILS_KEY

from .errors import ServiceError, unparsable

_STATUS_BY_CODE: Final = {status.value[0]: status for status in grpc.StatusCode}


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    await context.abort(
        _STATUS_BY_CODE[int(error.code)],
        error.message,
        trailing_metadata=((GRPC_STATUS_DETAILS_KEY, error.encode()),),
    )
    raise AssertionError("abort raises")


async def parse(message_class: Any, payload: bytes, context: Any) -> Any:
    """A request; gRPC's own deserialisers answer UNKNOWN and log a traceback for one that does not parse."""
    try:
        return message_class.FromString(payload)
    except DecodeError:
        await abort(context, unparsable(message_class.DESCRIPTOR.full_name))


def deadline_of(context: grpc.aio.ServicerContext[Any, Any], now: float) -> float | None:
    left = cast("float | None", context.time_remaining())  # The stubs forget the None.
    return None if left is None else now + left


def plain_peer(peer: str) -> str:
    """`127.0.0.1:1234` for gRPC's `ipv4:127.0.0.1:1234`, `[::1]:1234` for `ipv6:%5B::1%5D:1234`."""
    scheme, _, address = peer.partition(":")
    return unquote(address) if scheme in ("ipv4", "ipv6") else peer
