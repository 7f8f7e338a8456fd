"""The values that an expression names, out of raw records: nothing else of them is decoded.

    record field   0A len [ 0A len body | 12 len key .. | 1A len tag | 22 len property .. | 2A len attributes ] [transit, topic, trailer]
    property       22 len ( 0A len name 12 len value )

Many records are walked side by side, field by field, with numpy. A few records are parsed by protobuf instead. So is each that is not
written as the SDKs write it: a name behind its value, a value left out, two bodies. There protobuf decides what the record says.

Pure. The records are stored ones: their layout was proved when they were sent, and their octets are known to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

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
Positions = NDArray[np.int64]

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
OWN_NUMBERS: Final = frozenset((SIZE, *_NUMBERS_AT))
OWN_FIELDS: Final = frozenset((TAGS, KEYS, *OWN_NUMBERS, *_OTHER_TEXTS))
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
_STEPS_MAX: Final = 64
_STEPS_MAX_OF_FEW: Final = 16
"""Fields of a front that are walked through. Each step costs as much for one record as for a hundred, so few records must not make many."""
_TOO_LONG: Final = 1 << 40
_WORD_SIZE: Final = 8
assert FIXED_TRAILER_SIZE_BYTES > 2 * _WORD_SIZE
# So a word may be read at any place of a front.


class Texts(NamedTuple):
    """Where the text of each record begins and ends in the data; -1 where there is none."""

    starts: Positions
    ends: Positions


class FieldReader:
    """Reads the values of some names. Any thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._properties = {
            name: name.encode() for name in self._names if name not in (TAGS, KEYS)
        }
        self.needs_parse = any(name in _OTHER_TEXTS for name in self._names)
        """Whether protobuf has to be asked about each record."""
        self._needs_body = SIZE in self._names

    def columns(
        self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]
    ) -> Columns | None:
        """The values of the record fields [start, start + size), as arrays; None where protobuf is better asked about each."""
        if self.needs_parse or len(starts) < _ARRAYS_COUNT_MIN:
            return None
        columns = Columns(data, starts.astype(np.int64), sizes.astype(np.int64))
        columns.walk(self._properties, has_tags=TAGS in self._names, has_keys=KEYS in self._names)
        return columns

    def rows(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Rows:
        """For each record field [start, start + size) its values, in the order of the names; None where there is none."""
        columns = self.columns(data, starts, sizes)
        if columns is None:
            return self.parsed(data, starts, sizes)
        values = [_column(columns, name) for name in self._names]
        rows: list[tuple[FieldValue, ...]] = (
            list(zip(*values, strict=True)) if values else [()] * len(starts)
        )
        odd = columns.is_odd.nonzero()[0]
        for index, row in zip(odd.tolist(), self.parsed(data, starts[odd], sizes[odd]), strict=True):
            rows[index] = row
        return rows

    def parsed(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Rows:
        """As `rows`, each record by protobuf."""
        return [
            self._parse(data, start, start + size)
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def _parse(self, data: bytes, start: int, end: int) -> tuple[FieldValue, ...]:
        record = parse_record(data, start, end, with_body=self._needs_body)
        return tuple(_value_of(record, data, end, name) for name in self._names)


def parse_record(data: bytes, start: int, end: int, *, with_body: bool) -> Record:
    """A record field as protobuf reads it. Without the body, a body that stands in front is not copied."""
    _, start = read_varint(data, start + 1)
    if not with_body and start < end and data[start] == BODY_TAG:
        size, body_start = read_varint(data, start + 1)
        start = body_start + size
    return Record.FromString(data[start:end])


def front_size_of(data: bytes, start: int, size_bytes: int) -> int:
    """How many octets of a record field are no body, if a body stands in front."""
    _, at = read_varint(data, start + 1)
    if at < start + size_bytes and data[at] == BODY_TAG:
        return size_bytes - read_varint(data, at + 1)[0]
    return size_bytes


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


def _column(columns: Columns, name: str) -> list[FieldValue]:
    texts = columns.texts(name)
    column: list[FieldValue] = [None] * columns.count
    if texts is not None:
        data = columns.data
        column = [
            data[start:end] if start >= 0 else None
            for start, end in zip(texts.starts.tolist(), texts.ends.tolist(), strict=True)
        ]
    if name in OWN_NUMBERS:
        numbers = columns.own_numbers(name).tolist()
        return [
            number if text is None else text for text, number in zip(column, numbers, strict=True)
        ]
    return column


def _lengths(octets: NDArray[np.uint8], positions: Positions) -> tuple[Positions, Positions]:
    """The lengths that begin at the positions, and the positions behind them. Most have one octet all, or two."""
    first = octets[positions]
    wide = np.count_nonzero(first > 0x7F)
    if not wide:
        return first.astype(np.int64), positions + 1
    if wide == len(first):
        second = octets[positions + 1]
        if not np.count_nonzero(second > 0x7F):
            return (first & 0x7F) + (second.astype(np.int64) << 7), positions + 2
    return read_lengths(octets, positions, _TOO_LONG)


class Columns:
    """The values of many records, found by one walk through all their fronts at once.

    Attributes:
        data: in which the records stand.
        count: of the records.
        is_odd: records about which the walk says nothing: protobuf is to be asked.
    """

    def __init__(self, data: bytes, starts: Positions, sizes: Positions) -> None:
        self.data = data
        self.count = len(starts)
        self.octets = np.frombuffer(data, np.uint8)
        self._words: NDArray[np.uint64] = np.ndarray(
            (len(data) - _WORD_SIZE + 1,), "<u8", data, strides=(1,)
        )
        self._starts = starts
        self._ends = starts + sizes
        self._texts: dict[str, Texts] = {}
        self.is_odd = np.zeros(self.count, np.bool_)
        self._body_sizes = sizes

    def texts(self, name: str) -> Texts | None:
        """Where the texts of that name stand: of a property, the tag or the key; None if no record has one."""
        return self._texts.get(name)

    def own_numbers(self, name: str) -> NDArray[Any]:
        """A numeric field of the messages' own."""
        if name == SIZE:
            return self._body_sizes
        at, size = _NUMBERS_AT[name]
        return self._words[self._ends + at] & np.uint64((1 << 8 * size) - 1)

    def has_text(self, positions: Positions, text: bytes) -> NDArray[np.bool_]:
        """At which positions of fronts the text stands, if so many octets are left there."""
        if len(text) < _WORD_SIZE:
            mask = (1 << 8 * len(text)) - 1
            return (self._words[positions] & mask) == int.from_bytes(text, "little")
        is_there = np.ones(len(positions), np.bool_)
        last = len(text) - _WORD_SIZE
        for at in (*range(0, last, _WORD_SIZE), last):
            word = int.from_bytes(text[at : at + _WORD_SIZE], "little")
            # A long text may go on behind the data.
            is_there &= self._words[np.minimum(positions + at, len(self._words) - 1)] == np.uint64(word)
        return is_there

    def walk(self, properties: Mapping[str, bytes], *, has_tags: bool, has_keys: bool) -> None:
        """Finds the properties, tag and keys of all records."""
        octets = self.octets
        _, positions = _lengths(octets, self._starts + 1)
        # Nothing of a front stands where the trailer does; so nothing is looked up outside of the data.
        limits = self._ends - FIXED_TRAILER_SIZE_BYTES
        self.is_odd |= octets[positions] != BODY_TAG
        self._body_sizes, positions = _lengths(octets, positions + 1)
        positions = positions + self._body_sizes
        left = np.arange(self.count)
        for step in range(_STEPS_MAX):
            if step >= _STEPS_MAX_OF_FEW and len(left) < _ARRAYS_COUNT_MIN:
                break
            # What a length leads to may lie behind the data.
            np.minimum(positions, limits, out=positions)
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
                # More than one key, or an empty one.
                self.is_odd[keyed[starts[which] == ends[which]]] = True
                known = self._texts.get(KEYS)
                if known is not None:
                    self.is_odd[keyed[known.starts[keyed] >= 0]] = True
                self._note(KEYS, keyed, starts[which], ends[which])
            positions = ends
        self.is_odd[left] = True

    def front_sizes(self, records: Positions) -> Positions:
        """How many octets of these records are no body; of an odd record it may be all."""
        sizes = (self._ends - self._starts)[records]
        fronts = sizes - self._body_sizes[records]
        return np.where(fronts > 0, fronts, sizes)

    def _take_properties(
        self, left: Positions, starts: Positions, ends: Positions, properties: Mapping[str, bytes]
    ) -> None:
        """Entries [start, end) of the records `left`."""
        octets = self.octets
        name_sizes = octets[starts + 1]
        values = starts + name_sizes
        values += 2
        np.minimum(values, ends, out=values)
        is_plain = octets[starts] == _NAME_TAG
        is_plain &= name_sizes < 0x80
        is_plain &= octets[values] == _VALUE_TAG
        value_sizes, value_starts = _lengths(octets, values + 1)
        is_plain &= value_starts + value_sizes == ends
        if np.count_nonzero(is_plain) < len(left):
            self.is_odd[left[~is_plain]] = True
        for name, text in properties.items():
            found = (is_plain & (name_sizes == len(text))).nonzero()[0]
            if len(found):
                found = found[self.has_text(starts[found] + 2, text)]
                self._note(name, left[found], value_starts[found], ends[found])

    def _note(self, name: str, records: Positions, starts: Positions, ends: Positions) -> None:
        """The text of these records; one that comes later takes the place of one before."""
        if not len(records):
            return
        known = self._texts.get(name)
        if known is None:
            if len(records) == self.count:
                self._texts[name] = Texts(starts, ends)
                return
            none = np.full(self.count, -1)
            known = self._texts[name] = Texts(none, none.copy())
        known.starts[records] = starts
        known.ends[records] = ends
