"""TransactionProducer: transactions from threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from ._at_exit import call_at_exit
from ._calls_under_way import ThreadCalls
from ._checks import ExecuteChecks, check_flag, check_listener, check_seconds, checked_texts
from ._company import Company
from ._connection_options import ConnectionOptions
from ._end_lines import EndLine
from ._forks import call_after_fork
from ._half_core import HalfCore, HalfResult, end_of
from ._of_one_process import OfOneProcess
from ._outgoing import OutgoingMessage, SendResult, Stored
from ._producer import Producer
from ._producer_options import ProducerSettings
from ._retry import is_denial
from ._seldom import SaidSeldom
from ._send_arguments import SendSettings
from ._told_ends import Outcome, ToldEnds
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

    from ._transport import SyncTransport

logger = logging.getLogger("protomq.producer")

THREADS_END_S: Final = 1.0
"""How long `close` waits at most for threads that look for brokers, say."""
END_AGAIN_S: Final = 0.05
"""A thread may be about to begin its call when that is to be ended: then it is ended again."""


class _HalfProducer(Producer):
    """A producer whose messages are half messages."""

    after_stored: Callable[[Stored], None] | None = None
    """Called for each request whose callers are about to be woken."""

    def _make_core(self) -> HalfCore:
        return HalfCore(self.options, self._hooks)

    def _start(self) -> None:
        super()._start()
        self._company = Company()

    def _on_stored(self, stored: Stored) -> None:
        if self.after_stored is not None:
            self.after_stored(stored)

    def expect(self, count: int) -> None:
        """So many callers have been answered together, and may send again at once."""
        assert self._company is not None
        self._company.expect(count)


class Transaction:
    """One that was begun with `TransactionProducer.begin`: `commit` or `roll_back` ends it.

        with producer.begin("bookings", b"...") as transaction:
            book(transaction.message_id)

    Leaving the `with` block commits, unless `roll_back` was called; an exception rolls back, and goes on. Of one that is never ended,
    or whose block Ctrl-C or SystemExit ended, the broker asks the check listener. So it does where the error of a `commit` ended the block.
    """

    def __init__(self, producer: TransactionProducer, half: HalfResult) -> None:
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

    def commit(self, timeout_s: float | None = None) -> None:
        """The message is delivered. Returns when the broker has stored that; may be called again.

        Raises TransactionEndedError if it has ended otherwise, RequestTimeoutError if that is not known: then the broker asks later.
        """
        self._end(TransactionDecision.COMMIT, timeout_s)

    def roll_back(self, timeout_s: float | None = None) -> None:
        """Nobody gets the message. See `commit`."""
        self._end(TransactionDecision.ROLL_BACK, timeout_s)

    def _end(self, decision: TransactionDecision, timeout_s: float | None) -> None:
        self._tried = decision
        self._producer.end(self.half, decision, timeout_s=timeout_s)
        self._is_ended = True

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._is_ended:
            return
        if error is None:
            self._end(self._tried or TransactionDecision.COMMIT, None)
            return
        if not isinstance(error, Exception):  # an interrupt: what it interrupted may be done
            return
        if self._tried is TransactionDecision.COMMIT:  # The broker may have it. If not, it asks: the work is done.
            return
        try:
            self.roll_back()
        except TransactionNotFoundError as gone:  # Nobody gets the message: that was wanted.
            say_not_taken(self.message_id, TransactionDecision.ROLL_BACK, gone)
        except ProtomqError:  # the error that ended the block counts
            logger.exception("the transaction of message %s was not rolled back", self.message_id)


class TransactionProducer(OfOneProcess):
    """Sends messages that are delivered if, and only if, something else was done. From threads; make one and share it.

        def was_booked(check):
            return TransactionDecision.COMMIT if in_database(check.message.key) else TransactionDecision.ROLL_BACK

        with TransactionProducer("desk", was_booked, topics=["bookings"], namesrv="127.0.0.1:9876") as producer:
            producer.send("bookings", b"...", key="17", execute=lambda message: book("17"))

    - `group`: the producer group; all its producers answer for each other's transactions.
    - `check`: called on a thread of the producer when a broker asks what became of a transaction that nobody has ended. The transaction
      may be of this producer or another one of the group. The function looks for the result of the local work, and returns a
      TransactionDecision. UNKNOWN, or an exception: the broker asks again later.
    - `topics`: the brokers of these topics know from the start that this producer is there; other brokers, from the first
      send on.
    - All else: see Producer.
    """

    def __init__(
        self,
        group: str,
        check: Callable[[TransactionCheck], TransactionDecision],
        *,
        topics: Sequence[str] = (),
        namesrv: str | Sequence[str] | None = None,
        transport: SyncTransport | Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
        connection: ConnectionOptions | None = None,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        if not group:
            raise ConfigurationError("transactions need a producer group: its producers are asked")
        topics = checked_texts("topics", topics)
        check_listener(check, may_be_coroutine=False)
        self._execute_checks = ExecuteChecks(may_be_coroutine=False)
        self._check = check
        self._seldom = SaidSeldom(time.monotonic)
        self._producer = _HalfProducer(
            group,
            namesrv=namesrv,
            transport=transport,
            client_id=client_id,
            peer_timeout_s=peer_timeout_s,
            spin=spin,
            connection=connection,
            **settings,
        )
        self._producer.after_stored = self._expect_ends
        self._wanted_topics = tuple(topics)
        self._closed = threading.Event()
        self.after_fork()
        call_after_fork(self)
        call_at_exit(self)
        self._follow()

    def after_fork(self) -> None:
        """Prepares a forked child: nobody holds a lock, and no thread listens yet. The SDK calls it."""
        is_closed = self._closed.is_set()
        self._closed = threading.Event()
        if is_closed:
            self._closed.set()
        self._lock = threading.Lock()
        self._lines: dict[str, EndLine] = {}
        self._told: dict[str, ToldEnds] = {}
        self._listening: dict[str, dict[str, None]] = {}
        """By name of a broker that is told that this producer is there, topics whose routes lead there."""
        self._topics = self._wanted_topics
        """Those that are not followed yet: a child begins with its first message."""
        self._threads: list[threading.Thread] = []
        self._answers = ThreadCalls()
        """Listeners that run, and what they decide."""

    # Sending.

    def send(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        *,
        execute: Callable[[SendResult], TransactionDecision | None],
        wait_for_end: bool = True,
        **settings: Unpack[SendSettings],
    ) -> TransactionResult:
        """Sends a half message, does the local work, and ends the transaction as that says.

        `execute` is called on this thread with the result of the half message (its `message_id` and `transaction_handle`). It commits by
        returning None or COMMIT; ROLL_BACK and UNKNOWN are decisions, too. An exception rolls back, and is raised. Any other value is a
        WrongTypeError, and leaves the transaction open, as Ctrl-C and SystemExit do: the broker asks the check listener what was done. It
        asks, too, where it did not take a decision in time. That is no error; `is_ended` is False then.

        `wait_for_end`: False returns once the decision is on its way, as RocketMQ's client does; one that is not taken is logged, and the
        broker asks. An exception of `execute` is raised when the broker has taken the roll-back, whatever this says.

        Where the half message is answered FLUSH_SLAVE_TIMEOUT or FLUSH_DISK_TIMEOUT, a fail-over or a power cut may take it back. Then
        `execute` is not called, and the transaction is rolled back: the result has that status and ROLL_BACK. Send again.

        `settings`: all else that `Producer.send` takes, `key` and so on. Raises what that raises: then `execute` was not called.
        TransactionEndedError if somebody else ended it otherwise. TransactionNotFoundError if the work is done, and no broker has the
        message to be committed: a fail-over has taken it back, say. Nobody asks about it then.
        """
        self._execute_checks.check(execute)
        check_flag("wait_for_end", wait_for_end)
        half, timeout_s = self._begin(topic, body, settings), settings.get("timeout_s")
        if is_unconfirmed(half):
            say_unconfirmed(half, self._seldom)
            decision = TransactionDecision.ROLL_BACK
        else:
            try:
                returned = execute(half)
                if returned is not None:
                    refuse_never_run(returned)
            except Exception:
                # Another BaseException is an interrupt: it may have come right behind the commit of the local work.
                self._roll_back(half, timeout_s)
                raise
            decision = decision_of(returned)
        if wait_for_end:
            is_ended = self._try_to_end(half, decision, timeout_s)
        else:
            is_ended = False
            self._tell_end(half, decision, timeout_s)
        return result_of(half, decision, is_ended)

    def begin(
        self,
        topic: str | OutgoingMessage,
        body: Body = b"",
        **settings: Unpack[SendSettings],
    ) -> Transaction:
        """Sends a half message, to be committed or rolled back by the caller. Takes and raises what `Producer.send` does.

        NotConfirmedError where it is answered FLUSH_SLAVE_TIMEOUT or FLUSH_DISK_TIMEOUT: it is rolled back, and no work is to be done.
        """
        half = self._begin(topic, body, settings)
        if is_unconfirmed(half):
            refusal = self._roll_back(half, settings.get("timeout_s"))
            raise not_begun(half, refusal) from refusal
        return Transaction(self, half)

    def _begin(
        self, topic: str | OutgoingMessage, body: Body, settings: SendSettings
    ) -> HalfResult:
        if self._topics:
            self._follow()
        try:
            half = self._producer.send(topic, body, **settings)
        except BaseException as error:
            self._listen_where_stored(topic, error)
            raise
        assert isinstance(half, HalfResult)
        self._listen_to(half.queue)
        return half

    def end(
        self,
        half: SendResult,
        decision: TransactionDecision,
        *,
        timeout_s: float | None = None,
    ) -> bool:
        """Ends a transaction by the result of its half message; whether it had ended so before.

        Raises TransactionEndedError if it has ended otherwise, TransactionNotFoundError if it is not known.
        """
        end = end_of(half, decision, for_hooks=bool(self._producer._hooks.end))
        self._check_open()
        return self._end(end, timeout_s)

    def _line_of(self, broker_name: str) -> EndLine:
        line = EndLine(self._call_end, on_told=self._producer.expect)
        return self._lines.setdefault(broker_name, line)

    def _expect_ends(self, stored: Stored) -> None:
        """Those whose half messages have come together decide at about the same time, as a rule. If none waits for the answer to that, they
        send again.
        """
        line = self._lines.get(stored.queue.broker_name)
        if line is not None:
            line.company.expect(stored.count)
        elif stored.queue.broker_name in self._told:
            self._producer.expect(stored.count)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("the producer is closed")

    def _end(self, end: End, timeout_s: float | None) -> bool:
        line = self._lines.get(end.broker_name) or self._line_of(end.broker_name)
        within_s, hooks = self._seconds(timeout_s), self._producer._hooks
        if not hooks.end:
            return line.end(end, within_s)
        context = hooks.before_end(end)
        try:
            repeated = line.end(end, within_s)
        except BaseException as error:
            hooks.after_end(context, error)
            raise
        hooks.after_end(context, None)
        return repeated

    def _try_to_end(
        self, half: HalfResult, decision: TransactionDecision, timeout_s: float | None
    ) -> bool:
        """Whether it has ended so; the broker asks later if it has not."""
        if decision is TransactionDecision.UNKNOWN:
            return False
        try:
            self.end(half, decision, timeout_s=timeout_s)
        except ProtomqError as error:
            return note_not_taken(half.message_id, decision, error)
        return True

    def _roll_back(self, half: HalfResult, timeout_s: float | None) -> ProtomqError | None:
        """Why the broker did not; the error of which the program hears is another one."""
        try:
            self.end(half, TransactionDecision.ROLL_BACK, timeout_s=timeout_s)
        except ProtomqError as error:
            return not_rolled_back(half.message_id, error)
        return None

    def _tell_end(
        self, half: HalfResult, decision: TransactionDecision, timeout_s: float | None
    ) -> None:
        """Puts the decision on its way."""
        if decision is TransactionDecision.UNKNOWN:
            return
        if self._closed.is_set():
            say_not_taken(half.message_id, decision, ClosedError("the producer is closed"))
            return
        hooks = self._producer._hooks
        end = end_of(half, decision, for_hooks=bool(hooks.end))
        told = self._told.get(end.broker_name)
        if told is None:
            told = self._told.setdefault(end.broker_name, ToldEnds(self._call_end))
        context = hooks.before_end(end) if hooks.end else None

        def note(outcome: Outcome) -> None:
            error = outcome if isinstance(outcome, BaseException) else None
            if context is not None:
                hooks.after_end(context, error)
            if error is not None:
                say_not_taken(half.message_id, decision, error)

        try:
            told.tell(end, self._seconds(timeout_s), note)
        except (ProtomqError, RuntimeError) as error:
            note(error)

    def _call_end(self, ends: Sequence[End], timeout_s: float) -> list[bool | ProtomqError]:
        topics = self._listening.get(ends[0].broker_name, ())
        return self._producer._driver.run(end_steps(ends, timeout_s, tuple(topics)))

    def _seconds(self, timeout_s: float | None, *, zero: bool = False) -> float:
        if timeout_s is None:
            return self._producer.options.send_timeout_s
        return check_seconds("timeout_s", timeout_s, zero=zero)

    # Checks.

    def _listen_to(self, queue: MessageQueue) -> None:
        """Tells the broker of a queue from now on that this producer is there."""
        if queue.topic in self._listening.get(queue.broker_name, ()):
            return
        with self._lock:
            if self._closed.is_set():
                return
            topics = self._listening.get(queue.broker_name)
            if topics is None:
                topics = {queue.topic: None}
                self._begin_thread(self._answer_checks, topics, queue.broker_name)
                self._listening[queue.broker_name] = topics
            topics[queue.topic] = None

    def _listen_where_stored(self, topic: str | OutgoingMessage, error: BaseException) -> None:
        """A half message may be stored, nobody knows at which broker. If it is the first one there, that broker would ask nobody."""
        route = self._producer._routes.last_known(topic if isinstance(topic, str) else topic.topic)
        if may_be_stored(error) and route is not None:
            for queue in route.write_queues:
                self._listen_to(queue)

    def _follow(self) -> None:
        with self._lock:
            topics, self._topics = self._topics, ()
        if topics:
            self._begin_thread(self._follow_topics, topics)

    def _begin_thread(self, run: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(
            target=run, args=arguments, name="protomq-transaction-checks", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _follow_topics(self, topics: Sequence[str]) -> None:
        while not self._closed.is_set():
            is_known = True
            for topic in topics:
                try:
                    for queue in self._producer.queues(topic):
                        self._listen_to(queue)
                except ProtomqError as error:
                    is_known = False
                    logger.info("the brokers of topic %s are not known yet: %s", topic, error)
            self._closed.wait(TOPIC_PAUSE_S if is_known else PAUSE_S)

    def _answer_checks(self, topics: dict[str, None], broker_name: str) -> None:
        """Until the producer is closed: waits for what one broker asks, and answers."""
        producer = self._producer
        failures = 0
        while not self._closed.is_set():
            topic = topic_in_turn(topics, failures)
            try:
                route = producer._route(topic, time.monotonic() + PAUSE_S, None)
                address = route.brokers.get(broker_name)
                if address is None:
                    failures += 1
                    producer._routes.invalidate(topic)
                    self._closed.wait(PAUSE_S)
                    continue
                checks = producer._driver.run(
                    wait_steps(address, broker_name, producer.options.group)
                )
                for check in checks:
                    with self._answers:
                        if self._closed.is_set():  # The broker asks another producer of the group, after the next interval.
                            return
                        self._answer(topic, broker_name, check)
            except ProtomqError as error:
                if self._closed.is_set():
                    return
                failures += 1
                if error.stale_route:
                    producer._routes.invalidate(topic, is_denied=is_denial(error))
                logger.info("broker %s cannot ask about transactions: %s", broker_name, error)
                self._closed.wait(PAUSE_S)
            except BaseException:  # Nobody would begin another thread.
                logger.exception("a question of broker %s could not be answered", broker_name)
                self._closed.wait(PAUSE_S)

    def _answer(self, topic: str, broker_name: str, check: TransactionCheck) -> None:
        try:
            decision = listener_decision(self._check(check))
        except BaseException as error:  # sys.exit() in a listener ends no thread of ours.
            say_listener_failed(check, error, self._seldom)
            return
        if decision is TransactionDecision.UNKNOWN:
            return
        try:
            message_id = check.message.message_id
            self._end(
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

    def close(self, timeout_s: float | None = None) -> None:
        """Ends it. Decisions on their way are told, within `timeout_s` (None: the send time-out). So are those of check listeners that run.
        No further one is called.

        Transactions that are open stay so: the broker asks another producer of the group. So for a `send` whose `execute` runs, which
        raises nothing.
        """
        self._closed.set()
        deadline_s = time.monotonic() + self._seconds(timeout_s, zero=True)
        self._end_held_calls(self._threads)
        self._answers.wait(max(deadline_s - time.monotonic(), 0.0))
        self._end_threads(min(deadline_s, time.monotonic() + THREADS_END_S))
        for line in list(self._lines.values()):
            line.drain(max(deadline_s - time.monotonic(), 0.0))
        for told in list(self._told.values()):
            told.drain(max(deadline_s - time.monotonic(), 0.0))
        self._producer.close(max(deadline_s - time.monotonic(), 0.0))

    def _end_held_calls(self, threads: Sequence[threading.Thread]) -> None:
        """Brokers ask another producer of the group from now on."""
        self._producer._transport.end_held({thread.ident for thread in threads if thread.ident and thread.is_alive()})

    def _end_threads(self, until_s: float) -> None:
        for thread in self._threads.copy():
            while thread is not threading.current_thread() and thread.is_alive() and (left_s := until_s - time.monotonic()) > 0:
                self._end_held_calls([thread])
                thread.join(min(left_s, END_AGAIN_S))

    def finish_at_exit(self) -> int:
        """Gives decisions on their way the send time-out when the interpreter ends. The SDK calls it. What messages are lost, another one
        counts.
        """
        if self._closed.is_set():
            return 0
        deadline_s = time.monotonic() + self._seconds(None)
        lines = list(self._told.values())
        for told in lines:
            told.drain(max(deadline_s - time.monotonic(), 0.0))
        if left := sum(told.count for told in lines):
            say_not_told(left, "the interpreter ended")
        return 0

    def __enter__(self) -> TransactionProducer:
        if self._closed.is_set():
            raise ClosedError("the producer is closed")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
