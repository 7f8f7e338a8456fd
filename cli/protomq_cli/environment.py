"""Which PROTOMQ_* variables there are: one that is misspelled would be ignored silently.

Commands read a few; `standalone`, `namesrv` and `broker` read one for each of their settings. A variable of any of them is fine with every
command, since one environment may serve several; their values are the servers' to judge. Only PROTOMQ_NAMESRV is refused where a command
would have to guess its name server (settings.py). One in small letters that would be read in capitals is said, too.

What Kubernetes and Docker put into every container for a service that is called `protomq` looks the same, and is let pass.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

from protomq_cli.exits import CliError, ExitCode
from protomq_cli.settings import CONFIG_VARIABLE, NAMESRV_VARIABLE

PREFIX: Final = "PROTOMQ_"
SHARD_VARIABLE: Final = "PROTOMQ_SHARD"
"""Number of the shard, in the environment of a child of `broker --shards`."""
WORKER_PROCESS_VARIABLE: Final = "PROTOMQ_WORKER_PROCESS"
"""Number of the process, in the environment of those of `worker`: the SDK reads it."""
OF_COMMANDS: Final = (NAMESRV_VARIABLE, CONFIG_VARIABLE, SHARD_VARIABLE, WORKER_PROCESS_VARIABLE)
OF_COMPOSE: Final = "PROTOMQ_IMAGE"
"""The image of deploy/compose/compose.yaml: whoever exports it for docker compose uses commands in the same shell."""
OF_TESTS: Final = "PROTOMQ_CHAOS_"
_OF_CONTAINERS: Final = re.compile(
    r"PROTOMQ_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)"
)


def check_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Raises CliError for a variable that nothing reads, with what is like it."""
    suspects = [
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX)
        and name not in (*OF_COMMANDS, OF_COMPOSE)
        and not name.startswith(OF_TESTS)
        and not _is_of_containers(name, value)
    ]
    if not suspects:
        return
    of_servers = _variables_of_servers()
    known = {*OF_COMMANDS, *(of_servers or ())}
    for name in sorted(set(suspects) - known):
        if name.startswith(PREFIX):
            near = difflib.get_close_matches(name, known, 3, 0.8)
        else:
            near = [name.upper()] if name.upper() in known else []
        if not near and (of_servers is None or not name.startswith(PREFIX)):
            continue  # It may be a server's, none of which is installed here; in small letters it is somebody else's.
        hint = f"do you mean {' or '.join(near)}?" if near else "unset it"
        raise CliError(
            ExitCode.USAGE, "UNKNOWN_VARIABLE", f"environment: nothing reads {name}; {hint}"
        )


def _is_of_containers(name: str, value: str) -> bool:
    if name.endswith("_PORT") and value.startswith(("tcp://", "udp://")):
        return True
    return _OF_CONTAINERS.fullmatch(name) is not None


def _variables_of_servers() -> Iterable[str] | None:
    """Of all their settings; None where they are not installed."""
    try:
        from protomq_broker.config import BrokerConfig
        from protomq_namesrv.config import NamesrvConfig
        from protomq_runtime.config import variables_of
    except ModuleNotFoundError:
        return None
    return [*variables_of(BrokerConfig), *variables_of(NamesrvConfig)]
