"""Spark copies a topic from one cluster to another, as a stream, while both and Spark itself are done harm.

    sender ──▶ source broker ──▶ Spark driver, its JVM, its Python workers ──▶ target broker
               behind a FaultProxy                                             behind another

What is checked at the end, by the letters of docs/reliability.md: each acknowledged id is in the target (B3) once (A3), nothing else is
(A6). Only retention may take ids away before they are read, and only those that the source has not any more. The query may fail only where
a worker was killed (I1), and comes to its end when no fault is left (I2). In some rounds the source topic is deleted when all of it is
copied, and made again: ids of the new one count as all others do. In some the rows are shuffled, and written by `send_batch`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from protomq import Admin, MessageQueue, OutgoingMessage, Producer, PullConsumer
from protomq.errors import ProtomqError
from protomq.testing import Broker, FaultProxy
from tests.support.small_segments import (
    keep_all_again,
    let_retention_pass,
    small_segments_broker,
)
from tests.support.spark_driver import SHUFFLED, SparkDriver
from tests.support.topics import drain, make_topic
from tests.support.waiting import wait_for

from .checker import Violation

TOPIC: Final = "chaos-source"
COPY: Final = "chaos-copy"
QUEUES: Final = 3
BATCH_COUNT: Final = 15
PACE_S: Final = 0.05
"""300 ids a second: Spark keeps up on two busy cores, and its micro-batches never end."""
END_TIMEOUT_S: Final = 180.0
RAISED_BY_US: Final = re.compile(r"protomq_spark[./]|protomq\.errors")
"""In the text of a failed query: a traceback of ours. All else that may fail it is a worker that was killed."""
PASSED_THROUGH: Final = re.compile(r'File "[^"]*/protomq_spark/batches\.py"')
"""`send_batch` on the driver stands in the traceback of whatever fails the write that it waits for."""


class _End:
    """A broker and the proxy in front of its remoting port."""

    def __init__(self, folder: Path, seed: int, topic: str, queues: int) -> None:
        self.proxy = FaultProxy(seed=seed)
        self.broker: Broker = small_segments_broker(folder, self.proxy.advertised())
        self.broker.start()
        self.proxy.target = self.broker.remoting_address
        make_topic(self.broker, topic, queues)

    def close(self) -> None:
        self.broker.stop()
        self.proxy.close()


def _stored_count(end: _End, topic: str) -> int:
    """Asked past the proxy, by gRPC."""
    with PullConsumer(namesrv=end.broker.namesrv, transport="grpc") as consumer:
        return sum(consumer.end_offset(queue) for queue in consumer.queues(topic))


class SparkWorld:
    """Context. `harm` as often as you like, then `finish`, then `check`."""

    def __init__(self, seed: int, counts: Counter[str], *, bug: str = "") -> None:
        self.rng = random.Random(f"spark {seed}")
        self.counts = counts
        self._temporary = tempfile.TemporaryDirectory(prefix="protomq-spark-chaos-")
        self._folder = Path(self._temporary.name)
        self._source = _End(self._folder / "source", seed, TOPIC, QUEUES)
        self._target = _End(self._folder / "target", seed + 1, COPY, self.rng.choice((2, 3, 5)))
        self._acknowledged: dict[int, tuple[MessageQueue, int]] = {}
        self._uncertain: set[int] = set()
        self._may_send, self._ended = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self._sender = threading.Thread(target=self._send, name="sender")
        self._passes_retention = self.rng.random() < 0.4
        chance = random.Random(f"spark, what else {seed}")
        self._makes_again = not bug and not self._passes_retention and chance.random() < 0.5
        self._shuffles = not bug and chance.random() < 0.4
        self._gone: set[int] = set()
        """Ids of topics that were deleted, which were in the copy by then."""
        self._deleted_count = 0
        self._slow_s = self.rng.choice((0.0, 0.02, 0.05))
        """How much longer an answer of the target takes, always: so long do writes stay open to harm."""
        self._heal()
        self._driver: SparkDriver | None = None
        self._workers_killed = 0
        self._settings = self._spark_settings(bug)

    def _spark_settings(self, bug: str) -> dict[str, Any]:
        rng = self.rng
        transport = rng.choice(("auto", "auto", "auto", "grpc"))
        read = {
            "protomq.namesrv": self._source.broker.namesrv, "subscribe": TOPIC, "startingOffsets": "earliest",
            "columns": "body", "protomq.transport": transport, "protomq.pullCountMax": str(rng.choice((50, 200, 1000))),
            "maxOffsetsPerTrigger": str(rng.choice((300, 800, 2000))), "minPartitions": str(rng.choice((1, 4))),
            "failOnDataLoss": str(not (self._passes_retention or self._makes_again)).lower(),
        }  # fmt: skip
        write = {
            "protomq.namesrv": self._target.broker.namesrv, "topic": COPY,
            "protomq.transport": transport, "batchRows": str(rng.choice((20, 50, 500))),
        }  # fmt: skip
        write_format = SHUFFLED if self._shuffles else "protomq"
        self.counts["shuffled"] += self._shuffles
        if bug:
            write_format = "protomq-recorded"
            write |= {"record.folder": str(self._folder / "records"), "record.bug": bug}
        query = {
            "read_format": "protomq",
            "read": read,
            "write_format": write_format,
            "write": write,
        }
        query["checkpoint"] = str(self._folder / "checkpoint")
        return {
            "master": "local[2,4]", "warehouse": str(self._folder / "warehouse"), "queries": [query],
            "until": str(self._folder / "until"), "failures": str(self._folder / "failures"),
        }  # fmt: skip

    def __enter__(self) -> Self:
        self._sender.start()
        self._start_driver()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._may_send.set()
        if self._driver is not None and self._driver.running:
            self._driver.kill()
        self._sender.join()
        for end in (self._source, self._target):
            end.close()
        self._temporary.cleanup()

    # -- the sender ------------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """A batch, and as soon as that is allowed more and more."""
        first = 0
        with Producer(namesrv=self._source.broker.namesrv, send_timeout_s=3.0) as producer:
            while not self._ended.is_set():
                if first and not self._may_send.is_set():
                    self._idle.set()
                    self._may_send.wait()
                    self._idle.clear()
                    continue
                ids = range(first, first + BATCH_COUNT)
                first += BATCH_COUNT
                try:
                    sent = producer.send_batch(
                        TOPIC, [OutgoingMessage(TOPIC, b"%0400d" % n) for n in ids]
                    )
                except ProtomqError:
                    self._uncertain |= set(ids)
                else:
                    self._acknowledged |= {
                        n: (result.queue, result.queue_offset)
                        for n, result in zip(ids, sent, strict=True)
                    }
                self._ended.wait(PACE_S)

    def _hold_sender(self) -> None:
        self._may_send.clear()
        self._idle.wait()

    # -- harm --------------------------------------------------------------------------------------------------------------------

    def harm(self) -> None:
        """One fault, at a random moment while rows are being written to the target; two at a time now and then."""
        harms = self._harms()
        chosen = self.rng.sample(sorted(harms), 2 if self.rng.random() < 0.25 else 1)
        self.do(*chosen, after_s=self.rng.choice((0.0, 0.0, self.rng.uniform(0.0, 0.4))))

    def do(self, *names: str, after_s: float = 0.0) -> None:
        """These faults, one right after the other, as soon as rows are being written, or a little later."""
        self._wait_for_growth()
        if not self._may_send.is_set():  # The first batch has come through: Spark is there.
            self._may_send.set()
            self._wait_for_growth()
        time.sleep(after_s)
        harms = self._harms()
        for name in names:
            self.counts[name] += 1
            harms[name]()
        for end in (self._source, self._target):
            end.broker.start()
        self._heal()

    def _heal(self) -> None:
        for end in (self._source, self._target):
            end.proxy.heal()
        self._target.proxy.set(delay_s=self._slow_s)

    def _harms(self) -> dict[str, Callable[[], object]]:
        rng = self.rng
        found: dict[str, Callable[[], object]] = {
            "driver killed": self._kill_driver,
            "a worker killed": partial(self._kill_workers, 1),
            "all workers killed": partial(self._kill_workers, 100),
        }
        if self._passes_retention:
            found["retention"] = self._retention
        if self._makes_again:
            found["topic made again"] = self._make_again
        for name, end in (("source", self._source), ("target", self._target)):
            disturb = partial(self._disturb, end)
            found |= {
                f"{name} broker killed": partial(self._kill_broker, end),
                f"{name} broker restarted": end.broker.restart,
                f"{name} broker paused": partial(self._pause_broker, end),
                f"{name} connections cut": end.proxy.cut,
                f"{name} answers lost": partial(disturb, drop_answers=True),
                f"{name} connections cut often": partial(
                    disturb, cut_probability=rng.uniform(0.1, 0.5)
                ),
                f"{name} answers cut short": partial(
                    disturb, cut_after_answer_bytes=rng.randrange(10, 20_000)
                ),
            }
        return found

    def _kill_broker(self, end: _End) -> None:
        end.broker.kill()
        time.sleep(self.rng.uniform(0.0, 1.5))
        end.broker.start()

    def _pause_broker(self, end: _End) -> None:
        os.kill(end.broker.process_id, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.1, 1.0))
        os.kill(end.broker.process_id, signal.SIGCONT)

    def _disturb(self, end: _End, **faults: Any) -> None:
        end.proxy.set(**faults)
        time.sleep(self.rng.uniform(0.1, 0.8))

    def _kill_workers(self, count: int) -> None:
        assert self._driver is not None
        workers = self._driver.workers()
        for process_id in self.rng.sample(workers, min(count, len(workers))):
            try:
                os.kill(process_id, signal.SIGKILL)
            except ProcessLookupError:  # It ended by itself, or with the one it was forked from.
                continue
            self._workers_killed += 1
            self.counts["worker processes killed"] += 1

    def _kill_driver(self) -> None:
        assert self._driver is not None
        self._driver.kill()
        self._start_driver()

    def _start_driver(self) -> None:
        self._driver = SparkDriver(self._settings, self._folder / "driver.log")
        self.counts["drivers"] += 1

    def _retention(self) -> None:
        self._hold_sender()
        let_retention_pass(self._source.broker)
        keep_all_again(self._source.broker)
        self._may_send.set()

    def _make_again(self) -> None:
        self._hold_sender()
        sent = self._deleted_count + _stored_count(self._source, TOPIC)
        wait_for(lambda: _stored_count(self._target, COPY) >= sent, END_TIMEOUT_S)
        self._deleted_count = sent
        self._gone |= set(self._acknowledged)
        with Admin(namesrv=self._source.broker.namesrv) as admin:
            admin.delete_topic(TOPIC)
        make_topic(self._source.broker, TOPIC, QUEUES)
        self._may_send.set()

    def _wait_for_growth(self) -> None:
        """Until Spark writes: the target grows."""
        # By gRPC it is asked past the proxy.
        with PullConsumer(namesrv=self._target.broker.namesrv, transport="grpc") as consumer:
            queues = consumer.queues(COPY)

            def count() -> int:
                return sum(consumer.end_offset(queue) for queue in queues)

            before = count()
            wait_for(lambda: count() > before or not self._running(), END_TIMEOUT_S, pause_s=0.005)

    def _running(self) -> bool:
        return self._driver is not None and self._driver.running

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def finish(self) -> list[Violation]:
        """No more messages, and Spark copies what is left."""
        assert self._driver is not None
        self._hold_sender()
        self._slow_s = 0.0
        self._heal()
        (self._folder / "until").touch()
        log = self._folder / "driver.log"
        if not self._driver.wait(END_TIMEOUT_S):
            tail = log.read_text()[-3000:]
            return [
                Violation("I2", f"no fault is left, and Spark does not come to its end:\n{tail}")
            ]
        return []

    def check(self) -> list[Violation]:
        """What is wrong with the copy, and with what the query failed with."""
        found = self._failures()
        with PullConsumer(namesrv=self._source.broker.namesrv) as consumer:
            first = {queue: consumer.min_offset(queue) for queue in consumer.queues(TOPIC)}
        stored = Counter(int(message.body) for message in drain(self._target.broker, COPY))
        passed_over = 0
        for number, (queue, offset) in self._acknowledged.items():
            if number in stored:
                continue
            passed_over += offset < first[queue]
            if not self._passes_retention or number in self._gone or offset >= first[queue]:
                found.append(Violation("B3", f"id {number} of {queue}@{offset} is not in the copy"))
        for number, times in sorted(stored.items()):
            if times > 1:
                found.append(Violation("A3", f"id {number} is {times} times in the copy"))
            if number not in self._acknowledged and number not in self._uncertain:
                found.append(Violation("A6", f"id {number} is in the copy and was not sent"))
        commits = self._folder / "checkpoint/commits"
        self.counts["micro-batches"] += sum(path.name.isdecimal() for path in commits.iterdir())
        self.counts["ids acknowledged"] += len(self._acknowledged)
        self.counts["ids copied"] += len(stored)
        self.counts["ids deleted before they were read"] += passed_over
        return found

    def _failures(self) -> list[Violation]:
        path = self._folder / "failures"
        texts = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        self.counts["query failures"] += len(texts)
        found = [
            Violation("I1", f"the query failed with {text[:3000]}")
            for text in texts
            if RAISED_BY_US.search(PASSED_THROUGH.sub("", text))
        ]
        if len(texts) > self._workers_killed:
            found.append(
                Violation(
                    "I1", f"{self._workers_killed} workers killed, {len(texts)} failures: {texts}"
                )
            )
        return found


def spark_rounds(seed: int, rounds: int, counts: Counter[str], *, bug: str = "") -> list[Violation]:
    """So many faults, one after the other, then the count."""
    with SparkWorld(seed, counts, bug=bug) as world:
        for _ in range(rounds):
            world.harm()
        return world.finish() or world.check()
