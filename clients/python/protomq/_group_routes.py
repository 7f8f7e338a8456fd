"""The queues that the members of a group share out, where routes change: brokers restart, topics get queues. No I/O, time handed in.

Rules:
- Members compute shares of the same queues only if they have the same routes. Each tells a number that stands for its own (`numbers`).
- Where a broker or another member contradicts a route, it is looked up again: at once, then ever more rarely, up to RocketMQ's
  pollNameServerInterval. A contradiction of another kind has it looked up at once.
- A broker that falls out of a route and does not answer is restarting, as a rule. Its queues stay in the share while it is looked for, so a
  short restart moves no queue. One that answers and is not in the route any more has lost the topic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ._types import BrokerAddress, MessageQueue, Route

RETRY_MIN_S: Final = 0.2
RETRY_MAX_S: Final = 30.0
"""Between two look-ups of a route that is in doubt."""
BACK_S: Final = 3.0
"""A broker that answers again may need that long to be in the route again."""


class _Missing(NamedTuple):
    """A broker that has fallen out of a route, with what it had of the topic."""

    address: BrokerAddress
    queues: tuple[MessageQueue, ...]


@dataclass
class _Known:
    """What is known of one topic."""

    route: Route
    queues: tuple[MessageQueue, ...]
    number: int
    missing: dict[str, _Missing] = field(default_factory=dict)
    away: frozenset[str] = frozenset()
    """Missing brokers that do not answer."""
    away_s: dict[str, float] = field(default_factory=dict)
    """When each missing broker was last seen not to answer."""
    reason: Hashable = None
    retry_s: float = RETRY_MIN_S
    due_s: float = 0.0


class GroupRoutes:
    """Of one member."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def follow(self, routes: Mapping[str, Route], is_away: Callable[[str], bool], now_s: float) -> None:
        """Takes the routes as they are now. `is_away`: whether a broker does not answer."""
        for topic in self._known.keys() - routes.keys():
            del self._known[topic]
        for topic, route in routes.items():
            known = self._known.get(topic)
            if known is None:
                self._known[topic] = _Known(route, route.read_queues, route_number(route.read_queues))
                continue
            is_changed = known.route is not route
            if is_changed:
                self._note_missing(known, route)
            if self._drop_found(known, is_away, now_s) or is_changed:
                kept = [queue for one in known.missing.values() for queue in one.queues]
                known.queues = (*route.read_queues, *kept)
                known.number = route_number(known.queues)

    @property
    def queues(self) -> dict[str, tuple[MessageQueue, ...]]:
        """The queues that are shared out, by topic."""
        return {topic: known.queues for topic, known in self._known.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """A number for the queues of each topic: another one where they are others."""
        return {topic: known.number for topic, known in self._known.items()}

    @property
    def addresses(self) -> dict[str, BrokerAddress]:
        """The brokers of these queues."""
        found: dict[str, BrokerAddress] = {}
        for known in self._known.values():
            found |= {name: one.address for name, one in known.missing.items()}
        for known in self._known.values():
            brokers = known.route.brokers
            found |= {name: brokers[name] for name in _names(known.route.read_queues) if name in brokers}
        return found

    def due_in_s(self, contradicted: Mapping[str, Hashable], now_s: float) -> float:
        """Until `take_due` has something, as far as it is known now."""
        times = [self._due_s(known, contradicted.get(topic)) for topic, known in self._known.items()]
        return max(min(times, default=float("inf")) - now_s, 0.0)

    def take_due(self, contradicted: Mapping[str, Hashable], now_s: float) -> list[str]:
        """The topics that are to be looked up again now. `contradicted`: topics that others see in another way, and in which way."""
        return [topic for topic, known in self._known.items() if self._is_due(known, contradicted.get(topic), now_s)]

    @staticmethod
    def _due_s(known: _Known, contradiction: Hashable) -> float:
        if contradiction is None and not known.missing:
            return float("inf")
        return known.due_s if known.reason == (contradiction, frozenset(known.missing), known.away) else 0.0

    def _is_due(self, known: _Known, contradiction: Hashable, now_s: float) -> bool:
        due_s = self._due_s(known, contradiction)
        if due_s == float("inf"):
            known.reason = None
        if now_s < due_s:
            return False
        reason = (contradiction, frozenset(known.missing), known.away)
        if reason != known.reason:
            known.reason, known.retry_s = reason, RETRY_MIN_S
        known.due_s = now_s + known.retry_s
        known.retry_s = min(known.retry_s * 2, RETRY_MAX_S)
        return True

    @staticmethod
    def _note_missing(known: _Known, route: Route) -> None:
        names = _names(route.read_queues)
        for name in _names(known.route.read_queues) - names:
            queues = tuple(queue for queue in known.route.read_queues if queue.broker_name == name)
            known.missing[name] = _Missing(known.route.brokers[name], queues)
        for name in names & known.missing.keys():
            del known.missing[name]
        known.route = route

    @staticmethod
    def _drop_found(known: _Known, is_away: Callable[[str], bool], now_s: float) -> bool:
        """Whether a missing broker is given up: it answers, or was looked for long enough."""
        gone = []
        known.away = frozenset(name for name in known.missing if is_away(name))
        for name in known.missing:
            if name in known.away:
                known.away_s[name] = now_s
            if now_s - known.away_s.get(name, float("-inf")) > BACK_S or known.retry_s >= RETRY_MAX_S:
                gone.append(name)
        for name in gone:
            del known.missing[name]
        known.away -= set(gone)
        known.away_s = {name: at_s for name, at_s in known.away_s.items() if name in known.missing}
        return bool(gone)


def route_number(queues: Sequence[MessageQueue]) -> int:
    """A number that stands for these queues, in any order, in 64 bits; not 0."""
    digest = hashlib.blake2b(digest_size=8)
    for queue in sorted(queues):
        digest.update(f"{queue.broker_name}\n{queue.queue_id}\n".encode())
    return int.from_bytes(digest.digest(), "little") or 1


def _names(queues: Sequence[MessageQueue]) -> frozenset[str]:
    return frozenset(queue.broker_name for queue in queues)
