"""Receive only messages with certain tags. The broker compares hashes on its consume queue, the client compares the tags."""

import os
import sys

from protomq import Message, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "carriers"
FLIGHTS = [("UA", 1545), ("AA", 1141), ("B6", 725), ("DL", 461), ("UA", 1696)]


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        for carrier, number in FLIGHTS:
            producer.send(TOPIC, f"flight {number}", tag=carrier)

    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC, tags=["AA", "DL"])
        received: list[Message] = []
        while len(received) < 2:
            received += consumer.poll(timeout_s=5.0)
    for message in sorted(received, key=lambda message: message.body):
        print(message.tag, message.value(str))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
