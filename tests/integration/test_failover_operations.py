"""What an operator has begun goes on where the lead changes: a drain, and backups."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protomq_broker.store.start.settings import RESTORED_SLAVE_NAME
from tests.support.cli import PROTOMQ, environment_with, run, run_process
from tests.support.elected_brokers import CountingProducer, elected_cluster, read_all
from tests.support.ha_brokers import NAME, HaBroker, running
from tests.support.load import Load
from tests.support.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
ELECTION = {"lease_ttl_ms": 2_000, "renew_interval_ms": 500}
DELAY_S = 15


def test_a_drain_goes_on_at_the_next_master(tmp_path: Path) -> None:
    """A delayed message and a group that has not begun keep the drain waiting until the master has been killed."""
    with elected_cluster(tmp_path, count=2, election=ELECTION) as cluster:
        namesrv = cluster.namesrv
        other = HaBroker(tmp_path / "other", "ASYNC_MASTER", 0, broker_name="other", namesrv=[namesrv])
        with running(other), ThreadPoolExecutor(1) as operator:
            wait_for(lambda: "other" in run("cluster", "list", namesrv=namesrv).stdout, PATIENCE_S)
            run("topic", "create", "t", "-q", "2", namesrv=namesrv)
            run("group", "commit", "g", "t", "-O", "start", namesrv=namesrv)
            run("group", "commit", "g", "flights", "-O", "end", namesrv=namesrv)
            run("send", "t", "later", "-b", NAME, "--delay", f"{DELAY_S}s", namesrv=namesrv)
            with Load(namesrv, "t", "g", consumes=False) as load:
                wait_for(lambda: load.brokers_of_last(20) == {NAME, "other"}, PATIENCE_S)
                drain = operator.submit(run_process, "cluster", "drain", NAME, "--wait", "2m", "-o", "jsonl", namesrv=namesrv)
                wait_for(lambda: load.brokers_of_last(20) == {"other"}, PATIENCE_S)
                assert not drain.done()
                old = cluster.wait_leading(2)
                old.kill()
                new = cluster.wait_leading(1)
                assert new is not old
                load.begin_to_consume()
                found = json.loads(drain.result(2 * PATIENCE_S).stdout.splitlines()[-1])
                assert found["may_be_removed"] is True
                old.start()
                load.wait_for_more(40)
                assert load.brokers_of_last(20) == {"other"}
                load.stop_sending()
                load.wait_until_consumed()
            load.check()
            assert load.failures == []


@pytest.mark.parametrize("silent", ["slave", "master", "dead master"])
def test_a_drain_begins_while_a_member_does_not_answer(silent: str, tmp_path: Path) -> None:
    """A silent slave is named; a silent master is asked until another one leads."""
    with elected_cluster(tmp_path, election=ELECTION) as cluster:
        master = cluster.wait_leading(3)
        run("group", "commit", "g", "flights", "-O", "end", namesrv=cluster.namesrv)
        victim = next(each for each in cluster.brokers if each is not master) if silent == "slave" else master
        if silent == "dead master":
            victim.kill()
        else:
            victim.process.send_signal(signal.SIGSTOP)
        command = [*PROTOMQ, "cluster", "drain", NAME, "--wait", "2m", "--timeout", "1s", "-o", "jsonl"]
        told = tmp_path / "told"
        with told.open("w") as err:
            drain = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=environment_with(cluster.namesrv))
        try:
            if silent == "slave":
                wait_for(lambda: drain.poll() is not None or f"its slave {NAME}/" in told.read_text(), PATIENCE_S)
                victim.process.send_signal(signal.SIGCONT)
            out, _ = drain.communicate(timeout=3 * PATIENCE_S)
        finally:
            drain.kill()
        assert drain.returncode == 0, told.read_text()
        assert json.loads(out)["may_be_removed"] is True
        # That a master has died may be known before the drain begins.
        assert silent != "master" or "asked again, since it did not answer" in told.read_text()


def test_backups_go_on_at_the_next_master(tmp_path: Path) -> None:
    """The next run copies only what is new, also where the log of another member has it; a restored store has all of it."""
    kept, restored = tmp_path / "kept", tmp_path / "restored"
    with elected_cluster(tmp_path, count=2, election=ELECTION) as cluster:

        def backup() -> dict[str, int]:
            found: dict[str, int] = json.loads(run("backup", str(kept), "--broker", NAME, "-o", "jsonl", namesrv=cluster.namesrv).stdout)
            return found

        with CountingProducer(cluster.namesrv) as producer:
            producer.wait_for_more(100)
            first = backup()
            old = cluster.wait_leading(2)
            old.kill()
            producer.wait_for_more(100)
            second = backup()
            assert second["copied_bytes"] == second["end_position"] - first["end_position"] > 0
            old.start()
            new = cluster.wait_leading(2)
            assert new is not old
            run("ha", "switch", NAME, namesrv=cluster.namesrv)
            producer.wait_for_more(100)
        end = cluster.wait_leading(2).status().end_position
        wait_for(lambda: cluster.wait_leading(2).status().flushed_position >= end, PATIENCE_S)
        third = backup()
        assert third["copied_bytes"] == third["end_position"] - second["end_position"] > 0
        assert third["end_position"] >= end
        assert not producer.failures
    run("log", "verify", str(kept))
    run("restore", str(kept), str(restored))
    broker = HaBroker(restored, "ASYNC_MASTER", 0)
    with running(broker):
        producer.check(read_all(broker)[1:])


def test_a_lost_member_is_restored_as_a_slave_and_fetches_only_what_is_newer(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with elected_cluster(tmp_path, count=2, election=ELECTION) as cluster, CountingProducer(cluster.namesrv) as producer:
        producer.wait_for_more(100)
        copied = json.loads(run("backup", str(kept), "--broker", NAME, "-o", "jsonl", namesrv=cluster.namesrv).stdout)
        master = cluster.wait_leading(2)
        lost = next(each for each in cluster.brokers if each is not master)
        lost.stop()
        shutil.rmtree(lost.folder)
        run("restore", str(kept), str(lost.folder), "--slave")
        assert (lost.folder / RESTORED_SLAVE_NAME).exists()
        producer.wait_for_more(100)
        lost.start()
        assert cluster.wait_leading(2) is master
        assert f"follows from position {copied['end_position']} " in master.log_text()
        assert not (lost.folder / RESTORED_SLAVE_NAME).exists()
        run("ha", "switch", NAME, namesrv=cluster.namesrv)
        producer.wait_for_more(20)
        assert cluster.wait_leading(2) is lost
        assert not producer.failures
