"""WebAssembly modules of users as filters."""

import sys

import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.filters import wasm_filter
from protomq_broker.filters.errors import FilterError, FilterUnavailableError
from protomq_broker.filters.wasm_filter import MODULE_SIZE_MAX_BYTES, WasmFilter
from tests.support.wasm_modules import that_loops
from tests.unit.protomq_broker.filters.run_helpers import run_of

RUN = run_of({"body": b"a"}, {"body": b"late"}, {"body": b"b"}, {"body": b"late too"})
BODY_IS_LONG = "local.get 0 i32.load8_u offset=1 i32.const 3 i32.gt_u"


def module(
    matches=BODY_IS_LONG, alloc="i32.const 1024", memory='(memory (export "memory") 1)', more=""
):
    return bytes(
        wasmtime.wat2wasm(
            f"""(module {more} {memory}
                  (global $calls (mut i32) (i32.const 0))
                  (func (export "alloc") (param i32) (result i32) {alloc})
                  (func (export "matches") (param i32 i32) (result i32) {matches}))"""
        )
    )


def test_a_module_gets_the_octets_of_each_record():
    assert WasmFilter(module()).matching(*RUN).indexes == [1, 3]


def test_a_module_is_made_anew_for_each_run():
    counts = "global.get $calls i32.const 1 i32.add global.set $calls global.get $calls i32.const 1 i32.eq"
    made = WasmFilter(module(matches=counts))
    assert made.matching(*RUN).indexes == made.matching(*RUN).indexes == [0]


def test_alloc_is_told_the_size_of_the_largest_record_and_may_grow_the_memory():
    grown = "local.get 0 i32.const 65535 i32.add i32.const 16 i32.shr_u memory.grow i32.const 16 i32.shl"
    large = run_of({"body": bytes(300_000)}, {"body": b"x"})
    assert WasmFilter(module(alloc=grown)).matching(*large).indexes == [0]


@pytest.mark.parametrize(
    ("module_of", "said"),
    [
        ({"matches": "unreachable"}, "unreachable"),
        ({"matches": "(loop br 0) i32.const 1"}, "fuel"),
        ({"alloc": "(loop br 0) i32.const 1"}, "fuel"),
        ({"matches": "i32.const -1 i32.load"}, "out of bounds memory"),
        ({"alloc": "i32.const -5"}, "outside of the module's memory"),
        ({"alloc": "i32.const 65500"}, "outside of the module's memory"),
        ({"memory": '(memory (export "memory") 1000)'}, "memory"),
        ({"matches": "i32.const 0 i32.const 1 i32.const 0 i32.div_s"}, "divide"),
    ],
    ids=str,
)
def test_a_module_that_fails_is_an_error_and_no_answer(module_of, said):
    if said == "divide":
        module_of = {"matches": "i32.const 1 i32.const 0 i32.div_s"}
    made = WasmFilter(module(**module_of))
    with pytest.raises(FilterError, match=said):
        made.matching(*RUN)


def test_a_module_that_fails_of_one_record_has_examined_those_before_it():
    fails_of_b = f"local.get 0 i32.load8_u offset=2 i32.const 98 i32.eq if unreachable end {BODY_IS_LONG}"
    data, starts, sizes = RUN
    made = WasmFilter(module(matches=fails_of_b))
    assert made.matching(data, starts, sizes) == ([1], 2)
    with pytest.raises(FilterError, match="unreachable"):
        made.matching(data, starts[2:], sizes[2:])


def test_a_module_may_do_some_300_000_instructions_for_each_record_and_no_more():
    """A turn of the loop is five."""
    assert WasmFilter(that_loops(55_000)).matching(*RUN).indexes == [0, 1, 2, 3]
    with pytest.raises(FilterError, match="fuel"):
        WasmFilter(that_loops(65_000)).matching(*RUN)


def test_memory_is_not_grown_beyond_the_limit():
    """`memory.grow` answers -1, and the place -65536 is none."""
    made = WasmFilter(module(alloc="i32.const 1000 memory.grow i32.const 16 i32.shl"))
    with pytest.raises(FilterError, match="outside"):
        made.matching(*RUN)


@pytest.mark.parametrize(
    ("octets", "said"),
    [
        (b"", "no WebAssembly module: a module begins with 00 61 73 6D"),
        (b"(module)", "no WebAssembly"),
        (b"\0asm", "no valid"),
        (module()[:-5], "no valid"),
        (module(more='(import "wasi" "fd_write" (func))'), "imports nothing.*wasi.fd_write"),
        (module(memory='(memory 1)'), "memory"),
        (bytes(wasmtime.wat2wasm('(module (memory (export "memory") 1))')), r"alloc\(i32\) -> i32"),
        (module() + b"\0" * MODULE_SIZE_MAX_BYTES, "at most"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_such_module_is_refused(octets, said):
    with pytest.raises(FilterError, match=said):
        WasmFilter(octets)


@given(st.binary(max_size=64).map(lambda octets: b"\0asm\1\0\0\0" + octets))
def test_nothing_but_its_own_error_comes_out_of_any_octets(octets):
    with pytest.raises(FilterError):
        WasmFilter(octets)


def test_a_broker_without_the_library_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "wasmtime", None)
    wasm_filter._engine.cache_clear()
    with pytest.raises(FilterUnavailableError, match=r"protomq-broker\[wasm\]"):
        WasmFilter(b"\0asm")
    wasm_filter._engine.cache_clear()
