"""The name server as a process: its one service on both transports."""

from __future__ import annotations

from typing import Final

from protomq.v1 import route_service_pb2
from protomq_runtime.clock import Clock, SystemClock
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.server import LaneConfig, Server, default_lane_config

from . import __version__
from .config import NamesrvConfig
from .route_service import LANE, RouteService
from .route_table import RouteTable

ROUTE_SERVICE: Final = route_service_pb2.DESCRIPTOR.services_by_name["RouteService"]


def add_route_service(
    dispatch: DispatchTable, config: NamesrvConfig, clock: Clock | None = None
) -> RouteTable:
    """Put a name server's service into `dispatch`; the table of routes behind it is answered.

    A standalone server adds the broker's services to the same dispatch table.
    """
    table = RouteTable(config.liveness, config.limits)
    service = RouteService(table, config.liveness, config.limits, clock or SystemClock())
    dispatch.add_service(ROUTE_SERVICE, service)
    return table


def make_server(config: NamesrvConfig, clock: Clock | None = None) -> Server:
    """A name server that has not been started."""
    dispatch = DispatchTable()
    add_route_service(dispatch, config, clock)
    lane = LaneConfig(config.route_threads, default_lane_config(LANE).admission)
    return Server(
        dispatch,
        name=config.name,
        version=__version__,
        lanes={LANE: lane},
        grpc_host=config.listen.host,
        grpc_port=config.listen.grpc_port,
        remoting_host=config.listen.host,
        remoting_port=config.listen.remoting_port,
        limits=config.connections,
    )
