"""A client whose end is cancelled, or interrupted: it leaves its group all the same, and the next member gets all messages."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, Literal

import anyio
import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncPushConsumer,
    AsyncSimpleConsumer,
    ConnectionOptions,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
)
from protomq._closing import HURRY_S
from protomq.asgi import Messaging
from protomq.errors import ConfigurationError
from protomq.testing import Broker
from tests.support.push import LoopThread
from tests.support.waiting import PATIENCE_S, async_wait_for, wait_for

Transport = Literal["remoting", "grpc"]
BEFORE, AFTER = 20, 40
SOON_S = 5.0
"""A member that does not leave is one for a minute, or for ever."""


class Group:
    """A group at a topic with messages; what its first member has done, and what is seen by the next one."""

    def __init__(self, broker: Broker, topic: str, producer: Producer, admin: Admin, transport: Transport) -> None:
        self.connection = ConnectionOptions(namesrv=broker.namesrv, transport=transport)
        self.namesrv, self.topic, self.producer, self.admin = broker.namesrv, topic, producer, admin
        self.name = f"g-{topic}"
        self.done: list[bytes] = []
        self.pause_s = 0.0

    def push(self, **settings: Any) -> AsyncPushConsumer:
        consumer = AsyncPushConsumer(self.name, connection=self.connection, **settings)
        consumer.subscribe(self.topic, self.listen)
        return consumer

    async def listen(self, message: Message) -> None:
        if self.done:
            await asyncio.sleep(self.pause_s)
        self.done.append(message.body)

    def pull(self) -> AsyncPullConsumer:
        return AsyncPullConsumer(self.name, connection=self.connection)

    async def poll(self, consumer: AsyncPullConsumer, count: int = BEFORE) -> None:
        await consumer.subscribe(self.topic)
        while len(self.done) < count:
            self.done += [message.body for message in await consumer.poll(0.2)]
        # What was handed out is finished.
        await consumer.poll(0.0)

    async def wait_done(self, count: int = BEFORE) -> None:
        await async_wait_for(lambda: len(self.done) >= count, PATIENCE_S)

    def has_left(self) -> bool:
        return not self.admin.group_members(self.name)

    async def async_wait_left(self) -> None:
        await asyncio.to_thread(wait_for, self.has_left, SOON_S)

    def check_next(self) -> None:
        """The next member gets what comes, and nothing again that was done."""
        new = {b"after %d" % number for number in range(AFTER)}
        self.producer.send_batch(self.topic, sorted(new))
        seen: list[bytes] = []
        consumer = PushConsumer(self.name, namesrv=self.namesrv)
        consumer.subscribe(self.topic, lambda message: seen.append(message.body))
        with consumer:
            wait_for(lambda: new <= set(seen), SOON_S)
        again = set(seen) & set(self.done)
        assert not again


@pytest.fixture(params=["remoting", "grpc"])
def group(
    protomq_server: Broker, protomq_topic: str, protomq_producer: Producer, request: pytest.FixtureRequest
) -> Iterator[Group]:
    protomq_producer.send_batch(protomq_topic, [b"before %d" % number for number in range(BEFORE)])
    with Admin(namesrv=protomq_server.namesrv) as admin:
        yield Group(protomq_server, protomq_topic, protomq_producer, admin, request.param)


async def stop_is_cancelled(group: Group) -> None:
    consumer = group.push()
    await consumer.start()
    await group.wait_done()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.001)


async def stop_is_cancelled_and_called_again(group: Group) -> None:
    consumer = group.push()
    await consumer.start()
    await group.wait_done()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.0015)
    assert await consumer.stop() == 0
    assert not consumer.is_running
    assert group.has_left(), "the second stop has waited"


async def stop_is_cancelled_while_listeners_work(group: Group) -> None:
    group.pause_s = 0.2
    consumer = group.push(concurrency=20)
    await consumer.start()
    await group.wait_done(2)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.05)
    await async_wait_for(lambda: not consumer.is_running, SOON_S)


async def run_is_cancelled_again_and_again(group: Group) -> None:
    task = asyncio.create_task(group.push().run())
    await group.wait_done()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def the_scope_of_run_is_cancelled(group: Group) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.push().run)
        await group.wait_done()
        tasks.cancel_scope.cancel()


async def the_scope_of_a_block_is_cancelled(group: Group) -> None:
    with anyio.CancelScope() as scope:
        async with group.push():
            await group.wait_done()
            scope.cancel()
            await anyio.sleep_forever()


async def the_start_is_cancelled(group: Group) -> None:
    for moment_s in (0.0, 0.002, 0.005, 0.01, 0.02):
        with anyio.move_on_after(moment_s):
            async with group.push():
                await anyio.sleep(0.001)


async def the_scope_of_an_application_is_cancelled(group: Group) -> None:
    messaging = Messaging(connection=group.connection)
    messaging.consumer(group.name).subscribe(group.topic, group.listen)
    with anyio.CancelScope() as scope:
        async with messaging.lifespan():
            await group.wait_done()
            scope.cancel()
            await anyio.sleep_forever()
    assert not messaging.is_running


async def an_application_is_cancelled_at_each_await_while_listeners_send(group: Group) -> None:
    """The producer is there, and sends, until the last listener has ended."""
    messaging = Messaging(connection=group.connection)
    failed: list[Exception] = []
    has_begun, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def listen(message: Message) -> None:
        producer = await messaging.producer()
        has_begun.set()
        await may_end.wait()
        try:
            await producer.send(f"{group.topic}-sent", message.body)
        except Exception as error:
            failed.append(error)
            raise
        group.done.append(message.body)
        has_ended.set()

    messaging.consumer(group.name, concurrency=1).subscribe(group.topic, listen)

    async def serve() -> None:
        async with messaging.lifespan():
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await has_begun.wait()
    while not serving.done():
        serving.cancel()
        await asyncio.sleep(0)
    may_end.set()
    async with messaging.lifespan():
        assert has_ended.is_set(), "the lifespan before this one has ended"
        assert messaging.is_running
    assert not messaging.is_running
    assert failed == []


async def close_is_cancelled_and_called_again(group: Group) -> None:
    consumer = group.pull()
    await group.poll(consumer)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(consumer.close(), 0.0005)
    await consumer.close()
    assert group.has_left(), "the second close has waited"


async def the_scope_of_a_pulling_block_is_cancelled(group: Group) -> None:
    with anyio.CancelScope() as scope:
        async with group.pull() as consumer:
            await group.poll(consumer)
            scope.cancel()
            await consumer.poll(60)


WAYS: list[Callable[[Group], Awaitable[None]]] = [
    stop_is_cancelled, stop_is_cancelled_and_called_again, stop_is_cancelled_while_listeners_work, run_is_cancelled_again_and_again,
    the_scope_of_run_is_cancelled, the_scope_of_a_block_is_cancelled, the_start_is_cancelled, the_scope_of_an_application_is_cancelled,
    an_application_is_cancelled_at_each_await_while_listeners_send, close_is_cancelled_and_called_again,
    the_scope_of_a_pulling_block_is_cancelled,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_member_whose_end_is_cancelled_leaves(group: Group, way: Callable[[Group], Awaitable[None]]) -> None:
    await way(group)
    await group.async_wait_left()
    await asyncio.to_thread(group.check_next)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_member_leaves_whose_loop_ends_while_its_end_is_cancelled(group: Group, way: Callable[[Group], Awaitable[None]]) -> None:
    async def main() -> None:
        await way(group)

    asyncio.run(main())
    wait_for(group.has_left, SOON_S)
    group.check_next()


def test_a_loop_that_ends_waits_for_no_listener(group: Group) -> None:
    group.pause_s = 3600.0

    async def main() -> None:
        consumer = group.push(concurrency=1)
        await consumer.start()
        await group.wait_done(1)
        stopping = asyncio.create_task(consumer.stop(3600.0))
        await asyncio.sleep(0.2)
        assert not stopping.done()

    asyncio.run(main())
    wait_for(group.has_left, SOON_S)
    group.check_next()


async def test_a_second_stop_ends_the_wait_for_listeners(group: Group) -> None:
    group.pause_s = 3600.0
    consumer = group.push(concurrency=1)
    await consumer.start()
    await group.wait_done(1)
    first = asyncio.create_task(consumer.stop(3600.0))
    await asyncio.sleep(0.1)
    counts = sorted([await consumer.stop(0.0), await first])
    assert counts[0] == 0
    assert counts[1] > 0
    await asyncio.to_thread(group.check_next)


async def test_a_coroutine_that_cannot_be_cancelled_holds_up_no_stop(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protomq._async_push_consumer.JOIN_S", 0.2)
    ends, has_begun = asyncio.Event(), asyncio.Event()

    async def stubborn(message: Message) -> None:
        has_begun.set()
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()

    consumer = AsyncPushConsumer(group.name, connection=group.connection)
    consumer.subscribe(group.topic, stubborn)
    await consumer.start()
    await has_begun.wait()
    try:
        async with asyncio.timeout(SOON_S):
            await consumer.stop(0.1)
        assert group.has_left()
    finally:
        ends.set()


async def test_messages_of_handlers_whose_scope_is_cancelled_come_again_at_once(group: Group) -> None:
    has_begun = asyncio.Event()

    async def handler(message: Message) -> None:
        has_begun.set()
        await asyncio.Event().wait()

    with anyio.CancelScope() as scope:
        async with AsyncSimpleConsumer(group.name, connection=group.connection) as consumer, anyio.create_task_group() as tasks:

            async def handle() -> None:
                await consumer.handle(group.topic, handler, invisible_s=600.0)

            tasks.start_soon(handle)
            await has_begun.wait()
            scope.cancel()
    found: set[bytes] = set()
    async with AsyncSimpleConsumer(group.name, namesrv=group.namesrv) as next_consumer, asyncio.timeout(20):
        while len(found) < BEFORE:
            messages = await next_consumer.receive(group.topic, 32, hold_s=1.0)
            found |= {message.body for message in messages}
    assert len(found) == BEFORE, "each message, and none that nobody has sent"


async def test_a_producer_whose_scope_is_cancelled_sends_what_is_on_its_way(group: Group) -> None:
    with anyio.CancelScope() as scope:
        async with AsyncProducer(connection=group.connection) as producer:
            await producer.send(group.topic, b"first")
            sending = asyncio.create_task(producer.send(group.topic, b"second"))
            await asyncio.sleep(0)
            scope.cancel()
            await anyio.sleep_forever()
    assert (await sending).queue.topic == group.topic
    await producer.close()
    assert not producer._transport._connections
    assert not producer._transport._grpc_links


@pytest.fixture
def interrupt_soon() -> Iterator[Callable[[float], None]]:
    """Ctrl-C in so many seconds, in the main thread."""
    main, timers = threading.main_thread().ident, []
    assert main is not None
    before = signal.getsignal(signal.SIGUSR1)

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    def begin(after_s: float) -> None:
        timers.append(threading.Timer(after_s, signal.pthread_kill, (main, signal.SIGUSR1)))
        timers[-1].start()

    signal.signal(signal.SIGUSR1, interrupt)
    yield begin
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_stop_that_is_interrupted_leaves_the_group(group: Group, interrupt_soon: Callable[[float], None], again: bool) -> None:
    ends = threading.Event()

    def listen(message: Message) -> None:
        if group.done:
            ends.wait()
        else:
            group.done.append(message.body)

    consumer = PushConsumer(group.name, connection=group.connection)
    consumer.subscribe(group.topic, listen)
    consumer.start()
    wait_for(lambda: consumer.counts.done == 1, PATIENCE_S)
    interrupt_soon(0.2)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        consumer.stop(3600.0)
    assert time.monotonic() - began_s < SOON_S
    if again:
        consumer.stop()
    assert group.has_left()
    assert not consumer.is_running
    group.check_next()
    ends.set()


def test_a_stop_that_is_interrupted_gives_its_last_commit_no_more_time_than_an_interrupted_close(
    group: Group, interrupt_soon: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = PushConsumer(group.name, connection=group.connection)
    consumer.subscribe(group.topic, lambda _: threading.Event().wait(PATIENCE_S))
    consumer.start()
    wait_for(consumer._state.is_running, PATIENCE_S)
    assert consumer._consumer is not None
    steps, within_s = consumer._consumer._steps, []
    whole = steps.commit_last

    def commit_last(when: str, ends_s: float = float("inf")) -> Any:
        within_s.append(ends_s - time.monotonic())
        return whole(when, ends_s)

    monkeypatch.setattr(steps, "commit_last", commit_last)
    interrupt_soon(0.2)
    with pytest.raises(KeyboardInterrupt):
        consumer.stop(3600.0)
    assert len(within_s) == 1
    assert within_s[0] < HURRY_S


@pytest.mark.parametrize("where", ["_goodbye", "leave"])
def test_a_close_that_is_interrupted_leaves_the_group(group: Group, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = PullConsumer(group.name, connection=group.connection)
    consumer.subscribe(group.topic)
    while len(group.done) < BEFORE:
        group.done += [message.body for message in consumer.poll()]
    consumer.poll(0.0)
    owner: Any = consumer if where == "_goodbye" else consumer._member
    real, interrupts = getattr(owner, where), iter([True])

    def interrupted(*given: Any) -> Any:
        if next(interrupts, False):
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    assert group.has_left()
    consumer.close()
    group.check_next()


IN_CLOSED_LOOP = """
import asyncio, sys, threading
from protomq import AsyncPullConsumer, AsyncPushConsumer
from protomq.errors import ConfigurationError

namesrv, transport, group, topic, count = *sys.argv[1:5], int(sys.argv[5])


def in_closed_loop(coroutine):
    # As programs do that have no asyncio.run: tasks and sockets are left as they are.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(coroutine)
    loop.close()

"""
PULL = (
    IN_CLOSED_LOOP
    + """
async def poll():
    await consumer.subscribe(topic)
    seen = 0
    while seen < count:
        for message in await consumer.poll(0.2):
            print(message.body.decode())
            seen += 1
    await consumer.poll(0.0)  # What was handed out is finished.


async def end():
    await consumer.unsubscribe(topic)
    await consumer.close()


consumer = AsyncPullConsumer(group, namesrv=namesrv, transport=transport)
in_closed_loop(poll())
asyncio.run(end())
print("ended", flush=True)
sys.stdin.read()
"""
)
PUSH = (
    IN_CLOSED_LOOP
    + """
consumer = AsyncPushConsumer(group, namesrv=namesrv, transport=transport)


@consumer.on(topic)
async def listen(message):
    pass


in_closed_loop(consumer.start())
assert not consumer.is_running
consumer.suspend()
consumer.resume()
consumer.set_concurrency(3)
try:
    asyncio.run(consumer.stop())
except ConfigurationError as error:
    print(error)
for thread in [each for each in threading.enumerate() if each.name == "protomq-loop-watch"]:
    print(thread.name)
    thread.join(60.0)
    assert not thread.is_alive()
print("ended", flush=True)
sys.stdin.read()
"""
)


@contextlib.contextmanager
def running(program: str, group: Group) -> Iterator[list[str]]:
    """What a program prints that leaves a closed loop, until it ends. It lives as long as the block.

    A process of its own: gRPC keeps such a loop for ever, and Python warns of the rest.
    """
    settings = [group.namesrv, group.connection.transport, group.name, group.topic, str(BEFORE)]
    command = [sys.executable, "-W", "ignore", "-c", program, *settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while (line := process.stdout.readline()) != "ended\n":
            assert line, "the program has failed"
            lines.append(line.rstrip())
        yield lines
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_a_pull_consumer_of_a_closed_loop_is_closed_in_the_next(group: Group) -> None:
    with running(PULL, group) as lines:
        group.done += [line.encode() for line in lines]
        assert len(group.done) == BEFORE
        wait_for(group.has_left, SOON_S)
        group.check_next()


def test_a_push_consumer_of_a_closed_loop_does_not_run(group: Group) -> None:
    with running(PUSH, group) as (refusal, watch):
        assert "another event loop" in refusal
        assert watch == "protomq-loop-watch"


async def test_a_pull_consumer_of_an_open_loop_is_left_alone_by_others(group: Group) -> None:
    consumer = group.pull()
    with LoopThread() as thread:
        thread.run(consumer.subscribe(group.topic))
        for call in (consumer.unsubscribe(group.topic), consumer.assign([]), consumer.close()):
            with pytest.raises(ConfigurationError, match="another event loop"):
                await call
        thread.run(consumer.close())
