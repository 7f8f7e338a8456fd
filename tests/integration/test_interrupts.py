"""Ctrl-C at any moment of any call of a client: the next calls, and those of other threads, go on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from protomq.testing import Broker

ROOT = Path(__file__).parents[2]


def test_a_storm_of_interrupts_leaves_every_client_working(protomq_server: Broker, protomq_topic: str) -> None:
    command = [sys.executable, "-m", "tests.support.interrupted_client", protomq_server.namesrv, protomq_topic, "8"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"interrupted (\d+) times", ended.stdout)
    assert found is not None
    assert int(found[1]) > 20
