"""The 63-bit hash behind tag codes and key hashes.

CRC-32C in the low 32 bits, and above them the low 31 bits of CRC-32 (IEEE 802.3, zlib's). Every language has these two
checksums, and here they run in C (0.2 us a call). It spreads, it does not protect: tags and keys are compared again on reading.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias, Union

import google_crc32c

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Octets: TypeAlias = Union[bytes, "NDArray[np.uint8]"]
"""What a CRC can be made of. This library takes no memoryview or bytearray, but an array that views one: no copy is needed."""

crc32c: Callable[[Octets], int] = google_crc32c.value
"""CRC-32C (Castagnoli)."""

extend_crc32c: Callable[[int, Octets], int] = google_crc32c.extend
"""extend_crc32c(crc, data): the CRC-32C of what `crc` covered, followed by `data`."""

CONTIGUOUS_MAX_BYTES: Final = 4096
"""Up to this size one call computes the CRC over a copy of the covered bytes. For larger messages the copy would cost more than several
calls.
"""


def hash63(data: bytes) -> int:
    """Hash of `data` in [0, 2**63)."""
    return crc32c(data) | (zlib.crc32(data) & 0x7FFFFFFF) << 32


def key_hash_of(key: str) -> int:
    """Index code of a key: 0 for none."""
    return hash63(key.encode()) if key else 0


@lru_cache(maxsize=4096)
def tag_code_of(tag: str) -> int:
    """Filter code of a tag: 0 for none. Cached, since tags are few."""
    return hash63(tag.encode()) if tag else 0


def sharded_index(sharding_key: str, queue_count: int) -> int:
    """Index of the queue for a sharding key; the same in every process and language."""
    return hash63(sharding_key.encode()) % queue_count


def sharding_hash_of(sharding_key: str) -> int:
    """CRC-32C of a sharding key: 0 for none, and so 1 where the CRC-32C of a key is 0."""
    return crc32c(sharding_key.encode()) or 1 if sharding_key else 0
