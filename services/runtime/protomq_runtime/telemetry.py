"""OpenTelemetry, behind the one place where both transports dispatch.

Off by default, and then calls cost nothing more: `instrument` wraps the functions of the dispatch table once, at start-up, only if
telemetry is on. On when a provider of the SDK is set: by the OTEL_* variables (`telemetry_setup.py`), by the application, or by
`opentelemetry-instrument protomq broker`.

    spans     one for each call, kind SERVER, named by the rpc; from its start on the lane to its answer, holds included
    metrics   the tables of `metrics.py`, read from the lanes' and services' own counters when the exporter asks
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from .call import Call
from .dispatch import DispatchTable, Style
from .lane_pool import PoolStatus
from .metrics import Distribution, Kind, Numbers, lane_numbers

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.trace import Tracer

SCOPE: Final = "protomq"


class CallSpan:
    """A span as a call carries it; `end` is told the status code of the answer."""

    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, code: int) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("rpc.grpc.status_code", code)
        if code:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def attach(table: DispatchTable, statuses: Callable[[], Iterable[PoolStatus]]) -> None:
    """Instruments what a provider has been set for; does not import OpenTelemetry to find out that none has. Before the start."""
    if "opentelemetry.sdk" not in sys.modules:
        return
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
    if isinstance(tracers, TracerProvider):
        instrument(table, tracers.get_tracer(SCOPE))
    if isinstance(meters, MeterProvider):
        observe(lambda: [lane_numbers(statuses())], meters.get_meter(SCOPE))


def publish(read: Callable[[], Iterable[Numbers]]) -> None:
    """Has the numbers read whenever an exporter asks, if there is one; does not import OpenTelemetry to find out that there is none.

    `read` gives the same tables each time.
    """
    if "opentelemetry.sdk" not in sys.modules:
        return
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    meters = metrics.get_meter_provider()
    if isinstance(meters, MeterProvider):
        observe(read, meters.get_meter(SCOPE))


def observe(read: Callable[[], Iterable[Numbers]], meter: Meter) -> None:
    """Publishes the numbers. A histogram gets each value when it is observed, since OpenTelemetry has no other way."""
    readings = _Readings(read)
    for table, rows in read():
        for index, metric in enumerate(table.metrics):
            if metric.kind is Kind.HISTOGRAM:
                histogram = meter.create_histogram(
                    metric.name,
                    metric.unit,
                    metric.help,
                    explicit_bucket_boundaries_advisory=metric.bounds,
                )
                cast(Distribution, rows[0][1][index]).on_observed = histogram.record
                continue
            create = (
                meter.create_observable_counter
                if metric.kind is Kind.COUNTER
                else meter.create_observable_gauge
            )
            create(metric.name, [readings.callback(metric.name)], metric.unit, metric.help)


class _Readings:
    """One reading for all metrics of a collection: an exporter asks for each by itself, one after the other."""

    def __init__(self, read: Callable[[], Iterable[Numbers]]) -> None:
        self._read = read
        self._left: dict[str, list[Observation]] = {}

    def callback(self, name: str) -> Callable[[CallbackOptions], list[Observation]]:
        return lambda _: self._take(name)

    def _take(self, name: str) -> list[Observation]:
        if name not in self._left:
            self._left = dict(self._observations())
        return self._left.pop(name)

    def _observations(self) -> Iterator[tuple[str, list[Observation]]]:
        from opentelemetry.metrics import Observation

        for table, rows in self._read():
            attributes = [dict(zip(table.attributes, values, strict=True)) for values, _ in rows]
            for index, metric in enumerate(table.metrics):
                if metric.kind is not Kind.HISTOGRAM:
                    yield metric.name, [
                        Observation(cast(float, numbers[index]), each)
                        for each, (_, numbers) in zip(attributes, rows, strict=True)
                    ]


def instrument(table: DispatchTable, tracer: Tracer) -> None:
    """Puts a span around every unary method. Before the server starts."""
    for bound in table:
        if bound.style is Style.PLAIN:
            bound.function = _traced_plain(bound.function, tracer)
        elif bound.style is Style.RAW:
            bound.function = _traced_raw(bound.function, tracer)
        elif bound.style is Style.DRAINED:
            bound.function = _traced_drained(bound.function, tracer)


def _begin(call: Call, tracer: Tracer) -> None:
    from opentelemetry.trace import SpanKind

    method = call.method
    span = tracer.start_span(
        method.path[1:],
        kind=SpanKind.SERVER,
        attributes={
            "rpc.system": call.transport,
            "rpc.service": method.service,
            "rpc.method": method.name,
            "network.peer.address": call.peer,
            "protomq.lane": method.lane,
        },
    )
    call.span = CallSpan(span)


def _traced_plain(function: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    def traced(request: Any, call: Call) -> Any:
        _begin(call, tracer)
        return function(request, call)

    return traced


def _traced_raw(function: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    def traced(call: Call) -> None:
        _begin(call, tracer)
        function(call)

    return traced


def _traced_drained(function: Callable[..., Any], tracer: Tracer) -> Callable[..., Any]:
    def traced(calls: list[Call]) -> None:
        for call in calls:
            _begin(call, tracer)
        function(calls)

    return traced
