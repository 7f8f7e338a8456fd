"""WebAssembly modules of users as filters."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st

from protomq_broker.filters import wasm_filter
from protomq_broker.filters.errors import FilterError, FilterFailedError, FilterUnavailableError
from protomq_broker.filters.wasm_filter import MODULE_SIZE_MAX_BYTES, WasmFilter
from tests.support.wasm_modules import that_loops
from tests.unit.protomq_broker.filters.run_helpers import run_of

RUN = run_of({"body": b"a"}, {"body": b"late"}, {"body": b"b"}, {"body": b"late too"})
IS_LARGE = "local.get 0 i32.const 100 i32.gt_u"
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
        ({"matches": "i32.const -1 i32.load"}, "out of bounds memory"),
        ({"alloc": f"{IS_LARGE} if unreachable end i32.const 1"}, "unreachable"),
        ({"alloc": f"{IS_LARGE} if (loop br 0) end i32.const 1"}, "fuel"),
        ({"alloc": f"{IS_LARGE} i32.const 65400 i32.mul"}, "outside of the module's memory"),
        ({"matches": "i32.const 0 i32.const 1 i32.const 0 i32.div_s"}, "divide"),
    ],
    ids=str,
)
def test_a_module_that_fails_is_an_error_and_no_answer(module_of, said):
    if said == "divide":
        module_of = {"matches": "i32.const 1 i32.const 0 i32.div_s"}
    made = WasmFilter(module(**module_of))
    with pytest.raises(FilterFailedError, match=said):
        made.matching(*run_of({"body": bytes(200)}))


@pytest.mark.parametrize(
    ("module_of", "said"),
    [
        ({"memory": '(memory (export "memory") 129)'}, "no valid.*minimum byte size of 8454144"),
        ({"memory": '(memory (export "memory") 65536)'}, "no valid.*minimum byte size of 4294967296"),
        ({"more": "(table 100000000 funcref)"}, "no valid.*minimum element size of 100000000"),
        ({"more": "(table 1 funcref)" * 9}, "no valid.*count of 9 exceeds the per-instance limit of 8"),
        ({"more": "(func $begin unreachable) (start $begin)"}, "cannot start: wasm trap: .*unreachable"),
        ({"more": "(func $begin (loop br 0)) (start $begin)"}, "cannot start: wasm trap: all fuel"),
        ({"more": '(data (i32.const 65530) "1234567")'}, "cannot start: wasm trap: out of bounds memory"),
        ({"alloc": "unreachable"}, "cannot start: wasm trap: .*unreachable"),
        ({"alloc": "(loop br 0) i32.const 1"}, "cannot start: wasm trap: all fuel"),
        ({"alloc": "i32.const -5"}, "outside of the module's memory"),
    ],
    ids=str,
)
def test_a_module_with_which_no_run_could_begin_is_refused_at_once(module_of, said):
    octets = module(**module_of)
    with pytest.raises(FilterError, match=said):
        WasmFilter(octets)


def test_the_largest_memory_and_table_are_taken():
    most = {"memory": '(memory (export "memory") 128)', "more": "(table 65536 funcref)" * 8}
    assert WasmFilter(module(**most)).matching(*RUN).indexes == [1, 3]


def test_nothing_of_one_instance_is_in_the_memory_of_the_next():
    """They take it from a pool."""
    fills = "i32.const 70000 i32.load8_u if i32.const 1 return end i32.const 60000 i32.const 7 i32.const 20000 memory.fill i32.const 0"
    reads = "i32.const 70000 i32.load8_u"
    two_pages = '(memory (export "memory") 2)'
    for octets in (module(matches=fills, memory=two_pages), module(matches=reads, memory=two_pages)) * 3:
        assert WasmFilter(octets).matching(*run_of({"body": b"a"})).indexes == []


def test_more_threads_than_instances_wait_for_one_another():
    made = WasmFilter(that_loops(55_000))
    with ThreadPoolExecutor(4 * wasm_filter.INSTANCES_MAX) as executor:
        found = list(executor.map(lambda _: made.matching(*RUN).indexes, range(200)))
    assert found == [[0, 1, 2, 3]] * 200


def test_a_process_without_address_space_for_the_library_says_so(monkeypatch):
    """The library would end it."""
    monkeypatch.setattr(wasm_filter, "_ADDRESS_SPACE_BYTES", 1 << 60)
    wasm_filter._engine.cache_clear()
    with pytest.raises(FilterUnavailableError, match="address space"):
        WasmFilter(module())
    wasm_filter._engine.cache_clear()


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
    for pages, is_taken in ((127, True), (128, False)):
        octets = module(alloc=f"i32.const {pages} memory.grow i32.const 16 i32.shl")
        if is_taken:
            assert WasmFilter(octets).matching(*RUN).indexes == [1, 3]
        else:
            with pytest.raises(FilterError, match="outside"):
                WasmFilter(octets)


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
