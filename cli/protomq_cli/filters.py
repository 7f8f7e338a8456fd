"""`filter deploy|list|delete`: WebAssembly modules by which brokers filter for consumers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protomq_cli.asking import ask_to_delete
from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, OnBroker, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

_COLUMNS = ("name", "broker", "size_bytes", "crc32c")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", show_default=False, help="Name of the module.")
]


def deploy(
    name: NameArgument,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="The module: a .wasm file.")
    ],
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Deploy a module, in place of one that has the name.

    It exports `memory`, `alloc` and `matches`, and imports nothing.
    Consumers name it: subscribe(topic, module="NAME").
    """
    try:
        module = file.read_bytes()
    except OSError as error:
        raise CliError(
            ExitCode.USAGE, "NOT_READABLE", f"{file} cannot be read: {error.strerror}"
        ) from error
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = missing.take(
            lambda: admin.deploy_filter(name, module, brokers=[broker] if broker else None)
        )
    rows = [{"name": name, "broker": one, "size_bytes": len(module)} for one in brokers]
    print_rows(rows, _COLUMNS[:3], output)
    missing.check()


def list_filters(
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the modules of all brokers."""
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        found = missing.take(admin.list_filters)
    rows = [
        {"name": one.name, "broker": broker, "size_bytes": one.size_bytes, "crc32c": f"{one.crc32c:08x}"}
        for broker, modules in found.items()
        for one in modules
    ]  # fmt: skip
    print_rows(sorted(rows, key=lambda row: (row["name"], row["broker"])), _COLUMNS, output)
    missing.check()


def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Delete a module. Consumers that name it are refused from then on."""
    if not yes:
        ask_to_delete(f"Delete the filter {name}{f' on {broker}' if broker else ''}?")
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = missing.take(
            lambda: admin.delete_filter(name, brokers=[broker] if broker else None)
        )
    if not brokers:
        missing.check()
        raise CliError(
            ExitCode.NOT_FOUND,
            "FILTER_NOT_FOUND",
            f"no broker has a filter {name!r}; `protomq filter list` shows all there are",
        )
    print_rows([{"name": name, "broker": one} for one in brokers], _COLUMNS[:2], output)
    missing.check()
