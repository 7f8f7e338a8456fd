"""How a fork of a process that has its imports done becomes what was asked for."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence


def take_streams(streams: Sequence[int]) -> None:
    """Makes these its standard streams, from stdin on, and closes the descriptors."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def run_only(module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Runs a module as `python -m` does, in this environment and folder."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
