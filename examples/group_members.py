"""Two members of a group share a topic; one leaves, and the other takes over its queues."""

import os
import sys
import threading

from protomq import Admin, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC, GROUP, QUEUES = "shared-orders", "order-workers", 4


def main() -> None:
    with Admin(namesrv=NAMESRV) as admin:
        admin.create_topic(TOPIC, write_queues=QUEUES, update=True)
    stays, leaves = (PullConsumer(GROUP, namesrv=NAMESRV) for _ in range(2))
    for member in (stays, leaves):
        member.subscribe(TOPIC)
    poll_until(QUEUES // 2, stays, leaves)
    print(f"two members: {len(stays.assignment())} and {len(leaves.assignment())} queues")

    with Admin(namesrv=NAMESRV) as admin:
        names = [found.client_id for found in admin.group_members(GROUP)]
    print(f"the brokers know {len(names)} members")

    leaves.close()
    poll_until(QUEUES, stays)
    print(f"one member: {len(stays.assignment())} queues")

    with Producer(namesrv=NAMESRV) as producer:
        for number in range(8):
            producer.send(TOPIC, f"order {number}".encode())
    received = 0
    while received < 8:
        received += len(stays.poll())
    print(f"received {received} orders")
    stays.close()


def poll_until(queue_count: int, *members: PullConsumer) -> None:
    """Queues change hands inside `poll`, so each member polls in a thread of its own, as if it were a process."""

    def poll(member: PullConsumer) -> None:
        while len(member.assignment()) != queue_count:
            member.poll(0.1)

    threads = [threading.Thread(target=poll, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
