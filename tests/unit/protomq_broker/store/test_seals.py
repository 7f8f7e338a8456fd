"""Seals: golden bytes, and walking whole, cut and damaged logs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.record_pb2 import RecordBatch
from protomq.wire.log_walk import EMPTY, decode_seal, sealed_crc32c, walk_appends
from protomq.wire.record import SEAL_SIZE_BYTES, encode_seal
from protomq_broker.store.log import crc_forge
from protomq_broker.store.log.seals import LogWalker, Skip, chain_holds, encode_head, encode_padding

from .log_helpers import Log, make_record


def sealed(data: bytes, position: int, previous: int, count: int) -> bytes:
    seal = encode_seal(
        previous,
        data,
        epoch=3,
        start_position=position,
        record_count=count,
        store_time_ms=9,
        synced_position=position,
    )
    return data + seal


def chain(groups: list[list[bytes]], position: int = 0, previous: int = 0) -> bytes:
    """A log of these appends."""
    log = b""
    for group in groups:
        piece = sealed(b"".join(group), position + len(log), previous, len(group))
        previous = int.from_bytes(piece[-4:], "little")
        log += piece
    return log


def walk_to_end(walker: LogWalker) -> LogWalker:
    for _ in walker:
        pass
    return walker


def test_a_seal_has_these_bytes() -> None:
    seal = encode_seal(
        0x01020304,
        b"\x0a\x02\x0a\x00",
        epoch=1,
        start_position=53,
        record_count=1,
        store_time_ms=1_700_000_000_000,
        synced_position=53,
    )
    assert seal.hex(" ") == (
        "12 33 0d 01 00 00 00 11 35 00 00 00 00 00 00 00 19 04 00 00 00 00 00 00 00 25 01 00 00 00 "
        "29 00 68 e5 cf 8b 01 00 00 31 35 00 00 00 00 00 00 00 3d 88 e8 e3 8c"
    )
    assert RecordBatch.FromString(seal).seals[0].crc32c == 0x8CE3E888


def test_a_seal_reads_back() -> None:
    data = chain([[make_record()]])
    seal = decode_seal(data, len(data) - SEAL_SIZE_BYTES)
    assert seal is not None
    assert (seal.epoch, seal.start_position, seal.record_count, seal.end_position) == (
        3,
        0,
        1,
        len(data),
    )
    assert decode_seal(data, len(data) - SEAL_SIZE_BYTES + 1) is None
    assert decode_seal(data, -1) is None


@pytest.mark.parametrize("size", [2, 3, 129, 130, 131, 16_386, 16_387, 16_388, 16_389, 100_000])
def test_padding_has_any_size_and_parses(size: int) -> None:
    padding = encode_padding(size)
    assert len(padding) == size
    assert RecordBatch.FromString(padding).padding == bytes(
        len(RecordBatch.FromString(padding).padding)
    )


def test_walking_takes_whole_appends_and_gives_each_record() -> None:
    groups = [
        [make_record(b"a")],
        [make_record(b"b" * 300), make_record(b"c")],
        [encode_padding(10)],
        [make_record()] * 40,
    ]
    groups[2] = []
    log = chain(groups)
    block = walk_appends(log, 0, 0)
    assert block.problem == ""
    assert block.size_bytes == len(log)
    assert [seal.record_count for seal in block.seals] == [1, 2, 0, 40]
    fields = [log[a : a + b] for a, b in block.fields()]
    assert fields == [field for group in groups for field in group]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0, 1, 100, 130]), st.integers(1, 60)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1 << 20),
)
def test_records_of_one_size_in_a_row_are_found_one_by_one(
    groups: list[list[tuple[int, int]]], cut: int
) -> None:
    log = chain([[make_record(bytes(size))] * count for group in groups for size, count in group])
    fields = [make_record(bytes(size)) for group in groups for size, count in group for _ in range(count)]
    block = walk_appends(log, 0, 0)
    assert [block.data[at : at + size] for at, size in block.fields()] == fields
    shorter = walk_appends(log[: cut % (len(log) + 1)], 0, 0)
    found = list(shorter.fields())
    assert found == list(block.fields())[: len(found)]
    assert len(found) == sum(seal.record_count for seal in shorter.seals)


def test_walking_a_log_cut_at_any_byte_gives_the_appends_that_are_whole() -> None:
    log = chain([[make_record(b"a")], [make_record(b"b"), make_record(b"cc")]])
    ends = [seal.end_position for seal in walk_appends(log, 0, 0).seals]
    for size in range(len(log)):
        block = walk_appends(log[:size], 0, 0)
        assert block.size_bytes == max([0, *(end for end in ends if end <= size)])
        assert block.problem == ""
        zeros = walk_appends(log[:size] + bytes(len(log) - size), 0, 0)
        assert zeros.size_bytes <= block.size_bytes + 53, (
            "a seal whose last bytes are zeros is the most that can hold"
        )
        assert zeros.size_bytes in (0, *ends)


def test_walking_detects_every_flipped_bit() -> None:
    log = chain([[make_record(b"a")], [make_record(b"b"), make_record(b"cc")]])
    ends = [0, *(seal.end_position for seal in walk_appends(log, 0, 0).seals)]
    for bit in range(len(log) * 8):
        damaged = bytearray(log)
        damaged[bit // 8] ^= 1 << bit % 8
        block = walk_appends(bytes(damaged), 0, 0)
        assert block.size_bytes == max(end for end in ends if end <= bit // 8), bit


def test_a_seal_inside_a_body_is_no_boundary() -> None:
    inner = chain([[make_record(b"x")]])
    log = chain([[make_record(inner), make_record(b"y")]])
    block = walk_appends(log, 0, 0)
    assert [seal.record_count for seal in block.seals] == [2]


def test_an_append_in_another_place_does_not_hold() -> None:
    log = chain([[make_record(b"a")], [make_record(b"a")]])
    half = len(log) // 2
    assert walk_appends(log[half:] + log[:half], 0, 0).size_bytes == 0
    assert "another append" in walk_appends(log[half:], 0, 0).problem


def test_an_append_of_another_history_does_not_hold() -> None:
    log = chain([[make_record(b"a")]], previous=5)
    assert "CRC-32C" in walk_appends(log, 0, 0).problem


def test_without_a_known_crc_only_the_head_of_a_segment_is_taken() -> None:
    head = encode_head(4096, 77, epoch=0, store_time_ms=0, synced_position=0)
    rest = chain(
        [[make_record()]], position=4096 + 53, previous=int.from_bytes(head[-4:], "little")
    )
    assert walk_appends(head + rest, 4096, None).size_bytes == len(head + rest)
    assert (
        walk_appends(rest, 4096 + 53, None).problem
        == "a segment does not begin with an empty append"
    )


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x00" * 100, EMPTY),
        (b"\x0b" * 100, "no field of a log starts with 0x0B"),
        (b"\x0a\xff\xff\xff\xff\xff\x01" + bytes(50), "more than five octets"),
        (b"\x0a\xff\xff\xff\x7f" + bytes(50), "more than any may have"),
        (b"\x1a\x02\x00\x00\x0a\x00" + bytes(60), "padding without its seal"),
        (make_record() + b"\x1a\x00" + bytes(60), "padding where none can stand"),
        (b"\x12\x33" + bytes(60), "is none"),
    ],
)
def test_garbage_is_named(data: bytes, problem: str) -> None:
    block = walk_appends(data, 0, 0)
    assert block.size_bytes == 0
    assert problem in block.problem


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=12), min_size=1, max_size=12),
    st.sampled_from([64, 256, 1024, 4096, 1 << 20]),
)
def test_a_walk_does_not_depend_on_the_block_size(groups: list[list[int]], block_size: int) -> None:
    log = Log()
    expected = []
    for group in groups:
        fields = [make_record(bytes(size % 256 for _ in range(size)))[: 1 << 20] for size in group]
        if sum(map(len, fields)) > log.log.append_size_max_bytes:
            continue
        log.append(*fields)
        expected += fields
    walker = LogWalker(log.disk, log.folder, 0, 0, block_size_bytes=block_size)
    found = [
        block.data[a : a + b]
        for block in walker
        for a, b in block.fields()
    ]
    assert found == expected
    if expected:
        assert (walker.position, walker.crc32c, walker.problem) == (
            log.log.tail.position,
            log.log.tail.crc32c,
            EMPTY,
        )


def test_a_walk_passes_over_a_range_it_is_told_to_skip() -> None:
    log = Log()
    first = log.append(make_record(b"a"))
    second = log.append(make_record(b"b"))
    log.append(make_record(b"c"))
    log.disk.flip_bit(log.folder.path_at(0), (first.position + 9) * 8)
    assert "CRC" in walk_to_end(LogWalker(log.disk, log.folder, 0, 0)).problem
    skips = {first.position: Skip(second.position, second.crc32c)}
    walker = LogWalker(log.disk, log.folder, 0, 0, skips=skips)
    assert sum(sum(block.runs.counts) for block in walker) == 2
    assert walker.position == log.log.tail.position


@given(st.binary(max_size=100), st.integers(0, (1 << 32) - 1))
def test_a_crc_can_be_run_backwards(covered: bytes, previous: int) -> None:
    assert crc_forge.crc32c_before(covered, sealed_crc32c(previous, covered)) == previous


def seal_like_body() -> bytes:
    """A record whose body ends in the bytes of a seal."""
    return make_record(sealed(b"", 0, 0, 0))


@pytest.mark.parametrize(
    "groups",
    [
        [[make_record()]],
        [[]],
        [[], [make_record()], [make_record(b"x" * 500), make_record(b"")]],
        [[seal_like_body()], [seal_like_body(), seal_like_body()]],
        [[make_record()], [encode_padding(9)]],
    ],
)
def test_a_chain_holds_between_its_two_ends_and_no_bit_of_it_may_differ(
    groups: list[list[bytes]],
) -> None:
    data = chain(groups, 4096, 77)
    end_crc = int.from_bytes(data[-4:], "little")
    assert chain_holds(data, 4096, 77, end_crc)
    assert not chain_holds(data, 4097, 77, end_crc)
    assert not chain_holds(data, 4096, 78, end_crc)
    assert not chain_holds(data, 4096, 77, end_crc ^ 1)
    assert not chain_holds(data[1:], 4097, 77, end_crc)
    assert not chain_holds(data[:-1], 4096, 77, end_crc)
    assert not chain_holds(bytes(4) + data, 4092, 77, end_crc)
    for at in range(len(data)):
        for bit in (1, 0x80):
            wrong = bytearray(data)
            wrong[at] ^= bit
            assert not chain_holds(bytes(wrong), 4096, 77, end_crc)


def test_a_chain_of_which_an_append_is_missing_does_not_hold() -> None:
    first, second, third = [make_record(b"1")], [make_record(b"2")], [make_record(b"3")]
    data = chain([first, second, third], 0, 5)
    size = len(data) // 3
    end_crc = int.from_bytes(data[-4:], "little")
    assert chain_holds(data[size:], size, int.from_bytes(data[size - 4 : size], "little"), end_crc)
    assert not chain_holds(data[size:], 0, 5, end_crc)
    assert not chain_holds(data[:size] + data[2 * size :], 0, 5, end_crc)
    assert chain_holds(b"", 0, 5, 5)
    assert not chain_holds(b"", 0, 5, 6)
