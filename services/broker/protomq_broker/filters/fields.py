"""The values that an expression names, out of raw records: nothing else of them is decoded.

    record field   0A len [ 0A len body | 12 len key .. | 1A len tag | 22 len property .. | 2A len attributes ] [transit, topic, trailer]
    property       22 len ( 0A len name 12 len value )

Many records are walked side by side, field by field, with numpy. A few records are parsed by protobuf instead. So is each that is not
written as the SDKs write it: a name behind its value, a value left out, two bodies. There protobuf decides what the record says.

Pure. The records are stored ones: their layout was proved when they were sent, and their octets are known to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record
from protomq.wire.record import (
    BODY_TAG,
    BORN_TIME_MS_AT,
    FIXED_TRAILER_SIZE_BYTES,
    FRONT_TAGS,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    STORE_TIME_MS_AT,
    encode_message_id,
)
from protomq.wire.varint_arrays import read_lengths
from protomq.wire.varints import read_varint

FieldValue = bytes | int | None
Rows = Sequence[tuple[FieldValue, ...]]

TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
SIZE: Final = "size"
_NUMBERS_AT: Final[Mapping[str, tuple[int, int]]] = {
    "bornTime": (BORN_TIME_MS_AT, 8),
    "storeTime": (STORE_TIME_MS_AT, 8),
    "queueId": (QUEUE_ID_AT, 4),
    "queueOffset": (QUEUE_OFFSET_AT, 8),
}
"""Numeric fields: where they stand, counted from the end of a record, and their octets."""
_OTHER_TEXTS: Final[Mapping[str, Callable[[Record], str]]] = {
    "shardingKey": lambda record: record.attributes.sharding_key,
    "bornHost": lambda record: record.attributes.born_host,
    "messageId": lambda record: encode_message_id(
        record.producer_id, record.producer_epoch, record.sequence
    ),
}
OWN_FIELDS: Final = frozenset((TAGS, KEYS, SIZE, *_NUMBERS_AT, *_OTHER_TEXTS))
"""What a message has besides properties. A property of the same name goes first, except before TAGS and KEYS, which are RocketMQ's."""

_ARRAYS_COUNT_MIN: Final = 24
"""From this number of records on numpy saves more than its fixed cost."""
_KEY_TAG: Final = 0x12
_TAG_TAG: Final = 0x1A
_PROPERTY_TAG: Final = 0x22
_NAME_TAG: Final = 0x0A
_VALUE_TAG: Final = 0x12
_IN_FRONT: Final = np.isin(np.arange(256), sorted(FRONT_TAGS))
"""By tag: whether it is one of a front."""
_TOO_LONG: Final = 1 << 40


class FieldReader:
    """Reads the values of some names. Any thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._properties = {
            name: name.encode() for name in self._names if name not in (TAGS, KEYS)
        }
        self._needs_parse = any(name in _OTHER_TEXTS for name in self._names)

    def rows(self, data: bytes, starts: Sequence[int], sizes: Sequence[int]) -> Rows:
        """For each record field [start, start + size) its values, in the order of the names; None where there is none."""
        if self._needs_parse or len(starts) < _ARRAYS_COUNT_MIN:
            return [
                self._parse(data, start, start + size)
                for start, size in zip(starts, sizes, strict=True)
            ]
        walk = _Walk(data, np.asarray(starts, np.int64), np.asarray(sizes, np.int64))
        walk.run(self._properties, has_tags=TAGS in self._names, has_keys=KEYS in self._names)
        columns = [self._column(walk, name) for name in self._names]
        rows: list[tuple[FieldValue, ...]] = (
            list(zip(*columns, strict=True)) if columns else [()] * len(starts)
        )
        for index in np.flatnonzero(walk.is_odd).tolist():
            rows[index] = self._parse(data, starts[index], starts[index] + sizes[index])
        return rows

    def _column(self, walk: _Walk, name: str) -> list[FieldValue]:
        column = walk.texts(name)
        if name == SIZE or name in _NUMBERS_AT:
            own = walk.body_sizes.tolist() if name == SIZE else walk.numbers(*_NUMBERS_AT[name])
            return [
                number if text is None else text for text, number in zip(column, own, strict=True)
            ]
        return column

    def _parse(self, data: bytes, start: int, end: int) -> tuple[FieldValue, ...]:
        _, start = read_varint(data, start + 1)
        record = Record.FromString(data[start:end])
        return tuple(_value_of(record, data, end, name) for name in self._names)


def _value_of(record: Record, data: bytes, end: int, name: str) -> FieldValue:
    if name == TAGS:
        return record.tag.encode() or None
    if name == KEYS:
        return " ".join(record.keys).encode() or None
    if name in record.properties:
        return record.properties[name].encode()
    if name == SIZE:
        return len(record.body)
    if name in _NUMBERS_AT:
        at, size = _NUMBERS_AT[name]
        return int.from_bytes(data[end + at : end + at + size], "little")
    if name in _OTHER_TEXTS:
        return _OTHER_TEXTS[name](record).encode() or None
    return None


def _lengths(
    octets: NDArray[np.uint8], positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lengths that begin at the positions, and the positions behind them. Most have one octet."""
    first = octets[positions]
    if np.count_nonzero(first > 0x7F):
        return read_lengths(octets, positions, _TOO_LONG)
    return first.astype(np.int64), positions + 1


class _Walk:
    """One walk through the fronts of many records at once.

    Attributes:
        body_sizes: of each record, as stored.
        is_odd: records about which the walk says nothing: protobuf is to be asked.
    """

    def __init__(self, data: bytes, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        self._data = data
        self._octets = np.frombuffer(data, np.uint8)
        self._ends = starts + sizes
        self._starts = starts
        self._texts: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self.is_odd = np.zeros(len(starts), np.bool_)
        self.body_sizes = np.zeros(len(starts), np.int64)

    def run(self, properties: Mapping[str, bytes], *, has_tags: bool, has_keys: bool) -> None:
        """Finds the properties, tag and keys of all records."""
        octets = self._octets
        _, positions = read_lengths(octets, self._starts + 1)
        # Nothing of a front stands where the trailer does; so nothing is looked up outside of the data.
        limits = self._ends - FIXED_TRAILER_SIZE_BYTES
        lengths, positions_behind = _lengths(octets, positions + 1)
        self.is_odd |= octets[positions] != BODY_TAG
        self.body_sizes = lengths
        left = np.arange(len(self._starts))
        positions = positions_behind + lengths
        while True:
            # What a length leads to may lie behind the data.
            positions = np.minimum(positions, limits)
            tags = octets[positions]
            in_front = _IN_FRONT[tags] & (positions < limits)
            if np.count_nonzero(in_front) < len(left):
                left, positions, tags = left[in_front], positions[in_front], tags[in_front]
                limits = limits[in_front]
                if not len(left):
                    return
            lengths, starts = _lengths(octets, positions + 1)
            ends = starts + lengths
            is_wrong = (ends > limits) | (tags == BODY_TAG)
            if np.count_nonzero(is_wrong):
                self.is_odd[left[is_wrong]] = True
                fine = ~is_wrong
                left, tags, starts, ends = left[fine], tags[fine], starts[fine], ends[fine]
                limits = limits[fine]
            if properties:
                which = tags == _PROPERTY_TAG
                count = np.count_nonzero(which)
                if count == len(left):
                    self._take_properties(left, starts, ends, properties)
                elif count:
                    self._take_properties(left[which], starts[which], ends[which], properties)
            if has_tags:
                which = (tags == _TAG_TAG) & (ends > starts)
                self._note(TAGS, left[which], starts[which], ends[which])
            if has_keys:
                which = tags == _KEY_TAG
                keyed = left[which]
                known = self._texts.get(KEYS)
                if known is not None:
                    self.is_odd[keyed[known[0][keyed] >= 0]] = True  # More than one key.
                self._note(KEYS, keyed, starts[which], ends[which])
            positions = ends

    def _take_properties(
        self,
        left: NDArray[np.int64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        properties: Mapping[str, bytes],
    ) -> None:
        """Entries [start, end) of the records `left`."""
        octets = self._octets
        name_sizes = octets[starts + 1].astype(np.int64)
        values = starts + 2 + name_sizes
        is_plain = (octets[starts] == _NAME_TAG) & (name_sizes < 0x80) & (values + 2 <= ends)
        values = np.minimum(values, ends)
        is_plain &= octets[values] == _VALUE_TAG
        value_sizes, value_starts = _lengths(octets, values + 1)
        is_plain &= value_starts + value_sizes == ends
        if np.count_nonzero(is_plain) < len(left):
            self.is_odd[left[~is_plain]] = True
        for name, text in properties.items():
            found = np.flatnonzero(is_plain & (name_sizes == len(text)))
            if len(found):
                at = starts[found, None] + np.arange(2, 2 + len(text))
                found = found[(octets[at] == np.frombuffer(text, np.uint8)).all(1)]
                self._note(name, left[found], value_starts[found], ends[found])

    def _note(
        self,
        name: str,
        records: NDArray[np.int64],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """The text of these records; one that comes later takes the place of one before."""
        if not len(records):
            return
        known = self._texts.get(name)
        if known is None:
            none = np.full(len(self._starts), -1)
            known = self._texts[name] = none, none.copy()
        known[0][records] = starts
        known[1][records] = ends

    def texts(self, name: str) -> list[FieldValue]:
        """What was found, record by record."""
        known = self._texts.get(name)
        if known is None:
            return [None] * len(self._starts)
        data = self._data
        return [
            data[start:end] if start >= 0 else None
            for start, end in zip(known[0].tolist(), known[1].tolist(), strict=True)
        ]

    def numbers(self, at: int, size: int) -> list[int]:
        """A fixed-width number at a distance from the records' ends."""
        octets: NDArray[Any] = self._octets[self._ends[:, None] + np.arange(at, at + size)]
        return np.ascontiguousarray(octets).view(f"<u{size}")[:, 0].tolist()
