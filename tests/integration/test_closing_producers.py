"""Producers that are closed at once after what they have sent: what was under way arrives."""

from __future__ import annotations

import asyncio
import os
from typing import Literal

import pytest

from protomq import Admin, AsyncProducer, Producer
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

Transport = Literal["remoting", "grpc"]
BOTH = pytest.mark.parametrize("transport", ["remoting", "grpc"])
# Many small ones, and some that no kernel takes at once.
SIZES = pytest.mark.parametrize(("count", "size_bytes"), [(200, 10), (6, 3_500_000)])


def wait_stored(broker: Broker, topic: str, count: int) -> None:
    def stored() -> int:
        return sum(one.records_in for one in admin.stats([topic]))

    with Admin(namesrv=broker.namesrv) as admin:
        wait_for(lambda: stored() == count, PATIENCE_S)


@BOTH
@SIZES
def test_what_threads_send_one_way_arrives_though_the_producer_is_closed_at_once(
    protomq_server: Broker, protomq_topic: str, transport: Transport, count: int, size_bytes: int
) -> None:
    with Producer(namesrv=protomq_server.namesrv, transport=transport, compression="none", send_timeout_s=30.0) as producer:
        for _ in range(count):
            producer.send_one_way(protomq_topic, os.urandom(size_bytes))
    wait_stored(protomq_server, protomq_topic, count)


@BOTH
@SIZES
async def test_what_coroutines_send_one_way_arrives_though_the_producer_is_closed_at_once(
    protomq_server: Broker, protomq_topic: str, transport: Transport, count: int, size_bytes: int
) -> None:
    async with AsyncProducer(namesrv=protomq_server.namesrv, transport=transport, compression="none", send_timeout_s=30.0) as producer:
        for _ in range(count):
            await producer.send_one_way(protomq_topic, os.urandom(size_bytes))
    await asyncio.to_thread(wait_stored, protomq_server, protomq_topic, count)
