"""A codec of your own: values of a class become bodies when they are sent, and listeners and consumers get them back."""

import os
import sys
from dataclasses import dataclass
from typing import Any

from protomq import Producer, ProtomqError, PullConsumer
from protomq.body_codecs import BodyCodec, register_body_codec

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, GROUP = "positions", "position-readers"


@dataclass(frozen=True)
class Position:
    """Where a plane is."""

    plane: str
    feet: int


class PositionCodec(BodyCodec):
    """A line of text: "N14228 35000"."""

    content_type = "text/x-position"

    def handles(self, type_: Any) -> bool:
        return type_ is Position

    def encode(self, value: Any) -> bytes:
        return f"{value.plane} {value.feet}".encode()

    def decode(self, body: bytes, type_: Any) -> Position:
        plane, _, feet = body.decode().partition(" ")
        return Position(plane, int(feet))


def main() -> None:
    register_body_codec(PositionCodec())
    with Producer(namesrv=NAMESRV) as producer:
        producer.send(TOPIC, Position("N14228", 35_000))
    with PullConsumer(GROUP, namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        for message in consumer.poll(timeout_s=5.0):
            print(message.properties["content-type"], message.value(Position))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
