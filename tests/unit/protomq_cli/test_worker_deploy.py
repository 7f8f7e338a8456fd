"""The samples in deploy/ say what the command line takes, and give it the time that it needs."""

from __future__ import annotations

import shlex
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import typer
import yaml

from protomq_cli.main import build_app
from protomq_cli.units import parse_duration

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def parsed(words: list[str]) -> dict[str, Any]:
    """The arguments of `protomq worker`, as the command line reads them."""
    assert words[0].endswith("protomq")
    assert words[1] == "worker"
    command = typer.main.get_command(build_app()).commands["worker"]  # type: ignore[attr-defined]
    return dict(command.make_context("worker", words[2:]).params)


def test_the_systemd_unit() -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "worker.service")
    service = unit["Service"]
    found = parsed(shlex.split(service["ExecStart"]))
    assert (found["target"], found["processes"], found["metrics_port"]) == ("app.orders:consumer", 4, 9464)
    assert float(service["TimeoutStopSec"]) > found["stop_timeout"]
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"] == "2"
    assert "HUP" in service["ExecReload"]


def test_the_deployment() -> None:
    deployment = yaml.safe_load((DEPLOY / "worker.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    found = parsed(container["command"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > found["stop_timeout"] == parse_duration("30s")
    assert found["metrics_port"] == container["ports"][0]["containerPort"]
    assert found["metrics_host"] == "0.0.0.0"
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
