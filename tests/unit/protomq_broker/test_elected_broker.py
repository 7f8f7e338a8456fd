"""What an elected broker does when its store fails or did not close well, and when its event loop closes. No store, no ports."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protomq_broker import elected_broker
from protomq_broker.config import BrokerConfig, EtcdConfig
from protomq_broker.elected_broker import (
    CHANGE_GRACE_S,
    FULL_LOOKS,
    CutFork,
    ElectedBroker,
    LogFailed,
    LookForRoom,
    TryRoom,
    new_name_wait_ms,
)
from protomq_broker.etcd_gateway import ANSWER_TIMEOUT_S
from protomq_broker.healed_reopens import HealedReopens
from protomq_broker.store.errors import StoreFailedError
from protomq_broker.store.log.agreement import LogPoint
from protomq_broker.store.start.settings import make_folders
from protomq_broker.tail_file import TailFile
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.cluster_state import LogEnd
from protomq_ha.leadership_values import CutSettled, Role, StopLeading, TailSettled

ROOT = "/store"


def bare() -> ElectedBroker:
    """Nothing of it is open."""
    return ElectedBroker.__new__(ElectedBroker)


@pytest.mark.parametrize("is_closed_clean", [True, False])
def test_a_stop_is_clean_only_if_the_store_closed_clean(is_closed_clean: bool) -> None:
    disk = SimDisk()
    make_folders(disk, ROOT)
    first = TailFile(disk, ROOT, "one")
    first.open(syncs=False, is_lost=False)
    first.settle()

    async def stop(grace_s: float) -> None:
        pass

    async def run() -> None:
        broker = bare()
        store = SimpleNamespace(is_closed_clean=is_closed_clean)
        broker._todo, broker._tail, broker._watcher, broker._is_open = asyncio.Queue(), first, None, True
        broker._worker = asyncio.create_task(asyncio.sleep(0))
        broker._settings = EtcdConfig()
        broker.leadership = SimpleNamespace(close=lambda: None, hand_over=lambda timeout_s: False)  # type: ignore[assignment]
        broker.process = SimpleNamespace(stop=stop, broker=SimpleNamespace(store=store))  # type: ignore[assignment]
        await broker.stop(0)

    asyncio.run(run())
    assert TailFile(disk, ROOT, "two").open(syncs=False, is_lost=False) is not is_closed_clean


@pytest.mark.parametrize("lease_ttl_ms", [3_000, 60_000])
@pytest.mark.parametrize("read_interval_ms", [300, 5_000])
def test_an_empty_member_of_a_new_name_waits_as_long_as_others_need_to_tell_that_they_have_messages(
    lease_ttl_ms: int, read_interval_ms: int
) -> None:
    """The lease has nothing to do with it."""
    etcd = EtcdConfig(("http://e:1",), lease_ttl_ms=lease_ttl_ms, read_interval_ms=read_interval_ms)
    unanswered_ms, answered_ms = 1_000 * ANSWER_TIMEOUT_S, 1_000 * ANSWER_TIMEOUT_S
    assert new_name_wait_ms(etcd) == unanswered_ms + read_interval_ms + answered_ms


class Failing:
    """A broker whose log has failed. Attribute: done, what was done about it, in order. A process that starts follows by itself."""

    def __init__(
        self, role: Role, failure: str = "the log failed", *, opens_after: int = 0, loses_its_end: bool = False, leads_after: int = 0,
        is_damaged: bool = False, is_cut: bool = False, is_healed: bool = False, had_lost_its_end: bool = False, had_skipped: bool = False,
    ) -> None:
        self.done: list[str] = []
        self.counts_of: list[tuple[int, int]] = []
        """Processes whose store counts on from that of another one: that one first."""
        self._processes = 0
        self._leads_after = leads_after
        self._broker = broker = bare()
        broker._config = BrokerConfig(broker_name="b")
        broker._settings, broker._is_stopping, broker._is_open = EtcdConfig(), False, True
        broker._healed_reopens = HealedReopens()
        broker._tail = SimpleNamespace(  # type: ignore[assignment]
            doubt=lambda: self.done.append("doubts its end"), cut=lambda: self.done.append("knows that it was cut"), was_cut=is_cut,
            settle_cut=lambda: self.done.append("forgets that it was cut"), settle=lambda: self.done.append("forgets its doubt"),
        )  # fmt: skip
        broker.leadership = SimpleNamespace(  # type: ignore[assignment]
            role=role,
            tail_may_be_lost=self._note_doubt,
            tail_is_in_doubt=False,
            end_was_cut=self._note_cut,
            end_is_cut=False,
            hand_over=self._hand_over,
            unable=self._unable,
            able=lambda: self.done.append("may run"),
            is_unable=True,
            is_damaged=False,
            damaged=self._note_damage,
            opened=lambda epoch, end_position: self.done.append(f"leads in epoch {epoch}"),
        )
        self._refusals, self._loses_its_end, self._is_damaged, self._is_cut = opens_after, loses_its_end, is_damaged, is_cut
        broker.process = self._process(failure, has_lost_its_end=had_lost_its_end)
        store: Any = broker.process.broker.store
        store.has_healed_skipped_parts, store.skipped_ranges = is_healed, ["a range"] if had_skipped else []
        broker._make = self._make  # type: ignore[method-assign]

    def _hand_over(self, timeout_s: float) -> bool:
        self.done.append("hands over")
        return True

    def _note_doubt(self) -> None:
        self._broker.leadership.tail_is_in_doubt = True  # type: ignore[misc]
        self.done.append("leaves the set")

    def _note_cut(self, cut_end: LogEnd) -> None:
        self._broker.leadership.end_is_cut = True  # type: ignore[misc]
        self.done.append(f"was cut: {tuple(cut_end)}")

    def _note_damage(self, is_damaged: bool) -> None:
        self._broker.leadership.is_damaged = is_damaged  # type: ignore[misc]
        if is_damaged:
            self.done.append("is damaged")

    def _unable(self, epoch: int, why: str) -> None:
        self.done.append(f"gives epoch {epoch} back: {why}")

    def _lead(self, *_: object, **__: object) -> None:
        if self._leads_after:
            self._leads_after -= 1
            raise OSError(errno.ENOSPC, "full")

    def _check_room(self) -> None:
        if self._leads_after:
            raise OSError(errno.ENOSPC, "full")

    def _truncate(self, point: LogPoint) -> LogPoint:
        if self._leads_after:
            raise OSError(errno.ENOSPC, "full")
        self.done.append(f"ends at {point.position}")
        return point

    def _process(self, failure: str, *, has_lost_its_end: bool = False) -> Any:
        number = self._processes = self._processes + 1

        async def start() -> None:
            self.done.append("starts")

        async def stop(grace_s: float) -> None:
            self.done.append("stops")

        async def give_up_store(grace_s: float) -> Any:
            self.done.append("gives up its store")
            return store

        store = SimpleNamespace(
            log_failure=failure,
            has_lost_its_end=has_lost_its_end,
            has_cut_its_end=self._is_cut,
            epoch=3,
            skipped_ranges=["a range"] if self._is_damaged else [],
            has_healed_what_was_skipped=not self._is_damaged,
            has_healed_skipped_parts=False,
            healed_skipped_ranges=(),
            is_leading=False,
            lack_of_room=lambda: "",
            lead=self._lead,
            check_room=self._check_room,
            close=lambda: self.done.append("closes its store"),
            appended_position=0,
            truncate_to=self._truncate,
            go_on_counting=lambda before: self.counts_of.append((before.number, number)),
            number=number,
        )
        return SimpleNamespace(
            give_up_store=give_up_store,
            broker=SimpleNamespace(
                store=store,
                stop_following=lambda: self.done.append(f"process {number} follows nobody"),
                go_on_following=lambda: self.done.append(f"process {number} follows"),
            ),
            start=start,
            stop=stop,
        )

    def _make(self, config: object, epoch: int | None, store: object = None) -> Any:
        if store is not None:
            self.done.append("is a slave" if epoch is None else "is the master")
            return self._process("")
        if self._refusals:
            self._refusals -= 1
            self.done.append("cannot open")
            raise OSError(errno.ENOSPC, "full")
        return self._process("", has_lost_its_end=self._loses_its_end)

    def run(self) -> list[str]:
        asyncio.run(self._broker._do(LogFailed(self._broker.process)))
        return self.done


def test_a_slave_whose_log_has_failed_leaves_the_set_and_opens_its_store_until_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elected_broker, "FAILURE_LOOK_S", 0.001)
    failing = Failing(Role.FOLLOWING, opens_after=2)
    assert failing.run() == [
        "process 1 follows nobody", "leaves the set", "doubts its end", "stops", "cannot open", "cannot open", "starts",
    ]  # fmt: skip
    assert failing.counts_of == [(1, 2)]


def test_a_store_that_opens_again_with_damage_at_its_end_leaves_the_set() -> None:
    failing = Failing(Role.FOLLOWING, loses_its_end=True)
    asyncio.run(failing._broker._open_again())
    assert failing.done == ["stops", "leaves the set", "doubts its end", "starts"]


def test_a_store_that_is_to_lead_and_opens_with_damage_at_its_end_does_not_lead() -> None:
    failing = Failing(Role.OPENING, loses_its_end=True)
    assert not asyncio.run(failing._broker._lead(2))
    assert failing.done == [
        "stops", "leaves the set", "doubts its end", "starts", "gives epoch 2 back: its log was opened again, and ends with damage",
    ]  # fmt: skip


def test_a_store_that_opens_again_and_cuts_its_end_says_so_before_it_serves() -> None:
    failing = Failing(Role.FOLLOWING, is_cut=True)
    asyncio.run(failing._broker._open_again())
    assert failing.done == ["stops", "knows that it was cut", "was cut: (3, 0, True)", "starts"]


def test_what_caught_up_before_a_store_was_opened_again_and_cut_once_more_settles_nothing() -> None:
    failing = Failing(Role.FOLLOWING, is_cut=True)
    asyncio.run(failing._broker._open_again())
    asyncio.run(failing._broker._do(CutSettled()))
    assert failing.done[-1] == "starts"
    failing._broker.leadership.end_is_cut = False  # type: ignore[misc]
    asyncio.run(failing._broker._do(CutSettled()))
    assert failing.done[-1] == "forgets that it was cut"


def test_what_left_the_set_before_its_log_failed_once_more_settles_nothing() -> None:
    failing = Failing(Role.FOLLOWING)
    failing.run()
    asyncio.run(failing._broker._do(TailSettled()))
    assert failing.done[-1] == "starts"
    failing._broker.leadership.tail_is_in_doubt = False  # type: ignore[misc]
    asyncio.run(failing._broker._do(TailSettled()))
    assert failing.done[-1] == "forgets its doubt"


def test_a_store_that_was_cut_at_an_earlier_start_is_so_when_it_opens_again() -> None:
    """With the end that it has now."""
    failing = Failing(Role.FOLLOWING)
    failing._broker._tail.was_cut = True
    asyncio.run(failing._broker._open_again())
    assert failing.done == ["stops", "was cut: (3, 0, True)", "starts"]


def test_a_store_that_is_to_lead_and_opens_with_its_end_cut_does_not_lead() -> None:
    failing = Failing(Role.OPENING, is_cut=True)
    assert not asyncio.run(failing._broker._lead(2))
    assert failing.done[-1] == "gives epoch 2 back: its log was opened again, and its end was cut"


@pytest.mark.parametrize("had_lost_its_end", [True, False])
def test_a_store_that_was_healed_since_its_start_is_opened_again_before_it_leads(had_lost_its_end: bool) -> None:
    failing = Failing(Role.OPENING, "", is_healed=True, had_lost_its_end=had_lost_its_end, had_skipped=not had_lost_its_end)
    assert asyncio.run(failing._broker._lead(2))
    assert failing.done == ["stops", "starts", "gives up its store", "leads in epoch 2", "is the master", "starts"]


def test_a_store_of_which_only_a_part_was_healed_leads_as_damaged_as_it_was_elected() -> None:
    failing = Failing(Role.OPENING, "", is_healed=True, had_skipped=True, is_damaged=True)
    assert asyncio.run(failing._broker._lead(2))
    assert failing.done == ["stops", "is damaged", "starts", "gives up its store", "leads in epoch 2", "is the master", "starts"]
    failing = Failing(Role.OPENING, "", is_healed=True, had_lost_its_end=True, loses_its_end=True)
    assert asyncio.run(failing._broker._lead(2))
    assert "leaves the set" not in failing.done


@pytest.mark.parametrize("flaw", ["loses_its_end", "is_damaged", "is_cut"])
def test_a_healed_store_that_is_opened_to_lead_and_lacks_more_than_before_does_not_lead(flaw: str) -> None:
    failing = Failing(Role.OPENING, "", is_healed=True, **{flaw: True})
    assert not asyncio.run(failing._broker._lead(2))
    assert failing.done[-1].startswith("gives epoch 2 back: its log was opened again, and ")


def test_a_store_that_opens_again_without_some_of_its_log_says_so_before_it_serves() -> None:
    failing = Failing(Role.FOLLOWING, is_damaged=True)
    asyncio.run(failing._broker._open_again())
    assert failing.done == ["stops", "is damaged", "starts"]


def test_a_store_that_is_to_lead_and_opens_without_some_of_its_log_does_not_lead() -> None:
    failing = Failing(Role.OPENING, is_damaged=True)
    assert not asyncio.run(failing._broker._lead(2))
    assert failing.done == ["stops", "is damaged", "starts", "gives epoch 2 back: its log was opened again, and is damaged"]


def test_a_slave_whose_log_is_healed_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elected_broker, "FAILURE_LOOK_S", 0.001)
    failing = Failing(Role.FOLLOWING, "", is_damaged=True)
    broker, process = failing._broker, failing._broker.process
    broker._todo, broker.leadership.is_damaged = asyncio.Queue(), True  # type: ignore[misc]
    broker.leadership.is_unable = False  # type: ignore[misc]
    store: Any = process.broker.store
    looks, asked_at = 0, 0

    async def run() -> None:
        is_asked = asyncio.Event()

        def do_soon(item: object) -> None:
            nonlocal looks, asked_at
            if item is process:
                asked_at = asked_at or looks
                is_asked.set()
            elif isinstance(item, LookForRoom):
                looks += 1
                store.has_healed_what_was_skipped = looks >= 3

        broker._do_soon = do_soon  # type: ignore[method-assign]
        watcher = asyncio.create_task(broker._watch_log())
        await is_asked.wait()
        watcher.cancel()

    asyncio.run(run())
    assert asked_at == 3, "not before it is healed"


def is_healed(failing: Failing, store: Any) -> bool:
    return asyncio.run(failing._broker._is_healed(store))


def test_a_slave_of_a_repaired_log_is_opened_again_while_it_is_a_slave_when_its_messages_came_back() -> None:
    """Else it would do so when it is elected, and nobody would take sends meanwhile."""
    failing = Failing(Role.FOLLOWING, "")
    store: Any = failing._broker.process.broker.store
    assert not failing._broker.leadership.is_damaged
    assert not is_healed(failing, store), "padding has come back as padding"
    store.has_healed_skipped_parts, store.healed_skipped_ranges = True, ["a range"]
    failing._broker.leadership.role = Role.OPENING  # type: ignore[misc]
    assert not is_healed(failing, store)
    failing._broker.leadership.role = Role.FOLLOWING  # type: ignore[misc]
    assert is_healed(failing, store)
    assert not is_healed(failing, store), "once is enough"


def test_a_healed_slave_is_not_closed_while_its_disk_is_full() -> None:
    failing = Failing(Role.FOLLOWING, "", leads_after=1)
    store: Any = failing._broker.process.broker.store
    store.has_healed_skipped_parts, store.healed_skipped_ranges = True, ["a range"]
    assert not is_healed(failing, store)
    failing._leads_after, store.lack_of_room = 0, lambda: "few bytes left"
    assert not is_healed(failing, store)
    store.lack_of_room = lambda: ""
    assert is_healed(failing, store)


class Unreadable:
    """The store of a member on a disk that cannot be read."""

    log_failure = ""

    @property
    def skipped_ranges(self) -> list[object]:
        raise OSError(errno.EIO, "cannot be read")

    has_healed_what_was_skipped = skipped_ranges
    healed_skipped_ranges = ()


def cut_fork(failing: Failing, process: Any = None) -> list[str]:
    failing._broker.leadership.is_damaged = True  # type: ignore[misc]
    item = CutFork(process or failing._broker.process, LogPoint(70, 1, 0))
    asyncio.run(failing._broker._do(item))
    return failing.done


def test_a_member_whose_damage_lies_in_a_fork_leaves_the_set_before_its_log_is_truncated() -> None:
    """The damage may begin in what was acknowledged: after the truncation nothing shows that it lacks that."""
    assert cut_fork(Failing(Role.FOLLOWING, "")) == [
        "process 1 follows nobody", "leaves the set", "doubts its end", "ends at 70", "stops", "starts",
    ]  # fmt: skip


def test_a_fork_that_a_full_disk_keeps_is_looked_for_again() -> None:
    assert cut_fork(Failing(Role.FOLLOWING, "", leads_after=1))[-1] == "process 1 follows"


def test_a_log_that_was_opened_again_or_leads_is_not_truncated_for_a_fork() -> None:
    assert cut_fork(Failing(Role.FOLLOWING, ""), SimpleNamespace()) == []
    assert "ends at 70" not in cut_fork(Failing(Role.LEADING, ""))


def test_a_log_that_cannot_be_read_is_not_healed_and_may_be_damaged() -> None:
    failing = Failing(Role.FOLLOWING, "", is_damaged=True)
    failing._broker.leadership.is_damaged = True  # type: ignore[misc]
    unreadable: Any = Unreadable()
    assert not asyncio.run(failing._broker._is_healed(unreadable))
    assert elected_broker._has_skipped(unreadable)


def test_a_member_whose_disk_does_not_take_the_epoch_gives_the_lead_back_and_serves_as_a_slave() -> None:
    full = Failing(Role.OPENING, "", leads_after=1)
    assert not asyncio.run(full._broker._lead(2))
    assert full.done == ["gives up its store", "gives epoch 2 back: [Errno 28] full", "is a slave", "starts"]
    full.done.clear()
    assert asyncio.run(full._broker._lead(4))
    assert full.done == ["gives up its store", "leads in epoch 4", "is the master", "starts"]


def test_it_may_run_again_when_its_disk_has_room() -> None:
    full = Failing(Role.FOLLOWING, "", leads_after=1)
    asyncio.run(full._broker._do(TryRoom()))
    assert full.done == []
    full._leads_after = 0
    asyncio.run(full._broker._do(TryRoom()))
    assert full.done == ["may run"]


class Looking:
    """A broker that looks at its disk. Attribute: told, what the election was told."""

    def __init__(self, *, is_leading: bool, failure: str = "") -> None:
        self.told: list[str] = []
        self.refusal = self.short = self.no_write = ""
        self._broker = broker = bare()
        broker._config, broker._is_stopping, broker._other_looks = BrokerConfig(broker_name="b"), False, 0
        self._election = SimpleNamespace(is_full=False, full=self._full)
        broker.leadership = self._election  # type: ignore[assignment]
        self.log_failure, self.is_leading = failure, is_leading
        broker.process = SimpleNamespace(broker=SimpleNamespace(store=self))  # type: ignore[assignment]

    @property
    def last_refusal(self) -> str:
        return self.refusal

    def lack_of_room(self) -> str:
        return self.refusal or self.short

    def _full(self, why: str) -> None:
        self.told.append(why)
        self._election.is_full = bool(why)

    def check_room(self) -> None:
        if self.no_write:
            raise OSError(errno.ENOSPC, self.no_write)

    def look(self, times: int) -> None:
        async def run() -> None:
            for _ in range(times):
                await self._broker._do(LookForRoom())

        asyncio.run(run())


def test_a_disk_is_full_or_has_room_again_if_looks_in_a_row_say_so() -> None:
    master = Looking(is_leading=True)
    master.short = "few bytes left"
    master.look(FULL_LOOKS)
    assert master.told == [], "it takes sends"
    master.refusal = "no space"
    master.look(FULL_LOOKS - 1)
    master.refusal = ""
    master.look(1)
    master.refusal = "no space"
    master.look(FULL_LOOKS - 1)
    assert master.told == []
    master.look(2 * FULL_LOOKS)
    assert master.told == ["no space"], "it is said once"
    master.refusal = ""
    master.look(FULL_LOOKS)
    assert master.told == ["no space", ""]


def test_a_slave_has_room_again_when_its_disk_takes_a_file() -> None:
    slave = Looking(is_leading=False)
    slave.short, slave.no_write = "few bytes left", "full"
    slave.look(1)
    assert slave.told == ["few bytes left"], "before its master gives the lead to it"
    slave.short = ""
    slave.look(2 * FULL_LOOKS)
    assert slave.told == ["few bytes left"]
    slave.no_write = ""
    slave.look(FULL_LOOKS)
    assert slave.told == ["few bytes left", ""]


def test_a_log_that_has_failed_is_not_a_full_disk() -> None:
    master = Looking(is_leading=True, failure="an fsync failed")
    master.refusal = "an fsync failed"
    master.look(2 * FULL_LOOKS)
    assert master.told == []


def test_a_store_that_fails_while_it_is_to_lead_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(Role.OPENING, "")
    store = failing._broker.process.broker.store

    def fail(*_: object, **__: object) -> None:
        store.log_failure = "an fsync failed"  # type: ignore[misc]
        raise StoreFailedError("an fsync failed")

    monkeypatch.setattr(store, "lead", fail)
    assert not asyncio.run(failing._broker._lead(2))
    assert failing.done == ["gives up its store", "gives epoch 2 back: an fsync failed", "closes its store", "starts"]


def test_a_store_that_is_to_lead_and_cannot_be_opened_again_gives_the_lead_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elected_broker, "FAILURE_LOOK_S", 0.001)
    failing = Failing(Role.OPENING, opens_after=2)
    assert not asyncio.run(failing._broker._lead(2))
    assert failing.done == ["stops", "cannot open", "gives epoch 2 back: [Errno 28] full", "cannot open", "starts"]


def test_a_master_that_is_to_follow_waits_for_room_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elected_broker, "FAILURE_LOOK_S", 0.001)
    full = Failing(Role.FOLLOWING, "", opens_after=2)
    asyncio.run(full._broker._do(StopLeading()))
    assert full.done == ["stops", "cannot open", "cannot open", "starts"]


def test_a_stop_while_there_is_no_room_to_open_the_store_is_no_failure_and_stops_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elected_broker, "FAILURE_LOOK_S", 0.001)
    full = Failing(Role.FOLLOWING, "", opens_after=1_000_000)
    fatal: list[BaseException] = []

    async def run() -> None:
        broker, leadership = full._broker, cast("Any", full._broker.leadership)
        leadership.close, leadership.hand_over = (lambda: None), (lambda timeout_s: False)
        cast("Any", broker._tail).close = lambda is_clean: full.done.append(f"is closed, clean: {is_clean}")
        broker.process.broker.store.is_closed_clean = True
        refused = asyncio.Event()
        monkeypatch.setattr(elected_broker, "FailedOpens", lambda folder: SimpleNamespace(say=lambda error: refused.set()))
        broker._todo, broker._watcher, broker._on_fatal = asyncio.Queue(), None, fatal.append
        broker._todo.put_nowait(StopLeading())
        broker._worker = asyncio.create_task(broker._work())
        await refused.wait()
        await broker.stop(1)

    asyncio.run(run())
    assert not fatal
    assert [each for each in full.done if each != "cannot open"] == ["stops", "is closed, clean: True"]


def test_a_master_whose_log_has_failed_hands_over() -> None:
    assert Failing(Role.LEADING).run() == ["hands over"]


@pytest.mark.parametrize(("hands_over", "grace_s"), [(True, CHANGE_GRACE_S), (False, 9.0)])
def test_who_has_handed_over_lets_nobody_wait_for_what_it_cannot_confirm_any_more(hands_over: bool, grace_s: float) -> None:
    graces: list[float] = []

    async def stop(grace_s: float) -> None:
        graces.append(grace_s)

    async def run() -> None:
        broker = bare()
        broker._todo, broker._watcher, broker._is_open = asyncio.Queue(), None, True
        broker._tail = SimpleNamespace(close=lambda is_clean: None)  # type: ignore[assignment]
        broker._config, broker._settings = BrokerConfig(broker_name="b"), EtcdConfig()
        broker._worker = asyncio.create_task(asyncio.sleep(0))
        broker.leadership = SimpleNamespace(close=lambda: None, hand_over=lambda timeout_s: hands_over)  # type: ignore[assignment]
        store = SimpleNamespace(is_closed_clean=True)
        broker.process = SimpleNamespace(stop=stop, broker=SimpleNamespace(store=store))  # type: ignore[assignment]
        await broker.stop(9.0)

    asyncio.run(run())
    assert graces == [grace_s]


def test_a_loop_that_closes_ends_no_thread_that_has_something_for_it() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    broker = bare()
    broker._todo = asyncio.Queue()
    broker._loop = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=refuse)  # type: ignore[assignment]
    broker._do_soon(StopLeading())
    assert broker._todo.empty()


def test_who_takes_the_lead_has_started_when_its_process_did(monkeypatch: pytest.MonkeyPatch) -> None:
    started_ms: list[int] = []

    def make(config: BrokerConfig, *, start_time_ms: int, **_: object) -> Any:
        started_ms.append(start_time_ms)
        return SimpleNamespace(broker=SimpleNamespace(store=SimpleNamespace(root=ROOT)), set_on_fatal=lambda _: None)

    times_ms = iter([1_000, 2_000, 3_000])
    monkeypatch.setattr(elected_broker, "BrokerProcess", make)
    monkeypatch.setattr(elected_broker, "SystemClock", lambda: SimpleNamespace(now_ms=lambda: next(times_ms)), raising=False)
    monkeypatch.setattr(elected_broker, "HttpEtcd", lambda *_: None)
    broker = ElectedBroker(BrokerConfig(broker_name="b", broker_role="SYNC_MASTER", broker_id=1, etcd=EtcdConfig(("http://e:1",))))
    broker._make(broker._config, 5)
    assert started_ms == [1_000, 1_000]
