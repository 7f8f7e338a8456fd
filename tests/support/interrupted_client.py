"""A program whose main thread uses all kinds of clients while signals come all the time; then each of them has to work, and at once.

    python -m tests.support.interrupted_client NAMESRV TOPIC SECONDS ERROR    prints how often it was interrupted, and where it hangs

ERROR is what the signal handler raises: KeyboardInterrupt, as Ctrl-C does, or TimeoutError, as many alarms do.
"""

from __future__ import annotations

import builtins
import importlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from protomq import Admin, Producer, PullConsumer, TransactionDecision, TransactionProducer
from protomq.errors import ConnectionLostError

SOON_S = 5.0


class Interrupts:
    """Of the main thread: SIGINT comes at any moment, and raises the error once each time that `run` is called."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error
        self.count = 0
        self._is_armed = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._storm)
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _: int, __: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise self._error

    def _storm(self) -> None:
        rng, main = random.Random(14), threading.main_thread().ident
        assert main is not None
        while not self._ends.wait(rng.expovariate(1 / 0.001)):
            signal.pthread_kill(main, signal.SIGINT)

    def __enter__(self) -> Interrupts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_armed = False
        self._ends.set()
        self._thread.join()

    def run(self, work: Callable[[], object], until_s: float) -> None:
        """Again and again, until it is interrupted, or the time is over."""
        try:
            while time.monotonic() < until_s:
                # Each time: one that comes while CPython collects a socket that nobody has closed is lost without a word.
                self._is_armed = True
                work()
        except self._error:
            self.count += 1
        finally:
            self._is_armed = False


def main(namesrv: str, topic: str, seconds: float, error: type[BaseException]) -> int:
    """Returns how many kinds of calls do not work in time after all that."""
    producer = Producer(namesrv=namesrv)
    transactions = TransactionProducer("interrupted", lambda _: TransactionDecision.COMMIT, namesrv=namesrv)
    consumer = PullConsumer("interrupted", namesrv=namesrv)
    admin = Admin(namesrv=namesrv)
    consumer.subscribe(topic)
    works: dict[str, Callable[[], object]] = {
        "send": lambda: producer.send(topic, b"x", timeout_s=SOON_S),
        "send in order": lambda: producer.send(topic, b"x", sharding_key="k", timeout_s=SOON_S),
        "send_async": lambda: producer.send_async(topic, b"x", timeout_s=SOON_S).result(SOON_S),
        "transaction": lambda: transactions.send(topic, b"x", execute=lambda _: None, timeout_s=SOON_S),
        "poll": lambda: consumer.poll(0.001),
        "commit": consumer.commit,
        "admin": lambda: admin.describe_topic(topic),
        "first call": lambda: Producer(namesrv=namesrv).send(topic, b"x", timeout_s=SOON_S),
    }
    ends = threading.Event()

    def along() -> None:
        while not ends.is_set():
            try:
                producer.send(topic, b"y", timeout_s=SOON_S)
            except ConnectionLostError:
                pass  # Whoever carried it was interrupted.

    others = [threading.Thread(target=along, daemon=True) for _ in range(3)]
    for thread in others:
        thread.start()
    producer.send(topic, b"x", timeout_s=SOON_S)
    # Reading many messages at once imports numpy: an import that an error cuts short cannot be done again.
    importlib.import_module("protomq._record_columns")
    while not consumer.poll(SOON_S):
        pass
    until_s = time.monotonic() + seconds
    rng = random.Random(14)
    with Interrupts(error) as interrupts:
        while time.monotonic() < until_s:
            interrupts.run(rng.choice(list(works.values())), until_s)
    hung = []
    for name, work in works.items():
        done = threading.Event()

        def once(work: Callable[[], object] = work, done: threading.Event = done) -> None:
            work()
            done.set()

        threading.Thread(target=once, daemon=True).start()
        if not done.wait(2 * SOON_S):
            hung.append(name)
    ends.set()
    for thread in others:
        thread.join(2 * SOON_S)
        if thread.is_alive():
            hung.append("a thread that sends along")
    print(f"interrupted {interrupts.count} times; do not work: {', '.join(hung) or 'none'}")
    return len(hung)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), getattr(builtins, sys.argv[4])))
