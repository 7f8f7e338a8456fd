"""`python -m tests.bench.spark [row ...]`: writes build/bench.json and the section `spark` of docs/benchmarks.md."""

from __future__ import annotations

import shutil
import sys

from tests.bench.command import run_command
from tests.bench.spark import kafka
from tests.bench.spark.rows import SPARK_ROWS


def main() -> int:
    """0 if every row could be measured, whatever its value."""
    if missing := [tool for tool in ("java", "mvn") if shutil.which(tool) is None]:
        print(f"Spark was not measured: {', '.join(missing)} not found", file=sys.stderr)
        return 1
    return run_command({"spark": SPARK_ROWS}, before=kafka.install)


if __name__ == "__main__":
    sys.exit(main())
