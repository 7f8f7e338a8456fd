"""What a push consumer decides: which messages may run now, what is done, what goes back. No I/O, no threads, time handed in.

    offer(queue, messages)      what was pulled
    next_run(now)               a Run: messages of one queue for one thread or task
    settled(run, ...)           what a listener said of some of them, unless they are simply done (run.done)
    ended(run, now)             nothing of it is left
    tick(now)                   from time to time: what takes too long
    lowest_open(queue)          the offset to commit

Rules:
- A message is open from `offer` until it is done, or given back and the broker has answered. The lowest open offset of a queue is the one
  to commit: a slow message holds back the commit, and nothing else.
- A run has as many messages as listeners lately finished in 5 ms, so fast ones do not cost a hand-over each. Results are per message.
  Whoever works on it takes its messages from the left. A message that takes long holds up none behind it: a tick finds that. Then the
  next thread with nothing else to do takes messages from the right end. Both ends of a deque may be taken from without a lock.
- A queue is full when it reaches its bound of messages, bytes or span of offsets. It is full until a quarter of that has gone. So is
  the consumer. What is full is not taken from.
- Orderly: one run of a queue at a time, of which nothing is taken away. A failure ends the run; the queue waits, and goes on with the same
  message. Of a batch, what stands behind that message comes again, too, whatever was said of it.
- A queue that is dropped is forgotten at once: what its runs say later counts no more. In order, what comes later waits for their end.

Calls come one at a time: threads hold a lock for them. Only a run's `messages`, `done` and `current` are touched without it, by its owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ._message import Message
from ._pull_logic import Room
from ._push_backs import Back, BackLine
from ._push_options import PushOptions
from ._push_results import BEHIND, Failure, Listener, failure_of_text
from ._send_back import attempt_fields
from ._types import MessageQueue
from .errors import CorruptMessageError
from .wire.topics import DEAD_LETTER_PREFIX, retry_topic

RUN_COUNT_MAX: Final = 256
RUN_TARGET_S: Final = 0.005
"""What a run is to take: Python gives another thread its turn after 5 ms, too."""
RUN_SHARED_S: Final = 0.0005
"""A run that would take less is not shared out among threads that have nothing to do: a hand-over takes a tenth of it."""
SPEED_WEIGHT: Final = 0.2
"""Of the last run in the mean time of a message."""
REFILL_SHARE: Final = 0.75
"""A queue that was full is taken from again when its load is below this share of the limit: not after each message."""


@dataclass(slots=True, eq=False)
class Work:
    """What is here of one queue."""

    queue: MessageQueue
    listener: Listener | None
    """None: each message has its own, as retries of several topics."""
    waiting: deque[Message] = field(default_factory=deque)
    open_offsets: deque[int] = field(default_factory=deque)
    """Ascending, from the lowest that is open."""
    finished: set[int] = field(default_factory=set)
    """Of `open_offsets`: done, above one that is not."""
    end_offset: int = 0
    count: int = 0
    size_bytes: int = 0
    in_line: bool = False
    is_full: bool = False
    is_busy: bool = False
    """Orderly: a run of its queue is under way, maybe one from before the queue was dropped."""
    suspended_until_s: float = 0.0


@dataclass(slots=True, eq=False)
class Run:
    """Messages of one queue that one thread or task works on."""

    work: Work
    listener: Listener
    messages: deque[Message]
    count: int
    """How many it was given, less what others took."""
    began_s: float
    is_orderly: bool = False
    """It ends with the first message that is to be tried again."""
    done: deque[Message] = field(default_factory=deque)
    current: Sequence[Message] | Message | None = None
    """What the listener has now."""
    seen: object = None
    seen_since_s: float = 0.0
    is_slow: bool = False
    told_of: object = None
    """Orderly: what took too long, and was told."""
    taken_away: Sequence[Message] = ()
    """Messages that took too long: what the listener says of them counts no more."""
    first_offset: int = field(init=False)
    last_offset: int = field(init=False)
    """Nothing behind it is this run's any more. It stands below `first_offset` where all was taken away before any began."""

    def __post_init__(self) -> None:
        self.first_offset, self.last_offset = self.messages[0]._queue_offset, self.messages[-1]._queue_offset


class Overdue(NamedTuple):
    """Messages that a listener has had for too long; they are given back, unless it `keeps` them, in order."""

    listener: Listener
    messages: Sequence[Message]
    keeps: bool


class PushState:
    """The messages of one consumer that are here."""

    def __init__(self, options: PushOptions, listeners: Mapping[str, Listener]) -> None:
        """`listeners`: by topic; may grow."""
        self.options = options
        self.backs = BackLine()
        self.is_suspended = False
        self._resumes_wanted = self._resumes_done = 0
        self.is_stopping = False
        self.is_shut = False
        """Broadcast: whether the group's settings say that nothing is consumed; see `shut`."""
        self.count = 0
        """Messages that are here and not done."""
        self.size_bytes = 0
        self.done_count = 0
        """Since the start, with those that were given back."""
        self.failed_count = 0
        """How often a message failed since the start: it was given back, or dropped, or is tried again in order."""
        self.stands: Callable[[MessageQueue], bool] = lambda _: True
        """Whether the queue is certainly still this consumer's: else nothing of it is begun. Those that are not are dropped soon."""
        self.dropped_count = 0
        """Broadcast: messages that failed; they are given back to nobody."""
        self.retry_count_max: int | None = None
        """Orderly: of the group's settings, where it was set; `attempts_max` comes first."""
        self._listeners = listeners
        self._retry_topic = retry_topic(options.group)
        self._works: dict[MessageQueue, Work] = {}
        self._done_before: dict[MessageQueue, set[int]] = {}
        """Broadcast: offsets that were done before this consumer, or its queue, began; until they have come."""
        self._line: deque[Work] = deque()
        self._waiting_count = 0
        self._runs: set[Run] = set()
        self._full: set[MessageQueue] = set()
        self._is_full = False
        self._has_room_again = False
        self._mean_s: float | None = None

    # -- messages in -----------------------------------------------------------------------------------------------------

    def offer(self, queue: MessageQueue, messages: Sequence[Message]) -> None:
        """Messages of one queue, in their order, behind those that were offered before."""
        if not messages:
            return
        work = self._works.get(queue)
        if work is None:
            listener = None if queue.topic == self._retry_topic else self._listeners.get(queue.topic)
            work = self._works[queue] = Work(queue, listener, is_busy=self.options.orderly and self.is_running((queue,)))
        work.open_offsets.extend([message._queue_offset for message in messages])
        work.end_offset = messages[-1]._queue_offset + 1
        if queue in self._done_before:
            messages = self._without_done(work, messages, self._done_before[queue])
        size_bytes = _size_of(messages)
        work.waiting.extend(messages)
        work.count += len(messages)
        work.size_bytes += size_bytes
        self.count += len(messages)
        self.size_bytes += size_bytes
        self._waiting_count += len(messages)
        self._line_up(work)
        self._look_at_limits(work)

    def remember_done(self, queue: MessageQueue, offsets: set[int]) -> None:
        """Messages that are done already: no listener gets them when they come."""
        if offsets:
            self._done_before[queue] = offsets

    def forget_done(self, queue: MessageQueue) -> None:
        """Other messages may stand at the offsets now."""
        self._done_before.pop(queue, None)

    def done_behind(self, queue: MessageQueue) -> set[int]:
        """The offsets that are done, behind the lowest one that is not. Ask before `lowest_open`: then none is missing below that one."""
        for run in self._runs:
            if run.work.queue == queue:
                self._collect(run)
        work = self._works.get(queue)
        finished = set() if work is None else work.finished
        return finished | self._done_before.get(queue, set())

    def held(self) -> Collection[MessageQueue] | None:
        """Queues of which no more is to be taken; None: of none at all."""
        if self._rests() or self._is_full:
            return None
        return self._full

    def room(self, queue: MessageQueue | None) -> Room:
        """How much more of a queue is to be taken, or of all together. Where offsets have gaps, the span may grow beyond its bound."""
        options = self.options
        if queue is None:
            return Room(options.count_max - self.count, options.size_max_bytes - self.size_bytes)
        work = self._works.get(queue)
        if work is None:
            return Room(min(options.queue_count_max, options.queue_span_max), options.queue_size_max_bytes)
        span = work.end_offset - work.open_offsets[0] if work.open_offsets else 0
        count = min(options.queue_count_max - work.count, options.queue_span_max - span)
        return Room(count, options.queue_size_max_bytes - work.size_bytes)

    def has_room_again(self) -> bool:
        """Whether something that was full is so no more since the last time this was asked."""
        had, self._has_room_again = self._has_room_again, False
        return had

    def open_counts(self) -> dict[MessageQueue, int]:
        """Messages that are here and not done, by queue."""
        return {queue: work.count for queue, work in self._works.items()}

    @property
    def waiting_count(self) -> int:
        """Messages that no listener has yet."""
        return self._waiting_count

    def lowest_open(self, queue: MessageQueue) -> int | None:
        """The first offset that is not done; None: all that was offered is done."""
        for run in self._runs:
            if run.work.queue == queue:
                self._collect(run)
        work = self._works.get(queue)
        return work.open_offsets[0] if work is not None and work.open_offsets else None

    # -- runs ------------------------------------------------------------------------------------------------------------

    def next_run(self, now_s: float, idle_count: int = 1) -> Run | None:
        """Messages for one thread or task; None: there are none now. `idle_count`: how many could take some, this one included."""
        if self._rests():
            return None
        for _ in range(len(self._line)):
            work = self._line.popleft()
            work.in_line = False
            if not work.waiting:
                continue
            if work.suspended_until_s > now_s or not self.stands(work.queue):
                self._line_up(work)
                continue
            return self._cut(work, now_s, idle_count)
        return self._steal(now_s)

    def runs_wanted(self) -> int:
        """How many threads or tasks would find something to do now; more than that need not look."""
        if self._rests():
            return 0
        slow_count = sum(run.is_slow and bool(run.messages) for run in self._runs)
        if self.options.orderly:
            return len(self._line)
        return -(-self._waiting_count // self._run_length(RUN_SHARED_S)) + slow_count

    @property
    def runs(self) -> Collection[Run]:
        """Those that are with listeners."""
        return self._runs

    @property
    def running_count(self) -> int:
        """Runs that are with listeners."""
        return len(self._runs)

    def next_due_in_s(self, now_s: float) -> float:
        """Until a queue that waits goes on; infinity if none does."""
        return min(
            [max(work.suspended_until_s - now_s, 0.0) for work in self._line if work.suspended_until_s > now_s],
            default=float("inf"),
        )

    def settled(
        self, run: Run, messages: Sequence[Message], failures: Sequence[Failure | None], now_s: float
    ) -> None:
        """What a listener said of messages of its run: a failure each, or None where it is done. It may have the next ones by now."""
        if self.options.orderly:
            self._settle_in_order(run, messages, failures, now_s)
            return
        failed: list[tuple[Message, Failure]] = []
        for message, failure in zip(messages, failures, strict=True):
            if any(message is one for one in run.taken_away):
                continue
            if failure is None:
                run.done.append(message)
            else:
                failed.append((message, failure))
        self._collect(run)
        for message, failure in failed:
            self._fail(run, message, failure)

    def _settle_in_order(
        self, run: Run, messages: Sequence[Message], failures: Sequence[Failure | None], now_s: float
    ) -> None:
        judged = judge_in_order(self.options, self.retry_count_max, messages, failures)
        run.done.extend(judged.done)
        for message, failure in judged.dead:
            self._fail(run, message, failure)
        self._collect(run)
        if judged.again:
            self.failed_count += judged.tried_count
            run.work.suspended_until_s = now_s + judged.delay_ms / 1000
            self._put_back(run, judged.again)

    def ended(self, run: Run, now_s: float) -> None:
        """The run's owner has nothing of it any more."""
        self._collect(run)
        self._runs.discard(run)
        if run.count > 0:
            mean_s = max(now_s - run.began_s, 1e-7) / run.count
            last_s = mean_s if self._mean_s is None else self._mean_s
            self._mean_s = last_s + SPEED_WEIGHT * (mean_s - last_s)
        work = run.work
        if run.messages:  # Its owner was stopped in the middle.
            self._put_back(run, ())
        if self.options.orderly:
            # After a drop, it is what has come of the queue since then that goes on.
            work = self._works.get(work.queue, work)
            work.is_busy = False
            self._line_up(work)

    def tick(self, now_s: float) -> list[Overdue]:
        """What has been with a listener for too long, told once, and given back now unless it is in order. Finds runs of which others are
        to take the rest.
        """
        found: list[Overdue] = []
        for run in self._runs:
            self._collect(run)
            current = run.current
            if current is None or current is not run.seen:
                run.seen, run.seen_since_s, run.is_slow = current, now_s, False
                continue
            run.is_slow = True
            if now_s - run.seen_since_s < self.options.consume_timeout_s:
                continue
            messages = (current,) if isinstance(current, Message) else tuple(current)
            if self.options.orderly:
                # Given back, it would come behind the next ones of its queue.
                if messages and run.told_of is not current:
                    run.told_of = current
                    found.append(Overdue(run.listener, messages, keeps=True))
                continue
            if messages and not any(messages[0] is one for one in run.taken_away):
                run.taken_away = messages
                found.append(Overdue(run.listener, messages, keeps=False))
                failure = failure_of_text(
                    f"{run.listener.name} was not done with it after {self.options.consume_timeout_s:g} s"
                )
                for message in messages:
                    self._fail(run, message, failure)
        return found

    # -- what was given back ---------------------------------------------------------------------------------------------

    def given_back(self, backs: Iterable[Back]) -> None:
        """The broker has them again, or will never take them: they are finished."""
        for back in backs:
            work = self._works.get(back.message.queue)
            if work is not None and work is back.work:
                self._finish(work, (back.message,))

    # -- queues that go --------------------------------------------------------------------------------------------------

    def shut(self, is_shut: bool) -> None:
        """Whether all that no listener has begun waits here."""
        was_shut, self.is_shut = self.is_shut, is_shut
        if is_shut and not was_shut:
            self.rest()

    def revoke(self, queues: Collection[MessageQueue]) -> None:
        """Of these queues no listener gets anything more, but what has to be done that others behind it are not done in vain.

        A slow message may hold up the next ones of its run. What is done behind them, or is with a listener now, cannot be committed before
        they are done. What listeners have now still counts: see `is_running`, then `drop`.
        """
        self._take_back(queues, is_for_good=False)

    def _take_back(self, queues: Collection[MessageQueue], *, is_for_good: bool) -> None:
        # Runs from before a reset have nothing left to begin, and say nothing of what came since.
        runs = [run for run in self._runs if run.work.queue in queues and self._works.get(run.work.queue) is run.work]
        for run in runs:
            self._collect(run)
        begun: dict[MessageQueue, int] = {}
        # Those that stand behind first: of such a run nothing more can begin when it is known how far it has come.
        for run in sorted(runs, key=lambda one: one.last_offset, reverse=True):
            queue = run.work.queue
            keeps_below = max(run.work.finished, default=-1) if queue not in begun else begun[queue]
            self._put_back(run, (), -1 if is_for_good else keeps_below)
            begun[queue] = max(keeps_below, run.last_offset if run.last_offset >= run.first_offset else -1)
        for queue in queues:
            work = self._works.get(queue)
            if work is not None:
                self._waiting_count -= len(work.waiting)
                work.waiting.clear()

    def is_running(self, queues: Collection[MessageQueue] | None = None) -> bool:
        """Whether listeners have messages of these queues, or of any. Those of before a reset count in order only."""
        if queues is None:
            return bool(self._runs)
        return any(
            run.work.queue in queues and (self.options.orderly or self._works.get(run.work.queue) is run.work) for run in self._runs
        )

    def has_backs(self, queues: Collection[MessageQueue] | None = None) -> bool:
        """Whether messages of these queues, or of any, are to be given back yet."""
        return self.backs.has_any(queues)

    def drop(self, queues: Collection[MessageQueue]) -> None:
        """These queues are not this consumer's any more: all that is here of them is forgotten."""
        self._take_back(queues, is_for_good=True)
        self.backs.drop(queues)
        for queue in queues:
            self._done_before.pop(queue, None)
            work = self._works.pop(queue, None)
            if work is None:
                continue
            self.count -= work.count
            self.size_bytes -= work.size_bytes
            work.count = work.size_bytes = 0
            work.open_offsets.clear()
            work.finished.clear()
            self._full.discard(queue)
        self._look_at_total()

    def suspend(self) -> None:
        """No listener gets anything more, until `resume`."""
        self.is_suspended = True
        self.rest()

    def rest(self) -> None:
        """What listeners have not begun waits here, if none is to get anything now."""
        if self._rests():
            # The last ones first: each run goes to the head of what waits.
            for run in sorted(self._runs, key=lambda one: one.last_offset, reverse=True):
                self._put_back(run, ())

    def resume(self) -> None:
        """No longer suspended, as soon as it is known whether the group's offset was reset: see `resumed`."""
        if self.is_suspended:
            self._resumes_wanted += 1
            self.is_suspended = False

    @property
    def resumes_wanted(self) -> int | None:
        """What `resumed` is to be told when the group's offset was looked at; None: nobody waits for that."""
        return self._resumes_wanted if self._resumes_done < self._resumes_wanted else None

    def resumed(self, resumes: int) -> None:
        """Listeners get messages again, unless another `resume` came meanwhile: resets before that one count, too."""
        self._resumes_done = resumes

    def stop(self) -> None:
        """No listener gets anything more; what has not begun stays open."""
        self.is_stopping = True
        self.revoke(list(self._works))

    # --------------------------------------------------------------------------------------------------------------------

    def _rests(self) -> bool:
        """Whether no listener gets anything now."""
        return self.is_suspended or self.is_stopping or self.is_shut or self._resumes_done < self._resumes_wanted

    def _line_up(self, work: Work) -> None:
        if work.waiting and not work.in_line and not work.is_busy:
            work.in_line = True
            self._line.append(work)

    def _run_length(self, seconds: float) -> int:
        """How many messages listeners lately did in the time."""
        if self._mean_s is None:
            return 1
        return min(max(int(seconds / self._mean_s), 1), RUN_COUNT_MAX)

    def _cut(self, work: Work, now_s: float, idle_count: int) -> Run:
        waiting = work.waiting
        listener = work.listener or self.listener_of(waiting[0])
        count = self._run_length(RUN_TARGET_S)
        if not self.options.orderly:
            share = -(-self._waiting_count // max(idle_count, 1))
            count = min(count, max(share, self._run_length(RUN_SHARED_S)))
        if listener.batch_size is not None:
            # Whole batches: the rest of a run would come as a short list though more are here.
            count = -(-count // listener.batch_size) * listener.batch_size
        count = min(count, len(waiting))
        if work.listener is None:
            for i in range(1, count):
                if self.listener_of(waiting[i]) is not listener:
                    count = i
                    break
        if count == len(waiting):
            messages, work.waiting = waiting, deque()
        else:
            messages = deque([waiting.popleft() for _ in range(count)])
        self._waiting_count -= count
        if self.options.orderly:
            work.is_busy = True
        self._line_up(work)
        return self._begin(Run(work, listener, messages, count, now_s, self.options.orderly))

    def _begin(self, run: Run) -> Run:
        self._runs.add(run)
        return run

    def _steal(self, now_s: float) -> Run | None:
        """Half of what stands behind a message that takes long."""
        if self.options.orderly:
            return None
        slow = [run for run in self._runs if run.is_slow and run.messages and self.stands(run.work.queue)]
        if not slow:
            return None
        victim = max(slow, key=lambda run: len(run.messages))
        stolen: deque[Message] = deque()
        for _ in range(-(-len(victim.messages) // 2)):
            try:
                stolen.appendleft(victim.messages.pop())
            except IndexError:  # Its owner goes on again.
                break
        victim.count -= len(stolen)
        if not stolen:
            return None
        victim.last_offset = stolen[0]._queue_offset - 1
        return self._begin(Run(victim.work, victim.listener, stolen, len(stolen), now_s))

    def listener_of(self, message: Message) -> Listener:
        """Of a retry: the one of the topic in which this group had the message, and no other.

        So it is if that topic was unsubscribed, or another subscription has come in its place: see `PushConsumer.unsubscribe`.
        """
        try:
            topic = _consumed_topic(message)
        except CorruptMessageError:
            return NOBODY
        return self._listeners.get(topic, NOBODY)

    def _collect(self, run: Run) -> None:
        """What its owner has reported as done."""
        done = run.done
        if not done:
            return
        messages = []
        try:
            while True:
                messages.append(done.popleft())
        except IndexError:
            pass
        if run.taken_away:
            messages = [one for one in messages if not any(one is other for other in run.taken_away)]
        work = run.work
        if self._works.get(work.queue) is work:
            self._finish(work, messages)

    def _finish(self, work: Work, messages: Sequence[Message]) -> None:
        size_bytes = _size_of(messages)
        work.count -= len(messages)
        work.size_bytes -= size_bytes
        self.count -= len(messages)
        self.size_bytes -= size_bytes
        self.done_count += len(messages)
        self._close(work, [message._queue_offset for message in messages])
        if work.is_full or self._is_full:
            self._look_at_limits(work)

    @staticmethod
    def _close(work: Work, offsets: Iterable[int]) -> None:
        """These offsets are not open any more."""
        finished, open_offsets = work.finished, work.open_offsets
        finished.update(offsets)
        while open_offsets and open_offsets[0] in finished:
            finished.remove(open_offsets.popleft())

    def _without_done(self, work: Work, messages: Sequence[Message], done: set[int]) -> Sequence[Message]:
        """Those that are not done already. When all of these have come, they are remembered no more."""
        offsets = [message._queue_offset for message in messages]
        self._close(work, done.intersection(offsets))
        if offsets[-1] >= max(done):
            del self._done_before[work.queue]
        return [message for message, offset in zip(messages, offsets, strict=True) if offset not in done]

    def _fail(self, run: Run, message: Message, failure: Failure) -> None:
        work = run.work
        if self._works.get(work.queue) is not work:
            return  # The queue has gone.
        self.failed_count += 1
        if self.options.broadcast:
            self.dropped_count += 1
            self._finish(work, (message,))
        else:
            self.backs.add(Back(work, message, {**failure.fields, **attempt_fields(message)}))

    def _put_back(self, run: Run, messages: Sequence[Message], below_offset: int = -1) -> None:
        """`messages`, and the rest of a run, wait again, in front; the run keeps what is below an offset."""
        taken: list[Message] = []
        try:
            # The owner of the run takes from the other end, without the lock.
            while run.messages[-1]._queue_offset > below_offset:
                taken.append(run.messages.pop())
        except IndexError:
            pass
        if taken:
            run.last_offset = taken[-1]._queue_offset - 1
        rest = [*messages, *reversed(taken)]
        run.count -= len(rest) - len(messages)
        work = run.work
        if self._works.get(work.queue) is work:
            work.waiting.extendleft(reversed(rest))
            self._waiting_count += len(rest)
            self._line_up(work)

    def _look_at_limits(self, work: Work) -> None:
        options = self.options
        was_full = work.is_full
        share = REFILL_SHARE if was_full else 1.0
        span = work.end_offset - work.open_offsets[0] if work.open_offsets else 0
        work.is_full = (
            work.count >= options.queue_count_max * share
            or work.size_bytes >= options.queue_size_max_bytes * share
            or span >= options.queue_span_max * share
        )
        if work.is_full != was_full:
            (self._full.add if work.is_full else self._full.discard)(work.queue)
            self._has_room_again |= was_full
        self._look_at_total()

    def _look_at_total(self) -> None:
        was_full = self._is_full
        share = REFILL_SHARE if was_full else 1.0
        self._is_full = (
            self.count >= self.options.count_max * share
            or self.size_bytes >= self.options.size_max_bytes * share
        )
        self._has_room_again |= was_full and not self._is_full


class InOrder(NamedTuple):
    """What becomes of messages of an orderly queue, by what their listener said.

    `again`: from the first one on that is to be tried again, or that a failure stands before, all that stand behind it. They wait for
    `delay_ms`. `tried_count`: how many of them have failed.
    """

    done: list[Message]
    dead: list[tuple[Message, Failure]]
    again: list[Message]
    delay_ms: int
    tried_count: int


def judge_in_order(
    options: PushOptions, retry_count_max: int | None, messages: Iterable[Message], failures: Iterable[Failure | None]
) -> InOrder:
    """Judges them, and notes in each message that is to be tried again that it was tried. `retry_count_max`: as of `_is_spent`."""
    judged = InOrder([], [], [], 0, 0)
    for message, failure in zip(messages, failures, strict=True):
        if failure is BEHIND:
            judged.again.append(message)
            continue
        if failure is not None and not failure.is_dead_letter:
            tries = message.own_tries + 1
            if not _is_spent(options, retry_count_max, message, tries):
                message._tried(tries, failure.error)
                judged = judged._replace(tried_count=judged.tried_count + 1)
                if not judged.again:
                    judged = judged._replace(delay_ms=options.suspend_ms if failure.delay_ms is None else failure.delay_ms)
                judged.again.append(message)
                continue
            failure = Failure({"error": failure.error, "dead_letter": True})
        if judged.again:
            judged.again.append(message)
        elif failure is None:
            judged.done.append(message)
        else:
            judged.dead.append((message, failure))
    for message in judged.again:
        message._forget_assigned()
    return judged


def _is_spent(options: PushOptions, retry_count_max: int | None, message: Message, attempts: int) -> bool:
    """Orderly: whether a message, which has just failed for the `attempts`-th time here, is tried no more.

    `retry_count_max`: of the group's settings; None: not set, so there is no limit.
    """
    if options.attempts_max is not None:
        return attempts >= options.attempts_max
    if retry_count_max is None:
        return False
    if message.queue.topic.startswith(DEAD_LETTER_PREFIX):
        return attempts > retry_count_max  # Its record counts the attempts of another group.
    try:
        failed_count = message.attempt + 1
    except CorruptMessageError:
        failed_count = attempts
    return failed_count > retry_count_max


def _size_of(messages: Sequence[Message]) -> int:
    """The sum of their `size_bytes`, without a call for each."""
    return sum([len(one._rest) + len(one._stored) for one in messages])


def _consumed_topic(message: Message) -> str:
    """Of a retry: where its group had the message first. Raises CorruptMessageError."""
    transit = message._transit()
    return transit.consumed_topic if transit is not None else message.topic


def _without_listener(message: Message) -> None:
    raise LookupError(f"this consumer has no listener for topic {_consumed_topic(message)!r}")


NOBODY: Final = Listener(_without_listener, "no listener", False)
"""Whom a retry goes to whose topic never had a listener here."""
