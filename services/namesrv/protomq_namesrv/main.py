"""A name server from the command line to its end: settings, then the server until a signal comes."""

from __future__ import annotations

from pathlib import Path

from protomq_runtime.addresses import Address
from protomq_runtime.config import load_config
from protomq_runtime.lifecycle import run_until_signal

from .config import NamesrvConfig
from .server import make_server


def run(
    *,
    host: str | None = None,
    port: int | None = None,
    remoting_port: int | None = None,
    config_file: Path | None = None,
) -> int:
    """Run a name server with settings from a file, the environment and these flags; the last wins, None was not given.

    Answers the exit code. Raises ConfigError, and OSError for a port that is taken.
    """
    flags = {"listen.host": host, "listen.grpc_port": port, "listen.remoting_port": remoting_port}
    return main(load_config(NamesrvConfig, config_file, flags=flags))


def main(config: NamesrvConfig) -> int:
    """Run a name server until a signal comes; answers the exit code. Raises OSError for a port that is taken."""
    server = make_server(config)
    host = config.listen.host

    def ready() -> dict[str, str]:
        return {
            "grpc": str(Address(host, server.grpc_port)),
            "remoting": str(Address(host, server.remoting_port)),
        }

    return run_until_signal(
        server, ready, ports_file=config.listen.ports_file, service_name="protomq-namesrv"
    )
