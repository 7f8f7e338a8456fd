"""Arguments and settings, checked where they come in: what is wrong with one, and what to write instead.

A wrong type is a TypeError, a wrong value a ConfigurationError (which is a ValueError). Pure functions.
"""

from __future__ import annotations

import re
from typing import Final

from .errors import ConfigurationError

GROUP_LENGTH_MAX: Final = 120
"""As the broker has it."""
_GROUP: Final = re.compile(r"[A-Za-z0-9_-]+")


def check_group(group: object) -> str:
    """The name of a producer or consumer group; an empty one is no group.

    Raises TypeError or ConfigurationError; an address says that it belongs to `namesrv`.
    """
    if not isinstance(group, str):
        raise TypeError(
            f"group is a str, not {group!r}; addresses of name servers are given as namesrv=..."
        )
    if ":" in group:
        raise ConfigurationError(
            f"{group!r} is no group, it looks like an address: write namesrv={group!r}"
        )
    if group and not (_GROUP.fullmatch(group) and len(group) <= GROUP_LENGTH_MAX):
        raise ConfigurationError(
            f"a group has 1 to {GROUP_LENGTH_MAX} characters of A-Z a-z 0-9 _ and -, this is {group!r}"
        )
    return group
