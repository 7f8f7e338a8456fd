"""The checker catches bugs that were put in on purpose, and says nothing without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import pytest

from tests.chaos import process_campaigns, process_rounds, store_campaigns
from tests.chaos.checker import Violation
from tests.chaos.planted import FIRST_SEEDS, PLANTED, Drill, Planted, caught_by
from tests.chaos.store_campaigns import CampaignFailed
from tests.chaos.store_world import watch_log

pytestmark = pytest.mark.chaos


def test_the_seeds_that_are_tried_first_are_of_bugs_and_within_their_bounds() -> None:
    seeds = {planted.name: planted.seeds for planted in PLANTED}
    assert all(seed < seeds[name] for name, seed in FIRST_SEEDS.items())


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
def test_the_checker_catches_a_store_that(planted: Planted) -> None:
    with watch_log():
        caught = caught_by(planted, [FIRST_SEEDS.get(planted.name, 0), *range(planted.seeds)])
        assert caught is not None, "it got away"
        seed, _ = caught
        assert found_without_a_bug(planted.drill, seed) == [], f"the drill is red without the bug, too, with seed {seed}"


@cache
def found_without_a_bug(drill: Drill, seed: int) -> Sequence[Violation]:
    """Once for all bugs that a seed shows: a drill does the same each time. `python -m tests.chaos planted` runs it behind each bug."""
    return drill(seed)


def test_a_red_run_tells_its_seed_and_the_command_that_replays_it() -> None:
    bugs = {planted.name: planted for planted in PLANTED}
    cases: tuple[tuple[str, Callable[[Iterable[int]], object], str], ...] = (
        ("store-topics", store_campaigns.store_topics, "loses an append"),
        ("store-damage", store_campaigns.store_damage, "cuts corruption"),
        ("store-machine", partial(store_campaigns.store_machine, shrinks=False), "loses an append"),
    )
    for name, campaign, bug in cases:
        with bugs[bug].plant(), pytest.raises(CampaignFailed) as caught:
            campaign(range(1, 40))
        found = re.match(rf"{name}, seed (\d+): ", str(caught.value))
        assert found is not None
        command = f"replay: .venv/bin/python -m tests.chaos {name} {found[1]}"
        assert str(caught.value).endswith(command)


def test_a_red_run_with_processes_tells_its_rounds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(seed: int, rounds: int, counts: object, *, sync_flush: bool) -> list[Violation]:
        assert rounds == 20
        if seed == 3:
            raise OSError("the broker did not start")
        return [Violation("A1", "lost")] if seed == 4 else []

    monkeypatch.setattr(process_rounds, "kill_rounds", breaks)
    for seed, reason in ((3, "the broker did not start"), (4, "A1: lost")):
        with pytest.raises(CampaignFailed) as caught:
            process_campaigns.kill((1, seed), rounds_each=20)
        assert reason in str(caught.value)
        command = f"replay: .venv/bin/python -m tests.chaos kill {seed} --rounds 20"
        assert str(caught.value).endswith(command)
