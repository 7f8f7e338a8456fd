"""AsyncTransactionProducer: transactions from coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from ._async_producer import AsyncProducer
from ._at_exit import call_at_exit
from ._checks import ExecuteChecks, check_flag, check_listener, check_seconds, checked_texts
from ._closing import Closing
from ._connection_options import ConnectionOptions
from ._end_lines import AsyncEndLine
from ._forks import call_after_fork
from ._half_core import HalfCore, HalfResult, end_of, end_of_half
from ._loop_ends import is_closed
from ._of_one_process import OfOneProcess
from ._outgoing import OutgoingMessage, SendResult
from ._producer_options import ProducerSettings
from ._retry import is_denial
from ._seldom import SaidSeldom
from ._send_arguments import SendSettings
from ._transactions import (
    PAUSE_S,
    TOPIC_PAUSE_S,
    End,
    TransactionCheck,
    TransactionDecision,
    TransactionResult,
    decision_of,
    end_steps,
    is_unconfirmed,
    listener_decision,
    may_be_stored,
    new_end,
    not_begun,
    not_rolled_back,
    note_not_taken,
    refuse_never_run,
    result_of,
    say_listener_failed,
    say_not_taken,
    say_not_told,
    say_unconfirmed,
    topic_in_turn,
    wait_steps,
)
from ._types import PEER_TIMEOUT_S, Body, MessageQueue
from .errors import ClosedError, ConfigurationError, ProtomqError, TransactionNotFoundError

if TYPE_CHECKING:

    from ._async_transport import AsyncTransport

logger = logging.getLogger("protomq.producer")

_COMMIT: Final = TransactionDecision.COMMIT
SEARCH_DELAY_S: Final = 0.1
"""After a send that was cut off, until the brokers of its topic are looked for. They ask no earlier than a transaction is 6 s old."""

_own_answer: Final[contextvars.ContextVar[asyncio.Future[None] | None]] = contextvars.ContextVar("protomq_own_answer", default=None)
"""In a listener, and in tasks that it makes, as `asyncio.wait_for` does: what a `close` waits for that is called elsewhere."""

Listener = Callable[[TransactionCheck], TransactionDecision | Awaitable[TransactionDecision]]
"""A function or a coroutine function."""


class _AsyncHalfProducer(AsyncProducer):
    """A producer whose messages are half messages."""

    loop_left: Callable[[], None] = staticmethod(lambda: None)
    """Called where the loop was closed to which the producer belonged, in the next one."""

    def _leave_loop(self) -> None:
        self.loop_left()
        super()._leave_loop()

    def _make_core(self) -> HalfCore:
        return HalfCore(self.options, self._hooks)

    def stored(self, topic: str | OutgoingMessage, body: Body) -> Awaitable[SendResult]:
        """`send` of a message with a body and nothing else. Mostly a future, not a coroutine: see `AsyncTransactionProducer._told`."""
        is_full = self._pending_size > self.options.pending_size_max_bytes
        if not isinstance(topic, str) or self._hooks.send or is_full:
            return self.send(topic, body)
        deadline_s = self._deadline(None)
        record = self._core.prepare(body, deadline_s=deadline_s)
        line = self._lines.get((topic, None, None)) or self._line(topic, None, None)
        return self._enqueue(line, record, deadline_s).future


class AsyncTransaction:
    """One that was begun with `AsyncTransactionProducer.begin`; see Transaction. A task that is cancelled in the block leaves it open.

        async with await producer.begin("bookings", b"...") as transaction:
            await book(transaction.message_id)
    """

    def __init__(self, producer: AsyncTransactionProducer, half: HalfResult) -> None:
        self.half = half
        self._producer = producer
        self._tried: TransactionDecision | None = None
        """What the program has decided last, whether the broker has taken it or not."""
        self._is_ended = False

    @property
    def message_id(self) -> str:
        """The message's id, which it keeps."""
        return self.half.message_id

    @property
    def transaction_handle(self) -> str:
        """Names it to any producer of the group, and to `protomq transaction`."""
        return self.half.transaction_handle

    async def commit(self, timeout_s: float | None = None) -> None:
        """See Transaction.commit."""
        await self._end(TransactionDecision.COMMIT, timeout_s)

    async def roll_back(self, timeout_s: float | None = None) -> None:
        """Nobody gets the message. See `commit`."""
        await self._end(TransactionDecision.ROLL_BACK, timeout_s)

    async def _end(self, decision: TransactionDecision, timeout_s: float | None) -> None:
        self._tried = decision
        await self._producer.end(self.half, decision, timeout_s=timeout_s)
        self._is_ended = True

    async def __aenter__(self) -> AsyncTransaction:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._is_ended:
            return
        if error is None:
            await self._end(self._tried or TransactionDecision.COMMIT, None)
            return
        if not isinstance(error, Exception):  # an interrupt: what it interrupted may be done
            return
        if self._tried is TransactionDecision.COMMIT:  # The broker may have it. If not, it asks: the work is done.
            return
        try:
            await self.roll_back()
        except TransactionNotFoundError as gone:  # Nobody gets the message: that was wanted.
            say_not_taken(self.message_id, TransactionDecision.ROLL_BACK, gone)
        except ProtomqError:  # the error that ended the block counts
            logger.exception("the transaction of message %s was not rolled back", self.message_id)


class AsyncTransactionProducer(OfOneProcess):
    """TransactionProducer for coroutines of one event loop. `execute` and `check` are functions or coroutine functions."""

    def __init__(
        self,
        group: str,
        check: Listener,
        *,
        topics: Sequence[str] = (),
        namesrv: str | Sequence[str] | None = None,
        transport: AsyncTransport | Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        connection: ConnectionOptions | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        if not group:
            raise ConfigurationError("transactions need a producer group: its producers are asked")
        topics = checked_texts("topics", topics)
        check_listener(check, may_be_coroutine=True)
        self._execute_checks = ExecuteChecks(may_be_coroutine=True)
        self._check = check
        self._seldom = SaidSeldom(time.monotonic)
        self._wanted_topics = tuple(topics)
        self._producer = _AsyncHalfProducer(
            group,
            namesrv=namesrv,
            transport=transport,
            client_id=client_id,
            peer_timeout_s=peer_timeout_s,
            connection=connection,
            **settings,
        )
        self._producer.loop_left = self._leave_loop
        self._closed = False
        self._closing = Closing(None)
        self._begin()
        call_after_fork(self)
        call_at_exit(self)

    def _begin(self) -> None:
        """In a loop: nothing is under way in it yet."""
        self._topics = self._wanted_topics
        """Those that are not followed yet."""
        self._lines: dict[str, AsyncEndLine] = {}
        self._listening: dict[str, dict[str, None]] = {}
        """See TransactionProducer."""
        self._searched: set[str] = set()
        """Topics whose brokers are looked for, since a half message may be there."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: dict[asyncio.Future[None], asyncio.Task[Any]] = {}
        """Those of them in which a listener runs, or what it has decided is told, by what `close` waits for."""
        self._closers: set[asyncio.Task[Any]] = set()
        """Those of them whose listener has called `close`: it would wait for itself."""

    def after_fork(self) -> None:
        """Prepares a forked child: what is under way is the parent's. The SDK calls it."""
        self._forget_lines()
        self._begin()

    def _leave_loop(self) -> None:
        left = self._left_count()
        self._forget_lines()
        self._begin()
        if left:
            say_not_told(left, "the event loop was closed")

    def _forget_lines(self) -> None:
        for line in self._lines.values():
            line.forget()

    def _left_count(self) -> int:
        return sum(line.count for line in self._lines.values())

    # Sending.

    async def send(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        execute: Callable[[SendResult], TransactionDecision | Awaitable[TransactionDecision | None] | None],
        wait_for_end: bool = True,
        **settings: Unpack[SendSettings],
    ) -> TransactionResult:
        """See TransactionProducer.send. A task that is cancelled while `execute` runs leaves the transaction open, as Ctrl-C does."""
        self._execute_checks.check(execute)
        check_flag("wait_for_end", wait_for_end)
        self._producer._ensure_bound()  # First: in another loop, its topics are followed again.
        if self._topics:
            self._follow()
        producer, timeout_s = self._producer, settings.get("timeout_s")
        stored = producer.send(topic, body, **settings) if settings else producer.stored(topic, body)
        try:
            half = await stored
        except (ProtomqError, asyncio.CancelledError) as error:
            self._listen_where_stored(topic, error)
            raise
        assert isinstance(half, HalfResult)
        if half.queue.topic not in self._listening.get(half.queue.broker_name, ()):
            self._listen_to(half.queue)
        if is_unconfirmed(half):
            say_unconfirmed(half, self._seldom)
            decision = TransactionDecision.ROLL_BACK
        else:
            try:
                returned = execute(half)
                if returned is not None and inspect.isawaitable(returned):
                    returned = await returned
                if returned is not None:
                    refuse_never_run(returned)
            except Exception:
                await self._roll_back(half, timeout_s)
                raise
            decision = _COMMIT if returned is None else decision_of(returned)
        is_ended = False
        if not wait_for_end:
            told = self._tell_end(half, decision, timeout_s)
            if told is not None:
                await asyncio.wait((told,))
        elif decision is not TransactionDecision.UNKNOWN:
            # As TransactionProducer has it; each coroutine that stands in between costs every transaction a call.
            try:
                await self._ended(half, decision, timeout_s)
                is_ended = True
            except ProtomqError as error:
                is_ended = note_not_taken(half.message_id, decision, error)
        return result_of(half, decision, is_ended)

    async def begin(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        **settings: Unpack[SendSettings],
    ) -> AsyncTransaction:
        """See TransactionProducer.begin."""
        self._producer._ensure_bound()
        self._follow()
        try:
            half = await self._producer.send(topic, body, **settings)
        except (ProtomqError, asyncio.CancelledError) as error:
            self._listen_where_stored(topic, error)
            raise
        assert isinstance(half, HalfResult)
        self._listen_to(half.queue)
        if is_unconfirmed(half):
            refusal = await self._roll_back(half, settings.get("timeout_s"))
            raise not_begun(half, refusal) from refusal
        return AsyncTransaction(self, half)

    async def end(
        self,
        half: SendResult,
        decision: TransactionDecision,
        *,
        timeout_s: float | None = None,
    ) -> bool:
        """See TransactionProducer.end."""
        self._producer._ensure_bound()
        end = end_of(half, decision, for_hooks=bool(self._producer._hooks.end))
        return await self._told(end, timeout_s)

    def _ended(
        self, half: HalfResult, decision: TransactionDecision, timeout_s: float | None
    ) -> Awaitable[bool]:
        producer = self._producer
        if timeout_s is None and not producer._hooks.end:  # mostly
            topic, broker_name, _ = half.queue
            end = new_end((topic, broker_name, half.transaction_handle, decision, "", False))
            return self._line_of(broker_name).tell(end, producer.options.send_timeout_s)
        return self._told(end_of_half(half, decision, for_hooks=bool(producer._hooks.end)), timeout_s)

    def _line_of(self, broker_name: str, *, is_check: bool = False) -> AsyncEndLine:
        if self._closed and not is_check:
            raise ClosedError("the producer is closed")
        line = self._lines.get(broker_name)
        if line is None:
            line = self._lines[broker_name] = AsyncEndLine(self._call_end)
        return line

    def _told(self, end: End, timeout_s: float | None) -> Awaitable[bool]:
        """Mostly a future, not a coroutine: each that stands in between costs every transaction a call."""
        line, within_s = self._line_of(end.broker_name, is_check=end.is_check), self._seconds(timeout_s)
        if not self._producer._hooks.end:
            return line.tell(end, within_s)
        return self._told_with_hooks(line, end, within_s)

    async def _told_with_hooks(self, line: AsyncEndLine, end: End, within_s: float) -> bool:
        hooks = self._producer._hooks
        context = hooks.before_end(end)
        try:
            repeated = await line.tell(end, within_s)
        except BaseException as error:
            hooks.after_end(context, error)
            raise
        hooks.after_end(context, None)
        return repeated

    async def _roll_back(self, half: HalfResult, timeout_s: float | None) -> ProtomqError | None:
        """See TransactionProducer."""
        try:
            await self._ended(half, TransactionDecision.ROLL_BACK, timeout_s)
        except ProtomqError as error:
            return not_rolled_back(half.message_id, error)
        return None

    def _tell_end(
        self, half: HalfResult, decision: TransactionDecision, timeout_s: float | None
    ) -> asyncio.Future[bool] | None:
        """Puts the decision on its way. What is to be waited for where as many wait as one request takes."""
        if decision is TransactionDecision.UNKNOWN:
            return None
        hooks = self._producer._hooks
        topic, broker_name, _ = half.queue
        try:
            line = self._line_of(broker_name)
        except ClosedError as error:
            say_not_taken(half.message_id, decision, error)
            return None
        within_s = self._producer.options.send_timeout_s if timeout_s is None else self._seconds(timeout_s)
        on_failure = partial(_say_not_taken, half, decision)
        if not hooks.end and line.room > 1:
            end = new_end((topic, broker_name, half.transaction_handle, decision, "", False))
            line.tell_unawaited(end, within_s, on_failure)
            return None
        end = end_of_half(half, decision, for_hooks=bool(hooks.end))
        context = hooks.before_end(end) if hooks.end else None

        def note(told: asyncio.Future[bool]) -> None:
            error = told.exception()  # Nobody cancels it.
            if context is not None:
                hooks.after_end(context, error)

        told = line.tell(end, within_s, on_failure)
        told.add_done_callback(note)
        return None if line.room > 0 else told

    async def _call_end(self, ends: Sequence[End], timeout_s: float) -> list[bool | ProtomqError]:
        topics = self._listening.get(ends[0].broker_name, ())
        return await self._producer._driver.run(end_steps(ends, timeout_s, tuple(topics)))

    def _seconds(self, timeout_s: float | None, *, zero: bool = False) -> float:
        if timeout_s is None:
            return self._producer.options.send_timeout_s
        return check_seconds("timeout_s", timeout_s, zero=zero)

    # Checks.

    async def start(self) -> None:
        """Tells the brokers of `topics` that this producer is there; the first send, and `async with`, do that too."""
        self._producer._bind_to_loop()
        self._follow()

    def _follow(self) -> None:
        if self._topics:
            topics, self._topics = self._topics, ()
            _ = self._begin_task(self._follow_topics(topics))

    def _listen_to(self, queue: MessageQueue) -> None:
        """Tells the broker of a queue from now on that this producer is there."""
        topics = self._listening.get(queue.broker_name)
        if topics is not None:
            topics[queue.topic] = None
        elif not self._closed:
            topics = self._listening[queue.broker_name] = {queue.topic: None}
            task = self._begin_task(self._answer_checks(topics, queue.broker_name))
            # Somebody else may cancel it: then the next message begins another one.
            task.add_done_callback(lambda _: self._listening.pop(queue.broker_name, None))

    def _listen_where_stored(self, topic: str | OutgoingMessage, error: BaseException) -> None:
        """See TransactionProducer."""
        name = topic if isinstance(topic, str) else topic.topic
        if may_be_stored(error) and name not in self._searched and not self._closed:
            self._searched.add(name)
            # Not at once: a loop that is about to end has cancelled all of its tasks, and does not wait for a further one.
            asyncio.get_running_loop().call_later(SEARCH_DELAY_S, self._begin_search, name)

    def _begin_search(self, topic: str) -> None:
        if not self._closed:
            self._begin_task(self._search(topic)).add_done_callback(lambda _: self._searched.discard(topic))

    async def _search(self, topic: str) -> None:
        while not self._closed:
            if await self._listen_at(topic, once=True):
                return
            await asyncio.sleep(PAUSE_S)

    async def _listen_at(self, topic: str, *, once: bool = False) -> bool:
        """Tells the brokers of a topic that this producer is there. Returns False if they are not known yet.

        `once`: a topic that is nowhere is no reason to ask again.
        """
        try:
            for queue in await self._producer.queues(topic):
                self._listen_to(queue)
        except ProtomqError as error:
            logger.info("the brokers of topic %s are not known yet: %s", topic, error)
            return once and is_denial(error)
        return True

    def _begin_task(self, run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(run)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _follow_topics(self, topics: Sequence[str]) -> None:
        while not self._closed:
            is_known = all([await self._listen_at(topic) for topic in topics])
            await asyncio.sleep(TOPIC_PAUSE_S if is_known else PAUSE_S)

    async def _answer_checks(self, topics: dict[str, None], broker_name: str) -> None:
        """Until the producer is closed: waits for what one broker asks, and answers."""
        producer = self._producer
        failures = 0
        while not self._closed:
            topic = topic_in_turn(topics, failures)
            try:
                route = await producer._route(topic, time.monotonic() + PAUSE_S, None)
                address = route.brokers.get(broker_name)
                if address is None:
                    failures += 1
                    producer._routes.invalidate(topic)
                    await asyncio.sleep(PAUSE_S)
                    continue
                checks = await producer._driver.run(
                    wait_steps(address, broker_name, producer.options.group)
                )
                for check in checks:
                    if self._closed:  # The broker asks another producer of the group, after the next interval.
                        return
                    await self._answer(topic, broker_name, check)
            except ProtomqError as error:
                if self._closed:
                    return
                failures += 1
                if error.stale_route:
                    producer._routes.invalidate(topic, is_denied=is_denial(error))
                logger.info("broker %s cannot ask about transactions: %s", broker_name, error)
                await asyncio.sleep(PAUSE_S)
            except Exception:
                logger.exception("a question of broker %s could not be answered", broker_name)
                await asyncio.sleep(PAUSE_S)

    async def _answer(self, topic: str, broker_name: str, check: TransactionCheck) -> None:
        own_task = asyncio.current_task()
        assert own_task is not None
        answered = asyncio.get_running_loop().create_future()
        self._answering[answered] = own_task
        _own_answer.set(answered)
        try:
            await self._decide(topic, broker_name, check, own_task)
        finally:
            self._answering.pop(answered, None)
            _set_done(answered)

    async def _decide(self, topic: str, broker_name: str, check: TransactionCheck, own_task: asyncio.Task[Any]) -> None:
        try:
            returned = self._check(check)
            decision = listener_decision(await returned if inspect.isawaitable(returned) else returned)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and own_task.cancelling():
                raise  # The producer is closed.
            if is_closed(error, own_task):
                raise
            say_listener_failed(check, error, self._seldom)
            return
        if decision is TransactionDecision.UNKNOWN:
            return
        try:
            message_id = check.message.message_id
            await self._told(
                End(topic, broker_name, check.transaction_handle, decision, message_id, True), None
            )
        except ProtomqError as error:
            logger.info(
                "the answer about message %s was not taken: %s", check.message.message_id, error
            )

    # Life.

    @property
    def group(self) -> str:
        """The producer group."""
        return self._producer.group

    async def close(self, timeout_s: float | None = None) -> None:
        """See TransactionProducer.close. It goes on where the caller is cancelled, and a second call waits for it."""
        if self._closing.is_over or self._closing.is_own:
            return
        within_s = self._seconds(timeout_s, zero=True)
        if asyncio._get_running_loop() is not None:
            self._producer._bind_to_loop()
        own = _own_answer.get()
        if own is not None and own in self._answering:
            self._closers.add(self._answering[own])
            _set_done(own)
        self._closed = True
        for task in self._tasks.difference(self._answering.values()):
            task.cancel()
        await self._closing.wait(partial(self._end_all, within_s), partial(self._end_all, 0.0), self._producer._transport.abort)

    async def _end_all(self, timeout_s: float) -> None:
        """May be called again where it was cut off. A listener that closes its producer is not waited for, and not cancelled."""
        deadline_s = time.monotonic() + timeout_s
        if self._answering:
            await asyncio.wait(list(self._answering), timeout=timeout_s)
        for task in self._tasks - self._closers:
            task.cancel()
        for line in self._lines.values():
            await line.drain(max(deadline_s - time.monotonic(), 0.0))
        await self._producer.close(max(deadline_s - time.monotonic(), 0.0))

    def finish_at_exit(self) -> int:
        """When the interpreter ends, and with it the loop. Called by itself; what messages are lost, another one counts."""
        if not self._closed and (left := self._left_count()):
            say_not_told(left, "the interpreter ended")
        return 0

    async def __aenter__(self) -> AsyncTransactionProducer:
        if self._closed:
            raise ClosedError("the producer is closed")
        self._producer._bind_to_loop()
        self._follow()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _say_not_taken(half: HalfResult, decision: TransactionDecision, error: Exception) -> None:
    say_not_taken(half.message_id, decision, error)
