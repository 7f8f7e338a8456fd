"""What is derived from the log record by record: consume queues, index, table of repeated sends, and what joins them.

The store has one list of them (`StoreFiles.derived`), in this order: whoever asks another one comes behind it. To join, a structure
implements `Derived` and is put into that list; nothing else of the store knows it.

    a start    load < replay of what the log has behind `replay_from`, pass_over for damage between < truncate
    running    apply of each append, on the writer thread; flush, checkpoint, delete_below on the thread of housekeeping
    its end    checkpoint < close

Rules:
- What it makes follows from the records alone, and the same from `apply` as from `replay`: the log is the truth, files are a cache.
- Which records it takes their `flags` say (`log/kinds.py`); it selects by array and opens no record.
- Its files may tell of nothing behind the position of `checkpoint`, unless it cuts that at the next start (`truncate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .log.append import AppendRequest, ScannedRecords


class Derived(Protocol):
    """The life of a derived structure.

    Attributes:
        replay_from: after `load`: what the log has below this position is in it already.
        needs_rebuild: its files turned out not to hold: `start_rebuild`, then a replay from the log's start.
        damage: after `load`: why its files were not taken over, with a path; "" if they were.
        outlives_topics: records of topics that were deleted since are replayed too, with the topic "".
        takes_plain: plain messages, whose `flags` decide nothing, are of interest. Else `apply` is called only for a group that has others,
            too: nearly all sends are plain, and each call for one of them is felt.
    """

    replay_from: int
    needs_rebuild: bool
    damage: str
    outlives_topics: bool
    takes_plain: bool

    def load(self, log_start: int) -> None:
        """Takes over what its files hold. The log begins at `log_start`."""

    def start_rebuild(self) -> None:
        """Forgets everything."""

    def replay(self, records: ScannedRecords) -> None:
        """Takes records read back from the log, in its order; skips those it has."""

    def pass_over(self, start_position: int, end_position: int) -> None:
        """The replay gives no records of this part of the log, which is damaged."""

    def forget_deleted(self, positions: Mapping[str, int]) -> None:
        """A start: topics that were deleted, and up to where what the log has of them is gone; the records behind that come next.

        What was taken over by `load` knows of deletions in front of its position already.
        """

    def truncate(self, end_position: int) -> None:
        """Forgets what lies at or beyond the end of the log."""

    def apply(self, requests: Sequence[AppendRequest]) -> None:
        """Takes what was just appended: one group, in the order of the log."""

    def remove_topic(self, topic: str) -> None:
        """The topic is deleted: what is there of it leads to nothing any more. Between two appends."""

    def flush(self) -> None:
        """Memory to files, without a sync. An OSError loses nothing: the next call goes on."""

    def checkpoint(self, position: int) -> None:
        """Makes durable that everything below `position` is in it; the log is durable up to there, and all of it was applied."""

    def delete_below(self, log_start: int) -> None:
        """The log begins at `log_start` now."""

    def close(self) -> None:
        """Closes its files. `checkpoint` comes before."""
