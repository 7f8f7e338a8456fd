"""Whatever the order of the answers, a slave gets one run of bytes, and no byte twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protomq_ha.intake import Intake, LogPart

FRONT_SIZE_BYTES = 5


def part_of(data: bytes) -> LogPart:
    return LogPart(memoryview(data))


@given(
    start=st.integers(0, 1_000),
    parts=st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=12),
    data=st.data(),
)
def test_any_order_gives_the_run(start: int, parts: list[bytes], data: st.DataObject) -> None:
    """Each part is received in the same memory, over the one before."""
    intake = Intake(start)
    positions = [start + sum(map(len, parts[:index])) for index in range(len(parts))]
    memory = bytearray(FRONT_SIZE_BYTES + 9)
    stored = b""
    for index in data.draw(st.permutations(range(len(parts)))):
        end = FRONT_SIZE_BYTES + len(parts[index])
        memory[FRONT_SIZE_BYTES:end] = parts[index]
        run = intake.add(positions[index], LogPart(memoryview(memory)[:end], FRONT_SIZE_BYTES))
        assert intake.end_position == intake.position + len(run)
        taken = data.draw(st.integers(0, len(run)))
        stored += run[:taken]
        intake.stored(intake.position + taken)
        assert intake.position == start + len(stored)
    assert intake.waiting_count == 0
    assert b"".join(parts).startswith(stored)
    assert intake.end_position == start + sum(map(len, parts))


def test_what_is_left_of_a_part_goes_in_front_of_the_next_one_without_a_copy_of_that() -> None:
    intake = Intake(0)
    intake.add(0, part_of(b"abc"))
    intake.stored(1)
    memory = bytearray(b"....def")
    run = intake.add(3, LogPart(memoryview(memory), 4))
    assert bytes(run) == b"bcdef"
    assert run.obj is memory
    intake.stored(1)
    memory = bytearray(b".ghi")
    run = intake.add(6, LogPart(memoryview(memory), 1))
    assert bytes(run) == b"bcdefghi", "there was no room before it"
    assert memory == b".ghi"


def test_what_is_there_already_is_refused() -> None:
    intake = Intake(10)
    intake.add(10, part_of(b"abc"))
    for position, part in ((10, b"abc"), (12, b"c"), (13, b"")):
        with pytest.raises(ValueError, match="continue nothing"):
            intake.add(position, part_of(part))
    intake.add(20, part_of(b"later"))
    with pytest.raises(ValueError, match="everything below 13"):
        intake.add(20, part_of(b"later"))
    assert intake.waiting_count == 1
