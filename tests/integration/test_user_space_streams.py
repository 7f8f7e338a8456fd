"""The suite of both transports once more, over connections whose bytes pass through user space, as they will with TLS."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial

import pytest

from protomq_runtime.admission import AdmissionConfig
from protomq_runtime.server import LaneConfig, Server
from tests.integration import test_transports
from tests.integration.echo_services import Services
from tests.integration.test_transports import *  # noqa: F403
from tests.support.user_space_stream import UserSpaceStream


@pytest.fixture(autouse=True)
def in_user_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def sendfile(*_: object) -> int:
        raise AssertionError("these bytes may not go from a file to the socket")

    monkeypatch.setattr(os, "sendfile", sendfile)
    monkeypatch.setattr(test_transports, "Server", partial(Server, make_stream=UserSpaceStream))


@pytest.fixture  # type: ignore[no-redef]
async def server(services: Services) -> AsyncIterator[Server]:
    made = Server(
        services.table,
        name="echo",
        version="1",
        lanes={"send": LaneConfig(1, AdmissionConfig(depth_max=20, queue_time_target_ms=0))},
        make_stream=UserSpaceStream,
    )
    await made.start()
    yield made
    await made.stop(1)


@pytest.fixture(params=["remoting", "foreign"])  # type: ignore[no-redef]
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)
