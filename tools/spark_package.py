"""Build what must be on Spark's driver and executors where their Python has not installed protomq-spark: `make spark-package`.

build/spark-package/protomq-spark.zip          for --py-files: protomq and protomq_spark alone, pure Python. The Python of the cluster
                                               must have what they stand on: numpy, pyarrow, grpcio, protobuf, google-crc32c
build/spark-package/protomq-spark-site.tar.gz  for --archives: the same with all of that, for the machine and the minor version of
                                               Python that this runs on. The Python of the cluster needs nothing
build/spark-package/site                       the same as a folder, for the driver
build/spark-package/native.txt                 which packages have native code, and all versions

spark_package.py [zip|site]...    both unless named
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build/spark-package"
MEMBERS = ("clients/python", "clients/spark")
EXTRAS = {"clients/python": "[compression]"}


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(
            f"spark_package: {' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}"
        )


def installer() -> list[str]:
    """pip of this environment, or uv, which makes environments without pip."""
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def install(target: Path, *arguments: str) -> None:
    run(*installer(), "--target", str(target), *arguments)
    shutil.rmtree(target / "bin", ignore_errors=True)  # Commands, with paths of this machine.
    for cache in list(target.rglob("__pycache__")):
        shutil.rmtree(cache)


def build_zip(folder: Path) -> Path:
    """Our own modules, as wheels have them: nothing of the tree beside them."""
    site = folder / "pure"
    install(site, "--no-deps", *(f"./{member}" for member in MEMBERS))
    native = native_files(site)
    assert not native, f"not pure Python: {native}"
    made = folder / "protomq-spark.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in site.rglob("*") if path.is_file()):
            archive.write(path, path.relative_to(site))
    return made


def build_site(folder: Path) -> Path:
    """All that is imported; a folder to put on PYTHONPATH, since a virtual environment has paths of the machine that made it."""
    site = folder / "site"
    install(site, *(f"./{member}{EXTRAS.get(member, '')}" for member in MEMBERS))
    versions = [path.name.removesuffix(".dist-info") for path in site.glob("*.dist-info")]
    tops = {path.relative_to(site).parts[0] for path in native_files(site)}
    lines = [f"python {sys.version_info.major}.{sys.version_info.minor} {os.uname().machine}"]
    lines += [f"native code in {top}" for top in sorted(tops)]
    (OUTPUT / "native.txt").write_text("\n".join(lines + sorted(versions)) + "\n")
    made = folder / "protomq-spark-site.tar.gz"
    with tarfile.open(made, "w:gz", compresslevel=1) as archive:
        for path in sorted(site.iterdir()):
            archive.add(path, path.name)
    shutil.rmtree(OUTPUT / "site", ignore_errors=True)
    site.rename(OUTPUT / "site")
    return made


def native_files(site: Path) -> list[Path]:
    return [path for path in site.rglob("*.so*") if path.is_file()]


def main() -> None:
    wanted = sys.argv[1:] or ["zip", "site"]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    build = {"zip": build_zip, "site": build_site}
    for kind in wanted:
        with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
            made = build[kind](Path(folder))
            os.replace(made, OUTPUT / made.name)
        size_mib = (OUTPUT / made.name).stat().st_size / (1 << 20)
        print(f"{(OUTPUT / made.name).relative_to(ROOT)}  {size_mib:.1f} MiB")


if __name__ == "__main__":
    main()
