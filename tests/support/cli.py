"""The command line, called from a test: in this process or as one of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock

from protomq_cli.main import main

PROTOMQ = [sys.executable, "-m", "protomq_cli"]


@dataclass(frozen=True)
class Finished:
    """What a command left."""

    stdout: str
    stderr: str


class _Terminal(io.TextIOWrapper):
    """Somebody sits before it."""

    def isatty(self) -> bool:
        return True


def run(
    *arguments: str, namesrv: str = "", stdin: str = "", code: int | tuple[int, ...] = 0, terminal: bool = False
) -> Finished:
    """Runs a command in this process, which spares the start of an interpreter; it must end with this exit code, or one of these.

    `terminal`: whether its standard error is one.
    """
    out, err = io.TextIOWrapper(io.BytesIO()), (_Terminal if terminal else io.TextIOWrapper)(io.BytesIO())
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with (
        mock.patch.dict(os.environ, environment_with(namesrv), clear=True),
        mock.patch.object(sys, "stdin", given),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        found = main(list(arguments))
    texts = []
    for stream in (out, err):
        stream.flush()
        assert isinstance(stream.buffer, io.BytesIO)
        texts.append(stream.buffer.getvalue().decode())
    codes = (code,) if isinstance(code, int) else code
    assert found in codes, f"{arguments}: {found}\n{texts[0]}\n{texts[1]}"
    return Finished(*texts)


def run_process(*arguments: str, namesrv: str = "", stdin: str = "", code: int = 0) -> Finished:
    """The same in a process of its own."""
    finished = subprocess.run(
        [*PROTOMQ, *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=120,
        env=environment_with(namesrv),
        check=False,
    )
    assert finished.returncode == code, (
        f"{arguments}: {finished.returncode}\n{finished.stdout}\n{finished.stderr}"
    )
    return Finished(finished.stdout, finished.stderr)


def environment_with(namesrv: str) -> dict[str, str]:
    """This environment, with the settings of the machine's user taken out."""
    environment = {**os.environ, "PROTOMQ_CONFIG": "/dev/null"}
    environment.pop("PROTOMQ_NAMESRV_ADDR", None)
    return {**environment, "PROTOMQ_NAMESRV_ADDR": namesrv} if namesrv else environment


def jsonl(finished: Finished) -> list[dict[str, object]]:
    return [json.loads(line) for line in finished.stdout.splitlines()]
