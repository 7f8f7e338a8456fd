"""Clients of both transports for tests: small, slow and strict. `call` gives the response's bytes or raises CallFailed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import grpc

from protomq.v1 import remoting_pb2
from protomq.wire.frames import (
    FLAG_ANSWER,
    HEADER_SIZE_BYTES,
    LENGTH_SIZE_BYTES,
    MAGIC,
    decode_header,
    encode_request,
)
from protomq.wire.status import GRPC_STATUS_DETAILS_KEY, RpcStatus, decode_status
from protomq_runtime.dispatch import DispatchTable


class CallFailed(Exception):
    """The answer was an error."""

    def __init__(self, status: RpcStatus) -> None:
        super().__init__(str(status))
        self.status = status


class Caller(Protocol):
    async def call(self, path: str, payload: bytes, timeout_s: float = 60) -> bytes: ...

    async def close(self) -> None: ...


class GrpcCaller:
    def __init__(self, port: int, authorization: str = "") -> None:
        self.metadata = (("authorization", authorization),) if authorization else ()
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
        )

    async def call(self, path: str, payload: bytes, timeout_s: float = 60) -> bytes:
        try:
            call = cast("Callable[..., Awaitable[bytes]]", self.channel.unary_unary(path))
            return await call(payload, timeout=timeout_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            details = error.trailing_metadata().get(GRPC_STATUS_DETAILS_KEY)
            if details is None:
                raise
            assert isinstance(details, bytes)
            status = decode_status(details)
            if status.code != error.code().value[0]:
                raise
            raise CallFailed(status) from None

    async def close(self) -> None:
        await self.channel.close()


class RemotingCaller:
    """One connection to a lane; calls are pipelined."""

    def __init__(
        self, table: DispatchTable, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.table = table
        self.reader = reader
        self.writer = writer
        self.welcome = remoting_pb2.RemotingWelcome()
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def connect(
        cls, table: DispatchTable, port: int, lane: int, authorization: str = ""
    ) -> RemotingCaller:
        """Raises CallFailed if the hello is refused."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(MAGIC + hello(lane, authorization=authorization))
        status, payload = await read_answer(reader)
        if status:
            writer.close()
            raise CallFailed(decode_status(payload))
        caller = cls(table, reader, writer)
        caller.welcome = remoting_pb2.RemotingWelcome.FromString(payload)
        return caller

    async def call(self, path: str, payload: bytes, timeout_s: float = 60) -> bytes:
        bound = self.table.by_path.get(path)
        if self._task.done():
            raise ConnectionResetError("the connection is closed")
        request_id = next(self._request_ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        method_id = bound.method_id if bound else 0xFFFF
        self.writer.write(
            encode_request(request_id, method_id, len(payload), int(timeout_s * 1000)) + payload
        )
        return await asyncio.wait_for(future, timeout_s + 5)

    def send_one_way(self, path: str, payload: bytes) -> None:
        method_id = self.table.by_path[path].method_id
        self.writer.write(encode_request(0, method_id, len(payload), one_way=True) + payload)

    async def close(self) -> None:
        self._task.cancel()
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass

    async def _receive(self) -> None:
        try:
            while True:
                header = decode_header(await self.reader.readexactly(HEADER_SIZE_BYTES))
                payload = await self.reader.readexactly(
                    header.length + LENGTH_SIZE_BYTES - HEADER_SIZE_BYTES
                )
                assert header.flags == FLAG_ANSWER
                future = self._waiting.pop(header.request_id)
                if header.status:
                    status = decode_status(payload)
                    assert status.code == header.status
                    future.set_exception(CallFailed(status))
                else:
                    future.set_result(payload)
        except (OSError, asyncio.IncompleteReadError) as error:
            for future in self._waiting.values():
                future.set_exception(ConnectionResetError(str(error)))


def hello(lane: int, request_id: int = 0, *, authorization: str = "") -> bytes:
    payload = remoting_pb2.RemotingHello(
        lane=lane,  # type: ignore[arg-type]
        client_id="test",
        authorization=authorization,
    ).SerializeToString()
    return encode_request(request_id, 0, len(payload)) + payload


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """(status, payload) of the next answer."""
    header = decode_header(await reader.readexactly(HEADER_SIZE_BYTES))
    return header.status, await reader.readexactly(
        header.length + LENGTH_SIZE_BYTES - HEADER_SIZE_BYTES
    )
