"""A real etcd as a process, at ports of its own, which can be killed, stopped and started again with its data."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{_free_port()}"
        self.url = f"http://{self.address}"
        self._peer_url = f"http://127.0.0.1:{_free_port()}"

    def start(self) -> EtcdServer:
        """Until it answers."""
        command = shutil.which("etcd")
        assert command, "there is no etcd: make etcd"
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    command,
                    *("--data-dir", str(self._folder / "data")),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", self._peer_url, "--initial-advertise-peer-urls", self._peer_url),
                    *("--initial-cluster", f"default={self._peer_url}"),
                    # A test's disk is shared with other tests: what it syncs outlives no power cut anyway.
                    "--unsafe-no-fsync" if _has_no_fsync(command) else "--logger=zap",
                ],
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_healthy, PATIENCE_S)
        return self

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=1, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

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


def _has_no_fsync(command: str) -> bool:
    """Since 3.5."""
    helped = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    return "--unsafe-no-fsync" in helped.stdout + helped.stderr
