"""The seeded part of the campaigns on the simulated disk; the long form is `make chaos` (tests/chaos/)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos import planted_retries, planted_transactions, store_campaigns
from tests.chaos.replays import WORLDS, replay
from tests.chaos.store_crashes import ENDS, LIVES, check_crashes
from tests.chaos.store_loops import STEPS, prepared_world
from tests.chaos.store_world import watch_log

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_no_fault_at_any_io_of_any_operation_breaks_a_promise() -> None:
    # Between them these meet each of the signs below.
    tally = store_campaigns.store_loops((5, 6), stride=24)
    assert tally.images >= 1_000, tally
    for sign in (
        "torn tail cut",
        "fsync failed",
        "CRASH at pwritev",
        "SHORT at pwritev",
        "SYNC_LOST at fdatasync",
        "ENOSPC at create",
    ):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_damage_is_refused_or_set_aside_and_nothing_wrong_is_served() -> None:
    tally = store_campaigns.store_damage(range(5))
    for sign in (
        "start refused",
        "started: tail cut",
        "quarantine",
        "repair",
        "derived: as if nothing had been",
        "derived: readers are told, and it heals",
        "open: healed",
    ):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_a_clock_that_jumps_deletes_nothing_and_keeps_the_order() -> None:
    tally = store_campaigns.store_clock(range(6))
    assert tally.fired["clock doubted"], tally


def test_a_seed_gives_the_same_operations_and_the_same_bytes_every_time() -> None:
    def run() -> tuple[object, ...]:
        world = prepared_world(5, STEPS["checkpoint"], sync_flush=True)
        world.disk.history = []
        world.checkpoint()
        after = world.fork("power", world.rng)
        assert after.verify() == []
        return after.history.events, world.disk.history, after.disk.files("/")

    with watch_log():
        assert run() == run()


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_of_a_cluster_replays_exactly_also_where_hashes_are_others(world: str) -> None:
    first = replay(world, 7)
    assert replay(world, 7) == first != replay(world, 8)
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "tests.chaos.replays", world, "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == first


def test_a_whole_cluster_lives_through_faults_and_loses_nothing() -> None:
    tally = store_campaigns.failover_sim(range(40))
    for sign in (
        "fail-overs", "truncated", "repeated", "kill", "power cut", "read on a slave", "topic made again", "letters replayed",
        "topic deleted by an earlier try", "replayed by an earlier try", "ended again in doubt",
    ):  # fmt: skip
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_nothing_of_a_deleted_topic_comes_back() -> None:
    tally = store_campaigns.store_topics(range(30))
    assert tally.fired["unsynced tail rewritten"], f"no power cut lost anything; {tally}"


def test_a_broker_that_finds_nothing_but_the_log_tells_what_the_old_one_told() -> None:
    tally = store_campaigns.store_states(range(6))
    assert tally.fired["segments deleted"], tally


def test_an_end_at_any_io_of_delays_transactions_pops_and_retries_breaks_no_rule() -> None:
    tally = store_campaigns.store_crashes((1,), stride=12)
    for name in LIVES:
        for ends in ENDS:
            assert any(sign.startswith(f"{name}: {ends} in ") for sign in tally.fired), f"never happened: {name}, {ends}; {tally}"


@pytest.mark.parametrize(
    ("name", "plant", "rule"),
    [
        ("transactions", planted_transactions.commits_in_two_appends, "E1"),
        ("send-backs", planted_retries.the_replay_is_told_apart, "G1"),
    ],
)
def test_an_end_at_any_io_shows_what_is_no_single_append(name: str, plant: Callable[[], Any], rule: str) -> None:
    with plant():
        found = check_crashes(1, names=(name,))
    assert rule in {violation.invariant for violation in found}


def test_a_transaction_ends_once_and_its_half_message_is_never_seen() -> None:
    tally = store_campaigns.store_transactions(range(8))
    for sign in ("ended as 1", "ended as 2", "crash in retention", "segments deleted"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_a_send_tried_again_behind_a_crowd_and_a_rest_is_stored_once_or_refused() -> None:
    tally = store_campaigns.store_repeats(range(50))
    assert tally.fired["unsynced tail rewritten"], f"no power cut lost anything; {tally}"


def test_no_message_that_is_popped_has_two_holders_or_none() -> None:
    tally = store_campaigns.store_pops(range(10))
    for sign in ("delivered", "acked", "changed", "dead", "resets", "skipped", "segments", "restarts", "torn tail cut"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_nobody_gets_a_message_early_or_twice_or_one_that_was_recalled() -> None:
    tally = store_campaigns.store_delays(range(30))
    for sign in ("recalled", "too late", "kills", "power cuts", "crashed in the middle", "retained", "timer lost", "damage met"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_what_a_sync_master_answers_is_on_its_slaves_through_crashes_of_all() -> None:
    tally = store_campaigns.ha(range(24))
    for sign in ("SEND_OK", "SLAVE_NOT_AVAILABLE", "truncated", "master: power", "master: kill", "refused", "crash within a step"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_a_store_that_follows_has_its_leaders_bytes_and_answers_through_crashes_of_both() -> None:
    tally = store_campaigns.store_follow(range(40))
    for sign in ("torn tail cut", "log truncated", "unsynced tail rewritten"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_no_script_of_operations_faults_and_restarts_breaks_a_promise() -> None:
    tally = store_campaigns.store_machine((1,), rounds_each=40)
    for sign in ("torn tail cut", "unsynced tail rewritten"):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_messages_that_fail_are_retried_and_die_as_configured_whatever_ends_the_process() -> None:
    tally = store_campaigns.store_retries(range(1, 41))
    for sign in (
        "sent back",
        "delivered again",
        "dead",
        "replayed",
        "replayed before",
        "known when it was sent again",
        "done when it was sent again",
        "killed while messages were sent back",
    ):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"


def test_one_broker_leads_at_a_time_and_has_all_that_was_acknowledged() -> None:
    tally = store_campaigns.leadership(range(50))
    for sign in (
        "acknowledged",
        "acknowledged without a lease",
        "elected of several",
        "elected unclean",
        "returned",
        "etcd away",
        "etcd refuses",
        "suspend",
        "ahead of a restored etcd",
        "restored under brokers",
        "renewed by a late answer",
        "all logs were cut",
        "older copy found",
        "others traded places",
        "left alone",
    ):
        assert tally.fired[sign], f"never happened: {sign}; {tally}"
