"""Filters that a user wrote and compiled to WebAssembly (`pip install 'protomq-broker[wasm]'`): RocketMQ's filter server, without its Java.

A module exports `memory`, `alloc(size: i32) -> i32` and `matches(at: i32, size: i32) -> i32`, and imports nothing: it has no clock, file or
network. Each run of records has a new instance. It calls `alloc` once, with the size of the largest record, then `matches` for each record.
The record's protobuf octets (protomq.v1.Record) stand at `at`. Anything but 0 is a match.

Bounds: FUEL_PER_RECORD instructions for a record (and as many for the start), MEMORY_MAX_BYTES. A module that traps, or needs more, ends
with
FilterFailedError: which messages it would have let through nobody can know. Compiling takes long: not on a lane.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from numpy.typing import NDArray

from protomq.wire.varints import read_varint

from .errors import FilterError, FilterFailedError, FilterUnavailableError
from .filter_book import Matches

MODULE_SIZE_MAX_BYTES: Final = 768 << 10
"""So that one fits into a request of the admin lane, 1 MiB."""
MEMORY_MAX_BYTES: Final = 16 << 20
FUEL_PER_RECORD: Final = 300_000
"""Instructions, about: a quarter of a millisecond of work."""
_EXPORTS: Final = {"alloc": (1, 1), "matches": (2, 1)}
"""Functions, and how many numbers they take and give."""


class WasmFilter:
    """Any thread. A `Filter` of filter_book.py; of tags a module tells nothing."""

    tags: frozenset[bytes] = frozenset()
    records_min = 4
    records_max = 16

    def __init__(self, module: bytes) -> None:
        """Raises FilterError for what is no such module, and FilterUnavailableError where the library is missing."""
        self._wasmtime, self._engine = _engine()
        if len(module) > MODULE_SIZE_MAX_BYTES:
            raise FilterError(
                f"the module has {len(module)} bytes, at most {MODULE_SIZE_MAX_BYTES} are allowed"
            )
        if not module.startswith(b"\0asm"):  # The library would take text, too.
            raise FilterError("this is no WebAssembly module: a module begins with 00 61 73 6D")
        try:
            self._module = self._wasmtime.Module(self._engine, module)
        except self._wasmtime.WasmtimeError as error:
            raise FilterError(f"no valid WebAssembly module: {_first_line(error)}") from None
        self._check_interface()

    def _check_interface(self) -> None:
        wasmtime = self._wasmtime
        if imports := [f"{found.module}.{found.name}" for found in self._module.imports]:
            raise FilterError(f"a filter imports nothing, this one wants {', '.join(imports[:5])}")
        exports = {found.name: found.type for found in self._module.exports}
        if not isinstance(exports.get("memory"), wasmtime.MemoryType):
            raise FilterError("the module does not export its memory as `memory`")
        for name, (takes, gives) in _EXPORTS.items():
            kind = exports.get(name)
            if not isinstance(kind, wasmtime.FuncType) or (
                [str(value) for value in (*kind.params, *kind.results)] != ["i32"] * (takes + gives)
                or len(kind.params) != takes
            ):
                wanted = ", ".join(["i32"] * takes)
                raise FilterError(f"the module does not export {name}({wanted}) -> i32")

    def matching(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Matches:
        """As of Filter. Raises FilterFailedError if the module fails at the first record; it stops before a later one at which it fails."""
        wasmtime = self._wasmtime
        store = wasmtime.Store(self._engine)
        store.set_limits(memory_size=MEMORY_MAX_BYTES, memories=1, instances=1, tables=8, table_elements=65_536)
        found: list[int] = []
        examined = 0
        size_max = int(sizes.max())
        try:
            store.set_fuel(FUEL_PER_RECORD)
            exports = wasmtime.Instance(store, self._module, ()).exports(store)
            memory, matches = exports["memory"], exports["matches"]
            at = exports["alloc"](store, size_max) & 0xFFFF_FFFF
            if at + size_max > memory.data_len(store):
                raise FilterFailedError("alloc returned a place outside of the module's memory")
            for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
                _, record_start = read_varint(data, start + 1)
                record = data[record_start : start + size]
                memory.write(store, record, at)
                store.set_fuel(FUEL_PER_RECORD)
                if matches(store, at, len(record)):
                    found.append(index)
                examined += 1
        except (wasmtime.Trap, wasmtime.WasmtimeError) as error:
            if examined:  # Who asks again begins with the record at which it fails.
                return Matches(found, examined)
            raise FilterFailedError(f"the module failed: {_first_line(error)}") from None
        finally:
            store.close()
        return Matches(found, examined)


@lru_cache(1)
def _engine() -> tuple[Any, Any]:
    try:
        import wasmtime
    except ImportError:
        raise FilterUnavailableError(
            "this broker has no WebAssembly: pip install 'protomq-broker[wasm]' where it runs"
        ) from None
    config = wasmtime.Config()
    config.consume_fuel = True
    config.parallel_compilation = False
    config.max_wasm_stack = 256 << 10
    config.wasm_threads = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    return wasmtime, wasmtime.Engine(config)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "wasm trap" in line or "fuel" in line]
    return (causes or lines or ["no reason"])[0][:300]
