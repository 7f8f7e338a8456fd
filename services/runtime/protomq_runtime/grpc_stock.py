"""What every gRPC server has: health and reflection, and an answer for methods that there are not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, cast

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._base import BaseReflectionServicer

from protomq.wire.status import POOL as STATUS_POOL

from .errors import unknown_method
from .grpc_status import abort, parse

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION_SERVICES: Final = (
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
)
METHOD_LENGTH_SHOWN: Final = 200
"""Of the name of a method that there is not: the answer repeats it, and callers take no more metadata than this server does."""


def add_health(server: grpc.aio.Server, servicer: health.aio.HealthServicer) -> None:
    request_class = health_pb2.HealthCheckRequest

    async def check(payload: bytes, context: Any) -> Any:
        return await servicer.Check(await parse(request_class, payload, context), context)

    async def watch(payload: bytes, context: Any) -> None:
        await servicer.Watch(await parse(request_class, payload, context), context)

    serializer = health_pb2.HealthCheckResponse.SerializeToString
    handlers: dict[str, Any] = {
        "Check": grpc.unary_unary_rpc_method_handler(check, response_serializer=serializer),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, response_serializer=serializer),
    }
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(HEALTH_SERVICE, handlers)]
    )


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serves v1alpha and, since its messages are the same, v1 by the same servicer."""
    from grpc_reflection.v1alpha import reflection_pb2

    servicer = _Reflection(service_names)

    async def info(payloads: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[Any]:
            async for payload in payloads:
                yield await parse(reflection_pb2.ServerReflectionRequest, payload, context)

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


class UnknownMethods(grpc.GenericRpcHandler):
    """Answers every method with an error that has its ErrorInfo: gRPC's own UNIMPLEMENTED has none."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method[:METHOD_LENGTH_SHOWN]

        async def refuse(payloads: AsyncIterator[bytes], context: Any) -> None:
            await abort(context, unknown_method(name))

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
