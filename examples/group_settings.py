"""Settings of a group hold at all brokers, for all members that run: how often a message is tried, and whether the group consumes."""

import os
import sys

from protomq import Admin, Producer, ProtomqError, SimpleConsumer
from protomq.errors import GroupDisabledError

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, GROUP = "catering", "kitchen"


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send(TOPIC, "180 meals to gate D8")

    with Admin(namesrv=NAMESRV) as admin, SimpleConsumer(GROUP, namesrv=NAMESRV) as consumer:
        admin.set_group(GROUP, retry_count_max=3, consume_enabled=False)
        try:
            consumer.receive(TOPIC, hold_s=0)
        except GroupDisabledError:
            print("the kitchen is closed")

        settings = admin.set_group(GROUP, consume_enabled=True)
        print(f"it is open, with {settings.retry_count_max} retries")
        (message,) = consumer.receive(TOPIC, hold_s=5)
        consumer.ack(message)
        print(message.value(str))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
