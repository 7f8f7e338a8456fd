"""How long a slave waits between two tries. The thread of the slave and the simulation of fail-overs go by the same values."""

from __future__ import annotations

from protomq_broker.follow_pauses import (
    ELECTED_PAUSE_MAX_S,
    ELECTED_PAUSE_S,
    RETRY_PAUSE_MAX_S,
    RETRY_PAUSE_S,
    FollowPauses,
)


def after_silence(pauses: FollowPauses, count: int, heard_ms: int | None = None) -> list[float]:
    return [pauses.after(heard_ms, needs_others=False) for _ in range(count)]


def test_pauses_grow_while_nothing_is_heard() -> None:
    rising = [ELECTED_PAUSE_S * 2**power for power in range(4)]
    assert after_silence(FollowPauses(is_elected=True), 6) == [*rising, ELECTED_PAUSE_MAX_S, ELECTED_PAUSE_MAX_S]
    rising = [RETRY_PAUSE_S * 2**power for power in range(4)]
    assert after_silence(FollowPauses(is_elected=False), 6) == [*rising, RETRY_PAUSE_MAX_S, RETRY_PAUSE_MAX_S]


def test_a_master_that_has_said_something_is_asked_soon_again() -> None:
    pauses = FollowPauses(is_elected=True)
    after_silence(pauses, 5)
    assert after_silence(pauses, 2, heard_ms=7) == [ELECTED_PAUSE_S, 2 * ELECTED_PAUSE_S]
    assert after_silence(pauses, 1, heard_ms=8) == [ELECTED_PAUSE_S]


def test_another_master_is_asked_soon() -> None:
    pauses = FollowPauses(is_elected=True)
    after_silence(pauses, 5)
    pauses.begin_again()
    assert after_silence(pauses, 1) == [ELECTED_PAUSE_S]


def test_what_only_others_can_mend_is_tried_seldom() -> None:
    pauses = FollowPauses(is_elected=True)
    assert [pauses.after(number, needs_others=True) for number in range(3)] == [RETRY_PAUSE_MAX_S] * 3
    assert after_silence(pauses, 2, heard_ms=2) == [ELECTED_PAUSE_MAX_S] * 2
    assert after_silence(pauses, 1, heard_ms=3) == [ELECTED_PAUSE_S]
