"""The checker catches bugs that were put in on purpose, and says nothing without them."""

from __future__ import annotations

import pytest

from tests.chaos.planted import PLANTED, Planted, caught_by
from tests.chaos.store_world import watch_log

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.name for planted in PLANTED])
def test_the_checker_catches_a_store_that(planted: Planted) -> None:
    with watch_log():
        caught = caught_by(planted, range(40))
        assert caught is not None, "it got away"
        seed, _ = caught
        assert planted.drill(seed) == [], f"the drill is red without the bug, too, with seed {seed}"
