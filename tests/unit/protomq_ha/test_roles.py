"""Numbers of replication that make no sense are refused, with their names."""

from __future__ import annotations

import pytest

from protomq_ha.roles import BrokerRole, HaConfig


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"in_sync_replicas": 0}, "in_sync_replicas is 0; it must be 1 to 16"),
        ({"min_in_sync_replicas": 3}, "min_in_sync_replicas is 3; it must be 1 to 2"),
        ({"sync_timeout_ms": 0}, "sync_timeout_ms must be above 0"),
        ({"timeout_ms": 9_999}, "at least two heartbeats, 10000"),
        ({"transfer_size_bytes": 100}, "transfer_size_bytes is 100"),
    ],
)
def test_what_is_refused(settings: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        HaConfig(**settings)  # type: ignore[arg-type]


def test_roles_have_their_names_in_rocketmq() -> None:
    assert BrokerRole.named("SYNC_MASTER") is BrokerRole.SYNC_MASTER
    with pytest.raises(ValueError, match="ASYNC_MASTER, SYNC_MASTER, SLAVE"):
        BrokerRole.named("slave")
