"""What a push consumer does besides listening, in steps: subscriptions, the topic of retries, giving back. Both flavours drive them.

    Wanted (topic, tags, listener) ──▶ ConsumerSteps.subscribe ──▶ ListenedPulls: pulls and commits ──▶ PushState: runs, results
                                                                        ▲ lowest open offset ◀──────────────┘
    BackCall ──▶ SendBack

A topic that is deleted, or made again, is subscribed again by itself: nobody calls `poll` who could be told. What needs an operator is
logged, once a minute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from ._consumer_steps import ConsumerSteps
from ._filters import NO_FILTER, MessageFilter
from ._group_looks import LOOK_TIMEOUT_S, GroupLooks
from ._local_offsets import LocalOffsets, StoredOffset, in_runs, instance_here, of_runs
from ._loops import Loop
from ._message import Message
from ._offset_calls import subscribed_queues
from ._outages import Outages
from ._pull_logic import PullOptions, PullState, RoomOf, Ticket
from ._push_backs import BackCall
from ._push_options import PushOptions
from ._push_results import Listener
from ._push_state import Overdue, PushState
from ._retry import CALL
from ._seldom import SaidSeldom
from ._send_back import BackPayload, retry_topic_steps
from ._steps import Block, Steps
from ._types import MessageQueue, Route
from .errors import (
    ConfigurationError,
    IllegalFilterError,
    ProtomqError,
    TopicNotFoundError,
    TopicRecreatedError,
    UnsupportedError,
)
from .wire.topics import TopicClass, class_of, dead_letter_topic, retry_topic

logger = logging.getLogger("protomq")

LOOK_S: Final = 1.0
"""Between two looks at what is consumed."""
RETRY_TOPIC_PAUSE_MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A topic, and who listens to it."""

    topic: str
    listener: Listener
    tags: tuple[str, ...] = ()
    filter: MessageFilter = NO_FILTER


class ListenedPulls(PullState):
    """Pulls of a push consumer: what is finished is said by its listeners, not by the next `poll`."""

    def __init__(self, options: PullOptions) -> None:
        super().__init__(options)
        self.lowest_open: Callable[[MessageQueue], int | None] = lambda _: None
        self.moved: Callable[[MessageQueue], None] = lambda _: None
        """What is here of a queue is not what comes next."""
        self.done_behind: Callable[[MessageQueue], set[int]] = lambda _: set()
        """Broadcast: what is done behind the lowest that is open."""
        self.forked: Callable[[MessageQueue], None] = lambda _: None
        """Other messages may stand at offsets of the queue that have not come yet."""
        self.room_of: RoomOf | None = None

    def take_parts(
        self, count_max: int, *, one_queue: bool = False, room_of: RoomOf | None = None
    ) -> list[tuple[MessageQueue, list[Message]]]:
        """See PullState.take_parts; no more than the consumer's bounds leave room for."""
        return super().take_parts(count_max, one_queue=one_queue, room_of=room_of or self.room_of)

    def answered(self, ticket: Ticket, payload: bytes, now_s: float) -> None:
        """See PullState.answered."""
        log_epoch = self.log_epoch(ticket.queue)
        super().answered(ticket, payload, now_s)
        if self.log_epoch(ticket.queue) != log_epoch:
            # That the logs agree up to what was asked for says nothing of what is done behind it.
            self.forked(ticket.queue)

    def follow_reset(self, queue: MessageQueue, queue_offset: int, reset_epoch: int) -> None:
        """See PullState.follow_reset; what is here of the queue is forgotten, as the group's new offset says."""
        before = self._queues.get(queue)
        is_new = before is not None and before.reset_epoch != reset_epoch
        super().follow_reset(queue, queue_offset, reset_epoch)
        if is_new:
            self.moved(queue)

    def follow_kept(self, queue: MessageQueue, queue_offset: int) -> bool:
        """See PullState.follow_kept; what is here of the queue is forgotten where it goes on elsewhere."""
        goes = super().follow_kept(queue, queue_offset)
        if goes:
            self.moved(queue)
        return goes

    def follow_fork(self, queue: MessageQueue, queue_offset: int, log_epoch: int) -> None:
        """See PullState.follow_fork; what is here of the queue is forgotten, and what is open before the fork comes again."""
        position, lowest = self.position(queue), self.lowest_open(queue)
        assert position is not None
        offset = queue_offset if lowest is None else min(queue_offset, lowest)
        self.forked(queue)
        super().follow_fork(queue, queue_offset if position <= queue_offset else offset, log_epoch)
        if position > queue_offset:
            self.moved(queue)

    def user_came_back(self, loop: Loop | None = None) -> None:
        """Says nothing of what was handed out."""
        self._handed_out.clear()

    def to_commit(self, *, safe_only: bool) -> dict[MessageQueue, int]:
        """See PullState.to_commit; up to the lowest message that is open, whatever `safe_only`."""
        for queue, state in self._queues.items():
            lowest = self.lowest_open(queue)
            state.safe_position = state.position if lowest is None else lowest
        return super().to_commit(safe_only=True)

    def where(self) -> dict[MessageQueue, StoredOffset]:
        """What `to_commit` says, of all queues."""
        stands = {}
        for queue in self._queues:
            done = self.done_behind(queue)
            stands[queue] = self.stands_at(queue, self.lowest_open(queue), done)
        return {queue: offset for queue, offset in stands.items() if offset is not None}

    def stands_at(self, queue: MessageQueue, lowest_open: int | None, done: Iterable[int]) -> StoredOffset | None:
        """The same of one queue; None: it is not known where it stands.

        `lowest_open`: its lowest message that is not done; `done`: what is done behind it.
        """
        state = self._queues.get(queue)
        if state is None or state.is_gone:
            return None
        offset = state.position if lowest_open is None else lowest_open
        if offset is None:
            return None
        return StoredOffset(offset, state.incarnation, state.log_epoch, in_runs(one for one in done if one > offset))

    def rewind(self) -> None:
        """What was handed out is with listeners."""


class PushSteps:
    """One consumer. Calls come from whoever polls, but for `back_steps` and what follows it."""

    def __init__(
        self,
        options: PushOptions,
        consumer: ConsumerSteps,
        state: PushState,
        wanted: dict[str, Wanted],
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._consumer = consumer
        self._state = state
        self._wanted = wanted
        self._clock = clock
        self._seldom = SaidSeldom(clock)
        self._outages = Outages(clock)
        self._group_looks: GroupLooks | None = None
        if options.broadcast or (options.orderly and options.attempts_max is None):
            self._group_looks = GroupLooks(options.group, clock)
        self._file: LocalOffsets | None = None
        self._stored: dict[MessageQueue, StoredOffset] = {}
        """Of the file, until the queue comes."""
        self._saved: dict[MessageQueue, StoredOffset] = {}
        self._left: dict[MessageQueue, StoredOffset] = {}
        """Broadcast: where the consumer stood in queues that went, as those of a broker that is away."""
        self._next_save_s = 0.0
        self._floors: dict[MessageQueue, int | None] = {}
        """Of queues that went: the lowest message that was not done."""
        self._subscribed: dict[str, Wanted] = {}
        self._awaited: set[str] = set()
        """Topics of dead letters that do not exist yet."""
        self._retry_brokers: set[str] = set()
        self._retry_pause_s = LOOK_S
        self._next_retry_s = 0.0
        self._next_look_s = 0.0

    # -- what is consumed ------------------------------------------------------------------------------------------------

    def start(self) -> Steps[None]:
        """Subscribes to all that is wanted. Raises what a subscription raises; retries that cannot be had yet are looked for later."""
        if not self._wanted:
            raise ConfigurationError("nothing to consume: say on(topic) or subscribe(topic, listener) first")
        if self._options.broadcast:
            instance = instance_here(self._options.instance, os.environ)
            file = LocalOffsets(self._options.offset_folder, self._options.group, instance)
            self._stored = yield Block(file.open)
            self._file = file
            if not self._options.resume:
                self._stored = {}
        for wanted in list(self._wanted.values()):
            yield from self._subscribe(wanted)
            yield from self._consumer.raise_refusal()
        yield from self._follow_retries()
        yield from self._follow_group(self._consumer.options.request_timeout_s)
        yield from self._consumer.raise_refusal()
        self._next_save_s = self._clock() + self._options.commit_interval_s
        self._next_look_s = self._clock() + LOOK_S

    def wants_look(self) -> bool:
        """Whether `look` has something to do."""
        return self._clock() >= self._next_look_s

    def follow_resets(self) -> Steps[None]:
        """The consumer was suspended: what it has may have been skipped meanwhile."""
        return self._consumer.follow_resets()

    def look_now(self) -> None:
        """Somebody wants something else."""
        self._next_look_s = 0.0

    def look(self) -> Steps[None]:
        """Subscribes to what has come, and takes up the retries of brokers that have come."""
        self._next_look_s = self._clock() + LOOK_S
        # Also where another subscription has come in its place: what is here of the topic was let through by the old filter.
        for topic, subscribed in list(self._subscribed.items()):
            if self._wanted.get(topic) is not subscribed:
                del self._subscribed[topic]
                yield from self._consumer.unsubscribe(topic)
        for wanted in list(self._wanted.values()):
            if self._subscribed.get(wanted.topic) is not wanted:
                try:
                    yield from self._subscribe(wanted)
                except ProtomqError as error:
                    self._say_trouble(error, wanted.topic)
        if self._clock() >= self._next_retry_s:
            yield from self._follow_retries()
        yield from self._follow_group()
        if self._file is not None and self._clock() >= self._next_save_s:
            yield from self.save()

    def save(self, *, is_last: bool = False) -> Steps[None]:
        """Broadcast: writes where the consumer is into its file. A failure is logged. The next one makes up for it, if there is one."""
        self._next_save_s = self._clock() + self._options.commit_interval_s
        where = cast(ListenedPulls, self._consumer.state).where()
        # A queue whose broker is away stays where it was.
        offsets = self._stored | self._saved | self._left | where
        if self._file is None or offsets == self._saved:
            return
        try:
            yield Block(partial(self._file.save, offsets))
        except OSError as error:
            if is_last:
                said = "what was done since they were written last comes again, here"
                logger.error("offsets are not written to %s: %s: %s", self._file.path, said, error)
            elif self._seldom.is_due("offsets"):
                logger.error("offsets are not written to %s, trying again: %s", self._file.path, error)
        else:
            self._saved = offsets

    def close(self) -> None:
        """Somebody else may have the file."""
        if self._file is not None:
            self._file.close()

    def take_trouble(self, error: ProtomqError) -> list[MessageQueue]:
        """What pulls have run into. Queues that are gone: nothing of them counts any more. Raises what ends the consumer."""
        if error is self._consumer.refusal:
            raise error  # It would stay a consumer that consumes nothing, and nobody would hear of it.
        topic = error.metadata.get("topic", "")
        gone: list[MessageQueue] = []
        if isinstance(error, TopicRecreatedError | TopicNotFoundError):
            gone = self._consumer.state.gone_queues(topic)
            # It may take a while until the topic is subscribed to again: till then listeners would get what waits of the old one.
            self._consumer.state.drop_answers(gone)
        if not gone:
            self._say_trouble(error, topic)
        else:
            logger.warning("topic %s was deleted, or made again: consuming what it is now from its beginning", topic)
            self._subscribed.pop(topic, None)
            if topic == retry_topic(self._options.group):
                self._retry_brokers.clear()
            self.look_now()
        return gone

    def gave_away(self, queues: Iterable[MessageQueue]) -> None:
        """These queues go: what is here of them is forgotten, but for where the commit that comes now is to stand."""
        given = list(queues)
        for queue in given:
            done = self._state.done_behind(queue)
            lowest = self._floors[queue] = self._state.lowest_open(queue)
            stood = cast(ListenedPulls, self._consumer.state).stands_at(queue, lowest, done)
            if stood is not None and self._options.broadcast:
                self._left[queue] = stood
        self._state.drop(given)

    def lost(self, queues: Collection[MessageQueue]) -> None:
        """These queues are gone: nothing of them counts any more."""
        self._state.drop(queues)
        for queue in queues:
            self._floors.pop(queue, None)
            self._stored.pop(queue, None)
            self._saved.pop(queue, None)
            self._left.pop(queue, None)

    def came(self, queues: Iterable[MessageQueue]) -> None:
        """These queues came. One that was here before goes on with what was not done when it went: no broker has that of a broadcast."""
        pulls = self._consumer.state
        for queue in queues:
            left = self._left.pop(queue, None)
            stored = self._stored.pop(queue, None)
            was = left or stored
            if was is not None and was.incarnation:
                self._state.remember_done(queue, of_runs(was.done))
            if was is not None:
                pulls.start_all(
                    [queue],
                    {queue.queue_id: was.queue_offset},
                    {},
                    was.incarnation,
                    log_epoch=was.log_epoch,
                )
            floor = self._floors.pop(queue, None)
            if floor is not None and not pulls.lacks_position(queue):
                pulls.move_to(queue, floor)

    def lowest_open(self, queue: MessageQueue) -> int | None:
        """See PushState.lowest_open; of a queue that went, as it was then."""
        if queue in self._floors:
            return self._floors[queue]
        return self._state.lowest_open(queue)

    def say_overdue(self, overdue: Iterable[Overdue]) -> None:
        """Listeners that were not done in time."""
        for one in overdue:
            outcome = "in order, its queue waits for it" if one.keeps else "given back, they come again; it is still running"
            logger.warning(
                "%s has had %d message(s) for more than %g s, the first is %r: %s",
                one.listener.name, len(one.messages), self._options.consume_timeout_s, one.messages[0], outcome,
            )  # fmt: skip

    def _subscribe(self, wanted: Wanted) -> Steps[None]:
        topic = wanted.topic
        if topic in self._awaited:
            self._consumer.expect_all_of(topic)
        try:
            routes: list[Route] = yield from self._consumer.subscribe(topic, wanted.tags, wanted.filter)
        except TopicNotFoundError:
            if class_of(topic) is not TopicClass.DEAD_LETTER:
                raise
            # A broker makes it with the first dead letter, and `look` finds it.
            if topic not in self._awaited:
                text = "topic %s does not exist; the consumer waits until the first dead letter makes it: is the name right?"
                logger.warning(text, topic)
            self._awaited.add(topic)
            return
        self._awaited.discard(topic)
        self._subscribed[wanted.topic] = wanted
        for text in self._consumer.doubts(routes):
            logger.warning("%s", text)

    def _follow_retries(self) -> Steps[None]:
        """Consumes %RETRY%group at all brokers of what is consumed."""
        if self._options.broadcast:
            return
        topic = retry_topic(self._options.group)
        queues = subscribed_queues((), self._consumer.subscriptions)
        brokers = {queue.broker_name: queue.topic for queue in queues if queue.topic != topic}
        missing = set(brokers) - self._retry_brokers
        if not missing:
            return
        timeout_s = self._consumer.options.request_timeout_s
        try:
            yield from retry_topic_steps(self._options.group, brokers, timeout_s)
            yield from self._consumer.subscribe(topic, (), NO_FILTER)
        except ProtomqError as error:
            self._next_retry_s = self._clock() + self._retry_pause_s
            self._retry_pause_s = min(self._retry_pause_s * 2, RETRY_TOPIC_PAUSE_MAX_S)
            if self._seldom.is_due(("retries", error.reason)):
                logger.warning("retries of group %s are not consumed yet, trying again: %s", self._options.group, error)
        else:
            self._retry_brokers |= set(brokers)
            self._retry_pause_s = LOOK_S

    def _follow_group(self, timeout_s: float = LOOK_TIMEOUT_S) -> Steps[None]:
        """Obeys what the group's settings say of consumers like this one."""
        looks = self._group_looks
        if looks is None or looks.due_in_s(self._clock()):
            return
        queues = subscribed_queues((), self._consumer.subscriptions)
        if self._options.broadcast:
            yield from looks.look_at_broadcast(queues, timeout_s)
            self._consumer.state.is_shut = looks.is_shut
        else:
            yield from looks.look(queues, timeout_s)
            self._state.retry_count_max = looks.retry_count_max

    def _say_trouble(self, error: ProtomqError, topic: str) -> None:
        if self._seldom.is_due((error.reason, topic)):
            effect = ""
            if isinstance(error, IllegalFilterError | UnsupportedError):
                effect = "; nothing of the topic is consumed: subscribe to it with another filter"
            logger.error("group %s, topic %s: %s%s", self._options.group, topic or "?", error, effect)

    # -- what goes back --------------------------------------------------------------------------------------------------

    def back_steps(self, call: BackCall) -> Steps[None]:
        """Gives messages back to their broker; a call that is made again has the same octets."""
        if call.payload is None:
            failed = [(back.message, back.fields) for back in call.backs]
            alike_brokers = self._state.backs.alike_brokers
            call.payload = BackPayload(self._options.group, call.broker_name, failed, self._consumer.state.incarnation, alike_brokers)
        topic = call.backs[0].message.queue.topic
        answer = yield from call.payload.call_steps(topic, self._options.request_timeout_s, CALL)
        for back, result in zip(call.backs, answer.results, strict=False):
            # The broker counts retries: that these are spent is known only here.
            if result.dead_letter and self._seldom.is_due(("dead letter", back.message.topic)):
                logger.warning(
                    "%r is a dead letter, in %s: %s (a further one is not logged for a minute)",
                    back.message, dead_letter_topic(self._options.group), back.fields.get("error", ""),
                )  # fmt: skip

    def back_done(self, call: BackCall) -> None:
        """The broker has them."""
        self._outages.answered(f"broker {call.broker_name}", call.backs[0].message.topic)
        self._state.backs.done(call, self._clock())
        self._state.given_back(call.backs)

    def back_failed(self, call: BackCall, error: ProtomqError) -> None:
        """It has not, or nobody knows: they go again, unless it is for good."""
        refused = self._state.backs.failed(call, error, self._clock())
        if error.retriable:
            self._outages.failed(f"broker {call.broker_name}", call.backs[0].message.topic, error)
        for back in refused:
            logger.error(
                "%r of group %s failed with %r and cannot be given back, it does not come again: %s %s",
                back.message, self._options.group, back.fields.get("error", ""), error.reason, error,
            )  # fmt: skip
        self._state.given_back(refused)
