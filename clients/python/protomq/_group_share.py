"""The share of one consumer in what its group consumes: what is in `_membership_logic.py`, with the routes, for its steps.

One thread at a time, or coroutines of one loop; the driver of the membership has a lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ._member_driver import MemberDriver
from ._types import MessageQueue, Route

ROUTE_RETRY_MIN_S: Final = 0.2
ROUTE_RETRY_MAX_S: Final = 30.0
"""Between two look-ups of a route that is in doubt."""


class GroupShare:
    """What a consumer has of the topics that it subscribes to."""

    def __init__(self, member: MemberDriver, clock: Callable[[], float]) -> None:
        self.member = member
        self._clock = clock
        self._queues: list[MessageQueue] = []
        self._seen_news = 0
        self._due_s = 0.0
        self._first: dict[str, frozenset[MessageQueue]] = {}
        """The queues that a topic had when it was subscribed to."""
        self._doubts = RouteDoubts()

    def want(self, routes: Mapping[str, Route], filters: Mapping[str, str]) -> None:
        """What is subscribed to now. New brokers are called."""
        for topic in self._first.keys() - routes.keys():
            del self._first[topic]
        for topic, route in routes.items():
            if not self._first.get(topic):
                self._first[topic] = frozenset(route.read_queues)
        addresses = {
            queue.broker_name: route.brokers[queue.broker_name]
            for route in routes.values()
            for queue in route.read_queues
            if queue.broker_name in route.brokers
        }
        numbers = self._doubts.follow(routes)
        with self.member.lock:
            self.member.state.want(filters, addresses, numbers)
        self.member.poke()

    def queues(self, routes: Mapping[str, Route]) -> list[MessageQueue]:
        """The queues to consume now."""
        now_s = self._clock()
        by_topic = {topic: route.read_queues for topic, route in routes.items()}
        with self.member.lock:
            state = self.member.state
            self._seen_news = state.news
            found = state.share(by_topic, now_s)
            self._due_s = now_s + state.changes_in_s(now_s)
            if self._doubts.with_broken(state.doubtful_topics(by_topic)):
                self._due_s = min(self._due_s, max(self._doubts.due_s, now_s + ROUTE_RETRY_MIN_S))
        if found is None:
            readable = {queue for several in by_topic.values() for queue in several}
            found = [queue for queue in self._queues if queue in readable]
        self._queues = found
        return found

    def waits_for_answers(self) -> bool:
        """Whether brokers are to say yet whether queues of the share are free."""
        with self.member.lock:
            return self.member.state.has_open_claims()

    def claim(self, queues: Iterable[MessageQueue]) -> None:
        """The queues that the consumer has now."""
        with self.member.lock:
            self.member.state.claim(queues)
        self.member.poke()

    def may_change(self, now_s: float) -> bool:
        """Whether `queues` may have another answer than the last."""
        return self.member.state.news != self._seen_news or now_s >= self._due_s

    def due_in_s(self, now_s: float) -> float:
        """Until `may_change`, as far as it is known now."""
        return 0.0 if self.may_change(now_s) else self._due_s - now_s

    def lost_brokers(self) -> set[str]:
        """Brokers at which others may have this consumer's queues; once."""
        with self.member.lock:
            self.member.state.check_expiry(self._clock())
            lost = self.member.state.take_lost()
        self._queues = [queue for queue in self._queues if queue.broker_name not in lost]
        return lost

    def stands(self, broker_name: str, *, by_calls: bool = True) -> bool:
        """See MembershipState.stands. Any thread: it takes no lock."""
        return self.member.state.stands(broker_name, self._clock(), by_calls=by_calls)

    def doubtful_routes(self, routes: Mapping[str, Route]) -> list[str]:
        """Topics that are to be looked up again now."""
        by_topic = {topic: route.read_queues for topic, route in routes.items()}
        with self.member.lock:
            topics = self.member.state.doubtful_topics(by_topic)
        return self._doubts.take_due(topics, self._clock())

    def is_late(self, queue: MessageQueue) -> bool:
        """Whether the topic got the queue after it was subscribed to: nothing of it was there before."""
        return queue not in self._first.get(queue.topic, frozenset((queue,)))


class RouteDoubts:
    """When to look up again a route that a broker or another member contradicts, or out of which a broker has fallen.

    Look-ups begin at once and become rarer, up to RocketMQ's pollNameServerInterval. No I/O, time handed in.
    """

    def __init__(self) -> None:
        self.due_s = 0.0
        """Not before that time."""
        self._retry_s = ROUTE_RETRY_MIN_S
        self._numbers: dict[str, tuple[Route, int]] = {}
        self._missing: dict[str, frozenset[str]] = {}
        """By topic: brokers that its route had, and has no more. A broker that starts again comes back within seconds."""

    def follow(self, routes: Mapping[str, Route]) -> dict[str, int]:
        """Takes the routes that are used now; a number for each, which is another one where its queues are others."""
        for topic in self._numbers.keys() - routes.keys():
            del self._numbers[topic]
            self._missing.pop(topic, None)
        for topic, route in routes.items():
            known = self._numbers.get(topic)
            if known is None or known[0] is not route:
                self._numbers[topic] = route, route_number(route.read_queues)
                if known is not None:
                    self._note_missing(topic, known[0], route)
        return {topic: number for topic, (_, number) in self._numbers.items()}

    def with_broken(self, topics: Iterable[str]) -> list[str]:
        """These topics, and those whose route misses a broker."""
        return list(dict.fromkeys((*topics, *self._missing)))

    def take_due(self, contradicted: Iterable[str], now_s: float) -> list[str]:
        """The topics that are to be looked up again now."""
        topics = self.with_broken(contradicted)
        if not topics:
            self._retry_s, self.due_s = ROUTE_RETRY_MIN_S, 0.0
            return []
        if now_s < self.due_s:
            return []
        self.due_s = now_s + self._retry_s
        self._retry_s = min(self._retry_s * 2, ROUTE_RETRY_MAX_S)
        if self._retry_s == ROUTE_RETRY_MAX_S:
            self._missing.clear()  # Routes are looked up that often anyway.
        return topics

    def _note_missing(self, topic: str, before: Route, now: Route) -> None:
        brokers_now = _brokers_of(now)
        missing = (self._missing.get(topic, frozenset()) | _brokers_of(before)) - brokers_now
        if missing - self._missing.get(topic, frozenset()):
            self._retry_s, self.due_s = ROUTE_RETRY_MIN_S, 0.0
        if missing:
            self._missing[topic] = missing
        else:
            self._missing.pop(topic, None)


def route_number(queues: Sequence[MessageQueue]) -> int:
    """A number that stands for these queues, in any order, in 64 bits; not 0."""
    digest = hashlib.blake2b(digest_size=8)
    for queue in sorted(queues):
        digest.update(f"{queue.broker_name}\n{queue.queue_id}\n".encode())
    return int.from_bytes(digest.digest(), "little") or 1


def _brokers_of(route: Route) -> frozenset[str]:
    return frozenset(queue.broker_name for queue in route.read_queues)
