"""Orders about who leads: what their sender is told, and on which lane they wait for etcd."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from protomq.v1 import ha_service_pb2 as ha
from protomq_broker import ha_service
from protomq_broker.config import BrokerConfig
from protomq_broker.fetch_answers import AnswerMemory
from protomq_broker.ha_service import GATHER_MS, TICK_MS, HaService
from protomq_broker.ha_session import FollowSession
from protomq_broker.leadership_driver import (
    LeadershipView,
    OrderPendingError,
    OrderRefusedError,
    OrderUncertainError,
    Standing,
    UnknownMemberError,
)
from protomq_broker.log_time import LogTime
from protomq_broker.store.errors import DiskFullError, LogForkError
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.roles import HaConfig
from protomq_runtime.dispatch import BoundMethod, DispatchTable
from protomq_runtime.errors import Code, ServiceError
from protomq_runtime.principals import Principal
from protomq_runtime.regions import RecentRegion
from protomq_runtime.testing import FakeCall, FakeGrpcCall, FakeLane

from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import SEGMENT, open_store


def service_whose_orders_end_with(error: Exception | None) -> HaService:
    def order(*_: Any) -> str:
        if error is not None:
            raise error
        return "switch to store 2"

    return HaService(
        SimpleNamespace(positions=SimpleNamespace(appended=0), epoch=7),  # type: ignore[arg-type]
        BrokerConfig(broker_name="b"),
        ManualClock(),
        "b",
        lambda: 1,
        lambda verdict: None,
        leadership=SimpleNamespace(order=order, withdraw_order=order, forget=order),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("error", "code", "reason", "definite"),
    [
        (OrderPendingError("there"), Code.FAILED_PRECONDITION, "ORDER_PENDING", True),
        (OrderRefusedError("no etcd"), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", True),
        (OrderUncertainError("who knows"), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", False),
    ],
)
@pytest.mark.parametrize("kind", [ha.ORDER_KIND_SWITCH, ha.ORDER_KIND_WITHDRAW])
def test_only_an_order_whose_transaction_was_not_answered_may_stand(
    error: Exception, code: Code, reason: str, definite: bool, kind: ha.OrderKind.ValueType
) -> None:
    request = ha.OrderLeadRequest(broker_name="b", kind=kind)
    with pytest.raises(ServiceError, match=str(error)) as told:
        service_whose_orders_end_with(error).order_lead(request, None)  # type: ignore[arg-type]
    assert (told.value.code, told.value.reason) == (code, reason)
    assert told.value.metadata["definite"] == ("true" if definite else "false")
    done = service_whose_orders_end_with(None).order_lead(request, None)  # type: ignore[arg-type]
    assert done.replaced_order == "switch to store 2"


def test_an_id_of_a_request_that_etcd_is_to_keep_is_short() -> None:
    request = ha.OrderLeadRequest(broker_name="b", kind=ha.ORDER_KIND_WITHDRAW, request_id="x" * 65)
    with pytest.raises(ServiceError, match="65 characters") as told:
        service_whose_orders_end_with(None).order_lead(request, None)  # type: ignore[arg-type]
    assert told.value.reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (UnknownMemberError("never heard of"), Code.NOT_FOUND, "BROKER_NOT_FOUND"),
        (OrderRefusedError("no etcd"), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    ],
)
def test_whoever_cannot_be_forgotten_is_told(error: Exception, code: Code, reason: str) -> None:
    request = ha.ForgetMemberRequest(broker_name="b", broker_id=2)
    with pytest.raises(ServiceError, match=str(error)) as told:
        service_whose_orders_end_with(error).forget_member(request, None)  # type: ignore[arg-type]
    assert (told.value.code, told.value.reason, told.value.metadata["definite"]) == (code, reason, "true")
    assert service_whose_orders_end_with(None).forget_member(request, None) == ha.ForgetMemberResponse()  # type: ignore[arg-type]


def test_no_fetch_waits_for_etcd() -> None:
    table = DispatchTable()
    table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], service_whose_orders_end_with(None))
    lanes = {path.rpartition("/")[2]: bound.method.lane for path, bound in table.by_path.items()}
    assert lanes["OrderLead"] == lanes["ForgetMember"] == "admin"
    assert lanes["Fetch"] == lanes["Acknowledge"] == "ha"


@pytest.mark.parametrize(
    ("copies_min", "problem"),
    [
        (1, ""),
        (3, "1 copies are in sync, and min_in_sync_replicas is 3: no messages are taken until slaves are back"),
    ],
)
def test_the_status_says_that_too_few_copies_are_in_sync_for_sends(copies_min: int, problem: str) -> None:
    copies = HaConfig(in_sync_replicas=3, min_in_sync_replicas=copies_min)
    config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER", ha=copies)
    service = HaService(open_store(SimDisk()), config, ManualClock(), "b", lambda: 7, lambda verdict: None)
    assert service.get_ha_status(ha.GetHaStatusRequest(), None).problem == problem  # type: ignore[arg-type]


def judged(view: LeadershipView, standing: Standing) -> tuple[HaService, ha.GetHaStatusResponse]:
    """The service of an elected broker whose leadership has this view and standing, and the status that it gives."""
    leadership = SimpleNamespace(view=lambda: view, report=lambda end, reports: standing)
    config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER")
    service = HaService(
        open_store(SimDisk()), config, ManualClock(), "b", lambda: 7, lambda verdict: None, leadership=leadership,  # type: ignore[arg-type]
    )  # fmt: skip
    service._judge()
    return service, service.get_ha_status(ha.GetHaStatusRequest(), None)  # type: ignore[arg-type]


def test_the_status_of_a_broker_that_gives_up_its_lead_does_not_speak_of_too_few_copies() -> None:
    view = LeadershipView("1", "HANDING_OVER", 1, "1", ("1", "2"), ())
    _, status = judged(view, Standing(2, 0, False, alone=False))
    assert status.problem == "this broker does not lead yet, or not any more: it takes no messages"


def test_the_status_of_an_elected_master_counts_no_member_of_its_set_that_does_not_keep_up() -> None:
    view = LeadershipView("1", "LEADING", 1, "1", ("1", "2", "3"), (), late=("2",), etcd_problem="etcd has not answered")
    service, status = judged(view, Standing(3, 0, True, alone=False, late=1))
    assert (status.in_sync_count, service.verdict.in_sync_count) == (2, 3), "sends wait for all three"
    assert (list(status.leadership.late), status.leadership.etcd_problem) == (["2"], "etcd has not answered")


@pytest.mark.parametrize(("kind", "followers"), [(FakeCall, 0), (FakeGrpcCall, 1)])
def test_a_slave_whose_connection_breaks_while_no_fetch_is_held_has_gone(
    kind: type[FakeCall], followers: int
) -> None:
    config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER")
    service = HaService(open_store(SimDisk()), config, ManualClock(), "b", lambda: 7, lambda verdict: None)
    table = DispatchTable()
    table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], service)
    lane = FakeLane()
    service.begin(lane)
    lane.run()
    bound = next(bound for path, bound in table.by_path.items() if path.endswith("/Fetch"))
    call = kind(lane, bound, ha.FetchRequest(broker_name="b", broker_id=1, store_id=9))
    service.fetch(call)
    assert (call.answered, len(service.views)) == (True, 1)
    call.hang_up()
    lane.advance(TICK_MS)
    # Over gRPC an answered call tells nothing of its connection.
    assert len(service.views) == followers


def test_a_slave_whose_end_the_master_cannot_read_is_not_told_to_go_back() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a message"])])
    tail = store.positions.tail
    disk.flip_bit("/s/commitlog/" + "0" * 20, 8 * (tail.position - 60))
    config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER")
    service = HaService(store, config, ManualClock(), "b", lambda: 7, lambda verdict: None)
    table = DispatchTable()
    table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], service)
    bound = next(bound for path, bound in table.by_path.items() if path.endswith("/Fetch"))
    end = ha.LogPoint(position=tail.position - 1, epoch=store.epoch, crc32c=tail.crc32c)
    call = FakeCall(FakeLane(), bound, ha.FetchRequest(broker_name="b", broker_id=1, store_id=9, end=end))
    service.fetch(call)
    assert call.error is not None
    assert call.error.reason == "CORRUPT_LOG"
    with pytest.raises(ServiceError, match="is not known") as told:
        service.compare_log(ha.CompareLogRequest(broker_name="b", position=end.position), None)  # type: ignore[arg-type]
    assert told.value.reason == "CORRUPT_LOG"


def test_a_master_whose_disk_is_full_says_so_as_long_as_it_is() -> None:
    disk = SimDisk()
    store = open_store(disk)
    store.append([make_request([b"a"])])
    service = HaService(
        store, BrokerConfig(broker_name="b", broker_role="SYNC_MASTER"), ManualClock(), "b", lambda: 7, lambda verdict: None
    )

    def problem() -> str:
        return service.get_ha_status(ha.GetHaStatusRequest(), None).problem  # type: ignore[arg-type]

    assert problem() == ""
    disk.capacity_bytes = 1
    while not problem():
        with suppress(DiskFullError):
            store.append([make_request([bytes(300)])])
    assert "the disk is 100.0% full" in problem()
    disk.capacity_bytes = 1 << 40
    store.append([make_request([bytes(300)])])
    assert problem() == ""


class _Slave:
    """A follower that speaks with a HaService without a network."""

    def __init__(self, leader: Store, log_time: LogTime | None = None, kind: type[FakeCall] = FakeCall) -> None:
        self._kind = kind
        config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER")
        numbers = itertools.count(1)
        self._service = HaService(
            leader, config, ManualClock(), "b", lambda: next(numbers), lambda verdict: None, log_time=log_time
        )
        table = DispatchTable()
        table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], self._service)
        self._bound = next(bound for path, bound in table.by_path.items() if path.endswith("/Fetch"))
        self._lane = FakeLane()
        self.store = open_store(SimDisk(), follows=True)
        self.answers: list[ha.FetchResponse] = []

    def follow(self, cluster: str = "") -> str:
        """One session, until it has all or ends: why it ends. `cluster`: where it says that it belongs."""
        self.session = session = FollowSession(self.store, lambda function: function())
        request = session.begin_request("b", 1, "")
        request.cluster = cluster
        begins = True
        while True:
            call = self._kind(self._lane, self._bound, request)
            self._service.fetch(call)
            self._lane.advance(GATHER_MS)
            if call.error is not None:
                return call.error.reason
            if not call.answered:
                return ""
            response = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
            try:
                answer = AnswerMemory().read(response.SerializeToString())
                self.answers.append(answer[0])
                session.began(*answer) if begins else session.took(*answer)
            except LogForkError:
                call.hang_up()
                return "refused"
            request, begins = session.fetch_request(10 * GATHER_MS), False


def test_a_slave_of_another_cluster_is_refused() -> None:
    leader = open_store(SimDisk())
    leader.append([make_request([b"x"])])
    slave = _Slave(leader)
    assert slave.follow("other") == "BROKER_NOT_FOUND"
    assert not slave.store.appended_position
    assert slave.follow("DefaultCluster") == slave.follow("") == ""
    assert slave.store.appended_position == leader.appended_position


def test_a_master_says_its_log_time() -> None:
    """One of an earlier version does not."""
    leader = open_store(SimDisk())
    leader.append([make_request([b"x"])])
    slow = ManualClock(5_000)
    for log_time, said_ms in ((LogTime(slow, 0), 5_000), (None, 0)):
        slave = _Slave(leader, log_time)
        assert slave.follow() == ""
        assert slave.session.log_time_ms == said_ms


def test_damage_that_only_a_slave_notices_goes_into_quarantine_and_holds_it_up_no_longer_than_it_lasts() -> None:
    disk = SimDisk()
    leader = open_store(disk)
    segment = f"/s/commitlog/{0:020d}"
    starts = []
    for number in range(30):
        starts.append(leader.appended_position)
        leader.append([make_request([b"%03d" % number * 100])])
    good = disk.content(segment)
    disk.flip_bit(segment, 8 * (starts[7] + 50))
    slave = _Slave(leader)
    assert slave.follow() == "refused"
    assert not leader.damaged_ranges, "the connection may have broken for another reason"
    assert slave.follow() == "CORRUPT_LOG"
    (damage,) = leader.damaged_ranges
    assert (damage.start_position, damage.end_position) == (starts[7], starts[8])
    assert slave.store.appended_position == starts[7], "it gets what stands before the damage"
    assert slave.follow() == "CORRUPT_LOG"
    leader.heal_log(damage, good[starts[7] : starts[8]])
    assert slave.follow() == ""
    assert slave.store.appended_position == leader.appended_position


def late_leader() -> Store:
    """Its log begins behind 0."""
    leader = open_store(SimDisk())
    for number in range(60):
        leader.append([make_request([b"%03d" % number * 100])])
    leader.flush()
    leader.checkpoint()
    assert leader.delete_segments_below(SEGMENT) == SEGMENT
    return leader


@pytest.mark.parametrize("kind", [FakeCall, FakeGrpcCall])
def test_an_empty_slave_proves_the_first_head_of_a_log_that_begins_behind_0(kind: type[FakeCall]) -> None:
    """Else it would take a flipped epoch, part with its master, and know of an epoch that nobody has begun."""
    leader = late_leader()
    disk = leader._disk
    assert isinstance(disk, SimDisk)
    segment = f"/s/commitlog/{SEGMENT:020d}"
    good = disk.content(segment)
    slave = _Slave(leader, kind=kind)
    for at in (3, 40):  # its epoch, and what was synced then
        disk.flip_bit(segment, 8 * at)
        assert slave.follow() == "refused"
        assert (slave.store.appended_position, slave.store.epochs.highest_epoch) == (0, 0)
        assert slave.follow() == "CORRUPT_LOG"
        (damage,) = leader.damaged_ranges
        assert damage.start_position == SEGMENT
        leader.heal_log(damage, good[: damage.end_position - SEGMENT])
    assert slave.follow() == ""
    assert slave.store.appended_position == leader.appended_position
    assert slave.store.min_position == SEGMENT


def test_a_master_tells_what_stood_before_its_log_only_who_begins_there() -> None:
    leader = late_leader()
    slave = _Slave(leader)
    assert slave.follow() == ""
    assert [answer.previous_crc32c for answer in slave.answers] == [leader.start_point.crc32c]
    leader.append([make_request([b"more"])])
    assert slave.follow() == ""
    whole = open_store(SimDisk())
    whole.append([make_request([b"x"])])
    other = _Slave(whole)
    assert other.follow() == ""
    assert not any(answer.HasField("previous_crc32c") for answer in [*slave.answers[1:], *other.answers])


def test_a_master_that_does_not_know_what_stood_before_its_log_is_followed_as_before() -> None:
    leader = late_leader()
    leader._open_log.start.move(None)
    slave = _Slave(leader)
    assert slave.follow() == ""
    assert not slave.answers[0].HasField("previous_crc32c")
    assert slave.store.appended_position == leader.appended_position


def test_a_connection_that_breaks_makes_no_damage() -> None:
    leader = open_store(SimDisk())
    leader.append([make_request([b"x"])])
    slave = _Slave(leader)
    with mock.patch.object(FollowSession, "took", side_effect=LogForkError(0, "planted")):
        assert slave.follow() == slave.follow() == "refused"
    assert slave.follow() == ""
    assert not leader.damaged_ranges


def begun_service(leader: Store, role: str) -> tuple[HaService, BoundMethod, FakeLane]:
    """A master's service on a lane, with `Fetch`. Its sessions are numbered from 7."""
    config = BrokerConfig(broker_name="b", broker_role=role)
    service = HaService(leader, config, ManualClock(), "b", itertools.count(7).__next__, lambda verdict: None)
    table = DispatchTable()
    table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], service)
    bound = next(bound for path, bound in table.by_path.items() if path.endswith("/Fetch"))
    lane = FakeLane()
    service.begin(lane)
    lane.run()
    return service, bound, lane


def test_a_slave_that_asks_for_little_does_not_wait_for_more() -> None:
    """Its link brings no more at a time."""
    leader = open_store(SimDisk())
    service, bound, lane = begun_service(leader, "ASYNC_MASTER")

    def fetch(size_max_bytes: int, **fields: Any) -> FakeCall:
        call = FakeCall(lane, bound, ha.FetchRequest(size_max_bytes=size_max_bytes, **fields))
        service.fetch(call)
        return call

    def log_in(call: FakeCall) -> int:
        answer = call.response(lambda region: region.file.read(region.offset, region.size_bytes))  # type: ignore[attr-defined]
        return len(answer.log)

    leader.append([make_request([bytes(7_500)])])
    assert log_in(fetch(3_000, broker_name="b", broker_id=1, store_id=9)) == 3_000
    assert log_in(fetch(3_000, session=7)) == 3_000
    assert not fetch(1 << 20, session=7).answered, "there is less, which is gathered"
    lane.advance(GATHER_MS)
    held = fetch(3_000, session=7)
    leader.append([make_request([bytes(2_000)])])
    assert lane.run() == 0
    assert not held.answered
    leader.append([make_request([bytes(2_000)])])
    lane.run()
    assert log_in(held) == 3_000


def test_what_was_just_written_is_said_to_be_in_memory_and_what_lies_far_back_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ha_service, "RECENT_SIZE_MAX_BYTES", 2_000)
    leader = open_store(SimDisk())
    service, bound, lane = begun_service(leader, "ASYNC_MASTER")
    leader.append([make_request([bytes(3_000)])])
    regions = []

    def fetch(size_max_bytes: int, **fields: Any) -> None:
        call = FakeCall(lane, bound, ha.FetchRequest(size_max_bytes=size_max_bytes, **fields))
        service.fetch(call)
        lane.advance(GATHER_MS)
        regions.append(call.regions)

    fetch(1_500, broker_name="b", broker_id=1, store_id=9)
    fetch(1_500, session=7)
    assert [[isinstance(region, RecentRegion) for region in parts] for parts in regions] == [[False], [True]]
    assert [(region.offset, region.size_bytes) for parts in regions for region in parts] == [(0, 1_500), (1_500, 1_500)]


@pytest.mark.parametrize(("role", "is_gathered"), [("ASYNC_MASTER", True), ("SYNC_MASTER", False)])
def test_where_nobody_waits_for_it_a_slave_gets_many_appends_in_one_answer(
    role: str, is_gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ha_service, "GATHER_SIZE_MAX_BYTES", 3_000)
    leader = open_store(SimDisk())
    leader.positions.wait_for_replicas(not is_gathered)
    service, bound, lane = begun_service(leader, role)

    def fetch(session: int) -> FakeCall:
        end = leader.appended_position
        request = ha.FetchRequest(broker_name="b", broker_id=1, store_id=9)
        if session:
            request = ha.FetchRequest(session=session, written_position=end, flushed_position=end)
        call = FakeCall(lane, bound, request)
        service.fetch(call)
        return call

    def append(size_bytes: int) -> int:
        """How often the append has woken the lane."""
        leader.append([make_request([bytes(size_bytes)])])
        return lane.run()

    append(100)
    assert fetch(0).answered, "the first answer has what is there"
    held = fetch(7)
    append(100)
    assert held.answered is not is_gathered
    if is_gathered:
        assert append(100) == 0, "an append that is gathered wakes nobody"
        lane.advance(GATHER_MS - 1)
        assert not held.answered
        lane.advance(1)
        assert held.answered
    held = fetch(7)
    assert not held.answered
    append(100)
    assert held.answered is not is_gathered
    append(3_000)
    assert held.answered, "much does not wait"
    if is_gathered:
        held = fetch(7)
        assert [append(100) for _ in range(3)] == [0, 0, 0], "what comes behind it is gathered anew"
        assert not held.answered
        lane.advance(GATHER_MS)
        assert held.answered
        held = fetch(7)
        lane.advance(GATHER_MS)
        assert not held.answered
        append(100)
        assert held.answered, "after a pause nothing is gathered"
        held = fetch(7)
        lane.advance(GATHER_MS // 2)
        append(100)
        assert not held.answered
        lane.advance(GATHER_MS // 2)
        assert held.answered, "it is gathered from the last answer on"
        held = fetch(7)
        append(100)
        lane.advance(GATHER_MS // 2)
        assert not held.answered, "a later confirmed position goes with what is gathered"


def test_what_was_gathered_goes_to_all_slaves_at_the_same_time() -> None:
    leader = open_store(SimDisk())
    service, bound, lane = begun_service(leader, "ASYNC_MASTER")

    def fetch(request: ha.FetchRequest) -> FakeCall:
        call = FakeCall(lane, bound, request)
        service.fetch(call)
        return call

    def hold(session: int) -> FakeCall:
        end = leader.appended_position
        return fetch(ha.FetchRequest(session=session, written_position=end, flushed_position=end))

    def append() -> None:
        leader.append([make_request([bytes(100)])])
        lane.run()

    for broker_id in (1, 2):
        assert fetch(ha.FetchRequest(broker_name="b", broker_id=broker_id, store_id=broker_id)).answered
    held = [hold(session) for session in (7, 8)]
    append()
    lane.advance(GATHER_MS)
    for turn in range(3):
        assert [call.answered for call in held] == [True, True], f"turn {turn}"
        held = [hold(session) for session in (7, 8)]
        append()
        assert not any(call.answered for call in held)
        lane.advance(GATHER_MS)


class _Acknowledging:
    """A master with slaves 1 and 2, each of which was sent the whole log and has acknowledged nothing. Slave 1 has session 101."""

    def __init__(self) -> None:
        store = open_store(SimDisk())
        store.append([make_request([b"a message"])])
        self.end = store.appended_position
        config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER", ha=HaConfig(in_sync_replicas=3))
        sessions = iter((101, 102))
        self.service = HaService(store, config, ManualClock(), "b", lambda: next(sessions), lambda verdict: None)
        table = DispatchTable()
        table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], self.service)
        self._bound = {path.rpartition("/")[2]: bound for path, bound in table.by_path.items()}
        self._lane = FakeLane()
        self.service.begin(self._lane)
        self._lane.run()
        for broker_id in (1, 2):
            call = self.call("Fetch", ha.FetchRequest(broker_name="b", broker_id=broker_id, store_id=broker_id))
            assert call.answered
        for session in (101, 102):  # As where the master is elected.
            self.service._table.note_said(session, 5_000)

    def call(self, method: str, request: ha.FetchRequest | ha.AcknowledgeRequest, principal: str = "replica") -> FakeCall:
        call = FakeCall(self._lane, self._bound[method], request, principal=Principal(principal))
        getattr(self.service, {"Fetch": "fetch", "Acknowledge": "acknowledge"}[method])(call)
        return call

    def known(self) -> tuple[Any, ...]:
        """What the master takes its slaves to have, and what it has heard of them."""
        replicas = [self.service._table.find(session) for session in (101, 102)]
        return *(dataclasses.replace(each) for each in replicas if each is not None), self.service.verdict


def test_an_acknowledgement_moves_the_slave_that_owns_the_session_and_no_other() -> None:
    master = _Acknowledging()
    _, second, verdict = master.known()
    master.call("Acknowledge", ha.AcknowledgeRequest(session=101, written_position=master.end))
    first, untouched, after = master.known()
    assert (first.written_position, untouched) == (master.end, second)
    assert (verdict.in_sync_count, after.in_sync_count) == (1, 2)


@pytest.mark.parametrize("method", ["Fetch", "Acknowledge"])
@pytest.mark.parametrize(
    ("why", "change", "principal"),
    [
        ("a stranger has no session", {"session": 7}, "replica"),
        ("the session is another principal's", {}, "somebody else"),
        ("it was not sent that much", {"written_position": 1 << 40}, "replica"),
        ("it cannot have synced what it has not written", {"flushed_position": 1 << 40}, "replica"),
        ("it was not told anything at that time", {"heard_ms": 1 << 40}, "replica"),
    ],
)
def test_what_was_not_sent_to_the_caller_moves_nothing(method: str, why: str, change: dict[str, int], principal: str) -> None:
    master = _Acknowledging()
    before = master.known()
    kind = ha.FetchRequest if method == "Fetch" else ha.AcknowledgeRequest
    told = {"session": 101, "written_position": master.end, "heard_ms": before[0].said_ms} | change
    call = master.call(method, kind(**told), principal)
    assert master.known() == before, why
    if call.error is not None:
        assert call.error.reason == "INVALID_ARGUMENT"
    elif method == "Fetch":
        assert call.response().status == ha.FETCH_STATUS_SESSION_ENDED


@pytest.mark.parametrize("change", [{"flushed_position": -1}, {"address": "x" * 301}, {"size_max_bytes": -1}, {"hold_ms": -1}])
def test_a_first_fetch_that_is_refused_ends_no_session_and_begins_none(change: dict[str, Any]) -> None:
    master = _Acknowledging()
    before = master.known()
    told: dict[str, Any] = {"broker_name": "b", "broker_id": 1, "store_id": 1} | change
    call = master.call("Fetch", ha.FetchRequest(**told))
    assert call.error is not None
    assert call.error.reason == "INVALID_ARGUMENT"
    assert master.known() == before


def test_a_broker_whose_name_is_another_one_s_says_so() -> None:
    config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER")
    service = HaService(open_store(SimDisk()), config, ManualClock(), "b", lambda: 7, lambda verdict: None)
    service.name_problem = lambda: "the name b is taken"
    assert service.get_ha_status(ha.GetHaStatusRequest(), None).problem == "the name b is taken"  # type: ignore[arg-type]
    view = SimpleNamespace(address="m:1", problem="nobody leads", end_position=0, heard_ms=None)
    slave = HaService(open_store(SimDisk()), config, ManualClock(), "b", lambda: 7, lambda verdict: None, lambda: view)  # type: ignore[arg-type, return-value]
    slave.name_problem = service.name_problem
    assert slave.get_ha_status(ha.GetHaStatusRequest(), None).problem == "the name b is taken; nobody leads"  # type: ignore[arg-type]


def test_a_slave_with_a_fixed_role_is_told_that_the_name_elects_its_master() -> None:
    service = service_whose_orders_end_with(None)
    table = DispatchTable()
    table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], service)
    bound = next(bound for path, bound in table.by_path.items() if path.endswith("/Fetch"))
    call = FakeCall(FakeLane(), bound, ha.FetchRequest(broker_name="b", broker_id=1, store_id=9))
    service.fetch(call)
    assert call.error is not None
    assert call.error.reason == "NOT_MASTER"
    assert "the slave that asks has no etcd setting" in call.error.message


def test_a_slave_that_asks_in_another_epoch_is_told_both() -> None:
    service = service_whose_orders_end_with(None)
    table = DispatchTable()
    table.add_service(ha.DESCRIPTOR.services_by_name["HaService"], service)
    bound = next(bound for path, bound in table.by_path.items() if path.endswith("/Fetch"))
    call = FakeCall(FakeLane(), bound, ha.FetchRequest(broker_name="b", broker_id=1, store_id=9, epoch=77))
    service.fetch(call)
    assert call.error is not None
    assert call.error.reason == "NOT_MASTER"
    assert "has epoch 7 of b, not 77" in call.error.message
