"""A broker with small segments, which deletes nothing until it is told to: what retention does in weeks it does at once."""

from __future__ import annotations

from pathlib import Path

from protomq.testing import Broker
from tests.support.waiting import wait_for

_SMALL_SEGMENTS = "store:\n  segment_size_bytes: 256KiB\n"
_KEEP_ALL = "  disk_delete_ratio: 0.97\n  disk_force_ratio: 0.98\n  disk_refuse_ratio: 0.99\n"
_DELETE_ALL_IT_MAY = (
    "  disk_delete_ratio: 0.000001\n  disk_force_ratio: 0.000002\n  disk_refuse_ratio: 1.0\n"
)


def small_segments_broker(folder: Path, environment: dict[str, str] | None = None) -> Broker:
    """Not started yet."""
    folder.mkdir(exist_ok=True)
    config = folder / "broker.yaml"
    config.write_text(_SMALL_SEGMENTS + _KEEP_ALL)
    return Broker(data_dir=folder, arguments=("--config", str(config)), environment=environment)


def let_retention_pass(server: Broker) -> None:
    """Restarted, it deletes old segments, as on a disk that is full; until only the one being written and the next are left."""
    _restart(server, _DELETE_ALL_IT_MAY)
    segments = server.data_dir / "store/commitlog"
    wait_for(lambda: len(list(segments.iterdir())) <= 2)


def keep_all_again(server: Broker) -> None:
    """Restarted, it deletes nothing any more."""
    _restart(server, _KEEP_ALL)


def _restart(server: Broker, ratios: str) -> None:
    (server.data_dir / "broker.yaml").write_text(_SMALL_SEGMENTS + ratios)
    server.restart()
