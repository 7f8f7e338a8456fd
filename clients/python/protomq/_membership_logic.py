"""What a member of a group decides: whom to tell what, and which queues are its own. No I/O, time handed in.

    due(now)              brokers that want a call          begin(broker)    the call
    answered(ticket)      takes an answer                   failed(ticket)   takes an error
    share(...)            the queues to consume now         claim(queues)    those that it has
    take_lost()           brokers at which its membership may have ended

Rules:
- It holds a call at every broker of its topics. The members are the union of what all brokers say that can be reached: who cannot reach
  one of them is seen at another.
- If another member still has a queue, this one waits until that member gives it up, or for CLAIM_WAIT_S. Until then the other may
  still commit its offset.
- A queue that is free is claimed first: the broker is told, and says whether another member was faster. A list from before does not do: a
  broker tells nobody when a free queue is taken. Nor is a new list needed: a claim would cost as much as the group is large.
- A broker of an older version answers a claim like any call. Its list shows who was faster; if nothing has changed, nobody was.
- What the brokers that can be reached say while all of them have just begun is incomplete: the share stays as it is.
- Where a broker has not been told anything within the time after which it gives a member up, others may have the queues by now. The
  member's own clock says that first, since the broker's answer comes late to one that was stopped. That clock is CLOCK_MONOTONIC: it runs
  on while a process is stopped or frozen.
- No call that comes too late renews a membership by itself (`stands`). While the broker may still know the member, it is asked first:
  `only_if_member`. If it says that the membership has stood all along, the queues are the member's own still. Else they are given up.
- Commits name the membership (`membership`), another one after the queues of a broker were given up. So the broker refuses one that was on
  its way then.
- Members share out what their routes say. Where another's route has other queues, both look theirs up again.
- A broker that knows no groups (UNKNOWN_METHOD) is one of an older version: there everybody gets everything.
- A call that breaks frees the member's locks there soon (`unsure`). Nobody knows whose they are until they are renewed, behind an answer to
  a later call.
- A broker that refuses the member's reports does not know what it has, and gives it up. So it gives up its queues there, and takes none
  until a report is accepted. What another try does not change (`take_refusal`) its program is told.

Two threads: everything is called with the lock of its driver.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from . import _forks
from ._client_name import drawn_name
from ._decoding import decoded
from ._late_imports import fork_waits
from ._remoting_hello import VERSION
from ._types import BrokerAddress, Membership, MessageQueue
from .allocation import Allocation, GroupMember
from .errors import (
    ConfigurationError,
    ConnectionLostError,
    InvalidArgumentError,
    MemberUnknownError,
    ProtomqError,
    TooManyError,
    TransportError,
    UnknownMethodError,
)
from .wire.texts import one_line

if TYPE_CHECKING:
    from .v1 import membership_service_pb2 as pb

logger = logging.getLogger("protomq")

TOPICS_MAX: Final = 256
"""Most topics of a member, its group's retries among them; a test compares it with the broker's."""
HOLD_S: Final = 15.0
"""A broker hears of a member that often at least."""
HOLD_PART: Final = 0.6
"""Of the time after which a broker gives a member up: for how long a call is held at most."""
EXPIRY_PART: Final = 0.9
"""Of that time: when the member itself counts as given up."""
OVERDUE_PART: Final = 0.7
"""Of that time: when a call is overdue. Whoever makes the calls may be blocked, so somebody else does."""
CALL_MARGIN_S: Final = 5.0
DOUBT_S: Final = 5.0
"""For which a broker is asked whether the membership still stands, before the queues are given up."""
CLAIM_HOLD_MS: Final = 1
"""Not 0: who does not hold a call and dies is missed late."""
CLAIM_WAIT_S: Final = 60.0
"""RocketMQ's rebalanceLockMaxLiveTime: who has not given a queue up by then does not come to it."""
BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0
OLD_BROKER_RETRY_S: Final = 30.0

MemberKey = tuple[str, int]
"""Name and random number."""


def check_topic_count(group: str, topics: Iterable[str], topic: str) -> None:
    """Whether a member of the group may consume a topic beside these. Raises ConfigurationError."""
    has = set(topics)
    if topic not in has and len(has) >= TOPICS_MAX:
        raise ConfigurationError(
            f"this consumer of group {group!r} cannot subscribe to {topic!r}, too: a member has {TOPICS_MAX} topics at most, its retries "
            "among them. Give some of the topics to a consumer of another group"
        )


class MemberTicket(NamedTuple):
    """A call under way."""

    broker_name: str
    number: int


class LeaveRequest(NamedTuple):
    """What says to a broker that the member goes. `is_away`: its last call there failed."""

    address: BrokerAddress
    payload: bytes
    is_away: bool


@dataclass(slots=True)
class _Claim:
    """A queue that is to be taken."""

    number: int = 0
    """Of the call that tells its broker; 0: that is still to come."""
    is_granted: bool = False


@dataclass(slots=True)
class _Broker:
    """What is known of one broker, and by it."""

    address: BrokerAddress
    member_epoch: int
    """Which membership it is: another one once the queues here were given up."""
    is_refused: bool = False
    """Whether the broker takes no such member: none of its queues is consumed."""
    refusal: ProtomqError | None = None
    """Why not, where another try does not change that, and nobody was told yet."""
    asked: int | None = None
    """The last call when an answer was asked for (`ask`); one to a later call is it. None: there was one."""
    is_wanted: bool = True
    """Whether it has queues of a topic that is consumed. One that has none any more hears so, and is forgotten."""
    leaves: bool = False
    """Whether the last call said that nothing is consumed there."""
    away_since_s: float | None = None
    """Since when it has not been there, or is stopping; None: it answers."""
    number: int = 0
    """Of the last call; only its outcome counts."""
    in_flight: bool = False
    is_told: bool = False
    """Whether it was told what this member has now."""
    was_tried: bool = False
    retry_s: float = 0.0
    failures: int = 0
    version: int = 0
    start: int = 0
    members: list[pb.GroupMember] | None = None
    """None: not known, or not to be reached."""
    knows_groups: bool = True
    settled_s: float = 0.0
    expiry_s: float = float("inf")
    sent_s: float = 0.0
    """When the last call was sent."""
    heard_s: float = 0.0
    """When the last call was sent whose forerunner was answered: calls that fail renew nothing."""
    taken: frozenset[tuple[str, int]] | None = None
    """Topic and number of each queue that another member has; None: not looked up in `members` yet."""
    route_numbers: dict[str, set[int]] | None = None
    """What other members say of their routes, by topic; None: not looked up in `members` yet."""
    doubted_until_s: float | None = None
    """Until when the broker is asked whether it has given the member up; None: there is no doubt."""
    confirms: bool = False
    """Whether the last call asks that."""
    queue_counts: dict[str, int] = field(default_factory=dict)
    tells_routes: bool = False
    """Whether it says when the route of a topic that it has is another one."""
    route_changes: tuple[int, dict[str, int]] | None = None
    """By its start, and by topic, how often routes had changed when it said so last; None: it has not."""
    question: tuple[int, bool] | None = None
    """Somebody asks there how this member stands: the number, and whether stacks are wanted."""

    def told_until_s(self) -> float:
        """Until when the broker has not given the member up, as far as the member can know."""
        return self.sent_s + self.expiry_s * EXPIRY_PART

    def is_late(self, now_s: float) -> bool:
        """Whether the broker may have given the member up, by the member's clock."""
        return self.version > 0 and now_s > self.told_until_s()

    def may_know(self, now_s: float) -> bool:
        """Whether the broker may still know a member that is late: it counts from its answer to a call that it has held."""
        return now_s < self.sent_s + self.hold_s() + self.expiry_s

    def hold_s(self) -> float:
        """For how long it holds a call."""
        return min(HOLD_S, self.expiry_s * HOLD_PART)

    def is_unheard(self, now_s: float) -> bool:
        """Whether its calls have failed for that long."""
        return self.version > 0 and now_s > self.heard_s + self.expiry_s * EXPIRY_PART


class MembershipState:
    """One member of one group."""

    def __init__(
        self, group: str, client_id: str, allocation: Allocation, machine_room: str = "", *, locks_queues: bool = False
    ) -> None:
        self.group = group
        self.locks_queues = locks_queues
        self.allocation = allocation
        self.machine_room = machine_room
        self._wanted_id = client_id
        self._fork_count = -1
        self._client_id = ""
        self._nonce = 0
        self.is_named = True
        """Whether commits name the membership. Else they carry a lock's token, which outlives a restart of the broker and says more."""
        self.news = 0
        """Grows with each answer that may change the share."""
        self.member_count = 1
        """Of the group, this one included, as far as was known at the last `share`."""
        self._filters: dict[str, str] = {}
        self._going: dict[str, str] = {}
        """Topics that are not wanted any more, and have queues whose last commit is still to come."""
        self._epochs = itertools.count(1)
        self._route_numbers: dict[str, int] = {}
        self._brokers: dict[str, _Broker] = {}
        self._queues: frozenset[MessageQueue] = frozenset()
        self._claims: dict[MessageQueue, _Claim] = {}
        self._waits_since: dict[MessageQueue, float] = {}
        self._number = 0
        self._lost: set[str] = set()
        self._dropping: set[str] = set()
        """Of these the consumer knows that they are lost, and has not said yet what it has now."""
        self._told_of: set[str] = set()
        self._changed_routes: set[str] = set()
        """Topics of whose routes a broker has said that they are others by now, and nobody has looked them up since."""
        self._unsure_routes: set[str] = set()
        """Topics of whose routes nobody could have said that they are others: no broker knew the member, or the only one has started again.
        """
        self._others: set[MessageQueue] | None = None
        """Queues that other members have had since this one began; None: nobody asks."""
        self.unsure: Final[dict[str, int]] = {}
        """Brokers at which a call of a member with locks broke: others may have its queues since. The number of the last such call.

        Any thread may read it, without the lock; see `renewable`.
        """
        self.followed_s = -math.inf
        """When its program followed routes last; one that does not poll does not."""
        self.describe: Callable[[bool], pb.MemberDescription] | None = None
        """Says how the member stands; with its stacks, or without. Whoever makes calls calls it."""

    # -- who it is ---------------------------------------------------------------------------------------------------------

    @property
    def key(self) -> MemberKey:
        """Name and random number; others in a forked child."""
        if self._fork_count != _forks.fork_count:
            self._fork_count = _forks.fork_count
            self._client_id, self._nonce = self._wanted_id or drawn_name(), secrets.randbits(63) | 1
        return self._client_id, self._nonce

    def remember_others(self) -> None:
        """From now on `was_others` is asked."""
        self._others = set()

    def was_others(self, queue: MessageQueue) -> bool:
        """Whether another member has had the queue since this one began, as far as brokers said."""
        return self._others is not None and queue in self._others

    # -- what it wants -------------------------------------------------------------------------------------------------------

    def want(
        self, filters: Mapping[str, str], addresses: Mapping[str, BrokerAddress], route_numbers: Mapping[str, int]
    ) -> None:
        """Topics with their filters for people, the brokers that have queues of theirs, and numbers that stand for their routes.

        Brokers that are new are called.
        """
        if (dict(filters), dict(route_numbers)) != (self._filters, self._route_numbers):
            before = self._going | self._filters
            self._going = {topic: before[topic] for topic in {queue.topic for queue in self._queues} & before.keys() - filters.keys()}
            self._filters, self._route_numbers = dict(filters), dict(route_numbers)
            for broker in self._brokers.values():
                broker.is_told = False
                if broker.is_refused:  # It was another report.
                    broker.retry_s, broker.refusal = 0.0, None
            self.news += 1
        for name in self._brokers.keys() - addresses.keys():
            broker = self._brokers[name]
            self.news += broker.is_wanted
            if broker.is_wanted:
                broker.is_wanted = broker.is_told = False
            if not broker.in_flight and broker.members is None:
                self._forget_unwanted(name)
        for name, address in addresses.items():
            known = self._brokers.get(name)
            if known is None:
                known = self._brokers[name] = _Broker(address, next(self._epochs))
            if not known.is_wanted:
                known.is_wanted, known.is_told = True, False
                self.news += 1
            self.move(name, address)

    def move(self, broker_name: str, address: BrokerAddress) -> None:
        """The broker, or one that serves in its place, is there. It is called, unless that is where it was."""
        broker = self._brokers.get(broker_name)
        if broker is not None and broker.address != address:
            broker.address, broker.retry_s, broker.is_told = address, 0.0, False

    @property
    def topics(self) -> frozenset[str]:
        """What it consumes."""
        return frozenset(self._filters)

    def check_room(self, topics: Iterable[str], topic: str) -> None:
        """Whether it may consume a topic beside these. Raises ConfigurationError."""
        check_topic_count(self.group, {*topics, *self._going}, topic)

    @property
    def broker_names(self) -> list[str]:
        """The brokers that have queues of that."""
        return [name for name, broker in self._brokers.items() if broker.is_wanted]

    def has_queue_of(self, broker_name: str, topic: str) -> bool:
        """Whether it has a queue of the topic there."""
        return any(queue.broker_name == broker_name and queue.topic == topic for queue in self._queues)

    def claim(self, queues: Iterable[MessageQueue]) -> None:
        """The queues that it has now, of topics that are shared. Brokers for whom that is news are told."""
        before = self._queues | self._claims.keys()
        self._queues = frozenset(queues)
        for queue in self._queues & self._claims.keys():
            del self._claims[queue]
        self._tell_brokers(before ^ (self._queues | self._claims.keys()))
        self._dropping = set()
        if self._going:
            topics = {queue.topic for queue in self._queues}
            self._going = {topic: text for topic, text in self._going.items() if topic in topics}

    def ask(self, broker_name: str, address: BrokerAddress) -> None:
        """A broker has refused a commit: perhaps it has just started. It is called now, and answers at once (`is_answered`)."""
        broker = self._brokers.get(broker_name)
        if broker is not None:
            broker.address, broker.asked, broker.is_told, broker.retry_s = address, self._number, False, 0.0

    def doubt_locks(self, broker_name: str) -> None:
        """Another connection to the broker broke: that of the held call may have, too, and nobody has said so. It is called now."""
        broker = self._brokers.get(broker_name)
        if self.locks_queues and broker is not None and broker.version and broker_name not in self.unsure:
            self.unsure[broker_name] = self._number
            self.ask(broker_name, broker.address)

    def is_answered(self, broker_name: str) -> bool:
        """Whether the broker has answered since `ask`, or there is nothing to wait for."""
        broker = self._brokers.get(broker_name)
        return broker is None or broker.asked is None

    # -- calls -----------------------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> list[str]:
        """Brokers that want a call now."""
        return [
            name
            for name, broker in self._brokers.items()
            if broker.retry_s <= now_s and not (broker.in_flight and broker.is_told)
        ]

    def next_due_in_s(self, now_s: float) -> float:
        """Until `due` has more to say by the passing of time alone."""
        pauses = [
            broker.retry_s - now_s for broker in self._brokers.values() if not broker.in_flight or not broker.is_told
        ]
        return max(min(pauses, default=float("inf")), 0.0)

    def overdue_in_s(self, now_s: float) -> float:
        """Until a call is overdue: 0 if one is now."""
        dues_s = [broker.sent_s + broker.expiry_s * OVERDUE_PART for broker in self._brokers.values() if broker.version]
        return max(min(dues_s, default=float("inf")) - now_s, 0.0)

    def shortest_expiry_s(self) -> float:
        """The shortest time after which a broker gives the member up."""
        return min((broker.expiry_s for broker in self._brokers.values()), default=float("inf"))

    def call_anew(self, now_s: float = math.inf) -> None:
        """Brokers whose calls are overdue by then are called, whatever is under way: nobody takes those answers now."""
        for broker in self._brokers.values():
            if broker.version and broker.sent_s + broker.expiry_s * OVERDUE_PART <= now_s:
                broker.is_told = False

    def begin(self, broker_name: str, now_s: float, *, describes: bool = True) -> tuple[MemberTicket, BrokerAddress, bytes, float]:
        """A call to the broker: whose outcome it will be, where it goes, the request, and how long it may take.

        `describes`: it answers how the member stands, if somebody has asked.
        """
        with fork_waits:
            from .v1 import membership_service_pb2 as pb

        broker = self._brokers[broker_name]
        self._check_late(broker_name, broker, now_s)
        broker.confirms = broker.doubted_until_s is not None
        self._number += 1
        broker.number, broker.in_flight, broker.is_told = self._number, True, True
        broker.sent_s = now_s
        if not broker.failures:
            broker.heard_s = now_s
        open_claims = [claim for queue, claim in self._claims.items() if queue.broker_name == broker_name and not claim.is_granted]
        for claim in open_claims:
            claim.number = claim.number or self._number
        needs_list = broker.members is None
        said = self._said(broker_name)
        broker.leaves = not said.topics
        asks_at_once = bool(open_claims) or broker.asked is not None or broker.confirms
        hold_s = broker.hold_s()
        request = pb.HoldMembershipRequest(
            consumer_group=self.group,
            member=said,
            # The version of a group is 2 at least, and never goes back: to an older one the answer is the list, at once.
            hold_ms=CLAIM_HOLD_MS if asks_at_once else int(hold_s * 1000),
            known_version=broker.version - 1 if needs_list and broker.version > 1 else broker.version,
            broker_start=broker.start,
            claims_only=bool(open_claims) and not needs_list and not broker.confirms,
            only_if_member=broker.confirms,
        )
        if broker.question is not None and describes:
            self._describe_in(request, broker)
        ticket = MemberTicket(broker_name, self._number)
        # Its queues wait for that answer, and the connection may be dead.
        is_hurried = broker.confirms or (broker.asked is not None and broker_name in self.unsure)
        timeout_s = DOUBT_S if is_hurried else hold_s + CALL_MARGIN_S
        return ticket, broker.address, request.SerializeToString(), timeout_s

    def _describe_in(self, request: pb.HoldMembershipRequest, broker: _Broker) -> None:
        """Puts the answer to a question into the request."""
        assert broker.question is not None
        (number, wants_stacks), broker.question = broker.question, None
        if self.describe is None:
            return
        try:
            request.description.CopyFrom(self.describe(wants_stacks))
        except Exception:
            logger.exception("a member of group %s cannot say how it stands", self.group)
            request.ClearField("description")
        else:
            request.description.description_id = number

    def leave_requests(self, pull_member: str = "", *, is_final: bool = True) -> list[LeaveRequest]:
        """What says to each broker that the member goes; those that are away are the last.

        `pull_member`: its name in pulls, if it makes no more of them. `is_final`: it never joins again.
        """
        with fork_waits:
            from .v1 import membership_service_pb2 as pb

        client_id, nonce = self.key
        requests = []
        for broker in self._brokers.values():
            # One that is being asked for the first time may know it already. One that is away is not waited for, unless it may have locks
            # of this member: while only a connection is broken, they hinder others.
            is_known = broker.members is not None or broker.is_refused or (broker.in_flight and not broker.failures)
            is_away = not is_known
            if not is_away or (self.locks_queues and broker.version):
                request = pb.LeaveGroupRequest(
                    consumer_group=self.group,
                    client_id=client_id,
                    nonce=nonce,
                    member_epoch=broker.member_epoch if self.is_named else 0,
                    pull_member=pull_member,
                    is_final=is_final,
                )
                requests.append(LeaveRequest(broker.address, request.SerializeToString(), is_away))
        return sorted(requests, key=lambda leave: leave.is_away)

    def _said(self, broker_name: str) -> pb.GroupMember:
        with fork_waits:
            from .v1 import membership_service_pb2 as pb

        client_id, nonce = self.key
        is_left = not self._brokers[broker_name].is_wanted and not self._has_queues_at(broker_name)
        ids: dict[str, list[int]] = {} if is_left else {topic: [] for topic in self._filters}
        for queue in sorted(self._queues | self._claims.keys()):
            if queue.broker_name == broker_name and (queue.topic in ids or queue.topic in self._going):
                ids.setdefault(queue.topic, []).append(queue.queue_id)
        filters = self._going | self._filters
        return pb.GroupMember(
            client_id=client_id,
            nonce=nonce,
            topics=[
                pb.MemberTopic(
                    topic=topic,
                    filter=filters[topic],
                    queue_ids=queue_ids,
                    route_number=self._route_numbers.get(topic, 0),
                )
                for topic, queue_ids in sorted(ids.items())
            ],
            allocation=self.allocation.name,
            machine_room=self.machine_room,
            client_version=f"protomq-python {VERSION}",
            member_epoch=self._brokers[broker_name].member_epoch if self.is_named else 0,
            locks_queues=self.locks_queues,
        )

    def answered(self, ticket: MemberTicket, payload: bytes, now_s: float) -> None:
        """Takes an answer. Raises ProtocolError, and changes nothing, where it does not parse."""
        broker = self._current(ticket)
        if broker is None:
            return
        with fork_waits:
            from .v1 import membership_service_pb2 as pb

        if broker.leaves and not broker.is_wanted:
            self._drop_broker(ticket.broker_name)
            return
        answer = decoded(payload, pb.HoldMembershipResponse.FromString)
        broker.away_since_s = None
        broker.in_flight, broker.was_tried, broker.heard_s = False, True, broker.sent_s
        broker.failures, broker.retry_s, broker.knows_groups, broker.is_refused = 0, 0.0, True, False
        broker.refusal = None
        if broker.asked is not None and ticket.number > broker.asked:
            broker.asked = None
            self.news += ticket.broker_name in self.unsure  # Its locks may be renewed now: a poll that sleeps has to.
        if broker.confirms:
            self.news += 1
            # A broker of an earlier version does not confirm. When a member goes, the version grows.
            if not (answer.is_confirmed or (answer.broker_start, answer.version) == (broker.start, broker.version)):
                self._forget(ticket.broker_name, broker)
                return
            broker.confirms, broker.doubted_until_s = False, None
        broker.version, broker.start = answer.version, answer.broker_start
        broker.settled_s = now_s + answer.settling_ms / 1000
        broker.expiry_s = answer.expiry_ms / 1000
        broker.question = (answer.description_id, answer.wants_stacks) if answer.description_id else None
        is_list = not (answer.is_unchanged or answer.is_about_claims)
        if not is_list and broker.members is None:
            # The list that it does not repeat was forgotten since the call began.
            broker.version, broker.is_told, broker.retry_s = 0, False, now_s + BACKOFF_MIN_S
            return
        self.news += broker.tells_routes != answer.tells_routes
        broker.tells_routes = answer.tells_routes
        if is_list:
            self._note_route_changes(broker, {count.topic: count.route_changes for count in answer.queue_counts})
            broker.members, broker.taken, broker.route_numbers = list(answer.members), None, None
            broker.queue_counts = {count.topic: count.read_queues for count in answer.queue_counts}
        elif answer.taken:
            broker.taken = self._taken_at(broker).union((one.topic, queue_id) for one in answer.taken for queue_id in one.queue_ids)
        if self._others is not None:
            name = ticket.broker_name
            self._others.update(MessageQueue(topic, name, queue_id) for topic, queue_id in self._taken_at(broker))
        if broker.settled_s > now_s:
            has_judged = self._drop_claims(ticket.broker_name)  # Who has a queue may not have said so yet.
        else:
            has_judged = self._judge_claims(ticket)
        self.news += is_list or has_judged
        self._tell_difference(ticket.broker_name, answer.difference)

    def failed(self, ticket: MemberTicket, error: ProtomqError, now_s: float) -> None:
        """Takes an error; the call is made again after a pause."""
        broker = self._current(ticket)
        if broker is None:
            return
        broker.in_flight, broker.was_tried = False, True
        self.news += 1
        if self.locks_queues and broker.version and isinstance(error, TransportError):
            self.unsure[ticket.broker_name] = ticket.number
        if not broker.is_wanted and self._forget_unwanted(ticket.broker_name):
            return
        is_away = isinstance(error, TransportError) or error.reason == "SHUTTING_DOWN"
        broker.away_since_s = (now_s if broker.away_since_s is None else broker.away_since_s) if is_away else None
        if isinstance(error, MemberUnknownError):
            self._forget(ticket.broker_name, broker)
            return
        self._drop_claims(ticket.broker_name)
        broker.members = None  # Nobody knows whether it is still there; which answer it gave last, it may still know.
        broker.failures += 1
        pause_s = min(BACKOFF_MIN_S * 2 ** min(broker.failures - 1, 10), BACKOFF_MAX_S)
        if isinstance(error, UnknownMethodError):
            broker.asked, broker.knows_groups, broker.is_refused, pause_s = None, False, False, OLD_BROKER_RETRY_S
            self._tell(f"broker {ticket.broker_name} knows no groups: each member gets all of its messages")
        elif not is_away and (not error.retriable or isinstance(error, TooManyError) or broker.is_unheard(now_s)):
            self._refused(ticket.broker_name, broker, error)
        elif not error.retriable:
            self._tell(f"broker {ticket.broker_name}, calls of {self.key[0]} as a member of {self.group}: {error}")
        broker.retry_s = now_s + max(pause_s, (error.retry_delay_ms or 0) / 1000)

    def _refused(self, name: str, broker: _Broker, error: ProtomqError) -> None:
        """The broker does not know what this member has: others get its queues there, unless another broker still counts it."""
        if not broker.is_refused or self._has_queues_at(name):
            self._forget(name, broker)
        broker.is_refused, broker.asked = True, None
        text = f"broker {name} does not take {self.key[0]} as a member of {self.group}, so nothing is consumed there: {error}"
        if isinstance(error, InvalidArgumentError):
            refusal = type(error)(text, metadata=error.metadata, field_violations=error.field_violations)
            refusal.__cause__, broker.refusal = error, refusal
        self._tell(text)

    def take_refusal(self) -> ProtomqError | None:
        """Why a broker does not take this member, where another try does not change that; once for each of its refusals."""
        for broker in self._brokers.values():
            if (refusal := broker.refusal) is not None:
                broker.refusal = None
                return refusal
        return None

    def refused_by(self) -> set[str]:
        """Brokers that do not take this member."""
        return {name for name, broker in self._brokers.items() if broker.is_refused}

    def lose_calls(self, now_s: float) -> None:
        """All calls under way have failed."""
        error = ConnectionLostError("the calls of the member ended")
        for name, broker in list(self._brokers.items()):
            if broker.in_flight:
                self.failed(MemberTicket(name, broker.number), error, now_s)

    def check_expiry(self, now_s: float) -> bool:
        """Finds out whether a broker may have given this member up. Returns whether one is to be asked now."""
        asked = [name for name, broker in self._brokers.items() if self._check_late(name, broker, now_s)]
        return bool(asked)

    def _check_late(self, name: str, broker: _Broker, now_s: float) -> bool:
        """Where the broker may have given this member up, it is asked, or the queues are given up. Returns whether it is to be asked."""
        if broker.doubted_until_s is not None:
            is_over = now_s >= broker.doubted_until_s
        elif broker.is_late(now_s):
            is_over = not broker.may_know(now_s)
            if not is_over:
                broker.doubted_until_s = now_s + DOUBT_S
                broker.is_told, broker.retry_s = False, 0.0
        else:
            return False
        if is_over:
            self.news += 1
            self._forget(name, broker)
        return not is_over

    def restart(self) -> None:
        """All connections are gone, as in a forked child: it is another member now."""
        for name, broker in self._brokers.items():
            self._forget(name, broker)
            broker.in_flight, broker.number, broker.was_tried = False, 0, False
        self.unsure.clear()
        self.news += 1

    def renewable(self) -> dict[str, int]:
        """Of `unsure`, the brokers that have answered a later call: what they say of locks from now on holds."""
        found = {}
        for name, number in self.unsure.items():
            broker = self._brokers.get(name)
            if broker is not None and (not broker.knows_groups or (broker.version and not broker.failures and broker.asked is None)):
                found[name] = number
        return found

    def renewed(self, broker_name: str, number: int) -> None:
        """The broker has said whose the locks are, behind the call of this number that broke; there may have been another one since."""
        if self.unsure.get(broker_name) == number:
            del self.unsure[broker_name]

    def take_lost(self) -> set[str]:
        """Brokers at which others may have the queues of this member by now; once."""
        self._dropping = self._dropping | self._lost
        lost, self._lost = self._lost, set()
        return lost

    def stands(self, broker_name: str, now_s: float, *, by_calls: bool = True) -> bool:
        """Whether this member's queues at the broker are certainly still its own: else nothing of them is begun or committed.

        `by_calls`: calls that fail tell, too, until one is answered; else only how long ago the last one was sent.
        """
        broker = self._brokers.get(broker_name)
        if broker_name in self._lost or broker_name in self._dropping:
            return False
        if broker is None:
            return True
        is_doubtful = broker.doubted_until_s is not None or broker.is_late(now_s) or broker.is_refused
        return not (is_doubtful or (by_calls and broker.is_unheard(now_s)))

    def is_doubtful(self, broker_name: str, now_s: float) -> bool:
        """Whether the broker may say yet that the queues there are this member's own, though it was not told in time."""
        broker = self._brokers.get(broker_name)
        if broker is None or broker_name in self._lost or broker_name in self._dropping:
            return False
        return broker.doubted_until_s is not None or (broker.is_late(now_s) and broker.may_know(now_s))

    def membership(self, queue: MessageQueue) -> Membership | None:
        """What a commit of the queue names; None: nothing.

        It names nothing where a lock protects the queue, where the queue is not shared, and where its broker knows no groups. Ask
        before `stands`: who is given up between the two names the membership that is over. Any thread, without the lock.
        """
        broker = self._brokers.get(queue.broker_name)
        is_wanted = queue.topic in self._filters or queue.topic in self._going
        if not self.is_named or broker is None or not broker.knows_groups or not is_wanted:
            return None
        return Membership(*self.key, broker.member_epoch)

    def is_known_everywhere(self) -> bool:
        """Whether each broker was asked once."""
        return all(broker.was_tried for broker in self._brokers.values())

    def has_open_claims(self) -> bool:
        """Whether an answer to a claim is still to come."""
        return any(not claim.is_granted for claim in self._claims.values())

    # -- the share ---------------------------------------------------------------------------------------------------------------

    def share(self, queues: Mapping[str, Sequence[MessageQueue]], now_s: float) -> list[MessageQueue] | None:
        """Of these queues, by topic, the ones to consume now; None: as until now, for it is not known who else is there."""
        views = [broker for broker in self._brokers.values() if broker.is_wanted and broker.members is not None]
        if not views:
            if self._brokers and all(not broker.knows_groups for broker in self._brokers.values()):
                return [queue for several in queues.values() for queue in several]
            return None
        if all(broker.settled_s > now_s for broker in views):
            return None
        if any(broker.doubted_until_s is not None for broker in self._brokers.values()):
            return None  # What went now would go without a last commit.
        members = self._members(views)
        self.member_count = len(members)
        refused = self.refused_by()
        found: list[MessageQueue] = []
        waiting: dict[MessageQueue, float] = {}
        claims, self._claims = self._claims, {}
        for topic, several in queues.items():
            here = [member for member, topics in members.values() if topic in topics]
            own_share = self.allocation.share(members[self.key][0], sorted(several), here)
            if self._others is not None:
                # No later list says that another member has taken a queue that was free.
                self._others.update(set(several).difference(own_share))
            for queue in own_share:
                if queue in self._queues:
                    found.append(queue)
                    continue
                since_s = waiting[queue] = self._waits_since.get(queue, now_s)
                if queue in claims or not (self._is_taken(queue) or self._is_settling(queue, now_s)):
                    claim = self._claims[queue] = claims.get(queue) or _Claim(is_granted=not self._knows_groups(queue))
                    if claim.is_granted:
                        found.append(queue)
                elif now_s - since_s >= CLAIM_WAIT_S and queue.broker_name not in refused:
                    found.append(queue)
        self._waits_since = waiting
        self._tell_brokers(claims.keys() ^ self._claims.keys())
        return found

    def changes_in_s(self, now_s: float) -> float:
        """Until the share may change by the passing of time alone."""
        times = [broker.settled_s for broker in self._brokers.values() if broker.settled_s > now_s]
        times += [since_s + CLAIM_WAIT_S for since_s in self._waits_since.values() if since_s + CLAIM_WAIT_S > now_s]
        times += [
            broker.told_until_s() if broker.doubted_until_s is None else broker.doubted_until_s
            for broker in self._brokers.values()
            if broker.version
        ]
        return max(min(times, default=float("inf")) - now_s, 0.0)

    def away_since_s(self, broker_name: str) -> float | None:
        """Since when the broker has not been there, or is stopping; None: it answers, or nothing is known of it."""
        broker = self._brokers.get(broker_name)
        return None if broker is None else broker.away_since_s

    def contradicted(self, queues: Mapping[str, Sequence[MessageQueue]]) -> dict[str, Hashable]:
        """Topics of which a broker says that it has more or fewer queues, or another member that its route is another one; and how."""
        found: dict[str, Hashable] = {}
        for topic, several in queues.items():
            counts = Counter(queue.broker_name for queue in several)
            others = frozenset(
                (name, broker.queue_counts[topic])
                for name, broker in self._brokers.items()
                if broker.queue_counts.get(topic, counts[name]) != counts[name]
            )
            numbers = frozenset(number for broker in self._brokers.values() for number in self._other_routes(broker, topic))
            if others or numbers:
                found[topic] = others, numbers
        return found

    def _note_route_changes(self, broker: _Broker, changes: dict[str, int]) -> None:
        """Takes how often routes have changed, as the broker says."""
        before, broker.route_changes = broker.route_changes, (broker.start, changes)
        if before is not None and before[0] == broker.start:
            counts = before[1]
            self._changed_routes.update(topic for topic, count in changes.items() if counts.get(topic, count) != count)
        elif broker.tells_routes:
            # It has not heard of what changed before it began, nor told this member of what changed before that joined.
            others = [other for other in self._brokers.values() if other is not broker and other.tells_routes and other.members is not None]
            self._unsure_routes.update(topic for topic in changes if not any(topic in other.queue_counts for other in others))

    def take_changed_routes(self) -> set[str]:
        """Topics of whose routes a broker has said that they are others by now; once."""
        changed, self._changed_routes = self._changed_routes, set()
        return changed & self._filters.keys()

    def take_unsure_routes(self) -> set[str]:
        """Topics of whose routes nobody could have said that they are others by now; once."""
        unsure, self._unsure_routes = self._unsure_routes, set()
        return unsure & self._filters.keys()

    def hears_of_routes(self, queues: Mapping[str, Sequence[MessageQueue]]) -> bool:
        """Whether brokers say when the routes of all these topics are others: each that has one of them, and each has one."""
        for topic, several in queues.items():
            brokers = [self._brokers.get(name) for name in {queue.broker_name for queue in several}]
            told = [broker is not None and broker.tells_routes and topic in broker.queue_counts for broker in brokers]
            if not told or not all(told):
                return False
        return bool(queues)

    def _other_routes(self, broker: _Broker, topic: str) -> set[int]:
        """The numbers of other members' routes that are not this member's."""
        if broker.members is None:
            return set()
        if broker.route_numbers is None:
            broker.route_numbers = {}
            for said in broker.members:
                if (said.client_id, said.nonce) != self.key:
                    for other in said.topics:
                        if other.route_number:
                            broker.route_numbers.setdefault(other.topic, set()).add(other.route_number)
        return broker.route_numbers.get(topic, set()) - {self._route_numbers.get(topic, 0)}

    def _members(self, views: Iterable[_Broker]) -> dict[MemberKey, tuple[GroupMember, set[str]]]:
        """All members, by name, with their topics. Where two have one name, the random number stands behind it."""
        topics: dict[MemberKey, set[str]] = {self.key: set(self._filters)}
        rooms = {self.key: self.machine_room}
        for broker in views:
            for said in broker.members or ():
                key = (said.client_id, said.nonce)
                topics.setdefault(key, set()).update(topic.topic for topic in said.topics)
                rooms.setdefault(key, said.machine_room)
        counts = Counter(client_id for client_id, _ in topics)
        return {
            key: (GroupMember(key[0] if counts[key[0]] == 1 else f"{key[0]}#{key[1]:016x}", rooms[key]), topics[key])
            for key in sorted(topics)
        }

    def _judge_claims(self, ticket: MemberTicket) -> bool:
        """Takes the answer to a call: whether another member was faster. Returns whether there were claims."""
        judged = [
            (queue, claim)
            for queue, claim in self._claims.items()
            if queue.broker_name == ticket.broker_name and not claim.is_granted and 0 < claim.number <= ticket.number
        ]
        for queue, claim in judged:
            claim.is_granted = not self._is_taken(queue)
            if not claim.is_granted:
                del self._claims[queue]
                self._tell_brokers([queue])
        return bool(judged)

    def _has_queues_at(self, broker_name: str) -> bool:
        return any(queue.broker_name == broker_name for queue in (*self._queues, *self._claims))

    def _forget_unwanted(self, broker_name: str) -> bool:
        """Whether nothing is left there that it would have to hear of."""
        self._drop_claims(broker_name)
        if self._has_queues_at(broker_name):
            return False
        self._drop_broker(broker_name)
        return True

    def _drop_broker(self, name: str) -> None:
        del self._brokers[name]
        self.unsure.pop(name, None)

    def _drop_claims(self, broker_name: str) -> bool:
        """Returns whether there were any."""
        dropped = [queue for queue in self._claims if queue.broker_name == broker_name]
        for queue in dropped:
            del self._claims[queue]
        return bool(dropped)

    def _tell_brokers(self, queues: Iterable[MessageQueue]) -> None:
        """What this member has of these queues is news for their brokers."""
        for name in {queue.broker_name for queue in queues}:
            if name in self._brokers:
                self._brokers[name].is_told = False

    def _knows_groups(self, queue: MessageQueue) -> bool:
        broker = self._brokers.get(queue.broker_name)
        return broker is not None and broker.knows_groups

    def _is_settling(self, queue: MessageQueue, now_s: float) -> bool:
        """Whether the queue's broker may not have heard of all members yet."""
        broker = self._brokers.get(queue.broker_name)
        return broker is not None and broker.settled_s > now_s

    def _is_taken(self, queue: MessageQueue) -> bool:
        """Whether another member has the queue, as far as its broker says."""
        broker = self._brokers.get(queue.broker_name)
        if broker is None or not broker.knows_groups:
            return False
        if broker.members is None:
            return True  # It cannot be consumed now either.
        return (queue.topic, queue.queue_id) in self._taken_at(broker)

    def _taken_at(self, broker: _Broker) -> frozenset[tuple[str, int]]:
        """Topic and number of each queue that another member has, as far as the broker says."""
        if broker.taken is None:
            own = self.key
            broker.taken = frozenset(
                (topic.topic, queue_id)
                for said in broker.members or ()
                if (said.client_id, said.nonce) != own
                for topic in said.topics
                for queue_id in topic.queue_ids
            )
        return broker.taken

    def _current(self, ticket: MemberTicket) -> _Broker | None:
        broker = self._brokers.get(ticket.broker_name)
        return broker if broker is not None and broker.number == ticket.number else None

    def _forget(self, name: str, broker: _Broker) -> None:
        """The broker does not know the member any more, or may not: it joins again."""
        self._lost.add(name)
        broker.member_epoch, broker.asked = next(self._epochs), None
        broker.version = broker.start = 0
        broker.members, broker.is_told, broker.retry_s = None, False, 0.0
        broker.confirms, broker.doubted_until_s = False, None
        self._drop_claims(name)
        self._queues = frozenset(queue for queue in self._queues if queue.broker_name != name)

    def _tell_difference(self, broker_name: str, difference: str) -> None:
        if difference:
            advice = "Topics, filters and settings have to be the same in all members: else messages come to nobody, or twice"
            if "consumes under the group's name" in difference:  # As no member: nothing can be made the same.
                advice = "Give each kind a group of its own"
            self._tell(f"the members of group {self.group} are not alike, says broker {broker_name}: {difference}. {advice}")

    def _tell(self, text: str) -> None:
        if text not in self._told_of and len(self._told_of) < 1_000:
            self._told_of.add(text)
            logger.warning("%s", one_line(text))  # It may have names of clients in other languages.
