"""Decides which old segments to delete, and when to refuse writes. It only decides, and touches no file.

Rules, as RocketMQ's, with safer clocks:
- A segment is old when its newest message is older than the retention time. Old segments go in the delete hour, or at any hour once
  the disk is fuller than `disk_delete_ratio`.
- Above `disk_force_ratio` the oldest segments go, whatever their age, as many as bring the disk below it, 10 at a time at most.
- Above `disk_refuse_ratio` writes are refused.
- The segment being written never goes, nor one that holds what `keep_from_position` protects.
- A clock that jumps forward makes no message old. The lead is how far the wall clock has run ahead of the monotonic clock, which cannot
  jump; ages are computed without it. After both clocks have agreed for a whole retention time, the lead is forgotten. Messages from before
  the jump are truly old by then, and the same clock has stamped later ones. Nobody watches the clock over a restart, so a gain of up to one
  day is believed, and the rest is lead. A clock that goes back reduces the lead and makes messages younger, which is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

NOISE_MS: Final = 1_000
"""The two clocks may drift apart by this much from one look to the next without anybody having set them."""
UNWATCHED_TRUST_MS: Final = 24 * 3_600_000
FORCED_COUNT_MAX: Final = 10
"""Most segments that one look deletes by force, as in RocketMQ. Other files may fill the disk; then deleting all segments at once would not
help.
"""


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The rules from the configuration; see `StoreConfig`."""

    retention_ms: int = 72 * 3_600_000
    delete_hour: int = 4
    disk_delete_ratio: float = 0.75
    disk_force_ratio: float = 0.85
    disk_refuse_ratio: float = 0.90


@dataclass(frozen=True, slots=True)
class SegmentAge:
    """A segment: where it starts and ends in the log, its size on disk, and when its newest message was stored."""

    start_position: int
    end_position: int
    size_bytes: int
    newest_store_time_ms: int


@dataclass(frozen=True, slots=True)
class RetentionState:
    """State from one look to the next. The store saves all but `monotonic_ms` over a restart; losing it only delays deletions.

    Attributes:
        wall_ms: the wall clock at the last look.
        lead_ms: how far the wall clock was ahead of the true time.
        agreed_ms: for how long, by the monotonic clock, the two clocks have agreed since then.
        newest_store_time_ms: store time of the newest message at the last look.
        monotonic_ms: the monotonic clock at the last look; None after a restart.
    """

    wall_ms: int
    lead_ms: int = 0
    agreed_ms: int = 0
    newest_store_time_ms: int = 0
    monotonic_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """The facts at one look.

    Attributes:
        wall_ms: the wall clock, milliseconds since 1970.
        local_hour: hour of the day in local time, by the wall clock.
        monotonic_ms: a clock that never jumps.
        segments: all segments in their order; the last one is being written.
        disk_total_bytes: size of the disk.
        disk_used_ratio: used part of the disk, 0.0 to 1.0.
        keep_from_position: a replica, timer or open transaction needs the log from this position on; None: nothing does.
    """

    wall_ms: int
    local_hour: int
    monotonic_ms: int
    segments: Sequence[SegmentAge]
    disk_total_bytes: int
    disk_used_ratio: float
    keep_from_position: int | None = None


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """What to do now.

    Attributes:
        delete: the segments to delete, oldest first.
        reason: why, for the log; "" if none.
        write_refusal: why writes are refused; "" if they are taken.
        clock_warning: what is wrong with the wall clock; "" if nothing is.
        state: to be given to the next `decide`.
    """

    delete: Sequence[SegmentAge]
    reason: str
    write_refusal: str
    clock_warning: str
    state: RetentionState

    @property
    def delete_below(self) -> int:
        """The log may begin here; 0 if nothing is to be deleted."""
        return self.delete[-1].end_position if self.delete else 0


def decide(state: RetentionState | None, look: Look, rules: RetentionRules) -> RetentionDecision:
    """Decides for one look. `state`: result of the last look; None for a store without one."""
    state = _watch_clock(state, look, rules.retention_ms)
    trusted_ms = look.wall_ms - state.lead_ms
    may_go = list(look.segments[:-1])
    if look.keep_from_position is not None:
        may_go = [segment for segment in may_go if segment.end_position <= look.keep_from_position]

    forced = _forced_count(may_go, look, rules)
    old = 0
    while old < len(may_go) and may_go[old].newest_store_time_ms < trusted_ms - rules.retention_ms:
        old += 1
    is_hour = look.local_hour == rules.delete_hour
    is_early = look.disk_used_ratio >= rules.disk_delete_ratio
    due = old if is_hour or is_early else 0

    used = f"the disk is {look.disk_used_ratio:.1%} full"
    reason = ""
    if forced > due:
        reason = f"{used}, above {rules.disk_force_ratio:.0%}: the oldest segments go, whatever their age"
    elif due:
        when = "it is the delete hour" if is_hour else used
        reason = f"older than {rules.retention_ms / 3_600_000:g} hours, and {when}"
    refusal = ""
    if look.disk_used_ratio >= rules.disk_refuse_ratio:
        refusal = f"{used}, and from {rules.disk_refuse_ratio:.0%} on no messages are taken: free space, or shorten the retention time"
    warning = ""
    if state.lead_ms > NOISE_MS:
        warning = f"the clock has jumped ahead by {state.lead_ms / 1000:.0f} s: old messages are kept by that much longer, set it right"
    return RetentionDecision(may_go[: max(due, forced)], reason, refusal, warning, state)


def _watch_clock(state: RetentionState | None, look: Look, retention_ms: int) -> RetentionState:
    newest_ms = look.segments[-1].newest_store_time_ms if look.segments else 0
    if state is None:
        state = RetentionState(newest_ms or look.wall_ms, newest_store_time_ms=newest_ms)
    passed_ms = look.wall_ms - state.wall_ms
    if state.monotonic_ms is None:
        agreed_ms = 0
        gained_ms = passed_ms if passed_ms < 0 else max(0, passed_ms - UNWATCHED_TRUST_MS)
    else:
        agreed_ms = look.monotonic_ms - state.monotonic_ms
        gained_ms = passed_ms - agreed_ms
    # A clock that jumps up to the newest message's store time was behind before; that jump only corrects it.
    if gained_ms > 0 and not state.lead_ms:
        gained_ms = max(0, gained_ms - max(0, state.newest_store_time_ms - state.wall_ms))
    lead_ms = max(0, state.lead_ms + gained_ms)
    agreed_ms = 0 if abs(gained_ms) > NOISE_MS else state.agreed_ms + agreed_ms
    if agreed_ms > retention_ms:
        lead_ms = agreed_ms = 0
    return RetentionState(look.wall_ms, lead_ms, agreed_ms, newest_ms, look.monotonic_ms)


def _forced_count(may_go: Sequence[SegmentAge], look: Look, rules: RetentionRules) -> int:
    """Number of oldest segments that must go to bring the disk below the limit."""
    too_much = (look.disk_used_ratio - rules.disk_force_ratio) * look.disk_total_bytes
    if look.disk_used_ratio < rules.disk_force_ratio:
        return 0
    count = 0
    freed = 0
    while count < min(len(may_go), FORCED_COUNT_MAX) and freed <= too_much:
        freed += may_go[count].size_bytes
        count += 1
    return count
