"""A slave copies the filter modules of its master. A thread asks the master when a session begins, and each 30 s while it lasts.

The modules stand in no log, so replication does not bring them. Replication never waits for this thread, and goes on whatever fails here.
`filter_copies.py` decides what is fetched and removed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from protomq.v1 import filter_service_pb2 as pb
from protomq.v1 import options_pb2
from protomq.wire.hashing import crc32c
from protomq_runtime.errors import ServiceError
from protomq_runtime.remoting_client import RemotingClient

from .filter_copies import Change, CopiesFile, known_after, plan_changes
from .filter_modules import MODULES_MAX, FilterModules, ModuleInfo

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from protomq_runtime.addresses import Address

log = logging.getLogger("protomq.broker")

LOOK_INTERVAL_S: Final = 30.0
"""A deployment goes to slaves, too: this makes up for those that it did not reach."""
RETRY_INTERVAL_S: Final = 5.0
GAP_S: Final = 1.0
"""Least time between two looks. Sessions that end at once may begin many times a second."""
CALL_TIMEOUT_S: Final = 3.0
PAGE_SIZE: Final = 1_000
"""More than a broker may have: there is one page."""

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["FilterService"]
_LIST, _GET = (
    int(_SERVICE.methods_by_name[name].GetOptions().Extensions[options_pb2.remoting].method_id)
    for name in ("ListFilters", "GetFilter")
)
_EXPECTED: Final = (OSError, ServiceError, DecodeError, ValueError)


class NotCopiedError(ValueError):
    """Something is not as the master has it; the next look may find it otherwise."""


class MasterModules(NamedTuple):
    """What a master has. `store_id`: of its store; 0: it does not say."""

    modules: list[ModuleInfo]
    store_id: int


class ModuleSource(Protocol):
    """A connection to a master. Its methods raise OSError, ServiceError, DecodeError."""

    def list(self) -> MasterModules:
        """Returns which modules it has."""

    def get(self, name: str) -> bytes:
        """Returns the bytes of one; empty if it has none of that name."""

    def wake(self) -> None:
        """Ends a call that is under way, or the next one. Any thread."""

    def close(self) -> None:
        """Ends the connection."""


class FilterClient:
    """A ModuleSource over the remoting port."""

    def __init__(self, address: Address, client_id: str) -> None:
        """Connects. Raises OSError, ServiceError."""
        self._client = RemotingClient(
            address, options_pb2.LANE_ADMIN, client_id, timeout_s=CALL_TIMEOUT_S
        )

    def list(self) -> MasterModules:
        """See ModuleSource."""
        payload = self._call(_LIST, pb.ListFiltersRequest(page_size=PAGE_SIZE))
        answer = pb.ListFiltersResponse.FromString(payload)
        modules = [ModuleInfo(one.name, one.size_bytes, one.crc32c) for one in answer.modules]
        return MasterModules(modules, answer.store_id)

    def get(self, name: str) -> bytes:
        """See ModuleSource."""
        payload = self._call(_GET, pb.GetFilterRequest(name=name))
        return pb.GetFilterResponse.FromString(payload).module

    def wake(self) -> None:
        """See ModuleSource."""
        self._client.wake()

    def close(self) -> None:
        """See ModuleSource."""
        self._client.close()

    def _call(self, method_id: int, request: Message) -> bytes:
        request_id = self._client.start(method_id, request.SerializeToString(), CALL_TIMEOUT_S)
        answer = self._client.wait((request_id,), CALL_TIMEOUT_S)
        if answer is None:
            raise TimeoutError(f"{self._client.address} did not answer")
        return answer.unwrap()


class FilterFollower:
    """See the module's docstring. `begin`, `close`: any thread; `copy`: one thread."""

    def __init__(
        self,
        modules: FilterModules,
        copies: CopiesFile,
        changed: Callable[[str], None],
        is_following: Callable[[], bool],
        connect: Callable[[Address], ModuleSource],
    ) -> None:
        """`changed` is called with the name of a module that was replaced or removed. `is_following`: whether the session lasts."""
        self._modules = modules
        self._copies = copies
        self._changed = changed
        self._is_following = is_following
        self._connect = connect
        self._master: Address | None = None
        self._source: ModuleSource | None = None
        self._complaint = ""
        self._wanted = threading.Event()
        self._closed = threading.Event()
        # Nothing is changed any more when `close` has returned: another broker may have the folder then.
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, master: Address) -> None:
        """A session with this master has begun: its modules are looked at now."""
        with self._changing:
            if self._closed.is_set():
                return
            self._master = master
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="protomq-filter-copies", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread. It is not waited for: a master that is gone may keep it for seconds, and a slave is to lead at once."""
        with self._changing:
            self._closed.set()
            source = self._source
        if source is not None:
            source.wake()
        self._wanted.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closed.is_set():
            if self._wanted.wait(pause_s):
                self._wanted.clear()
            elif not self._is_following():
                pause_s = LOOK_INTERVAL_S
                continue
            master = self._master
            assert master is not None
            if self._closed.is_set():
                return
            try:
                self.copy(master)
                self._complaint = ""
                pause_s = LOOK_INTERVAL_S
            except _EXPECTED as error:
                self._complain(master, error)
                pause_s = RETRY_INTERVAL_S
            except Exception as error:
                log.exception("copying the filter modules of the master failed; it begins again")
                self._complain(master, error)
                pause_s = RETRY_INTERVAL_S
            self._closed.wait(GAP_S)

    def copy(self, master: Address) -> None:
        """Makes the modules here those of the master. Raises OSError, ServiceError, DecodeError, NotCopiedError."""
        with closing(self._connect(master)) as source:
            self._source = source
            try:
                there = source.list()
                plan = plan_changes(
                    self._modules.all(), there.modules, self._copies.read(), there.store_id
                )
                failures = [why for change in plan if (why := self._make(change, source, master))]
            finally:
                self._source = None
        with self._changing:
            if self._closed.is_set():
                return
            self._copies.write(known_after(self._modules.all(), there.modules, there.store_id))
        if failures:
            raise NotCopiedError("; ".join(failures))

    def _make(self, change: Change, source: ModuleSource, master: Address) -> str:
        """Makes one change. Returns why not, or ""."""
        if self._closed.is_set():
            return ""
        name, wanted = change.name, change.wanted
        module = source.get(name) if wanted is not None else None
        if wanted is not None and (not module or crc32c(module) != wanted.crc32c):
            return f"the master has another {name}, or none, since it was asked"
        with self._changing:
            if self._closed.is_set():
                return ""
            if not self._modules.swap(name, change.here_crc32c, module):
                return f"{name} was changed here meanwhile, or the maximum of {MODULES_MAX} modules is here"
        self._changed(name)
        if module is None:
            log.info("filter module %s is removed: the master at %s has it no more", name, master)
        else:
            log.info("filter module %s came from the master at %s: %d bytes", name, master, len(module))
        return ""

    def _complain(self, master: Address, error: BaseException) -> None:
        """Logs a repeated problem once."""
        text = str(error) or type(error).__name__
        if text != self._complaint and not self._closed.is_set():
            self._complaint = text
            log.warning("the filter modules of the master at %s are not all here yet: %s", master, text)
