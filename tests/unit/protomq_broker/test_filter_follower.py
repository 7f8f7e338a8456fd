"""A slave copies the filter modules of its master, whatever happens on both sides meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from protomq.v1.filter_service_pb2 import (
    DeleteFilterRequest,
    GetFilterRequest,
    ListFiltersRequest,
)
from protomq.wire.hashing import crc32c
from protomq_broker import filter_follower, filter_modules
from protomq_broker.filter_copies import CopiesFile
from protomq_broker.filter_follower import FilterFollower, MasterModules, NotCopiedError
from protomq_broker.filter_modules import FilterModules
from protomq_broker.filter_service import FilterService
from protomq_broker.testing.simdisk import SimDisk
from protomq_runtime.addresses import Address
from protomq_runtime.call import CallContext
from tests.support.waiting import PATIENCE_S, wait_for

ADDRESS = Address("master", 1)
CONTEXT = cast(CallContext, SimpleNamespace(peer="test"))


class Master:
    """A ModuleSource without a socket: FilterService on a disk of its own. `before_get` is called with the name of what is asked for."""

    def __init__(self, store_id: int = 7) -> None:
        self.modules = FilterModules(SimDisk(), "/m/config/filters")
        self.before_get: Callable[[str], None] = lambda name: None
        self.looks = threading.Semaphore(0)
        self.is_closed = False
        self._service = FilterService(self.modules, lambda name: None, store_id)

    def list(self) -> MasterModules:
        self.looks.release()
        answer = self._service.list_filters(ListFiltersRequest(page_size=1_000), CONTEXT)
        found = [filter_modules.ModuleInfo(one.name, one.size_bytes, one.crc32c) for one in answer.modules]
        return MasterModules(found, answer.store_id)

    def get(self, name: str) -> bytes:
        self.before_get(name)
        return self._service.get_filter(GetFilterRequest(name=name), CONTEXT).module

    def delete(self, name: str) -> None:
        assert self._service.delete_filter(DeleteFilterRequest(name=name), CONTEXT).deleted

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Slave:
    """What a slave has, and whom it asks."""

    def __init__(self, master: Master) -> None:
        self.disk = SimDisk()
        self.disk.make_folder("/s/config")
        self.modules = FilterModules(self.disk, "/s/config/filters")
        self.master: Master | None = master
        self.changed: list[str] = []
        self.is_following = True
        self.follower = self.made()

    def made(self) -> FilterFollower:
        copies = CopiesFile(self.disk, "/s")
        return FilterFollower(
            self.modules, copies, self.changed.append, lambda: self.is_following, self._connect
        )

    def _connect(self, address: Address) -> Master:
        assert address == ADDRESS
        if self.master is None:
            raise ConnectionRefusedError("nobody listens")
        return self.master

    def copy(self) -> None:
        self.follower.copy(ADDRESS)

    def has(self) -> dict[str, bytes]:
        return {info.name: self.modules.read(info.name) for info in self.modules.all()}


@pytest.fixture
def master() -> Master:
    made = Master()
    made.modules.write("late", b"one")
    made.modules.write("early", b"two")
    return made


@pytest.fixture(autouse=True)
def short_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_follower, "GAP_S", 0.01)


@pytest.fixture
def slave(master: Master) -> Slave:
    return Slave(master)


def test_an_empty_slave_gets_all(master: Master, slave: Slave) -> None:
    slave.copy()
    assert slave.has() == {"late": b"one", "early": b"two"}
    assert sorted(slave.changed) == ["early", "late"]
    assert master.is_closed
    slave.copy()
    assert len(slave.changed) == 2, "nothing has changed since"


def test_a_new_version_takes_the_place_of_the_old_one(master: Master, slave: Slave) -> None:
    slave.copy()
    master.modules.write("late", b"three")
    slave.copy()
    assert slave.has() == {"late": b"three", "early": b"two"}
    assert slave.changed.count("late") == 2


def test_what_the_master_has_no_more_goes(master: Master, slave: Slave) -> None:
    slave.copy()
    slave.modules.write("own", b"deployed here")
    master.delete("late")
    # What is known outlives a restart.
    slave.follower = slave.made()
    slave.copy()
    assert slave.has() == {"early": b"two", "own": b"deployed here"}


def test_another_master_without_modules_takes_none(slave: Slave) -> None:
    slave.copy()
    slave.master = Master(store_id=8)
    slave.copy()
    slave.copy()
    assert slave.has() == {"late": b"one", "early": b"two"}


def test_what_is_deployed_here_meanwhile_stays(master: Master, slave: Slave) -> None:
    def deploy_here(name: str) -> None:
        slave.modules.write("late", b"newer")

    master.before_get = deploy_here
    with pytest.raises(NotCopiedError, match="late was changed here meanwhile"):
        slave.copy()
    assert slave.has() == {"late": b"newer", "early": b"two"}
    # Then the master has it, too.
    master.modules.write("late", b"newer")
    slave.copy()
    assert slave.has() == {"late": b"newer", "early": b"two"}


@pytest.mark.parametrize("now", [None, b"another"])
def test_what_the_master_changes_meanwhile_is_not_stored(
    master: Master, slave: Slave, now: bytes | None
) -> None:
    def change(name: str) -> None:
        if name == "late":
            master.modules.swap("late", crc32c(b"one"), now)

    master.before_get = change
    with pytest.raises(NotCopiedError, match="another late, or none"):
        slave.copy()
    assert slave.has() == {"early": b"two"}


def test_where_no_more_fit_the_rest_is_copied(
    master: Master, slave: Slave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_modules, "MODULES_MAX", 2)
    slave.modules.write("own", b"deployed here")
    with pytest.raises(NotCopiedError, match=r"late .* maximum of 100 modules"):
        slave.copy()
    assert slave.has() == {"early": b"two", "own": b"deployed here"}


def test_after_the_end_nothing_is_changed(master: Master, slave: Slave) -> None:
    master.before_get = lambda name: slave.follower.close()
    slave.copy()
    assert slave.has() == {}
    assert not slave.disk.exists("/s/config/filter_copies.json")
    slave.follower.begin(ADDRESS)
    assert slave.follower._thread is None


def test_each_session_begins_with_a_look(master: Master, slave: Slave) -> None:
    try:
        for version in (b"three", b"four"):
            master.modules.write("late", version)
            slave.follower.begin(ADDRESS)
            wait_for(lambda: slave.has().get("late") == version, PATIENCE_S)  # noqa: B023
    finally:
        slave.follower.close()


def test_sessions_that_begin_again_and_again_are_one_look(
    master: Master, slave: Slave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_follower, "GAP_S", PATIENCE_S)
    try:
        slave.follower.begin(ADDRESS)
        assert master.looks.acquire(timeout=PATIENCE_S)
        wait_for(lambda: len(slave.changed) == 2, PATIENCE_S)
        for _ in range(100):
            slave.follower.begin(ADDRESS)
        assert not master.looks.acquire(blocking=False)
    finally:
        slave.follower.close()


def test_it_looks_again_by_itself_while_it_follows(
    master: Master, slave: Slave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_follower, "LOOK_INTERVAL_S", 0.01)
    try:
        slave.follower.begin(ADDRESS)
        for _ in range(3):
            assert master.looks.acquire(timeout=PATIENCE_S)
    finally:
        slave.follower.close()


def test_what_fails_is_said_once_and_tried_again(
    master: Master, slave: Slave, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filter_follower, "RETRY_INTERVAL_S", 0.01)
    asked = threading.Semaphore(0)

    def connect(address: Address) -> Master:
        asked.release()
        return Slave._connect(slave, address)

    slave.master = None
    slave.follower._connect = connect
    with caplog.at_level(logging.WARNING, "protomq.broker"):
        try:
            slave.follower.begin(ADDRESS)
            for _ in range(3):
                assert asked.acquire(timeout=PATIENCE_S)
            slave.master = master
            wait_for(lambda: len(slave.has()) == 2, PATIENCE_S)
        finally:
            slave.follower.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the filter modules of the master at master:1 are not all here yet: nobody listens"
    ]


def test_while_it_does_not_follow_nobody_is_asked(
    master: Master, slave: Slave, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)
    monkeypatch.setattr(filter_follower, "LOOK_INTERVAL_S", 0.01)

    def is_following() -> bool:
        looked.release()
        return False

    slave.follower._is_following = is_following
    try:
        slave.follower.begin(ADDRESS)
        assert master.looks.acquire(timeout=PATIENCE_S)
        for _ in range(3):
            assert looked.acquire(timeout=PATIENCE_S)
        assert not master.looks.acquire(blocking=False)
    finally:
        slave.follower.close()
