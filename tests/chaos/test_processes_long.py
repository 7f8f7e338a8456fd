"""The long form with real processes. PROTOMQ_CHAOS_SEED chooses where the seeds begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from . import delivery_rounds, pop_rounds, process_campaigns
from .broker_places import CHANGES
from .failing_sync import why_no_shim
from .failover_rounds import FAULTS
from .group_member import KINDS
from .loop_disk import why_no_loop_disk
from .planted_kills import BUGS, PlantedInChild, environment_of
from .process_campaigns import first_seed
from .sick_disk import why_no_sick_disk
from .store_campaigns import CampaignFailed

pytestmark = pytest.mark.chaos


def seeds(count: int) -> range:
    return range(first_seed(), first_seed() + count)


@pytest.fixture
def loop_disk() -> None:
    """Skips, visibly, where there can be no file system of our own."""
    reason = why_no_loop_disk()
    if reason:
        pytest.skip(reason)


@pytest.mark.usefixtures("loop_disk")
def test_power() -> None:
    counts = process_campaigns.power(seeds(8), rounds_each=3)
    print(counts)
    assert counts["power cuts"] >= 20


def test_proxy() -> None:
    counts = process_campaigns.proxy(seeds(6), rounds_each=4)
    print(counts)
    assert all(counts[f"proxy: {fault}"] for fault in ("cut", "cut often", "half", "lose"))
    assert counts["repeats recognised"] >= 20


@pytest.mark.usefixtures("loop_disk")
def test_full_disk() -> None:
    counts = process_campaigns.full_disk(seeds(6))
    print(counts)
    assert counts["full disks"] == 6


@pytest.mark.skipif(bool(why_no_shim()), reason=why_no_shim())
def test_failed_sync() -> None:
    counts = process_campaigns.failed_sync(seeds(6))
    print(counts)
    assert counts["failed syncs"] == 6


def test_damage() -> None:
    counts = process_campaigns.damage(seeds(24))
    print(counts)
    assert counts["damaged logs verified"] >= 12
    assert counts["start refused"] >= 2


def test_queue_damage() -> None:
    counts = process_campaigns.queue_damage(seeds(4), rounds_each=3)
    print(counts)
    assert counts["files healed"] >= 12


def test_lock() -> None:
    counts = process_campaigns.lock(seeds(1))
    print(counts)
    assert counts["second brokers refused"] == 2


def test_names() -> None:
    counts = process_campaigns.names(seeds(6), rounds_each=12)
    print(counts)
    assert counts["refused starts"] >= 6


def all_fired(counts: Counter[str], faults: Sequence[str]) -> bool:
    """Each kind came, and none much more often than another."""
    fired = [counts[fault] for fault in faults]
    return min(fired) > 0 and max(fired) <= min(fired) + 2


def test_failover() -> None:
    # Even and odd seeds differ in when they sync; one seed of three has an etcd of three members.
    rounds_each = -(-len(FAULTS) // 3)
    counts = process_campaigns.failover(seeds(3), rounds_each=rounds_each)
    print(counts)
    assert sum(counts[fault] for fault in FAULTS) == 3 * rounds_each
    assert len([fault for fault in FAULTS if counts[fault]]) >= len(FAULTS) // 2
    if first_seed() % 3 == 1 and not why_no_sick_disk():
        assert all_fired(counts, FAULTS)
    assert counts["acknowledged"] >= 3_000
    assert counts["read"] >= 3_000


def test_times_without_service() -> None:
    """With the default settings. Of a hundred kills one may take longer; of eight none does. Beside other work, single switches may."""
    counts = process_campaigns.failover(seeds(1), rounds_each=24, faults=("kill", "switch", "terminate"))
    print(counts)
    assert counts["kill"] == counts["switch"] == counts["terminate"] == 8
    assert counts["kill: ms without an answer, longest"] <= 5_000
    assert 0 < counts["promotion, ms, median"] <= 1_000
    assert 0 < counts["the first answer, ms, median"] <= 1_000
    assert counts["switch: ms without an answer, median"] < 1_000
    assert counts["terminate: ms without an answer, median"] < 1_000


def test_failover_of_two_members() -> None:
    counts = process_campaigns.failover(seeds(1), rounds_each=8, members=2)
    print(counts)
    assert sum(counts[fault] for fault in FAULTS) == 8
    assert max(counts[fault] for fault in FAULTS) == 1
    assert counts["acknowledged"] >= 500
    assert counts["acknowledged in batches"] >= 500


@pytest.mark.soak
@pytest.mark.parametrize(("members", "seed_count"), [(3, 6), (2, 2)], ids=["three members", "two members"])
def test_failover_in_200_rounds(members: int, seed_count: int) -> None:
    counts = process_campaigns.failover(seeds(seed_count), rounds_each=25, members=members)
    print(counts)
    assert counts["rounds"] == seed_count * 25
    there = [fault for fault in FAULTS if (members > 2 or fault != "kill two") and not (why_no_sick_disk() and fault.endswith("disk"))]
    assert all_fired(counts, there)


def test_hostile() -> None:
    counts = process_campaigns.hostile(seeds(3))
    print(counts)
    assert sum(count for name, count in counts.items() if name.startswith("attack: ")) == 3 * 13


KILLS_EACH = 14
"""With those under pops: a hundred rounds in all."""


@pytest.mark.parametrize("name", ["kill_retries", "kill_delays", "kill_transactions"])
def test_delivery_through_kills(name: str) -> None:
    counts = getattr(process_campaigns, name)(seeds(1), rounds_each=KILLS_EACH)
    print(counts)
    assert counts["kills"] == KILLS_EACH
    if name == "kill_retries":
        assert counts["consumers killed"] >= KILLS_EACH // 2
        assert counts["killed with a message in hand"]
    if name == "kill_transactions":
        assert counts["producers killed"] >= KILLS_EACH // 4
        assert counts["killed with a transaction in hand"]
        assert counts["late decisions"]


CHANGES_EACH = 4
"""Of the lead: each kind once, and one again."""


@pytest.mark.parametrize(
    ("name", "work"),
    [("retries", "deliveries"), ("delays", "delivered"), ("transactions", "committed"), ("pops", "deliveries")],
)
def test_delivery_goes_on_where_the_lead_changes(name: str, work: str) -> None:
    counts = getattr(process_campaigns, f"failover_{name}")(seeds(1), rounds_each=CHANGES_EACH)
    print(counts)
    assert sum(counts[change] for change in CHANGES) == CHANGES_EACH
    assert all(counts[change] for change in CHANGES)
    assert counts[work] >= 100


def test_orderly_groups_go_on_where_the_lead_changes() -> None:
    kind = KINDS.index("orderly")
    counts = process_campaigns.failover_groups(range(kind, kind + 1), rounds_each=CHANGES_EACH)
    print(counts)
    assert counts["kind: orderly"] == 1
    assert all(counts[f"lead: {change}"] for change in CHANGES)
    assert counts["acked"] >= 100


def test_delays_while_the_clock_is_set() -> None:
    counts = process_campaigns.clock_delays(seeds(1), rounds_each=6)
    print(counts)
    assert counts["kills"] == 6
    assert counts["delivered"] >= 100


def test_pops_through_kills() -> None:
    counts = process_campaigns.kill_pops(seeds(2), rounds_each=30)
    print(counts)
    assert counts["kills"] == 60
    assert counts["in order"] == counts["in any order"] == 1
    assert counts["deliveries"] >= 60 * 20
    assert counts["acknowledged too late"] >= 60
    assert counts["dead letters"] >= 10
    assert counts["given back"] >= 100
    assert counts["renewed"] >= 30


@pytest.mark.parametrize("bug", BUGS, ids=[f"{bug.plant.__name__}-{bug.campaign}" for bug in BUGS])
def test_a_planted_bug_of_a_broker_that_is_killed_is_caught(
    bug: PlantedInChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment_of(bug).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(delivery_rounds, "PATIENCE_S", 20.0)
    # A busy machine delivers seconds late, which would hide what comes early.
    monkeypatch.setattr(delivery_rounds, "DELAY_MAX_S", 6.0)
    monkeypatch.setattr(delivery_rounds, "RETRIES", 3)
    monkeypatch.setattr(delivery_rounds, "RETRY_DELAYS_S", (3.0, 3.0, 3.0))
    # With few retries there is room for more messages: more are in hand when a consumer is killed.
    monkeypatch.setattr(delivery_rounds, "SEND_PAUSE_S", 0.01)
    monkeypatch.setattr(pop_rounds, "PATIENCE_S", 20.0)
    monkeypatch.setattr(pop_rounds, "INVISIBLE_S", bug.invisible_s)
    with pytest.raises(CampaignFailed, match=rf"\b{bug.rule}\b"):
        getattr(process_campaigns, bug.campaign)((bug.seed,), rounds_each=bug.rounds)
