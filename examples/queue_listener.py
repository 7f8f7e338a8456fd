"""A listener is told which queues a consumer gets: it says where to begin in each, at a moment, and commits when they go."""

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from protomq import MessageQueue, Producer, ProtomqError, PullConsumer, QueueListener

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "radar"


class FromMoment(QueueListener):
    """Queues are read from a moment on, whatever the group has committed."""

    consumer: PullConsumer

    def __init__(self, moment: datetime) -> None:
        self.moment = moment

    def on_assigned(self, queues: Sequence[MessageQueue]) -> None:
        for queue in queues:
            self.consumer.seek(queue, self.consumer.offset_for_time(queue, self.moment))

    def on_revoked(self, queues: Sequence[MessageQueue]) -> None:
        self.consumer.commit({queue: self.consumer.position(queue) for queue in queues})
        print(f"committed {len(queues)} queues")


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [f"echo {number}" for number in range(8)])
        time.sleep(0.05)
        moment = datetime.now(UTC)
        time.sleep(0.05)
        producer.send_batch(TOPIC, ["AA1141 at 2,000 feet", "DL461 at 9,000 feet"])

    listener = FromMoment(moment)
    with PullConsumer("approach", auto_commit=False, listener=listener, namesrv=NAMESRV) as consumer:
        listener.consumer = consumer
        consumer.subscribe(TOPIC)
        seen: list[str] = []
        while len(seen) < 2:
            seen += [message.value(str) for message in consumer.poll(timeout_s=5.0)]
    print(*sorted(seen), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
