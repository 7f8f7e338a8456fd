"""What a consumer obeys of its group's settings, and asks brokers for from time to time: brokers cannot obey it for the consumer.

    orderly push consumer     the limit of retries: it tries again by itself
    broadcasting consumer     whether the group consumes, and may broadcast: its pulls name no membership, and may name no group

The settings with the highest version hold, over all brokers. A broker that is away changes nothing. One that no route has named for
FORGET_S is gone for good, and has no say any more. A consumer that starts now does not hear of it either.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from . import _methods
from ._call_steps import call_broker
from ._decoding import decoded
from ._late_imports import fork_waits
from ._retry import ONCE
from ._steps import Each, Steps
from ._types import MessageQueue
from .errors import ProtomqError, UnknownMethodError

if TYPE_CHECKING:
    from .v1 import group_service_pb2
    from .v1.group_pb2 import GroupSettings

logger = logging.getLogger("protomq")

LOOK_INTERVAL_S: Final = 15.0
LOOK_AGAIN_S: Final = 2.0
"""While no broker has answered yet."""
LOOK_TIMEOUT_S: Final = 0.5
"""Meanwhile nothing is polled."""
FORGET_S: Final = 120.0
"""A broker that restarts is in no route meanwhile; that long, as RocketMQ's name server waits for one."""


class GroupLooks:
    """The settings of one group, as one consumer knows them."""

    def __init__(self, group: str, clock: Callable[[], float]) -> None:
        self._group = group
        self._clock = clock
        self._known: GroupSettings | None = None
        self._by_broker: dict[str, GroupSettings] = {}
        """What each broker said last; one that does not answer, or has left the route, may come back with it."""
        self._named_s: dict[str, float] = {}
        """When each of them was last in a route."""
        self._next_s = -math.inf
        self._has_told = False
        self.is_shut = False
        """Broadcasting: whether the settings say that nothing is consumed."""

    @property
    def retry_count_max(self) -> int | None:
        """What was set; None: nothing, or it is not known."""
        known = self._known
        return known.retry_count_max if known is not None and known.HasField("retry_count_max") else None

    def due_in_s(self, now_s: float) -> float:
        """Until the next look."""
        return max(self._next_s - now_s, 0.0)

    def look(
        self, queues: Iterable[MessageQueue], timeout_s: float = LOOK_TIMEOUT_S, *, broadcasting: bool = False
    ) -> Steps[None]:
        """Asks the brokers of these queues. `broadcasting`: and says how it consumes, which brokers tell members of the group."""
        topics = {queue.broker_name: queue.topic for queue in queues}
        answers: list[group_service_pb2.GetGroupResponse | None] = yield Each(
            [self._ask(topic, name, timeout_s, broadcasting) for name, topic in topics.items()]
        )
        found = [None if answer is None else answer.settings for answer in answers]
        self._tell_of_members([answer.sharing_member for answer in answers if answer is not None])
        now_s = self._clock()
        self._by_broker |= {name: one for name, one in zip(topics, found, strict=True) if one is not None}
        self._named_s |= dict.fromkeys(topics, now_s)
        for name in [name for name, named_s in self._named_s.items() if now_s - named_s > FORGET_S]:
            del self._named_s[name]
            self._by_broker.pop(name, None)
        self._known = max(self._by_broker.values(), key=lambda one: one.version, default=None)
        self._next_s = now_s + (LOOK_AGAIN_S if self._known is None else LOOK_INTERVAL_S)

    def look_at_broadcast(self, queues: Iterable[MessageQueue], timeout_s: float = LOOK_TIMEOUT_S) -> Steps[None]:
        """Asks, and says whether a broadcasting consumer goes on (`is_shut`). The log hears of a change."""
        yield from self.look(queues, timeout_s, broadcasting=True)
        off: list[str] = []
        known = self._known
        if known is not None and known.HasField("consume_enabled") and not known.consume_enabled:
            off.append("consume_enabled")
        if known is not None and known.HasField("broadcast_enabled") and not known.broadcast_enabled:
            off.append("broadcast_enabled")
        if bool(off) == self.is_shut:
            return
        self.is_shut = bool(off)
        if off:
            text = "group %s: %s is off in its settings, so nothing is consumed in broadcast mode; `protomq group set` turns it on"
            logger.warning(text, self._group, " and ".join(off))
        else:
            logger.warning("group %s consumes in broadcast mode again, as its settings say", self._group)

    def _tell_of_members(self, names: Iterable[str]) -> None:
        """Once; members are told by their brokers."""
        name = next(filter(None, names), "")
        if name and not self._has_told:
            self._has_told = True
            logger.warning(
                "the consumers of group %s are not alike: %s shares its queues with other members, and this one consumes in broadcast "
                "mode. Each message comes to both: give each kind a group of its own",
                self._group, name,
            )  # fmt: skip

    def _ask(
        self, topic: str, broker_name: str, timeout_s: float, broadcasting: bool
    ) -> Steps[group_service_pb2.GetGroupResponse | None]:
        with fork_waits:
            from .v1 import group_service_pb2 as pb

        payload = pb.GetGroupRequest(consumer_group=self._group, broadcasting=broadcasting).SerializeToString()
        try:
            data = yield from call_broker(topic, broker_name, _methods.GET_GROUP, (payload,), timeout_s, ONCE, self._clock)
            return decoded(data, pb.GetGroupResponse.FromString)
        except UnknownMethodError:
            return pb.GetGroupResponse()  # A broker of an older version has none.
        except ProtomqError as error:
            logger.debug("group %s: broker %s does not tell its settings: %r", self._group, broker_name, error)
            return None
