"""Runs a broker until a signal ends it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from protomq_runtime.addresses import Address
from protomq_runtime.config import load_config
from protomq_runtime.lifecycle import run_until_signal

from .broker_process import BrokerProcess, metrics_words
from .config import BrokerConfig
from .failed_opens import start_named
from .reopened_broker import ReopenedBroker


def run_broker(config_file: Path | None, flags: Mapping[str, object] | None = None) -> int:
    """Runs a broker until a signal ends it, and returns the exit code. Raises ConfigError and what the start raises."""
    config = load_config(BrokerConfig, config_file, flags=flags)
    with start_named(config.data_dir):
        if config.etcd.endpoints:
            # httpx takes 0.1 s to import. Brokers without an election need not wait for it.
            from .elected_broker import ElectedBroker

            broker: ReopenedBroker | ElectedBroker = ElectedBroker(config)
        else:
            broker = ReopenedBroker(config)
        return run_until_signal(
            broker,
            lambda: ready_words(broker.process, config),
            ports_file=config.listen.ports_file,
            service_name="protomq-broker",
        )


def ready_words(process: BrokerProcess, config: BrokerConfig) -> dict[str, str]:
    """Returns what stands behind `ready`: where the broker listens, its name, and its store."""
    server, host = process.server, config.listen.host
    return {
        "grpc": str(Address(host, server.grpc_port)),
        "remoting": str(Address(host, server.remoting_port)),
        **metrics_words(process),
        "broker": process.broker.name,
        "data": str(config.data_dir),
    }
