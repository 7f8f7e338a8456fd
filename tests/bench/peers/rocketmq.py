"""Installs, starts, stops and drives RocketMQ: the servers as released, the load by its own Java client (java/Bench.java)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests.bench.measure import Sample, sample_from_json
from tests.bench.process import resident_mib

VERSION: Final = "5.3.3"
SIMPLE_VERSION: Final = "5.0.7"
"""Of its gRPC client, whose classes do not share a class path with the servers'."""
TOPIC: Final = "BenchT16"
QUEUES: Final = 16
_HERE: Final = Path(__file__).parent
_PORT_TIMEOUT_S: Final = 240.0
_STOP_TIMEOUT_S: Final = 30.0
_INSTALL_TIMEOUT_S: Final = 900

_OPENS: Final = [
    f"--add-{kind}=java.base/{package}=ALL-UNNAMED"
    for kind, packages in (
        ("exports", ("jdk.internal.ref", "sun.nio.ch")),
        ("opens", ("java.nio", "sun.nio.ch", "jdk.internal.ref", "java.lang", "java.util")),
    )
    for package in packages
]
# As bin/runbroker.sh has them, with 4 GiB instead of 8.
_BROKER_JVM: Final = (
    "-server",
    "-Xms4g",
    "-Xmx4g",
    "-Xmn2g",
    "-XX:+UseG1GC",
    "-XX:G1HeapRegionSize=16m",
    "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30",
    "-XX:SoftRefLRUPolicyMSPerMB=0",
    "-XX:-OmitStackTraceInFastThrow",
    "-XX:MaxDirectMemorySize=15g",
)
_BROKER_MAIN: Final = "org.apache.rocketmq.broker.BrokerStartup"
_PROXY_MAIN: Final = "org.apache.rocketmq.proxy.ProxyStartup"
_PRETOUCH: Final = "-XX:+AlwaysPreTouch"
# What makes its consumer fastest here: the broker may answer 256 messages or 4 MiB a pull instead of 32 or 256 KiB.
_TUNED: Final = {
    "maxTransferCountOnMessageInMemory": "256",
    "maxTransferBytesOnMessageInMemory": "4194304",
}
_LOGGING: Final = """<configuration><appender name="F" class="ch.qos.logback.core.FileAppender"><file>${{user.home}}/{0}.log</file>
<encoder><pattern>%d %p %m%n</pattern></encoder></appender><root level="WARN"><appender-ref ref="F"/></root></configuration>
"""


def home() -> Path:
    """Where RocketMQ lives."""
    return Path(tempfile.gettempdir()) / "protomq-peers"


def missing_tools() -> list[str]:
    """What is needed and not there."""
    return [tool for tool in ("java", "javac", "mvn") if shutil.which(tool) is None]


def install() -> None:
    """Fetch RocketMQ by Maven and compile the drivers; what is there already is kept. Raises CalledProcessError."""
    _fetch("pom.xml", f"-Drmq.version={VERSION}", _servers())
    _fetch("pom-simple.xml", f"-Dsimple.version={SIMPLE_VERSION}", _simple_client())
    sources = [_HERE / "java" / f"{name}.java" for name in ("Load", "Bench", "Simple")]
    compiled = _classes() / "Simple.class"
    changed_s = max(source.stat().st_mtime for source in sources)
    if not compiled.exists() or compiled.stat().st_mtime < changed_s:
        _classes().mkdir(parents=True, exist_ok=True)
        _compile(_servers(), sources[:2])
        _compile(_simple_client(), sources[2:])
    configuration = home() / "home" / "conf"
    configuration.mkdir(parents=True, exist_ok=True)
    for name in ("broker", "namesrv", "tools", "proxy"):
        (configuration / f"logback_{name}.xml").write_text(_LOGGING.format(name))


def _servers() -> Path:
    return home() / f"servers-{VERSION}"


def _simple_client() -> Path:
    return home() / f"simple-{SIMPLE_VERSION}"


def _classes() -> Path:
    return home() / f"classes-{VERSION}"


def _fetch(pom: str, version: str, folder: Path) -> None:
    if folder.is_dir():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run(
        [
            "mvn", "-q", "-B", "-f", str(_HERE / pom), version,
            "dependency:copy-dependencies", f"-DoutputDirectory={partial}", "-DincludeScope=runtime",
        ],
        check=True, timeout=_INSTALL_TIMEOUT_S,
    )  # fmt: skip
    partial.rename(folder)


def _compile(libraries: Path, sources: Sequence[Path]) -> None:
    path = f"{_classes()}:{libraries}/*"
    command = ["javac", "-nowarn", "-d", str(_classes()), "-cp", path, *map(str, sources)]
    subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S)


def _java(
    work: Path,
    jvm: Sequence[str],
    main: str,
    arguments: Sequence[str],
    libraries: Path | None = None,
) -> list[str]:
    work.mkdir(parents=True, exist_ok=True)
    path = f"{_classes()}:{libraries or _servers()}/*"
    return ["java", *jvm, *_OPENS, f"-Duser.home={work}", "-cp", path, main, *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "ROCKETMQ_HOME": str(home() / "home")}


class _Process:
    def __init__(self, command: Sequence[str], work: Path) -> None:
        with (work / "out.log").open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=work, env=_environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: int) -> None:
        if self.alive:
            self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.send_signal(signal.SIGCONT)
        self.send_signal(number)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RocketMQ:
    """A name server and a broker with a store of its own; beside them, as asked, a slave of the broker.

    `proxy`: the broker's process is also a proxy for the gRPC client ("local mode"). Use it with `with`: everything ends with it, and its
    data is deleted.
    """

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        pretouch: bool = True,
        proxy: bool = False,
        slave: bool = False,
    ) -> None:
        self._work = Path(tempfile.mkdtemp(prefix="run-", dir=home()))
        self._pretouch = pretouch
        self._has_proxy, self._has_slave = proxy, slave
        name_server_port, self._broker_port = free_ports()
        self.name_server = f"127.0.0.1:{name_server_port}"
        (self._work / "namesrv").mkdir()
        conf = self._work / "namesrv.conf"
        conf.write_text(f"bindAddress=127.0.0.1\nlistenPort={name_server_port}\n")
        jvm = ["-server", "-Xms512m", "-Xmx512m", "-Xmn256m"]
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        work = self._work / "namesrv"
        self._name_server = _Process(_java(work, jvm, main, ["-c", str(conf)]), work)
        self._broker: _Process | None = None
        self._slave: _Process | None = None
        self._proxy_port = 0
        try:
            wait_for_port(name_server_port)
            self._write_configuration("broker", self._broker_port, settings or {})
        except BaseException:
            self.close()
            raise

    def _write_configuration(self, name: str, port: int, settings: Mapping[str, str]) -> None:
        store = self._work / name / "store"
        values = {
            "brokerClusterName": "bench", "brokerName": "broker-a", "brokerId": "0",
            "brokerIP1": "127.0.0.1", "brokerIP2": "127.0.0.1", "bindAddress": "127.0.0.1",
            "listenPort": str(port), "haListenPort": str(port + 1),
            "namesrvAddr": self.name_server, "autoCreateTopicEnable": "true",
            "flushDiskType": "ASYNC_FLUSH", "brokerRole": "ASYNC_MASTER",
            "deleteWhen": "04", "fileReservedTime": "48",
            "storePathRootDir": str(store), "storePathCommitLog": str(store / "commitlog"),
            **_TUNED, **settings,
        }  # fmt: skip
        lines = "".join(f"{key}={value}\n" for key, value in values.items())
        (self._work / f"{name}.conf").write_text(lines)

    def _spawn(self, name: str, main: str, arguments: Sequence[str]) -> _Process:
        work = self._work / name
        jvm = [*_BROKER_JVM, *([_PRETOUCH] if self._pretouch else [])]
        return _Process(_java(work, jvm, main, arguments), work)

    def spawn_broker(self) -> None:
        """Start the broker and do not wait for it."""
        configuration = str(self._work / "broker.conf")
        if not self._has_proxy:
            self._broker = self._spawn("broker", _BROKER_MAIN, ["-c", configuration])
            return
        self._proxy_port, remoting_port = free_ports()
        values = {
            "rocketMQClusterName": "bench", "proxyMode": "LOCAL", "namesrvAddr": self.name_server,
            "grpcServerPort": self._proxy_port, "remotingListenPort": remoting_port,
        }  # fmt: skip
        proxy = self._work / "proxy.json"
        proxy.write_text(json.dumps(values))
        arguments = [
            "-pm",
            "local",
            "-bc",
            configuration,
            "-pc",
            str(proxy),
            "-n",
            self.name_server,
        ]
        self._broker = self._spawn("broker", _PROXY_MAIN, arguments)

    def start_broker(self) -> None:
        """Start the broker, its slave if it has one, and create the topic."""
        self.spawn_broker()
        wait_for_port(self._broker_port)
        if self._has_proxy:
            wait_for_port(self._proxy_port)
        self.create_topic()
        if self._has_slave:
            self._start_slave()

    def _start_slave(self) -> None:
        """Start the slave; returns when the master's sends are confirmed by it."""
        _, port = free_ports()
        self._write_configuration("slave", port, {"brokerId": "1", "brokerRole": "SLAVE"})
        self._slave = self._spawn("slave", _BROKER_MAIN, ["-c", str(self._work / "slave.conf")])
        wait_for_port(port)
        for _ in range(20):
            if not self.run("fill", limit=256, size=1024).errors:
                return
            time.sleep(1)
        raise RuntimeError("the slave does not follow its master")

    def create_topic(self) -> None:
        """16 queues. Tries for a while: a broker takes some time to be known."""
        command = _java(
            self._work / "tools", ["-Xmx256m"], "org.apache.rocketmq.tools.command.MQAdminStartup",
            [
                "updateTopic", "-n", self.name_server, "-c", "bench", "-t", TOPIC,
                "-r", str(QUEUES), "-w", str(QUEUES),
            ],
        )  # fmt: skip
        said = ""
        for _ in range(10):
            done = subprocess.run(
                command, env=_environment(), capture_output=True, text=True, check=False, timeout=60
            )
            if "success" in done.stdout:
                return
            said = done.stdout[-500:]
            time.sleep(1)
        raise RuntimeError(f"topic {TOPIC} was not made: {said}")

    @property
    def broker_pid(self) -> int:
        """Process id of the broker."""
        assert self._broker is not None
        return self._broker.pid

    def resident_mib(self) -> float:
        """Resident memory of name server and broker."""
        return resident_mib(self._name_server.pid) + resident_mib(self.broker_pid)

    def kill_broker(self) -> None:
        """kill -9."""
        if self._broker is not None:
            self._broker.end(signal.SIGKILL)

    def pause(self) -> None:
        """Takes no CPU time until `resume`."""
        for process in (self._broker, self._slave, self._name_server):
            if process is not None:
                process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on."""
        for process in (self._broker, self._slave, self._name_server):
            if process is not None:
                process.send_signal(signal.SIGCONT)

    def driver(self, mode: str, **options: Any) -> Driver:
        """Its client under load, driven window by window."""
        return Driver(self._driver_command("Bench", mode, options), self._work / "client")

    def simple_driver(self, **options: Any) -> Driver:
        """The same with its gRPC client, which pops at the proxy."""
        values = {"proxy": f"127.0.0.1:{self._proxy_port}", **options}
        return Driver(self._driver_command("Simple", "pop", values), self._work / "client")

    def run(self, mode: str, **options: Any) -> Sample:
        """Its client under a load that ends by itself."""
        done = subprocess.run(
            self._driver_command("Bench", mode, options),
            cwd=self._work, env=_environment(), capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(f"{mode} printed nothing:\n{done.stderr[-2000:]}")
        return sample_from_json(lines[-1])

    def first_accepted_send(self) -> float:
        """Start the broker; the seconds from there until its client, which is up already, has a send accepted."""
        since, ready = self._work / "since", self._work / "ready"
        for path in (since, ready):
            path.unlink(missing_ok=True)
        command = self._driver_command("Bench", "probe", {"since": since, "ready": ready})
        with subprocess.Popen(
            command, cwd=self._work, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as probe:  # fmt: skip
            while not ready.exists():
                time.sleep(0.05)
            time.sleep(1.0)
            since.write_text(f"{time.time() * 1000:.0f}")
            self.spawn_broker()
            output, _ = probe.communicate(timeout=200)
        return sample_from_json(output.strip().splitlines()[-1]).seconds

    def _driver_command(self, main: str, mode: str, options: Mapping[str, Any]) -> list[str]:
        values = {"ns": self.name_server, "topic": TOPIC, **options}
        if self._broker is not None and self._broker.alive:
            values["serverpid"] = self.broker_pid
        arguments = [mode, *(f"{name}={value}" for name, value in values.items())]
        libraries = _simple_client() if main == "Simple" else _servers()
        return _java(self._work / "client", ["-Xms1g", "-Xmx1g"], main, arguments, libraries)

    def close(self) -> None:
        """End all and delete the data."""
        for process in (self._broker, self._slave, self._name_server):
            if process is not None:
                process.end(signal.SIGKILL)
        shutil.rmtree(self._work, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Driver:
    """A running Java client: warm, and parked between windows."""

    def __init__(self, command: Sequence[str], work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        with (work / "client.err").open("ab") as errors:
            self._process = subprocess.Popen(
                command, cwd=work, env=_environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    def window(self, warm_up_s: float, seconds: float) -> Sample:
        """One measurement."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{warm_up_s * 1000:.0f} {seconds * 1000:.0f}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return sample_from_json(line)
        raise RuntimeError(f"the Java client ended with {self._process.wait()}")

    def pause(self) -> None:
        """Takes no CPU time until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self.resume()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_ports() -> tuple[int, int]:
    """A port for the name server, and one for the broker, which also takes the one above and the second one below."""
    for _ in range(100):
        with (
            socket.create_server(("127.0.0.1", 0)) as first,
            socket.create_server(("127.0.0.1", 0)) as second,
        ):
            name_server, broker = first.getsockname()[1], second.getsockname()[1]
        if abs(name_server - broker) > 3 and all(map(_is_free, (broker - 2, broker + 1))):
            return name_server, broker
    raise RuntimeError("no free ports were found")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError):
        return False
    return True


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + _PORT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nothing listens on port {port}")
