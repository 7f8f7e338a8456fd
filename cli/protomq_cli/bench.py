"""`bench producer|batch|consumer|latency`: RocketMQ's benchmarks with RocketMQ's parameters.

Clients run in this process, and share the machine with the broker if that is here. What is measured stands in
`bench_loads`. Here are the parameters, the progress line and the result: one row per kind of call, latencies from the
intended start (see `load`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq.wire.topics import QUEUES_MAX
from protomq_cli import completion
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import (
    Namesrv,
    Output,
    TransportName,
    count_option,
    duration_option,
    option_parser,
)
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from protomq_cli.load import Tally

DEFAULT_TOPIC: Final = "BenchmarkTest"
"""As RocketMQ's benchmark calls it."""



def _parse_body_size(text: str) -> int:
    from protomq.wire.record import BODY_SIZE_MAX_BYTES

    size_bytes = parse_size(text)
    if size_bytes > BODY_SIZE_MAX_BYTES:
        raise ValueError(f"a message has a body of {format_size(BODY_SIZE_MAX_BYTES)} at most, not {text}")
    return size_bytes


def _parse_measured(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise ValueError(f"a time to measure is more than 0, not {text}")
    return seconds


Topic = Annotated[
    str, typer.Option("--topic", "-t", metavar="TOPIC", autocompletion=completion.complete_topics, help="Topic.")
]
Threads = Annotated[
    int, typer.Option("--threads", "-w", metavar="N", min=1, max=10_000, help="Callers at a time.")
]
BodySize = Annotated[
    int,
    typer.Option(
        "--size", "-s", parser=option_parser(_parse_body_size), metavar="SIZE", help="Size of a body: 128, 1KiB; 4MiB at most."
    ),
]
Queues = Annotated[
    int, typer.Option("--queues", "-q", metavar="N", min=1, max=QUEUES_MAX, help="Queues of the topic, if it is new.")
]
Duration = Annotated[
    float,
    typer.Option(
        "--duration", "-d", parser=option_parser(_parse_measured), metavar="TIME", show_default="10s",
        help="How long to measure.",
    ),
]  # fmt: skip
WarmUp = Annotated[
    float,
    typer.Option(
        "--warm-up", parser=duration_option, metavar="TIME", show_default="1s",
        help="Warm-up before it, not counted.",
    ),
]  # fmt: skip
Rate = Annotated[
    int,
    typer.Option(
        "--rate", "-r", parser=count_option, metavar="N", show_default="as fast as it goes",
        help="Calls a second over all callers, by a timetable: 1000, 20k.",
    ),
]  # fmt: skip
Asynchronous = Annotated[
    bool, typer.Option("--async", "-y", help="Callers are coroutines on one loop, not threads.")
]


def producer(
    topic: Topic = DEFAULT_TOPIC,
    threads: Threads = 64,
    size: BodySize = 128,
    queues: Queues = 8,
    rate: Rate = 0,
    duration: Duration = 10.0,
    warm_up: WarmUp = 1.0,
    asynchronous: Asynchronous = False,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Send one message at a time per caller.

    RocketMQ: benchmark/producer.sh, whose -t, -w, -s and -n mean the same
    here.
    """
    from protomq_cli import bench_loads

    load = bench_loads.Load(
        namesrv, topic, transport, queues, threads, size, rate, duration, warm_up
    )
    run = bench_loads.send_from_coroutines if asynchronous else bench_loads.send_from_threads
    _report(run(load, 1, _ProgressLine(load.expected_s)), output)


def batch(
    topic: Topic = DEFAULT_TOPIC,
    threads: Threads = 1,
    size: BodySize = 1024,
    batch_size: Annotated[
        int, typer.Option("--batch", "-b", metavar="N", min=1, max=32_768, help="Messages a call.")
    ] = 256,
    queues: Queues = 8,
    rate: Rate = 0,
    duration: Duration = 10.0,
    warm_up: WarmUp = 1.0,
    asynchronous: Asynchronous = False,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Send one batch at a time per caller.

    RocketMQ: benchmark/batchproducer.sh, whose -t, -w, -s, -b and -n mean
    the same here. --rate counts batches.
    """
    from protomq_cli import bench_loads

    load = bench_loads.Load(
        namesrv, topic, transport, queues, threads, size, rate, duration, warm_up
    )
    run = bench_loads.send_from_coroutines if asynchronous else bench_loads.send_from_threads
    _report(run(load, batch_size, _ProgressLine(load.expected_s)), output)


def consumer(
    topic: Topic = DEFAULT_TOPIC,
    threads: Threads = 1,
    batch_size: Annotated[
        int, typer.Option("--batch", "-b", metavar="N", min=1, max=32_768, help="Messages a pull, at most.")
    ] = 1024,
    duration: Duration = 10.0,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Read a topic from its start.

    Every message is touched: body, key, offset, CRC.

    Ends when all that was there is read, or after --duration. The latency
    is that of a pull. Fill the topic first, with `protomq bench batch`.
    RocketMQ: benchmark/consumer.sh, whose -t, -w and -n mean the same here.
    """
    from protomq_cli import bench_loads

    load = bench_loads.Load(namesrv, topic, transport, 0, threads, 0, 0, duration, 0.0)
    _report(bench_loads.consume(load, batch_size, _ProgressLine(load.expected_s)), output)


def latency(
    topic: Topic = DEFAULT_TOPIC,
    threads: Threads = 4,
    size: BodySize = 128,
    queues: Queues = 8,
    rate: Rate = 1000,
    duration: Duration = 10.0,
    warm_up: WarmUp = 1.0,
    transport: TransportName = "auto",
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Send at a rate, and measure send to receipt.

    A consumer holds a pull on every queue meanwhile.

    Two rows: until the send was answered, and until the message was
    received. Both count from the intended start.
    """
    from protomq_cli import bench_loads

    if rate <= 0:
        raise typer.BadParameter(
            "must be above 0: at full speed the latency is that of a queue", param_hint="--rate"
        )
    load = bench_loads.Load(
        namesrv, topic, transport, queues, threads, size, rate, duration, warm_up
    )
    _report(bench_loads.send_to_receipt(load, _ProgressLine(load.expected_s)), output)


class _ProgressLine:
    """A line on stderr that is rewritten every second; only on a terminal."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s = expected_s
        self._shown = sys.stderr.isatty()
        self._last_messages = 0
        self._seconds = 0

    def __call__(self, tallies: Sequence[Tally]) -> None:
        if not self._shown:
            return
        self._seconds += 1
        messages = sum(tally.messages for tally in tallies)
        errors = sum(tally.errors for tally in tallies)
        text = f"{self._seconds:3d} s of {self._expected_s:g}   {messages - self._last_messages:,} msg/s"
        sys.stderr.write(f"\r\x1b[K{text}" + (f"   {errors} errors" if errors else ""))
        sys.stderr.flush()
        self._last_messages = messages

    def close(self) -> None:
        """Takes the line away."""
        if self._shown and self._seconds:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _report(result: tuple[list[dict[str, Any]], Sequence[Tally]], output: OutputFormat) -> None:
    from protomq_cli.load import COLUMNS, first_error

    rows, tallies = result
    print_rows(rows, COLUMNS, output)
    if (error := first_error(tallies)) is not None:
        count = sum(tally.errors for tally in tallies)
        raise CliError(
            ExitCode.FAILURE, "CALLS_FAILED", f"{count} calls failed, the first with: {error}"
        )
