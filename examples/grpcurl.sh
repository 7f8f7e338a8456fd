#!/usr/bin/env bash
# Everything by hand, with JSON: reflection is on, so grpcurl needs no .proto files. Bytes are base64 in JSON.
#
#     examples/grpcurl.sh [HOST:PORT]
set -euo pipefail
address=${1:-127.0.0.1:8081}
call() { grpcurl -plaintext "$@"; }

call "$address" list
call "$address" describe protomq.v1.SendService
call -d '{"topic": "by-hand", "records": [{"body": "'"$(printf 'hello' | base64)"'", "keys": ["k1"]}], "queueId": 0}' \
  "$address" protomq.v1.SendService/Send
call -d '{"topic": "by-hand", "queueId": 0, "queueOffset": 0}' "$address" protomq.v1.PullService/Pull
call -d '{"topic": "by-hand"}' "$address" protomq.v1.AdminService/DescribeTopic
