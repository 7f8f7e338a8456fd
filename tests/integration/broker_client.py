"""A client of a broker in this process, over either transport: small and strict, without the SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import Message

from protomq.v1 import options_pb2
from protomq.v1 import pull_service_pb2 as pull
from protomq.v1 import send_service_pb2 as send
from protomq.v1.record_pb2 import Record
from protomq_broker.broker_process import BrokerProcess
from protomq_broker.config import BrokerConfig
from protomq_broker.store.config import StoreConfig
from protomq_runtime.addresses import ListenConfig
from tests.integration.transport_callers import Caller, GrpcCaller, RemotingCaller

Response = TypeVar("Response", bound=Message)


def config_in(folder: Path, **fields: Any) -> BrokerConfig:
    ratios = {"disk_delete_ratio": 0.97, "disk_force_ratio": 0.98, "disk_refuse_ratio": 0.99}
    store = {"segment_size_bytes": 16 << 20, **ratios, **fields.pop("store", {})}
    listen = ListenConfig(grpc_port=0, remoting_port=0)
    return BrokerConfig(
        data_dir=folder, broker_name="b", listen=listen, store=StoreConfig(**store), **fields
    )


class Client:
    """Calls by request message, whatever the transport."""

    def __init__(self, broker: BrokerProcess, transport: str) -> None:
        self._broker = broker
        self._transport = transport
        self._callers: dict[str, Caller] = {}
        self._connecting = asyncio.Lock()

    async def call(self, request: Message, response_class: type[Response]) -> Response:
        name = request.DESCRIPTOR.name.removesuffix("Request")
        path = next(path for path in self._broker.server.table.by_path if path.endswith(f"/{name}"))
        return response_class.FromString(await (await self._caller(path)).call(path, request.SerializeToString()))

    async def raw(self, path: str, payload: bytes) -> bytes:
        return await (await self._caller(path)).call(path, payload)

    async def send(self, *records: Record, topic: str = "t", **fields: Any) -> send.SendResponse:
        return await self.call(send.SendRequest(topic=topic, records=records, **fields), send.SendResponse)

    async def pull(self, queue_offset: int = 0, **fields: Any) -> pull.PullResponse:
        fields = {"topic": "t", "queue_id": 0, **fields}
        return await self.call(pull.PullRequest(queue_offset=queue_offset, **fields), pull.PullResponse)

    async def _caller(self, path: str) -> Caller:
        async with self._connecting:
            if path not in self._callers:
                self._callers[path] = await self._connect(path)
            return self._callers[path]

    async def _connect(self, path: str) -> Caller:
        server = self._broker.server
        if self._transport == "grpc":
            return GrpcCaller(server.grpc_port)
        lane = options_pb2.Lane.Value(f"LANE_{server.table.by_path[path].method.lane.upper()}")
        return await RemotingCaller.connect(server.table, server.remoting_port, lane)

    async def close(self) -> None:
        for caller in self._callers.values():
            await caller.close()
