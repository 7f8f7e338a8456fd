from __future__ import annotations

import pytest

from protomq_cli.child import parse_ready_line


def test_the_ready_line_names_ports_and_folder() -> None:
    line = (
        "ready grpc=127.0.0.1:8081 remoting=127.0.0.1:10911 namesrv=127.0.0.1:10911 data=/a b/c\n"
    )
    assert parse_ready_line(line) == {
        "grpc": "127.0.0.1:8081", "remoting": "127.0.0.1:10911", "namesrv": "127.0.0.1:10911", "data": "/a b/c",
    }  # fmt: skip


@pytest.mark.parametrize(
    "line", ["", "ready", "ready\n", "steady grpc=1", "ready grpc", "Traceback (most recent"]
)
def test_any_other_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="not a ready line"):
        parse_ready_line(line)
