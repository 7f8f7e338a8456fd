"""How pytest-xdist shares the tests out: by file, and all that start a Spark on one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling


class SparkOnOneWorker(LoadFileScheduling):
    """A JVM takes most of a small machine: two side by side would make each other, and all tests that watch the clock, slow."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return "spark" if Path(path).name.startswith("test_spark_") else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """For --dist loadfile, which the Makefile asks for."""
    return SparkOnOneWorker(config, log) if config.getoption("dist") == "loadfile" else None
