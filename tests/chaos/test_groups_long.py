"""The long form of the campaigns with a group. PROTOMQ_CHAOS_SEED chooses where the seeds begin."""

from __future__ import annotations

import pytest

from . import group_rounds, process_campaigns
from .group_member import KINDS
from .group_rounds import KILLS, STOPS
from .planted_groups import BUGS, SEEDS, PlantedInGroup, environment_of
from .process_campaigns import first_seed
from .store_campaigns import CampaignFailed

pytestmark = pytest.mark.chaos


def seeds() -> range:
    """One for each kind of members."""
    return range(first_seed(), first_seed() + len(KINDS))


def test_members_and_brokers_are_killed() -> None:
    counts = process_campaigns.groups(seeds(), rounds_each=23, undisturbed_kills=2)
    print(counts)
    assert sum(counts[f"rounds: {kill}"] for kill in KILLS) >= 100
    assert len([name for name in counts if name.startswith("kind: ")]) == len(KINDS)
    assert counts["take-overs"] >= 10


def test_brokers_restart_and_no_queue_moves() -> None:
    counts = process_campaigns.groups(seeds(), rounds_each=6, faults=("broker",), gap_s=25.0)
    print(counts)
    assert counts["deliveries"] >= 1_000
    # While members join, a queue's first message may come twice. Where queues moved at each restart, one of ten messages did.
    assert counts["deliveries twice"] <= len(KINDS)


def test_members_are_stopped_past_their_time_and_wake_up() -> None:
    counts = process_campaigns.groups(seeds(), rounds_each=4, faults=STOPS)
    print(counts)
    assert counts["stopped anywhere"] + counts["stopped in a commit"] >= 20
    # A message may be between check and listener when a stop falls; that is rare.
    assert counts["begun on waking"] <= 3


@pytest.mark.parametrize("bug", BUGS, ids=[bug.plant.__name__ for bug in BUGS])
def test_a_planted_bug_of_a_group_is_caught(bug: PlantedInGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(bug).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group_rounds, "PATIENCE_S", 40.0)
    several = range(bug.kind, bug.kind + SEEDS * len(KINDS), len(KINDS))
    with pytest.raises(CampaignFailed, match=rf"\b{bug.rules}\b"):
        process_campaigns.groups(several, rounds_each=bug.rounds, faults=bug.faults)
