"""deploy/compose/compose.yaml, started without a container engine: a host of its own for each service, with network, files and name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import compose_hosts

COMPOSE = Path(__file__).resolve().parents[2] / "deploy/compose/compose.yaml"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_compose_layout_starts_fails_over_and_loses_nothing(tmp_path: Path) -> None:
    assert compose_hosts.why_no_namespaces() == ""
    found = compose_hosts.in_namespaces(COMPOSE, tmp_path)
    assert found["hosts"] == ["broker-1", "broker-2", "broker-3", "etcd", "namesrv-1", "namesrv-2"]
    assert found["changed"], "the master's cable was pulled, and it leads still"
    assert found["numbers"] == list(range(2 * compose_hosts.MESSAGES)), "each message once"
    assert found["in_order"]
    assert found["exit_codes"] == [0]
