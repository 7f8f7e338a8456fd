"""Send messages that are delivered later, and take one of them back. Nobody sees a message before its time."""

import os
import sys
from datetime import UTC, datetime, timedelta

from protomq import DelayLevel, Message, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "reminders"


def main() -> None:
    started = datetime.now(UTC)
    with Producer(namesrv=NAMESRV) as producer:
        producer.send(TOPIC, b"in two seconds", delay=timedelta(seconds=2))
        producer.send(TOPIC, b"in one: the broker's level 1", delay=DelayLevel(1))
        unwanted = producer.send(
            TOPIC, b"tomorrow", deliver_at=datetime.now(UTC) + timedelta(days=1)
        )
        producer.send(TOPIC, b"now")
        recalled = producer.recall(TOPIC, unwanted.recall_handle)
        print("tomorrow's reminder is", "taken back" if recalled else "on its way")

    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        consumer.seek_to_time(started)  # An earlier run has left messages there.
        received: list[Message] = []
        while len(received) < 3:
            found = consumer.poll(timeout_s=5.0)
            received += found
            for message in found:
                print(message.body.decode())


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
