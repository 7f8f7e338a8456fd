"""A broker in memory that takes half messages and decisions, and asks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from protomq import AsyncTransactionProducer, TransactionDecision, TransactionProducer, _methods
from protomq._types import BrokerAddress, MethodInfo
from protomq.errors import ConnectionLostError
from protomq.v1 import transaction_service_pb2 as pb
from protomq.v1.record_pb2 import Record
from protomq.v1.send_service_pb2 import SendResponse, SendStatus
from protomq.wire.record import RecordTemplate, encode_message_id

from .fake_cluster import FakeAsyncTransport, FakeCluster, FakeSyncTransport


class AskingBroker(FakeCluster):
    """Takes half messages, asks about those that a test names, and keeps what it is told of each handle."""

    def __init__(self, topics: dict[str, dict[str, int]] | None = None) -> None:
        super().__init__(topics)
        self.questions: deque[bytes] = deque()
        self.told: list[tuple[str, int]] = []
        self.half_status = SendStatus.SEND_STATUS_SEND_OK
        """Of all half messages from now on."""

    def ask(self, *handles: str) -> None:
        """In one answer."""
        template = RecordTemplate("T", 7, 1)
        records = [Record.FromString(template.encode(handle.encode(), number, 1)) for number, handle in enumerate(handles)]
        checks = [
            pb.TransactionCheck(transaction_handle=handle, message=record, check_count=1)
            for handle, record in zip(handles, records, strict=True)
        ]
        self.questions.append(pb.WaitForChecksResponse(checks=checks).SerializeToString())

    def answer(
        self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes], timeout_s: float, one_way: bool
    ) -> bytes:
        answer = super().answer(address, method, payload, timeout_s, one_way)
        if method == _methods.SEND:
            stored = SendResponse.FromString(answer)
            stored.status = self.half_status
            stored.transaction_handles.extend(["half"] * stored.record_count)
            return stored.SerializeToString()
        if method == _methods.WAIT_FOR_CHECKS:
            if self.questions:
                return self.questions.popleft()
            raise ConnectionLostError("nothing to ask")
        if method == _methods.END_TRANSACTION:
            ends = pb.EndTransactionRequest.FromString(b"".join(payload)).ends
            self.told += [(end.transaction_handle, end.decision) for end in ends]
            results = [pb.TransactionEnded(message_id=encode_message_id(7, 1, number)) for number in range(len(ends))]
            return pb.EndTransactionResponse(results=results).SerializeToString()
        return answer


def begin(broker: AskingBroker, execute: Callable[[Any], Any]) -> None:
    """Does the local work in a block, from a thread."""
    with (
        TransactionProducer("g", lambda _: TransactionDecision.COMMIT, transport=FakeSyncTransport(broker)) as producer,
        producer.begin("T", b"") as transaction,
    ):
        execute(transaction)


def begin_async(broker: AskingBroker, execute: Callable[[Any], Any]) -> None:
    """The same in a coroutine, in a loop of its own."""

    async def run() -> None:
        async with (
            AsyncTransactionProducer("g", lambda _: TransactionDecision.COMMIT, transport=FakeAsyncTransport(broker)) as producer,
            await producer.begin("T", b"") as transaction,
        ):
            execute(transaction)

    asyncio.run(run())
