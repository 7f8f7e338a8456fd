"""Shell completion: the script for each shell, and values that come from a running system.

`protomq completion bash|zsh|fish` prints the script instead of installing it, and never guesses the shell: in containers
guesses fail. Topic names are asked for with a deadline; a slow or absent server means no suggestions, not a slow shell.
"""

from __future__ import annotations

import threading
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from protomq_cli.output import ALL_DONE, stdout_named

COMPLETE_VARIABLE: Final = "_PROTOMQ_COMPLETE"
_DEADLINE_S: Final = 0.3


class Shell(StrEnum):
    """Shells that are supported."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def print_completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print the completion script of a shell.

    bash: add `eval "$(protomq completion bash)"` to ~/.bashrc. zsh: the
    same with zsh, after compinit, in ~/.zshrc. fish: protomq completion
    fish > ~/.config/fish/completions/protomq.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(
        prog_name="protomq", complete_var=COMPLETE_VARIABLE, shell=shell.value
    )
    with stdout_named(ALL_DONE):
        typer.echo(script)


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics that begin with what was typed, from the name server that the command would use."""
    found: list[str] = []

    def ask() -> None:
        found.extend(_topic_names(ctx.params.get("namesrv")))

    # The thread may still wait for a server when the answer is due: it does not keep the process.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_DEADLINE_S)
    return sorted(name for name in found if name.startswith(incomplete))


def _topic_names(namesrv: Any) -> list[str]:
    try:
        from protomq_cli.connection import open_admin

        with open_admin(namesrv, _DEADLINE_S) as admin:
            return admin.list_topic_names()
    except Exception:
        # Whatever is wrong, a message in the middle of the user's line would not help.
        return []
