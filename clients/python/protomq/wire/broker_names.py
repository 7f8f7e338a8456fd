"""Names of brokers and clusters: the rule that name servers hold brokers to.

A broker in a machine room is called "room@name", as in RocketMQ (`protomq.allocation.MachineRoom`).
"""

from __future__ import annotations

import re
from typing import Final

NAME_RULE: Final = "1 to 127 characters of A-Z a-z 0-9 _ . - and start with none of the last two; a room and @ may stand before it"
"""What a name must be, for messages."""
_LENGTH_MAX: Final = 127
_NAME: Final = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")


def is_broker_name(name: str) -> bool:
    """Whether a broker or a cluster may be called that."""
    return len(name) <= _LENGTH_MAX and _NAME.fullmatch(name) is not None
