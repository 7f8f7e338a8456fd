"""Pop in order: of each sharding key the broker gives one message at a time, and the next when it is acknowledged. Other keys go on."""

import os
import sys
import threading
from collections import defaultdict

from protomq import Admin, Message, Producer, ProtomqError, SimpleConsumer, TopicType

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "turnarounds"
PLANES = ["N14228", "N24211", "N619AA"]  # Tail numbers.
STEPS = ["unload", "clean", "refuel", "board"]


def main() -> None:
    with Admin(namesrv=NAMESRV) as admin:
        admin.create_topic(TOPIC, type=TopicType.FIFO)  # It takes no message without a sharding key.
    with Producer(namesrv=NAMESRV) as producer:
        for plane in PLANES:
            for step in STEPS:
                producer.send(TOPIC, step, key=plane, sharding_key=plane)

    done: dict[str, list[str]] = defaultdict(list)
    lock = threading.Lock()
    with SimpleConsumer("ground", namesrv=NAMESRV) as consumer:

        def work(message: Message) -> None:
            with lock:
                done[message.key].append(message.value(str))
                if sum(map(len, done.values())) == len(PLANES) * len(STEPS):
                    consumer.request_stop()

        consumer.handle(TOPIC, work, concurrency=3, fifo=True)
    for plane in PLANES:
        print(plane, "->", ", ".join(done[plane]))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
