"""Generate the Python stubs of proto/ into clients/python/protomq/v1.

Run by `make generate` with the interpreter of .venv-codegen (see codegen-requirements.txt). With `--check`
nothing is written: the exit code is 1 if the committed stubs are not exactly what the generator makes.

- `*_pb2.py` and `*_pb2_grpc.py` come from grpcio-tools; the latter for files with a service only.
- `*_pb2.pyi` and `*_pb2_grpc.pyi` come from mypy-protobuf: protoc's own do not type extensions (the remoting
  options of our methods), and nothing else types the gRPC stubs.
- The folder belongs to this script: what it did not make is removed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
PACKAGE = Path("protomq/v1")
TARGET = ROOT / "clients/python" / PACKAGE
INIT = '"""The generated stubs of protomq.v1: made by tools/generate_stubs.py, do not edit."""\n'


def protoc(out: Path, protos: list[Path], *outputs: str) -> None:
    names = [proto.relative_to(PROTO_ROOT).as_posix() for proto in protos]
    # The plugins of mypy-protobuf are found on PATH, and must be those beside this interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}"]
    command += [f"--{output}{out}" for output in outputs]
    subprocess.run(command + names, check=True, env={**os.environ, "PATH": path})


def generate(out: Path) -> None:
    protos = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    if not protos:
        sys.exit(f"generate_stubs: no .proto file in {PROTO_ROOT / PACKAGE}")
    services = [p for p in protos if re.search(r"^service ", p.read_text("utf-8"), re.MULTILINE)]
    protoc(out, protos, "python_out=", "mypy_out=quiet:")
    if services:
        protoc(out, services, "grpc_python_out=", "mypy_grpc_out=quiet:")
    # Before __init__.py is there, and so without the SDK's package: protomq is a namespace here, and the stubs
    # are imported alone, on the oldest grpcio that we promise, with every warning an error.
    modules = [f"{PACKAGE.as_posix().replace('/', '.')}.{f.stem}" for f in (out / PACKAGE).glob("*.py")]
    check = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-B", "-W", "error", "-c", check, *modules], check=True, cwd=out)
    (out / PACKAGE / "__init__.py").write_text(INIT, "utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name: file.read_bytes() for file in files if file.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the Python stubs of proto/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stubs differ")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made = contents(Path(scratch) / PACKAGE)
    there = contents(TARGET)
    different = sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))

    if arguments.check:
        if different:
            sys.exit("stubs are not what proto/ says; run `make generate`: " + ", ".join(different))
        print(f"{len(made)} stub files are up to date")
        return
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in different:  # The others keep their time stamps.
        if name in made:
            (TARGET / name).write_bytes(made[name])
        else:
            (TARGET / name).unlink()
    print(f"{len(made)} stub files in {TARGET.relative_to(ROOT)}, {len(different)} changed")


if __name__ == "__main__":
    main()
