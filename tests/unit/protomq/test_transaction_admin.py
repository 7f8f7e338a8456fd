"""What an operator does about open transactions, where two brokers have the same one open."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protomq import Admin, BrokerInfo, Permission, TransactionDecision
from protomq._methods import LIST_TRANSACTIONS
from protomq.errors import ConfigurationError
from protomq.v1 import transaction_service_pb2 as pb
from tests.support.cli import run

MESSAGE_ID = "7" * 40


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What brokers are told. `a` and `copy` have the transaction of MESSAGE_ID open: `copy` has a's store."""
    told: list[Any] = []
    brokers = [
        BrokerInfo("c", name, 0, f"{name}:8081", f"{name}:10911", "", 7, Permission.READ_WRITE) for name in ("a", "copy")
    ]  # fmt: skip

    def call(_: Admin, address: object, method: object, request: Any, response: Any) -> Any:
        if method is not LIST_TRANSACTIONS:
            told.append((address, request))
            return response()
        transaction = pb.OpenTransaction(message_id=MESSAGE_ID, topic="t", transaction_handle=str(address))
        return pb.ListTransactionsResponse(transactions=[transaction])

    monkeypatch.setattr(Admin, "_cluster", lambda *_: (brokers, []))
    monkeypatch.setattr(Admin, "_call", call)
    return told


def test_a_transaction_that_is_open_at_two_brokers_is_ended_at_neither(told: list[Any]) -> None:
    with Admin(namesrv="nobody:1") as admin:
        with pytest.raises(ConfigurationError, match=f"message {MESSAGE_ID} has several open transactions, at a, copy"):
            admin.end_transaction(MESSAGE_ID, TransactionDecision.COMMIT)
        assert len(admin.list_transactions(message_id=MESSAGE_ID)) == 2
    assert told == []


@pytest.mark.parametrize("command", ["show", "commit", "rollback"])
def test_commands_name_the_brokers_that_have_it_open(command: str, told: list[Any]) -> None:
    refused = run("transaction", command, MESSAGE_ID, "-o", "json", namesrv="nobody:1", code=2)
    error = json.loads(refused.stderr)["error"]
    assert error["reason"] == "CONFIGURATION"
    assert "has several open transactions, at a, copy" in error["message"]
    assert told == []


@pytest.mark.parametrize("command", ["commit", "rollback"])
def test_one_of_them_is_ended_at_the_broker_that_is_named(command: str, told: list[Any]) -> None:
    shown = json.loads(run("transaction", "show", MESSAGE_ID, "--broker", "copy", "-o", "json", namesrv="nobody:1").stdout)
    assert shown["broker"] == "copy"
    run("transaction", command, MESSAGE_ID, "--broker", "copy", namesrv="nobody:1")
    ((address, request),) = told
    assert [end.transaction_handle for end in request.ends] == [str(address)]
    assert "copy" in str(address)
