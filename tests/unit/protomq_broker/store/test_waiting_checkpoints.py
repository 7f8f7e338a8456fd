"""A checkpoint that waits for replicas over several turns of housekeeping: what happens meanwhile, and what the next start finds."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.errors import CorruptLogError
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk

from .log_helpers import ManualClock, make_request
from .store_helpers import open_store
from .test_following import disk_of, fill, follow, pair


def master_with_delays(count: int) -> Store:
    """A master that waits for replicas; messages that fall due one after the other."""
    store = open_store(SimDisk(), clock=ManualClock(), follows=True)
    store.lead(waits_for_replicas=True)
    store.topics.create(TopicConfig("topic"))
    for number in range(count):
        store.append([make_request([b"%d" % number], due_time_ms=1_000 + number)])
    return store


def begin_timer_rebuild(store: Store) -> None:
    """As housekeeping does where a file of the timer does not hold; the log is too long for one step."""
    store.pending.met_damage = "a file does not hold"
    steps = store._upkeep.timer_rebuild
    steps._take_entries = lambda end: iter((None, None))  # type: ignore[method-assign]
    steps.step(0)
    assert store.pending.is_rebuilding


def test_a_checkpoint_that_waits_while_the_timer_begins_to_be_rebuilt_forgets_no_delayed_message() -> None:
    store = master_with_delays(3)
    assert not store.checkpoint(), "it waits"
    begin_timer_rebuild(store)
    store.positions.note_replicated(store.appended_position)
    assert store.checkpoint()
    again = open_store(disk_of(store).killed(), clock=ManualClock(), follows=True)
    assert again.pending.count == 3
    assert len(again.pending.due(1 << 60, 10)) == 3


@pytest.mark.parametrize("leads", [False, True])
def test_damage_of_what_a_clean_close_has_synced_is_no_torn_tail_though_replicas_lack_it(leads: bool) -> None:
    """The close writes no checkpoint, so that files beside the log know nothing that a fail-over takes back."""
    leader, store = pair()
    fill(leader)
    follow(leader, store)
    assert store.checkpoint()
    if leads:
        store.lead(waits_for_replicas=True)
        fill(store, 3, 20)
    else:
        fill(leader, 3, 20)
        follow(leader, store, confirmed=False)
    end = store.appended_position
    store.close()
    assert store.is_closed_clean
    disk = disk_of(store).crash(random.Random(1), keep=0.0)
    assert open_store(disk.killed(), follows=True).appended_position == end
    disk.flip_bit(f"/s/commitlog/{0:020d}", 8 * (end - 60))
    with pytest.raises(CorruptLogError, match=f"the log had been synced up to {end}"):
        open_store(disk, follows=True)
