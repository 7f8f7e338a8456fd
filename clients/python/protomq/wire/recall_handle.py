"""Recall handles: what names a delayed message to RecallMessage. Text of letters, digits, - and _: base64 without padding of

    version u8 = 1 | position u64 | due_time_ms u64 | producer id u64 | epoch u32 | sequence u64 | name of the broker, UTF-8

all of it little-endian. The answer to a request of several messages names the first; those of the others differ in what differs.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import Final, NamedTuple

_HEAD: Final = struct.Struct("<BQQQIQ")
_VERSION: Final = 1
_NO_HANDLE: Final = "it is not a handle of a send"


class RecallHandle(NamedTuple):
    """Names a delayed message: all of it is compared.

    Attributes:
        broker_name: where it is.
        position: where its record stood when it was sent; one that was carried forward is found by its due time.
        due_time_ms: when it is delivered.
        message_id: producer id, epoch, sequence.
    """

    broker_name: str
    position: int
    due_time_ms: int
    message_id: tuple[int, int, int]


def encode_handle(handle: RecallHandle) -> str:
    """As a caller gets it."""
    octets = _HEAD.pack(_VERSION, handle.position, handle.due_time_ms, *handle.message_id)
    return base64.urlsafe_b64encode(octets + handle.broker_name.encode()).decode().rstrip("=")


def decode_handle(text: str) -> RecallHandle:
    """Raises ValueError for what is no handle."""
    try:
        octets = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        version, position, due_time_ms, producer_id, epoch, sequence = _HEAD.unpack_from(octets)
        broker_name = octets[_HEAD.size :].decode()
    except (binascii.Error, struct.error, UnicodeError, ValueError):
        raise ValueError(_NO_HANDLE) from None
    handle = RecallHandle(broker_name, position, due_time_ms, (producer_id, epoch, sequence))
    # Of one that was cut, bits may be left over.
    if version != _VERSION or encode_handle(handle) != text.rstrip("="):
        raise ValueError(_NO_HANDLE)
    return handle
