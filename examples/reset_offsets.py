"""Move a group to where it is to go on: back to a moment, to its beginning, past its backlog, or to where another group is."""

import os
import sys

from protomq import Admin, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "fares"


def read(group: str, count: int) -> list[str]:
    """As many as the group is to get; they are committed."""
    with PullConsumer(group, namesrv=NAMESRV) as consumer:
        consumer.subscribe(TOPIC)
        fares: list[str] = []
        while len(fares) < count and (found := consumer.poll(timeout_s=5.0)):
            fares += [message.value(str) for message in found]
        return sorted(fares)


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer, Admin(namesrv=NAMESRV) as admin:
        producer.send_batch(TOPIC, ["EWR-LAX 270", "JFK-SFO 284"])
        print("report:", read("report", 2))
        admin.reset_offsets("report", TOPIC, "earliest")
        print("report, again:", read("report", 2))

        admin.clone_offsets("report", "audit", TOPIC)
        producer.send(TOPIC, "LGA-ORD 81")
        print("audit, from where report is:", read("audit", 1))

        print("lag of report:", sum(each.lag for each in admin.group_lag("report", TOPIC)))
        admin.reset_offsets("report", TOPIC, "latest")
        print("without its backlog:", sum(each.lag for each in admin.group_lag("report", TOPIC)))


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
