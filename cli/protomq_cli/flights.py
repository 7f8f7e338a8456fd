"""The demo's data: the 336,776 flights that left New York in 2013, as messages, and the proof that all came back.

A row of the CSV becomes a message. Its key is the tail number, its tag the carrier, its body the row as JSON, with
numbers as numbers and null for `NA`. 2,512 rows have no tail number and therefore no key.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

FLIGHT_COUNT: Final = 336_776
KEYLESS_COUNT: Final = 2_512

_TEXT_COLUMNS: Final = frozenset(("carrier", "tailnum", "origin", "dest", "time_hour"))
_MISSING: Final = "NA"


class Flight(NamedTuple):
    """A message of the demo; `key` is "" where the row has no tail number."""

    key: str
    tag: str
    body: bytes


def read_flights(path: Path, count_max: int | None = None) -> Iterator[Flight]:
    """The rows of flights.csv in their order, the first `count_max` of them."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        header = next(rows)
        key_at, tag_at = header.index("tailnum"), header.index("carrier")
        numeric = [name not in _TEXT_COLUMNS for name in header]
        # One encoder for all rows: json.dumps with arguments makes one each time.
        encode = json.JSONEncoder(separators=(",", ":")).encode
        for row in islice(rows, count_max):
            values = [
                None if text == _MISSING else int(text) if number else text
                for text, number in zip(row, numeric, strict=True)
            ]
            key = "" if row[key_at] == _MISSING else row[key_at]
            yield Flight(key, row[tag_at], encode(dict(zip(header, values, strict=True))).encode())


class RoundTripCheck:
    """Compares what was received with what was sent: every message once, and those of one key in the order of sending.

    It keeps only CRCs, 4 bytes a message. `sent` and `received` take the CRC-32C of the body. The caller computes it from
    the bytes at hand, not from what a header claims. Not thread-safe.
    """

    def __init__(self) -> None:
        self._sent: dict[str, array[int]] = {}
        self._received: dict[str, array[int]] = {}

    def sent(self, key: str, body_crc32c: int) -> None:
        """A message is going to be sent."""
        self._sent.setdefault(key, array("I")).append(body_crc32c)

    def received(self, key: str, body_crc32c: int) -> None:
        """A message came back, in the order of its queue."""
        self._received.setdefault(key, array("I")).append(body_crc32c)

    def problems(self) -> list[str]:
        """What is wrong, one line each; empty if all is well."""
        sent_count, received_count = _count(self._sent), _count(self._received)
        found = []
        if sent_count != received_count:
            found.append(f"{sent_count:,} messages were sent, {received_count:,} received")
        differing = {
            key
            for key in self._sent.keys() | self._received.keys()
            if self._received.get(key) != self._sent.get(key)
        }
        # Messages without a key have no order among themselves: they lie in several queues.
        if "" in differing and sorted(self._sent.get("", ())) == sorted(self._received.get("", ())):
            differing.discard("")
        if differing:
            example = min(differing)
            name = f"tail number {example}" if example else "no tail number"
            found.append(
                f"{len(differing)} tail numbers came back with other messages or in another order, "
                f"first: {name} ({len(self._sent.get(example, ()))} sent, "
                f"{len(self._received.get(example, ()))} received)"
            )
        return found

    @property
    def key_count(self) -> int:
        """Different keys among the messages sent."""
        return len(self._sent.keys() - {""})

    @property
    def keyless_count(self) -> int:
        """Messages sent without a key."""
        return len(self._sent.get("", ()))


def _count(by_key: dict[str, array[int]]) -> int:
    return sum(len(crcs) for crcs in by_key.values())
