"""`log dump`: what a record is, in words."""

from __future__ import annotations

import pytest

from protomq.v1.record_pb2 import Record
from protomq.wire.record import FLAG_KIND_COPY, FLAG_KIND_HALF, NO_QUEUE_OFFSET
from protomq_broker.store.tools.verify import Finding, FindingKind
from protomq_cli.logs import FINDINGS_SHOWN, _first_of_each_kind, _record_row


@pytest.mark.parametrize(
    ("record", "kind", "offset", "note"),
    [
        (Record(body=b"1", queue_offset=3), "plain", 3, "body of 1 B"),
        (
            Record(body=b"1", queue_offset=NO_QUEUE_OFFSET, flags=FLAG_KIND_HALF),
            "half",
            None,
            "half, body of 1 B",
        ),
        (
            Record(queue_offset=NO_QUEUE_OFFSET, flags=FLAG_KIND_COPY | 0x10, due_time_ms=5),
            "copy",
            None,
            "copy, not due, body of 0 B",
        ),
    ],
)
def test_a_record_says_its_kind_and_has_no_offset_where_it_is_in_no_queue(
    record: Record, kind: str, offset: int | None, note: str
) -> None:
    row = _record_row(record)
    assert (row["record_kind"], row["queue_offset"], row["note"]) == (kind, offset, note)
    assert ("due_time" in row) == record.HasField("due_time_ms")


def test_of_many_findings_of_a_kind_the_first_are_shown() -> None:
    stamps = [Finding(FindingKind.WRONG_STAMP, "/b", at, at, (), "an append of epoch 1, behind one of epoch 2") for at in range(3_263)]
    damage = [Finding(FindingKind.CORRUPTION, "/b", at, at + 1, (), "does not hold") for at in range(2)]
    assert _first_of_each_kind([*damage, *stamps]) == [*damage, *stamps[:FINDINGS_SHOWN]]
    assert _first_of_each_kind([]) == []
