"""How a member of a group stands, for operators who ask it through a broker: settings, counts, queues, stacks. See `_membership_logic.py`.

It is read without the consumer's locks: a listener that hangs with one of them is what somebody wants to see. So the numbers are of
nearly the same moment, not of exactly one.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ._late_imports import fork_waits
from ._remoting_hello import VERSION
from ._stacks import Stacks
from ._types import MessageQueue

if TYPE_CHECKING:
    from ._pull_logic import QueueState
    from .v1 import membership_service_pb2 as pb

QUEUES_MAX: Final = 2_000
SETTING_LENGTH_MAX: Final = 200
SIZE_MAX_BYTES: Final = 1_000_000
"""A broker takes 1 MiB."""
RATE_SPAN_S: Final = 60.0
TRIES_MAX: Final = 5

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class About:
    """What a client knows of itself.

    `open_counts`: messages that were handed out and are not done.
    """

    kind: str
    settings: Mapping[str, str]
    counts: Mapping[str, int] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    open_counts: Mapping[MessageQueue, int] = field(default_factory=dict)


class Rates:
    """By how much counters grow in a second, as a mean of the last minute. It looks at them once a second or less often."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque()

    def note(self, counts: Mapping[str, int]) -> None:
        """How they stand now."""
        now_s = self._clock()
        if self._seen and now_s - self._seen[-1][0] < 1.0:
            return
        self._seen.append((now_s, counts))
        while now_s - self._seen[0][0] > RATE_SPAN_S:
            self._seen.popleft()

    def per_s(self, counts: Mapping[str, int]) -> dict[str, float]:
        """The rates, with how they stand now; none in the first second."""
        if not self._seen:
            return {}
        first_s, first = self._seen[0]
        span_s = self._clock() - first_s
        if span_s < 1.0:
            return {}
        return {name: (count - first.get(name, 0)) / span_s for name, count in counts.items()}


def read_unlocked(read: Callable[[], _T]) -> _T:
    """What `read` finds in collections that another thread may change meanwhile; it is done again if that happened."""
    for _ in range(TRIES_MAX - 1):
        try:
            return read()
        except RuntimeError:  # Changed during iteration.
            continue
    return read()


def settings_of(options: Any) -> dict[str, str]:
    """The fields of an options object, as text."""
    return {
        field.name: repr(getattr(options, field.name))[:SETTING_LENGTH_MAX] for field in dataclasses.fields(options)
    }


def description(
    about: About,
    began_s: float,
    queues: Iterable[QueueState],
    stacks: Sequence[Stacks],
) -> pb.MemberDescription:
    """What is sent. Queues beyond QUEUES_MAX, and stacks that would make it too large, are left out."""
    with fork_waits:
        from .v1 import membership_service_pb2 as pb

    made = pb.MemberDescription(
        kind=about.kind,
        version=f"protomq-python {VERSION}, {platform.python_implementation()} {platform.python_version()}, {sys.platform}",
        running_ms=int((time.monotonic() - began_s) * 1000),
        settings=about.settings,
        counts=about.counts,
        rates=about.rates,
    )
    listed = sorted(queues)
    for one in listed[:QUEUES_MAX]:
        made.queues.add(
            topic=one.queue.topic,
            broker_name=one.queue.broker_name,
            queue_id=one.queue.queue_id,
            position=-1 if one.position is None else one.position,
            committed_offset=-1 if one.committed is None else one.committed,
            open_messages=one.open_count,
            is_paused=one.is_paused,
        )
    made.is_cut = len(listed) > QUEUES_MAX or any(some.is_cut for some in stacks)
    size_bytes = made.ByteSize()
    for stack in itertools.chain(*(some.stacks for some in stacks)):
        size_bytes += len(stack.name.encode()) + len(stack.text.encode(errors="replace")) + 16
        if size_bytes > SIZE_MAX_BYTES:
            made.is_cut = True
            break
        made.stacks.add(name=stack.name, text=stack.text.encode(errors="replace").decode())
    return made
