"""A slave that lacks the last commits answers for offsets while its master is away: none of them falls when the master is back (C3)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from protomq import Admin, Message, MessageQueue, PullConsumer, PushConsumer
from protomq.errors import ProtomqError
from tests.support.cli import run
from tests.support.ha_brokers import NAME, TOPIC, HaBroker, pair, running
from tests.support.namesrv import Namesrv, running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

QUEUE = MessageQueue(TOPIC, NAME, 0)
COUNT = 100


class Cluster(NamedTuple):
    """A name server, a master that has 100 messages, and its slave."""

    namesrv: Namesrv
    master: HaBroker
    slave: HaBroker

    @property
    def at(self) -> str:
        return str(self.namesrv.remoting)

    def ids(self) -> list[int]:
        """Of the brokers that the name server knows."""
        with Admin(namesrv=self.at) as admin:
            return [broker.broker_id for broker in admin.cluster_info() if broker.broker_name == NAME]

    def committed(self, group: str) -> int | None:
        """By a consumer that does not consume."""
        with PullConsumer(group, namesrv=self.at, auto_commit=False) as consumer:
            return consumer.committed(QUEUE)

    def commit(self, group: str, queue_offset: int) -> None:
        """As a member that stands there."""
        with PullConsumer(group, namesrv=self.at, auto_commit=False) as consumer:
            consumer.commit({QUEUE: queue_offset})

    def leave_the_slave_alone(self) -> None:
        """It is stopped, and starts when the master is away: what was done meanwhile it does not have."""
        self.master.kill()
        self.slave.start()
        wait_for(lambda: self.ids() == [1], PATIENCE_S)

    def bring_back_the_master(self) -> None:
        self.master.start()
        wait_for(lambda: self.ids() == [0, 1], PATIENCE_S)


@contextmanager
def cluster(folder: Path, role: str = "ASYNC_MASTER") -> Iterator[Cluster]:
    with running_namesrv() as namesrv:
        master, slave = pair(folder, role, namesrv=[str(namesrv.remoting)])
        with running(master, slave):
            slave.wait_for_all_of(master)
            with Admin(namesrv=str(namesrv.remoting)) as admin:
                admin.create_topic(TOPIC, write_queues=1, read_queues=1)
            master.send_ok(*(b"%d" % number for number in range(COUNT)))
            slave.wait_for_all_of(master)
            yield Cluster(namesrv, master, slave)


def take(consumer: PullConsumer, count: int) -> list[int]:
    """The offsets of the next messages."""
    offsets: list[int] = []

    def has_them() -> bool:
        offsets.extend(message.queue_offset for message in consumer.poll(0.2, max_messages=count - len(offsets)))
        return len(offsets) >= count

    wait_for(has_them, PATIENCE_S)
    return offsets


def is_taken(consumer: PullConsumer) -> bool:
    try:
        consumer.commit()
    except ProtomqError:
        return False
    return True


@pytest.mark.parametrize("role", ["SYNC_MASTER", "ASYNC_MASTER"])
def test_no_committed_offset_falls_after_a_slave_that_lacks_it_has_told_an_older_one(
    tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Committed: `g` 50, then 80 (the slave lacks that); `far` 50, then 60; `new` 70, of which the slave knows nothing."""
    with cluster(tmp_path, role) as pair_:
        for group in ("g", "far"):
            pair_.commit(group, 50)
        pair_.slave.wait_for_all_of(pair_.master)
        assert pair_.slave.stop() == 0
        for group, queue_offset in {"g": 80, "far": 60, "new": 70}.items():
            pair_.commit(group, queue_offset)
        pair_.leave_the_slave_alone()
        assert pair_.committed("g") == 50
        assert "what group g has committed is what a slave knows" in caplog.text
        told = run("group", "offsets", "g", TOPIC, namesrv=pair_.at, code=7)
        assert f"no master of {NAME} is registered now, only {NAME}/1" in told.stderr
        with (
            PullConsumer("g", namesrv=pair_.at, auto_commit=False) as behind,
            PullConsumer("far", namesrv=pair_.at, auto_commit=False) as far,
            PullConsumer("new", namesrv=pair_.at, begin="latest", auto_commit=False) as latest,
        ):
            for consumer in (behind, far, latest):
                consumer.subscribe(TOPIC)
            assert take(behind, 10) == [*range(50, 60)], "what comes again while the master is away is no harm"
            assert take(far, 30) == [*range(50, 80)]
            assert latest.poll(0.2) == []
            pair_.bring_back_the_master()
            for consumer in (behind, far, latest):
                wait_for(lambda consumer=consumer: is_taken(consumer), PATIENCE_S)  # type: ignore[misc]
            assert {group: pair_.committed(group) for group in ("g", "far", "new")} == {"g": 80, "far": 80, "new": 70}
            assert take(behind, 20) == [*range(80, COUNT)]
            assert take(latest, 30) == [*range(70, COUNT)], "nothing is skipped either"
            assert is_taken(behind)
        assert pair_.committed("g") == COUNT


def test_consumers_that_commit_by_themselves_go_on_where_the_group_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cluster(tmp_path) as pair_:
        for group in ("pulled", "pushed"):
            pair_.commit(group, 50)
        pair_.slave.wait_for_all_of(pair_.master)
        assert pair_.slave.stop() == 0
        for group in ("pulled", "pushed"):
            pair_.commit(group, 90)
        pair_.leave_the_slave_alone()
        listened: list[int] = []
        goes_on = threading.Event()

        def listen(message: Message) -> None:
            listened.append(message.queue_offset)
            if len(listened) > 10:
                assert goes_on.wait(PATIENCE_S)

        def are_told() -> bool:
            """Each by its first commit at the master, of what it has done; what is committed does not fall meanwhile."""
            assert pulling.poll(0.1) == []
            committed = [pair_.committed(group) for group in ("pulled", "pushed")]
            assert committed == [90, 90]
            return all(f"group {group} began at 50" in caplog.text for group in ("pulled", "pushed"))

        pushing = PushConsumer("pushed", namesrv=pair_.at, concurrency=1, commit_interval_s=0.2, queue_count_max=12)
        pushing.subscribe(TOPIC, listen)
        with pushing, PullConsumer("pulled", namesrv=pair_.at, auto_commit_interval_s=0.2) as pulling:
            pulling.subscribe(TOPIC)
            assert take(pulling, 10) == [*range(50, 60)]
            pulling.pause([QUEUE])
            wait_for(lambda: len(listened) > 10, PATIENCE_S)
            pair_.bring_back_the_master()
            wait_for(are_told, PATIENCE_S)
            goes_on.set()
            pulling.resume([QUEUE])
            assert take(pulling, 10) == [*range(90, COUNT)]
            wait_for(lambda: COUNT - 1 in listened, PATIENCE_S)
        assert [offset for offset in listened if offset >= 90] == [*range(90, COUNT)]
        assert [pair_.committed(group) for group in ("pulled", "pushed")] == [COUNT, COUNT]


def test_a_reset_that_the_slave_lacks_wins(tmp_path: Path) -> None:
    with cluster(tmp_path) as pair_:
        for group in ("forward", "back"):
            pair_.commit(group, 50)
        pair_.slave.wait_for_all_of(pair_.master)
        assert pair_.slave.stop() == 0
        with Admin(namesrv=pair_.at) as admin:
            admin.reset_offsets("forward", TOPIC, 90)
            admin.reset_offsets("back", TOPIC, 20)
        pair_.leave_the_slave_alone()
        with (
            PullConsumer("forward", namesrv=pair_.at, auto_commit=False) as forward,
            PullConsumer("back", namesrv=pair_.at, auto_commit=False) as back,
        ):
            for consumer in (forward, back):
                consumer.subscribe(TOPIC)
                assert take(consumer, 10) == [*range(50, 60)]
            pair_.bring_back_the_master()
            for consumer in (forward, back):
                wait_for(lambda consumer=consumer: is_taken(consumer), PATIENCE_S)  # type: ignore[misc]
            assert {group: pair_.committed(group) for group in ("forward", "back")} == {"forward": 90, "back": 20}
            assert (take(forward, 10), take(back, 10)) == ([*range(90, COUNT)], [*range(20, 30)])
