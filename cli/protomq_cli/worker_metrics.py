"""Metrics of a worker's processes, in Prometheus' text form, over HTTP on a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple, Protocol

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.worker_policy import WorkerPolicy


class _Process(Protocol):
    """What the page says of a process."""

    @property
    def is_running(self) -> bool:
        """Whether it consumes."""

    @property
    def counts(self) -> Mapping[str, int]:
        """PushCounts, by name."""


class _Supervisor(Protocol):
    """Whose metrics these are."""

    @property
    def policy(self) -> WorkerPolicy:
        """What decides."""

    @property
    def processes(self) -> Mapping[int, _Process]:
        """Those that there are, by number."""


class Metric(NamedTuple):
    """A name, what it counts, and its value for each process."""

    name: str
    kind: str
    help: str
    values: Sequence[int]


_OF_COUNTS: Final = (
    ("done", "protomq_worker_messages_done_total", "counter", "Messages that are finished or given back, since the start of the process."),
    ("failed", "protomq_worker_messages_failed_total", "counter", "How often a message failed, since the same."),
    ("refused", "protomq_worker_messages_refused_total", "counter", "Messages that failed and do not come again, since the same."),
    ("open", "protomq_worker_messages_open", "gauge", "Messages that are here and not done."),
    ("waiting", "protomq_worker_messages_waiting", "gauge", "Those of them that no listener has."),
    ("size_bytes", "protomq_worker_messages_bytes", "gauge", "Octets of those that are here."),
)  # fmt: skip


def metrics_of(supervisor: _Supervisor) -> list[Metric]:
    """All of them; a process that is down has zeros."""
    slots = supervisor.policy.slots
    processes = [supervisor.processes.get(slot.index) for slot in slots]
    found = [
        Metric(
            "protomq_worker_up", "gauge", "1 while the process consumes.",
            [int(one is not None and one.is_running) for one in processes],
        ),
        Metric(
            "protomq_worker_restarts_total", "counter", "Processes of this number that have died.",
            [slot.restarts for slot in slots],
        ),
    ]  # fmt: skip
    for key, name, kind, help_text in _OF_COUNTS:
        values = [one.counts[key] if one is not None else 0 for one in processes]
        found.append(Metric(name, kind, help_text, values))
    return found


def page_text(metrics: Sequence[Metric]) -> str:
    """As Prometheus reads it."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f'{metric.name}{{process="{index}"}} {value}' for index, value in enumerate(metric.values)]
    return "\n".join(lines) + "\n"


class MetricsPage:
    """GET of any path. Raises CliError if the port is taken."""

    def __init__(self, supervisor: _Supervisor, host: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = page_text(metrics_of(supervisor)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Says nothing of each request."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (UnicodeError, socket.gaierror) as error:
            text = f"--metrics-host: the host {host!r} is not known here; give an address of this machine, or 0.0.0.0 for all"
            raise CliError(ExitCode.USAGE, "UNKNOWN_HOST", text) from error
        except OSError as error:
            advice = "give another --metrics-port, or 0 for a free one"
            raise CliError(ExitCode.REFUSED, "PORT_TAKEN", f"metrics cannot be served at {host}:{port}: {error}; {advice}") from error
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}/metrics"
        threading.Thread(target=self._server.serve_forever, name="protomq-worker-metrics", daemon=True).start()

    def close(self) -> None:
        """No more."""
        self._server.shutdown()
        self._server.server_close()
