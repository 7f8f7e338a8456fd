"""A page of numbers over plain HTTP, for people at `/` and for Prometheus at `/metrics`.

Values are read when somebody looks, and at no other time. One thread serves one request after the other, so two callers at once wait
for each other. A caller that has not sent its request after REQUEST_TIMEOUT_S is cut off. Both pages are written from the tables of
`metrics.py`.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, cast

from .addresses import Address
from .metrics import Distribution, Kind, Metric, Numbers, quantile_bound
from .wake_up import WakeUp

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 5.0
ACCEPT_PAUSE_S: Final = 0.1
END_S: Final = 1.0
ROWS_SHOWN_MAX: Final = 500
"""Of a table, at `/`; those with the largest first number. /metrics has all."""

_STYLE: Final = (
    "body{font:15px/1.4 system-ui,sans-serif;margin:2em;color:#222;background:#fff}"
    "table{border-collapse:collapse;margin-bottom:1.5em}"
    "th,td{padding:.15em .9em .15em 0;text-align:left;border-bottom:1px solid #ddd}"
    "td.number{text-align:right;font-variant-numeric:tabular-nums}h2{font-size:1.1em}"
)


class MetricsPage(threading.Thread):
    """The server of the page; takes its port when it is made, answers once it is started. Raises OSError."""

    def __init__(self, address: Address, title: str, read: Callable[[], Iterable[Numbers]]) -> None:
        super().__init__(name="metrics-page", daemon=True)
        handler = type("Handler", (_Handler,), {"title": title, "read": staticmethod(read)})
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._stopping = threading.Event()
        server_class = type("Server", (_Server,), {"address_family": family, "stopping": self._stopping})
        try:
            self._server = server_class((address.host, address.port), handler)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on {address} for the metrics page: {error.strerror}"
            ) from None
        self.address = Address(address.host, self._server.server_port)
        """Where it listens; the port is a free one if 0 was asked for."""
        self._wake_up = WakeUp()

    def run(self) -> None:
        with select.epoll() as poll:
            for descriptor in (self._server.fileno(), self._wake_up.descriptor):
                poll.register(descriptor, select.EPOLLIN)
            while not self._stopping.is_set():
                poll.poll()
                if not self._stopping.is_set():
                    self._server.handle_request()

    def stop(self) -> None:
        """Ends it; any thread. A request under way is not waited for longer than a second."""
        self._stopping.set()
        self._wake_up.set()
        if self.ident is not None:
            self.join(END_S)
        self._server.server_close()


def prometheus_text(tables: Iterable[Numbers]) -> bytes:
    """The numbers in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tuple(tables)))
    return generate_latest(registry)


def html_page(title: str, tables: Iterable[Numbers]) -> bytes:
    """The numbers for people."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>",
        "<p>Read when the page was asked for. Prometheus finds the same at <a href=/metrics>/metrics</a>.</p>",
    ]
    for numbers in tables:
        if numbers.rows:
            parts += _html_table(numbers)
    return "".join(parts).encode()


class _Server(HTTPServer):
    stopping: threading.Event

    # http.server asks the DNS for the host's name otherwise, which may take seconds.
    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        host, port = self.socket.getsockname()[:2]
        self.server_address = (host, port)
        self.server_name, self.server_port = host, port

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # Out of descriptors, most likely: the caller still waits, so the next try would follow at once.
            self.stopping.wait(ACCEPT_PAUSE_S)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("the metrics page was not read by %s", client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    title: str
    read: Callable[[], Iterable[Numbers]]

    def setup(self) -> None:
        super().setup()
        # `timeout` is for each wait: a caller that sends an octet now and then would stay for days.
        self._limit = threading.Timer(self.timeout, self._cut_off)
        self._limit.daemon = True
        self._limit.start()

    def finish(self) -> None:
        self._limit.cancel()
        super().finish()

    def _cut_off(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._limit.cancel()
        path = self.path.partition("?")[0]
        status, kind = HTTPStatus.OK, "text/html; charset=utf-8"
        try:
            if path == "/":
                body = html_page(self.title, self.read())
            elif path == "/metrics":
                body, kind = prometheus_text(self.read()), "text/plain; version=0.0.4; charset=utf-8"
            else:
                status, kind = HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8"
                body = b"there are / for people and /metrics for Prometheus\n"
        except Exception:
            logger.exception("the metrics page failed")
            status, kind = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8"
            body = b"a defect of the server; its log has the trace\n"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def version_string(self) -> str:
        return "protomq"


class _Collector:
    """As prometheus_client wants it."""

    def __init__(self, tables: Sequence[Numbers]) -> None:
        self._tables = tables

    def collect(self) -> Iterator[Family]:
        for table, rows in self._tables:
            for index, metric in enumerate(table.metrics):
                if metric.kind is Kind.HISTOGRAM:
                    yield _histogram(metric, cast(Distribution, rows[0][1][index]))
                else:
                    values = [(labels, cast(float, numbers[index])) for labels, numbers in rows]
                    yield _family(metric, table.attributes, values)


def _family(
    metric: Metric, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.prometheus_name, metric.help, labels=labels)
    for each in values:
        family.add_metric(*each)
    return family


def _histogram(metric: Metric, value: Distribution) -> Family:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(metric.prometheus_name, metric.help)
    bounds = [*map(str, metric.bounds), "+Inf"]
    family.add_metric((), list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    return family


def _html_table(numbers: Numbers) -> Iterator[str]:
    table, rows = numbers
    yield f"<h2>{escape(table.title)}</h2><table>"
    if not table.attributes:  # One row: better read from top to bottom.
        for metric, value in zip(table.metrics, rows[0][1], strict=True):
            yield f"<tr title='{escape(metric.help, quote=True)}'><td>{escape(metric.heading)}"
            yield f"<td class=number>{_value_text(metric, value)}"
        yield "</table>"
        return
    yield "<tr>" + "".join(f"<th>{escape(name)}" for name in table.attributes)
    for metric in table.metrics:
        yield f"<th title='{escape(metric.help, quote=True)}'>{escape(metric.heading)}"
    shown = rows
    if len(rows) > ROWS_SHOWN_MAX:
        shown = sorted(rows, key=lambda row: cast(float, row[1][0]), reverse=True)[:ROWS_SHOWN_MAX]
    for labels, values in shown:
        yield "<tr>" + "".join(f"<td>{escape(label)}" for label in labels)
        for metric, value in zip(table.metrics, values, strict=True):
            yield f"<td class=number>{_value_text(metric, value)}"
    yield "</table>"
    if len(rows) > len(shown):
        yield f"<p>{len(rows) - len(shown)} more stand at /metrics.</p>"


def _value_text(metric: Metric, value: float | Distribution) -> str:
    if metric.kind is not Kind.HISTOGRAM:
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    distribution = cast(Distribution, value)
    counts = tuple(distribution.counts)
    if not any(counts):
        return "0"
    half, most = (quantile_bound(metric.bounds, counts, share) for share in (0.5, 0.99))
    return f"{sum(counts):,}: half within {half:g}, 99 % within {most:g}"
