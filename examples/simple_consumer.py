"""Share the messages of a topic among workers: each goes to one of them, who acknowledges it or gives it back."""

import os
import sys

from protomq import Producer, ProtomqError, SimpleConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "parcels"


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [b"parcel %d" % number for number in range(4)])

    with SimpleConsumer("drivers", namesrv=NAMESRV) as consumer:
        delivered: list[bytes] = []
        was_at_home = False
        while len(delivered) < 4:
            for message in consumer.receive(TOPIC, invisible_s=60, hold_s=5):
                if message.body == b"parcel 2" and not was_at_home:
                    was_at_home = True  # The next time, that is: it comes again.
                    consumer.nack(message)
                    print("gave back", message.body.decode())
                else:
                    consumer.ack(message)
                    delivered.append(message.body)
    for body in sorted(delivered):
        print("delivered", body.decode())


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
