"""Which tests `make test` runs a second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import failed_again

SUITES = ["tests/unit", "tests/integration"]


def test_only_the_suites_that_just_ran_count() -> None:
    listed = json.dumps({"tests/unit/test_b.py::test": True, "tests/chaos/test_a.py::test": True, "tests/integration/test_a.py": True})
    assert failed_again.failed(listed, SUITES) == ["tests/integration/test_a.py", "tests/unit/test_b.py::test"]


@pytest.mark.parametrize("count", [0, failed_again.MOST + 1])
def test_none_runs_again_where_none_or_too_many_failed(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "lastfailed"
    listed.write_text(json.dumps({f"tests/unit/test_{number}.py::test": True for number in range(count)}))
    monkeypatch.setattr(failed_again, "LAST_FAILED", listed)
    monkeypatch.setattr("tools.failed_again.subprocess.call", lambda command: pytest.fail(f"ran {command}"))
    assert failed_again.main(SUITES) == 1
    assert f"{count} tests failed" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "unsteady"), [(0, True), (1, False)])
def test_the_second_run_decides_and_names_the_unsteady(
    code: int, unsteady: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "lastfailed"
    listed.write_text(json.dumps({"tests/unit/test_a.py::test[x y]": True}))
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return code

    monkeypatch.setattr(failed_again, "LAST_FAILED", listed)
    monkeypatch.setattr("tools.failed_again.subprocess.call", call)
    assert failed_again.main(SUITES) == code
    assert [command[-1] for command in commands] == ["tests/unit/test_a.py::test[x y]"]
    assert ("UNSTEADY" in capsys.readouterr().out) == unsteady
