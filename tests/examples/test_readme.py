"""What the README shows is run as it stands there, but for the address."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq.testing import Broker

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "127.0.0.1:10911"


def run(arguments: list[str], address: str) -> str:
    result = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=180,
        env={"PROTOMQ_NAMESRV_ADDR": address, "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    """Of its own: elsewhere the topic of the README may have messages already."""
    with Broker() as broker:
        yield broker


def test_the_first_program_of_the_readme_works(server: Broker) -> None:
    program, _spark = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert ADDRESS in program
    address = server.remoting_address
    printed = run([sys.executable, "-c", program.replace(ADDRESS, address)], address)
    assert "SEND_OK" in printed
    assert "b'hello'" in printed


def test_the_commands_of_the_readme_work(server: Broker) -> None:
    section = README.read_text().partition("From the shell:\n\n")[2].partition("\n\n")[0]
    commands = [shlex.split(line) for line in section.splitlines()]
    assert len(commands) == 3
    for words in commands:
        assert words[0] == ".venv/bin/protomq"
        words = [sys.executable, "-m", "protomq", *words[1:]]
        if "consume" in words:
            words.append("--exit")  # it goes on until Ctrl-C otherwise
        assert run(words, server.remoting_address)
