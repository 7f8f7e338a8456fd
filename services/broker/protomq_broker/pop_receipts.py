"""Receipts of popped messages: what a member of a group gets with a hand-out, and gives back to settle it. Pure.

    receipt    version, CRC-32C of all behind it, incarnation, queue, number, pop time, invisible time, attempt, epoch, broker, group, topic

A receipt and a queue offset name one delivery of one message. All that can differ is compared, so that any door of the broker can settle
what another one gave out: broker, group and topic with the request, incarnation, queue, number and pop time with the state. Number and pop
time tell apart what stood at one offset in two lives of a log; the attempt follows from them. Epoch and invisible time say where a receipt
comes from, for who reads it.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from protomq.wire.hashing import crc32c
from protomq_runtime.errors import Code, ServiceError

_HEAD: Final = struct.Struct("<BI")
_BODY: Final = struct.Struct("<QIQQIII")
_VERSION: Final = 1
_SEPARATOR: Final = b"/"
"""Stands in no name."""


class Receipt(NamedTuple):
    """See the module's docstring. Times in milliseconds."""

    broker_name: str
    group: str
    topic: str
    incarnation: int
    queue_id: int
    number: int
    time_ms: int
    invisible_ms: int
    attempt: int
    epoch: int


def encode_receipt(receipt: Receipt) -> bytes:
    """As a caller gets it."""
    names = _SEPARATOR.join(name.encode() for name in receipt[:3])
    body = _BODY.pack(*receipt[3:]) + names
    return _HEAD.pack(_VERSION, crc32c(body)) + body


def decode_receipt(octets: bytes) -> Receipt:
    """Raises ServiceError ILLEGAL_RECEIPT for what is none."""
    try:
        version, crc = _HEAD.unpack_from(octets)
        body = octets[_HEAD.size :]
        if version != _VERSION or crc32c(body) != crc:
            raise ValueError
        numbers = _BODY.unpack_from(body)
        broker_name, group, topic = body[_BODY.size :].decode().split("/")
    except (struct.error, UnicodeDecodeError, ValueError):
        raise illegal_receipt("receipt", "", "it is not a receipt of a pop") from None
    return Receipt(broker_name, group, topic, *numbers)


def check_receipt(receipt: Receipt, broker_name: str, group: str, topic: str) -> None:
    """Raises ServiceError ILLEGAL_RECEIPT for a receipt of somebody else."""
    wanted = (("broker_name", broker_name), ("consumer_group", group), ("topic", topic))
    for (field, value), found in zip(wanted, receipt[:3], strict=True):
        if found != value:
            raise illegal_receipt(field, found, f"it is of the {field} {found!r}, this is {value!r}")


def illegal_receipt(field: str, value: str, text: str) -> ServiceError:
    """INVALID_ARGUMENT for a receipt that cannot settle anything here."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "ILLEGAL_RECEIPT",
        f"receipt: {text}; give receipts back to the broker, group and topic that they come from. Nothing was changed",
        metadata={"field": field, "value": value},
    )


def stale_receipt(topic: str, queue_id: int, queue_offset: int) -> ServiceError:
    """FAILED_PRECONDITION for a request of whose messages none is held any more."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "STALE_RECEIPT",
        f"message {queue_offset} of queue {queue_id} of {topic!r} is not held by this receipt any more: it is done, dead, or somebody else"
        " has it; drop it. Nothing was changed",
        metadata={
            "topic": topic,
            "queue_id": str(queue_id),
            "queue_offset": str(queue_offset),
        },
    )
