"""A listener gets the messages of each queue one after another: a plane that is not ready holds up those behind it, and no other runway."""

import os
import sys
import threading
from collections import defaultdict

from protomq import Message, Producer, ProtomqError, PushConsumer, Suspend

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "runways"
LINES = {"22R": ["UA1545", "UA1714", "AA1141"], "31L": ["B6725", "DL461"]}


def main() -> None:
    left: dict[str, list[str]] = defaultdict(list)
    is_done = threading.Event()
    consumer = PushConsumer("tower", orderly=True, namesrv=NAMESRV)

    @consumer.on(TOPIC)
    def clear(message: Message) -> Suspend | None:
        flight = message.value(str)
        if flight == "UA1714" and message.attempt < 2:
            return Suspend(20, error="still de-icing")  # Its queue goes on with it after 20 ms.
        left[message.key].append(f"{flight} (try {message.attempt + 1})")
        if sum(map(len, left.values())) == sum(map(len, LINES.values())):
            is_done.set()
        return None

    with Producer(namesrv=NAMESRV) as producer:
        for runway, flights in LINES.items():
            for flight in flights:
                producer.send(TOPIC, flight, key=runway, sharding_key=runway)
    with consumer:
        is_done.wait(60)
    for runway in LINES:
        print(f"{runway}: {', '.join(left[runway])}")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
