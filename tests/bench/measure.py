"""How a load is measured: the window, the sample that comes of it, and how samples are interleaved and summed up.

A load runs in a worker process (`worker.py`) and prints one `Sample` as JSON. CPU time of the client (all its threads) and of the server is
read at both ends of the window, so that start and warm-up do not count.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import subprocess
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from protomq_cli.load import percentile

from .process import ROOT, cpu_seconds, python_module

_WORKER_GRACE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What one load saw in its window. Latencies are in milliseconds, absent where none were taken."""

    messages: int
    seconds: float
    size_bytes: int = 0
    errors: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_rate(self) -> float:
        """Bytes a second."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def client_us(self) -> float:
        """CPU time of the client per message, in microseconds."""
        return self.client_cpu_s * 1e6 / self.messages if self.messages else 0.0

    @property
    def server_us(self) -> float:
        """CPU time of the server per message, in microseconds."""
        return self.server_cpu_s * 1e6 / self.messages if self.messages else 0.0


@dataclass(slots=True, eq=False)
class Counter:
    """What one caller counts; written by one thread, read by the window at its ends."""

    messages: int = 0
    size_bytes: int = 0
    errors: int = 0
    latencies_s: array[float] = field(default_factory=lambda: array("d"))
    first_error: str = ""

    def note_error(self, error: BaseException) -> None:
        """A call failed."""
        self.errors += 1
        self.first_error = self.first_error or f"{type(error).__name__}: {error}"


class Window:
    """Marks the measured time. `begin` and `end` are called by the load's main thread or coroutine, after the warm-up and at the end."""

    def __init__(self, counters: Sequence[Counter], server_pids: Sequence[int]) -> None:
        self._counters = counters
        self._server_pids = server_pids
        self.counting = False

    def _now(self) -> tuple[float, float, float, int, int]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return (
            time.perf_counter(),
            usage.ru_utime + usage.ru_stime,
            cpu_seconds(self._server_pids),
            sum(counter.messages for counter in self._counters),
            sum(counter.size_bytes for counter in self._counters),
        )

    def begin(self) -> None:
        """From now on it counts."""
        self._begin = self._now()
        self.counting = True

    def end(self) -> None:
        """What comes now does not count."""
        self.counting = False
        self._end = self._now()

    def sample(self, extra: Mapping[str, Any] | None = None) -> Sample:
        """The result, once all callers have ended. Raises RuntimeError if every call failed."""
        seconds, client, server, messages, size_bytes = (
            end - begin for begin, end in zip(self._begin, self._end, strict=True)
        )
        errors = sum(counter.errors for counter in self._counters)
        first = next((c.first_error for c in self._counters if c.first_error), "")
        if not messages:
            raise RuntimeError(
                f"nothing was done in {seconds:.1f} s; first error: {first or 'none'}"
            )
        ordered = sorted(latency for c in self._counters for latency in c.latencies_s)
        more = dict(extra or {})
        if first:
            more["first_error"] = first
        return Sample(
            messages=int(messages), seconds=seconds, size_bytes=int(size_bytes), errors=errors,
            p50_ms=percentile(ordered, 50) * 1000 if ordered else None,
            p99_ms=percentile(ordered, 99) * 1000 if ordered else None,
            max_ms=ordered[-1] * 1000 if ordered else None,
            client_cpu_s=client, server_cpu_s=server, extra=more,
        )  # fmt: skip


def sample_to_json(sample: Sample) -> str:
    """One line."""
    return json.dumps(dataclasses.asdict(sample))


def sample_from_json(text: str) -> Sample:
    """The inverse."""
    return Sample(**json.loads(text))


def worker_command(load: str) -> list[str]:
    """The command that runs a load of `loads/`, named module.function; its parameters are its first line of input."""
    return python_module("tests.bench.worker", load)


def run_load(load: str, **parameters: Any) -> Sample:
    """Run a load to its end. Raises RuntimeError with what it wrote if it fails."""
    timeout_s = _WORKER_GRACE_S + 3 * float(parameters.get("seconds", 0))
    return _run(worker_command(load), timeout_s, json.dumps(parameters) + "\n")


def run_foreign(command: Sequence[str], timeout_s: float = _WORKER_GRACE_S) -> Sample:
    """The same for a program that is not ours but prints a Sample as JSON."""
    return _run(command, timeout_s)


def _run(command: Sequence[str], timeout_s: float, given: str = "") -> Sample:
    done = subprocess.run(
        command,
        cwd=ROOT,
        input=given,
        capture_output=True,
        timeout=timeout_s,
        check=False,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        what = " ".join(command[-2:])
        raise RuntimeError(f"{what} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return sample_from_json(lines[-1])


def start_worker(load: str, parameters: Mapping[str, Any]) -> subprocess.Popen[str]:
    """Start a load with pipes to its input and output."""
    process = subprocess.Popen(
        worker_command(load), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(parameters) + "\n")
    process.stdin.flush()
    return process


class Helper:
    """A worker that is told what to do line by line, and answers each with one line of JSON."""

    def __init__(self, load: str, **parameters: Any) -> None:
        self._load = load
        self._process = start_worker(load, parameters)

    def ask(self, command: str) -> dict[str, Any]:
        """Do it, and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._load} ended with {self._process.wait(10)} at {command!r}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoadInBackground:
    """A load that goes on while something else is measured."""

    def __init__(self, load: str, **parameters: Any) -> None:
        self._process = start_worker(load, parameters)

    def sample(self, timeout_s: float) -> Sample:
        """Its result, when it has ended."""
        output, _ = self._process.communicate(timeout=timeout_s)
        if self._process.returncode:
            raise RuntimeError(f"the load in the background ended with {self._process.returncode}")
        return sample_from_json(output.strip().splitlines()[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def interleave(runs: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Run each in turn, `rounds` times (A, B, A, B), so that a machine that changes its speed does so for all."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            os.sync()  # What one run left to the disk must not slow the next.
            samples[name].append(run())
    return samples


def median_rate(samples: Sequence[Sample]) -> float:
    """Messages a second."""
    return statistics.median(sample.rate for sample in samples)


def median_of(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float:
    """Median of a value of the samples; those that have none are left out."""
    return statistics.median(v for sample in samples if (v := value(sample)) is not None)
