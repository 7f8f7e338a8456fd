"""For which damaged ranges a broker asks its replicas, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from protomq_broker.replica_healing import REPAIRED_LOOKS, ReplicaHealing
from protomq_broker.store.log.recovery import DamagedRange

DAMAGED = DamagedRange(100, 200, 1, "zeros")
REPAIRED = DamagedRange(500, 600, 2, "zeros")


def test_a_range_that_a_repair_has_filled_is_asked_for_once_and_then_seldom() -> None:
    store: Any = SimpleNamespace(
        unhealed_ranges=[DAMAGED, REPAIRED],
        is_repaired=lambda position: position == REPAIRED.start_position,
    )
    healing = ReplicaHealing(store, lambda: (), "a")
    asked = [healing.ranges_to_heal() for _ in range(REPAIRED_LOOKS + 1)]
    assert asked[0] == [DAMAGED, REPAIRED]
    assert asked[1:-1] == [[DAMAGED]] * (REPAIRED_LOOKS - 1)
    assert asked[-1] == [DAMAGED, REPAIRED]
