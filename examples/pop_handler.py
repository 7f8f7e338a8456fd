"""A function handles each message, however long it takes: its message is renewed meanwhile. One that it rejects is a dead letter."""

import os
import sys
import threading

from protomq import Message, Producer, ProtomqError, PullConsumer, Reject, SimpleConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "de-icing"
GROUP = "trucks"
PLANES = ("N14228", "N24211", "N619AA", "N804JB", "N668DN", "N39463")


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [tail_number.encode() for tail_number in PLANES])

    treated: list[str] = []
    lock = threading.Lock()
    with SimpleConsumer(GROUP, namesrv=NAMESRV) as consumer:

        def treat(message: Message) -> Reject | None:
            """Runs on one of four threads. If it takes longer, its message is renewed every 5 s, for up to 15 minutes."""
            plane = message.body.decode()
            with lock:
                treated.append(plane)
                if len(treated) == len(PLANES):
                    consumer.request_stop()
            if plane == "N804JB":
                return Reject("it stands in the hangar")
            consumer.hold(message).check()  # Before what must not be done twice: is it still ours?
            return None

        counts = consumer.handle(TOPIC, treat, concurrency=4, invisible_s=10)
    print(f"{counts.done} done, {counts.failed} failed")

    with PullConsumer(namesrv=NAMESRV) as reader:
        reader.subscribe(f"%DLQ%{GROUP}")
        for message in reader:
            print(f"{message.body.decode()} is a dead letter: {message.last_error}")
            break


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
