"""Settings of a consumer group, and what becomes of a message that failed: when it is retried, or that it is a dead letter. Pure.

    delivery 1 fails -> retry 1 after the first delay -> … -> retry n after the n-th delay -> dead letter once retry_count_max are spent

RocketMQ: retryMaxTimes 16; the first retry waits for delay level 3 (10s), the 16th for level 18 (2h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from protomq.v1.group_pb2 import GroupSettings as GroupMessage
from protomq.wire.topics import why_no_group
from protomq_broker.store.errors import StoreError

RETRY_COUNT_DEFAULT: Final = 16
RETRY_COUNT_MAX: Final = (1 << 31) - 1
RETRY_DELAYS_MAX: Final = 64
RETRY_DELAY_MAX_MS: Final = 40 * 86_400_000
"""The longest delay that a message can have."""
FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry, as in RocketMQ."""
VERSION_MAX: Final = (1 << 63) - 1
"""The highest that there can be: int64."""
VERSION_PUT_MAX: Final = 1 << 62
"""The highest version that whoever changes settings may name: what comes later needs higher ones."""


class GroupSettingsError(StoreError):
    """Settings that no group can have.

    Attributes: field: the field of the message GroupSettings that is wrong.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How the messages of a group are delivered.

    Attributes:
        group: its name.
        orderly: it gets each queue in order.
        retry_count_max: retries before a message becomes a dead letter, 0 to 2^31 - 1; None: 16, or without limit for an orderly group.
        retry_delays_ms: how long each retry waits; the last one stands for all further ones. None: the broker's levels from level 3 on.
        consume_enabled: its members may pull.
        broadcast_enabled: its members may consume in broadcast mode.
        version: of two settings the one with the higher version holds; 0: nobody has set the group up.
    """

    group: str
    orderly: bool = False
    retry_count_max: int | None = None
    retry_delays_ms: tuple[int, ...] = ()
    consume_enabled: bool = True
    broadcast_enabled: bool = True
    version: int = 0

    def __post_init__(self) -> None:
        """Raises GroupSettingsError."""
        if reason := why_no_group(self.group):
            raise GroupSettingsError("consumer_group", reason)
        if self.retry_count_max is not None and not 0 <= self.retry_count_max <= RETRY_COUNT_MAX:
            raise GroupSettingsError(
                "retry_count_max", f"is 0 to {RETRY_COUNT_MAX}, not {self.retry_count_max}"
            )
        if len(self.retry_delays_ms) > RETRY_DELAYS_MAX:
            raise GroupSettingsError(
                "retry_delays_ms", f"are {RETRY_DELAYS_MAX} at most, not {len(self.retry_delays_ms)}"
            )
        for delay_ms in self.retry_delays_ms:
            if not 0 <= delay_ms <= RETRY_DELAY_MAX_MS:
                raise GroupSettingsError(
                    "retry_delays_ms", f"are 0 to {RETRY_DELAY_MAX_MS} (40 days) each, not {delay_ms}"
                )
        if self.version < 0:
            raise GroupSettingsError("version", f"is 0 to 2^62, not {self.version}")

    @property
    def retry_limit(self) -> int | None:
        """Retries before a message becomes a dead letter; None: without limit."""
        if self.retry_count_max is None and not self.orderly:
            return RETRY_COUNT_DEFAULT
        return self.retry_count_max


def retry_delays_of(settings: GroupSettings, levels_ms: Sequence[int]) -> Sequence[int]:
    """How long each retry of the group waits, in milliseconds. `levels_ms`: the broker's delay levels, level 1 first; at least one."""
    return settings.retry_delays_ms or levels_ms[FIRST_RETRY_LEVEL - 1 :] or levels_ms[-1:]


def plan_retry(
    settings: GroupSettings,
    levels_ms: Sequence[int],
    failed_count: int,
    asked_delay_ms: int | None = None,
) -> int | None:
    """How long a message waits for its next delivery, in milliseconds; None: it becomes a dead letter.

    `failed_count`: its deliveries that failed, the last one too: 1 or more. `asked_delay_ms`: what the consumer asks for; the limit holds
    all the same.
    """
    assert failed_count >= 1, "a retry comes after a delivery"
    limit = settings.retry_limit
    if limit is not None and failed_count > limit:
        return None
    if asked_delay_ms is not None:
        return asked_delay_ms
    delays_ms = retry_delays_of(settings, levels_ms)
    return delays_ms[min(failed_count, len(delays_ms)) - 1]


def group_to_message(settings: GroupSettings) -> GroupMessage:
    """As records and clients see it."""
    return GroupMessage(
        consumer_group=settings.group,
        orderly=settings.orderly,
        retry_count_max=settings.retry_count_max,
        retry_delays_ms=settings.retry_delays_ms,
        consume_enabled=settings.consume_enabled,
        broadcast_enabled=settings.broadcast_enabled,
        version=settings.version,
    )


def group_from_message(message: GroupMessage) -> GroupSettings:
    """What a record or a client says. Raises GroupSettingsError."""
    return GroupSettings(
        message.consumer_group,
        orderly=message.orderly,
        retry_count_max=message.retry_count_max if message.HasField("retry_count_max") else None,
        retry_delays_ms=tuple(message.retry_delays_ms),
        consume_enabled=not message.HasField("consume_enabled") or message.consume_enabled,
        broadcast_enabled=not message.HasField("broadcast_enabled") or message.broadcast_enabled,
        version=message.version,
    )
