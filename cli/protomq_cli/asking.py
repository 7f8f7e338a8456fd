"""Questions before something is deleted."""

from __future__ import annotations

import sys

import typer

from protomq_cli.exits import CliError, ExitCode


def ask_to_delete(question: str) -> None:
    """Returns if somebody at the terminal says yes. Raises CliError, also where nobody can be asked."""
    if not sys.stdin.isatty():
        raise CliError(
            ExitCode.USAGE, "NOT_CONFIRMED", "no terminal to ask on; add --yes to delete"
        )
    if not typer.confirm(question, err=True):
        raise CliError(ExitCode.FAILURE, "NOT_CONFIRMED", "nothing was deleted")
