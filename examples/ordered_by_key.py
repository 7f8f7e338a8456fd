"""Messages with the same sharding key go to the same queue and are received in the order in which they were sent."""

import os
import sys
from collections import defaultdict

from protomq import Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "parcels"
PARCELS = ["parcel-a", "parcel-b", "parcel-c"]
STEPS = ["packed", "collected", "sorted", "delivered"]


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        for step in STEPS:
            for parcel in PARCELS:
                producer.send(TOPIC, step.encode(), key=parcel, sharding_key=parcel)

    steps: dict[str, list[str]] = defaultdict(list)
    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        while sum(len(seen) for seen in steps.values()) < len(PARCELS) * len(STEPS):
            for message in consumer.poll(timeout_s=5.0):
                steps[message.key].append(message.body.decode())
    for parcel in PARCELS:
        print(parcel, "->", ", ".join(steps[parcel]))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
