"""A broker whose master is far away: `python -m tests.bench.distant_slave ROUND_TRIP_MS broker -c FILE`.

What the slave says to its master leaves later by the whole round trip; what the master says comes at once. Each exchange takes as
long as if half of the time went to each direction. The bytes of the log are not touched. So the delay takes nothing of the rate, as a proxy
in Python would. The kernel's way (tc netem) is not in every kernel.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from typing import Any, Final

from protomq.wire import frames
from protomq_broker import ha_follower
from protomq_cli.__main__ import run
from protomq_runtime.remoting_client import RemotingClient

_END: Final = (0.0, b"")


class DistantClient(RemotingClient):
    """Its requests leave `round_trip_s` after they were made, in their order, from a thread of its own. Attribute: round_trip_s, of all."""

    round_trip_s = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._late: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        super().__init__(*arguments, **options)
        self._way = self._socket.dup()
        threading.Thread(target=self._deliver, daemon=True).start()

    def start(self, method_id: int, payload: bytes, timeout_s: float) -> int:
        """See RemotingClient."""
        request_id = self._next_request_id
        self._next_request_id = request_id % 0xFFFF_FFFF + 1
        timeout_ms = max(1, min(int(timeout_s * 1_000), 0xFFFF_FFFF))
        self._leave_later(frames.encode_request(request_id, method_id, len(payload), timeout_ms) + payload)
        return request_id

    def tell(self, method_id: int, payload: bytes, timeout_s: float) -> None:
        """See RemotingClient."""
        self._leave_later(frames.encode_request(0, method_id, len(payload), one_way=True) + payload)

    def close(self) -> None:
        """See RemotingClient."""
        self._late.put(_END)
        super().close()

    def _leave_later(self, frame: bytes) -> None:
        self._late.put((time.monotonic() + self.round_trip_s, frame))

    def _deliver(self) -> None:
        with self._way as way:
            while (item := self._late.get()) is not _END:
                due_s, frame = item
                if (early_s := due_s - time.monotonic()) > 0:
                    time.sleep(early_s)
                try:
                    way.sendall(frame)
                except OSError:  # The follower sees the same.
                    way.shutdown(socket.SHUT_RDWR)
                    return


def main() -> int:
    """Runs the rest of the command line as `protomq` would."""
    DistantClient.round_trip_s = float(sys.argv.pop(1)) / 1_000
    setattr(ha_follower, "RemotingClient", DistantClient)  # noqa: B010, mypy lets nobody assign what a module has imported
    return run()


if __name__ == "__main__":
    sys.exit(main())
