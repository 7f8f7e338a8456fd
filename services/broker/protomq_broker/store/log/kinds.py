"""What the kind of a record and its due time decide: which of the derived structures takes it.

    kind    due time    consume queue, index    repeated sends
    plain   no          both                    yes
    plain   yes         neither: not yet        yes
    half    any         neither                 yes, unless it was carried forward: then it has a transit
    copy    no          both                    no
    copy    yes         neither: not yet        no
    state   no          queue only              no

All is told by bits of the trailer's `flags`, so of many records by one array operation. Such a bit is the broker's word: a producer may set
none of them but that of the due time.
"""

from __future__ import annotations

from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from protomq.wire.record import (
    FLAG_DUE_TIME,
    FLAG_KIND_COPY,
    FLAG_KIND_HALF,
    FLAG_KIND_MASK,
    FLAG_TRANSIT,
)

FATE_MASK: Final = FLAG_KIND_MASK | FLAG_DUE_TIME
"""The bits that decide; all 0 on a plain message that may be delivered at once."""
NO_OFFSET: Final = -1
"""Queue offset of a record that enters no consume queue; on the disk `NO_QUEUE_OFFSET`."""

MIXED: Final = -1
"""`flags` of a region in which only some messages have a due time. The region has to be taken apart before it is appended."""

Flags = NDArray[np.uint32]
Chosen = NDArray[np.bool_]


@overload
def is_queued(flags: int) -> bool: ...
@overload
def is_queued(flags: Flags) -> Chosen: ...
def is_queued(flags: int | Flags) -> bool | Chosen:
    """Whether a record enters the consume queue that it is stamped with."""
    return (flags & FLAG_DUE_TIME == 0) & (flags & FLAG_KIND_MASK != FLAG_KIND_HALF)


@overload
def is_indexed(flags: int) -> bool: ...
@overload
def is_indexed(flags: Flags) -> Chosen: ...
def is_indexed(flags: int | Flags) -> bool | Chosen:
    """Whether a record is found by its keys and its message id."""
    kinds = flags & FLAG_KIND_MASK
    return (flags & FLAG_DUE_TIME == 0) & ((kinds == 0) | (kinds == FLAG_KIND_COPY))


@overload
def is_sent(flags: int) -> bool: ...
@overload
def is_sent(flags: Flags) -> Chosen: ...
def is_sent(flags: int | Flags) -> bool | Chosen:
    """Whether a record came from its producer as it is: a repeat of that send has to be recognised."""
    kinds = flags & (FLAG_KIND_MASK | FLAG_TRANSIT)
    return (kinds == 0) | (kinds == FLAG_KIND_HALF)

