"""The driver with a model of etcd: effects come in order, what is confirmed follows the set, and orders are left."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from protomq_broker.etcd_gateway import EtcdGateway, HttpEtcd
from protomq_broker.leadership_driver import (
    LeadershipDriver,
    OrderPendingError,
    OrderRefusedError,
    OrderUncertainError,
    UnknownMemberError,
)
from protomq_ha.cluster_state import (
    IN_SYNC,
    ORDER,
    PROMOTE_UNCLEAN,
    SWITCH,
    WITHDRAWN,
    ClusterView,
    LogEnd,
    MemberName,
    Put,
    Row,
    Transaction,
    encode_in_sync,
    encode_master,
    encode_name,
    encode_order,
)
from protomq_ha.in_sync_set import MemberReport
from protomq_ha.leadership import Leadership
from protomq_ha.leadership_values import (
    Committed,
    CutSettled,
    Effect,
    Follow,
    Lead,
    NoteStart,
    ReadCluster,
    Request,
    Result,
    Role,
    Settings,
    StopFollowing,
)
from tests.support.fake_etcd import FakeEtcd

PREFIX = "/protomq/c/n"
QUICK: dict[str, Any] = {"renew_interval_ms": 20, "read_interval_ms": 20, "member_timeout_ms": 300}


class Broker:
    """A driver that does at once what it is told, and a clock that a test may move."""

    def __init__(self, etcd: FakeEtcd, member: str) -> None:
        self.effects: list[Effect] = []
        self.ahead_ms = 0
        gateway = HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport)
        self.driver = LeadershipDriver(gateway, self.now_ms, self.take, int(member))
        self.driver.begin(
            Settings(member, f"{member}:10911", broker_id=int(member), process=f"of {member}", **QUICK),
            0,
            end_position=0,
            tail_may_be_lost=False,
        )

    def take(self, effect: Effect) -> None:
        """Its folder has the number of its start at once; all other effects are a test's."""
        if isinstance(effect, NoteStart):
            threading.Thread(target=self.driver.start_noted, args=(effect.number,)).start()
        else:
            self.effects.append(effect)

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000 + self.ahead_ms

    def lead(self) -> Broker:
        """Until it leads."""
        until(lambda: StopFollowing() in self.effects)
        self.driver.following_stopped(0)
        until(lambda: any(isinstance(each, Lead) for each in self.effects))
        lead = next(each for each in self.effects if isinstance(each, Lead))
        self.driver.opened(lead.epoch, 100)
        until(lambda: self.driver.role is Role.LEADING)
        return self


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd(PREFIX)


@pytest.fixture
def make(etcd: FakeEtcd) -> Iterator[Callable[[str], Broker]]:
    made: list[Broker] = []

    def start(member: str) -> Broker:
        made.append(Broker(etcd, member))
        return made[-1]

    yield start
    for broker in made:
        broker.driver.close()


def test_the_first_one_leads_alone_and_confirms_what_it_appends(make: Callable[[str], Broker]) -> None:
    driver = make("1").lead().driver
    assert driver.report(100, {}) == (1, 100, True, True, 0)
    assert driver.confirm_alone(150) == (1, 150, True, True, 0)
    view = driver.view()
    assert (view.member, view.state, view.epoch, view.master) == ("1", "LEADING", 1, "1")
    assert (view.in_sync, view.problems) == (("1",), ())


def test_a_slave_is_told_whom_to_follow_and_speaks_to_nobody_else(make: Callable[[str], Broker]) -> None:
    make("1").lead()
    slave = make("2")
    follow = Follow("1", "1:10911", 1)
    until(lambda: slave.effects == [follow])
    assert slave.driver.target == follow
    assert slave.driver.may_speak(follow)
    assert not slave.driver.may_speak(follow._replace(epoch=2))


def test_from_the_moment_a_slave_is_to_join_nothing_is_confirmed_without_it(
    make: Callable[[str], Broker], etcd: FakeEtcd
) -> None:
    driver = make("1").lead().driver
    driver.report(100, {})
    asked_ms = driver.now_ms() + 1_000
    # What it has said to etcd before may be under way still.
    until(lambda: not driver.report(100, {"2": MemberReport(100, True, asked_ms)}).alone)
    standing = driver.confirm_alone(200)
    assert (standing.confirmed_position, standing.alone) == (100, False)
    until(lambda: driver.report(200, {"2": MemberReport(150, True, asked_ms)}).copies == 2)
    assert driver.report(200, {"2": MemberReport(150, True, asked_ms)}).confirmed_position == 150


def test_a_slave_whose_log_was_cut_forgets_that_when_it_has_caught_up(make: Callable[[str], Broker]) -> None:
    make("1").lead()
    slave = make("2")
    until(lambda: any(isinstance(each, Follow) for each in slave.effects))
    slave.driver.end_was_cut(LogEnd(1, 50, is_cut=True))
    slave.driver.heard(1, LogEnd(1, 80), has_caught_up=False)
    assert CutSettled() not in slave.effects
    assert any("has cut the end" in problem for problem in slave.driver.view().problems)
    slave.driver.heard(1, LogEnd(1, 100), has_caught_up=True)
    assert slave.effects[-1] == CutSettled()
    assert not any("has cut the end" in problem for problem in slave.driver.view().problems)


def test_without_lease_and_promises_nothing_more_is_confirmed(
    make: Callable[[str], Broker], etcd: FakeEtcd
) -> None:
    broker = make("1").lead()
    driver = broker.driver
    member = MemberReport(100, True, driver.now_ms() + 1_000)
    until(lambda: driver.report(100, {"2": member}).copies == 2)
    etcd.is_up = False
    broker.ahead_ms = 10_000
    late = member._replace(position=180)
    assert driver.report(200, {"2": late}).confirmed_position == 100
    assert any("nothing is acknowledged" in each for each in driver.view().problems)
    heard = late._replace(asked_ms=driver.now_ms())
    assert driver.report(200, {"2": heard}).confirmed_position == 180, "its promise is enough"


def test_a_member_of_the_set_that_follows_nobody_is_late_though_etcd_cannot_take_it_out(
    make: Callable[[str], Broker], etcd: FakeEtcd
) -> None:
    driver = make("1").lead().driver
    member = MemberReport(100, True, driver.now_ms() + 1_000)
    until(lambda: driver.report(100, {"2": member}).copies == 2)
    assert (driver.report(100, {"2": member}).late, driver.view().late) == (0, ())
    etcd.is_up = False
    for reports in ({"2": member._replace(is_live=False)}, {}):
        standing = driver.report(200, reports)
        assert (standing.copies, standing.confirmed_position) == (2, 100), "sends wait for it"
        assert (standing.late, driver.view().late) == (1, ("2",))
    assert driver.report(200, {"2": member}).late == 0


def test_a_master_that_ends_hands_over_to_who_is_in_sync(
    make: Callable[[str], Broker], etcd: FakeEtcd
) -> None:
    driver = make("1").lead().driver
    assert not driver.hand_over(1), "there is nobody to hand over to"
    assert etcd.model.view.order is None
    member = MemberReport(100, True, driver.now_ms() + 100_000)
    until(lambda: driver.report(100, {"2": member}).copies == 2)
    assert driver.hand_over(20)
    assert driver.role is Role.FOLLOWING
    view = etcd.model.view
    assert view.in_sync is not None
    assert (view.master, view.order, view.in_sync.successor) == (None, None, "2")
    assert view.in_sync.members == {"2"}, "nobody waits for who has ended"
    assert not driver.hand_over(1)


def test_a_master_whose_successor_lags_ends_all_the_same(
    make: Callable[[str], Broker], etcd: FakeEtcd
) -> None:
    driver = make("1").lead().driver
    asked_ms = driver.now_ms() + 100_000
    until(lambda: driver.report(100, {"2": MemberReport(100, True, asked_ms)}).copies == 2)
    driver.report(200, {"2": MemberReport(150, True, asked_ms)})
    assert not driver.hand_over(0.3)
    etcd.is_up = False
    assert not driver.hand_over(5)


def test_a_master_that_ends_hands_over_behind_an_order_that_it_takes_back(
    make: Callable[[str], Broker], etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promotion, or a switch to a member that is gone, stood in the moment of its SIGTERM."""
    driver = make("1").lead().driver
    asked_ms = driver.now_ms() + 100_000
    until(lambda: driver.report(100, {"2": MemberReport(100, True, asked_ms)}).copies == 2)
    leave = driver.order
    tries: list[str] = []

    def order(kind: str, target: str) -> str:
        tries.append(kind)
        if len(tries) == 1:
            etcd.model.commit(Transaction((), (Put(ORDER, encode_order(PROMOTE_UNCLEAN, "gone")),)))
            raise OrderPendingError("another order is there")
        return leave(kind, target)

    monkeypatch.setattr(driver, "order", order)
    assert driver.hand_over(20)
    assert len(tries) > 1
    assert set(tries) == {SWITCH}
    view = etcd.model.view
    assert view.in_sync is not None
    assert (view.in_sync.successor, view.order) == ("2", None)


class Scripted:
    """An etcd that gives these answers, one after the other."""

    def __init__(self, *results: Result) -> None:
        self._results = list(results)

    def ask(self, request: Request) -> Result:
        return self._results.pop(0)

    def close(self) -> None:
        pass


def idle_driver(etcd: EtcdGateway) -> LeadershipDriver:
    """It has not begun: it takes no order."""
    return LeadershipDriver(etcd, lambda: 0, lambda effect: None)


def test_an_order_stands_in_etcd_until_somebody_takes_it(etcd: FakeEtcd) -> None:
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    driver.order(SWITCH, "2")
    assert etcd.model.view.order == (SWITCH, "2", etcd.model.revision)
    driver.order(SWITCH, "2")
    assert etcd.model.view.order == (SWITCH, "2", etcd.model.revision), "the same order is not left once more"
    with pytest.raises(OrderPendingError, match=r"another order is there: switch to store 2\. It waits until somebody leads"):
        driver.order(SWITCH, "3")
    assert etcd.model.view.order == (SWITCH, "2", etcd.model.revision), "it is not overwritten"
    etcd.is_up = False
    with pytest.raises(OrderRefusedError, match="etcd does not answer") as refused:
        driver.order(SWITCH, "2")
    assert type(refused.value) is OrderRefusedError, "it is certain that nothing was left"


def test_an_order_that_etcd_refuses_is_told_with_its_reason(etcd: FakeEtcd) -> None:
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    etcd.model.refusal = "no space"
    with pytest.raises(OrderUncertainError, match=r"etcd refuses requests \(no space\)"):
        driver.order(SWITCH, "2")
    etcd.model.refuses_reads = True
    with pytest.raises(OrderRefusedError, match=r"etcd refuses requests \(no space\)") as refused:
        driver.order(SWITCH, "2")
    assert type(refused.value) is OrderRefusedError, "it is certain that nothing was left"
    with pytest.raises(OrderRefusedError, match=r"etcd refuses requests \(no space\): nobody is forgotten"):
        driver.forget(2)


def test_an_order_that_waits_is_told_with_its_broker_and_what_it_waits_for(etcd: FakeEtcd) -> None:
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    driver.order(PROMOTE_UNCLEAN, "x2")
    puts = (Put("name/x2", encode_name(MemberName(2, "there:1"))), Put("master", encode_master("x1", 4, "here:1")))
    etcd.model.commit(Transaction((), puts))
    with pytest.raises(OrderPendingError) as pending:
        driver.order(PROMOTE_UNCLEAN, "x3")
    assert "promotion of broker_id 2 at there:1 (store x2)" in str(pending.value)
    assert "now it names store x1 at here:1 as the master of epoch 4" in str(pending.value)


@pytest.mark.parametrize("standing", [(SWITCH, "2"), (SWITCH, ""), (PROMOTE_UNCLEAN, "gone")])
def test_an_unclean_promotion_replaces_what_nobody_takes_while_nobody_leads(etcd: FakeEtcd, standing: tuple[str, str]) -> None:
    """An operator in an emergency needs no tool of etcd."""
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    driver.order(*standing)
    put = Put("master", encode_master("x1", 4, "here:1"))
    etcd.model.commit(Transaction((), (put,)))
    with pytest.raises(OrderPendingError, match=r"now it names|for store x1 at here:1"):
        driver.order(PROMOTE_UNCLEAN, "3")
    assert etcd.model.view.order == (*standing, etcd.model.revision - 1), "who leads takes it, or takes it back"
    etcd.model.commit(Transaction((), (), ("master",)))
    assert re.fullmatch("(switch to|promotion of) (whichever is furthest|store .*)", driver.order(PROMOTE_UNCLEAN, "3"))
    assert etcd.model.view.order == (PROMOTE_UNCLEAN, "3", etcd.model.revision)


def test_an_order_is_withdrawn_unless_somebody_was_faster(etcd: FakeEtcd) -> None:
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    assert driver.withdraw_order() == ""
    driver.order(PROMOTE_UNCLEAN, "gone")
    view = etcd.model.view
    assert driver.withdraw_order() == "promotion of store gone"
    assert etcd.model.view.order is None
    with pytest.raises(OrderPendingError, match="at the same time"):
        idle_driver(Scripted(view, Committed(False, 9))).withdraw_order()
    with pytest.raises(OrderUncertainError):
        idle_driver(Scripted(view, None)).withdraw_order()


def test_a_withdrawal_whose_answer_was_lost_is_answered_as_at_first_and_takes_no_later_order_away(etcd: FakeEtcd) -> None:
    gateway = HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport)
    first, other = idle_driver(gateway), idle_driver(gateway)
    first.order(PROMOTE_UNCLEAN, "gone")
    seen = etcd.model.view
    assert first.withdraw_order("r1") == "promotion of store gone"
    assert other.withdraw_order("r1") == "promotion of store gone"
    first.order(SWITCH, "2")
    standing = etcd.model.view.order
    assert other.withdraw_order("r1") == "promotion of store gone"
    assert etcd.model.view.order == standing
    # Both tries are under way at once.
    late = Scripted(seen, Committed(False, 9), etcd.model.view)
    assert idle_driver(late).withdraw_order("r1") == "promotion of store gone"
    assert other.withdraw_order("r2") == "switch to store 2"
    assert first.withdraw_order("r3") == ""
    first.order(SWITCH, "3")
    assert other.withdraw_order() == "switch to store 3", "an earlier version sends no id"


@pytest.mark.parametrize("value", [b"", b"{}", b'{"request_id": 1, "order": ""}'])
def test_nobody_is_held_up_by_what_says_who_has_withdrawn(etcd: FakeEtcd, value: bytes) -> None:
    etcd.model.commit(Transaction((), (Put(WITHDRAWN, value),)))
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    driver.order(SWITCH, "2")
    assert driver.withdraw_order("r1") == "switch to store 2"
    assert driver.withdraw_order("r1") == "switch to store 2"


def test_a_switch_that_is_withdrawn_on_its_way_leaves_the_lead_where_it_is(make: Callable[[str], Broker], etcd: FakeEtcd) -> None:
    driver = make("1").lead().driver
    asked_ms = driver.now_ms() + 100_000
    until(lambda: driver.report(100, {"2": MemberReport(100, True, asked_ms)}).copies == 2)
    driver.report(200, {"2": MemberReport(150, True, asked_ms)})
    driver.order(SWITCH, "2")
    until(lambda: driver.role is Role.HANDING_OVER)
    assert driver.withdraw_order() == "switch to store 2"
    until(lambda: driver.role is Role.LEADING)
    assert driver.report(200, {"2": MemberReport(200, True, asked_ms)}).takes_sends


def test_two_operators_do_not_both_replace_an_order(etcd: FakeEtcd) -> None:
    gateway = HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport)
    idle_driver(gateway).order(SWITCH, "2")
    seen = gateway.ask(ReadCluster())

    class Late:
        """Has read before the other one has written."""

        def ask(self, request: Request) -> Result:
            return seen if isinstance(request, ReadCluster) else gateway.ask(request)

        def close(self) -> None:
            pass

    idle_driver(gateway).order(PROMOTE_UNCLEAN, "3")
    with pytest.raises(OrderPendingError, match="at the same time"):
        idle_driver(Late()).order(PROMOTE_UNCLEAN, "4")
    assert etcd.model.view.order == (PROMOTE_UNCLEAN, "3", etcd.model.revision)


def test_an_order_that_is_left_at_the_same_time_is_not_overwritten() -> None:
    with pytest.raises(OrderPendingError, match="at the same time"):
        idle_driver(Scripted(ClusterView(5, {}), Committed(False, 6))).order(SWITCH, "2")


def test_an_order_whose_transaction_is_not_answered_is_uncertain() -> None:
    with pytest.raises(OrderUncertainError, match="look at the status"):
        idle_driver(Scripted(ClusterView(5, {}), None)).order(SWITCH, "2")


def test_who_is_out_of_the_set_is_known_until_it_is_forgotten(etcd: FakeEtcd, make: Callable[[str], Broker]) -> None:
    driver = make("1").lead().driver
    gone, kept = MemberName(2, "gone:1"), MemberName(3, "kept:1")
    etcd.model.commit(Transaction((), (Put("name/2", encode_name(gone)), Put("name/3", encode_name(kept)))))
    until(lambda: {("2", gone), ("3", kept)} <= set(driver.view().known))
    driver.forget(2)
    assert {"1", "3"} == etcd.model.view.names.keys()
    until(lambda: "2" not in dict(driver.view().known))
    with pytest.raises(UnknownMemberError, match="etcd knows no such broker, only 1, 3"):
        driver.forget(2)


def test_a_member_of_the_set_is_not_forgotten(etcd: FakeEtcd) -> None:
    driver = idle_driver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport))
    in_sync = Put(IN_SYNC, encode_in_sync(1, frozenset({"2"}), unclean_epoch=0))
    etcd.model.commit(Transaction((), (in_sync, Put("name/2", encode_name(MemberName(2, "away:1"))))))
    with pytest.raises(UnknownMemberError, match="it is in the in-sync set"):
        driver.forget(2)
    assert etcd.model.view.names.keys() == {"2"}


def test_nobody_is_forgotten_who_joins_meanwhile_or_if_etcd_does_not_answer() -> None:
    view = ClusterView(5, {"name/2": Row(encode_name(MemberName(2, "away:1")), 4)})
    for answers in ((None,), (view, None), (view, Committed(False, 6))):
        with pytest.raises(OrderRefusedError):
            idle_driver(Scripted(*answers)).forget(2)


def test_ticks_go_on_behind_one_that_failed(etcd: FakeEtcd, caplog: pytest.LogCaptureFixture) -> None:
    begun_in = threading.get_ident()
    failures: list[int] = []

    def now_ms() -> int:
        if threading.get_ident() != begun_in and not failures:
            failures.append(1)
            raise RuntimeError("planted")
        return time.monotonic_ns() // 1_000_000

    effects: list[Effect] = []
    gateway = HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport)
    driver = LeadershipDriver(gateway, now_ms, effects.append)
    try:
        driver.begin(Settings("1", "1:10911", process="of 1", **QUICK), 0, end_position=0, tail_may_be_lost=False)
        until(lambda: NoteStart(1, is_older_copy=False) in effects)
        driver.start_noted(1)
        until(lambda: StopFollowing() in effects)
    finally:
        driver.close()
    assert [each.getMessage() for each in caplog.records] == ["a tick of the leadership failed"]


def test_the_number_of_the_election_is_found_or_written_before_the_broker_registers(etcd: FakeEtcd) -> None:
    def driver() -> LeadershipDriver:
        return LeadershipDriver(HttpEtcd(["http://etcd:2379"], PREFIX, etcd.transport), lambda: 0, lambda effect: None)

    first, second, late = driver(), driver(), driver()
    etcd.is_up = False
    late.find_election(13)
    assert late.election == 0
    etcd.is_up = True
    first.find_election(11)
    second.find_election(12)
    assert (first.election, second.election) == (11, 11)
    for each in (first, second, late):
        each.close()


def test_a_member_may_have_lost_the_lead_unless_nobody_else_can_lead(make: Callable[[str], Broker]) -> None:
    broker = make("1")
    assert broker.driver.may_have_lost
    broker.lead()
    assert not broker.driver.may_have_lost
    with mock.patch.object(Leadership, "may_acknowledge", return_value=False):
        assert broker.driver.may_have_lost
