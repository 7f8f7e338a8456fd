"""A lane ends in one order, and no later than its time."""

from __future__ import annotations

import pytest

from protomq_runtime.errors import SHUTTING_DOWN, system_busy
from protomq_runtime.lane_shutdown import LaneShutdown, Stage


def test_a_lane_serves_then_refuses_then_finishes_then_is_over() -> None:
    shutdown = LaneShutdown()
    stages = [shutdown.stage]
    shutdown.refuse(SHUTTING_DOWN)
    stages.append(shutdown.stage)
    shutdown.finish(10)
    stages.append(shutdown.stage)
    shutdown.end_if(True, 5)
    stages.append(shutdown.stage)
    assert stages == [Stage.SERVING, Stage.REFUSING, Stage.FINISHING, Stage.OVER]
    assert shutdown.refusal is SHUTTING_DOWN


def test_what_is_left_to_do_is_waited_for_until_the_time_is_up() -> None:
    shutdown = LaneShutdown()
    shutdown.refuse(SHUTTING_DOWN)
    shutdown.finish(10)
    stages = []
    for now in (9.9, 10):
        shutdown.end_if(False, now)
        stages.append(shutdown.stage)
    assert stages == [Stage.FINISHING, Stage.OVER]


def test_the_first_refusal_counts() -> None:
    shutdown = LaneShutdown()
    shutdown.refuse(SHUTTING_DOWN)
    shutdown.refuse(system_busy("send", 1))
    assert shutdown.refusal is SHUTTING_DOWN


def test_a_step_out_of_order_is_a_defect_that_changes_nothing() -> None:
    shutdown = LaneShutdown()
    with pytest.raises(AssertionError, match="SERVING cannot finish"):
        shutdown.finish(1)
    with pytest.raises(AssertionError, match="SERVING does not end"):
        shutdown.end_if(True, 1)
    assert (shutdown.stage, shutdown.refusal, shutdown.finish_by) == (Stage.SERVING, None, None)
