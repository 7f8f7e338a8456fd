"""Every member gets every message: the gates of an airport all show every change. A file of its own says how far each gate has come."""

import os
import sys
import tempfile
import threading

from protomq import Producer, ProtomqError, PushConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "gate-signs"
CHANGES = ["UA1545 leaves from C71", "AA1141 leaves from D40"]


def gate(name: str, folder: str, seen: list[str], is_done: threading.Event) -> PushConsumer:
    consumer = PushConsumer("gates", broadcast=True, instance=name, offset_folder=folder, namesrv=NAMESRV)

    @consumer.on(TOPIC)
    def show(change: str) -> None:
        seen.append(f"{name}: {change}")
        if len(seen) == 2 * len(CHANGES):
            is_done.set()

    return consumer


def main(folder: str) -> None:
    seen: list[str] = []
    is_done = threading.Event()
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, CHANGES)
    with gate("gate C70", folder, seen, is_done), gate("gate D41", folder, seen, is_done):
        is_done.wait(60)
    print(*sorted(seen), sep="\n")


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
