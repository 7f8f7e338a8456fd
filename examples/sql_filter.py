"""Receive only messages of which a condition is true: flights that left more than half an hour late. The broker evaluates it, in SQL92."""

import os
import sys

from protomq import Message, OutgoingMessage, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "delayed-departures"
FLIGHTS = [  # Of New York, 1 January 2013: carrier, flight, origin, minutes of delay.
    ("UA", 1545, "EWR", 2), ("UA", 1714, "LGA", 4), ("AA", 1141, "JFK", 2), ("MQ", 4576, "LGA", 101),
    ("B6", 725, "JFK", -1), ("MQ", 3944, "JFK", 853), ("UA", 856, "EWR", 144), ("UA", 1086, "LGA", 134),
]  # fmt: skip


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(
            TOPIC,
            [
                OutgoingMessage(
                    TOPIC,
                    f"{carrier}{flight} from {origin}, {delay} minutes late".encode(),
                    tag=carrier,
                    properties={"origin": origin, "dep_delay": str(delay)},
                )
                for carrier, flight, origin, delay in FLIGHTS
            ],
        )

    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC, sql="dep_delay > 30 AND (origin = 'LGA' OR TAGS = 'UA')")
        received: list[Message] = []
        while len(received) < 3:
            received += consumer.poll(timeout_s=5.0)
    for message in received:
        print(message.body.decode())


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
