"""Fakes: a clock that is advanced by hand, and a TCP proxy that makes faults.

`FaultProxy` stands between a client and a server and does what networks do: it delays bytes, loses answers, and cuts connections
in the middle. What is random comes from the seed. It knows nothing of protomq.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final

from protomq._checks import check_count, check_seconds
from protomq.errors import ConfigurationError, WrongTypeError

_PIECE_SIZE: Final = 64 << 10
_RETRANSMISSION_S: Final = 0.2
"""Linux waits that long, and a round trip, before it sends again what was lost (TCP_RTO_MIN)."""
_RATE_PARTS_PER_S: Final = 100
"""Parts of a second that go through at a time, where a rate is given."""

_Pair = tuple[socket.socket, socket.socket]


class FakeClock:
    """A clock that stands still until it is told to move. Any thread.

    It offers what protomq's clocks offer: `now_ms` (wall clock), `monotonic_ms`, and `monotonic` in seconds.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._wall_ms = now_ms
        self._monotonic_ms = 0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self._wall_ms

    def monotonic_ms(self) -> int:
        """Milliseconds since an arbitrary point."""
        return self._monotonic_ms

    def monotonic(self) -> float:
        """Seconds since the same point."""
        return self._monotonic_ms / 1000

    def advance(self, milliseconds: int) -> None:
        """Time passes."""
        if milliseconds < 0:
            raise ValueError("time does not run backwards; `jump_wall` sets the wall clock")
        with self._lock:
            self._monotonic_ms += milliseconds
            self._wall_ms += milliseconds

    def jump_wall(self, milliseconds: int) -> None:
        """Somebody sets the wall clock: it jumps, forwards or back, and the monotonic clock does not."""
        with self._lock:
            self._wall_ms += milliseconds


@dataclass(frozen=True, slots=True)
class Faults:
    """What a proxy does to a connection; all off by default.

    - `delay_s`: the delay of every piece, in both directions. `jitter_s`: the largest random delay on top.
    - `loss_probability`: chance, for each piece, that it is lost on the way. TCP sends it again: it arrives, and all that is behind it in
      its direction, 200 ms and a round trip (twice the delay) later. `FaultProxy.losses` counts them.
    - `rate_bytes_per_s`: most that goes through in a second, in each direction of a connection; None: as much as comes.
    - `drop_requests`, `drop_answers`: bytes of that direction are read and thrown away; the connection stays open.
    - `cut_after_request_bytes`, `cut_after_answer_bytes`: the proxy closes both sides once that number of bytes went through in that
      direction since the start of the connection. The byte that goes over the limit does not arrive.
    - `cut_probability`: chance, for each piece, that the connection is closed instead.
    - `refuse`: new connections are closed at once.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss_probability: float = 0.0
    rate_bytes_per_s: int | None = None
    drop_requests: bool = False
    drop_answers: bool = False
    cut_after_request_bytes: int | None = None
    cut_after_answer_bytes: int | None = None
    cut_probability: float = 0.0
    refuse: bool = False

    def __post_init__(self) -> None:
        """Refuses what a proxy cannot do: else the first piece would end the thread that carries it, and be lost."""
        for name in ("delay_s", "jitter_s"):
            check_seconds(name, getattr(self, name), zero=True)
        for name in ("loss_probability", "cut_probability"):
            _check_probability(name, getattr(self, name))
        if self.rate_bytes_per_s is not None:
            check_count("rate_bytes_per_s", self.rate_bytes_per_s, 1)
        for name in ("cut_after_request_bytes", "cut_after_answer_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 0)
        for name in ("drop_requests", "drop_answers", "refuse"):
            if not isinstance(getattr(self, name), bool):
                raise WrongTypeError(f"{name} is True or False, not {getattr(self, name)!r}")


def _check_probability(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongTypeError(f"{name} is a number from 0 to 1, not {value!r}")
    if not 0 <= value <= 1:
        raise ConfigurationError(f"{name} is 0 to 1, not {value}")


class FaultProxy:
    """A TCP proxy on a free port of 127.0.0.1 with faults that can be changed at any time.

        with FaultProxy() as proxy:
            with Broker(environment=proxy.advertised()) as broker:
                proxy.target = broker.remoting_address
                producer = Producer(namesrv=broker.namesrv)      # finds the proxy in the route
                proxy.set(drop_answers=True)

    `faults` holds for what comes from now on, on all connections. Any thread.
    """

    def __init__(self, target: str = "", *, seed: int = 0, faults: Faults | None = None) -> None:
        if not isinstance(target, str):
            raise WrongTypeError(f"target is a str, HOST:PORT, not {target!r}")
        if target and not target.rpartition(":")[2].isdecimal():
            raise ConfigurationError(f"target is HOST:PORT, not {target!r}")
        self.target = target
        self.faults = faults or Faults()
        self.seed = seed
        self.connections_accepted = 0
        self.losses = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._closed = False
        self._pairs: set[_Pair] = set()
        self._swallowed: set[_Pair] = set()
        self._on_answer: Callable[[bytes], None] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [
            threading.Thread(target=self._accept, name=f"fault-proxy-{self.address}", daemon=True)
        ]
        self._threads[0].start()

    def advertised(self) -> dict[str, str]:
        """Environment that makes a standalone broker advertise the proxy in place of its remoting port."""
        return {"PROTOMQ_LISTEN_ADVERTISED_REMOTING_PORT": self.address.rpartition(":")[2]}

    def set(self, **changes: Any) -> None:
        """Changes some of the faults: `proxy.set(drop_answers=True)`. Refuses values that a fault cannot have."""
        self.faults = replace(self.faults, **changes)

    def heal(self) -> None:
        """No faults from now on. Connections that lost bytes are cut: they could only confuse their ends."""
        lossy = self.faults.drop_answers or self.faults.drop_requests
        self.faults = Faults()
        if lossy:
            self.cut()

    def on_answer(self, callback: Callable[[bytes], None] | None) -> None:
        """Calls back with each piece that comes from the server, before its fate is decided: to act at the right moment."""
        self._on_answer = callback

    def swallow(self) -> int:
        """What comes on the connections of now disappears, both ways; new ones are well. As a firewall that forgot them."""
        with self._lock:
            self._swallowed |= self._pairs
            return len(self._pairs)

    def cut(self) -> int:
        """Closes all connections now; how many there were."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._close(pair)
        return len(pairs)

    def close(self) -> None:
        """Ends the proxy and all its connections."""
        self._closed = True
        # Closing a listening socket does not wake its accept; connecting to it does.
        try:
            socket.create_connection(self._listener.getsockname(), 1.0).close()
        except OSError:
            pass
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5.0)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._closed:
                client.close()
                return
            if self.faults.refuse or not self.target:
                client.close()
                continue
            host, _, port = self.target.rpartition(":")
            try:
                server = socket.create_connection((host, int(port)), 5.0)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections_accepted += 1
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                thread = threading.Thread(
                    target=self._pump,
                    args=(pair, source, sink, is_answer),
                    name="fault-proxy-pump",
                    daemon=True,
                )
                self._threads.append(thread)
                thread.start()

    def _pump(
        self,
        pair: _Pair,
        source: socket.socket,
        sink: socket.socket,
        is_answer: bool,
    ) -> None:
        passed = 0
        try:
            while piece := source.recv(_PIECE_SIZE):
                if is_answer and self._on_answer is not None:
                    self._on_answer(piece)
                faults = self.faults
                if faults.delay_s or faults.jitter_s:
                    time.sleep(faults.delay_s + faults.jitter_s * self._draw())
                if faults.loss_probability and self._draw() < faults.loss_probability:
                    with self._lock:
                        self.losses += 1
                    time.sleep(_RETRANSMISSION_S + 2 * faults.delay_s)
                if faults.cut_probability and self._draw() < faults.cut_probability:
                    break
                if pair in self._swallowed or (
                    faults.drop_answers if is_answer else faults.drop_requests
                ):
                    continue
                limit = (
                    faults.cut_after_answer_bytes if is_answer else faults.cut_after_request_bytes
                )
                if limit is not None and passed + len(piece) > limit:
                    sink.sendall(piece[: max(limit - passed, 0)])
                    break
                passed += len(piece)
                self._send(sink, piece)
        except OSError:
            pass  # One side has gone; the other is closed below.
        self._close(pair)

    def _send(self, sink: socket.socket, piece: bytes) -> None:
        """Sends a piece, in parts that keep to the rate of the moment."""
        at = 0
        while at < len(piece):
            rate = self.faults.rate_bytes_per_s
            end = len(piece) if rate is None else at + max(rate // _RATE_PARTS_PER_S, 1)
            part = piece[at:end]
            if rate is not None:
                time.sleep(len(part) / rate)
            sink.sendall(part)
            at += len(part)

    def _draw(self) -> float:
        with self._lock:
            return self._random.random()

    def _close(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.discard(pair)
            self._swallowed.discard(pair)
        for sock in pair:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()
