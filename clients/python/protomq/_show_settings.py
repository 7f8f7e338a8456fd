"""Clients whose settings are the fields of an options object: `help`, signatures and errors show them as if each were a parameter."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from ._checks import explain_unknown_settings

_Client = TypeVar("_Client", bound=type)


def show_settings(options: Any, names: Collection[str]) -> Callable[[_Client], _Client]:
    """A class decorator: what `**settings` takes are these fields of the dataclass `options`, with types, defaults and meanings."""

    def shown(client: _Client) -> _Client:
        constructor = vars(client)["__init__"]
        signature = inspect.signature(constructor)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        # Before what is of the connection, but for where to connect to.
        behind = next(i for i, p in enumerate(parameters) if p.name == "namesrv") + 1
        parameters[behind:behind] = [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
            )
            for field in dataclasses.fields(options)
            if field.name in names
        ]
        constructor.__signature__ = signature.replace(parameters=parameters)
        client.__init__ = explain_unknown_settings(constructor)  # type: ignore[misc]
        if client.__doc__ and options.__doc__:  # There are none under `python -OO`.
            client.__doc__ = f"{client.__doc__.rstrip()}\n\n    {options.__doc__}"
        return client

    return shown
