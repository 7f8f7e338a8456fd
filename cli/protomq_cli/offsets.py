"""Offsets in one flag: the little language of `--offset`.

    start            from the first stored message          47       from offset 47
    end              from what comes next                   +2       2 after the first stored message
    10:20            from 10 up to, not including, 20       -3       the last 3
    :end             from the start up to the end of now    47:end   from 47 up to the end of now
    @1622505600000   stored at this time (ms since 1970) or later
    @2026-11-21      a date or a time in ISO 8601, UTC unless it names a zone: @2026-11-21T13:30:00+01:00
    @-1h             stored in the last hour; units ms, s, m, h, d
    @A:B             from time A up to time B; `end` and an empty side are allowed

The places are per queue: `-3` is the last three of each. Parsing is pure: the clock is handed in. What a place
means in a queue is decided by `resolve`, which is given the range of the queue.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from protomq_cli.units import parse_duration

FORMS: Final = "start, end, 47, +2, -3, 10:20, :end, @ms, @date, @-1h, @a:b"
TIME_FORMS: Final = "@ms, @date, @-1h"


@dataclass(frozen=True, slots=True)
class FromStart:
    """`count` messages after the first that is stored."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class FromEnd:
    """`count` messages before the end."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class Exactly:
    """A queue offset."""

    queue_offset: int


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message stored at this time or later, in milliseconds since 1970-01-01 UTC."""

    time_ms: int


Place = FromStart | FromEnd | Exactly | AtTime


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Half-open [begin, end); `end` is None where there is no end: go on with what arrives."""

    begin: Place
    end: Place | None = None


START: Final = OffsetRange(FromStart())


def parse_offsets(text: str, now_ms: int) -> OffsetRange:
    """The range that `text` names. Raises ValueError, with the forms there are, for anything else."""
    text = text.strip()
    found = _parse_times(text[1:], now_ms) if text.startswith("@") else _parse_places(text)
    if found is None:
        raise ValueError(f"{text!r} is no offset; the forms are {FORMS}")
    _check_order(text, found)
    return found


def parse_times(text: str, now_ms: int) -> OffsetRange:
    """The same where times are wanted, one or two."""
    found = _parse_times(text.strip()[1:], now_ms) if text.strip().startswith("@") else None
    if found is None or not isinstance(found.begin, AtTime):
        raise ValueError(f"{text!r} is no time; the forms are {TIME_FORMS}")
    _check_order(text, found)
    return found


def resolve(
    place: Place, min_offset: int, end_offset: int, offset_at_time: Callable[[int], int]
) -> int:
    """The queue offset of a place, held within the range of the queue.

    An exact offset is taken as it stands, even beyond the end: the broker says what is wrong with it.
    """
    match place:
        case FromStart(count):
            return min(min_offset + count, end_offset)
        case FromEnd(count):
            return max(end_offset - count, min_offset)
        case Exactly(queue_offset):
            return queue_offset
        case AtTime(time_ms):
            return offset_at_time(time_ms)


def _parse_places(text: str) -> OffsetRange | None:
    begin, colon, end = text.partition(":")
    if not colon:
        place = _parse_place(text)
        return None if place is None else OffsetRange(place)
    first = _parse_place(begin) if begin else FromStart()
    last = _parse_place(end) if end else None
    if first is None or (end and last is None) or text == ":":
        return None
    return OffsetRange(first, last)


def _parse_place(text: str) -> Place | None:
    if text == "start":
        return FromStart()
    if text == "end":
        return FromEnd()
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        return None
    number = int(text.lstrip("+-"))
    if text.startswith("+"):
        return FromStart(number)
    return FromEnd(number) if text.startswith("-") else Exactly(number)


def _parse_times(text: str, now_ms: int) -> OffsetRange | None:
    """One time, or two with a colon between: at whichever colon both sides are times."""
    if (single := _parse_time(text, now_ms)) is not None:
        return OffsetRange(single)
    for colon in re.finditer(":", text):
        begin, end = text[: colon.start()], text[colon.end() :]
        first = _parse_time(begin, now_ms) if begin else FromStart()
        last = _parse_time(end.removeprefix("@"), now_ms) if end else None
        if first is not None and (last is not None or (begin and not end)):
            return OffsetRange(first, last)
    return None


def _parse_time(text: str, now_ms: int) -> Place | None:
    if text == "start":
        return FromStart()
    if text == "end":
        return FromEnd()
    if re.fullmatch(r"[0-9]{9,15}", text):
        # Ten digits are the seconds of today, thirteen its milliseconds; nobody means 1970.
        return AtTime(int(text) * 1000 if len(text) <= 10 else int(text))
    if re.fullmatch(r"-[0-9].*", text):
        try:
            return AtTime(now_ms - round(parse_duration(text[1:]) * 1000))
        except ValueError:
            return None
    if not re.match(r"[0-9]{4}-", text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return AtTime(round(moment.timestamp() * 1000))


def _check_order(text: str, wanted: OffsetRange) -> None:
    """Raises ValueError for a range that ends before it begins in every queue. Whether 5:-3 is one depends on the queue."""
    match wanted.begin, wanted.end:
        case (
            (Exactly(begin), Exactly(end))
            | (AtTime(begin), AtTime(end))
            | (FromStart(begin), FromStart(end))
            | (FromEnd(end), FromEnd(begin))
        ):
            is_empty = end < begin
        case _, FromStart(0):
            is_empty = True
        case _:
            is_empty = False
    if is_empty:
        raise ValueError(f"{text!r} ends before it begins")
