"""The rules of registration and liveness, on a clock that the tests move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protomq.v1.route_service_pb2 import Broker, GetRouteResponse, Route
from protomq.v1.topic_pb2 import Permission
from protomq_namesrv.config import LimitsConfig, LivenessConfig
from protomq_namesrv.route_snapshot import BrokerKey, Registration, TopicShare, Version
from protomq_namesrv.route_table import (
    CHANGED_TOPICS_MAX,
    PAUSE_SCANS,
    Removal,
    RemovalCause,
    RouteTable,
)
from protomq_runtime.errors import ServiceError
from tests.support.examples import examples

READ_WRITE = Permission.PERMISSION_READ_WRITE
LIVENESS = LivenessConfig()
A = BrokerKey("a", 0)


def registration(
    name: str = "a",
    broker_id: int = 0,
    *,
    incarnation: int = 100,
    store_id: int = 0,
    counter: int = 1,
    topics: dict[str, int] | None = None,
    permission: Permission.ValueType = READ_WRITE,
    topic_permission: Permission.ValueType = READ_WRITE,
    auto_create_queues: int = 0,
    epoch: int = 0,
    election_id: int = 0,
    port: int = 8081,
    cluster: str = "c",
) -> Registration:
    broker = Broker(
        cluster=cluster,
        broker_name=name,
        broker_id=broker_id,
        grpc_address=f"{name}:{port + broker_id}",
        incarnation=incarnation,
        store_id=store_id,
        permission=permission,
        auto_create_queues=auto_create_queues,
        epoch=epoch,
        election_id=election_id,
    )
    shares = {
        topic: TopicShare(queues, queues, topic_permission)
        for topic, queues in (topics or {}).items()
    }
    return Registration(broker, Version(counter, 0), shares)


def route_of(table: RouteTable, topic: str) -> Route | None:
    encoded = table.snapshot.encoded_route(topic)
    return None if encoded is None else GetRouteResponse.FromString(encoded).route


def queues_of(table: RouteTable, topic: str) -> dict[str, int]:
    route = route_of(table, topic)
    return (
        {} if route is None else {queue.broker_name: queue.write_queues for queue in route.queues}
    )


def keys_of(table: RouteTable) -> set[BrokerKey]:
    return {BrokerKey(one.broker_name, one.broker_id) for one in table.snapshot.cluster_info().brokers}


def scan_until(table: RouteTable, start_ms: int, end_ms: int) -> list[Removal]:
    """Scans as often as a name server does, so that no pause of its own is seen."""
    removals = list(table.remove_silent(start_ms))
    for now_ms in range(start_ms, end_ms, LIVENESS.scan_interval_ms):
        removals.extend(table.remove_silent(now_ms))
    removals.extend(table.remove_silent(end_ms))
    return removals


def reason_of(error: pytest.ExceptionInfo[ServiceError]) -> str:
    return error.value.reason


def names_missing(table: RouteTable, topic: str = "") -> list[str]:
    return [gone.broker.broker_name for gone in table.snapshot.cluster_info(topic).missing_brokers]


def test_registered_topics_have_routes_and_others_have_none() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 8}), 0)
    assert queues_of(table, "t") == {"a": 8}
    assert route_of(table, "u") is None


def test_a_broker_hears_of_its_topics_at_others_that_come_change_and_go_and_of_no_more() -> None:
    table, told = RouteTable(), list[BrokerKey]()
    table.on_changed_topics.append(told.append)
    table.register(registration("a", topics={"t": 8, "u": 8, "only_a": 1}), 0)
    table.register(registration("a", 1, topics={"t": 8, "u": 8}), 0)
    assert not told, "a slave is no other broker"

    def heard() -> list[str]:
        assert table.has_changed_topics(A) is (A in told)
        told.clear()
        return table.take_changed_topics(A)

    table.register(registration("b", topics={"t": 4, "only_b": 1}), 0)
    assert heard() == ["t"]
    table.register(registration("b", topics={"t": 4, "only_b": 1}), 0)
    assert heard() == []
    table.register(registration("b", counter=2, topics={"t": 4, "u": 1}), 0)
    assert heard() == ["u"]
    table.register(registration("b", counter=3, topics={"t": 8, "u": 1}), 0)
    assert heard() == ["t"]
    table.register(registration("b", counter=4, topics={"t": 8, "u": 1}, permission=Permission.PERMISSION_READ), 0)
    assert heard() == ["t", "u"]
    table.unregister(BrokerKey("b", 0), 100, 0)
    assert heard() == ["t", "u"]
    table.register(registration("b", incarnation=101, topics={"t": 8}), 0)
    assert heard() == ["t"]
    scan_until(table, 0, 60_000)
    table.heartbeat(A, 100, Version(1, 0), 60_000)
    scan_until(table, 60_000, 121_000)
    assert heard() == ["t"], "it was silent"


def test_what_a_broker_has_not_heard_when_it_goes_it_hears_no_more() -> None:
    table = RouteTable()
    table.register(registration("a", topics={"t": 8}), 0)
    table.register(registration("b", topics={"t": 8}), 0)
    table.unregister(A, 100, 0)
    table.register(registration("a", incarnation=101, topics={"t": 8}), 0)
    assert table.take_changed_topics(A) == []


def test_only_the_hold_that_a_broker_opened_last_hears_of_changed_topics() -> None:
    table = RouteTable()
    table.register(registration("a", topics={"t": 8}), 0)
    dead, newest = table.open_hold(A, 100, 0), table.open_hold(A, 100, 0)
    table.register(registration("b", topics={"t": 8}), 0)
    assert table.take_changed_topics(A, dead) == []
    table.end_hold(A, newest, 0, broken=False)
    assert table.take_changed_topics(A, dead) == [], "it is not the newest because that one was answered"
    assert table.take_changed_topics(A, newest) == ["t"]


def test_a_hold_of_an_earlier_start_hears_of_no_changed_topics() -> None:
    table = RouteTable()
    table.register(registration("a", topics={"t": 8}), 0)
    earlier = table.open_hold(A, 100, 0)
    table.register(registration("a", incarnation=101, topics={"t": 8}), 0)
    table.register(registration("b", topics={"t": 8}), 0)
    assert table.take_changed_topics(A, earlier) == []
    assert table.take_changed_topics(A, table.open_hold(A, 101, 0)) == ["t"]


def test_very_many_changed_topics_are_told_in_parts() -> None:
    table = RouteTable()
    topics = {f"t{number:04}": 1 for number in range(CHANGED_TOPICS_MAX + 1)}
    table.register(registration("a", topics=topics), 0)
    table.register(registration("b", topics=topics), 0)
    parts = [table.take_changed_topics(A) for _ in range(3)]
    assert [len(part) for part in parts] == [CHANGED_TOPICS_MAX, 1, 0]
    assert [topic for part in parts for topic in part] == list(topics)


def test_route_lists_every_broker_that_has_the_topic_with_its_addresses() -> None:
    table = RouteTable()
    table.register(registration("a", topics={"t": 8, "only_a": 1}), 0)
    table.register(registration("b", topics={"t": 4}), 0)
    route = route_of(table, "t")
    assert route is not None
    assert [(queue.broker_name, queue.write_queues) for queue in route.queues] == [
        ("a", 8),
        ("b", 4),
    ]
    assert [broker.grpc_address for broker in route.brokers] == ["a:8081", "b:8081"]
    only_a = route_of(table, "only_a")
    assert only_a is not None
    assert [broker.broker_name for broker in only_a.brokers] == ["a"]


def test_higher_incarnation_replaces_and_lower_one_is_refused() -> None:
    table = RouteTable()
    table.register(registration(incarnation=100, topics={"t": 1}), 0)
    table.register(registration(incarnation=101, counter=0, topics={"t": 2}), 1)
    with pytest.raises(ServiceError) as error:
        table.register(registration(incarnation=100, counter=9, topics={"t": 3}), 2)
    assert reason_of(error) == "STALE_REGISTRATION"
    assert queues_of(table, "t") == {"a": 2}


def test_a_removed_broker_is_missing_with_time_and_cause_until_it_is_back_or_forgotten() -> None:
    table = RouteTable()
    for name, topic in (("a", "t"), ("b", "t"), ("c", "u")):
        table.register(registration(name, topics={topic: 1}), 0)
    table.unregister(A, 100, 1, time_ms=1_700_000_000_000)
    table.remove_silent(LIVENESS.expiry_ms, time_ms=1_700_000_120_000)
    missing = table.snapshot.cluster_info().missing_brokers
    assert [(gone.broker.grpc_address, gone.removed_time.ToMilliseconds(), gone.cause) for gone in missing] == [
        ("a:8081", 1_700_000_000_000, "it was stopped"),
        ("b:8081", 1_700_000_120_000, "no heartbeat in time"),
        ("c:8081", 1_700_000_120_000, "no heartbeat in time"),
    ]  # fmt: skip
    assert names_missing(table, "t") == ["a", "b"]
    table.register(registration("b", incarnation=101, store_id=5), LIVENESS.expiry_ms)
    assert names_missing(table) == ["a", "c"]
    table.forget("a")
    assert names_missing(table) == ["c"]
    for name, why in (("a", "no broker a is missing"), ("b", "stop it first")):
        with pytest.raises(ServiceError, match=why) as error:
            table.forget(name)
        assert reason_of(error) == "BROKER_NOT_FOUND"


def test_nothing_is_missing_while_another_broker_of_the_name_is_there() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1}), 0)
    table.register(registration(broker_id=1, topics={"t": 1}), 0)
    table.unregister(A, 100, 1)
    assert names_missing(table) == []
    table.unregister(BrokerKey("a", 1), 100, 1)
    assert names_missing(table) == ["a"]


def test_nothing_is_missing_with_a_slave_that_never_followed() -> None:
    table = RouteTable()
    slave = BrokerKey("a", 1)
    table.register(registration(broker_id=1), 0)
    table.unregister(slave, 100, 1)
    assert names_missing(table) == []
    table.register(registration(broker_id=1, incarnation=200, topics={"t": 1}), 2)
    table.unregister(slave, 200, 3)
    assert names_missing(table) == ["a"]


def test_a_topic_that_no_slave_has_registered_yet_is_away_with_its_master() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1, "new": 1}), 0)
    table.register(registration(broker_id=1, topics={"t": 1}), 0)
    assert table.snapshot.names_away("new") == []
    table.unregister(A, 100, 1)
    assert route_of(table, "new") is None
    assert (table.snapshot.names_away("new"), table.snapshot.names_away("never made")) == (["a"], [])
    table.register(registration(broker_id=1, counter=2, topics={"t": 1, "new": 1}), 2)
    assert queues_of(table, "new").keys() == {"a"}
    # The next master has deleted it.
    table.register(registration(incarnation=101, topics={"t": 1}), 3)
    assert (queues_of(table, "new"), table.snapshot.names_away("new")) == ({}, [])


@pytest.mark.parametrize("of_slave", [{}, {"t": 1}])
def test_what_a_master_had_is_missing_when_its_last_slave_goes_too(of_slave: dict[str, int]) -> None:
    """The slave was started a moment before its master died, or could not follow it."""
    table = RouteTable()
    table.register(registration(topics={"t": 1, "new": 1}), 0)
    table.register(registration(broker_id=1, topics=of_slave), 0)
    table.unregister(A, 100, 1)
    table.unregister(BrokerKey("a", 1), 100, 2)
    assert names_missing(table) == names_missing(table, "t") == names_missing(table, "new") == ["a"]
    assert table.snapshot.names_away("new") == ["a"]
    table.forget("a")
    assert (names_missing(table), table.snapshot.names_away("new")) == ([], [])


def test_what_was_missing_is_away_while_an_empty_slave_has_the_name() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1}), 0)
    table.unregister(A, 100, 1)
    table.register(registration(broker_id=1), 2)
    assert (names_missing(table), table.snapshot.names_away("t")) == ([], ["a"])
    table.unregister(BrokerKey("a", 1), 100, 3)
    assert names_missing(table, "t") == ["a"]
    table.register(registration(incarnation=200), 4)  # another one took its place
    assert (names_missing(table), table.snapshot.names_away("t")) == ([], [])


def test_of_too_many_missing_brokers_the_longest_gone_are_dropped() -> None:
    table = RouteTable(limits=LimitsConfig(broker_count_max=2))
    for number, name in enumerate(("c", "a", "b")):
        table.register(registration(name), number)
        table.unregister(BrokerKey(name, 0), 100, number)
    assert names_missing(table) == ["a", "b"]


def test_a_name_stays_with_its_store_while_that_is_alive() -> None:
    table = RouteTable()
    table.register(registration(store_id=1, incarnation=100, topics={"t": 4}), 0)
    hold = table.open_hold(A, 100, 0, store_id=1)
    for incarnation in (99, 100, 200):
        calls: list[Callable[[], object]] = [
            lambda: table.register(registration(store_id=2, incarnation=incarnation), 10),  # noqa: B023
            lambda: table.heartbeat(A, incarnation, Version(1, 0), 10, store_id=2),  # noqa: B023
            lambda: table.open_hold(A, incarnation, 10, store_id=2),  # noqa: B023
        ]
        for call in calls:
            with pytest.raises(ServiceError, match="belongs to the broker at a:8081") as error:
                call()
            assert reason_of(error) == "NAME_TAKEN"
            assert error.value.retry_delay_ms is None  # it holds: nobody knows of an end
        assert not table.unregister(A, incarnation, 10, store_id=2)
    assert queues_of(table, "t") == {"a": 4}
    table.end_hold(A, hold, 20, broken=True)
    with pytest.raises(ServiceError) as error:
        table.register(registration(store_id=2), 20)
    assert error.value.retry_delay_ms == LIVENESS.broken_grace_ms
    scan_until(table, 20, 20 + LIVENESS.broken_grace_ms)
    table.register(registration(store_id=2, incarnation=1, topics={"u": 2}), 10_000)
    assert queues_of(table, "u") == {"a": 2}


def test_the_same_store_comes_back_at_once_though_its_old_hold_looks_alive() -> None:
    table = RouteTable()
    table.register(registration(store_id=1, incarnation=100), 0)
    table.open_hold(A, 100, 0, store_id=1)
    table.register(registration(store_id=1, incarnation=101, topics={"t": 1}), 5)
    assert queues_of(table, "t") == {"a": 1}
    with pytest.raises(ServiceError) as error:
        table.register(registration(store_id=1, incarnation=100), 6)
    assert reason_of(error) == "STALE_REGISTRATION"


def test_a_name_belongs_to_one_cluster() -> None:
    table = RouteTable()
    table.register(registration(store_id=1, epoch=1, topics={"t": 4}), 0)
    hold = table.open_hold(A, 100, 0, store_id=1)
    for broker_id in (0, 2):
        # An election in a cluster of its own counts its own epochs.
        stray = registration(broker_id=broker_id, store_id=2, epoch=7, cluster="d")
        with pytest.raises(ServiceError, match="a of cluster 'c' is registered here, at a:8081, and this one has cluster 'd'") as error:
            table.register(stray, 10)
        assert reason_of(error) == "NAME_TAKEN"
        assert error.value.retry_delay_ms is None  # it holds: nobody knows of an end
    assert queues_of(table, "t") == {"a": 4}
    table.register(registration("b", store_id=3, cluster="d"), 10)
    table.end_hold(A, hold, 20, broken=True)
    with pytest.raises(ServiceError) as error:
        table.register(registration(broker_id=2, store_id=2, cluster="d"), 20)
    assert error.value.retry_delay_ms == LIVENESS.broken_grace_ms
    scan_until(table, 20, 20 + LIVENESS.broken_grace_ms)
    table.register(registration(broker_id=2, store_id=2, cluster="d"), 10_000)


def test_a_broker_alone_may_come_back_with_another_cluster() -> None:
    table = RouteTable()
    table.register(registration(store_id=1, incarnation=100), 0)
    table.register(registration(store_id=1, incarnation=101, cluster="d", topics={"t": 1}), 5)
    assert queues_of(table, "t") == {"a": 1}


def held(**fields: Any) -> tuple[RouteTable, list[int]]:
    """A table with a broker that holds, and holds again when it is asked, at the time 0; its open hold."""
    table = RouteTable()
    table.register(registration(store_id=1, incarnation=100, topics={"t": 1}, **fields), 0)
    holds = [table.open_hold(A, 100, 0, store_id=1)]
    return table, holds


def taken(table: RouteTable, item: Registration, now_ms: int, *, is_returning: bool = False) -> int | None:
    """Refused for its name: when it may be free, if that is known."""
    with pytest.raises(ServiceError, match="a store of the same number") as error:
        table.register(item, now_ms, is_returning=is_returning)
    assert reason_of(error) == "NAME_TAKEN"
    return error.value.retry_delay_ms


def test_a_copy_of_a_running_store_does_not_get_the_name() -> None:
    table, holds = held()
    asked: list[BrokerKey] = []
    table.on_doubt = asked.append
    copy = registration(store_id=1, incarnation=200, port=9000, topics={"t": 2})
    for start_ms in (1_000, 50_000):
        assert taken(table, copy, start_ms) == LIVENESS.broken_grace_ms
        assert asked == [A]
        table.end_hold(A, holds.pop(), start_ms + 1, broken=False)
        assert taken(table, copy, start_ms + 2) == LIVENESS.broken_grace_ms - 2
        holds.append(table.open_hold(A, 100, start_ms + 3, store_id=1))
        assert taken(table, copy, start_ms + 4) is None
        assert asked == [A]
        asked.clear()
    assert queues_of(table, "t") == {"a": 1}
    assert not table.unregister(A, 99, 60_000, store_id=1)


@pytest.mark.parametrize(("name", "broker_id"), [("a", 4), ("b", 0)])
def test_a_copy_of_a_running_store_gets_no_other_id_or_name_either(name: str, broker_id: int) -> None:
    table, holds = held()
    asked: list[BrokerKey] = []
    table.on_doubt = asked.append
    copy = registration(name, broker_id, store_id=1, incarnation=200, port=9000)
    assert taken(table, copy, 1_000) == LIVENESS.broken_grace_ms
    assert asked == [A], "the first one is to call again"
    table.end_hold(A, holds[0], 1_001, broken=False)
    table.open_hold(A, 100, 1_002, store_id=1)
    assert taken(table, copy, 1_003) is None
    assert queues_of(table, "t") == {"a": 1}


def test_a_store_that_moves_to_another_id_has_it_as_soon_as_the_old_one_has_gone() -> None:
    table, holds = held()
    moved = registration(broker_id=4, store_id=1, incarnation=200, port=9000)
    taken(table, moved, 1)
    table.end_hold(A, holds[0], 1, broken=True)
    table.register(moved, 2)
    assert BrokerKey("a", 4) in keys_of(table)


def test_a_member_that_begins_to_lead_has_another_id_at_the_same_address() -> None:
    table = RouteTable()
    slave = registration(broker_id=3, store_id=1, port=8078)
    table.register(slave, 0)
    table.open_hold(BrokerKey("a", 3), 100, 0, store_id=1)
    table.register(registration(store_id=1, incarnation=101, epoch=2, election_id=9), 1)
    assert BrokerKey("a", 0) in keys_of(table)


def test_a_broker_that_returns_goes_before_its_copy_of_another_id() -> None:
    table = RouteTable()
    table.register(registration(broker_id=4, store_id=1, incarnation=200, port=9000), 0)
    table.open_hold(BrokerKey("a", 4), 200, 0, store_id=1)
    original = registration(store_id=1, incarnation=100, topics={"t": 1})
    table.register(original, 1_000, is_returning=True)
    assert BrokerKey("a", 4) not in table.snapshot.registrations
    table.open_hold(A, 100, 1_000, store_id=1)
    assert taken(table, registration(broker_id=4, store_id=1, incarnation=200, port=9000), 1_001) is not None


def test_a_copy_does_not_get_the_name_between_two_holds() -> None:
    table, holds = held()
    table.end_hold(A, holds[0], 10_000, broken=False)
    copy = registration(store_id=1, incarnation=200, port=9000)
    assert taken(table, copy, 10_001) == LIVENESS.broken_grace_ms
    table.open_hold(A, 100, 10_002, store_id=1)
    assert taken(table, copy, 10_003) is None


@pytest.mark.parametrize("is_asked", [False, True])
def test_the_same_store_comes_back_at_another_address_at_once_after_a_kill(is_asked: bool) -> None:
    table, holds = held()
    back = registration(store_id=1, incarnation=200, port=9000, topics={"t": 2})
    if is_asked:
        taken(table, back, 1)
    table.end_hold(A, holds[0], 2, broken=True)
    table.register(back, 3)
    assert queues_of(table, "t") == {"a": 2}


def test_the_same_store_comes_back_at_another_address_when_the_old_one_says_nothing() -> None:
    """Its machine has lost power: no connection broke."""
    table, holds = held()
    back = registration(store_id=1, incarnation=200, port=9000, topics={"t": 2})
    assert taken(table, back, 0) == LIVENESS.broken_grace_ms
    table.end_hold(A, holds[0], 1, broken=False)
    assert taken(table, back, LIVENESS.broken_grace_ms - 1) == 1
    table.register(back, LIVENESS.broken_grace_ms)
    assert queues_of(table, "t") == {"a": 2}


def test_a_broker_whose_copy_was_registered_for_a_while_gets_its_name_back_when_that_has_gone() -> None:
    table = RouteTable()
    table.register(registration(store_id=1, incarnation=200, port=9000), 0)
    table.open_hold(A, 200, 0, store_id=1)
    original = registration(store_id=1, incarnation=100, topics={"t": 1})
    assert taken(table, original, 20_000, is_returning=True) is None
    assert table.unregister(A, 200, 30_000, store_id=1)
    table.register(original, 30_001, is_returning=True)
    assert queues_of(table, "t") == {"a": 1}


def test_a_broker_that_returns_goes_before_its_copy_that_has_just_come() -> None:
    table = RouteTable()
    table.register(registration(store_id=1, incarnation=200, port=9000), 0)
    table.open_hold(A, 200, 0, store_id=1)
    original = registration(store_id=1, incarnation=100, topics={"t": 1})
    assert table.register(original, 1_000, is_returning=True)
    assert queues_of(table, "t") == {"a": 1}


def test_a_broker_that_returns_goes_before_one_that_has_just_come() -> None:
    """As after a restart of the name server, when a second broker of that name asks first."""
    table = RouteTable()
    table.register(registration(store_id=2, incarnation=200, topics={"t": 2}), 0)
    table.open_hold(A, 200, 0, store_id=2)
    back = registration(store_id=1, incarnation=100, topics={"t": 1})
    with pytest.raises(ServiceError):
        table.register(back, 1_000)
    table.register(back, 1_000, is_returning=True)
    assert queues_of(table, "t") == {"a": 1}
    with pytest.raises(ServiceError) as error:
        table.open_hold(A, 200, 2_000, store_id=2)
    assert reason_of(error) == "NAME_TAKEN"
    for other_too in (False, True):  # who had the name before has it for good
        with pytest.raises(ServiceError):
            table.register(
                registration(store_id=2, incarnation=300), 2_000, is_returning=other_too
            )


def test_a_broker_that_was_away_too_long_does_not_get_its_name_back() -> None:
    table = RouteTable()
    table.register(registration(store_id=2), 0)
    with pytest.raises(ServiceError) as error:
        table.register(registration(store_id=1), LIVENESS.newcomer_ms, is_returning=True)
    assert reason_of(error) == "NAME_TAKEN"


def test_heartbeat_and_hold_of_a_lower_incarnation_are_refused() -> None:
    table = RouteTable()
    table.register(registration(incarnation=100), 0)
    for attempt in (
        lambda: table.heartbeat(A, 99, Version(1, 0), 0),
        lambda: table.open_hold(A, 99, 0),
    ):
        with pytest.raises(ServiceError) as error:
            attempt()
        assert reason_of(error) == "STALE_REGISTRATION"


def test_older_topics_of_the_same_incarnation_do_not_replace_newer_ones() -> None:
    table = RouteTable()
    table.register(registration(counter=2, topics={"t": 2}), 0)
    table.register(registration(counter=1, topics={"t": 1}), 0)
    assert queues_of(table, "t") == {"a": 2}


def test_same_registration_again_publishes_nothing() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1}), 0)
    snapshot = table.snapshot
    table.register(registration(topics={"t": 1}), 30_000)
    assert table.snapshot is snapshot


def test_change_is_told_once_after_it_can_be_seen() -> None:
    table = RouteTable()
    seen: list[dict[str, int]] = []
    table.on_change = lambda: seen.append(queues_of(table, "t"))
    table.register(registration(topics={"t": 1}), 0)
    table.register(registration(topics={"t": 1}), 0)
    table.unregister(A, 100, 0)
    assert seen == [{"a": 1}, {}]


def test_a_snapshot_stays_as_it_was() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1}), 0)
    before = table.snapshot
    table.unregister(A, 100, 0)
    assert before.encoded_route("t") is not None
    assert list(before.topic_names) == ["t"]


def test_heartbeat_tells_unknown_and_outdated_brokers_to_register_again() -> None:
    table = RouteTable()
    assert table.heartbeat(A, 100, Version(1, 0), 0)
    table.register(registration(counter=1), 0)
    assert not table.heartbeat(A, 100, Version(1, 0), 0)
    assert table.heartbeat(A, 100, Version(2, 0), 0)
    assert table.heartbeat(A, 101, Version(1, 0), 0)


def test_broker_is_removed_when_no_heartbeat_comes_for_the_expiry() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1}), 0)
    assert scan_until(table, 0, 119_999) == []
    assert scan_until(table, 119_999, 120_000) == [Removal(A, RemovalCause.EXPIRED)]
    assert route_of(table, "t") is None


def test_heartbeats_keep_a_broker() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    for now_ms in range(0, 600_000, 30_000):
        assert scan_until(table, now_ms, now_ms + 30_000) == []
        table.heartbeat(A, 100, Version(1, 0), now_ms + 30_000)


def test_broken_hold_removes_the_broker_after_the_grace() -> None:
    table = RouteTable()
    table.register(registration(topics={"t": 1}), 0)
    hold = table.open_hold(A, 100, 0)
    table.end_hold(A, hold, 5_000, broken=True)
    assert scan_until(table, 5_000, 7_999) == []
    assert scan_until(table, 7_999, 8_000) == [Removal(A, RemovalCause.CONNECTION_BROKEN)]
    assert route_of(table, "t") is None


def test_new_hold_within_the_grace_keeps_the_broker() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    table.end_hold(A, table.open_hold(A, 100, 0), 0, broken=True)
    table.open_hold(A, 100, 2_900)
    assert scan_until(table, 0, 30_000) == []


def test_registering_again_after_a_break_gives_time_to_hold_again() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    table.end_hold(A, table.open_hold(A, 100, 0), 0, broken=True)
    table.register(registration(), 2_900)
    assert scan_until(table, 2_900, 5_800) == []
    assert scan_until(table, 5_800, 6_000) == [Removal(A, RemovalCause.CONNECTION_BROKEN)]


def test_answered_hold_has_to_be_renewed() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    table.end_hold(A, table.open_hold(A, 100, 0), 10_000, broken=False)
    assert scan_until(table, 10_000, 19_999) == []
    assert scan_until(table, 19_999, 20_000) == [Removal(A, RemovalCause.HOLD_NOT_RENEWED)]


def test_second_hold_outlives_the_break_of_the_first() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    first, second = table.open_hold(A, 100, 0), table.open_hold(A, 100, 0)
    table.end_hold(A, first, 0, broken=True)
    assert scan_until(table, 0, 60_000) == []
    table.end_hold(A, second, 60_000, broken=True)
    assert scan_until(table, 60_000, 63_000) == [Removal(A, RemovalCause.CONNECTION_BROKEN)]


def test_broken_hold_of_an_earlier_incarnation_does_not_touch_the_new_one() -> None:
    table = RouteTable()
    table.register(registration(incarnation=100), 0)
    old = table.open_hold(A, 100, 0)
    table.register(registration(incarnation=101), 1_000)
    table.end_hold(A, old, 1_001, broken=True)
    assert scan_until(table, 1_001, 60_000) == []


def test_hold_of_an_unknown_broker_is_refused() -> None:
    with pytest.raises(ServiceError) as error:
        RouteTable().open_hold(A, 100, 0)
    assert reason_of(error) == "BROKER_NOT_FOUND"


def test_pause_of_this_process_is_not_held_against_brokers() -> None:
    table = RouteTable()
    table.register(registration(), 0)
    table.end_hold(A, table.open_hold(A, 100, 0), 0, broken=False)
    table.remove_silent(0)
    assert table.remove_silent(600_000) == []
    table.open_hold(A, 100, 600_001)
    table.heartbeat(A, 100, Version(1, 0), 600_001)
    assert scan_until(table, 600_001, 700_000) == []


def test_pause_of_this_process_gives_a_name_to_no_copy() -> None:
    """The holder was asked to hold again, and could not be heard."""
    table, holds = held()
    table.remove_silent(0)
    copy = registration(store_id=1, incarnation=200, port=9000, topics={"t": 2})
    assert taken(table, copy, 1) == LIVENESS.broken_grace_ms
    table.end_hold(A, holds[0], 1, broken=False)
    assert taken(table, copy, 600_000) is not None
    table.remove_silent(600_000)
    table.open_hold(A, 100, 600_001, store_id=1)
    assert taken(table, copy, 600_002) is None
    assert queues_of(table, "t") == {"a": 1}


def test_pause_of_this_process_takes_no_name_from_who_had_it_before() -> None:
    table = RouteTable()
    table.remove_silent(0)
    table.register(registration(store_id=2, topics={"t": 2}), 0)
    table.register(registration(store_id=1, topics={"t": 1}), 600_000, is_returning=True)
    assert queues_of(table, "t") == {"a": 1}


def test_unregistered_broker_is_gone_and_a_late_register_does_not_bring_it_back() -> None:
    table = RouteTable()
    table.register(registration(incarnation=100, topics={"t": 1}), 0)
    assert table.unregister(A, 100, 1_000)
    with pytest.raises(ServiceError):
        table.register(registration(incarnation=100, topics={"t": 1}), 1_001)
    assert route_of(table, "t") is None
    table.register(registration(incarnation=101, topics={"t": 2}), 1_002)
    assert queues_of(table, "t") == {"a": 2}


def test_unregister_of_a_lower_incarnation_leaves_the_newer_one() -> None:
    table = RouteTable()
    table.register(registration(incarnation=101, topics={"t": 1}), 0)
    assert not table.unregister(A, 100, 0)
    assert queues_of(table, "t") == {"a": 1}


def test_broker_removed_for_silence_may_come_back_with_the_same_incarnation_only() -> None:
    table = RouteTable()
    table.register(registration(incarnation=100), 0)
    table.end_hold(A, table.open_hold(A, 100, 0), 0, broken=True)
    assert scan_until(table, 0, 3_000) != []
    with pytest.raises(ServiceError):
        table.register(registration(incarnation=99), 3_001)
    table.register(registration(incarnation=100, topics={"t": 1}), 3_002)
    assert queues_of(table, "t") == {"a": 1}


def test_clock_set_back_between_two_starts_locks_a_broker_out_for_the_expiry_only() -> None:
    table = RouteTable()
    table.register(registration(incarnation=100), 0)
    table.unregister(A, 100, 0)
    with pytest.raises(ServiceError):
        table.register(registration(incarnation=50), 119_999)
    table.register(registration(incarnation=50, topics={"t": 1}), 120_000)
    assert queues_of(table, "t") == {"a": 1}


def test_slaves_alone_can_be_read_only() -> None:
    table = RouteTable()
    table.register(registration(broker_id=0, topics={"t": 8}), 0)
    table.register(registration(broker_id=1, topics={"t": 8, "stale": 1}), 0)
    route = route_of(table, "t")
    assert route is not None
    assert [broker.broker_id for broker in route.brokers] == [0, 1]
    assert [queue.permission for queue in route.queues] == [READ_WRITE]
    assert route_of(table, "stale") is None, "the master speaks for the topics"
    table.unregister(A, 100, 0)
    route = route_of(table, "t")
    assert route is not None
    assert [queue.permission for queue in route.queues] == [Permission.PERMISSION_READ]


@pytest.mark.parametrize(
    ("broker", "topic", "both"),
    [
        (Permission.PERMISSION_UNSPECIFIED, Permission.PERMISSION_UNSPECIFIED, READ_WRITE),
        (Permission.PERMISSION_READ, Permission.PERMISSION_READ_WRITE, Permission.PERMISSION_READ),
        (Permission.PERMISSION_READ, Permission.PERMISSION_WRITE, Permission.PERMISSION_NONE),
        (READ_WRITE, Permission.PERMISSION_WRITE, Permission.PERMISSION_WRITE),
        (Permission.PERMISSION_NONE, READ_WRITE, Permission.PERMISSION_NONE),
    ],
)
def test_clients_may_do_what_topic_and_broker_both_allow(
    broker: Permission.ValueType, topic: Permission.ValueType, both: Permission.ValueType
) -> None:
    table = RouteTable()
    table.register(registration(permission=broker, topic_permission=topic, topics={"t": 1}), 0)
    route = route_of(table, "t")
    assert route is not None
    assert route.queues[0].permission == both


def test_auto_create_route_has_the_brokers_that_would_create_the_topic() -> None:
    table = RouteTable()
    table.register(registration("a", auto_create_queues=8), 0)
    table.register(registration("b", auto_create_queues=0), 0)
    table.register(
        registration("c", auto_create_queues=4, permission=Permission.PERMISSION_READ), 0
    )
    table.register(registration("d", 1, auto_create_queues=4), 0)
    route = table.snapshot.auto_create_route("new")
    assert route is not None
    assert route.auto_create
    assert [(queue.broker_name, queue.write_queues) for queue in route.queues] == [("a", 8)]
    assert route.topic == "new"


def test_no_auto_create_route_without_such_a_broker() -> None:
    table = RouteTable()
    table.register(registration("b", auto_create_queues=0), 0)
    assert table.snapshot.auto_create_route("new") is None


def test_topic_pages_cover_all_names_once_in_order() -> None:
    table = RouteTable()
    names = [f"t{index:03d}" for index in range(25)]
    table.register(registration("a", topics=dict.fromkeys(names[:15], 1)), 0)
    table.register(registration("b", topics=dict.fromkeys(names[10:], 1)), 0)
    collected: list[str] = []
    token = ""
    for _ in range(3):
        page, token = table.snapshot.topic_page(token, 10)
        collected.extend(page)
    assert token == ""
    assert collected == names


def test_more_brokers_than_the_limit_are_refused() -> None:
    table = RouteTable(limits=LimitsConfig(broker_count_max=1))
    table.register(registration("a"), 0)
    with pytest.raises(ServiceError) as error:
        table.register(registration("b"), 0)
    assert reason_of(error) == "TOO_MANY"
    table.register(registration("a", incarnation=101), 0)


class NaiveBroker:
    """A broker in the model: every rule written down as plainly as possible."""

    def __init__(self, incarnation: int, store: int, now_ms: int, newcomer_until_ms: int) -> None:
        self.incarnation = incarnation
        self.store = store
        self.newcomer_until_ms = newcomer_until_ms
        self.counter = 0
        self.topics: dict[str, int] = {}
        self.last_heard_ms = now_ms
        self.open_holds: set[int] = set()
        self.ever_held = False
        self.hold_deadline_ms = 0
        self.grace_ms = 0


class RouteTableMachine(RuleBasedStateMachine):
    """Random registrations, heartbeats, holds and time against the model above."""

    NAMES = st.sampled_from(["a", "b"])
    INCARNATIONS = st.integers(1, 2)
    STORES = st.sampled_from([7, 7, 7, 8])
    """Of each name; two names have no store in common."""
    TOPICS = st.dictionaries(st.sampled_from(["t", "u", "v"]), st.integers(1, 3))

    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable()
        self.now_ms = 0
        self.alive: dict[str, NaiveBroker] = {}
        self.stones: dict[str, tuple[int, int, int]] = {}
        self.holds: list[tuple[str, int]] = []
        self.missing: dict[str, dict[str, int]] = {}
        self.table.remove_silent(0)

    def is_refused(self, name: str, incarnation: int, store: int) -> bool:
        if name in self.alive:
            broker = self.alive[name]
            return store != broker.store or incarnation < broker.incarnation
        lowest, until_ms, removed_store = self.stones.get(name, (0, 0, 0))
        return self.now_ms < until_ms and store == removed_store and incarnation < lowest

    def remove(self, name: str, lowest: int) -> None:
        broker = self.alive.pop(name)
        self.stones[name] = (lowest, self.now_ms + LIVENESS.expiry_ms, broker.store)
        self.missing[name] = broker.topics

    def heard(self, name: str) -> None:
        broker = self.alive[name]
        broker.last_heard_ms = self.now_ms
        if broker.ever_held and not broker.open_holds:
            broker.hold_deadline_ms = max(broker.hold_deadline_ms, self.now_ms + broker.grace_ms)

    @rule(
        name=NAMES,
        incarnation=INCARNATIONS,
        store=STORES,
        counter=st.integers(0, 3),
        topics=TOPICS,
        returning=st.booleans(),
    )
    def register(
        self,
        name: str,
        incarnation: int,
        store: int,
        counter: int,
        topics: dict[str, int],
        returning: bool,
    ) -> None:
        store += 10 if name == "b" else 0
        item = registration(
            name, incarnation=incarnation, store_id=store, counter=counter, topics=topics
        )
        known = self.alive.get(name)
        if (
            returning
            and known is not None
            and known.store != store
            and self.now_ms < known.newcomer_until_ms
        ):
            self.remove(name, known.incarnation)
        if self.is_refused(name, incarnation, store):
            with pytest.raises(ServiceError):
                self.table.register(item, self.now_ms, is_returning=returning)
            return
        self.table.register(item, self.now_ms, is_returning=returning)
        self.missing.pop(name, None)
        if name not in self.alive or self.alive[name].incarnation < incarnation:
            newcomer_until_ms = self.now_ms if returning else self.now_ms + LIVENESS.newcomer_ms
            self.alive[name] = NaiveBroker(incarnation, store, self.now_ms, newcomer_until_ms)
        self.heard(name)
        if counter >= self.alive[name].counter:
            self.alive[name].counter = counter
            self.alive[name].topics = topics

    @rule(name=NAMES, incarnation=INCARNATIONS, store=STORES)
    def unregister(self, name: str, incarnation: int, store: int) -> None:
        store += 10 if name == "b" else 0
        done = self.table.unregister(BrokerKey(name, 0), incarnation, self.now_ms, store_id=store)
        known = self.alive.get(name)
        assert done == (
            known is not None and known.store == store and known.incarnation <= incarnation
        )
        if done:
            self.remove(name, incarnation + 1)

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        if self.missing.pop(name, None) is not None:
            self.table.forget(name)
            return
        with pytest.raises(ServiceError):
            self.table.forget(name)

    @rule(name=NAMES, incarnation=INCARNATIONS, store=STORES, counter=st.integers(0, 3))
    def heartbeat(self, name: str, incarnation: int, store: int, counter: int) -> None:
        store += 10 if name == "b" else 0
        key, version = BrokerKey(name, 0), Version(counter, 0)
        if self.is_refused(name, incarnation, store):
            with pytest.raises(ServiceError):
                self.table.heartbeat(key, incarnation, version, self.now_ms, store_id=store)
            return
        again = self.table.heartbeat(key, incarnation, version, self.now_ms, store_id=store)
        known = name in self.alive and self.alive[name].incarnation == incarnation
        assert again == (not known or self.alive[name].counter != counter)
        if known:
            self.heard(name)

    @rule(name=NAMES, incarnation=INCARNATIONS, store=STORES)
    def open_stray_hold(self, name: str, incarnation: int, store: int) -> None:
        store += 10 if name == "b" else 0
        known = self.alive.get(name)
        if known is None or (known.incarnation, known.store) != (incarnation, store):
            with pytest.raises(ServiceError):
                self.table.open_hold(
                    BrokerKey(name, 0), incarnation, self.now_ms, store_id=store
                )

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def open_hold(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        broker = self.alive[name]
        hold = self.table.open_hold(
            BrokerKey(name, 0), broker.incarnation, self.now_ms, store_id=broker.store
        )
        self.holds.append((name, hold))
        broker.open_holds.add(hold)
        broker.ever_held = True

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), broken=st.booleans())
    def end_hold(self, data: st.DataObject, broken: bool) -> None:
        name, hold = data.draw(st.sampled_from(self.holds))
        self.holds.remove((name, hold))
        self.table.end_hold(BrokerKey(name, 0), hold, self.now_ms, broken=broken)
        broker = self.alive.get(name)
        if broker is not None and hold in broker.open_holds:
            broker.open_holds.remove(hold)
            if not broker.open_holds:
                broker.grace_ms = LIVENESS.broken_grace_ms if broken else LIVENESS.renewal_grace_ms
                broker.hold_deadline_ms = self.now_ms + broker.grace_ms

    @rule(scans=st.integers(1, 8), step_ms=st.sampled_from([1, 500, 1_000]))
    def pass_seconds(self, scans: int, step_ms: int) -> None:
        self.pass_time(scans, step_ms)

    @rule(scans=st.integers(60, 130))
    def pass_minutes(self, scans: int) -> None:
        self.pass_time(scans, 1_000)

    def pass_time(self, scans: int, step_ms: int) -> None:
        for _ in range(scans):
            self.now_ms += step_ms
            self.table.remove_silent(self.now_ms)
            self.remove_overdue()

    @rule(pause_ms=st.integers(PAUSE_SCANS * LIVENESS.scan_interval_ms + 1, 200_000))
    def be_paused(self, pause_ms: int) -> None:
        self.now_ms += pause_ms
        for broker in self.alive.values():
            broker.last_heard_ms += pause_ms
            broker.hold_deadline_ms += pause_ms
            broker.newcomer_until_ms += pause_ms
        self.table.remove_silent(self.now_ms)
        self.remove_overdue()

    def remove_overdue(self) -> None:
        for name, broker in list(self.alive.items()):
            expired = self.now_ms - broker.last_heard_ms >= LIVENESS.expiry_ms
            unheld = (
                broker.ever_held
                and not broker.open_holds
                and self.now_ms >= broker.hold_deadline_ms
            )
            if expired or unheld:
                self.remove(name, broker.incarnation)

    @invariant()
    def routes_are_those_of_the_model(self) -> None:
        for topic in ("t", "u", "v"):
            expected = {
                name: broker.topics[topic]
                for name, broker in self.alive.items()
                if topic in broker.topics
            }
            assert queues_of(self.table, topic) == expected

    @invariant()
    def the_missing_are_those_of_the_model(self) -> None:
        assert names_missing(self.table) == sorted(self.missing)
        for topic in ("t", "u", "v"):
            expected = sorted(name for name, topics in self.missing.items() if topic in topics)
            assert names_missing(self.table, topic) == expected

    @invariant()
    def names_are_those_of_the_model(self) -> None:
        expected = sorted({topic for broker in self.alive.values() for topic in broker.topics})
        assert list(self.table.snapshot.topic_names) == expected


RouteTableMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
test_table_agrees_with_a_naive_model = pytest.mark.slow(RouteTableMachine.TestCase)


def test_the_name_goes_to_the_master_of_the_later_election_however_alive_the_other_is() -> None:
    table = RouteTable(LIVENESS)
    table.register(registration(incarnation=200, store_id=1, epoch=4), 0)
    table.open_hold(A, 200, 0, store_id=1)
    assert table.register(registration(incarnation=100, store_id=2, epoch=5), 10)
    assert not table.heartbeat(A, 100, Version(1, 0), 20, store_id=2), "it is known"
    for call in (
        lambda: table.register(registration(incarnation=300, store_id=1, epoch=4), 20),
        lambda: table.register(
            registration(incarnation=300, store_id=1, epoch=4), 20, is_returning=True
        ),
        lambda: table.heartbeat(A, 200, Version(1, 0), 20, store_id=1),
    ):
        with pytest.raises(ServiceError) as error:
            call()
        assert error.value.reason == "NAME_TAKEN"


def test_a_master_without_an_epoch_loses_its_name_to_no_epoch() -> None:
    table = RouteTable(LIVENESS)
    table.register(registration(store_id=1), 0)
    with pytest.raises(ServiceError):
        table.register(registration(store_id=2, epoch=9), 10)


def elected(store_id: int, election_id: int, *, broker_id: int = 0, epoch: int = 0, incarnation: int = 100) -> Registration:
    """At an address of its own, whatever its id."""
    port = 8_080 + store_id - broker_id
    return registration(store_id=store_id, election_id=election_id, broker_id=broker_id, epoch=epoch, incarnation=incarnation, port=port)


def with_a_cluster() -> RouteTable:
    """Election 7 has led a in epoch 1: its master holds, its slave has the id 2."""
    table = RouteTable(LIVENESS)
    table.register(elected(1, 7, epoch=1), 0)
    table.open_hold(A, 100, 0, store_id=1)
    table.register(elected(2, 7, broker_id=2), 0)
    return table


def stores_of(table: RouteTable) -> dict[int, int]:
    return {key.broker_id: each.broker.store_id for key, each in table.snapshot.registrations.items()}


@pytest.mark.parametrize(("broker_id", "epoch"), [(0, 5), (2, 0), (3, 0)])
@pytest.mark.parametrize("now_ms", [10, LIVENESS.newcomer_ms + 10])
def test_epochs_of_two_elections_have_nothing_to_do_with_each_other(broker_id: int, epoch: int, now_ms: int) -> None:
    table = with_a_cluster()
    stray = elected(9, 8, broker_id=broker_id, epoch=epoch)
    with pytest.raises(ServiceError, match=r"is at a:8081, and is alive\. Is etcd\.endpoints or etcd\.prefix wrong") as error:
        table.register(stray, now_ms)
    assert (reason_of(error), error.value.retry_delay_ms) == ("NAME_TAKEN", None)
    assert stores_of(table) == {0: 1, 2: 2}


def test_epochs_of_one_election_decide_who_has_the_name() -> None:
    table = with_a_cluster()
    assert table.register(elected(3, 7, epoch=2), 10)
    assert stores_of(table) == {0: 3, 2: 2}


@pytest.mark.parametrize(("known", "new"), [(0, 8), (7, 0)])
def test_a_broker_that_names_no_election_is_compared_by_its_epoch(known: int, new: int) -> None:
    """It is one of an earlier version."""
    table = RouteTable(LIVENESS)
    table.register(elected(1, known, epoch=1), 0)
    assert table.register(elected(2, new, epoch=2), 10)


def test_a_broker_that_names_its_election_late_is_refused_all_the_same() -> None:
    """It could not ask etcd before."""
    table = with_a_cluster()
    table.register(elected(9, 0, broker_id=3), 10)
    with pytest.raises(ServiceError, match=r"etcd\.prefix wrong"):
        table.register(elected(9, 8, broker_id=3), 20, is_returning=True)


def test_another_election_gets_the_name_of_one_that_is_gone() -> None:
    table = with_a_cluster()
    table.unregister(BrokerKey("a", 2), 100, 10, store_id=2)
    hold = table.open_hold(A, 100, 10, store_id=1)
    table.end_hold(A, hold, 20, broken=True)
    table.end_hold(A, hold - 1, 20, broken=True)
    with pytest.raises(ServiceError, match="is given up in 2990 ms") as error:
        table.register(elected(9, 8, epoch=1), 30)
    assert error.value.retry_delay_ms == 2_990
    scan_until(table, 30, 3_020)
    table.register(elected(9, 8, epoch=1), 3_030)
    assert stores_of(table) == {0: 9}


def test_members_whose_etcd_has_lost_its_data_keep_their_name_one_by_one() -> None:
    """Its master ends its lead then, and one of its slaves leads by an order."""
    table = with_a_cluster()
    table.register(elected(4, 7, broker_id=4), 0)
    table.unregister(A, 100, 10, store_id=1)
    table.register(elected(2, 8, broker_id=2), 20, is_returning=True)
    master = elected(2, 8, epoch=2, incarnation=102)
    with pytest.raises(ServiceError, match=r"etcd\.prefix wrong"):
        table.register(master, 30)  # it leads already, and one has not read etcd yet
    table.register(elected(4, 8, broker_id=4), 40, is_returning=True)
    table.register(master, 50)
    assert stores_of(table) == {0: 2, 2: 2, 4: 4}


def test_a_restart_in_another_election_is_no_move_of_its_etcd() -> None:
    table = with_a_cluster()
    with pytest.raises(ServiceError, match=r"etcd\.prefix wrong"):
        table.register(elected(2, 8, broker_id=2, incarnation=101), 10)


def test_who_had_the_name_sends_newcomers_of_another_election_away() -> None:
    """The name server was started again, and a broker that it has refused before asks first."""
    table, doubts = RouteTable(LIVENESS), list[BrokerKey]()
    table.on_doubt = doubts.append
    table.register(elected(9, 8, broker_id=3), 0)
    table.register(elected(8, 8, epoch=5), 0)
    table.register(elected(1, 7, epoch=1), 10, is_returning=True)
    table.register(elected(2, 7, broker_id=2), 20, is_returning=True)
    assert stores_of(table) == {0: 1, 2: 2}
    assert set(doubts) == {A, BrokerKey("a", 3)}
    with pytest.raises(ServiceError, match=r"etcd\.prefix wrong"):
        table.register(elected(9, 8, broker_id=3), 30)


def test_who_had_the_name_does_not_get_it_back_from_another_election_that_has_it_since_long() -> None:
    table = with_a_cluster()
    with pytest.raises(ServiceError, match=r"etcd\.prefix wrong"):
        table.register(elected(9, 8, broker_id=3), LIVENESS.newcomer_ms, is_returning=True)


@pytest.mark.parametrize(("broker_id", "epoch"), [(0, 5), (3, 0)])
def test_a_master_with_a_fixed_role_shares_its_name_with_no_election(broker_id: int, epoch: int) -> None:
    table = RouteTable(LIVENESS)
    table.register(registration(store_id=1), 0)
    table.open_hold(A, 100, 0, store_id=1)
    table.register(registration(store_id=2, broker_id=1), 0)
    with pytest.raises(ServiceError, match=r"master with a fixed role.* \(id 0\) is at a:8081, and is alive\. Either all") as error:
        table.register(elected(9, 8, broker_id=broker_id, epoch=epoch), LIVENESS.newcomer_ms)
    assert reason_of(error) == "NAME_TAKEN"
    assert stores_of(table) == {0: 1, 1: 2}


def test_a_master_with_a_fixed_role_does_not_get_the_name_of_an_election_that_has_no_master_now() -> None:
    table = with_a_cluster()
    table.unregister(A, 100, 10, store_id=1)
    with pytest.raises(ServiceError, match=r"elect their master in etcd, and this one has a fixed role\. One of them \(id 2\)"):
        table.register(registration(store_id=9), 20)
    table.register(elected(3, 7, epoch=2), 30)
    assert stores_of(table) == {0: 3, 2: 2}


def test_a_store_that_had_a_fixed_role_may_come_back_with_an_election() -> None:
    table = RouteTable(LIVENESS)
    table.register(registration(store_id=1), 0)
    table.register(elected(1, 7, broker_id=1, incarnation=101), 10)
    table.register(elected(1, 7, epoch=3, incarnation=102), 20)
    assert stores_of(table) == {0: 1, 1: 1}
