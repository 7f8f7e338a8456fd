"""D5 by somebody else's parser: the bytes of a log are a RecordBatch to `protoc --decode`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .violations import Violation

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-codegen" / "bin" / "python"


def why_not() -> str:
    """Why protoc cannot be run here; "" if it can."""
    return "" if PYTHON.exists() else f"{PYTHON} is missing: run make generate-check"


def decode_with_protoc(data: bytes, record_count: int) -> list[Violation]:
    """`data`: whole appends of a log."""
    done = subprocess.run(
        [
            PYTHON,
            "-m",
            "grpc_tools.protoc",
            "--decode",
            "protomq.v1.RecordBatch",
            f"-I{ROOT / 'proto'}",
            "protomq/v1/record.proto",
        ],
        input=data,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        return [Violation("D5", f"protoc: {done.stderr.decode(errors='replace')[-500:]}")]
    count = done.stdout.count(b"\nrecords {") + done.stdout.startswith(b"records {")
    return (
        []
        if count == record_count
        else [Violation("D5", f"protoc sees {count} records, the log has {record_count}")]
    )
