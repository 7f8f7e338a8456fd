"""`make demo-spark` on a few made-up flights that `make demo` has sent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tests.support.spark")  # Skips where there is no JDK or no pyspark.

from tests.support.spark import SPARK_MARKS, program_environment

pytestmark = [pytest.mark.long, *SPARK_MARKS]

ROOT = Path(__file__).resolve().parents[2]
COUNT = 3000


def write_data(folder: Path) -> None:
    """The five CSV files, with the columns that the pipeline takes."""
    folder.mkdir()
    lines = ["year,month,day,dep_time,dep_delay,arr_delay,carrier,flight,tailnum,origin,dest,time_hour"]
    for n in range(COUNT):
        day, origin = 1 + n * 28 // COUNT, ("EWR", "JFK", "LGA")[n % 3]
        tail = "NA" if n % 50 == 0 else "N14228" if n % 50 == 1 else f"N{n % 97}"
        lines.append(
            f"2013,1,{day},600,{n % 60},5,{'UA' if n % 2 else 'AA'},{n},{tail},{origin},BOS,2013-01-{day:02}T10:00:00Z"
        )
    files = {
        "flights": "\n".join(lines),
        "airlines": "carrier,name\nUA,United\nAA,American",
        "airports": "faa,name\nEWR,Newark\nJFK,Kennedy\nLGA,La Guardia",
        "planes": "tailnum,seats\nN1,100",
        "weather": "origin,time_hour,wind_speed,precip\nEWR,2013-01-01T10:00:00Z,5,0",
    }
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text + "\n")


def test_the_table_grows_until_all_flights_are_in_it(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    environment = program_environment(tmp_path / "conf")

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=350, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    flights = str(tmp_path / "data" / "flights.csv")
    python("-m", "protomq_cli.demo", "--flights", flights, "--data-dir", "store", "--count", str(COUNT))
    output = python(
        str(ROOT / "clients/spark/demo.py"), "--store", "store", "--data", "data", "--batch-size", "1000", "--report", "report",
    )  # fmt: skip
    grown = [line.split() for line in output.splitlines() if re.fullmatch(r"( +[\d,.]+){8}", line)]
    assert [row[2] for row in grown] == ["1,000", "2,000", "3,000"]
    assert [row[3:6] for row in grown[-1:]] == [["1,000"] * 3]
    assert "checked: all 3,000 flights are in the table" in output
    assert (tmp_path / "report" / "report.png").stat().st_size > 10_000
