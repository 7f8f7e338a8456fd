"""A slave opens its store again for what was healed: once for each part, and seldom after that."""

from __future__ import annotations

from itertools import pairwise

from protomq_broker.healed_reopens import (
    FIRST_PAUSE_MS,
    PARTLY_HEALED_WAIT_MS,
    PAUSE_MAX_MS,
    HealedReopens,
)
from protomq_broker.store.log.recovery import DamagedRange

ONE, OTHER = DamagedRange(100, 200, 1, "why"), DamagedRange(300, 400, 2, "why")


def is_opened(reopens: HealedReopens, *healed: DamagedRange, is_whole: bool = True, now_ms: int = 0) -> bool:
    is_due = reopens.is_due(healed, is_whole=is_whole, now_ms=now_ms)
    if is_due:
        reopens.note_opening(now_ms)
    return is_due


def test_what_is_healed_is_served_at_once() -> None:
    reopens = HealedReopens()
    assert is_opened(reopens, ONE)
    assert is_opened(reopens, OTHER), "that is new"


def test_what_is_healed_again_and_again_opens_the_store_ever_more_seldom() -> None:
    reopens = HealedReopens()
    opened_at_ms = [now_ms for now_ms in range(0, 12 * PAUSE_MAX_MS, 1_000) if is_opened(reopens, ONE, now_ms=now_ms)]
    pauses_ms = [later - earlier for earlier, later in pairwise(opened_at_ms)]
    assert pauses_ms[:4] == [FIRST_PAUSE_MS, 2 * FIRST_PAUSE_MS, 4 * FIRST_PAUSE_MS, 8 * FIRST_PAUSE_MS]
    assert pauses_ms == sorted(pauses_ms)
    assert pauses_ms[-1] == PAUSE_MAX_MS


def test_a_log_that_is_whole_though_nobody_knows_why_does_so_too() -> None:
    """Nobody could read what its start had skipped."""
    reopens = HealedReopens()
    assert is_opened(reopens)
    assert not is_opened(reopens, now_ms=FIRST_PAUSE_MS - 1)
    assert is_opened(reopens, now_ms=FIRST_PAUSE_MS)


def test_a_part_that_is_healed_waits_for_the_others_for_a_while() -> None:
    reopens = HealedReopens()
    assert not is_opened(reopens, is_whole=False, now_ms=PARTLY_HEALED_WAIT_MS), "nothing is healed"
    assert not is_opened(reopens, ONE, is_whole=False, now_ms=10_000)
    assert not is_opened(reopens, ONE, OTHER, is_whole=False, now_ms=20_000)
    assert not is_opened(reopens, ONE, OTHER, is_whole=False, now_ms=20_000 + PARTLY_HEALED_WAIT_MS - 1)
    assert is_opened(reopens, ONE, OTHER, is_whole=False, now_ms=20_000 + PARTLY_HEALED_WAIT_MS)
