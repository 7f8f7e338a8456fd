"""Producers, readers and an operator of the simulated cluster (`failover_world`). They write down what they are told, as those of the real
rounds do.

A producer has an id and sequences, one send under way, and tries again, at whoever is said to lead, as the SDK does (`RequestRetries`).
A reader reads one queue in order, on the master or on any slave that answers.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from protomq.v1.group_pb2 import GroupSettings
from protomq.v1.group_service_pb2 import CreateRetryTopicRequest, PutGroupRequest
from protomq.v1.send_service_pb2 import SendRequest, SendResponse, SendStatus
from protomq.wire.record import RecordTemplate, encode_front, encode_record_field
from protomq.wire.topics import retry_topic
from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.queues.reading import ReadStatus
from protomq_runtime.errors import DEFINITE_KEY, ServiceError

from .bodies import body_of, message_id
from .failover_member import QUEUES
from .store_world import seen_of

if TYPE_CHECKING:
    from protomq_broker.store.store import Store

    from .failover_member import Member, Reply
    from .failover_world import FailoverWorld
    from .history import Call

TOPIC: Final = "t"
SEND_TIMEOUT_MS: Final = 800
RETRY_MS: Final = 60
GIVE_UP_MS: Final = 6_000
SEND_EVERY_MS: Final = 110
POLL_EVERY_MS: Final = 130
CHANGE_EVERY_MS: Final = 150
SET_GROUP: Final = "set"
PUT_GROUP: Final = "/protomq.v1.GroupService/PutGroup"
CREATE_RETRY_TOPIC: Final = "/protomq.v1.GroupService/CreateRetryTopic"


class Producer:
    """See the module's docstring."""

    def __init__(self, world: FailoverWorld, number: int) -> None:
        self.world, self.name = world, f"p{number}"
        self.producer_id = world.rng.getrandbits(62) | 1
        self.template = RecordTemplate(TOPIC, self.producer_id, 0)
        self.queue = number % QUEUES
        self.sequence = 0
        self.acknowledged: int | None = None
        self.master: Member | None = None
        self.call: Call | None = None
        self.attempt = 0
        world.at(world.rng.uniform(0, SEND_EVERY_MS), self.send)

    def send(self) -> None:
        """The next messages."""
        world, rng = self.world, self.world.rng
        if world.is_over:
            return
        count = rng.choice((1, 1, 1, 3))
        ids = [message_id(self.name, self.sequence + index, rng.choice((0, 40, 200, 900))) for index in range(count)]
        self.first, self.count = self.sequence, count
        self.sequence += count
        records = [
            self.template.encode(body_of(world.run, id_), self.first + index, 5, key=id_, front=encode_front((id_,), ""))
            for index, id_ in enumerate(ids)
        ]
        self.records = b"".join(map(encode_record_field, records))
        self.record_sizes = [len(record) for record in records]
        self.begun_ms = world.now_ms
        self.is_unknown = False
        self.previous = self.acknowledged
        self.call = world.history.invoke(self.name, "send", topic=TOPIC, queue=self.queue, ids=ids)
        self.try_once()

    def try_once(self) -> None:
        world = self.world
        self.attempt += 1
        attempt = self.attempt
        self.master = self.master or world.route
        if self.master is None:
            self.failed(attempt, world.not_master)
            return
        request = SendRequest(topic=TOPIC, queue_id=self.queue, record_sizes=self.record_sizes)
        if self.previous is not None:
            request.previous_sequence = self.previous
        world.to_member(self.master, self.records + request.SerializeToString(), partial(self.answered, attempt))
        world.at(SEND_TIMEOUT_MS, self.failed, attempt, world.timed_out)

    def answered(self, attempt: int, reply: Reply) -> None:
        if attempt != self.attempt:
            return
        if isinstance(reply, ServiceError):
            self.failed(attempt, reply)
            return
        response = SendResponse.FromString(reply)
        status = SendStatus.Name(response.status).removeprefix("SEND_STATUS_")
        if status in ("FLUSH_DISK_TIMEOUT", "FLUSH_SLAVE_TIMEOUT"):
            self.world.fired[status] += 1
            self.failed(attempt, self.world.timed_out)
            return
        self.attempt += 1
        self.world.fired[status] += 1
        self.world.fired["repeated"] += response.repeated_send
        self.acknowledged = self.first + self.count - 1
        assert self.call is not None
        self.call.ok(
            status=status, queue=response.queue_id, offset=response.queue_offset, physical=response.physical_offset or -1,
            repeated=response.repeated_send,
        )  # fmt: skip
        self.rest()

    def failed(self, attempt: int, error: ServiceError) -> None:
        """See RequestRetries.decide."""
        if attempt != self.attempt:
            return
        world = self.world
        self.attempt += 1
        self.master = None
        delay_ms = RETRY_MS * world.rng.uniform(0.5, 2)
        if error.reason in ("SEQUENCE_EXPIRED", "SEND_OUT_OF_ORDER"):
            world.fired[error.reason] += 1
            self.acknowledged = None
            may_be_stored = self.is_unknown and error.reason == "SEQUENCE_EXPIRED"
            if self.previous is None or may_be_stored:
                self.give_up(error)
                return
            self.previous, delay_ms = None, 0.0
        self.is_unknown = self.is_unknown or error.metadata[DEFINITE_KEY] != "true"
        if world.now_ms - self.begun_ms > GIVE_UP_MS or world.is_over:
            self.give_up(error)
            return
        world.at(delay_ms, self._try_again, self.attempt)

    def _try_again(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.try_once()

    def give_up(self, error: ServiceError) -> None:
        """Whether it is stored may be unknown for ever."""
        assert self.call is not None
        (self.call.info if self.is_unknown else self.call.fail)(error.reason, error.message)
        self.world.fired["given up"] += 1
        self.rest()

    def rest(self) -> None:
        self.call = None
        self.world.at(SEND_EVERY_MS * self.world.rng.uniform(0.3, 1.7), self.send)


class Operator:
    """Gives a group other settings, and makes topics of retries, at whoever is said to lead.

    Attributes: version: of the newest settings that were answered OK; groups: whose topics were.
    """

    def __init__(self, world: FailoverWorld) -> None:
        self.world = world
        self.rng = Random(f"operator {world.run}")
        self.version = self.number = 0
        self.groups: set[str] = set()
        world.at(CHANGE_EVERY_MS, self.change)

    def change(self) -> None:
        """The next change. Nobody says it again."""
        world = self.world
        if world.is_over:
            return
        world.at(CHANGE_EVERY_MS * self.rng.uniform(0.3, 1.7), self.change)
        if world.route is None:
            return
        self.number += 1
        if self.rng.random() < 0.5:
            settings = GroupSettings(consumer_group=SET_GROUP, version=self.number)
            path, payload = PUT_GROUP, PutGroupRequest(settings=settings).SerializeToString()
        else:
            path, payload = CREATE_RETRY_TOPIC, CreateRetryTopicRequest(consumer_group=f"g{self.number}").SerializeToString()
        world.to_member(world.route, payload, partial(self.answered, path, self.number), path)

    def answered(self, path: str, number: int, reply: Reply) -> None:
        if isinstance(reply, ServiceError):
            self.world.fired[f"a change is answered {reply.reason}"] += 1
            return
        self.world.fired["changes"] += 1
        if path == PUT_GROUP:
            self.version = max(self.version, number)
        else:
            self.groups.add(f"g{number}")

    def check(self, member: Member) -> None:
        """L2, of a new master, and of all members at the end."""
        version = member.store.groups.find(SET_GROUP).version
        if version < self.version:
            self.world.say("L2", f"{member.name} has version {version} of the settings, and {self.version} was answered")
        lacking = sorted(group for group in self.groups if member.store.topics.find(retry_topic(group)) is None)
        if lacking:
            self.world.say("L2", f"{member.name} lacks topics that were answered, of {lacking[:5]}")


class Reader:
    """See the module's docstring."""

    def __init__(self, world: FailoverWorld, number: int) -> None:
        self.world, self.name = world, f"r{number}"
        self.queue = number % QUEUES
        self.next = 0
        world.at(world.rng.uniform(0, POLL_EVERY_MS), self.poll)

    def poll(self) -> None:
        """One read."""
        world, rng = self.world, self.world.rng
        if world.is_over:
            return
        world.at(POLL_EVERY_MS * rng.uniform(0.5, 1.5), self.poll)
        member = rng.choice(world.members)
        is_there = member.is_up and member.server is not None and member.paused_until_ms <= world.now_ms
        if not is_there or (member.name, "clients") in world.cut or ("clients", member.name) in world.cut:
            return
        try:
            result = member.store.read(TOPIC, self.queue, self.next, rng.choice((1, 7, 64)), 1 << 20)
        except CorruptLogError:
            world.fired["damage met by a reader"] += 1
            return
        if result.status is not ReadStatus.FOUND:
            return
        world.fired["read on a master" if member.store.is_leading else "read on a slave"] += 1
        call = world.history.invoke(self.name, "poll", topic=TOPIC, queue=self.queue, offset=self.next)
        call.ok(records=records_of(world.run, result), next=result.next_offset, member=member.name)
        self.next = result.next_offset


def records_of(run: str, result: object) -> list[list[object]]:
    """What the checker wants to know of the records that were read."""
    data = b"".join(region.file.read(region.offset, region.size_bytes) for region in result.regions)  # type: ignore[attr-defined]
    offsets = range(result.first_offset, result.first_offset + result.record_count)  # type: ignore[attr-defined]
    places = zip(result.starts.tolist(), result.sizes.tolist(), offsets, strict=True)  # type: ignore[attr-defined]
    return [seen_of(run, offset, data[start : start + size]) for start, size, offset in places]


def scan_of(run: str, store: Store) -> list[dict[str, object]]:
    """All that a store serves. Raises CorruptLogError."""
    queues: list[dict[str, object]] = []
    for queue in range(QUEUES):
        start, end = store.queue_range(TOPIC, queue)
        at, records = start, []
        while at < end:
            result = store.read(TOPIC, queue, at, 100, 1 << 20)
            if result.status is not ReadStatus.FOUND:
                break
            records += records_of(run, result)
            at = result.next_offset
        queues.append({"topic": TOPIC, "queue": queue, "min": start, "end": end, "records": records})
    return queues
