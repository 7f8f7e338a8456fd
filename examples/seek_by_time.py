"""Go to the first message that was stored at a certain time or later, in every queue, and read from there."""

import os
import sys
import time
from datetime import UTC, datetime

from protomq import Message, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "measurements"


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [b"early"] * 10)
        time.sleep(0.05)
        noon = datetime.now(UTC)
        time.sleep(0.05)
        producer.send_batch(TOPIC, [b"late"] * 5)

    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        consumer.seek_to_time(noon)
        messages: list[Message] = []
        while len(messages) < 5:
            messages += consumer.poll(timeout_s=5.0)
    print(f"stored since {noon:%H:%M:%S}:", [message.body.decode() for message in messages])


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
