"""What follows for sends from who is in sync, and which thread may know what first."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protomq_broker.config import BrokerConfig
from protomq_broker.confirmed_file import ConfirmedFile
from protomq_broker.follower_writer import FollowerWriter
from protomq_broker.ha_follower import MasterView
from protomq_broker.leadership_driver import NO_STANDING, Standing
from protomq_broker.replication import Replication
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.replicas import Confirmation, ReplicaView, Verdict
from protomq_ha.roles import HaConfig
from protomq_runtime.testing import FakeLane

from .store.log_helpers import ManualClock, make_request
from .store.store_helpers import open_store, read_all

ALL = Verdict(in_sync_count=3, waits=True, confirmed_position=0, is_short=False, refuses=False)
FEWER = ALL._replace(in_sync_count=2, is_short=True)


class Master:
    """A store that leads, and what its send lane has not come to yet. A send answers what is readable, by `confirmation`."""

    def __init__(self, **settings: Any) -> None:
        clock = ManualClock()
        self.store = open_store(SimDisk(), clock=clock)
        self.send = SimpleNamespace(confirmation=Confirmation(), shortage=None)
        self.posted: list[Callable[[], None]] = []
        config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER", **settings)
        self.replication = Replication(
            self.store, config, "b", clock, lambda: 1, FollowerWriter(), lambda: None
        )
        waiting = SimpleNamespace(resolve=lambda: None)
        writer = SimpleNamespace(post=self.posted.append)
        self.replication.begin(FakeLane(), self.send, waiting, writer)  # type: ignore[arg-type]
        self.note(ALL)
        self.run_send_lane()

    def note(self, verdict: Verdict) -> None:
        """On the ha lane."""
        self.replication._note_verdict(verdict)

    def run_send_lane(self) -> None:
        posted = self.posted[:]
        self.posted.clear()
        for function in posted:
            function()

    def append(self) -> int:
        self.store.append([make_request([b"x"])])
        return self.store.appended_position

    def says_all_copies(self, position: int) -> bool | None:
        """None: not answered yet."""
        if self.store.readable_position < position:
            return None
        return self.send.confirmation.has_all_copies(position)


def test_what_fewer_copies_confirm_is_not_readable_before_the_send_lane_knows_that_they_are_fewer() -> None:
    master = Master()
    position = master.append()
    assert master.says_all_copies(position) is None
    master.note(FEWER._replace(confirmed_position=position))
    assert master.says_all_copies(position) is None
    master.run_send_lane()
    assert master.says_all_copies(position) is False


def test_what_all_copies_confirm_is_readable_at_once() -> None:
    master = Master()
    position = master.append()
    master.note(ALL._replace(confirmed_position=position))
    assert master.says_all_copies(position) is True


def test_what_fewer_had_confirmed_is_not_on_all_once_they_are_all_again_however_late_the_send_lane_hears_of_both() -> None:
    master = Master()
    by_fewer = master.append()
    later = master.append()
    master.note(FEWER._replace(confirmed_position=by_fewer))
    master.note(ALL)
    master.run_send_lane()
    assert master.says_all_copies(by_fewer) is False
    master.note(ALL._replace(confirmed_position=later))
    master.run_send_lane()
    assert master.says_all_copies(later) is True


def test_the_log_says_what_becomes_of_sends_and_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    master = Master()
    caplog.clear()
    for verdict in (FEWER, FEWER, FEWER._replace(in_sync_count=0, refuses=True), FEWER, ALL):
        master.note(verdict)
        master.run_send_lane()
    assert [record.message for record in caplog.records if "sends are" in record.message] == [
        "2 of 2 copies are in sync: sends are answered SLAVE_NOT_AVAILABLE",
        "0 of 2 copies are in sync: sends are refused, since min_in_sync_replicas is 1",
        "2 of 2 copies are in sync: sends are answered SLAVE_NOT_AVAILABLE",
        "3 of 2 copies are in sync: sends are answered SEND_OK again",
    ]


@pytest.mark.parametrize("in_sync_count", [1, 2])
def test_who_refuses_sends_with_enough_copies_in_sync_says_that_it_does_not_lead(
    in_sync_count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """So it is while the lead changes: those copies are not too few."""
    master = Master()
    caplog.clear()
    master.note(FEWER._replace(in_sync_count=in_sync_count, refuses=True))
    master.run_send_lane()
    (said,) = [record.message for record in caplog.records if "sends are" in record.message]
    assert said == f"{in_sync_count} of 2 copies are in sync: sends are refused, since this broker does not lead yet, or not any more"


@pytest.mark.parametrize("master", ["", "127.0.0.1:9999"])
def test_a_master_that_is_given_a_master_says_that_it_follows_nobody(master: str, caplog: pytest.LogCaptureFixture) -> None:
    Master(ha=HaConfig(master=master))
    said = "ha.master is not used: broker_role is SYNC_MASTER, and only a SLAVE follows" in caplog.messages
    assert said is bool(master)


def test_metrics_of_a_master_show_its_slowest_slave() -> None:
    master = Master()
    end = master.append()
    views = [ReplicaView(number, "", True, end - lag, 0, lag, 0) for number, lag in ((1, 7), (2, 90), (3, 0))]
    master.replication.service.views = views
    master.replication.service.verdict = FEWER
    assert master.replication.counts() == (3, 2, 90, 0)
    master.replication.service.views = ()
    assert master.replication.counts() == (0, 2, 0, 0)


def test_metrics_of_a_master_miss_what_a_member_of_its_set_lacks_that_follows_nobody() -> None:
    master = Master()
    confirmed = master.append()
    master.store.positions.note_replicated(confirmed)
    lag_bytes = master.append() - confirmed
    master.replication.service.verdict = ALL
    assert master.replication.counts() == (0, 3, 0, 0)
    master.replication.service.standing = Standing(3, confirmed, True, alone=False, late=1)
    assert master.replication.counts() == (0, 2, lag_bytes, 0)


@pytest.mark.parametrize(("view", "counts"), [(MasterView("m:1", 10_000, 5, ""), (0, 0, 9_000, 1)), (MasterView("m:1", 400), (0, 0, 0, 0))])
def test_metrics_of_a_slave_show_what_it_lacks_and_whether_it_follows(view: MasterView, counts: tuple[int, ...]) -> None:
    master = Master()
    master.replication.follower = SimpleNamespace(view=view)  # type: ignore[assignment]
    master.replication._store = SimpleNamespace(appended_position=1_000)  # type: ignore[assignment]
    assert master.replication.counts() == counts


@pytest.mark.parametrize("noted", [True, False])
def test_a_master_that_was_elected_shows_what_was_confirmed_and_nothing_behind_it(noted: bool) -> None:
    """The rest of its log may be only here. It waits for the in-sync set, of which nothing is known yet."""
    disk, clock = SimDisk(), ManualClock()
    store = open_store(disk, clock=clock)
    store.append([make_request([b"confirmed"])])
    confirmed = store.appended_position
    store.append([make_request([b"not yet"])])
    store.close()
    store = open_store(disk, clock=clock, follows=True)
    file = ConfirmedFile(disk, store.root)
    if noted:
        file.write(confirmed)
    store.lead(7, waits_for_replicas=True)
    leadership = SimpleNamespace(report=lambda end, reports: NO_STANDING, on_standing=None)
    config = BrokerConfig(broker_name="b", broker_role="SYNC_MASTER")
    replication = Replication(store, config, "b", clock, lambda: 1, FollowerWriter(), lambda: None, leadership)  # type: ignore[arg-type]
    replication._confirmed_file = file
    replication._notes = SimpleNamespace(start=lambda: None)  # type: ignore[assignment]
    send = SimpleNamespace(confirmation=Confirmation(), shortage=None)
    writer = SimpleNamespace(post=lambda function: None)
    replication.begin(FakeLane(), send, SimpleNamespace(resolve=lambda: None), writer)  # type: ignore[arg-type]
    assert store.readable_position == (confirmed if noted else 0) < store.appended_position
    assert [body for _, body in read_all(store)] == [b"confirmed"] * noted
