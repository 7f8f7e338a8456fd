"""FakeGroup: listeners of a push consumer without a broker. Retries, delays and dead letters come as a broker makes them come, by a clock
that jumps.

    consumer = app.orders.consumer             # a PushConsumer or AsyncPushConsumer, not started
    group = FakeGroup(consumer)
    group.send("orders", b"poison")
    group.deliver()                            # calls the listeners, in this thread
    group.advance(10)                          # the first retry is due
    group.deliver()
    assert group.dead_letters[0].error == "ValueError: ..."
    group.crash()                              # what was not committed comes again

    first, second = group.members[0], group.join()
    group.queue_ids(second, "orders")          # its share, by the allocation of the consumer
    group.crash(second)                        # the first one has all queues again, and what the second had not committed

What listeners say is judged by the code that a real consumer runs. Tags are compared; SQL92, CEL and WebAssembly are the broker's, and let
everything through here.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from protomq._async_push_consumer import AsyncPushConsumer
from protomq._checks import QUEUE_ID_MAX, check_count, check_topic, loop_runs
from protomq._group_admin import RETRY_COUNT_MAX as GROUP_RETRY_COUNT_MAX
from protomq._message import Message
from protomq._producer_options import ProducerOptions
from protomq._push_consumer import PushConsumer
from protomq._push_results import Failure, Listener
from protomq._push_state import NOBODY, Run, Work, judge_in_order
from protomq._push_steps import Wanted
from protomq._push_work import Worker
from protomq._seldom import SaidSeldom
from protomq._send_back import DELAY_MAX_S, error_text
from protomq._send_core import SendCore
from protomq._transit import NO_OFFSET, MessageOrigin
from protomq._types import Body, MessageQueue
from protomq.allocation import GroupMember
from protomq.body_codecs import encode_body
from protomq.errors import ConfigurationError, QueueNotFoundError, WrongTypeError
from protomq.wire.hashing import sharded_index
from protomq.wire.record import (
    FLAG_KIND_COPY,
    FLAG_TRANSIT,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    STORE_TIME_MS_AT,
    RecordTemplate,
    encode_front,
    encode_varint,
)
from protomq.wire.topics import dead_letter_topic, retry_topic, why_no_topic

from .fakes import FakeClock

BROKER_NAME: Final = "fake"
RETRY_DELAYS_S: Final = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The broker's delay levels from level 3 on: the delays of a group that nobody has set up."""
RETRY_COUNT_MAX: Final = 16
QUEUE_COUNT: Final = 8
"""Of a topic, as a broker makes it."""
ADVANCE_MAX_S: Final = 10 * 366 * 86_400
DELAY_LEVELS_S: Final = (1, 5, *RETRY_DELAYS_S)
_RETRIES: Final = Wanted("", NOBODY)
"""The subscription to the group's retries. Each goes to the listener of its topic."""


class DeadLetter(NamedTuple):
    """A message that became one, as it stands among the dead letters of its group, and why its last delivery failed."""

    message: Message
    error: str


@dataclass(slots=True, eq=False)
class _Waiting:
    """A message that is to be delivered. `number`: in the order in which they came. It has its offset from the moment when it is due."""

    due_ms: int
    number: int
    message: Message
    is_kept: bool = False
    """Hooks have said that the program gets it; they are asked when a consumer pulls it."""


class FakeMember:
    """A member of a FakeGroup.

    Attributes:
        name: "member-1" and so on, as they joined.
        consumer: whose listeners get its messages.
        done: what these have done, in order.
    """

    def __init__(self, name: str, consumer: PushConsumer | AsyncPushConsumer) -> None:
        self.name = name
        self.consumer = consumer
        self.done: list[Message] = []
        self._uncommitted: list[_Waiting] = []
        self._as_member = GroupMember(name, consumer.options.machine_room)
        self._starts()

    def __repr__(self) -> str:
        return f"FakeMember({self.name!r})"

    def _starts(self) -> None:
        """What its program asked of a consumer that ran before is over."""
        self.consumer._stop_wanted.clear()

    @property
    def _is_stopping(self) -> bool:
        return self.consumer._stop_wanted.is_set()

    def _subscription(self, queue: MessageQueue) -> Wanted | None:
        """By which it gets messages of a queue; None: it wants none of them. Retries come while it has listened to anything."""
        consumer = self.consumer
        if self._is_stopping:
            return None
        if queue.topic == retry_topic(consumer.group):
            return _RETRIES if consumer._listeners else None
        return consumer._wanted.get(queue.topic)


class _Holder(NamedTuple):
    """Who gets the messages of a queue, and by which subscription."""

    member: FakeMember
    wanted: Wanted

    def may_begin(self) -> bool:
        return not self.member.consumer.is_suspended

    def listener_of(self, message: Message) -> Listener:
        if self.wanted is _RETRIES:
            return self.member.consumer._state.listener_of(message)
        return self.wanted.listener

    def is_same(self, other: _Holder | None) -> bool:
        return other is not None and self.member is other.member and self.wanted is other.wanted


class FakeGroup:
    """A broker's part for the members of a group, which share queues out as real ones do. One thread."""

    def __init__(
        self,
        consumer: PushConsumer | AsyncPushConsumer,
        *,
        retry_count_max: int | None = None,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        delay_levels_s: Sequence[float] = DELAY_LEVELS_S,
        clock: FakeClock | None = None,
        queue_count: int = QUEUE_COUNT,
    ) -> None:
        """`consumer`: of the first member; `join` makes others. `queue_count`: of each topic.

        `retry_count_max` and `retry_delays_s`: the settings of the group (`Admin.set_group`). None: not set. That means 16, and no limit
        in order. `delay_levels_s`: those of the broker (`delay.levels`), for listeners that name one. Beyond the last, the last counts.
        """
        _check_consumer(consumer)
        check_count("queue_count", queue_count, 1, QUEUE_ID_MAX + 1)
        if retry_count_max is not None:
            check_count("retry_count_max", retry_count_max, 0, GROUP_RETRY_COUNT_MAX)
        _check_spans("retry_delays_s", retry_delays_s, "a group has one delay of a retry at least")
        _check_spans("delay_levels_s", delay_levels_s, "a broker has one delay level at least")
        if clock is not None and not isinstance(clock, FakeClock):
            raise WrongTypeError(f"clock is a FakeClock, not {clock!r}")
        self.clock = clock or FakeClock()
        self.done: list[Message] = []
        """In the order in which their listeners returned."""
        self.dead_letters: list[DeadLetter] = []
        self.members = [FakeMember("member-1", consumer)]
        """Those that are there, in the order in which they joined."""
        self._member_number = 1
        self._queue_count = queue_count
        self._core = SendCore(ProducerOptions())
        """Checks what is sent, as a producer does."""
        self._retry_count_max = retry_count_max
        self._retry_delays_s = retry_delays_s
        self._delay_levels_s = delay_levels_s
        self._sequence = itertools.count(1)
        self._offsets: dict[MessageQueue, itertools.count[int]] = {}
        self._later: list[tuple[int, int, _Waiting]] = []
        """A heap of those that are not due yet, with `due_ms` and `number`. They stand in no queue."""
        self._stored: dict[MessageQueue, deque[_Waiting]] = {}
        """Those that are to be delivered, in the order of their offsets."""
        self._suspended_until_ms: dict[MessageQueue, int] = {}
        self._holders: dict[MessageQueue, _Holder] = {}
        """Of queues that somebody has; see `_follow_members`."""
        self._commit_interval_ms = round(consumer.options.commit_interval_s * 1000)
        self._next_commit_ms = self.clock.monotonic_ms() + self._commit_interval_ms

    def send(
        self,
        topic: str,
        body: Body,
        *,
        key: str = "",
        tag: str = "",
        properties: Mapping[str, str] | None = None,
        sharding_key: str | None = None,
        queue_id: int | None = None,
        delay_s: float = 0.0,
    ) -> Message:
        """A message that is to be delivered, at once or after a delay; as its listener gets it. Refuses what a producer or broker does.

        Without `queue_id` it goes to the queue of its sharding key, as a producer would send it; without both, to queue 0.
        """
        if why := why_no_topic(check_topic(topic)):
            raise ConfigurationError(why)
        if queue_id is not None:
            self._check_queue(topic, check_count("queue_id", queue_id, 0, QUEUE_ID_MAX))
        _check_span("delay_s", delay_s, DELAY_MAX_S)
        self._core.prepare(body, None if key == "" else key, (), tag, properties, sharding_key)
        if queue_id is None:
            queue_id = sharded_index(sharding_key, self._queue_count) if sharding_key else 0
        number = next(self._sequence)
        body, properties = encode_body(body, properties)
        front = encode_front((key,) if key else (), tag, properties, sharding_key or "")
        record = RecordTemplate(topic, 1, 0).encode(
            body, number, self.clock.now_ms(), key=key, tag=tag, sharding_key=sharding_key or "", front=front
        )
        queue = MessageQueue(topic, BROKER_NAME, queue_id)
        message = self._stamped(record, queue) if not delay_s else self._delayed(Message.from_record(record, queue), delay_s)
        self._wait(message, delay_s)
        return message

    def _check_queue(self, topic: str, queue_id: int) -> None:
        """Raises what a broker answers with."""
        if queue_id >= self._queue_count:
            raise QueueNotFoundError(
                f"topic {topic!r} has queues 0 to {self._queue_count - 1}, not {queue_id}; FakeGroup(queue_count=...) makes more",
                metadata={"topic": topic, "broker_name": BROKER_NAME, "queue_id": str(queue_id)},
            )

    def advance(self, seconds: float) -> None:
        """Time passes: what falls due in it is delivered by the next `deliver`. Every 5 s (`commit_interval_s`) the member commits."""
        _check_span("seconds", seconds, ADVANCE_MAX_S)
        self.clock.advance(round(seconds * 1000))
        self._store_what_is_due()
        now_ms = self.clock.monotonic_ms()
        if now_ms >= self._next_commit_ms:
            self.commit()
            self._next_commit_ms = now_ms - now_ms % self._commit_interval_ms + self._commit_interval_ms

    def commit(self) -> None:
        """All members commit what they have finished, as they do when they stop: a crash repeats nothing of it."""
        for member in self.members:
            member._uncommitted.clear()

    def join(self, consumer: PushConsumer | AsyncPushConsumer | None = None) -> FakeMember:
        """Another member comes, and gets its share; the others commit what they give away. None: with the consumer of the first member."""
        first = self.members[0].consumer
        joining = first if consumer is None else consumer
        _check_consumer(joining)
        if joining.group != first.group:
            raise ConfigurationError(f"a member of {joining.group!r} cannot join {first.group!r}")
        if joining.options.broadcast or first.options.broadcast:
            raise ConfigurationError("each member of a broadcasting group gets all messages: make a FakeGroup for each")
        self._follow_members()
        going_on = [member for member in self.members if not member._is_stopping]
        self._member_number += 1
        member = FakeMember(f"member-{self._member_number}", joining)
        self.members = [*going_on, member]
        self._follow_members()
        return member

    def leave(self, member: FakeMember) -> None:
        """A member stops: it commits what it has finished, and the others take its queues over."""
        self._check_member(member)
        if len(self.members) == 1:
            raise ConfigurationError("the last member cannot leave: who would be given what waits?")
        self.members.remove(member)
        self._follow_members()

    def crash(self, member: FakeMember | None = None) -> list[Message]:
        """A member dies, and the others take over at its last commit: these messages are delivered again, beside those that wait.

        The last one is followed by one like it at once. None: the only one. Among them are messages that failed: the retry that the broker
        has made of one comes, too. That is what "at least once" means.
        """
        self._follow_members()
        if member is None:
            if len(self.members) > 1:
                raise ConfigurationError(f"crash(member): say which of {len(self.members)} members, such as group.members[1]")
            member = self.members[0]
        self._check_member(member)
        again, member._uncommitted = member._uncommitted, []
        self._put_back(again)
        for queue in [queue for queue, holder in self._holders.items() if holder.member is member]:
            self._forget(queue)
        if len(self.members) > 1:
            self.members.remove(member)
        else:
            member._starts()
        self._follow_members()
        return [one.message for one in again]

    def queue_ids(self, member: FakeMember, topic: str) -> list[int]:
        """The queues of a topic that a member has now."""
        self._check_member(member)
        holders = [(queue.queue_id, self._holder(queue)) for queue in self._queues(topic)]
        return [queue_id for queue_id, holder in holders if holder is not None and holder.member is member]

    @property
    def waiting(self) -> list[Message]:
        """Messages that are not delivered yet, the next one first."""
        return [one.message for one in self._in_order()]

    @property
    def next_due_in_s(self) -> float:
        """Until the next one is; infinity if none waits for its time: where nobody listens, or all are suspended, time changes nothing."""
        self._store_what_is_due()
        self._follow_members()
        firsts = [stored[0] for stored in self._stored.values() if stored] + [one for *_, one in self._later]
        holders = {queue: holder for queue, holder in self._holders.items() if holder.may_begin()}
        due_ms = min((self._due_ms(one) for one in firsts if one.message.queue in holders), default=math.inf)
        return max(due_ms - self.clock.monotonic_ms(), 0) / 1000

    def _check_listeners(self) -> None:
        """Raises ConfigurationError where nothing could ever be delivered."""
        if not any(member.consumer._listeners for member in self.members):
            raise ConfigurationError(
                f"no member of group {self.members[0].consumer.group!r} has a listener: subscribe one, or import the module that does"
            )

    def deliver(self) -> int:
        """Gives all that is due to listeners, and what falls due at once by what they say. How many messages were delivered.

        An async test writes `await group.deliver_async()`.
        """
        if loop_runs():
            raise ConfigurationError("deliver() has an event loop of its own, and one runs here: await group.deliver_async()")
        self._check_listeners()
        count = 0
        with asyncio.Runner() as runner:
            while (found := self._next_batch()) is not None:
                member, listener, batch = found
                count += len(batch)
                run, worker, settle = self._begun(member, listener, batch)
                with self._comes_again(batch):
                    if listener.is_coroutine:
                        runner.run(worker.work_async(run))
                    else:
                        worker.work(run)
                settle()
        return count

    async def deliver_async(self) -> int:
        """`deliver` in the event loop that runs."""
        self._check_listeners()
        count = 0
        while (found := self._next_batch()) is not None:
            member, listener, batch = found
            count += len(batch)
            run, worker, settle = self._begun(member, listener, batch)
            with self._comes_again(batch):
                if listener.is_coroutine:
                    await worker.work_async(run)
                else:
                    worker.work(run)
            settle()
        return count

    # --------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _comes_again(self, batch: Sequence[_Waiting]) -> Iterator[None]:
        """Where the delivery is cancelled, or interrupted, nobody has done it."""
        try:
            yield
        except BaseException:
            self._put_back(batch)
            raise

    def _put_back(self, batch: Sequence[_Waiting]) -> None:
        """They come again, as they came at first."""
        for one in batch:
            one.message._forget_assigned()
            one.is_kept = False
            self._stored[one.message.queue].append(one)
        for queue in {one.message.queue for one in batch}:
            self._stored[queue] = deque(sorted(self._stored[queue], key=lambda one: one.message.queue_offset))

    def _due_ms(self, one: _Waiting) -> int:
        """An orderly queue waits as a whole."""
        return max(one.due_ms, self._suspended_until_ms.get(one.message.queue, 0))

    def _place_in_order(self, one: _Waiting) -> tuple[int, int, int]:
        return self._due_ms(one), one.due_ms, one.number

    def _in_order(self) -> list[_Waiting]:
        self._store_what_is_due()
        stored = itertools.chain.from_iterable(self._stored.values())
        return sorted([*stored, *(one for *_, one in self._later)], key=self._place_in_order)

    def _queues(self, topic: str) -> list[MessageQueue]:
        """Of a topic. A topic of retries has one."""
        count = 1 if self._is_of_retries(topic) else self._queue_count
        return [MessageQueue(topic, BROKER_NAME, queue_id) for queue_id in range(count)]

    def _is_of_retries(self, topic: str) -> bool:
        return topic == retry_topic(self.members[0].consumer.group)

    def _holder(self, queue: MessageQueue) -> _Holder | None:
        """Who has a queue, by the members' allocation; one that is alone has all. None: nobody."""
        here = [_Holder(member, wanted) for member in self.members if (wanted := member._subscription(queue)) is not None]
        if len(self.members) == 1:
            return here[0] if here else None
        queues, as_members = self._queues(queue.topic), sorted(one.member._as_member for one in here)
        for one in here:
            if queue in one.member.consumer.options.allocation.share(one.member._as_member, queues, as_members):
                return one
        return None

    def _follow_members(self) -> None:
        """Those that were asked to stop commit and leave; the last one stays in the list. Who loses a queue commits what is done of it.

        That also holds where a member does so by itself, as it unsubscribes.
        """
        stopping = [member for member in self.members if member._is_stopping]
        for member in stopping:
            member._uncommitted.clear()
        self.members = [member for member in self.members if member not in stopping] or self.members[-1:]
        for queue in self._stored:
            had, holder = self._holders.get(queue), self._holder(queue)
            if had is not None and not had.is_same(holder):
                had.member._uncommitted = [one for one in had.member._uncommitted if one.message.queue != queue]
                self._forget(queue)
            if holder is not None:
                self._holders[queue] = holder

    def _forget(self, queue: MessageQueue) -> None:
        """Whoever has the queue next begins at its first message that is not done, at once, and counts tries from the beginning."""
        self._holders.pop(queue, None)
        self._suspended_until_ms.pop(queue, None)
        for one in self._stored[queue]:
            one.message._tries = 0  # An orderly member counts them itself.
            one.is_kept = False

    def _check_member(self, member: FakeMember) -> None:
        if member not in self.members:
            raise ConfigurationError(f"{member!r} is no member of this group, or is not any more")

    def _next_batch(self) -> tuple[FakeMember, Listener, list[_Waiting]] | None:
        """What one call of a listener gets, and of which member; messages that filters or hooks keep from it are left out."""
        self._store_what_is_due()
        self._follow_members()
        while (queue := self._next_queue()) is not None:
            listener, batch = self._batch_of(self._holders[queue], self._stored[queue])
            if listener is not None:
                return self._holders[queue].member, listener, batch
        return None

    def _batch_of(self, holder: _Holder, stored: deque[_Waiting]) -> tuple[Listener | None, list[_Waiting]]:
        """The first ones of a queue, for one listener. None: none of them is for its holder."""
        listener: Listener | None = None
        batch: list[_Waiting] = []
        try:
            while stored and (listener is None or len(batch) < (listener.batch_size or 1)):
                if not self._is_for(holder, stored[0]):
                    stored.popleft()
                    continue
                found = holder.listener_of(stored[0].message)
                if listener is not None and found is not listener:
                    break
                listener = found
                batch.append(stored.popleft())
        except BaseException:  # A hook ends the program: nobody has got them.
            stored.extendleft(reversed(batch))
            raise
        return listener, batch

    def _next_queue(self) -> MessageQueue | None:
        """The one whose first message is the next, of those whose holders may get one now."""
        now_ms = self.clock.monotonic_ms()
        found: list[tuple[tuple[int, int, int], MessageQueue]] = []
        for queue, stored in self._stored.items():
            holder = self._holders.get(queue)
            if stored and holder is not None and holder.may_begin() and self._due_ms(stored[0]) <= now_ms:
                found.append((self._place_in_order(stored[0]), queue))
        return min(found)[1] if found else None

    def _is_for(self, holder: _Holder, one: _Waiting) -> bool:
        """Whether the tags and hooks of its holder let it through. Hooks are asked once, as it is pulled."""
        if holder.wanted.tags and one.message.tag not in holder.wanted.tags:
            return False
        one.is_kept = one.is_kept or bool(holder.member.consumer._hooks.kept([one.message]))
        return one.is_kept

    def _begun(
        self, member: FakeMember, listener: Listener, batch: Sequence[_Waiting]
    ) -> tuple[Run, Worker, Callable[[], None]]:
        """What is to be worked on, and what is to be called then."""
        failed: list[tuple[Message, Failure]] = []

        def settle(run: Run, messages: Iterable[Message], failures: Iterable[Failure | None]) -> None:
            for message, failure in zip(messages, failures, strict=True):
                if failure is None:
                    run.done.append(message)
                else:
                    failed.append((message, failure))

        messages = deque(one.message for one in batch)
        options = member.consumer.options
        run = Run(Work(messages[0].queue, listener), listener, messages, len(batch), 0.0, options.orderly)
        comes_again = not options.broadcast
        worker = Worker(settle, SaidSeldom(self.clock.monotonic), comes_again=comes_again)
        return run, worker, lambda: self._ended(member, batch, run, failed, comes_again)

    def _ended(
        self, member: FakeMember, batch: Sequence[_Waiting], run: Run, failed: Sequence[tuple[Message, Failure]], comes_again: bool
    ) -> None:
        if member.consumer.options.orderly:
            done, batch = self._end_in_order(member, batch, failed)
        else:
            done = run.done
            if comes_again:
                for message, failure in failed:
                    self._give_back(message, failure)
        self.done += done
        member.done += done
        member._uncommitted += batch

    def _end_in_order(
        self, member: FakeMember, batch: Sequence[_Waiting], failed: Sequence[tuple[Message, Failure]]
    ) -> tuple[Sequence[Message], Sequence[_Waiting]]:
        """What is done, and those of the batch that do not come again."""
        by_message = {id(message): failure for message, failure in failed}
        messages = [one.message for one in batch]
        judged = judge_in_order(
            member.consumer.options, self._retry_count_max, messages, [by_message.get(id(message)) for message in messages]
        )
        for message, failure in judged.dead:
            self._give_back(message, failure)
        ended_count = len(batch) - len(judged.again)
        if judged.again:
            self._suspended_until_ms[batch[0].message.queue] = self.clock.monotonic_ms() + judged.delay_ms
        self._stored[batch[0].message.queue].extendleft(reversed(batch[ended_count:]))
        return judged.done, batch[:ended_count]

    def _give_back(self, message: Message, failure: Failure) -> None:
        attempt = message.attempt + 1
        count_max = RETRY_COUNT_MAX if self._retry_count_max is None else self._retry_count_max
        group = self.members[0].consumer.group
        if failure.is_dead_letter or attempt > count_max:
            dead = self._copy(message, dead_letter_topic(group), self._transit(message, attempt, failure.error))
            self._give_offset(dead)
            self.dead_letters.append(DeadLetter(dead, failure.error))
            return
        delay_s = self._retry_delays_s[min(attempt, len(self._retry_delays_s)) - 1]
        if "delay_ms" in failure.fields:
            delay_s = failure.fields["delay_ms"] / 1000
        elif "delay_level" in failure.fields:
            delay_s = self._delay_levels_s[min(failure.fields["delay_level"], len(self._delay_levels_s)) - 1]
        self._wait(self._copy(message, retry_topic(group), self._transit(message, attempt, failure.error), delay_s), delay_s)

    def _delayed(self, message: Message, delay_s: float) -> Message:
        """As the broker moves it into its queue when it is due. It was in none before."""
        origin = MessageOrigin(message.topic, message.queue.queue_id, None, self.clock.now_ms())
        return self._copy(message, message.topic, _transit(origin, 0, ""), delay_s)

    def _transit(self, message: Message, attempt: int, error: str) -> bytes:
        origin = message.origin or MessageOrigin(message.topic, message.queue_id, message.queue_offset, message.store_time_ms)
        return _transit(origin, attempt, error_text(error))

    def _copy(self, message: Message, topic: str, transit: bytes, delay_s: float = 0.0) -> Message:
        """As the broker moves a message into another topic, or into its own; after the delay, which is when it is stored there."""
        from protomq.v1.record_pb2 import Record

        before = Record.FromString(message.record)
        front = encode_front(before.keys, before.tag, before.properties, message.sharding_key)
        record = RecordTemplate(topic, message.producer_id, message.producer_epoch).encode(
            before.body, message.sequence, message.born_time_ms, key=message.key, tag=message.tag,
            sharding_key=message.sharding_key, front=front, flags=FLAG_KIND_COPY | FLAG_TRANSIT,
        )  # fmt: skip
        at = record.rindex(b"\x3a" + bytes([len(topic)]) + topic.encode())
        record = record[:at] + b"\x32" + encode_varint(len(transit)) + transit + record[at:]
        queue_id = message.queue.queue_id if topic == message.topic else 0
        return self._stamped(record, MessageQueue(topic, BROKER_NAME, queue_id), round(delay_s * 1000))

    def _stamped(self, record: bytes, queue: MessageQueue, later_ms: int = 0) -> Message:
        """The message, with what a broker stamps when it stores it, but for its offset."""
        stamped = bytearray(record)
        size = len(stamped)
        struct.pack_into("<I", stamped, size + QUEUE_ID_AT, queue.queue_id)
        struct.pack_into("<Q", stamped, size + STORE_TIME_MS_AT, self.clock.now_ms() + later_ms)
        return Message.from_record(bytes(stamped), queue, -1)

    def _give_offset(self, message: Message) -> None:
        """It is stored in its queue now."""
        message._queue_offset = next(self._offsets.setdefault(message.queue, itertools.count()))
        rest = bytearray(message._rest)
        struct.pack_into("<Q", rest, len(rest) + QUEUE_OFFSET_AT, message.queue_offset)
        message._rest = bytes(rest)

    def _wait(self, message: Message, delay_s: float) -> None:
        due_ms = self.clock.monotonic_ms() + round(delay_s * 1000)
        one = _Waiting(due_ms, next(self._sequence), message)
        self._stored.setdefault(message.queue, deque())
        heapq.heappush(self._later, (due_ms, one.number, one))
        self._store_what_is_due()

    def _store_what_is_due(self) -> None:
        now_ms = self.clock.monotonic_ms()
        while self._later and self._later[0][0] <= now_ms:
            *_, one = heapq.heappop(self._later)
            self._give_offset(one.message)
            self._stored[one.message.queue].append(one)


def _transit(origin: MessageOrigin, attempt: int, error: str) -> bytes:
    from protomq.v1.record_pb2 import Transit

    return Transit(
        origin_topic=origin.topic,
        origin_queue_id=origin.queue_id,
        origin_queue_offset=NO_OFFSET if origin.queue_offset is None else origin.queue_offset,
        first_store_time_ms=origin.store_time_ms,
        attempt=attempt,
        last_error=error,
    ).SerializeToString()


def _check_consumer(consumer: object) -> None:
    if not isinstance(consumer, PushConsumer | AsyncPushConsumer):
        hint = "; write consumer.make()" if hasattr(consumer, "make") else ""
        raise WrongTypeError(f"FakeGroup takes a PushConsumer or AsyncPushConsumer, not {consumer!r}{hint}")
    if consumer.is_running:
        raise ConfigurationError("this consumer runs: its listeners get messages of its brokers")


def _check_spans(name: str, given: object, why_empty: str) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise WrongTypeError(f"{name} is a list of seconds, not {given!r}")
    if not given:
        raise ConfigurationError(why_empty)
    for delay_s in given:
        _check_span(f"each of {name}", delay_s, DELAY_MAX_S)


def _check_span(name: str, value: object, most_s: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongTypeError(f"{name} is a number of seconds, not {value!r}")
    if not 0 <= value <= most_s:
        raise ConfigurationError(f"{name} is 0 to {most_s:,.0f} seconds, not {value}")
