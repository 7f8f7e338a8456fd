"""A load in a process of its own: `python -m tests.bench.worker MODULE.FUNCTION <<< '{"parameter": value}'`.

The function stands in `tests.bench.loads`; its parameters are the first line of standard input. What it returns, a Sample, is printed as
one line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys

from .measure import Sample, sample_to_json


def main() -> None:
    """Run the load that the command line names."""
    module_name, _, function_name = sys.argv[1].partition(".")
    parameters = json.loads(sys.stdin.readline())
    module = importlib.import_module(f"tests.bench.loads.{module_name}")
    gc.freeze()  # What was imported is not garbage.
    sample: Sample | None = getattr(module, function_name)(**parameters)
    if sample is not None:
        print(sample_to_json(sample), flush=True)


if __name__ == "__main__":
    main()
