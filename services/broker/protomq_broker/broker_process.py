"""A broker with its server and its metrics page: what one process runs, or a part of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from protomq_ha.roles import BrokerRole
from protomq_runtime.addresses import Address, parse_listen_address
from protomq_runtime.clock import Clock, SystemClock
from protomq_runtime.dispatch import DispatchTable
from protomq_runtime.listening import check_can_listen
from protomq_runtime.server import LaneConfig, Server

from . import __version__
from .broker import LATE_LANES, Broker, Election, broker_name_of
from .config import BrokerConfig
from .name_check import check_name_is_not_elected
from .name_server_connections import NameServer
from .store.files.side_files import START_NAME, TAIL_NAME
from .store.store import Store

if TYPE_CHECKING:
    from protomq_runtime.metrics_page import MetricsPage

REFUSED_GRACE_S = 1.0
"""Time for callers that have called before a start is refused, so that they get an answer."""


class BrokerProcess:
    """A broker and its server; a standalone process puts a name server's service into the same table.

    Attributes: broker; server, made by `__init__`, has its ports after `start`; metrics_address: of the metrics page, "" without one.
    """

    def __init__(
        self,
        config: BrokerConfig,
        *,
        clock: Clock | None = None,
        table: DispatchTable | None = None,
        lanes: Mapping[str, LaneConfig] | None = None,
        name_servers: Iterable[NameServer] = (),
        on_truncated: Callable[[], None] = lambda: None,
        election: Election | None = None,
        store: Store | None = None,
        start_time_ms: int | None = None,
    ) -> None:
        """Opens the store, after a test that all ports are free. Raises OSError for a port that is not; then no store is created. Raises
        ServiceError NAME_TAKEN where a member of an election is to lead by a fixed role beside the others; then nothing has changed.

        `table`, `lanes` and `name_servers` are those of other services in this process. `on_truncated`, `election`, `store`,
        `start_time_ms`: see Broker.
        """
        if store is None:
            check_can_listen(_listen_addresses(config))
            if election is None and config.role is not BrokerRole.SLAVE and _was_elected(config):
                check_name_is_not_elected(config.name_server_addresses, broker_name_of(config))
        self.metrics_address = ""
        self._metrics_page: MetricsPage | None = None
        self._unregistering: asyncio.Task[None] | None = None
        self.broker = Broker(
            config,
            clock or SystemClock(),
            __version__,
            name_servers,
            on_truncated,
            election,
            store,
            start_time_ms,
        )
        table = table or DispatchTable()
        self.broker.add_services(table)
        self.server = Server(
            table,
            name=self.broker.name,
            version=__version__,
            lanes={**(lanes or {}), **self.broker.lane_configs()},
            late_lanes=LATE_LANES,
            grpc_host=config.listen.host,
            grpc_port=config.listen.grpc_port,
            remoting_host=config.listen.host,
            remoting_port=config.listen.remoting_port,
            limits=config.connections,
        )

    def set_on_fatal(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Implements the hook of protomq_runtime.lifecycle."""
        self.server.set_on_fatal(on_fatal)

    async def start(self) -> None:
        """Serves and registers, and returns when sends are taken. If it raises, nothing runs any more."""
        try:
            self._open_metrics_page()
            await self.server.start()
        except BaseException:
            self._close_metrics_page()
            self.broker.close()
            raise
        try:
            await asyncio.to_thread(self.broker.register)
        except BaseException:
            await self.stop(REFUSED_GRACE_S)
            raise

    async def stop(self, grace_s: float) -> None:
        """Unregisters, refuses new calls, finishes those under way, and closes the store."""
        await asyncio.to_thread(self.broker.unregister)
        await asyncio.to_thread(self._close_metrics_page)
        await self.server.stop(grace_s)
        await asyncio.to_thread(self.broker.close)

    async def give_up_store(self, grace_s: float) -> Store:
        """As `stop`, but the store stays open, for another broker in its place. No name server is waited for."""
        self._unregistering = asyncio.create_task(asyncio.to_thread(self.broker.unregister))
        await asyncio.gather(
            asyncio.to_thread(self._close_metrics_page), self.server.stop(grace_s)
        )
        await asyncio.to_thread(self.broker.close, keeps_store=True)
        return self.broker.store

    def _open_metrics_page(self) -> None:
        listen = self.broker.config.metrics.listen
        if listen:
            from protomq_runtime.metrics_page import MetricsPage

            title = f"protomq broker {self.broker.name}"
            read = self.broker.metrics().numbers
            page = MetricsPage(parse_listen_address(listen), title, read)
            self._metrics_page, self.metrics_address = page, str(page.address)
            page.start()

    def _close_metrics_page(self) -> None:
        page, self._metrics_page = self._metrics_page, None
        if page is not None:
            page.stop()


def _was_elected(config: BrokerConfig) -> bool:
    """Whether the store has taken part in an election: only then its log may be that of others, too."""
    return any((Path(config.data_dir) / name).exists() for name in (TAIL_NAME, START_NAME))


def _listen_addresses(config: BrokerConfig) -> dict[str, Address]:
    """Returns where the process will listen, by purpose."""
    host = config.listen.host
    addresses = {
        "gRPC": Address(host, config.listen.grpc_port),
        "the remoting port": Address(host, config.listen.remoting_port),
    }
    if config.metrics.listen:
        addresses["the metrics page"] = parse_listen_address(config.metrics.listen)
    return addresses


def with_ports_of(process: BrokerProcess, config: BrokerConfig) -> BrokerConfig:
    """Returns the configuration of a running process, with the ports that it has got in place of 0."""
    server = process.server
    listen = replace(
        config.listen, grpc_port=server.grpc_port, remoting_port=server.remoting_port
    )
    metrics = config.metrics
    if process.metrics_address:
        metrics = replace(metrics, listen=process.metrics_address)
    return replace(config, listen=listen, metrics=metrics)


def metrics_words(process: BrokerProcess) -> dict[str, str]:
    """Returns the address of the metrics page, if there is one."""
    return {"metrics": process.metrics_address} if process.metrics_address else {}
