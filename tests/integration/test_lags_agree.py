"""The lag of a group is one number, whoever is asked: the metric, each command, Admin. Also where it has touched few of the queues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from protomq import Admin, Producer, PullConsumer, PushConsumer, SimpleConsumer
from tests.integration.test_metrics import scrape
from tests.support.cli import jsonl, run
from tests.support.ha_brokers import HaBroker, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import wait_for

QUEUES = 4
SENT = 50
"""Messages in each queue."""


def pull(namesrv: str) -> None:
    """Touches one queue of broker a."""
    with PullConsumer("g", namesrv=namesrv, auto_commit=False) as consumer:
        queue = next(each for each in consumer.queues("t") if each.broker_name == "a")
        consumer.assign([queue])
        count = 0
        while count < 20:
            count += len(consumer.poll(timeout_s=5, max_messages=20 - count))
        consumer.commit()


def push(namesrv: str) -> None:
    """Touches the queues in which there are messages by now."""
    done: list[bytes] = []
    consumer = PushConsumer("g", namesrv=namesrv)
    consumer.subscribe("t", lambda message: done.append(message.body))
    consumer.start()
    wait_for(lambda: len(done) == 20)
    consumer.stop()


def pop(namesrv: str) -> None:
    """Touches as few queues as one call does."""
    with SimpleConsumer("g", namesrv=namesrv) as consumer:
        done = 0
        while done < 20:
            messages = consumer.receive("t", 20 - done, invisible_s=600, hold_s=5)
            consumer.ack(messages)
            done += len(messages)


@pytest.mark.parametrize("consume", [pull, push, pop])
def test_all_say_the_same_lag(tmp_path: Path, consume: Callable[[str], None]) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        made = {
            name: HaBroker(tmp_path / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv], metrics={"listen": "127.0.0.1:0"})
            for name in "ab"
        }
        with running(*made.values()), Admin(namesrv=namesrv) as admin, Producer(namesrv=namesrv) as producer:
            wait_for(lambda: len(admin.cluster_info()) == 2)
            admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
            wait_for(lambda: len(producer.queues("t")) == 2 * QUEUES)

            def fill(*, first: bool) -> None:
                for queue in producer.queues("t"):
                    is_first = queue.broker_name == "a" and queue.queue_id == 0
                    for _ in range((20 if is_first else 0) if first else (SENT - 20 if is_first else SENT)):
                        producer.send("t", b"", queue=queue)

            fill(first=True)
            if consume is push:
                consume(namesrv)
            fill(first=False)
            if consume is not push:
                consume(namesrv)
            lag = 2 * QUEUES * SENT - 20
            for command in (["list", "-t", "t"], ["offsets", "g", "t"], ["lag", "g", "--topic", "t"], ["lag", "g"]):
                rows = jsonl(run("group", *command, "-o", "jsonl", namesrv=namesrv))
                assert sum(cast(int, row["lag"]) for row in rows if row.get("topic", "t") == "t") == lag, command
            assert sum(each.lag for each in admin.group_lag("g") if each.queue.topic == "t") == lag
            # The other broker does not know the group, perhaps: it has done nothing there.
            numbers = scrape(made["a"].metrics_address)
            shown = [value for key, value in numbers.items() if key[:3] == ("protomq_group_lag_records", "g", "t")]
            assert len(shown) == QUEUES
            assert sum(shown) == sum(each.lag for each in admin.group_lag("g", "t", brokers=["a"]))
