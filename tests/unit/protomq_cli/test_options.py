"""What options of the command line become."""

from __future__ import annotations

from pathlib import Path

import pytest

from protomq_cli.options import _parse_folder


def test_a_folder_is_known_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _parse_folder("backup") == tmp_path / "backup"
    assert _parse_folder("/elsewhere") == Path("/elsewhere")
    with pytest.raises(ValueError, match="empty"):
        _parse_folder("")
