"""Asks name servers, before a store is opened to lead, whether its name belongs to brokers that elect their master.

A store that leads begins a new epoch. In the log of a member of an election nobody else would follow it then, nor would it follow anybody.
So that must not happen if name servers are about to refuse the broker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from protomq.v1.route_service_pb2 import Broker, GetClusterInfoResponse
from protomq_runtime.addresses import Address
from protomq_runtime.errors import Code, ServiceError

from .name_server_connections import get_cluster_info

ANSWER_TIMEOUT_S: Final = 2.0
"""How long a start waits for name servers that do not answer."""
GONE_TIMEOUT_S: Final = 5.0
"""How long it waits until name servers give up brokers that may be gone."""
LOOK_S: Final = 0.2


def check_name_is_not_elected(name_servers: Sequence[Address], broker_name: str) -> None:
    """Raises ServiceError NAME_TAKEN if a name server knows elected brokers of this name, and does not give them up in a while."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while (other := _elected_of(name_servers, broker_name)) is not None:
        if time.monotonic() >= deadline:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "NAME_TAKEN",
                f"the name {broker_name} belongs to brokers that elect their master in etcd, and this one has a fixed role. One of them"
                f" (id {other.broker_id}) is at {other.grpc_address}. Either all brokers of a name have the etcd setting, or none. If this"
                " is another cluster, give it another broker_name, or name servers of its own",
                metadata={
                    "broker_name": broker_name,
                    "broker_id": str(other.broker_id),
                    "grpc_address": other.grpc_address,
                },
            )
        time.sleep(LOOK_S)


def _elected_of(name_servers: Sequence[Address], broker_name: str) -> Broker | None:
    """An elected broker of this name that some name server knows."""
    if not name_servers:
        return None
    askers = ThreadPoolExecutor(len(name_servers), "protomq-name-check")
    try:
        asked: list[Future[GetClusterInfoResponse]] = [
            askers.submit(get_cluster_info, address, f"start of {broker_name}") for address in name_servers
        ]
        for answer in wait(asked, ANSWER_TIMEOUT_S).done:
            if isinstance(answer.exception(), OSError | ServiceError):
                continue
            for broker in answer.result().brokers:
                if broker.broker_name == broker_name and broker.election_id:
                    return broker
    finally:
        askers.shutdown(wait=False, cancel_futures=True)
    return None
