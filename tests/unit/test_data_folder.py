"""docs/operations.md lists everything that a broker writes into its data folder: a file that no page knows invites its deletion."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("commitlog", "boundaries", "consumequeue", "index", "repeatedsends", "timer", "transactions")


def test_the_page_lists_what_a_broker_writes() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    section = text[text.index("\n## The data folder\n") : text.index("\n## After a crash\n")]
    block = "\n".join(re.findall(r"^    \S.*", section, re.MULTILINE))
    listed = set(re.findall(r"config/(\w+(?:\.json)?)", block))
    written: set[str] = {"queue_ends.json"}  # Its folder stands elsewhere.
    for path in (ROOT / "services/broker/protomq_broker").rglob("*.py"):
        written |= set(re.findall(r"""["/]config/(\w+(?:\.json)?)["\s]""", path.read_text()))
    assert {"store.json", "storeId", "filters"} <= written
    assert listed == written
    assert set(re.findall(r"(\w+)/(?=\s|\d)", block)) - {"filters"} == set(FOLDERS)
