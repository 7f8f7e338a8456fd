"""A misspelled PROTOMQ_* variable gets a warning: otherwise it would be ignored silently.

The SDK reads one variable. All others belong to servers or the command line, which check them themselves, most likely on another
machine. So the SDK warns only of variables that look like its own. It ignores what Kubernetes and Docker put into containers for a
service called protomq-namesrv.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Final

from ._late_imports import fork_waits
from ._warnings import warn

logger = logging.getLogger("protomq")

PREFIX: Final = "PROTOMQ_"
NAMESRV_ADDR_VARIABLE: Final = "PROTOMQ_NAMESRV_ADDR"
BROKERS_NAMESRV_VARIABLE: Final = "PROTOMQ_NAMESRV"
_OF_CONTAINERS: Final = re.compile(r"\w+_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP)\w*)")
_LIKENESS_MIN: Final = 0.7
"""Of what stands behind the prefix: no setting of a server but PROTOMQ_NAMESRV is so like it."""

_told: Final[set[str]] = set()


def namesrv_addresses(environment: Mapping[str, str]) -> str:
    """What PROTOMQ_NAMESRV_ADDR says, "" if it is not set. A variable that may be meant for it is told once in a process."""
    for name, text in mistaken(environment).items():
        if name not in _told:
            _told.add(name)
            warn(logger, text)
    return environment.get(NAMESRV_ADDR_VARIABLE, "").strip()


def mistaken(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are like the one that is read, each with the warning about it."""
    suspects = [
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX)
        and name != NAMESRV_ADDR_VARIABLE
        and not value.startswith(("tcp://", "udp://"))
        and not _OF_CONTAINERS.fullmatch(name)
    ]
    if not suspects:
        return {}
    with fork_waits:
        import difflib

    texts: dict[str, str] = {}
    for name in suspects:
        if name == BROKERS_NAMESRV_VARIABLE:
            if NAMESRV_ADDR_VARIABLE not in environment:
                texts[name] = f"environment: {name} is a setting of brokers; clients read {NAMESRV_ADDR_VARIABLE}"
        elif difflib.get_close_matches(
            name.upper().removeprefix(PREFIX),
            [NAMESRV_ADDR_VARIABLE.removeprefix(PREFIX)],
            1,
            _LIKENESS_MIN,
        ):
            texts[name] = f"environment: nothing reads {name}; do you mean {NAMESRV_ADDR_VARIABLE}?"
    return texts
