"""The sample configurations of deploy/ start as they are, and do what their names say: `make cluster` runs the same program."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from protomq import Admin, BrokerRole, MessageQueue, Producer, SendStatus
from protomq.errors import ProtomqError
from protomq_broker.config import BrokerConfig
from protomq_namesrv.config import NamesrvConfig
from protomq_runtime.config import load_config
from tests.support.cli import run
from tests.support.waiting import PATIENCE_S, wait_for

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
LAYOUTS = ("1m", "2m", "2m-2s-async", "2m-2s-etcd", "2m-2s-sync", "3r-etcd")
SMALL = {
    "PROTOMQ_STORE_SEGMENT_SIZE_BYTES": "4MiB",
    "PROTOMQ_STORE_DISK_DELETE_RATIO": "0.97",
    "PROTOMQ_STORE_DISK_FORCE_RATIO": "0.98",
    "PROTOMQ_STORE_DISK_REFUSE_RATIO": "0.99",
}
"""The machine of a test has little room."""


COMMAND = (sys.executable, str(ROOT / "tools/cluster.py"))


@contextmanager
def cluster(layout: Path, folder: Path, *options: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The lines that it writes, and the words of the last one, by which it is ready; ended as by Ctrl-C."""
    command = [*COMMAND, str(layout), "--folder", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | SMALL, text=True)
    with process:
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or not lines[-1].startswith("ready "):
                lines.append(process.stdout.readline())
                assert lines[-1], "it has ended"
            yield lines, dict(word.partition("=")[::2] for word in lines[-1].split()[1:])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


def test_all_layouts_are_tried() -> None:
    assert sorted(path.parent.name for path in DEPLOY.glob("*/namesrv-1.yaml")) == sorted(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_read_and_no_two_want_one_port_or_folder(layout: str) -> None:
    ports: list[int] = []
    folders: list[Path] = []
    for file in sorted((DEPLOY / layout).glob("*.yaml")):
        assert isinstance(yaml.safe_load(file.read_text()), dict)
        if file.stem.startswith("etcd"):
            continue
        if file.stem.startswith("namesrv"):
            listen = load_config(NamesrvConfig, file, environment={}).listen
        else:
            config = load_config(BrokerConfig, file, environment={})
            listen = config.listen
            folders.append(config.data_dir)
        ports += [listen.grpc_port, listen.remoting_port]
    assert len(set(ports)) == len(ports)
    assert len(set(folders)) == len(folders) >= 1


@pytest.mark.parametrize("layout", ["1m", "2m-2s-sync"])
def test_a_layout_starts_and_takes_messages(layout: str, tmp_path: Path) -> None:
    with cluster(DEPLOY / layout, tmp_path, "--free-ports") as (_, words):
        namesrv = words["namesrv"]
        brokers = [name for name in words if name.startswith("broker")]
        with Admin(namesrv=namesrv) as admin, Producer(namesrv=namesrv) as producer:
            wait_for(lambda: len(admin.cluster_info()) == len(brokers), PATIENCE_S)
            masters = [each for each in admin.ha_status() if each.role is not BrokerRole.SLAVE]
            assert len(masters) == (1 if layout == "1m" else 2)
            if layout == "1m":
                assert producer.send("flights", b"x").status is SendStatus.SEND_OK
                address = str(admin.cluster_info()[0].grpc_address)
                assert "serving" in run("health", address).stdout
                assert "serving" in run("health", address, "--service", "protomq.v1.SendService").stdout
                assert "has no service x" in run("health", address, "--service", "x", code=4).stderr
                os.kill(int(words["broker-a"]), signal.SIGKILL)
                assert address in run("health", address, code=3).stderr
                return
            wait_for(lambda: all_in_sync(admin), PATIENCE_S)
            for _ in range(4):
                assert producer.send("flights", b"x").status is SendStatus.SEND_OK
            # A slave is killed: its master goes on, and says so.
            os.kill(int(words["broker-a-s"]), signal.SIGKILL)
            statuses: set[SendStatus] = set()

            def said() -> bool:
                statuses.add(producer.send("flights", b"y").status)
                return {SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE} <= statuses

            wait_for(said, PATIENCE_S)


@pytest.mark.parametrize(
    ("layout", "role", "copies"),
    [("2m", BrokerRole.ASYNC_MASTER, 1), ("2m-2s-async", BrokerRole.ASYNC_MASTER, 2), ("2m-2s-etcd", BrokerRole.SYNC_MASTER, 2)],
)
def test_each_name_of_a_layout_has_a_master_that_takes_messages(layout: str, role: BrokerRole, copies: int, tmp_path: Path) -> None:
    with cluster(DEPLOY / layout, tmp_path, "--free-ports") as (_, words), Admin(namesrv=words["namesrv"]) as admin:

        def masters() -> dict[str, tuple[BrokerRole, int]]:
            try:
                states = admin.ha_status()
            except ProtomqError:
                return {}
            return {each.broker_name: (each.role, each.in_sync_count) for each in states if each.role is not BrokerRole.SLAVE}

        wait_for(lambda: masters() == dict.fromkeys(("broker-a", "broker-b"), (role, copies)), PATIENCE_S)
        assert len(words["namesrv"].split(";")) == 2
        admin.create_topic("flights")
        with Producer(namesrv=words["namesrv"]) as producer:
            for name in ("broker-a", "broker-b"):
                assert producer.send("flights", b"x", queue=MessageQueue("flights", name, 0)).status is SendStatus.SEND_OK


def test_replicas_elect_their_master_and_all_are_in_sync(tmp_path: Path) -> None:
    with cluster(DEPLOY / "3r-etcd", tmp_path, "--free-ports") as (_, words), Admin(namesrv=words["namesrv"]) as admin:

        def is_whole() -> bool:
            try:
                states = admin.ha_status()
            except ProtomqError:
                return False
            return sorted((each.in_sync_count for each in states), reverse=True) == [3, 0, 0]

        wait_for(is_whole, PATIENCE_S)
        with Producer(namesrv=words["namesrv"]) as producer:
            assert producer.send("flights", b"x").status is SendStatus.SEND_OK


@pytest.mark.parametrize("layout", ["2m-2s-etcd", "3r-etcd"])
@pytest.mark.parametrize("own_ports", [True, False])
def test_the_file_of_etcd_gives_brokers_what_they_ask_it_by(layout: str, own_ports: bool, tmp_path: Path) -> None:
    folder = etcd_alone(layout, tmp_path)
    with cluster(folder, tmp_path / "run", *[] if own_ports else ["--free-ports"]) as (lines, _):
        url = next(line.split()[1] for line in lines if line.startswith("etcd-1 "))
        answer = httpx.post(f"{url}/v3/kv/range", json={"key": "AA=="}, trust_env=False)
        assert (answer.status_code, "header" in answer.json()) == (200, True)


def test_an_etcd_of_somebody_else_on_the_port_is_not_taken_for_the_clusters(tmp_path: Path) -> None:
    folder = etcd_alone("3r-etcd", tmp_path)
    with cluster(folder, tmp_path / "run") as (lines, _):
        url = next(line.split()[1] for line in lines if line.startswith("etcd-1 "))
        other = [*COMMAND, str(folder), "--folder", str(tmp_path / "other")]
        done = subprocess.run(other, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 1
        port = url.rpartition(":")[2]
        assert done.stderr == (
            f"cluster: etcd-1 needs 127.0.0.1:{port}, which another program has: stop it (systemctl stop etcd), or use --free-ports\n"
        )


def etcd_alone(layout: str, tmp_path: Path) -> Path:
    """The layout's etcd as a layout of its own, at ports that nobody has: those of the file may be taken on this machine."""
    text = (DEPLOY / layout / "etcd-1.yaml").read_text()
    with socket.socket() as client, socket.socket() as peer:
        for port, probe in (("2379", client), ("2380", peer)):
            probe.bind(("127.0.0.1", 0))
            text = re.sub(rf":{port}\b", f":{probe.getsockname()[1]}", text)
    folder = tmp_path / "layout"
    folder.mkdir()
    (folder / "etcd-1.yaml").write_text(text)
    return folder


def all_in_sync(admin: Admin) -> bool:
    try:
        states = admin.ha_status()
    except ProtomqError:
        return False
    return all(each.in_sync_count == 2 for each in states if each.role is BrokerRole.SYNC_MASTER)
