"""A network between here and a namespace of its own, with a router between that can be told to drop everything without a word.

    this process  10.231.N.1 ── veth ── 10.231.N.2  router  10.231.N.5 ── veth ── 10.231.N.6  inside

With forwarding off, neither end sees anything but silence: no RST, no ICMP, links stay up, as if the machine at the other end had vanished.
Linux, as root, with network namespaces and veth; `why_no_network` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from functools import cache
from typing import Final, TypeVar

CLONE_NEWNET: Final = 0x40000000

T = TypeVar("T")


@cache
def why_no_network() -> str:
    """Why there can be none here; "" if there can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    try:
        with VanishingNetwork():
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', b'') or error!r}"


@cache
def why_no_netem() -> str:
    """Why there can be no delay and loss by the kernel here; "" if there can."""
    if reason := why_no_network():
        return reason
    if shutil.which("tc") is None:
        return "there is no `tc` command"
    try:
        with VanishingNetwork() as network:
            network.spoil(1, 1.0)
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the kernel has no netem: {getattr(error, 'stderr', '') or error!r}"


class VanishingNetwork:
    """Made at `__enter__`, gone at `__exit__`. `outside`: this process's address; `inside`: the other end's."""

    def __init__(self) -> None:
        self._number = os.getpid() % 250
        self._tag = f"pmq{os.getpid() % 1_000_000}"
        net = f"10.231.{self._number}"
        self.outside, self._near = f"{net}.1", f"{net}.2"
        self._far, self.inside = f"{net}.5", f"{net}.6"

    def __enter__(self) -> VanishingNetwork:
        tag = self._tag
        try:
            for name in ("r", "i"):
                _run("ip", "netns", "add", tag + name)
                _run("ip", "-n", tag + name, "link", "set", "lo", "up")
            _run(
                "ip",
                "link",
                "add",
                tag + "a",
                "type",
                "veth",
                "peer",
                tag + "b",
                "netns",
                tag + "r",
            )
            _run(
                "ip", "-n", tag + "r", "link", "add", tag + "c", "type", "veth", "peer", tag + "d", "netns", tag + "i",
            )  # fmt: skip
            self._set_up(None, tag + "a", self.outside)
            self._set_up(tag + "r", tag + "b", self._near)
            self._set_up(tag + "r", tag + "c", self._far)
            self._set_up(tag + "i", tag + "d", self.inside)
            _run("ip", "route", "add", f"{self.inside}/32", "via", self._near)
            _run("ip", "-n", tag + "i", "route", "add", f"{self.outside}/32", "via", self._far)
            self.heal()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The links go with the namespaces that they end in.
        for name in ("r", "i"):
            subprocess.run(
                ["ip", "netns", "delete", self._tag + name], check=False, capture_output=True
            )
        subprocess.run(["ip", "link", "delete", self._tag + "a"], check=False, capture_output=True)

    def vanish(self) -> None:
        """From now on whatever is sent is lost."""
        self._forward("0")

    def heal(self) -> None:
        """Packets get through again."""
        self._forward("1")

    def spoil(self, delay_ms: float, loss_percent: float) -> None:
        """From now on each packet is late, and some are lost, both ways, by tc netem. A round trip takes twice the delay."""
        for end in ("b", "c"):
            netem = ("netem", "delay", f"{delay_ms:g}ms", "loss", f"{loss_percent:g}%")
            _run("tc", "-n", self._tag + "r", "qdisc", "replace", "dev", self._tag + end, "root", *netem)

    def enter(self) -> None:
        """Moves this thread inside, and those that it starts, for ever."""
        _enter(self._tag + "i")

    def run_inside(self, function: Callable[[], T]) -> T:
        """Runs a function on a thread that lives inside: sockets that it opens and processes that it starts are there, too."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                _enter(self._tag + "i")
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def connections_inside(self, port: int) -> int:
        """TCP connections to a port that the inside still has open."""
        files = ("/proc/net/tcp", "/proc/net/tcp6")
        rows = _run("ip", "netns", "exec", self._tag + "i", "cat", *files).splitlines()
        fields = [row.split() for row in rows]
        return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in fields)

    def _set_up(self, namespace: str | None, link: str, address: str) -> None:
        place = ("-n", namespace) if namespace else ()
        _run("ip", *place, "address", "add", f"{address}/30", "dev", link)
        _run("ip", *place, "link", "set", link, "up")

    def _forward(self, value: str) -> None:
        script = f"echo {value} > /proc/sys/net/ipv4/ip_forward"
        _run("ip", "netns", "exec", self._tag + "r", "sh", "-c", script)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _enter(namespace: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if library.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    finally:
        os.close(descriptor)
