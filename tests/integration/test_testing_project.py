"""docs/testing.md holds: the program and the tests on it are a user's project, which pytest runs with the plug-in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"


def test_the_tests_of_the_page_pass_in_a_project_of_their_own(tmp_path: Path) -> None:
    files = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert sorted(files) == ["orders.py", "test_orders.py", "test_with_a_broker.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "test_fixture.py").write_text(
        "import orders\n\ndef test_it(protomq_group):\n    group = protomq_group(orders.consumer)\n"
        '    group.send("orders", b"", tag="paid")\n    assert group.deliver() == 1\n'
        '    assert group.dead_letters[0].error == "an order without a text"\n'
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PROTOMQ_"))}
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "8 passed" in finished.stdout
