"""docs/quick_start.md is run as it is printed, in one folder, from the first line to the last: its files, its commands, what they print.

A file is a block that begins with `# name`. A block of the language `sh` has one command, and what that prints; ports and processes have
other numbers here. A command that says that it is ready goes on, until all that it prints has come. Consuming is at least once: where two
workers join while messages are there, some may be printed once more.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from mypy import api

PAGE = Path(__file__).parents[2] / "docs" / "quick_start.md"
ADDRESS = "127.0.0.1:10911"
TIMEOUT_S = 120.0
NUMBERS = re.compile(r"process \d+|127\.0\.0\.1:\d+|(?<=airport/)\d+@\d+")


class Block(NamedTuple):
    """A file, or a command with its output."""

    language: str
    text: str


def blocks() -> Iterator[Block]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        yield Block(language, text)


def write(text: str, folder: Path, address: str = ADDRESS) -> Path:
    """Writes a file of the page. Its name is in its first line."""
    name = re.match(r"# (\S+)\n", text)
    assert name is not None, text
    path = folder / name[1]
    path.write_text(re.sub(r"(grpc_port|remoting_port): \d+", r"\1: 0", text).replace(ADDRESS, address))
    return path


def plain(lines: list[str]) -> list[str]:
    """Without what is another number each time."""
    return [NUMBERS.sub("#", line) for line in lines]


class Running:
    """A command that goes on. Its output is read by a thread, which also ends a test that waits for too long."""

    def __init__(self, command: str, expected: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT if "worker" in command else subprocess.DEVNULL,
        )  # fmt: skip
        self.lines: list[str] = []
        end = threading.Timer(TIMEOUT_S, self.process.kill)
        end.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if Counter(plain(expected)) <= Counter(plain(self.lines)):
                break
        end.cancel()
        self._drain = threading.Thread(target=self.process.stdout.read, daemon=True)
        self._drain.start()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._drain.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_the_programs_of_the_quick_start_type_check(tmp_path: Path) -> None:
    files = [write(text, tmp_path) for language, text in blocks() if language == "python"]
    assert len(files) >= 7
    said, trouble, code = api.run(["--strict", "--config-file=", f"--cache-dir={tmp_path}", *map(str, files)])
    assert code == 0, said + trouble


@pytest.mark.slow
def test_the_quick_start_runs_as_it_is_printed(tmp_path: Path) -> None:
    binaries = str(Path(sys.executable).parent)
    environment = {"PATH": f"{binaries}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"} | {
        name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "HOME")
    }
    free_ports = {"PROTOMQ_LISTEN_GRPC_PORT": "0", "PROTOMQ_LISTEN_REMOTING_PORT": "0"}
    commands = 0
    servers: list[Running] = []
    try:
        for language, text in blocks():
            if language != "sh":
                write(text, tmp_path, environment.get("PROTOMQ_NAMESRV_ADDR", ""))
                continue
            first, *expected = text.splitlines()
            command = first.removeprefix("$ ")
            assert command != first
            commands += 1
            if expected[0].startswith("ready"):
                server = Running(command, expected, tmp_path, environment | (free_ports if not servers else {}))
                servers.append(server)
                assert plain(server.lines) == plain(expected)
                if len(servers) == 1:
                    environment["PROTOMQ_NAMESRV_ADDR"] = server.lines[0].split("namesrv=")[1].split()[0]
            elif "worker" in command:
                worker = Running(command, expected, tmp_path, environment)
                code = worker.stop()
                # Of several processes nobody knows whose line is first.
                assert Counter(plain(worker.lines)) >= Counter(plain(expected))
                assert set(plain(worker.lines)) == set(plain(expected))
                assert code == 0
            else:
                done = subprocess.run(
                    ["bash", "-c", command], cwd=tmp_path, env=environment, text=True, timeout=TIMEOUT_S, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                assert (done.returncode, plain(done.stdout.splitlines())) == (0, plain(expected)), f"{command}\n{done.stdout}"
        assert commands >= 10
        assert [server.process.poll() for server in servers] == [None, None]
        assert [server.stop() for server in reversed(servers)] == [0, 0]
    finally:
        for server in servers:
            server.kill()
