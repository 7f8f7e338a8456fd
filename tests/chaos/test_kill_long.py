"""The long form of kill -9 under load. In a file of its own, so that it runs beside the others."""

from __future__ import annotations

import pytest

from . import process_campaigns
from .process_campaigns import first_seed

pytestmark = pytest.mark.chaos


def test_kill() -> None:
    counts = process_campaigns.kill(range(first_seed(), first_seed() + 10), rounds_each=20)
    print(counts)
    assert counts["kills"] >= 200
    assert counts["parsed by protoc"] >= 200
