"""A function is given up to five messages of one queue at a time, and says when that queue is due again: a table is loaded in lots."""

import os
import sys
from collections.abc import Sequence

from protomq import Message, MessageQueue, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "fuel"
LOT = 5


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [f"{1000 + number} kg" for number in range(12)], queue=producer.queues(TOPIC)[0])

    loaded: list[str] = []
    with PullConsumer("loader", namesrv=NAMESRV) as consumer:

        def load(queue: MessageQueue, messages: Sequence[Message]) -> int:
            lot = [message.value(str) for message in messages]
            loaded.extend(lot)
            print(f"{len(lot)} rows, from {lot[0]} on")
            if len(loaded) == 12:
                consumer.close()
            return 0 if len(lot) == LOT else 30_000  # Milliseconds.

        consumer.subscribe(TOPIC)
        consumer.run_scheduled(load, max_messages=LOT)


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
