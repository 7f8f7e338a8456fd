"""The damaged parts of the log, in quarantine: the broker serves nothing of them, now and after a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from protomq.wire.topics import GROUPS_TOPIC, OFFSETS_TOPIC, TOPICS_TOPIC
from protomq_broker.store.files.disk import Disk
from protomq_broker.store.log.recovery import (
    DamagedRange,
    is_repaired,
    merged_ranges,
    write_quarantine,
)
from protomq_broker.store.log.segment import SegmentFolder

from .consume_queue import ConsumeQueueDamagedError
from .consume_queue_table import ConsumeQueueTable
from .queue_ends import QueueEnd, ends_in, keep_ends_of_damage
from .repaired import RepairedRange, is_within

log = logging.getLogger(__name__)

_END: Final = 1 << 63
"""Behind each position of a log."""
_LOST_WITH: Final = {
    OFFSETS_TOPIC: ". Records of committed offsets stand there. Where config/consumerOffsets.json does not have them, offsets fall back to"
    " the newest record that holds, and messages are delivered again",
    TOPICS_TOPIC: ". Records of topics stand there. Where config/topics.json does not have them, topics fall back to the newest record that"
    " holds, and deleted ones may come back",
    GROUPS_TOPIC: ". Records of settings of groups stand there. Where config/groups.json does not have them, settings fall back to the"
    " newest record that holds",
}


class Quarantine:
    """Any thread.

    Attributes:
        ranges: rising and disjoint; replaced, never changed, so that any thread may look at them.
        refusal: why the disk has no note of them; "" if it has.
        left_count: how often a part of the log has left quarantine, healed or deleted. It rises after `ranges` has changed.
    """

    def __init__(
        self,
        disk: Disk,
        path: str,
        folder: SegmentFolder,
        queues: ConsumeQueueTable,
        ranges: Sequence[DamagedRange],
        sync_to: Callable[[int], None],
    ) -> None:
        """`ranges`: what a start has found; `sync_to` makes the log durable up to a position."""
        self.ranges = ranges
        self.refusal = ""
        self.left_count = 0
        self._disk = disk
        self._path = path
        self._folder = folder
        self._queues = queues
        self._sync_to = sync_to
        self._lock = threading.Lock()
        self._repaired: dict[DamagedRange, bool] = {}
        self._skipped_later: set[DamagedRange] = set()
        self._is_unsaved = False
        self._unsaved_ends: list[QueueEnd] = []
        for damage in ranges:
            if warning := self._warning_of(damage):
                log.warning(
                    "positions %d to %d of the log are in quarantine%s",
                    damage.start_position, damage.end_position, warning,
                )  # fmt: skip

    def add(self, damage: DamagedRange) -> None:
        """Damage was found while the store is open. Makes durable what stands around it, before anybody learns of it."""
        self._sync_to(damage.end_position)
        with self._lock:
            known = self.ranges
            if any(k.start_position <= damage.start_position < k.end_position for k in known):
                return  # somebody else came upon it at the same time
            log.error(
                "corrupt log: %s: positions %d to %d are in quarantine: %s. Run `protomq log verify`%s",
                self._folder.path_at(damage.start_position),
                damage.start_position,
                damage.end_position,
                damage.reason,
                self._warning_of(damage),
            )
            self.ranges = merged_ranges([*known, damage])
            self._save([damage])

    def add_repaired(self, repaired: RepairedRange) -> None:
        """The leader's log has padding where a repair has taken something out. Its messages are lost here too, and readers are told."""
        damage = repaired.damage
        self._sync_to(damage.end_position)
        with self._lock:
            if is_within(damage, self.ranges):
                return
            log.warning(
                "positions %d to %d of the log were taken out by `protomq log repair` at the leader: %s. Reads of what stood there get an"
                " error", damage.start_position, damage.end_position, damage.reason,
            )  # fmt: skip
            self.ranges = merged_ranges([*self.ranges, damage])
            self._save([damage], repaired.ends)

    def has_messages(self, damage: DamagedRange) -> bool:
        """Whether messages stood in a range, as far as queues know."""
        return bool(ends_in(self._queues.all(), [damage]))

    def is_repaired(self, damage: DamagedRange) -> bool:
        """Whether `protomq log repair` has taken the damage out. Read once: nobody repairs a store that is open."""
        known = self._repaired.get(damage)
        if known is None:
            known = self._repaired[damage] = is_repaired(self._disk, self._folder, damage)
        return known

    def forget_repaired(self) -> None:
        """Bytes of a range were replaced, and it stays in quarantine: whether it is repaired is to be read again."""
        with self._lock:
            self._repaired.clear()

    def skip(self, spans: Iterable[tuple[int, int]] = ((0, _END),)) -> Sequence[DamagedRange]:
        """Something is derived from the log now, and goes without the records of the ranges that reach into one of these parts.

        Such a range stays in quarantine when it is healed, for the next start, which rebuilds everything from the log. Returns the ranges.
        """
        parts = list(spans)
        with self._lock:
            skipped = [damage for damage in self.ranges if any(_reaches_into(damage, *part) for part in parts)]
            self._skipped_later.update(skipped)
            return skipped

    def replace(
        self, damage: DamagedRange, repaired: Sequence[RepairedRange], *, unless_skipped: bool = False
    ) -> bool:
        """A range holds again: its bytes are in their place and synced. Messages are lost only where `repaired` says.

        `unless_skipped`: nothing is done, and False returned, if something derived lacks its records.
        """
        with self._lock:
            if unless_skipped and any(
                _reaches_into(damage, skipped.start_position, skipped.end_position) for skipped in self._skipped_later
            ):
                return False
            self._repaired.clear()
            lost = [each.damage for each in repaired]
            others = [known for known in self.ranges if known != damage]
            self.ranges = merged_ranges([*others, *lost])
            self.left_count += 1
            self._save(lost, [end for each in repaired for end in each.ends])
            return True

    def forget_below(self, position: int) -> None:
        """The log begins at `position` now."""
        with self._lock:
            self._repaired.clear()
            kept = [damage for damage in self.ranges if damage.end_position > position]
            if len(kept) < len(self.ranges):
                self.ranges = kept
                self._save([])
            self.left_count += 1  # a range may reach behind the position, and records in it are gone all the same

    def save_again(self) -> None:
        """Writes what the disk did not take before. Raises OSError."""
        with self._lock:
            if self._is_unsaved:
                self._write()
                log.warning("what is in quarantine is noted: the disk takes it again")

    def _save(self, found: Sequence[DamagedRange], told: Sequence[QueueEnd] = ()) -> None:
        """Remembers the ranges beside the log, and how far the queues went in these. Their files may be deleted, and the log no longer has
        it. What the disk does not take now, `save_again` writes.
        """
        self._unsaved_ends += [*ends_in(self._queues.all(), found), *told]
        self._is_unsaved = True
        try:
            self._write()
        except OSError as error:
            log.error("what is in quarantine cannot be noted for the next start yet: %s. It is tried again", error)

    def _write(self) -> None:
        try:
            keep_ends_of_damage(self._disk, self._path.rpartition("/")[0], self.ranges, self._unsaved_ends)
            write_quarantine(self._disk, self._path, self.ranges)
        except OSError as error:
            self.refusal = str(error)
            raise
        self._is_unsaved, self._unsaved_ends, self.refusal = False, [], ""

    def _warning_of(self, damage: DamagedRange) -> str:
        """What the broker's own records in a range say is lost with it, as far as their queue tells; "" if none stand there."""
        return "".join(
            warning for topic, warning in _LOST_WITH.items() if self._has_some(topic, damage)
        )

    def _has_some(self, topic: str, damage: DamagedRange) -> bool:
        """Whether records of a system topic stand in a range."""
        queue = self._queues.find(topic, 0)
        if queue is None:
            return False
        try:
            first = queue.first_at_or_beyond(damage.start_position)
            return first < queue.first_at_or_beyond(damage.end_position)
        except ConsumeQueueDamagedError:
            return True


def _reaches_into(damage: DamagedRange, start: int, end: int) -> bool:
    return damage.start_position < end and start < damage.end_position
