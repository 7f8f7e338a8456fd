"""Deploy a WebAssembly module at the brokers, and receive only messages that it lets through. Any language that compiles to it will do."""

import base64
import os
import sys

from protomq import Admin, Producer, ProtomqError, PullConsumer

NAMESRV = os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
TOPIC = "departure-board"
# (module
#   (memory (export "memory") 1)
#   (func (export "alloc") (param i32) (result i32) (i32.const 16))
#   (func (export "matches") (param $at i32) (param $size i32) (result i32)
#     ;; A record begins with its body: 0A, the length, then "late" or anything else.
#     (i32.eq (i32.load offset=2 (local.get $at)) (i32.const 0x6574616c))))
MODULE = base64.b64decode(
    "AGFzbQEAAAABDAJgAX8Bf2ACf38BfwMDAgABBQMBAAEHHAMGbWVtb3J5AgAFYWxsb2MAAAdtYXRjaGVzAAEKFQIEAEEQCw4AIAAoAgJB7MLRqwZGCwAUBG5hbWUC"
    "DQEBAgACYXQBBHNpemU="
)


def main() -> None:
    with Producer(namesrv=NAMESRV) as producer:
        producer.send_batch(TOPIC, ["on time: UA1545", "late: MQ4576", "on time: B6725", "late: UA856"])

    with Admin(namesrv=NAMESRV) as admin:
        admin.deploy_filter("late-ones", MODULE)
        try:
            with PullConsumer(namesrv=NAMESRV) as consumer:
                consumer.subscribe(TOPIC, module="late-ones")
                late: list[str] = []
                while len(late) < 2:
                    late += [message.value(str) for message in consumer.poll(timeout_s=5.0)]
        finally:
            admin.delete_filter("late-ones")
    print(*sorted(late), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except ProtomqError as error:
        sys.exit(f"{error}; a server is to be started first: protomq standalone")
