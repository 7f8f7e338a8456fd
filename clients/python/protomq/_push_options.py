"""Settings of push consumers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypedDict

from ._checks import check_count, check_flag, check_group, check_seconds, check_text
from ._consumer_options import (
    AUTO_COMMIT_INTERVAL_S,
    AVERAGE,
    REQUEST_TIMEOUT_S,
    ConsumerOptions,
    ConsumerSettings,
)
from ._offset_calls import Begin
from .allocation import Allocation
from .errors import ConfigurationError
from .hooks import Hook

CONCURRENCY_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Settings of a push consumer.

    - `group`: whose messages these are.
    - `concurrency`: how many messages are with listeners at a time: threads, or tasks; `set_concurrency` changes it. 1 to 1,024.
    - `orderly`: each queue one message or batch at a time, in order; a message that fails holds up its queue. The member has its queues to
      itself, by locks at their brokers. Not with `broadcast`.
    - `broadcast`: each member gets all messages. Nothing is given back: what fails is dropped, and logged. Offsets are in a file.
    - `offset_folder`, `instance`: where `broadcast` keeps its file ("": ~/.local/state/protomq/offsets), and what tells consumers of one
      group on one machine apart.
    - `begin`, `resume`, `hold_ms`, `request_timeout_s`, `allocation`, `machine_room`, `instance_name`: as of a pull consumer.
    - `queue_count_max`, `queue_size_max_bytes`, `queue_span_max`: bounds of one queue. They count its messages here that are not done,
      their bytes, and the offsets from the lowest of them to the last one taken. At a bound the consumer takes no more of it.
      `count_max`, `size_max_bytes`: the same for all queues together. The last message taken may be beyond a bound of bytes.
    - `consume_timeout_s`: a message that a listener still has after this time is given back, and comes again. If `orderly`,
      its queue waits, and the log says so.
    - `commit_interval_s`: between two commits.
    - `suspend_ms`: how long an orderly queue waits after a failure.
    - `attempts_max`: after this number of failures an orderly message becomes a dead letter. None: the retry limit of the group holds; if
      none was set, it is tried for ever. Only with `orderly`: else the group's settings say it (docs/retry.md).
    - `drain_timeout_s`: how long `stop` waits for listeners.
    - `pull_record_count_max`, `pull_size_max_bytes`: bounds of one answer.
    - `trace`: what listeners did is told in RMQ_SYS_TRACE_TOPIC, in the background (docs/track.md).
    - `hooks`: code of yours that is called around listeners and calls, and that filters (protomq.hooks).
    """

    group: str = ""
    concurrency: int = 20
    orderly: bool = False
    broadcast: bool = False
    begin: Begin = "earliest"
    resume: bool = True
    queue_count_max: int = 1000
    queue_size_max_bytes: int = 100 << 20
    queue_span_max: int = 2000
    count_max: int = 20_000
    size_max_bytes: int = 512 << 20
    consume_timeout_s: float = 900.0
    commit_interval_s: float = AUTO_COMMIT_INTERVAL_S
    suspend_ms: int = 1000
    attempts_max: int | None = None
    drain_timeout_s: float = 10.0
    offset_folder: str = ""
    instance: str = ""
    hold_ms: int = 15_000
    pull_record_count_max: int = 1024
    pull_size_max_bytes: int = 1 << 20
    request_timeout_s: float = REQUEST_TIMEOUT_S
    allocation: Allocation = AVERAGE
    machine_room: str = ""
    instance_name: str = ""
    trace: bool = False
    hooks: Sequence[Hook] = ()

    def __post_init__(self) -> None:
        if not self.group:
            raise ConfigurationError('a push consumer has a group: PushConsumer("my-group")')
        check_group(self.group)
        check_count("concurrency", self.concurrency, 1, CONCURRENCY_MAX)
        check_flag("orderly", self.orderly)
        check_flag("broadcast", self.broadcast)
        check_flag("resume", self.resume)
        if self.orderly and self.broadcast:
            raise ConfigurationError(
                "orderly and broadcast exclude each other: orderly holds a queue for one member, broadcast gives it to all. Leave one "
                "out; concurrency=1 keeps the order of what a broadcast brings"
            )
        check_flag("trace", self.trace)
        check_text("offset_folder", self.offset_folder)
        check_text("instance", self.instance)
        if self.instance and not self.broadcast:
            raise ConfigurationError(
                "instance names the file of a consumer with broadcast=True; without that brokers keep the offsets: leave it out"
            )
        for name in ("queue_count_max", "queue_span_max", "count_max"):
            check_count(name, getattr(self, name), 1, 1 << 24)
        for name in ("queue_size_max_bytes", "size_max_bytes"):
            check_count(name, getattr(self, name), 1, 1 << 40)
        check_seconds("consume_timeout_s", self.consume_timeout_s)
        check_seconds("commit_interval_s", self.commit_interval_s)
        check_count("suspend_ms", self.suspend_ms, 1, 40 * 86_400_000)
        if self.attempts_max is not None:
            check_count("attempts_max", self.attempts_max, 1, 1 << 24)
            if not self.orderly:
                raise ConfigurationError(
                    "attempts_max is of an orderly consumer, which tries a message again itself; without orderly=True brokers count: "
                    f"set retry_count_max of the group, as with `protomq group set {self.group} --retries {self.attempts_max - 1}`"
                )
        check_seconds("drain_timeout_s", self.drain_timeout_s, zero=True)
        self.consumer_options()

    def consumer_options(self) -> ConsumerOptions:
        """Those of the pull consumer below. Raises ConfigurationError."""
        return ConsumerOptions(group=self.consumer_group, **self.consumer_settings())

    @property
    def consumer_group(self) -> str:
        """The group of the pull consumer below: in broadcast mode nobody shares anything with it."""
        return "" if self.broadcast else self.group

    def consumer_settings(self) -> ConsumerSettings:
        """The settings of the pull consumer below."""
        return {
            "begin": self.begin,
            "resume": self.resume and not self.broadcast,
            "auto_commit": not self.broadcast,
            "lock_queues": self.orderly and not self.broadcast,
            "auto_commit_interval_s": self.commit_interval_s,
            "hold_ms": self.hold_ms,
            "pull_record_count_max": self.pull_record_count_max,
            "pull_size_max_bytes": self.pull_size_max_bytes,
            "request_timeout_s": self.request_timeout_s,
            "allocation": self.allocation,
            "machine_room": self.machine_room,
            "instance_name": self.instance_name,
            "hooks": self.hooks,
        }


class PushSettings(TypedDict, total=False):
    """Keyword arguments of the push consumers: the fields of PushOptions but its group (a test compares them)."""

    concurrency: int
    orderly: bool
    broadcast: bool
    begin: Begin
    resume: bool
    queue_count_max: int
    queue_size_max_bytes: int
    queue_span_max: int
    count_max: int
    size_max_bytes: int
    consume_timeout_s: float
    commit_interval_s: float
    suspend_ms: int
    attempts_max: int | None
    drain_timeout_s: float
    offset_folder: str
    instance: str
    hold_ms: int
    pull_record_count_max: int
    pull_size_max_bytes: int
    request_timeout_s: float
    allocation: Allocation
    machine_room: str
    instance_name: str
    trace: bool
    hooks: Sequence[Hook]
