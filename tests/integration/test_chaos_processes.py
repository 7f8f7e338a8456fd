"""The seeded part of the campaigns with real processes; the long form is `make chaos` (tests/chaos/)."""

from __future__ import annotations

import pytest

from tests.chaos import process_campaigns
from tests.chaos.failing_sync import why_no_shim
from tests.chaos.loop_disk import why_no_loop_disk

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def loop_disk() -> None:
    """Skips, visibly, where there can be no file system of our own."""
    reason = why_no_loop_disk()
    if reason:
        pytest.skip(reason)


def test_kill_9_under_load_loses_nothing_and_leaves_a_log_that_holds() -> None:
    counts = process_campaigns.kill((1,), rounds_each=2)
    assert counts["kills"] >= 2
    assert counts["sends ok"] > 50, counts


@pytest.mark.usefixtures("loop_disk")
def test_a_power_cut_loses_nothing_under_sync_flush_and_a_suffix_under_async_flush() -> None:
    assert process_campaigns.power((1, 2), rounds_each=1)["power cuts"] == 2


def test_retried_sends_through_a_faulty_proxy_are_stored_once() -> None:
    counts = process_campaigns.proxy((1,))
    assert counts["repeats recognised"], counts


@pytest.mark.usefixtures("loop_disk")
def test_a_full_disk_refuses_sends_and_takes_them_again_when_there_is_space() -> None:
    counts = process_campaigns.full_disk((1,))
    assert counts["full disks"] == 1, counts
    assert counts["sends ok"], counts
    assert counts["sends fail"], counts


@pytest.mark.skipif(bool(why_no_shim()), reason=why_no_shim())
def test_a_failed_fsync_stops_writes_for_good_and_says_so() -> None:
    counts = process_campaigns.failed_sync((1,))
    assert counts["failed syncs"] == 1, counts
    assert counts["sends ok"], counts


def test_damaged_files_are_refused_or_set_aside_and_nothing_wrong_is_served() -> None:
    counts = process_campaigns.damage((5, 10))
    assert counts["damaged logs verified"] >= 2, counts


def test_damaged_queues_of_a_running_broker_heal_without_a_restart() -> None:
    counts = process_campaigns.queue_damage((1,), rounds_each=1)
    assert counts["files healed"], counts


def test_a_second_broker_on_the_same_store_is_refused() -> None:
    assert process_campaigns.lock((1,))["second brokers refused"] == 2


def test_two_brokers_with_one_name_never_both_take_sends() -> None:
    assert process_campaigns.names((3,), rounds_each=5)["refused starts"]


def test_a_hostile_client_harms_nobody() -> None:
    counts = process_campaigns.hostile((1,))
    assert [name for name in counts if name.startswith("attack: ")], counts
    assert counts["sends ok"], counts
