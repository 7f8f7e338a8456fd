"""A load as a process of its own, so that it may have another version of the SDK: python -m tests.support.load_process NAMESRV TOPIC GROUP

It says how much was acknowledged, a line for each 20 messages, until its stdin ends. Then everything is consumed and checked. The last
line tells what was found: {"acknowledged": 123, "repeats": 0, "failures": [], "sdk": the place of its SDK}.
"""

from __future__ import annotations

import json
import sys
import threading

import protomq
from tests.support.load import Load

STEP = 20


def main(namesrv: str, topic: str, group: str) -> None:
    over = threading.Event()

    def read_to_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=read_to_the_end, daemon=True).start()
    with Load(namesrv, topic, group) as load:
        while not over.is_set():
            load.wait_for_more(STEP)
            print(len(load.acknowledged), flush=True)
        load.stop_sending()
        load.wait_until_consumed()
    load.check()
    found = {"acknowledged": len(load.acknowledged), "repeats": load.repeats, "failures": load.failures, "sdk": protomq.__file__}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
