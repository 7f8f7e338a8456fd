"""The supervisor of worker processes, where the machine has no more of something for a while."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import time
from typing import Any

import pytest

from protomq_cli.worker import Supervisor
from protomq_cli.worker_policy import Doing, Phase


def test_a_process_that_cannot_be_started_is_tried_again_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    supervisor = Supervisor(
        "app:consumer", 1, environment={}, stop_timeout_s=1.0, start_timeout_s=math.inf, status_s=0.0, watched=None, say=said.append
    )

    def no_process(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    open_files = len(os.listdir("/proc/self/fd"))
    slot = supervisor.policy.slots[0]
    for _ in range(3):
        slot.phase, slot.started_s = Phase.STARTING, time.monotonic()
        supervisor._do(Doing.START, 0)
    assert (slot.phase, slot.deaths, supervisor.processes) == (Phase.DOWN, 3, {})
    assert said[-1].startswith("worker 0 cannot be started, it is tried again in 4 s: ")
    assert len(os.listdir("/proc/self/fd")) == open_files
