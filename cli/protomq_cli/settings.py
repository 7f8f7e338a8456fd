"""Where the name server is: flag, then environment, then configuration file, then where one usually is.

The file is `$PROTOMQ_CONFIG`, else `$XDG_CONFIG_HOME/protomq/config.toml` (`~/.config/protomq/config.toml`):

    namesrv = "10.0.0.1:9876;10.0.0.2:9876"

Without any of the three it first tries a name server (port 9876). Then it tries `protomq standalone`, which serves the name
server on its remoting port (10911) and on its gRPC port (8081).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from protomq_cli.exits import CliError, ExitCode

NAMESRV_VARIABLE: Final = "PROTOMQ_NAMESRV_ADDR"
BROKERS_NAMESRV_VARIABLE: Final = "PROTOMQ_NAMESRV"
"""The setting `namesrv` of a broker; commands do not read it, but it is taken for theirs."""
CONFIG_VARIABLE: Final = "PROTOMQ_CONFIG"
STANDALONE_REMOTING_ADDRESS: Final = "127.0.0.1:10911"
USUAL_ADDRESSES: Final = ("127.0.0.1:9876", STANDALONE_REMOTING_ADDRESS, "127.0.0.1:8081")
_PROBE_TIMEOUT_S: Final = 0.5
"""Long enough on one machine: a port without a listener refuses at once."""


def config_path(environment: Mapping[str, str] = os.environ) -> Path:
    """The configuration file of the command line; it need not exist unless the variable names it."""
    if named := environment.get(CONFIG_VARIABLE):
        return Path(named)
    base = environment.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "protomq" / "config.toml"


def configured_namesrv(path: Path, *, must_exist: bool = False) -> str | None:
    """`namesrv` of the configuration file, None if there is no file or no such line. Raises CliError for a file that does not hold."""
    import tomllib

    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        if not must_exist:
            return None
        message = f"{path}: there is no such file; {CONFIG_VARIABLE} names it: mend or unset that"
        raise CliError(ExitCode.NOT_FOUND, "FILE_NOT_FOUND", message) from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CliError(ExitCode.USAGE, "BAD_CONFIG", f"cannot read {path}: {error}") from error
    unknown = sorted(content.keys() - {"namesrv"})
    if unknown:
        raise CliError(
            ExitCode.USAGE, "BAD_CONFIG", f"{path}: nothing reads {unknown[0]!r}; the only key is namesrv"
        )
    value = content.get("namesrv")
    if value is not None and not isinstance(value, str):
        raise CliError(ExitCode.USAGE, "BAD_CONFIG", f"{path}: namesrv must be a text in quotes")
    return value


def listens(address: str) -> bool:
    """Whether something takes a connection there."""
    import socket

    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def named_namesrv(flag: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """What the flag names, else the environment, else the configuration file; None if none of them does. Raises CliError."""
    if flag is not None and not flag.strip():
        raise CliError(ExitCode.USAGE, "USAGE", "--namesrv is empty; give HOST:PORT, or leave it out")
    if flag:
        return flag
    must_exist = bool(environment.get(CONFIG_VARIABLE))
    if named := environment.get(NAMESRV_VARIABLE):
        if must_exist:
            configured_namesrv(config_path(environment), must_exist=True)  # Else a mistyped name goes unnoticed until it matters.
        return named
    return configured_namesrv(config_path(environment), must_exist=must_exist)


def find_namesrv(
    flag: str | None,
    environment: Mapping[str, str] = os.environ,
    probe: Callable[[str], bool] = listens,
    *,
    grpc_only: bool = False,
) -> str:
    """Name-server addresses, several with `;` between. Raises CliError if none is named and none found.

    `grpc_only`: the remoting port is not to be used, so its address will not do.
    """
    if flag is None and not environment.get(NAMESRV_VARIABLE) and environment.get(BROKERS_NAMESRV_VARIABLE):
        raise CliError(
            ExitCode.USAGE,
            "UNKNOWN_VARIABLE",
            f"environment: {BROKERS_NAMESRV_VARIABLE} is a setting of brokers; for commands set {NAMESRV_VARIABLE}, or give --namesrv",
        )
    if named := named_namesrv(flag, environment):
        return named
    for address in USUAL_ADDRESSES:
        if not (grpc_only and address == STANDALONE_REMOTING_ADDRESS) and probe(address):
            return address
    raise CliError(
        ExitCode.UNREACHABLE,
        "NO_NAME_SERVER",
        f"no name server at {', '.join(USUAL_ADDRESSES)}; "
        f"start `protomq standalone`, or name one with --namesrv or {NAMESRV_VARIABLE}",
    )
