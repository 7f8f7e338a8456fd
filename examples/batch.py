"""Many messages in one request: all of them are stored or none, with consecutive offsets."""

import os
import sys

from protomq import OutgoingMessage, Producer, ProtomqError

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        # Bodies alone are enough ...
        results = producer.send_batch("readings", [f"{n} °C".encode() for n in range(100)])
        first, last = results[0], results[-1]
        print(
            f"stored {len(results)} in queue {first.queue.queue_id}, offsets {first.queue_offset} to {last.queue_offset}"
        )

        # ... and each message can have all that a single one can have.
        messages = [
            OutgoingMessage(
                "readings", b"21 C", key=f"sensor-{n}", tag="indoor", properties={"room": str(n)}
            )
            for n in range(3)
        ]
        for result in producer.send_batch("readings", messages):
            print(result.message_id, "at offset", result.queue_offset)


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
