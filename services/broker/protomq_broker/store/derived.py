"""The protocol of structures that are derived from the log record by record: consume queues, index, table of repeated sends, and others.

The store has one ordered list of them (`StoreFiles.derived`): a structure stands behind those that it asks. A new structure implements
`Derived` and joins that list; no other part of the store has to know it.

    a start    load < replay of what the log has behind `replay_from`, pass_over for damage between < truncate
    running    apply of each append, on the writer thread; flush, checkpoint, delete_below on the thread of housekeeping
    its end    checkpoint < close

Rules:
- Its state follows from the records alone, and `apply` and `replay` give the same state: the log is the truth, files are a cache.
- It selects its records by their `flags` (`log/kinds.py`) with array operations, and opens no record.
- Its files must contain nothing behind the position of `checkpoint`, unless it cuts that off at the next start (`truncate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .log.append import AppendRequest, ScannedRecords


class Derived(Protocol):
    """The life of a derived structure.

    Attributes:
        replay_from: after `load`: the structure has everything of the log below this position.
        needs_rebuild: its files are damaged: call `start_rebuild`, then replay from the log's start.
        damage: after `load`: why it did not use its files, with a path; "" if it did.
        outlives_topics: records of topics that were deleted since are replayed too, with the topic "".
        takes_plain: whether it needs plain messages. If not, `apply` is called only for groups with other messages, since nearly all sends
            are plain, and each call costs time.
    """

    replay_from: int
    needs_rebuild: bool
    damage: str
    outlives_topics: bool
    takes_plain: bool

    def load(self, log_start: int) -> None:
        """Loads its files. The log begins at `log_start`."""

    def start_rebuild(self) -> None:
        """Forgets everything."""

    def replay(self, records: ScannedRecords) -> None:
        """Takes records that were read back from the log, in the log's order; skips those that it has."""

    def pass_over(self, start_position: int, end_position: int) -> None:
        """Notes a damaged part of the log, of which the replay gives no records."""

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """Called at a start. `positions`: for each deleted topic the position up to which its records are deleted. The records behind it
        come next.

        The state from `load` already knows deletions before its position.
        """

    def truncate(self, end_position: int) -> None:
        """Forgets what lies at or beyond the end of the log."""

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Takes what was just appended: one group, in the order of the log."""

    def remove_topic(self, topic: str) -> None:
        """Forgets a deleted topic: its entries lead to nothing any more. Called between two appends."""

    def flush(self) -> None:
        """Writes memory to files, without a sync. An OSError loses nothing: the next call tries again."""

    def checkpoint(self, position: int) -> None:
        """Makes durable that it has everything below `position`. The log is durable up to there, and all of it was applied."""

    def delete_below(self, log_start: int) -> None:
        """Deletes what stands below `log_start`, the new start of the log."""

    def close(self) -> None:
        """Closes its files. The store calls `checkpoint` before."""
