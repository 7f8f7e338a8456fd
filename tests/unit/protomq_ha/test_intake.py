"""Whatever the order of the answers, a slave gets one run of bytes, and no byte twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_ha.intake import Intake


@given(
    start=st.integers(0, 1_000),
    parts=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=12),
    data=st.data(),
)
def test_any_order_gives_the_run(start: int, parts: list[bytes], data: st.DataObject) -> None:
    intake = Intake(start)
    positions = [start + sum(map(len, parts[:index])) for index in range(len(parts))]
    stored = b""
    for index in data.draw(st.permutations(range(len(parts)))):
        run = intake.add(positions[index], parts[index])
        assert intake.end_position == intake.position + len(run)
        taken = data.draw(st.integers(0, len(run)))
        stored += run[:taken]
        intake.stored(intake.position + taken)
        assert intake.position == start + len(stored)
    assert intake.waiting_count == 0
    assert b"".join(parts).startswith(stored)
    assert intake.end_position == start + sum(map(len, parts))


def test_what_is_there_already_is_refused() -> None:
    intake = Intake(10)
    intake.add(10, b"abc")
    for position, part in ((10, b"abc"), (12, b"c"), (13, b"")):
        with pytest.raises(ValueError, match="continue nothing"):
            intake.add(position, part)
    intake.add(20, b"later")
    with pytest.raises(ValueError, match="everything below 13"):
        intake.add(20, b"later")
    assert intake.waiting_count == 1
