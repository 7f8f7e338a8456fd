"""How pytest-xdist shares the tests out: by file, but all that need the Spark session on one worker, and from the start.

And what holds for all tests on a busy machine: Hypothesis gives no example a deadline.
"""

from __future__ import annotations

import signal
from pathlib import Path

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

SPARK_PROGRAMS = (
    "test_spark_chaos.py",
    "test_spark_cluster.py",
    "test_spark_demo.py",
    "test_spark_example.py",
)
"""They start Spark as a process of its own and need no session here."""


def _turn(path: str) -> int:
    """0 for what needs the Spark session, 1 for programs with a Spark of their own, 2 for the rest.

    The session's tests take longest, one after the other: whoever begins them last ends last. Behind them come the programs, so that
    tests that watch the clock have one Spark beside them at most.
    """
    name = Path(path).name
    return (1 if name in SPARK_PROGRAMS else 0) if name.startswith("test_spark_") else 2


# A shell has what it starts in the background ignore Ctrl-C, and so do the processes that this one starts: tests would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")


class SparkOnOneWorker(LoadFileScheduling):
    """One session is started, and shared by all tests that need one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return "spark" if _turn(path) == 0 else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """For --dist loadfile, which the Makefile asks for."""
    return SparkOnOneWorker(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, where workers share the tests."""
    if config.getoption("dist") == "loadfile" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item.nodeid.split("::", 1)[0]))
