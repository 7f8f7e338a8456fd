"""Messages with the same sharding key go to the same queue and are received in the order in which they were sent."""

import os
import sys
from collections import defaultdict

from protomq import Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "legs"
PLANES = ["N14228", "N24211", "N619AA"]  # Tail numbers.
STEPS = ["boarding", "taxi", "take-off", "landing"]


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        for step in STEPS:
            for plane in PLANES:
                producer.send(TOPIC, step, key=plane, sharding_key=plane)

    steps: dict[str, list[str]] = defaultdict(list)
    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        while sum(len(seen) for seen in steps.values()) < len(PLANES) * len(STEPS):
            for message in consumer.poll(timeout_s=5.0):
                steps[message.key].append(message.value(str))
    for plane in PLANES:
        print(plane, "->", ", ".join(steps[plane]))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
