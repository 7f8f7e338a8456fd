"""Two brokers with one name and a store each, started, killed, stopped, frozen and thawed beside name servers that are restarted.

N1   as long as a name server can be asked, at most one of the two takes sends, and it is the one in the routes
N2   a broker that has the name and is not touched keeps it, in the routes of every name server too
N3   while it has it, the other one does not start
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from protomq.errors import ProtomqError
from tests.support.named_brokers import REFUSED, Process, read_ready, routed_to, start
from tests.support.namesrv import Namesrv, running_namesrv

from .checker import Violation

SETTLE_S = 25.0
"""For brokers to find their name servers again, who try every 3 s and are given 10 s after a restart of a name server."""
START_S = 30.0


class NamesWorld:
    """The processes. `owner`: who had the name at the last check."""

    def __init__(self, seed: int, folder: Path, stack: ExitStack, counts: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.counts = counts
        self.folder = folder
        self.brokers: dict[str, Process] = {}
        self.owner = ""
        self.violations: list[Violation] = []
        self._stack = stack
        self._ports = [(_free_port(), _free_port()) for _ in range(self.rng.choice((1, 2)))]
        self._name_servers = [ExitStack() for _ in self._ports]
        self.name_servers: list[Namesrv] = [
            self._start_name_server(i) for i in range(len(self._ports))
        ]
        stack.callback(self._end)

    def round(self) -> None:
        """One thing happens, then everything settles and is checked."""
        idle = [name for name in ("x", "y") if name not in self.brokers]
        actions = [lambda: self.start(self.rng.choice(idle))] if idle else []
        if self.brokers:
            victim = self.rng.choice(sorted(self.brokers))
            actions += [
                lambda: self.end(victim, signal.SIGKILL),
                lambda: self.end(victim, signal.SIGTERM),
                lambda: self.freeze(victim),
                lambda: self.restart_name_server(self.rng.randrange(len(self.name_servers))),
            ]
            if idle:  # The case that all is about comes up more often.
                actions += actions[:1] * 3
        self.rng.choice(actions)()
        self.check()

    def start(self, name: str) -> None:
        """A broker is started; one that does not own the name may not."""
        self.counts["starts"] += 1
        addresses = [server.remoting for server in self.name_servers]
        child = start(self.folder / name, *addresses)
        ready = read_ready(child)
        if ready is not None:
            self.brokers[name] = ready
            if self.owner and self.owner != name:
                self._broken("N3", f"{name} started while {self.owner} had the name")
            return
        code = child.wait(START_S)
        _close(child)
        self.counts["refused starts"] += 1
        if code != REFUSED:
            self._broken("N3", f"{name} ended with code {code}")

    def end(self, name: str, number: signal.Signals) -> None:
        """A broker ends."""
        self.counts[number.name] += 1
        child = self.brokers.pop(name).process
        child.send_signal(number)
        child.wait(START_S)
        _close(child)
        self.owner = ""

    def freeze(self, name: str) -> None:
        """A broker stands still for a while; the other one may be started meanwhile."""
        self.counts["freezes"] += 1
        child = self.brokers[name].process
        child.send_signal(signal.SIGSTOP)
        if name == self.owner:
            self.owner = ""
        time.sleep(self.rng.uniform(0.2, 2.5))
        other = "y" if name == "x" else "x"
        if other not in self.brokers and self.rng.random() < 0.7:
            self.start(other)
        child.send_signal(signal.SIGCONT)
        self.owner = ""

    def restart_name_server(self, index: int) -> None:
        """A name server forgets everything."""
        self.counts["name servers restarted"] += 1
        self._name_servers[index].close()
        self.name_servers[index] = self._start_name_server(index)

    def check(self) -> None:
        """Waits until N1 holds; then N2."""
        end = time.monotonic() + SETTLE_S
        while (wrong := self._n1()) and time.monotonic() < end:
            time.sleep(0.1)
        if wrong:
            self._broken("N1", wrong)
        owners = [name for name in self.brokers if self._takes_sends(name)]
        if self.owner and owners != [self.owner]:
            self._broken(
                "N2", f"{self.owner} had the name and was not touched; now it is with {owners}"
            )
        self.owner = owners[0] if len(owners) == 1 else ""

    def _n1(self) -> str:
        owners = [name for name in sorted(self.brokers) if self._takes_sends(name)]
        if len(owners) != min(1, len(self.brokers)):
            return f"{owners} take sends, of {sorted(self.brokers)}"
        expected = [self.brokers[name].address.remoting_address for name in owners]
        for server in self.name_servers:
            try:
                routed = routed_to(server)
            except ProtomqError as error:
                return str(error)
            if routed != expected:
                return f"{owners} takes sends at {expected}, routes lead to {routed}"
        return ""

    def _takes_sends(self, name: str) -> bool:
        try:
            return self.brokers[name].takes_sends()
        except ProtomqError:
            return False

    def _broken(self, promise: str, message: str) -> None:
        self.violations.append(Violation(promise, message))

    def _start_name_server(self, index: int) -> Namesrv:
        self._name_servers[index] = ExitStack()
        # Long enough for brokers to come back after a restart; what it takes to notice a dead one is short.
        server = running_namesrv(*self._ports[index], newcomer=10_000)
        return self._name_servers[index].enter_context(server)

    def _end(self) -> None:
        for broker in self.brokers.values():
            broker.process.kill()
            broker.process.wait()
            _close(broker.process)
        for server in self._name_servers:
            server.close()


def name_rounds(seed: int, rounds: int, counts: Counter[str]) -> list[Violation]:
    """So many things happen, one after the other."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        world = NamesWorld(seed, Path(folder), stack, counts)
        world.start("x")
        world.check()
        for _ in range(rounds):
            world.round()
            if world.violations:
                break
        return world.violations


def _close(child: subprocess.Popen[str]) -> None:
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
