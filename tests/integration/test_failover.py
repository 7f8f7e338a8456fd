"""Fail-over with a real etcd and three real brokers: whatever happens to the master, what was acknowledged is there, once, in order."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from protomq import Admin, AsyncProducer, Message, MessageQueue, Producer, PullConsumer, SendStatus
from protomq.errors import PartialResultError
from tests.chaos.sick_disk import SickDisk, build_library, why_no_sick_disk
from tests.support.cli import jsonl, run
from tests.support.elected_brokers import CountingProducer, ElectedCluster, elected_cluster
from tests.support.ha_brokers import NAME, TOPIC
from tests.support.waiting import PATIENCE_S, wait_for
from tests.support.wasm_modules import LATE

LEASE_S = 3.0
QUEUE = MessageQueue(TOPIC, NAME, 0)
ANSWERED = (SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE)


def send(namesrv: str, *bodies: bytes) -> set[SendStatus]:
    with Producer(namesrv=namesrv, send_timeout_s=15) as producer:
        return {producer.send(TOPIC, body, queue=QUEUE).status for body in bodies}


def numbered(name: str, count: int) -> list[bytes]:
    return [b"%s %d" % (name.encode(), number) for number in range(count)]


class Reader:
    """A member of a group that goes on through all of it, and commits each message at once."""

    def __init__(self, namesrv: str) -> None:
        self.bodies: list[bytes] = []
        self.consumer = PullConsumer("g", namesrv=namesrv, begin="earliest")
        self.consumer.subscribe(TOPIC)

    def read_until(self, last: bytes) -> None:
        def has_it() -> bool:
            messages: list[Message] = self.consumer.poll(0.2)
            self.bodies += [message.body for message in messages]
            return last in self.bodies

        wait_for(has_it, 2 * PATIENCE_S)


def problem_of(broker_id: int, namesrv: str) -> str:
    """As the operator reads it; "" if nobody knows that broker. Name servers may still list one that was killed (exit code 7)."""
    rows = jsonl(run("ha", "status", "-o", "jsonl", namesrv=namesrv, code=(0, 7)))
    return "; ".join(str(row["problem"]) for row in rows if row["broker_id"] == broker_id)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    with elected_cluster(tmp_path_factory.mktemp("failover")) as running:
        yield running


@pytest.fixture
def producer(cluster: ElectedCluster) -> Iterator[CountingProducer]:
    """Checked at the end: all that it was told is stored is there, once, in order, behind what was there before."""
    cluster.wait_leading()
    before = len(cluster.bodies())
    with CountingProducer(cluster.namesrv) as sends:
        sends.wait_for_more()
        yield sends
    sends.check(cluster.bodies()[before:])


def test_kill_of_the_master(cluster: ElectedCluster, producer: CountingProducer) -> None:
    old = cluster.wait_leading()
    epoch = old.status().epoch
    old.kill()
    killed_s = time.monotonic()
    producer.wait_for_more()
    new = cluster.wait_leading(2)
    assert new is not old
    assert new.status().epoch > epoch
    print(f"time without service: {producer.longest_pause_s(killed_s):.2f} s")
    old.start()
    assert cluster.wait_leading(3) is new
    assert not producer.failures


def known_and_away(admin: Admin) -> tuple[dict[str, int], list[int]]:
    """What the master knows of members: their ids, by store; and the ids of those that do not answer."""
    try:
        states = admin.ha_status(NAME)
    except PartialResultError as error:  # a name server has it still
        states = error.result
    masters = [state for state in states if not state.broker_id]
    known = {each.member: each.broker_id for state in masters if state.leadership for each in state.leadership.known}
    return known, [each.broker_id for state in masters for each in state.away]


def test_a_dead_member_is_listed_until_it_is_replaced_or_forgotten(cluster: ElectedCluster) -> None:
    leader, namesrv = cluster.wait_leading(), cluster.namesrv
    number, dead = next((number, each) for number, each in enumerate(cluster.brokers, 1) if each is not leader)
    forget = ("ha", "forget", NAME, "--id", str(number))
    with Admin(namesrv=namesrv) as admin:

        def are_all_there() -> bool:
            known, away = known_and_away(admin)
            return sorted(known.values()) == [1, 2, 3] and not away

        wait_for(are_all_there, PATIENCE_S)
        before = set(known_and_away(admin)[0])
        dead.kill()
        wait_for(lambda: f"protomq {' '.join(forget)}" in problem_of(number, namesrv), PATIENCE_S)
        assert known_and_away(admin)[1] == [number]
        # An emptied folder is another member.
        shutil.rmtree(dead.folder)
        dead.start()
        cluster.wait_leading(3)
        wait_for(lambda: are_all_there() and len(set(known_and_away(admin)[0]) - before) == 1, PATIENCE_S)
        assert "runs: stop it first" in run(*forget, namesrv=namesrv, code=6).stderr
        dead.kill()
        wait_for(lambda: "out of the in-sync set" in problem_of(number, namesrv), PATIENCE_S)
        run(*forget, namesrv=namesrv)
        wait_for(lambda: not known_and_away(admin)[1], PATIENCE_S)
        assert number not in known_and_away(admin)[0].values()
        # It comes back all the same.
        dead.start()
        cluster.wait_leading(3)
        wait_for(are_all_there, PATIENCE_S)


def module_counts(admin: Admin) -> list[int]:
    """Of each broker; none while one does not answer, since it opens its store, say."""
    try:
        return [len(modules) for modules in admin.list_filters().values()]
    except PartialResultError:
        return []


def test_filter_modules_are_at_the_next_master(cluster: ElectedCluster) -> None:
    """They stand in no log: a deployment goes to all three, and a member that lost its folder takes them from the new master."""
    old = cluster.wait_leading()
    with Admin(namesrv=cluster.namesrv) as admin:
        wait_for(lambda: len(admin.cluster_info()) == 3, PATIENCE_S)
        assert len(admin.deploy_filter("late", LATE)) == 3
        old.kill()
        shutil.rmtree(old.folder)
        new = cluster.wait_leading(2)
        assert new is not old
        assert send(cluster.namesrv, b"early", b"late") == {SendStatus.SEND_OK}
        with PullConsumer(namesrv=cluster.namesrv, begin="earliest") as consumer:
            consumer.subscribe(TOPIC, module="late")
            assert [message.body for message in consumer.poll(PATIENCE_S)] == [b"late"]
        old.start()
        assert cluster.wait_leading(3) is new
        wait_for(lambda: module_counts(admin) == [1, 1, 1], PATIENCE_S)


@pytest.mark.long
def test_a_master_that_is_told_to_stop_hands_over_first(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    old = cluster.wait_leading()
    epoch = old.status().epoch
    stopped_s = time.monotonic()
    assert old.stop() == 0
    assert "another member leads pair" in old.log_text()
    producer.wait_for_more()
    new = cluster.wait_leading(2)
    assert (new is not old, new.status().epoch) == (True, epoch + 1)
    print(f"time without service: {producer.longest_pause_s(stopped_s):.2f} s")
    old.start()
    assert cluster.wait_leading(3) is new
    assert not producer.failures


def test_producers_do_not_wait_for_a_master_that_is_silent(cluster: ElectedCluster) -> None:
    """Its connections stay open. Once another one leads, sends go there, however long their time-out; what they repeat is stored once."""
    old = cluster.wait_leading()
    before = len(cluster.bodies())

    def from_thread(transport: Literal["auto", "grpc"]) -> float:
        with Producer(namesrv=cluster.namesrv, send_timeout_s=30, transport=transport) as producer:
            producer.send(TOPIC, b"first", queue=QUEUE)
            stopped.wait()
            began_s = time.monotonic()
            assert producer.send(TOPIC, b"thread " + transport.encode(), queue=QUEUE).status in ANSWERED
            return time.monotonic() - began_s

    async def from_coroutine(transport: Literal["auto", "grpc"]) -> float:
        async with AsyncProducer(namesrv=cluster.namesrv, send_timeout_s=30, transport=transport) as producer:
            await producer.send(TOPIC, b"first", queue=QUEUE)
            await asyncio.to_thread(stopped.wait)
            began_s = time.monotonic()
            result = await producer.send(TOPIC, b"coroutine " + transport.encode(), queue=QUEUE)
            assert result.status in ANSWERED
            return time.monotonic() - began_s

    stopped = threading.Barrier(5, action=lambda: old.process.send_signal(signal.SIGSTOP))
    try:
        with ThreadPoolExecutor() as threads:
            waits = [threads.submit(from_thread, "auto"), threads.submit(from_thread, "grpc")]
            waits += [threads.submit(asyncio.run, from_coroutine("auto")), threads.submit(asyncio.run, from_coroutine("grpc"))]
            stopped.wait()
            waits_s = [wait.result() for wait in waits]
    finally:
        old.process.send_signal(signal.SIGCONT)
    print("first answers after", [f"{wait_s:.2f} s" for wait_s in waits_s])
    # The lease runs for 3 s. Half of the time-out is 15 s.
    assert max(waits_s) < 10
    assert cluster.wait_leading(3) is not old
    bodies = cluster.bodies()[before:]
    assert sorted(body for body in bodies if body != b"first") == sorted(
        kind + way for kind in (b"thread ", b"coroutine ") for way in (b"auto", b"grpc")
    )


@pytest.mark.long
def test_a_master_that_is_stopped_and_wakes_up(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    old = cluster.wait_leading()
    old.process.send_signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        producer.wait_for_more()
        print(f"time without service: {producer.longest_pause_s(stopped_s):.2f} s")
    finally:
        old.process.send_signal(signal.SIGCONT)
    producer.wait_for_more()
    assert cluster.wait_leading(3) is not old
    assert old.status().leadership.state == "FOLLOWING"


@pytest.mark.long
def test_without_etcd_all_goes_on_and_it_is_said(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    master = cluster.wait_leading()
    epoch = master.status().epoch
    cluster.etcd.kill()
    try:
        wait_for(lambda: bool(master.status().leadership.problems), PATIENCE_S)
        assert "etcd has not answered" in master.status().leadership.problems[0]
        killed_s = time.monotonic()
        wait_for(lambda: time.monotonic() > killed_s + 2 * LEASE_S, PATIENCE_S)
        producer.wait_for_more()
        assert producer.longest_pause_s(killed_s) < LEASE_S, "the promises of its slaves are enough"
    finally:
        cluster.etcd.start()
    wait_for(lambda: not master.status().leadership.problems, PATIENCE_S)
    assert (cluster.wait_leading(3), master.status().epoch) == (master, epoch)
    assert not producer.failures


@pytest.mark.long
def test_a_switch_loses_nothing(cluster: ElectedCluster, producer: CountingProducer) -> None:
    old = cluster.wait_leading()
    target = next(each for each in cluster.brokers if each is not old)
    begun_s = time.monotonic()
    with Admin(namesrv=cluster.namesrv) as admin:
        admin.switch_master("pair", target.status().broker_id)
        # Connections from its time as a slave are closed, and a change is not sent to nobody.
        admin.create_topic("made-at-once")
    wait_for(lambda: cluster.leading() is target, PATIENCE_S)
    producer.wait_for_more()
    print(f"time without service: {producer.longest_pause_s(begun_s):.2f} s")
    assert cluster.wait_leading(3) is target
    assert not producer.failures
    own_id = cluster.brokers.index(target) + 1
    for command in (("switch", NAME), ("promote", NAME), ("promote", NAME, "--unclean", "--yes")):
        for broker_id in (0, own_id):
            said = run("ha", *command, "--to", str(broker_id), namesrv=cluster.namesrv).stderr
            assert f"broker_id {broker_id} of {NAME} leads already" in said
    assert cluster.wait_leading(3) is target


@pytest.mark.long
def test_a_slave_that_is_silent_keeps_no_other_from_the_lead(cluster: ElectedCluster) -> None:
    old = cluster.wait_leading()
    target, silent = (each for each in cluster.brokers if each is not old)
    broker_id = target.status().broker_id
    assert silent.process is not None
    silent.process.send_signal(signal.SIGSTOP)
    try:
        run("ha", "switch", NAME, "--to", str(broker_id), "--timeout", "1", namesrv=cluster.namesrv)
        assert cluster.leading() is target
        run("ha", "wait", NAME, "--copies", "2", "--wait", "20s", "--timeout", "1", namesrv=cluster.namesrv)
    finally:
        silent.process.send_signal(signal.SIGCONT)


@pytest.mark.long
def test_members_whose_disks_do_not_take_the_new_epoch_stay_slaves_and_one_leads_when_its_disk_does(
    cluster: ElectedCluster, producer: CountingProducer
) -> None:
    old = cluster.wait_leading(3)
    slaves = [broker for broker in cluster.brokers if broker is not old]
    ids = {slave: slave.status().broker_id for slave in slaves}
    # A folder where the next version of the file is to be written: it fails as on a full disk.
    for slave in slaves:
        (slave.folder / "config/epochs.json.tmp").mkdir()
    old.kill()
    for slave, slave_id in ids.items():

        def says_it(slave_id: int = slave_id) -> bool:
            return "does not run until it can" in problem_of(slave_id, cluster.namesrv)

        wait_for(says_it, 2 * PATIENCE_S)
        assert slave.is_up
        assert "It gives the lead back and stays a slave" in slave.log_text()
    (slaves[0].folder / "config/epochs.json.tmp").rmdir()
    wait_for(lambda: cluster.leading() is slaves[0], PATIENCE_S)
    producer.wait_for_more()
    (slaves[1].folder / "config/epochs.json.tmp").rmdir()
    wait_for(lambda: not slaves[1].status().leadership.problems, PATIENCE_S)
    old.start()
    assert cluster.wait_leading(3) is slaves[0]


@pytest.mark.long
@pytest.mark.skipif(why_no_sick_disk() != "", reason=why_no_sick_disk())
def test_a_master_whose_disk_is_full_gives_the_lead_to_a_member_with_room_and_joins_again_when_it_has_some(tmp_path: Path) -> None:
    library = build_library(tmp_path)
    disks = [SickDisk(tmp_path / f"disk-{number}", library) for number in (1, 2, 3)]
    # A log has space until its segment ends: with small ones that is soon, however few messages a busy machine sends.
    store = {"segment_size_bytes": "64KiB"}
    with elected_cluster(tmp_path, environments=[disk.environment for disk in disks], store=store) as here:
        old = here.wait_leading(3)
        old_disk = disks[here.brokers.index(old)]
        others = [broker for broker in here.brokers if broker is not old]
        with CountingProducer(here.namesrv) as sends:
            sends.wait_for_more()
            with old_disk.full():
                wait_for(lambda: here.leading() in others, PATIENCE_S)
                sends.wait_for_more()
                assert not sends.failures, "they wait for the next master"
            new = here.wait_leading(3)
            assert new in others
            wait_for(lambda: not old.status().leadership.problems, PATIENCE_S)
            sends.wait_for_more()
        sends.check(here.bodies()[1:])
        assert max(here.led_epochs().values()) == 1


@pytest.mark.long
@pytest.mark.skipif(why_no_sick_disk() != "", reason=why_no_sick_disk())
def test_where_all_disks_are_full_the_lead_stays_and_sends_are_taken_as_soon_as_there_is_room(tmp_path: Path) -> None:
    library = build_library(tmp_path)
    disks = [SickDisk(tmp_path / f"disk-{number}", library) for number in (1, 2, 3)]
    with elected_cluster(tmp_path, environments=[disk.environment for disk in disks]) as here:
        master = here.wait_leading(3)
        epochs, stays = here.led_epochs(), "the lead stays here until a member in sync has room"
        with CountingProducer(here.namesrv) as sends:
            sends.wait_for_more()
            with ExitStack() as full:
                for disk in disks:
                    full.enter_context(disk.scant())
                wait_for(lambda: stays in problem_of(0, here.namesrv), PATIENCE_S)
                ends_s = time.monotonic() + 2 * LEASE_S
                while time.monotonic() < ends_s:
                    assert here.leading(copies=3) is master
                    assert stays in problem_of(0, here.namesrv)
                assert here.led_epochs() == epochs, "the lead does not go round"
            sends.wait_for_more()
            # Whoever finds first that it has room may have the lead by now.
            here.wait_leading(3)
        sends.check(here.bodies()[1:])


def test_an_unclean_promotion_says_what_is_lost_and_nothing_else_is(cluster: ElectedCluster) -> None:
    kept, lost, later = numbered("kept", 30), numbered("lost", 20), numbered("later", 40)
    namesrv = cluster.namesrv
    before = cluster.bodies()
    old = cluster.wait_leading()
    assert send(namesrv, *kept) == {SendStatus.SEND_OK}
    reader = Reader(namesrv)
    reader.read_until(kept[-1])
    reader.consumer.commit()
    heir, other = (broker for broker in cluster.brokers if broker is not old)
    for slave in (heir, other):
        slave.wait_for_all_of(old)
        slave.kill()
    wait_for(lambda: old.status().in_sync_count == 1, PATIENCE_S)
    # Alone, the old master acknowledges, and says that nobody else has it.
    assert send(namesrv, *lost) == {SendStatus.SLAVE_NOT_AVAILABLE}
    reader.read_until(lost[9])
    reader.consumer.commit()
    old_end = old.status().end_position
    old.kill()

    heir.start()
    heir_id, heir_end = heir.status().broker_id, heir.status().end_position
    wait_for(lambda: "this store may lack what was acknowledged" in problem_of(heir_id, namesrv), PATIENCE_S)
    assert "order an unclean promotion" in problem_of(heir_id, namesrv)
    refused = run("ha", "promote", NAME, "--to", str(heir_id), namesrv=namesrv, code=1)
    assert "nobody leads pair" in refused.stderr
    ordered_s = time.monotonic()
    run("ha", "promote", NAME, "--to", str(heir_id), "--unclean", "--yes", namesrv=namesrv)
    print(f"promoted within {time.monotonic() - ordered_s:.2f} s")
    assert cluster.wait_leading(1) is heir

    assert send(namesrv, *later) <= {SendStatus.SEND_OK, SendStatus.SLAVE_NOT_AVAILABLE}
    # The reader has had ten messages that are no more: it is told where the logs part, and misses none of the new ones.
    reader.read_until(later[-1])
    reader.consumer.commit()
    assert [body for body in reader.bodies if body in later] == later
    assert reader.consumer.committed(QUEUE) == reader.consumer.position(QUEUE)
    reader.consumer.close()

    old.start()
    other.start()
    assert cluster.wait_leading(3) is heir
    for slave in (old, other):
        slave.wait_for_all_of(heir)
    end = heir.status().end_position
    assert old.log_bytes(end) == other.log_bytes(end) == heir.log_bytes(end)
    assert cluster.bodies() == [*before, *kept, *later]
    said = f"the log ends at {old_end}, and agrees with the master's up to {heir_end}: it is truncated"
    assert said in old.log_text()
