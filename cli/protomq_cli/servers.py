"""`standalone`, `namesrv`, `broker` and `version`: the commands that run a server in this process.

They only translate flags; the servers' own packages do the rest and print the ready line. The command line can be installed
without them: then the error says what to install.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.importing import uncollected
from protomq_cli.options import folder_option
from protomq_cli.output import ALL_DONE, OutputFormat, print_object, stdout_named

DEFAULT_GRPC_PORT: Final = 8081
DEFAULT_REMOTING_PORT: Final = 10911
DEFAULT_NAMESRV_PORT: Final = 9876

_PORT_MAX: Final = 65_535


class LogLevel(StrEnum):
    """What a server writes to stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Host = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        show_default="127.0.0.1",
        help="Listen here; 0.0.0.0: on all interfaces.",
    ),
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", help="What to write to stderr.", case_sensitive=False)
]


def standalone(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", "-d", parser=folder_option, metavar="DIR", show_default="protomq-data", help="Folder of the store."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", "-p", metavar="PORT", min=0, max=_PORT_MAX, show_default=str(DEFAULT_GRPC_PORT),
            help="gRPC port of all services; 0: a free one.",
        ),
    ] = None,
    remoting_port: Annotated[
        int | None,
        typer.Option(
            "--remoting-port", metavar="PORT", min=0, max=_PORT_MAX,
            show_default=f"{DEFAULT_REMOTING_PORT}; with --port a free one, whatever the file says",
            help="Remoting port of all services; 0: a free one.",
        ),
    ] = None,
    host: Host = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", show_default=False,
            help="Settings of the broker, YAML or TOML; flags win.",
        ),
    ] = None,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:  # fmt: skip
    """Run name server and broker in one process.

    Prints one line when it is ready: `ready grpc=HOST:PORT
    remoting=HOST:PORT namesrv=HOST:PORT data=DIR`. Ctrl-C or SIGTERM stops
    it cleanly. With the default ports the other commands find it by
    themselves.
    """
    # A second server, started with --port alone, must not collide with the first on the other port.
    if remoting_port is None and port is not None:
        remoting_port = 0
    with _starting(log_level):
        with uncollected():
            from protomq_cli.standalone import run_standalone

        code = run_standalone(
            data_dir=data_dir, host=host, port=port, remoting_port=remoting_port, config_file=config
        )
    raise typer.Exit(code)


def namesrv(
    port: Annotated[
        int | None,
        typer.Option(
            "--port", "-p", metavar="PORT", min=0, max=_PORT_MAX, show_default=str(DEFAULT_NAMESRV_PORT),
            help="gRPC port; 0: a free one.",
        ),
    ] = None,
    remoting_port: Annotated[
        int | None,
        typer.Option(
            "--remoting-port", metavar="PORT", min=0, max=_PORT_MAX, show_default="the one after --port",
            help="Remoting port; 0: a free one.",
        ),
    ] = None,
    host: Host = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", show_default=False, help="Settings, YAML or TOML; flags win."
        ),
    ] = None,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:  # fmt: skip
    """Run a name server. Brokers register with it, clients ask it for routes.

    Prints one line when it is ready: `ready grpc=HOST:PORT
    remoting=HOST:PORT`.
    """
    if remoting_port is None and port is not None:
        remoting_port = port + 1 if 0 < port < _PORT_MAX else 0
    with _starting(log_level):
        with uncollected():
            from protomq_namesrv.main import run

        code = run(host=host, port=port, remoting_port=remoting_port, config_file=config)
    raise typer.Exit(code)


def broker(
    config: Annotated[
        Path, typer.Option("--config", "-c", metavar="FILE", help="Settings of the broker, YAML or TOML.")
    ],
    shards: Annotated[
        int,
        typer.Option(
            min=1, max=256,
            help="Run N brokers, each with its own name, ports and store, under one supervisor.",
        ),
    ] = 1,
    log_level: LogLevelOption = LogLevel.INFO,
) -> None:  # fmt: skip
    """Run a broker. It registers with the name servers that its settings name.

    Prints one line when it is ready: `ready grpc=HOST:PORT
    remoting=HOST:PORT broker=NAME data=DIR`.
    """
    with _starting(log_level):
        with uncollected():
            from protomq_cli.shards import run_shards

        code = run_shards(config, shards, ["--log-level", log_level.value])
    raise typer.Exit(code)


def version(
    output: Annotated[
        OutputFormat | None,
        typer.Option("--output", "-o", help="How to print.", show_default="a line of text", case_sensitive=False),
    ] = None,
) -> None:
    """Print the version."""
    print_version(output)


def print_version(output: OutputFormat | None = None) -> None:
    """The version, as a line of text or as an object."""
    from importlib import metadata

    number = metadata.version("protomq-cli")
    if output is not None:
        print_object({"version": number}, output)
        return
    with stdout_named(ALL_DONE):
        typer.echo(f"protomq {number}")


@contextmanager
def _starting(log_level: LogLevel) -> Iterator[None]:
    """Logs to stderr, and turns what keeps a server from starting into one line."""
    import logging

    # What gRPC's C core writes by itself is said again, and better, by what it raises.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # numpy's linear algebra, which no server uses, would start a thread for each core, with a tenth of the start's CPU.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    logging.basicConfig(
        level=log_level.name,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("protomq_broker", "protomq_namesrv", "protomq_runtime"):
            raise
        message = "the server is not installed; run `pip install .` in a checkout of protomq"
        raise CliError(ExitCode.USAGE, "NOT_INSTALLED", message) from error
    except OSError as error:
        if error.errno is not None or type(error).__name__ == "UnknownHostError":
            raise
        # gRPC does not say why; the message tells the address.
        raise CliError(ExitCode.REFUSED, "CANNOT_LISTEN", str(error)) from error
