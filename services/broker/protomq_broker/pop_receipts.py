"""Receipts of popped messages. A member of a group gets one with a hand-out, and gives it back to settle the messages. Pure.

    receipt    version, CRC-32C of all behind it, incarnation, queue, number, pop time, invisible time, attempt, epoch, broker, group, topic

A receipt and a queue offset name one delivery of one message. The broker compares every field that can differ, so any door of the broker
can settle what another door gave out. It compares broker, group and topic with the request, and incarnation, queue, number and pop time
with the state. Number and pop time also differ for two messages that had one offset before and after a truncation; the attempt follows from
them. Epoch and invisible time are for people who read a receipt.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from protomq.wire.hashing import crc32c
from protomq_runtime.errors import Code, ServiceError

_HEAD: Final = struct.Struct("<BI")
_BODY: Final = struct.Struct("<QIQQIII")
_VERSION: Final = 1
_SEPARATOR: Final = "/"
"""A character that no name contains."""


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
    """Encodes a receipt for a caller."""
    body = _BODY.pack(*receipt[3:]) + _SEPARATOR.join(receipt[:3]).encode()
    return _HEAD.pack(_VERSION, crc32c(body)) + body


def decode_receipt(octets: bytes) -> Receipt:
    """Decodes a receipt. Raises ServiceError ILLEGAL_RECEIPT for other bytes."""
    try:
        version, crc = _HEAD.unpack_from(octets)
        body = octets[_HEAD.size :]
        if version != _VERSION or crc32c(body) != crc:
            raise ValueError
        numbers = _BODY.unpack_from(body)
        broker_name, group, topic = body[_BODY.size :].decode().split(_SEPARATOR)
    except (struct.error, UnicodeDecodeError, ValueError):
        raise illegal_receipt("receipt", "", "it is not a receipt of a pop") from None
    return Receipt(broker_name, group, topic, *numbers)


def check_receipt(receipt: Receipt, broker_name: str, group: str, topic: str) -> None:
    """Raises ServiceError ILLEGAL_RECEIPT for a receipt of another broker, group or topic."""
    if receipt[:3] == (broker_name, group, topic):
        return
    wanted = (("broker_name", broker_name), ("consumer_group", group), ("topic", topic))
    for (field, value), found in zip(wanted, receipt[:3], strict=True):
        if found != value:
            raise illegal_receipt(field, found, f"it is of the {field} {found!r}, this is {value!r}")


def illegal_receipt(field: str, value: str, text: str) -> ServiceError:
    """Makes an INVALID_ARGUMENT error for a receipt that can settle nothing here."""
    return ServiceError(
        Code.INVALID_ARGUMENT,
        "ILLEGAL_RECEIPT",
        f"receipt: {text}; give receipts back to the broker, group and topic that they come from. Nothing was changed",
        metadata={"field": field, "value": value},
    )


def stale_receipt(topic: str, queue_id: int, queue_offset: int, *, never_acknowledged: bool) -> ServiceError:
    """Makes a FAILED_PRECONDITION error for a request whose receipts hold none of its messages any more.

    `never_acknowledged`: it is known that these receipts have not acknowledged them before, either.
    """
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "STALE_RECEIPT",
        f"message {queue_offset} of queue {queue_id} of {topic!r} is not held by this receipt any more. It is done, dead, or somebody else"
        " has it: drop it. Nothing was changed",
        metadata={
            "topic": topic,
            "queue_id": str(queue_id),
            "queue_offset": str(queue_offset),
            "never_acknowledged": "true" if never_acknowledged else "false",
        },
    )
