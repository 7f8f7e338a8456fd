"""The share of one consumer in what its group consumes: what is in `_membership_logic.py`, with the routes, for its steps.

One thread at a time, or coroutines of one loop; the driver of the membership has a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from ._call_steps import broker_of
from ._group_routes import GroupRoutes
from ._member_driver import MemberDriver
from ._steps import GetRoute, Steps, Tell
from ._types import Membership, MessageQueue, Route
from .errors import ProtomqError


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
        self._unmade: set[str] = set()
        """Topics that did not exist when they were subscribed to, as far as name servers knew."""
        self._routes = GroupRoutes()

    def want(self, routes: Mapping[str, Route], filters: Mapping[str, str]) -> None:
        """What is subscribed to now. New brokers are called."""
        for topic in self._first.keys() - routes.keys():
            del self._first[topic]
        self._unmade &= routes.keys()
        for topic, route in routes.items():
            if route.auto_create and topic not in self._first:
                self._unmade.add(topic)
            if not self._first.get(topic):
                self._first[topic] = frozenset(route.read_queues)
        self._follow(routes, drops=True)
        with self.member.lock:
            self.member.state.want(filters, self._routes.addresses, self._routes.numbers)
        self.member.poke()

    def queues(self) -> list[MessageQueue]:
        """The queues to consume now."""
        now_s = self._clock()
        by_topic = self._routes.queues
        with self.member.lock:
            state = self.member.state
            self._seen_news = state.news
            found = state.share(by_topic, now_s)
            contradicted = state.contradicted(by_topic)
            self._due_s = now_s + min(state.changes_in_s(now_s), self._routes.due_in_s(contradicted, now_s))
        if found is None:
            readable = {queue for several in by_topic.values() for queue in several}
            found = [queue for queue in self._queues if queue in readable]
        self._queues = found
        return found

    def check_room(self, topics: Iterable[str], topic: str) -> None:
        """See MembershipState.check_room."""
        with self.member.lock:
            self.member.state.check_room(topics, topic)

    def take_refusal(self) -> ProtomqError | None:
        """See MembershipState.take_refusal."""
        with self.member.lock:
            return self.member.state.take_refusal()

    def refused_by(self) -> set[str]:
        """See MembershipState.refused_by."""
        with self.member.lock:
            return self.member.state.refused_by()

    @property
    def member_count(self) -> int:
        """Members of the group, this one included, as far as is known."""
        return self.member.state.member_count

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
            is_asked = self.member.state.check_expiry(self._clock())
            lost = self.member.state.take_lost()
        if is_asked:
            self.member.poke()
        self._queues = [queue for queue in self._queues if queue.broker_name not in lost]
        return lost

    def stands(self, broker_name: str, *, by_calls: bool = True) -> bool:
        """See MembershipState.stands. Any thread: it takes no lock."""
        return self.member.state.stands(broker_name, self._clock(), by_calls=by_calls)

    @property
    def unsure(self) -> Mapping[str, int]:
        """See MembershipState.unsure; always the same one."""
        return self.member.state.unsure

    def doubt_locks(self, broker_name: str) -> None:
        """See MembershipState.doubt_locks."""
        with self.member.lock:
            self.member.state.doubt_locks(broker_name)
        self.member.poke()

    def renewable(self) -> dict[str, int]:
        """See MembershipState.renewable."""
        with self.member.lock:
            return self.member.state.renewable()

    def renewed(self, broker_name: str, number: int) -> None:
        """See MembershipState.renewed."""
        with self.member.lock:
            self.member.state.renewed(broker_name, number)

    def is_doubtful(self, broker_name: str) -> bool:
        """See MembershipState.is_doubtful. Any thread: it takes no lock."""
        return self.member.state.is_doubtful(broker_name, self._clock())

    def membership(self, queue: MessageQueue) -> Membership | None:
        """See MembershipState.membership. Any thread: it takes no lock."""
        return self.member.state.membership(queue)

    def rejoin(self, topic: str, broker_name: str, timeout_s: float) -> Steps[None]:
        """Calls a broker that has refused a commit, and waits for its answer: it may have just started, and not know the member yet."""
        ends_s = self._clock() + timeout_s
        route: Route = yield GetRoute(topic, timeout_s, may_be_old=True)
        address = broker_of(route, broker_name)
        with self.member.lock:
            self.member.state.ask(broker_name, address)
        yield Tell(partial(self.member.wait_answered, broker_name, max(ends_s - self._clock(), 0.0)))

    def doubtful_routes(self, routes: Mapping[str, Route]) -> list[str]:
        """Topics that are to be looked up again now."""
        self._follow(routes, drops=False)
        with self.member.lock:
            contradicted = self.member.state.contradicted(self._routes.queues)
        return self._routes.take_due(contradicted, self._clock())

    def changed_routes(self) -> set[str]:
        """See MembershipState.take_changed_routes."""
        with self.member.lock:
            return self.member.state.take_changed_routes()

    def unsure_routes(self) -> set[str]:
        """See MembershipState.take_unsure_routes."""
        with self.member.lock:
            return self.member.state.take_unsure_routes()

    def hears_of_routes(self, topics: Collection[str]) -> bool:
        """Whether brokers say when the routes of these topics are others, so that nobody has to look."""
        queues = self._routes.queues
        with self.member.lock:
            return self.member.state.hears_of_routes({topic: queues.get(topic, ()) for topic in topics})

    def is_looked_for(self, queue: MessageQueue) -> bool:
        """Whether the queue's broker is missing in the route, and expected back."""
        return self._routes.is_looked_for(queue)

    def _follow(self, routes: Mapping[str, Route], *, drops: bool) -> None:
        now_s = self._clock()
        with self.member.lock:
            self._routes.follow(routes, self.member.state.away_since_s, now_s, drops=drops)
            self.member.state.followed_s = now_s

    def is_late(self, queue: MessageQueue) -> bool:
        """Whether the topic got the queue after it was subscribed to: nothing of it was there before."""
        return queue.topic in self._unmade or queue not in self._first.get(queue.topic, frozenset((queue,)))

    def was_others(self, queue: MessageQueue) -> bool:
        """See MembershipState.was_others."""
        with self.member.lock:
            return self.member.state.was_others(queue)
