"""OpenTelemetry's SDK from the OTEL_* variables, as its specification has them, for a server that nobody has set it up for.

    signals    traces, metrics: on where OTEL_<SIGNAL>_EXPORTER names exporters, or an endpoint for OTLP is named. Else off, unlike the
               specification's default: a server that nobody asked to must not call a collector on this machine.
    off        OTEL_SDK_DISABLED=true, or `none` as the exporter
    exporters  by name, as installed packages give them; `otlp` is what OTEL_EXPORTER_OTLP_PROTOCOL says, HTTP unless told otherwise

All other variables (headers, intervals, samplers, resources) are read by the SDK and by the exporters themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from .config import ConfigError

if TYPE_CHECKING:
    from .telemetry_flush import Telemetry

SIGNALS: Final = ("traces", "metrics")
OTLP_BY_PROTOCOL: Final = {
    "http/protobuf": "otlp_proto_http",
    "grpc": "otlp_proto_grpc",
}
PACKAGES: Final = {
    "otlp_proto_http": "opentelemetry-exporter-otlp-proto-http",
    "otlp_proto_grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "prometheus": "opentelemetry-exporter-prometheus",
}


def wanted_exporters(environment: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of exporters by signal; signals that are off are left out. Raises ConfigError."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    wanted = {}
    for signal in SIGNALS:
        variable = f"OTEL_{signal.upper()}_EXPORTER"
        named = environment.get(variable, "").strip()
        has_endpoint = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environment.get(
            f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"
        )
        if not named and has_endpoint:
            named = "otlp"
        names = [name.strip() for name in named.split(",") if name.strip() not in ("", "none")]
        if names:
            wanted[signal] = [
                _otlp_by_protocol(signal, environment) if name == "otlp" else name for name in names
            ]
    return wanted


def set_up(
    service_name: str, environment: Mapping[str, str] | None = None
) -> Telemetry | None:
    """Sets the global providers that the variables ask for, unless the application has set its own. Raises ConfigError.

    The result is to be shut down at the end, which sends what is left; None: nothing was asked for.
    """
    variables = os.environ if environment is None else environment
    wanted = wanted_exporters(variables)
    if not wanted:
        return None  # and nothing of OpenTelemetry is imported
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from .telemetry_flush import CountingSpanProcessor, LastMetrics, Telemetry

    telemetry = Telemetry()
    named = "service.name=" in variables.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create(
        {} if named or variables.get("OTEL_SERVICE_NAME") else {"service.name": service_name}
    )
    if "traces" in wanted and not isinstance(trace.get_tracer_provider(), TracerProvider):
        # Not shut down by the SDK at the exit: that takes as long as its exporters try.
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        spans = [CountingSpanProcessor(exporter) for exporter in _load("traces", wanted["traces"])]
        for processor in spans:
            tracers.add_span_processor(processor)
        trace.set_tracer_provider(tracers)
        telemetry.add_tracers(tracers, spans)
    if "metrics" in wanted and not isinstance(metrics.get_meter_provider(), MeterProvider):
        readers: list[MetricReader] = []
        pushed: list[LastMetrics] = []
        for exporter in _load("metrics", wanted["metrics"]):
            if isinstance(exporter, MetricReader):
                readers.append(exporter)
            else:
                pushed.append(LastMetrics(exporter))
                readers.append(PeriodicExportingMetricReader(exporter))
        meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        metrics.set_meter_provider(meters)
        telemetry.add_meters(meters, pushed)
    return telemetry


def _otlp_by_protocol(signal: str, environment: Mapping[str, str]) -> str:
    protocol = (
        environment.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    )
    name = OTLP_BY_PROTOCOL.get(protocol)
    if name is None:
        known = ", ".join(OTLP_BY_PROTOCOL)
        raise ConfigError(
            f"environment: OTEL_EXPORTER_OTLP_PROTOCOL: one of {known} is expected, this is {protocol!r}"
        )
    if protocol.startswith("http/"):
        _check_url(signal, environment)
    return name


def _check_url(signal: str, environment: Mapping[str, str]) -> None:
    """The exporter would say it too, with each attempt and long after the start."""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        endpoint = environment.get(variable)
        if endpoint:
            if not endpoint.lower().startswith(("http://", "https://")):
                raise ConfigError(
                    f"environment: {variable}: a URL is expected, such as http://127.0.0.1:4318, not {endpoint!r}"
                )
            return


def _load(signal: str, names: Iterable[str]) -> list[Any]:
    # Only who exports pays for it: it takes a tenth of a server's imports.
    from importlib.metadata import entry_points

    exporters = []
    for name in names:
        found = tuple(entry_points(group=f"opentelemetry_{signal}_exporter", name=name))
        if not found:
            package = PACKAGES.get(name)
            remedy = f"run: pip install {package}" if package else "no installed package has it"
            raise ConfigError(
                f"environment: the exporter {name!r} for {signal} is not there; {remedy}"
            )
        # The standard output belongs to the ready line.
        options = {"out": sys.stderr} if name == "console" else {}
        exporters.append(found[0].load()(**options))
    return exporters
