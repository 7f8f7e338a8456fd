"""A store that was a member of an election is not opened to lead by a fixed role beside the others, and nothing in it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from protomq.v1.route_service_pb2 import Broker, GetClusterInfoResponse
from protomq_broker import broker_process, name_check
from protomq_broker.broker_process import BrokerProcess
from protomq_broker.config import BrokerConfig
from protomq_broker.name_check import check_name_is_not_elected
from protomq_broker.store.files.side_files import START_NAME, TAIL_NAME
from protomq_runtime.addresses import Address
from protomq_runtime.errors import ServiceError

FIRST, SECOND = Address("ns1", 9876), Address("ns2", 9876)
ELECTED = Broker(broker_name="n", broker_id=2, grpc_address="h:1", election_id=7)
FIXED = Broker(broker_name="n", grpc_address="h:2")


def answers(monkeypatch: pytest.MonkeyPatch, *turns: dict[Address, list[Broker]]) -> None:
    """What name servers say, look by look; one that says nothing is down. No look waits."""
    left = list(turns)
    asked: list[Address] = []

    def ask(address: Address, client_id: str) -> GetClusterInfoResponse:
        asked.append(address)
        turn = left[min(asked.count(address), len(left)) - 1]
        if address not in turn:
            raise ConnectionRefusedError
        return GetClusterInfoResponse(brokers=turn[address])

    monkeypatch.setattr(name_check, "get_cluster_info", ask)
    monkeypatch.setattr(name_check, "LOOK_S", 0.0)


def test_one_name_server_that_knows_elected_brokers_of_the_name_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_check, "GONE_TIMEOUT_S", 0.0)
    answers(monkeypatch, {FIRST: [], SECOND: [ELECTED]})
    with pytest.raises(ServiceError, match=r"this one has a fixed role\. One of them \(id 2\) is at h:1") as error:
        check_name_is_not_elected([FIRST, SECOND], "n")
    assert error.value.reason == "NAME_TAKEN"


def test_brokers_that_name_servers_give_up_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {FIRST: [ELECTED]}, {FIRST: [ELECTED]}, {FIRST: []})
    check_name_is_not_elected([FIRST], "n")


@pytest.mark.parametrize("said", [{}, {FIRST: [FIXED]}, {FIRST: [Broker(broker_name="other", election_id=7)]}])
def test_others_are_in_nobodys_way(monkeypatch: pytest.MonkeyPatch, said: dict[Address, list[Broker]]) -> None:
    monkeypatch.setattr(name_check, "GONE_TIMEOUT_S", 0.0)
    answers(monkeypatch, said)
    check_name_is_not_elected([FIRST], "n")
    check_name_is_not_elected([], "n")


@pytest.mark.parametrize("left", [TAIL_NAME, START_NAME, ""])
def test_only_a_store_that_was_elected_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: str) -> None:
    """A repair of the log, or a full disk, takes the first of the two files away."""

    def refuse(name_servers: object, name: str) -> None:
        raise ServiceError(1, "NAME_TAKEN", name)

    monkeypatch.setattr(broker_process, "check_name_is_not_elected", refuse)
    monkeypatch.setattr(broker_process, "check_can_listen", lambda addresses: None)
    monkeypatch.setattr(broker_process, "Broker", lambda *arguments: pytest.fail("the store is opened"))
    if left:
        (tmp_path / left).parent.mkdir()
        (tmp_path / left).write_text("{}")
    config = BrokerConfig(broker_name="n", data_dir=tmp_path)
    with pytest.raises(ServiceError if left else pytest.fail.Exception):
        BrokerProcess(config)
