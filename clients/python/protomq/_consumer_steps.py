"""What a pull consumer does, in steps: what is consumed, where it begins, what is asked of brokers. Both flavours drive them.

    subscribe, assign ──▶ queues ──▶ where to begin ──▶ PullState (_pull_logic.py): what to pull, what to hand out
                                                              │
    commit ◀── CommitSteps (_commit_steps.py) ◀── what was finished

The flavours differ in how pulls are in flight, and in nothing else: a selector over connections for threads, tasks for coroutines. A push
consumer stands on the same steps: it takes what `PullState` hands out, gives it to listeners, and says what was finished.

One thread at a time, or coroutines of one loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final

from ._call_steps import broker_of, forget_route, pull_address
from ._commit_steps import CommitSteps
from ._consumer_calls import ConsumerCalls, Limits
from ._consumer_options import ConsumerOptions
from ._filters import MessageFilter, filter_text
from ._group_looks import GroupLooks
from ._group_share import GroupShare
from ._loops import Loop
from ._member_driver import MemberDriver
from ._offset_calls import (
    Begin,
    by_broker,
    check_queues_exist,
    combined,
    doubtful_topics,
    first_offsets,
    missing_queues,
    queues_left,
    subscribed_queues,
    unknown_topic,
)
from ._outages import Outages
from ._pull_logic import PullState, Ticket
from ._queue_listener import ListenerMethod, QueueListener, told
from ._queue_locks import QueueLocks
from ._retry import GOING, LAST_COMMIT, ONCE, PAUSE_MIN_S
from ._route_looks import TOLD_SPREAD_S, UNSURE_SPREAD_S, RouteLooks
from ._seldom import SaidSeldom
from ._steps import Each, ForgetRoute, GetRoute, Steps, Tell
from ._types import BrokerAddress, Membership, MessageQueue, QueueRange, Route
from .errors import (
    BusyError,
    ClosedError,
    ConfigurationError,
    InvalidArgumentError,
    NoRouteError,
    ProtomqError,
    QueueNotFoundError,
    QueueNotOwnedError,
    TopicNotFoundError,
    TopicRecreatedError,
    TransportError,
    UnsupportedError,
)
from .wire.topics import TopicClass, class_of, retry_topic

logger = logging.getLogger("protomq")

POLL_CALL_TIMEOUT_S: Final = 0.5
"""For the calls that `poll` makes besides pulling: a broker that is gone must not hold up the queues of the others."""
RETRY_RESOLVE_S: Final = 2.0
PIN_PAUSE_MAX_S: Final = 30.0
"""Between tries to commit where a queue begins: a group that may not commit never can."""
IN_POLL: Final = Limits(POLL_CALL_TIMEOUT_S, ONCE)


@dataclass(slots=True)
class _Start:
    """Where a queue begins."""

    queue_offset: int
    next_commit_s: float = 0.0
    pause_s: float = RETRY_RESOLVE_S
    """Behind the next commit that fails."""


@dataclass(slots=True)
class _Going:
    """A queue whose listener was told that it goes, while its last commit is still to come: who polls may have been cut off."""

    ends_s: float
    is_last_try: bool = False
    """Whether the try that comes behind that was begun."""


class ConsumerSteps:
    """One consumer, without anything that waits."""

    def __init__(
        self,
        options: ConsumerOptions,
        clock: Callable[[], float] = time.monotonic,
        listener: QueueListener | None = None,
        state: PullState | None = None,
        member: MemberDriver | None = None,
    ) -> None:
        """`state`: of a consumer that has another idea of what was finished."""
        self.options = options
        self.clock = clock
        self.state = state or PullState(options.pull_options())
        self.subscriptions: dict[str, Route] = {}
        self.state.followed = self.subscriptions
        self.assigned: tuple[MessageQueue, ...] = ()
        self.trouble: ProtomqError | None = None
        """What the next `poll` is to raise."""
        self.refusal: ProtomqError | None = None
        """The last error by which a broker has refused this member, for as long as it is as it is."""
        self._limits = Limits(options.request_timeout_s)
        self._begun: set[MessageQueue] = set()
        """Queues of the share that this member has had: one that comes back goes on where the group is, whatever `resume` says."""
        self._tags: dict[str, tuple[str, ...]] = {}
        self._filters: dict[str, MessageFilter] = {}
        self._calls = ConsumerCalls(clock)
        self._outages = Outages(clock)
        self._seldom = SaidSeldom(clock)
        self._listener = listener
        self._share = GroupShare(member, clock) if member is not None else None
        self._route_looks = RouteLooks(clock())
        self._hears_of_retries = False
        """Whether brokers say when the routes of the group's retries are others."""
        self._group_looks = GroupLooks(options.group, clock) if options.broadcasting and options.group else None
        self.locks: QueueLocks | None = None
        """Of a consumer that has its queues to itself."""
        if member is not None and not options.resume:
            member.state.remember_others()
        if member is not None and options.lock_queues:
            self.locks = QueueLocks(options.group, lambda: member.state.key, clock, self._share)
            self.state.unsure = self.locks.unsure
            member.state.is_named = False
        self.commits = CommitSteps(
            options.group, self._calls, self.state, self._outages, clock, self.locks, self.stands, self.membership, self._rejoin,
            self._is_doubtful,
        )
        self._unpinned: dict[MessageQueue, _Start] = {}
        """Where queues begin, as long as no broker has that: the commit failed, or the topic does not exist yet."""
        self._is_changing = False
        self._changes_again = False
        self._was_cut_off = False
        """Whether a change of queues was, by Ctrl-C or since its task was cancelled: the next poll makes it."""
        self._cut_off_as: tuple[bool, Begin] = (False, options.begin)
        """That change: whether it parks what goes, and where new queues begin."""
        self._going: dict[MessageQueue, _Going] = {}
        self._committing_count = 0
        self._next_commit_s = clock() + options.auto_commit_interval_s
        self._commit_pause_s = PAUSE_MIN_S
        """Behind the next commit in `poll` that a busy broker refuses."""
        self._retry_resolve_s = 0.0
        self._exists: dict[str, bool] = {}
        """What brokers say of topics: a name server may not know yet of one that was made a moment ago."""
        self._incarnations: dict[tuple[str, str], int] = {}
        """The last that is known of each topic at each broker."""
        self._made_again: set[str] = set()
        """Topics that were deleted while they were consumed: all that is in them since is to be consumed."""

    # -- what to consume -------------------------------------------------------------------------------------------------

    def subscribe(
        self, topic: str, tags: tuple[str, ...], wanted_filter: MessageFilter
    ) -> Steps[list[Route]]:
        """All queues of a topic, or the share of a member of a group. The routes that may be doubted.

        Raises what a broker has against the filter, ConfigurationError while queues are assigned, and for one topic more than a member
        may have. Nothing is subscribed to then.
        """
        if self.assigned and class_of(topic) is not TopicClass.RETRY:
            raise ConfigurationError(
                f"this consumer has assigned queues, so it cannot subscribe to {topic!r}: `assign([])` first, or take another consumer"
            )
        self._check_room(topic)
        route: Route = yield GetRoute(topic, self.options.request_timeout_s)
        yield from self._try_filter([route], wanted_filter)
        self._check_room(topic)  # Other tasks may have subscribed meanwhile.
        self._tags[topic], self._filters[topic] = tags, wanted_filter
        self.subscriptions[topic] = route
        yield from self._forget_gone([topic])
        if self._share is not None:
            # While a queue moves both members may have pulled it: neither gets everything.
            self.state.warned_of_other()
            self._share.want(self.subscriptions, self._filter_texts())
            yield Tell(partial(self._share.member.wait_known, self.options.request_timeout_s))
        yield from self._reassign()
        if self._share is not None:
            if self._share.waits_for_answers():
                # One that comes later is taken by a poll.
                yield Tell(partial(self._share.member.wait_granted, POLL_CALL_TIMEOUT_S))
            # The answers may have come before that was asked.
            if self._share.may_change(self.clock()):
                yield from self._reassign()
        return [route]

    def _check_room(self, topic: str) -> None:
        if self._share is not None:
            self._share.check_room(self.subscriptions, topic)

    def unsubscribe(self, topic: str) -> Steps[None]:
        """The topic no more."""
        self.subscriptions.pop(topic, None)
        self._begun = {queue for queue in self._begun if queue.topic != topic}
        yield from self._reassign()
        self._unpinned = {queue: start for queue, start in self._unpinned.items() if queue.topic != topic}
        self._forget_incarnations()

    def assign(
        self,
        queues: tuple[MessageQueue, ...],
        tags: tuple[str, ...],
        wanted_filter: MessageFilter,
    ) -> Steps[list[Route]]:
        """Exactly these queues. The routes that may be doubted. Raises as `subscribe` while topics are, and QueueNotFoundError."""
        topics = [topic for topic in self.subscriptions if class_of(topic) is not TopicClass.RETRY]
        if queues and topics:
            raise ConfigurationError(
                f"this consumer has subscribed to {', '.join(map(repr, topics))}, so it cannot assign queues: `unsubscribe` first, or take "
                "another consumer"
            )
        routes = yield from self._routes_of(queues)
        yield from self._try_filter(routes, wanted_filter)
        self.assigned = queues
        for queue in queues:
            self._tags[queue.topic], self._filters[queue.topic] = tags, wanted_filter
        yield from self._forget_gone(queue.topic for queue in queues)
        self._forget_incarnations()
        yield from self._reassign()
        return routes

    def doubts(self, routes: Iterable[Route]) -> list[str]:
        """What the user may not have meant; each is told once."""
        return doubtful_topics(routes, self._exists, self._outages.told_of)

    def _try_filter(self, routes: Iterable[Route], wanted: MessageFilter) -> Steps[None]:
        """Asks all brokers of these topics what they have against a filter. Raises the first answer that another try does not change.

        A broker that is away says it later, to a pull.
        """
        if wanted.type_number:
            queues = {queue[:2]: queue for route in routes for queue in route.read_queues}
            yield Each([self._try_filter_at(queue, wanted) for queue in queues.values()])

    def _try_filter_at(self, queue: MessageQueue, wanted: MessageFilter) -> Steps[None]:
        try:
            yield from self._calls.try_filter(self._limits._replace(retries=ONCE), queue, wanted)
        except (InvalidArgumentError, UnsupportedError):
            raise
        except ProtomqError as error:
            logger.debug("%s: its broker has not read the filter yet: %r", queue, error)

    def _routes_of(self, queues: Sequence[MessageQueue]) -> Steps[list[Route]]:
        """The routes of the topics of queues that are to be assigned. Raises QueueNotFoundError where one is not there."""
        timeout_s = self.options.request_timeout_s
        routes: list[Route] = []
        for topic in dict.fromkeys(queue.topic for queue in queues):
            try:
                route: Route = yield GetRoute(topic, timeout_s)
                if missing_queues(route, queues):  # It may have more since the last look-up.
                    yield ForgetRoute(topic)
                    route = yield GetRoute(topic, timeout_s)
            except NoRouteError:
                continue  # No name server answers: `poll` goes on trying.
            check_queues_exist(route, queues)
            routes.append(route)
        return routes

    def _forget_gone(self, topics: Iterable[str]) -> Steps[None]:
        """What is known of topics that were deleted is known no more: they are begun again."""
        names = set(topics)
        lost = self.state.forget_gone(names)
        self._made_again.update(queue.topic for queue in lost)
        if self.trouble is not None and self.trouble.metadata.get("topic") in names:
            self.trouble = None  # Of another queue, found while the user saw to it.
        for topic in names:
            self._exists.pop(topic, None)
        if self.locks is not None:
            self.locks.forget_queues(lost)
        if self._listener is not None:
            yield from self._tell(self._listener.on_lost, lost)

    def expect_all_of(self, topic: str) -> None:
        """The topic did not exist a moment ago, so all that is in it is to be consumed."""
        self._made_again.add(topic)

    def _forget_incarnations(self) -> None:
        """Of topics that are not consumed any more: one that is taken up again begins where it is told."""
        topics = self.subscriptions.keys() | {queue.topic for queue in self.assigned}
        self._made_again &= topics
        self._incarnations = {key: incarnation for key, incarnation in self._incarnations.items() if key[0] in topics}

    def _note_incarnation(self, topic: str, broker_name: str, incarnation: int) -> None:
        if incarnation and self._incarnations.setdefault((topic, broker_name), incarnation) != incarnation:
            self._incarnations[topic, broker_name] = incarnation
            self._made_again.add(topic)

    def _reassign(self) -> Steps[None]:
        """Brings the queues in line with what the user asked for."""
        added = yield from self._change_queues(self._limits)
        yield from self._resolve_or_later(added, self.options.begin, self._limits)

    def _change_queues(self, limits: Limits, *, park: bool = False, begin: Begin | None = None) -> Steps[list[MessageQueue]]:
        """Gives away the queues that are not wanted any more, and takes those that are. The new ones, whose position is to be found.

        Where another change is under way (of another task, or of the listener that is called for it), that one takes this one along.
        `begin`: where its caller has new queues begin; None: as the program has said.
        """
        if self._is_changing:
            self._changes_again = True
            return []
        self._is_changing = is_open = True
        added: list[MessageQueue] = []
        try:
            while True:
                self._changes_again, is_open = False, True
                yield from self._follow_locks(limits)
                revoked = self._queues_that_go()
                yield from self._give_away(revoked, limits)
                before = set(self.state.queues)
                # The share may have changed while they went. Nothing goes without a word, and what comes back comes as new.
                wanted, gone = self._wanted_queues(), frozenset(revoked)
                going_next = [queue for queue in self.state.missing_from(wanted) if queue not in gone]
                self._changes_again = self._changes_again or bool(going_next) or not gone.isdisjoint(wanted)
                keeps = [queue for queue in wanted if queue not in gone] + going_next
                added += self.state.assign(keeps, self._tags, self._filters, park=park)
                is_open = False
                self._going = {queue: going for queue, going in self._going.items() if queue in before and queue not in gone}
                if self._share is not None:
                    self._share.claim(set(self.state.queues).difference(self.assigned))
                came = [queue for queue in self.state.queues if queue not in before]
                if self._listener is not None:
                    yield from self._tell(self._listener.on_assigned, came)
                if self.locks is not None:
                    yield from self.locks.release(self.locks.beside(set(self.state.queues)), limits)
                if not self._changes_again:
                    break
        finally:
            self._is_changing, self._was_cut_off = False, is_open or self._changes_again
            self._cut_off_as = park, begin or self.options.begin
        return [queue for queue in dict.fromkeys(added) if self._is_to_be_looked_up(queue)]

    def _queues_that_go(self) -> list[MessageQueue]:
        """What is not wanted any more. One whose listener was told so goes in any case: if it is wanted again, it comes as a new one."""
        unwanted = self.state.missing_from(self._wanted_queues())
        return unwanted + [queue for queue in self._going if queue in self.state.queues and queue not in set(unwanted)]

    def _is_to_be_looked_up(self, queue: MessageQueue) -> bool:
        """Whether it is not known where to begin, or, where the listener has decided that, what the group's last reset is."""
        if self.state.lacks_position(queue):
            return True
        return bool(self.options.group) and queue in self.state.queues and self.state.reset_epoch(queue) is None

    def _wanted_queues(self) -> list[MessageQueue]:
        share = self._share
        if share is None:
            return subscribed_queues(self.assigned, self.subscriptions)
        share.want(self.subscriptions, self._filter_texts())
        shared = share.queues()
        return [*self.assigned, *(shared if self.locks is None else self.locks.locked(shared))]

    def _follow_locks(self, limits: Limits) -> Steps[None]:
        """Locks the queues of the share; what is left of queues that were lost is forgotten."""
        if self.locks is None or self._share is None:
            return
        self._share.want(self.subscriptions, self._filter_texts())
        while lost := (yield from self.locks.follow(self._share.queues(), limits)):
            lost = [queue for queue in lost if queue in self.state.queues]
            if lost:
                text = "group %s: the locks of %d queues are lost: what was finished and not committed comes again"
                logger.warning(text, self.options.group, len(lost))
                yield from self._lose(lost)

    def _lose(self, lost: Sequence[MessageQueue]) -> Steps[None]:
        self.state.drop(lost)
        if self._listener is not None:
            yield from self._tell(self._listener.on_lost, lost)

    def _filter_texts(self) -> dict[str, str]:
        return {
            topic: filter_text(self._tags[topic], self._filters[topic])
            for topic in self.subscriptions
        }

    def _give_away(self, queues: Sequence[MessageQueue], limits: Limits) -> Steps[None]:
        """What comes before queues go: the listener is told, and what was finished is committed.

        Who polls within `asyncio.wait_for` cuts that off again and again: the time for it counts from the first try.
        """
        if not queues:
            return
        for queue in queues:
            self._note_incarnation(queue.topic, queue.broker_name, self.state.incarnation(queue))
        if self._listener is not None:
            yield from self._tell(self._listener.on_revoked, [queue for queue in queues if queue not in self._going])
        ends_s = self.clock() + self._limits.timeout_s
        going = [self._going.setdefault(queue, _Going(ends_s)) for queue in queues]
        left_s = max(one.ends_s for one in going) - self.clock()
        is_over = left_s <= 0 and all(one.is_last_try for one in going)
        # Not within the limits of `poll`: their next owners begin where this commit stands.
        last = self._limits._replace(timeout_s=left_s, retries=GOING if limits is IN_POLL else LAST_COMMIT)
        if left_s <= 0:
            last = IN_POLL
            for one in going:
                one.is_last_try = True
        if is_over:
            text = "group %s gives %d queues away, and what was finished may not be committed: each poll was cut off before that"
            logger.warning(text, self.options.group, len(queues))
        elif self.options.auto_commits:
            yield from self.commits.commit_dealt_with("when they went", last, is_last=True, of=frozenset(queues))
        else:
            yield from self._pin_existing(last, frozenset(queues), is_last=True)
        if self.locks is not None:
            yield from self.locks.release(queues, limits)

    def _tell(
        self, method: ListenerMethod, queues: Sequence[MessageQueue]
    ) -> Steps[None]:
        if queues:
            yield Tell(partial(told, method, tuple(queues)))

    def stands(self, queue: MessageQueue, by_calls: bool = False) -> bool:
        """Whether a queue is certainly still this consumer's; see MembershipState.stands. Any thread.

        A lock ends where the broker has heard nothing for long, so with locks failing calls tell, too.
        """
        share = self._share
        by_calls = by_calls or self.locks is not None
        return share is None or share.stands(queue.broker_name, by_calls=by_calls) or queue in self.assigned

    def may_begin(self, queue: MessageQueue) -> bool:
        """Whether a message of the queue may be begun: it stands, and its lock, if it needs one, is certainly this member's. Any thread."""
        return self.is_locked(queue) and self.stands(queue)

    def is_locked(self, queue: MessageQueue) -> bool:
        """The half of that which is asked before each message in order. Any thread."""
        return self.locks is None or self.locks.may_begin(queue) or queue in self.assigned

    def may_hand_on(self, loop: Loop) -> bool:
        """Whether a loop has a message left, and that may be begun."""
        queue = loop.next_queue
        return queue is not None and self.may_begin(queue)

    def _is_doubtful(self, queue: MessageQueue) -> bool:
        return self._share is not None and self._share.is_doubtful(queue.broker_name) and queue not in self.assigned

    def membership(self, queue: MessageQueue) -> Membership | None:
        """What a commit of the queue names; None: nothing."""
        if self._share is None or queue in self.assigned:
            return None
        return self._share.membership(queue)

    def _rejoin(self, topic: str, broker_name: str, timeout_s: float) -> Steps[None]:
        assert self._share is not None
        return self._share.rejoin(topic, broker_name, timeout_s)

    # -- polls -----------------------------------------------------------------------------------------------------------

    def is_settled(self, cached: Callable[[str], Route | None]) -> bool:
        """Whether `before_poll` has nothing to do: nearly always. `cached`: a route that needs no look-up."""
        now_s = self.clock()
        if self._was_cut_off:
            return False
        if self._share is not None and self._share.may_change(now_s):
            return False
        if self.locks is not None and not self.locks.due_in_s(now_s):
            return False
        if self._group_looks is not None and not self._group_looks.due_in_s(now_s):
            return False
        if self._unpinned and not self._pins_due_in_s(now_s):
            return False
        if not self._route_looks.due_in_s(now_s):
            return False
        if self.state.doubted or now_s >= self._retry_resolve_s or (self.options.auto_commits and now_s >= self._next_commit_s):
            return False
        for topic, route in self.subscriptions.items():  # noqa: SIM110  # As `all` of a generator it is twice as slow.
            if cached(topic) is not route:
                return False
        return True

    def before_poll(self) -> Steps[None]:
        """What `poll` does beside handing out: commits that are due, queues that a topic got, where queues begin."""
        now_s = self.clock()
        if self._share is not None:
            yield from self._give_up_lost(self._share)
        if doubted := self.state.doubted:
            try:
                yield from self.follow_resets(doubted)
            except Exception:
                self.state.believe(doubted)
                raise
            # Not of a poll that is cancelled meanwhile: the next one asks.
            self.state.believe(doubted)
        if self.options.auto_commits and now_s >= self._next_commit_s and not self._committing_count:
            yield from self._commit_in_poll()
        if not self._pins_due_in_s(now_s):
            yield from self._pin_existing(IN_POLL)
        if self._share is not None:
            for topic in self._share.doubtful_routes(self.subscriptions):
                yield ForgetRoute(topic, may_be_old=True)
            yield from self._hear_of_routes(self._share, now_s)
        if not self._route_looks.due_in_s(now_s):
            yield from self._look_at_route(now_s)
        yield from self._follow_routes(now_s)
        if self._group_looks is not None and not self._group_looks.due_in_s(now_s):
            yield from self._group_looks.look_at_broadcast(subscribed_queues(self.assigned, self.subscriptions))
            self.state.is_shut = self._group_looks.is_shut
        if self._share is not None and (self._was_cut_off or not self._share_due_in_s(self._share, self.clock())):
            yield from self._follow_group(self._share)
        elif self._was_cut_off:
            park, begin = self._cut_off_as
            added = yield from self._change_queues(IN_POLL, park=park, begin=begin)
            yield from self._resolve_or_later(added, begin, IN_POLL)
        if self._share is not None and (refusal := self._share.take_refusal()) is not None:
            yield from self._give_up_lost(self._share)  # Behind that: it may have come a moment ago.
            self.trouble = self.refusal = refusal

    def raise_refusal(self) -> Steps[None]:
        """Raises why a broker does not take this member, where another try does not change that; nothing is left to commit there then."""
        if self._share is not None and (refusal := self._share.take_refusal()) is not None:
            yield from self._give_up_lost(self._share)
            raise refusal

    def looks_seldom(self, topic: str) -> bool:
        """Whether the route of a topic may be trusted for long, since brokers say when it is another one. Any thread."""
        return self._hears_of_retries and class_of(topic) is TopicClass.RETRY

    def _topics_to_look_up(self) -> dict[str, None]:
        """Where the brokers of these are, the group's retries are."""
        return dict.fromkeys(topic for topic in self.subscriptions if class_of(topic) is not TopicClass.RETRY)

    def _hear_of_routes(self, share: GroupShare, now_s: float) -> Steps[None]:
        """Has topics looked up again of whose routes brokers say that they are others, or could not say it."""
        topics = self._topics_to_look_up()
        retries = self.subscriptions.keys() - topics.keys()
        hears = share.hears_of_routes(topics)
        heard, self._hears_of_retries = self._hears_of_retries, hears and share.hears_of_routes(retries)
        self._route_looks.follow(hears, now_s)
        if heard and not self._hears_of_retries:
            self._route_looks.hear(retries, UNSURE_SPREAD_S, now_s)
        self._route_looks.hear(share.changed_routes(), TOLD_SPREAD_S, now_s)
        self._route_looks.hear(share.unsure_routes() & topics.keys(), UNSURE_SPREAD_S, now_s)
        for topic in self._route_looks.take_heard(now_s):
            self._route_looks.begun(now_s)
            yield ForgetRoute(topic, may_be_old=True)

    def _look_at_route(self, now_s: float) -> Steps[None]:
        """Has one topic looked up again."""
        topics = self._topics_to_look_up()
        member_count = 1 if self._share is None else self._share.member_count
        topic = self._route_looks.take_due(topics, member_count, now_s)
        if topic is not None:
            yield ForgetRoute(topic, may_be_old=True)

    def _follow_group(self, share: GroupShare) -> Steps[None]:
        """Takes and gives away queues, as the group shares them out now."""
        yield from self._give_up_lost(share)
        added = yield from self._change_queues(IN_POLL)
        early = [queue for queue in added if share.is_late(queue)]
        yield from self._resolve_or_later(early, "earliest", IN_POLL)
        yield from self._resolve_or_later(
            (queue for queue in added if not share.is_late(queue)), self.options.begin, IN_POLL
        )

    def _give_up_lost(self, share: GroupShare) -> Steps[None]:
        """Forgets what is here of queues that others may have by now; before anything is committed."""
        lost_at = share.lost_brokers()
        if lost_at:
            lost = [
                queue
                for queue in self.state.queues
                if queue.broker_name in lost_at and queue not in self.assigned
            ]
            if self.locks is not None:
                self.locks.forget(lost_at)
            if lost_at <= share.refused_by():
                logger.warning("group %s: this member gives up %d queues, of brokers that do not take it", self.options.group, len(lost))
            else:
                why = "no broker has confirmed its membership in time"
                text = "group %s may have given this member up: %s. It begins again with %d queues"
                logger.warning(text, self.options.group, why, len(lost))
            yield from self._lose(lost)

    def group_due_in_s(self, now_s: float) -> float:
        """Until `before_poll` may have something to do that comes before the next message: 0 if it has now.

        Queues to take or to give away, routes, the settings of the group, a start to commit, a queue that goes on after a pause.
        """
        if self.state.doubted or self._was_cut_off:
            return 0.0
        due_in_s = self._route_looks.due_in_s(now_s) if self.subscriptions else float("inf")
        if self._group_looks is not None:
            return min(due_in_s, self._group_looks.due_in_s(now_s))
        due_in_s = min(due_in_s, self._pins_due_in_s(now_s))
        return due_in_s if self._share is None else min(due_in_s, self._share_due_in_s(self._share, now_s))

    def _share_due_in_s(self, share: GroupShare, now_s: float) -> float:
        due_in_s = share.due_in_s(now_s)
        return due_in_s if self.locks is None else min(due_in_s, self.locks.due_in_s(now_s))

    def known_address(self, route: Route | None, queue: MessageQueue) -> BrokerAddress | None:
        """Where a queue is pulled, by a route; None: it does not tell. A slave that the route lacks is suggested no more."""
        broker_id = self.state.suggested_broker_id(queue)
        if broker_id and route is not None and (queue.broker_name, broker_id) not in route.slaves:
            self.state.forget_suggestion(queue)
        return pull_address(route, queue, broker_id)

    def address_for(self, ticket: Ticket) -> Steps[BrokerAddress | None]:
        """Where a pull goes; None: that cannot be known now, and the pull has failed."""
        queue = ticket.queue
        try:
            route: Route = yield GetRoute(
                queue.topic, self.options.request_timeout_s, may_be_old=True
            )
            return self.known_address(route, queue) or broker_of(route, queue.broker_name)
        except ProtomqError as error:
            yield from self.take_error(ticket, error, by_broker=False)
        return None

    def take_answer(self, ticket: Ticket, answer: bytes) -> None:
        """What came of a pull."""
        queue = ticket.queue
        if self._outages.answered(f"broker {queue.broker_name}", queue.topic, ticket.asked_s):
            # The pulls of its other queues rest for up to 3 s.
            self.state.hurry({queue.broker_name})
        try:
            self.state.answered(ticket, answer, self.clock())
        except ProtomqError as error:
            self._take_trouble(queue, error)

    def take_error(
        self, ticket: Ticket, error: ProtomqError, *, by_broker: bool = True
    ) -> Steps[None]:
        """A pull failed; it is made again. `by_broker`: the broker was asked, not only the name server."""
        queue = ticket.queue
        if not self.state.is_under_way(ticket):
            return  # It was given up, or its queue went.
        if by_broker and self.locks is not None and self._share is not None and isinstance(error, TransportError):
            if not isinstance(error, ClosedError) and not self.state.suggested_broker_id(queue):
                self._share.doubt_locks(queue.broker_name)
        # Of a consumer that is closed no slave has failed.
        if by_broker and not isinstance(error, ClosedError) and self.state.leave_slave(ticket, error, self.clock()):
            if error.stale_route:
                yield forget_route(queue.topic, error, may_be_old=True)
            return
        if error.stale_route and not (self._share is not None and self._share.is_looked_for(queue)):
            yield forget_route(queue.topic, error) if by_broker else ForgetRoute(queue.topic, may_be_old=True)
        if by_broker and isinstance(error, TopicNotFoundError | TopicRecreatedError) and self.state.incarnation(queue):
            self._made_again.add(queue.topic)
        told = self.state.failed(ticket, error, self.clock(), by_broker=by_broker)
        if told is None and isinstance(error, QueueNotFoundError) and queue in self.assigned:
            told = error  # A subscription follows the route; this queue was asked for by its number.
        if told is not None:
            self._take_trouble(queue, told)
        else:
            self._outages.failed(f"broker {queue.broker_name}", queue.topic, error)

    def _take_trouble(self, queue: MessageQueue, error: ProtomqError) -> None:
        """Keeps what the user is to know; what a broker has against a filter does not name the topic."""
        error.metadata = {"topic": queue.topic, **error.metadata}
        self.trouble = error

    def raise_trouble(self) -> None:
        """Raises what the user is to know, once."""
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble

    def _follow_routes(self, now_s: float) -> Steps[None]:
        """Takes up queues that a subscribed topic got meanwhile: those that are new from their first message on."""
        for topic, last in list(self.subscriptions.items()):
            try:
                route: Route = yield GetRoute(
                    topic, self.options.request_timeout_s, may_be_old=True
                )
            except ProtomqError:
                continue  # The pulls will tell.
            if route is not last and self.subscriptions.get(topic) is last:
                self.subscriptions[topic] = route
                new_brokers = route.brokers.keys() - last.brokers.keys()
                moved = {name for name, address in route.brokers.items() if name in last.brokers and last.brokers[name] != address}
                self.state.pull_elsewhere(topic, moved)
                retries = retry_topic(self.options.group)
                if (new_brokers or moved) and topic != retries and retries in self.subscriptions:
                    yield ForgetRoute(retries, may_be_old=True)
                self._outages.queues_changed(topic, len(route.read_queues))
                # Of a group, others may consume meanwhile what goes here.
                begin: Begin = "earliest" if last.read_queues else self.options.begin
                added = yield from self._change_queues(IN_POLL, park=self._share is None, begin=begin)
                self.state.hurry(new_brokers)
                yield from self._resolve_or_later(added, begin, IN_POLL)
                return  # The others: next time.
        if now_s >= self._retry_resolve_s:
            self._retry_resolve_s = now_s + RETRY_RESOLVE_S
            yield from self._resolve_or_later(
                self.state.unresolved(), self.options.begin, IN_POLL
            )

    # -- where to begin --------------------------------------------------------------------------------------------------

    def _resolve_or_later(
        self, queues: Iterable[MessageQueue], begin: Begin, limits: Limits
    ) -> Steps[None]:
        """Finds out where to begin; a broker that does not answer is asked again in a later `poll`."""
        for (topic, broker_name), members in by_broker(queues).items():
            try:
                is_there = yield from self._resolve(topic, broker_name, members, begin, limits)
            except ProtomqError as error:
                if not error.retriable:
                    raise
                self._outages.failed(f"broker {broker_name}", topic, error)
            else:
                if is_there:
                    self._outages.answered(f"broker {broker_name}", topic)

    def _resolve(
        self,
        topic: str,
        broker_name: str,
        queues: Sequence[MessageQueue],
        begin: Begin,
        limits: Limits,
    ) -> Steps[bool]:
        """Finds out where to begin in queues of one broker, and pins that; whether it has the topic and the queues."""
        if self._is_own_retries(topic):
            begin = "earliest"
        committed: dict[int, int] = {}
        ignored: set[MessageQueue] = set()
        # Nobody resets what nobody commits.
        epochs: dict[int, int] | None = {} if self.options.group else None
        starts: dict[MessageQueue, int] = {}
        incarnation = log_epoch = 0
        from_slave = False
        pinned = queues
        try:
            if self.options.group:
                committed, incarnation, epochs, log_epoch, from_slave = yield from self._calls.committed(
                    limits, self.options.group, topic, broker_name, [queue.queue_id for queue in queues]
                )
                ignored = {queue for queue in queues if queue.queue_id in committed and self._begins_afresh(queue)}
                for queue in ignored:
                    del committed[queue.queue_id]
            rest = [queue for queue in queues if queue.queue_id not in committed and self.state.lacks_position(queue)]
            if isinstance(begin, datetime):
                for queue in rest:
                    starts[queue], incarnation = yield from self._calls.offset_for_time(
                        limits, queue, begin, incarnation
                    )
            elif rest:
                ranges, incarnation = yield from self._calls.queue_ranges(
                    limits, topic, broker_name, [queue.queue_id for queue in rest], incarnation
                )
                self._note_incarnation(topic, broker_name, incarnation)
                starts = first_offsets(rest, ranges, "earliest" if topic in self._made_again else begin)
        except (TopicNotFoundError, QueueNotFoundError) as error:
            is_there = False
            from_slave = bool(self.options.group)  # It may be a slave that does not have the topic yet.
            # Not made yet (auto_create): its first message will have the offset 0.
            committed, starts, incarnation = {}, {}, 0
            epochs = None if epochs is None else {}
            self._exists.setdefault(topic, isinstance(error, QueueNotFoundError))
            if isinstance(error, QueueNotFoundError):
                # The route is old. Of the queues that are left, what is committed counts; the others are gone, and have no start.
                left = queues_left(queues, error)
                if left:
                    yield from self._resolve(topic, broker_name, left, begin, limits)
                queues = [queue for queue in queues if queue not in left]
                pinned = []
        else:
            is_there = self._exists[topic] = True
            self._note_incarnation(topic, broker_name, incarnation)
        if self.locks is not None:
            # Their topic was made again, or deleted, since they were locked: they are locked again, and then looked up.
            others = {queue for queue in queues if self.locks.is_of_other_topic(queue, incarnation)}
            self.locks.refused(others)
            queues, pinned = ([queue for queue in several if queue not in others] for several in (queues, pinned))
        begun = {
            queue: _Start(starts.get(queue, 0))
            for queue in pinned
            if queue.queue_id not in committed and self._is_to_be_pinned(queue, queue in ignored) and self.state.lacks_position(queue)
        }
        by_slave = {queue for queue in queues if from_slave and not self._begins_afresh(queue)}
        if is_there and any(self.state.lacks_position(queue) for queue in by_slave):
            text = "group %s begins in %s/%s where a slave says, since the master is away: what was committed last may come again"
            logger.warning(text, self.options.group, topic, broker_name)
        self.state.start_all(queues, committed, starts, incarnation, epochs, log_epoch, by_slave)
        if self._share is not None:
            self._begun.update(set(queues).difference(self.assigned))
        for queue in queues:
            self._unpinned.pop(queue, None)
        self._unpinned |= begun
        if is_there:
            yield from self._pin(begun, limits)
        return is_there

    def _is_own_retries(self, topic: str) -> bool:
        """Whether it has what the group gave back. That begins at its beginning, as in RocketMQ: nobody but the group was to get it."""
        return self.options.shares and topic == retry_topic(self.options.group)

    def _begins_afresh(self, queue: MessageQueue) -> bool:
        """Whether what is committed does not count. `resume` holds at the consumer's own start: not for what another member had."""
        if not self.options.shares:
            return True
        if self.options.resume or self._is_own_retries(queue.topic):
            return False
        if self._share is None or queue in self.assigned:
            return True
        return queue not in self._begun and not self._share.was_others(queue)

    def _is_to_be_pinned(self, queue: MessageQueue, is_committed: bool) -> bool:
        """Whether where it begins is committed at once: else its next owner would begin elsewhere, and skip what came in between.

        A program that commits itself has its offsets left alone, but for the share of a member: there the group has none yet.
        """
        options = self.options
        if not options.shares or self._is_own_retries(queue.topic) or (options.begin == "earliest" and not is_committed):
            return False
        return options.auto_commit or not (is_committed or queue in self.assigned)

    def _pins_due_in_s(self, now_s: float) -> float:
        """Until a start is to be committed; infinity if none is, or if its topic does not exist yet."""
        if not self._unpinned:
            return float("inf")
        for queue in [queue for queue in self._unpinned if self.state.has_commit(queue)]:
            del self._unpinned[queue]
        # A topic that exists has an incarnation, which the first answer of each queue tells. Of one that was deleted nothing is committed.
        state = self.state
        dues_s = [start.next_commit_s for queue, start in self._unpinned.items() if state.incarnation(queue) and state.lacks_commit(queue)]
        return max(min(dues_s, default=float("inf")) - now_s, 0.0)

    def _pin_existing(self, limits: Limits, of: Collection[MessageQueue] | None = None, *, is_last: bool = False) -> Steps[None]:
        """Commits starts that no broker has yet, of topics that exist by now. `of`: of these queues only."""
        # Also of queues that have not answered yet: the process may end with the topic's first message.
        topics = {queue.topic for queue in self._unpinned if self.state.incarnation(queue)}
        queues = [queue for queue in self._unpinned if queue.topic in topics and (of is None or queue in of)]
        return self._pin(queues, limits, is_last=is_last)

    def _pin(self, queues: Iterable[MessageQueue], limits: Limits, *, is_last: bool = False) -> Steps[None]:
        """Commits where queues begin; a failure is made up for by a later look, unless this is the last one."""
        starts = {queue: self._unpinned[queue] for queue in queues if self.state.lacks_commit(queue)}
        if not starts:
            return
        for queue, start in starts.items():
            if self.state.incarnation(queue):
                start.next_commit_s = self.clock() + start.pause_s
                start.pause_s = min(2 * start.pause_s, PIN_PAUSE_MAX_S)
        self._committing_count += 1
        try:
            offsets = {queue: start.queue_offset for queue, start in starts.items()}
            yield from self.commits.commit_or_log(offsets, "where they begin", limits, is_last=is_last)
        finally:
            self._committing_count -= 1

    # -- positions and offsets -------------------------------------------------------------------------------------------

    def position(self, queue: MessageQueue) -> Steps[int]:
        """Offset of the next message that is handed out."""
        position = self.state.position(queue)
        if position is None:
            yield from self._resolve(
                queue.topic, queue.broker_name, [queue], self.options.begin, self._limits
            )
            position = self.state.position(queue)
        if position is None:
            raise QueueNotOwnedError(f"the topic of {queue} was deleted, or made again, since it was locked: it is locked again; ask then")
        return position

    def seek_to_time(
        self, when: datetime, queues: Iterable[MessageQueue] | None
    ) -> Steps[None]:
        """To the first message stored at the time or later; in these queues, or in all that are consumed."""
        for queue in self.state.queues if queues is None else queues:
            self.state.seek(queue, (yield from self.offset_for_time(queue, when)))

    def seek_to_end_of_range(
        self, which: int, queues: Iterable[MessageQueue] | None
    ) -> Steps[None]:
        """To the first message (0), or behind the last (1); in these queues, or in all that are consumed."""
        for queue in self.state.queues if queues is None else queues:
            self.state.seek(queue, (yield from self.queue_range(queue))[which])

    def committed(self, queue: MessageQueue) -> Steps[int | None]:
        """The offset that the group has committed; None: none. A slave may lack the last commits: a warning says so."""
        found = yield from self._calls.committed(
            self._limits, self.options.group, queue.topic, queue.broker_name, [queue.queue_id]
        )
        if found.from_slave and self._seldom.is_due(queue):
            text = "%s: what group %s has committed is what a slave knows; the master, which is away, may have more"
            logger.warning(text, queue, self.options.group)
        return found.offsets.get(queue.queue_id)

    def queue_range(self, queue: MessageQueue) -> Steps[QueueRange]:
        """What a queue holds."""
        found = yield from self._calls.queue_ranges(
            self._limits, queue.topic, queue.broker_name, [queue.queue_id]
        )
        return found.ranges[queue.queue_id]

    def offset_for_time(self, queue: MessageQueue, when: datetime) -> Steps[int]:
        """The first offset stored at the time or later; the end offset if there is none."""
        return (yield from self._calls.offset_for_time(self._limits, queue, when)).queue_offset

    def assignment(self) -> tuple[MessageQueue, ...]:
        """The queues that are consumed: of subscriptions, not those of topics that were deleted. Any thread."""
        queues = self.state.queues
        # Their routes name the queues that they would get if they were made again.
        deleted = {queue.topic for queue in queues if self._would_be_made(queue.topic) and self.state.is_gone(queue)}
        return tuple(queue for queue in queues if queue in self.assigned or queue.topic not in deleted)

    def _would_be_made(self, topic: str) -> bool:
        route = self.subscriptions.get(topic)
        return route is not None and route.auto_create

    def queues(self, topic: str) -> Steps[tuple[MessageQueue, ...]]:
        """The queues of a topic that can be read. Raises TopicNotFoundError if neither name server nor brokers know it."""
        route: Route = yield GetRoute(topic, self.options.request_timeout_s)
        if not route.auto_create:
            return route.read_queues
        # It may have been made a moment ago: brokers know that first.
        found: list[MessageQueue] = []
        for broker_name in route.brokers:
            once = self._limits._replace(retries=ONCE)
            try:
                answer = yield from self._calls.queue_ranges(once, topic, broker_name)
            except TopicNotFoundError:
                continue
            found.extend(MessageQueue(topic, broker_name, queue_id) for queue_id in sorted(answer.ranges))
        if not found:
            raise unknown_topic(topic)
        return tuple(found)

    # -- commits ---------------------------------------------------------------------------------------------------------

    def follow_resets(self, of: Collection[MessageQueue] | None = None) -> Steps[None]:
        """Asks whether the offsets were reset, in these queues or in all. Pulls and commits say it, but may not have been made lately.

        Of a broker that does not answer they say it later.
        """
        queues = self.state.queues if of is None else of
        before = {queue: self.state.reset_epoch(queue) for queue in queues if self.options.group}
        silent: set[str] = set()
        for (topic, broker_name), members in by_broker(queue for queue, epoch in before.items() if epoch is not None).items():
            if broker_name in silent:
                continue
            ids = [queue.queue_id for queue in members]
            try:
                found = yield from self._calls.committed(IN_POLL, self.options.group, topic, broker_name, ids)
            except ProtomqError as error:
                logger.debug("whether offsets of %s in %s/%s were reset is not known: %s", self.options.group, topic, broker_name, error)
                if isinstance(error, TransportError):
                    silent.add(broker_name)
                continue
            for queue in members:
                epoch = found.reset_epochs.get(queue.queue_id)
                # 0: the topic did not exist when it was asked where to begin, and no answer has come since.
                is_same = self.state.incarnation(queue) in (0, found.topic_incarnation) and self.state.reset_epoch(queue) == before[queue]
                if epoch and is_same:
                    self.state.learn_incarnation(queue, found.topic_incarnation)
                    self.state.follow_reset(queue, found.offsets[queue.queue_id], epoch)

    def commit(self, offsets: Mapping[MessageQueue, int] | None) -> Steps[None]:
        """These offsets, or the positions. Raises what a broker's call raised, after all brokers were asked."""
        if offsets is None:
            self.state.user_came_back()
            offsets = self.state.to_commit(safe_only=True)
        errors = yield from self.commits.commit(offsets, self._limits)
        if errors:
            raise combined(errors)

    def _commit_in_poll(self) -> Steps[None]:
        """Commits what was finished; meanwhile `poll` of another task does not. A broker that is busy is asked again soon."""
        interval_s = self.options.auto_commit_interval_s
        self._next_commit_s = self.clock() + interval_s
        self._committing_count += 1
        try:
            error = yield from self.commits.commit_dealt_with("in poll", IN_POLL)
        finally:
            self._committing_count -= 1
        if isinstance(error, BusyError):
            pause_s = max((error.retry_delay_ms or 0) / 1000, self._commit_pause_s)
            self._next_commit_s = min(self.clock() + pause_s, self._next_commit_s)
            self._commit_pause_s = min(2 * self._commit_pause_s, interval_s)
        else:
            self._commit_pause_s = PAUSE_MIN_S

    def say_goodbye(self) -> Steps[None]:
        """The consumer is being closed: the listener is told that all queues go. Where they began others are to know."""
        if self._listener is not None and not self._is_changing:
            yield from self._tell(self._listener.on_revoked, [queue for queue in self.state.queues if queue not in self._going])
        if not self.options.auto_commits:
            yield from self._pin_existing(self._limits._replace(retries=LAST_COMMIT), is_last=True)

    def commit_last(self, when: str, ends_s: float = float("inf")) -> Steps[ProtomqError | None]:
        """What was finished, when nothing comes after. The first error."""
        limits = self._limits._replace(retries=LAST_COMMIT)
        return self.commits.commit_dealt_with(when, limits, ends_s=ends_s, is_last=True)
