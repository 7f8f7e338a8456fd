"""How many examples a property that takes seconds gets."""

from __future__ import annotations

from typing import Final

from hypothesis import settings

JUDGED_PERCENT: Final = 40
"""Of its examples. `make test` tries the same ones each time: what the first forty do not find, the next sixty seldom do."""


def examples(count: int) -> int:
    """`count` where `make properties` searches, with new examples in each round; fewer where `make test` judges a change."""
    if settings.get_current_profile_name() == "searching":
        return count
    return count * JUDGED_PERCENT // 100
