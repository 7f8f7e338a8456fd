"""A cluster gets another version, one broker after the other, under load, and the version before again: docs/operations.md.

The version before is a commit of this repository; its brokers and one load run from their own tree, in the environment of this one. The
name server, the command line and the other clients are of this version all the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from protomq import (
    Admin,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    SimpleConsumer,
    TransactionDecision,
    TransactionProducer,
)
from tests.support.cli import run
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, TOPIC, HaBroker
from tests.support.load import Load
from tests.support.polling import polled
from tests.support.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "076be67"
"""The commit that stands for the version before: the last one without locks of queues, whose records it does not know."""
PACKAGES = ("clients/python", "services/runtime", "services/namesrv", "services/ha", "services/broker", "cli")
THIS_VERSION: Mapping[str, str] = {}
HOUR_S = 3_600
LATER_S = (0.0, 10.0, 25.0)
"""Delays: due before the brokers change, while they do, and behind that."""
TOPICS = ("later", "bookings", "parcels", "orders")


def version_before(folder: Path) -> dict[str, str]:
    """Its environment, behind its tree."""
    archive = folder.with_suffix(".tar")
    command = ["git", "archive", "--format=tar", f"--output={archive}", BEFORE, *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}: this needs the history: git fetch --unshallow"
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return {"PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES)}


def restart(cluster: ElectedCluster, broker: HaBroker, environment: Mapping[str, str]) -> None:
    """With another version, when all are in sync; until all are in sync again."""
    assert broker.stop() == 0
    broker.environment = environment
    broker.start()
    run("ha", "wait", NAME, "--copies", "3", "--wait", "60s", namesrv=cluster.namesrv)


def roll(cluster: ElectedCluster, environment: Mapping[str, str]) -> None:
    """Those that follow first, then the master, which has given the lead away."""
    master = cluster.wait_leading()
    for broker in cluster.brokers:
        if broker is not master:
            restart(cluster, broker, environment)
    run("ha", "switch", NAME, namesrv=cluster.namesrv)
    wait_for(lambda: cluster.leading(copies=3) not in (None, master), PATIENCE_S)
    restart(cluster, master, environment)


def runs_from(broker: HaBroker, folder: Path) -> bool:
    """Whether its process has its modules from there."""
    environment = Path(f"/proc/{broker.process.pid}/environ").read_bytes()
    return str(folder).encode() in environment


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_rolling_restart_shows_callers_no_error(tmp_path: Path) -> None:
    with elected_cluster(tmp_path) as cluster:
        with Load(cluster.namesrv, TOPIC, "g") as load:
            load.wait_for_more(50)
            roll(cluster, THIS_VERSION)
            load.wait_for_more(50)
            load.stop_sending()
            load.wait_until_consumed()
        load.check()
        print(f"{len(load.acknowledged)} messages, {load.repeats} of them consumed again, {len(load.failures)} sends failed")
        assert not load.failures, load.failures[:5]


@contextmanager
def load_of(environment: Mapping[str, str], namesrv: str) -> Iterator[subprocess.Popen[str]]:
    """A load by the SDK of that version; killed at the end."""
    command = [sys.executable, "-m", "tests.support.load_process", namesrv, "old-clients", "old"]
    paths = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def found_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a load says when it is told to end."""
    lines = process.communicate(timeout=2 * PATIENCE_S)[0].splitlines()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_an_upgrade_and_a_downgrade_lose_nothing(tmp_path: Path) -> None:
    before = version_before(tmp_path / "before")
    with elected_cluster(tmp_path, environment=before) as cluster:
        run("topic", "create", "old-clients", "-q", "2", namesrv=cluster.namesrv)
        with load_of(before, cluster.namesrv) as old_clients, Load(cluster.namesrv, TOPIC, "g") as load:
            load.wait_for_more(50)
            assert all(runs_from(broker, tmp_path / "before") for broker in cluster.brokers)
            roll(cluster, THIS_VERSION)
            assert not any(runs_from(broker, tmp_path / "before") for broker in cluster.brokers)
            load.wait_for_more(50)
            # What the version before does not know, in the log that it will have to read.
            with PullConsumer("locking", namesrv=cluster.namesrv, begin="earliest", lock_queues=True) as consumer:
                consumer.subscribe(TOPIC)
                wait_for(lambda: consumer.poll(0.2), PATIENCE_S)
                consumer.commit()
            roll(cluster, before)
            assert all(runs_from(broker, tmp_path / "before") for broker in cluster.brokers)
            load.wait_for_more(50)
            load.stop_sending()
            load.wait_until_consumed()
            found = found_by(old_clients)
        load.check()
        assert str(tmp_path / "before") in found["sdk"]
        assert found["acknowledged"] >= 150
        print(f"the version before: {found}")
        print(f"{len(load.acknowledged)} messages, {load.repeats} of them consumed again, {len(load.failures)} sends failed")
        master = cluster.wait_leading()
        end = master.status().end_position
        for broker in cluster.brokers:
            if broker is not master:
                broker.wait_for_all_of(master)
                assert broker.log_bytes(end) == master.log_bytes(end)
    for broker in cluster.brokers:
        run("log", "verify", str(broker.folder))


class Promises:
    """What brokers have promised, and whether they keep it. Each topic has one queue."""

    def __init__(self, namesrv: str, stack: ExitStack) -> None:
        way: dict[str, Any] = {"namesrv": namesrv}
        self._way = way
        self._admin = stack.enter_context(Admin(**way))
        self._producer = stack.enter_context(Producer(send_timeout_s=PATIENCE_S, **way))
        self._popper = stack.enter_context(SimpleConsumer("poppers", request_timeout_s=PATIENCE_S, **way))
        self._group = stack.enter_context(PullConsumer("g", auto_commit=False, request_timeout_s=PATIENCE_S, **way))
        self._desk = stack.enter_context(
            TransactionProducer("desk", lambda check: TransactionDecision.UNKNOWN, topics=["bookings"], send_timeout_s=PATIENCE_S, **way)
        )
        for topic in TOPICS:
            self._admin.create_topic(topic, write_queues=1, read_queues=1)
        self._admin.set_group("g", retry_count_max=2, retry_delays_ms=[20_000, 100])
        for delay_s in LATER_S:
            self._producer.send("later", b"%g" % delay_s, delay=delay_s)
        self._to_recall = self._producer.send("later", b"recalled", delay=HOUR_S)
        self._halves = {name: self._desk.begin("bookings", name.encode()) for name in ("commit", "roll back")}
        for number in range(5):
            self._producer.send("parcels", b"%d" % number)
        done, *self._held = self._popper.receive("parcels", 3, invisible_s=HOUR_S)
        assert len(self._held) == 2
        self._popper.ack(done)
        self._group.assign([MessageQueue("orders", NAME, 0)])
        for body in (b"retried", b"dead"):
            self._producer.send("orders", body)
        retried, dead = self._polled(2)
        self._group.send_back([dead], error="bad", dead_letter=True)
        self._group.send_back([retried], error="not yet")
        self._group.commit()

    def check(self) -> None:
        """All of it, by brokers of another version."""
        assert self._producer.recall("later", self._to_recall.recall_handle)
        assert self._bodies("later", len(LATER_S)) == Counter(b"%g" % delay_s for delay_s in LATER_S)
        self._halves["commit"].commit()
        self._halves["roll back"].roll_back()
        assert self._bodies("bookings", 1) == Counter([b"commit"])
        wait_for(lambda: not self._admin.list_transactions(), PATIENCE_S)
        assert sorted(message.body for message in self._popper.receive("parcels", 6, invisible_s=HOUR_S)) == [b"3", b"4"]
        assert self._popper.ack(self._held) == []
        assert self._admin.get_group("g").retry_count_max == 2
        assert self._group.committed(MessageQueue("orders", NAME, 0)) == 2
        self._group.assign([MessageQueue("%RETRY%g", NAME, 0)])
        self._group.seek_to_begin()
        for attempt in (1, 2):
            (retry,) = self._polled(1)
            assert (retry.body, retry.attempt) == (b"retried", attempt)
            self._group.send_back(retry, error="still not")
        assert self._bodies("%DLQ%g", 2) == Counter([b"dead", b"retried"])

    def _polled(self, count: int) -> list[Message]:
        """At least so many messages, until there are no more."""
        return polled(self._group, count)

    def _bodies(self, topic: str, count: int) -> Counter[bytes]:
        """Of all messages of a topic."""
        with PullConsumer(**self._way) as reader:
            reader.assign([MessageQueue(topic, NAME, 0)])
            reader.seek_to_begin()
            return Counter(message.body for message in polled(reader, count))


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("way", ["upgrade", "downgrade"])
def test_what_was_promised_is_kept_by_another_version(tmp_path: Path, way: str) -> None:
    before = version_before(tmp_path / "before")
    first, then = (before, THIS_VERSION) if way == "upgrade" else (THIS_VERSION, before)
    settings: dict[str, Any] = {"pop_invisible_min_ms": 100, "transaction_timeout_ms": HOUR_S * 1_000}
    with elected_cluster(tmp_path, environment=first, **settings) as cluster, ExitStack() as stack:
        promises = Promises(cluster.namesrv, stack)
        roll(cluster, then)
        promises.check()
