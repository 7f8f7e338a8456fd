"""How members share queues: in runs, in turns, by their places on a ring, or by what each is told. The first part needs no server."""

import os
import sys
from collections.abc import Iterable

from protomq import Admin, MessageQueue, ProtomqError, PullConsumer
from protomq.allocation import Allocation, Average, Circle, Configured, ConsistentHash, GroupMember

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, QUEUES = "parking-stands", 8
MEMBERS = [GroupMember(name) for name in ("anna", "ben", "cleo")]


def text(queues: Iterable[MessageQueue]) -> str:
    return " ".join(str(queue.queue_id) for queue in queues) or "none"


def main() -> None:
    queues = [MessageQueue(TOPIC, "airport", number) for number in range(QUEUES)]
    allocations: list[Allocation] = [Average(), Circle(), ConsistentHash()]
    for allocation in allocations:
        shares = ", ".join(
            f"{member.name}: {text(allocation.share(member, queues, MEMBERS))}"
            for member in MEMBERS
        )
        print(f"{type(allocation).__name__:<14} {shares}")

    with Admin(namesrv=NAMESRV) as admin:
        admin.create_topic(TOPIC, write_queues=QUEUES, update=True)
    with PullConsumer(namesrv=NAMESRV) as consumer:
        mine = consumer.queues(TOPIC)[2:4]
    # All members of a group have to share in the same way; with Configured each is told its own queues.
    with PullConsumer("stand-agents", namesrv=NAMESRV, allocation=Configured(mine)) as consumer:
        consumer.subscribe(TOPIC)
        while len(consumer.assignment()) < len(mine):
            consumer.poll(0.1)
        print(f"{'Configured':<14} this member has {text(consumer.assignment())}")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
