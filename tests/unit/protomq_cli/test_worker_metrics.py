"""What a scraper reads of a worker's processes: each number stands under its own name, for its own process."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from protomq_cli.worker_metrics import metrics_of, page_text
from protomq_cli.worker_policy import WorkerPolicy


class OneProcess(NamedTuple):
    """A process as its supervisor knows it."""

    is_running: bool
    counts: dict[str, int]


class Supervisor:
    """Two slots. The second process is down, after a death."""

    def __init__(self) -> None:
        self.policy = WorkerPolicy(2, 30.0)
        self.policy.slots[1].restarts = 3
        self.processes = {0: OneProcess(True, {"open": 5, "waiting": 4, "size_bytes": 600, "done": 7, "refused": 2})}


def test_each_count_has_its_name_and_its_process() -> None:
    text = page_text(metrics_of(cast(Any, Supervisor())))
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples == {
        'protomq_worker_up{process="0"}': "1",
        'protomq_worker_up{process="1"}': "0",
        'protomq_worker_restarts_total{process="0"}': "0",
        'protomq_worker_restarts_total{process="1"}': "3",
        'protomq_worker_messages_done_total{process="0"}': "7",
        'protomq_worker_messages_done_total{process="1"}': "0",
        'protomq_worker_messages_refused_total{process="0"}': "2",
        'protomq_worker_messages_refused_total{process="1"}': "0",
        'protomq_worker_messages_open{process="0"}': "5",
        'protomq_worker_messages_open{process="1"}': "0",
        'protomq_worker_messages_waiting{process="0"}': "4",
        'protomq_worker_messages_waiting{process="1"}': "0",
        'protomq_worker_messages_bytes{process="0"}': "600",
        'protomq_worker_messages_bytes{process="1"}': "0",
    }
    types = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name for name, kind in types.items() if kind == "counter"} == {name for name in types if name.endswith("_total")}
