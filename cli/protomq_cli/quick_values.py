"""Values of options and arguments without pydantic, by which typer converts them: its import takes 0.1 s, a fifth of a short command.

Only what is plainly right is converted here. All else goes typer's way, which then also says what is wrong with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Final

import typer

ELSEWHERE: Final = object()
"""The value is for typer to convert or to refuse."""

_INTEGER: Final = re.compile(r"-?[0-9]{1,18}")


def quick_value(
    value: Any,
    annotation: Any,
    *,
    parser: Callable[[Any], Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """What a single value of the command line, or a default, becomes; else ELSEWHERE. Raises what `parser` raises."""
    if value is None:
        return None
    if parser is not None:
        return parser(value)
    if not isinstance(annotation, type):
        return ELSEWHERE
    if issubclass(annotation, Enum):
        return next((each for each in annotation if value in (each, each.value)), ELSEWHERE)
    if annotation is Path and isinstance(value, str) and os.access(value, os.R_OK):
        return Path(value)
    if annotation is int and isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if annotation not in (str, int) or type(value) is not annotation:
        return ELSEWHERE
    is_inside = (minimum is None or value >= minimum) and (maximum is None or value <= maximum)
    return value if is_inside else ELSEWHERE


def convert_quickly(command: Any, parent: typer.Context | None = None) -> None:
    """Has a command of typer, and those below it, convert their values so."""
    context = typer.Context(command, parent=parent, **command.context_settings)
    # With --help, which the first context makes that asks for it.
    for param in command.get_params(context):
        if hasattr(param, "type_descriptor") and param.nargs == 1:
            param.process_value = _process_value(param)
    for child in getattr(command, "commands", {}).values():
        convert_quickly(child, context)


def _process_value(param: Any) -> Callable[[typer.Context, Any], Any]:
    by_typer = param.process_value
    annotation, known = param.type_descriptor.annotation, param.type_descriptor.parameter_info

    def process_value(context: typer.Context, value: Any) -> Any:
        found = ELSEWHERE
        if param.multiple:
            if value is None and not param.required:
                found = ()
        elif value is not None or not param.required:
            found = quick_value(
                value, annotation, parser=known.parser, minimum=known.min, maximum=known.max
            )
        if found is ELSEWHERE:
            return by_typer(context, value)
        return found if param.callback is None else param.callback(context, param, found)

    return process_value
