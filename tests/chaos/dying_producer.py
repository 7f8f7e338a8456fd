"""A producer of transactions in a process of its own, for whoever kills it: python -m tests.chaos.dying_producer NAMESRV SEED NAME.

It decides as `delivery_rounds.first_word_on` says, and tells each step in a line that a kill cannot cut:

    tried|half|ended|left BODY

`half`: its message is stored, and its decision is not sent yet. `ended`: that was answered. `left`: it does not know, or got no answer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from protomq import SendResult, TransactionCheck, TransactionDecision, TransactionProducer
from protomq.errors import NoRouteError, ProtomqError

from .broker_places import is_acknowledged
from .delivery_rounds import BOOKINGS, DESK, World, decision_on, first_word_on


def tell(step: str, body: bytes) -> None:
    os.write(1, b"%s %s\n" % (step.encode(), body))


def main(namesrv: str, seed: int, name: str) -> None:
    """Until it is killed, or its standard input ends: then its parent is gone."""
    world, number = World(seed), 0

    def check(asked: TransactionCheck) -> TransactionDecision:
        return decision_on(world, asked.message.body)

    def end_with_parent() -> None:
        sys.stdin.read()
        world.stopping.set()

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        with TransactionProducer(DESK, check, topics=[BOOKINGS], namesrv=namesrv) as producer:
            while not world.stopping.is_set():
                body, number = f"{name} {number}".encode(), number + 1
                tell("tried", body)

                def work(half: SendResult, body: bytes = body) -> TransactionDecision:
                    if is_acknowledged(half):
                        tell("half", body)
                    return first_word_on(world, body)

                try:
                    told = producer.send(BOOKINGS, body, execute=work)
                except ProtomqError:
                    world.stopping.wait(0.05)
                    continue
                tell("ended" if told.is_ended else "left", body)
    except NoRouteError:
        return  # The broker is down: the next producer tries again.


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
