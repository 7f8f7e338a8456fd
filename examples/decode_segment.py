"""A segment of the commit log is one protobuf message: decode it with nothing but protoc.

    python examples/decode_segment.py DATA_DIR/commitlog/00000000000000000000 | head -40

What runs is `protoc --decode protomq.v1.RecordBatch proto/protomq/v1/record.proto < SEGMENT`. Segments are made in full size,
with zeros behind the last append; protoc wants them away, so the few lines below find where the fields end.
"""

from __future__ import annotations

import mmap
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def read_varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def end_of_fields(data: mmap.mmap) -> int:
    """Every field of a RecordBatch is a tag byte, a length and so many bytes; the first zero is no tag."""
    at = 0
    while at < len(data) and data[at] != 0:
        size, start = read_varint(data, at + 1)
        at = start + size
    return at


def protoc() -> list[str]:
    """protoc itself, or the one inside grpcio-tools: here, or in the environment of `make generate`."""
    if found := shutil.which("protoc"):
        return [found]
    for python in (sys.executable, str(ROOT / ".venv-codegen/bin/python")):
        command = [python, "-m", "grpc_tools.protoc"]
        try:
            if (
                subprocess.run([*command, "--version"], capture_output=True, check=False).returncode
                == 0
            ):
                return command
        except FileNotFoundError:
            pass
    sys.exit("decode_segment: no protoc; run: pip install grpcio-tools")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: decode_segment.py SEGMENT")
    with (
        open(sys.argv[1], "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        used = data[: end_of_fields(data)]
    decode = ["--decode=protomq.v1.RecordBatch", "protomq/v1/record.proto"]
    command = [*protoc(), f"--proto_path={ROOT / 'proto'}", *decode]
    sys.exit(subprocess.run(command, input=used, check=False).returncode)


if __name__ == "__main__":
    main()
