"""WebAssembly modules by which brokers filter."""

from __future__ import annotations

from typing import Final

import wasmtime

LATE_TEXT: Final = """(module
    (memory (export "memory") 1)
    (func (export "alloc") (param i32) (result i32) (i32.const 16))
    (func (export "matches") (param $at i32) (param $size i32) (result i32)
        ;; The body comes first: 0A, its length, "late" or anything else.
        (i32.eq (i32.load offset=2 (local.get $at)) (i32.const 0x6574616c))))"""
LATE: Final = bytes(wasmtime.wat2wasm(LATE_TEXT))
"""Messages whose body begins with "late"."""
OTHERS: Final = bytes(wasmtime.wat2wasm(LATE_TEXT.replace("(i32.eq ", "(i32.ne ")))
"""All others."""
