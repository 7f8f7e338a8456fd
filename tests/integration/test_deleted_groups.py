"""A group that was deleted stays deleted: a real broker, kill -9, and no cache left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from protomq import Admin, MessageQueue, Producer, PullConsumer
from protomq.testing import Broker

CACHES = ("config/consumerOffsets.json", "checkpoint", "consumequeue", "index", "repeatedsends")


def commit(broker: Broker, group: str, topic: str, queue_offset: int) -> None:
    with PullConsumer(group, namesrv=broker.namesrv, auto_commit=False) as consumer:
        (queue,) = consumer.queues(topic)
        consumer.commit({queue: queue_offset})


def committed(broker: Broker, group: str, queue: MessageQueue) -> int | None:
    with PullConsumer(group, namesrv=broker.namesrv, auto_commit=False) as consumer:
        return consumer.committed(queue)


@pytest.mark.slow
def test_a_deleted_group_does_not_come_back_after_kill_9_without_caches(tmp_path: Path) -> None:
    with Broker(data_dir=tmp_path) as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("t", write_queues=1)
        with Producer(namesrv=broker.namesrv) as producer:
            queue = [producer.send("t", b"x").queue for _ in range(3)][-1]
        for group in ("gone", "again", "kept"):
            commit(broker, group, "t", 2)
        with Admin(namesrv=broker.namesrv) as admin:
            for group in ("gone", "again"):
                admin.delete_group(group)
        commit(broker, "again", "t", 1)

        for lost in ((), CACHES):
            broker.kill()
            for name in lost:
                path = tmp_path / "store" / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            broker.start()
            with Admin(namesrv=broker.namesrv) as admin:
                assert [group.name for group in admin.list_groups()] == ["again", "kept"]
            found = [committed(broker, group, queue) for group in ("gone", "again", "kept")]
            assert found == [None, 1, 2]
