"""The gRPC front: every method of the dispatch table, health and reflection, on one grpc.aio server.

Everything here runs on the event loop that started it; there is one in a process. Requests and responses stay bytes (identity
serialisers). A unary call crosses to its lane and comes back once: calls of one loop iteration are put on a lane's queue together,
and a lane hands back all answers of its turn by one call_soon_threadsafe. Streams run on the loop itself.

`maximum_concurrent_rpcs` stays unset: what bounds the calls is each lane's queue and the number of holds, and connections and their
streams have limits of their own (`connection_limits.py`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, cast
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._base import BaseReflectionServicer

from protomq.wire.status import GRPC_STATUS_DETAILS_KEY
from protomq.wire.status import POOL as STATUS_POOL

from .addresses import Address
from .call import Call
from .connection_limits import ConnectionLimits, grpc_options
from .dispatch import BoundMethod, DispatchTable, Style
from .errors import (
    SHUTTING_DOWN,
    Code,
    ServiceError,
    corrupt_log,
    internal,
    request_too_large,
    unknown_method,
    unparsable,
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
from .regions import Region, ShortFileError, read_regions
from .unread_answers import UnreadAnswers

logger = logging.getLogger(__name__)

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION_SERVICES: Final = (
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)
METADATA_SIZE_MAX_BYTES: Final = 16 << 10
METHOD_LENGTH_SHOWN: Final = 200
"""Of the name of a method that there is not: the answer repeats it, and callers take no more metadata than this server does."""
PENDING_CALLS_MAX: Final = 30_000
LAST_ANSWERS_GRACE_S: Final = 0.1
"""For answers that are made but not sent yet when the server closes."""
GATHER_COUNT_MIN: Final = 4
"""If this many calls for a lane were under way at once lately, the next ones are gathered; fewer callers would only wait longer."""
GATHER_S: Final = 0.002
"""Longest time to gather: a call costs 0.3 ms of CPU, so many callers wait longer for each other anyway."""
CROWD_DECAY: Final = 0.9
"""By how much the number lately under way falls from one group to the next."""

UNREAD_SIZE_MAX_BYTES: Final = 4 << 20
"""Of a connection's answers that are made and not taken: as much as a gRPC client accepts in one message unless it says otherwise."""
COUNTED_SIZE_MIN_BYTES: Final = 4 << 10
"""Smaller answers are not counted: there are many, and calls under way are bounded."""


class _CallersThatLeft(logging.Filter):
    """grpc.aio reports an answer that could not be sent, since its caller is gone, as an error with a traceback: it is neither."""

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        return kind is None or kind.__name__ != "ExecuteBatchError"


CALLERS_THAT_LEFT: Final = _CallersThatLeft()
_STATUS_BY_CODE: Final = {status.value[0]: status for status in grpc.StatusCode}


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


class GrpcCall(Call):
    """A call that came by gRPC. Its answer is one `bytes`, regions read in."""

    __slots__ = ("_closed", "_peer", "_principal", "front", "future", "unread_size_bytes")

    transport = "grpc"
    lane: Lane

    def __init__(
        self,
        front: GrpcServer,
        lane: Lane,
        bound: BoundMethod,
        payload: bytes,
        peer: str,
        principal: Principal,
        received: float,
        deadline: float | None,
        future: asyncio.Future[bytes | ServiceError],
    ) -> None:
        self.front = front
        self.lane = lane
        self.bound = bound
        self.payload = payload
        self._peer = peer
        self._principal = principal
        self.received = received
        self.deadline = deadline
        self.future = future
        self.answered = False
        self._on_close = None
        self._closed = False
        self.span = None
        self.unread_size_bytes = 0
        """Of the answer, from when it is made until its caller has taken it; 0 for small ones, which are not counted."""

    @property
    def peer(self) -> str:
        return plain_peer(self._peer)

    @property
    def principal(self) -> Principal:
        return self._principal

    @property
    def closed(self) -> bool:
        return self._closed

    def answer(
        self, payload: bytes, regions: Sequence[Region] = (), regions_size_bytes: int = 0
    ) -> None:
        span, self.span = self.span, None  # ended when it is known whether the regions can be read
        self._finish(0)
        if regions_size_bytes < COUNTED_SIZE_MIN_BYTES:
            self._make(payload, regions, span)
            return
        lane = self.lane

        def start() -> None:
            self.unread_size_bytes = regions_size_bytes
            if threading.current_thread() is lane:
                self._make(payload, regions, span)
            else:
                lane.post(lambda: self._make(payload, regions, span))

        self.front.unread.begin(self._peer, regions_size_bytes, start)

    def _make(self, payload: bytes, regions: Sequence[Region], span: Any) -> None:
        """On the lane: reads the regions in, unless nobody waits any more; ends the span with what came of it."""
        answer: bytes | ServiceError = payload
        code = 0
        if regions and self._closed:
            code = Code.CANCELLED
        elif regions:
            try:
                answer = b"".join((payload, *read_regions(regions)))
            except (OSError, ShortFileError) as error:
                logger.error("the answer to %s cannot be read: %s", self.method.path, error)
                reason = f"what is stored cannot be read: {error}"
                answer = corrupt_log(reason)
                code = answer.code
        if span is not None:
            span.end(code)
        self.lane.hand_back(self.front, (self, answer))

    def fail(self, error: ServiceError) -> None:
        self._finish(error.code)
        self.lane.hand_back(self.front, (self, error))

    def settle(self) -> None:
        """On the event loop: the answer was taken, or nobody will."""
        if self.unread_size_bytes:
            self.front.unread.settle(self._peer, self.unread_size_bytes)
            self.unread_size_bytes = 0

    def abandon(self) -> None:
        """On the event loop: the caller has gone."""
        self._closed = True
        self.lane.post(self.caller_gone)

    def _watch(self) -> None:
        # If the caller went before this, `abandon` has posted caller_gone, which may have run already.
        if self._closed:
            self.lane.post(self.caller_gone)

    def _count_hold(self, change: int) -> None:
        super()._count_hold(change)
        self.front.held[self.lane] += change


class StreamContext:
    """CallContext of a streaming method."""

    __slots__ = ("_context", "deadline", "principal")

    def __init__(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        deadline: float | None,
        principal: Principal,
    ) -> None:
        self._context = context
        self.deadline = deadline
        self.principal = principal

    @property
    def peer(self) -> str:
        return plain_peer(self._context.peer())

    @property
    def closed(self) -> bool:
        return self._context.done()


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
        self._gathered: dict[Lane, tuple[list[Call], asyncio.Handle]] = {}
        lanes = [lane for pool in pools.values() for lane in pool.lanes]
        self._under_way = dict.fromkeys(lanes, 0)
        self._crowds = dict.fromkeys(lanes, 0.0)
        self.held = dict.fromkeys(lanes, 0)
        """Of the calls under way at a lane, those that it holds; each number is changed by its lane's thread only."""
        self.unread = UnreadAnswers(UNREAD_SIZE_MAX_BYTES)
        logging.getLogger("grpc._cython.cygrpc").addFilter(CALLERS_THAT_LEFT)
        self._server = grpc.aio.server(options=server_options(request_size_max_bytes, limits))
        self._server.add_generic_rpc_handlers(self._handlers(table, pools))
        self._health = health.aio.HealthServicer()
        _add_health(self._server, self._health)
        self._service_names = ["", *table.service_names]
        _add_reflection(self._server, [*table.service_names, HEALTH_SERVICE, *REFLECTION_SERVICES])
        self._server.add_generic_rpc_handlers([_UnknownMethods()])  # the last: it takes what is left

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
        under_way = self._under_way

        async def handle(payload: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            lane = pick()
            if self._refusing:
                await _abort(context, SHUTTING_DOWN)
            if len(payload) > size_max_bytes:
                await _abort(
                    context, request_too_large(bound.method.name, len(payload), size_max_bytes)
                )
            if not lane.has_room(self._gathered_count(lane)):
                lane.rejection_count += 1
                await _abort(context, lane.busy_error)
            try:
                principal = self._principal_of(context)
            except ServiceError as error:
                await _abort(context, error)
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
                _deadline_of(context, received),
                future,
            )
            open_calls.add(call)
            under_way[lane] += 1
            self._submit(lane, call)
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
                await _abort(context, answer)
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

    def _submit(self, lane: Lane, call: Call) -> None:
        """Puts the call on the lane's queue with others: one wake-up, one group.

        Every group costs both threads several hand-overs of the GIL. So where many calls were under way at once lately (held ones do
        not count), the next ones are gathered, until as many are here or a moment has passed. Else a call goes at the end of this
        iteration of the loop.
        """
        crowd = self._crowds[lane] = max(
            self._under_way[lane] - self.held[lane], self._crowds[lane]
        )
        gathered = self._gathered.get(lane)
        if gathered is not None:
            gathered[0].append(call)
            if GATHER_COUNT_MIN <= crowd <= len(gathered[0]):
                gathered[1].cancel()
                self._hand_over(lane)
        elif crowd < GATHER_COUNT_MIN:
            self._gathered[lane] = [call], self._loop.call_soon(self._hand_over, lane)
        else:
            self._gathered[lane] = [call], self._loop.call_later(GATHER_S, self._hand_over, lane)

    def _hand_over(self, lane: Lane) -> None:
        calls, _ = self._gathered.pop(lane)
        self._crowds[lane] *= CROWD_DECAY
        lane.submit_all(calls)

    def _gathered_count(self, lane: Lane) -> int:
        gathered = self._gathered.get(lane)
        return len(gathered[0]) if gathered is not None else 0

    def _stream_handler(self, bound: BoundMethod) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
        async def handle(
            payload: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> AsyncIterator[bytes]:
            if self._refusing:
                await _abort(context, SHUTTING_DOWN)
            try:
                try:
                    request = bound.method.request_class.FromString(payload)
                except DecodeError:
                    raise unparsable(bound.method.request_class.DESCRIPTOR.full_name) from None
                principal = self._principal_of(context)
                stream = StreamContext(context, _deadline_of(context, time.monotonic()), principal)
                async for response in bound.function(request, stream):
                    yield response.SerializeToString()
            except ServiceError as error:
                await _abort(context, error)
            except Exception:
                logger.exception("%s failed for %s", bound.method.path, context.peer())
                await _abort(context, internal())

        return handle


class _UnknownMethods(grpc.GenericRpcHandler):
    """Answers every method with an error that has its ErrorInfo: gRPC's own UNIMPLEMENTED has none."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method[:METHOD_LENGTH_SHOWN]

        async def refuse(payloads: AsyncIterator[bytes], context: Any) -> None:
            await _abort(context, unknown_method(name))

        # Any call looks like a stream of requests with a stream of answers.
        return grpc.stream_stream_rpc_method_handler(cast("Any", refuse))


class _Reflection(reflection.aio.ReflectionServicer):
    """The stock servicer does not find `package.Service.Method`: it is looked up here without its last part. What details of errors
    are made of is found too, so that grpcurl shows them; it is described in a pool of its own (protomq.wire.status).
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        super().__init__(service_names)
        self._of_errors: Any = BaseReflectionServicer((), pool=STATUS_POOL)

    def _file_by_filename(self, request: Any, filename: str) -> Any:
        answer = super()._file_by_filename(request, filename)  # type: ignore[misc]
        if answer.HasField("error_response"):
            return self._of_errors._file_by_filename(request, filename)
        return answer

    def _file_containing_symbol(self, request: Any, fully_qualified_name: str) -> Any:
        answer = super()._file_containing_symbol(request, fully_qualified_name)  # type: ignore[misc]
        owner = fully_qualified_name.rpartition(".")[0]
        if answer.HasField("error_response") and owner:
            answer = super()._file_containing_symbol(request, owner)  # type: ignore[misc]
        if answer.HasField("error_response"):
            answer = self._of_errors._file_containing_symbol(request, fully_qualified_name)
        return answer


def _add_health(server: grpc.aio.Server, servicer: health.aio.HealthServicer) -> None:
    request_class = health_pb2.HealthCheckRequest

    async def check(payload: bytes, context: Any) -> Any:
        return await servicer.Check(await _parse(request_class, payload, context), context)

    async def watch(payload: bytes, context: Any) -> None:
        await servicer.Watch(await _parse(request_class, payload, context), context)

    serializer = health_pb2.HealthCheckResponse.SerializeToString
    handlers: dict[str, Any] = {
        "Check": grpc.unary_unary_rpc_method_handler(check, response_serializer=serializer),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, response_serializer=serializer),
    }
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(HEALTH_SERVICE, handlers)]
    )


def _add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves v1alpha and, since its messages are the same, v1 by the same servicer."""
    from grpc_reflection.v1alpha import reflection_pb2

    servicer = _Reflection(service_names)

    async def info(payloads: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[Any]:
            async for payload in payloads:
                yield await _parse(reflection_pb2.ServerReflectionRequest, payload, context)

        answers: Any = servicer.ServerReflectionInfo(requests(), context)
        async for response in answers:
            yield response

    handler: Any = grpc.stream_stream_rpc_method_handler(
        info, response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in REFLECTION_SERVICES
        ]
    )


def plain_peer(peer: str) -> str:
    """`127.0.0.1:1234` for gRPC's `ipv4:127.0.0.1:1234`, `[::1]:1234` for `ipv6:%5B::1%5D:1234`."""
    scheme, _, address = peer.partition(":")
    return unquote(address) if scheme in ("ipv4", "ipv6") else peer


def _deadline_of(context: grpc.aio.ServicerContext[Any, Any], now: float) -> float | None:
    left = cast("float | None", context.time_remaining())  # The stubs forget the None.
    return None if left is None else now + left


async def _parse(message_class: Any, payload: bytes, context: Any) -> Any:
    """A request; gRPC's own deserialisers answer UNKNOWN and log a traceback for one that does not parse."""
    try:
        return message_class.FromString(payload)
    except DecodeError:
        await _abort(context, unparsable(message_class.DESCRIPTOR.full_name))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    await context.abort(
        _STATUS_BY_CODE[int(error.code)],
        error.message,
        trailing_metadata=((GRPC_STATUS_DETAILS_KEY, error.encode()),),
    )
    raise AssertionError("abort raises")


def _resolve(answers: list[tuple[GrpcCall, bytes | ServiceError]]) -> None:
    for call, answer in answers:
        if not call.future.done():
            call.future.set_result(answer)
        else:
            call.settle()
