"""A segment of the commit log is one protobuf message: decode it with nothing but protoc, and check what its producers wrote.

    .venv/bin/python examples/decode_segment.py DATA_DIR/commitlog/00000000000000000000 | head -40

What runs is `protoc --decode protomq.v1.RecordBatch proto/protomq/v1/record.proto < SEGMENT`. Segments are made in full size,
with zeros behind the last append; protoc wants them away, so the few lines below find where the fields end. Without a
protoc on the PATH the generated Python class does the same, field by field.

The `crc32c` of a record covers its fields 1 to 5 as they stand, and they stand first.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_varint(data: mmap.mmap | bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def field_ends(data: mmap.mmap) -> Iterator[int]:
    """Every field of a RecordBatch is a tag byte, a length and so many bytes; the first zero is no tag."""
    at = 0
    while at < len(data) and data[at] != 0:
        size, start = read_varint(data, at + 1)
        at = start + size
        yield at


def is_segment(data: mmap.mmap) -> bool:
    """Whether it begins with a field of a RecordBatch, or has none yet, and its last field ends in it."""
    try:
        return data[0] < 0x20 and max(field_ends(data), default=0) <= len(data)
    except IndexError:  # A length is cut off.
        return False


def check_records(data: mmap.mmap) -> None:
    """Ends the program at the first record that is not what its producer wrote."""
    try:
        import google_crc32c
    except ImportError:
        print("decode_segment: not checked; run: pip install google-crc32c", file=sys.stderr)
        return
    begin = count = 0
    for end in field_ends(data):
        if data[begin] == 0x0A:  # field 1 of a RecordBatch: a record
            front, crc = front_and_crc(data[read_varint(data, begin + 1)[1] : end])
            if crc not in (None, google_crc32c.value(front)):
                sys.exit(f"decode_segment: the record at octet {begin} is not what its producer wrote")
            count += 1
        begin = end
    print(f"{count} records, all whole", file=sys.stderr)


def front_and_crc(record: bytes) -> tuple[bytes, int | None]:
    """Fields 1 to 5, and the value of field 15: None if there is none, and so nothing to check."""
    at = front = 0
    crc = None
    while at < len(record):
        tag, start = read_varint(record, at)
        if tag & 7 == 2:
            size, start = read_varint(record, start)
        else:
            size = {1: 8, 5: 4}[tag & 7]
        at = start + size
        if tag >> 3 <= 5:
            front = at
        elif tag >> 3 == 15:
            crc = int.from_bytes(record[start:at], "little")
    return record[:front], crc


def decode_with_protoc(protoc: str, data: mmap.mmap) -> int:
    used = data[: max(field_ends(data), default=0)]
    command = [protoc, f"--proto_path={ROOT / 'proto'}", "--decode=protomq.v1.RecordBatch"]
    return subprocess.run(
        [*command, "protomq/v1/record.proto"], input=used, check=False
    ).returncode


def decode_with_stubs(data: mmap.mmap) -> int:
    try:
        from google.protobuf import text_format

        from protomq.v1.record_pb2 import RecordBatch
    except ImportError:
        sys.exit("decode_segment: no protoc and no protomq here; run it with .venv/bin/python")
    start = 0
    for end in field_ends(data):  # Any run of whole fields is a RecordBatch of its own.
        print(text_format.MessageToString(RecordBatch.FromString(data[start:end])), end="")
        start = end
    return 0


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: decode_segment.py SEGMENT")
    try:
        with (
            open(sys.argv[1], "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            if not is_segment(data):
                sys.exit(f"decode_segment: {sys.argv[1]} is no segment")
            check_records(data)
            protoc = shutil.which("protoc")
            return decode_with_protoc(protoc, data) if protoc else decode_with_stubs(data)
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the file is empty.
        sys.exit(f"decode_segment: {sys.argv[1]} is no segment: {error}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # `head` has enough. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
