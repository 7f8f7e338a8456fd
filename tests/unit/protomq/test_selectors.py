"""Queues take turns, sharding keys stay with their queue, unavailable brokers are skipped."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from protomq._selectors import RoundRobin
from protomq._types import MessageQueue
from protomq.wire.hashing import sharded_index

QUEUES = [MessageQueue("T", broker, i) for broker in ("a", "b") for i in range(3)]


def test_queues_take_turns() -> None:
    turns = RoundRobin(4)
    assert [QUEUES.index(turns.next_queue(QUEUES)) for _ in range(8)] == [4, 5, 0, 1, 2, 3, 4, 5]


def test_another_broker_is_found_while_there_is_one() -> None:
    turns = RoundRobin(0)
    assert {turns.next_queue(QUEUES, avoid_broker="a").broker_name for _ in range(20)} == {"b"}
    only_a = QUEUES[:3]
    assert {turns.next_queue(only_a, avoid_broker="a").broker_name for _ in range(20)} == {"a"}


def test_unavailable_brokers_are_passed_over_unless_there_is_no_other() -> None:
    turns = RoundRobin(0)
    available = {"b"}
    chosen = [
        turns.next_queue(QUEUES, is_available=lambda name: name in available) for _ in range(20)
    ]
    assert {queue.broker_name for queue in chosen} == {"b"}
    # The available one is to be avoided: it is still better than one that is not available.
    assert (
        turns.next_queue(
            QUEUES, avoid_broker="b", is_available=lambda name: name in available
        ).broker_name
        == "b"
    )
    available.clear()
    assert {
        turns.next_queue(QUEUES, is_available=lambda name: name in available).broker_name
        for _ in range(20)
    } == {"a", "b"}


def test_the_hash_of_a_sharding_key_is_fixed_for_all_times_and_languages() -> None:
    assert [sharded_index(key, 1 << 62) for key in ("", "N14228", "é")] == [
        0,
        sharded_index("N14228", 1 << 62),
        sharded_index("é", 1 << 62),
    ]
    # CRC-32C of "123456789" is E3069283, CRC-32 is CBF43926: the check values of both algorithms.
    assert sharded_index("123456789", 1 << 63) == 0x4BF43926_E3069283


def test_another_process_chooses_the_same_queue() -> None:
    code = "from protomq.wire.hashing import sharded_index; print(sharded_index('N14228', 8))"
    answers = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
                       capture_output=True, text=True, check=True).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert answers == {str(sharded_index("N14228", 8))}


def test_sharding_keys_spread_over_the_queues() -> None:
    counts = Counter(sharded_index(f"key-{i}", 8) for i in range(8000))
    assert all(800 < counts[queue] < 1200 for queue in range(8))
