"""AdminService over a store on a simulated disk, without lanes and sockets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from protomq.testing.simdisk import SimDisk
from protomq.v1.admin_service_pb2 import QueryMessagesRequest, QueryMessagesResponse
from protomq.wire.record import encode_message_id
from protomq_broker.admin_service import AdminService
from protomq_broker.config import BrokerConfig
from protomq_broker.group_members import GroupMembers
from protomq_broker.offset_commits import OffsetCommits
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.system_writer import SystemWriter
from protomq_broker.waiting_answers import WaitingAnswers
from protomq_broker.write_permit import WritePermit
from protomq_runtime.errors import Code, ServiceError

from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import SEGMENT, open_store


class StubCall:
    transport = "grpc"

    def __init__(self, request: QueryMessagesRequest, deadline: float | None = None) -> None:
        self.payload = request.SerializeToString()
        self.deadline = deadline
        self.answered = b""

    def answer(self, payload: bytes) -> None:
        self.answered = payload


def service_of(store: Store, clock: ManualClock) -> AdminService:
    permit = WritePermit()
    permit.give()
    return AdminService(
        store,
        BrokerConfig(),
        clock,
        broker_name="b",
        version="1",
        lane_status=list,
        announce=lambda: None,
        write_refusal=lambda: "",
        commits=OffsetCommits(store, SystemWriter(permit), WaitingAnswers(store, clock), BrokerConfig()),
        members=GroupMembers(clock),
        permit=permit,
    )


def look_up(service: AdminService, **fields: Any) -> list[int] | ServiceError:
    """Sequences of the messages found, or the error."""
    call = StubCall(QueryMessagesRequest(topic="topic", **fields))
    try:
        service.query_messages(call)  # type: ignore[arg-type]
    except ServiceError as error:
        return error
    return [record.sequence for record in QueryMessagesResponse.FromString(call.answered).records]


def test_a_look_up_that_may_miss_damaged_messages_says_which_and_what_to_do() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    store.topics.create(TopicConfig("topic"))
    requests = [
        make_request([bytes(99)], key="k", producer_id=7, sequence=number) for number in range(9)
    ]
    for request in requests:
        store.append([request])
    position = requests[5].physical_offset
    store.flush()
    disk.flip_bit("/s/commitlog/" + "0" * 20, (position % SEGMENT + 40) * 8)
    clock.time_ms += 1000
    service = service_of(store, clock)
    error = look_up(service, key="k")
    assert isinstance(error, ServiceError)
    assert (error.code, error.reason) == (Code.DATA_LOSS, "CORRUPT_LOG")
    assert error.metadata == {
        "definite": "true",
        "position": str(position),
        "topic": "topic",
        "queue_id": "0",
        "queue_offset": "5",
        "next_offset": "6",
        "found_count": "3",
    }
    assert "a record_count_max of 3" in error.message
    assert look_up(service, key="k", record_count_max=3) == [8, 7, 6]
    assert look_up(service, key="other") == []
    assert look_up(service, message_id=encode_message_id(7, 0, 4)) == [4]
    error = look_up(service, message_id=encode_message_id(7, 0, 5))
    assert isinstance(error, ServiceError)
    assert (error.reason, error.metadata["queue_offset"]) == ("CORRUPT_LOG", "5")


def test_as_many_are_found_by_key_as_are_asked_for() -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock, segment=1 << 20)
    store.topics.create(TopicConfig("topic"))
    for first in range(0, 300, 100):
        store.append([make_request([b"x"] * 100, key="k", producer_id=7, sequence=first)])
    found = look_up(service_of(store, clock), key="k", record_count_max=256)
    assert found == list(range(299, 43, -1))


def test_a_look_up_by_key_ends_with_its_caller_s_time() -> None:
    clock = ManualClock()
    store = open_store(SimDisk(), clock=clock)
    store.topics.create(TopicConfig("topic"))
    store.append([make_request([b"x"], key="k", producer_id=7, sequence=0)])
    call = StubCall(QueryMessagesRequest(topic="topic", key="k"), time.monotonic())
    with pytest.raises(ServiceError, match="narrow it by begin_time") as caught:
        service_of(store, clock).query_messages(call)  # type: ignore[arg-type]
    assert caught.value.code == Code.DEADLINE_EXCEEDED
