"""D5 by somebody else's parser: the bytes of a log are a RecordBatch to `protoc --decode`."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .violations import Violation

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-codegen" / "bin" / "python"

# One process for each part, but Python starts once: a log has dozens of segments. Exit codes are told in the order of the parts.
_DECODE = """
import os, sys
from grpc_tools import protoc
for name in sys.argv[2:]:
    child = os.fork()
    if not child:
        os.dup2(os.open(name, os.O_RDONLY), 0)
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(name + suffix, os.O_WRONLY | os.O_CREAT), descriptor)
        os._exit(protoc.main(["protoc", "--decode", "protomq.v1.RecordBatch", "-I" + sys.argv[1], "protomq/v1/record.proto"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def why_not() -> str:
    """Why protoc cannot be run here; "" if it can."""
    return "" if PYTHON.exists() else f"{PYTHON} is missing: run make generate-check"


def decode_with_protoc(parts: Sequence[tuple[bytes, int]]) -> list[Violation]:
    """`parts`: whole appends of a log, each with the number of its records."""
    with tempfile.TemporaryDirectory(prefix="protomq-protoc-") as folder:
        files = [Path(folder) / str(number) for number in range(len(parts))]
        for file, (data, _) in zip(files, parts, strict=True):
            file.write_bytes(data)
        done = subprocess.run(
            [PYTHON, "-c", _DECODE, ROOT / "proto", *files], capture_output=True, timeout=60, check=False, text=True
        )
        codes = done.stdout.split()
        if len(codes) != len(parts):
            return [Violation("D5", f"protoc did not run: {done.stderr[-500:]}")]
        found = []
        for file, code, (_, record_count) in zip(files, codes, parts, strict=True):
            if code != "0":
                said = file.with_suffix(".err").read_text(errors="replace")
                found.append(Violation("D5", f"protoc: {said[-500:]}"))
                continue
            decoded = file.with_suffix(".out").read_bytes()
            count = decoded.count(b"\nrecords {") + decoded.startswith(b"records {")
            if count != record_count:
                found.append(Violation("D5", f"protoc sees {count} records, the log has {record_count}"))
        return found
