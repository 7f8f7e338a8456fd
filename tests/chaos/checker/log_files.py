"""Invariant D over the files of a store: an own reading of the log, which shares no code with the store's.

    D1   log and consume queues are a bijection: each record has one entry, each entry one record, positions rise, check bits hold.
         A half message and one with a due time have none, and say so: their offset is 2^64 - 1
    D2   no entry at or beyond the end of the log
    D5   all seals hold and chain, records stand where they say, zeros behind the end
    D7   the checkpoint is not ahead of the log's end, nor of what any seal or the caller knows to be synced
    D8   each record is what its producer wrote: its CRC over fields 1 to 5 holds
    D9   epochs never fall, and the table of epochs knows those of the log: each append has the epoch of its row

Files come as a mapping from path (relative to the store's root) to bytes, so that a simulated disk and a real folder look the same.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import google_crc32c
from google.protobuf.message import DecodeError

from protomq.v1.record_pb2 import Record, Seal

from .violations import Violation

ENTRY = struct.Struct("<QIq")
SEAL_FIELD_SIZE = 53
ENTRY_FACTORS = (
    0x2D65C24B130B9697, 0x29C7BFA39B35C1EB, 0xB6F1DED17B53111B, 0x82912A1B6E7342FF, 0x62994ADBB0EF8583,
)  # fmt: skip
ENTRY_STEP = 0x9E3779B97F4A7C15
NO_OFFSET = 2**64 - 1
CHECKPOINT = struct.Struct("<8sQQIIQQI")


class LogRecord(NamedTuple):
    """A record of the log: where its field starts, its size with tag and length, the record."""

    position: int
    size_bytes: int
    record: Record


@dataclass(slots=True)
class LogReport:
    """What stands in a log: records, where it ends, what is wrong with it."""

    records: list[LogRecord] = field(default_factory=list)
    end: int = 0
    first: int = 0
    seals: int = 0
    synced: int = 0
    seal_ends: dict[int, int] = field(default_factory=dict)  # position behind a seal -> its CRC
    synced_by: dict[int, int] = field(default_factory=dict)  # position behind a seal -> what it says was synced
    epochs: dict[int, int] = field(default_factory=dict)  # start of an append -> its epoch
    violations: list[Violation] = field(default_factory=list)

    def say(self, invariant: str, message: str) -> None:
        """Adds a violation."""
        self.violations.append(Violation(invariant, message))


def read_files(root: Path) -> dict[str, bytes]:
    """The files of a real store."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def parse_log(
    files: Mapping[str, bytes], *, skips: Mapping[int, tuple[int, int]] | None = None
) -> LogReport:
    """Reads the whole log. `skips`: start of a damaged range -> (its end, CRC with which the chain goes on)."""
    report = LogReport()
    segments = {
        int(path.rpartition("/")[2]): data for path, data in files.items() if _is_segment(path)
    }
    if not segments:
        return report
    size = len(next(iter(segments.values())))
    report.first = report.end = min(segments)
    crc: int | None = 0 if report.first == 0 else None
    for base in sorted(segments):
        data = segments[base]
        if len(data) != size:
            report.say("D5", f"segment {base} has {len(data)} bytes, not {size}")
        if report.end < base and (skips or {}).get(report.end, (0, 0))[0] != base:
            if any(data):
                report.say("D5", f"segment {base} is written, though the log ends at {report.end}")
            continue
        crc = _parse_segment(report, data, base, crc, skips or {})
        behind = data[max(report.end - base, 0) :]
        if any(behind):
            report.say(
                "D5",
                f"bytes behind the end of the log: {len(behind.rstrip(bytes(1)))} from {report.end} on",
            )
    return report


def _is_segment(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == "commitlog" and name.isdecimal()


def _parse_segment(
    report: LogReport, data: bytes, base: int, crc: int | None, skips: Mapping[int, tuple[int, int]]
) -> int | None:
    """One segment, from where the log ended so far; the CRC of the last seal."""
    while report.end < base + len(data):
        skip = skips.get(report.end)
        if skip is not None:
            report.end, crc = skip
            continue
        at = report.end - base
        append = _parse_append(report, data, at, base)
        if append is None:
            return crc
        records, seal, seal_at = append
        covered = data[at : seal_at + SEAL_FIELD_SIZE - 4]
        if at == 0 and (seal.size_bytes or seal.record_count):
            report.say("D5", f"segment {base} does not begin with an empty append")
        if crc is not None:
            expected = google_crc32c.extend(google_crc32c.value(crc.to_bytes(4, "little")), covered)
            if expected != seal.crc32c:
                report.say("D5", f"the CRC of the append at {report.end} does not hold")
                return crc
        if (seal.start_position, seal.size_bytes, seal.record_count) != (
            report.end,
            seal_at - at,
            len(records),
        ):
            report.say("D5", f"the seal at {base + seal_at} is another append's: {seal}")
        if seal.synced_position > report.end:
            report.say(
                "D7",
                f"the seal at {base + seal_at} says that {seal.synced_position} was synced before it was written",
            )
        report.synced = max(report.synced, seal.synced_position)
        report.records += records
        if seal.epoch < max(report.epochs.values(), default=0):
            report.say("D9", f"the append at {report.end} is of epoch {seal.epoch}")
        report.epochs[report.end] = seal.epoch
        report.seals += 1
        crc = seal.crc32c
        report.end = base + seal_at + SEAL_FIELD_SIZE
        report.seal_ends[report.end] = crc
        report.synced_by[report.end] = seal.synced_position
    return crc


def _parse_append(
    report: LogReport, data: bytes, at: int, base: int
) -> tuple[list[LogRecord], Seal, int] | None:
    """(records, seal, where the seal starts) of the append at `at`; None where the log ends."""
    records: list[LogRecord] = []
    start = at
    while at < len(data):
        tag = data[at]
        if tag == 0 and at == start:
            return None
        size, content = _length(data, at + 1)
        if tag not in (0x0A, 0x12, 0x1A) or content + size > len(data):
            report.say("D5", f"no field of a log stands at {base + at} (tag {tag})")
            return None
        try:
            if tag == 0x12:
                return records, Seal.FromString(data[content : content + size]), at
            if tag == 0x0A:
                record = Record.FromString(data[content : content + size])
                if record.physical_offset != base + at:
                    report.say(
                        "D5",
                        f"the record at {base + at} says that it stands at {record.physical_offset}",
                    )
                if not is_whole(data[content : content + size], record.crc32c):
                    report.say(
                        "D8", f"the record at {base + at} is not what its producer wrote: its CRC"
                    )
                records.append(LogRecord(base + at, content + size - at, record))
        except DecodeError:
            report.say("D5", f"the field at {base + at} does not parse")
            return None
        at = content + size
    report.say("D5", f"the append at {base + start} has no seal")
    return None


def is_whole(record: bytes, crc: int) -> bool:
    """Whether the CRC-32C of fields 1 to 5, which all have a length, is `crc`. They stand first: nothing is sought."""
    at = 0
    while at < len(record) and record[at] >> 3 <= 5 and record[at] & 7 == 2:
        size, content = _length(record, at + 1)
        at = content + size
    return at <= len(record) and google_crc32c.value(record[:at]) == crc


def records_in(message: bytes) -> list[bytes]:
    """Field 1, octet by octet, of a message that has records there and parses: a batch, an answer to a pull."""
    found: list[bytes] = []
    at = 0
    while at < len(message):
        tag, at = _length(message, at)
        if tag & 7 == 2:
            size, content = _length(message, at)
            at = content + size
            if tag == 0x0A:
                found.append(message[content:at])
        else:
            at = {0: _length(message, at)[1], 1: at + 8, 5: at + 4}[tag & 7]
    return found


def _length(data: bytes, at: int) -> tuple[int, int]:
    size = shift = 0
    while at < len(data):
        octet = data[at]
        at += 1
        size |= (octet & 0x7F) << shift
        if octet < 0x80:
            break
        shift += 7
    return size, at


def check_store_files(
    files: Mapping[str, bytes],
    *,
    synced: int | None = None,
    skips: Mapping[int, tuple[int, int]] | None = None,
    deleted: bool = False,
) -> list[Violation]:
    """D over the files of a store that was closed. `synced`: known to be synced; `deleted`: topics were deleted, so queues may be gone."""
    report = parse_log(files, skips=skips)
    if not deleted:
        _check_queues(report, files, has_damage=bool(skips))
    _check_checkpoint(report, files, synced)
    if not skips:
        _check_epochs(report, files)
    return report.violations


def _check_epochs(report: LogReport, files: Mapping[str, bytes]) -> None:
    """The table of a store that was closed. One that had no room for it, or damage, has none that holds before its next start."""
    lines = files.get("config/epochs.json", b"").split(b"\n", 2)
    if len(lines) < 3:
        return
    table = json.loads(lines[2].rstrip()[:-1])
    starts = [row[0] for row in table["rows"]]
    known = [row[1] for row in table["rows"]]
    if sorted(set(starts)) != starts or sorted(known) != known:
        report.say("D9", f"the rows of the epochs do not rise: {table['rows']}")
    if max([table["highest_epoch"], *known]) != table["highest_epoch"]:
        report.say("D9", f"the highest epoch is not {table['highest_epoch']}: {known}")
    if table["synced_position"] > report.end:
        report.say("D9", f"the epochs say that {table['synced_position']} was synced")
    for position, epoch in report.epochs.items():
        row = bisect_right(starts, position) - 1
        if row < 0 or known[row] != epoch:
            report.say("D9", f"the append at {position} is of epoch {epoch}: {table['rows']}")
            break


def _check_queues(report: LogReport, files: Mapping[str, bytes], *, has_damage: bool) -> None:
    expected: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}
    for position, size, record in report.records:
        is_hidden = record.HasField("due_time_ms") or record.flags >> 8 & 7 == 1
        if is_hidden != (record.queue_offset == NO_OFFSET):
            report.say(
                "D1", f"the record at {position} is of flags {record.flags:#x}, its offset is {record.queue_offset}"
            )  # fmt: skip
        if is_hidden:
            continue
        queue = expected.setdefault((record.topic, record.queue_id), {})
        if record.queue_offset in queue:
            report.say(
                "D1",
                f"two records of {record.topic}/{record.queue_id} have offset {record.queue_offset}",
            )
        queue[record.queue_offset] = (position, size, record.tag_code)
    actual: dict[tuple[str, int], dict[int, tuple[int, int, int]]] = {}
    for path, data in files.items():
        parts = path.split("/")
        if parts[0] != "consumequeue" or len(parts) != 4:
            continue
        if len(data) % ENTRY.size:
            report.say("D1", f"{path} ends within an entry")
        first = int(parts[3]) // ENTRY.size
        queue = actual.setdefault((parts[1], int(parts[2])), {})
        named = expected.get((parts[1], int(parts[2])), {})
        salt = google_crc32c.value(f"{parts[1]}/{parts[2]}".encode()) << 32
        for at in range(0, len(data) - ENTRY.size + 1, ENTRY.size):
            offset = first + at // ENTRY.size
            octets = data[at : at + ENTRY.size]
            entry, check = _open_entry(octets)
            queue[offset] = entry
            if check != _entry_check(octets, offset, salt) and (any(octets) or offset in named):
                report.say("D1", f"the check bits of {parts[1]}/{parts[2]}@{offset} do not hold")
    for key in sorted({*expected, *actual}):
        _compare_queue(report, key, expected.get(key, {}), actual.get(key, {}), has_damage)


def _open_entry(octets: bytes) -> tuple[tuple[int, int, int], int]:
    """(position, size and tag code; the check bits): the top octets of position and size."""
    position, size, tag_code = ENTRY.unpack(octets)
    return (position % (1 << 56), size % (1 << 24), tag_code), position >> 56 | size >> 24 << 8


def _entry_check(octets: bytes, offset: int, salt: int) -> int:
    """As FORMAT.md has it: the upper 16 of 64 bits of a sum over the words without the check octets, the offset and the queue's name."""
    bare = octets[:7] + b"\0" + octets[8:11] + b"\0" + octets[12:]
    words = (int.from_bytes(bare[at : at + 4], "little") for at in range(0, 20, 4))
    total = sum(factor * word for factor, word in zip(ENTRY_FACTORS, words, strict=True))
    return (total + ENTRY_STEP * offset + salt) % (1 << 64) >> 48


def _compare_queue(
    report: LogReport,
    key: tuple[str, int],
    expected: dict[int, tuple[int, int, int]],
    actual: dict[int, tuple[int, int, int]],
    has_damage: bool,
) -> None:
    name = f"{key[0]}/{key[1]}"
    for offset in sorted({*expected, *actual}):
        entry, record = actual.get(offset), expected.get(offset)
        if entry == record:
            continue
        if record is None:
            assert entry is not None
            if entry[0] >= report.end:
                report.say(
                    "D2", f"{name}@{offset} points to {entry[0]}, the log ends at {report.end}"
                )
            elif entry[0] >= report.first and not has_damage and entry[1]:
                report.say(
                    "D1", f"{name}@{offset} points to {entry[0]}, where no record of it stands"
                )
        elif entry is None:
            report.say("D1", f"{name}@{offset}, position {record[0]}, has no entry")
        else:
            report.say("D1", f"{name}@{offset} is {entry}, the record is {record}")


def _check_checkpoint(report: LogReport, files: Mapping[str, bytes], synced: int | None) -> None:
    data = files.get("checkpoint")
    if data is None:
        return
    if len(data) != CHECKPOINT.size + 4 or google_crc32c.value(data[:-4]) != int.from_bytes(
        data[-4:], "little"
    ):
        report.say("D7", "the checkpoint does not hold")
        return
    _, flushed, replay, replay_crc, *_ = CHECKPOINT.unpack_from(data)
    if replay > flushed or flushed > report.end:
        report.say(
            "D7", f"the checkpoint says {replay} and {flushed}, the log ends at {report.end}"
        )
    if synced is not None and flushed > synced:
        report.say("D7", f"the checkpoint says that {flushed} was synced, it was {synced}")
    if replay and replay in report.seal_ends and report.seal_ends[replay] != replay_crc:
        report.say("D7", f"the checkpoint's CRC at {replay} is not the seal's")
    if replay and replay > report.first and replay not in report.seal_ends and report.seal_ends:
        report.say("D7", f"the checkpoint says {replay}, where no append ends")
