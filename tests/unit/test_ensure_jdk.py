"""tools/ensure_jdk.py with machines made of a few shell scripts on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEW = 'openjdk version "21.0.2" 2024-01-16'


def add_command(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def add_java(folder: Path, line: str) -> None:
    add_command(folder, "java", f"echo '{line}' >&2")


def ensure(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "tools/ensure_jdk.py"), "make test"]
    variables = {"PATH": str(path), **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("line", [NEW, 'java version "17" 2021-09-14', 'openjdk version "25-ea"'])
def test_a_java_that_is_new_enough_will_do(tmp_path: Path, line: str) -> None:
    add_java(tmp_path, line)
    assert ensure(tmp_path).returncode == 0


def test_java_home_goes_before_the_path(tmp_path: Path) -> None:
    add_java(tmp_path / "path", 'java version "1.8.0_402"')
    add_java(tmp_path / "home/bin", NEW)
    assert ensure(tmp_path / "path", JAVA_HOME=str(tmp_path / "home")).returncode == 0
    wrong = ensure(tmp_path / "path", JAVA_HOME=str(tmp_path / "nothing"))
    assert wrong.returncode == 1
    assert f"JAVA_HOME is {tmp_path}/nothing, where there is no bin/java" in wrong.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "there is no java"),
        ('java version "1.8.0_402"', "is Java 8"),
        ('openjdk version "11.0.2"', "is Java 11"),
        ("what?", "fails"),
    ],
)
def test_no_java_and_nothing_to_install_it_with_is_one_line_that_says_what_to_do(
    tmp_path: Path, line: str, said: str
) -> None:
    if line:
        add_java(tmp_path, line)
    done = ensure(tmp_path)
    assert done.returncode == 1
    (text,) = done.stderr.splitlines()
    assert text.startswith("make test: Spark needs a JDK 17 or newer, and ")
    assert said in text
    assert "apt-get install openjdk-17-jre-headless" in text


def add_debian(path: Path, log: Path, *, knows: str, install: str) -> None:
    add_command(path, "apt-cache", f'[ "$2" = {knows} ]')
    add_command(path, "apt-get", f'echo "$@" >> {log}\n[ "$1" = update ] && exit 0\n{install}')


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
def test_as_root_on_debian_it_is_installed_if_it_is_missing_or_too_old(tmp_path: Path) -> None:
    path, log = tmp_path / "path", tmp_path / "log"
    add_java(tmp_path / "package", NEW)
    install = f"/bin/cp {tmp_path}/package/java {path}/java"
    for old in (False, True):
        if old:
            add_java(path, 'openjdk version "11.0.2"')
        add_debian(path, log, knows="openjdk-17-jre-headless", install=install)
        done = ensure(path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "installing openjdk-17-jre-headless" in done.stdout
    calls = log.read_text().splitlines()
    assert calls[0] == "update"
    assert calls[1] == "install --yes --no-install-recommends openjdk-17-jre-headless"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
def test_an_installation_that_fails_says_why(tmp_path: Path) -> None:
    add_debian(
        tmp_path,
        tmp_path / "log",
        knows="openjdk-21-jre-headless",
        install="echo 'E: disk full' >&2; exit 100",
    )
    done = ensure(tmp_path)
    assert done.returncode == 1
    assert "there is no java (apt-get install openjdk-21-jre-headless: E: disk full)" in done.stderr
