"""A consumer for `protomq worker worker:consumer --processes 2`, which runs it in two processes. As a program it does so, and ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from protomq import Producer, ProtomqError, PushConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "taxi-times"
FLIGHTS = {"UA1545": 17, "UA1714": 21, "AA1141": 12, "MQ4576": 30}

consumer = PushConsumer("taxi", namesrv=NAMESRV)


@consumer.on(TOPIC)
def count(taxi: dict[str, object]) -> None:
    # One write for a line: several threads print.
    print(f"{taxi['flight']} rolled for {taxi['minutes']} minutes\n", end="", flush=True)


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, [{"flight": flight, "minutes": minutes} for flight, minutes in FLIGHTS.items()])

    command = [sys.executable, "-m", "protomq", "worker", "worker:consumer", "--processes", "2", "--namesrv", NAMESRV]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        lines = sorted(worker.stdout.readline().strip() for _ in FLIGHTS)
        worker.send_signal(signal.SIGTERM)  # They finish what they have, commit, and end.
    print(*lines, sep="\n")
    print("the worker ended with", worker.returncode)


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
