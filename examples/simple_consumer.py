"""Share the messages of a topic among workers: each goes to one of them, who acknowledges it or gives it back."""

import os
import sys

from protomq import Producer, ProtomqError, SimpleConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "bags"


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [b"bag %d" % number for number in range(4)])

    with SimpleConsumer("handlers", namesrv=NAMESRV) as consumer:
        loaded: list[bytes] = []
        gave_back = False
        while len(loaded) < 4:
            for message in consumer.receive(TOPIC, invisible_s=60, hold_s=5):
                if message.body == b"bag 2" and not gave_back:
                    gave_back = True  # The cart was full: it comes again.
                    consumer.nack(message)
                    print("gave back", message.body.decode())
                else:
                    consumer.ack(message)
                    loaded.append(message.body)
    for body in sorted(loaded):
        print("loaded", body.decode())


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
