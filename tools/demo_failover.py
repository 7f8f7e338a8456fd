"""`make demo-failover`: the flights through the cluster of `make cluster`, one of whose masters is killed with -9 on the way.

    demo_failover.py [--layout DIR] [--count N] [--flights FILE] [--folder DIR]

The layout is started at free ports, the flights are sent, a third of them before the kill, and read again: every one once, in order.
Prints the count and the longest time for which no send was acknowledged. Exit code 0 only if nothing is lost and nothing there twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from protomq import Admin, BrokerRole
from protomq.errors import ProtomqError
from protomq_cli.demo import consume, produce
from protomq_cli.exits import CliError
from protomq_cli.flights import FLIGHT_COUNT, Flight, RoundTripCheck, read_flights

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 60.0
SEND_TIMEOUT_S = 20.0
"""Longer than a fail-over: a producer that waits for less gives its caller an error meanwhile."""


class Cluster(NamedTuple):
    """`pids`: by gRPC address of the broker."""

    namesrv: str
    pids: dict[str, int]


@contextmanager
def running(layout: Path, folder: Path) -> Iterator[Cluster]:
    """The cluster of a folder of deploy/; ended as by Ctrl-C."""
    command = [sys.executable, str(ROOT / "tools/cluster.py"), str(layout)]
    command += ["--free-ports", "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            addresses: dict[str, str] = {}
            for line in process.stdout:
                words = line.split()
                if words[0].startswith("broker"):
                    addresses[words[0]] = words[2]
                if words[0] == "ready":
                    found = dict(word.partition("=")[::2] for word in words[1:])
                    pids = {address: int(found[name]) for name, address in addresses.items()}
                    yield Cluster(found["namesrv"], pids)
                    break
            else:
                raise RuntimeError(f"the cluster does not start: see {folder}")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def wait_for_masters(admin: Admin, brokers: int) -> dict[str, str]:
    """gRPC addresses of the masters by name, as soon as so many brokers lead or are in sync with who leads."""
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        try:
            in_sync = sum(each.in_sync_count for each in admin.ha_status() if each.role is not BrokerRole.SLAVE)
            if in_sync >= brokers:
                return {each.broker_name: str(each.address.grpc_address) for each in admin.cluster_info() if each.broker_id == 0}
        except ProtomqError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"not {brokers} brokers in sync within {WAIT_S:.0f} s")


def killing(flights: Iterator[Flight], at: int, cluster: Cluster, master: str) -> Iterator[Flight]:
    """The flights; before one of them the master is killed."""
    for number, flight in enumerate(flights):
        if number == at:
            print(f"{at:,} flights are on their way: kill -9 of the master at {master}", flush=True)
            os.kill(cluster.pids[master], signal.SIGKILL)
        yield flight


def main() -> int:
    parser = argparse.ArgumentParser(description="The flights, and the master killed on the way.")
    parser.add_argument("--layout", type=Path, default=ROOT / "deploy/2m-2s-etcd", metavar="DIR", help="a folder of deploy/ with etcd")
    parser.add_argument("--count", type=int, default=None, metavar="N", help="the first N flights only")
    parser.add_argument("--flights", type=Path, default=ROOT / "build/flights/flights.csv", metavar="FILE")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/demo-failover", metavar="DIR")
    arguments = parser.parse_args()
    count = arguments.count or FLIGHT_COUNT
    # As Ctrl-C does: the cluster is ended, too, which runs in a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    shutil.rmtree(arguments.folder, ignore_errors=True)
    check = RoundTripCheck()
    try:
        with running(arguments.layout, arguments.folder) as cluster, Admin(namesrv=cluster.namesrv) as admin:
            before = wait_for_masters(admin, len(cluster.pids))
            name, master = min(before.items())
            print(f"{len(cluster.pids)} brokers in sync, the masters at {', '.join(before.values())}", flush=True)
            flights = killing(read_flights(arguments.flights, count), count // 3, cluster, master)
            sent = produce(cluster.namesrv, flights, check, lambda _: None, send_timeout_s=SEND_TIMEOUT_S)
            after = wait_for_masters(admin, len(cluster.pids) - 1)
            received, _ = consume(cluster.namesrv, sent.messages, check, lambda _: None)
    except (RuntimeError, CliError) as error:
        print(f"demo-failover: {error}", file=sys.stderr)
        return 1
    problems = check.problems()
    print(f"the new master of {name} is at {after[name]}, and {len(cluster.pids) - 1} brokers are in sync")
    print(f"sent {sent.messages:,}, received {received.messages:,}: {'; '.join(problems) or 'each once, in order'}")
    longest_s, usual_ms = max(sent.latencies_s), 1e3 * median(sent.latencies_s)
    print(f"time without service: {longest_s:.2f} s (the longest send; the median of a send is {usual_ms:.1f} ms)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
