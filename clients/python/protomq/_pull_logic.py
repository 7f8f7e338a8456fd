"""What a pull consumer decides: which queue to pull next, what to hand out, what to commit. No I/O, time handed in.

Both flavours drive one `PullState`:

    due(now)            queues that want a pull
    begin(queue)        a Ticket, whose request is to be sent
    answered(ticket)    takes the answer;  failed(ticket): takes the error
    take(count_max)     messages for the user, decoded here

Rules:
- A queue has one pull in flight and one answer waiting, or two answers waiting. The next pull starts as soon as an answer is
  there. So the broker holds it while the user works, and memory is bounded.
- A driver that can leave answers in the kernel's buffers reads no more than there is room for (`room_bytes`). Bytes that are
  read long before their use leave the CPU's caches, and need memory that the kernel has to clear first.
- A queue that is held back is not handed out. One answer of it may wait, or two; they do not count for the room of the others. It is not
  pulled meanwhile, so a reset of the group's offset is not heard of. When it is to go on, brokers are asked first (`doubted`, `believe`).
- `seek` makes an answer that is on its way stale: its ticket carries the generation of the queue, a number that is given once only. The
  driver hears of a pull that is dropped so (`on_dropped`), and gives it up: the broker is to hold it no longer.
- Over the remoting port a master holds pulls of subscribed topics for up to a minute. Else a thousand consumers at rest, of 16 queues each,
  would make a thousand pulls a second. Meanwhile the connection asks the master whether it is there (LongHold). Where another master has
  come, the pulls go there (`pull_elsewhere`). Not so for assigned queues, whose routes nobody follows, and at slaves.
- The position of a queue is the offset behind the last message handed out. It becomes safe to commit when the user comes back
  for more (`user_came_back`): then those messages are finished. Those that a loop has not handed on yet are not (`loop_over`).
- Each pull and commit of a group says which reset of its offset it knows of. When the broker says that there was another one, what was
  pulled is dropped, and the queue goes on where the group was reset to.
- Each pull and commit also says which epoch of the log gave the last answer. When the broker says that the messages before the offset
  were taken back (an unclean promotion), the queue goes on where the two logs part.
- A broker says with each answer from which broker of its name to pull next: a slave while the consumer lags far behind (RocketMQ:
  suggestWhichBrokerId). What a slave fails to give, has no offset for, or says of a reset is asked of the master, who knows.
  Slaves are left alone then.
- What is known of a queue belongs to one incarnation of its topic, learned from the first answer and told with every request. If the
  topic was created again, or deleted for good, every try raises an error until the queues are assigned again. Waiting does not bring
  back what the position counted.

Not thread-safe: the consumer that owns it takes care of that.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import secrets
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, cast

from . import _forks
from ._checks import OFFSET_MAX, check_count
from ._filters import NO_FILTER, MessageFilter
from ._loops import Loop
from ._message import DamagedMessage, Message
from ._pull_answer import AnswerMessages, PullAnswer, decode_pull_answer
from ._types import MessageQueue, PullStatus
from .errors import (
    ConfigurationError,
    CorruptMessageError,
    OffsetIllegalError,
    ProtocolError,
    ProtomqError,
    ServerError,
    TopicNotFoundError,
    TopicRecreatedError,
    TransportError,
)

logger = logging.getLogger("protomq")

OffsetReset = Literal["nearest", "earliest", "latest", "error"]

POLL_MESSAGES: Final = 512
"""Default number of messages handed out at a time: that many bodies of 1 KiB stay in the CPU's cache until they are used."""
BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 3.0
LOOP_POLL_S: Final = 1.0
"""For which a loop over a consumer waits at a time."""
SHORT_POLL_INTERVAL_S: Final = 0.02
"""Pause between two pulls of an empty queue when the user wants no hold."""
GROUP_LOOK_MIN_S: Final = 0.01
"""Between two looks at the group, where one is under way in another task."""
ANSWERS_WAITING_MAX: Final = 2
READ_AHEAD_MAX_BYTES: Final = 8 << 20
"""While this many bytes wait to be handed out, no more are read: two of the largest answers, so that queues take turns."""
_NOT_OF_A_SLAVE: Final = (PullStatus.OFFSET_ILLEGAL, PullStatus.DIVERGED, PullStatus.OFFSET_RESET)
"""What the master may see otherwise: its log may begin earlier, or go on, and have a later reset of the group's offset."""
DELETED_AFTER_S: Final = 3.0
"""How long a deleted topic may take to be created again: the error then is TopicRecreatedError."""
SLAVE_PAUSE_S: Final = 60.0
"""After a pull from a slave has failed, only the master is pulled for this time."""
QUIET_HOLD_FACTOR: Final = 8
QUIET_HOLD_MAX_MS: Final = 120_000
"""A broker of version 1.0 holds for a minute then."""
DOUBT_AFTER_S: Final = 1.0
"""A queue that a schedule has held back for less goes on with what waits, as one that is polled slowly does."""
READ_PAUSE_MAX_S: Final = 15.0
"""After this time without a read one is made all the same: brokers drop a connection that takes nothing for 60 s."""


@dataclass(frozen=True, slots=True)
class PullOptions:
    """What to ask for in one pull."""

    consumer_group: str = ""
    hold_ms: int = 15_000
    record_count_max: int = 32_768
    size_max_bytes: int = 4 << 20
    offset_reset: OffsetReset = "nearest"
    broadcasting: bool = False

    @property
    def quiet_hold_ms(self) -> int:
        """How long a master holds a pull whose caller asks it whether it is there after `hold_ms`."""
        return max(self.hold_ms, min(self.hold_ms * QUIET_HOLD_FACTOR, QUIET_HOLD_MAX_MS))

    def __post_init__(self) -> None:
        if self.offset_reset not in ("nearest", "earliest", "latest", "error"):
            raise ConfigurationError(
                f"offset_reset is nearest, earliest, latest or error, not {self.offset_reset!r}"
            )
        check_count("hold_ms", self.hold_ms, 0, 60_000)
        check_count("pull_record_count_max", self.record_count_max, 1, 32_768)
        check_count("pull_size_max_bytes", self.size_max_bytes, 1, 16 << 20)


class Room(NamedTuple):
    """How much more somebody takes."""

    messages: int
    size_bytes: int


RoomOf = Callable[[MessageQueue | None], Room]
"""Of a queue, or of all together."""


class Ticket(NamedTuple):
    """One pull under way."""

    queue: MessageQueue
    generation: int
    queue_offset: int
    asked_s: float = math.inf
    """When it is sent; inf: nobody has said."""


@dataclass(slots=True)
class _Waiting:
    """An answer of which the first `taken` messages have been handed out."""

    answer: PullAnswer
    messages: AnswerMessages
    taken: int = 0


@dataclass(slots=True)
class _Queue:
    generation: int
    tags: tuple[str, ...] = ()
    filter: MessageFilter = NO_FILTER
    position: int | None = None  # None: where to begin is not known yet.
    safe_position: int | None = None
    committed: int | None = None
    is_uncommitted: bool = False  # Messages before the position were handed out and are not committed.
    incarnation: int = 0  # Of the topic; 0: not known yet.
    reset_epoch: int | None = None  # The last reset of the group's offset; None: resets are not followed.
    log_epoch: int = 0  # Of the log that told the position; 0: nobody did.
    began: int | None = None  # Where it began, if that may have been told by a slave, and the master has taken no commit since.
    suggested_broker_id: int = 0  # Where to pull; 0: the master.
    leaves_slaves_until_s: float = 0.0  # One has failed: till then the master is pulled, whatever is suggested.
    missing_since_s: float | None = None  # When the broker first said that it has the topic no more.
    is_gone: bool = False  # The topic was deleted, and made again or not.
    is_held: bool = False  # Nothing of it is handed out.
    is_paused: bool = False  # By the program: then it is held, too.
    held_since_s: float = math.inf  # By a schedule.
    pull_offset: int = 0
    in_flight: bool = False
    asked_s: float = math.inf
    failures: int = 0
    paused_until_s: float = 0.0
    waiting: deque[_Waiting] = field(default_factory=deque)


class QueueState(NamedTuple):
    """How a queue stands, for people. `position`, `committed`: None: not known, none; `open_count`: messages here that are not done."""

    queue: MessageQueue
    position: int | None
    committed: int | None
    open_count: int
    is_paused: bool


class PullState:
    """The queues of one consumer."""

    def __init__(self, options: PullOptions, rng: random.Random | None = None) -> None:
        self.options = options
        self._queues: dict[MessageQueue, _Queue] = {}
        self.alike_brokers: set[str] = set()
        """Names of brokers that take messages that failed alike as runs."""
        self.on_dropped: Callable[[Ticket], None] = lambda _: None
        """Hears of pulls under way whose outcome does not count any more."""
        self.followed: Collection[str] = ()
        """Topics whose routes are looked up again and again, so that `pull_elsewhere` is called."""
        self._generations = itertools.count()
        self._parked: dict[MessageQueue, _Queue] = {}
        # Queues with answers to hand out; the first is next.
        self._line: deque[MessageQueue] = deque()
        self._handed_out: list[_Queue] = []  # By the last `take`.
        self._loops: list[Loop] = []
        self._is_looped_over = False  # What the last `take` handed out: nobody else is at work on it.
        self._held: frozenset[MessageQueue] = frozenset()
        self._unsure: frozenset[MessageQueue] = frozenset()
        self.unsure: Callable[[], frozenset[MessageQueue]] = frozenset
        """Queues that may be another member's by now: nothing of them is handed out."""
        self.doubted: frozenset[MessageQueue] = frozenset()
        """Queues that are held until it is known whether the group's offset was reset meanwhile: what waits would be skipped then."""
        self._waiting_bytes = 0
        self._answered_at_s = 0.0
        self._rng = rng or random.Random()
        self._member = ""
        self._member_fork_count = -1
        self._warned_of_other = False
        self.is_shut = False
        """Whether nothing is pulled or handed out: the group's settings say so."""

    # -- assignment and positions ----------------------------------------------------------------------------------------

    def assign(
        self,
        queues: Iterable[MessageQueue],
        tags: Mapping[str, tuple[str, ...]],
        filters: Mapping[str, MessageFilter] = MappingProxyType({}),
        *,
        park: bool = False,
    ) -> list[MessageQueue]:
        """Replaces the assignment; queues that stay keep their position. Returns the new ones, whose position is to be found.

        `tags` and `filters`: by topic.
        `park`: queues that go may come back (their broker is away) and then go on where they were.
        """
        wanted = dict.fromkeys(queues)
        if not park:
            self._parked.clear()
        for queue in [queue for queue in self._queues if queue not in wanted]:
            state = self._queues.pop(queue)
            self._drop_answers(queue, state)
            if park and state.position is not None:
                state.pull_offset = state.position
                self._parked[queue] = state
        added = [queue for queue in wanted if queue not in self._queues]
        for queue in added:
            self._queues[queue] = state = (
                self._parked.pop(queue)
                if queue in self._parked
                else _Queue(next(self._generations))
            )
            state.is_held = self._is_to_be_held(queue, state)
        for queue in wanted:
            wanted_tags = tags.get(queue.topic, ())
            wanted_filter = filters.get(queue.topic, NO_FILTER)
            self._set_wanted(queue, self._queues[queue], wanted_tags, wanted_filter)
        return [queue for queue in added if self._queues[queue].position is None]

    def missing_from(self, wanted: Iterable[MessageQueue]) -> list[MessageQueue]:
        """The queues of the assignment that are not among those wanted."""
        kept = set(wanted)
        return [queue for queue in self._queues if queue not in kept]

    def lacks_position(self, queue: MessageQueue) -> bool:
        """Whether the queue is assigned, and it is not known yet where to begin."""
        state = self._queues.get(queue)
        return state is not None and state.position is None

    @property
    def queues(self) -> tuple[MessageQueue, ...]:
        """The assignment."""
        return tuple(self._queues)

    def described(self, open_counts: Mapping[MessageQueue, int]) -> list[QueueState]:
        """How each queue stands. `open_counts`: messages that were handed out and are not done, where somebody counts them."""
        return [
            QueueState(
                queue,
                state.position,
                state.committed,
                sum(len(one.answer.sizes) - one.taken for one in state.waiting) + open_counts.get(queue, 0),
                state.is_held,
            )
            for queue, state in self._queues.items()
        ]

    def incarnation(self, queue: MessageQueue) -> int:
        """Incarnation of the topic to which the position of the queue belongs; 0: not known, or not assigned."""
        state = self._queues.get(queue)
        return state.incarnation if state is not None else 0

    def learn_incarnation(self, queue: MessageQueue, incarnation: int) -> None:
        """A broker says it before the first answer to a pull does."""
        state = self._queues.get(queue)
        if state is not None:
            state.incarnation = state.incarnation or incarnation

    def has_commit(self, queue: MessageQueue) -> bool:
        """Whether an offset of the queue is known to be committed."""
        state = self._queues.get(queue)
        return state is not None and state.committed is not None

    def lacks_commit(self, queue: MessageQueue) -> bool:
        """Whether the queue is assigned, it is known where to begin, and no commit is known."""
        state = self._queues.get(queue)
        return state is not None and state.position is not None and state.committed is None and not state.is_gone

    def forget_gone(self, topics: Collection[str]) -> list[MessageQueue]:
        """Queues of topics that were deleted are assigned again by the next `assign`, as if they had never been. Those queues."""
        gone: list[MessageQueue] = []
        for queue, state in list(self._queues.items()):
            if state.is_gone and queue.topic in topics:
                self._drop_answers(queue, state)
                del self._queues[queue]
                gone.append(queue)
        return gone

    def gone_queues(self, topic: str) -> list[MessageQueue]:
        """Its queues of a topic that was deleted, and made again or not."""
        return [queue for queue, state in self._queues.items() if state.is_gone and queue.topic == topic]

    def is_gone(self, queue: MessageQueue) -> bool:
        """Whether the topic of the queue was deleted, and made again or not."""
        state = self._queues.get(queue)
        return state is not None and state.is_gone

    def drop_answers(self, queues: Iterable[MessageQueue]) -> None:
        """What was pulled of these queues is not handed out."""
        for queue in queues:
            self._drop_answers(queue, self._state(queue))

    def drop(self, queues: Iterable[MessageQueue]) -> None:
        """These queues go, and nothing of them is committed."""
        for queue in queues:
            state = self._queues.pop(queue, None)
            if state is not None:
                self._drop_answers(queue, state)

    def unresolved(self) -> list[MessageQueue]:
        """Queues of which it is not known where to begin."""
        return [queue for queue, state in self._queues.items() if state.position is None]

    def position(self, queue: MessageQueue) -> int | None:
        """The next offset to hand out; None: not known yet."""
        self.give_back_left()
        return self._state(queue).position

    def start_all(
        self,
        queues: Iterable[MessageQueue],
        committed: Mapping[int, int],
        starts: Mapping[MessageQueue, int],
        incarnation: int = 0,
        reset_epochs: Mapping[int, int] | None = None,
        log_epoch: int = 0,
        by_slave: Collection[MessageQueue] = (),
    ) -> None:
        """Where to begin: at what is committed (by queue id), else at `starts`; both belong to the topic's `incarnation`.

        `log_epoch`: of the log that told what is committed; 0: not known. `by_slave`: queues of which a slave told it, or nobody.

        `reset_epochs`: the last reset of the group's offsets, by queue id, where there was one; None: resets are not followed.

        Queues that were moved meanwhile stay.
        """
        for queue in queues:
            state = self._queues.get(queue)
            if state is None:
                continue
            if reset_epochs is not None and state.reset_epoch is None:
                state.reset_epoch = reset_epochs.get(queue.queue_id, 0)
            if state.position is not None:
                continue
            self.seek(queue, committed.get(queue.queue_id, starts.get(queue, 0)))
            state.began = state.position if queue in by_slave else None
            state.committed = committed.get(queue.queue_id)
            state.incarnation = incarnation
            state.log_epoch = log_epoch if queue.queue_id in committed else 0

    def log_epoch(self, queue: MessageQueue) -> int:
        """Epoch of the log to which the position of the queue belongs; 0: not known, or not assigned."""
        state = self._queues.get(queue)
        return state.log_epoch if state is not None else 0

    def began(self, queue: MessageQueue) -> int | None:
        """Where the queue began, if the master may know of later commits; None: it has told, or the program has moved to another place."""
        state = self._queues.get(queue)
        return state.began if state is not None else None

    def reset_epoch(self, queue: MessageQueue) -> int | None:
        """The last reset of the group's offset that is known; None: not known, or not assigned."""
        state = self._queues.get(queue)
        return state.reset_epoch if state is not None else None

    def follow_reset(self, queue: MessageQueue, queue_offset: int, reset_epoch: int) -> None:
        """The group's offset was reset: goes on there. A queue that is not assigned any more is left alone."""
        state = self._queues.get(queue)
        if state is None or state.reset_epoch == reset_epoch:
            return
        logger.info(
            "%s: the offset of group %s was reset: continuing at %d instead of %s",
            queue, self.options.consumer_group, queue_offset, state.position,
        )  # fmt: skip
        # A pull at a slave says so, too, and knows of no later commit.
        self.move_to(queue, queue_offset)
        state.began = state.committed = queue_offset
        state.reset_epoch = reset_epoch

    def follow_kept(self, queue: MessageQueue, queue_offset: int) -> bool:
        """The group had committed this offset, of which the slave that told where to begin did not know. Goes on there, unless it has done
        all up to there; whether it goes. A queue that is not assigned any more, or was moved meanwhile, is left alone.
        """
        state = self._queues.get(queue)
        if state is None or state.position is None or state.began is None:
            return False
        state.committed = queue_offset
        if state.began <= queue_offset <= state.position:
            return False
        logger.warning(
            "%s: group %s began at %d, where a slave said; the master says that it has committed %d: continuing there instead of at %d",
            queue, self.options.consumer_group, state.began, queue_offset, state.position,
        )  # fmt: skip
        self.move_to(queue, queue_offset)
        state.began = queue_offset
        return True

    def follow_fork(self, queue: MessageQueue, queue_offset: int, log_epoch: int) -> None:
        """Messages from this offset on were taken back: goes on there. What waits here is pulled again, for it may be of those."""
        state = self._state(queue)
        assert state.position is not None
        if state.position > queue_offset:
            logger.warning(
                "%s: messages %d to %d, which were handed out, were taken back by a fail-over that had to lose them: continuing at %d",
                queue, queue_offset, state.position - 1, queue_offset,
            )  # fmt: skip
        self._pull_again(queue, state, min(state.position, queue_offset))
        if state.safe_position is not None:
            state.safe_position = min(state.safe_position, queue_offset)
        if state.began is not None:
            state.began = min(state.began, queue_offset)
        # Whatever was committed, this log may not have heard of it.
        state.committed, state.log_epoch = None, log_epoch

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """The next message handed out is the one at this offset, whatever the group has committed."""
        self.move_to(queue, queue_offset)
        self._state(queue).began = None

    def move_to(self, queue: MessageQueue, queue_offset: int) -> None:
        """The next message handed out is the one at this offset. That is no wish of the program's."""
        check_count("queue_offset", queue_offset, 0, OFFSET_MAX)
        state = self._state(queue)
        self._drop_answers(queue, state)
        for loop in self._loops:
            loop.moved.add(queue)
        if state.position is None or queue_offset > state.position:
            # Nobody has seen what stands between.
            state.log_epoch = 0
        state.position = state.pull_offset = state.safe_position = queue_offset
        state.is_uncommitted = False
        state.suggested_broker_id = 0
        state.failures, state.paused_until_s = 0, 0.0

    def give_back(self, messages: Iterable[Message]) -> None:
        """Messages that were handed out, but not used: they come again."""
        first: dict[MessageQueue, int] = {}
        for message in messages:
            first.setdefault(message.queue, message.queue_offset)
        for queue, queue_offset in first.items():
            state = self._kept(queue)
            if state is None or state.position is None or state.safe_position is None:
                continue
            # Somebody else may have given back what stands before.
            if queue_offset < state.position:
                self._pull_again(queue, state, queue_offset)
            state.safe_position = min(state.safe_position, queue_offset)

    def pull_elsewhere(self, topic: str, broker_names: Collection[str]) -> None:
        """Other masters have these names now: what is held at the old ones is pulled there, and what failed at once."""
        for queue, state in self._queues.items():
            if queue.topic == topic and queue.broker_name in broker_names:
                self._drop_pull(queue, state)
                state.paused_until_s = 0.0

    def restart(self) -> None:
        """All connections are gone: every pull in flight is forgotten."""
        for state in self._queues.values():
            if state.in_flight:
                state.in_flight, state.generation = False, next(self._generations)

    def rewind(self) -> None:
        """Everything begins again behind what was finished: for the user whose `poll` was interrupted half-way, at any place of it."""
        self._line.clear()
        self._waiting_bytes = 0
        for queue, state in self._queues.items():
            state.waiting.clear()
            if state.safe_position is not None:
                self.move_to(queue, state.safe_position)
        self._handed_out.clear()

    # -- pulls -----------------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> list[MessageQueue]:
        """Queues that want a pull now."""
        if self.is_shut:
            return []
        return [
            queue
            for queue, state in self._queues.items()
            if _wants_pull(state) and state.paused_until_s <= now_s
        ]

    def next_due_in_s(self, now_s: float) -> float:
        """Until `due` has more to say by the passing of time alone; infinity if it has not."""
        if self.is_shut:
            return float("inf")
        pauses = [
            state.paused_until_s - now_s for state in self._queues.values() if _wants_pull(state)
        ]
        return max(min(pauses, default=float("inf")), 0.0)

    def hurry(self, broker_names: Collection[str]) -> None:
        """Brokers are back: pulls that failed there are made again now."""
        for queue, state in self._queues.items():
            if queue.broker_name in broker_names:
                state.paused_until_s = 0.0

    def room_bytes(self, now_s: float) -> int:
        """How much more is to be read now."""
        room_bytes = READ_AHEAD_MAX_BYTES - self._waiting_bytes
        if room_bytes <= 0 and now_s >= self._answered_at_s + READ_PAUSE_MAX_S:
            return 1  # One more answer, whatever its size.
        return max(room_bytes, 0)

    def begin(self, queue: MessageQueue, now_s: float = math.inf) -> Ticket:
        """A pull of the queue is being sent."""
        state = self._state(queue)
        assert _wants_pull(state)
        state.in_flight, state.asked_s = True, now_s
        return Ticket(queue, state.generation, state.pull_offset, now_s)

    def may_rest(self, queue: MessageQueue) -> bool:
        """Whether its pull may be held for `quiet_hold_ms`."""
        options = self.options
        return (
            queue.topic in self.followed
            and not self.suggested_broker_id(queue)
            and options.quiet_hold_ms > options.hold_ms
        )

    def suggested_broker_id(self, queue: MessageQueue) -> int:
        """From which broker of its name the queue is to be pulled; 0: the master."""
        state = self._queues.get(queue)
        return state.suggested_broker_id if state is not None else 0

    def forget_suggestion(self, queue: MessageQueue) -> None:
        """The queue is pulled from the master, until an answer suggests a slave again."""
        state = self._queues.get(queue)
        if state is not None:
            state.suggested_broker_id = 0

    def leave_slave(self, ticket: Ticket, why: object, now_s: float) -> bool:
        """A pull has failed. If a slave was suggested for it, it is made again at the master at once, and nobody has to know."""
        if not self.suggested_broker_id(ticket.queue):
            return False
        state = self._ended(ticket, now_s)
        if state is None:
            return False
        self._leave_slave(ticket.queue, state, why, now_s)
        return True

    def is_under_way(self, ticket: Ticket) -> bool:
        """Whether the outcome of the pull still counts: its queue may have gone, or be pulled elsewhere."""
        state = self._queues.get(ticket.queue)
        return state is not None and state.generation == ticket.generation and state.in_flight

    def lost(self, ticket: Ticket) -> None:
        """A pull has ended without an outcome: it is made again."""
        state = self._queues.get(ticket.queue)
        if state is not None and self.is_under_way(ticket):
            state.in_flight, state.generation = False, next(self._generations)

    def encode_request(self, ticket: Ticket) -> bytes:
        """The encoded PullRequest of a ticket."""
        from .v1 import pull_service_pb2

        options, state = self.options, self._state(ticket.queue)
        return pull_service_pb2.PullRequest(
            topic=ticket.queue.topic,
            queue_id=ticket.queue.queue_id,
            queue_offset=ticket.queue_offset,
            record_count_max=options.record_count_max,
            size_max_bytes=options.size_max_bytes,
            hold_ms=options.hold_ms,
            quiet_hold_ms=options.quiet_hold_ms if self.may_rest(ticket.queue) else 0,
            tags=state.tags,
            filter_type=cast(Any, state.filter.type_number),
            filter=state.filter.expression,
            consumer_group=options.consumer_group,
            topic_incarnation=state.incarnation,
            member=self.member_name() if options.consumer_group and not options.broadcasting else "",
            reset_epoch=state.reset_epoch,
            log_epoch=state.log_epoch,
        ).SerializeToString()

    def member_name(self) -> str:
        """Of the consumer in its pulls: another one in each consumer, and in a forked child."""
        if self._member_fork_count != _forks.fork_count:
            self._member_fork_count = _forks.fork_count
            self._member = f"{socket.gethostname()}@{os.getpid()}@{secrets.token_hex(4)}"
        return self._member

    def answered(self, ticket: Ticket, payload: bytes, now_s: float) -> None:
        """Takes an encoded PullResponse. Raises ProtocolError, or OffsetIllegalError where the policy is "error"."""
        self._answered_at_s = now_s
        state = self._ended(ticket, now_s)
        if state is None:
            return
        answer = decode_pull_answer(payload)
        if state.suggested_broker_id and answer.status in _NOT_OF_A_SLAVE:
            self._leave_slave(ticket.queue, state, answer.status, now_s)
            return
        state.suggested_broker_id = answer.suggested_broker_id if now_s >= state.leaves_slaves_until_s else 0
        state.failures = 0
        state.missing_since_s = None
        state.incarnation = answer.topic_incarnation or state.incarnation
        if answer.status is not PullStatus.DIVERGED:
            state.log_epoch = answer.log_epoch or state.log_epoch
        if answer.other_member and not self._warned_of_other:
            self._warned_of_other = True
            logger.warning(
                "group %s has another member, %s, that consumes %s too: both get every message of it. "
                "Call subscribe(), so that the group shares its queues, or assign() other queues to each",
                self.options.consumer_group,
                answer.other_member,
                ticket.queue,
            )
        if answer.status is PullStatus.FOUND and len(answer.starts):
            if answer.next_offset <= ticket.queue_offset:
                state.paused_until_s = now_s + BACKOFF_MAX_S
                raise ProtocolError(
                    f"{ticket.queue}: the broker's answer to a pull at {ticket.queue_offset} leads nowhere"
                )
            state.waiting.append(_Waiting(answer, AnswerMessages(answer, ticket.queue)))
            state.pull_offset = answer.next_offset
            if not state.is_held:
                self._waiting_bytes += len(answer.raw)
                if len(state.waiting) == 1:
                    self._line.append(ticket.queue)
        elif answer.status is PullStatus.OFFSET_RESET:
            self.follow_reset(ticket.queue, answer.next_offset, answer.reset_epoch)
        elif answer.status is PullStatus.DIVERGED:
            self._diverged(ticket, state, answer, now_s)
        elif answer.status is PullStatus.OFFSET_ILLEGAL:
            self._offset_illegal(ticket, state, answer, now_s)
        else:
            state.pull_offset = max(answer.next_offset, ticket.queue_offset)
            _pass_over(state)
            if not self.options.hold_ms:
                state.paused_until_s = now_s + SHORT_POLL_INTERVAL_S

    def failed(
        self, ticket: Ticket, error: ProtomqError, now_s: float, *, by_broker: bool = True
    ) -> ProtomqError | None:
        """Takes an error; the pull is made again after a pause. The error that the user has to know, if any.

        `by_broker`: the broker was asked, not only the name server, which may be younger than the topic.
        """
        state = self._ended(ticket, now_s)
        if state is None:
            return None
        state.failures += 1
        pause_s = min(
            BACKOFF_MIN_S * 2 ** min(state.failures - 1, 10), BACKOFF_MAX_S
        ) * self._rng.uniform(0.5, 1.0)
        if error.retry_delay_ms is not None:
            pause_s = max(pause_s, error.retry_delay_ms / 1000)
        state.paused_until_s = now_s + pause_s
        if isinstance(error, TopicRecreatedError):
            self._mark_gone(ticket.queue, state.incarnation)
            return error
        if isinstance(error, TopicNotFoundError):
            if by_broker and state.incarnation and state.missing_since_s is None:
                state.missing_since_s = now_s
        elif by_broker and isinstance(error, ServerError):
            state.missing_since_s = None  # It has the topic, and something else against the pull.
        if isinstance(error, TransportError) or state.missing_since_s is None:
            return error if not error.retriable else None
        if now_s - state.missing_since_s < DELETED_AFTER_S:
            return None
        self._mark_gone(ticket.queue, state.incarnation)
        return _deleted(ticket.queue)

    def _mark_gone(self, queue: MessageQueue, incarnation: int) -> None:
        """All queues of the same topic at the same broker."""
        for other, state in self._queues.items():
            if other[:2] == queue[:2] and state.incarnation == incarnation:
                state.is_gone = True

    # -- messages --------------------------------------------------------------------------------------------------------

    def user_came_back(self, loop: Loop | None = None) -> None:
        """What the last `take` handed out has been finished. `loop`: the one that asks for more, in which case others are at work still."""
        self.give_back_left()
        if loop is not None:
            loop.came_back()
        still_open = self._open_in_loops(with_current=loop is not None)
        for state in self._handed_out:
            safe = _open_from(state, still_open)
            # A commit in another loop may have counted the message that this one is at: that is not taken back.
            state.safe_position = safe if state.safe_position is None else max(state.safe_position, safe)
        self._handed_out = [state for state, _ in still_open.values()]

    def _open_in_loops(self, *, with_current: bool) -> dict[int, tuple[_Queue, int]]:
        """Queues of which loops have messages to hand on, by id, with the first of them. `with_current`: as of `Loop.open_offsets`."""
        first: dict[int, tuple[_Queue, int]] = {}
        for loop in self._loops:
            for queue, queue_offset in loop.open_offsets(with_current=with_current).items():
                state = self._kept(queue)
                if state is not None and state.safe_position is not None:
                    first[id(state)] = state, min(queue_offset, first.get(id(state), (state, queue_offset))[1])
        return first

    def loop_over(self, loop: Loop, messages: Iterable[Message]) -> None:
        """These messages go to the user one by one: what the loop has not handed on is not finished, whoever comes back."""
        if loop not in self._loops:
            self._loops.append(loop)
        loop.fill(messages)
        self._is_looped_over = True

    def end_loops(self) -> None:
        """All loops end with the message that they are at."""
        for loop in self._loops:
            loop.is_over = True
        self.give_back_left()

    def give_back_left(self) -> None:
        """What loops that are over have not handed on comes again. Ctrl-C at any place of it loses nothing: it may be called again.

        An error may have ended them. So the messages that they are at are finished once the user comes back, those before them now.
        """
        over = [loop for loop in self._loops if loop.is_over]
        if not over:
            return
        if self._is_looped_over:
            still_open = self._open_in_loops(with_current=True)
            for state in self._handed_out:
                if state.safe_position is not None and state.position is not None:
                    state.safe_position = max(state.safe_position, _open_from(state, still_open))
        self._is_looped_over = False
        for loop in over:
            self.give_back(loop.take_unseen())
            self._loops.remove(loop)

    def hold_back(self, queues: Collection[MessageQueue], now_s: float = math.inf) -> None:
        """Of these queues nothing is handed out, until this is called without them. `now_s`: inf if the caller asks for resets itself."""
        held = frozenset(queues)
        if held == self._held:
            return
        changed, self._held = held ^ self._held, held
        for queue in changed:
            state = self._queues.get(queue)
            if state is None:
                continue
            if queue in held:
                state.held_since_s = now_s
            elif now_s < math.inf and now_s - state.held_since_s >= DOUBT_AFTER_S:
                self._doubt(queue, state)
            self._hold(queue, state)

    def pause(self, queues: Iterable[MessageQueue], *, is_paused: bool = True) -> None:
        """Of these queues nothing is handed out, or again. Raises ConfigurationError, and changes nothing, where one is not assigned."""
        for queue, state in [(queue, self._state(queue)) for queue in queues]:
            if state.is_paused and not is_paused:
                self._doubt(queue, state)
            state.is_paused = is_paused
            self._hold(queue, state)

    def believe(self, queues: Iterable[MessageQueue]) -> None:
        """What waits of these queues is handed out: it is known whether their offsets were reset, or nobody says."""
        self.doubted = self.doubted.difference(queues)
        for queue in queues:
            state = self._queues.get(queue)
            if state is not None:
                self._hold(queue, state)

    @property
    def paused(self) -> tuple[MessageQueue, ...]:
        """The queues that are paused."""
        return tuple(queue for queue, state in self._queues.items() if state.is_paused)

    def take(self, count_max: int, *, one_queue: bool = False) -> list[Message]:
        """At most `count_max` messages, of the queues in turn; empty if nothing waits. Raises ProtocolError.

        `one_queue`: of the first that has any.
        """
        messages: list[Message] = []
        self._is_looped_over = False
        self._hold_unsure()
        while self._line and not self.is_shut:
            for _, part in self.take_parts(count_max, one_queue=one_queue):
                messages = messages + part if messages else part
            if messages or not one_queue:
                break
        return messages

    def take_parts(
        self, count_max: int, *, one_queue: bool = False, room_of: RoomOf | None = None
    ) -> list[tuple[MessageQueue, list[Message]]]:
        """The same, by queue. What was decoded before an error is returned; the next call raises it, and its queue is pulled again.

        `room_of`: no more is taken than fits; of octets, the last message may be beyond.
        """
        parts: list[tuple[MessageQueue, list[Message]]] = []
        self._hold_unsure()
        rooms = None if room_of is None else _Rooms(room_of)
        left_count = count_max if rooms is None else min(count_max, rooms.total.messages)
        skipped_count = 0
        while self._line and left_count > 0 and not self.is_shut:
            queue = self._line[0]
            state = self._queues[queue]
            waiting = state.waiting[0]
            answer = waiting.answer
            stop = min(waiting.taken + left_count, len(answer.starts))
            if rooms is not None:
                stop = rooms.fill(queue, waiting, stop)
                if stop == waiting.taken:
                    skipped_count += 1
                    if skipped_count >= len(self._line):
                        break
                    self._line.rotate(-1)
                    continue
                skipped_count = 0
            try:
                part = waiting.messages.part(waiting.taken, stop)
            except ProtocolError:
                if parts:
                    break  # They are handed out first: the next call raises.
                # The broker may have healed the record when it is asked again.
                assert state.position is not None
                self._pull_again(queue, state, state.position)
                state.paused_until_s = self._answered_at_s + BACKOFF_MAX_S
                raise
            self._line.popleft()
            self._handed_out.append(state)
            state.is_uncommitted = True
            if stop < len(answer.starts):
                waiting.taken = stop
                state.position = part[-1].queue_offset + 1
            else:
                state.waiting.popleft()
                self._waiting_bytes -= len(answer.raw)
                state.position = answer.next_offset
            if state.waiting:
                self._line.append(queue)
            if state.tags:  # The broker compared hashes.
                part = with_tags(part, state.tags)
            left_count -= len(part)
            parts.append((queue, part))
            if one_queue:
                break
        return parts

    # -- commits ---------------------------------------------------------------------------------------------------------

    def to_commit(self, *, safe_only: bool) -> dict[MessageQueue, int]:
        """Positions that differ from what is committed; `safe_only`: without what the last `take` handed out."""
        wanted: dict[MessageQueue, int] = {}
        for queue, state in self._queues.items():
            position = state.safe_position if safe_only else state.position
            if state.is_gone:
                continue  # An offset of the old topic is of no use to anybody.
            if safe_only and not position and not state.incarnation:
                continue  # Nobody has said that the queue is there: a route may be older than a topic that was made again.
            if position is not None and position != state.committed:
                wanted[queue] = position
        return wanted

    def committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """The broker took them."""
        for queue, queue_offset in offsets.items():
            if queue in self._queues:
                state = self._queues[queue]
                state.committed, state.began = queue_offset, None
                state.is_uncommitted = state.is_uncommitted and queue_offset != state.position

    def uncommitted_count(self) -> int:
        """Queues of which messages were handed out that nobody has committed."""
        return sum(
            state.is_uncommitted and not state.is_gone
            for state in list(self._queues.values())
        )

    def warned_of_other(self) -> None:
        """The user knows already that the group has another member."""
        self._warned_of_other = True

    # --------------------------------------------------------------------------------------------------------------------

    def _is_to_be_held(self, queue: MessageQueue, state: _Queue) -> bool:
        return queue in self._held or state.is_paused or queue in self.doubted or queue in self._unsure

    def _hold_unsure(self) -> None:
        unsure = self.unsure()
        if unsure != self._unsure:
            changed, self._unsure = unsure ^ self._unsure, unsure
            for queue in changed:
                if (state := self._queues.get(queue)) is not None:
                    self._hold(queue, state)

    def _doubt(self, queue: MessageQueue, state: _Queue) -> None:
        """It is to go on with what has waited for long. Where nothing waits, the pull under way reports a reset."""
        if state.waiting and state.reset_epoch is not None:
            self.doubted |= {queue}

    def _hold(self, queue: MessageQueue, state: _Queue) -> None:
        """What waits of a queue that is held is in no line, and counts for no bound: it is one answer at most."""
        is_held = self._is_to_be_held(queue, state)
        if is_held == state.is_held:
            return
        state.is_held = is_held
        size_bytes = sum(len(waiting.answer.raw) for waiting in state.waiting)
        self._waiting_bytes += -size_bytes if is_held else size_bytes
        if state.waiting:
            if is_held:
                self._line.remove(queue)
            else:
                self._line.append(queue)

    def _kept(self, queue: MessageQueue) -> _Queue | None:
        """The queue, also while its broker is away."""
        return self._queues.get(queue) or self._parked.get(queue)

    def _state(self, queue: MessageQueue) -> _Queue:
        try:
            return self._queues[queue]
        except KeyError:
            raise ConfigurationError(f"{queue} is not assigned to this consumer") from None

    def _ended(self, ticket: Ticket, now_s: float) -> _Queue | None:
        """The queue of a ticket that still counts."""
        if not self.is_under_way(ticket):
            return None
        state = self._queues[ticket.queue]
        state.in_flight = False
        return state

    def _leave_slave(self, queue: MessageQueue, state: _Queue, why: object, now_s: float) -> None:
        logger.info("%s: pulling from the master again, instead of broker_id %d: %s", queue, state.suggested_broker_id, why)
        state.suggested_broker_id, state.leaves_slaves_until_s = 0, now_s + SLAVE_PAUSE_S

    def _set_wanted(
        self, queue: MessageQueue, state: _Queue, tags: tuple[str, ...], filter_: MessageFilter
    ) -> None:
        """What was pulled with other tags, or another filter, is not what is wanted now."""
        if (tags, filter_) != (state.tags, state.filter):
            state.tags, state.filter = tags, filter_
            if state.position is not None:
                self._pull_again(queue, state, state.position)

    def _pull_again(self, queue: MessageQueue, state: _Queue, queue_offset: int) -> None:
        """From there on, without saying anything about what has been finished."""
        self._drop_answers(queue, state)
        state.position = state.pull_offset = queue_offset

    def _drop_pull(self, queue: MessageQueue, state: _Queue) -> None:
        dropped = Ticket(queue, state.generation, state.pull_offset, state.asked_s) if state.in_flight else None
        state.generation = next(self._generations)
        state.in_flight = False
        if dropped is not None:
            self.on_dropped(dropped)

    def _drop_answers(self, queue: MessageQueue, state: _Queue) -> None:
        self._drop_pull(queue, state)
        if state.waiting:
            if not state.is_held:
                self._waiting_bytes -= sum(len(waiting.answer.raw) for waiting in state.waiting)
                self._line.remove(queue)
            state.waiting.clear()

    def _diverged(self, ticket: Ticket, state: _Queue, answer: PullAnswer, now_s: float) -> None:
        if self.options.offset_reset == "error":
            state.paused_until_s = now_s + BACKOFF_MIN_S
            raise _illegal(
                ticket,
                answer,
                f"messages before offset {ticket.queue_offset} were taken back, from {answer.next_offset} on",
                diverging_offset=str(answer.next_offset),
            )
        self.follow_fork(ticket.queue, answer.next_offset, answer.log_epoch)

    def _offset_illegal(
        self, ticket: Ticket, state: _Queue, answer: PullAnswer, now_s: float
    ) -> None:
        policy = self.options.offset_reset
        outside = (
            f"offset {ticket.queue_offset} is outside [{answer.min_offset}, {answer.end_offset}]"
        )
        if policy == "error":
            state.paused_until_s = now_s + BACKOFF_MIN_S
            raise _illegal(ticket, answer, outside)
        target = {"earliest": answer.min_offset, "latest": answer.end_offset}.get(
            policy, answer.next_offset
        )
        logger.warning("%s: %s: continuing at %d", ticket.queue, outside, target)
        state.pull_offset = target
        _pass_over(state)


def _illegal(ticket: Ticket, answer: PullAnswer, why: str, **more: str) -> OffsetIllegalError:
    """`more`: for the error's metadata."""
    return OffsetIllegalError(
        f"{ticket.queue}: {why}: seek",
        metadata={
            "queue_offset": str(ticket.queue_offset),
            "min_offset": str(answer.min_offset),
            "end_offset": str(answer.end_offset),
            **more,
        },
    )


def _deleted(queue: MessageQueue) -> TopicNotFoundError:
    error = TopicNotFoundError(
        f"topic {queue.topic!r} was deleted at broker {queue.broker_name!r} while it was read; unsubscribe or assign other queues, "
        "or subscribe or assign again to begin with a new topic of that name",
        metadata={"topic": queue.topic, "broker_name": queue.broker_name},
    )
    error.retriable = error.stale_route = False  # It has been looked up again.
    return error


def with_tags(messages: list[Message], tags: tuple[str, ...]) -> list[Message]:
    """Those that have one of the tags, and those whose tag is damaged: the user gets an error rather than missing a message."""
    try:
        return [message for message in messages if message.tag in tags]
    except CorruptMessageError:
        return [
            message
            for message in messages
            if isinstance(message, DamagedMessage) or message.tag in tags
        ]


class _Rooms:
    """How much more may be taken in one call."""

    def __init__(self, room_of: RoomOf) -> None:
        self.total = room_of(None)
        self._room_of = room_of
        self._left: dict[MessageQueue, Room] = {}

    def fill(self, queue: MessageQueue, waiting: _Waiting, stop: int) -> int:
        """Up to where messages of an answer are taken, `stop` at most."""
        room = self._left.get(queue) or self._room_of(queue)
        stop = min(stop, waiting.taken + room.messages)
        if stop <= waiting.taken:
            return waiting.taken
        size_max_bytes, raw_size_bytes = min(room.size_bytes, self.total.size_bytes), len(waiting.answer.raw)
        # Seldom: a bound is many answers.
        if size_max_bytes < raw_size_bytes:
            sizes = waiting.answer.sizes[waiting.taken : stop]
            stop = waiting.taken + sum(before < size_max_bytes for before in itertools.accumulate(sizes[:-1], initial=0))
        # Of octets rather too few are left than too many: the next call knows better.
        self._left[queue] = Room(room.messages - (stop - waiting.taken), room.size_bytes - raw_size_bytes)
        self.total = Room(self.total.messages, self.total.size_bytes - raw_size_bytes)
        return stop


def _open_from(state: _Queue, still_open: Mapping[int, tuple[_Queue, int]]) -> int:
    """The position of a queue that was handed out, or the first message that is open still."""
    assert state.position is not None
    return min(state.position, still_open[id(state)][1]) if id(state) in still_open else state.position


def _pass_over(state: _Queue) -> None:
    """There is nothing between the position and the next pull; that is finished if what stands before it is."""
    if not state.waiting:
        if state.safe_position == state.position:
            state.safe_position = state.pull_offset
        state.position = state.pull_offset


def _wants_pull(state: _Queue) -> bool:
    return (
        not state.in_flight
        and state.position is not None
        and len(state.waiting) < (1 if state.is_held else ANSWERS_WAITING_MAX)
    )
