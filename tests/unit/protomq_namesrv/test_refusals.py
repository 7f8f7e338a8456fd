"""Whom a name server refuses: it is told for some minutes, within bounds, until it registers."""

from __future__ import annotations

import pytest

from protomq.v1.route_service_pb2 import Broker
from protomq_namesrv.config import LimitsConfig
from protomq_namesrv.refusals import ADDRESS_MAX, CAUSE_MAX, COUNT_MAX, EXPIRY_MS, Refusals
from protomq_namesrv.route_table import RouteTable
from protomq_runtime.errors import Code, ServiceError

from .test_route_table import registration

TAKEN = ServiceError(Code.FAILED_PRECONDITION, "NAME_TAKEN", "it is taken")


def refused_by(table: RouteTable, now_ms: int = 0) -> list[tuple[str, int, str, str]]:
    return [
        (each.broker.broker_name, each.broker.broker_id, each.broker.grpc_address, each.reason) for each in table.refusals.all(now_ms)
    ]


def test_each_way_to_be_refused_is_told_with_its_reason_until_the_broker_registers() -> None:
    table = RouteTable(limits=LimitsConfig(broker_count_max=3))
    table.register(registration("a", store_id=1, incarnation=100), 0)
    table.register(registration("e", 1, store_id=2, election_id=7), 0)
    refused = [
        registration("a", store_id=3, port=1),  # another store
        registration("a", 1, store_id=3, port=2, cluster="other"),
        registration("e", 2, store_id=4, port=3, election_id=8),
    ]
    for each in refused:
        with pytest.raises(ServiceError, match=r"belongs|is registered here"):
            table.register(each, 0, time_ms=1_700_000_000_000)
    with pytest.raises(ServiceError, match="later start"):
        table.register(registration("a", store_id=1, incarnation=99), 0)
    table.register(registration("f", store_id=5), 0)
    with pytest.raises(ServiceError, match="the most this name server takes"):
        table.register(registration("g", store_id=6), 0)
    assert refused_by(table) == [
        ("a", 0, "a:8081", "STALE_REGISTRATION"),
        ("a", 0, "a:1", "NAME_TAKEN"),
        ("a", 1, "a:3", "NAME_TAKEN"),
        ("e", 2, "e:5", "NAME_TAKEN"),
        ("g", 0, "g:8081", "TOO_MANY"),
    ]
    first = table.refusals.all(0)[1]
    assert first.refused_time.ToMilliseconds() == 1_700_000_000_000
    assert first.cause.startswith("the name a (id 0) belongs to the broker at a:8081, which has another store")
    table.unregister(registration("f").key, 100, 0, store_id=5)
    table.register(registration("g", store_id=6), 0)
    # It has been given another name.
    table.unregister(registration("g").key, 100, 0, store_id=6)
    renamed = registration("h", store_id=3)
    renamed.broker.grpc_address = "a:1"
    table.register(renamed, 0)
    assert [each[:2] for each in refused_by(table)] == [("a", 0), ("a", 1), ("e", 2)]
    assert refused_by(table)[0][3] == "STALE_REGISTRATION"


def test_a_refusal_is_told_for_some_minutes_after_the_last_time() -> None:
    refusals, broker = Refusals(), Broker(broker_name="a", grpc_address="a:1")
    refusals.note(broker, TAKEN, 0, 1_000)
    refusals.note(broker, TAKEN, 3_000, 4_000)
    (refused,) = refusals.all(EXPIRY_MS + 2_999)
    assert refused.refused_time.ToMilliseconds() == 4_000
    assert refusals.all(EXPIRY_MS + 3_000) == []


@pytest.mark.parametrize(
    ("store_id", "incarnation", "is_over"),
    [
        (7, 100, False),  # The original, which was there before, says once more that it is there.
        (7, 200, False),
        (7, 999, False),  # A copy that had the name by then: the original still asks, or has ended, and operators have to know.
        (7, 1_001, True),
        (8, 1_001, False),
        (0, 1_001, False),  # An earlier version tells no store.
    ],
)
def test_a_later_start_of_a_refused_store_at_another_address_ends_its_refusal(store_id: int, incarnation: int, *, is_over: bool) -> None:
    """Whoever is refused still asks again within seconds, and is told again."""
    refusals = Refusals()
    refused = Broker(broker_name="a", broker_id=1, store_id=7, incarnation=200, grpc_address="a:1")
    refusals.note(refused, TAKEN, 0, 1_000)
    refusals.note(Broker(broker_name="b", incarnation=200, grpc_address="b:1"), TAKEN, 0, 1_000)
    refusals.settle(Broker(broker_name="a", broker_id=1, store_id=store_id, incarnation=incarnation, grpc_address="a:9"))
    assert [each.broker.broker_name for each in refusals.all(0)] == (["b"] if is_over else ["a", "b"])
    refusals.note(refused, TAKEN, 0, 2_000)
    assert len(refusals.all(0)) == 2


def test_forged_registrations_fill_no_memory() -> None:
    """The newest ones stay, and of each only so much."""
    refusals = Refusals()
    long = Broker(grpc_address="a" * 10_000 + ":1", remoting_address="b" * 10_000)
    unknown_field = b"\xfa\x7f\xff\x7f" + b"x" * 16_383
    forged = Broker.FromString(long.SerializeToString() + unknown_field)
    for number in range(2 * COUNT_MAX):
        forged.broker_name, forged.store_id = f"n{number:03}", number
        refusals.note(forged, ServiceError(Code.FAILED_PRECONDITION, "NAME_TAKEN", "c" * 10_000), 0, 0)
    kept = refusals.all(0)
    assert [each.broker.store_id for each in kept] == list(range(COUNT_MAX, 2 * COUNT_MAX))
    assert all(each.ByteSize() < 2 * ADDRESS_MAX + CAUSE_MAX + 100 for each in kept)
