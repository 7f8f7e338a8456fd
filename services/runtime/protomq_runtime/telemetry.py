"""OpenTelemetry, behind the one place where both transports dispatch.

Off by default, and then nothing is in the way of a call: `instrument` wraps the functions of the dispatch table once, at start-up,
and is not called otherwise. On when a provider of the SDK is set: by the OTEL_* variables (`telemetry_setup.py`), by the application, or by
`opentelemetry-instrument protomq broker`.

    spans     one for each call, kind SERVER, named by the rpc; from its start on the lane to its answer, holds included
    metrics   read from the lanes' and services' own counters when the exporter asks: nothing is counted twice
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .call import Call
from .dispatch import DispatchTable, Style
from .lane_pool import PoolStatus

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
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
        observe_lanes(statuses, meters.get_meter(SCOPE))


class Number(NamedTuple):
    """A number that a service publishes. `is_total`: it only grows, from 0 at the start; else it is what it is now."""

    name: str
    unit: str
    description: str
    read: Callable[[], int]
    is_total: bool = False


def publish(numbers: Iterable[Number]) -> None:
    """Has the numbers read whenever an exporter asks, if there is one; does not import OpenTelemetry to find out that there is none."""
    if "opentelemetry.sdk" not in sys.modules:
        return
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider

    meters = metrics.get_meter_provider()
    if isinstance(meters, MeterProvider):
        observe_numbers(numbers, meters.get_meter(SCOPE))


def observe_numbers(numbers: Iterable[Number], meter: Meter) -> None:
    """Publishes the numbers."""
    from opentelemetry.metrics import CallbackOptions, Observation

    def reader(number: Number) -> Callable[[CallbackOptions], list[Observation]]:
        return lambda _: [Observation(number.read())]

    for number in numbers:
        create = (
            meter.create_observable_counter if number.is_total else meter.create_observable_gauge
        )
        create(number.name, [reader(number)], number.unit, number.description)


def instrument(table: DispatchTable, tracer: Tracer) -> None:
    """Puts a span around every unary method. Before the server starts."""
    for bound in table:
        if bound.style is Style.PLAIN:
            bound.function = _traced_plain(bound.function, tracer)
        elif bound.style is Style.RAW:
            bound.function = _traced_raw(bound.function, tracer)
        elif bound.style is Style.DRAINED:
            bound.function = _traced_drained(bound.function, tracer)


def observe_lanes(statuses: Callable[[], Iterable[PoolStatus]], meter: Meter) -> None:
    """Publishes the counters of the lanes."""
    from opentelemetry.metrics import CallbackOptions, Observation

    def reader(field: str, scale: float = 1) -> Callable[[CallbackOptions], list[Observation]]:
        def read(_: CallbackOptions) -> list[Observation]:
            return [
                Observation(getattr(status, field) * scale, {"lane": status.lane})
                for status in statuses()
            ]

        return read

    meter.create_observable_counter(
        "protomq.lane.calls", [reader("calls")], "{call}", "Calls taken"
    )
    meter.create_observable_counter(
        "protomq.lane.rejections", [reader("rejections")], "{call}", "Calls refused"
    )
    meter.create_observable_gauge(
        "protomq.lane.depth", [reader("depth")], "{call}", "Calls that wait"
    )
    meter.create_observable_gauge("protomq.lane.holds", [reader("holds")], "{call}", "Calls held")
    meter.create_observable_gauge(
        "protomq.lane.connections", [reader("connections")], "{connection}", "Remoting connections"
    )
    meter.create_observable_gauge(
        "protomq.lane.queue_time", [reader("queue_time_us", 1e-6)], "s", "Longest wait lately"
    )


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
