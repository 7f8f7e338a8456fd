"""A consumer that lags is sent to the slave, and returns by itself: when it has caught up, and when the slave dies under it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from protomq import Admin, AsyncPullConsumer, Producer, PullConsumer
from protomq.v1.admin_service_pb2 import GetStatsRequest
from protomq.v1.admin_service_pb2_grpc import AdminServiceStub
from tests.support.ha_brokers import TOPIC, HaBroker, pair, running
from tests.support.namesrv import Namesrv, running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

COUNT = 400
PULL_COUNT = 20
BODIES = [b"%d" % number for number in range(COUNT)]


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[Namesrv, HaBroker, HaBroker]]:
    """A master and its slave, which have some messages; nothing but the end of a queue counts as in memory."""
    ha = {"slave_read_memory_ratio": 0}
    with running_namesrv() as namesrv:
        master, slave = pair(folder, ha=ha, namesrv=[str(namesrv.remoting)])
        with running(master, slave):
            slave.wait_for_all_of(master)
            with Admin(namesrv=str(namesrv.remoting)) as admin:
                admin.create_topic(TOPIC, write_queues=1, read_queues=1)

                def is_registered() -> bool:
                    return [broker.broker_id for broker in admin.cluster_info()] == [0, 1]

                wait_for(is_registered, PATIENCE_S)
            master.send_ok(*BODIES)
            slave.wait_for_all_of(master)
            # The master notes on a tick that its slave has caught up.
            wait_for(lambda: [each.in_sync for each in master.status().replicas] == [True], PATIENCE_S)
            yield namesrv, master, slave


def given_out(broker: HaBroker) -> int:
    """Messages that this broker has given to consumers since its start."""
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        answer = AdminServiceStub(channel).GetStats(GetStatsRequest(topics=[TOPIC]), timeout=PATIENCE_S)
        return sum(topic.records_out for topic in answer.topics)


def take(consumer: PullConsumer, count: int) -> list[bytes]:
    """The next bodies."""
    bodies: list[bytes] = []

    def has_them() -> bool:
        bodies.extend(message.body for message in consumer.poll(0.2, max_messages=count - len(bodies)))
        return len(bodies) >= count

    wait_for(has_them, PATIENCE_S)
    return bodies


def test_a_consumer_that_lags_reads_from_the_slave_and_returns(tmp_path: Path) -> None:
    with cluster(tmp_path) as (namesrv, master, slave):
        at = str(namesrv.remoting)
        with PullConsumer("lagging", namesrv=at, begin="earliest", pull_record_count_max=PULL_COUNT) as consumer:
            consumer.subscribe(TOPIC)
            assert take(consumer, COUNT) == BODIES
            assert (given_out(master), given_out(slave)) == (PULL_COUNT, COUNT - PULL_COUNT), "the first answer sends it away"
            consumer.commit()
            with Producer(namesrv=at) as producer:
                producer.send(TOPIC, b"news")
            assert take(consumer, 1) == [b"news"]
            assert (given_out(master), given_out(slave)) == (PULL_COUNT + 1, COUNT - PULL_COUNT)


def test_a_consumer_goes_on_at_the_master_when_the_slave_dies_under_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as (namesrv, master, slave):
        at = str(namesrv.remoting)
        with PullConsumer("lagging", namesrv=at, begin="earliest", pull_record_count_max=PULL_COUNT) as consumer:
            consumer.subscribe(TOPIC)
            bodies = take(consumer, COUNT // 2)
            assert given_out(slave) > 0
            slave.kill()
            assert bodies + take(consumer, COUNT // 2) == BODIES
            assert given_out(master) > PULL_COUNT


def test_a_consumer_of_coroutines_does_the_same(tmp_path: Path) -> None:
    with cluster(tmp_path) as (namesrv, master, slave):

        async def read() -> list[bytes]:
            bodies: list[bytes] = []
            at = str(namesrv.remoting)
            async with AsyncPullConsumer("lagging", namesrv=at, begin="earliest", pull_record_count_max=PULL_COUNT) as consumer:
                await consumer.subscribe(TOPIC)
                async with asyncio.timeout(PATIENCE_S):
                    while len(bodies) < COUNT:
                        bodies += [message.body for message in await consumer.poll(0.2)]
            return bodies

        assert asyncio.run(read()) == BODIES
        assert (given_out(master), given_out(slave)) == (PULL_COUNT, COUNT - PULL_COUNT)
