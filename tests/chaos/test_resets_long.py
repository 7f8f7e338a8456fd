"""The long form of the campaigns with resets and with broadcasts. PROTOMQ_CHAOS_SEED chooses where the seeds begin."""

from __future__ import annotations

import pytest

from . import group_rounds, process_campaigns
from .group_member import KINDS
from .planted_groups import SEEDS
from .planted_resets import BUGS, PlantedInMembers, environment_of
from .process_campaigns import first_seed
from .store_campaigns import CampaignFailed

pytestmark = pytest.mark.chaos


def test_offsets_are_reset_while_members_and_brokers_are_killed() -> None:
    counts = process_campaigns.resets(range(first_seed(), first_seed() + len(KINDS)), rounds_each=9)
    print(counts)
    assert len([name for name in counts if name.startswith("kind: ")]) == len(KINDS)
    assert all(counts[f"resets: {kind}"] for kind in ("offset", "time", "end"))
    assert sum(count for name, count in counts.items() if name.startswith("resets: ")) >= 25


def test_all_members_of_a_broadcast_get_everything_through_kills() -> None:
    counts = process_campaigns.broadcasts(range(first_seed(), first_seed() + 2), rounds_each=9)
    print(counts)
    assert counts["ended well"] >= 2
    assert counts["rounds: kill"] + counts["rounds: broker"] + counts["rounds: broker and member"] >= 9


@pytest.mark.parametrize("bug", BUGS, ids=[bug.plant.__name__ for bug in BUGS])
def test_a_planted_bug_of_resets_or_broadcasts_is_caught(bug: PlantedInMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(bug).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group_rounds, "PATIENCE_S", 20.0)
    several = range(bug.kind, bug.kind + SEEDS * len(KINDS), len(KINDS))
    with pytest.raises(CampaignFailed, match=rf"\b{bug.rules}\b"):
        getattr(process_campaigns, bug.campaign)(several, rounds_each=bug.rounds, faults=bug.faults)
