"""The services of a compose file as processes, each on a host of its own, as containers would be: without a container engine.

    compose_hosts.py COMPOSE_FILE FOLDER

A host is a network namespace with an address and a cable to one switch, a mount namespace with the files that the compose file
mounts, and a name. `in_namespaces` starts this module with namespaces of its own, as an ordinary user too: all ends with its process,
and the machine sees nothing of it. What it does then is in `rounds`; it prints what it found, as JSON. Not as in containers: the file
system is this machine's, `read_only` and limits are not set, and etcd is the one on PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
NET: Final = "10.77.0"
"""Of the switch, whose network is in a namespace."""
PATIENCE_S: Final = 180.0
MESSAGES: Final = 400
"""Of each part of the load."""
NAMESPACES: Final = ("--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
HOST_SCRIPT: Final = """
set -e
echo here
read go
ip link set lo up
ip address add {address}/24 dev eth0
ip link set eth0 up
hostname {name}
mount -t tmpfs none {folder}
for place in etc var/lib; do
  mkdir -p {folder}/$place/upper {folder}/$place/work
  mount -t overlay overlay -o lowerdir=/$place,upperdir={folder}/$place/upper,workdir={folder}/$place/work /$place
done
printf '%s' "$HOSTS" > /etc/hosts
mkdir -p /etc/protomq /var/lib/protomq
{mounts}
cd /var/lib/protomq
unset HOSTS
exec "$@"
"""


def in_namespaces(compose_file: Path, folder: Path) -> dict[str, Any]:
    """What `rounds` found. Raises RuntimeError with what was said if it failed."""
    command = ["unshare", *NAMESPACES, sys.executable, "-m", "tests.support.compose_hosts", str(compose_file), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def why_no_namespaces() -> str:
    """What keeps them from being made here; "" if nothing does."""
    for command in ("unshare", "nsenter", "ip"):
        if shutil.which(command) is None:
            return f"there is no `{command}` (Debian: util-linux, iproute2)"
    probe = "ip link add name probe type bridge && mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w"
    probe += " && mount -t overlay overlay -o lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w /etc"
    done = subprocess.run(["unshare", *NAMESPACES, "sh", "-c", probe], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


class Host:
    """One service on its host; started by the constructor."""

    def __init__(self, cluster: Cluster, service: str, number: int, command: Sequence[str]) -> None:
        self.name = service
        self.address = f"{NET}.{number + 10}"
        self._cable = f"cable{number}"
        self._settings = cluster.services[service]
        script = HOST_SCRIPT.format(
            address=self.address,
            name=self._settings.get("hostname", service),
            folder=cluster.made(f"hosts/{service}"),
            mounts="\n".join(cluster.mounts(self._settings)),
        )
        self.log_path = cluster.folder / f"{service}.log"
        environment = cluster.environment(self._settings)
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                ["unshare", "--net", "--mount", "--uts", "sh", "-c", script, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment | {"HOSTS": cluster.hosts_file()},
                text=True,
                bufsize=1,
            )
        self._environment = environment
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "here\n":
            raise RuntimeError(f"no host for {service}: {self.log_path.read_text()}")
        run("ip", "link", "add", "name", self._cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.process.pid))
        run("ip", "link", "set", self._cable, "master", "switch", "up")
        self.process.stdin.write("go\n")
        self.process.stdin.close()

    def execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """As `docker compose exec`."""
        place = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--uts", f"--wd={ROOT}"]
        return subprocess.run([*place, *command], env=self._environment, capture_output=True, text=True, check=False)

    def is_healthy(self) -> bool:
        """By the service's healthcheck."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} has ended: {self.log_path.read_text()}")
        kind, *command = self._settings["healthcheck"]["test"]
        assert kind == "CMD", kind
        if shutil.which(command[0]) is None and command[0] == "etcdctl":
            return _answers(f"http://{self.address}:2379/health")  # Not in Debian's etcd-server.
        return self.execute(command).returncode == 0

    def wait_healthy(self) -> None:
        wait_for(self.is_healthy, f"{self.name} is not healthy")

    def unplug(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        run("ip", "link", "set", self._cable, "nomaster")

    def plug_in(self) -> None:
        run("ip", "link", "set", self._cable, "master", "switch")

    def stop(self) -> int:
        """As `docker compose stop`; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


class Cluster:
    """A compose file, and the hosts of its services."""

    def __init__(self, compose_file: Path, folder: Path) -> None:
        self.folder = folder
        self._base = compose_file.resolve().parent
        content = yaml.safe_load(compose_file.read_text())
        self.services: dict[str, dict[str, Any]] = content["services"]
        self.volumes: dict[str, Any] = content["volumes"]
        self._numbers = {name: number for number, name in enumerate(self.services)}
        dockerfile = (ROOT / "deploy/Dockerfile").read_text()
        self._entrypoint: list[str] = json.loads(_after("ENTRYPOINT ", dockerfile))
        self.hosts: dict[str, Host] = {}

    def start_all(self) -> None:
        """All services that have no profile, each when those that it depends on are healthy."""
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "name", "switch", "type", "bridge")
        run("ip", "address", "add", f"{NET}.1/24", "dev", "switch")
        run("ip", "link", "set", "switch", "up")
        # The client runs beside the switch, and knows the hosts by name, too.
        etc = self.made("hosts/client")
        run("mount", "-t", "tmpfs", "none", str(etc))
        (etc / "upper").mkdir()
        (etc / "work").mkdir()
        run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/etc,upperdir={etc}/upper,workdir={etc}/work", "/etc")
        Path("/etc/hosts").write_text(self.hosts_file())
        wanted = {name: each.get("depends_on", {}) for name, each in self.services.items() if not each.get("profiles")}
        order = TopologicalSorter(wanted)
        order.prepare()
        while order.is_active():
            ready = sorted(order.get_ready())
            for name in ready:
                self.hosts[name] = Host(self, name, self._numbers[name], self.command(name))
            for name in ready:
                self.hosts[name].wait_healthy()
                order.done(name)

    def command(self, service: str, words: Sequence[str] = ()) -> list[str]:
        """What the container would run. Services that are not ours have images without an entrypoint."""
        settings = self.services[service]
        ours = settings["image"].startswith("${PROTOMQ_IMAGE")
        return [*(self._entrypoint if ours else []), *(words or settings["command"])]

    def run_client(self, *words: str, given: str = "") -> str:
        """As `docker compose run --rm client WORDS`, beside the switch; stdout."""
        environment = self.environment(self.services["client"])
        command = self.command("client", words)
        done = subprocess.run(command, env=environment, input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout[-2_000:]}\n{done.stderr}")
        return done.stdout

    def environment(self, settings: dict[str, Any]) -> dict[str, str]:
        """What the compose file says, and where programs are."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "HOME": str(self.folder), "PROTOMQ_CONFIG": "/dev/null", **settings.get("environment", {})}

    def hosts_file(self) -> str:
        lines = [f"{NET}.{number + 10} {name}" for name, number in self._numbers.items()]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def mounts(self, settings: dict[str, Any]) -> Iterator[str]:
        """Shell lines for `volumes`: files beside the compose file, and named volumes, which are folders here."""
        for volume in settings.get("volumes", ()):
            source, target, *_ = volume.split(":")
            path = self._base / source if source.startswith(".") else self.made(f"volumes/{source}")
            if path.is_file():
                yield f"touch {target} && mount --bind {path} {target}"
            else:
                assert source in self.volumes, source
                yield f"mkdir -p {target} && mount --bind {path} {target}"

    def made(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def leader(self) -> str:
        """The service whose broker leads with two other copies in sync; "" if none does."""
        try:
            rows = [json.loads(line) for line in self.run_client("ha", "status", "-o", "jsonl").splitlines()]
        except RuntimeError:
            return ""
        lead = [row["leadership"]["member"] for row in rows if (row["leadership"] or {}).get("state") == "LEADING" and row["in_sync"] == 3]
        if not lead:
            return ""
        listed = [json.loads(line) for line in self.run_client("cluster", "list", "-o", "jsonl").splitlines()]
        return next((row["grpc_address"].partition(":")[0] for row in listed if row["broker_id"] == 0), "")


def rounds(compose_file: Path, folder: Path) -> dict[str, Any]:
    """Starts all, sends, pulls the cable of the master while it sends more, plugs it in, stops all; what was found."""
    cluster = Cluster(compose_file, folder)
    cluster.start_all()
    found: dict[str, Any] = {"hosts": sorted(cluster.hosts)}
    wait_for(cluster.leader, "nobody leads three copies in sync")
    first = cluster.leader()
    _send(cluster, 0)
    cluster.hosts[first].unplug()
    _send(cluster, MESSAGES)
    cluster.hosts[first].plug_in()
    wait_for(cluster.leader, "not all copies are in sync again")
    second = cluster.leader()
    found["changed"] = first != second
    bodies = cluster.run_client("pull", "flights", "-c", "0", "-f", r"%q %v\n").splitlines()
    queues: dict[str, list[int]] = {}
    for line in bodies:
        queue, _, number = line.partition(" ")
        queues.setdefault(queue, []).append(int(number))
    found["numbers"] = sorted(number for each in queues.values() for number in each)
    found["in_order"] = all(each == sorted(each) for each in queues.values())
    found["exit_codes"] = sorted({cluster.hosts[name].stop() for name in cluster.hosts if name != "etcd"})
    return found


def _send(cluster: Cluster, first: int) -> None:
    """Each line is one message; all are acknowledged, or the command fails. The time is that of a fail-over, and more."""
    lines = "".join(f"{number}\n" for number in range(first, first + MESSAGES))
    cluster.run_client("send", "flights", "--quiet", "--timeout", "60s", given=lines)


def wait_for(happened: Any, else_say: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > give_up_s:
            raise RuntimeError(else_say)
        time.sleep(0.2)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _after(prefix: str, text: str) -> str:
    return next(line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix))


if __name__ == "__main__":
    print(json.dumps(rounds(Path(sys.argv[1]), Path(sys.argv[2]))))
