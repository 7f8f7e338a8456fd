"""Pages of the docs show programs that run, and what commands print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protomq import Admin, Message, Producer, PushConsumer
from protomq.testing import Broker
from tests.support.waiting import PATIENCE_S, wait_for

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Of its own: elsewhere its topics may have messages already."""
    with Broker(environment={"PROTOMQ_BROKER_NAME": "broker-a"}) as made:
        yield made


@pytest.mark.parametrize("service", ["listener.py", "prices.py"])
def test_request_and_reply_run_as_they_are_printed(service: str, broker: Broker, tmp_path: Path) -> None:
    programs = re.findall(r"```python\n# (\S+\.py): .*?\n(.*?)```", (DOCS / "request_reply.md").read_text(), re.DOTALL)
    assert [name for name, _ in programs] == ["prices.py", "ask.py", "listener.py"]
    for name, text in programs:
        (tmp_path / name).write_text(text.replace("timeout_s=10", f"timeout_s={PATIENCE_S}"))
    environment = os.environ | {"PROTOMQ_NAMESRV_ADDR": broker.namesrv}
    serves = subprocess.Popen([sys.executable, service], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        asked = subprocess.run(
            [sys.executable, "ask.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
        )
        assert (asked.returncode, asked.stdout[:6]) == (0, "b'80' "), asked.stderr
    finally:
        serves.send_signal(signal.SIGINT)
        serves.wait(PATIENCE_S)


def cells(table: str) -> list[list[str]]:
    """Of a table that a command prints, without what is another number or name each time."""
    rows = [re.split(r" {2,}", line.strip()) for line in table.strip().splitlines()]
    client = rows[0].index("CLIENT") if "CLIENT" in rows[0] else None
    return [[re.sub(r"\d+", "#", cell) if place != client else "" for place, cell in enumerate(row)] for row in rows]


def test_track_and_trace_print_what_their_page_shows(broker: Broker) -> None:
    with Admin(namesrv=broker.namesrv) as admin:
        admin.create_topic("orders")
        admin.set_group("billing", retry_delays_ms=[100], retry_count_max=1)
    with Producer("desk", trace=True, namesrv=broker.namesrv) as producer:
        message_id = producer.send("orders", b"4 chairs", key="order-17").message_id
    consumer = PushConsumer("billing", trace=True, namesrv=broker.namesrv)

    @consumer.on("orders")
    def bill(message: Message) -> None:
        raise ValueError("no account")

    with consumer:
        wait_for(lambda: consumer.counts.done == 2, PATIENCE_S)
    shown = re.findall(r"    \$ protomq (message track|trace show) [0-9A-F]+\n(.*?)\n\n", (DOCS / "track.md").read_text(), re.DOTALL)
    assert len(shown) == 2
    for command, table in shown:
        printed = subprocess.run(
            [sys.executable, "-m", "protomq", *command.split(), message_id], env=os.environ | {"PROTOMQ_NAMESRV_ADDR": broker.namesrv},
            capture_output=True, text=True, check=True, timeout=PATIENCE_S,
        ).stdout  # fmt: skip
        assert cells(printed) == cells(table)
