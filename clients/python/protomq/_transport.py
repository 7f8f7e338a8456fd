"""How a call reaches a server: over the remoting port first, over gRPC where that cannot be reached.

Rules:
- Nothing is opened at import or construction; a forked child starts with no connections (its parent's are not touched).
- A call is made once. Whether to make it again is for the caller to decide, by the error's attributes. There is one exception: a call
  of `REPEATABLE` (`_methods.py`), where the server turns out to have closed the connection. It is made again, once, on a new one.
- The choice is made per server and remembered, 30 s for a remoting port that does not answer, or has no place for a connection. It is
  remembered longer for a port that speaks otherwise, and no longer than a call over gRPC finds a server. `kind(address)` tells it; a change
  is logged.

`AsyncTransport` (module `_async_transport`) has the same interface with `async def call` and `async def close`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from . import _forks
from ._late_imports import fork_waits, load_needed_modules
from ._methods import WATCHED
from ._remoting_sync import ConnectionPool, PipelinedConnection, probe
from ._transport_options import (
    WATCHED_CONNECT_S,
    TransportOptions,
    was_answered,
    was_refused,
    was_silent,
)
from ._types import BrokerAddress, MethodInfo
from .errors import (
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    ConnectionLostError,
    ForeignProtocolError,
)

if TYPE_CHECKING:
    from ._grpc_transport import GrpcLink

logger = logging.getLogger("protomq")

Kind = Literal["remoting", "grpc"]
_T = TypeVar("_T")

RETRY_REMOTING_AFTER_S: Final = 30.0
"""The SDK tries an unreachable remoting port again after this time."""
RETRY_FOREIGN_AFTER_S: Final = 600.0
"""A port that answered in another protocol will hardly change its mind."""


class Choice:
    """Which transport to use for a server: pure bookkeeping, time handed in."""

    def __init__(self, transport: Literal["auto", "remoting", "grpc"]) -> None:
        self._transport = transport
        self._grpc_until: dict[BrokerAddress, float] = {}
        self._told: set[BrokerAddress] = set()

    def try_remoting(self, address: BrokerAddress, now_s: float) -> bool:
        """Whether to try the remoting port now. After a failure one caller is told so when the time has come, no others."""
        transport = self._transport_for(address)
        if transport == "remoting":
            return True
        if transport == "grpc" or not address.remoting_address:
            return False
        until_s = self._grpc_until.get(address)
        if until_s is None:
            return True
        if now_s < until_s:
            return False
        self._grpc_until[address] = now_s + RETRY_REMOTING_AFTER_S
        return True

    def retry_is_due(self, address: BrokerAddress, now_s: float) -> bool:
        """Whether `try_remoting` would say yes to a server that gRPC is used for."""
        return (
            self._transport_for(address) == "auto"
            and bool(address.remoting_address)
            and now_s >= self._grpc_until.get(address, 0.0)
        )

    def may_fall_back(self, address: BrokerAddress, error: ConnectFailedError | None = None) -> bool:
        """Whether gRPC may be tried when the remoting port cannot be reached, or could not be for `error`.

        A port that may be either answers a hello in its own way. One that is silent, or refuses, says nothing about its protocol. One that
        says why it takes no further connection is no gRPC port.
        """
        if self._transport_for(address) != "auto" or not address.grpc_address:
            return False
        return error is None or not _is_one_port(address) or not (was_silent(error) or was_refused(error) or was_answered(error))

    def _transport_for(self, address: BrokerAddress) -> Literal["auto", "remoting", "grpc"]:
        """A name server is known by one address, of either kind: what is chosen for brokers says nothing about it."""
        return self._transport if address.broker_name else "auto"

    def connect_timeout_s(
        self, address: BrokerAddress, timeout_s: float, connect_timeout_s: float
    ) -> float:
        """How long to try the remoting port: some of the time is left for gRPC."""
        return min(timeout_s * 0.4 if self.may_fall_back(address) else timeout_s, connect_timeout_s)

    def fell_back(self, address: BrokerAddress, error: ConnectFailedError, now_s: float) -> None:
        """gRPC's port answers where the remoting port did not. The first of a row is told."""
        foreign = isinstance(error, ForeignProtocolError)
        self._grpc_until[address] = now_s + (
            RETRY_FOREIGN_AFTER_S if foreign else RETRY_REMOTING_AFTER_S
        )
        if address not in self._told and not _is_one_port(address):
            self._told.add(address)
            logger.warning(
                "remoting port of %s cannot be used: using gRPC (%s)",
                address.broker_name or address.remoting_address,
                error,
            )

    def grpc_failed(self, address: BrokerAddress) -> None:
        """A call over gRPC found no server. What made gRPC the choice may be over: the next call tries the remoting port first."""
        if address in self._grpc_until:
            self._grpc_until[address] = 0.0

    def reached(self, address: BrokerAddress) -> None:
        """The remoting port answers."""
        self._grpc_until.pop(address, None)
        self._told.discard(address)


def _is_one_port(address: BrokerAddress) -> bool:
    """Whether it may be of either kind, as a name server's: then gRPC is nothing to warn of."""
    return address.grpc_address == address.remoting_address


def check_grpc(refused: ConnectFailedError | None) -> None:
    """Raises ConfigurationError in a forked child in which gRPC cannot be used, or `refused`, where the other port is only away."""
    if not _forks.grpc_is_lost:
        return
    if refused is not None and not isinstance(refused, ForeignProtocolError):
        raise refused
    raise ConfigurationError(
        "gRPC hangs or crashes in this process: an asyncio client of its parent had a gRPC channel when it was forked. Start it with "
        "multiprocessing's \"spawn\", fork before that client is used, or use the remoting port"
    )


# gRPC's objects must not even be collected in a forked child: their threads are not there.
_GRPC_LINKS_OF_PARENTS: list[object] = []


class _Link(Protocol):
    @property
    def kind(self) -> Kind: ...

    def call(
        self,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        one_way: bool,
        is_replaced: Callable[[], bool] | None = None,
    ) -> bytes: ...

    def end_held(self, threads: Set[int]) -> None: ...

    def close(self) -> None: ...


class SyncTransport:
    """Calls from threads: blocking sockets from a pool, one in use per thread at a time, no reader thread.

    Any thread may call everything.
    """

    is_replaced: Callable[[BrokerAddress, float], bool] | None = None
    """Whether another broker leads under the name of one that has been silent for a number of seconds, or longer. Calls of `WATCHED` ask it
    while they wait, and end with ConnectionLostError if so. They try to connect for WATCHED_CONNECT_S. Then their caller is to look at the
    route.
    """

    def __init__(self, options: TransportOptions | None = None) -> None:
        load_needed_modules()
        self.options = options or TransportOptions()
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._fork_count = _forks.fork_count
        # RLocks know who has them: a signal's handler may close it on a thread that has one, and Ctrl-C may come behind `acquire`.
        self._lock = threading.RLock()
        self._links: dict[tuple[BrokerAddress, int], _Link] = {}
        self._left: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()
        """Those that gRPC has taken the place of, as long as calls are under way on them."""
        self._opening: dict[tuple[BrokerAddress, int], threading.RLock] = {}
        self._grpc_links: dict[str, GrpcLink] = {}
        self._kinds: dict[BrokerAddress, Kind] = {}
        self._choice = Choice(self.options.transport)

    def _start_in_child(self) -> None:
        """Closes the child's copies of idle sockets (the parent's stay open) and lets gRPC's objects be: they cannot be used."""
        links = list(self._links.values())
        _GRPC_LINKS_OF_PARENTS.append(self._grpc_links)
        self._start()
        for link in links:
            if isinstance(link, ConnectionPool):
                link.close_copies()

    def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        """Calls a method and returns the encoded response; the pieces of `payload` together are the encoded request.

        `timeout_s` covers connecting, sending and waiting, and goes on the wire as the deadline. `one_way`: returns b"" as
        soon as the request is handed to the kernel; nothing tells whether it arrived.

        Raises ConnectFailedError, ConnectionLostError, RequestTimeoutError, ProtocolError, ClosedError, or the ServerError
        that the server answered with.
        """
        if self._fork_count != _forks.fork_count:
            self._start_in_child()
        key = (address, method.lane)
        is_replaced: Callable[[], bool] | None = None
        if self.is_replaced is not None and method.method_id in WATCHED:
            is_replaced = partial(self.is_replaced, address, WATCHED[method.method_id].silent_s)
        connect_timeout_s = self.options.connect_timeout_s
        link = self._links.get(key)
        if link is None or link.kind == "grpc":
            started_s = time.monotonic()
            if link is None or self._choice.retry_is_due(address, started_s):
                if is_replaced is not None:
                    connect_timeout_s = min(connect_timeout_s, WATCHED_CONNECT_S)
                link = self._make_link(key, timeout_s, connect_timeout_s)
                timeout_s = max(timeout_s - (time.monotonic() - started_s), 0.001)
        try:
            return link.call(method, payload, timeout_s, one_way, is_replaced)
        except ConnectionLostError:
            if link.kind == "grpc":
                self._choice.grpc_failed(address)
            raise
        except ConnectFailedError as error:  # Nothing was sent.
            if link.kind == "grpc":
                self._choice.grpc_failed(address)
                raise
            if not self._choice.may_fall_back(address, error):
                raise
            if is_replaced is not None and was_silent(error):
                # It was reached here before. Most likely the machine is gone, not the port.
                raise
            grpc_link = self._fall_back(address, timeout_s, error, connect_timeout_s)
            assert isinstance(link, ConnectionPool)
            with self._lock:
                self._links[key] = grpc_link
                self._left.add(link)
            link.leave()  # Not closed: other threads' calls that the server holds are as well as before.
            return grpc_link.call(method, payload, timeout_s, one_way, is_replaced)

    def open_pipelined(
        self, address: BrokerAddress, lane: int, timeout_s: float
    ) -> PipelinedConnection | GrpcLink:
        """For one consumer alone: a connection that carries many calls at once, or what gRPC offers. The caller closes the former.

        Raises ConnectFailedError, ClosedError, or the ServerError of a refused hello.
        """
        if self._fork_count != _forks.fork_count:
            self._start_in_child()
        return self._choose(
            address,
            timeout_s,
            self.options.connect_timeout_s,
            lambda limit_s: PipelinedConnection.open(
                address.remoting_address,
                lane,
                self.options.hello_client_id(),
                limit_s,
                self.options.peer_timeout_s,
            ),
        )

    @property
    def is_closed(self) -> bool:
        """Whether it takes no calls any more."""
        return self._closed

    def kind(self, address: BrokerAddress) -> Kind | Literal[""]:
        """The transport last used for the server: "remoting", "grpc", or "" before the first call."""
        return self._kinds.get(address, "")

    def wait_for_one_way(self, timeout_s: float) -> None:
        """Waits until what was asked without an answer is gone, and no close can hold it back. The kernel has it at once, gRPC later."""
        deadline_s = time.monotonic() + timeout_s
        if self._fork_count == _forks.fork_count:
            for link in list(self._grpc_links.values()):
                link.wait_for_one_way(deadline_s - time.monotonic())

    def end_held(self, threads: Set[int]) -> None:
        """Ends calls that servers hold for these threads, with ClosedError: their client is closed, the transport may be another's, too."""
        if self._fork_count != _forks.fork_count:
            return
        with self._lock:
            links: list[_Link] = [*self._links.values(), *self._left, *self._grpc_links.values()]
        for link in links:
            link.end_held(threads)

    def close(self) -> None:
        """Closes all connections: idle ones now, those in use when their call ends. May be called twice."""
        self._closed = True
        with self._lock:
            links: list[_Link] = [*self._links.values(), *self._left, *self._grpc_links.values()]
            self._links.clear()
            self._grpc_links.clear()
        if self._fork_count == _forks.fork_count:
            for link in links:
                link.close()

    def __enter__(self) -> SyncTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_link(
        self, key: tuple[BrokerAddress, int], timeout_s: float, connect_timeout_s: float
    ) -> _Link:
        """Connects, and keeps the link for the calls to come. One thread does it, the others wait for it."""
        address, lane = key
        started_s = time.monotonic()
        with self._lock:
            opening = self._opening.setdefault(key, threading.RLock())
        try:
            # Whoever opens tries both ports.
            if not opening.acquire(timeout=min(timeout_s, 2 * connect_timeout_s)):
                raise ConnectFailedError(
                    f"no connection to {address.broker_name or address.remoting_address} in time"
                ) from TimeoutError()
            link = self._links.get(key)
            if link is not None and (
                link.kind == "remoting" or not self._choice.retry_is_due(address, started_s)
            ):
                return link

            def open_pool(limit_s: float) -> ConnectionPool:
                pool = ConnectionPool(address.remoting_address, lane, self.options)
                pool.prepare(limit_s)
                return pool

            link = self._choose(
                address, max(timeout_s - (time.monotonic() - started_s), 0.001), connect_timeout_s, open_pool
            )
            with self._lock:
                self._links[key] = link
                closed = self._closed
                if closed:  # Behind that: a signal's handler may close it here, too.
                    self._links.pop(key, None)
                links = list(self._links.values())
        finally:
            with suppress(RuntimeError):  # Another thread has it.
                opening.release()
        if closed:
            link.close()
            raise ClosedError("the transport is closed")
        # A broker may have come back under this address; nobody calls the one that it had before.
        for each in links:
            if isinstance(each, ConnectionPool):
                each.close_lost()
        return link

    def _choose(
        self,
        address: BrokerAddress,
        timeout_s: float,
        connect_timeout_s: float,
        open_remoting: Callable[[float], _T],
    ) -> _T | GrpcLink:
        """What `open_remoting` opens, or a gRPC link where the remoting port cannot be reached."""
        if self._closed:
            raise ClosedError("the transport is closed")
        started_s = time.monotonic()
        refused: ConnectFailedError | None = None
        if self._choice.try_remoting(address, started_s):
            if not address.remoting_address:
                raise ConnectFailedError(
                    f"broker {address.broker_name!r} advertises no remoting port"
                )
            limit_s = self._choice.connect_timeout_s(address, timeout_s, connect_timeout_s)
            try:
                opened = open_remoting(limit_s)
            except ConnectFailedError as error:
                if not self._choice.may_fall_back(address, error):
                    raise
                refused = error
            else:
                self._choice.reached(address)
                self._kinds[address] = "remoting"
                return opened
        return self._fall_back(
            address, max(timeout_s - (time.monotonic() - started_s), 0.001), refused, connect_timeout_s
        )

    def _fall_back(
        self,
        address: BrokerAddress,
        timeout_s: float,
        refused: ConnectFailedError | None,
        connect_timeout_s: float,
    ) -> GrpcLink:
        """The gRPC link of a server that is there; `refused`: why the remoting port is not used."""
        if not address.grpc_address:
            raise ConnectFailedError(f"broker {address.broker_name!r} advertises no gRPC port")
        check_grpc(refused)
        if address.grpc_address not in self._grpc_links:
            # A plain connect first: it tells a dead server from a living one at once and without loading grpc.
            probe(address.grpc_address, min(timeout_s, connect_timeout_s))
        link = self._grpc_link(address.grpc_address)
        if refused is not None:
            self._choice.fell_back(address, refused, time.monotonic())
        self._kinds[address] = "grpc"
        return link

    def _grpc_link(self, grpc_address: str) -> GrpcLink:
        with fork_waits:
            from ._grpc_transport import GrpcLink  # grpc is loaded where it is needed only.

            # The first channel imports more of grpc.
            with self._lock:
                if self._closed:
                    raise ClosedError("the transport is closed")
                link = self._grpc_links.get(grpc_address)
                if link is None:
                    link = self._grpc_links[grpc_address] = GrpcLink(
                        grpc_address, self.options.peer_timeout_s
                    )
            if self._closed:  # By a signal's handler, meanwhile.
                link.close()
                raise ClosedError("the transport is closed")
            return link
