"""Where did a message go, and who has consumed it? Brokers know its places, and clients that trace say what they did with it, and when."""

import os
import sys

from protomq import Admin, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "suitcases"


def main() -> None:
    with Producer("check-in", trace=True, namesrv=NAMESRV) as producer:
        sent = producer.send(TOPIC, "JFK to LAX", key="B6-0042")

    with PullConsumer("belt-7", trace=True, namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        consumer.subscribe_retries()
        (message,) = consumer.poll(timeout_s=5.0)
        consumer.send_back(message, error="the belt stands", delay=0)
        (again,) = consumer.poll(timeout_s=60.0)
        print(f"attempt {again.attempt + 1}: {again.value(str)}")

    with Admin(namesrv=NAMESRV) as admin:
        for place in admin.track_message(sent.message_id).places:
            groups = ", ".join(f"{group} {state}" for group, state in place.groups.items())
            print(f"{place.kind} in {place.queue.topic}: {groups} {place.last_error}".rstrip())
        for event in admin.trace_of(sent.message_id):
            print(f"trace: {event.kind} by {event.group}")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
