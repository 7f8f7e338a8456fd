"""Filters that a user wrote and compiled to WebAssembly (`pip install 'protomq-broker[wasm]'`): RocketMQ's filter server, without its Java.

A module exports `memory`, `alloc(size: i32) -> i32` and `matches(at: i32, size: i32) -> i32`, and imports nothing: it has no clock, file or
network. Each run of records has a new instance. It calls `alloc` once, with the size of the largest record, then `matches` for each record.
The record's protobuf octets (protomq.v1.Record) stand at `at`. Anything but 0 is a match.

Bounds: FUEL_PER_RECORD instructions for a record (and as many for the start), MEMORY_MAX_BYTES. A module that traps, or needs more, ends
with
FilterFailedError: which messages it would have let through nobody can know. Compiling takes long: not on a lane.

A lane waits while a module runs. `memory.fill` and the like cost an instruction an octet, but run to their end before that is noticed: 0.5
ms for all memory. Fresh memory would make it 5 to 10 ms, for the kernel takes 2 us to give each of its 2,048 pages. So instances
take their memory from a pool, which clears it and keeps it.
"""

from __future__ import annotations

import mmap
import re
import threading
from contextlib import closing
from functools import lru_cache
from typing import Any, Final

from numpy.typing import NDArray

from protomq.wire.varints import read_varint

from .errors import FilterError, FilterFailedError, FilterUnavailableError
from .filter_book import Matches

MODULE_SIZE_MAX_BYTES: Final = 768 << 10
"""So that one fits into a request of the admin lane, 1 MiB."""
MEMORY_MAX_BYTES: Final = 8 << 20
"""Twice the largest record."""
FUEL_PER_RECORD: Final = 300_000
"""Instructions, about: a quarter of a millisecond of work."""
INSTANCES_MAX: Final = 8
"""At a time: a lane's thread has one at most. Where there are more threads, they wait for one another."""
_TABLES_MAX: Final = 8
_TABLE_ELEMENTS_MAX: Final = 65_536
_INSTANCE_SIZE_MAX_BYTES: Final = 8 << 20
_TRIAL_SIZE_BYTES: Final = 64
_ADDRESS_SPACE_BYTES: Final = 192 << 20
"""More than the pool reserves. The library ends the process if it gets less."""
_LINE_NUMBER: Final = re.compile(r"\d+: ")
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
            raise FilterError(f"no valid WebAssembly module for a filter: {_cause(error)}") from None
        self._check_interface()
        self._check_start()

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

    def _check_start(self) -> None:
        """Raises FilterError if no run of records could begin."""
        with _instances, closing(self._new_store()) as store:
            try:
                self._begin(store, _TRIAL_SIZE_BYTES)
            except (self._wasmtime.Trap, self._wasmtime.WasmtimeError) as error:
                raise FilterError(f"the module cannot start: {_cause(error)}") from None

    def matching(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Matches:
        """As of Filter. Raises FilterFailedError if the module fails at the first record; it stops before a later one at which it fails."""
        found: list[int] = []
        examined = 0
        with _instances, closing(self._new_store()) as store:
            try:
                memory, matches, at = self._begin(store, int(sizes.max()))
                for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
                    _, record_start = read_varint(data, start + 1)
                    record = data[record_start : start + size]
                    memory.write(store, record, at)
                    store.set_fuel(FUEL_PER_RECORD)
                    if matches(store, at, len(record)):
                        found.append(index)
                    examined += 1
            except (self._wasmtime.Trap, self._wasmtime.WasmtimeError) as error:
                if not examined:
                    raise FilterFailedError(f"the module failed: {_cause(error)}") from None
                # Who asks again begins with the record at which it fails.
        return Matches(found, examined)

    def _new_store(self) -> Any:
        store = self._wasmtime.Store(self._engine)
        store.set_limits(
            memory_size=MEMORY_MAX_BYTES, memories=1, instances=1, tables=_TABLES_MAX, table_elements=_TABLE_ELEMENTS_MAX
        )
        return store

    def _begin(self, store: Any, size_max: int) -> tuple[Any, Any, int]:
        """A new instance: its memory, `matches`, and the place for records of that size. Raises Trap, WasmtimeError, FilterFailedError."""
        store.set_fuel(FUEL_PER_RECORD)
        exports = self._wasmtime.Instance(store, self._module, ()).exports(store)
        memory = exports["memory"]
        at = exports["alloc"](store, size_max) & 0xFFFF_FFFF
        if at + size_max > memory.data_len(store):
            raise FilterFailedError("alloc returned a place outside of the module's memory")
        return memory, exports["matches"], at


_instances = threading.BoundedSemaphore(INSTANCES_MAX)


@lru_cache(1)
def _engine() -> tuple[Any, Any]:
    try:
        import wasmtime
    except ImportError:
        raise FilterUnavailableError(
            "this broker has no WebAssembly: pip install 'protomq-broker[wasm]' where it runs"
        ) from None
    try:
        mmap.mmap(-1, _ADDRESS_SPACE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0).close()
    except OSError:
        raise FilterUnavailableError(
            f"this broker has no room for WebAssembly: {_ADDRESS_SPACE_BYTES >> 20} MiB of address space, which `ulimit -v` bounds"
        ) from None
    config = wasmtime.Config()
    config.consume_fuel = True
    config.parallel_compilation = False
    config.max_wasm_stack = 256 << 10
    config.wasm_threads = False
    config.wasm_memory64 = False
    config.wasm_multi_memory = False
    config.memory_reservation = MEMORY_MAX_BYTES
    config.memory_guard_size = 0
    config.memory_init_cow = False  # Else modules would not share the pool's memory.
    _use_pool(wasmtime._ffi, config)
    return wasmtime, wasmtime.Engine(config)


def _use_pool(ffi: Any, config: Any) -> None:
    """Makes instances take memory that others have had. The library's package has names for this in its lower layer only."""
    pool = ffi.wasmtime_pooling_allocation_config_new()
    for name, value in {
        "total_core_instances": INSTANCES_MAX,
        "total_memories": INSTANCES_MAX,
        "total_gc_heaps": INSTANCES_MAX,
        "total_tables": INSTANCES_MAX * _TABLES_MAX,
        "max_tables_per_module": _TABLES_MAX,
        "table_elements": _TABLE_ELEMENTS_MAX,
        "table_keep_resident": _TABLE_ELEMENTS_MAX * 8,
        "max_core_instance_size": _INSTANCE_SIZE_MAX_BYTES,
        "max_memory_size": MEMORY_MAX_BYTES,
        "linear_memory_keep_resident": MEMORY_MAX_BYTES,
        "max_unused_warm_slots": 0,  # Memory that was used before is taken first.
    }.items():
        getattr(ffi, f"wasmtime_pooling_allocation_config_{name}_set")(pool, value)
    ffi.wasmtime_pooling_allocation_strategy_set(config.ptr(), pool)
    ffi.wasmtime_pooling_allocation_config_delete(pool)


def _cause(error: Exception) -> str:
    """What the library says at last: that is the cause of all before, each in a line, perhaps with a number."""
    lines = [_LINE_NUMBER.sub("", line.strip()) for line in str(error).splitlines() if line.strip()]
    return (lines or ["no reason"])[-1][:300]
