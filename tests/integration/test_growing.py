"""A cluster grows and its parts are replaced under load: nothing acknowledged is missed, queues keep their order, repeats are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from protomq import Admin, PullConsumer
from tests.support.cli import run
from tests.support.ha_brokers import NAME, HaBroker, pair, running
from tests.support.load import Load
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for

TOPIC = "t"


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    with running_namesrv() as server:
        yield str(server.remoting)


@contextmanager
def brokers(folder: Path, namesrv: str, *names: str) -> Iterator[list[HaBroker]]:
    """Masters of these names, which the name server knows."""
    made = [HaBroker(folder / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv]) for name in names]
    with running(*made):
        wait_for(lambda: set(names) <= known(namesrv), PATIENCE_S)
        try:
            yield made
        finally:
            for broker in made:
                broker.kill()
            wait_for(lambda: not known(namesrv) & set(names), PATIENCE_S)
            for name in names:
                run("cluster", "forget", name, namesrv=namesrv)


def known(namesrv: str) -> set[str]:
    with Admin(namesrv=namesrv) as admin:
        return {each.broker_name for each in admin.cluster_info()}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_broker_is_added_under_load_and_gets_topics_groups_and_settings(
    namesrv: str, tmp_path: Path
) -> None:
    with brokers(tmp_path, namesrv, "a"):
        run("topic", "create", TOPIC, "-q", "2", namesrv=namesrv)
        run("group", "set", "g", "--retries", "3", namesrv=namesrv)
        # Of a group whose members are away while the broker is added, and which begin at the end where nothing is known.
        run("group", "commit", "away", TOPIC, "-O", "end", namesrv=namesrv)
        with Load(namesrv, TOPIC, "g") as load:
            load.wait_for_more(50)
            with brokers(tmp_path, namesrv, "c"):
                assert load.brokers_of_last(20) == {"a"}
                rows = [json.loads(line) for line in run("cluster", "spread", "c", "-o", "jsonl", namesrv=namesrv).stdout.splitlines()]
                assert [(row["topic"], row["write_queues"], row["is_new"]) for row in rows] == [(TOPIC, 2, True)]
                assert sorted(rows[0]["groups"]) == ["away", "g"]
                wait_for(lambda: load.brokers_of_last(20) == {"a", "c"}, PATIENCE_S)
                again = json.loads(run("cluster", "spread", "c", "-o", "jsonl", namesrv=namesrv).stdout)
                assert (again["is_new"], again["groups"]) == (False, [])
                load.wait_for_more(50)
                load.stop_sending()
                load.wait_until_consumed()
                with Admin(namesrv=namesrv) as admin:
                    assert set(admin.list_group_settings()) == {"g"}
                    assert {each.queue.broker_name for each in admin.group_lag("away", TOPIC)} == {"a", "c"}
                with PullConsumer("away", namesrv=namesrv, begin="latest") as consumer:
                    consumer.subscribe(TOPIC)
                    sent_to_c = load.bodies_of("c")
                    assert sent_to_c
                    late: set[bytes] = set()

                    def poll() -> bool:
                        late.update(message.body for message in consumer.poll(0.2))
                        return sent_to_c <= late

                    wait_for(poll, PATIENCE_S)
                # What has grown shrinks again.
                run("cluster", "drain", "c", "--wait", "60s", namesrv=namesrv)
        load.check()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_cannot_be_spread_is_refused(namesrv: str, tmp_path: Path) -> None:
    with brokers(tmp_path, namesrv, "a", "c"):
        assert "no broker x is registered" in run("cluster", "spread", "x", namesrv=namesrv, code=4).stderr
        assert "no other broker has the topic" in run("cluster", "spread", "c", "-t", "nothing", namesrv=namesrv, code=4).stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_name_servers_are_replaced_one_by_one_under_load(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(running_namesrv()) for _ in range(2)]
        places = [str(server.remoting) for server in servers]
        both = ";".join(places)
        broker = HaBroker(tmp_path / "a", "ASYNC_MASTER", 0, broker_name="a", namesrv=places)
        stack.enter_context(running(broker))
        run("cluster", "namesrv", "--wait", "60s", namesrv=both)
        run("topic", "create", TOPIC, "-q", "2", namesrv=both)
        with Load(both, TOPIC, "g") as load:
            for number, old in enumerate(servers):
                load.wait_for_more(30)
                old.process.kill()
                old.process.wait()
                gone = run("cluster", "namesrv", "-o", "jsonl", namesrv=both, code=7).stdout
                assert [bool(json.loads(line)["problem"]) for line in gone.splitlines()] == [number == 0, number == 1]
                load.wait_for_more(30)
                # The new one knows nothing, has the old one's address, and learns from the brokers.
                stack.enter_context(running_namesrv(old.grpc.port, old.remoting.port))
                rows = run("cluster", "namesrv", "--wait", "60s", "-o", "jsonl", namesrv=both).stdout
                assert [json.loads(line)["brokers"] for line in rows.splitlines()] == [1, 1]
            load.wait_for_more(30)
            load.stop_sending()
            load.wait_until_consumed()
        load.check()
        assert load.failures == []
        assert known(places[0]) == known(places[1]) == {"a"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_replica_is_replaced_by_an_empty_one_under_load(tmp_path: Path) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        master, slave = pair(tmp_path, "SYNC_MASTER", namesrv=[namesrv])
        new = HaBroker(tmp_path / "new", "SLAVE", 1, ha={"heartbeat_interval_ms": 300, "timeout_ms": 3_000}, namesrv=[namesrv])
        with running(master, slave):
            try:
                run("ha", "wait", NAME, "--copies", "2", "--wait", "60s", namesrv=namesrv)
                run("topic", "create", TOPIC, "-q", "2", namesrv=namesrv)
                with Load(namesrv, TOPIC, "g") as load:
                    load.wait_for_more(50)
                    assert slave.stop() == 0
                    behind = run("ha", "wait", NAME, "--copies", "2", "--wait", "0s", namesrv=namesrv, code=6)
                    assert "NOT_IN_SYNC" in behind.stderr or "1 of 2" in behind.stderr
                    load.wait_for_more(50)
                    new.start()
                    run("ha", "wait", NAME, "--copies", "2", "--wait", "60s", namesrv=namesrv)
                    load.wait_for_more(50)
                    load.stop_sending()
                    load.wait_until_consumed()
                load.check()
                new.wait_for_all_of(master)
                end = master.status().end_position
                assert new.log_bytes(end) == master.log_bytes(end)
            finally:
                new.kill()
