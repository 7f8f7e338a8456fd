"""A name server's lanes are those of its settings."""

import pytest

from protomq_namesrv.config import NamesrvConfig
from protomq_namesrv.route_service import LANE
from protomq_namesrv.server import make_server
from protomq_runtime.addresses import ListenConfig


def test_as_many_lanes_serve_routes_as_the_settings_say() -> None:
    for threads in (1, 3):
        server = make_server(NamesrvConfig(listen=ListenConfig(grpc_port=0, remoting_port=0), route_threads=threads))
        assert len(server.pools[LANE].lanes) == threads


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_server_has_a_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"name is '{name}'; it must not be empty"):
        NamesrvConfig(name=name)
