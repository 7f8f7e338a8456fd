"""Models as bodies: a listener says by its type hint what it takes, and what is none of that becomes a dead letter at once."""

import os
import sys

from pydantic import BaseModel, Field

from protomq import Message, Producer, ProtomqError, PullConsumer, PushConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, GROUP = "departures-typed", "typed-boards"


class Departure(BaseModel):
    carrier: str
    tailnum: str | None = None
    dest: str
    dep_delay: int = Field(ge=-120)


consumer = PushConsumer(GROUP, namesrv=NAMESRV)
lines: list[str] = []


@consumer.on(TOPIC)
def show(departure: Departure, message: Message) -> None:
    lines.append(f"{departure.carrier} to {departure.dest}, {departure.dep_delay} minutes ({message.properties['schema']})")
    if len(lines) == 2:
        consumer.request_stop()


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send(TOPIC, {"carrier": "MQ", "dest": "CLT", "dep_delay": "late"}, properties={"schema": "Departure"})
        producer.send(TOPIC, Departure(carrier="UA", tailnum="N14228", dest="IAH", dep_delay=2))
        producer.send(TOPIC, Departure(carrier="B6", tailnum="N804JB", dest="BQN", dep_delay=-1))

    consumer.run()
    print(*sorted(lines), sep="\n")

    with PullConsumer(namesrv=NAMESRV) as reader:
        reader.subscribe(f"%DLQ%{GROUP}")
        dead = next(iter(reader))
    print("dead letter:", dead.value(dict)["dest"], "-", dead.last_error)


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
