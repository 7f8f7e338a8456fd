"""The notebook, run as a script by a Python of its own; and the programs of docs/spark.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from protomq.testing import Broker
from tests.support.spark import program_environment

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run_notebook(broker: Broker, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "spark_notebook.py")],
        capture_output=True,
        text=True,
        timeout=350,
        env={**environment, "PROTOMQ_NAMESRV_ADDR": broker.namesrv},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_notebook_runs_as_a_script(protomq_server: Broker, tmp_path: Path) -> None:
    output = run_notebook(protomq_server, program_environment(tmp_path / "conf"))
    assert re.search(r"\|large\| +200\| *44975\.0\|", output)
    assert re.search(r"\|small\| +800\| *79900\.0\|?", output)
    assert "large orders: 200" in output
    assert "copied: 200 and then: 0" in output
    assert "in nb-large: 200" in output
    assert "|500|customer-3|125.0|2025-10-09 17:13:20|" in output
    assert "|SEND_OK| NULL|" in output


def test_the_notebook_is_made_of_cells() -> None:
    text = (EXAMPLES / "spark_notebook.py").read_text()
    assert text.count("\n# %% ") >= 8
