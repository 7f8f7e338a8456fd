"""The random number that tells one store from another.

A broker's name can be given twice by mistake; its store cannot: it is this number that a name server compares (NAME_TAKEN). It is drawn
once, and kept in `config/storeId`. Incarnations of topics that their first message makes are mixed with it (`topics.py`). A folder that is
copied takes it along: remove the file from a copy that becomes a broker of its own.

    storeId   magic (8 octets), the number (i64, little-endian, 1 and above), CRC-32C of both
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from .disk import Disk
from .side_files import read_state_file, size_of_file, write_state_file

log = logging.getLogger("protomq.broker")

MAGIC: Final = b"PMQSTID1"
_SIZE_BYTES: Final = 8


def has_store_id(disk: Disk, root: str) -> bool:
    """Whether a folder has a store's number that holds."""
    return read_state_file(disk, f"{root}/config/storeId", MAGIC) is not None


def store_id(disk: Disk, root: str, draw: Callable[[], int]) -> int:
    """The store's number; a store without one gets what `draw` gives, 1 and above. While its lock is held.

    Raises OSError, also where the disk cannot read the number. That may pass, and name servers and etcd know it.
    """
    path = f"{root}/config/storeId"
    payload = read_state_file(disk, path, MAGIC)
    if payload is not None and len(payload) == _SIZE_BYTES:
        return int.from_bytes(payload, "little")
    if size_of_file(disk, path) is not None:
        log.warning(
            "%s is damaged: the store gets a new number. Name servers that know the broker by the old number "
            "refuse it until they give that up, within two minutes",
            path,
        )
    drawn = draw()
    assert drawn > 0, "a store's number is 1 or above"
    write_state_file(disk, path, MAGIC, drawn.to_bytes(_SIZE_BYTES, "little"))
    return drawn
