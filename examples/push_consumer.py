"""A function is given the messages of a group. It returns, raises, asks for another try, or rejects what can never be done."""

import json
import os
import sys

from protomq import (
    Admin,
    Message,
    Producer,
    ProtomqError,
    PullConsumer,
    PushConsumer,
    Reject,
    Retry,
)

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, GROUP = "departures", "boards"
FLIGHTS: list[dict[str, object]] = [
    {"carrier": "UA", "tailnum": "N14228", "dest": "IAH", "dep_delay": 2},
    {"carrier": "UA", "tailnum": "N24211", "dest": "IAH", "dep_delay": 4},
    {"carrier": "AA", "tailnum": "N619AA", "dest": "MIA", "dep_delay": 2},
    {"carrier": "UA", "tailnum": "N39463", "dest": "ORD", "dep_delay": -4},
    {"carrier": "UA", "tailnum": None, "dest": "ORD", "dep_delay": 0},
]

consumer = PushConsumer(GROUP, namesrv=NAMESRV)
shown: set[bytes] = set()


@consumer.on(TOPIC, tags=["UA"])
def show(message: Message) -> Retry | Reject | None:
    flight = json.loads(message.body)
    if flight["tailnum"] is None:
        shown.add(message.body)
        return Reject("no tail number")
    late = flight["dep_delay"]
    if late < 0 and not message.attempt:
        return Retry(delay=0.2, error="too early to say")
    how = f"{late} minutes late" if late >= 0 else f"{-late} minutes early, said the second time"
    # One write: threads that print at the same time mix lines with their ends.
    sys.stdout.write(f"{flight['tailnum']} to {flight['dest']} left {how}\n")
    shown.add(message.body)
    if len(shown) == 4:
        consumer.request_stop()  # Else run() goes on until Ctrl-C or SIGTERM.
    return None


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        for flight in FLIGHTS:
            producer.send(TOPIC, json.dumps(flight).encode(), tag=str(flight["carrier"]))
    with Admin(namesrv=NAMESRV) as admin:
        admin.set_group(GROUP, retry_count_max=3)

    left = consumer.run()
    print(f"stopped, {left} left")

    with PullConsumer(namesrv=NAMESRV) as reader:
        reader.subscribe(f"%DLQ%{GROUP}")
        dead = next(iter(reader))
    print(f"dead letter: a flight without a plane: {dead.last_error}")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
