"""How pytest-xdist shares the tests out: by file, but all that share a Spark on one worker, and from the start.

And what holds for all tests on a busy machine: Hypothesis gives no example a deadline.
"""

from __future__ import annotations

import gc
import os
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
SLOW_FILES = (
    "test_chaos_processes.py",
    "test_chaos_store.py",
    "test_ha.py",
    "test_push.py",
    "test_worker.py",
    "test_ha_sync.py",
    "test_ha_clients.py",
    "test_deploy.py",
    "test_uvloop.py",
    "test_request_reply.py",
    "test_groups.py",
    "test_push_faults.py",
    "test_cli.py",
    "test_connection_limits.py",
    "test_queue_locks.py",
    "test_broker.py",
    "test_broker_names.py",
    "test_queue_healing.py",
    "test_failover.py",
    "test_transactions.py",
    "test_cli_missing_brokers.py",
    "test_examples.py",
    "test_demo.py",
    "test_chaos_planted.py",
    "test_push_alike.py",
    "test_pop_handlers.py",
    "test_quick_start.py",
    "test_timer_mover.py",
    "test_transaction_service.py",
    "test_hand_over.py",
    "test_pop.py",
    "test_namesrv.py",
    "test_sdk_consumer_and_broker.py",
    "test_producer.py",
    "test_transports.py",
    "test_testing_project.py",
    "test_retry.py",
    "test_delays.py",
    "test_server_settings.py",
    "test_broker_start.py",
    "test_store.py",
    "test_derived_crashes.py",
    "test_checked_log.py",
    "test_heal.py",
    "test_tidy.py",
)
"""Each takes 5 s and more, whatever the number of its tests. The slowest first."""


def _turn(path: str) -> int:
    """When a file's turn comes: what takes longest comes first, so that at the end all workers have something short to do.

    0 for what needs the Spark session, 1 for the programs with a Spark of their own. Each is done one after the other, the second beside
    the first: more than two Sparks at a time are too many for a small machine, and the start of each costs as much as many tests.
    """
    name = Path(path).name
    if name.startswith("test_spark_"):
        return 1 if name in SPARK_PROGRAMS else 0
    if name in SLOW_FILES:
        return 2 + SLOW_FILES.index(name)
    return 2 + len(SLOW_FILES) + path.startswith("tests/unit/")


# Nothing here does linear algebra: numpy shall not start threads for it in each process that imports it, for a tenth of a start's CPU.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# What the collection leaves in memory stays until the end: to look for garbage in it, over and over, is a tenth of a run's CPU.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """From here on there is garbage. The process that only shares tests out comes here, too."""
    gc.freeze()
    # After 700 objects, which is the default, the short tests of whole stores look for garbage for a fifth of their time.
    gc.set_threshold(10_000)
    gc.enable()


# A shell has what it starts in the background ignore Ctrl-C, and so do the processes that this one starts: tests would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# `make test` judges a change, so it tries the same examples each time. `make properties` searches with new ones.
hypothesis.settings.register_profile("judging", deadline=None, derandomize=True)
hypothesis.settings.register_profile("searching", deadline=None)
hypothesis.settings.load_profile("judging")


class SparkOnTwoWorkers(LoadFileScheduling):
    """A session is started on one, and shared by all tests that need one; the programs run on another."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::", 1)[0]
        return {0: "spark", 1: "spark too"}.get(_turn(path), path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """For --dist loadfile, which the Makefile asks for."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # It goes by the number of tests, not by their time.
    return SparkOnTwoWorkers(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, where workers share the tests."""
    if config.getoption("dist", "no") == "loadfile" or hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item.nodeid.split("::", 1)[0]))
