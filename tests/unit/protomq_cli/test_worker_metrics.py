"""The metrics of a worker: which number of which process stands under which name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from protomq_cli.worker_metrics import metrics_of, page_text


def test_each_count_stands_under_its_name_and_a_process_that_is_down_has_zeros() -> None:
    counts = {"open": 7, "waiting": 5, "size_bytes": 4_096, "done": 90, "refused": 3, "failed": 5}
    slots = [SimpleNamespace(index=index, restarts=index + 1) for index in range(3)]
    supervisor: Any = SimpleNamespace(
        policy=SimpleNamespace(slots=slots),
        processes={
            0: SimpleNamespace(is_running=True, counts=counts),
            2: SimpleNamespace(is_running=False, counts={**counts, "done": 91}),
        },
    )
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(page_text(metrics_of(supervisor))):
        for sample in family.samples:
            assert sample.labels == {"process": str(len(found.setdefault(sample.name, [])))}
            found[sample.name].append(sample.value)
    assert found == {
        "protomq_worker_up": [1, 0, 0],
        "protomq_worker_restarts_total": [1, 2, 3],
        "protomq_worker_messages_done_total": [90, 0, 91],
        "protomq_worker_messages_failed_total": [5, 0, 5],
        "protomq_worker_messages_refused_total": [3, 0, 3],
        "protomq_worker_messages_open": [7, 0, 7],
        "protomq_worker_messages_waiting": [5, 0, 5],
        "protomq_worker_messages_bytes": [4_096, 0, 4_096],
    }
