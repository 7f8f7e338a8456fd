"""A broker's configuration is judged before anything is made."""

from __future__ import annotations

from typing import Any

import pytest

from protomq_broker.config import BrokerConfig, LaneSizes
from protomq_runtime.addresses import Address


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"namesrv": ("localhost",)}, "namesrv: 'localhost' has no port"),
        ({"namesrv": ("a:1;b",)}, "namesrv: 'b' has no port"),
        ({"namesrv": ("http://h:1",)}, "namesrv: 'http://h:1' is a URL"),
        ({"namesrv": ("h:0",)}, "namesrv: "),
        ({"broker_name": "ä b"}, "broker_name is 'ä b'; it must be 1 to 127 characters"),
        ({"cluster": ""}, "cluster is ''"),
    ],
)
def test_what_no_name_server_would_take_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BrokerConfig(**values)


@pytest.mark.parametrize("name", ["pull_threads", "admin_depth_max"])
def test_a_lane_has_threads_and_room(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be 1 to"):
        LaneSizes(**{name: 0})


def test_several_name_servers_may_stand_in_one_text() -> None:
    config = BrokerConfig(namesrv=("a:1;b:2", "a:1"))
    assert config.name_server_addresses == (Address("a", 1), Address("b", 2))
