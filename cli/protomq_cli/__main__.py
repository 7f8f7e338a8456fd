"""Where the command `protomq` begins: Ctrl-C ends it in one way, also while its modules are still being imported."""

from __future__ import annotations

import gc
import os
import sys

from protomq_cli.importing import uncollected


def run() -> int:
    """Run the command of this process; its exit code."""
    _open_closed_streams()
    if sys.argv[1:2] == ["worker"]:
        _outlive_hangups()
    try:
        with uncollected():
            from protomq_cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130  # ExitCode.INTERRUPTED, which may not be imported yet.
    finally:
        # The interpreter's last collection would look through all modules once more.
        gc.freeze()


def _outlive_hangups() -> None:
    """A worker's SIGHUP replaces its processes: while there are none, it says nothing, and must not end the worker."""
    import signal

    if hasattr(signal, "SIGHUP"):  # Not on Windows.
        signal.signal(signal.SIGHUP, lambda *_: None)


def _open_closed_streams() -> None:
    """Where the shell has closed a standard stream (`>&-`), Python has None, and the next socket would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It stays open as long as the process.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - see above.


if __name__ == "__main__":
    sys.exit(run())
