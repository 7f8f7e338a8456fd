"""`filter deploy|list|delete`: WebAssembly modules by which brokers filter for consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from protomq_cli.asking import ask_to_delete
from protomq_cli.connection import open_admin
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, OnBroker, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.partial import Missing

if TYPE_CHECKING:
    from protomq import FilterModule

_COLUMNS: Final = ("name", "broker", "broker_id", "size_bytes", "crc32c", "state")
_SLAVES: Final = "a slave that is back takes over what its master has, by itself"

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

    It goes to masters and their slaves.
    It exports `memory`, `alloc` and `matches`, and imports nothing.
    Consumers name it: subscribe(topic, module="NAME").
    """
    module = file.read_bytes()
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = missing.take(
            lambda: admin.deploy_filter(name, module, brokers=[broker] if broker else None)
        )
    rows = [{"name": name, **_broker(one), "size_bytes": len(module)} for one in brokers]
    print_rows(rows, _COLUMNS[:4], output)
    missing.check_change(of_slaves=_SLAVES)


def list_filters(
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """List the modules of all brokers, slaves too.

    STATE is `missing` where a broker lacks what another one of its name
    has, and `differs` where it is not the version of the master.
    """
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        found = missing.take(admin.list_filters)
    print_rows(filter_rows(found), _COLUMNS, output)
    missing.check(of_slaves=_SLAVES)


def filter_rows(found: Mapping[str, Sequence[FilterModule]]) -> list[dict[str, Any]]:
    """A row for each module at each broker of a name that has it, sorted. `found`: as Admin.list_filters returns it."""
    brokers = {label: {module.name: module for module in modules} for label, modules in found.items()}
    wanted: dict[str, set[str]] = {}
    for label, modules in brokers.items():
        wanted.setdefault(_broker(label)["broker"], set()).update(modules)
    rows = []
    for label, modules in brokers.items():
        broker = _broker(label)
        of_master = brokers.get(broker["broker"], {})
        for name in wanted[broker["broker"]]:
            rows.append({"name": name, **broker, **_version(modules.get(name), of_master.get(name))})
    return sorted(rows, key=lambda row: (row["name"], row["broker"], row["broker_id"]))


def _version(module: FilterModule | None, of_master: FilterModule | None) -> dict[str, Any]:
    """What is said of a module at a broker, and of that of its master. None: there is none."""
    if module is None:
        return {"size_bytes": None, "crc32c": None, "state": "missing"}
    is_other = of_master is not None and of_master.crc32c != module.crc32c
    return {
        "size_bytes": module.size_bytes,
        "crc32c": f"{module.crc32c:08x}",
        "state": "differs" if is_other else "",
    }


def _broker(label: str) -> dict[str, Any]:
    """The columns of a broker's label: a name, of a slave `name/id`."""
    name, _, broker_id = label.partition("/")
    return {"broker": name, "broker_id": int(broker_id or 0)}


def delete(
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    broker: OnBroker = None,
    namesrv: Namesrv = None,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Delete a module, at masters and their slaves.

    Consumers that name it are refused from then on.
    """
    if not yes:
        ask_to_delete(f"Delete the filter {name}{f' on {broker}' if broker else ''}?")
    missing = Missing()
    with open_admin(namesrv, timeout) as admin:
        brokers = missing.take(
            lambda: admin.delete_filter(name, brokers=[broker] if broker else None)
        )
    if not brokers:
        missing.check_change(of_slaves=_SLAVES)
        raise CliError(
            ExitCode.NOT_FOUND,
            "FILTER_NOT_FOUND",
            f"no broker has a filter {name!r}; `protomq filter list` shows all there are",
        )
    print_rows([{"name": name, **_broker(one)} for one in brokers], _COLUMNS[:3], output)
    missing.check_change(of_slaves=_SLAVES)
