"""tools/ensure_etcd.py with machines made of a few shell scripts on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def add_command(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def ensure(path: Path) -> subprocess.CompletedProcess[str]:
    path.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "tools/ensure_etcd.py"), "make test"]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, check=False)


def test_an_etcd_3_will_do(tmp_path: Path) -> None:
    add_command(tmp_path, "etcd", "echo 'etcd Version: 3.4.23'")
    assert ensure(tmp_path).returncode == 0


@pytest.mark.parametrize("version", ["", "etcd Version: 2.3.8"])
def test_none_and_nothing_to_install_it_with_is_one_line_that_says_what_to_do(
    tmp_path: Path, version: str
) -> None:
    if version:
        add_command(tmp_path, "etcd", f"echo '{version}'")
    done = ensure(tmp_path)
    assert done.returncode == 1
    (text,) = done.stderr.splitlines()
    assert text.startswith("make test: fail-over needs an etcd 3, and ")
    assert ("is no etcd 3" if version else "there is no etcd") in text
    assert "apt-get install etcd-server" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
def test_as_root_on_debian_it_is_installed_or_it_is_said_why_not(tmp_path: Path) -> None:
    path, log = tmp_path / "path", tmp_path / "log"
    add_command(tmp_path / "package", "etcd", "echo 'etcd Version: 3.4.23'")
    install = f"/bin/cp {tmp_path}/package/etcd {path}/etcd"
    for step, code in (("echo 'E: disk full' >&2; exit 100", 1), (install, 0)):
        add_command(path, "apt-get", f'echo "$@" >> {log}\n[ "$1" = update ] && exit 0\n{step}')
        done = ensure(path)
        assert done.returncode == code
        assert ("E: disk full" in done.stderr) is bool(code)
    assert log.read_text().splitlines()[-1] == "install --yes --no-install-recommends etcd-server"
