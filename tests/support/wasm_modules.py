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


def that_loops(turns: int, *, matches: int = 1) -> bytes:
    """All messages, or none (0), each after so many turns of five instructions."""
    loop = "(loop $again (br_if $again (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))"
    return bytes(
        wasmtime.wat2wasm(
            f"""(module
                  (memory (export "memory") 1)
                  (func (export "alloc") (param i32) (result i32) (i32.const 16))
                  (func (export "matches") (param i32 i32) (result i32) (local $left i32)
                    (local.set $left (i32.const {turns})) {loop} (i32.const {matches})))"""
        )
    )


def that_does(work: str, *, pages: int = 128) -> bytes:
    """No message, after some work. `pages`: of 64 KiB, of its memory at the start; 128 is the most."""
    return bytes(
        wasmtime.wat2wasm(
            f"""(module
                  (memory (export "memory") {pages})
                  (func (export "alloc") (param i32) (result i32) (i32.const 1024))
                  (func (export "matches") (param i32 i32) (result i32) (local $at i32)
                    {work} (i32.const 0)))"""
        )
    )


FILLS: Final = "(memory.fill (i32.const 2000) (i32.const 1) (i32.const 8000000))"
COPIES: Final = "(memory.copy (i32.const 2000) (i32.const 30000) (i32.const 8000000))"
TOUCHES: Final = """(loop $again
    (i32.store (local.get $at) (i32.const 1))
    (local.set $at (i32.add (local.get $at) (i32.const 4096)))
    (br_if $again (i32.lt_u (local.get $at) (i32.const 8380000))))"""
"""All pages of 4 KiB: some 21,000 instructions."""
