"""Reckoning the head of a segment again from its CRC.

A head has no room for padding, so none can be forged that ends in the CRC of the one that was lost. But most of what it said is known. A
CRC-32C tells four octets that stand together, if all the rest is known: the position to which the log was synced, or the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protomq.wire.hashing import crc32c, extend_crc32c
from protomq.wire.record import SEAL_COVERED_BYTES

from .crc_forge import bytes_between, unwind_crc32c
from .seals import encode_head

_STORE_TIME_AT: Final = 31
_SYNCED_POSITION_AT: Final = 40


@dataclass(frozen=True, slots=True)
class HeadBounds:
    """What a head can have said, by the seals before and behind it.

    Attributes: epochs: the possible ones, likely ones first; store_time_ms, synced_position: the least and the most, both included.
    """

    epochs: Sequence[int]
    store_time_ms: tuple[int, int]
    synced_position: tuple[int, int]


def find_head(position: int, previous_crc32c: int, sealed_crc32c: int, bounds: HeadBounds) -> bytes | None:
    """The head at `position` that has this CRC behind the one before it, and says what it can have said; None if there is none.

    The seal before a head gives it its time, and a log's first head has nothing synced. Where two times fit, the newer one is taken.
    """
    ranges = {_SYNCED_POSITION_AT: bounds.synced_position, _STORE_TIME_AT: bounds.store_time_ms}
    for solved_at, (least, most) in ranges.items():
        for epoch, high in itertools.product(bounds.epochs, range(most >> 32, (least >> 32) - 1, -1)):
            values = {field_at: first for field_at, (first, _) in ranges.items()} | {solved_at: high << 32}
            head = encode_head(
                position,
                previous_crc32c,
                epoch=epoch,
                store_time_ms=values[_STORE_TIME_AT],
                synced_position=values[_SYNCED_POSITION_AT],
            )
            covered = head[:SEAL_COVERED_BYTES]
            before = extend_crc32c(crc32c(previous_crc32c.to_bytes(4, "little")), covered[:solved_at])
            low = bytes_between(before, unwind_crc32c(sealed_crc32c, covered[solved_at + 4 :]))
            if least <= (high << 32) + int.from_bytes(low, "little") <= most:
                return covered[:solved_at] + low + covered[solved_at + 4 :] + sealed_crc32c.to_bytes(4, "little")
    return None
