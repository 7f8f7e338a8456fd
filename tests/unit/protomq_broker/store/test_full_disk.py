"""What is said of a full disk, and how often."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.store.housekeeping.full_disk import (
    LOOK_PAUSE_MAX_MS,
    LOOK_PAUSE_MIN_MS,
    FullDisk,
)

TURN_MS = 500


def test_a_refusal_is_news_once_and_so_is_its_end():
    disk = FullDisk()
    assert not disk.is_look_due(0)
    assert [disk.refused("full", 0), disk.refused("full", 0)] == [True, False]
    assert disk.is_look_due(0)
    assert disk.stored()
    assert (disk.reason, disk.was_full) == ("", False)
    assert not disk.stored()


def test_looks_that_promise_space_in_vain_become_rare():
    disk, now_ms = FullDisk(), 0
    said: list[int] = []
    while now_ms < 600_000:
        disk.refused("full", now_ms)
        if disk.is_look_due(now_ms):
            disk.found_space()
            said.append(now_ms)
        now_ms += TURN_MS
    pauses = [after - before for before, after in itertools.pairwise(said)]
    assert pauses == sorted(pauses)
    assert LOOK_PAUSE_MIN_MS <= pauses[0] <= LOOK_PAUSE_MIN_MS + TURN_MS
    assert LOOK_PAUSE_MAX_MS <= pauses[-1] <= LOOK_PAUSE_MAX_MS + TURN_MS
    assert len(said) < 20
    disk.found_space()
    disk.stored()  # it was true: the next refusal is looked at soon
    disk.refused("full", now_ms)
    assert disk.is_look_due(now_ms)


@given(st.lists(st.sampled_from(("refused", "stored", "look")), max_size=60))
def test_the_reason_is_that_of_the_last_append_unless_a_look_found_space(steps: list[str]):
    disk, reason = FullDisk(), ""
    for number, step in enumerate(steps):
        if step == "refused":
            was_known, reason = bool(reason), f"full {number}"
            assert disk.refused(reason, number * TURN_MS) is not was_known
        elif step == "stored":
            disk.stored()
            reason = ""
        elif disk.is_look_due(number * TURN_MS):
            disk.found_space()
            reason = ""
        assert disk.reason == reason
