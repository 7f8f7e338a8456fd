"""Messages that prove themselves: a message's id stands in its key, and its body follows from its id.

id     <producer>-<sequence>-<size of the body>      "p3-17-200"
body   SHAKE-128 of the run's name and the id, cut to the size: no two are alike, and any byte can be checked
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class MessageName(NamedTuple):
    """The parts of an id."""

    producer: str
    sequence: int
    size_bytes: int


def message_id(producer: str, sequence: int, size_bytes: int) -> str:
    """The id of a message."""
    return f"{producer}-{sequence}-{size_bytes}"


def parse_id(text: str) -> MessageName | None:
    """The parts of an id, None if it is none."""
    producer, _, rest = text.partition("-")
    sequence, _, size = rest.partition("-")
    if not producer or not sequence.isdecimal() or not size.isdecimal():
        return None
    return MessageName(producer, int(sequence), int(size))


def body_of(run: str, id_: str) -> bytes:
    """The body that the message of this id has in this run."""
    name = parse_id(id_)
    assert name is not None, id_
    return hashlib.shake_128(f"{run}/{id_}".encode()).digest(name.size_bytes)


def is_body_of(run: str, id_: str, body: bytes) -> bool:
    """Whether every byte is right."""
    name = parse_id(id_)
    return name is not None and len(body) == name.size_bytes and body == body_of(run, id_)
