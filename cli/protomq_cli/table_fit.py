"""A table that is wider than the terminal: which columns are shown, and how wide. Pure functions.

Numbers, addresses, ids and times are shown whole or not at all: half an address is worse than none. Texts are cut, with `…`, down
to a width at which they can still be told apart. What does not fit even so goes column by column, the least important first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

TEXT_WIDTH_MIN: Final = 10
_WHOLE: Final = ("_address", "_id", "_time", "_offset", "_position")
"""How the names of columns end whose values are never cut."""


def is_whole(column: str, values: Iterable[object]) -> bool:
    """Whether the values of a column are never cut."""
    return column.endswith(_WHOLE) or all(
        value is None or isinstance(value, int | float) for value in values
    )


def fit(
    widths: Mapping[str, int], minimums: Mapping[str, int], expendable: Sequence[str], room: int
) -> dict[str, int]:
    """The columns that are shown, with their widths, so that their sum is at most `room`.

    `widths`: what each would need, in the order of display; `minimums`: the least each is shown with. `expendable`: which go first,
    in that order; after them the last of the row. The first column stays, whatever its width. All widths include the gap.
    """
    shown = dict(widths)
    order = [name for name in expendable if name in shown]
    order += [name for name in reversed(list(widths)) if name not in order]
    for name in order:
        if sum(minimums[each] for each in shown) <= room or len(shown) == 1:
            break
        del shown[name]
    while sum(shown.values()) > room:
        cuttable = [name for name, width in shown.items() if width > minimums[name]]
        if not cuttable:
            break
        widest = max(cuttable, key=lambda name: shown[name])
        shown[widest] -= 1
    return shown


def cut(text: str, width: int) -> str:
    """The text in a fixed number of characters; a longer one ends in `…`."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
