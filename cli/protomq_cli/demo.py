"""`make demo`: 336,776 real flights through a real broker, checked to the last bit.

    broker as a child process -> produce to topic flights -> consume with a group -> compare
    -> two members share the topic, one is killed -> table -> what to type next

The store stays where it was made, with exactly one copy of the flights in the topic `flights`. The commands shown at the end
use it, and so do later demos. A second run rebuilds the store. Exit code 0 only if every check holds.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protomq.records import sharded_index
from protomq_cli.child import StandaloneChild
from protomq_cli.connection import open_admin, translate
from protomq_cli.demo_group import share
from protomq_cli.exits import CliError, ExitCode, error_line
from protomq_cli.flights import FLIGHT_COUNT, KEYLESS_COUNT, Flight, RoundTripCheck, read_flights
from protomq_cli.load import percentile
from protomq_cli.output import OutputFormat, colour_wanted, print_rows
from protomq_cli.units import format_ms, format_size

TOPIC: Final = "flights"
QUEUES: Final = 8
GROUP: Final = "flights-demo"
SHARED_GROUP: Final = "flights-shared"
BATCH_COUNT: Final = 256
"""Messages of one queue that travel together."""
ECHO_TOPIC: Final = "flights-demo-echo"
ECHO_COUNT: Final = 1000
TIMEOUT_S: Final = 10.0
STALL_S: Final = 20.0
"""If no message comes within this time, the missing ones are lost."""
EXTRA_S: Final = 0.2
"""How long to look for messages beyond the expected ones."""
KEYLESS: Final = -1
MARKER: Final = ".protomq-demo"
"""Stands in a store that this demo made, and may therefore delete."""

Advance = Callable[[int], None]


@dataclass(slots=True)
class Measured:
    """What a step took. `elapsed_s` is the time in the client, without reading the file and comparing."""

    messages: int = 0
    size_bytes: int = 0
    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    def note(self, messages: int, size_bytes: int, began_s: float) -> None:
        """A call that began then and ended now."""
        took_s = time.perf_counter() - began_s
        self.messages += messages
        self.size_bytes += size_bytes
        self.elapsed_s += took_s
        self.latencies_s.append(took_s)

    def row(self, step: str, latency_of: str) -> dict[str, Any]:
        """A line of the table."""
        ordered = sorted(self.latencies_s)
        elapsed_s = self.elapsed_s or 1e-9
        return {
            "step": step,
            "messages": f"{self.messages:,}",
            "messages_per_s": f"{self.messages / elapsed_s:,.0f}",
            "mib_per_s": f"{self.size_bytes / elapsed_s / (1 << 20):,.1f}",
            "p50_ms": format_ms(percentile(ordered, 50)),
            "p99_ms": format_ms(percentile(ordered, 99)),
            "latency_of": latency_of,
        }


def run_demo(flights_file: Path, store: Path, count: int | None) -> None:
    """The whole demo. Raises CliError if something cannot be done or does not hold."""
    if not flights_file.is_file():
        raise CliError(
            ExitCode.NOT_FOUND,
            "NO_FLIGHTS",
            f"{flights_file} does not exist; fetch it with: python tools/fetch_flights.py",
        )
    prepare_store(store)
    check = RoundTripCheck()
    with StandaloneChild(store, store.with_name(store.name + ".log")) as broker:
        # Not earlier: a broker takes no folder that has files of others.
        (store / MARKER).touch()
        _say(f"broker on {broker.grpc} (gRPC) and {broker.remoting} (remoting port), store {store}")
        with _progress(count or FLIGHT_COUNT) as (sending, receiving):
            sent = produce(broker.remoting, read_flights(flights_file, count), check, sending)
            received, transport = consume(broker.remoting, sent.messages, check, receiving)
        echoed = echo(broker.remoting)
        committed = committed_count(broker.remoting)
        shared = share(broker.remoting, SHARED_GROUP, TOPIC, sent.messages)
        exit_code = broker.stop()

    problems = check.problems()
    if count is None and (sent.messages, check.keyless_count) != (FLIGHT_COUNT, KEYLESS_COUNT):
        problems.append(f"{flights_file} holds {sent.messages:,} flights, not {FLIGHT_COUNT:,}")
    if committed != sent.messages:
        problems.append(f"the group has committed {committed:,} of {sent.messages:,} messages")
    if transport != "remoting":
        problems.append(f"consumed through {transport or 'nothing'}, not the remoting port")
    if exit_code != 0:
        problems.append(f"the broker ended with exit code {exit_code}")
    if problems:
        raise CliError(ExitCode.FAILURE, "CHECK_FAILED", "demo failed: " + "; ".join(problems))

    rows = [
        sent.row(f"send, {BATCH_COUNT} a call", "until stored"),
        received.row("consume, by a group", "a poll"),
        echoed.row("send and receive, one by one", "send to receipt"),
    ]
    columns = ("step", "messages", "messages_per_s", "mib_per_s", "p50_ms", "p99_ms", "latency_of")
    print_rows(rows, columns, OutputFormat.TABLE)
    _write(
        f"checked: {received.messages:,} of {sent.messages:,} messages came back, each once, "
        f"{check.key_count:,} tail numbers in order,",
        f"{check.keyless_count:,} messages without a key, every CRC-32C right; "
        f"{format_size(sent.size_bytes)} of bodies",
        shared.line(),
    )
    _write("", *next_commands(store))


def prepare_store(store: Path) -> None:
    """An empty folder for the store; that of the last run is removed.

    Raises CliError for a folder that this demo did not make, or that a broker uses.
    """
    if store.exists() and any(store.iterdir()):
        if not (store / MARKER).exists():
            raise CliError(
                ExitCode.REFUSED,
                "NOT_OURS",
                f"{store} holds what this demo did not make; remove it, or choose another --data-dir",
            )
        if _in_use(store):
            raise CliError(
                ExitCode.REFUSED,
                "STORE_IN_USE",
                f"a broker runs on {store}; stop it, then try again",
            )
        shutil.rmtree(store)
    store.mkdir(parents=True, exist_ok=True)


def produce(
    namesrv: str,
    flights: Iterator[Flight],
    check: RoundTripCheck,
    advance: Advance,
    **options: Any,
) -> Measured:
    """Sends the flights, those of one tail number to one queue and in their order. `options`: of the producer."""
    from protomq import OutgoingMessage, Producer
    from protomq.wire.hashing import crc32c

    create_topic(namesrv, TOPIC, QUEUES)
    measured = Measured()
    # What goes to one queue is gathered, so that each call is one request. The SDK chooses the queue itself, by the same rule.
    gathered: dict[int, list[OutgoingMessage]] = {}

    with Producer(namesrv=namesrv, **options) as producer:

        def send(messages: list[OutgoingMessage]) -> None:
            began_s = time.perf_counter()
            producer.send_batch(TOPIC, messages)
            measured.note(len(messages), sum(len(m.body) for m in messages), began_s)
            advance(len(messages))

        for key, tag, body in flights:
            check.sent(key, crc32c(body))
            message = OutgoingMessage(TOPIC, body, key or None, tag=tag, sharding_key=key or None)
            place = sharded_index(key, QUEUES) if key else KEYLESS
            messages = gathered.setdefault(place, [])
            messages.append(message)
            if len(messages) == BATCH_COUNT:
                send(messages)
                messages.clear()
        for messages in gathered.values():
            if messages:
                send(messages)
    return measured


def consume(
    namesrv: str, expected_count: int, check: RoundTripCheck, advance: Advance
) -> tuple[Measured, str]:
    """Reads the whole topic as a member of the group; also: what carried the pulls."""
    from protomq import MessageQueue, PullConsumer
    from protomq.wire.hashing import crc32c

    measured = Measured()
    next_offsets: dict[MessageQueue, int] = {}
    with PullConsumer(GROUP, namesrv=namesrv) as consumer:
        consumer.subscribe(TOPIC)
        last_s = time.perf_counter()
        while measured.messages < expected_count and time.perf_counter() - last_s < STALL_S:
            began_s = time.perf_counter()
            messages = consumer.poll(1.0)
            # The SDK has compared the CRC-32C with the producer's: a damaged body is an error here.
            measured.note(len(messages), sum(len(m.body) for m in messages), began_s)
            for message in messages:
                check.received(message.key, crc32c(message.body))
                expected = next_offsets.get(message.queue, 0)
                if message.queue_offset != expected:
                    raise CliError(
                        ExitCode.FAILURE,
                        "CHECK_FAILED",
                        f"demo failed: {message!r} where {expected} was due",
                    )
                next_offsets[message.queue] = expected + 1
            if messages:
                last_s = time.perf_counter()
                advance(len(messages))
        for message in consumer.poll(EXTRA_S):
            # One too many: the check will say so.
            check.received(message.key, crc32c(message.body))
        return measured, consumer.transport


def echo(namesrv: str) -> Measured:
    """Sends one message and receives it, then the next: what one caller waits for."""
    from protomq import Producer, PullConsumer

    create_topic(namesrv, ECHO_TOPIC, 1)
    measured = Measured()
    body = bytes(128)
    with Producer(namesrv=namesrv) as producer, PullConsumer(namesrv=namesrv) as consumer:
        consumer.subscribe(ECHO_TOPIC)
        consumer.poll(0.0)
        for _ in range(ECHO_COUNT):
            began_s = time.perf_counter()
            producer.send(ECHO_TOPIC, body)
            if not consumer.poll(STALL_S):
                raise CliError(
                    ExitCode.FAILURE,
                    "CHECK_FAILED",
                    f"demo failed: a message was not received in {STALL_S:g} s",
                )
            measured.note(1, len(body), began_s)
    with open_admin(namesrv, TIMEOUT_S) as admin:
        admin.delete_topic(ECHO_TOPIC)
    return measured


def committed_count(namesrv: str) -> int:
    """What the group has committed over all queues."""
    from protomq import PullConsumer

    with PullConsumer(GROUP, namesrv=namesrv, auto_commit=False) as consumer:
        return sum(consumer.committed(queue) or 0 for queue in consumer.queues(TOPIC))


def create_topic(namesrv: str, topic: str, queues: int) -> None:
    """A topic with `queues` queues."""
    with open_admin(namesrv, TIMEOUT_S) as admin:
        admin.create_topic(topic, write_queues=queues)


def next_commands(store: Path) -> list[str]:
    """What to type next, as it works from here."""
    program = _from_here(Path(sys.executable).parent / "protomq")
    return [
        "The flights stay in the store. Start the broker on it again:",
        f"  {program} standalone --data-dir {shlex.quote(_from_here(store))}",
        "and in another terminal:",
        f"  {program} pull {TOPIC} --tag UA --count 3",
        f"  {program} message query {TOPIC} --key N14228 --count 3 --format '%o %d %v\\n'",
        f"  {program} group offsets {GROUP} {TOPIC}",
    ]


def _from_here(path: Path) -> str:
    """The path as one types it in the current folder."""
    # Not resolved: the interpreter in an environment is a link to one that has no protomq beside it.
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def _in_use(store: Path) -> bool:
    """Whether a broker holds the store's lock."""
    try:
        with (store / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def _progress(total: int) -> Iterator[tuple[Advance, Advance]]:
    """Two bars on stderr; into a file or a pipe nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, no_color=not colour_wanted(sys.stderr))
    columns = (
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Few refreshes: they run in this process, which is being measured.
    with Progress(
        *columns, console=console, refresh_per_second=4, disable=not sys.stderr.isatty()
    ) as bars:
        sending = bars.add_task("send", total=total)
        receiving = bars.add_task("consume", total=total, start=False, visible=False)

        def advance_receiving(count: int) -> None:
            bars.start_task(receiving)
            bars.update(receiving, advance=count, visible=True)

        yield lambda count: bars.advance(sending, count), advance_receiving


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _write(*lines: str) -> None:
    sys.stdout.write("".join(line + "\n" for line in lines))


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m protomq_cli.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--flights", type=Path, default=Path("build/flights/flights.csv"), metavar="FILE"
    )
    parser.add_argument("--data-dir", type=Path, default=Path("build/demo-store"), metavar="DIR")
    parser.add_argument(
        "--count", type=int, default=None, metavar="N", help="the first N flights only"
    )
    parsed = parser.parse_args(arguments)
    # Ended by a signal or by an error, the broker is stopped on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        run_demo(parsed.flights, parsed.data_dir, parsed.count)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except Exception as error:
        known = translate(error)
        if known is None:
            raise
        sys.stderr.write(error_line(known, as_json=False) + "\n")
        return known.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
