"""A member of a group in a process of its own, for whoever kills and stops it:

    python -m tests.chaos.group_member KIND NAMESRV [NAME FOLDER]

NAME, FOLDER: of a kind that broadcasts: its instance, and where its offsets are.

It tells each step, before the consumer itself knows, in a line that a kill cannot cut; times are of the machine's monotonic clock:

    got|done TIME QUEUE OFFSET                      a listener has the message, has ended it; a pull consumer: the program has it
    failed TIME QUEUE OFFSET                        an orderly listener fails
    fetched TIME QUEUE OFFSET BEGAN                 the broker says where the group is; -1: nowhere
    token TIME QUEUE TOKEN                          the broker has locked the queue for it
    commit TIME NUMBER QUEUE OFFSET TOKEN           this goes out now
    committed|refused TIME NUMBER REASON            what came of it
    stopping TIME                                   SIGUSR1: it stops itself between the checks of a commit and its way out
    left TIME                                       SIGTERM: the end

A queue is "broker/number". The calls are seen below the consumer, at its transport.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from protomq import AsyncPushConsumer, Message, PullConsumer, PushConsumer
from protomq._async_transport import AsyncTransport
from protomq._methods import COMMIT_OFFSETS, GET_OFFSETS, LOCK_QUEUES
from protomq._transport import SyncTransport
from protomq.errors import NoRouteError, ProtomqError
from protomq.v1.consumer_service_pb2 import (
    CommitOffsetsRequest,
    GetOffsetsRequest,
    GetOffsetsResponse,
)
from protomq.v1.queue_lock_service_pb2 import LockQueuesResponse

GROUP: Final = "members"
TOPIC: Final = "shared"
COMMIT_INTERVAL_S: Final = 0.2
KINDS: Final = ("pull", "locked", "push", "async", "orderly", "async-orderly")
IN_ORDER: Final[dict[str, Any]] = {"orderly": True, "suspend_ms": 50}
BROADCAST_KINDS: Final = ("broadcast", "async-broadcast", "pull-broadcast")


def tell(*words: object, time_s: float | None = None) -> None:
    """One line; the time stands second."""
    first, *rest = words
    text = " ".join(map(str, (first, repr(time.monotonic() if time_s is None else time_s), *rest)))
    os.write(1, f"{text}\n".encode())


def queue_of(message: Message) -> str:
    return f"{message.queue.broker_name}/{message.queue.queue_id}"


def work_s(is_orderly: bool = False) -> float:
    """Mostly short; now and then longer than two commits are apart, so that a commit and then a kill fall into it.

    In order, some take longer than a queue that goes waits for its listeners: only its lock keeps it from the next owner then.
    """
    if is_orderly and random.random() < 0.015:
        return 1.5
    return random.choice((0.002, 0.005, 0.01)) if random.random() > 0.02 else 2 * COMMIT_INTERVAL_S


def broadcast_work_s() -> float:
    """Often so long that the file of offsets is written meanwhile, which is once a second."""
    return 0.8 if random.random() < 0.06 else 0.002


class Watched:
    """What calls say, before they go out and when they are answered."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.stops_in_commit = threading.Event()

    def before(self, address: Any, method: Any, payload: Sequence[bytes]) -> int:
        """Number of a commit; 0 of other calls."""
        if method is not COMMIT_OFFSETS:
            return 0
        request = CommitOffsetsRequest.FromString(b"".join(payload))
        ours = [offset for offset in request.offsets if offset.topic == TOPIC]
        if not ours:
            return 0
        if self.stops_in_commit.is_set():
            self.stops_in_commit.clear()
            tell("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        number = next(self._numbers)
        for offset in ours:
            tell("commit", number, f"{address.broker_name}/{offset.queue_id}", offset.queue_offset, offset.lock_token)
        return number

    def after(self, address: Any, method: Any, payload: Sequence[bytes], number: int, began_s: float, answer: bytes | ProtomqError) -> None:
        if number:
            tell(*(("refused", number, answer.reason) if isinstance(answer, ProtomqError) else ("committed", number, "-")))
        elif isinstance(answer, ProtomqError):
            return
        elif method is GET_OFFSETS:
            request = GetOffsetsRequest.FromString(b"".join(payload))
            if request.topic == TOPIC:
                known = {offset.queue_id: offset.queue_offset for offset in GetOffsetsResponse.FromString(answer).offsets}
                for queue_id in request.queue_ids:
                    tell("fetched", f"{address.broker_name}/{queue_id}", known.get(queue_id, -1), repr(began_s))
        elif method is LOCK_QUEUES:
            for locked in LockQueuesResponse.FromString(answer).queues:
                if locked.token and locked.queue.topic == TOPIC:
                    tell("token", f"{address.broker_name}/{locked.queue.queue_id}", locked.token)

    def watch(self) -> None:
        """From here on, for all transports of this process."""
        sync_call, async_call = SyncTransport.call, AsyncTransport.call

        def call(transport: Any, address: Any, method: Any, payload: Any, *rest: Any, **named: Any) -> bytes:
            number, began_s = self.before(address, method, payload), time.monotonic()
            try:
                answer = sync_call(transport, address, method, payload, *rest, **named)
            except ProtomqError as error:
                self.after(address, method, payload, number, began_s, error)
                raise
            self.after(address, method, payload, number, began_s, answer)
            return answer

        async def call_async(transport: Any, address: Any, method: Any, payload: Any, *rest: Any, **named: Any) -> bytes:
            number, began_s = self.before(address, method, payload), time.monotonic()
            try:
                answer = await async_call(transport, address, method, payload, *rest, **named)
            except ProtomqError as error:
                self.after(address, method, payload, number, began_s, error)
                raise
            self.after(address, method, payload, number, began_s, answer)
            return answer

        SyncTransport.call = call  # type: ignore[method-assign,assignment]
        AsyncTransport.call = call_async  # type: ignore[method-assign,assignment]


def fail_now_and_then(message: Message) -> None:
    """An orderly listener: a message of 25 fails, some of them again and again."""
    if random.random() < (0.04 if not message.attempt else 0.5):
        tell("failed", queue_of(message), message.queue_offset)
        raise ValueError(f"no {message.attempt}")


def listen(message: Message, seconds: float, *, fails: bool = False) -> None:
    tell("got", queue_of(message), message.queue_offset)
    time.sleep(seconds)
    if fails:
        fail_now_and_then(message)
    tell("done", queue_of(message), message.queue_offset)


async def listen_async(message: Message, seconds: float, *, fails: bool = False) -> None:
    tell("got", queue_of(message), message.queue_offset)
    await asyncio.sleep(seconds)
    if fails:
        fail_now_and_then(message)
    tell("done", queue_of(message), message.queue_offset)


def pull(namesrv: str, stopping: threading.Event, **options: Any) -> None:
    with PullConsumer(GROUP, namesrv=namesrv, auto_commit_interval_s=COMMIT_INTERVAL_S, **options) as consumer:
        consumer.subscribe(TOPIC)
        while not stopping.is_set():
            messages = consumer.poll(0.1, 4)
            got_s = time.monotonic()
            for message in messages:
                tell("got", queue_of(message), message.queue_offset, time_s=got_s)
            for message in messages:
                # Who begins at the beginning each time has to catch up.
                time.sleep(0.001 if options.get("broadcasting") else work_s())
                tell("done", queue_of(message), message.queue_offset)


def listener_work_s(options: dict[str, Any]) -> float:
    """Of a consumer with these options."""
    return broadcast_work_s() if options.get("broadcast") else work_s(bool(options.get("orderly")))


def push(namesrv: str, stopping: threading.Event, **options: Any) -> None:
    consumer = PushConsumer(GROUP, namesrv=namesrv, commit_interval_s=COMMIT_INTERVAL_S, concurrency=4, **options)
    consumer.subscribe(TOPIC, lambda message: listen(message, listener_work_s(options), fails="orderly" in options))
    with consumer:
        stopping.wait()


async def push_async(namesrv: str, stopping: threading.Event, **options: Any) -> None:
    consumer = AsyncPushConsumer(GROUP, namesrv=namesrv, commit_interval_s=COMMIT_INTERVAL_S, concurrency=4, **options)

    async def listener(message: Message) -> None:
        await listen_async(message, listener_work_s(options), fails="orderly" in options)

    consumer.subscribe(TOPIC, listener)
    async with consumer:
        await asyncio.to_thread(stopping.wait)


def main(kind: str, namesrv: str, name: str = "", folder: str = "") -> None:
    """Until SIGTERM, or its standard input ends: then its parent is gone."""
    watched, stopping = Watched(), threading.Event()
    watched.watch()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    faulthandler.register(signal.SIGUSR2)  # for one that does not end
    signal.signal(signal.SIGUSR1, lambda *_: watched.stops_in_commit.set())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    alone: dict[str, Any] = {"broadcast": True, "instance": name, "offset_folder": folder}
    runs: dict[str, Callable[[], object]] = {
        "pull": lambda: pull(namesrv, stopping),
        "locked": lambda: pull(namesrv, stopping, lock_queues=True),
        "push": lambda: push(namesrv, stopping),
        "orderly": lambda: push(namesrv, stopping, **IN_ORDER),
        "async": lambda: asyncio.run(push_async(namesrv, stopping)),
        "async-orderly": lambda: asyncio.run(push_async(namesrv, stopping, **IN_ORDER)),
        "broadcast": lambda: push(namesrv, stopping, **alone),
        "async-broadcast": lambda: asyncio.run(push_async(namesrv, stopping, **alone)),
        "pull-broadcast": lambda: pull(namesrv, stopping, broadcasting=True, begin="earliest"),
    }
    while not stopping.is_set():
        try:
            runs[kind]()
        except NoRouteError:
            stopping.wait(0.2)  # The name server does not know the topic yet.
        except ProtomqError as error:
            print(f"{kind}: {error!r}", file=sys.stderr)
            stopping.wait(0.2)
    tell("left")


if __name__ == "__main__":
    main(*sys.argv[1:])
