"""Who keeps a topic, and who keeps dead letters, in the simulated cluster (`failover_world`). They know at any time what must be there.

    TopicKeeper    makes a topic, sends to it, deletes it, and makes it again, as another incarnation
    LetterKeeper   sends messages, sends them back as dead letters, and replays these

A keeper asks one thing after the other. It asks each of them at whoever is said to lead, until it is answered. Earlier tries may be done
late, but no later than the next thing: a master takes calls in their order, and one that was deposed is truncated. So a new master has all
that was answered, and at most one thing more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from protomq.v1.admin_service_pb2 import CreateTopicRequest, CreateTopicResponse, DeleteTopicRequest
from protomq.v1.dead_letter_service_pb2 import ReplayDeadLettersRequest, ReplayDeadLettersResponse
from protomq.v1.group_service_pb2 import FailedMessage, SendBackRequest, SendBackResponse
from protomq.v1.record_pb2 import Record, RecordBatch
from protomq.v1.send_service_pb2 import SendRequest, SendResponse, SendStatus
from protomq.v1.topic_pb2 import Topic
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq.wire.topics import dead_letter_topic
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.queues.reading import ReadStatus
from protomq_runtime.errors import DEFINITE_KEY, ServiceError
from tests.support.retry_world import id_of

from .bodies import body_of, message_id
from .failover_clients import RETRY_MS, SEND_TIMEOUT_MS, records_of
from .failover_member import SEND

if TYPE_CHECKING:
    from protomq_broker.store.store import Store

    from .failover_member import Member, Reply
    from .failover_world import FailoverWorld

REST_MS: Final = 60
LOOK_EVERY_MS: Final = 110
KEPT: Final = "kept"
ORIGIN: Final = "origin"
GROUP: Final = "dead"
LETTERS: Final = dead_letter_topic(GROUP)
CREATE_TOPIC: Final = "/protomq.v1.AdminService/CreateTopic"
DELETE_TOPIC: Final = "/protomq.v1.AdminService/DeleteTopic"
SEND_BACK: Final = "/protomq.v1.GroupService/SendBack"
REPLAY: Final = "/protomq.v1.DeadLetterService/ReplayDeadLetters"
PASSING: Final = frozenset(
    {
        "NOT_MASTER", "NOT_ENOUGH_REPLICAS", "CONNECTION_LOST", "REQUEST_TIMEOUT", "DEADLINE_EXCEEDED", "DISK_FULL", "STORE_FAILED",
        "SHUTTING_DOWN", "SYSTEM_BUSY", "CORRUPT_LOG", "QUEUE_HEALING", "REPLICA_BEHIND",
    }
)  # fmt: skip
"""Reasons of errors after which a keeper asks again."""


class Asked(NamedTuple):
    """A call. `take` gets its answer, and returns whether that is the end of it."""

    path: str
    payload: bytes
    take: Callable[[Reply], bool]


class _Keeper:
    """Attributes: asked: what is under way; is_unknown: whether an earlier try of it may have been done."""

    name: str

    def __init__(self, world: FailoverWorld) -> None:
        self.world = world
        self.rng = Random(f"{self.name} {world.run}")
        self.asked: Asked | None = None
        self.is_unknown = False
        self._attempt = 0
        self._master: Member | None = None
        self._sends = 0
        world.at(self.rng.uniform(0, REST_MS), self._begin)

    def next(self) -> Asked:
        """What is to be asked now."""
        raise NotImplementedError

    def send(self, topic: str, ids: list[str], take: Callable[[Reply], bool]) -> Asked:
        """A send to queue 0, by a producer of its own."""
        world = self.world
        self._sends += 1
        self.producer_id = self.rng.getrandbits(62) | 1
        template = RecordTemplate(topic, self.producer_id, 0)
        records = [
            template.encode(body_of(world.run, id_), index, 5, key=id_, front=encode_front((id_,), "")) for index, id_ in enumerate(ids)
        ]
        request = SendRequest(topic=topic, queue_id=0, record_sizes=map(len, records))
        return Asked(SEND, b"".join(map(encode_record_field, records)) + request.SerializeToString(), take)

    def new_ids(self, producer: str, first: int) -> list[str]:
        """Of one to three messages."""
        return [message_id(producer, first + index, self.rng.choice((0, 40, 200))) for index in range(self.rng.randint(1, 3))]

    def say(self, rule: str, message: str) -> None:
        self.world.say(rule, f"{self.name}: {message}")

    def _begin(self) -> None:
        if not self.world.is_over:
            self.asked, self.is_unknown = self.next(), False
            self._try_once()

    def _try_once(self) -> None:
        world = self.world
        self._attempt += 1
        attempt = self._attempt
        self._master = self._master or world.route
        if self._master is None:
            self._failed(attempt, world.not_master)
            return
        assert self.asked is not None
        if self.asked.path != SEND:
            world.asked(self._master)
        world.to_member(self._master, self.asked.payload, partial(self._answered, attempt), self.asked.path)
        world.at(SEND_TIMEOUT_MS, self._failed, attempt, world.timed_out)

    def _answered(self, attempt: int, reply: Reply) -> None:
        if attempt != self._attempt:
            return
        if isinstance(reply, ServiceError) and reply.reason in PASSING:
            self._failed(attempt, reply)
            return
        assert self.asked is not None
        if not self.asked.take(reply):
            self._failed(attempt, self.world.timed_out)
            return
        self._attempt += 1
        self.asked = None
        self.world.at(REST_MS * self.rng.uniform(0.2, 1.8), self._begin)

    def _failed(self, attempt: int, error: ServiceError) -> None:
        if attempt != self._attempt:
            return
        self._attempt += 1
        self._master = None
        self.is_unknown = self.is_unknown or error.metadata[DEFINITE_KEY] != "true"
        self.world.at(RETRY_MS * self.rng.uniform(0.5, 2), self._try_again, self._attempt)

    def _try_again(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._try_once()

    def offset_of(self, reply: Reply) -> int | None:
        """Where a send stands; None: it is not known to be stored on all copies that count."""
        if isinstance(reply, ServiceError):
            self.say("I1", f"a send is answered {reply.reason}: {reply.message}")
            return 0
        response = SendResponse.FromString(reply)
        is_stored = response.status in (SendStatus.SEND_STATUS_SEND_OK, SendStatus.SEND_STATUS_SLAVE_NOT_AVAILABLE)
        return response.queue_offset if is_stored else None


class TopicKeeper(_Keeper):
    """See the module's docstring.

    Attributes: incarnation: of the topic, as it was answered; 0: its deletion was. wanted: what it may be by now; ids: of the messages that
    were answered.
    """

    name = "keeper of a topic"

    def __init__(self, world: FailoverWorld) -> None:
        super().__init__(world)
        self.incarnation = self.wanted = self._last = 0
        self.ids: list[str] = []
        self._sending: list[str] = []
        self._sent: dict[int, list[str]] = {}
        world.at(self.rng.uniform(0, LOOK_EVERY_MS), self._look)

    def next(self) -> Asked:
        """The next thing of a topic's life."""
        if not self.incarnation:
            self._last += 1
            self.wanted, self.ids, self._sent[self._last] = self._last, [], []
            topic = Topic(name=KEPT, write_queues=1, read_queues=1, incarnation=self._last)
            return Asked(CREATE_TOPIC, CreateTopicRequest(topic=topic).SerializeToString(), self._made)
        if self.rng.random() < 0.4:
            self.wanted = 0
            return Asked(DELETE_TOPIC, DeleteTopicRequest(topic=KEPT).SerializeToString(), self._deleted)
        self._sending = self.new_ids(f"kept{self.incarnation}", len(self.ids))
        self._sent[self.incarnation] += self._sending
        return self.send(KEPT, self._sending, self._stored)

    def _made(self, reply: Reply) -> bool:
        if isinstance(reply, ServiceError):
            self.say("L2", f"{KEPT} was deleted, and cannot be made: {reply.reason}: {reply.message}")
            return True
        self.incarnation = CreateTopicResponse.FromString(reply).topic.incarnation
        if self.incarnation != self.wanted:
            self.say("L2", f"{KEPT} was made as {self.wanted}, and is {self.incarnation}")
        self.world.fired["topic made again"] += self._last > 1
        return True

    def _deleted(self, reply: Reply) -> bool:
        if isinstance(reply, ServiceError):
            # Another try has deleted it.
            if reply.reason != "TOPIC_NOT_FOUND" or not self.is_unknown:
                self.say("L2", f"{KEPT} is there, and its deletion is answered {reply.reason}: {reply.message}")
            self.world.fired["topic deleted by an earlier try"] += 1
        self.incarnation = 0
        self.world.fired["topic deleted"] += 1
        return True

    def _stored(self, reply: Reply) -> bool:
        offset = self.offset_of(reply)
        if offset is None:
            return False
        if offset != len(self.ids):
            self.say("A7", f"{self._sending[0]} is message {len(self.ids)} of its incarnation, and its offset is {offset}")
        self.ids += self._sending
        return True

    def _look(self) -> None:
        """At any member: what it shows of the topic is of one incarnation, from its first message on."""
        world = self.world
        if world.is_over:
            return
        world.at(LOOK_EVERY_MS * self.rng.uniform(0.5, 1.5), self._look)
        member = self.rng.choice(world.members)
        if member.is_up and member.server is not None:
            try:
                self._check_shown(member)
            except CorruptLogError:
                world.fired["damage met by a keeper"] += 1

    def _check_shown(self, member: Member) -> list[str]:
        topic = member.store.topics.find(KEPT)
        if topic is None:
            return []
        result = member.store.read(KEPT, 0, 0, 1_000, 1 << 20)
        found = records_of(self.world.run, result) if result.status is ReadStatus.FOUND else []
        shown = [str(record[1]) for record in found]
        sent = self._sent.get(topic.incarnation, [])
        if shown != sent[: len(shown)] or not all(record[2] for record in found):
            self.say("A6", f"{member.name} has incarnation {topic.incarnation} of {KEPT}, and shows {shown[:5]}, not {sent[:5]}")
        return shown

    def check_new_master(self, member: Member) -> None:
        """L2. It has what was answered, and perhaps what is under way."""
        topic = member.store.topics.find(KEPT)
        has = topic.incarnation if topic is not None else 0
        if has not in (self.incarnation, self.wanted):
            self.say("L2", f"{member.name} leads with incarnation {has} of {KEPT}, and {self.incarnation} was answered")

    def check(self, member: Member) -> None:
        """At the end, when nothing is under way."""
        topic = member.store.topics.find(KEPT)
        has = topic.incarnation if topic is not None else 0
        shown = self._check_shown(member)
        if has != self.incarnation or (has and shown != self.ids):
            self.say("L2", f"{member.name} has incarnation {has} of {KEPT} with {shown}, not {self.incarnation} with {self.ids}")


class LetterKeeper(_Keeper):
    """See the module's docstring.

    Attributes: letters: ids of those that were answered; replayed: how many of them were replayed, as was answered: the first ones.
    """

    name = "keeper of dead letters"

    def __init__(self, world: FailoverWorld) -> None:
        super().__init__(world)
        self._sent_count = self.replayed = 0
        self._alive: list[FailedMessage] = []
        self.letters: list[str] = []

    def next(self) -> Asked:
        """The next thing of some messages' lives."""
        if self.letters and self.rng.random() < 0.4:
            return Asked(REPLAY, ReplayDeadLettersRequest(consumer_group=GROUP).SerializeToString(), self._replayed)
        if self._alive:
            request = SendBackRequest(consumer_group=GROUP, messages=self._alive, request_id=self.rng.getrandbits(62) | 1)
            return Asked(SEND_BACK, request.SerializeToString(), self._died)
        ids = self.new_ids("origin", self._sent_count)
        return self.send(ORIGIN, ids, partial(self._stored, ids))

    def _stored(self, ids: list[str], reply: Reply) -> bool:
        offset = self.offset_of(reply)
        if offset is None:
            return False
        self._sent_count += len(ids)
        for index in range(len(ids)):
            told = id_of(Record(producer_id=self.producer_id, sequence=index))
            self._alive.append(FailedMessage(topic=ORIGIN, queue_offset=offset + index, message_id=told, dead_letter=True))
        return True

    def _died(self, reply: Reply) -> bool:
        if isinstance(reply, ServiceError):
            self.say("G1", f"messages were stored, and cannot be sent back: {reply.reason}: {reply.message}")
            return True
        results = SendBackResponse.FromString(reply).results
        if len(results) != len(self._alive):
            self.say("G1", f"{len(self._alive)} messages are sent back, and the answer has {len(results)}")
        self.letters += [message.message_id for message in self._alive]
        self._alive = []
        return True

    def _replayed(self, reply: Reply) -> bool:
        """All letters before `next_offset` are replayed now, or were before. A new master may not read all of them yet."""
        if isinstance(reply, ServiceError):
            self.say("G5", f"there are dead letters, and a replay is answered {reply.reason}: {reply.message}")
            return True
        response = ReplayDeadLettersResponse.FromString(reply)
        before, end = min(self.replayed, response.next_offset), response.next_offset
        if response.known_count < before or response.replayed_count + response.known_count != end:
            self.say("G5", f"{before} dead letters were replayed, and the next answer is {response}")
        self.replayed = max(self.replayed, end)
        self.world.fired["letters replayed"] += response.replayed_count
        self.world.fired["replayed by an earlier try"] += response.known_count > before
        return True

    def check_new_master(self, member: Member) -> None:
        """L2. It knows what was replayed."""
        topic = member.store.topics.find(LETTERS)
        if topic is None:
            if self.letters:
                self.say("L2", f"{member.name} leads without {LETTERS}, and {len(self.letters)} letters were answered")
            return
        known = member.store.groups.replayed(GROUP, topic.incarnation).count_within(0, self.replayed)
        if known < self.replayed:
            self.say("L2", f"{member.name} leads and knows {known} replays, and {self.replayed} were answered")

    def check(self, member: Member) -> None:
        """At the end, when nothing is under way."""
        letters = [id_of(record) for record in records_in(member.store, LETTERS)]
        if Counter(letters) != Counter(self.letters):
            apart = Counter(letters) - Counter(self.letters), Counter(self.letters) - Counter(letters)
            self.say("G1", f"{member.name} has dead letters too many, {[*apart[0]]}, or too few, {[*apart[1]]}")
        origin = records_in(member.store, ORIGIN)
        replays = Counter(id_of(record) for record in origin if record.transit.replayed_group)
        if replays != Counter(letters[: self.replayed]):
            self.say("G5", f"{member.name} has replays {replays}, not one of each of {letters[: self.replayed]}")
        if len(origin) - replays.total() != self._sent_count:
            self.say("A1", f"{member.name} has {len(origin) - replays.total()} messages of {ORIGIN}, not {self._sent_count}")


def records_in(store: Store, topic: str) -> list[Record]:
    """All that a store serves of queue 0. Raises CorruptLogError."""
    found: list[Record] = []
    if store.topics.find(topic) is None:
        return found
    while True:
        result = store.read(topic, 0, len(found), 100, 1 << 20)
        if result.status is not ReadStatus.FOUND:
            return found
        data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)
        found += RecordBatch.FromString(data).records
