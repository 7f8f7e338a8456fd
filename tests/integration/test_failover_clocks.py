"""The lead changes between brokers whose wall clocks are an hour apart: what has a time comes when it is due, not an hour early or late."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from protomq import Admin, Message, MessageQueue, Producer, PullConsumer, SimpleConsumer
from tests.chaos.stepped_clock import SteppedClock
from tests.support.elected_brokers import elected_cluster
from tests.support.ha_brokers import NAME, TOPIC
from tests.support.polling import polled
from tests.support.waiting import PATIENCE_S, wait_for

HOUR_S = 3_600.0
DELAY_S = 6.0
EARLY_MAX_S = 1.0
"""Log time follows a wall clock that is off, by a tenth."""
LATE_MAX_S = 15.0
"""For the change of the lead, on a busy machine."""


def received(popper: SimpleConsumer) -> list[Message]:
    """What is visible again."""
    found: list[Message] = []

    def has_some() -> bool:
        found.extend(popper.receive("parcels", 1, invisible_s=PATIENCE_S, hold_s=1))
        return bool(found)

    wait_for(has_some, PATIENCE_S, pause_s=0.0)
    return found


def test_delays_and_invisible_times_go_on_at_a_master_whose_clock_is_an_hour_off(tmp_path: Path) -> None:
    clocks = [SteppedClock(tmp_path / f"clock-{number}") for number in range(2)]
    clocks[1].set(HOUR_S)
    queue = MessageQueue(TOPIC, NAME, 0)
    with elected_cluster(tmp_path, count=2, environments=[clock.environment for clock in clocks], pop_invisible_min_ms=100) as cluster:
        way: dict[str, Any] = {"namesrv": cluster.namesrv}
        with (
            Admin(**way) as admin,
            Producer(send_timeout_s=PATIENCE_S, **way) as producer,
            PullConsumer("g", request_timeout_s=PATIENCE_S, **way) as consumer,
            SimpleConsumer("poppers", request_timeout_s=PATIENCE_S, **way) as popper,
        ):
            admin.create_topic("parcels", write_queues=1, read_queues=1)
            consumer.assign([queue])
            consumer.seek_to_end()
            # From each of them to the other one.
            for turn in (b"first", b"second"):
                old = cluster.wait_leading(2)
                producer.send("parcels", turn)
                begun_s = time.monotonic()
                assert [each.body for each in popper.receive("parcels", 1, invisible_s=DELAY_S)] == [turn]
                producer.send(TOPIC, turn, queue=queue, delay=DELAY_S)
                admin.switch_master(NAME)
                assert cluster.wait_leading(2) is not old
                assert [each.body for each in polled(consumer, 1)] == [turn]
                delayed_s = time.monotonic() - begun_s
                (again,) = received(popper)
                invisible_s = time.monotonic() - begun_s
                popper.ack(again)
                assert again.body == turn
                assert DELAY_S - EARLY_MAX_S <= delayed_s <= DELAY_S + LATE_MAX_S
                assert DELAY_S - EARLY_MAX_S <= invisible_s <= DELAY_S + LATE_MAX_S
