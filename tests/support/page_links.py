"""Where pages lead: links to files and headings, and targets of make."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

_LINK: Final = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_MARKUP: Final = re.compile(r"`|\*|\[([^\]]*)\]\([^)]*\)")
_MAKE: Final = re.compile(r"`make ([a-z][\w-]*)|^ {4}make ([a-z][\w-]*)", re.MULTILINE)
_TARGET: Final = re.compile(r"^([a-z][\w -]*):", re.MULTILINE)


def anchors_of(text: str) -> frozenset[str]:
    """Of the headings of a page, as GitHub forms them."""
    plain = (_MARKUP.sub(lambda match: match[1] or "", heading) for heading in _HEADING.findall(text))
    return frozenset(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain)


def targets_of(makefile: str) -> frozenset[str]:
    """All that `make` can be asked for."""
    return frozenset(name for names in _TARGET.findall(makefile) for name in names.split())


def lost_links(page: Path, texts: Mapping[Path, str], targets: Collection[str]) -> Iterator[str]:
    """A line for each place to which the page leads and that is not there. `texts`: of all pages, by their absolute paths."""
    for name, heading in _LINK.findall(texts[page]):
        if name.startswith(("http:", "https:")):
            continue
        place = (page.parent / name).resolve() if name else page
        if not place.exists():
            yield f"{page}: there is no {name}"
        elif heading and place in texts and heading not in anchors_of(texts[place]):
            yield f"{page}: {name or 'the page'} has no heading #{heading}"
    for target in {one or other for one, other in _MAKE.findall(texts[page])}:
        if target not in targets:
            yield f"{page}: make has no target {target}"
