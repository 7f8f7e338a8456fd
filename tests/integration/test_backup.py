"""`protomq backup` and `restore` with real processes: a broker that is loaded, killed runs, another place, another time."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from protomq.v1.consumer_service_pb2 import CommitOffsetsRequest, GetOffsetsRequest
from protomq.v1.consumer_service_pb2_grpc import ConsumerServiceStub
from protomq.v1.pull_service_pb2 import PullRequest
from protomq.v1.pull_service_pb2_grpc import PullServiceStub
from tests.support.ha_brokers import TOPIC, HaBroker, follow, pair, running
from tests.support.waiting import PATIENCE_S, wait_for

GROUP = "archive"


def protomq(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protomq_cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(*arguments: object) -> dict[str, Any]:
    """Runs a command that prints one row, which succeeds."""
    process = protomq(*arguments, "-o", "jsonl")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return json.loads(out) if out.strip() else {}


def refused(*arguments: object) -> tuple[int, str]:
    """Runs a command that fails: its exit code, and the reason."""
    process = protomq(*arguments, "-o", "json")
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, json.loads(err)["error"]["reason"]


def bodies(broker: HaBroker) -> list[bytes]:
    found: list[bytes] = []
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        while True:
            request = PullRequest(topic=TOPIC, queue_offset=len(found), record_count_max=1_000)
            answer = PullServiceStub(channel).Pull(request, timeout=PATIENCE_S)
            if not answer.records:
                return found
            found += [record.body for record in answer.records]


def commit(broker: HaBroker, offset: int) -> None:
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = CommitOffsetsRequest(consumer_group=GROUP)
        request.offsets.add(topic=TOPIC, queue_id=0, queue_offset=offset)
        ConsumerServiceStub(channel).CommitOffsets(request, timeout=PATIENCE_S)


def committed(broker: HaBroker) -> int:
    with grpc.insecure_channel(broker.address.grpc_address) as channel:
        request = GetOffsetsRequest(consumer_group=GROUP, topic=TOPIC)
        answer = ConsumerServiceStub(channel).GetOffsets(request, timeout=PATIENCE_S)
        return answer.offsets[0].queue_offset


class Load:
    """Sends one batch after another; what was answered SEND_OK is in `acknowledged`. Large ones first, so that there are segments."""

    def __init__(self, broker: HaBroker) -> None:
        self.acknowledged: list[bytes] = []
        self._broker = broker
        self._stopping = threading.Event()
        for _ in range(3):
            self._send(bytes(20_000), 100)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(0.02):
            self._send(bytes(100), 10)

    def _send(self, tail: bytes, count: int) -> None:
        first = len(self.acknowledged)
        batch = [b"%06d" % (first + number) + tail for number in range(count)]
        self._broker.send_ok(*batch)
        self.acknowledged += batch

    def stop(self) -> list[bytes]:
        self._stopping.set()
        self._thread.join(PATIENCE_S)
        return self.acknowledged


@pytest.mark.long
def test_a_broker_under_load_is_backed_up_and_restored_elsewhere(tmp_path: Path) -> None:
    broker = HaBroker(tmp_path / "store", "ASYNC_MASTER", 0)
    with running(broker):
        load = Load(broker)
        try:
            # Runs that are killed with -9 in the middle, and one that is not.
            for pause_s in (0.5, 1.0):
                process = protomq(
                    "backup", tmp_path / "kept", "--broker", broker.address.remoting_address
                )
                try:
                    process.communicate(timeout=pause_s)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
            before = len(load.acknowledged)
            commit(broker, 7)
            committed_at = broker.status().end_position
            wait_for(lambda: broker.status().flushed_position >= committed_at)
            first = done("backup", tmp_path / "kept", "--broker", broker.address.remoting_address)
            assert first["linked_bytes"] == 0
        finally:
            acknowledged = load.stop()
        commit(broker, 11)
        wait_for(lambda: broker.status().flushed_position == broker.status().end_position)
        second = done("backup", tmp_path / "kept", "--broker", broker.address.remoting_address)
        assert second["copied_bytes"] == second["end_position"] - first["end_position"]
        linked = done(
            "backup",
            tmp_path / "linked",
            "--broker",
            broker.address.remoting_address,
            "--store",
            broker.folder,
        )
        assert refused("backup", tmp_path / "none", "--store", broker.folder) == (6, "STORE_IN_USE")
        assert linked["linked_bytes"] > 0
        assert linked["end_position"] == second["end_position"]
        assert bodies(broker) == acknowledged
    done("log", "verify", tmp_path / "kept")
    done("restore", tmp_path / "kept", tmp_path / "whole")
    done("restore", tmp_path / "linked", tmp_path / "cut", "--position", first["end_position"])
    whole = HaBroker(tmp_path / "whole", "ASYNC_MASTER", 0)
    cut = HaBroker(tmp_path / "cut", "ASYNC_MASTER", 0)
    with running(whole, cut):
        assert bodies(whole) == acknowledged
        assert committed(whole) == 11
        earlier = bodies(cut)
        assert before <= len(earlier) < len(acknowledged) + 1
        assert earlier == acknowledged[: len(earlier)]
        assert committed(cut) == 7
        whole.send_ok(b"goes on")
        assert bodies(whole)[-1] == b"goes on"
    done("log", "verify", tmp_path / "whole")


def test_a_slave_is_backed_up_and_a_new_slave_begins_with_the_backup(tmp_path: Path) -> None:
    master, slave = pair(tmp_path)
    with running(master):
        try:
            master.send_ok(*[b"%d" % number * 2_000 for number in range(300)])
            follow(slave, master)
            slave.wait_for_all_of(master)
            wait_for(lambda: slave.status().flushed_position == master.status().end_position)
            row = done("backup", tmp_path / "kept", "--broker", slave.address.remoting_address)
            assert row["end_position"] == master.status().end_position
        finally:
            slave.kill()
        early = protomq("restore", tmp_path / "kept", tmp_path / "early", "--time", "@2020-01-01")
        assert re.search(r"has nothing that old: .* stored at 20\d\d-\d\d-\d\dT.*Z, and end at", early.communicate(timeout=PATIENCE_S)[1])
        assert (early.returncode, (tmp_path / "early").exists()) == (2, False)
        done("restore", tmp_path / "kept", tmp_path / "again")
        again = HaBroker(tmp_path / "again", "SLAVE", 1, ha=slave._config["ha"])
        master.send_ok(b"later")
        try:
            follow(again, master)
            again.wait_for_all_of(master)
            end = master.status().end_position
            assert again.log_bytes(end) == master.log_bytes(end)
            assert bodies(again) == bodies(master)
        finally:
            again.kill()


def test_a_backup_of_links_outlives_a_log_that_is_cut(tmp_path: Path) -> None:
    """A master that dies is succeeded by its slave, which lacks the end, and follows it."""
    store = {"segment_size_bytes": 1 << 20, "disk_delete_ratio": 0.97, "disk_force_ratio": 0.98, "disk_refuse_ratio": 0.99}
    master, slave = pair(tmp_path, store=store)
    with running(master):
        try:
            master.send_ok(*[b"shared %d" % number + bytes(2_000) for number in range(100)])
            follow(slave, master)
            slave.wait_for_all_of(master)
            shared_end = slave.status().end_position
            slave.stop()
            for batch in range(8):
                master.send_ok(*[b"alone %d" % number + bytes(2_000) for number in range(batch * 100, batch * 100 + 100)])
            wait_for(lambda: master.status().flushed_position == master.status().end_position)
            expected = bodies(master)
            end = master.status().end_position
            kept = done("backup", tmp_path / "kept", "--broker", master.address.remoting_address, "--store", master.folder)
            assert (kept["end_position"], kept["linked_bytes"]) == (end, 2 << 20)
            log = master.log_bytes(end)
            # A slave that has only the beginning may catch up. It may be stopped, or run.
            behind = (6, "LOG_BEHIND")
            assert refused("backup", tmp_path / "kept", "--store", slave.folder) == behind
            slave.configure(ha=slave._config["ha"] | {"master": "127.0.0.1:1"})
            slave.start()
            assert refused("backup", tmp_path / "kept", "--broker", slave.address.remoting_address) == behind
        finally:
            master.kill()
            slave.kill()
        new = HaBroker(tmp_path / "slave", "ASYNC_MASTER", 0, ha=slave._config["ha"], store=store)
        old = HaBroker(tmp_path / "master", "SLAVE", 1, ha=slave._config["ha"], store=store)
        with running(new):
            # One that leads has lost what it lacks.
            lost = refused("backup", tmp_path / "kept", "--broker", new.address.remoting_address)
            assert lost == (1, "LOG_DIVERGED")
            for batch in range(8):
                new.send_ok(*[b"new %d" % number + bytes(2_000) for number in range(batch * 100, batch * 100 + 100)])
            try:
                follow(old, new)
                old.wait_for_all_of(new)
                assert f"is truncated to position {shared_end}" in old.log_text()
                assert bodies(old) == bodies(new) != expected
            finally:
                old.kill()
    done("log", "verify", tmp_path / "kept")
    done("restore", tmp_path / "kept", tmp_path / "restored")
    restored = HaBroker(tmp_path / "restored", "ASYNC_MASTER", 0, store=store)
    with running(restored):
        assert bodies(restored) == expected
        assert restored.log_bytes(end) == log


def test_damage_of_a_backup_and_times_behind_its_end_are_told(tmp_path: Path) -> None:
    broker = HaBroker(tmp_path / "store", "ASYNC_MASTER", 0)
    with running(broker):
        for number in range(20):
            broker.send_ok(b"%d" % number * 1_000)
        wait_for(lambda: broker.status().flushed_position == broker.status().end_position)
        done("backup", tmp_path / "kept", "--broker", broker.address.remoting_address)
        broker.stop()
    kept = tmp_path / "kept"
    done("backup", kept, "--store", tmp_path / "store")

    def ended(*arguments: object) -> tuple[int, str]:
        process = protomq(*arguments)
        _, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, err

    code, err = ended("restore", kept, tmp_path / "ahead", "--time", "@2099-01-01")
    assert (code, "lies ahead, so all would be restored" in err, (tmp_path / "ahead").exists()) == (2, True, False)
    code, err = ended("restore", kept, tmp_path / "now", "--time", "@-0s")
    assert code == 0, err
    assert re.search(r"the backup ends with what was stored at 20\S+Z, before --time: all of it is restored", err)
    (segment,) = (kept / "commitlog").iterdir()
    with segment.open("r+b") as file:
        file.seek(10_000)
        byte = file.read(1)
        file.seek(10_000)
        file.write(bytes([byte[0] ^ 1]))
    code, err = ended("log", "verify", kept)
    assert code == 1
    place = re.search(rf"this is a backup: make another one.* `protomq restore {kept} NEW --position (\d+)` gives", err)
    assert place is not None, err
    done("restore", kept, tmp_path / "before", "--position", place[1])
    code, err = ended("restore", kept, tmp_path / "whole")
    assert code == 1, err
    before = HaBroker(tmp_path / "before", "ASYNC_MASTER", 0)
    with running(before):
        assert 0 < len(bodies(before)) < 20


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["backup", "DIR", "--broker", "127.0.0.1:1"], 3, "give the remoting port"),
        (["backup", "DIR"], 2, "--broker"),
        (["backup", "DIR", "--store", "nowhere"], 4, "is not a folder"),
        (["backup", "DIR", "--store", "/"], 4, "this is not a store"),
        (["backup", "DIR", "--broker", "127.0.0.1:1", "--store", "nowhere"], 4, "is not a folder"),
        (["backup", "DIR", "--broker", "127.0.0.1:1", "--store", "/"], 4, "this is not a store"),
        (["backup", "DIR", "--broker", "127.0.0.1:x"], 2, "--broker"),
        (["restore", "DIR", "DIR2"], 4, "is no backup"),
        (["restore", "DIR", "DIR2", "--time", "+3"], 2, "--time"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], code: int, word: str, tmp_path: Path
) -> None:
    process = protomq(
        *(str(tmp_path / each) if each.startswith("DIR") else each for each in arguments)
    )
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, err
    assert word in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [["restore", "OUTER", "OUTER/store"], ["restore", "OUTER", "OUTER/deep/store"], ["backup", "OUTER/kept", "--broker", "127.0.0.1:1"]],
)
def test_nothing_is_put_into_a_store_or_a_backup(arguments: list[str], tmp_path: Path) -> None:
    outer = tmp_path / "OUTER"
    (outer / "commitlog").mkdir(parents=True)
    process = protomq(*(str(tmp_path / each) if each.startswith("OUTER") else each for each in arguments))
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, f"lies in {outer}, which is a store or a backup: take another folder" in err) == (6, True), err
    assert [path.name for path in outer.iterdir()] == ["commitlog"]


def test_a_port_that_says_nothing_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started_s = time.monotonic()
        process = protomq("backup", tmp_path / "DIR", "--broker", address, "--timeout", "200ms")
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, time.monotonic() - started_s < 8) == (3, True)
    assert err == f"protomq: {address}: no answer within 0.2 s (--timeout); give the remoting port of a broker that runs\n"
