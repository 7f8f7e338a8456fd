"""Where the brokers of a member are, while its program does not poll: it may work on messages for longer than a fail-over takes.

Who polls looks routes up in `before_poll` (`_group_routes.py`). For who does not, the driver of the membership does. So the member comes to
a slave, and back to the master, before the list there counts as complete (`member_settle_ms`). No I/O, time handed in.
"""

from __future__ import annotations

from typing import Final

from ._group_routes import KEEP_S, SEARCH_S
from ._membership_logic import MembershipState
from ._routes import RouteBook

POLLED_S: Final = 1.5 * SEARCH_S
"""Who polls looks for its brokers more often than that."""
LOOK_S: Final = 0.2
"""Between two looks at what look-ups have found."""
LONG_GONE_S: Final = 10.0
"""Between two look-ups for brokers that have not been there for KEEP_S."""


class MemberSearch:
    """Of one member. All with the lock of its driver."""

    def __init__(self, state: MembershipState, routes: RouteBook | None) -> None:
        """`routes`: None: nothing is searched for."""
        self._state = state
        self._routes = routes
        self._next_s = 0.0
        self._searched: dict[str, str] = {}
        """The brokers that were away at the last look, each with the topic by whose route it is found."""

    def take_due(self, now_s: float) -> list[str]:
        """Topics whose routes are to be looked up now. What was found since the last time is taken: the member is called there."""
        if self._routes is None or now_s - self._state.followed_s < POLLED_S:
            self._searched = {}
            return []
        for name, topic in self._searched.items():
            route = self._routes.last_known(topic)
            if route is not None and name in route.brokers:
                self._state.move(name, route.brokers[name])
        self._searched = self._topics_by_broker(self._routes)
        if not self._searched or now_s < self._next_s:
            return []
        is_recent = any(now_s - (self._state.away_since_s(name) or now_s) < KEEP_S for name in self._searched)
        self._next_s = now_s + (SEARCH_S if is_recent else LONG_GONE_S)
        return list(dict.fromkeys(self._searched.values()))

    def next_due_in_s(self) -> float:
        """Until `take_due` may have more, as it has said last."""
        return LOOK_S if self._searched else float("inf")

    def _topics_by_broker(self, routes: RouteBook) -> dict[str, str]:
        """The brokers that do not answer or are slaves, each with a topic by whose route it is found: always the same one."""
        found: dict[str, str] = {}
        for topic in sorted(self._state.topics):
            route = routes.last_known(topic)
            if route is None:
                continue
            for name in self._state.broker_names:
                if self._state.away_since_s(name) is not None or name in route.leaderless_brokers:
                    if name in route.brokers or self._state.has_queue_of(name, topic):
                        found.setdefault(name, topic)
        return found
