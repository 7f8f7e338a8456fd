"""The checkpoint's bytes, and that it is replaced as a whole."""

from __future__ import annotations

import random

import pytest

from protomq_broker.store.files.disk import sync_names_above
from protomq_broker.store.log.checkpoint import (
    Checkpoint,
    decode_checkpoint,
    encode_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from protomq_broker.testing.simdisk import Fault, SimDisk, SimulatedCrash

CHECKPOINT = Checkpoint(
    0x0807060504030201, 0x08070605040302, 0xAABBCCDD, 7, 1_700_000_000_000, 1 << 30, 5
)


def test_a_checkpoint_reads_back() -> None:
    assert decode_checkpoint(encode_checkpoint(CHECKPOINT)) == CHECKPOINT


def test_a_checkpoint_with_any_bit_flipped_or_cut_anywhere_is_none() -> None:
    data = encode_checkpoint(CHECKPOINT)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_checkpoint(bytes(damaged)) is None
    assert all(decode_checkpoint(data[:size]) is None for size in range(len(data)))


def test_a_crash_at_any_operation_leaves_the_old_one_or_the_new_one() -> None:
    rng = random.Random(5)
    newer = Checkpoint(9, 9, 9, 9, 9, 0, 0)
    number = 0
    while True:
        number += 1
        disk = SimDisk()
        disk.make_folder("/s")
        sync_names_above(disk, "/s")
        write_checkpoint(disk, "/s/checkpoint", Checkpoint(1, 1, 1, 1, 1, 0, 0))
        disk.fail_at(number, Fault.CRASH)
        finished = False
        try:
            write_checkpoint(disk, "/s/checkpoint", newer)
            finished = True
        except SimulatedCrash:
            pass
        for _ in range(8):
            found = read_checkpoint(disk.crash(rng), "/s/checkpoint")
            assert found is not None
            assert found == newer or (not finished and found.flushed_position == 1)
        if finished:
            break
    assert number == 7, "create, truncate, pwrite, fsync, rename, fsync of the folder"


def test_no_checkpoint_is_none() -> None:
    assert read_checkpoint(SimDisk(), "/s/checkpoint") is None


def test_a_checkpoint_never_claims_more_derived_than_flushed() -> None:
    with pytest.raises(AssertionError):
        write_checkpoint(SimDisk(), "/s/checkpoint", Checkpoint(1, 2, 0, 0, 0, 0, 0))
