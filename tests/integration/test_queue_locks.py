"""Locks of queues with real processes: one owner at a time, old owners commit nothing, queues of the dead are free at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import grpc
import pytest

from protomq import Admin, Message, MessageQueue, Producer, PullConsumer, PushConsumer
from protomq._push_steps import PushSteps
from protomq.errors import ConfigurationError, QueueNotOwnedError
from protomq.testing import Broker
from protomq.testing.fakes import FaultProxy
from protomq.v1.queue_lock_service_pb2 import ListQueueLocksRequest
from protomq.v1.queue_lock_service_pb2_grpc import QueueLockServiceStub
from tests.support.cli import jsonl, run
from tests.support.waiting import PATIENCE_S, wait_for

QUEUES = 4
LOCK_S = 60.0


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as made:
        with Admin(namesrv=made.namesrv) as admin:
            admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
        yield made


def of_topic(consumer: PushConsumer) -> list[MessageQueue]:
    """Its queues, without those of the group's retries."""
    return [queue for queue in consumer.assignment() if queue.topic == "t"]


def fill(broker: Broker, count: int) -> None:
    with Producer(namesrv=broker.namesrv) as producer:
        queues = producer.queues("t")
        for number in range(count):
            producer.send("t", b"%d" % number, queue=queues[number % QUEUES])


def member(broker: Broker, **settings: object) -> PullConsumer:
    return PullConsumer("g", namesrv=broker.namesrv, lock_queues=True, auto_commit=False, **settings)  # type: ignore[arg-type]


def poll_until_shared(counts: list[int], *members: PullConsumer) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while [len(one.assignment()) for one in members] != counts:
        assert time.monotonic() < ends_s, [one.assignment() for one in members]
        for one in members:
            one.poll(0.02)


def test_queues_are_locked_before_they_are_consumed_and_only_the_owner_commits(
    broker: Broker,
) -> None:
    fill(broker, 8)
    with member(broker) as first, member(broker) as second:
        first.subscribe("t")
        poll_until_shared([4], first)
        second.subscribe("t")
        poll_until_shared([2, 2], first, second)
        mine, theirs = first.assignment()[0], second.assignment()[0]
        first.commit({mine: 1})
        with pytest.raises(QueueNotOwnedError) as refused:
            first.commit({theirs: 1})
        assert refused.value.metadata["queue_ids"] == str(theirs.queue_id)
        assert second.committed(theirs) is None
        second.commit({theirs: 2})
        with PullConsumer("g", namesrv=broker.namesrv) as stranger:
            with pytest.raises(QueueNotOwnedError):
                stranger.commit({mine: 2})
        first.close()
        poll_until_shared([4], second)
        second.commit({mine: 2, theirs: 2})


def test_a_lock_that_was_lost_is_noticed_by_the_commit_and_the_queue_begins_again(
    broker: Broker,
) -> None:
    fill(broker, 8)
    with member(broker) as one:
        one.subscribe("t")
        poll_until_shared([4], one)
        seen: set[tuple[int, int]] = set()
        while len(seen) < 8:
            seen.update((message.queue_id, message.queue_offset) for message in one.poll())
        locks = one._steps.locks
        assert locks is not None
        queue = MessageQueue("t", one.assignment()[0].broker_name, 0)
        locks._tokens[queue] += 1  # as if it had another lock, of a while ago
        with pytest.raises(QueueNotOwnedError):
            one.commit()
        assert [one.committed(each) for each in sorted(one.assignment())] == [None, 2, 2, 2]
        again: list[tuple[int, int]] = []
        while len(again) < 2:
            again += [(message.queue_id, message.queue_offset) for message in one.poll()]
        assert again == [(0, 0), (0, 1)], "what was not committed comes again, in order"
        one.commit()
        assert one.committed(queue) == 2


def test_orderly_members_come_and_go_and_no_queue_has_two_or_goes_back(broker: Broker) -> None:
    seen: dict[int, list[tuple[str, int]]] = {number: [] for number in range(QUEUES)}
    working: dict[int, int] = dict.fromkeys(range(QUEUES), 0)
    both: list[int] = []
    guard = threading.Lock()

    def consumer(stack: ExitStack, name: str) -> PushConsumer:
        made = PushConsumer("g", namesrv=broker.namesrv, orderly=True, commit_interval_s=0.2)

        @made.on("t")
        def listen(message: Message) -> None:
            with guard:
                working[message.queue_id] += 1
                if working[message.queue_id] > 1:
                    both.append(message.queue_id)
                seen[message.queue_id].append((name, message.queue_offset))
            time.sleep(0.01)
            with guard:
                working[message.queue_id] -= 1

        return stack.enter_context(made)

    def done() -> bool:
        with guard:
            return all(len({offset for _, offset in all_of}) == 60 for all_of in seen.values())

    with ExitStack() as stack:
        consumer(stack, "a")
        fill(broker, 120)
        second = consumer(stack, "b")
        wait_for(lambda: len(of_topic(second)) == 2)
        fill(broker, 120)
        second.stop()
        wait_for(done)
    assert both == []
    for all_of in seen.values():
        assert [offset for _, offset in all_of] == list(range(60)), "in order, each once: queues were given away, not lost"


def test_a_topic_that_is_made_again_is_consumed_once_and_in_order_by_members_that_worked_on_the_old_one(broker: Broker) -> None:
    seen: dict[tuple[int, int], list[int]] = {}
    working: dict[int, int] = dict.fromkeys(range(QUEUES), 0)
    both: list[tuple[int, bytes]] = []
    guard = threading.Lock()
    rounds, count = 4, 5
    go_on = threading.Event()
    at_work = threading.Semaphore(0)

    def listen(message: Message) -> None:
        number, last = map(int, message.body.split())
        with guard:
            working[message.queue_id] += 1
            if working[message.queue_id] > 1:
                both.append((message.queue_id, message.body))
            seen.setdefault((number, message.queue_id), []).append(message.queue_offset)
        if last:
            # The topic goes while a listener has this one.
            until = go_on
            at_work.release()
            until.wait(PATIENCE_S)
        time.sleep(0.02)
        with guard:
            working[message.queue_id] -= 1

    def are_committed(queues: tuple[MessageQueue, ...], queue_offset: int) -> Callable[[], bool]:
        return lambda: all(looks.committed(queue) == queue_offset for queue in queues)

    with ExitStack() as stack:
        stack.callback(go_on.set)
        members = [PushConsumer("g", namesrv=broker.namesrv, orderly=True, commit_interval_s=0.1) for _ in range(2)]
        for one in members:
            one.subscribe("t", listen)
            stack.enter_context(one)
        wait_for(lambda: [len(of_topic(one)) for one in members] == [2, 2])
        admin = stack.enter_context(Admin(namesrv=broker.namesrv))
        looks = stack.enter_context(PullConsumer("g", namesrv=broker.namesrv))
        queues: tuple[MessageQueue, ...] = ()
        for number in range(rounds):
            if number:
                admin.delete_topic("t")
                admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
            with Producer(namesrv=broker.namesrv) as producer:
                queues = producer.queues("t")
                for queue in queues:
                    for place in range(count):
                        producer.send("t", b"%d %d" % (number, place == count - 1), queue=queue)
            if number:
                before, go_on = go_on, threading.Event()
                before.set()  # Those of the topic before are done with now, while the new one is there.
            for _ in range(QUEUES):
                assert at_work.acquire(timeout=PATIENCE_S)
            wait_for(are_committed(queues, count - 1))
        go_on.set()
        wait_for(are_committed(queues, count))
    assert both == [], "two messages of a queue at the same time"
    assert seen == {(number, queue_id): list(range(count)) for number in range(rounds) for queue_id in range(QUEUES)}


def test_a_queue_is_not_another_members_while_a_listener_has_a_message_of_it(
    broker: Broker,
) -> None:
    fill(broker, 4)
    go_on = threading.Event()
    working = threading.Semaphore(0)
    with ExitStack() as stack:
        stack.callback(go_on.set)
        first = PushConsumer("g", namesrv=broker.namesrv, orderly=True)
        second = PushConsumer("g", namesrv=broker.namesrv, orderly=True)

        @first.on("t")
        def hold(message: Message) -> None:
            working.release()
            go_on.wait()

        repeated: list[Message] = []
        second.subscribe("t", repeated.append)
        stack.enter_context(first)
        for _ in range(QUEUES):
            assert working.acquire(timeout=PATIENCE_S)
        stack.enter_context(second)
        wait_for(lambda: len(of_topic(first)) == 2)
        # It is free as far as members say: what keeps it is the lock. It is asked for each half second.
        ends_s = time.monotonic() + 1.5
        while time.monotonic() < ends_s:
            assert of_topic(second) == []
            time.sleep(0.05)
        assert repeated == []
        go_on.set()
        wait_for(lambda: len(of_topic(second)) == 2)
        wait_for(lambda: len(repeated) == 2)
    assert {message.queue_offset for message in repeated} == {0}, "done, but not committed: it comes again"


def test_locks_are_listed_with_owner_token_and_age_and_what_is_free_without(broker: Broker) -> None:
    with member(broker, instance_name="one") as one, Admin(namesrv=broker.namesrv) as admin:
        one.subscribe("t")
        poll_until_shared([4], one)
        locks = admin.queue_locks("g")
        assert [lock.queue for lock in locks] == sorted(one.assignment())
        one.commit(dict.fromkeys(one.assignment(), 0))
        assert len({lock.token for lock in locks}) == QUEUES
        assert all(lock.client_id.endswith("@one") and lock.is_member and lock.age_s is not None for lock in locks)
        admin.create_topic("t", write_queues=QUEUES + 1, read_queues=QUEUES + 1, update=True)
        rows = jsonl(run("group", "locks", "g", "-o", "jsonl", namesrv=broker.namesrv))
        assert [row["queue_id"] for row in rows] == [*range(QUEUES + 1)]
        assert [row["token"] for row in rows] == [*(f"{lock.token:016x}" for lock in locks), None]
        assert [row["owner"] for row in rows] == [locks[0].client_id] * QUEUES + [None]
        assert jsonl(run("group", "locks", "g", "--free", "-o", "jsonl", namesrv=broker.namesrv)) == rows[QUEUES:]
    with Admin(namesrv=broker.namesrv) as admin:
        wait_for(lambda: admin.queue_locks("g") == [])
    # All of its offsets have stayed, so it is known; it has no locks any more.
    assert jsonl(run("group", "locks", "g", "-o", "jsonl", namesrv=broker.namesrv)) == []
    assert "no broker knows the group" in run("group", "locks", "nobody", namesrv=broker.namesrv, code=4).stderr


MEMBER = """
import sys
from protomq import PushConsumer
consumer = PushConsumer("g", namesrv=sys.argv[1], orderly=True, commit_interval_s=0.1)
consumer.on("t")(lambda message: print("got", message.queue_id, flush=True))
consumer.run()
"""


def test_who_dies_together_with_the_broker_leaves_no_lock_behind_for_longer_than_the_gap(tmp_path: Path) -> None:
    gap_s = 3.0
    with Broker(data_dir=tmp_path, environment={"PROTOMQ_MEMBER_GAP_MS": str(int(gap_s * 1000))}) as broker:
        with Admin(namesrv=broker.namesrv) as admin:
            admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
            with subprocess.Popen([sys.executable, "-c", MEMBER, broker.namesrv], stdout=subprocess.DEVNULL) as victim:
                wait_for(lambda: len([lock for lock in admin.queue_locks("g") if lock.queue.topic == "t"]) == QUEUES)
                victim.kill()
                # The broker dies before it has noticed.
                os.kill(broker.process_id, signal.SIGKILL)
            broker.kill()
            broker.restart()
            began_s = time.monotonic()
            with member(broker) as survivor:
                survivor.subscribe("t")
                poll_until_shared([4], survivor)
            assert time.monotonic() - began_s < LOCK_S / 2, "not only when the locks end by time"


LEAVER = """
import os, sys, threading
from protomq import PushConsumer
namesrv, way = sys.argv[1:]
consumer = PushConsumer("g", namesrv=namesrv, orderly=True)
consumer.on("t")(lambda message: None)
consumer.start()
sys.stdin.readline()
if way == "exit":
    sys.exit(0)  # without a word to the consumer
if way == "os._exit":
    os._exit(0)
if way == "an error":
    raise SystemError("of the program")
threading.Event().wait()
"""
LEAVE_S = 10.0
"""A busy machine may take longer than the promised 2 s; what is left behind is so for 25 or 60 s."""


def locked_by_others(admin: Admin, name: str) -> set[int]:
    return {lock.queue.queue_id for lock in admin.queue_locks("g") if lock.queue.topic == "t" and not lock.client_id.endswith(f"@{name}")}


@pytest.mark.parametrize("way", ["exit", "os._exit", "an error", "kill", "SIGTERM", "stop", "unsubscribe", "close", "rebalance"])
def test_a_member_that_leaves_by_any_way_leaves_no_queue_without_an_owner(protomq_server: Broker, way: str) -> None:
    namesrv = protomq_server.namesrv
    with ExitStack() as stack:
        admin = stack.enter_context(Admin(namesrv=namesrv))
        if "t" not in admin.list_topic_names():
            admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
        survivor = PushConsumer("g", namesrv=namesrv, orderly=True, instance_name="survivor")
        survivor.subscribe("t", lambda message: None)
        stack.enter_context(survivor)
        wait_for(lambda: len(of_topic(survivor)) == QUEUES)
        if way in ("stop", "unsubscribe"):
            pushed = PushConsumer("g", namesrv=namesrv, orderly=True)
            pushed.subscribe("t", lambda message: None)
            stack.enter_context(pushed)
            wait_for(lambda: len(of_topic(survivor)) == len(locked_by_others(admin, "survivor")) == QUEUES // 2)
            began_s = time.monotonic()
            pushed.stop() if way == "stop" else pushed.unsubscribe("t")
        elif way in ("close", "rebalance"):
            pulled = stack.enter_context(PullConsumer("g", namesrv=namesrv, lock_queues=True))
            pulled.subscribe("t")
            while len(of_topic(survivor)) != QUEUES // 2 or len(locked_by_others(admin, "survivor")) != QUEUES // 2:
                pulled.poll(0.05)
            began_s = time.monotonic()
            if way == "close":
                pulled.close()
            else:
                with PullConsumer("g", namesrv=namesrv, lock_queues=True) as third:
                    third.subscribe("t")
                    while len(locked_by_others(admin, "survivor")) != QUEUES - 1 or not third.assignment():
                        pulled.poll(0.05)
                        third.poll(0.05)
                        assert time.monotonic() - began_s < LEAVE_S
                pulled.close()
        else:
            command = [sys.executable, "-c", LEAVER, namesrv, way]
            leaver = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL))
            stack.callback(leaver.kill)
            wait_for(lambda: len(of_topic(survivor)) == len(locked_by_others(admin, "survivor")) == QUEUES // 2)
            began_s = time.monotonic()
            if way in ("kill", "SIGTERM"):
                leaver.send_signal(signal.SIGKILL if way == "kill" else signal.SIGTERM)
            else:
                assert leaver.stdin is not None
                leaver.stdin.write(b"go\n")
                leaver.stdin.flush()
        wait_for(lambda: len(of_topic(survivor)) == QUEUES)
        assert time.monotonic() - began_s < LEAVE_S
        assert locked_by_others(admin, "survivor") == set()


@pytest.mark.parametrize("transport", ["remoting", "grpc"])
@pytest.mark.parametrize("is_broken", [False, True], ids=["", "its connection breaks first"])
def test_no_lock_of_a_member_outlives_its_stop(transport: Literal["remoting", "grpc"], is_broken: bool) -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy()) for _ in range(2)]
        ports = [proxy.address.rpartition(":")[2] for proxy in proxies]
        environment = {"PROTOMQ_LISTEN_ADVERTISED_REMOTING_PORT": ports[0], "PROTOMQ_LISTEN_ADVERTISED_GRPC_PORT": ports[1]}
        broker = stack.enter_context(Broker(environment=environment))
        proxies[0].target, proxies[1].target = broker.remoting_address, broker.grpc_address
        admin = stack.enter_context(Admin(namesrv=broker.namesrv))
        admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
        for number in range(5):
            group = f"stopping-{number}"
            consumer = PushConsumer(group, namesrv=broker.namesrv, orderly=True, transport=transport)
            consumer.subscribe("t", lambda message: None)
            consumer.start()
            wait_for(lambda group=group: len(admin.queue_locks(group)) > QUEUES)  # type: ignore[misc]
            if is_broken:
                for proxy in proxies:
                    proxy.cut()
            consumer.stop()
            assert admin.queue_locks(group) == []
            with PullConsumer(group, namesrv=broker.namesrv, auto_commit=False) as other:
                queue = other.queues("t")[0]
                other.assign([queue])
                other.seek(queue, 0)
                other.commit()


def test_the_only_member_repeats_nothing_after_its_connection_was_broken_for_so_long_that_its_queues_were_free() -> None:
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy()) for _ in range(2)]
        ports = [proxy.address.rpartition(":")[2] for proxy in proxies]
        environment = {"PROTOMQ_LISTEN_ADVERTISED_REMOTING_PORT": ports[0], "PROTOMQ_LISTEN_ADVERTISED_GRPC_PORT": ports[1]}
        broker = stack.enter_context(Broker(environment=environment))
        proxies[0].target, proxies[1].target = broker.remoting_address, broker.grpc_address
        channel = stack.enter_context(grpc.insecure_channel(broker.grpc_address))

        def lock_count() -> int:
            return len(QueueLockServiceStub(channel).ListQueueLocks(ListQueueLocksRequest(consumer_group="g"), timeout=PATIENCE_S).locks)

        admin = stack.enter_context(Admin(namesrv=broker.namesrv))
        admin.create_topic("t", write_queues=QUEUES, read_queues=QUEUES)
        got: Counter[bytes] = Counter()
        consumer = PushConsumer("g", namesrv=broker.namesrv, orderly=True, commit_interval_s=2.0)
        consumer.subscribe("t", lambda message: got.update([message.body]))
        stack.enter_context(consumer)
        fill(broker, 40)
        wait_for(lambda: len(got) == 40)
        for proxy in proxies:
            proxy.set(refuse=True)
            proxy.cut()
        wait_for(lambda: lock_count() == 0)
        for proxy in proxies:
            proxy.heal()
        wait_for(lambda: lock_count() > QUEUES)  # with that of the retries
        fill(broker, 48)

        def committed() -> int:
            return sum(lag.committed_offset or 0 for lag in admin.group_lag("g", "t"))

        wait_for(lambda: committed() == 88)
        assert got == Counter(b"%d" % number for count in (40, 48) for number in range(count))


def test_a_start_that_fails_leaves_no_lock_behind(protomq_server: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic("first", write_queues=QUEUES, read_queues=QUEUES)
        locked: list[int] = []

        def fail(self: PushSteps) -> None:
            locked.append(len(admin.queue_locks("failing")))
            raise ConfigurationError("no")

        monkeypatch.setattr(PushSteps, "_follow_retries", fail)
        consumer = PushConsumer("failing", namesrv=protomq_server.namesrv, orderly=True)
        consumer.subscribe("first", lambda message: None)
        with pytest.raises(ConfigurationError):
            consumer.start()
        assert locked == [QUEUES]
        # Its connection ends without a word, and a member may be back over another one: the broker waits 0.4 s for it.
        wait_for(lambda: admin.queue_locks("failing") == [])
        assert admin.group_members("failing") == []
