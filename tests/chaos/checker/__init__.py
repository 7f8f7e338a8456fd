"""The checker: pure functions from a history, or from the files of a store, to what is wrong with them.

    check_history(events, promise)        A, B, I     messages.py
    check_commits(events, promise)        C3          commits.py
    check_log(files, ...)                 D1, D2, D5, D7, D8    log_files.py
    decode_with_protoc(segments)          D5          protoc.py

An empty list means that nothing is wrong. That the checker sees what is wrong is proved with planted bugs (tests/chaos/planted.py).
"""

from __future__ import annotations

from .commits import check_commits
from .log_files import LogReport, check_store_files, is_whole, parse_log, records_in
from .messages import Promise, check_history
from .violations import Violation, explain

__all__ = [
    "LogReport",
    "Promise",
    "Violation",
    "check_commits",
    "check_history",
    "check_store_files",
    "is_whole",
    "records_in",
    "explain",
    "parse_log",
]
