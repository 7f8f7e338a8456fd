"""Spans and counters, with the SDK's in-memory exporters; nothing at all when nobody looks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from protomq.v1 import pull_service_pb2, send_service_pb2
from protomq_runtime import telemetry
from protomq_runtime.call import Call
from protomq_runtime.dispatch import BoundMethod, DispatchTable, drained, raw
from protomq_runtime.errors import ServiceError, internal
from protomq_runtime.execution import run_drained, run_raw
from protomq_runtime.lane_pool import PoolStatus
from protomq_runtime.metrics import Kind, Metric, Numbers, Table, lane_numbers


class FakeLane:
    answer_count = 0


class FakeCall(Call):
    __slots__ = ("outcome",)

    def __init__(self, bound: BoundMethod) -> None:
        self.bound = bound
        self.payload = b""
        self.lane = FakeLane()  # type: ignore[assignment]
        self.answered = False
        self.span = None
        self._on_close = None
        self.outcome: object = None

    @property
    def peer(self) -> str:
        return "127.0.0.1:1"

    def answer(self, payload, regions=(), regions_size_bytes=0):
        self.outcome = payload
        self._finish(0)

    def fail(self, error: ServiceError) -> None:
        self.outcome = error
        self._finish(error.code)


class Services:
    @drained
    def send(self, calls):
        for call in calls:
            call.answer(b"")

    @raw
    def recall_message(self, call):
        call.answer(b"")

    @raw
    def pull(self, call):
        raise internal()


@pytest.fixture
def table():
    made = DispatchTable()
    made.add_service(send_service_pb2.DESCRIPTOR.services_by_name["SendService"], Services())
    made.add_service(pull_service_pb2.DESCRIPTOR.services_by_name["PullService"], Services())
    return made


def test_every_call_has_a_span_with_its_outcome(table):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.instrument(table, provider.get_tracer("test"))
    send, pull = table.by_id[0x0201], table.by_id[0x0301]
    run_drained(send, [FakeCall(send), FakeCall(send)])
    run_raw(FakeCall(pull))
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["protomq.v1.SendService/Send"] * 2 + [
        "protomq.v1.PullService/Pull"
    ]
    attributes = [dict(span.attributes or {}) for span in spans]
    assert [each["rpc.grpc.status_code"] for each in attributes] == [0, 0, 13]
    assert [each["protomq.lane"] for each in attributes] == ["send", "send", "pull"]
    assert spans[2].status.status_code is StatusCode.ERROR


def published(reader: InMemoryMetricReader) -> list[Any]:
    """What an exporter gets."""
    data = reader.get_metrics_data()
    assert data is not None
    return list(data.resource_metrics[0].scope_metrics[0].metrics)


def test_the_lanes_counters_are_published():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    status = PoolStatus("send", 1, 2, 10, 1500, 77, 3, 4, 5)
    telemetry.observe(lambda: [lane_numbers([status])], provider.get_meter("test"))
    points = {metric.name: (metric.unit, metric.data.data_points[0]) for metric in published(reader)}
    assert {name: (unit, point.value) for name, (unit, point) in points.items()} == {
        "protomq.lane.threads": ("{thread}", 1),
        "protomq.lane.depth": ("{call}", 2),
        "protomq.lane.depth_max": ("{call}", 10),
        "protomq.lane.queue_time": ("s", 0.0015),
        "protomq.lane.calls": ("{call}", 77),
        "protomq.lane.rejections": ("{call}", 3),
        "protomq.lane.connections": ("{connection}", 4),
        "protomq.lane.holds": ("{call}", 5),
    }
    assert all(point.attributes == {"lane": "send"} for _, point in points.values())


class Durations:
    """A distribution that counts nothing itself."""

    counts = (0, 0, 0)
    sum = 0.0
    on_observed: Callable[[float], None] | None = None


def test_all_kinds_are_published_and_read_once_for_each_collection():
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    durations = Durations()
    readings: list[int] = []
    table = Table(
        "t",
        ("topic",),
        (
            Metric("protomq.now", "{file}", "", "now"),
            Metric("protomq.ever", "{file}", "", "ever", Kind.COUNTER),
        ),
    )
    times = Table("d", (), (Metric("protomq.time", "s", "", "time", Kind.HISTOGRAM, (0.5, 2.0)),))

    def read():
        readings.append(1)
        count = len(readings)
        yield Numbers(table, [(("a",), (3, count)), (("b",), (4, 0))][: 3 - count])
        yield Numbers(times, [((), (durations,))])

    telemetry.observe(read, meter)
    assert durations.on_observed is not None
    for duration_s in (0.1, 0.5, 1.0, 9.0):
        durations.on_observed(duration_s)
    found = {metric.name: metric.data for metric in published(reader)}
    now, ever, time = (found[f"protomq.{name}"] for name in ("now", "ever", "time"))
    assert [(point.attributes, point.value) for point in ever.data_points] == [({"topic": "a"}, 2)]
    assert [(point.attributes, point.value) for point in now.data_points] == [({"topic": "a"}, 3)]
    assert (type(now).__name__, type(ever).__name__) == ("Gauge", "Sum")
    (point,) = time.data_points
    assert (point.explicit_bounds, point.bucket_counts) == ((0.5, 2.0), (2, 1, 1))
    assert len(readings) == 2  # The first one told which metrics there are.
    published(reader)
    assert len(readings) == 3


def test_a_provider_that_is_set_turns_it_on(table, monkeypatch):
    before = table.by_id[0x0201].function
    telemetry.attach(table, list)
    assert table.by_id[0x0201].function == before
    provider, reader = TracerProvider(), InMemoryMetricReader()
    meters = MeterProvider([reader])
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: meters)
    telemetry.attach(table, lambda: [PoolStatus("send", 1, 2, 10, 1500, 77, 3, 4, 5)])
    assert table.by_id[0x0201].function != before
    assert reader.get_metrics_data() is not None


def test_nothing_of_opentelemetry_is_imported_when_nobody_looks():
    code = (
        "import sys; from protomq_runtime import dispatch, server, telemetry; telemetry.attach(dispatch.DispatchTable(), list);"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OTEL_")
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
