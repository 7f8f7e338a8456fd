"""The Python that tests give to Spark is as any other, but that its imports are done: tests/support/warm_python.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is not installed: make spark", exc_type=ImportError)

from tests.support.waiting import wait_for
from tests.support.warm_python import warm_python

SAY = "import os, sys; print('pyspark.worker' in sys.modules, os.environ['SAID'], os.getcwd(), sys.stdin.read())"
STAY = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def run(python: str, program: str, folder: Path) -> list[str]:
    """What a program writes, which is run by a module, as Spark's are."""
    done = subprocess.run(
        [python, "-m", "timeit", "-n1", "-r1", program],
        input="asked", capture_output=True, text=True, check=True, cwd=folder, env={**os.environ, "SAID": "this"},
    )  # fmt: skip
    return done.stdout.splitlines()[0].split()


def test_it_has_its_imports_and_streams_environment_and_folder_of_whoever_asks(tmp_path: Path) -> None:
    with warm_python(tmp_path) as python:
        assert run(python, SAY, tmp_path) == ["True", "this", str(tmp_path), "asked"]
        with subprocess.Popen([python, "-m", "timeit", STAY], stdout=subprocess.PIPE, text=True) as asked:
            assert asked.stdout is not None
            process = Path("/proc", asked.stdout.readline().strip())
            assert process.exists()
            asked.terminate()  # As Spark does to a worker.
            wait_for(lambda: not process.exists())
    # Spark may outlive it.
    assert run(python, SAY, tmp_path) == ["False", "this", str(tmp_path), "asked"]
