"""A message that cannot be processed comes again after a delay; once its retries are spent it is a dead letter, and is replayed."""

import os
import sys

from protomq import Admin, Message, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, GROUP = "payments", "payment-workers"


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send(TOPIC, b"100 EUR to nobody")
    with Admin(namesrv=NAMESRV) as admin:
        admin.set_group(GROUP, retry_count_max=2, retry_delays_ms=[100, 500])

    with PullConsumer(GROUP, namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        consumer.subscribe_retries()
        for message in consumer:
            try:
                pay(message)
            except ValueError as error:
                (told,) = consumer.send_back(message, error=error)
                print(f"delivery {told.attempt} failed: {error}")
                if told.dead_letter:
                    break

    with PullConsumer(namesrv=NAMESRV) as reader:
        reader.subscribe(f"%DLQ%{GROUP}")
        dead = next(iter(reader))
    print(f"dead letter from {dead.origin.topic if dead.origin else '?'}: {dead.last_error}")

    with Admin(namesrv=NAMESRV) as admin:
        done = admin.replay_dead_letters(GROUP)
    print(f"replayed: {done.replayed}")


def pay(message: Message) -> None:
    """Nobody has no account."""
    raise ValueError(f"no account: {message.body.decode()}")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
