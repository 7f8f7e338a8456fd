"""What is pending, against a dict; power cuts and kills at every operation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protomq_broker.store.timer import pending, timer_runs
from protomq_broker.store.timer.pending import PendingLimits, PendingTimers
from protomq_broker.store.timer.recalled import recalled_key
from protomq_broker.store.timer.timer_rows import merge_rows
from protomq_broker.store.timer.timer_runs import TimerDamagedError
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash
from tests.support.examples import examples

SMALL = PendingLimits(near=8, fresh=3, far=5, runs_per_level=2)
FOLDER = "/s/timer"


@contextmanager
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timer_runs, "BLOCK_ROWS", 4)
        yield


@pytest.fixture
def blocks() -> Iterator[None]:
    with small_blocks():
        yield


@dataclass
class Log:
    """Events with their positions: (position, adds [(due, position)], removals [(due, position)])."""

    events: list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]] = field(
        default_factory=list
    )
    end: int = 1

    def live(self) -> dict[int, int]:
        """Position -> due time of what is pending."""
        found: dict[int, int] = {}
        for _, adds, removals in self.events:
            for due_ms, position in removals:
                assert found.pop(position) == due_ms
            for due_ms, position in adds:
                found[position] = due_ms
        return found

    def add(self, *dues_ms: int) -> tuple[int, list[tuple[int, int]]]:
        adds = [(due_ms, self.end + index) for index, due_ms in enumerate(dues_ms)]
        self.events.append((self.end, adds, []))
        self.end += len(dues_ms)
        return self.end, adds

    def remove(self, removals: list[tuple[int, int]]) -> int:
        self.events.append((self.end, [], removals))
        self.end += 1
        return self.end

    def cut(self, end: int) -> None:
        self.events = [event for event in self.events if event[0] < end]


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row[0] for row in rows], np.uint64), np.array(
        [row[1] for row in rows], np.uint64
    )


@dataclass
class Timer:
    """The structure over a log that is a list, as a store would drive it."""

    disk: SimDisk
    log: Log = field(default_factory=Log)
    durable: int = 0
    is_saved: bool = False

    def start(self) -> None:
        self.disk.make_folder(FOLDER)
        self.disk.fsync_dir("/")
        self.disk.fsync_dir("/s")
        self.pending = PendingTimers(self.disk, FOLDER, SMALL)
        self.pending.load()
        if self.is_saved:
            assert not self.pending.damage, "a checkpoint was made, and it does not hold"
        entries_from, removals_from = self.pending.entries_from, self.pending.removals_from
        assert max(entries_from, removals_from) <= self.log.end, "the files are ahead of the log"
        for position, adds, _ in self.log.events:
            if adds and position >= entries_from:
                self.note(adds, position + len(adds))
        for position, _, removals in self.log.events:
            if removals and position >= removals_from:
                self.pending.note_removed(
                    *columns(removals), position + 1, np.full(len(removals), 100)
                )

    def note(self, adds: list[tuple[int, int]], end: int) -> None:
        due_ms, positions = columns(adds)
        self.pending.note(due_ms, positions, np.full(len(adds), 100), end)

    def add(self, *dues_ms: int) -> None:
        end, adds = self.log.add(*dues_ms)
        self.note(adds, end)

    def remove(self, removals: list[tuple[int, int]]) -> None:
        self.pending.note_removed(
            *columns(removals), self.log.remove(removals), np.full(len(removals), 100)
        )

    def checkpoint(self) -> None:
        position = self.log.end
        durable = max(self.pending.freeze(), position)
        self.durable = max(self.durable, durable)
        self.pending.checkpoint(position)
        self.is_saved = True

    def take_all(self) -> list[tuple[int, int]]:
        """Moves all that is pending, a few at a time; in the order in which it came."""
        taken: list[tuple[int, int]] = []
        while len(rows := self.pending.due(1 << 62, 5)):
            part = list(zip(rows["due_ms"].tolist(), rows["position"].tolist(), strict=True))
            self.remove(part)
            taken += part
        return taken

    def check(self) -> None:
        expected = sorted((due_ms, position) for position, due_ms in self.log.live().items())
        assert self.pending.count == len(expected)
        assert self.take_all() == expected
        assert self.pending.count == self.pending.size_bytes == 0


class PendingMachine(RuleBasedStateMachine):
    """Against `Log.live`, with restarts, kills and power cuts."""

    @initialize()
    def begin(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(timer_runs, "BLOCK_ROWS", 4)
        self.timer = Timer(SimDisk())
        self.timer.start()
        self.is_frozen = False

    def teardown(self) -> None:
        if hasattr(self, "timer"):
            self.timer.check()
            self.patch.undo()

    @rule(dues_ms=st.lists(st.integers(0, 40), min_size=1, max_size=6))
    def add(self, dues_ms: list[int]) -> None:
        self.timer.add(*dues_ms)

    @rule(count=st.integers(1, 9), now_ms=st.integers(0, 45), is_moved=st.booleans())
    def due(self, count: int, now_ms: int, is_moved: bool) -> None:
        rows = self.timer.pending.due(now_ms, count)
        found = list(zip(rows["due_ms"].tolist(), rows["position"].tolist(), strict=True))
        live = sorted((due_ms, position) for position, due_ms in self.timer.log.live().items())
        assert found == [row for row in live if row[0] <= now_ms][:count]
        if is_moved and found:
            self.timer.remove(found)

    @precondition(lambda self: self.timer.log.live())
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        live = sorted((due_ms, position) for position, due_ms in self.timer.log.live().items())
        chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3, unique=True))
        for due_ms, _ in chosen:
            found = self.timer.pending.at_due(due_ms, 1_000)["position"].tolist()
            assert found == [at for due, at in live if due == due_ms]
        self.timer.remove(chosen)
        for due_ms, position in chosen:
            assert position not in self.timer.pending.at_due(due_ms, 1_000)["position"]

    @rule()
    def flush(self) -> None:
        self.timer.pending.flush()

    @rule(position=st.integers(0, 60))
    def below(self, position: int) -> None:
        found = [int(p) for rows in self.timer.pending.below(position) for p in rows["position"]]
        assert sorted(found) == sorted(p for p in self.timer.log.live() if p < position)

    @rule()
    def next_due(self) -> None:
        live = self.timer.log.live()
        due_ms = self.timer.pending.next_due_ms()
        assert due_ms is not None or not live
        assert not live or due_ms is None or due_ms <= min(live.values())

    @rule(dues_ms=st.lists(st.integers(0, 40), max_size=6))
    def checkpoint(self, dues_ms: list[int]) -> None:
        """What comes between freeze and checkpoint is not in it, and not lost."""
        timer = self.timer
        position = timer.log.end
        timer.durable = max(timer.pending.freeze(), position)
        if dues_ms:
            timer.add(*dues_ms)
            due_ms, at = timer.log.events[-1][1][0]
            timer.remove([(due_ms, at)])
            timer.pending.flush()
        timer.pending.checkpoint(position)
        timer.is_saved = True

    @rule()
    def kill(self) -> None:
        self.timer.disk = self.timer.disk.killed()
        self.timer.start()

    @rule(seed=st.integers(0, 1 << 32), share=st.floats(0, 1))
    def cut_power(self, seed: int, share: float) -> None:
        timer = self.timer
        timer.log.cut(timer.durable + int((timer.log.end - timer.durable) * share))
        timer.disk = timer.disk.crash(random.Random(seed))
        timer.start()

    @rule()
    def lose_files(self) -> None:
        self.timer.disk.remove(FOLDER)
        self.timer.is_saved = False
        self.timer.start()

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "timer"):
            assert self.timer.pending.count == len(self.timer.log.live())


TestPendingMachine = PendingMachine.TestCase
TestPendingMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def work(timer: Timer) -> None:
    """A bit of everything."""
    rng = random.Random(3)
    for step in range(12):
        timer.add(*(rng.randrange(40) for _ in range(4)))
        if step % 3 == 1:
            live = sorted((due_ms, position) for position, due_ms in timer.log.live().items())
            timer.remove(rng.sample(live, 2))
        if step % 4 == 2:
            rows = timer.pending.due(12, 3)
            if len(rows):
                timer.remove(
                    list(zip(rows["due_ms"].tolist(), rows["position"].tolist(), strict=True))
                )
        timer.pending.flush()
        if step % 5 == 3:
            timer.checkpoint()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("is_power_cut", [False, True])
def test_a_crash_at_any_operation_loses_no_timer_and_brings_none_back(is_power_cut: bool) -> None:
    clean = Timer(SimDisk())
    clean.start()
    before = clean.disk.operations
    work(clean)
    count = clean.disk.operations - before
    assert count > 50
    for number in range(1, count + 1):
        timer = Timer(SimDisk())
        timer.start()
        timer.disk.fail_at(number, Fault.CRASH)
        with pytest.raises(SimulatedCrash):
            work(timer)
        if is_power_cut:
            timer.disk = timer.disk.crash(random.Random(number))
            timer.log.cut(max(timer.durable, timer.log.end - number % 7))
        else:
            timer.disk = timer.disk.killed()
        timer.start()
        timer.check()


@pytest.mark.usefixtures("blocks")
def test_a_failing_write_loses_no_row() -> None:
    for fault in (Fault.EIO, Fault.ENOSPC, Fault.SHORT):
        for number in range(1, 40):
            timer = Timer(SimDisk())
            timer.start()
            timer.disk.fail_at(number, fault)
            for step in range(20):
                timer.add(*range(step, step + 4))
                try:
                    timer.pending.flush()
                    if step % 4 == 3:
                        timer.checkpoint()
                except OSError:
                    pass  # The next checkpoint freezes it anew.
            timer.check()


@pytest.mark.usefixtures("blocks")
def test_damaged_files_are_made_anew_from_the_log() -> None:
    timer = Timer(SimDisk())
    timer.start()
    for step in range(10):
        timer.add(*range(step, step + 5))
    timer.pending.flush()
    timer.checkpoint()
    paths = list(timer.disk.files(FOLDER))
    assert len(paths) > 1
    for path in paths:
        for bit in (8, 8 * 40, 8 * (len(timer.disk.content(path)) - 3)):
            damaged = Timer(timer.disk.killed(), Log(list(timer.log.events), timer.log.end))
            damaged.disk.flip_bit(path, bit)
            damaged.start()
            try:
                damaged.check()
            except TimerDamagedError:  # within a block: met when it is read
                assert "run." in path
                damaged.log = Log(list(timer.log.events), timer.log.end)
                damaged.pending.start_rebuild()
                damaged.start()
                damaged.check()


def start_with_far_rows(count: int) -> Timer:
    """What falls due first is in memory, all else in files."""
    timer = Timer(SimDisk())
    timer.start()
    timer.add(*range(20))
    timer.pending.flush()
    for due_ms in range(100, 100 + count, 10):
        timer.add(*range(due_ms, due_ms + 10))
    timer.pending.flush()
    return timer


@pytest.mark.usefixtures("blocks")
def test_what_is_taken_of_files_while_they_are_merged_does_not_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = start_with_far_rows(80)
    add = timer_runs.RunWriter.add
    is_first = True

    def add_slowly(writer: timer_runs.RunWriter, rows: np.ndarray) -> None:
        nonlocal is_first
        add(writer, rows)
        if is_first and not timer.pending._lock.locked():  # it is a merge, not a first write
            is_first = False
            rows = timer.pending.due(130, 1_000)
            timer.remove(list(zip(rows["due_ms"].tolist(), rows["position"].tolist(), strict=True)))

    timer.add(*range(1_000, 1_010))
    monkeypatch.setattr(pending, "_of_one_level", lambda cursors, _: is_first and cursors[:2])
    monkeypatch.setattr(timer_runs.RunWriter, "add", add_slowly)
    timer.pending.flush()
    assert not is_first
    timer.check()


@pytest.mark.usefixtures("blocks")
def test_a_removal_is_kept_until_it_meets_its_row() -> None:
    timer = start_with_far_rows(400)
    recalled = [(due_ms, p) for p, due_ms in timer.log.live().items() if due_ms % 7 == 0]
    for row in recalled:
        timer.remove([row])
        timer.pending.flush()
    assert timer.pending.count == 420 - len(recalled)
    timer.check()


@pytest.mark.usefixtures("blocks")
def test_what_a_checkpoint_tells_of_is_on_the_disk() -> None:
    timer = start_with_far_rows(100)
    timer.checkpoint()
    timer.disk = timer.disk.crash(random.Random(0), keep=0.0)
    timer.start()
    assert timer.pending.entries_from == timer.log.end
    timer.check()


@pytest.mark.usefixtures("blocks")
def test_what_lies_far_ahead_is_not_read() -> None:
    timer = Timer(SimDisk())
    timer.start()
    for _ in range(20):
        timer.add(*(1_000_000 + due_ms for due_ms in range(6)))
        timer.pending.flush()
    timer.add(5)
    timer.pending.flush()
    run_paths = [path for path in timer.disk.files(FOLDER) if "run." in path]
    assert run_paths
    for path in run_paths:
        timer.disk.flip_bit(path, 8)  # reading would find it
    assert timer.pending.due(999, 10)["due_ms"].tolist() == [5]
    with pytest.raises(TimerDamagedError):
        timer.pending.due(2_000_000, 200)


def test_files_that_nobody_needs_go() -> None:
    with small_blocks():
        timer = Timer(SimDisk())
        timer.start()
        for step in range(30):
            timer.add(*range(step, step + 6))
            timer.pending.flush()
        timer.take_all()
        timer.checkpoint()
        timer.checkpoint()
        assert [path.rpartition("/")[2] for path in timer.disk.files(FOLDER)] == ["pending.bin"]
        assert timer.disk.open_descriptors == 0


def _with_unreadable(disk: SimDisk, count: int) -> PendingTimers:
    """`count` messages have the due times 1, 2, …, at positions from 101 on. Those that are due at 20 or before cannot be read."""
    timers = PendingTimers(disk, FOLDER, SMALL)
    timers.load()
    rows = [(number, 100 + number) for number in range(1, count + 1)]
    timers.note(*columns(rows), np.full(count, 10), 1_000)
    while len(due := timers.due(20, 4)):
        timers.set_aside(due)
    return timers


@pytest.mark.usefixtures("blocks")
def test_many_that_cannot_be_read_come_again_after_a_start_and_hold_up_no_others() -> None:
    disk = SimDisk()
    timers = _with_unreadable(disk, 40)
    timers.flush()
    files = disk.files(FOLDER)
    for now_ms in (20, 20, 40):
        timers.flush()
        assert timers.due(now_ms, 100)["due_ms"].tolist() == [*range(21, now_ms + 1)]
    assert len(disk.files(FOLDER)) <= len(files), "a look writes no files"
    assert [timers.at_due(due_ms, 9)["position"].tolist() for due_ms in (3, 19, 22)] == [[103], [119], [122]]
    assert [row for rows in timers.below(106) for row in rows["position"].tolist()] == [101, 102, 103, 104, 105]
    timers.freeze()
    timers.checkpoint(1_000)
    again = PendingTimers(disk, FOLDER, SMALL)
    again.load()
    assert (again.damage, again.count) == ("", 40)
    assert again.due(40, 100)["due_ms"].tolist() == [*range(1, 41)]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("restarts", [False, True])
def test_what_cannot_be_read_may_be_carried_forward(restarts: bool) -> None:
    disk = SimDisk()
    timers = _with_unreadable(disk, 40)
    carried = [(due_ms, 100 + due_ms) for due_ms in (2, 19, 25)]
    timers.note_removed(*columns(carried), 1_001, np.full(3, 10))
    timers.flush()
    if restarts:
        timers.freeze()
        timers.checkpoint(1_001)
        timers = PendingTimers(disk, FOLDER, SMALL)
        timers.load()
    left = [due_ms for due_ms in range(1, 41) if due_ms not in (2, 19, 25)]
    assert [row for rows in timers.below(1_000) for row in rows["due_ms"].tolist()] == left
    assert timers.due(40, 100)["due_ms"].tolist() == [due_ms for due_ms in left if restarts or due_ms > 20]


@pytest.mark.usefixtures("blocks")
def test_what_cannot_be_read_costs_those_that_leave_later_nothing() -> None:
    timers = _with_unreadable(SimDisk(), 40)
    aside = list(timers._aside)
    assert timers.due(40, 100)["due_ms"].tolist() == [*range(21, 41)]
    timers.note_removed(*columns([(due_ms, 100 + due_ms) for due_ms in range(21, 31)]), 1_001, np.full(10, 10))
    timers.flush()
    assert list(map(id, timers._aside)) == list(map(id, aside)), "it may be of millions of rows"
    assert timers.due(40, 100)["due_ms"].tolist() == [*range(31, 41)]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("seed", range(10))
def test_what_was_set_aside_falls_due_again_but_for_what_still_cannot_be_read(seed: int) -> None:
    rng = random.Random(seed)
    disk = SimDisk()
    timers = _with_unreadable(disk, 40)
    assert timers.take_back([(0, 1_000)]) == 0
    damaged: list[tuple[int, int]] = [(104, 106), (115, 116)]  # records of 10 octets reach into them, and come up to them
    hurt = [due_ms for due_ms in range(1, 21) if any(100 + due_ms < end and start < 110 + due_ms for start, end in damaged)]
    gone = rng.sample(range(1, 21), 5)
    timers.note_removed(*columns([(due_ms, 100 + due_ms) for due_ms in gone[:3]]), 1_001, np.full(3, 10))
    back = [due_ms for due_ms in range(1, 21) if due_ms not in {*hurt, *gone[:3]}]
    assert timers.take_back(damaged) == len(back)
    assert timers.take_back(damaged) == 0
    timers.note_removed(*columns([(due_ms, 100 + due_ms) for due_ms in gone[3:]]), 1_002, np.full(2, 10))
    timers.flush()
    back = [due_ms for due_ms in back if due_ms not in gone]
    assert timers.due(40, 100)["due_ms"].tolist() == [*back, *range(21, 41)]
    assert timers.next_due_ms() == back[0]
    left = [due_ms for due_ms in range(1, 41) if due_ms not in gone]
    assert [row for rows in timers.below(1_000) for row in rows["due_ms"].tolist()] == left
    assert [len(timers.at_due(due_ms, 9)) for due_ms in range(1, 41)] == [int(due_ms in left) for due_ms in range(1, 41)]
    timers.freeze()
    timers.checkpoint(1_002)
    again = PendingTimers(disk, FOLDER, SMALL)
    again.load()
    assert (again.damage, again.count) == ("", len(left))
    assert again.due(40, 100)["due_ms"].tolist() == left


@pytest.mark.usefixtures("blocks")
def test_that_many_cannot_be_read_costs_no_more_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged segment may have millions. Recalls wait while they are set aside."""
    timers = PendingTimers(SimDisk(), FOLDER)
    timers.load()
    rows = [(number, 100 + number) for number in range(1, 6_401)]
    timers.note(*columns(rows), np.full(len(rows), 10), 10_000)
    due = timers.due(10_000, 10_000)
    merged_counts: list[int] = []

    def note(parts: list[np.ndarray], *, keep_removals: bool) -> np.ndarray:
        merged_counts.append(sum(map(len, parts)))
        return merge_rows(parts, keep_removals=keep_removals)

    monkeypatch.setattr(pending, "merge_rows", note)
    for start in range(0, len(rows), 50):
        timers.set_aside(due[start : start + 50])
    assert sum(merged_counts) < 10 * len(rows)
    assert len(timers.due(10_000, 10_000)) == 0
    gone = random.Random(5).sample(rows, 900)
    timers.note_removed(*columns(gone), 10_001, np.full(len(gone), 10))
    left = sorted(set(rows) - set(gone))
    assert [int(row["position"]) for part in timers.below(1 << 40) for row in part] == [at for _, at in left]
    assert [int(at) for due_ms in (1, 6_400) for at in timers.at_due(due_ms, 9)["position"]] == [
        at for due_ms, at in left if due_ms in (1, 6_400)
    ]


@pytest.mark.parametrize("seed", range(examples(20)))
def test_removals_that_meet_no_row_count_as_none(seed: int, blocks: None) -> None:
    """The log was damaged where their rows stood. Those of them that stand behind the horizon meet nothing only later."""
    dice = random.Random(seed)
    disk = SimDisk()
    timers = PendingTimers(disk, FOLDER, SMALL)
    timers.load()
    live: dict[int, int] = {}
    for position in range(100, 100 + 300, 2):
        due_ms = dice.randrange(1_000)
        timers.note(*columns([(due_ms, position)]), np.full(1, 10), position + 1)
        live[position] = due_ms
        if dice.random() < 0.5:
            gone, _ = dice.choice(list(live.items()))
            removals = [(live.pop(gone), gone)]
            if dice.random() < 0.5:
                removals.append((dice.randrange(1_000), position + 1))
            timers.note_removed(*columns(removals), position + 2, np.full(len(removals), 10))
        if dice.random() < 0.2:
            timers.flush()
        if dice.random() < 0.1:
            timers.freeze()
            timers.checkpoint(position + 2)
            timers = PendingTimers(disk, FOLDER, SMALL)
            timers.load()
            assert not timers.damage
    found = timers.due(1_000, 1_000)
    assert sorted(found["position"].tolist()) == sorted(live)
    timers.flush()
    assert (timers.count, timers.size_bytes) == (len(live), 10 * len(live))
    timers.freeze()
    timers.checkpoint(1_000)
    timers = PendingTimers(disk, FOLDER, SMALL)
    timers.load()
    assert (timers.count, timers.size_bytes) == (len(live), 10 * len(live))


@pytest.mark.parametrize("number", range(1, 14))
def test_a_crash_within_a_checkpoint_forgets_no_recalled_message(number: int):
    disk = SimDisk()
    timer = Timer(disk)
    timer.start()
    timer.add(5_000, 6_000)
    timer.checkpoint()
    row, key = (5_000, next(iter(timer.log.live()))), recalled_key(5_000, (1, 0, 7))
    end = timer.log.remove([row])
    timer.pending.note_removed(*columns([row]), end, np.full(1, 100), key)
    disk.fail_at(number, Fault.CRASH)
    with suppress(SimulatedCrash):
        timer.checkpoint()
    later = PendingTimers(disk.killed(), FOLDER, SMALL)
    later.load()
    assert later.removals_from < end or key in later.recalled
