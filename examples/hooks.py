"""Hooks: who sends what, how long listeners take, and a property on every message. One class, for producers and consumers."""

import os
import sys
import threading
from dataclasses import replace

from protomq import Message, Producer, ProtomqError, PushConsumer
from protomq.hooks import ConsumeContext, Hook, SendContext

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "gate-changes"


class Audit(Hook):
    def __init__(self, desk: str) -> None:
        self.desk = desk
        self.sent = self.failed = self.consumed = 0

    def before_send(self, context: SendContext) -> None:
        context.messages = [
            replace(message, properties={**(message.properties or {}), "desk": self.desk})
            for message in context.messages
        ]

    def after_send(self, context: SendContext) -> None:
        self.sent += len(context.results)

    def after_consume(self, context: ConsumeContext) -> None:
        self.failed += sum(failure is not None for failure in context.failures)
        self.consumed += sum(failure is None for failure in context.failures)

    def keeps(self, message: Message) -> bool:
        return message.tag != "drill"


def main() -> None:
    producers, consumers = Audit("desk-7"), Audit("")
    done = threading.Event()
    with Producer("desk", namesrv=NAMESRV, hooks=[producers]) as producer:
        producer.send(TOPIC, b"UA 12: B4")
        producer.send(TOPIC, b"UA 99: C1", tag="drill")
        producer.send_batch(TOPIC, [b"DL 3: A1", b"DL 7: A9"])
    consumer = PushConsumer("boards", namesrv=NAMESRV, hooks=[consumers], concurrency=1)
    seen: list[str] = []

    @consumer.on(TOPIC)
    def show(message: Message) -> None:
        seen.append(f"{message.body.decode()} (from {message.properties['desk']})")
        if len(seen) == 3:
            done.set()

    with consumer:
        done.wait(30)
    print("\n".join(sorted(seen)))
    print(f"sent {producers.sent}, consumed {consumers.consumed}, failed {consumers.failed}")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
