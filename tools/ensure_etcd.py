"""Make sure that there is an etcd: found, or installed where that is allowed, or one line that says what to do.

    ensure_etcd.py WHO    WHO is named in the line, for instance "make test"

Brokers elect their master in etcd; the tests of that start a real one. It is the first on PATH. Where there is none, and this runs as root
on a machine with apt-get, the distribution's is installed. Only the standard library is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGE = "etcd-server"
"""Debian 12 has 3.4, Debian 13 and Ubuntu 24.04 have 3.5; both have the JSON gateway under /v3."""


def what_is_wrong() -> str:
    """Why no etcd could be started; "" if one could."""
    command = shutil.which("etcd")
    if command is None:
        return "there is no etcd"
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return "" if said.stdout.startswith("etcd Version: 3.") else f"{command} is no etcd 3"


def install() -> str:
    """Installs the distribution's etcd; "", or why that did not work."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    run("apt-get", "update")  # A package list that cannot be renewed may still do.
    print(f"installing {PACKAGE} for fail-over", flush=True)
    done = run("apt-get", "install", "--yes", "--no-install-recommends", PACKAGE)
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return f"apt-get install {PACKAGE}: {' '.join(last)}" if done.returncode else ""


def main() -> None:
    who = sys.argv[1]
    wrong = what_is_wrong()
    if wrong and os.geteuid() == 0 and shutil.which("apt-get"):
        failed = install()
        wrong = what_is_wrong() if not failed else f"{wrong} ({failed})"
    if wrong:
        sys.exit(
            f"{who}: fail-over needs an etcd 3, and {wrong}: install one (Debian, Ubuntu: apt-get install {PACKAGE})"
        )


if __name__ == "__main__":
    main()
