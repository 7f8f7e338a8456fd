"""A booking is announced if, and only if, it was written to the database. Another producer of the group settles what was left open."""

import os
import sqlite3
import sys
import tempfile

from protomq import (
    Message,
    ProtomqError,
    PullConsumer,
    SendResult,
    TransactionCheck,
    TransactionDecision,
    TransactionProducer,
)

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "bookings"


class Bookings:
    """The database of the desk: seats, each booked once."""

    def __init__(self, path: str) -> None:
        self._path = path
        with sqlite3.connect(path) as database:
            database.execute("create table if not exists bookings (seat text primary key)")

    def book(self, seat: str) -> None:
        with sqlite3.connect(self._path) as database:
            database.execute("insert into bookings values (?)", (seat,))

    def has(self, seat: str) -> bool:
        with sqlite3.connect(self._path) as database:
            rows = database.execute("select 1 from bookings where seat = ?", (seat,))
            return rows.fetchone() is not None


def main(path: str) -> None:
    bookings = Bookings(path)

    def check(asked: TransactionCheck) -> TransactionDecision:
        """A broker asks: the answer is in the database, whoever wrote it."""
        booked = bookings.has(asked.message.key)
        return TransactionDecision.COMMIT if booked else TransactionDecision.ROLL_BACK

    with TransactionProducer("desk", check, topics=[TOPIC], namesrv=NAMESRV) as producer:
        for seat in ("12A", "12B", "12A"):

            def book(_: SendResult, seat: str = seat) -> None:
                bookings.book(seat)

            try:
                producer.send(TOPIC, f"{seat} is booked".encode(), key=seat, execute=book)
                print(seat, "booked")
            except sqlite3.IntegrityError:
                print(seat, "was taken: nobody is told")

        with producer.begin(TOPIC, b"14C is booked", key="14C"):
            bookings.book("14C")

    received: list[Message] = []
    with PullConsumer(namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        while len(received) < 3:
            received += consumer.poll(timeout_s=5.0)
    for message in sorted(received, key=lambda message: message.key):
        print("told:", message.body.decode())


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as folder:
            main(f"{folder}/bookings.db")
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
