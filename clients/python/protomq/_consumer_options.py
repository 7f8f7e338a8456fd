"""Settings of consumers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from ._checks import check_flag, check_group, check_name, check_seconds
from ._hook_points import check_hooks
from ._offset_calls import Begin, check_begin
from ._pull_logic import OffsetReset, PullOptions
from ._transport_options import LongHold
from .allocation import Allocation, Average
from .errors import ConfigurationError, WrongTypeError
from .hooks import Hook

AVERAGE: Final = Average()
AUTO_COMMIT_INTERVAL_S: Final = 5.0
"""RocketMQ's persistConsumerOffsetInterval."""
NAME_MAX_BYTES: Final = 128
REQUEST_TIMEOUT_S: Final = 3.0
PULL_TIMEOUT_EXTRA_S: Final = 5.0
"""What a pull may take beyond its hold: a cold disk, a slow network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Settings of a pull consumer.

    - `group`: whose offsets are committed; without one, nothing is.
    - `broadcasting`: each member of the group gets all messages; no broker keeps its offsets. False (RocketMQ: CLUSTERING): they share.
    - `allocation`: how the members of a group share queues out (protomq.allocation); all have to do it alike.
    - `lock_queues`: each queue of its share is its own, by a lock at the broker, before it is consumed (docs/groups.md); for consuming in
      order. All members of the group have to do it.
    - `machine_room`: where it runs, for allocations that look at it.
    - `instance_name`: names the member, "host@instance_name", over restarts; else "host@pid@random", or `client_id`.
    - `begin`: where a queue without a committed offset begins: "earliest", "latest" or a datetime. A group's retries begin at their
      beginning. Where it is not "earliest", the start is committed at once (docs/groups.md).
    - `resume`: False: begin there even if there is a committed offset. Queues that another member has had since go on at that offset.
    - `auto_commit`: positions are committed inside `poll`, every `auto_commit_interval_s` seconds, and on `close`.
    - `offset_reset`: what to do when the position is outside the queue (its messages expired). Go to the "nearest" valid offset,
      "earliest" or "latest", or raise an "error".
    - `hold_ms`: how long a broker holds a pull of an empty queue, 0 to 60,000. Over the remoting port a master holds pulls of subscribed
      topics four times as long, 60 s at most. After `hold_ms` it is asked whether it is there.
    - `pull_record_count_max`, `pull_size_max_bytes`: bounds of one answer. Over the remoting port the consumer stops reading while 8 MiB
      wait to be handed out. Over gRPC up to two answers per queue are in memory.
    - `request_timeout_s`: of each call besides pulls, all its tries together.
    - `trace`: the consumer reports what `poll` gave in RMQ_SYS_TRACE_TOPIC, in the background
      (docs/track.md).
    - `hooks`: code of yours that runs before and after what `poll` gave and before and after calls, and that filters
      (protomq.hooks).
    """

    group: str = ""
    broadcasting: bool = False
    allocation: Allocation = AVERAGE
    lock_queues: bool = False
    machine_room: str = ""
    instance_name: str = ""
    begin: Begin = "earliest"
    resume: bool = True
    auto_commit: bool = True
    auto_commit_interval_s: float = AUTO_COMMIT_INTERVAL_S
    offset_reset: OffsetReset = "nearest"
    hold_ms: int = 15_000
    pull_record_count_max: int = 32_768
    pull_size_max_bytes: int = 4 << 20
    request_timeout_s: float = REQUEST_TIMEOUT_S
    trace: bool = False
    hooks: Sequence[Hook] = ()

    def __post_init__(self) -> None:
        check_begin(self.begin)
        check_seconds("auto_commit_interval_s", self.auto_commit_interval_s)
        check_seconds("request_timeout_s", self.request_timeout_s)
        check_flag("resume", self.resume)
        check_flag("auto_commit", self.auto_commit)
        check_flag("trace", self.trace)
        check_group(self.group)
        check_flag("broadcasting", self.broadcasting)
        check_flag("lock_queues", self.lock_queues)
        if self.lock_queues and not self.shares:
            raise ConfigurationError(
                "lock_queues holds queues that the members of a group share: this consumer has no group, or broadcasting=True gives it all "
                "queues. Leave it out, or share"
            )
        if not isinstance(getattr(self.allocation, "name", None), str) or not callable(getattr(self.allocation, "share", None)):
            raise WrongTypeError(f"allocation is one of protomq.allocation, such as Circle(), not {self.allocation!r}")
        check_name("the name of the allocation", self.allocation.name)
        for name in ("machine_room", "instance_name"):
            check_name(name, getattr(self, name), NAME_MAX_BYTES)
        check_hooks(self.hooks)
        self.pull_options()

    def pull_options(self) -> PullOptions:
        """What to ask for in one pull. Raises ConfigurationError."""
        return PullOptions(
            self.group,
            self.hold_ms,
            self.pull_record_count_max,
            self.pull_size_max_bytes,
            self.offset_reset,
            self.broadcasting,
        )

    @property
    def auto_commits(self) -> bool:
        """Whether it commits by itself."""
        return self.auto_commit and self.shares

    @property
    def shares(self) -> bool:
        """Whether what it subscribes to is shared with the other members of its group."""
        return bool(self.group) and not self.broadcasting

    @property
    def pull_timeout_s(self) -> float:
        """How long a pull may take, its hold and all."""
        return self.hold_ms / 1000 + PULL_TIMEOUT_EXTRA_S

    @property
    def long_hold(self) -> LongHold:
        """How long a pull may take that rests at a master."""
        return LongHold(self.pull_options().quiet_hold_ms / 1000 + PULL_TIMEOUT_EXTRA_S, self.hold_ms / 1000)


class ConsumerSettings(TypedDict, total=False):
    """Keyword arguments of the consumers: the fields of ConsumerOptions but its group (a test compares them)."""

    broadcasting: bool
    allocation: Allocation
    lock_queues: bool
    machine_room: str
    instance_name: str
    begin: Begin
    resume: bool
    auto_commit: bool
    auto_commit_interval_s: float
    offset_reset: OffsetReset
    hold_ms: int
    pull_record_count_max: int
    pull_size_max_bytes: int
    request_timeout_s: float
    trace: bool
    hooks: Sequence[Hook]
