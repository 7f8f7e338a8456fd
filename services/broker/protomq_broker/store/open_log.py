"""The log of an open store, with what reads it and what knows its state. The parts of the store share these."""

from __future__ import annotations

from typing import NamedTuple

from .log.checked_log import CheckedLog
from .log.commit_log import CommitLog
from .log.flusher import LogFlusher
from .log.positions import Positions
from .queues.log_reader import LogReader
from .queues.quarantine import Quarantine
from .refusals import Refusals
from .store_files import LogStart


class OpenLog(NamedTuple):
    """Values only; see the module's docstring.

    Attributes:
        commit_log: its segments, and its tail.
        positions: what of it is published, synced and readable.
        flusher: syncs it.
        refusals: why it takes no messages.
        start: where it begins.
        quarantine: its damaged ranges.
        checked: its ranges that are known to hold.
        reader: reads what is readable.
    """

    commit_log: CommitLog
    positions: Positions
    flusher: LogFlusher
    refusals: Refusals
    start: LogStart
    quarantine: Quarantine
    checked: CheckedLog
    reader: LogReader
