from __future__ import annotations

import json
from pathlib import Path

import pytest

from protomq_cli.flights import RoundTripCheck, read_flights

CSV = """year,dep_time,carrier,flight,tailnum,time_hour
2013,517,UA,1545,N14228,2013-01-01T10:00:00Z
2013,NA,AA,133,NA,2013-01-02T20:00:00Z
2013,533,UA,1714,N24211,2013-01-01T10:00:00Z
"""


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "flights.csv"
    path.write_text(CSV)
    return path


def test_a_row_becomes_a_message_with_numbers_as_numbers(csv_file: Path) -> None:
    first = next(read_flights(csv_file))
    assert (first.key, first.tag) == ("N14228", "UA")
    assert json.loads(first.body) == {
        "year": 2013, "dep_time": 517, "carrier": "UA", "flight": 1545, "tailnum": "N14228",
        "time_hour": "2013-01-01T10:00:00Z",
    }  # fmt: skip


def test_a_row_without_tail_number_has_no_key_and_nulls_in_its_body(csv_file: Path) -> None:
    flight = list(read_flights(csv_file))[1]
    assert (flight.key, flight.tag) == ("", "AA")
    row = json.loads(flight.body)
    assert row["tailnum"] is None
    assert row["dep_time"] is None


def test_a_part_of_the_file_can_be_read(csv_file: Path) -> None:
    assert [f.key for f in read_flights(csv_file, 2)] == ["N14228", ""]


def check_of(sent: list[tuple[str, int]], received: list[tuple[str, int]]) -> RoundTripCheck:
    check = RoundTripCheck()
    for key, crc in sent:
        check.sent(key, crc)
    for key, crc in received:
        check.received(key, crc)
    return check


SENT = [("a", 1), ("b", 2), ("", 7), ("a", 3), ("", 8)]


def test_all_is_well_when_each_key_comes_back_in_its_order() -> None:
    check = check_of(SENT, [("b", 2), ("", 8), ("a", 1), ("", 7), ("a", 3)])
    assert check.problems() == []
    assert check.key_count == 2


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ([("a", 3), ("b", 2), ("", 7), ("a", 1), ("", 8)], ["another order, first: tail number a"]),
        (
            [("a", 1), ("b", 2), ("", 7), ("", 8)],
            ["5 messages were sent, 4 received", "first: tail number a"],
        ),
        (
            [*SENT, ("b", 2)],
            ["5 messages were sent, 6 received", "first: tail number b (1 sent, 2 received)"],
        ),
        ([("a", 1), ("b", 2), ("", 7), ("a", 3), ("", 9)], ["first: no tail number"]),
        ([("a", 1), ("c", 2), ("", 7), ("a", 3), ("", 8)], ["2 tail numbers", "tail number b"]),
    ],
)
def test_a_lost_repeated_changed_or_reordered_message_is_found(
    received: list[tuple[str, int]], expected: list[str]
) -> None:
    problems = "\n".join(check_of(SENT, received).problems())
    assert all(text in problems for text in expected), problems
