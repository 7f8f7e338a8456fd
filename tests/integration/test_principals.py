"""Who calls: what callers give reaches whoever authenticates, and its verdict reaches the services, over both transports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protomq.v1 import admin_service_pb2, options_pb2, route_service_pb2
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.principals import (
    ANONYMOUS,
    AUTHORIZATION_SIZE_MAX_BYTES,
    Authenticator,
    NoAuthentication,
    Principal,
)
from protomq_runtime.server import Server
from tests.integration.echo_services import Services
from tests.integration.transport_callers import Caller, CallFailed, GrpcCaller, RemotingCaller

DESCRIBE = "/protomq.v1.AdminService/DescribeTopic"
WHO_CALLS = admin_service_pb2.DescribeTopicRequest(topic="who calls").SerializeToString()


class OneSecret:
    """Knows one secret, and whom it belongs to; keeps the addresses of those whom it was asked about."""

    def __init__(self) -> None:
        self.peers: list[str] = []

    def authenticate(self, authorization: str, peer: str) -> Principal:
        self.peers.append(peer)
        if not authorization:
            return ANONYMOUS
        if authorization != "Test secret":
            raise ServiceError(Code.UNAUTHENTICATED, "", "that is not the secret")
        return Principal("alice")


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    (tmp_path / "file").touch()
    made = Services(tmp_path / "file")
    yield made
    made.pull.file.close()


@pytest.fixture
def authenticator() -> Authenticator:
    return OneSecret()


@pytest.fixture
async def server(services: Services, authenticator: Authenticator) -> AsyncIterator[Server]:
    made = Server(services.table, name="echo", version="1", authenticator=authenticator)
    await made.start()
    yield made
    await made.stop(1)


@pytest.fixture(params=["remoting", "foreign", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def connect(server: Server, transport: str, authorization: str) -> Caller:
    if transport == "grpc":
        return GrpcCaller(server.grpc_port, authorization)
    lane = options_pb2.LANE_ADMIN if transport == "remoting" else options_pb2.LANE_PULL
    return await RemotingCaller.connect(server.table, server.remoting_port, lane, authorization)


async def who_calls(server: Server, transport: str, authorization: str) -> str:
    """The name by which a service knows the caller. Raises CallFailed."""
    caller = await connect(server, transport, authorization)
    try:
        answer = await caller.call(DESCRIBE, WHO_CALLS)
        return admin_service_pb2.DescribeTopicResponse.FromString(answer).topic.name
    finally:
        await caller.close()


async def refusal(server: Server, transport: str, authorization: str) -> tuple[Code, str, object]:
    with pytest.raises(CallFailed) as caught:
        await who_calls(server, transport, authorization)
    status = caught.value.status
    return Code(status.code), status.reason, dict(status.metadata)


async def test_a_service_knows_who_calls(
    server: Server, transport: str, authenticator: OneSecret
) -> None:
    assert await who_calls(server, transport, "Test secret") == "alice"
    assert await who_calls(server, transport, "") == "nobody in particular"
    assert all(peer.startswith("127.0.0.1:") for peer in authenticator.peers)


async def test_who_is_not_let_in_calls_nothing(server: Server, transport: str) -> None:
    code, _, _ = await refusal(server, transport, "Test guess")
    assert code is Code.UNAUTHENTICATED
    assert server.pools["admin"].status().calls == 0
    assert server.pools["admin"].status().connections == 0


async def test_the_welcome_says_as_whom_the_caller_is_known(server: Server) -> None:
    for authorization, name in (("Test secret", "alice"), ("", "")):
        caller = await RemotingCaller.connect(
            server.table, server.remoting_port, options_pb2.LANE_ADMIN, authorization
        )
        assert caller.welcome.principal == name
        assert caller.welcome.server_name == "echo"
        await caller.close()


async def test_a_stream_knows_who_calls(server: Server) -> None:
    request = route_service_pb2.WatchRouteRequest(topic="who calls").SerializeToString()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch: Any = channel.unary_stream("/protomq.v1.RouteService/WatchRoute")
        metadata = (("authorization", "Test secret"),)
        assert len([answer async for answer in watch(request, metadata=metadata)]) == len(
            "who calls"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in watch(request, metadata=(("authorization", "x"),))]
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_credentials_have_a_bound(server: Server, transport: str) -> None:
    size = AUTHORIZATION_SIZE_MAX_BYTES + 1
    assert await refusal(server, transport, "x" * size) == (
        Code.INVALID_ARGUMENT,
        "MESSAGE_TOO_LARGE",
        {
            "definite": "true",
            "field": "authorization",
            "size_bytes": str(size),
            "limit_bytes": str(AUTHORIZATION_SIZE_MAX_BYTES),
        },
    )
    assert (await refusal(server, transport, "x" * (size - 1)))[0] is Code.UNAUTHENTICATED


@pytest.mark.parametrize("authenticator", [NoAuthentication()])
async def test_without_authentication_credentials_are_refused_and_not_ignored(
    server: Server, transport: str, authenticator: Authenticator
) -> None:
    assert await refusal(server, transport, "Test secret") == (
        Code.UNIMPLEMENTED, "UNSUPPORTED", {"definite": "true", "field": "authorization"},
    )  # fmt: skip
    assert await who_calls(server, transport, "") == "nobody in particular"
