"""Masters and slaves as processes, which can be killed and started again at the same ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from protomq._methods import SEND
from protomq._transport import SyncTransport
from protomq._types import BrokerAddress
from protomq.v1 import ha_service_pb2, ha_service_pb2_grpc
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendRequest, SendResponse, SendStatus

from .waiting import PATIENCE_S, wait_for
from .warm_servers import ServerPopen

NAME = "pair"
TOPIC = "flights"
SEGMENT_SIZE_BYTES = 4 << 20


class HaBroker:
    """One broker. `address` is that of its last start, `metrics_address` too, if it has such a page."""

    def __init__(
        self,
        folder: Path,
        role: str,
        broker_id: int,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """`environment`: variables of the next start, beside those of this process; `settings`: of the configuration."""
        self.environment = environment or {}
        self.folder = folder
        self.role = role
        self._config: dict[str, Any] = {
            "data_dir": str(folder),
            "broker_name": NAME,
            "broker_role": role,
            "broker_id": broker_id,
            "listen": {"grpc_port": 0, "remoting_port": 0},
            "register_interval_ms": 200,
            "store": {
                "segment_size_bytes": SEGMENT_SIZE_BYTES,
                "disk_delete_ratio": 0.97,
                "disk_force_ratio": 0.98,
                "disk_refuse_ratio": 0.99,
            },
        }
        for name, value in settings.items():
            known = self._config.get(name)
            self._config[name] = known | value if isinstance(known, dict) else value
        self._process: subprocess.Popen[str] | None = None
        self.address = BrokerAddress(NAME, "", "")
        self.metrics_address = ""

    def start(self) -> HaBroker:
        """Starts it, at the ports that it had before: somebody else on this machine may have one for a moment."""
        lines: list[str] = []

        def is_ready() -> bool:
            lines.append(self._start_once())
            assert lines[-1] or "is taken" in self.log_text(), self.log_text()
            return bool(lines[-1])

        wait_for(is_ready, PATIENCE_S)
        words = dict(word.split("=", 1) for word in lines[-1].split()[1:])
        self.address = BrokerAddress(NAME, words["grpc"], words["remoting"])
        self.metrics_address = words.get("metrics", "")
        for name in ("grpc", "remoting"):
            self._config["listen"][f"{name}_port"] = int(words[name].rpartition(":")[2])
        return self

    def exit_of_start(self) -> int:
        """The exit code of a start that fails."""
        self._start_once(kills=False)
        code = self.process.wait(PATIENCE_S)
        self.kill()
        return code

    def _start_once(self, *, kills: bool = True) -> str:
        """The ready line; "" if it has ended instead."""
        file = self.folder.with_suffix(".yaml")
        # JSON is YAML, too.
        file.write_text(json.dumps(self._config))
        log = self.log_path.open("a")
        command = [sys.executable, "-m", "protomq_cli", "broker", "-c", str(file)]
        environment = {**os.environ, **self.environment}
        self._process = ServerPopen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            if kills:
                self.kill()
            return ""
        return line

    @property
    def log_path(self) -> Path:
        return self.folder.with_suffix(".log")

    def log_text(self) -> str:
        """What it has logged since its first start."""
        return self.log_path.read_text()

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    @property
    def is_up(self) -> bool:
        """It was started, and not stopped or killed here."""
        return self._process is not None

    def configure(self, **settings: Any) -> None:
        """Of the next start."""
        self._config |= settings

    def listen(self, **settings: Any) -> None:
        """Where it is to listen with the next start, and what it is to tell others of that."""
        self._config["listen"] |= settings

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)
        code = self.process.returncode
        self._process = None
        return code

    def send(self, *bodies: bytes, queue_id: int = 0) -> SendResponse:
        """Sends one batch."""
        request = SendRequest(topic=TOPIC, queue_id=queue_id, records=[Record(body=body) for body in bodies])
        with SyncTransport() as caller:
            answer = caller.call(self.address, SEND, [request.SerializeToString()], PATIENCE_S)
        return SendResponse.FromString(answer)

    def send_ok(self, *bodies: bytes) -> None:
        """The same, and the answer is SEND_OK."""
        status = self.send(*bodies).status
        assert status == SendStatus.SEND_STATUS_SEND_OK, SendStatus.Name(status)

    def status(self) -> ha_service_pb2.GetHaStatusResponse:
        """Over gRPC, as any generated client asks."""
        with grpc.insecure_channel(self.address.grpc_address) as channel:
            stub = ha_service_pb2_grpc.HaServiceStub(channel)
            return stub.GetHaStatus(ha_service_pb2.GetHaStatusRequest(), timeout=PATIENCE_S)

    def has_all_of(self, master: HaBroker) -> bool:
        """Whether this slave follows, has the master's log, and knows that all of it is confirmed."""
        try:
            ours, theirs = self.status(), master.status()
        except grpc.RpcError:  # its store is being opened again
            return False
        return (
            not ours.problem
            and ours.end_position == theirs.end_position
            and ours.confirmed_position == theirs.confirmed_position == theirs.end_position
        )

    def wait_for_all_of(self, master: HaBroker) -> None:
        """Until then."""
        wait_for(lambda: self.has_all_of(master), PATIENCE_S)

    def log_bytes(self, end_position: int) -> bytes:
        """Its commit log up to there, as it is on the disk."""
        files = sorted((self.folder / "commitlog").glob("[0-9]*"))
        return b"".join(file.read_bytes() for file in files)[:end_position]


@contextmanager
def running(*brokers: HaBroker) -> Iterator[None]:
    """Starts them in this order; killed at the end."""
    try:
        for broker in brokers:
            broker.start()
        yield
    finally:
        for broker in brokers:
            broker.kill()


def pair(
    folder: Path,
    role: str = "ASYNC_MASTER",
    ha: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[HaBroker, HaBroker]:
    """A master, and a slave that is to be told where the master is (`follow`). `ha`, `settings`: of both."""
    quick = {"heartbeat_interval_ms": 300, "timeout_ms": 3_000} | dict(ha or {})
    master = HaBroker(folder / "master", role, 0, ha=quick, **settings)
    slave = HaBroker(folder / "slave", "SLAVE", 1, ha=quick, **settings)
    return master, slave


def follow(slave: HaBroker, master: HaBroker) -> HaBroker:
    """Starts the slave of a master that runs."""
    slave.configure(ha=slave._config["ha"] | {"master": master.address.remoting_address})
    return slave.start()
