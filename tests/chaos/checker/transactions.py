"""Invariants E over the log alone: what became of each half message, by an own reading of half messages, copies and records of states.

    E1   committed: one copy in its queue, in the append that says so; no other way leads there
    E2   rolled back: no copy
    E3   a transaction ends once: committed, rolled back or expired; an answered decision is the one in the log
    E5   an answered half message is there until it is ended; it expires after all checks, into one copy where operators find it
    E6   the broker has open what the log says is open, asked about as often; what has ended is asked about no more
    E8   nobody is asked earlier than was promised

Nothing of the store's code is used; FORMAT.md says what counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protomq.v1.record_pb2 import Record
from protomq.v1.state_pb2 import TransactionsRecord

from .log_files import LogReport
from .violations import Violation

HALF, COPY = 1, 2
COMMITTED, ROLLED_BACK, EXPIRED, CHECKED, CARRIED = 1, 2, 3, 4, 5
EXPIRED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
RULES = {COMMITTED: "E1", ROLLED_BACK: "E2", EXPIRED: "E5"}
"""By how a transaction ended: what its copies may break."""
IMMUNITY_MS, INTERVAL_MS, CHECKS_MAX = 6_000, 30_000, 15

Key = tuple[int, int, int]


@dataclass(slots=True)
class TransactionLog:
    """What a log says.

    Attributes:
        first: where it begins.
        open: by id: how often it was asked about.
        endings: by id.
        copies: by id: (topic, whether it has a due time).
        visible: by topic and queue: positions of the records that may be read.
    """

    first: int = 0
    open: dict[Key, int] = field(default_factory=dict)
    endings: dict[Key, int] = field(default_factory=dict)
    copies: dict[Key, list[tuple[str, bool]]] = field(default_factory=dict)
    visible: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    asked_from_ms: dict[Key, int] = field(default_factory=dict)
    carried_in: set[Key] = field(default_factory=set)
    """Their half messages were carried forward, and what was in front is gone: the next record says how often they were asked about."""

    def say(self, invariant: str, message: str) -> None:
        """Adds a violation."""
        self.violations.append(Violation(invariant, message))


def transactions_of(report: LogReport) -> TransactionLog:
    """What the records of a log say, in their order, and where they break E1 to E8."""
    log = TransactionLog(report.first)
    for _, _, record in report.records:
        key = record.producer_id, record.producer_epoch, record.sequence
        kind = record.flags >> 8 & 7
        if record.topic == "%SYS%TRANSACTIONS":
            _take(log, record)
        elif kind == HALF:
            if key in log.endings:
                log.say("E3", f"{key} is a half message behind its ending")
            if key not in log.open and record.flags & 0x800:
                log.carried_in.add(key)
            log.open.setdefault(key, 0)
            log.asked_from_ms.setdefault(key, record.store_time_ms + IMMUNITY_MS)
            continue
        elif kind == COPY:
            log.copies.setdefault(key, []).append((record.topic, record.HasField("due_time_ms")))
        if not record.HasField("due_time_ms"):
            queue = record.topic, record.queue_id
            log.visible.setdefault(queue, []).append(record.physical_offset)
    _check_copies(log)
    return log


def _take(log: TransactionLog, record: Record) -> None:
    told = TransactionsRecord.FromString(record.body)
    carried = zip(told.check_counts, told.due_times_ms, strict=True)
    keys = zip(told.producer_ids, told.producer_epochs, told.sequences, strict=True)
    for key, event in zip(keys, told.events, strict=True):
        if event == CARRIED:
            count, due_ms = next(carried)
            if key in log.open:
                if key not in log.carried_in and count != log.open[key]:
                    log.say("E6", f"{key} is carried forward as asked about {count} times, it was {log.open[key]}")
                log.carried_in.discard(key)
                log.open[key], log.asked_from_ms[key] = count, due_ms
        elif event == CHECKED:
            if key not in log.open:  # its half message may have gone with its segment, and stand further on
                if not log.first:
                    log.say("E6", f"{key} is asked about and not open")
                continue
            if told.time_ms < log.asked_from_ms[key]:
                log.say("E8", f"{key} is asked at {told.time_ms}, {log.asked_from_ms[key]} was promised")
            log.open[key] += 1
            log.asked_from_ms[key] = told.time_ms + INTERVAL_MS
        else:
            if key in log.endings:
                log.say("E3", f"{key} ends as {log.endings[key]} and as {event}")
            if event == EXPIRED and log.open.get(key, CHECKS_MAX) < CHECKS_MAX:
                log.say("E5", f"{key} expires, asked about {log.open[key]} times")
            log.open.pop(key, None)
            log.endings.setdefault(key, event)


def _check_copies(log: TransactionLog) -> None:
    for key, ending in log.endings.items():
        copies = log.copies.get(key, [])
        at_operators = [copy for copy in copies if copy[0] == EXPIRED_TOPIC]
        elsewhere = [copy for copy in copies if copy[0] != EXPIRED_TOPIC]
        delivered = [copy for copy in elsewhere if not copy[1]]
        if len(delivered) > 1 or bool(elsewhere) is not (ending == COMMITTED):
            log.say(RULES[ending], f"{key} ended as {ending} and has the copies {copies}")
        if len(at_operators) != (ending == EXPIRED):
            log.say("E5", f"{key} ended as {ending} and is at the operators {len(at_operators)} times")
    for key in log.copies:
        if key in log.open or (key not in log.endings and not log.first):
            log.say("E1", f"{key} has copies and has not ended")


def check_answers(
    log: TransactionLog, halves: Iterable[Key], decided: dict[Key, int], ended: set[Key]
) -> list[Violation]:
    """E3 and E5: of half messages and decisions that were answered. `ended`: those that had ended by earlier readings of the log."""
    found = []
    for key in halves:
        is_known = key in log.open or key in log.endings
        if not is_known and (key not in ended or not log.first):
            found.append(Violation("E5", f"{key} was answered, and the log has neither it nor its ending"))
    for key, ending in decided.items():
        if key in log.open or log.endings.get(key, ending) != ending:
            found.append(Violation("E3", f"{key} was answered as {ending}, the log says {log.endings.get(key)}"))
    return found
