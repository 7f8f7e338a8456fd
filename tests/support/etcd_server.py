"""A real etcd, of one process or several, at ports of its own, which can be killed, stopped and started again with its data."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import httpx

from .waiting import PATIENCE_S, wait_for


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EtcdServer:
    """Attributes: address, url: for its clients."""

    def __init__(self, folder: Path, name: str = "default") -> None:
        """`name`: tells the members of one etcd apart."""
        self._folder, self._name = folder, name
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{_free_port()}"
        self.url = f"http://{self.address}"
        self._peer_url = f"http://127.0.0.1:{_free_port()}"
        self.place = f"{name}={self._peer_url}"
        """Its place among its fellows."""
        self.fellows = [self.place]

    def start(self) -> EtcdServer:
        """Until it answers."""
        self.launch()
        self.wait_healthy()
        return self

    def launch(self) -> None:
        """Starts it. Alone of several it does not answer yet."""
        command = shutil.which("etcd")
        assert command, "there is no etcd: make etcd"
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    command,
                    *("--name", self._name),
                    *("--data-dir", str(self._folder / "data")),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", self._peer_url, "--initial-advertise-peer-urls", self._peer_url),
                    *("--initial-cluster", ",".join(self.fellows)),
                    # A test's disk is shared with other tests: what it syncs outlives no power cut anyway.
                    "--unsafe-no-fsync" if _has_no_fsync(command) else "--logger=zap",
                ],
                stdout=log,
                stderr=log,
            )

    def wait_healthy(self) -> None:
        """Until it answers."""
        wait_for(self._is_healthy, PATIENCE_S)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=1, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def is_up(self) -> bool:
        """It was started, and not killed here."""
        return self._process is not None

    def is_leader(self) -> bool:
        """Whether it says that it leads its fellows."""
        try:
            answer = httpx.post(f"{self.url}/v3/maintenance/status", json={}, timeout=1, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return False
        leader = answer.get("leader", "")
        return bool(leader) and leader == answer.get("header", {}).get("member_id")

    def pause(self) -> None:
        """SIGSTOP: it is silent, its ports are there."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal is on its way when the call returns, and etcd has many threads.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


    def lose_data(self) -> None:
        """Of one that was killed: it starts as a new one."""
        assert self._process is None
        shutil.rmtree(self._folder / "data")

    def copy_data(self, folder: Path) -> None:
        """Of one that was killed."""
        assert self._process is None
        shutil.copytree(self._folder / "data", folder / self._name)

    def restore_data(self, folder: Path) -> None:
        """Of one that was killed: it starts as it was when they were copied there."""
        self.lose_data()
        shutil.copytree(folder / self._name, self._folder / "data")


class EtcdMembers:
    """An etcd of some processes."""

    def __init__(self, folder: Path, count: int = 1) -> None:
        self.members: Sequence[EtcdServer] = [EtcdServer(folder / f"member-{i}", f"member-{i}") for i in range(count)]
        for member in self.members:
            member.fellows = [each.place for each in self.members]

    @property
    def urls(self) -> list[str]:
        """For clients."""
        return [member.url for member in self.members]

    def start(self) -> None:
        """All that do not run; until they answer."""
        for member in self.members:
            if not member.is_up:
                member.launch()
        for member in self.members:
            member.wait_healthy()

    def kill(self) -> None:
        """kill -9 of all."""
        for member in self.members:
            member.kill()

    def lose_data(self) -> None:
        """All are killed, and start as a new etcd."""
        self.kill()
        for member in self.members:
            member.lose_data()
        self.start()

    def copy_data(self, folder: Path) -> None:
        """All are killed, and start again when their data are copied there."""
        self.kill()
        for member in self.members:
            member.copy_data(folder)
        self.start()

    def restore_data(self, folder: Path) -> None:
        """All are killed, and start as they were when their data were copied there."""
        self.kill()
        for member in self.members:
            member.restore_data(folder)
        self.start()

    def leader(self) -> EtcdServer:
        """Whoever leads among them."""
        found: list[EtcdServer] = []

        def leads() -> bool:
            found[:] = [member for member in self.members if member.is_leader()]
            return len(found) == 1

        wait_for(leads, PATIENCE_S)
        return found[0]


def _has_no_fsync(command: str) -> bool:
    """Since 3.5."""
    helped = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    return "--unsafe-no-fsync" in helped.stdout + helped.stderr
