from __future__ import annotations

import pytest

from protomq_cli.offsets import (
    AtTime,
    Exactly,
    FromEnd,
    FromStart,
    OffsetRange,
    parse_offsets,
    resolve,
)

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("start", FromStart(), None),
        ("end", FromEnd(), None),
        ("0", Exactly(0), None),
        ("47", Exactly(47), None),
        ("+2", FromStart(2), None),
        ("-3", FromEnd(3), None),
        ("10:20", Exactly(10), Exactly(20)),
        ("10:10", Exactly(10), Exactly(10)),
        (":20", FromStart(), Exactly(20)),
        (":end", FromStart(), FromEnd()),
        ("10:", Exactly(10), None),
        ("-5:-2", FromEnd(5), FromEnd(2)),
        ("+2:end", FromStart(2), FromEnd()),
        ("@1622505600000", AtTime(1_622_505_600_000), None),
        ("@1622505600", AtTime(1_622_505_600_000), None),
        ("@2021-06-01", AtTime(1_622_505_600_000), None),
        ("@2021-06-01T00:00:00Z", AtTime(1_622_505_600_000), None),
        ("@2021-06-01T01:00+01:00", AtTime(1_622_505_600_000), None),
        ("@2021-06-01T00:00:00.250", AtTime(1_622_505_600_250), None),
        ("@-1h", AtTime(NOW_MS - HOUR_MS), None),
        ("@-90s", AtTime(NOW_MS - 90_000), None),
        ("@-500ms", AtTime(NOW_MS - 500), None),
        ("@-2d:-1d", AtTime(NOW_MS - 48 * HOUR_MS), AtTime(NOW_MS - 24 * HOUR_MS)),
        ("@-1h:end", AtTime(NOW_MS - HOUR_MS), FromEnd()),
        ("@-1h:@end", AtTime(NOW_MS - HOUR_MS), FromEnd()),
        ("@:-1h", FromStart(), AtTime(NOW_MS - HOUR_MS)),
        ("@-1h:", AtTime(NOW_MS - HOUR_MS), None),
        ("@1622505600000:1622592000000", AtTime(1_622_505_600_000), AtTime(1_622_592_000_000)),
        (
            "@2021-06-01T10:30:00Z:2021-06-01T11:30:00Z",
            AtTime(1_622_543_400_000),
            AtTime(1_622_547_000_000),
        ),
        ("@2021-06-01:2021-06-02", AtTime(1_622_505_600_000), AtTime(1_622_592_000_000)),
    ],
)
def test_each_form_names_its_range(text: str, begin: object, end: object) -> None:
    assert parse_offsets(text, NOW_MS) == OffsetRange(begin, end)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", ":", "@", "@:", "@:end:", "abc", "1.5", "--3", "+-3", "10:20:30", "@yesterday", "@-1y", "@2021-13-01",
     "0x10", "٣", "1e3", "@12", "9" * 30, "@-", "10-20"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"the forms are start, end, 47"):
        parse_offsets(text, NOW_MS)


@pytest.mark.parametrize("text", ["20:10", "@2021-06-02:2021-06-01", "@-1h:-2h", "end:start", "5:start", "@-1h:start", "+5:+2", "-2:-5"])
def test_a_range_that_ends_before_it_begins_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        parse_offsets(text, NOW_MS)


@pytest.mark.parametrize(
    ("place", "offset"),
    [
        (FromStart(), 100),
        (FromStart(2), 102),
        (FromStart(1000), 150),
        (FromEnd(), 150),
        (FromEnd(3), 147),
        (FromEnd(1000), 100),
        (Exactly(7), 7),
        (AtTime(5), 1005),
    ],
)
def test_a_place_is_held_within_the_range_of_its_queue(place: object, offset: int) -> None:
    assert resolve(place, 100, 150, lambda time_ms: 1000 + time_ms) == offset  # type: ignore[arg-type]
