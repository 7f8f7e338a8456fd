"""The one table that both transports dispatch through: from method to function, made from the service descriptors.

An implementation has one method per rpc, in snake_case. A decorator says how it is called; without one it is a plain
function from request message to response message. Every rpc of an added service must be there: that is checked at start-up.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from protomq.v1 import options_pb2

_Function = TypeVar("_Function", bound=Callable[..., Any])
REQUEST_SIZE_DEFAULT_BYTES = 1 << 20
_STYLE_ATTRIBUTE = "__protomq_style__"
_NEVER_SHED_ATTRIBUTE = "__protomq_never_shed__"


class Style(IntEnum):
    """How a method is called."""

    PLAIN = 0
    RAW = 1
    DRAINED = 2
    STREAMING = 3


def raw(function: _Function) -> _Function:
    """`def pull(self, call: Call) -> None`: gets undecoded bytes and answers the call now or later, on the call's lane."""
    setattr(function, _STYLE_ATTRIBUTE, Style.RAW)
    return function


def drained(function: _Function) -> _Function:
    """`def send(self, calls: list[Call]) -> None`: all calls that the lane collected in one turn of its loop, over all connections."""
    setattr(function, _STYLE_ATTRIBUTE, Style.DRAINED)
    return function


def never_shed(function: _Function) -> _Function:
    """The call tells that work goes on, or ends: a lane that is overloaded serves it all the same. Only a full queue refuses it."""
    setattr(function, _NEVER_SHED_ATTRIBUTE, True)
    return function


def streaming(function: _Function) -> _Function:
    """`async def watch_route(self, request, context) -> AsyncIterator[response]`: gRPC only, on the gRPC event loop."""
    setattr(function, _STYLE_ATTRIBUTE, Style.STREAMING)
    return function


@dataclass(frozen=True, slots=True)
class Method:
    """An rpc as its .proto file describes it."""

    path: str
    """`/protomq.v1.SendService/Send`"""
    service: str
    """`protomq.v1.SendService`"""
    name: str
    """`Send`"""
    method_id: int | None
    """Number over the remoting port; None: gRPC only."""
    lane: str
    """`send`, from LANE_SEND."""
    request_class: type[Message]
    response_class: type[Message]
    server_streaming: bool
    request_size_max_bytes: int
    """A parser makes up to sixty times a request's size of objects: what needs no large requests takes none."""


class BoundMethod:
    """A method and the function that serves it. Immutable once the server has started; any thread."""

    __slots__ = ("function", "may_be_shed", "method", "method_id", "style")

    def __init__(self, method: Method, style: Style, function: Callable[..., Any]) -> None:
        self.method = method
        self.method_id = method.method_id or 0
        self.style = style
        self.may_be_shed = not getattr(function, _NEVER_SHED_ATTRIBUTE, False)
        self.function = function

    def __repr__(self) -> str:
        return f"BoundMethod({self.method.path}, {self.style.name})"


class DispatchTable:
    """All methods of a server. Filled before the server starts, read only afterwards."""

    def __init__(self) -> None:
        self.by_id: dict[int, BoundMethod] = {}
        self.by_path: dict[str, BoundMethod] = {}
        self.implementations: list[Any] = []
        """What has hooks: `start(server)` is called when the lanes run and nobody gets in yet, `stop()` when new calls are refused."""
        self.service_names: list[str] = []

    def add_service(self, service_descriptor: ServiceDescriptor, implementation: Any) -> None:
        """Binds every rpc of the service to the implementation.

        Raises TypeError if one is missing or its style does not fit, ValueError if the service or a method number is taken.
        """
        if service_descriptor.full_name in self.service_names:
            raise ValueError(f"{service_descriptor.full_name} was added before")
        for method in methods_of(service_descriptor):
            bound = _bind(method, implementation)
            if method.method_id is not None:
                taken = self.by_id.setdefault(method.method_id, bound)
                if taken is not bound:
                    raise ValueError(
                        f"{method.path} and {taken.method.path} have the same number {method.method_id:#06x}"
                    )
            self.by_path[method.path] = bound
        self.service_names.append(service_descriptor.full_name)
        if not any(implementation is other for other in self.implementations):
            self.implementations.append(implementation)

    def add_hooks(self, owner: Any) -> None:
        """Has the `start` and `stop` of something called that is no service, behind those that were added before."""
        self.implementations.append(owner)

    @property
    def lane_names(self) -> list[str]:
        """The lanes that unary methods of the table run on."""
        return list(
            dict.fromkeys(
                b.method.lane for b in self.by_path.values() if b.style is not Style.STREAMING
            )
        )

    def __iter__(self) -> Iterator[BoundMethod]:
        return iter(self.by_path.values())


class PoolMethods:
    """The methods of a server as the lanes of one pool see them. Immutable; any thread."""

    __slots__ = ("by_id", "own", "pool_name", "request_sizes_max_bytes")

    def __init__(self, pool_name: str, by_id: Mapping[int, BoundMethod]) -> None:
        """`by_id`: all methods of the server by their number; any may be called on any connection."""
        self.pool_name = pool_name
        self.by_id = by_id
        self.own = {
            number: bound for number, bound in by_id.items() if bound.method.lane == pool_name
        }
        """Those that the pool runs itself."""
        self.request_sizes_max_bytes = {
            number: bound.method.request_size_max_bytes for number, bound in by_id.items()
        }


def methods_of(service_descriptor: ServiceDescriptor) -> Iterable[Method]:
    """The rpcs of a service. Raises ValueError if the service names no lane."""
    lane = service_descriptor.GetOptions().Extensions[options_pb2.lane]
    if lane == options_pb2.LANE_UNSPECIFIED:
        raise ValueError(f"{service_descriptor.full_name} has no option (lane)")
    for descriptor in service_descriptor.methods:
        own = descriptor.GetOptions().Extensions[options_pb2.method_lane]
        yield _method_of(service_descriptor, descriptor, lane_name(own or lane))


def lane_name(lane: int) -> str:
    """`send` for LANE_SEND. Raises ValueError for a number that is no lane."""
    return str(options_pb2.Lane.Name(lane)).removeprefix("LANE_").lower()  # type: ignore[arg-type]


def snake_case(name: str) -> str:
    """`get_route` for `GetRoute`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _method_of(service: ServiceDescriptor, descriptor: MethodDescriptor, lane: str) -> Method:
    options = descriptor.GetOptions()
    method_id = None
    size_max_bytes = options.Extensions[options_pb2.remoting].request_size_max_bytes
    if options.HasExtension(options_pb2.remoting):
        method_id = options.Extensions[options_pb2.remoting].method_id
        if not 0 < method_id < 1 << 16:
            raise ValueError(
                f"{descriptor.full_name}: the method number {method_id} is not within 1 to 65535"
            )
    return Method(
        path=f"/{service.full_name}/{descriptor.name}",
        service=service.full_name,
        name=descriptor.name,
        method_id=method_id,
        lane=lane,
        request_class=message_factory.GetMessageClass(descriptor.input_type),
        response_class=message_factory.GetMessageClass(descriptor.output_type),
        server_streaming=descriptor.server_streaming,
        request_size_max_bytes=size_max_bytes or REQUEST_SIZE_DEFAULT_BYTES,
    )


def _bind(method: Method, implementation: Any) -> BoundMethod:
    name = snake_case(method.name)
    function = getattr(implementation, name, None)
    if not callable(function):
        raise TypeError(
            f"{type(implementation).__name__} has no method {name}, which {method.path} needs"
        )
    style = getattr(function, _STYLE_ATTRIBUTE, Style.PLAIN)
    if (style is Style.STREAMING) != method.server_streaming:
        raise TypeError(
            f"{type(implementation).__name__}.{name}: @streaming is for server streams, and needed for them"
        )
    if style is Style.STREAMING and not inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{type(implementation).__name__}.{name}: a server stream is an async generator"
        )
    if style is not Style.STREAMING and (
        inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    ):
        raise TypeError(f"{type(implementation).__name__}.{name}: methods on lanes are not async")
    if style is Style.STREAMING and method.method_id is not None:
        raise TypeError(
            f"{method.path}: a stream has no number, the remoting port does not carry it"
        )
    return BoundMethod(method, style, function)
