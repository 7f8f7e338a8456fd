"""Numbers that pages promise in their text are those of the code. (Limits of requests: test_limits. Settings: test_settings_docs.)"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from protomq import _queue_locks, _trace
from protomq_broker import filter_modules, queue_locks
from protomq_broker.filters import wasm_filter
from protomq_ha import leadership
from tests.chaos import planted_groups, planted_kills, planted_resets
from tests.chaos.planted import PLANTED
from tests.chaos.store_pops import check_pops
from tests.chaos.store_retries import check_send_backs

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

KILLED: Final = [bug for bug in planted_kills.BUGS if bug.campaign.startswith("kill_")]

BUGS_SAID: Final = (
    ("pop.md", r"It catches (\w+) planted bugs", [bug for bug in PLANTED if bug.drill is check_pops]),
    ("pop.md", r"It catches (\w+) bugs in these brokers", [bug for bug in KILLED if bug.campaign == "kill_pops"]),
    ("retry.md", r"It must catch (\w+) planted bugs", [bug for bug in PLANTED if bug.drill is check_send_backs]),
    ("reliability.md", r"(\w+) bugs in those processes must be caught", KILLED),
    ("reliability.md", r"compares listeners, commits, tokens and times; (\w+) planted bugs", planted_groups.BUGS),
    ("reliability.md", r"how soon members follow\. (\w+) planted bugs", [bug for bug in planted_resets.BUGS if bug.campaign == "resets"]),
)
"""(page, how many planted bugs it says are caught, those that there are)."""

WORDS: Final = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip


@pytest.mark.parametrize(("page", "said", "number"), SAID, ids=[f"{page}: {said[:40]}" for page, said, _ in SAID])
def test_a_number_in_the_text_is_that_of_the_code(page: str, said: str, number: float) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    (found,) = re.findall(said, text)
    assert float(found.replace(",", "")) == number


@pytest.mark.parametrize(("page", "said", "bugs"), BUGS_SAID, ids=[f"{page}: {said[:40]}" for page, said, _ in BUGS_SAID])
def test_a_page_counts_the_planted_bugs_that_there_are(page: str, said: str, bugs: Sequence[object]) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    (found,) = re.findall(said, text)
    assert WORDS.index(found.lower()) == len(bugs)


def test_a_lock_outlives_two_renewals_that_fail() -> None:
    assert 3 * _queue_locks.RENEW_S * 1_000 <= queue_locks.LOCK_MS
