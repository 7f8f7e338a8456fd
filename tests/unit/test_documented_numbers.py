"""Numbers that pages promise in their text are those of the code. (Limits of requests: test_limits. Settings: test_settings_docs.)"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from protomq import _queue_locks, _trace
from protomq_broker import filter_modules, queue_locks
from protomq_broker.filters import wasm_filter
from protomq_ha import leadership

DOCS: Final = Path(__file__).parents[2] / "docs"

SAID: Final = (
    ("groups.md", r"renews the locks every (\d+) s\.", _queue_locks.RENEW_S),
    ("groups.md", r"A lock holds for (\d+) s ", queue_locks.LOCK_MS / 1_000),
    ("groups.md", r"Other holders have (\d+) s to renew", queue_locks.LOCK_MS / 1_000),
    ("filters.md", r"It may execute ([\d,]+) instructions for a record", wasm_filter.FUEL_PER_RECORD),
    ("filters.md", r"A module has at most (\d+) KiB", wasm_filter.MODULE_SIZE_MAX_BYTES >> 10),
    ("filters.md", r"a broker at most (\d+) modules", filter_modules.MODULES_MAX),
    ("track.md", r"At most ([\d,]+) events wait", _trace.PENDING_MAX),
    ("ha.md", r"twice as long if it happens again, (\d+) min at most", leadership.FULL_PAUSE_MAX_MS / 60_000),
)
"""(page, what it says, what the code has)."""


@pytest.mark.parametrize(("page", "said", "number"), SAID, ids=[f"{page}: {said[:40]}" for page, said, _ in SAID])
def test_a_number_in_the_text_is_that_of_the_code(page: str, said: str, number: float) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    (found,) = re.findall(said, text)
    assert float(found.replace(",", "")) == number


def test_a_lock_outlives_two_renewals_that_fail() -> None:
    assert 3 * _queue_locks.RENEW_S * 1_000 <= queue_locks.LOCK_MS
