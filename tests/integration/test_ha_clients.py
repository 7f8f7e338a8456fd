"""Clients of a master and its slave, by the name server: they write to the one, read from the other while it is away, and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from protomq import Admin, Producer, PullConsumer
from protomq.calls import Calls
from protomq.errors import ProtomqError
from tests.support.cli import run
from tests.support.ha_brokers import NAME, TOPIC, HaBroker, pair, running
from tests.support.namesrv import Namesrv, running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for


class Cluster(NamedTuple):
    """A name server, a master and its slave, which has found it there."""

    namesrv: Namesrv
    master: HaBroker
    slave: HaBroker

    def ids(self) -> list[int]:
        """Of the brokers that the name server knows."""
        with Admin(namesrv=str(self.namesrv.remoting)) as admin:
            return [broker.broker_id for broker in admin.cluster_info() if broker.broker_name == NAME]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_namesrv() as namesrv:
        addresses = [str(namesrv.remoting)]
        master, slave = pair(tmp_path_factory.mktemp("cluster"), namesrv=addresses)
        with running(master, slave):
            slave.wait_for_all_of(master)
            yield Cluster(namesrv, master, slave)


def test_the_route_has_both_and_sends_go_to_the_master(cluster: Cluster) -> None:
    wait_for(lambda: cluster.ids() == [0, 1], PATIENCE_S)
    with Producer(namesrv=str(cluster.namesrv.remoting)) as producer:
        for number in range(8):
            result = producer.send(TOPIC, b"%d" % number)
            assert result.queue.broker_name == NAME
    cluster.slave.wait_for_all_of(cluster.master)
    assert cluster.slave.status().master_address == cluster.master.address.remoting_address


def test_a_consumer_reads_from_the_slave_and_returns(cluster: Cluster) -> None:
    namesrv = str(cluster.namesrv.remoting)
    with Producer(namesrv=namesrv) as producer:
        for number in range(20):
            producer.send(TOPIC, b"before %d" % number)
    cluster.slave.wait_for_all_of(cluster.master)
    cluster.master.kill()
    wait_for(lambda: cluster.ids() == [1], PATIENCE_S)
    # A slave that starts again while its master is away serves what it knows to be confirmed.
    assert cluster.slave.stop() == 0
    cluster.slave.start()
    wait_for(lambda: cluster.ids() == [1], PATIENCE_S)
    with PullConsumer("readers", namesrv=namesrv, begin="earliest", auto_commit=False) as consumer:
        consumer.subscribe(TOPIC)
        bodies: set[bytes] = set()

        def read() -> set[bytes]:
            bodies.update(message.body for message in consumer.poll(0.2))
            return bodies

        wanted = {b"before %d" % number for number in range(20)}
        wait_for(lambda: wanted <= read(), PATIENCE_S)
        with pytest.raises(ProtomqError) as refused:
            consumer.commit()
        assert refused.value.retriable
        cluster.master.start()
        wait_for(lambda: cluster.ids() == [0, 1], PATIENCE_S)
        with Producer(namesrv=namesrv) as producer:
            producer.send(TOPIC, b"after")
        wait_for(lambda: b"after" in read(), PATIENCE_S)
        # What was pending is committed at the master, without anything being consumed again.
        wait_for(lambda: is_committed(consumer), PATIENCE_S)
    with PullConsumer("readers", namesrv=namesrv, begin="earliest") as again:
        again.subscribe(TOPIC)
        assert again.poll(0.5) == []
    cluster.slave.wait_for_all_of(cluster.master)
    assert cluster.slave.log_bytes(1 << 20) == cluster.master.log_bytes(1 << 20)


def test_a_topic_that_was_made_a_moment_ago_is_at_the_slave_as_soon_as_its_master_is_away(tmp_path: Path) -> None:
    # The default intervals: no heartbeat of the slave, and no end of its hold, says by chance what topics it has.
    with running_namesrv(hold=10_000) as namesrv:
        master, slave = pair(tmp_path, namesrv=[str(namesrv.remoting)], register_interval_ms=30_000)
        with running(master, slave), Producer(namesrv=str(namesrv.remoting)) as producer:
            slave.wait_for_all_of(master)
            with Admin(namesrv=str(namesrv.remoting)) as admin:
                admin.create_topic("newest", write_queues=1, read_queues=1)
            producer.send("newest", b"first")
            slave.wait_for_all_of(master)
            master.kill()
            with Calls(namesrv=str(namesrv.remoting)) as calls:

                def is_at_slave() -> bool:
                    """Raises TopicNotFoundError where the name server knows nobody who has it: neither before nor after the change."""
                    calls.forget_route("newest")
                    return calls.route("newest").leaderless_brokers == (NAME,)

                wait_for(is_at_slave, PATIENCE_S)
            # A producer waits for the next master.
            with ThreadPoolExecutor() as sender:
                sent = sender.submit(producer.send, "newest", b"second", timeout_s=PATIENCE_S)
                master.start()
                assert sent.result(PATIENCE_S).queue_offset == 1


def is_committed(consumer: PullConsumer) -> bool:
    try:
        consumer.commit()
    except ProtomqError:
        return False
    return True


def test_the_command_line_says_how_replication_stands(cluster: Cluster) -> None:
    cluster.slave.wait_for_all_of(cluster.master)
    wait_for(lambda: cluster.ids() == [0, 1], PATIENCE_S)
    namesrv = str(cluster.namesrv.remoting)
    output = run("ha", "status", "-o", "jsonl", namesrv=namesrv).stdout
    master, slave = map(json.loads, output.splitlines())
    assert (master["role"], master["broker_id"], slave["role"], slave["broker_id"]) == ("ASYNC_MASTER", 0, "SLAVE", 1)
    assert master["end_position"] == slave["end_position"] == slave["confirmed_position"]
    assert [(each["broker_id"], each["lag_bytes"]) for each in master["replicas"]] == [(1, 0)]
    assert slave["master_address"] == cluster.master.address.remoting_address
    assert (slave["lag_bytes"], slave["problem"]) == (0, "")
    table = run("ha", "status", "--broker", NAME, namesrv=namesrv).stdout
    assert "ASYNC_MASTER" in table
    assert "SLAVE" in table
    assert "no broker of that name" in run("ha", "status", "-b", "other", namesrv=namesrv, code=4).stderr


def test_while_the_master_is_away_the_command_line_shows_what_its_slave_has_and_says_so(cluster: Cluster) -> None:
    wait_for(lambda: cluster.ids() == [0, 1], PATIENCE_S)
    namesrv = str(cluster.namesrv.remoting)
    run("send", TOPIC, "x", "-k", "k1", namesrv=namesrv)
    run("group", "set", "shown", "--retries", "3", namesrv=namesrv)
    run("group", "commit", "shown", TOPIC, "-O", "start", namesrv=namesrv)
    cluster.slave.wait_for_all_of(cluster.master)
    shown = {
        command: run(*command, "-o", "jsonl", namesrv=namesrv).stdout
        for command in (
            ("topic", "list"),
            ("topic", "describe", TOPIC),
            ("group", "list"),
            ("group", "show", "shown"),
            ("group", "offsets", "shown", TOPIC),
            ("message", "query", TOPIC, "--key", "k1"),
            ("dlq", "list"),
        )
    }
    cluster.master.kill()
    wait_for(lambda: cluster.ids() == [1], PATIENCE_S)
    for command, before in shown.items():
        now = run(*command, "-o", "jsonl", namesrv=namesrv, code=7)
        assert now.stdout == before, command
        assert f"no answer from {NAME} (no master of {NAME} is registered now, only {NAME}/1: " in now.stderr, command
    for only in ((), ("-b", NAME)):
        status = run("ha", "status", *only, "-o", "jsonl", namesrv=namesrv, code=7)
        assert [json.loads(line)["broker_id"] for line in status.stdout.splitlines()] == [1]
        assert f"no answer from {NAME} (no master of {NAME} is registered now, only {NAME}/1: " in status.stderr
    assert "nobody leads" in run("ha", "wait", NAME, "-c", "1", "--wait", "0s", namesrv=namesrv, code=6).stderr
    lag = run("group", "lag", "shown", "-b", NAME, "-o", "jsonl", namesrv=namesrv, code=7)
    assert sum(json.loads(line)["lag"] for line in lag.stdout.splitlines()) > 0
    with PullConsumer("shown", client_id="watcher", auto_commit=False, namesrv=namesrv) as consumer:
        consumer.subscribe(TOPIC)
        consumer.poll(0.1)
        members = run("group", "members", "shown", "-o", "jsonl", namesrv=namesrv, code=7)
    assert json.loads(members.stdout)["member"] == "watcher"
    # A slave changes nothing, and what each master does now only it can say.
    for refused in (("topic", "create", "new"), ("topic", "create", "new", "-b", NAME), ("cluster", "status")):
        error = run(*refused, namesrv=namesrv, code=3).stderr
        assert f"no master of {NAME} is registered now, only {NAME}/1" in error, refused
    cluster.master.start()
    wait_for(lambda: cluster.ids() == [0, 1], PATIENCE_S)
    assert run("group", "show", "shown", "-o", "jsonl", namesrv=namesrv).stdout == shown["group", "show", "shown"]


@pytest.mark.parametrize(
    ("role", "settings"),
    [("SLAVE", {}), ("SYNC_MASTER", {"etcd": {"endpoints": ["http://127.0.0.1:1"]}})],
    ids=["follows", "is elected"],
)
def test_a_broker_with_another_cluster_than_its_name_has_does_not_start(
    tmp_path: Path, role: str, settings: dict[str, Any]
) -> None:
    with running_namesrv() as namesrv:
        addresses = [str(namesrv.remoting)]
        master = HaBroker(tmp_path / "master", "ASYNC_MASTER", 0, namesrv=addresses)
        stray = HaBroker(tmp_path / "stray", role, 1, namesrv=addresses, cluster="other", **settings)
        with running(master):
            assert stray.exit_of_start() == 6
            assert "this one has cluster 'other'. Give it the same cluster" in stray.log_text()
            assert not master.status().replicas
