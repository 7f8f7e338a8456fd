"""gRPC tries nothing again below the SDK, which counts its tries: a server that is not available is asked once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest

from protomq import _methods
from protomq._grpc_transport import AioGrpcLink, GrpcLink
from protomq._types import MethodInfo
from protomq.errors import ConnectionLostError


class Unavailable(grpc.GenericRpcHandler):
    """Refuses every call as a proxy does whose server is gone."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def service(self, handler_call_details: Any) -> Any:
        self.called.append(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(self._refuse)

    def _refuse(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        raise AssertionError("abort raises")


@pytest.mark.parametrize("method", [_methods.GET_ROUTE, _methods.PULL, _methods.COMMIT_OFFSETS, _methods.SEND])
async def test_a_call_over_grpc_is_made_once(method: MethodInfo) -> None:
    refusing = Unavailable()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[refusing])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    link, aio_link = GrpcLink(address), AioGrpcLink(address)
    try:
        with pytest.raises(ConnectionLostError):
            link.call(method, (b"",), 60.0, False)
        assert refusing.called == [method.path]
        with pytest.raises(ConnectionLostError):
            await aio_link.call(method, (b"",), 60.0, False)
        assert refusing.called == [method.path] * 2
    finally:
        link.close()
        await aio_link.close()
        server.stop(None).wait(60)
