"""What servers measure, as tables: everything that shows a number takes its name, unit and meaning from here.

    Metric     name, unit, kind, help, bounds
    Table      metrics with the same attributes; a server's tables are constants (LANES here, more in a service's own `metrics.py`)
    Numbers    a table and its rows as they are now: the attributes' values, and a value for each metric

The metrics page (`metrics_page.py`), OpenTelemetry (`telemetry.py`) and docs/metrics.md are made from these tables. Values are read when
somebody looks, and at no other time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from .lane_pool import PoolStatus

_NAME: Final = re.compile(r"protomq(\.[a-z]+(_[a-z]+)*)+")
_UNIT_WORDS: Final = {"s": "seconds", "By": "bytes", "1": "ratio"}
"""How a name in Prometheus ends, unless the name has the word already."""


class Kind(Enum):
    """What a metric's values mean."""

    GAUGE = "gauge"
    """What it is now."""
    COUNTER = "counter"
    """What has happened since the start: it only grows."""
    HISTOGRAM = "histogram"
    """What has happened since the start, counted by size."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as OpenTelemetry has it, words with dots between them.
        unit: `s`, `By`, `1` for a ratio from 0 to 1, `{call}` for a number of calls; "" for what has none.
        heading: its short name on the metrics page.
        help: what it counts.
        bounds: of a histogram and of nothing else: the largest value that each of its counts covers, ascending, in `unit`.
    """

    name: str
    unit: str
    heading: str
    help: str
    kind: Kind = Kind.GAUGE
    bounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert self.unit in ("", *_UNIT_WORDS) or re.fullmatch(r"\{[a-z]+\}", self.unit), self.unit
        assert bool(self.bounds) == (self.kind is Kind.HISTOGRAM), self.name
        assert list(self.bounds) == sorted(set(self.bounds)), self.name

    @property
    def prometheus_name(self) -> str:
        """Without the endings that tell the samples of a counter or a histogram apart."""
        words = self.name.replace(".", "_").split("_")
        unit_word = _UNIT_WORDS.get(self.unit)
        if unit_word is not None and unit_word not in words:
            words.append(unit_word)
        return "_".join(words)


@dataclass(frozen=True, slots=True)
class Table:
    """Metrics with the same attributes.

    Attributes:
        title: for people.
        attributes: names; Prometheus calls them labels.
    """

    title: str
    attributes: tuple[str, ...]
    metrics: tuple[Metric, ...]

    def __post_init__(self) -> None:
        histograms = any(metric.kind is Kind.HISTOGRAM for metric in self.metrics)
        assert not (histograms and self.attributes), "a histogram has no attributes"


class Distribution(Protocol):
    """The value of a histogram. Its owner goes on counting in it.

    Attributes:
        counts: how many values lie at or below each bound and above the one before; the last: above all bounds.
        sum: of all values.
        on_observed: called with each value, by whoever has observed it.
    """

    @property
    def counts(self) -> Sequence[int]: ...

    @property
    def sum(self) -> float: ...

    on_observed: Callable[[float], None] | None


Row: TypeAlias = tuple[Sequence[str], Sequence["float | Distribution"]]


class Numbers(NamedTuple):
    """A table, and what it says now."""

    table: Table
    rows: Sequence[Row]


def quantile_bound(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The lowest bound at or below which `share` of the values lie; infinity if none is. There is a value."""
    wanted = share * sum(counts)
    covered = 0
    for bound, count in zip(bounds, counts, strict=False):
        covered += count
        if covered >= wanted:
            return bound
    return float("inf")


LANES: Final = Table(
    "Lanes",
    ("lane",),
    (
        Metric("protomq.lane.threads", "{thread}", "threads", "Threads of the lane"),
        Metric("protomq.lane.depth", "{call}", "waiting", "Calls that wait"),
        Metric("protomq.lane.depth_max", "{call}", "may wait", "Calls that may wait before the lane is full"),
        Metric("protomq.lane.queue_time", "s", "longest wait (s)", "Longest wait of a call lately"),
        Metric("protomq.lane.calls", "{call}", "calls", "Calls taken", Kind.COUNTER),
        Metric("protomq.lane.rejections", "{call}", "refused", "Calls refused", Kind.COUNTER),
        Metric("protomq.lane.connections", "{connection}", "connections", "Connections of the remoting port"),
        Metric("protomq.lane.holds", "{call}", "held", "Calls held now"),
    ),
)  # fmt: skip


def lane_numbers(statuses: Iterable[PoolStatus]) -> Numbers:
    """What the lanes say."""
    return Numbers(LANES, [_lane_row(status) for status in statuses])


def _lane_row(status: PoolStatus) -> Row:
    return (status.lane,), (
        status.threads,
        status.depth,
        status.depth_max,
        status.queue_time_us / 1e6,
        status.calls,
        status.rejections,
        status.connections,
        status.holds,
    )
