"""Name server and broker in one process, on one gRPC port and one remoting port: for development, tests and small installations.

It stands here and not in a service, since no service imports another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from protomq_broker.broker_process import BrokerProcess, metrics_words
from protomq_broker.config import BrokerConfig
from protomq_broker.failed_opens import start_named
from protomq_broker.name_server_connections import NameServer
from protomq_namesrv.config import NamesrvConfig
from protomq_namesrv.direct_connection import DirectConnection
from protomq_namesrv.server import add_route_service
from protomq_runtime.addresses import Address
from protomq_runtime.clock import SystemClock
from protomq_runtime.config import load_config, variable_of
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.lifecycle import run_until_signal

DESK_DISK_RATIOS = {
    "store.disk_delete_ratio": 0.95,
    "store.disk_force_ratio": 0.97,
    "store.disk_refuse_ratio": 0.99,
}
"""Without a configuration file this is somebody's desk, where disks are often fuller than the 75, 85 and 90 % of a broker's own disk.
For that the first message must not be refused or deleted."""


def desk_disk_ratios(environment: Mapping[str, str]) -> Mapping[str, float]:
    """The ratios without a configuration file: none of these where a variable says one."""
    is_said = any(variable_of(key) in environment for key in DESK_DISK_RATIOS)
    return {} if is_said else DESK_DISK_RATIOS


def run_standalone(
    *,
    data_dir: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    remoting_port: int | None = None,
    config_file: Path | None = None,
) -> int:
    """Runs until a signal comes; the exit code. What is None was not given: the file or the default decides.

    Raises ConfigError and what the start raises.
    """
    config = load_config(
        BrokerConfig,
        config_file,
        flags={
            "data_dir": data_dir,
            "listen.host": host,
            "listen.grpc_port": port,
            "listen.remoting_port": remoting_port,
            **(desk_disk_ratios(os.environ) if config_file is None else {}),
        },
    )
    clock = SystemClock()
    table = DispatchTable()
    namesrv = NamesrvConfig()
    routes = add_route_service(table, namesrv, clock)

    def connect(client_id: str) -> DirectConnection:
        return DirectConnection(routes, namesrv.liveness, namesrv.limits, clock)

    with start_named(config.data_dir):
        process = BrokerProcess(
            config, clock=clock, table=table, name_servers=[NameServer("this process", connect)]
        )

    def ready() -> dict[str, str]:
        host = config.listen.host
        remoting_address = str(Address(host, process.server.remoting_port))
        return {
            "grpc": str(Address(host, process.server.grpc_port)),
            "remoting": remoting_address,
            "namesrv": remoting_address,
            **metrics_words(process),
            "data": str(config.data_dir),
        }

    return run_until_signal(
        process, ready, ports_file=config.listen.ports_file, service_name="protomq-standalone"
    )
