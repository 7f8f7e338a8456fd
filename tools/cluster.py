"""Start a cluster of deploy/ on this machine, say where, and end it with Ctrl-C.

    cluster.py deploy/2m-2s-sync [--folder build/cluster] [--free-ports]

Each file of the folder is a process: first etcd (`etcd-*.yaml`), then the name servers (`namesrv-*.yaml`), masters, slaves. Stores are made
in `--folder`, logs beside them. `--free-ports`: the files' ports are not used. The last line on stdout begins with `ready`. Only the
standard library is used: the servers run in processes of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
FREE_PORTS = {"PROTOMQ_LISTEN_GRPC_PORT": "0", "PROTOMQ_LISTEN_REMOTING_PORT": "0"}


class Member:
    """One process. `words`: what its ready line says."""

    def __init__(self, file: Path, folder: Path, environment: dict[str, str]) -> None:
        self.name = file.stem
        self.log_path = folder / f"{file.stem}.log"
        verb = "namesrv" if file.stem.startswith("namesrv") else "broker"
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "protomq_cli", verb, "-c", str(file.resolve())],
                cwd=folder,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # Ctrl-C is for this program, which stops its members in their order.
                start_new_session=True,
            )
        self.words: dict[str, str] = {}

    def wait_ready(self) -> None:
        """Reads the ready line; RuntimeError if none comes."""
        give_up = threading.Timer(START_TIMEOUT_S, self.process.kill)
        give_up.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            give_up.cancel()
        if not line.startswith("ready "):
            raise RuntimeError(f"{self.name} does not start: see {self.log_path}")
        self.words = dict(word.partition("=")[::2] for word in line.split()[1:])

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that takes too long."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class EtcdMember(Member):
    """An etcd. Attribute: url, of its clients."""

    def __init__(self, file: Path, folder: Path, *, free_ports: bool) -> None:
        self.name = file.stem
        self.log_path = folder / f"{file.stem}.log"
        command = shutil.which("etcd")
        if command is None:
            raise RuntimeError("there is no etcd: make etcd installs it (Debian, Ubuntu: apt-get install etcd-server)")
        lines = (line.partition(": ") for line in file.read_text().splitlines())
        settings = {name: value.strip() for name, _, value in lines}
        self.url = settings["advertise-client-urls"]
        arguments = ["--config-file", str(file.resolve())]
        if free_ports:
            self.url, peer_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
            settings |= {
                "listen-client-urls": self.url,
                "advertise-client-urls": self.url,
                "listen-peer-urls": peer_url,
                "initial-advertise-peer-urls": peer_url,
                "initial-cluster": f"{settings['name']}={peer_url}",
            }
            arguments = [f"--{name}={value}" for name, value in settings.items() if value and name[0] != "#"]
        for name in ("listen-client-urls", "listen-peer-urls"):
            self._refuse_taken_port(settings[name])
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                [command, *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.words = {"etcd": self.url}

    def _refuse_taken_port(self, url: str) -> None:
        """RuntimeError where another program listens: an etcd of somebody else would answer as if it were this one."""
        host, _, port = url.rpartition("/")[2].rpartition(":")
        with socket.socket() as probe:
            # As etcd does: connections that have ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError:
                raise RuntimeError(
                    f"{self.name} needs {host}:{port}, which another program has: stop it (systemctl stop etcd), or use --free-ports"
                ) from None

    def wait_ready(self) -> None:
        """Until it answers; RuntimeError if it does not."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1):
                    return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.1)
        raise RuntimeError(f"{self.name} does not start: see {self.log_path}")


def free_port() -> int:
    """One that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def order_of(file: Path) -> tuple[bool, bool, bool, str]:
    """etcd and name servers first, slaves last."""
    stem = file.stem
    return not stem.startswith("etcd"), not stem.startswith("namesrv"), stem.endswith("-s"), stem


def start_all(members: list[Member], files: list[Path], folder: Path, *, free_ports: bool) -> None:
    """Starts them in order, each when the one before is ready; those that run are in `members`."""
    environment = dict(FREE_PORTS) if free_ports else {}
    for file in files:
        if file.stem.startswith("etcd"):
            etcd = EtcdMember(file, folder, free_ports=free_ports)
            members.append(etcd)
            etcd.wait_ready()
            if free_ports:
                environment["PROTOMQ_ETCD_ENDPOINTS"] = etcd.url
            print(f"{etcd.name:12} {etcd.url}", flush=True)
            continue
        namesrv = [each.words["remoting"] for each in members if each.name.startswith("namesrv")]
        if free_ports and not file.stem.startswith("namesrv"):
            environment["PROTOMQ_NAMESRV"] = ";".join(namesrv)
        member = Member(file, folder, environment)
        members.append(member)
        member.wait_ready()
        words = member.words
        print(f"{member.name:12} gRPC {words['grpc']:22} remoting {words['remoting']}", flush=True)
    addresses = ";".join(each.words["remoting"] for each in members if "namesrv" in each.name)
    print(f"clients: PROTOMQ_NAMESRV_ADDR='{addresses}'   Ctrl-C ends all; logs are in {folder}")
    pids = " ".join(f"{each.name}={each.process.pid}" for each in members)
    print(f"ready namesrv={addresses} {pids}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Start a cluster of deploy/ on this machine.")
    parser.add_argument("layout", type=Path, help="a folder of deploy/")
    parser.add_argument("--folder", type=Path, default=Path("build/cluster"))
    parser.add_argument("--free-ports", action="store_true")
    arguments = parser.parse_args()
    files = sorted(arguments.layout.glob("*.yaml"), key=order_of)
    if not files:
        parser.error(f"{arguments.layout} has no *.yaml")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    members: list[Member] = []
    try:
        start_all(members, files, arguments.folder.resolve(), free_ports=arguments.free_ports)
        over.wait()
        return 0
    except RuntimeError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    finally:
        for member in reversed(members):
            member.stop()


if __name__ == "__main__":
    sys.exit(main())
