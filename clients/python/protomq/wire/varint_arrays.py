"""`varints.read_varint` for lengths at many places at once. Apart from it, since it needs numpy, which is slow to import."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .varints import LENGTH_SIZE_MAX_BYTES


def read_lengths(
    data: NDArray[np.uint8], positions: NDArray[Any], too_long: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the lengths that begin at the positions, the positions behind them).

    Raises IndexError where the data end before one does, and for one of more than 5 octets, unless that is to have the value `too_long`.
    """
    octets = data[positions]
    values = (octets & 0x7F).astype(np.int64)
    positions = positions + 1
    more = octets >= 0x80
    for shift in range(7, 7 * LENGTH_SIZE_MAX_BYTES, 7):
        if not more.any():
            return values, positions
        octets = data[np.minimum(positions, len(data) - 1)]
        values += np.where(more, (octets & 0x7F).astype(np.int64) << shift, 0)
        positions = positions + more
        more &= octets >= 0x80
    if more.any():
        if too_long is None:
            raise IndexError(f"a length of more than {LENGTH_SIZE_MAX_BYTES} octets")
        values[more] = too_long
    return values, positions
