"""What a row gets to work with: how long to measure, where to put data, and servers; and what it gives: results."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .measure import Sample, interleave, median_of, median_rate, run_load
from .process import Server, python_module

Better = Literal["more", "less"]


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table.

    `floor` is the least (or, where less is better, the most) that the issue asks for; None: measured without one. `how` says what stands
    behind the value. `broker_us` and `client_us` are CPU time per message.
    """

    name: str
    value: float
    unit: str
    better: Better
    how: str
    floor: float | None = None
    broker_us: float | None = None
    client_us: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the floor is reached; None without one."""
        if self.floor is None:
            return None
        return self.value >= self.floor if self.better == "more" else self.value <= self.floor


@dataclass(frozen=True, slots=True)
class Extent:
    """How long and how large."""

    name: str
    seconds: float
    warm_up_s: float
    rounds: int
    consume_messages: int
    stored_bytes: int
    timers: int = 1_000_000


QUICK: Final = Extent("quick", 2.0, 0.7, 2, 1_000_000, 1 << 30)
FULL: Final = Extent("full", 8.0, 2.0, 3, 2_000_000, 6 << 30)


@dataclass(slots=True)
class Bench:
    """Handed to each row. Data lies under `folder` and is deleted after the row."""

    extent: Extent
    folder: Path
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def standalone(self, **settings: str) -> Iterator[Server]:
        """A broker with its name server, on a new store. `settings` are environment names without prefix: store_sync_flush="true"."""
        data = self.new_folder("standalone")
        server = start_standalone(data, settings)
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(data, ignore_errors=True)

    @contextmanager
    def slave(self, master: Server, broker_name: str, command: Sequence[str] = ()) -> Iterator[Server]:
        """A slave of a master that `standalone` has started, on a new store. `command`: what stands for `protomq`, if something does."""
        folder = self.new_folder("slave")
        settings = {
            "data_dir": str(folder / "store"), "broker_name": broker_name, "broker_id": 1, "broker_role": "SLAVE",
            "namesrv": [master.values["namesrv"]], "listen": {"grpc_port": 0, "remoting_port": 0},
        }  # fmt: skip
        configuration = folder / "slave.yaml"
        configuration.write_text(json.dumps(settings))  # JSON is YAML, too.
        server = Server([*(command or [program()]), "broker", "-c", str(configuration)], folder / "slave.log")
        try:
            yield server
            server.stop()  # The name server would keep its name for the store that was there, and refuse the next slave.
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def limit(self, *arguments: str) -> Iterator[Server]:
        """One of the bare loops of `limits`; what it writes is deleted with it."""
        folder = self.new_folder("limit")
        if arguments == ("remoting",):
            arguments = ("remoting", str(folder / "segments"))
        server = Server(python_module("tests.bench.limits", *arguments), folder / "log")
        try:
            yield server
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)

    def new_folder(self, name: str) -> Path:
        """An empty one."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def load(self, name: str, server: Server, **parameters: Any) -> Sample:
        """A load of the usual length against a server."""
        seconds = parameters.pop("seconds", self.extent.seconds)
        warm_up = parameters.pop("warm_up", self.extent.warm_up_s)
        return run_load(
            name, **parameters, seconds=seconds, warm_up=warm_up, server_pids=server.pids
        )

    def compare(self, runs: Mapping[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
        """Interleaved: A, B, A, B."""
        return interleave(runs, self.extent.rounds)

    def repeat(self, run: Callable[[], Sample]) -> list[Sample]:
        """The same, again and again."""
        return interleave({"": run}, self.extent.rounds)[""]


def start_standalone(data: Path, settings: Mapping[str, str] | None = None) -> Server:
    """`protomq standalone` on free ports; the store stands in `data`/store."""
    environment = {f"PROTOMQ_{k.upper()}": value for k, value in (settings or {}).items()}
    command = [program(), "standalone", "--data-dir", str(data / "store"), "--port", "0"]
    return Server(command, data / "broker.log", environment=environment)


def program() -> str:
    """The command `protomq` of this environment."""
    return str(Path(sys.executable).with_name("protomq"))


def create_topics(server: Server, topics: Sequence[str], queues: int) -> Sample:
    """Create topics on a broker."""
    return run_load(
        "remoting.create_topics",
        remoting=server.values["remoting"],
        topics=topics,
        queues=queues,
        server_pids=server.pids,
    )


def rate_of(
    name: str,
    samples: Sequence[Sample],
    how: str,
    *,
    unit: str = "msg/s",
    floor: float | None = None,
) -> Result:
    """The median rate of samples as a result, with CPU times."""
    return Result(
        name, median_rate(samples), unit, "more", how, floor,
        broker_us=median_of(samples, lambda s: s.server_us),
        client_us=median_of(samples, lambda s: s.client_us),
    )  # fmt: skip


def ratio_of(
    name: str, ours: Sequence[Sample], theirs: Sequence[Sample], floor: float | None, how: str,
    value: Callable[[Sample], float] = lambda sample: sample.rate,
) -> Result:  # fmt: skip
    """Ours against a limit or a peer: the ratio of the medians."""
    quotient = statistics.median(map(value, ours)) / statistics.median(map(value, theirs))
    return Result(name, quotient, "x", "more", how, floor)


def spread(samples: Sequence[Sample]) -> str:
    """Least and most of the rates, for `how`."""
    rates = sorted(sample.rate for sample in samples)
    return f"{rates[0]:,.0f} to {rates[-1]:,.0f}"


RowFunction = Callable[[Bench], Iterator[Result]]
ROWS: Final[dict[str, RowFunction]] = {}


def row(name: str) -> Callable[[RowFunction], RowFunction]:
    """Registers a row (a group of results that are measured together) under a name to select it by."""

    def register(function: RowFunction) -> RowFunction:
        assert name not in ROWS
        ROWS[name] = function
        return function

    return register
