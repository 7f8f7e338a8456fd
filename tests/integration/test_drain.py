"""`protomq cluster drain` under load: a broker is emptied and removed, and no acknowledged message is missed."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Final, Literal

import pytest

from protomq import (
    Admin,
    AsyncProducer,
    ConnectionOptions,
    Producer,
    TransactionDecision,
    TransactionProducer,
)
from protomq.errors import ProtomqError
from protomq_cli import draining
from tests.support.cli import run
from tests.support.ha_brokers import HaBroker, pair, running
from tests.support.load import Load
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, wait_for


def pair_of(name: str, folder: Path, namesrv: str) -> tuple[HaBroker, HaBroker]:
    """A SYNC_MASTER of this name, and its slave."""
    (folder / name).mkdir()
    return pair(folder / name, "SYNC_MASTER", broker_name=name, namesrv=[namesrv])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_broker_is_drained_under_load_and_removed_with_its_slave(tmp_path: Path) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        (a, slave_of_a), (b, slave_of_b) = (pair_of(name, tmp_path, namesrv) for name in "ab")
        with running(a, slave_of_a, b, slave_of_b):
            for name in "ab":
                run("ha", "wait", name, "--copies", "2", "--wait", "60s", namesrv=namesrv)
            run("topic", "create", "t", "-q", "2", namesrv=namesrv)
            with Load(namesrv, "t", "g", consumes=False) as load:
                wait_for(lambda: load.brokers_of_last(20) == {"a", "b"}, PATIENCE_S)
                run("group", "commit", "g", "t", "-O", "start", namesrv=namesrv)
                # Nobody consumes yet: it is closed, and not empty.
                behind = run("cluster", "drain", "a", "--wait", "0s", "-o", "jsonl", namesrv=namesrv, code=6)
                assert json.loads(behind.stdout)["messages"] > 0
                assert "NOT_DRAINED" in behind.stderr
                assert run("send", "t", "x", "-b", "a", namesrv=namesrv, code=4).stderr
                run("cluster", "drain", "a", "--undo", namesrv=namesrv)
                wait_for(lambda: "a" in load.brokers_of_last(20), PATIENCE_S)
                load.begin_to_consume()
                done = run("cluster", "drain", "a", "--wait", "60s", "-o", "jsonl", namesrv=namesrv)
                assert json.loads(done.stdout)["may_be_removed"] is True
                slave_of_a.wait_for_all_of(a)
                end_of_a = a.status().end_position
                assert slave_of_a.stop() == a.stop() == 0
                run("cluster", "forget", "a", namesrv=namesrv)
                load.wait_for_more(20)
                load.wait_for_more(20)
                assert load.brokers_of_last(20) == {"b"}
                load.stop_sending()
                load.wait_until_consumed()
            load.check()
            assert load.failures == []
            slave_of_b.wait_for_all_of(b)
            assert slave_of_a.log_bytes(end_of_a) == a.log_bytes(end_of_a)
            end_of_b = b.status().end_position
            assert slave_of_b.log_bytes(end_of_b) == b.log_bytes(end_of_b)


KINDS: Final[tuple[Literal["remoting", "grpc"], ...]] = ("remoting", "grpc")


class KeyedSender:
    """Sends with keys of all queues, one after another, until it is closed; by threads or coroutines, over one kind of port."""

    def __init__(self, namesrv: str, transport: Literal["remoting", "grpc"], *, as_coroutine: bool) -> None:
        self.places: list[str] = []
        self.errors: list[str] = []
        self._connection = ConnectionOptions(namesrv=namesrv, transport=transport)
        self._stopping = threading.Event()
        run_all = (lambda: asyncio.run(self._run_coroutine())) if as_coroutine else self._run
        self._thread = threading.Thread(target=run_all, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with Producer(connection=self._connection, send_timeout_s=15) as producer:
            while not self._stopping.is_set():
                for number in range(8):
                    try:
                        self.places.append(producer.send("t", b"x", sharding_key=f"k{number}").queue.broker_name)
                    except ProtomqError as error:
                        self.errors.append(repr(error))

    async def _run_coroutine(self) -> None:
        async with AsyncProducer(connection=self._connection, send_timeout_s=15) as producer:

            async def send(key: str) -> None:
                try:
                    self.places.append((await producer.send("t", b"x", sharding_key=key)).queue.broker_name)
                except ProtomqError as error:
                    self.errors.append(repr(error))

            while not self._stopping.is_set():
                await asyncio.gather(*(send(f"k{number}") for number in range(8)))

    def wait_for_places(self, wanted: set[str]) -> None:
        """Until messages go to just these brokers."""

        def goes_there() -> bool:
            count = len(self.places)
            wait_for(lambda: len(self.places) > count + 20, PATIENCE_S)
            return set(self.places[count:]) == wanted

        wait_for(goes_there, PATIENCE_S)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_S)


def test_senders_with_sharding_keys_go_on_while_a_broker_is_drained_and_opened_again(tmp_path: Path) -> None:
    with running_namesrv() as first, running_namesrv() as second:
        namesrv = f"{first.remoting};{second.remoting}"
        a, b = (HaBroker(tmp_path / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=namesrv.split(";")) for name in "ab")
        with running(a, b):
            run("cluster", "namesrv", "--wait", "30s", namesrv=namesrv)
            wait_for(lambda: run("cluster", "list", "-o", "jsonl", namesrv=namesrv).stdout.count("\n") == 2)
            run("topic", "create", "t", "-q", "2", namesrv=namesrv)
            for drained, left in (("a", "b"), ("b", "a")):
                senders = [
                    KeyedSender(namesrv, transport, as_coroutine=as_coroutine)
                    for transport in KINDS for as_coroutine in (False, True)
                ]  # fmt: skip
                try:
                    for sender in senders:
                        sender.wait_for_places({"a", "b"})
                    # Nobody consumes: it is closed, and not empty.
                    run("cluster", "drain", drained, "--wait", "0s", namesrv=namesrv, code=6)
                    for sender in senders:
                        sender.wait_for_places({left})
                finally:
                    for sender in senders:
                        sender.close()
                assert [sender.errors for sender in senders] == [[]] * len(senders)
                run("cluster", "drain", drained, "--undo", namesrv=namesrv)
            # All are closed, and one is opened: a new client is told so, whichever name server it asks.
            for _ in range(3):
                for name in "ab":
                    run("cluster", "drain", name, "--wait", "0s", namesrv=namesrv, code=6)
                run("cluster", "drain", "a", "--undo", namesrv=namesrv)
                for key in ("k1", None):
                    with Producer(namesrv=namesrv) as producer:
                        assert producer.send("t", b"y", sharding_key=key).queue.broker_name == "a"


def test_producers_come_back_within_two_seconds_after_undo(tmp_path: Path) -> None:
    """Nothing fails that would make them look at the route: they look each second, as long as a broker is closed and others are not."""
    places: dict[str, list[str]] = {"thread": [], "coroutine": []}
    stopping = threading.Event()

    def from_thread() -> None:
        with Producer(namesrv=namesrv) as producer:
            while not stopping.wait(0.02):
                places["thread"].append(producer.send("t", b"x").queue.broker_name)

    async def from_coroutine() -> None:
        async with AsyncProducer(namesrv=namesrv) as producer:
            while not stopping.is_set():
                places["coroutine"].append((await producer.send("t", b"x", sharding_key="k")).queue.broker_name)
                await asyncio.sleep(0.02)

    def wait_until_used(name: str, *, timeout_s: float = PATIENCE_S, only: bool = False) -> None:
        counts = {who: len(found) for who, found in places.items()}

        def is_used() -> bool:
            new = [set(found[counts[who] :]) for who, found in places.items()]
            return all(found == {name} if only else name in found for found in new)

        wait_for(is_used, timeout_s, pause_s=0.01)

    with running_namesrv() as server:
        namesrv = str(server.remoting)
        a, b = (HaBroker(tmp_path / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv]) for name in "ab")
        with running(a, b), Admin(namesrv=namesrv) as admin:
            wait_for(lambda: len(admin.cluster_info()) == 2, PATIENCE_S)
            admin.create_topic("t", write_queues=1, read_queues=1)
            # The queue that the key chooses among both.
            with Producer(namesrv=namesrv) as producer:
                drained = producer.send("t", b"x", sharding_key="k").queue.broker_name
            threads = [threading.Thread(target=run_it) for run_it in (from_thread, lambda: asyncio.run(from_coroutine()))]
            for thread in threads:
                thread.start()
            try:
                wait_until_used(drained)
                run("cluster", "drain", drained, "--wait", "0s", namesrv=namesrv, code=6)
                wait_until_used("ab".replace(drained, ""), only=True)
                draining.reopen(admin, drained)
                wait_until_used(drained, timeout_s=2)
            finally:
                stopping.set()
                for thread in threads:
                    thread.join(PATIENCE_S)


def test_undo_needs_no_other_broker_and_touches_no_other_topic(tmp_path: Path) -> None:
    with running_namesrv() as server:
        namesrv = str(server.remoting)
        a, gone = (HaBroker(tmp_path / name, "ASYNC_MASTER", 0, broker_name=name, namesrv=[namesrv]) for name in ("a", "gone"))
        a.configure(transaction_timeout_ms=1_000, transaction_check_interval_ms=1_000, transaction_check_max=1)
        with running(a, gone):
            run("topic", "create", "t", "-b", "a", namesrv=namesrv)
            run("topic", "create", "archive", "-b", "a", "--permission", "read", namesrv=namesrv)
            with TransactionProducer("g", lambda check: TransactionDecision.UNKNOWN, namesrv=namesrv) as producer:
                producer.begin("t", b"never decided")
                expired = "TRANS_CHECK_MAX_TIME_TOPIC"
                wait_for(lambda: expired in run("topic", "list", namesrv=namesrv).stdout, PATIENCE_S)
            before = run("topic", "list", "-b", "a", "-o", "jsonl", namesrv=namesrv).stdout
            run("cluster", "drain", "a", "--wait", "0s", namesrv=namesrv, code=6)
            assert run("topic", "list", "-b", "a", "-o", "jsonl", namesrv=namesrv).stdout != before
            assert gone.stop() == 0
            undone = run("cluster", "drain", "a", "--undo", "-o", "jsonl", namesrv=namesrv)
            assert json.loads(undone.stdout) == {"broker": "a", "opened_topics": 1}
            assert run("topic", "list", "-b", "a", "-o", "jsonl", namesrv=namesrv).stdout == before
