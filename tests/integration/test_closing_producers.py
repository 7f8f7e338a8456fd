"""Producers that are closed at once after what they have sent: what was under way arrives."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import pytest

from protomq import Admin, AsyncProducer, ConnectionOptions, Producer
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

Transport = Literal["remoting", "grpc"]
BOTH = pytest.mark.parametrize("transport", ["remoting", "grpc"])
# Many small ones, and some that no kernel takes at once.
SIZES = pytest.mark.parametrize(("count", "size_bytes"), [(200, 10), (6, 3_500_000)])


class Arrivals:
    """What of a topic's messages reaches its broker. One that is overloaded refuses messages, and of those sent one way nobody hears."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._namesrv, self._topic = broker.namesrv, topic
        self._refused_before = self._refused_count()

    def wait_for(self, count: int) -> None:
        """Until all of them are stored, or refused."""
        with Admin(namesrv=self._namesrv) as admin:
            wait_for(lambda: self._stored_count(admin) + self._refused_count() - self._refused_before == count, PATIENCE_S)

    def _stored_count(self, admin: Admin) -> int:
        return sum(one.records_in for one in admin.stats([self._topic]))

    def _refused_count(self) -> int:
        with Admin(namesrv=self._namesrv) as admin:
            return sum(lane.rejections for broker in admin.broker_status() for lane in broker.lanes if lane.lane == "send")


def way(broker: Broker, transport: Transport) -> dict[str, Any]:
    """With time for a machine on which others are at work: a message that is sent one way is tried once."""
    connection = ConnectionOptions(namesrv=broker.namesrv, transport=transport, connect_timeout_s=PATIENCE_S)
    return {"connection": connection, "compression": "none", "send_timeout_s": PATIENCE_S}


@BOTH
@SIZES
def test_what_threads_send_one_way_arrives_though_the_producer_is_closed_at_once(
    protomq_server: Broker, protomq_topic: str, transport: Transport, count: int, size_bytes: int
) -> None:
    arrivals = Arrivals(protomq_server, protomq_topic)
    with Producer(**way(protomq_server, transport)) as producer:
        for _ in range(count):
            producer.send_one_way(protomq_topic, os.urandom(size_bytes))
    arrivals.wait_for(count)


@BOTH
@SIZES
async def test_what_coroutines_send_one_way_arrives_though_the_producer_is_closed_at_once(
    protomq_server: Broker, protomq_topic: str, transport: Transport, count: int, size_bytes: int
) -> None:
    arrivals = await asyncio.to_thread(Arrivals, protomq_server, protomq_topic)
    async with AsyncProducer(**way(protomq_server, transport)) as producer:
        for _ in range(count):
            await producer.send_one_way(protomq_topic, os.urandom(size_bytes))
    await asyncio.to_thread(arrivals.wait_for, count)
