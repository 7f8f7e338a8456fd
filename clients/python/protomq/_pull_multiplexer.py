"""Many pulls (or other held calls) in flight at several brokers, waited for by one thread, without a reader thread.

Over the remoting port there is one connection per broker; what brokers send ahead waits in the kernel's buffers until the
thread comes. Over gRPC the calls run in gRPC's own threads, which put the outcome on a queue and wake the selector. Connecting
is done by a short-lived thread per broker, so that a machine that does not answer holds up its own queues only.

One thread at a time (the consumer's lock); `wake` may come from any thread or signal handler.
"""

from __future__ import annotations

import errno
import logging
import queue as thread_queue
import selectors
import socket
import threading
import time
from collections.abc import Set
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from . import _methods
from ._held_pops import GIVE_UP_S, give_up_of
from ._interrupts import comes_of_signal
from ._late_imports import fork_waits
from ._remoting_hello import error_of_answer
from ._remoting_sync import PipelinedConnection
from ._transport import SyncTransport
from ._transport_options import ECHO_S, HELD, NEWS_S, LongHold, given_up
from ._types import BrokerAddress, MethodInfo
from .errors import ConnectFailedError, ConnectionLostError, ProtomqError, RequestTimeoutError

if TYPE_CHECKING:
    from ._grpc_transport import GrpcLink

logger = logging.getLogger("protomq")

CONNECT_TIMEOUT_S: Final = 3.0
EXPIRY_INTERVAL_S: Final = 0.1
"""While answers come: between two looks for calls whose time is up."""
_DOUBT_PERIOD_S: Final = HELD.look_s + NEWS_S


class Outcome(NamedTuple):
    """How a call ended."""

    ticket: Any
    result: bytes | ProtomqError


class _InFlight(NamedTuple):
    ticket: Any
    connection: PipelinedConnection
    sent_at_s: float
    deadline_s: float
    silent_s: float
    """See LongHold."""


class _GrpcCall(NamedTuple):
    address: BrokerAddress
    sent_at_s: float
    link: GrpcLink
    payload: bytes


class _Request(NamedTuple):
    ticket: Any
    payload: bytes
    timeout_s: float
    long_hold: LongHold | None


class _Connected(NamedTuple):
    """What a connecting thread found: a PipelinedConnection, a GrpcLink or the error."""

    address: BrokerAddress
    link: Any


class PullMultiplexer:
    """The pulls of one consumer, or its calls of another method. `ticket`: whatever tells the owner which call ended."""

    def __init__(self, transport: SyncTransport, method: MethodInfo = _methods.PULL) -> None:
        self._transport = transport
        self._method = method
        self._closed = False
        try:
            self._selector = selectors.DefaultSelector()
            try:
                self._wake_in, self._wake_out = socket.socketpair()
            except BaseException:
                self._selector.close()
                raise
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):  # A signal's handler may raise a TimeoutError here, which is the program's.
                raise
            raise ConnectFailedError(f"no connection to any broker can be made: {error}") from error
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._connections: dict[BrokerAddress, PipelinedConnection] = {}
        self._connecting: dict[BrokerAddress, list[_Request]] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._request_ids: dict[Any, int] = {}
        """Of those in flight over the remoting port, by ticket."""
        self._request_id = 0
        self._asked_at_s: dict[PipelinedConnection, float] = {}
        """When the last echo was sent, while there was no word since."""
        self._look_at_s = 0.0
        self._heard_at_s: dict[BrokerAddress, float] = {}
        self._grpc_calls: dict[Any, _GrpcCall] = {}
        self._grpc_tickets: dict[Any, Any] = {}
        self._given_up: set[Any] = set()
        # From other threads, each followed by a wake-up.
        self._reports: thread_queue.SimpleQueue[Outcome | _Connected] = thread_queue.SimpleQueue()

    def send(
        self, address: BrokerAddress, ticket: Any, payload: bytes, timeout_s: float, long_hold: LongHold | None = None
    ) -> None:
        """Sends a pull, once there is a connection; `timeout_s` is the hold and some room. `wait` tells how it ended.

        `long_hold`: how long it may take over the remoting port instead.
        """
        request = _Request(ticket, payload, timeout_s, long_hold)
        connection = self._connections.get(address)
        if connection is not None:
            self._send(address, connection, request)
        elif address in self._connecting:
            self._connecting[address].append(request)
        else:
            thread = threading.Thread(target=self._connect, args=(address,), name="protomq-connect", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # No more threads now: it is tried again as where nobody listens.
                self._reports.put(Outcome(ticket, ConnectFailedError(f"{address.broker_name}: {error}")))
                self.wake()
                return
            self._connecting[address] = [request]  # What the thread reports is taken in `wait`.

    def give_up(self, ticket: Any) -> None:
        """Ends what a server holds; `wait` tells how, unless the server is silent."""
        request_id = self._request_ids.get(ticket)
        if request_id is not None:
            try:
                self._in_flight[request_id].connection.give_up(request_id)
            except ProtomqError:
                self.drop(ticket)
            return
        for call, of_call in list(self._grpc_tickets.items()):
            if of_call == ticket:
                self._give_up_grpc(call)
                return
        for requests in self._connecting.values():
            for request in requests:
                if request.ticket == ticket:
                    requests.remove(request)
                    self._reports.put(Outcome(ticket, ConnectionLostError(f"{self._method.path} was given up")))
                    self.wake()
                    return

    def drop(self, ticket: Any) -> None:
        """Closes the connection of a call, if that is under way."""
        request_id = self._request_ids.get(ticket)
        if request_id is None:
            return
        item = self._in_flight[request_id]
        address = next(address for address, connection in self._connections.items() if connection is item.connection)
        lost: list[Outcome] = []
        self._lose(address, item.connection, ConnectionLostError(f"{self._method.path} was given up"), lost)
        for outcome in lost:
            self._reports.put(outcome)
        self.wake()

    def wait(self, timeout_s: float, size_max_bytes: int) -> list[Outcome]:
        """What ended by now, or within the time if nothing had. May end early with nothing, as after a wake-up.

        Stops reading answers of a connection once this many bytes have come; with 0 it reads none.
        """
        outcomes: list[Outcome] = []
        ahead = [
            address
            for address, connection in self._connections.items()
            if connection.has_received_ahead and size_max_bytes
        ]
        if self._transport.is_replaced is not None and (self._in_flight or self._grpc_calls):
            timeout_s = min(timeout_s, NEWS_S)
        ready = self._selector.select(0.0 if ahead else max(timeout_s, 0.0))
        for address in ahead:
            self._receive(address, size_max_bytes, outcomes)
        for key, _ in ready:
            if key.data is None:
                self._drain_wakes()
            else:
                self._receive(key.data, size_max_bytes, outcomes)
        while not self._reports.empty():
            report = self._reports.get_nowait()
            if isinstance(report, Outcome):
                outcomes.append(report)
            else:
                self._connected(report, outcomes)
        # Not where something could be read: an answer may have waited for a user who came late.
        self._expire({*ahead, *(key.data for key, _ in ready)}, outcomes)
        return outcomes

    def wake(self) -> None:
        """Ends a wait."""
        try:
            self._wake_out.send(b"\0")
        except OSError as error:
            if comes_of_signal(error):
                raise
            # Full, then it wakes anyway; or closed.

    def close(self) -> None:
        """Closes all connections; the brokers drop what they hold for them. In a forked child it closes the child's copies."""
        self._closed = True
        self._selector.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        for call in list(self._grpc_calls):
            call.cancel()
        self._close_late_connections()
        self._wake_in.close()
        self._wake_out.close()

    def abandon(self) -> None:
        """Closes a forked child's copies of what belongs to its parent, who goes on with it."""
        self._grpc_calls.clear()
        self.close()

    # -- connecting, on a thread of its own ------------------------------------------------------------------------------

    def _connect(self, address: BrokerAddress) -> None:
        link: Any
        try:
            link = self._transport.open_pipelined(address, self._method.lane, CONNECT_TIMEOUT_S)
        except ProtomqError as error:
            link = error
        except Exception as error:  # A defect must not leave the queue waiting for ever.
            logger.exception("connecting to %s", address.broker_name)
            link = ConnectFailedError(f"{address.broker_name}: {error!r}")
        self._reports.put(_Connected(address, link))
        self.wake()
        if self._closed:
            self._close_late_connections()

    def _close_late_connections(self) -> None:
        while True:
            try:
                report = self._reports.get_nowait()
            except thread_queue.Empty:
                return
            if isinstance(report, _Connected) and isinstance(report.link, PipelinedConnection):
                report.link.close()

    def _connected(self, report: _Connected, outcomes: list[Outcome]) -> None:
        address, link = report
        requests = self._connecting.pop(address, [])
        if isinstance(link, ProtomqError):
            outcomes.extend(Outcome(request.ticket, link) for request in requests)
        elif isinstance(link, PipelinedConnection):
            self._connections[address] = link
            self._selector.register(link, selectors.EVENT_READ, address)
            for request in requests:
                self._send(address, link, request)
        else:
            for request in requests:
                self._send_grpc(address, link, request)

    # -- the remoting port -----------------------------------------------------------------------------------------------

    def _send(
        self, address: BrokerAddress, connection: PipelinedConnection, request: _Request
    ) -> None:
        self._request_id = request_id = self._request_id + 1 & 0xFFFFFFFF
        now_s = time.monotonic()
        timeout_s, silent_s = request.long_hold or (request.timeout_s, float("inf"))
        self._in_flight[request_id] = _InFlight(request.ticket, connection, now_s, now_s + timeout_s, silent_s)
        self._request_ids[request.ticket] = request_id
        try:
            connection.send(request_id, self._method, request.payload, timeout_s)
        except ProtomqError as error:
            lost: list[Outcome] = []
            self._lose(address, connection, error, lost)
            for outcome in lost:
                self._reports.put(outcome)
            self.wake()

    def _receive(
        self, address: BrokerAddress, size_max_bytes: int, outcomes: list[Outcome]
    ) -> None:
        connection = self._connections.get(address)
        if connection is None:
            return  # Lost while this round was under way.
        try:
            answers = connection.receive(size_max_bytes)
        except ProtomqError as error:
            self._lose(address, connection, error, outcomes)
            return
        for request_id, status, payload in answers:
            in_flight = self._in_flight.pop(request_id, None)
            if in_flight is not None:
                self._request_ids.pop(in_flight.ticket, None)
                result = error_of_answer(status, payload) if status else payload
                outcomes.append(Outcome(in_flight.ticket, result))

    def _expire(self, heard: Set[BrokerAddress | None], outcomes: list[Outcome]) -> None:
        """A broker that does not even end a hold is not there any more; `heard`: those of which something could be read."""
        now_s = time.monotonic()
        # Before the bound of looks: the answer to an echo comes right behind the look that has sent it.
        for of in heard:
            if of is not None:
                self._heard_at_s[of] = now_s
        if heard and now_s < self._look_at_s:
            return  # Messages are coming: a look at all calls for each of them would cost too much.
        self._look_at_s = now_s + EXPIRY_INTERVAL_S
        late = {item.connection for item in self._in_flight.values() if item.deadline_s <= now_s}
        sent_at_s: dict[PipelinedConnection, float] = {}
        long_held: dict[PipelinedConnection, _InFlight] = {}
        for item in self._in_flight.values():
            sent_at_s.setdefault(item.connection, item.sent_at_s)  # The first is the oldest.
            if item.silent_s != float("inf"):
                long_held.setdefault(item.connection, item)
        for address, connection in list(self._connections.items()):
            error: ProtomqError
            if address in heard:
                continue
            if connection in late or (connection in long_held and self._is_silent(address, long_held[connection], now_s)):
                error = RequestTimeoutError(f"{address.remoting_address}: no answer to a pull in time")
            elif self._is_replaced(address, sent_at_s.get(connection, now_s), now_s):
                error = given_up(address.remoting_address, self._method)
            else:
                continue
            self._lose(address, connection, error, outcomes)
        calls = list(self._grpc_calls.items())
        oldest = {one.address: one.sent_at_s for _, one in reversed(calls)}
        replaced = {address for address, sent_s in oldest.items() if self._is_replaced(address, sent_s, now_s)}
        for call, one in calls:
            if one.address in replaced:
                self._given_up.add(call)
                if not call.cancel():  # It has ended meanwhile, and nobody else would forget it here.
                    self._given_up.discard(call)

    def _is_silent(self, address: BrokerAddress, item: _InFlight, now_s: float) -> bool:
        """Whether a broker says nothing, even though it was asked. Asks it if that is due. `item`: its oldest long-held call."""
        since_s = max(item.sent_at_s, self._heard_at_s.get(address, item.sent_at_s))
        asked_at_s = self._asked_at_s.get(item.connection, float("-inf"))
        if now_s < since_s + item.silent_s:
            return False
        if asked_at_s > since_s:
            return now_s >= max(since_s + item.silent_s, asked_at_s) + ECHO_S
        self._request_id = self._request_id + 1 & 0xFFFFFFFF
        try:
            item.connection.ask(self._request_id)
        except ProtomqError:
            return True
        self._asked_at_s[item.connection] = now_s
        return False

    def _is_replaced(self, address: BrokerAddress, sent_at_s: float, now_s: float) -> bool:
        """Whether another broker leads under the name of one that has said nothing since: see `SyncTransport.is_replaced`.

        It is asked for a moment, until the route that it has looked up is there, and again after `HELD.look_s`.
        """
        is_replaced = self._transport.is_replaced
        doubt_s = now_s - max(sent_at_s, self._heard_at_s.get(address, sent_at_s)) - HELD.silent_s
        return is_replaced is not None and doubt_s >= 0 and doubt_s % _DOUBT_PERIOD_S < 2 * NEWS_S and is_replaced(address, HELD.silent_s)

    def _lose(
        self,
        address: BrokerAddress,
        connection: PipelinedConnection,
        error: ProtomqError,
        outcomes: list[Outcome],
    ) -> None:
        """Closes a connection; all that was in flight on it has failed."""
        if self._connections.get(address) is connection:
            del self._connections[address]
            self._selector.unregister(connection)
        self._asked_at_s.pop(connection, None)
        connection.close()
        for request_id in [
            i for i, item in self._in_flight.items() if item.connection is connection
        ]:
            ticket = self._in_flight.pop(request_id).ticket
            self._request_ids.pop(ticket, None)
            outcomes.append(Outcome(ticket, error))

    # -- gRPC ------------------------------------------------------------------------------------------------------------

    def _send_grpc(self, address: BrokerAddress, link: GrpcLink, request: _Request) -> None:
        try:
            call = link.begin(self._method, request.payload, request.timeout_s)
        except ValueError as error:  # The channel is closed.
            self._reports.put(Outcome(request.ticket, ConnectionLostError(str(error))))
            self.wake()
            return
        self._grpc_calls[call] = _GrpcCall(address, time.monotonic(), link, request.payload)
        self._grpc_tickets[call] = request.ticket
        call.add_done_callback(lambda done: self._grpc_ended(request.ticket, address, done))

    def _give_up_grpc(self, call: Any) -> None:
        # gRPC drops the answer to a call that is cancelled, even if it is here. A pop's may have messages that nobody else gets then.
        if self._method.method_id != _methods.POP.method_id:
            call.cancel()
            return
        made = self._grpc_calls.get(call)
        if made is None:
            return  # It has ended.
        request = give_up_of((made.payload,))
        if request is None:
            return

        def heard(done: Any) -> None:
            """Runs in a thread of gRPC's."""
            if done.cancelled() or done.exception() is not None:  # A broker of an earlier version: the pop would take what comes later.
                call.cancel()

        try:
            made.link.begin(_methods.GIVE_UP_POP, request, GIVE_UP_S).add_done_callback(heard)
        except ValueError:  # The channel is closed.
            call.cancel()

    def _grpc_ended(self, ticket: Any, address: BrokerAddress, call: Any) -> None:
        """Runs in a thread of gRPC's."""
        with fork_waits:
            from ._grpc_transport import outcome_of_future

        self._grpc_calls.pop(call, None)
        self._grpc_tickets.pop(call, None)
        result = outcome_of_future(call, self._method)
        if isinstance(result, bytes):
            self._heard_at_s[address] = time.monotonic()
        elif call in self._given_up:
            result = given_up(address.grpc_address, self._method)
        self._given_up.discard(call)
        self._reports.put(Outcome(ticket, result))
        self.wake()

    def _drain_wakes(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            return
