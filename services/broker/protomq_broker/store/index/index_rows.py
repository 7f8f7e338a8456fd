"""Rows of the index: the hash of a key or of a message id, and a position. Arithmetic on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from protomq_broker.store.log.append import MoreKey, ScannedRecords
from protomq_broker.store.log.record_runs import run_continues

ROW: Final = np.dtype([("hash", "<u8"), ("position", "<u8")])
SEQUENCES_PER_BLOCK: Final = 256
BLOCK_MARK: Final = 1 << 63
"""Tells the hash of a block of sequences from that of one sequence (sequences stay below 2**63 in practice)."""
MASK_64: Final = 0xFFFFFFFFFFFFFFFF

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
Noted = tuple[int, int, "NDArray[np.int64]", "NDArray[np.uint64]", int, int, int]
"""Of a request of many records: position, count, starts, key hashes, producer id, epoch, first sequence; not the bytes."""
ONE_COLUMNS: Final = 5
"""Of a request of one record: position, key hash, producer id, epoch, sequence."""


def message_id_hash(producer_id: int, producer_epoch: int, number: int) -> int:
    """64-bit hash (splitmix64's finaliser, once per part) of a sequence, or of a block of sequences with `BLOCK_MARK` set."""
    return _mix(_mix(_mix(producer_id) ^ producer_epoch) ^ number)


def rows_of_noted(
    ones: NDArray[np.uint64], many: list[Noted], more_keys: Sequence[MoreKey] = ()
) -> NDArray[Any]:
    """The rows of requests, in the order of the log; `ones` has a row of `ONE_COLUMNS` for each request of one record."""
    positions, key_hashes, producer_ids, epochs, sequences = ones.T
    keyed, identified = np.flatnonzero(key_hashes), np.flatnonzero(producer_ids)
    parts = [
        _rows(key_hashes[keyed], positions[keyed]),
        _message_id_rows(
            producer_ids[identified],
            epochs[identified],
            sequences[identified],
            positions[identified],
        ),
    ]
    ids: list[tuple[int, int, int, int]] = []  # producer id, epoch, number, position
    for position, count, starts, hashes, producer_id, producer_epoch, first_sequence in many:
        keyed = np.flatnonzero(hashes)
        if len(keyed):
            parts.append(_rows(hashes[keyed], starts[keyed] + position))
        if producer_id:
            last = first_sequence + count - 1
            for block in range(
                first_sequence // SEQUENCES_PER_BLOCK, last // SEQUENCES_PER_BLOCK + 1
            ):
                index = max(0, block * SEQUENCES_PER_BLOCK - first_sequence)
                ids.append(
                    (
                        producer_id,
                        producer_epoch,
                        BLOCK_MARK | block,
                        position + int(starts[index]),
                    )
                )
    parts += _more_key_rows(more_keys)
    if ids:
        columns = np.array(ids, np.uint64).T
        parts.append(_message_id_rows(*columns))
    return _in_log_order(parts)


def rows_of_scan(records: ScannedRecords, first: int) -> NDArray[Any]:
    """The rows of the records from index `first` on, in their order."""
    key_hashes, positions = records.key_hashes[first:], records.positions[first:]
    keyed = np.flatnonzero(key_hashes)
    keys = _rows(key_hashes[keyed], positions[keyed])
    more = [key for key in records.more_keys if key[0] >= positions[0]]
    return _in_log_order([keys, _message_id_rows_of_scan(records, first), *_more_key_rows(more)])


def _more_key_rows(more_keys: Sequence[MoreKey]) -> list[NDArray[Any]]:
    if not more_keys:
        return []
    positions, hashes = np.array(more_keys, np.uint64).T
    return [_rows(hashes, positions)]


def _message_id_rows_of_scan(records: ScannedRecords, first: int) -> NDArray[Any]:
    """As in `rows_of_noted` for records of which nobody knows any more which request they came in: runs take the place of requests.

    A run ends with its append at the latest: damage takes whole appends, and the row of one must not stand in another.
    """
    producer_ids, epochs = (
        records.producer_ids[first:],
        records.producer_epochs[first:].astype(np.uint64),
    )
    sequences, positions = records.sequences[first:], records.positions[first:]
    goes_on = run_continues(records)[first:]
    goes_on[0] = False
    sizes = records.sizes[first:]
    goes_on[1:] &= positions[1:] == positions[:-1] + sizes[:-1]  # else a seal stands in between
    followed = np.append(goes_on[1:], False)
    alone = ~goes_on & ~followed
    anchors = (~goes_on | (sequences % np.uint64(SEQUENCES_PER_BLOCK) == 0)) & (producer_ids != 0)
    blocks = sequences // np.uint64(SEQUENCES_PER_BLOCK) | np.uint64(BLOCK_MARK)
    numbers = np.where(alone, sequences, blocks)
    return _message_id_rows(
        producer_ids[anchors], epochs[anchors], numbers[anchors], positions[anchors]
    )


def _message_id_rows(
    producer_ids: NDArray[np.uint64],
    epochs: NDArray[np.uint64],
    numbers: NDArray[np.uint64],
    positions: NDArray[Any],
) -> NDArray[Any]:
    return _rows(_mix_many(_mix_many(_mix_many(producer_ids) ^ epochs) ^ numbers), positions)


def _rows(hashes: NDArray[np.uint64], positions: NDArray[Any]) -> NDArray[Any]:
    rows = np.empty(len(hashes), ROW)
    rows["hash"] = hashes
    rows["position"] = positions
    return rows


def _in_log_order(parts: list[NDArray[Any]]) -> NDArray[Any]:
    rows = np.concatenate(parts)
    return rows[np.argsort(rows["position"], kind="stable")]


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & MASK_64
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK_64
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK_64
    return value ^ (value >> 31)


def _mix_many(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))
