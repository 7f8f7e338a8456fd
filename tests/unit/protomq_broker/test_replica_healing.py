"""For which damaged ranges a broker asks its replicas, and when."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from protomq_broker import replica_healing
from protomq_broker.replica_healing import REPAIRED_LOOKS, ReplicaHealing
from protomq_broker.store.log.recovery import DamagedRange
from protomq_runtime.addresses import Address

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


def test_a_broker_that_is_to_lead_does_not_wait_for_a_replica_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_healing, "LOOK_INTERVAL_S", 0.01)
    store: Any = SimpleNamespace(unhealed_ranges=[DAMAGED], is_repaired=lambda position: False, heal_log=lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        healing = ReplicaHealing(store, lambda: [Address(*silent.getsockname())], "a")
        healing.start()
        connection, _ = silent.accept()
        begun_s = time.monotonic()
        healing.close()
        took_s = time.monotonic() - begun_s
        connection.close()
    assert took_s < 2


def test_nothing_is_healed_any_more_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_healing, "LOOK_INTERVAL_S", 0.01)
    healed: list[DamagedRange] = []
    store: Any = SimpleNamespace(
        unhealed_ranges=[DAMAGED], is_repaired=lambda position: False, heal_log=lambda damage, data: healed.append(damage)
    )
    asked, answered = threading.Event(), threading.Event()

    def fetch(damage: DamagedRange, address: Address) -> bytes:
        asked.set()
        assert answered.wait(30)
        return bytes(100)

    healing = ReplicaHealing(store, lambda: [Address("replica", 1)], "a")
    monkeypatch.setattr(healing, "_fetch", fetch)
    healing.start()
    assert asked.wait(30)
    healing.close()
    answered.set()
    healing._thread.join(30)
    assert not healing._thread.is_alive()
    assert healed == []
