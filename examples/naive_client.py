"""A client with nothing of ours but the generated stubs: send and pull by plain gRPC, every id, CRC and size left out.

    python examples/naive_client.py [HOST:PORT]

HOST:PORT is the gRPC port; PROTOMQ_NAMESRV_ADDR if it is not given. The broker fills in what is missing.
The same goes for any language that protoc generates code for.
"""

from __future__ import annotations

import os
import sys

import grpc

from protomq.v1 import (
    pull_service_pb2,
    pull_service_pb2_grpc,
    record_pb2,
    send_service_pb2,
    send_service_pb2_grpc,
)

TOPIC = "naive"


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PROTOMQ_NAMESRV_ADDR", "127.0.0.1:8081")
    with grpc.insecure_channel(address) as channel:
        sender = send_service_pb2_grpc.SendServiceStub(channel)
        records = [
            record_pb2.Record(body=f"message {n}".encode(), keys=[f"key-{n}"]) for n in range(3)
        ]
        sent = sender.Send(
            send_service_pb2.SendRequest(topic=TOPIC, queue_id=0, records=records), timeout=5
        )
        print(f"sent {sent.record_count} to queue {sent.queue_id} from offset {sent.queue_offset}")

        puller = pull_service_pb2_grpc.PullServiceStub(channel)
        request = pull_service_pb2.PullRequest(
            topic=TOPIC,
            queue_id=0,
            queue_offset=sent.queue_offset,
            plain_bodies=True,  # What others compressed, the broker unpacks: this client has no codecs.
        )
        for record in puller.Pull(request, timeout=5).records:
            print(f"offset {record.queue_offset}: {record.body.decode()} (key {record.keys[0]})")


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"{error.details()}; a server is to be started first: protomq standalone")
