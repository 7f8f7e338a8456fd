"""`cluster namesrv`: what each name server knows. They share no state, so one that was started again learns all from the brokers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final

from protomq_cli.connection import open_admin
from protomq_cli.draining import Wait
from protomq_cli.exits import CliError, ExitCode
from protomq_cli.options import DEFAULT_TIMEOUT_S, Namesrv, Output, Timeout
from protomq_cli.output import OutputFormat, print_rows
from protomq_cli.settings import find_namesrv

LOOK_INTERVAL_S: Final = 0.5
_COLUMNS: Final = ("name_server", "brokers", "lacks", "problem")
Row = dict[str, Any]


def name_servers(
    namesrv: Namesrv = None,
    wait: Wait = 0.0,
    output: Output = OutputFormat.TABLE,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
) -> None:
    """Show what each of the name servers knows, and whether they agree.

    `lacks` names brokers that another one knows. Exit code 7 if one does
    not answer or lacks a broker. With --wait it is asked again until then:
    so you know when the next one may be stopped.
    """
    addresses = [part for part in re.split(r"[;,\s]+", find_namesrv(namesrv)) if part]
    rows = wait_until_agreed(lambda: compared(addresses, timeout), wait)
    print_rows(rows, _COLUMNS, output)
    if not is_agreed(rows):
        raise CliError(
            ExitCode.PARTIAL,
            "NAME_SERVERS_DIFFER",
            "the name servers do not know the same brokers yet; leave those that know all of them running, and ask again with --wait 1m",
        )


def wait_until_agreed(
    look: Callable[[], list[Row]],
    wait_s: float | None,
    monotonic_s: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Looks until all know the same, or the time is over; None: as long as it takes."""
    ends_s = None if wait_s is None else monotonic_s() + wait_s
    while True:
        rows = look()
        if is_agreed(rows) or (ends_s is not None and monotonic_s() >= ends_s):
            return rows
        pause(LOOK_INTERVAL_S)


def is_agreed(rows: list[Row]) -> bool:
    """Whether each answers and lacks nothing."""
    return not any(row["lacks"] or row["problem"] for row in rows)


def compared(addresses: list[str], timeout_s: float) -> list[Row]:
    """A row for each name server."""
    from protomq.errors import ProtomqError

    known: dict[str, set[str]] = {}
    problems: dict[str, str] = {}
    for address in addresses:
        try:
            with open_admin(address, timeout_s) as admin:
                known[address] = {f"{each.broker_name}/{each.broker_id}" for each in admin.cluster_info()}
        except ProtomqError as error:
            problems[address] = str(error)
    everything = set().union(*known.values())
    return [
        {
            "name_server": address,
            "brokers": len(known.get(address, ())),
            "lacks": sorted(everything - known.get(address, set())),
            "problem": problems.get(address, ""),
        }
        for address in addresses
    ]
