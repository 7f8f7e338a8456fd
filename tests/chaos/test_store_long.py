"""The long form on the simulated disk. PROTOMQ_CHAOS_SEED chooses where the seeds begin."""

from __future__ import annotations

import pytest

from . import store_campaigns
from .process_campaigns import first_seed

pytestmark = pytest.mark.chaos


def test_store_loops() -> None:
    tally = store_campaigns.store_loops(range(first_seed(), first_seed() + 5))
    print(tally)
    assert tally.images >= 10_000


def test_store_damage() -> None:
    tally = store_campaigns.store_damage(range(first_seed(), first_seed() + 1_000))
    print(tally)


def test_store_clock() -> None:
    store_campaigns.store_clock(range(first_seed(), first_seed() + 100))


def test_store_topics() -> None:
    store_campaigns.store_topics(range(first_seed(), first_seed() + 500))


def test_store_machine() -> None:
    print(store_campaigns.store_machine(range(first_seed(), first_seed() + 15)))


@pytest.mark.soak
def test_store_loops_for_an_hour() -> None:
    tally = store_campaigns.store_loops(range(first_seed(), first_seed() + 150))
    print(tally)
    assert tally.images >= 500_000
