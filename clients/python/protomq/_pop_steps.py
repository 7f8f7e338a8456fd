"""What simple consumers do: pop, acknowledge, hold for another time. Steps for threads and coroutines alike (`_steps.py`).

    pop answer    [header: fields 4 to 11][regions: record fields, with seals here and there]

Several brokers of a topic are asked side by side (`_pop_race.py`). With one broker it is one call.

What may pass raises nothing: a broker restarts or is silent, or another master is elected. It is asked again until the hold is over, by the
route as it is then. The log says when that begins and ends. While other brokers answer, one that failed rests between its tries. A log that
has failed may pass, too: another master is elected. If nobody takes over within the hold, it is raised, for it may last until a restart.
"""

from __future__ import annotations

import copy
import logging
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from . import _methods
from ._call_steps import broker_of, call_broker, forget_route, retried
from ._checks import (
    SECONDS_MIN,
    check_count,
    check_flag,
    check_group,
    check_number,
    check_queue,
    check_seconds,
    check_topic,
)
from ._decoding import decoded
from ._fields import read_varint, skip_value
from ._filters import MessageFilter, checked_filter
from ._held_pops import HeldPop, HeldPops, encoded_give_up, id_field
from ._hook_points import HookPoints
from ._hooked_consuming import HeldMessages
from ._late_imports import fork_waits
from ._late_pops import HandOut, LatePop, LatePops
from ._message import Message
from ._offset_calls import checked_tags
from ._outages import NAME_SERVERS, Outages
from ._permitted import nothing_to_read
from ._pop_race import CALL_EXTRA_S, PopRace
from ._pull_answer import AnswerMessages, PullAnswer, read_u32s
from ._pull_logic import with_tags
from ._requests import reply_steps, reply_timeout_s
from ._retry import (
    BACKOFF_MAX_S,
    CALL,
    ONCE,
    PAUSE_MIN_S,
    SETTLE,
    Retries,
    attempt_timeout,
    is_away,
    knows_nobody,
)
from ._route_looks import LOOK_S
from ._send_back import attempt_fields, error_text, send_back_steps
from ._steps import CallServer, Each, ForgetRoute, GetRoute, Pause, Race, Steps
from ._types import Body, BrokerAddress, MessageQueue, PoppedQueue, PullStatus, Route
from .errors import (
    BusyError,
    ClosedError,
    ConfigurationError,
    DeadlineExceededError,
    NoRouteError,
    NotMasterError,
    ProtocolError,
    ProtomqError,
    RequestTimeoutError,
    StaleReceiptError,
    StoreFailedError,
    TopicNotFoundError,
    TopicRecreatedError,
    TransportError,
    UnknownMethodError,
    WrongTypeError,
)
from .wire.runs import offsets_in, runs_of

if TYPE_CHECKING:
    from ._types import MethodInfo

COUNT_DEFAULT: Final = 32
COUNT_MAX: Final = 1_024
INVISIBLE_DEFAULT_S: Final = 60.0
INVISIBLE_MAX_S: Final = 43_200.0
HOLD_DEFAULT_S: Final = 15.0
HOLD_MAX_S: Final = 60.0
SIZE_MAX_BYTES: Final = 4 << 20
SETTLED_COUNT_MAX: Final = 10_000
GIVE_BACK_S: Final = 1.0
"""How long whoever is interrupted, or closes, gives back what nobody has seen."""
REST_MIN_S: Final = 0.1
REST_MAX_S: Final = 3.0
"""A broker that failed is asked again after this time, which doubles, as long as others answer; as pulls are."""

_QUEUE: Final = attrgetter("queue")
_PLACE: Final = attrgetter("queue.topic", "queue.broker_name")
_RECEIPT: Final = attrgetter("queue.receipt")
_OFFSET: Final = attrgetter("queue_offset")

logger = logging.getLogger("protomq")

Start = Literal["earliest", "latest"]


@dataclass(frozen=True, slots=True)
class PopWish:
    """What one `receive` asks for.

    Attributes: what the arguments of `receive` say; `hold_s`: of all brokers together.
    """

    group: str
    topic: str
    count: int
    invisible_ms: int
    hold_s: float
    queue: MessageQueue | None
    tags: tuple[str, ...]
    filter: MessageFilter
    fifo: bool
    start: Start

    def encoded(self, hold_ms: int, incarnation: int = 0, *, from_first: bool = False) -> bytes:
        """The request. `incarnation`: of the topic that is meant; `from_first`: where it begins whatever `start` says."""
        with fork_waits:
            from .v1 import pop_service_pb2 as pb

        request = pb.PopRequest(
            consumer_group=self.group,
            topic=self.topic,
            record_count_max=self.count,
            size_max_bytes=SIZE_MAX_BYTES,
            hold_ms=hold_ms,
            invisible_ms=self.invisible_ms,
            tags=self.tags,
            fifo=self.fifo,
            start=pb.POP_START_END if self.start == "latest" and not from_first else pb.POP_START_UNSPECIFIED,
            topic_incarnation=incarnation,
        )
        if self.queue is not None:
            request.queue_id = self.queue.queue_id
        if self.filter.type_number:
            request.filter_type = self.filter.type_number  # type: ignore[assignment]
            request.filter = self.filter.expression
        return request.SerializeToString()


def wanted_in(request: bytes) -> bytes:
    """What an encoded pop wants, without how long it waits, and how many it takes: what answers one answers another, too."""
    with fork_waits:
        from .v1 import pop_service_pb2 as pb

    wanted = pb.PopRequest.FromString(request)
    for name in ("hold_ms", "hold_id", "record_count_max", "topic_incarnation", "start"):
        wanted.ClearField(name)
    return wanted.SerializeToString()


class PopSteps:
    """The steps of one consumer. Any thread."""

    def __init__(
        self,
        group: str,
        request_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        hooks: HookPoints | None = None,
        kind_of: Callable[[BrokerAddress], str] = lambda address: "",
    ) -> None:
        """`kind_of`: the transport that a broker was reached by last."""
        if not check_group(group):
            raise ConfigurationError("a simple consumer has a group: what it gets, no other member gets")
        self.group = group
        self._request_timeout_s = check_seconds("request_timeout_s", request_timeout_s)
        self._clock = clock
        self._kind_of = kind_of
        self._turns = count()
        self._hooks = hooks or HookPoints(group)
        self._held = HeldMessages(self._hooks) if self._hooks.consume else None
        self._next_look_s: dict[str, float] = {}
        """When the route of each topic is looked up again: nobody says that a broker came new, or came back."""
        self._known_names: tuple[Route | None, list[str]] = None, []
        self._outages = Outages(clock)
        self.is_closed = False
        """By the program: what fails from then on is no outage."""
        self.on_abandoned: Callable[[list[Message]], None] | None = None
        """Gets what a `receive` has found that is cancelled before it returns: nobody has seen it."""
        self._incarnations: dict[tuple[str, str], int] = {}
        """Of topics from which it receives from the end on, at their brokers: what was made again since is another topic."""
        self._made_again: set[tuple[str, str]] = set()
        """Topics, at their brokers, that were made again since it has received from them: all of their messages are new."""
        self.late = LatePops(clock)
        self.held = HeldPops()
        self._gives_up: set[str] = set()
        """Brokers that are known to know GiveUpPop."""
        self._rests: dict[str, tuple[float, float]] = {}
        """Of each broker whose last pop failed: until when it is left in peace, and for how long."""

    def wish(
        self,
        topic: str,
        count: int,
        *,
        invisible_s: float,
        hold_s: float,
        queue: MessageQueue | None,
        tags: Iterable[str],
        sql: str | None,
        cel: str | None,
        module: str | None,
        fifo: bool,
        start: str,
    ) -> PopWish:
        """What a call of `receive` asks for. Raises ConfigurationError."""
        check_topic(topic)
        check_count("count", count, 1, COUNT_MAX)
        if not SECONDS_MIN <= check_number("invisible_s", invisible_s) <= INVISIBLE_MAX_S:
            raise ConfigurationError(
                f"invisible_s is 10 to {INVISIBLE_MAX_S:.0f} (12 h), or what the broker's settings say, not {invisible_s}"
            )
        if check_seconds("hold_s", hold_s, zero=True) > HOLD_MAX_S:
            raise ConfigurationError(f"hold_s is {HOLD_MAX_S:.0f} at most, not {hold_s}")
        check_queue(topic, queue)
        if start not in ("earliest", "latest"):
            raise ConfigurationError(f'start is "earliest" or "latest", not {start!r}')
        wanted = checked_tags(tags)
        filter_ = checked_filter(wanted, sql, cel, module)
        check_flag("fifo", fifo)
        invisible_ms = math.ceil(invisible_s * 1000)
        return PopWish(
            self.group, topic, count, invisible_ms, hold_s, queue, wanted, filter_, fifo, start  # type: ignore[arg-type]
        )

    def receive(self, wish: PopWish, given: list[HandOut] | None = None) -> Steps[list[Message]]:
        """Messages of one broker; none if none had any within the hold.

        `given`: gets what several brokers have handed out, before anything else is done with it; who calls one adds it. For whoever is
        interrupted, see `give_back_all`.
        """
        given = [] if given is None else given
        if not self._hooks.receive:
            return (yield from self._receive_while_open(wish, given))
        context = self._hooks.before_receive(wish.topic)
        try:
            messages = yield from self._receive_while_open(wish, given)
        except BaseException as error:
            self._hooks.after_receive(context, (), error)
            raise
        self._hooks.after_receive(context, messages)
        return messages

    def _receive_while_open(self, wish: PopWish, given: list[HandOut]) -> Steps[list[Message]]:
        """Gives back what comes for a program that has closed the consumer: it could not acknowledge it."""
        this_one = self.held.began()
        try:
            messages = yield from self._receive(wish, given)
            if not self.is_closed:
                return messages
            if messages:
                yield from self.give_back(messages, GIVE_BACK_S)
                given.clear()
            raise _closed_meanwhile()
        finally:
            self.held.ended(this_one)

    def give_up_held(self) -> Steps[bool]:
        """Ends what brokers hold for calls of `receive`. False: one of them cannot do that, and goes on holding."""
        until_s = self._clock() + GIVE_BACK_S / 2
        pops = self.held.pops()
        know_it: Sequence[bool] = yield Each([self._give_up(*pop, until_s, len(pops) - index) for index, pop in enumerate(pops)])
        return all(know_it)

    def _give_up(self, hold_id: bytes, held: HeldPop, until_s: float, turns_left: int) -> Steps[bool]:
        # A thread asks one after the other: a broker that is silent leaves time for those behind it.
        timeout_s = max((until_s - self._clock()) / turns_left, 0.001)
        request = (encoded_give_up(hold_id),)
        try:
            yield from call_broker(held.topic, held.broker_name, _methods.GIVE_UP_POP, request, timeout_s, ONCE, self._clock)
        except UnknownMethodError:
            return False
        except ProtomqError:
            return True  # It is gone or silent, and so its hold ends, or what it has sent comes.
        return True

    def _receive(self, wish: PopWish, given: list[HandOut]) -> Steps[list[Message]]:
        deadline_s = self._clock() + wish.hold_s
        if self.late:  # Hardly ever.
            messages = yield from self._receive_late(wish, given)
            if messages:
                return messages
        if self._clock() >= self._next_look_s.get(wish.topic, 0.0):
            self._next_look_s[wish.topic] = self._clock() + LOOK_S
            yield ForgetRoute(wish.topic, may_be_old=True)
        first = next(self._turns)
        pause_s = PAUSE_MIN_S
        failed: dict[str, ProtomqError] = {}
        while True:
            self._check_open()
            try:
                route, names = yield from self._names(wish)
            except ProtomqError as error:
                self._check_open()
                if not is_away(error):
                    raise
                self._outages.failed(NAME_SERVERS, wish.topic, error)
                failed[NAME_SERVERS] = error
                route, names = Route(wish.topic), []
            else:
                failed.pop(NAME_SERVERS, None)
            messages = []
            if len(names) == 1:
                failed.clear()
                messages = yield from self._receive_from_one(wish, names[0], deadline_s, failed)
            elif names:
                turn = [names[(first + index) % len(names)] for index in range(len(names))]
                messages = yield from self._receive_from_several(wish, route, turn, deadline_s, failed, given)
            if messages:
                return messages
            given.clear()
            if any(isinstance(error, TopicRecreatedError) for error in failed.values()):
                failed = {name: error for name, error in failed.items() if not isinstance(error, TopicRecreatedError)}
                continue
            # Others have left the route meanwhile; of none it is known who failed.
            failures = [error for name, error in failed.items() if not names or name in names]
            left_s = deadline_s - self._clock()
            if len(failures) < len(names):
                if left_s <= 0:
                    return []
                continue
            for failure in failures:
                # No route: the queue's broker is a wrong one, or no name server answers. Brokers that are away are waited for.
                is_lost = isinstance(failure, NoRouteError) and not is_away(failure)
                if not passes(failure) or (left_s <= 0 and is_lost):
                    raise failure
            if left_s <= 0:
                if all(isinstance(failure, StoreFailedError) for failure in failures):
                    raise failures[0]
                return []
            yield Pause(min(pause_s, left_s))
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)
            if not names:
                yield ForgetRoute(wish.topic)

    def _receive_late(self, wish: PopWish, given: list[HandOut]) -> Steps[list[Message]]:
        """What an earlier call has asked for, and did not wait for."""
        found: list[Message] = []
        for name, data in self.late.take(wanted_in(wish.encoded(0))):
            given.append(HandOut(name, data))
            self._note_incarnation(wish, name, data)
            self._answered(name, wish.topic)
            found += decode_pop_answer(data, wish.topic, name)
        if not found:
            return []
        return (yield from self._kept(wish, found[: wish.count], found[wish.count :]))

    def keep_late(self, request: Sequence[bytes], broker_name: str, answer: bytes) -> LatePop | None:
        """Keeps an answer that came when nobody waited for it any more; None: it has no messages. See `late`."""
        encoded = b"".join(request)
        with fork_waits:
            from .v1 import pop_service_pb2 as pb

        wanted = pb.PopRequest.FromString(encoded)
        topic = wanted.topic
        try:
            if not decode_pop_answer(answer, topic, broker_name):
                return None
        except ProtomqError as error:
            logger.warning("the answer to a call that was given up cannot be read: %r", error)
            return None
        return self.late.keep(wanted_in(encoded), topic, HandOut(broker_name, answer), wanted.invisible_ms / 1000)

    def give_back_kept(self, late: LatePop) -> Steps[None]:
        """Gives back an answer that was kept, unless it was taken. Others may have its messages at once."""
        if self.late.end(late):
            yield from self.give_back(decode_pop_answer(late.hand_out.data, late.topic, late.hand_out.broker_name))

    def _receive_from_one(
        self, wish: PopWish, name: str, deadline_s: float, failed: dict[str, ProtomqError]
    ) -> Steps[list[Message]]:
        asked_s = self._clock()
        left_s = max(deadline_s - asked_s, 0.0)
        try:
            messages = yield from self._pop(wish, name, max(round(left_s * 1000), 1) if left_s else 0)
        except ProtomqError as error:
            self._check_open()
            if isinstance(error, TopicRecreatedError):
                self._note_made_again(wish.topic, name)
            if passes(error):
                self._failed(name, wish.topic, error)
            if isinstance(error, RequestTimeoutError):
                # A master that is stopped or cut off: meanwhile another one may lead.
                yield ForgetRoute(wish.topic)
            failed[name] = error
            return []
        self._answered(name, wish.topic, asked_s)
        return messages

    def _receive_from_several(
        self, wish: PopWish, route: Route, names: list[str], deadline_s: float, failed: dict[str, ProtomqError], given: list[HandOut]
    ) -> Steps[list[Message]]:
        """Messages of the first that has some. None: one has failed, or time to ask one again that rests, or the hold is over."""
        awake = self._awake(names)
        hold_ids: list[bytes] = []

        def make(name: str, hold_ms: int) -> CallServer:
            payload = [self._request(wish, name, hold_ms)]
            if hold_ms:
                hold_ids.append(self.held.begin(wish.topic, name))
                payload.append(id_field(hold_ids[-1]))
            return CallServer(broker_of(route, name), _methods.POP, payload, hold_ms / 1000 + CALL_EXTRA_S)

        rest_ends_s = [self._rests[name][0] for name in names if name not in awake]
        limit_s = min([deadline_s, *rest_ends_s])

        def may_hold(name: str) -> bool:
            return name in self._gives_up or self._kind_of(broker_of(route, name)) != "grpc"

        def decode(name: str, data: bytes) -> list[Message]:
            given.append(HandOut(name, data))
            self._note_incarnation(wish, name, data)
            messages = decode_pop_answer(data, wish.topic, name)
            if not messages and not may_hold(name) and may_be_given_up(data):
                self._gives_up.add(name)
            return messages

        race = PopRace(awake, make, decode, limit_s, self._clock, may_hold, lambda: self.is_closed)
        try:
            yield Race(race)
        finally:
            for hold_id in hold_ids:
                self.held.end(hold_id)
        if not race.found:
            self._check_open()
        for name in race.answered:
            self._answered(name, wish.topic)
            failed.pop(name, None)
        if race.failures:
            self._check_open()
        for name, error in race.failures.items():
            if isinstance(error, ClosedError):
                raise error
            failed[name] = error
            if isinstance(error, TopicRecreatedError):
                self._note_made_again(wish.topic, name)
                continue
            self._failed(name, wish.topic, error)
            if error.stale_route or isinstance(error, RequestTimeoutError):
                # Another one may lead. Known brokers are asked meanwhile: a name server may be silent, too.
                yield forget_route(wish.topic, error, may_be_old=True)
        for name in race.silent:
            self._rest(name)
        messages: list[Message] = []
        surplus: list[Message] = []
        for _, found in race.found:
            if messages and len(messages) + len(found) > wish.count:
                surplus += found
            else:
                messages += found
        return (yield from self._kept(wish, messages, surplus)) if messages else []

    def _request(self, wish: PopWish, name: str, hold_ms: int) -> bytes:
        if wish.start != "latest":
            return wish.encoded(hold_ms)
        place = wish.topic, name
        return wish.encoded(hold_ms, self._incarnations.get(place, 0), from_first=place in self._made_again)

    def _note_incarnation(self, wish: PopWish, name: str, answer: bytes) -> None:
        if wish.start == "latest":
            place, incarnation = (wish.topic, name), incarnation_in(answer)
            if not incarnation:
                return  # The topic is gone.
            if self._incarnations.get(place, incarnation) != incarnation:
                self._made_again.add(place)  # While the broker held this pop.
            self._incarnations[place] = incarnation

    def _note_made_again(self, topic: str, name: str) -> None:
        self._made_again.add((topic, name))
        self._incarnations.pop((topic, name), None)

    def _check_open(self) -> None:
        if self.is_closed:
            raise _closed_meanwhile()

    def _names(self, wish: PopWish) -> Steps[tuple[Route, list[str]]]:
        """The route, and the brokers that are to be asked."""
        known, known_names = self._known_names
        has_several = known is not None and known.topic == wish.topic and len(known_names) > 1
        try:
            route: Route = yield GetRoute(wish.topic, self._request_timeout_s, has_several)
        except TopicNotFoundError as error:
            if knows_nobody(error) and not is_away(error):
                raise NoRouteError(error.message, metadata=error.metadata) from error
            raise
        names = [wish.queue.broker_name] if wish.queue is not None else self._readable(route)
        if not names:
            # The route may be from before somebody permitted it.
            yield ForgetRoute(wish.topic)
            route = yield GetRoute(wish.topic, self._request_timeout_s)
            names = self._readable(route)
        if not names:
            raise nothing_to_read(route)
        self._outages.answered(NAME_SERVERS, wish.topic)
        return route, names

    def _awake(self, names: list[str]) -> list[str]:
        """Those that do not rest; all, if all do."""
        if not self._rests:  # Nearly always.
            return names
        now_s = self._clock()
        return [name for name in names if self._rests.get(name, (0.0, 0.0))[0] <= now_s] or names

    def _failed(self, name: str, topic: str, error: ProtomqError) -> None:
        if passes(error):
            self._outages.failed(f"broker {name}", topic, error)
        self._rest(name)

    def _answered(self, name: str, topic: str, asked_s: float = math.inf) -> None:
        self._rests.pop(name, None)
        self._outages.answered(f"broker {name}", topic, asked_s)

    def _rest(self, name: str) -> None:
        rest_s = min(self._rests.get(name, (0.0, REST_MIN_S / 2))[1] * 2, REST_MAX_S)
        self._rests[name] = self._clock() + rest_s, rest_s

    def _readable(self, route: Route) -> list[str]:
        """The brokers with queues that can be read; looked up once for each route that comes."""
        known, names = self._known_names
        if known is not route:
            names = list(dict.fromkeys(queue.broker_name for queue in route.read_queues))
            self._known_names = route, names
        return names

    def _pop(self, wish: PopWish, broker_name: str, hold_ms: int) -> Steps[list[Message]]:
        timeout_s = hold_ms / 1000 + CALL_EXTRA_S
        payload = [self._request(wish, broker_name, hold_ms)]
        # What is held is asked for again by `_receive`, for as long as is left then.
        retries = ONCE if hold_ms else CALL
        hold_id = self.held.begin(wish.topic, broker_name) if hold_ms else b""
        try:
            if hold_id:
                payload.append(id_field(hold_id))
                self._check_open()  # Whoever has closed it meanwhile may not have seen this call.
            data = yield from call_broker(wish.topic, broker_name, _methods.POP, payload, timeout_s, retries, self._clock)
        finally:
            self.held.end(hold_id)
        self._note_incarnation(wish, broker_name, data)
        return (yield from self._kept(wish, decode_pop_answer(data, wish.topic, broker_name)))

    def _kept(self, wish: PopWish, messages: list[Message], surplus: Sequence[Message] = ()) -> Steps[list[Message]]:
        """Those that are wanted. `surplus` is given back before."""
        try:
            if surplus:
                yield from self.give_back(surplus)
            return (yield from self._wanted(wish, messages))
        except GeneratorExit:
            raise
        except BaseException:  # A cancelled task: nobody gets any of them.
            if self.on_abandoned is not None:
                self.on_abandoned([*messages, *surplus])
            raise

    def _wanted(self, wish: PopWish, messages: list[Message]) -> Steps[list[Message]]:
        """Those that are wanted; the others are acknowledged."""
        kept = messages
        if wish.tags:  # the broker compares hashes
            kept = with_tags(kept, wish.tags)
        if self._hooks.filter:
            kept = self._hooks.kept(kept)
        if len(kept) < len(messages):
            wanted = set(map(id, kept))
            unwanted = [message for message in messages if id(message) not in wanted]
            try:
                yield from self.ack(unwanted)
            except ProtomqError as error:
                text = "%d messages of %s that nobody here wants are not acknowledged, and come again: %r"
                logger.warning(text, len(unwanted), wish.topic, error)
        return kept

    def ack(self, messages: Message | Iterable[Message]) -> Steps[list[Message]]:
        """Acknowledges; those that were not held any more."""
        with fork_waits:
            from .v1 import pop_service_pb2 as pb

        found = checked_messages(messages)
        steps = self._settle(found, _methods.ACK, pb.AckRequest, pb.AckResponse, repeat_is_stale=True)
        stale = yield from self._hooked("ack", found, steps)
        self._tell_settled(found, stale, None)
        return stale

    def nack(
        self, messages: Message | Iterable[Message], after_s: float, error: str | BaseException = "", retry_level: int | None = None
    ) -> Steps[list[Message]]:
        """Gives back; those that were not held any more. `retry_level`: see ChangeInvisibleRequest."""
        _check_hold("after_s", after_s)
        found = checked_messages(messages)
        stale = yield from self._hooked("nack", found, self.change_invisible(found, after_s, error, retry_level))
        self._tell_settled(found, stale, error_text(error) or "given back")
        return stale

    def give_back_all(self, topic: str, given: Iterable[HandOut]) -> Steps[None]:
        """Gives back what a `receive` that was interrupted has taken; it takes GIVE_BACK_S at most."""
        found = [decode_pop_answer(data, topic, broker_name) for broker_name, data in given]
        messages = [message for some in found for message in some]
        if messages:
            yield from self.give_back(messages, GIVE_BACK_S)

    def give_back(self, messages: Sequence[Message], timeout_s: float | None = None) -> Steps[None]:
        """Nobody has seen them: the delivery does not count, and others may have them at once."""
        with fork_waits:
            from .v1 import pop_service_pb2 as pb

        try:
            yield from self._settle(
                messages,
                _methods.CHANGE_INVISIBLE,
                lambda: pb.ChangeInvisibleRequest(unseen=True),
                pb.ChangeInvisibleResponse,
                repeat_is_stale=True,
                retries=CALL,
                timeout_s=timeout_s,
            )
        except StaleReceiptError:
            return  # They are not held any more.
        except ProtomqError as error:
            logger.info("%d messages that nobody has seen come again when their time is up: %r", len(messages), error)

    def _hooked(
        self, operation: str, messages: list[Message], steps: Steps[list[Message]]
    ) -> Steps[list[Message]]:
        """What the steps return, with the hooks around them."""
        if not self._hooks.settle or not messages:
            return (yield from steps)
        context = self._hooks.before_settle(operation, messages)
        try:
            stale = yield from steps
        except BaseException as error:
            self._hooks.after_settle(context, (), error)
            raise
        self._hooks.after_settle(context, stale)
        return stale

    def tell_received(self, messages: Iterable[Message]) -> None:
        """The program gets these from `receive`; those of a handler have hooks around the handler."""
        if self._held is not None:
            self._held.gave(messages)

    def _tell_settled(self, messages: list[Message], stale: list[Message], failure: str | None) -> None:
        if self._held is not None:
            gone = set(map(id, stale))
            self._held.settled([message for message in messages if id(message) not in gone], failure)
            self._held.settled(stale, "not held any more")

    def reply(
        self,
        message: Message,
        body: Body,
        properties: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> Steps[None]:
        """Replies to a request."""
        if timeout_s is None:
            timeout_s = reply_timeout_s(self._request_timeout_s)
        return reply_steps(message, body, properties, check_seconds("timeout_s", timeout_s))

    def change_invisible(
        self,
        messages: Message | Iterable[Message],
        invisible_s: float,
        error: str | BaseException = "",
        retry_level: int | None = None,
        retries: Retries = SETTLE,
    ) -> Steps[list[Message]]:
        """Holds for another time; those that were not held any more. `error`: why they failed, if they are given back for that."""
        with fork_waits:
            from .v1 import pop_service_pb2 as pb

        _check_hold("invisible_s", invisible_s)
        invisible_ms, text = math.ceil(invisible_s * 1000), error_text(error)
        return (
            yield from self._settle(
                checked_messages(messages),
                _methods.CHANGE_INVISIBLE,
                lambda: pb.ChangeInvisibleRequest(invisible_ms=invisible_ms, error=text, retry_level=retry_level),
                pb.ChangeInvisibleResponse,
                repeat_is_stale=invisible_ms == 0,
                retries=retries,
            )
        )

    def reject(self, message: Message, error: str) -> Steps[list[Message]]:
        """Makes a dead letter of it, and acknowledges it then; the message, where it was not held any more.

        It is held for that long at least. A crash in between leaves both: the dead letter, and the message, which comes again.
        """
        stale = yield from self.change_invisible(message, INVISIBLE_DEFAULT_S)
        if stale:
            return stale
        fields = {"error": error_text(error), "dead_letter": True, **attempt_fields(message)}
        yield from send_back_steps(self.group, [message], fields, lambda _: 0, self._request_timeout_s, SETTLE, self._clock)
        return (yield from self.ack(message))

    def _settle(
        self,
        messages: Sequence[Message],
        method: MethodInfo,
        make: Callable[[], object],
        answer_class: type,
        *,
        repeat_is_stale: bool,
        retries: Retries = SETTLE,
        timeout_s: float | None = None,
    ) -> Steps[list[Message]]:
        """`repeat_is_stale`: when it is done, nobody holds the messages any more, so the same call is refused."""
        by_topic: dict[tuple[str, str], list[Message]] = {}
        for place, neighbours in groupby(messages, _PLACE):
            by_topic.setdefault(place, []).extend(neighbours)
        steps = [
            self._settle_at(
                topic, broker_name, some[start : start + SETTLED_COUNT_MAX], method, make, answer_class, repeat_is_stale, retries, timeout_s
            )
            for (topic, broker_name), some in by_topic.items()
            for start in range(0, len(some), SETTLED_COUNT_MAX)
        ]
        if len(steps) == 1:
            return (yield from steps[0])
        stale: list[list[Message]] = yield Each(steps)
        return [message for some in stale for message in some]

    def _settle_at(
        self,
        topic: str,
        broker_name: str,
        messages: Sequence[Message],
        method: MethodInfo,
        make: Callable[[], object],
        answer_class: type,
        repeat_is_stale: bool,
        retries: Retries,
        timeout_s: float | None,
    ) -> Steps[list[Message]]:
        """At one broker. A call that is made again since its outcome is unknown may find that it was done: that is no failure.

        Who has been told to hold messages for longer still holds them: there, a stale one is somebody else's. The broker remembers what
        acknowledgements have done. If it does not, the outcome stays unknown. The error of the first such call says so (`_left_unknown`).
        """
        by_receipt: dict[bytes, list[Message]] = {}
        for receipt, neighbours in groupby(messages, _RECEIPT):
            by_receipt.setdefault(receipt, []).extend(neighbours)
        request: object = make()
        request.consumer_group, request.topic = self.group, topic  # type: ignore[attr-defined]
        for receipt, some in by_receipt.items():
            runs = runs_of(sorted(map(_OFFSET, some)))
            request.messages.add(receipt=receipt, offset_runs=runs)  # type: ignore[attr-defined]
        payload = (request.SerializeToString(),)  # type: ignore[attr-defined]
        deadline_s = self._clock() + (self._request_timeout_s if timeout_s is None else timeout_s)
        unknown: ProtomqError | None = None

        def attempt() -> Steps[bytes]:
            nonlocal unknown
            left_s = max(deadline_s - self._clock(), 0.001)
            # The connection may be dead without a word: then there is time for another one.
            limit_s = left_s if retries.tries_max == 1 else attempt_timeout(left_s)
            try:
                return (yield from call_broker(topic, broker_name, method, payload, limit_s, ONCE))
            except ProtomqError as error:
                if unknown is None and repeat_is_stale and not error.definite:
                    unknown = error
                raise

        is_ack = method is _methods.ACK
        try:
            data = yield from retried(attempt, retries.of_call(deadline_s, self._clock).decide)
        except StaleReceiptError as error:
            if unknown is None:
                raise
            if not is_ack:
                return []
            if error.metadata.get("never_acknowledged") != "true":
                raise _left_unknown(unknown) from error
            error.definite = True
            raise
        answer = decoded(data, answer_class.FromString)  # type: ignore[attr-defined]
        if unknown is not None and answer.stale_messages:
            if not is_ack:
                return []
            if not answer.never_acknowledged:
                raise _left_unknown(unknown)
        stale: list[Message] = []
        for named in answer.stale_messages:
            offsets = set(offsets_in(named.offset_runs))
            stale += [m for m in by_receipt.get(named.receipt, ()) if m.queue_offset in offsets]
        return stale


def _left_unknown(first: ProtomqError) -> ProtomqError:
    """The error of the first try of an acknowledgement, and what a further one has found."""
    text = (
        f"{first.message}. A further try found the receipts stale, and the broker does not know why: the messages may be acknowledged or "
        "not, and those that are not come again"
    )
    error = copy.copy(first)
    error.args, error.message = (text,), text
    error.metadata = {**first.metadata, "acknowledged": "unknown"}
    return error


def _closed_meanwhile() -> ClosedError:
    return ClosedError("it was closed while this call waited")


def passes(error: ProtomqError) -> bool:
    """Whether a pop may succeed by itself soon: its broker is away, silent, busy, or another one is elected."""
    kinds = TransportError | NoRouteError | NotMasterError | BusyError | StoreFailedError | DeadlineExceededError
    return error.retriable and (isinstance(error, kinds) or is_away(error))


def incarnation_in(payload: bytes) -> int:
    """The topic's incarnation in an encoded PopResponse; 0: it tells none. It stands at the front, behind the status."""
    position = 0
    while position < len(payload):
        field_tag, position = read_varint(payload, position)
        if field_tag & 7 or field_tag >> 3 > 5:
            return 0
        value, position = read_varint(payload, position)
        if field_tag >> 3 == 5:
            return value
    return 0


def may_be_given_up(answer: bytes) -> bool:
    """Whether the broker of an encoded PopResponse, which has no messages, says that it knows GiveUpPop."""
    with fork_waits:
        from .v1 import pop_service_pb2 as pb

    return decoded(answer, pb.PopResponse.FromString).may_be_given_up


def decode_pop_answer(payload: bytes, topic: str, broker_name: str) -> list[Message]:
    """The messages of an encoded PopResponse; the records behind its header are not parsed. Raises ProtocolError."""
    try:
        return _decode(payload, topic, broker_name)
    except (IndexError, TypeError, struct.error) as error:
        raise ProtocolError("a pop answer ends in the middle of a field") from error


def _decode(payload: bytes, topic: str, broker_name: str) -> list[Message]:
    with fork_waits:
        from .v1 import pop_service_pb2 as pb

    arrays = {9: b"", 10: b"", 11: b""}
    hand_outs: list[pb.PopHandOut] = []
    position, header_end = 0, len(payload)
    while position < header_end:
        field_tag, position = read_varint(payload, position)
        number, wire_type = field_tag >> 3, field_tag & 7
        if number <= 3:
            raise ProtocolError("a pop answer has records where its header was expected")
        if wire_type == 0:
            value, position = read_varint(payload, position)
            if number == 8:
                header_end = len(payload) - value
        elif wire_type == 2:
            size, position = read_varint(payload, position)
            if number == 7:
                hand_outs.append(decoded(payload[position : position + size], pb.PopHandOut.FromString))
            elif number in arrays:
                arrays[number] = payload[position : position + size]
            position += size
        else:
            position = skip_value(payload, position, field_tag)
    counts = [hand_out.record_count for hand_out in hand_outs]
    record_count = sum(counts)
    if position != header_end or not (
        len(arrays[9]) == len(arrays[10]) == 4 * record_count and len(arrays[11]) == 8 * record_count
    ):
        raise ProtocolError("a pop answer names more records than it has")
    starts, sizes = read_u32s(arrays[9]), read_u32s(arrays[10])
    offsets = struct.unpack(f"<{record_count}Q", arrays[11])
    messages: list[Message] = []
    first = 0
    for hand_out, count_of_one in zip(hand_outs, counts, strict=True):
        queue = PoppedQueue(topic, broker_name, hand_out.queue_id)
        queue.receipt, queue.attempt = hand_out.receipt, hand_out.attempt
        part = slice(first, first + count_of_one)
        first += count_of_one
        answer = PullAnswer(
            PullStatus.FOUND, 0, 0, 0, payload, header_end, starts[part], sizes[part], offsets[part]
        )
        messages += AnswerMessages(answer, queue).part(0, count_of_one)
    return messages


def checked_messages(messages: object) -> list[Message]:
    """Popped messages, one, several or none. Raises WrongTypeError."""
    found = [messages] if isinstance(messages, Message) else messages
    if not isinstance(found, Iterable):
        raise WrongTypeError(f"messages are messages that `receive` has returned, not {messages!r}")
    checked = list(found)
    # Kinds are few: so they are looked at, not the messages, unless something is wrong.
    if all(issubclass(kind, Message) for kind in set(map(type, checked))) and all(
        issubclass(kind, PoppedQueue) for kind in set(map(type, map(_QUEUE, checked)))
    ):
        return checked
    for message in checked:
        if not isinstance(message, Message) or not isinstance(message.queue, PoppedQueue):
            raise WrongTypeError(f"messages are messages that `receive` has returned, {message!r} is none")
    return checked


def _check_hold(name: str, seconds: float) -> None:
    if not 0 <= check_number(name, seconds) <= INVISIBLE_MAX_S:
        raise ConfigurationError(f"{name} is 0 to {INVISIBLE_MAX_S:.0f} (12 h), not {seconds}")
