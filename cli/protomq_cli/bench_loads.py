"""What the benchmarks do: senders, readers, and both at once, through the SDK as any application uses it."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from protomq_cli.connection import (
    open_admin,
    open_async_producer,
    open_consumer,
    open_producer,
)
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.load import (
    Pace,
    Tally,
    Window,
    call_paced,
    call_paced_async,
    run_threads,
    summarise,
)

if TYPE_CHECKING:
    from protomq import Message, PullConsumer

Rows = tuple[list[dict[str, Any]], Sequence[Tally]]
OnProgress = Callable[[Sequence[Tally]], None]

_INTENDED: Final = struct.Struct("<d")
"""First bytes of a body of the latency benchmark: when it was meant to be sent."""
_RECEIPT_GRACE_S: Final = 2.0
"""How long the latency benchmark waits for the last messages."""
_IDLE_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """The parameters of a benchmark; a rate of 0 is as fast as it goes."""

    namesrv: str | None
    topic: str
    transport: str
    queues: int
    threads: int
    size_bytes: int
    rate: int
    duration_s: float
    warm_up_s: float

    @property
    def expected_s(self) -> float:
        """How long it will take."""
        return self.warm_up_s + self.duration_s

    def timetable(self) -> tuple[Pace, Window]:
        """When calls start, and which of them count."""
        start = time.perf_counter()
        begin = start + self.warm_up_s
        return Pace(start, self.rate), Window(begin, begin + self.duration_s)


def send_from_threads(load: Load, batch_count: int, on_progress: OnProgress) -> Rows:
    """Each thread sends, waits for the answer, and sends again; they share one producer."""
    _ensure_topic(load)
    body = bytes(load.size_bytes)
    bodies = [body] * batch_count
    size_bytes = load.size_bytes * batch_count
    with open_producer(load.namesrv, transport=load.transport, compression="none") as producer:
        topic = load.topic
        send, send_batch = producer.send, producer.send_batch

        def send_one(intended: float) -> int:
            send(topic, body)
            return size_bytes

        def send_many(intended: float) -> int:
            send_batch(topic, bodies)
            return size_bytes

        producer.send(topic, body)  # Connections and routes are made before the clock starts.
        pace, window = load.timetable()
        call = send_one if batch_count == 1 else send_many
        tallies = run_threads(
            lambda number, tally, stop: call_paced(call, pace, window, batch_count, tally, stop),
            load.threads,
            on_progress,
        )
    return [summarise(_name(batch_count, "threads", load), tallies, load.duration_s)], tallies


def send_from_coroutines(load: Load, batch_count: int, on_progress: OnProgress) -> Rows:
    """The same with coroutines on one event loop."""
    import asyncio

    _ensure_topic(load)
    body = bytes(load.size_bytes)
    bodies = [body] * batch_count
    size_bytes = load.size_bytes * batch_count
    tallies = [Tally() for _ in range(load.threads)]

    async def run() -> None:
        async with open_async_producer(
            load.namesrv, transport=load.transport, compression="none"
        ) as producer:

            async def send_one(intended: float) -> int:
                await producer.send(load.topic, body)
                return size_bytes

            async def send_many(intended: float) -> int:
                await producer.send_batch(load.topic, bodies)
                return size_bytes

            await producer.send(load.topic, body)
            pace, window = load.timetable()
            call = send_one if batch_count == 1 else send_many
            report = asyncio.create_task(_report_each_second(tallies, on_progress))
            try:
                async with asyncio.TaskGroup() as group:
                    for tally in tallies:
                        group.create_task(call_paced_async(call, pace, window, batch_count, tally))
            finally:
                report.cancel()

    asyncio.run(run())
    return [summarise(_name(batch_count, "coroutines", load), tallies, load.duration_s)], tallies


def consume(load: Load, batch_count: int, on_progress: OnProgress) -> Rows:
    """Reads the topic from its start; each thread has a consumer with its share of the queues."""
    shares: list[dict[Any, int]] = [{} for _ in range(load.threads)]
    with open_consumer(load.namesrv) as consumer:
        for number, queue in enumerate(consumer.queues(load.topic)):
            shares[number % load.threads][queue] = consumer.end_offset(queue)
    if not any(end for share in shares for end in share.values()):
        raise CliError(
            ExitCode.NOT_FOUND,
            "TOPIC_EMPTY",
            f"topic {load.topic!r} is empty; fill it with `protomq bench batch -t {load.topic}`",
        )
    started: list[float] = []
    ended: list[float] = []

    def work(number: int, tally: Tally, stop: threading.Event) -> None:
        with open_consumer(load.namesrv, transport=load.transport) as consumer:
            consumer.assign(shares[number])
            started.append(time.perf_counter())
            deadline = started[-1] + load.duration_s
            _read(consumer, shares[number], batch_count, deadline, tally, stop)
            ended.append(time.perf_counter())

    tallies = run_threads(work, min(load.threads, sum(map(bool, shares))), on_progress)
    return [summarise("consume, a pull", tallies, max(ended) - min(started))], tallies


def send_to_receipt(load: Load, on_progress: OnProgress) -> Rows:
    """Sends by a timetable while one consumer waits for all queues."""
    _ensure_topic(load)
    padding = bytes(max(load.size_bytes - _INTENDED.size, 0))
    receipts = Tally()
    stop_receiving = threading.Event()
    with (
        open_producer(load.namesrv, transport=load.transport, compression="none") as producer,
        open_consumer(load.namesrv, transport=load.transport, begin="latest") as consumer,
    ):
        producer.send(load.topic, b"")  # Creates what the first send has to create.
        consumer.subscribe(load.topic)
        consumer.poll(_IDLE_POLL_S)
        pace, window = load.timetable()
        receiver = threading.Thread(
            target=_receive, args=(consumer, window, receipts, stop_receiving), daemon=True
        )
        receiver.start()

        def call(intended: float) -> int:
            body = _INTENDED.pack(intended) + padding
            producer.send(load.topic, body)
            return len(body)

        try:
            tallies = run_threads(
                lambda number, tally, stop: call_paced(call, pace, window, 1, tally, stop),
                load.threads,
                on_progress,
            )
            sent = sum(tally.messages for tally in tallies)
            deadline = time.perf_counter() + _RECEIPT_GRACE_S
            while receipts.messages < sent and time.perf_counter() < deadline:
                time.sleep(0.01)
        finally:
            # Before the consumer is closed, whatever ends the run: Ctrl-C too.
            stop_receiving.set()
            consumer.wakeup()
            receiver.join()
    rows = [
        summarise("send", tallies, load.duration_s),
        summarise("send to receipt", [receipts], load.duration_s),
    ]
    if receipts.messages < sent:
        receipts.note_error(RuntimeError(f"{sent - receipts.messages} messages were not received"))
    return rows, [*tallies, receipts]


def _read(
    consumer: PullConsumer,
    ends: dict[Any, int],
    batch_count: int,
    deadline: float,
    tally: Tally,
    stop: threading.Event,
) -> None:
    """Up to the ends of the queues or the deadline; every message is touched."""
    open_queues = {queue for queue, end in ends.items() if end}
    while open_queues and not stop.is_set() and (begin := time.perf_counter()) < deadline:
        messages = consumer.poll(1.0, batch_count)
        tally.latencies_s.append(time.perf_counter() - begin)
        for message in messages:
            # The CRC-32C was compared before; key and offset are read as a real consumer would.
            tally.size_bytes += len(message.body) + len(message.key)
            if message.queue_offset + 1 >= ends[message.queue]:
                open_queues.discard(message.queue)
        tally.messages += len(messages)


def _receive(consumer: PullConsumer, window: Window, tally: Tally, stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            for message in consumer.poll(_IDLE_POLL_S):
                _note_receipt(message, window, tally)
    except Exception as error:
        tally.note_error(error)


def _note_receipt(message: Message, window: Window, tally: Tally) -> None:
    now = time.perf_counter()
    if len(message.body) < _INTENDED.size:
        return  # Not from this run.
    (intended,) = _INTENDED.unpack_from(message.body)
    if window.counts(intended):
        tally.latencies_s.append(now - intended)
        tally.messages += 1
        tally.size_bytes += len(message.body)


def _ensure_topic(load: Load) -> None:
    """Creates the topic with the queues asked for, at the brokers that answer; one that is there stays as it is."""
    from protomq.errors import PartialResultError, TopicExistsError

    with open_admin(load.namesrv, 5.0) as admin, suppress(TopicExistsError, PartialResultError):
        admin.create_topic(load.topic, write_queues=load.queues)


async def _report_each_second(tallies: Sequence[Tally], on_progress: OnProgress) -> None:
    import asyncio

    while True:
        await asyncio.sleep(1.0)
        on_progress(tallies)


def _name(batch_count: int, callers: str, load: Load) -> str:
    what = "send" if batch_count == 1 else f"send {batch_count} a call"
    return f"{what}, {load.threads} {callers}"
