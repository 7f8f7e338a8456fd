"""SimpleConsumer: messages for members of a group that have no queues of their own. From threads; `_async_pop` has the asyncio flavour."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Final, Literal
from weakref import WeakSet

from . import _methods
from ._checks import check_flag, explain_unknown_settings
from ._client_name import client_name
from ._connection_options import ConnectionOptions, connection_of
from ._hook_points import HookPoints, check_hooks
from ._hooked_calls import transport_with
from ._hooked_consuming import hooked_listener
from ._late_imports import load_needed_modules
from ._late_pops import HandOut
from ._message import Message
from ._of_one_process import OfOneProcess
from ._pop_handling import (
    AHEAD_DEFAULT,
    CONCURRENCY_DEFAULT,
    DRAIN_TIMEOUT_DEFAULT_S,
    RECEIVE_HOLD_S,
    RENEW_LIMIT_DEFAULT_S,
    HandledCounts,
    Handling,
    HandlingOptions,
    Hold,
    check_alone,
    hold_of,
)
from ._pop_steps import (
    COUNT_DEFAULT,
    GIVE_BACK_S,
    HOLD_DEFAULT_S,
    INVISIBLE_DEFAULT_S,
    PopSteps,
    Start,
)
from ._pop_threads import HandlerThreads
from ._push_results import Listener
from ._races import Races
from ._routes import Routes
from ._steps import CallServer, Driver
from ._trace import Tracer, traced
from ._transport import SyncTransport
from ._types import PEER_TIMEOUT_S, Body, BrokerAddress, MessageQueue, MethodInfo
from .errors import ClosedError, WrongTypeError
from .hooks import Hook

REQUEST_TIMEOUT_S: Final = 5.0


class _NotedCalls:
    """Calls of one `receive`: what a broker hands out is noted at once, for an interrupt may come at any place."""

    __slots__ = ("_given", "_transport")

    def __init__(self, transport: SyncTransport, given: list[HandOut]) -> None:
        self._transport = transport
        self._given = given

    def call(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, *, one_way: bool = False
    ) -> bytes:
        answer = self._transport.call(address, method, payload, timeout_s, one_way=one_way)
        if method is _methods.POP:
            self._given.append(HandOut(address.broker_name, answer))
        return answer


class SimpleConsumer(OfOneProcess):
    """Receives messages that no other member of its group gets for a while, and acknowledges them.

        with SimpleConsumer("my-group") as consumer:
            while True:
                for message in consumer.receive("flights", invisible_s=30):
                    handle(message)
                    consumer.ack(message)

    Or, with a function that is given each message, which is held for as long as it runs:

        consumer.handle("flights", handle, concurrency=8)

    A message that is not acknowledged within `invisible_s` goes to some member again. Any thread may call everything; nothing is opened
    before the first use.
    """

    @explain_unknown_settings
    def __init__(
        self,
        group: str,
        *,
        namesrv: str | Sequence[str] | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
        connection: ConnectionOptions | None = None,
        trace: bool = False,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Makes a consumer; raises ConfigurationError.

        `request_timeout_s`: time-out of an acknowledgement with all its tries, and of looking up a route. `trace`: reports what was
        received and acknowledged to RMQ_SYS_TRACE_TOPIC, in the background (docs/track.md). `hooks`: code of yours that is called around
        what is consumed and around calls, and that filters (protomq.hooks). All else: as in Producer.
        """
        check_hooks(hooks)
        self._hooks = HookPoints(group, hooks)
        self._tracer: Tracer | None = None
        load_needed_modules("protomq.v1.pop_service_pb2")
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s, spin=spin,
        )  # fmt: skip
        self._transport = transport_with(connection, self._hooks)
        self._hooks.named_by(client_name(connection.client_id))
        if check_flag("trace", trace):
            self._tracer = traced(self._hooks, connection, connection.namesrv)
        self._steps = PopSteps(group, request_timeout_s, hooks=self._hooks, kind_of=self._transport.kind)
        self._routes = Routes(self._transport, connection.namesrv)
        self._hooks.located_by(self._routes.last_known, self._transport.kind)
        self._transport.is_replaced = self._routes.is_replaced
        self._races = Races(self._transport, _methods.POP, self._came_late)
        self._driver = Driver(self._transport, self._routes, race=self._races.run)
        self._closed = False
        self._handlers: set[HandlerThreads] = set()
        self._handlers_lock = threading.Lock()
        self._handlings: WeakSet[Handling] = WeakSet()
        """Also those whose `handle` is over while a handler runs, whose thread has them."""

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._steps.group

    def receive(
        self,
        topic: str,
        count: int = COUNT_DEFAULT,
        *,
        invisible_s: float = INVISIBLE_DEFAULT_S,
        hold_s: float = HOLD_DEFAULT_S,
        queue: MessageQueue | None = None,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        fifo: bool = False,
        start: Start = "earliest",
    ) -> list[Message]:
        """Returns up to `count` messages (at most 1,024), which nobody else gets for `invisible_s` (10 s to 12 h, by the broker's
        settings).

        Returns as soon as there are any, and an empty list if there are none for `hold_s` (60 at most). `queue`: only from there. `tags`,
        `sql`, `cel`, `module`: as in PullConsumer.subscribe; all members of a group use the same. `fifo`: only one message of each sharding
        key is handed out at a time; all members must use it, or none. `start`: where a group begins in a queue in which it has received and
        committed nothing yet.

        `message.queue` is a PoppedQueue: its `attempt` says which delivery this is. While a broker is away, is silent, or another master is
        elected, it is asked again until the hold is over. The others are asked meanwhile. If none has any, the list is empty. Raises
        TopicNotFoundError, NotPermittedError, IllegalFilterError, GroupDisabledError, and NoRouteError if no name server answers, or
        knows any broker.
        Raises StoreFailedError if the log of the brokers has failed, and no other one takes over within the hold.

        A call that ends with another error, as by Ctrl-C or a signal handler, gives back what it has been given.
        """
        self._check_open()
        wish = self._steps.wish(
            topic,
            count,
            invisible_s=invisible_s,
            hold_s=hold_s,
            queue=queue,
            tags=tags,
            sql=sql,
            cel=cel,
            module=module,
            fifo=fifo,
            start=start,
        )
        given: list[HandOut] = []
        try:
            driver = Driver(_NotedCalls(self._transport, given), self._routes, race=self._races.run)
            messages = driver.run(self._steps.receive(wish, given))
            self._steps.tell_received(messages)
            return messages
        except BaseException:  # Ctrl-C, or the error of a signal handler.
            if given:
                self._driver.run(self._steps.give_back_all(topic, given))
            raise

    def ack(self, messages: Message | Iterable[Message]) -> list[Message]:
        """Acknowledges messages: nobody gets them again. Returns those that another member has or has done by now, and dead ones.

        Many at once cost one call for each broker. Raises StaleReceiptError if that is so of all messages of one broker. The other
        brokers are asked all the same. What this receipt has acknowledged before is done.

        It is tried again for `request_timeout_s`. A further try may find receipts stale of which the broker does not know any more whether
        they have acknowledged. Then the error of the first try says so: `metadata["acknowledged"]` is "unknown".
        """
        self._check_open()
        return self._driver.run(self._steps.ack(messages))

    def change_invisible(
        self, messages: Message | Iterable[Message], invisible_s: float
    ) -> list[Message]:
        """Hides messages from other members for `invisible_s` from now on (0 to 12 h), instead of the earlier time. Otherwise as `ack`."""
        self._check_open()
        return self._driver.run(self._steps.change_invisible(messages, invisible_s))

    def nack(
        self, messages: Message | Iterable[Message], after_s: float = 0.0, *, error: str | BaseException = ""
    ) -> list[Message]:
        """Gives messages back: some member gets them after `after_s` (0 to 12 h). Otherwise as `ack`.

        `error`: why they failed; the broker keeps 512 bytes of it. The last one becomes the `last_error` of a dead letter.
        """
        self._check_open()
        return self._driver.run(self._steps.nack(messages, after_s, error))

    def handle(
        self,
        topic: str,
        handler: Callable[..., object],
        *,
        concurrency: int = CONCURRENCY_DEFAULT,
        invisible_s: float = INVISIBLE_DEFAULT_S,
        renew_limit_s: float = RENEW_LIMIT_DEFAULT_S,
        drain_timeout_s: float = DRAIN_TIMEOUT_DEFAULT_S,
        ahead: int = AHEAD_DEFAULT,
        queue: MessageQueue | None = None,
        tags: Iterable[str] = (),
        sql: str | None = None,
        cel: str | None = None,
        module: str | None = None,
        fifo: bool = False,
        start: Start = "earliest",
    ) -> HandledCounts:
        """Receives messages and has a function handle each, on up to `concurrency` threads (1 to 1,024), until `request_stop` or `close`.

        When `handler` returns, its message is acknowledged. When it raises, the message is given back with the error's text. It comes
        again as the group's settings say: after 10 s, 30 s, 1 min and so on where nobody has set them. A handler may return
        Retry(delay=...) or Reject(), and may have a type for the body, as a listener of a push consumer.

        While a handler runs, its message is renewed for another `invisible_s` when half of that is over, until `renew_limit_s` (15 minutes)
        have passed. If the broker refuses to renew, another member has the message: `hold(message).is_lost` says so, and the handler's
        result does not count (`HandledCounts.refused`). `request_stop` waits up to `drain_timeout_s` for running handlers. `close` waits
        for none, and nothing is acknowledged after it.

        Up to `ahead` messages (0 to 1,024), and 4 MiB, wait here for a handler and are renewed meanwhile. They are no more than
        handlers lately finished in a quarter of a second. A stop gives them back at once.

        Several calls may run side by side, of different topics, or queues. One for messages of another one raises ConfigurationError: each
        would go to either function by chance.

        It asks a broker that is away again and again. Raises errors that need your action, as `receive` does: TopicNotFoundError and the
        like. The other arguments: as in `receive`. With `fifo`, the next message of a sharding key comes when the one before is
        acknowledged or dead.
        """
        self._check_open()
        function = hooked_listener(Listener.of(handler), self._hooks)
        if function.is_coroutine:
            raise WrongTypeError(f"{function.name} is a coroutine function, which only AsyncSimpleConsumer can run")
        options = HandlingOptions(concurrency, invisible_s, renew_limit_s, drain_timeout_s, ahead)
        wish = self._steps.wish(
            topic, concurrency, invisible_s=invisible_s, hold_s=RECEIVE_HOLD_S, queue=queue, tags=tags, sql=sql, cel=cel, module=module,
            fifo=fifo, start=start,
        )  # fmt: skip
        threads = HandlerThreads(self._steps, Handling(self._steps, wish, options, function.name), function, self._driver.run)
        with self._handlers_lock:
            check_alone(threads.handling, [others.handling for others in self._handlers if others.begins_handlers])
            self._handlers.add(threads)
            self._handlings.add(threads.handling)
        try:
            return threads.work()
        finally:
            with self._handlers_lock:
                self._handlers.discard(threads)

    def hold(self, message: Message) -> Hold:
        """Returns whether a message still belongs to its running handler of `handle`. Raises ConfigurationError for any other message."""
        with self._handlers_lock:
            handlings = list(self._handlings)
        return hold_of(message, handlings)

    def request_stop(self) -> None:
        """Makes every `handle` return within 2 s after its handlers have. Handlers and signal handlers may call it, too."""
        for threads in list(self._handlers):
            threads.stop()

    def reply(
        self,
        message: Message,
        body: Body = b"",
        *,
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """See PullConsumer.reply."""
        self._check_open()
        self._driver.run(self._steps.reply(message, body, properties, timeout_s))

    def close(self) -> None:
        """Closes all connections. What was not acknowledged comes to others when its time is up. What is on its way to a `receive` that is
        over is given back before, which takes a second at most.

        `handle` ends then, too. Its handlers that run are not waited for: coroutines are cancelled, threads go on. Nothing is
        acknowledged or given back for them: their messages come to others, and `hold(message).check()` raises. So call `request_stop`
        first, and let `handle` return, to have them finish.

        A `receive` that waits in another thread ends with ClosedError. What a broker has sent for it is given back, too.
        """
        until_s = time.monotonic() + GIVE_BACK_S
        self._closed = self._steps.is_closed = True
        for threads in list(self._handlers):
            threads.close()
        if self._tracer is not None:
            self._tracer.close()
        self._steps.late.close()
        if self._driver.run(self._steps.give_up_held()):
            with suppress(FutureTimeoutError):
                self._steps.held.over(threading.get_ident()).result(max(until_s - time.monotonic(), 0.0))
        self._races.close(max(until_s - time.monotonic(), 0.0))
        self._transport.close()

    def _came_late(self, call: CallServer, answer: bytes) -> None:
        """An answer has come when its `receive` was over. A thread of its own."""
        late = self._steps.keep_late(call.payload, call.address.broker_name, answer)
        if late is not None:
            late.over.wait(late.kept_s)
            self._driver.run(self._steps.give_back_kept(late))

    def __enter__(self) -> SimpleConsumer:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
