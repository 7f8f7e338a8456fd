"""Decodes what servers answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .errors import ProtocolError

_T = TypeVar("_T")


def decoded(data: bytes, parse: Callable[[bytes], _T]) -> _T:
    """An answer as `parse` of its protobuf class gives it. Raises ProtocolError."""
    from google.protobuf.message import DecodeError

    try:
        return parse(data)
    except DecodeError as error:
        raise ProtocolError(f"the server's answer does not parse: {error}") from error
