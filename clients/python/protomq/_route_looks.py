"""When a consumer looks its routes up again, for brokers that came new, or came back. No I/O, time handed in.

Rules:
- Brokers tell members when routes change, if their name servers tell them. Then a member looks only when it is told, and as often as each
  route is looked up anyway. It looks once more after it has joined. Nobody has told it what changed between its first look-up and that.
- Thousands of members hear of a change, or of a broker's restart, at one time. Each looks a random moment later.
- Nobody tells others: consumers that are no members, and members of which a broker or a name server is of an earlier version, or lost.
- A route that is trusted for 30 s, as a producer's, hides a broker for that long. So each topic is looked up again after LOOK_S.
- The members of a group tell each other when their routes differ. So the more there are, the more seldom each one looks: together they make
  LOOKS_PER_S, as long as each looks once in ROUTE_FRESH_S. So does a consumer of many topics, which it looks up in turn.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

from ._routes import ROUTE_FRESH_S

LOOK_S: Final = 2.0
LOOKS_PER_S: Final = 2.0
SPREAD_ALONE: Final = 0.25
"""A pause is longer or shorter by this part; in a group by up to all of it."""
ANSWER_S: Final = 0.2
"""After a look-up begins, somebody sees what came of it."""
TOLD_SPREAD_S: Final = 0.25
"""A member that hears of a change looks by then: the queues of a new broker are to be consumed within 1 s."""
UNSURE_SPREAD_S: Final = 1.0
"""Where nobody could have told, there is no change as a rule."""


class RouteLooks:
    """Of one consumer."""

    def __init__(self, now_s: float, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._line: list[str] = []
        """Topics that are still to be looked up in this round."""
        self._next_s = now_s + LOOK_S
        self._answer_s = float("inf")
        self._is_told = False
        self._heard_s: dict[str, float] = {}
        """When topics are to be looked up because of what brokers said."""
        self._first_heard_s = float("inf")
        """The first of these times: each poll asks."""

    def due_in_s(self, now_s: float) -> float:
        """Until there is something to look up, or to see."""
        return max(min(self._next_s, self._answer_s, self._first_heard_s) - now_s, 0.0)

    def follow(self, is_told: bool, now_s: float) -> None:
        """Takes whether brokers report changes now. Where they have just ceased to, there is a look soon."""
        if self._is_told and not is_told:
            self._next_s = min(self._next_s, now_s + self._spread(LOOK_S, 1.0))
        self._is_told = is_told

    def hear(self, topics: Collection[str], spread_s: float, now_s: float) -> None:
        """Takes topics that brokers want to be looked up, each within `spread_s`."""
        for topic in topics:
            due_s = now_s + spread_s * self._rng.random()
            self._heard_s[topic] = min(due_s, self._heard_s.get(topic, due_s))
            self._first_heard_s = min(self._first_heard_s, due_s)

    def take_heard(self, now_s: float) -> list[str]:
        """Topics of these that are to be looked up now."""
        if now_s < self._first_heard_s:
            return []
        due = [topic for topic, due_s in self._heard_s.items() if due_s <= now_s]
        for topic in due:
            del self._heard_s[topic]
        self._first_heard_s = min(self._heard_s.values(), default=float("inf"))
        return due

    def begun(self, now_s: float) -> None:
        """Somebody has a topic looked up now."""
        self._answer_s = min(self._answer_s, now_s + ANSWER_S)

    def take_due(self, topics: Collection[str], member_count: int, now_s: float) -> str | None:
        """The topic that is to be looked up now; None: none. `member_count`: how many look at the same topics."""
        if now_s >= self._answer_s:
            self._answer_s = float("inf")
        if now_s < self._next_s:
            return None
        if self._is_told:
            self._next_s = now_s + ROUTE_FRESH_S
            return None
        if not topics:
            self._next_s = now_s + LOOK_S
            return None
        pause_s = max(min(member_count / LOOKS_PER_S, ROUTE_FRESH_S / len(topics)), LOOK_S / len(topics))
        # Members that began at one time do not look at one time.
        spread = SPREAD_ALONE if member_count == 1 else 1.0
        self._next_s = now_s + self._spread(pause_s, spread)
        self._answer_s = now_s + ANSWER_S
        while True:
            if not self._line:
                self._line = list(topics)
            topic = self._line.pop()
            if topic in topics:
                return topic

    def _spread(self, pause_s: float, part: float) -> float:
        return pause_s * self._rng.uniform(1 - part, 1 + part)
