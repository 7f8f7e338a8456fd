"""Make the virtual environments of the workspace, by uv when it is there and by venv and pip when not.

    make_env.py dev        .venv: every member of the workspace, editable, and the dependency group `dev`
    make_env.py spark      .venv with the dependency group `spark` too
    make_env.py codegen    .venv-codegen: what generates the stubs (see codegen-requirements.txt)
    make_env.py kafka      .venv-kafka: the Spark of Kafka's connector, for `make bench-spark`
    make_env.py deploy     .venv-deploy: linters, for `make deploy-check`

The stamp `.installed` is written last and holds a digest of all that the environment was made from. So an
interrupted run is repeated, an unchanged environment is left alone, and of two runs at once (a lock) the
second finds the work done. Only the standard library is used: nothing is installed yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SELDOM = "/tests/|/site-packages/(fontTools|mpl_toolkits|mypy|mypyc|numpy/f2py|pip|pygments/lexers|pyspark/(ml|mllib|pandas)|setuptools)/"
"""What packages bring along and nothing here imports, or one module of it: half of what could be compiled."""
REQUIREMENTS = {
    "codegen": "tools/codegen-requirements.txt",
    "kafka": "tests/bench/spark/requirements.txt",
    "deploy": "tools/deploy-requirements.txt",
}


def sources(kind: str) -> tuple[list[str], list[Path]]:
    """What the installer is told to install, and the files that decide the outcome."""
    if kind in REQUIREMENTS:
        return ["-r", REQUIREMENTS[kind]], [ROOT / REQUIREMENTS[kind]]
    arguments = ["--group", "dev", *(["--group", "spark"] if kind == "spark" else [])]
    for member in members():
        # The SDK first, with what its users may choose: types and tests need all of it.
        arguments += ["-e", "./clients/python[all]" if member == "clients/python" else f"./{member}"]
    return arguments, [ROOT / "pyproject.toml", *(ROOT / member / "pyproject.toml" for member in members())]


def members() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found: list[str] = project["tool"]["uv"]["workspace"]["members"]
    return found


def builders() -> list[str]:
    """What builds the members, what hatchling asks for besides to install something editable, and what builds pyspark.

    The registry has pyspark as a source archive only. setuptools makes wheels by itself since 70.1; a new Python 3.11 brings an older one.
    """
    projects = (tomllib.loads((ROOT / member / "pyproject.toml").read_text("utf-8")) for member in members())
    return sorted({"editables", "setuptools>=70.1", *(one for project in projects for one in project["build-system"]["requires"])})


def digest(files: list[Path]) -> str:
    state = hashlib.sha256(sys.version.encode())
    for file in [Path(__file__), *files]:
        state.update(file.read_bytes())
    return state.hexdigest()


def works(python: Path, *arguments: str) -> bool:
    if not python.exists():
        return False
    command = [str(python), *arguments]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def install(venv: Path, arguments: list[str]) -> None:
    """Create the environment unless a usable one is there, and bring it up to date."""
    python = venv / "bin/python"
    same = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=ROOT)

    if uv := shutil.which("uv"):
        if not works(python, "-c", same):
            run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv))
        run(uv, "pip", "install", "--quiet", "--python", str(python), *arguments)
        return
    # An environment that uv made has no pip, and is rebuilt.
    if not (works(python, "-c", same) and works(python, "-m", "pip", "--version")):
        run(sys.executable, "-m", "venv", "--clear", str(venv))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    if "-e" in arguments:
        # The first that knows dependency groups. What builds the members is installed once, where pip would do it anew for each.
        run(*pip, "--upgrade", "pip>=25.1", *builders())
        run(*pip, "--no-build-isolation", *arguments)
    else:
        run(*pip, *arguments)
    # For all cores, where pip has one at work. What does not compile is a template.
    subprocess.run([str(python), "-m", "compileall", "-qq", "-j", "0", "-x", SELDOM, str(venv / "lib")], check=False)


def main() -> None:
    kind = sys.argv[1]
    venv = ROOT / (f".venv-{kind}" if kind in REQUIREMENTS else ".venv")
    stamps = [venv / ".installed"]
    if kind == "spark":  # It has all that `dev` has.
        stamps.append(venv / ".installed-spark")
    lock = ROOT / "build" / f"make_env{venv.name}.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        arguments, files = sources(kind)
        missing = [str(file.relative_to(ROOT)) for file in files if not file.exists()]
        if missing:
            sys.exit(f"make_env: missing: {', '.join(missing)}")
        wanted = digest(files)
        if not all(stamp.exists() and stamp.read_text("utf-8") == wanted for stamp in stamps):
            for stamp in stamps:
                stamp.unlink(missing_ok=True)
            print(f"making {venv.name} by {'uv' if shutil.which('uv') else 'venv and pip'}", flush=True)
            try:
                install(venv, arguments)
            except subprocess.CalledProcessError as error:
                sys.exit(f"make_env: {' '.join(error.cmd)}: exit code {error.returncode}")
        # Also when nothing was to do: make compares times, and a checkout changes those of the sources.
        for stamp in stamps:
            temporary = stamp.with_suffix(".new")
            temporary.write_text(wanted, "utf-8")
            os.replace(temporary, stamp)


if __name__ == "__main__":
    main()
