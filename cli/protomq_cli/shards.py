"""`protomq broker --shards N`: several brokers on one machine, since one Python process fills about one core.

Each shard is a broker of its own: a name, ports and a store; nothing is shared. Routing spreads queues over them as it does over machines.

    shard i    broker_name NAME-i, data_dir DIR/shard-i, each port that is not 0 plus i

The supervisor starts them, passes signals on, prints one ready line when all are ready, and ends all when one fails. Then systemd or
Kubernetes restarts the whole, which is better than a machine that has silently lost a part of its queues.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from protomq_broker.config import BrokerConfig
from protomq_broker.main import run_broker
from protomq_cli.environment import SHARD_VARIABLE
from protomq_runtime import service_manager
from protomq_runtime.addresses import parse_listen_address
from protomq_runtime.config import load_config
from protomq_runtime.lifecycle import say_ready


def run_shards(config_file: Path, shard_count: int, arguments: Sequence[str] = ()) -> int:
    """Runs the brokers until a signal comes; the exit code: that of the first one that failed, else 0.

    `arguments` are further ones for the command line of each.
    """
    shard = os.environ.get(SHARD_VARIABLE)
    if shard is not None:
        return run_broker(
            config_file, shard_flags(load_config(BrokerConfig, config_file), int(shard))
        )
    if shard_count == 1:
        return run_broker(config_file)
    load_config(BrokerConfig, config_file)  # What is wrong in it is said once, not by each shard.
    return _Supervisor(config_file, shard_count, arguments).run()


def shard_flags(config: BrokerConfig, shard: int) -> dict[str, object]:
    """What differs in a shard."""
    listen = config.listen
    ports: dict[str, object] = {
        f"listen.{name}": getattr(listen, name) + shard
        for name in (
            "grpc_port",
            "remoting_port",
            "advertised_grpc_port",
            "advertised_remoting_port",
        )
        if getattr(listen, name)
    }
    if config.metrics.listen:
        page = parse_listen_address(config.metrics.listen)
        if page.port:
            ports["metrics.listen"] = str(page._replace(port=page.port + shard))
    name = config.broker_name or os.uname().nodename
    return {
        **ports,
        "broker_name": f"{name}-{shard}",
        "data_dir": config.data_dir / f"shard-{shard}",
    }


class _Supervisor:
    def __init__(self, config_file: Path, shard_count: int, arguments: Sequence[str] = ()) -> None:
        self._command = [
            sys.executable,
            "-m",
            "protomq_cli",
            "broker",
            "--config",
            str(config_file),
            *arguments,
        ]
        self._shard_count = shard_count
        self._children: list[subprocess.Popen[str]] = []
        self._told: list[subprocess.Popen[str]] = []
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        for shard in range(self._shard_count):
            environment = {**os.environ, SHARD_VARIABLE: str(shard)}
            # systemd is told by the supervisor, when all are ready.
            environment.pop(service_manager.VARIABLE, None)
            # A process group of its own: Ctrl-C reaches a child through the supervisor only, once.
            self._children.append(
                subprocess.Popen(
                    self._command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            if self._stopping:
                self._stop_all()  # The signal came while this one was not in the list.
                break
        ready = self._wait_ready()
        if len(ready) == self._shard_count:
            say_ready(" ".join(line.removeprefix("ready ").strip() for line in ready))
            self._wait_first_end()
        self._stop_all()
        codes = [child.wait() for child in self._children]
        return next((abs(code) for code in codes if code), 0)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_all(number)

    def _stop_all(self, number: int = signal.SIGTERM) -> None:
        self._stopping = True
        for child in self._children:
            if child.poll() is not None or (child in self._told and number == signal.SIGTERM):
                continue  # A second signal would end it at once.
            self._told.append(child)
            child.send_signal(number)

    def _wait_ready(self) -> Sequence[str]:
        """The children's ready lines; fewer if one ends before."""
        lines = []
        for child in self._children:
            assert child.stdout is not None
            line = child.stdout.readline()
            if not line.startswith("ready"):
                break
            lines.append(line)
        return lines

    def _wait_first_end(self) -> None:
        """Until a child closes its standard output, which it does by ending."""
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                assert child.stdout is not None
                selector.register(child.stdout, selectors.EVENT_READ)
            selector.select()
