"""What the OTEL_* variables turn on, as OpenTelemetry's specification has them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from protomq_runtime.config import ConfigError
from protomq_runtime.telemetry_setup import set_up, wanted_exporters

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, {}),
        ({"OTEL_SERVICE_NAME": "x"}, {}),
        ({ENDPOINT: "http://c:4318"}, {"traces": ["otlp_proto_http"], "metrics": ["otlp_proto_http"]}),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://u"}, {"metrics": ["otlp_proto_http"]}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://u"}, {"traces": ["otlp_proto_http"]}),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, {"metrics": ["otlp_proto_http"]}),
        ({"OTEL_METRICS_EXPORTER": "console, otlp"}, {"metrics": ["console", "otlp_proto_http"]}),
        ({ENDPOINT: "http://u", "OTEL_TRACES_EXPORTER": "none"}, {"metrics": ["otlp_proto_http"]}),
        ({ENDPOINT: "http://u", "OTEL_SDK_DISABLED": "TRUE"}, {}),
        (
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            {"metrics": ["otlp_proto_grpc"]},
        ),
        (
            {
                ENDPOINT: "http://u",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
            },
            {"traces": ["otlp_proto_grpc"], "metrics": ["otlp_proto_http"]},
        ),
    ],
)
def test_what_the_variables_turn_on(
    variables: dict[str, str], wanted: dict[str, list[str]]
) -> None:
    assert wanted_exporters(variables) == wanted


def test_mistakes_are_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="one of http/protobuf, grpc is expected, this is 'http'"):
        set_up("s", {ENDPOINT: "http://u", "OTEL_EXPORTER_OTLP_PROTOCOL": "http"})
    with pytest.raises(ConfigError, match="'nope' for metrics is not there; no installed package"):
        set_up("s", {"OTEL_METRICS_EXPORTER": "nope"})


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "tcp://c:4318"])
def test_an_endpoint_that_is_no_url_is_said_at_the_start(endpoint: str) -> None:
    for variable in (ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        with pytest.raises(ConfigError, match=f"{variable}: a URL is expected"):
            wanted_exporters({variable: endpoint})
    wanted_exporters({ENDPOINT: endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_an_exporter_that_is_not_installed_names_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        set_up("s", {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"})


def test_nothing_is_imported_where_nothing_is_wanted() -> None:
    code = (
        "import sys; from protomq_runtime import telemetry_setup; telemetry_setup.set_up('s', {});"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@contextmanager
def collector() -> Iterator[tuple[str, dict[str, bytes]]]:
    """An OTLP collector: its address, and the last body by path."""
    bodies: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_an_endpoint_alone_sends_both_signals_there() -> None:
    code = (
        "from protomq_runtime.telemetry_setup import set_up; telemetry = set_up('protomq-broker')\n"
        "from opentelemetry import metrics, trace\n"
        "trace.get_tracer('t').start_span('a span').end()\n"
        "metrics.get_meter('t').create_counter('a.counter').add(1)\n"
        "telemetry.shut_down(60)"
    )
    with collector() as (address, bodies):
        inherited = {name: v for name, v in os.environ.items() if not name.startswith("OTEL_")}
        environment = {**inherited, ENDPOINT: address, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert set(bodies) == {"/v1/traces", "/v1/metrics"}
    assert b"a span" in bodies["/v1/traces"]
    assert b"a.counter" in bodies["/v1/metrics"]
    assert all(b"protomq-broker" in body for body in bodies.values())


@pytest.mark.slow
def test_the_console_exporter_leaves_the_standard_output_to_the_ready_line() -> None:
    code = (
        "from protomq_runtime.telemetry_setup import set_up; telemetry = set_up('s')\n"
        "from opentelemetry import metrics\n"
        "metrics.get_meter('t').create_counter('a.counter').add(1)\n"
        "telemetry.shut_down(60)"
    )
    environment = {**os.environ, "OTEL_METRICS_EXPORTER": "console", "OTEL_SERVICE_NAME": "mine"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    (resource,) = json.loads(done.stderr)["resource_metrics"]
    assert resource["resource"]["attributes"]["service.name"] == "mine"


@contextmanager
def silent_collector() -> Iterator[str]:
    """Takes connections and never answers: its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("is_listening", [True, False])
def test_the_end_does_not_wait_for_a_collector_that_is_gone(is_listening: bool) -> None:
    # One retry of OTLP's exporter is allowed 10 s: shorter than that is by our limit.
    code = (
        "import time; from protomq_runtime.telemetry_setup import set_up; telemetry = set_up('s')\n"
        "from opentelemetry import metrics, trace\n"
        "for _ in range(3): trace.get_tracer('t').start_span('a span').end()\n"
        "metrics.get_meter('t').create_counter('a.counter').add(1)\n"
        "began = time.monotonic(); telemetry.shut_down(0.2); print(time.monotonic() - began < 5)"
    )
    with silent_collector() as address:
        endpoint = address if is_listening else "http://127.0.0.1:1"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, ENDPOINT: endpoint}, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    assert done.stdout == "True\n"
    assert "did not take it within 0.2 s: 3 spans, the last values of the metrics" in done.stderr
