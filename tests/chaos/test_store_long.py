"""The long form on the simulated disk. PROTOMQ_CHAOS_SEED chooses where the seeds begin."""

from __future__ import annotations

import pytest

from . import store_campaigns
from .failover_world import KINDS
from .process_campaigns import first_seed

STEPS_MET = (
    "delays: kill in send", "delays: power in recall", "delays: kill in deliver",
    "transactions: power in send", "transactions: kill in decide", "transactions: kill in pass_time",
    "pops: power in pop", "pops: kill in ack", "pops: kill in change", "pops: power in reset",
    "transactions: EIO in checkpoint", "pops: SYNC_LOST in retain",
    "send-backs: power in fail", "send-backs: kill in deliver", "send-backs: power in replay",
)  # fmt: skip

pytestmark = pytest.mark.chaos


def test_store_loops() -> None:
    tally = store_campaigns.store_loops(range(first_seed(), first_seed() + 5))
    print(tally)
    assert tally.images >= 10_000


def test_ha() -> None:
    tally = store_campaigns.ha(range(first_seed(), first_seed() + 1_000))
    print(tally)
    assert tally.fired["truncated"], tally


def test_store_follow() -> None:
    tally = store_campaigns.store_follow(range(first_seed(), first_seed() + 500))
    print(tally)
    for sign in ("torn tail cut", "log truncated", "segments deleted"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_store_damage() -> None:
    tally = store_campaigns.store_damage(range(first_seed(), first_seed() + 1_000))
    print(tally)
    assert tally.images >= 5_000
    assert tally.fired["quarantine"]
    assert tally.fired["repair"]


def test_store_clock() -> None:
    tally = store_campaigns.store_clock(range(first_seed(), first_seed() + 100))
    print(tally)
    assert tally.fired["clock doubted"]


def test_store_topics() -> None:
    tally = store_campaigns.store_topics(range(first_seed(), first_seed() + 500))
    print(tally)
    assert tally.fired["unsynced tail rewritten"]


def test_store_crashes() -> None:
    tally = store_campaigns.store_crashes(range(first_seed(), first_seed() + 2))
    print(tally)
    for sign in STEPS_MET:
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_store_transactions() -> None:
    tally = store_campaigns.store_transactions(range(first_seed(), first_seed() + 100))
    assert tally.fired["crash in retention"], tally


def test_store_states() -> None:
    tally = store_campaigns.store_states(range(first_seed(), first_seed() + 300))
    print(tally)
    for sign in ("segments deleted", "torn tail cut", "topics recovered"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_store_repeats() -> None:
    tally = store_campaigns.store_repeats(range(first_seed(), first_seed() + 1_000))
    print(tally)
    assert tally.fired["unsynced tail rewritten"]


def test_store_moves() -> None:
    tally = store_campaigns.store_moves(range(first_seed(), first_seed() + 300))
    print(tally)
    assert tally.fired["torn tail cut"]


def test_store_pops() -> None:
    tally = store_campaigns.store_pops(range(first_seed(), first_seed() + 1_000))
    print(tally)
    assert tally.fired["17 deliveries, and dead"]
    assert tally.fired["torn tail cut"]


def test_store_delays() -> None:
    tally = store_campaigns.store_delays(range(first_seed(), first_seed() + 300))
    print(tally)
    assert tally.fired["in time"]
    assert tally.fired["power cuts"]


def test_store_retries() -> None:
    tally = store_campaigns.store_retries(range(first_seed(), first_seed() + 1_000))
    print(tally)
    assert tally.fired["killed while messages were sent back"]
    assert tally.fired["17 deliveries, and dead"]


def test_leadership() -> None:
    tally = store_campaigns.leadership(range(first_seed(), first_seed() + 2_000))
    print(tally)
    for sign in ("elected of several", "elected unclean", "returned", "acknowledged without a lease"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


FAILOVER_SIGNS = (
    *KINDS, "crashed at an I/O", "fail-overs", "truncated", "returned", "repeated", "an old master that does not know it", "SEND_OK",
    "SLAVE_NOT_AVAILABLE", "FLUSH_SLAVE_TIMEOUT", "read on a master", "read on a slave", "told that its disk is full",
    "topic made again", "topic deleted by an earlier try", "letters replayed", "replayed by an earlier try", "ended again in doubt",
)  # fmt: skip
"""What a thousand clusters meet."""


def test_failover_sim() -> None:
    tally = store_campaigns.failover_sim(range(first_seed(), first_seed() + 1_000))
    print(tally)
    for sign in FAILOVER_SIGNS:
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_store_machine() -> None:
    tally = store_campaigns.store_machine(range(first_seed(), first_seed() + 15))
    print(tally)
    for sign in ("segments deleted", "torn tail cut", "unsynced tail rewritten"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


@pytest.mark.soak
def test_store_loops_for_an_hour() -> None:
    tally = store_campaigns.store_loops(range(first_seed(), first_seed() + 150))
    print(tally)
    assert tally.images >= 500_000


@pytest.mark.soak
def test_ha_for_long() -> None:
    tally = store_campaigns.ha(range(first_seed(), first_seed() + 10_000))
    print(tally)
    assert tally.fired["truncated"], tally


@pytest.mark.soak
def test_leadership_for_long() -> None:
    tally = store_campaigns.leadership(range(first_seed(), first_seed() + 10_000))
    print(tally)
    for sign in ("elected of several", "elected unclean", "returned", "acknowledged without a lease"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


@pytest.mark.soak
def test_failover_sim_for_long() -> None:
    tally = store_campaigns.failover_sim(range(first_seed(), first_seed() + 10_000))
    print(tally)
    for sign in FAILOVER_SIGNS:
        assert tally.fired[sign], f"never happened: {sign}; {tally}"
