"""What was taken without a word, and did something else than its author meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    AsyncPullConsumer,
    AsyncSimpleConsumer,
    AsyncTransactionProducer,
    Producer,
    PullConsumer,
    PushConsumer,
    SimpleConsumer,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import ClosedError, ConfigurationError
from protomq.hooks import Hook
from tests.support.fake_cluster import FakeCluster, FakeSyncTransport

NOWHERE = "127.0.0.1:1"


class Misspelled(Hook):
    def befor_send(self, context: object) -> None:
        raise AssertionError(context)


class Helped(Hook):
    """Methods of its own are the program's."""

    def send_count(self) -> int:
        return 0


@pytest.mark.parametrize(
    "open_client",
    [
        lambda: Producer(namesrv=NOWHERE),
        lambda: TransactionProducer("g", lambda _: TransactionDecision.UNKNOWN, namesrv=NOWHERE),
        lambda: PullConsumer("g", namesrv=NOWHERE),
        lambda: SimpleConsumer("g", namesrv=NOWHERE),
        lambda: Admin(namesrv=NOWHERE),
    ],
    ids=["producer", "transactions", "pull", "simple", "admin"],
)
def test_a_closed_client_is_not_entered(open_client: Callable[[], Any]) -> None:
    client = open_client()
    with client:
        client.close()
    with pytest.raises(ClosedError, match="is closed"), client:
        pass


@pytest.mark.parametrize(
    "open_client",
    [
        lambda: AsyncProducer(namesrv=NOWHERE),
        lambda: AsyncTransactionProducer("g", lambda _: TransactionDecision.UNKNOWN, namesrv=NOWHERE),
        lambda: AsyncPullConsumer("g", namesrv=NOWHERE),
        lambda: AsyncSimpleConsumer("g", namesrv=NOWHERE),
    ],
    ids=["producer", "transactions", "pull", "simple"],
)
async def test_nor_is_one_of_coroutines(open_client: Callable[[], Any]) -> None:
    client = open_client()
    await client.close()
    with pytest.raises(ClosedError, match="is closed"):
        async with client:
            pass


def test_an_empty_list_of_tags_does_not_mean_all() -> None:
    with PullConsumer("g", namesrv=NOWHERE) as pulling, SimpleConsumer("g", namesrv=NOWHERE) as popping:
        pushing = PushConsumer("g", namesrv=NOWHERE)
        for call in (
            lambda: pulling.subscribe("T", tags=[]),
            lambda: popping.receive("T", tags=[]),
            lambda: pushing.subscribe("T", lambda _: None, tags=[]),
        ):
            with pytest.raises(ConfigurationError, match="leave it out"):
                call()


def test_a_message_has_no_tag_that_stands_for_all() -> None:
    with Producer(transport=FakeSyncTransport(FakeCluster()), namesrv="n:1") as producer:
        with pytest.raises(ConfigurationError, match="nobody can ask for this tag"):
            producer.send("T", b"x", tag="*")


def test_a_misspelled_method_of_a_hook_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"nobody calls befor_send .*; did you mean before_send\?"):
        Producer(namesrv=NOWHERE, hooks=[Misspelled()])
    Producer(namesrv=NOWHERE, hooks=[Helped()]).close()


def test_offsets_are_not_cloned_from_the_group_itself() -> None:
    with Admin(namesrv=NOWHERE) as admin, pytest.raises(ConfigurationError, match="are both 'g'"):
        admin.clone_offsets("g", "g")


@pytest.mark.parametrize("seconds", [-1, 0, 8_553_600.0])
def test_how_long_a_message_may_be_hidden_is_said_as_brokers_have_it(seconds: float) -> None:
    with SimpleConsumer("g", namesrv=NOWHERE) as consumer:
        with pytest.raises(ConfigurationError, match=r"invisible_s is 10 to 43200 \(12 h\)"):
            consumer.receive("T", invisible_s=seconds)


def test_an_instance_belongs_to_broadcast() -> None:
    with pytest.raises(ConfigurationError, match="broadcast=True"):
        PushConsumer("g", namesrv=NOWHERE, instance="one")
    PushConsumer("g", namesrv=NOWHERE, instance="one", broadcast=True)
