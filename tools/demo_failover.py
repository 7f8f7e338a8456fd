"""`make demo-failover`: the flights through three brokers, whose master is killed with -9 on the way.

    demo_failover.py [--count N] [--flights FILE] [--folder DIR]

deploy/3r-etcd is started at free ports, the flights are sent, a third of them before the kill, and read again: every one once, in order.
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

from protomq import Admin
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
def running(folder: Path) -> Iterator[Cluster]:
    """deploy/3r-etcd; ended as by Ctrl-C."""
    command = [sys.executable, str(ROOT / "tools/cluster.py"), str(ROOT / "deploy/3r-etcd")]
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


def wait_for_master(admin: Admin, copies: int) -> str:
    """gRPC address of the broker that leads, as soon as so many copies are in sync."""
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        try:
            states = admin.ha_status()
            if any(each.in_sync_count >= copies for each in states):
                brokers = admin.cluster_info()
                return next(str(each.address.grpc_address) for each in brokers if each.broker_id == 0)
        except (ProtomqError, StopIteration):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"no master with {copies} copies in sync within {WAIT_S:.0f} s")


def killing(flights: Iterator[Flight], at: int, cluster: Cluster, master: str) -> Iterator[Flight]:
    """The flights; before one of them the master is killed."""
    for number, flight in enumerate(flights):
        if number == at:
            print(f"{at:,} flights are on their way: kill -9 of the master at {master}", flush=True)
            os.kill(cluster.pids[master], signal.SIGKILL)
        yield flight


def main() -> int:
    parser = argparse.ArgumentParser(description="The flights, and the master killed on the way.")
    parser.add_argument("--count", type=int, default=None, metavar="N", help="the first N flights only")
    parser.add_argument("--flights", type=Path, default=ROOT / "build/flights/flights.csv", metavar="FILE")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/demo-failover", metavar="DIR")
    arguments = parser.parse_args()
    count = arguments.count or FLIGHT_COUNT
    shutil.rmtree(arguments.folder, ignore_errors=True)
    check = RoundTripCheck()
    try:
        with running(arguments.folder) as cluster, Admin(namesrv=cluster.namesrv) as admin:
            master = wait_for_master(admin, 3)
            print(f"three brokers in sync, the master at {master}", flush=True)
            flights = killing(read_flights(arguments.flights, count), count // 3, cluster, master)
            sent = produce(
                cluster.namesrv, flights, check, lambda _: None, send_timeout_s=SEND_TIMEOUT_S
            )
            new = wait_for_master(admin, 2)
            received, _ = consume(cluster.namesrv, sent.messages, check, lambda _: None)
    except (RuntimeError, CliError) as error:
        print(f"demo-failover: {error}", file=sys.stderr)
        return 1
    problems = check.problems()
    print(f"the new master is at {new}, with two copies in sync")
    print(f"sent {sent.messages:,}, received {received.messages:,}: {'; '.join(problems) or 'each once, in order'}")
    longest_s, usual_ms = max(sent.latencies_s), 1e3 * median(sent.latencies_s)
    print(f"time without service: {longest_s:.2f} s (the longest send; the median of a send is {usual_ms:.1f} ms)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
