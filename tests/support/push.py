"""Push consumers of either flavour, run from a test's thread; and what tests of them ask a broker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from protomq import Admin, AsyncPushConsumer, Producer, PullConsumer, PushConsumer
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S


class LoopThread:
    """An event loop on a thread of its own, for the flavour that needs one."""

    def __enter__(self) -> LoopThread:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        return self

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Push:
    """A flavour. `left`: what the last stop has returned. `call`: runs a function where the consumer lives."""

    def __init__(self, kind: str, broker: Broker) -> None:
        self.kind = kind
        self.namesrv = broker.namesrv
        self.left: int | None = None
        self.call: Callable[[Callable[[], Any]], Any] = lambda function: function()

    @contextmanager
    def __call__(
        self,
        group: str,
        topic: str,
        listener: Callable[[Any], Any],
        *,
        namesrv: str = "",
        batch_size: int | None = None,
        **settings: Any,
    ) -> Iterator[PushConsumer | AsyncPushConsumer]:
        """A running consumer. `listener`: a function; where coroutines are to listen it becomes one."""
        namesrv = namesrv or self.namesrv
        if self.kind == "threads":
            consumer = PushConsumer(group, namesrv=namesrv, **settings)
            consumer.subscribe(topic, listener, batch_size=batch_size)
            consumer.start()
            try:
                yield consumer
            finally:
                self.left = consumer.stop()
            return

        async def coroutine(given: Any) -> Any:
            await asyncio.sleep(0)
            result = listener(given)
            return await result if asyncio.iscoroutine(result) else result

        with LoopThread() as thread:

            async def begin() -> AsyncPushConsumer:
                made = AsyncPushConsumer(group, namesrv=namesrv, **settings)
                wanted = coroutine if self.kind == "coroutines" else listener
                made.subscribe(topic, wanted, batch_size=batch_size)
                await made.start()
                return made

            async def run(function: Callable[[], Any]) -> Any:
                return function()

            self.call = lambda function: thread.run(run(function))
            async_consumer = thread.run(begin())
            try:
                yield async_consumer
            finally:
                self.left = thread.run(async_consumer.stop())


def group_of(broker: Broker, topic: str, *delays_ms: int) -> str:
    """A group with these retries."""
    name = f"g-{topic}"
    with Admin(namesrv=broker.namesrv) as admin:
        admin.set_group(name, retry_count_max=len(delays_ms), retry_delays_ms=list(delays_ms))
    return name


def send(producer: Producer, topic: str, count: int, first: int = 0) -> list[bytes]:
    bodies = [b"%d" % number for number in range(first, first + count)]
    producer.send_batch(topic, bodies)
    return bodies


def dead_letters(broker: Broker, group: str, count: int) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    with PullConsumer(namesrv=broker.namesrv) as reader:
        reader.subscribe(f"%DLQ%{group}")
        ends_s = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < ends_s:
            found |= {one.body: one.last_error for one in reader.poll()}
    return found


def committed(broker: Broker, group: str, topic: str) -> int:
    """Of all queues together."""
    with PullConsumer(group, namesrv=broker.namesrv) as reader:
        return sum(reader.committed(queue) or 0 for queue in reader.queues(topic))
