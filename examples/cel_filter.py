"""Receive only messages of which a condition in CEL is true. The broker evaluates it; others never leave it. Here a group pops."""

import os
import sys

from protomq import OutgoingMessage, Producer, ProtomqError, SimpleConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "arrivals"
FLIGHTS = [  # Of New York, 1 January 2013: carrier, flight, destination, minutes of delay.
    ("UA", 1545, "IAH", 11), ("UA", 1714, "IAH", 20), ("AA", 1141, "MIA", 33), ("MQ", 4576, "CLT", 98),
    ("B6", 725, "BQN", -18), ("DL", 461, "ATL", -25), ("UA", 856, "SFO", 137), ("B6", 507, "FLL", 19),
]  # fmt: skip


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(
            TOPIC,
            [
                OutgoingMessage(
                    TOPIC, f"{carrier}{flight} to {to}", tag=carrier, properties={"to": to, "delay": str(delay)}
                )
                for carrier, flight, to, delay in FLIGHTS
            ],
        )

    condition = "int(properties.delay) > 15 && (TAGS == 'UA' || properties.to in ['MIA', 'FLL'])"
    late: list[str] = []
    with SimpleConsumer("connections", namesrv=NAMESRV) as consumer:
        while len(late) < 4:
            for message in consumer.receive(TOPIC, cel=condition, hold_s=5):
                late.append(message.value(str))
                consumer.ack(message)
    print(*sorted(late), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
