"""`python -m tests.bench.peers [row ...]`: against RocketMQ, interleaved; writes build/bench.json and docs/benchmarks.md."""

from __future__ import annotations

import sys

from tests.bench.command import run_command
from tests.bench.peers import rocketmq
from tests.bench.peers.delivery_rows import DELIVERY_ROWS
from tests.bench.peers.rows import PEER_ROWS


def main() -> int:
    """0 if every row could be measured, whatever its value."""
    if missing := rocketmq.missing_tools():
        print(f"RocketMQ was not measured: {', '.join(missing)} not found", file=sys.stderr)
        return 1
    rocketmq.home().mkdir(parents=True, exist_ok=True)
    sections = {"peers": PEER_ROWS, "delivery peers": DELIVERY_ROWS}
    return run_command(sections, before=rocketmq.install)


if __name__ == "__main__":
    sys.exit(main())
