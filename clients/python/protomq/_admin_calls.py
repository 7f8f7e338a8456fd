"""How Admin asks all brokers, and reads lists page by page. Also what happens if some do not answer.

Questions go to all brokers side by side: who waits for several that are silent waits once. Changes go to one after another, so what the
first refuses as wrong is not done at the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from . import _methods
from ._admin_values import BrokerInfo, MissingBroker, broker_info_of, missing_broker_of
from ._call_steps import call_address
from ._checks import checked_texts
from ._connection_options import ConnectionOptions
from ._daemon_threads import DaemonThreads
from ._decoding import decoded
from ._of_one_process import OfOneProcess
from ._retry import CHANGE
from ._routes import PAGE_SIZE, Routes
from ._steps import Driver
from ._transport import SyncTransport
from ._types import BrokerAddress, MethodInfo
from .errors import (
    BrokerNotFoundError,
    ClientError,
    ClosedError,
    ConfigurationError,
    ConnectFailedError,
    InvalidArgumentError,
    NoRouteError,
    NotFoundError,
    NotPermittedError,
    PartialResultError,
    ProtomqError,
    TopicExistsError,
    TransportError,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message as PbMessage

_T = TypeVar("_T", bound="PbMessage")
_R = TypeVar("_R")

ASKED_AT_ONCE_MAX: Final = 32
"""Brokers that one question is put to at a time."""

_ANSWERS = (ClientError, InvalidArgumentError, TopicExistsError, NotPermittedError, NotFoundError)
"""A broker that says one of these has answered: the caller has asked for something wrong."""


class AdminCalls(OfOneProcess):
    """Calls to the servers of a cluster. Any thread."""

    def __init__(
        self,
        connection: ConnectionOptions,
        request_timeout_s: float,
        silence_s: float = 0.0,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request_timeout_s = request_timeout_s
        self._silence_s = silence_s
        self._monotonic_s = monotonic_s
        self._silent: dict[BrokerAddress, tuple[TransportError, float]] = {}
        """Brokers that did not answer: with what error, and until when it holds."""
        self._transport = SyncTransport(connection)
        self._routes = Routes(self._transport, connection.namesrv)
        self._driver = Driver(self._transport, self._routes)
        self._closed = False

    def close(self) -> None:
        """Closes all connections. May be called twice."""
        self._closed = True
        self._transport.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _brokers_named(self, name: str | None) -> list[BrokerInfo]:
        """Those of a name, master and slaves; None: all."""
        from .v1 import route_service_pb2 as pb

        found, _ = self._cluster(pb.GetClusterInfoRequest(), () if name is None else (name,))
        return [broker for broker in found if name in (None, broker.broker_name)]

    def cluster_info(self) -> list[BrokerInfo]:
        """All brokers, by cluster, name and id; slaves too."""
        from .v1 import route_service_pb2 as pb

        return self._cluster(pb.GetClusterInfoRequest())[0]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the admin client is closed")

    def _ask_each(
        self,
        names: Iterable[str] | None,
        ask: Callable[[BrokerInfo], None],
        topic: str = "",
        *,
        with_slaves: bool = False,
        slave_stands_in: bool = False,
        first: Callable[[], Collection[str]] | None = None,
    ) -> dict[str, ProtomqError]:
        """Calls `ask` for one broker after another, all or those named; the errors of those that could not answer, by label.

        Raises if none could. `topic`: a broker that is missing counts only if it had this one. `with_slaves`: slaves are asked too, after
        the masters. `slave_stands_in`: where the master of a name does not answer, or is away, its slaves are asked instead. The first of
        them that answers counts. `first`: names of those that are asked before the others.
        """
        return self._asked(names, ask, topic, with_slaves, slave_stands_in, side_by_side=False, first=first)[1]

    def _answers(
        self,
        names: Iterable[str] | None,
        ask: Callable[[BrokerInfo], _R],
        topic: str = "",
        *,
        with_slaves: bool = False,
        slave_stands_in: bool = False,
    ) -> tuple[list[tuple[BrokerInfo, _R]], dict[str, ProtomqError]]:
        """As `_ask_each`, for what changes nothing: all are asked side by side, and what they said comes in the order of the brokers.

        `ask` runs on several threads at a time.
        """
        return self._asked(names, ask, topic, with_slaves, slave_stands_in, side_by_side=True)

    def _asked(
        self,
        names: Iterable[str] | None,
        ask: Callable[[BrokerInfo], _R],
        topic: str,
        with_slaves: bool,
        slave_stands_in: bool,
        *,
        side_by_side: bool,
        first: Callable[[], Collection[str]] | None = None,
    ) -> tuple[list[tuple[BrokerInfo, _R]], dict[str, ProtomqError]]:
        brokers, missing = self._brokers(names, topic)
        if first is not None and len({broker.broker_name for broker in brokers}) > 1:
            firsts = first()
            brokers.sort(key=lambda broker: (broker.broker_id, broker.broker_name not in firsts))
        masters = [broker for broker in brokers if not broker.broker_id]
        led = {broker.broker_name for broker in masters}
        answers: list[tuple[BrokerInfo, _R]] = []
        failures: dict[str, ProtomqError] = {}

        def is_answered_by(broker: BrokerInfo, said: Callable[[], _R]) -> bool:
            try:
                answers.append((broker, said()))
            except _ANSWERS:
                raise
            except ProtomqError as error:
                if isinstance(error, TransportError):  # A server's metadata are its own.
                    error.metadata = {**error.metadata, "broker_name": broker.broker_name}
                failures[broker.label] = error
                return False
            return True

        def said_by(asked: Sequence[BrokerInfo]) -> Iterator[tuple[BrokerInfo, Callable[[], _R]]]:
            if self._silence_s and not side_by_side:
                self._find_silent(asked)
            calls: list[Callable[[], _R]] = [
                partial(self._unless_silent, broker, partial(ask, broker), changes=not side_by_side) for broker in asked
            ]
            return zip(asked, self._side_by_side(calls) if side_by_side else calls, strict=True)

        for broker, said in said_by(brokers if with_slaves else masters):
            is_answered_by(broker, said)
        if not with_slaves:
            away = self._without_master(brokers)
            failures |= away
            # A master that has answered with an error of its own has answered.
            silent = [name for name in led if isinstance(failures.get(name), TransportError)]
            unled = (*sorted(silent), *away) if slave_stands_in else ()
            slaves = [broker for name in unled for broker in brokers if broker.broker_name == name and broker.broker_id]
            stood_in: set[str] = set()
            for slave, said in said_by(slaves):
                if slave.broker_name not in stood_in and is_answered_by(slave, said):
                    stood_in.add(slave.broker_name)
        failures |= {gone.broker.broker_name: gone.error for gone in missing}
        if not answers:
            raise next(iter(failures.values()))
        return answers, failures

    def _unless_silent(self, broker: BrokerInfo, call: Callable[[], _R], *, changes: bool = False) -> _R:
        """What it says. One that did not answer a moment ago is not waited for again: a read raises its error as it was."""
        known, until_s = self._silent.get(broker.address, (None, 0.0))
        if known is not None and self._monotonic_s() < until_s:
            if changes:
                # The error of the ping, or of another change, would leave open whether this one was sent.
                raise ConnectFailedError(f"nothing was sent to it, because it has just been silent: {known}")
            # An error that is raised several times collects tracebacks and contexts.
            raise copy(known)
        try:
            return call()
        except TransportError as error:
            self._silent[broker.address] = (copy(error), self._monotonic_s() + self._silence_s)
            raise

    def _find_silent(self, brokers: Sequence[BrokerInfo]) -> None:
        """Before brokers are asked one after another: those that are silent are waited for at the same time."""
        pings = [partial(self._unless_silent, broker, partial(self._ask, broker.address, _methods.PING, ())) for broker in brokers]
        for ponged in self._side_by_side(pings) if len(pings) > 1 else ():
            with suppress(ProtomqError):
                ponged()

    @staticmethod
    def _side_by_side(calls: Sequence[Callable[[], _R]]) -> Iterator[Callable[[], _R]]:
        """For each call, in their order, what gives its result or raises its error. They run at the same time."""
        if len(calls) == 1:
            yield from calls
            return
        for start in range(0, len(calls), ASKED_AT_ONCE_MAX):
            threads = DaemonThreads("protomq-admin")
            futures = [threads.submit(call) for call in calls[start : start + ASKED_AT_ONCE_MAX]]
            threads.close()
            yield from (future.result for future in futures)

    @classmethod
    def _without_master(cls, brokers: Sequence[BrokerInfo]) -> dict[str, ProtomqError]:
        """By name, the errors of those of which only slaves are registered."""
        led = {broker.broker_name for broker in brokers if not broker.broker_id}
        names = dict.fromkeys(broker.broker_name for broker in brokers)
        return {name: cls._no_master(name, brokers) for name in names if name not in led}

    @staticmethod
    def _no_master(name: str, brokers: Iterable[BrokerInfo]) -> NoRouteError:
        slaves = ", ".join(broker.label for broker in brokers if broker.broker_name == name)
        return NoRouteError(
            f"no master of {name} is registered now, only {slaves}: a slave changes nothing, and may lack the newest of what its master "
            "has; start the master again",
            metadata={"broker_name": name},
        )

    def _master(self, name: str) -> BrokerInfo:
        """The master of that name."""
        brokers, _ = self._brokers([name])
        if brokers[0].broker_id:
            raise self._no_master(name, brokers)
        return brokers[0]

    def _brokers(
        self, names: Iterable[str] | None, topic: str = ""
    ) -> tuple[list[BrokerInfo], list[MissingBroker]]:
        """The masters by name, all or those named, and behind them the slaves by id.

        If all are wanted, also those that are missing and had the topic ("": any).
        """
        from .v1 import route_service_pb2 as pb

        wanted = None if names is None else checked_texts("brokers", names)
        if wanted is not None and not wanted:
            raise ConfigurationError("brokers names no broker; None stands for all")
        request = pb.GetClusterInfoRequest(topic=topic if names is None else "")
        known, missing = self._cluster(request, wanted or ())
        found = {(broker.broker_id, broker.broker_name): broker for broker in known}
        registered = {broker.broker_name for broker in found.values()}
        if wanted is not None:
            for gone in missing:
                if gone.broker.broker_name in wanted:
                    raise gone.error
            unknown = [name for name in wanted if name not in registered]
            if unknown:
                raise BrokerNotFoundError(
                    f"no broker of that name is registered: {', '.join(unknown)}"
                )
            return sorted(
                (broker for broker in found.values() if broker.broker_name in wanted),
                key=lambda broker: (broker.broker_id, wanted.index(broker.broker_name)),
            ), []
        if not found and not missing:
            raise BrokerNotFoundError("no broker is registered at the name server")
        return [found[key] for key in sorted(found)], missing

    def _cluster(self, request: PbMessage, wanted: Collection[str] = ()) -> tuple[list[BrokerInfo], list[MissingBroker]]:
        """What a name server has that knows the brokers `wanted`, or any: others may have just started. Else what the first one has."""
        from .v1 import route_service_pb2 as pb

        def knows(data: bytes) -> bool:
            answer = decoded(data, pb.GetClusterInfoResponse.FromString)
            names = {broker.broker_name for broker in answer.brokers} | {gone.broker.broker_name for gone in answer.missing_brokers}
            return bool(names) and names.issuperset(wanted)

        self._check_open()
        data = self._routes.ask(
            _methods.GET_CLUSTER_INFO, request.SerializeToString(), self._request_timeout_s, knows
        )
        answer = decoded(data, pb.GetClusterInfoResponse.FromString)
        missing = [missing_broker_of(gone) for gone in answer.missing_brokers]
        return [broker_info_of(broker) for broker in answer.brokers], missing

    def _call(
        self, address: BrokerAddress, method: MethodInfo, request: PbMessage, answer_class: type[_T]
    ) -> _T:
        data = self._ask(address, method, (request.SerializeToString(),))
        return decoded(data, answer_class.FromString)

    def _ask(self, address: BrokerAddress, method: MethodInfo, payload: Sequence[bytes]) -> bytes:
        return self._driver.run(
            call_address(address, method, payload, self._request_timeout_s, CHANGE)
        )

    def _pages(
        self,
        broker: BrokerInfo,
        method: MethodInfo,
        request: Any,
        answer_class: type[_T],
    ) -> Iterator[_T]:
        """The answers of a broker to a request for a list, page by page."""
        request.page_size = PAGE_SIZE
        while True:
            answer: Any = self._call(broker.address, method, request, answer_class)
            yield answer
            request.page_token = answer.next_page_token
            if not request.page_token:
                return


def whole(result: _R, failures: Mapping[str, ProtomqError], hint: str = "") -> _R:
    """The result; raises PartialResultError if somebody's part is missing. `hint`: what follows, and what to do."""
    if failures:
        why = "; ".join(f"{name}: {error}" for name, error in failures.items())
        why += f"; {hint}" if hint else ""
        raise PartialResultError(f"some brokers did not answer: {why}", result, failures)
    return result
