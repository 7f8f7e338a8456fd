"""Where the command `protomq` begins: Ctrl-C ends it in one way, also while its modules are still being imported."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the command of this process; its exit code."""
    try:
        from protomq_cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130  # ExitCode.INTERRUPTED, which may not be imported yet.


if __name__ == "__main__":
    sys.exit(run())
