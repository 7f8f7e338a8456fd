"""A cluster gets another version, one broker after the other, under load, and the version before again: docs/operations.md.

The version before is a commit of this repository; its brokers run from their own tree, in the environment of this one. Clients and the
command line are of this version all the time.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from protomq import PullConsumer
from tests.support.cli import run
from tests.support.elected_brokers import ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, TOPIC, HaBroker
from tests.support.load import Load
from tests.support.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "076be67"
"""The commit that stands for the version before: the last one without locks of queues, whose records it does not know."""
PACKAGES = ("clients/python", "services/runtime", "services/namesrv", "services/ha", "services/broker", "cli")
THIS_VERSION: Mapping[str, str] = {}


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


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_an_upgrade_and_a_downgrade_lose_nothing(tmp_path: Path) -> None:
    before = version_before(tmp_path / "before")
    with elected_cluster(tmp_path, environment=before) as cluster:
        with Load(cluster.namesrv, TOPIC, "g") as load:
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
        load.check()
        print(f"{len(load.acknowledged)} messages, {load.repeats} of them consumed again, {len(load.failures)} sends failed")
        master = cluster.wait_leading()
        end = master.status().end_position
        for broker in cluster.brokers:
            if broker is not master:
                broker.wait_for_all_of(master)
                assert broker.log_bytes(end) == master.log_bytes(end)
    for broker in cluster.brokers:
        run("log", "verify", str(broker.folder))
