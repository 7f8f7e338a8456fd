"""Steps: what a client does, written once for threads and coroutines.

Steps are a generator. Where something is to be asked or waited for, it yields an effect: a value that says what. A driver does it,
and sends the outcome in, or throws the error in. What the generator returns is the result.

    def queue_count(topic):                                      a client's steps
        route = yield GetRoute(topic, 3.0)
        return len(route.read_queues)

    Driver(transport, routes).run(queue_count("T"))              from a thread: blocks
    await AsyncDriver(transport, routes).run(queue_count("T"))   from a coroutine (_async_steps.py)

So each decision stands in one place, and its tests need no socket, no clock and no sleep: they answer the effects themselves. New
effects are added here and in both drivers; all else that a client does is steps. What a thread and a coroutine do in different ways
(a selector, tasks, locks) belongs to the class that owns it, not into steps.

Steps may be interrupted at an effect (Ctrl-C, a cancelled task): that error, too, is thrown in, so `finally` in steps holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ._interrupts import comes_of_signal
from ._types import BrokerAddress, MethodInfo, Route
from .errors import ProtomqError

T = TypeVar("T")


class CallServer(NamedTuple):
    """One try at one server; the outcome is its encoded answer. The pieces of `payload` together are the encoded request."""

    address: BrokerAddress
    method: MethodInfo
    payload: Sequence[bytes]
    timeout_s: float


class SendOneWay(NamedTuple):
    """As CallServer, for a request that has no answer."""

    address: BrokerAddress
    method: MethodInfo
    payload: Sequence[bytes]
    timeout_s: float


class GetRoute(NamedTuple):
    """The route of a topic. `may_be_old`: whatever is known will do, and is looked up again behind the steps' back."""

    topic: str
    timeout_s: float
    may_be_old: bool = False


class ForgetRoute(NamedTuple):
    """The route led to the wrong place: whoever wants it next looks it up first.

    `may_be_old`: it is in doubt only, and may be used. `is_denied`: a broker says that it has no such topic.
    """

    topic: str
    may_be_old: bool = False
    is_denied: bool = False


class Pause(NamedTuple):
    """Time passes, with nothing to do."""

    seconds: float


class Block(NamedTuple):
    """The result of a function that blocks."""

    function: Callable[[], Any]


class Tell(NamedTuple):
    """Code of the program's, in the calling thread or task. A coroutine awaits what it returns, if that can be awaited."""

    function: Callable[[], Any]


class Each(NamedTuple):
    """The results of several steps: a thread takes one after the other, coroutines take all at once. When all have ended, the first error
    is raised.
    """

    steps: Sequence[Generator[Any, Any, Any]]


class Start(NamedTuple):
    """A call that a race wants, and the name of its server."""

    name: str
    call: CallServer


class CallRace(Protocol):
    """Says which calls are to be under way side by side, and when that is over."""

    @property
    def is_over(self) -> bool:
        """Whether what is under way is to be given up."""

    @property
    def silent(self) -> Sequence[str]:
        """Servers that give no sign of life."""

    def begin(self) -> list[Start]:
        """The first calls."""

    def ended(self, name: str, outcome: bytes | ProtomqError) -> list[Start]:
        """A call has ended; the next ones."""

    def due(self) -> list[Start]:
        """Time has passed; the next ones."""

    def wait_s(self) -> float:
        """Until `due` is to be called."""


class Race(NamedTuple):
    """Calls side by side, until the race is over; it keeps what has come of them. What is under way then is given up."""

    race: CallRace


Effect: TypeAlias = CallServer | GetRoute | ForgetRoute | Pause | Block | Tell | Each | SendOneWay | Race
Steps: TypeAlias = Generator[Effect, Any, T]


class CallsServers(Protocol):
    """What a driver needs of a transport."""

    def call(
        self,
        address: BrokerAddress,
        method: MethodInfo,
        payload: Sequence[bytes],
        timeout_s: float,
        *,
        one_way: bool = False,
    ) -> bytes:
        """See SyncTransport.call."""


class KnowsRoutes(Protocol):
    """What a driver needs of routes."""

    def get(self, topic: str, timeout_s: float) -> Route:
        """See Routes.get."""

    def current(self, topic: str, timeout_s: float) -> Route:
        """See Routes.current."""

    def invalidate(self, topic: str, *, may_be_old: bool = False, is_denied: bool = False) -> None:
        """See RouteBook.invalidate."""


class Driver:
    """Drives steps in the calling thread. Any thread."""

    __slots__ = ("_pause", "_race", "_routes", "_transport")

    def __init__(
        self,
        transport: CallsServers,
        routes: KnowsRoutes | None = None,
        pause: Callable[[float], None] = time.sleep,
        race: Callable[[CallRace], None] | None = None,
    ) -> None:
        """`race`: runs those of a client that has some."""
        self._race = race
        self._transport = transport
        self._routes = routes
        self._pause = pause

    def run(self, steps: Steps[T]) -> T:
        """What the steps return; raises what they raise."""
        try:
            effect = next(steps)
            while True:
                outcome: Any = None
                thrown: BaseException | None = None
                try:
                    outcome = self._do(effect)
                except BaseException as error:
                    thrown = error
                # Not while the error is handled: it would be the context of whatever the steps raise later.
                effect = steps.send(outcome) if thrown is None else steps.throw(thrown)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            # An error that refers to this frame is not to be kept by it.
            thrown = None

    def _do(self, effect: Effect) -> Any:
        match effect:
            case CallServer():
                return self._transport.call(*effect)
            case GetRoute(topic, timeout_s, may_be_old):
                assert self._routes is not None
                look = self._routes.current if may_be_old else self._routes.get
                return look(topic, timeout_s)
            case ForgetRoute(topic, may_be_old, is_denied):
                assert self._routes is not None
                self._routes.invalidate(topic, may_be_old=may_be_old, is_denied=is_denied)
            case Pause(seconds):
                self._pause(seconds)
            case Block(function):
                return function()
            case Tell(function):
                function()
            case Each(several):
                return results_of([self._outcome(steps) for steps in several])
            case SendOneWay():
                self._transport.call(*effect, one_way=True)
            case Race(race):
                assert self._race is not None
                self._race(race)
        return None

    def _outcome(self, steps: Steps[Any]) -> Any:
        try:
            return self.run(steps)
        except Exception as error:
            if comes_of_signal(error):
                raise
            return error


def to_end(steps: Steps[Any], goes_on: Callable[[], bool]) -> Steps[bool]:
    """The same steps; whether they came to their end. They are closed before an effect if they are not to go on any more."""
    outcome: Any = None
    thrown: BaseException | None = None
    try:
        while True:
            effect = steps.send(outcome) if thrown is None else steps.throw(thrown)
            if not goes_on():
                steps.close()
                return False
            outcome = thrown = None
            try:
                outcome = yield effect
            except BaseException as error:
                thrown = error
    except StopIteration:
        return True
    finally:
        # An error that refers to this frame is not to be kept by it.
        thrown = None


def results_of(outcomes: Sequence[Any]) -> Sequence[Any]:
    """What several steps have returned. Raises the first error among it."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
