"""Filter modules are at masters and slaves: whoever leads next filters by them, and a slave that lacks them takes them from its master."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq import Admin, PullConsumer, SimpleConsumer
from protomq.errors import PartialResultError
from tests.support.cli import jsonl, run
from tests.support.ha_brokers import NAME, TOPIC, HaBroker, pair, running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for
from tests.support.wasm_modules import LATE, OTHERS


class Pair:
    """A name server, a master, and its slave, which finds it there."""

    def __init__(self, namesrv: str, master: HaBroker, slave: HaBroker) -> None:
        self.namesrv = namesrv
        self.master = master
        self.slave = slave
        self.admin = Admin(namesrv=namesrv)

    def connect_anew(self) -> None:
        """The connections to brokers that have stopped are broken."""
        self.admin.close()
        self.admin = Admin(namesrv=self.namesrv)

    def ids(self) -> list[int]:
        """Of the brokers that the name server knows."""
        return [broker.broker_id for broker in self.admin.cluster_info()]

    def modules(self, label: str) -> dict[str, int]:
        """Sizes of a broker's modules by name. A broker that is gone may be registered for a moment, and one that starts not yet."""
        try:
            found = self.admin.list_filters()
        except PartialResultError as error:
            found = error.result
        return {module.name: module.size_bytes for module in found.get(label, [])}

    def wait_for(self, label: str, *names: str) -> None:
        """Until that broker has exactly these modules."""
        wait_for(lambda: sorted(self.modules(label)) == sorted(names), PATIENCE_S)

    def pulled(self, count: int) -> list[bytes]:
        """What a reader gets by the module."""
        with PullConsumer(namesrv=self.namesrv, begin="earliest") as consumer:
            consumer.subscribe(TOPIC, module="late")
            bodies: list[bytes] = []

            def read() -> int:
                bodies.extend(message.body for message in consumer.poll(0.2))
                return len(bodies)

            wait_for(lambda: read() >= count, PATIENCE_S)
            return sorted(bodies)

    def popped(self, count: int) -> list[bytes]:
        """What a group that pops gets by the module."""
        bodies: list[bytes] = []
        with SimpleConsumer("g", namesrv=self.namesrv) as consumer:
            while len(bodies) < count:
                messages = consumer.receive(TOPIC, module="late", hold_s=1)
                consumer.ack(messages)
                bodies += [message.body for message in messages]
        return sorted(bodies)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Pair]:
    with running_namesrv() as namesrv:
        address = str(namesrv.remoting)
        master, slave = pair(tmp_path, namesrv=[address])
        with running(master, slave):
            made = Pair(address, master, slave)
            master.send_ok(b"late 1", b"early", b"late 2")
            slave.wait_for_all_of(master)
            wait_for(lambda: made.ids() == [0, 1], PATIENCE_S)
            yield made
            made.admin.close()


def test_who_leads_next_filters_by_the_modules(brokers: Pair) -> None:
    """Deployed at both, the master killed, its slave made the master; then the killed one comes back, emptied, as a slave."""
    old, new = brokers.master, brokers.slave
    assert brokers.admin.deploy_filter("late", LATE) == [NAME, f"{NAME}/1"]
    assert brokers.modules(NAME) == brokers.modules(f"{NAME}/1") == {"late": len(LATE)}
    old.kill()
    wait_for(lambda: brokers.ids() == [1], PATIENCE_S)
    assert brokers.pulled(2) == [b"late 1", b"late 2"], "a slave serves readers while its master is away"
    assert new.stop() == 0
    new.configure(broker_role="ASYNC_MASTER", broker_id=0)
    new.start()
    wait_for(lambda: brokers.ids() == [0], PATIENCE_S)
    assert brokers.pulled(2) == [b"late 1", b"late 2"]
    assert brokers.popped(2) == [b"late 1", b"late 2"]
    shutil.rmtree(old.folder)
    old.configure(broker_role="SLAVE", broker_id=1)
    old.start()
    brokers.wait_for(f"{NAME}/1", "late")
    assert "filter module late came from the master" in old.log_text()


def test_a_slave_that_was_away_has_what_its_master_has_when_it_is_back(brokers: Pair) -> None:
    label = f"{NAME}/1"
    brokers.admin.deploy_filter("late", LATE)
    brokers.admin.deploy_filter("gone", LATE)
    # A session begins with a look: the slave learns that both are the master's.
    assert brokers.slave.stop() == 0
    brokers.slave.start()
    wait_for(lambda: "gone" in _known(brokers.slave), PATIENCE_S)
    assert brokers.slave.stop() == 0
    wait_for(lambda: brokers.ids() == [0], PATIENCE_S)
    assert brokers.admin.deploy_filter("new", LATE) == [NAME]
    assert brokers.admin.deploy_filter("late", OTHERS) == [NAME]
    assert brokers.admin.delete_filter("gone") == [NAME]
    brokers.slave.start()
    brokers.wait_for(label, "late", "new")
    assert brokers.modules(label) == {"late": len(OTHERS), "new": len(LATE)}
    assert brokers.pulled(1) == [b"early"]


def test_who_has_led_keeps_what_was_deployed_at_it_when_it_follows_again(brokers: Pair) -> None:
    """What it knew of its master from before it led is out of date: the module is another deployment, with the same bytes."""
    first, second = brokers.master, brokers.slave
    brokers.admin.deploy_filter("late", LATE)
    assert second.stop() == 0
    second.start()
    wait_for(lambda: "late" in _known(second), PATIENCE_S)
    assert second.stop() == 0
    wait_for(lambda: brokers.ids() == [0], PATIENCE_S)
    assert brokers.admin.delete_filter("late") == [NAME]
    assert first.stop() == 0
    second.configure(broker_role="ASYNC_MASTER", broker_id=0)
    second.start()
    wait_for(lambda: brokers.ids() == [0], PATIENCE_S)
    assert _known(second) == ""
    brokers.connect_anew()
    assert brokers.admin.deploy_filter("late", LATE) == [NAME]
    assert second.stop() == 0
    first.start()
    second.configure(broker_role="SLAVE", broker_id=1)
    second.start()
    # The first look says that the two have no module in common.
    wait_for(lambda: '"modules": {}' in _known(second), PATIENCE_S)
    brokers.connect_anew()
    assert brokers.modules(f"{NAME}/1") == {"late": len(LATE)}
    assert brokers.modules(NAME) == {}


def test_without_a_master_a_deployment_is_not_whole(brokers: Pair) -> None:
    brokers.master.kill()
    wait_for(lambda: brokers.ids() == [1], PATIENCE_S)
    with pytest.raises(PartialResultError, match="no master of pair is registered now") as caught:
        brokers.admin.deploy_filter("late", LATE, brokers=[NAME])
    assert caught.value.result == [f"{NAME}/1"]
    # What never was the master's stays when the master is back, and the list shows it.
    brokers.master.start()
    brokers.slave.wait_for_all_of(brokers.master)
    wait_for(lambda: brokers.ids() == [0, 1], PATIENCE_S)
    rows = jsonl(run("filter", "list", "-o", "jsonl", namesrv=brokers.namesrv))
    assert [(row["broker"], row["broker_id"], row["size_bytes"], row["state"]) for row in rows] == [
        (NAME, 0, None, "missing"), (NAME, 1, len(LATE), ""),
    ]  # fmt: skip


def test_the_command_names_a_slave_that_does_not_answer(brokers: Pair, tmp_path: Path) -> None:
    file = tmp_path / "late.wasm"
    file.write_bytes(LATE)
    done = run("filter", "deploy", "late", str(file), "-o", "jsonl", namesrv=brokers.namesrv)
    assert [(row["broker"], row["broker_id"]) for row in jsonl(done)] == [(NAME, 0), (NAME, 1)]
    brokers.slave.process.send_signal(signal.SIGSTOP)
    try:
        partly = run("filter", "deploy", "late", str(file), "-o", "jsonl", "--timeout", "1s", namesrv=brokers.namesrv, code=7)
    finally:
        brokers.slave.process.send_signal(signal.SIGCONT)
    assert [(row["broker"], row["broker_id"]) for row in jsonl(partly)] == [(NAME, 0)]
    assert f"no answer from {NAME}/1" in partly.stderr
    assert "a slave that is back takes over what its master has" in partly.stderr


def _known(slave: HaBroker) -> str:
    """What the slave knows to be its master's."""
    file = slave.folder / "config" / "filter_copies.json"
    return file.read_text() if file.exists() else ""
