"""What `protomq filter list` shows of several brokers of a name."""

from __future__ import annotations

from protomq import FilterModule
from protomq_cli.filters import filter_rows

LATE, LATE_2, EARLY = FilterModule("late", 3, 0xA), FilterModule("late", 4, 0xB), FilterModule("early", 5, 0xC)


def shown(found: dict[str, list[FilterModule]]) -> list[tuple[object, ...]]:
    return [
        (row["name"], row["broker"], row["broker_id"], row["crc32c"], row["state"]) for row in filter_rows(found)
    ]


def test_a_module_that_a_slave_lacks_is_seen() -> None:
    assert shown({"a": [LATE, EARLY], "a/2": [LATE], "a/11": [EARLY]}) == [
        ("early", "a", 0, "0000000c", ""),
        ("early", "a", 2, None, "missing"),
        ("early", "a", 11, "0000000c", ""),
        ("late", "a", 0, "0000000a", ""),
        ("late", "a", 2, "0000000a", ""),
        ("late", "a", 11, None, "missing"),
    ]


def test_another_version_than_the_masters_is_seen() -> None:
    assert shown({"a": [LATE], "a/1": [LATE_2]}) == [
        ("late", "a", 0, "0000000a", ""), ("late", "a", 1, "0000000b", "differs"),
    ]  # fmt: skip


def test_a_module_that_the_master_lacks_is_seen() -> None:
    assert shown({"a": [], "a/1": [LATE]}) == [
        ("late", "a", 0, None, "missing"), ("late", "a", 1, "0000000a", ""),
    ]  # fmt: skip


def test_brokers_of_other_names_may_have_other_modules() -> None:
    assert shown({"a": [LATE], "b": [], "c": [LATE_2], "c/1": [LATE_2]}) == [
        ("late", "a", 0, "0000000a", ""), ("late", "c", 0, "0000000b", ""), ("late", "c", 1, "0000000b", ""),
    ]  # fmt: skip


def test_without_its_master_a_slave_shows_what_it_has() -> None:
    assert shown({"a/1": [LATE], "a/2": [LATE_2]}) == [
        ("late", "a", 1, "0000000a", ""), ("late", "a", 2, "0000000b", ""),
    ]  # fmt: skip
