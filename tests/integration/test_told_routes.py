"""A topic gets another broker: name servers tell brokers, and these their members, who need not ask every few seconds. Real processes."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from protomq import Admin, PullConsumer
from protomq._membership_logic import MembershipState
from protomq._routes import ROUTE_FRESH_S
from tests.support.named_brokers import running
from tests.support.namesrv import running_namesrv
from tests.support.waiting import PATIENCE_S, fastest_s

REBALANCE_S = 1.0
LONG_S = 5.0
"""A member that looks by itself does so earlier."""


@pytest.mark.parametrize("port", ["grpc", "remoting"])
def test_a_member_has_the_queues_of_a_new_broker_within_a_second_without_looking_for_it(tmp_path: Path, port: str) -> None:
    with (
        running_namesrv(hold=60_000, expiry=120_000) as namesrv,
        running(tmp_path / "a", getattr(namesrv, port), broker_name="a"),
        running(tmp_path / "b", getattr(namesrv, port), broker_name="b"),
        Admin(namesrv=str(namesrv.remoting)) as admin,
    ):
        numbers = itertools.count()

        def spread() -> float:
            topic = f"t{next(numbers)}"
            admin.create_topic(topic, write_queues=2, read_queues=2, brokers=["a"])
            with PullConsumer("g", namesrv=str(getattr(namesrv, port)), transport=port) as member:  # type: ignore[arg-type]
                member.subscribe(topic)
                ends_s = time.monotonic() + PATIENCE_S
                while len(member.assignment()) < 2 or member._steps._route_looks.due_in_s(time.monotonic()) < LONG_S:
                    assert time.monotonic() < ends_s, "it goes on looking by itself"
                    member.poll(0.02)
                began_s = time.monotonic()
                admin.create_topic(topic, write_queues=2, read_queues=2, brokers=["b"])
                while {queue.broker_name for queue in member.assignment()} != {"a", "b"}:
                    assert time.monotonic() < ends_s
                    member.poll(0.02)
                return time.monotonic() - began_s

        assert fastest_s(spread, REBALANCE_S) < REBALANCE_S


def test_a_member_has_the_queues_of_a_broker_that_gets_the_topic_just_before_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        running_namesrv(hold=60_000, expiry=120_000) as namesrv,
        running(tmp_path / "a", namesrv.remoting, broker_name="a"),
        running(tmp_path / "b", namesrv.remoting, broker_name="b"),
        Admin(namesrv=str(namesrv.remoting)) as admin,
    ):
        admin.create_topic("t", write_queues=2, read_queues=2, brokers=["a"])
        before_joining = [lambda: admin.create_topic("t", write_queues=2, read_queues=2, brokers=["b"])]
        want = MembershipState.want

        def spread_and_want(state: MembershipState, *arguments: Any) -> None:
            """The member has looked its route up, and has called nobody yet."""
            for spread in before_joining:
                spread()
            before_joining.clear()
            want(state, *arguments)

        monkeypatch.setattr(MembershipState, "want", spread_and_want)
        with PullConsumer("g", namesrv=str(namesrv.remoting)) as member:
            member.subscribe("t")
            assert not before_joining
            ends_s = time.monotonic() + ROUTE_FRESH_S / 2
            while {queue.broker_name for queue in member.assignment()} != {"a", "b"}:
                assert time.monotonic() < ends_s, "it waits for its next look-up"
                member.poll(0.02)
