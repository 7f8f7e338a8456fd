"""Make sure that there is a JDK for Spark, 17 or newer: found, or installed where that is allowed, or one line that says what to do.

    ensure_jdk.py WHO    WHO is named in the line, for instance "make test"

Spark takes the Java of JAVA_HOME, else the first on PATH, and so does this. Where neither will do, and this runs as root on a machine with
apt-get, a headless one is installed. Only the standard library is used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

OLDEST = 17
PACKAGES = ("openjdk-21-jre-headless", "openjdk-17-jre-headless")
"""The first that the distribution has: Debian 12 has 17, Debian 13 and Ubuntu 24.04 have 21."""


def java_command(environment: Mapping[str, str]) -> str | None:
    """The Java that Spark would start; None if there is none."""
    home = environment.get("JAVA_HOME")
    return shutil.which(f"{home}/bin/java" if home else "java", path=environment.get("PATH", ""))


def major_version(text: str) -> int | None:
    """The number in what `java -version` prints: 17 of 'openjdk version "17.0.15"', 8 of 'java version "1.8.0_402"'."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None


def what_is_wrong(environment: Mapping[str, str]) -> str:
    """Why Spark could not start; "" if it could."""
    command = java_command(environment)
    if command is None:
        home = environment.get("JAVA_HOME")
        return f"JAVA_HOME is {home}, where there is no bin/java" if home else "there is no java"
    said = subprocess.run([command, "-version"], capture_output=True, text=True, check=False)
    version = major_version(said.stderr)
    if said.returncode or version is None:
        return f"{command} -version fails"
    return f"{command} is Java {version}" if version < OLDEST else ""


def install() -> str:
    """Installs a headless Java from the distribution; "", or why that did not work."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    run("apt-get", "update")  # A package list that cannot be renewed may still do.
    for package in PACKAGES:
        if run("apt-cache", "show", package).returncode == 0:
            print(f"installing {package} for Spark", flush=True)
            done = run("apt-get", "install", "--yes", "--no-install-recommends", package)
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            return f"apt-get install {package}: {' '.join(last)}" if done.returncode else ""
    return f"apt-get knows neither {' nor '.join(PACKAGES)}"


def main() -> None:
    who = sys.argv[1]
    wrong = what_is_wrong(os.environ)
    # What JAVA_HOME names is the user's choice: another Java beside it would not be taken.
    if wrong and not os.environ.get("JAVA_HOME") and os.geteuid() == 0 and shutil.which("apt-get"):
        failed = install()
        wrong = what_is_wrong(os.environ) if not failed else f"{wrong} ({failed})"
    if wrong:
        sys.exit(
            f"{who}: Spark needs a JDK {OLDEST} or newer, and {wrong}: install one"
            f" (Debian, Ubuntu: apt-get install {PACKAGES[1]}), or set JAVA_HOME"
        )


if __name__ == "__main__":
    main()
