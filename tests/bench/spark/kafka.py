"""Installs, starts and stops Kafka: one KRaft node as released, on loopback, with the JVM settings of its own scripts."""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Final, Self

from tests.bench.peers.rocketmq import free_ports, wait_for_port
from tests.bench.process import ROOT

VERSION: Final = "4.3.1"
CONNECTOR_VERSION: Final = "4.0.0"
PYTHON: Final = ROOT / ".venv-kafka" / "bin" / "python"
"""The environment with the Spark of the connector: `make bench-spark` makes it."""
PARTITIONS: Final = 16
_HERE: Final = Path(__file__).parent
_INSTALL_TIMEOUT_S: Final = 900
_STOP_TIMEOUT_S: Final = 30.0
_JVM: Final = (
    "-server", "-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent", "-Djava.awt.headless=true",
)  # fmt: skip
_LOGGING: Final = """<Configuration><Appenders><Console name="C" target="SYSTEM_ERR"><PatternLayout pattern="%d %p %c %m%n"/></Console>
</Appenders><Loggers><Root level="WARN"><AppenderRef ref="C"/></Root></Loggers></Configuration>
"""
_PROPERTIES: Final = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
auto.create.topics.enable=true
group.initial.rebalance.delay.ms=0
"""


def home() -> Path:
    """Where what Maven fetched is kept."""
    return Path(tempfile.gettempdir()) / "protomq-peers"


def connector_jars() -> list[str]:
    """What Spark needs for format("kafka")."""
    return sorted(map(str, (home() / f"kafka-connector-{CONNECTOR_VERSION}").glob("*.jar")))


def install() -> None:
    """Fetch Kafka and the connector by Maven; what is there already is kept. Raises CalledProcessError."""
    for pom, name in (
        ("pom-broker.xml", f"kafka-{VERSION}"),
        ("pom-connector.xml", f"kafka-connector-{CONNECTOR_VERSION}"),
    ):
        libraries = home() / name
        if libraries.is_dir():
            continue
        partial = home() / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(
            [
                "mvn", "-q", "-B", "-f", str(_HERE / pom), "dependency:copy-dependencies",
                f"-DoutputDirectory={partial}", "-DincludeScope=runtime",
            ],
            check=True, timeout=_INSTALL_TIMEOUT_S,
        )  # fmt: skip
        partial.rename(libraries)


class Kafka:
    """A broker with a log of its own, which is deleted in the end. Topics are made by the first send, with 16 partitions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        port, controller = free_ports()
        self.bootstrap = f"127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log4j2.xml").write_text(_LOGGING)
        properties = folder / "server.properties"
        properties.write_text(
            _PROPERTIES.format(
                port=port, controller=controller, data=folder / "data", partitions=PARTITIONS
            )
        )
        cluster_id = "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        subprocess.run(
            self._java(("-Xmx256m",), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)),
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        with (folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._java(_JVM, "kafka.Kafka", str(properties)), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            wait_for_port(port)
        except BaseException:
            self.close()
            raise

    def _java(self, jvm: tuple[str, ...], main: str, *arguments: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile=file:{self._folder / 'log4j2.xml'}"
        return ["java", *jvm, logging, "-cp", f"{home()}/kafka-{VERSION}/*", main, *arguments]

    @property
    def pid(self) -> int:
        """Process id of the broker."""
        assert self._process is not None
        return self._process.pid

    def pause(self) -> None:
        """Takes no CPU time until `resume`."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Goes on."""
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """End it and delete its data."""
        self.resume()
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(_STOP_TIMEOUT_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
