"""A producer and a member of a group that work while something is done to the cluster, and the checker of what they saw.

Each message is a number of its sender. What was acknowledged must be consumed, from the queue that the answer named; messages of a queue
come in the order in which they were sent; what comes twice is counted. A send that failed may be there or not.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from protomq import MessageQueue, Producer, PullConsumer, SendStatus
from protomq.errors import ProtomqError

from .waiting import PATIENCE_S, wait_for

PAUSE_S = 0.005
SEND_TIMEOUT_S = 20.0
"""Longer than a fail-over."""
STORED = (SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE)
"""Of a SYNC_MASTER that waits for those copies that are in sync: the others are away for a while."""


class Load:
    """`with` begins and ends it.

    Attributes: acknowledged: the queue of each body; failures: of sends, as text; consumed: by queue, the numbers as they came.
    """

    def __init__(self, namesrv: str, topic: str, group: str, *, consumes: bool = True) -> None:
        """`consumes`: at once, else from `begin_to_consume` on."""
        self.acknowledged: dict[bytes, MessageQueue] = {}
        self.failures: list[str] = []
        self.consumed: dict[MessageQueue, list[int]] = {}
        self._namesrv, self._topic, self._group = namesrv, topic, group
        self._sent_all = threading.Event()
        self._over = threading.Event()
        self._may_consume = threading.Event()
        if consumes:
            self._may_consume.set()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._send, self._consume)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._sent_all.set()
        self._over.set()
        self._may_consume.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def _send(self) -> None:
        with Producer(namesrv=self._namesrv, send_timeout_s=SEND_TIMEOUT_S) as producer:
            number = 0
            while not self._sent_all.wait(PAUSE_S):
                body = b"%d" % number
                number += 1
                try:
                    result = producer.send(self._topic, body)
                except ProtomqError as error:
                    self.failures.append(f"{number - 1}: {error!r}")
                    continue
                if result.status in STORED:
                    self.acknowledged[body] = result.queue
                else:
                    self.failures.append(f"{number - 1}: {result.status.name}")

    def begin_to_consume(self) -> None:
        self._may_consume.set()

    def _consume(self) -> None:
        self._may_consume.wait()
        with PullConsumer(self._group, namesrv=self._namesrv, begin="earliest") as consumer:
            consumer.subscribe(self._topic)
            while not self._over.is_set():
                try:
                    for message in consumer.poll(0.2):
                        # Others may have sent there before.
                        if message.body.isdigit():
                            self.consumed.setdefault(message.queue, []).append(int(message.body))
                    consumer.commit()
                except ProtomqError as error:
                    if not error.retriable:
                        raise

    def wait_for_more(self, count: int) -> None:
        """Until so many more are acknowledged."""
        wanted = len(self.acknowledged) + count
        wait_for(lambda: len(self.acknowledged) >= wanted or self._errors, 2 * PATIENCE_S)
        assert not self._errors, self._errors

    def brokers_of_last(self, count: int) -> set[str]:
        """That took the last sends."""
        return {queue.broker_name for queue in list(self.acknowledged.values())[-count:]}

    def bodies_of(self, broker: str) -> set[bytes]:
        """What this one has acknowledged."""
        return {body for body, queue in self.acknowledged.items() if queue.broker_name == broker}

    def stop_sending(self) -> None:
        self._sent_all.set()
        self._threads[0].join()

    def wait_until_consumed(self) -> None:
        """Everything that was acknowledged; behind `stop_sending`."""
        wanted = {int(body) for body in self.acknowledged}
        wait_for(lambda: wanted <= self._numbers().keys() or self._errors, 2 * PATIENCE_S)

    def _numbers(self) -> Counter[int]:
        return Counter(number for numbers in list(self.consumed.values()) for number in list(numbers))

    @property
    def repeats(self) -> int:
        """Messages that came more than once, counted each further time."""
        numbers = self._numbers()
        return numbers.total() - len(numbers)

    @property
    def stored_twice(self) -> int:
        """Messages that are in two queues: sent again to another one after a failure."""
        places = Counter(number for numbers in self.consumed.values() for number in set(numbers))
        return sum(count > 1 for count in places.values())

    def check(self) -> None:
        """Nothing acknowledged is missed, or elsewhere; in each queue, first arrivals are in order; each message is stored once."""
        assert not self._errors, self._errors
        numbers = self._numbers()
        missed = sorted({int(body) for body in self.acknowledged} - numbers.keys())
        assert not missed, f"{len(missed)} acknowledged messages were missed: {missed[:20]}"
        there = {queue: set(seen) for queue, seen in self.consumed.items()}
        elsewhere = [int(body) for body, queue in self.acknowledged.items() if int(body) not in there.get(queue, ())]
        assert not elsewhere, f"{len(elsewhere)} messages are not in the queue that was acknowledged: {elsewhere[:20]}"
        for queue, seen in self.consumed.items():
            first = list(dict.fromkeys(seen))
            assert first == sorted(first), f"{queue} is out of order"
        assert not self.stored_twice, "a message is in two queues"
