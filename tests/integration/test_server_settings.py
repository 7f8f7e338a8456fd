"""What servers make of flags, files and variables together: real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protomq_cli.child import parse_ready_line
from tests.support.warm_servers import ServerPopen


@contextmanager
def process(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "protomq_cli", *map(str, arguments)]
    with ServerPopen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ready_words(child: subprocess.Popen[str]) -> dict[str, str]:
    assert child.stdout is not None
    return parse_ready_line(child.stdout.readline())


@pytest.mark.slow
@pytest.mark.parametrize("in_file", ["", "listen: {remoting_port: 1, grpc_port: 2}\n"])
def test_a_port_flag_moves_both_ports_whatever_the_file_says(tmp_path: Path, in_file: str) -> None:
    config = tmp_path / "broker.yaml"
    config.write_text(f"{in_file}store: {{disk_delete_ratio: 0.97, disk_force_ratio: 0.98, disk_refuse_ratio: 0.99}}")
    with process("standalone", "-c", config, "-d", tmp_path / "data", "--port", 0) as child:
        words = ready_words(child)
    ports = {name: int(words[name].rpartition(":")[2]) for name in ("grpc", "remoting")}
    assert ports["grpc"] != ports["remoting"]
    assert not {1, 2, 8081, 10911} & set(ports.values())


@pytest.mark.slow
def test_the_remoting_port_of_a_name_server_follows_its_port_flag(tmp_path: Path) -> None:
    config = tmp_path / "namesrv.yaml"
    config.write_text("listen: {remoting_port: 1}\n")
    with process("namesrv", "-c", config, "--port", 0) as child:
        assert child.stdout is not None
        words = dict(word.split("=") for word in child.stdout.readline().split()[1:])
    assert words["remoting"] not in ("127.0.0.1:1", "127.0.0.1:9877")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["standalone"], ["namesrv"], ["topic", "list"]])
def test_a_misspelled_variable_stops_every_command(command: list[str]) -> None:
    with process(*command, PROTOMQ_NAMESRV_ADR="127.0.0.1:1") as child:
        out, log = child.communicate(timeout=60)
    assert (child.returncode, out) == (2, "")
    assert "nothing reads PROTOMQ_NAMESRV_ADR; do you mean PROTOMQ_NAMESRV_ADDR" in log


@pytest.mark.slow
def test_an_otel_variable_alone_turns_metrics_on(tmp_path: Path) -> None:
    variables = {"OTEL_METRICS_EXPORTER": "console", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
    with process("standalone", "-d", tmp_path, "--port", 0, **variables) as child:
        ready_words(child)
        assert child.stderr is not None
        wanted = {"protomq.lane.holds", "protomq.log.damaged_ranges", "protomq-standalone"}
        for line in child.stderr:
            wanted = {name for name in wanted if f'"{name}"' not in line}
            if not wanted:
                break
        assert not wanted


@pytest.mark.slow
def test_an_exporter_that_is_not_there_keeps_a_server_from_starting(tmp_path: Path) -> None:
    with process("standalone", "-d", tmp_path, "--port", 0, OTEL_TRACES_EXPORTER="nope") as child:
        out, log = child.communicate(timeout=60)
    assert (child.returncode, out) == (2, "")
    assert "the exporter 'nope' for traces is not there" in log.splitlines()[-1]
