"""Runs the tests that have just failed once more, one after the other; `make test` does so.

Beside other work a test can run out of a time that it does not need when alone. A test that fails twice is red. One that passes alone
is named as unsteady: a defect to mend, but no reason to refuse the change. Where more than `MOST` failed, the change is at fault, not the
machine: nothing runs again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 6
"""Tests; past this many the first run's verdict stands."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""pytest's own list: the node id of each test that failed."""


def failed(listed: str, suites: list[str]) -> list[str]:
    """The tests of `suites` (folders) in the text of pytest's list, sorted.

    A file that could not be imported stands there as a path without a test; it counts.
    """
    return sorted(node for node in json.loads(listed) if node.split("::")[0].startswith(tuple(suites)))


def main(suites: list[str]) -> int:
    """The exit code of the second run, or 1 where there is none."""
    tests = failed(LAST_FAILED.read_text(), suites) if LAST_FAILED.exists() else []
    if not 1 <= len(tests) <= MOST:
        print(f"{len(tests)} tests failed: none runs again (1 to {MOST} would)", file=sys.stderr)
        return 1
    print("\nThese failed, and run again alone:\n  " + "\n  ".join(tests), flush=True)
    code = subprocess.call([sys.executable, "-m", "pytest", *tests])
    if code == 0:
        print("UNSTEADY, failed beside other tests and passed alone:\n  " + "\n  ".join(tests), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
