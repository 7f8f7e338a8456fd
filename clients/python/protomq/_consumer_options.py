"""Settings of consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from ._checks import check_flag, check_group, check_seconds
from ._offset_calls import Begin, check_begin
from ._pull_logic import OffsetReset, PullOptions

AUTO_COMMIT_INTERVAL_S: Final = 5.0
"""RocketMQ's persistConsumerOffsetInterval."""
REQUEST_TIMEOUT_S: Final = 3.0
PULL_TIMEOUT_EXTRA_S: Final = 5.0
"""What a pull may take beyond its hold: a cold disk, a slow network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """Settings of a pull consumer.

    - `group`: whose offsets are committed; without one, nothing is.
    - `begin`: where a queue without a committed offset begins: "earliest", "latest" or a datetime.
    - `resume`: False: begin there even if there is a committed offset.
    - `auto_commit`: positions are committed inside `poll`, every `auto_commit_interval_s` seconds, and on `close`.
    - `offset_reset`: what to do when the position is outside the queue (its messages expired): go to the "nearest" valid offset,
      "earliest", "latest", or raise an "error".
    - `hold_ms`: how long a broker holds a pull of an empty queue, 0 to 60,000.
    - `pull_record_count_max`, `pull_size_max_bytes`: bounds of one answer. Over the remoting port no more is read while 8 MiB wait to be
      handed out; over gRPC up to two answers per queue are in memory.
    - `request_timeout_s`: of each call besides pulls, all its tries together.
    - `trace`: what `poll` gave is told in RMQ_SYS_TRACE_TOPIC, in the background (docs/track.md).
    """

    group: str = ""
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

    def __post_init__(self) -> None:
        check_begin(self.begin)
        check_seconds("auto_commit_interval_s", self.auto_commit_interval_s)
        check_seconds("request_timeout_s", self.request_timeout_s)
        check_flag("resume", self.resume)
        check_flag("auto_commit", self.auto_commit)
        check_flag("trace", self.trace)
        check_group(self.group)
        self.pull_options()

    def pull_options(self) -> PullOptions:
        """What to ask for in one pull. Raises ConfigurationError."""
        return PullOptions(
            self.group,
            self.hold_ms,
            self.pull_record_count_max,
            self.pull_size_max_bytes,
            self.offset_reset,
        )

    @property
    def auto_commits(self) -> bool:
        """Whether it commits by itself."""
        return self.auto_commit and bool(self.group)

    @property
    def pull_timeout_s(self) -> float:
        """How long a pull may take, its hold and all."""
        return self.hold_ms / 1000 + PULL_TIMEOUT_EXTRA_S


class ConsumerSettings(TypedDict, total=False):
    """Keyword arguments of the consumers: the fields of ConsumerOptions but its group (a test compares them)."""

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
