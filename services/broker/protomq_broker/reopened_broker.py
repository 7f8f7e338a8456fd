"""A broker whose store is opened again while the process runs: a slave that drops what its master does not have.

Opening takes room on the disk. Where there is none, the broker tries again until there is; meanwhile it serves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from protomq_runtime.clock import SystemClock

from .broker_process import REFUSED_GRACE_S, BrokerProcess, with_ports_of
from .config import BrokerConfig
from .failed_opens import FailedOpens
from .store.files.disk import DISK_FULL_ERRNOS

log = logging.getLogger("protomq.broker")

ROOM_LOOK_S: Final = 1.0
"""Between two tries to open a store for which the disk has no room."""


class ReopenedBroker:
    """A broker that opens its store again on request. A slave asks for that when it has to drop bytes that its master does not have.

    For protomq_runtime.lifecycle. Attribute: process, the one that runs now.
    """

    def __init__(self, config: BrokerConfig) -> None:
        """Raises what BrokerProcess raises."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_fatal: Callable[[BaseException], None] = lambda error: None
        self._changing = asyncio.Lock()
        self._is_stopped = False
        self._is_open = True
        """Whether `process` has not been stopped."""
        self._reopening: asyncio.Task[None] | None = None
        self._start_time_ms = SystemClock().now_ms()
        self.process = self._make(config)

    def _make(self, config: BrokerConfig) -> BrokerProcess:
        return BrokerProcess(config, on_truncated=self._reopen_soon, start_time_ms=self._start_time_ms)

    def set_on_fatal(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Implements the hook of protomq_runtime.lifecycle."""
        self._on_fatal = on_fatal
        self.process.set_on_fatal(on_fatal)

    async def start(self) -> None:
        """As BrokerProcess."""
        self._loop = asyncio.get_running_loop()
        async with self._changing:
            await self.process.start()

    async def stop(self, grace_s: float) -> None:
        """As BrokerProcess."""
        async with self._changing:
            self._is_stopped = True
            if self._is_open:
                await self.process.stop(grace_s)

    def _reopen_soon(self) -> None:
        """Opens the store again soon. Any thread, after the start."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_reopening)

    def _begin_reopening(self) -> None:
        self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        config = with_ports_of(self.process, self.process.broker.config)
        failed_opens = FailedOpens(config.data_dir)
        while True:
            if await self._try_reopen(config, failed_opens):
                return
            await asyncio.sleep(ROOM_LOOK_S)

    async def _try_reopen(self, config: BrokerConfig, failed_opens: FailedOpens) -> bool:
        """Returns False if there was no room to open the store."""
        async with self._changing:
            if self._is_stopped:
                return True
            try:
                if self._is_open:
                    self._is_open = False
                    await self.process.stop(REFUSED_GRACE_S)
                before = self.process.broker.store
                self.process = self._make(config)
                self.process.broker.store.go_on_counting(before)
                self.process.set_on_fatal(self._on_fatal)
                await self.process.start()
            except Exception as error:
                if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
                    failed_opens.say(error)
                    return False
                log.critical("the store could not be opened again: %s", error)
                self._is_stopped = True
                self._on_fatal(error)
                return True
            self._is_open = True
            log.warning("the store is open again")
            return True
