"""Simple consumers behind a firewall that forgets connections: what they tell of messages goes on a new one, in the time of the call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from protomq import Admin, AsyncSimpleConsumer, Producer, SimpleConsumer
from protomq.testing import Broker, FaultProxy

REQUEST_TIMEOUT_S = 5.0
TELL: dict[str, Callable[[Any, Any], Any]] = {
    "ack": lambda consumer, messages: consumer.ack(messages),
    "change_invisible": lambda consumer, messages: consumer.change_invisible(messages, 60),
}


def tell_by_threads(namesrv: str, transport: Any, what: str, proxy: FaultProxy) -> float:
    with SimpleConsumer("g", namesrv=namesrv, transport=transport) as consumer:
        (first,), (second,) = (consumer.receive("t", 1, hold_s=5, invisible_s=60) for _ in range(2))
        assert consumer.ack(first) == []  # The connection is there.
        assert proxy.swallow()
        began_s = time.monotonic()
        assert TELL[what](consumer, second) == []
        return time.monotonic() - began_s


async def tell_by_tasks(namesrv: str, transport: Any, what: str, proxy: FaultProxy) -> float:
    async with AsyncSimpleConsumer("g", namesrv=namesrv, transport=transport) as consumer:
        (first,) = await consumer.receive("t", 1, hold_s=5, invisible_s=60)
        (second,) = await consumer.receive("t", 1, hold_s=5, invisible_s=60)
        assert await consumer.ack(first) == []
        assert proxy.swallow()
        began_s = time.monotonic()
        assert await TELL[what](consumer, second) == []
        return time.monotonic() - began_s


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("transport", ["remoting", "grpc"])
def test_what_is_told_on_a_connection_that_is_dead_without_a_word_is_told_again_on_a_new_one(transport: str, kind: str) -> None:
    with FaultProxy() as proxy:
        port = proxy.address.rpartition(":")[2]
        with Broker(environment={f"PROTOMQ_LISTEN_ADVERTISED_{transport.upper()}_PORT": port}) as broker:
            proxy.target = broker.remoting_address if transport == "remoting" else broker.grpc_address
            with Admin(namesrv=broker.namesrv) as admin:
                admin.create_topic("t", write_queues=1, read_queues=1)
            for what in TELL:
                with Producer(namesrv=broker.namesrv) as producer:
                    for body in (b"1", b"2"):
                        producer.send("t", body)
                if kind == "threads":
                    took_s = tell_by_threads(broker.namesrv, transport, what, proxy)
                else:
                    took_s = asyncio.run(tell_by_tasks(broker.namesrv, transport, what, proxy))
                assert took_s < REQUEST_TIMEOUT_S, what
