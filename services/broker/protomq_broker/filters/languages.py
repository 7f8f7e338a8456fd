"""From a language and an expression in it, or the name of a module, to a filter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .cel_filter import CelFilter
from .filter_book import Filter, FilterKey
from .wasm_filter import WasmFilter

MODULE: Final = "WebAssembly"
"""As a language: its texts are names of modules."""


def compile_filter(key: FilterKey, module: Callable[[str], bytes]) -> Filter:
    """`module` gives a module by its name. Raises FilterError, and FilterUnavailableError where a library is missing."""
    if key.language == "CEL":
        return CelFilter(key.text)
    if key.language == MODULE:
        return WasmFilter(module(key.text))
    # Lark takes time to import, which brokers without such filters need not spend.
    from .sql_filter import SqlFilter

    return SqlFilter(key.text)
