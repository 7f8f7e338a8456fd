"""The share of one consumer in what its group consumes: what is in `_membership_logic.py`, with the routes, for its steps.

One thread at a time, or coroutines of one loop; the driver of the membership has a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ._member_driver import MemberDriver
from ._types import MessageQueue, Route

ROUTE_RETRY_MIN_S: Final = 0.2
ROUTE_RETRY_MAX_S: Final = 30.0
"""Between two look-ups of a route that does not agree with what a broker says."""


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
        self._route_retry_s = ROUTE_RETRY_MIN_S
        self._route_due_s = 0.0

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
        with self.member.lock:
            self.member.state.want(filters, addresses)
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
            if state.topics_with_other_counts(by_topic):
                self._due_s = min(self._due_s, max(self._route_due_s, now_s + ROUTE_RETRY_MIN_S))
        if found is None:
            readable = {queue for several in by_topic.values() for queue in several}
            found = [queue for queue in self._queues if queue in readable]
        self._queues = found
        return found

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
        """Topics that are to be looked up again, since a broker has more or fewer queues of them."""
        by_topic = {topic: route.read_queues for topic, route in routes.items()}
        with self.member.lock:
            topics = self.member.state.topics_with_other_counts(by_topic)
        now_s = self._clock()
        if not topics:
            self._route_retry_s, self._route_due_s = ROUTE_RETRY_MIN_S, 0.0
            return []
        if now_s < self._route_due_s:
            return []
        self._route_due_s = now_s + self._route_retry_s
        self._route_retry_s = min(self._route_retry_s * 2, ROUTE_RETRY_MAX_S)
        return topics

    def is_late(self, queue: MessageQueue) -> bool:
        """Whether the topic got the queue after it was subscribed to: nothing of it was there before."""
        return queue not in self._first.get(queue.topic, frozenset((queue,)))
