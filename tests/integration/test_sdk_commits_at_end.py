"""Offsets of several brokers: one that is silent or refuses keeps no other from taking its own, least of all when there is no next time."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protomq import AsyncPullConsumer, PullConsumer, _methods
from protomq._consumer_calls import Limits
from protomq._steps import Steps
from protomq.errors import OffsetOutOfRangeError, ProtomqError
from protomq.wire.status import RpcStatus
from tests.support.fake_server import FakeServer

REFUSED = RpcStatus(11, "beyond the end", "OFFSET_OUT_OF_RANGE")
BUSY = RpcStatus(8, "busy", "SYSTEM_BUSY")
Faulty = Callable[[FakeServer], None]

FAULTS: dict[str, Faulty] = {
    "refuses": lambda server: server.fail(_methods.COMMIT_OFFSETS, REFUSED, times=9),
    "is busy": lambda server: server.fail(_methods.COMMIT_OFFSETS, BUSY, times=99),
    "is silent": lambda server: server.stall(_methods.COMMIT_OFFSETS, times=9),
    "is gone": lambda server: server.stop(),
}


@pytest.fixture
def two() -> Iterator[tuple[FakeServer, FakeServer, FakeServer]]:
    """A name server, and two brokers of which the first is asked first. One message each."""
    with FakeServer() as names, FakeServer() as first, FakeServer(broker_name="broker-b") as second:
        names.topics = first.topics = second.topics = {"t": 1}
        names.brokers = [first.as_broker(), second.as_broker()]
        for server in (first, second):
            server.append("t", 0, [b"x"])
        yield names, first, second
        names.stop()


@pytest.fixture(params=FAULTS, ids=lambda name: name.replace(" ", "_"))
def fault(request: pytest.FixtureRequest) -> Faulty:
    return FAULTS[request.param]


def consumed(names: FakeServer, **options: Any) -> PullConsumer:
    """A consumer that has dealt with both messages."""
    source = PullConsumer("g", namesrv=names.address, hold_ms=0, **options)
    source.subscribe("t")
    count = 0
    while count < 2:
        count += len(source.poll(1))
    assert [queue.broker_name for queue in source.assignment()] == ["broker-a", "broker-b"]
    return source


async def async_consumed(names: FakeServer, **options: Any) -> AsyncPullConsumer:
    source = AsyncPullConsumer("g", namesrv=names.address, hold_ms=0, **options)
    await source.subscribe("t")
    count = 0
    while count < 2:
        count += len(await source.poll(1))
    return source


def lines(caplog: pytest.LogCaptureFixture, when: str) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and f"not committed {when}" in record.message
    ]


def test_close_asks_every_broker_and_tells_which_did_not_take_its_offsets(
    two: tuple[FakeServer, ...], fault: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    names, first, second = two
    source = consumed(names, request_timeout_s=1.0)
    fault(first)
    with pytest.warns(RuntimeWarning, match="messages of 1 queue .* will come again: .* failed") as told:
        source.close()
    assert told[0].filename == __file__
    assert second.committed == {("g", "t", 0): 1}
    assert first.committed == {}
    assert len(lines(caplog, "on close")) == 1


async def test_close_of_the_async_consumer_does_so_too(
    two: tuple[FakeServer, ...], fault: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    names, first, second = two
    source = await async_consumed(names, request_timeout_s=1.0)
    fault(first)
    with pytest.warns(RuntimeWarning, match="messages of 1 queue .* will come again: .* failed") as told:
        await source.close()
    assert told[0].filename == __file__
    assert second.committed == {("g", "t", 0): 1}
    assert len(lines(caplog, "on close")) == 1


BUSY_FOR_A_WHILE = RpcStatus(8, "busy", "SYSTEM_BUSY", retry_delay_ms=100)


def test_close_outlasts_a_broker_that_is_busy(
    two: tuple[FakeServer, ...], recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    names, first, second = two
    source = consumed(names)
    first.fail(_methods.COMMIT_OFFSETS, BUSY_FOR_A_WHILE, times=6)
    begun_s = time.monotonic()
    source.close()
    assert first.committed == second.committed == {("g", "t", 0): 1}
    assert time.monotonic() - begun_s >= 0.1 + 0.1 + 0.2 + 0.4 + 0.5
    assert not recwarn.list
    assert lines(caplog, "on close") == []


async def test_close_of_the_async_consumer_outlasts_it_too(
    two: tuple[FakeServer, ...], recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    names, first, second = two
    source = await async_consumed(names)
    first.fail(_methods.COMMIT_OFFSETS, BUSY_FOR_A_WHILE, times=6)
    await source.close()
    assert first.committed == second.committed == {("g", "t", 0): 1}
    assert not recwarn.list
    assert lines(caplog, "on close") == []


def test_commit_asks_every_broker_and_raises_at_the_end(
    two: tuple[FakeServer, ...], fault: Faulty
) -> None:
    names, first, second = two
    with consumed(names, request_timeout_s=1.0, auto_commit=False) as source:
        fault(first)
        with pytest.raises(ProtomqError):
            source.commit()
        assert second.committed == {("g", "t", 0): 1}


async def test_commit_of_the_async_consumer_does_so_too(
    two: tuple[FakeServer, ...], fault: Faulty
) -> None:
    names, first, second = two
    async with await async_consumed(names, request_timeout_s=1.0, auto_commit=False) as source:
        fault(first)
        with pytest.raises(ProtomqError):
            await source.commit()
        assert second.committed == {("g", "t", 0): 1}


def test_an_error_of_commit_tells_those_of_the_other_brokers(
    two: tuple[FakeServer, ...]
) -> None:
    names, first, second = two
    with consumed(names, auto_commit=False) as source:
        for server in (first, second):
            server.fail(_methods.COMMIT_OFFSETS, REFUSED)
        with pytest.raises(OffsetOutOfRangeError) as caught:
            source.commit()
        assert caught.value.__notes__ == [
            "offsets in t/broker-a not committed: OffsetOutOfRangeError: beyond the end",
            "offsets in t/broker-b not committed: OffsetOutOfRangeError: beyond the end",
        ]


def test_a_broker_that_is_silent_is_not_asked_for_each_of_its_topics(
    two: tuple[FakeServer, ...],
) -> None:
    names, first, second = two
    for server in (first, second):
        server.topics["u"] = 1
        server.append("u", 0, [b"x"])
    source = consumed(names, request_timeout_s=1.0)
    source.subscribe("u")
    while source.position(source.queues("u")[0]) + source.position(source.queues("u")[1]) < 2:
        source.poll(1)
    FAULTS["is silent"](first)
    with pytest.warns(RuntimeWarning, match="will come again: .* failed"):
        source.close()
    assert second.committed == {("g", "t", 0): 1, ("g", "u", 0): 1}
    assert first.called(_methods.COMMIT_OFFSETS) == 1


def test_the_limit_at_exit_is_one_for_all_brokers(
    two: tuple[FakeServer, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, *brokers = two
    source = consumed(names)
    assert source.poll(0) == []
    for server in brokers:
        server.stall(_methods.COMMIT_OFFSETS)
    limits_s: list[float] = []
    calls = source._steps._calls
    commit = calls.commit

    def recorded(limits: Limits, *args: Any) -> Steps[Any]:
        limits_s.append(limits.timeout_s)
        return commit(limits, *args)

    monkeypatch.setattr(calls, "commit", recorded)
    assert source.finish_at_exit(1.0) == 2
    # Each was silent for all the time it was given.
    assert len(limits_s) == 2
    assert sum(limits_s) <= 1.05
    source.close()


PROGRAM = """
    from protomq import PullConsumer

    consumers = []
    for i in range({count}):
        consumer = PullConsumer(f"g{{i}}", namesrv={address!r}, hold_ms=0)
        consumer.subscribe("t")
        count = 0
        while count < 2:
            count += len(consumer.poll(1))
        assert consumer.poll(0) == []
        consumers.append(consumer)
"""


@pytest.mark.parametrize("name", FAULTS)
def test_when_the_program_ends_every_consumer_asks_every_broker(
    two: tuple[FakeServer, ...], name: str
) -> None:
    names, first, second = two
    program = textwrap.dedent(PROGRAM).format(count=2, address=names.address)
    if name == "is gone":
        for _ in range(99):
            first.drop(_methods.COMMIT_OFFSETS)
    else:
        FAULTS[name](first)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert second.committed == {("g0", "t", 0): 1, ("g1", "t", 0): 1}
    for group in ("g0", "g1"):
        assert f"messages of 1 queue that were handed out to group {group} are not" in done.stderr
