"""Names of brokers and clusters: the rule that name servers hold brokers to."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,126}")


def is_broker_name(name: str) -> bool:
    """Whether a broker or a cluster may be called that."""
    return _NAME.fullmatch(name) is not None
