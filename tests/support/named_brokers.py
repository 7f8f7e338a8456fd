"""Brokers as processes that all have one name, each with a store of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from protomq import Admin
from protomq._methods import SEND
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress
from protomq.errors import NameTakenError
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest, SendResponse, SendStatus

from .namesrv import Namesrv
from .waiting import PATIENCE_S
from .warm_servers import ServerPopen

NAME = "twice"
REFUSED = 6
"""Exit code of one that does not start for its name."""


class Process(NamedTuple):
    """A broker that is ready."""

    process: subprocess.Popen[str]
    address: BrokerAddress

    def send(self) -> SendResponse:
        request = SendRequest(topic="t", records=[Record(body=b"x")])
        with SyncTransport() as caller:
            answer = caller.call(self.address, SEND, [request.SerializeToString()], PATIENCE_S)
        return SendResponse.FromString(answer)

    def takes_sends(self) -> bool:
        try:
            return self.send().status == SendStatus.SEND_STATUS_SEND_OK
        except NameTakenError:
            return False


def start(folder: Path, *namesrv: object, **settings: object) -> subprocess.Popen[str]:
    """A broker with its store in `folder`, which registers with these name servers."""
    config = {
        "data_dir": str(folder),
        "broker_name": NAME,
        "namesrv": [str(address) for address in namesrv],
        "listen": {"grpc_port": 0, "remoting_port": 0},
        "register_interval_ms": 200,
        "store": {
            "segment_size_bytes": 4 << 20,
            "disk_delete_ratio": 0.97,
            "disk_force_ratio": 0.98,
            "disk_refuse_ratio": 0.99,
        },
        **settings,
    }
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(config))  # which is YAML, too
    command = [sys.executable, "-m", "protomq_cli", "broker", "-c", str(file)]
    return ServerPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_ready(process: subprocess.Popen[str]) -> Process | None:
    """The broker when it is ready; None if it has ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready "):
        return None
    words = dict(word.split("=", 1) for word in line.split()[1:])
    return Process(process, BrokerAddress(NAME, words["grpc"], words["remoting"]))


@contextmanager
def running(folder: Path, *namesrv: object, **settings: object) -> Iterator[Process]:
    """Killed at the end."""
    with start(folder, *namesrv, **settings) as process:
        try:
            ready = read_ready(process)
            assert ready is not None, process.communicate()[1]
            yield ready
        finally:
            process.kill()
            process.communicate()


def routed_to(namesrv: Namesrv) -> list[str]:
    """Addresses of the brokers that the name server knows."""
    with Admin(namesrv=str(namesrv.remoting)) as admin:
        return [broker.remoting_address for broker in admin.cluster_info()]
