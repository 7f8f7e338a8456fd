"""The rows of Spark: the same records, queries and machine for both sides, in turns."""

from __future__ import annotations

import json
import pickle
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.bench.bench import Bench, Result, create_topics, rate_of, ratio_of, spread
from tests.bench.measure import Sample, interleave, median_of, run_load
from tests.bench.process import Server
from tests.bench.rows.pull import fill
from tests.bench.spark import kafka
from tests.bench.spark.kafka import PARTITIONS, Kafka
from tests.bench.spark.session import Session

TOPIC: Final = "bench"
MANY_QUEUES: Final = 1000
_WARM_UPS: Final = 1
_LENGTHS: Final = "sum(length({}))"
# Kafka's own, and what made its source and sink fastest here.
_KAFKA_SOURCE_TUNED: Final = {
    "kafka.max.poll.records": "5000",
    "kafka.max.partition.fetch.bytes": str(16 << 20),
    "kafka.receive.buffer.bytes": str(4 << 20),
}
_KAFKA_SINK_TUNED: Final = {
    "kafka.acks": "1",
    "kafka.linger.ms": "5",
    "kafka.batch.size": "262144",
}

_FIRST: Final = json.dumps(
    {TOPIC: {str(queue): 0 for queue in range(PARTITIONS - 1)} | {str(PARTITIONS - 1): 1}}
)
"""The first record of one queue."""

Run = Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class _Ours:
    """A broker, and a Spark that reads from it."""

    bench: Bench
    broker: Server
    session: Session

    def options(self, **more: str) -> dict[str, str]:
        """Of source and sink alike."""
        return {"protomq.namesrv": self.broker.values["namesrv"], **more}

    def read(self, **more: str) -> Sample:
        """Count and sum of lengths, over the whole topic."""
        options = self.options(subscribe=TOPIC, **more)
        return self.session.run(
            "read", format="protomq", options=options, sums=[_LENGTHS.format("body")]
        )

    def write(self, rows: int, size: int) -> Sample:
        """Rows of one size."""
        return self.session.run(
            "write", format="protomq", options=self.options(topic=TOPIC), column="body",
            rows=rows, size=size, mode="append",
        )  # fmt: skip

    def touch(self) -> None:
        """A query of some records."""
        self.read(endingOffsets=_FIRST)

    def pause(self) -> None:
        """Takes no CPU time until `resume`."""
        self.session.pause()
        self.broker.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on."""
        self.broker.send_signal(signal.SIGCONT)
        self.session.resume()

    def consume(self, messages: int) -> Sample:
        """By the SDK, Spark stopped."""
        self.session.pause()
        try:
            return run_load(
                "sdk.consume", namesrv=self.broker.values["namesrv"], topic=TOPIC,
                messages=messages, keys=False, server_pids=self.broker.pids,
            )  # fmt: skip
        finally:
            self.session.resume()

    def send(self) -> Sample:
        """Batches by the SDK, Spark stopped."""
        self.session.pause()
        try:
            return self.bench.load(
                "sdk.send_from_threads", self.broker, namesrv=self.broker.values["namesrv"],
                topic=TOPIC, threads=4, batch=256, size=1024,
            )  # fmt: skip
        finally:
            self.session.resume()


@dataclass(frozen=True, slots=True)
class _Theirs:
    """Kafka, and a Spark with its connector."""

    broker: Kafka
    session: Session

    def options(self, **more: str) -> dict[str, str]:
        """Of source and sink alike."""
        return {"kafka.bootstrap.servers": self.broker.bootstrap, **more}

    def read(self, more: Mapping[str, str]) -> Sample:
        """Count and sum of lengths, over the whole topic."""
        options = self.options(subscribe=TOPIC, startingOffsets="earliest", **more)
        return self.session.run(
            "read", format="kafka", options=options, sums=[_LENGTHS.format("value")]
        )

    def write(self, rows: int, size: int, more: Mapping[str, str]) -> Sample:
        """Rows of one size."""
        return self.session.run(
            "write", format="kafka", options=self.options(topic=TOPIC, **more), column="value",
            rows=rows, size=size, mode="append",
        )  # fmt: skip

    def touch(self) -> None:
        """A query of some records."""
        self.read({"endingOffsets": _FIRST})

    def pause(self) -> None:
        """Takes no CPU time until `resume`."""
        self.session.pause()
        self.broker.pause()

    def resume(self) -> None:
        """Goes on."""
        self.broker.resume()
        self.session.resume()


@dataclass(frozen=True, slots=True)
class _Pair:
    bench: Bench
    ours: _Ours
    theirs: _Theirs

    def interleave(self, ours: Mapping[str, Run], theirs: Mapping[str, Run]) -> dict[str, list[Sample]]:  # fmt: skip
        """Each in turn, the other side stopped; what came out of the first turns does not count."""
        runs = {
            name: partial(_while_stopped, self.theirs, run, self.ours) for name, run in ours.items()
        }
        runs |= {
            name: partial(_while_stopped, self.ours, run, self.theirs)
            for name, run in theirs.items()
        }
        for _ in range(_WARM_UPS):
            for run in runs.values():
                run()
        return interleave(runs, self.bench.extent.rounds + 1)

    def fill(self, rows: int, size: int) -> None:
        """The same records on both sides."""
        _while_stopped(self.theirs, partial(self.ours.write, rows, size))
        tuned = partial(self.theirs.write, rows, size, _KAFKA_SINK_TUNED)
        _while_stopped(self.ours, tuned)

    @property
    def versions(self) -> str:
        """Which Sparks."""
        return (
            f"local[2]; ours in Spark {self.ours.session.version}, Kafka {kafka.VERSION} with its connector"
            f" in Spark {self.theirs.session.version}"
        )


def _while_stopped(
    other: _Ours | _Theirs, run: Run, after: _Ours | _Theirs | None = None
) -> Sample:
    """`after`: whose small query is run before and not counted. What was stopped itself has to find back: heartbeats are late."""
    other.pause()
    try:
        if after is not None:
            after.touch()
        return run()
    finally:
        other.resume()


@contextmanager
def _ours(bench: Bench, queues: int = PARTITIONS) -> Iterator[_Ours]:
    with ExitStack() as stack:
        broker = stack.enter_context(bench.standalone())
        create_topics(broker, [TOPIC], queues)
        folder = bench.new_folder("spark")
        session = stack.enter_context(Session(Path(sys.executable), folder, broker.pid))
        yield _Ours(bench, broker, session)


@contextmanager
def _pair(bench: Bench) -> Iterator[_Pair]:
    with ExitStack() as stack:
        ours = stack.enter_context(_ours(bench))
        broker = stack.enter_context(Kafka(bench.new_folder("kafka")))
        folder = bench.new_folder("spark-kafka")
        session = stack.enter_context(
            Session(kafka.PYTHON, folder, broker.pid, kafka.connector_jars())
        )
        yield _Pair(bench, ours, _Theirs(broker, session))


def _faster(one: Sequence[Sample], other: Sequence[Sample]) -> Sequence[Sample]:
    rate = partial(median_of, value=lambda sample: sample.rate)
    return one if rate(one) >= rate(other) else other


def _reads(bench: Bench, size: int, rows: int, floor: float, sdk_floor: float | None) -> Iterator[Result]:  # fmt: skip
    name = f"Spark read, {'1 KiB' if size == 1024 else f'{size} B'}"
    with _pair(bench) as pair:
        pair.fill(rows, size)
        ours, theirs = pair.ours, pair.theirs
        some = pair.interleave(
            {
                "all": ours.read,
                "body": partial(ours.read, columns="body"),
                "sdk": partial(ours.consume, rows),
            },
            {
                "default": partial(theirs.read, {}),
                "tuned": partial(theirs.read, _KAFKA_SOURCE_TUNED),
            },
        )
        versions = pair.versions
    best = _faster(some["default"], some["tuned"])
    yield rate_of(
        f"{name}: protomq", some["all"],
        f"count and sum of lengths, {rows:,} records, {PARTITIONS} queues, all 13 columns; {versions}; {spread(some['all'])}",
    )  # fmt: skip
    yield rate_of(f"{name}, columns=body: protomq", some["body"], spread(some["body"]))
    yield rate_of(f"{name}: Kafka", some["default"], f"its defaults; {spread(some['default'])}")
    yield rate_of(
        f"{name}, tuned: Kafka", some["tuned"],
        f"larger polls, fetches and buffers; {spread(some['tuned'])}",
    )  # fmt: skip
    how = "against the faster of Kafka's two"
    yield ratio_of(f"{name}: protomq / Kafka", some["all"], best, floor, how)
    yield ratio_of(f"{name}, columns=body: protomq / Kafka", some["body"], best, None, how)
    yield rate_of(f"{name}: the SDK without Spark", some["sdk"], spread(some["sdk"]))
    how = "the SDK's catch-up rate in the same run"
    yield ratio_of(f"{name}: Spark / SDK", some["all"], some["sdk"], sdk_floor, how)
    yield ratio_of(f"{name}, columns=body: Spark / SDK", some["body"], some["sdk"], None, how)


def read_1k(bench: Bench) -> Iterator[Result]:
    """Batch reads of 1 KiB against Kafka's source and against the SDK."""
    yield from _reads(bench, 1024, bench.extent.consume_messages * 3 // 2, 1.6, 0.6)


def read_128(bench: Bench) -> Iterator[Result]:
    """The same with 128 B."""
    yield from _reads(bench, 128, 3 * bench.extent.consume_messages, 1.2, None)


def stream(bench: Bench) -> Iterator[Result]:
    """Trigger.AvailableNow over 1 KiB, into nothing."""
    rows = bench.extent.consume_messages
    with _pair(bench) as pair:
        pair.fill(rows, 1024)
        given = {"subscribe": TOPIC, "startingOffsets": "earliest"}

        def ours() -> Sample:
            options = pair.ours.options(**given)
            return pair.ours.session.run("stream", format="protomq", options=options)

        def theirs(more: Mapping[str, str]) -> Sample:
            options = pair.theirs.options(**given, **more)
            return pair.theirs.session.run("stream", format="kafka", options=options)

        some = pair.interleave(
            {"ours": ours},
            {"default": partial(theirs, {}), "tuned": partial(theirs, _KAFKA_SOURCE_TUNED)},
        )
        versions = pair.versions
    name = "Spark stream, AvailableNow, 1 KiB"
    how = f"a new query each time, {rows:,} records, all columns, sink noop; {versions}"
    yield rate_of(f"{name}: protomq", some["ours"], f"{how}; {spread(some['ours'])}")
    yield rate_of(f"{name}: Kafka", some["default"], f"its defaults; {spread(some['default'])}")
    yield rate_of(f"{name}, tuned: Kafka", some["tuned"], spread(some["tuned"]))
    best = _faster(some["default"], some["tuned"])
    how = "against the faster of Kafka's two"
    yield ratio_of(f"{name}: protomq / Kafka", some["ours"], best, 1.3, how)


def write_1k(bench: Bench) -> Iterator[Result]:
    """Batch writes of 1 KiB against Kafka's sink and against the SDK."""
    rows = bench.extent.consume_messages
    with _pair(bench) as pair:
        pair.fill(rows // 4, 1024)  # That is their first write, too: JVMs get warm by it.
        ours, theirs = pair.ours, pair.theirs
        nothing = partial(
            ours.session.run, "write", format="noop", options={}, column="body", rows=rows,
            size=1024, mode="overwrite",
        )  # fmt: skip
        some = pair.interleave(
            {"ours": partial(ours.write, rows, 1024), "sdk": ours.send, "noop": nothing},
            {
                "default": partial(theirs.write, rows, 1024, {}),
                "tuned": partial(theirs.write, rows, 1024, _KAFKA_SINK_TUNED),
            },
        )
        versions = pair.versions
    name = "Spark write, 1 KiB"
    best = _faster(some["default"], some["tuned"])
    yield rate_of(
        f"{name}: protomq", some["ours"],
        f"{rows:,} rows made by Spark in 4 partitions, stored once; {versions}; {spread(some['ours'])}",
    )  # fmt: skip
    yield rate_of(
        f"{name}: Kafka", some["default"],
        f"its defaults: acks=all, at least once; {spread(some['default'])}",
    )  # fmt: skip
    yield rate_of(
        f"{name}, tuned: Kafka", some["tuned"],
        f"acks=1, linger 5 ms, batches of 256 KiB; {spread(some['tuned'])}",
    )  # fmt: skip
    yield rate_of(f"{name}: making the rows alone", some["noop"], "sink noop")
    how = "against the faster of Kafka's two"
    yield ratio_of(f"{name}: protomq / Kafka", some["ours"], best, 1.0, how)
    yield rate_of(f"{name}: the SDK without Spark", some["sdk"], "4 threads, batches of 256")
    yield ratio_of(f"{name}: Spark / SDK", some["ours"], some["sdk"], 0.5, "in the same run")


def start(bench: Bench) -> Iterator[Result]:
    """What a query costs before its records: 16 records from 16 queues, in a warm session."""
    with _pair(bench) as pair:
        pair.fill(PARTITIONS * 20_000, 128)  # So many that each queue gets some.
        end = json.dumps({TOPIC: {str(queue): 1 for queue in range(PARTITIONS)}})
        some = pair.interleave(
            {"ours": partial(pair.ours.read, endingOffsets=end)},
            {"theirs": partial(pair.theirs.read, {"endingOffsets": end})},
        )
        versions = pair.versions
    for name, samples in (("protomq", some["ours"]), ("Kafka", some["theirs"])):
        yield Result(
            f"Spark, start of a query with {PARTITIONS} tasks: {name}",
            statistics.median(sample.seconds for sample in samples), "s", "less",
            f"a record from each queue, warm session; {versions}",
        )  # fmt: skip


def planning(bench: Bench) -> Iterator[Result]:
    """What the source adds to a micro-batch over 1,000 queues."""
    from protomq_spark.options import parse_read_options
    from protomq_spark.source import StreamReader

    with bench.standalone() as broker:
        create_topics(broker, [TOPIC], MANY_QUEUES)
        fill(broker, TOPIC, MANY_QUEUES, 256 * MANY_QUEUES, 128)  # A batch to each queue.
        given = {
            "protomq.namesrv": broker.values["namesrv"], "subscribe": TOPIC,
            "startingOffsets": "earliest", "maxOffsetsPerTrigger": str(2 * MANY_QUEUES),
        }  # fmt: skip
        options = parse_read_options(given, streaming=True)
        reader = StreamReader(options, options.columns)
        offset: Any = json.loads(json.dumps(reader.initialOffset()))
        times_ms = []
        for _ in range(20):
            begin = time.perf_counter()
            end = reader.latestOffset(offset, reader.getDefaultReadLimit())
            reader.reportLatestOffset()
            tasks = reader.partitions(offset, json.loads(json.dumps(end)))
            for task in tasks:
                pickle.dumps(task)
            reader.commit(end)
            times_ms.append((time.perf_counter() - begin) * 1000)
            assert len(tasks) == MANY_QUEUES
            offset = end
    yield Result(
        f"Spark, planning of a micro-batch over {MANY_QUEUES:,} queues", statistics.median(times_ms), "ms", "less",
        f"latestOffset with a limit, partitions, commit, without Spark; worst {max(times_ms):.1f}", 100.0,
    )  # fmt: skip


def memory(bench: Bench) -> Iterator[Result]:
    """Resident memory of a Python worker, by the backlog of its task."""
    rows = bench.extent.consume_messages
    with _ours(bench, queues=1) as ours:
        ours.write(rows, 1024)
        most = {}
        # Twice: what a first task loads is no part of either.
        for part in (16, 16, 4, 1):
            options = ours.options(
                subscribe=TOPIC, endingOffsets=json.dumps({TOPIC: {"0": rows // part}})
            )
            most[part] = ours.session.run_watching_memory(
                "read", format="protomq", options=options, sums=[_LENGTHS.format("body")]
            )
    for part in (16, 1):
        yield Result(
            f"Spark, memory of a Python worker, {rows // part * 1024 / (1 << 20):,.0f} MiB to read", most[part], "MiB", "less",
            "most resident memory while one task reads them, all columns",
        )  # fmt: skip
    yield Result(
        "Spark, memory of a Python worker, whole backlog / a sixteenth", most[1] / most[16], "x", "less",
        "bounded by the size of a pull (4 MiB), not by the backlog", 1.2,
    )  # fmt: skip


SPARK_ROWS: Final[dict[str, Callable[[Bench], Iterator[Result]]]] = {
    "spark-read": read_1k,
    "spark-read-128": read_128,
    "spark-stream": stream,
    "spark-write": write_1k,
    "spark-start": start,
    "spark-planning": planning,
    "spark-memory": memory,
}
