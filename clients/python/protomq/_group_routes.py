"""The queues that the members of a group share out, where routes change: brokers restart, topics get queues. No I/O, time handed in.

Rules:
- Members compute shares of the same queues only if they have the same routes. Each tells a number that stands for its own (`numbers`).
- Where a broker or another member contradicts a route, it is looked up again: at once, then ever more rarely, up to RocketMQ's
  pollNameServerInterval. A contradiction of another kind has it looked up at once.
- Where a broker does not answer, or is a slave whose master is away, one of its routes is looked up again each SEARCH_S. So all members
  come to a slave, and back to the master, while their list there counts as incomplete (`member_settle_ms`). Pulls would tell too late
  where a member has no queue of a topic.
- Routes are looked up one by one. So the address of a broker is that of the route that has changed last.
- A broker that falls out of a route and does not answer is restarting, as a rule. Its queues stay in the share for KEEP_S, so a restart
  moves no queue. All members see at the same time that it is gone, and so give it up together. One that answers and does not come back into
  the route has lost the topic.
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
SEARCH_S: Final = 1.0
"""Between two look-ups while a broker is searched for."""
KEEP_S: Final = 25.0
"""How long a broker keeps its place in the share while it does not answer; brokers give a silent member up after this time, too."""
BACK_S: Final = 3.0
"""A broker that answers again may need that long to be in the route again."""
GRACE_S: Final = 1.0
"""One that has never stopped answering may be missing that long: a name server that starts does not know all brokers yet."""


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
    changed: int
    """Grows with each change of any route: the higher one is the newer route."""
    missing: dict[str, _Missing] = field(default_factory=dict)
    away: frozenset[str] = frozenset()
    """Missing brokers that do not answer."""
    until_s: dict[str, float] = field(default_factory=dict)
    """How long each missing broker keeps its place."""
    searched: frozenset[str] = frozenset()
    """Brokers of the route that do not answer, or are slaves; without those that another topic searches for."""
    reason: Hashable = None
    retry_s: float = RETRY_MIN_S
    due_s: float = 0.0


class GroupRoutes:
    """Of one member."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._change_count = 0

    def follow(
        self, routes: Mapping[str, Route], away_since_s: Callable[[str], float | None], now_s: float, *, drops: bool
    ) -> None:
        """Takes the routes as they are now. `away_since_s`: since when a broker has not answered; None: it does.

        `drops`: the routes have just been looked at again, so brokers whose time is over lose their places.
        """
        for topic in self._known.keys() - routes.keys():
            del self._known[topic]
        for topic, route in routes.items():
            known = self._known.get(topic)
            if known is None:
                self._change_count += 1
                self._known[topic] = _Known(route, route.read_queues, route_number(route.read_queues), self._change_count)
                continue
            is_changed = known.route is not route
            if is_changed:
                self._change_count += 1
                known.changed = self._change_count
                self._note_missing(known, route)
            self._note_away(known, away_since_s, now_s)
            gone = [name for name, until_s in known.until_s.items() if drops and now_s > until_s]
            for name in gone:
                del known.missing[name], known.until_s[name]
                known.away -= {name}
            if gone or is_changed:
                kept = [queue for one in known.missing.values() for queue in one.queues]
                known.queues = (*route.read_queues, *kept)
                known.number = route_number(known.queues)
        searched: set[str] = set()
        for known in self._known.values():
            route = known.route
            lost = {name for name in route.brokers if name in route.leaderless_brokers or away_since_s(name) is not None}
            if lost:
                lost &= _names(route.read_queues)
            known.searched = frozenset(lost - searched)
            searched |= lost

    def is_looked_for(self, queue: MessageQueue) -> bool:
        """Whether the queue is one of a broker that is missing in its route."""
        known = self._known.get(queue.topic)
        return known is not None and queue.broker_name in known.missing

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
        for known in sorted(self._known.values(), key=lambda known: known.changed):
            brokers = known.route.brokers
            found |= {name: brokers[name] for name in _names(known.route.read_queues) if name in brokers}
        return found

    def due_in_s(self, contradicted: Mapping[str, Hashable], now_s: float) -> float:
        """Until `take_due` has something, or a broker loses its place, as far as it is known now."""
        times = [self._due_s(known, contradicted.get(topic)) for topic, known in self._known.items()]
        times += [until_s for known in self._known.values() for until_s in known.until_s.values()]
        return max(min(times, default=float("inf")) - now_s, 0.0)

    def take_due(self, contradicted: Mapping[str, Hashable], now_s: float) -> list[str]:
        """The topics that are to be looked up again now. `contradicted`: topics that others see in another way, and in which way."""
        return [topic for topic, known in self._known.items() if self._is_due(known, contradicted.get(topic), now_s)]

    @staticmethod
    def _due_s(known: _Known, contradiction: Hashable) -> float:
        if contradiction is None and not known.missing and not known.searched:
            return float("inf")
        return known.due_s if known.reason == _reason(known, contradiction) else 0.0

    def _is_due(self, known: _Known, contradiction: Hashable, now_s: float) -> bool:
        due_s = self._due_s(known, contradiction)
        if due_s == float("inf"):
            known.reason, known.retry_s = None, RETRY_MIN_S
        if now_s < due_s:
            return False
        reason = _reason(known, contradiction)
        if reason != known.reason:
            known.reason, known.retry_s = reason, RETRY_MIN_S
        known.due_s = now_s + (min(known.retry_s, SEARCH_S) if known.searched else known.retry_s)
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
        known.until_s = {name: until_s for name, until_s in known.until_s.items() if name in known.missing}
        known.route = route

    @staticmethod
    def _note_away(known: _Known, away_since_s: Callable[[str], float | None], now_s: float) -> None:
        """Sets how long each missing broker keeps its place."""
        since_s = {name: away_since_s(name) for name in known.missing}
        for name, at_s in since_s.items():
            if at_s is not None:
                known.until_s[name] = at_s + KEEP_S
            elif name in known.away:
                known.until_s[name] = now_s + BACK_S
            else:
                known.until_s.setdefault(name, now_s + GRACE_S)
        known.away = frozenset(name for name, at_s in since_s.items() if at_s is not None)


def route_number(queues: Sequence[MessageQueue]) -> int:
    """A number that stands for these queues, in any order, in 64 bits; not 0."""
    digest = hashlib.blake2b(digest_size=8)
    for queue in sorted(queues):
        digest.update(f"{queue.broker_name}\n{queue.queue_id}\n".encode())
    return int.from_bytes(digest.digest(), "little") or 1


def _reason(known: _Known, contradiction: Hashable) -> Hashable:
    """Why the route of a topic is in doubt."""
    return contradiction, frozenset(known.missing), known.away, known.searched


def _names(queues: Sequence[MessageQueue]) -> frozenset[str]:
    return frozenset(queue.broker_name for queue in queues)
