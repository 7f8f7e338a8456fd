"""Reads a PullRequest, without a look at the store. A held pull is read again when it is answered: 17,000 parsed requests take 10 MB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from protomq.v1.pull_service_pb2 import FilterType, PullRequest
from protomq_runtime.errors import invalid_argument, unparsable

from .filter_searches import illegal_filter
from .filters.errors import FilterError
from .filters.tag_expression import parse_tags
from .pull_answer import SIZE_DEFAULT_BYTES

if TYPE_CHECKING:
    from protomq_runtime.call import Call

GRPC_SIZE_MAX_BYTES = SIZE_DEFAULT_BYTES - (512 << 10)
"""Most bytes of messages in an answer over gRPC. With the index of up to 32,768 messages it fits into the 4 MiB that a gRPC client accepts
by default. An answer also stays in memory until the client reads it. One message is always given, even if the answer exceeds 4 MiB.
"""

HOLD_MAX_MS: Final = 86_400_000
"""A day: whoever asks for a longer hold has mistaken the unit."""


def shortened_hold_ms(hold_ms: int, hold_max_ms: int) -> int:
    """Returns how long to hold a call that asks for `hold_ms`: `hold_max_ms` at most, since brokers may have other settings than a client
    knows. Raises ServiceError.
    """
    if not 0 <= hold_ms <= HOLD_MAX_MS:
        raise invalid_argument("hold_ms", f"must be 0 to {HOLD_MAX_MS}")
    return min(hold_ms, hold_max_ms)


def parse_request(call: Call) -> PullRequest:
    """Returns the request as it was sent. Raises ServiceError."""
    try:
        return PullRequest.FromString(bytes(call.payload))
    except DecodeError as error:
        raise unparsable("protomq.v1.PullRequest") from error


def request_of(call: Call) -> PullRequest:
    """Returns the request of a call, as it is to be answered."""
    request = parse_request(call)
    complete(call, request)
    return request


def complete(call: Call, request: PullRequest) -> None:
    """Sets what follows from the rest: tags from a filter of tags, and the size that the caller takes. Raises ServiceError."""
    if request.filter_type or request.filter:
        read_filter(request)
    if call.transport == "grpc" or request.plain_bodies:
        wanted = request.size_max_bytes or SIZE_DEFAULT_BYTES
        request.size_max_bytes = min(wanted, GRPC_SIZE_MAX_BYTES)


def read_filter(request: PullRequest) -> None:
    """Moves the tags of an `a || b` filter into `tags`. Raises ServiceError for an unknown filter language."""
    if not request.filter_type:
        raise invalid_argument("filter_type", "says in which language `filter` is written")
    if request.filter_type != FilterType.FILTER_TYPE_TAG:
        return
    if request.tags:
        raise invalid_argument("tags", "cannot stand beside a filter")
    try:
        request.tags.extend(parse_tags(request.filter))
    except FilterError as error:
        raise illegal_filter(error, "TAG") from error
