"""Commits of members whom real brokers have given up, or do not know yet since they have just started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from protomq import Admin, AsyncPullConsumer, Producer, PullConsumer, PushConsumer
from protomq._methods import COMMIT_OFFSETS
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import QueueNotOwnedError, SystemBusyError, TransportError
from protomq.testing import Broker
from tests.support.member_processes import member_process, read_until
from tests.support.waiting import PATIENCE_S, wait_for

# It stops itself on the way from the checks of a commit to its socket, once it has a message.
MEMBER = """
import os, signal, sys
from protomq import PullConsumer
from protomq._methods import COMMIT_OFFSETS
from protomq._transport import SyncTransport
from protomq.errors import ProtomqError

real, stopped, got = SyncTransport.call, [], []

def call(transport, address, method, *rest, **named):
    if method is COMMIT_OFFSETS and got and not stopped:
        stopped.append(True)
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        return real(transport, address, method, *rest, **named)
    except ProtomqError as error:
        if method is COMMIT_OFFSETS:
            print("refused", error.reason, flush=True)
        raise

SyncTransport.call = call
with PullConsumer("g", namesrv=sys.argv[1], auto_commit_interval_s=0.1) as member:
    member.subscribe("t")
    while True:
        if member.poll(0.1, 1):
            got.append(True)
            print("got", flush=True)
"""


def make_topic(broker: Broker, sends: int) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic("t", write_queues=1, read_queues=1)
    with Producer(namesrv=broker.namesrv) as producer:
        for number in range(sends):
            producer.send("t", b"%d" % number)


def committed(broker: Broker) -> list[int | None]:
    with Admin(namesrv=broker.namesrv) as admin:
        return [queue.committed_offset for queue in admin.group_lag("g") if queue.queue.topic == "t"]


def test_the_commit_that_a_stopped_member_was_sending_does_not_take_back_the_next_owners() -> None:
    with Broker(environment={"PROTOMQ_MEMBER_GAP_MS": "3000"}) as broker:
        make_topic(broker, 10)
        with member_process(MEMBER, broker) as stopped, PullConsumer("g", namesrv=broker.namesrv) as other:
            read_until(stopped, "got")
            read_until(stopped, "stops")
            other.subscribe("t")
            got: list[bytes] = []
            ends_s = time.monotonic() + PATIENCE_S
            while len(got) < 10 and time.monotonic() < ends_s:
                got += [message.body for message in other.poll(0.1)]
            assert got == [b"%d" % number for number in range(10)]
            other.commit()
            assert committed(broker) == [10]
            os.kill(stopped.pid, signal.SIGCONT)
            read_until(stopped, "refused MEMBER_UNKNOWN")
            assert committed(broker) == [10]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_a_commit_that_comes_to_a_broker_before_it_knows_its_members_again_is_not_lost(tmp_path: Path, transport: str) -> None:
    with Broker(data_dir=tmp_path) as broker:
        make_topic(broker, 10)
        namesrv = broker.grpc_address if transport == "grpc" else broker.namesrv
        with PullConsumer("g", namesrv=namesrv, transport=transport, auto_commit=False) as consumer:  # type: ignore[arg-type]
            consumer.subscribe("t")
            while sum(consumer.position(queue) for queue in consumer.assignment()) < 10:
                assert consumer.poll(PATIENCE_S)
            broker.kill()
            broker.start()
            consumer.poll(0)

            def is_committed() -> bool:
                with contextlib.suppress(TransportError):  # A channel of gRPC pauses before it connects again.
                    consumer.commit()
                    return True
                return False

            wait_for(is_committed, PATIENCE_S)
            assert committed(broker) == [10]


def test_coroutines_commit_to_a_broker_that_has_just_started_too(tmp_path: Path) -> None:
    async def consume(broker: Broker) -> None:
        async with AsyncPullConsumer("g", namesrv=broker.namesrv, auto_commit=False) as consumer:
            await consumer.subscribe("t")
            got = 0
            while got < 10:
                got += len(await consumer.poll(PATIENCE_S))
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            await consumer.poll(0)
            await consumer.commit()

    with Broker(data_dir=tmp_path) as broker:
        make_topic(broker, 10)
        asyncio.run(consume(broker))
        assert committed(broker) == [10]


def test_a_queue_that_is_another_members_is_not_committed_and_one_that_was_assigned_is() -> None:
    with Broker() as broker:
        make_topic(broker, 10)
        with (
            PullConsumer("g", namesrv=broker.namesrv) as owner,
            PullConsumer("g", namesrv=broker.namesrv) as other,
            PullConsumer("g", namesrv=broker.namesrv) as stranger,
        ):
            owner.subscribe("t")
            other.subscribe("t")
            (queue,) = owner.assignment() or other.assignment()
            has, lacks = (owner, other) if owner.assignment() else (other, owner)
            with pytest.raises(QueueNotOwnedError) as raised:
                lacks.commit({queue: 3})
            assert raised.value.metadata["owner"]
            has.commit({queue: 4})
            assert committed(broker) == [4]
            with pytest.warns(RuntimeWarning, match="both get every message"):
                stranger.assign([queue])
            stranger.commit({queue: 5})
            assert committed(broker) == [5]


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("orderly", [False, True])
def test_joins_and_leaves_at_a_busy_broker_repeat_nothing(
    transport: Literal["remoting", "grpc"], orderly: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker refuses four commits of what goes by the join, and four of what goes by the leave."""
    real, refusals, refused = SyncTransport.call, 0, 0

    def call(self: SyncTransport, address: BrokerAddress, method: MethodInfo, *rest: Any, **named: Any) -> bytes:
        nonlocal refused
        if method is COMMIT_OFFSETS and refused < refusals:
            refused += 1
            error = SystemBusyError("the lane consumer is overloaded")
            error.retry_delay_ms = 100
            raise error
        return real(self, address, method, *rest, **named)

    monkeypatch.setattr(SyncTransport, "call", call)
    with Broker() as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("t", write_queues=4, read_queues=4)
        with Producer(namesrv=broker.namesrv) as producer:
            for number in range(40):
                producer.send("t", b"%d" % number)
        heard: list[bytes] = []

        def member() -> PushConsumer:
            source = PushConsumer("g", namesrv=broker.namesrv, transport=transport, orderly=orderly, commit_interval_s=60.0)
            source.subscribe("t", lambda message: heard.append(message.body))
            return source

        def count(source: PushConsumer) -> int:
            return sum(queue.topic == "t" for queue in source.assignment())

        first = member()
        first.start()
        wait_for(lambda: len(heard) >= 40)
        refusals = 4
        with member() as second:
            wait_for(lambda: count(first) == count(second) == 2)
            assert refused == 4
            refused = 0
            assert first.stop() == 0
            assert refused == 4
            wait_for(lambda: count(second) == 4)
            with Producer(namesrv=broker.namesrv) as producer:
                for number in range(40, 80):
                    producer.send("t", b"%d" % number)
            wait_for(lambda: len(heard) >= 80)
        assert Counter(heard) == Counter(b"%d" % number for number in range(80))
    assert "not committed" not in caplog.text
