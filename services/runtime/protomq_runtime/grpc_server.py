"""The gRPC front: every method of the dispatch table, health and reflection, on one grpc.aio server.

Everything here runs on the event loop that started it; there is one in a process. Requests and responses stay bytes (identity
serialisers). A unary call crosses to its lane and comes back once. Calls of one loop iteration go on a lane's queue together, and
a lane hands back all answers of its turn by one call_soon_threadsafe. Streams run on the loop itself.

`maximum_concurrent_rpcs` stays unset: each lane's queue and the number of holds bound the calls. Connections and their streams have
limits of their own (`connection_limits.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from .addresses import Address
from .connection_limits import ConnectionLimits, grpc_options
from .dispatch import BoundMethod, DispatchTable, Style
from .errors import (
    SHUTTING_DOWN,
    ServiceError,
    internal,
    request_too_large,
    unparsable,
)
from .grpc_call import GrpcCall, StreamContext
from .grpc_gathering import Gathering
from .grpc_status import abort, deadline_of, plain_peer
from .grpc_stock import (
    HEALTH_SERVICE,
    REFLECTION_SERVICES,
    UnknownMethods,
    add_health,
    add_reflection,
)
from .lane import Lane
from .lane_pool import LanePool
from .listening import bound_socket
from .principals import (
    AUTHORIZATION_KEY,
    Authenticator,
    Principal,
    check_authorization_size,
)
from .unread_answers import UnreadAnswers

logger = logging.getLogger(__name__)

METADATA_SIZE_MAX_BYTES: Final = 16 << 10
PENDING_CALLS_MAX: Final = 30_000
LAST_ANSWERS_GRACE_S: Final = 0.1
"""For answers that are made but not sent yet when the server closes."""

UNREAD_SIZE_MAX_BYTES: Final = 4 << 20
"""Of a connection's answers that are made and not taken: as much as a gRPC client accepts in one message unless it says otherwise."""


class _CallersThatLeft(logging.Filter):
    """grpc.aio reports an answer that could not be sent, since its caller is gone, as an error with a traceback: it is neither."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        return kind is None or kind.__name__ != "ExecuteBatchError"


CALLERS_THAT_LEFT: Final = _CallersThatLeft()


def server_options(request_size_max_bytes: int, limits: ConnectionLimits) -> list[tuple[str, int]]:
    """Channel arguments of the server."""
    return [
        # On by default, and then a second server shares the port without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", request_size_max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", METADATA_SIZE_MAX_BYTES),
        # Calls that the loop has not picked up yet. With the default of 1,000 a burst of pulls, as after a restart, is cancelled in part:
        # of 10,000 at once only 4,500 were served.
        ("grpc.server.max_pending_requests", PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS_MAX),
        *grpc_options(limits),
    ]


class GrpcServer:
    """The server. All methods on the event loop, except `deliver`."""

    def __init__(
        self,
        table: DispatchTable,
        pools: Mapping[str, LanePool],
        *,
        request_size_max_bytes: int,
        limits: ConnectionLimits,
        authenticator: Authenticator,
    ) -> None:
        self._authenticator = authenticator
        self._loop = asyncio.get_running_loop()
        self._refusing = False
        self._open_calls: set[GrpcCall] = set()
        self._all_answered: asyncio.Event | None = None
        lanes = [lane for pool in pools.values() for lane in pool.lanes]
        self._gathering = Gathering(self._loop, lanes)
        self.unread = UnreadAnswers(UNREAD_SIZE_MAX_BYTES)
        logging.getLogger("grpc._cython.cygrpc").addFilter(CALLERS_THAT_LEFT)
        self._server = grpc.aio.server(options=server_options(request_size_max_bytes, limits))
        self._server.add_generic_rpc_handlers(self._handlers(table, pools))
        self._health = health.aio.HealthServicer()
        add_health(self._server, self._health)
        self._service_names = ["", *table.service_names]
        add_reflection(self._server, [*table.service_names, HEALTH_SERVICE, *REFLECTION_SERVICES])
        self._server.add_generic_rpc_handlers([UnknownMethods()])  # the last: it takes what is left

    def bind(self, host: str, port: int) -> int:
        """Takes the port; answers which, if 0 was asked for. Raises OSError."""
        address = Address(host, port)
        bound_socket(address, "gRPC").close()  # gRPC itself does not say why it cannot.
        try:
            bound = self._server.add_insecure_port(str(address))
        except RuntimeError:
            bound = 0
        if not bound:
            raise OSError(f"cannot listen on {address} for gRPC; another process has just taken the port")
        return int(bound)

    async def start(self) -> None:
        await self._server.start()
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def refuse(self) -> None:
        """From now on new calls are refused, and health says NOT_SERVING."""
        self._refusing = True
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Waits until the unary calls under way are answered, with a time-out, and closes. It does not wait for streams."""
        if self._open_calls:
            self._all_answered = asyncio.Event()
            try:
                await asyncio.wait_for(self._all_answered.wait(), grace_s)
            except TimeoutError:
                logger.warning("%d calls were not answered within the grace", len(self._open_calls))
        await self._server.stop(LAST_ANSWERS_GRACE_S)

    def deliver(self, answers: list[Any]) -> None:
        """As AnswerSink, on a lane's thread: the answers of one turn."""
        try:
            self._loop.call_soon_threadsafe(_resolve, answers)
        except RuntimeError:
            logger.info("%d answers came after the event loop was closed", len(answers))

    def count_hold(self, lane: Lane, change: int) -> None:
        """A call began or ended to be held by that lane. Lane thread."""
        self._gathering.held[lane] += change

    def _handlers(
        self, table: DispatchTable, pools: Mapping[str, LanePool]
    ) -> list[grpc.GenericRpcHandler]:
        by_service: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {
            name: {} for name in table.service_names
        }
        for bound in table:
            method = bound.method
            handler: grpc.RpcMethodHandler[Any, Any]
            if bound.style is Style.STREAMING:
                handler = grpc.unary_stream_rpc_method_handler(self._stream_handler(bound))
            else:
                handler = grpc.unary_unary_rpc_method_handler(
                    self._unary_handler(bound, pools[method.lane])
                )
            by_service[method.service][method.name] = handler
        return [
            grpc.method_handlers_generic_handler(name, handlers)
            for name, handlers in by_service.items()
        ]

    def _unary_handler(
        self, bound: BoundMethod, pool: LanePool
    ) -> Callable[[bytes, Any], Awaitable[bytes]]:
        loop = self._loop
        pick = pool.pick_for_call
        size_max_bytes = bound.method.request_size_max_bytes
        monotonic = time.monotonic
        open_calls = self._open_calls
        gathering = self._gathering
        under_way = gathering.under_way

        async def handle(payload: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            lane = pick()
            if self._refusing:
                await abort(context, SHUTTING_DOWN)
            if len(payload) > size_max_bytes:
                await abort(
                    context, request_too_large(bound.method.name, len(payload), size_max_bytes)
                )
            if not gathering.has_room(lane):
                lane.rejection_count += 1
                await abort(context, lane.busy_error)
            try:
                principal = self._principal_of(context)
            except ServiceError as error:
                await abort(context, error)
            received = monotonic()
            future: asyncio.Future[bytes | ServiceError] = loop.create_future()
            call = GrpcCall(
                self,
                lane,
                bound,
                payload,
                context.peer(),
                principal,
                received,
                deadline_of(context, received),
                future,
            )
            open_calls.add(call)
            under_way[lane] += 1
            gathering.submit(lane, call)
            try:
                answer = await future
            except asyncio.CancelledError:
                call.abandon()
                if not future.cancelled():  # The answer came, and nobody takes it.
                    call.settle()
                raise
            finally:
                open_calls.discard(call)
                under_way[lane] -= 1
                if not open_calls and self._all_answered is not None:
                    self._all_answered.set()
            if call.unread_size_bytes:
                on_done: Any = lambda _: call.settle()  # noqa: E731  (the stubs ask for too much)
                context.add_done_callback(on_done)
            if isinstance(answer, ServiceError):
                await abort(context, answer)
            return answer

        return handle

    def _principal_of(self, context: grpc.aio.ServicerContext[Any, Any]) -> Principal:
        """Who calls. Raises ServiceError."""
        authorization = ""
        for key, value in context.invocation_metadata() or ():
            if key == AUTHORIZATION_KEY:
                authorization = cast("str", value)
                check_authorization_size(authorization)
        return self._authenticator.authenticate(authorization, plain_peer(context.peer()))

    def _stream_handler(self, bound: BoundMethod) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
        size_max_bytes = bound.method.request_size_max_bytes

        async def handle(
            payload: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            if self._refusing:
                await abort(context, SHUTTING_DOWN)
            if len(payload) > size_max_bytes:
                await abort(
                    context, request_too_large(bound.method.name, len(payload), size_max_bytes)
                )
            try:
                try:
                    request = bound.method.request_class.FromString(payload)
                except DecodeError:
                    raise unparsable(bound.method.request_class.DESCRIPTOR.full_name) from None
                principal = self._principal_of(context)
                stream = StreamContext(context, deadline_of(context, time.monotonic()), principal)
                async for response in bound.function(request, stream):
                    yield response.SerializeToString()
            except ServiceError as error:
                await abort(context, error)
            except Exception:
                logger.exception("%s failed for %s", bound.method.path, context.peer())
                await abort(context, internal())

        return handle


def _resolve(answers: list[tuple[GrpcCall, bytes | ServiceError]]) -> None:
    for call, answer in answers:
        if not call.future.done():
            call.future.set_result(answer)
        else:
            call.settle()
