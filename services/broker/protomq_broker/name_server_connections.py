"""Connects a broker to a name server, over the remoting port or gRPC, whichever the address turns out to be.

Both kinds carry the same RPCs, keep one HoldRegistration open beside them, and belong to one thread. All errors of transport are
OSErrors; what the name server answers is a ServiceError. A third kind, without sockets, is
`protomq_namesrv.direct_connection`, for a name server in the same process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

from protomq.v1 import options_pb2, route_service_pb2
from protomq.v1.route_service_pb2 import (
    GetClusterInfoRequest,
    GetClusterInfoResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    HoldRegistrationRequest,
    HoldRegistrationResponse,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from protomq.wire.status import GRPC_STATUS_DETAILS_KEY, decode_status
from protomq_runtime.addresses import Address
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.remoting_client import NotRemotingError, RemotingClient

CALL_TIMEOUT_S: Final = 3.0
HOLD_TIMEOUT_S: Final = 75.0
"""A name server answers a hold within 60 s, so one that stays silent for this time is gone."""

_SERVICE: Final = route_service_pb2.DESCRIPTOR.services_by_name["RouteService"]

R = TypeVar("R", bound=Message)


class NameServerConnection(Protocol):
    """What a registration needs of a name server."""

    def register_broker(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse: ...

    def unregister_broker(self, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse: ...

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse: ...

    def open_hold(self, request: HoldRegistrationRequest) -> None:
        """Starts the call that ties the broker's registration to this connection; `wait` reports its end."""

    def wait(self, timeout_s: float) -> bool:
        """Returns whether the hold was answered; False after `timeout_s` or when woken. Raises the error with which the hold ended."""

    def take_changed_topics(self) -> Sequence[str]:
        """Returns topics of the broker whose routes others have changed, as far as the name server has said it since the last time."""

    def wake(self) -> None:
        """Ends a `wait` that is under way, or the next one. Any thread."""

    def close(self) -> None:
        """Closes the connection; the name server notices."""


class NameServer(NamedTuple):
    """A name server: its address as people read it, and how to connect to it."""

    label: str
    connect: Callable[[str], NameServerConnection]
    """Takes the caller's id. Raises OSError or ServiceError."""


def remote_name_server(address: Address) -> NameServer:
    """A name server by the address of its remoting port or of its gRPC port."""
    return NameServer(str(address), lambda client_id: connect(address, client_id))


def connect(address: Address, client_id: str) -> RemotingConnection | GrpcConnection:
    """Tries the remoting port first. If the port speaks another protocol, it is taken for gRPC."""
    try:
        return RemotingConnection(
            RemotingClient(address, options_pb2.LANE_ROUTE, client_id, timeout_s=CALL_TIMEOUT_S)
        )
    except NotRemotingError:
        return GrpcConnection(address)


def get_cluster_info(address: Address, client_id: str) -> GetClusterInfoResponse:
    """Asks one name server about all brokers. Raises OSError or ServiceError."""
    connection = connect(address, client_id)
    try:
        return connection.get_cluster_info()
    finally:
        connection.close()


class _Calls(ABC):
    """What both transports have in common."""

    def __init__(self) -> None:
        self._changed_topics: list[str] = []

    def take_changed_topics(self) -> Sequence[str]:
        topics, self._changed_topics = self._changed_topics, []
        return topics

    def register_broker(self, request: RegisterBrokerRequest) -> RegisterBrokerResponse:
        return self._call("RegisterBroker", request, RegisterBrokerResponse)

    def unregister_broker(self, request: UnregisterBrokerRequest) -> UnregisterBrokerResponse:
        return self._call("UnregisterBroker", request, UnregisterBrokerResponse)

    def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        return self._call("Heartbeat", request, HeartbeatResponse)

    def get_cluster_info(self) -> GetClusterInfoResponse:
        return self._call("GetClusterInfo", GetClusterInfoRequest(), GetClusterInfoResponse)

    @abstractmethod
    def _call(self, method: str, request: Message, response_class: type[R]) -> R: ...


class RemotingConnection(_Calls):
    """Over the remoting port."""

    def __init__(self, client: RemotingClient) -> None:
        super().__init__()
        self._client = client
        self._hold_id: int | None = None

    def open_hold(self, request: HoldRegistrationRequest) -> None:
        payload = request.SerializeToString()
        self._hold_id = self._client.start(_method_id("HoldRegistration"), payload, HOLD_TIMEOUT_S)

    def wait(self, timeout_s: float) -> bool:
        answer = self._client.wait(() if self._hold_id is None else (self._hold_id,), timeout_s)
        if answer is None:
            return False
        self._hold_id = None
        self._changed_topics += HoldRegistrationResponse.FromString(answer.unwrap()).changed_topics
        return True

    def wake(self) -> None:
        self._client.wake()

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, request: Message, response_class: type[R]) -> R:
        payload = self._client.call(_method_id(method), request.SerializeToString(), CALL_TIMEOUT_S)
        return response_class.FromString(payload)


class GrpcConnection(_Calls):
    """Over gRPC, with a channel of its own; grpc is not imported before it is needed."""

    def __init__(self, address: Address) -> None:
        import grpc

        super().__init__()
        self._grpc = grpc
        # A registration does its own retries, shares nothing, and never goes through a web proxy.
        options = [
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        self._channel = grpc.insecure_channel(str(address), options=options)
        self._hold: Any = None
        self._event = threading.Event()

    def open_hold(self, request: HoldRegistrationRequest) -> None:
        call = self._multi_callable("HoldRegistration", HoldRegistrationResponse)
        self._hold = call.future(request, timeout=HOLD_TIMEOUT_S)
        self._hold.add_done_callback(lambda _: self._event.set())

    def wait(self, timeout_s: float) -> bool:
        self._event.wait(timeout_s)
        self._event.clear()
        if self._hold is None or not self._hold.done():
            return False
        hold, self._hold = self._hold, None
        try:
            self._changed_topics += hold.result().changed_topics
        except self._grpc.RpcError as error:
            raise _to_error(error) from error
        return True

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Message, response_class: type[R]) -> R:
        try:
            response: R = self._multi_callable(method, response_class)(
                request, timeout=CALL_TIMEOUT_S
            )
        except self._grpc.RpcError as error:
            raise _to_error(error) from error
        return response

    def _multi_callable(self, method: str, response_class: type[R]) -> Any:
        return self._channel.unary_unary(
            f"/{_SERVICE.full_name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response_class.FromString,
        )


def _method_id(method: str) -> int:
    options = _SERVICE.methods_by_name[method].GetOptions()
    number: int = options.Extensions[options_pb2.remoting].method_id
    return number


def _to_error(error: Any) -> OSError | ServiceError:
    """A ServiceError if the name server itself answered (it attaches ErrorInfo); otherwise an OSError, since the connection failed."""
    for key, value in error.trailing_metadata() or ():
        if key == GRPC_STATUS_DETAILS_KEY:
            status = decode_status(value)
            return ServiceError(
                Code(status.code),
                status.reason,
                status.message,
                metadata=status.metadata,
                retry_delay_ms=status.retry_delay_ms,
                field_violations=status.field_violations,
            )
    return ConnectionError(f"{error.code().name}: {error.details()}")
