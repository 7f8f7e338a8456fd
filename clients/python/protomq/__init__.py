"""protomq: the Python SDK.

    from protomq import Producer, PullConsumer

    with Producer() as producer:
        producer.send("greetings", b"hello", key="k1")

    with PullConsumer("my-group") as consumer:
        consumer.subscribe("greetings")
        for message in consumer:
            print(message.key, message.body)

Public names stand here and in `protomq.errors`, `protomq.body_codecs`, `protomq.asgi`, `protomq.allocation`, `protomq.hooks`,
`protomq.otel` and `protomq.testing`. Connectors and tools also use `protomq.calls` and `protomq.records`. Modules with an underscore may
change at any time. Names are loaded when they are first used, so that `import protomq` is cheap and grpc is not loaded before it is
needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import errors as errors
    from ._admin import Admin as Admin
    from ._admin_values import BrokerInfo as BrokerInfo
    from ._admin_values import BrokerStatus as BrokerStatus
    from ._admin_values import ConsumerGroup as ConsumerGroup
    from ._admin_values import DamagedQueue as DamagedQueue
    from ._admin_values import FilterModule as FilterModule
    from ._admin_values import LaneStatus as LaneStatus
    from ._admin_values import LogDamage as LogDamage
    from ._admin_values import MissingBroker as MissingBroker
    from ._admin_values import QueueStatus as QueueStatus
    from ._admin_values import RefusedBroker as RefusedBroker
    from ._admin_values import TopicConfig as TopicConfig
    from ._admin_values import TopicDescription as TopicDescription
    from ._admin_values import TopicStats as TopicStats
    from ._async_pop import AsyncSimpleConsumer as AsyncSimpleConsumer
    from ._async_producer import AsyncProducer as AsyncProducer
    from ._async_pull_consumer import AsyncPullConsumer as AsyncPullConsumer
    from ._async_push_consumer import AsyncPushConsumer as AsyncPushConsumer
    from ._async_transaction_producer import AsyncTransaction as AsyncTransaction
    from ._async_transaction_producer import AsyncTransactionProducer as AsyncTransactionProducer
    from ._connection_options import ConnectionOptions as ConnectionOptions
    from ._dead_letters import DamagedLetters as DamagedLetters
    from ._dead_letters import DeadLetters as DeadLetters
    from ._dead_letters import ReplayProgress as ReplayProgress
    from ._group_admin import GroupSettings as GroupSettings
    from ._group_locks import QueueLockInfo as QueueLockInfo
    from ._group_members import GroupMemberInfo as GroupMemberInfo
    from ._group_members import MemberQueue as MemberQueue
    from ._group_members import MemberReport as MemberReport
    from ._group_offsets import GroupLag as GroupLag
    from ._ha_admin import BrokerRole as BrokerRole
    from ._ha_admin import HaStatus as HaStatus
    from ._ha_admin import KnownMember as KnownMember
    from ._ha_admin import LeadershipStatus as LeadershipStatus
    from ._ha_admin import ReplicaStatus as ReplicaStatus
    from ._message import Message as Message
    from ._message_track import MessagePlace as MessagePlace
    from ._message_track import MessageTrack as MessageTrack
    from ._message_track import PlaceKind as PlaceKind
    from ._message_track import TrackState as TrackState
    from ._outgoing import BatchResult as BatchResult
    from ._outgoing import OutgoingMessage as OutgoingMessage
    from ._outgoing import SendResult as SendResult
    from ._outgoing import SendStatus as SendStatus
    from ._pop import SimpleConsumer as SimpleConsumer
    from ._pop_handling import HandledCounts as HandledCounts
    from ._pop_handling import Hold as Hold
    from ._producer import Producer as Producer
    from ._pull_consumer import PullConsumer as PullConsumer
    from ._push_base import PushCounts as PushCounts
    from ._push_consumer import PushConsumer as PushConsumer
    from ._push_results import Reject as Reject
    from ._push_results import Retry as Retry
    from ._push_results import Suspend as Suspend
    from ._queue_listener import QueueListener as QueueListener
    from ._requests import Reply as Reply
    from ._send_back import SentBack as SentBack
    from ._trace import TraceEvent as TraceEvent
    from ._transaction_admin import OpenTransaction as OpenTransaction
    from ._transaction_producer import Transaction as Transaction
    from ._transaction_producer import TransactionProducer as TransactionProducer
    from ._transactions import TransactionCheck as TransactionCheck
    from ._transactions import TransactionDecision as TransactionDecision
    from ._transactions import TransactionResult as TransactionResult
    from ._transit import MessageOrigin as MessageOrigin
    from ._types import DelayLevel as DelayLevel
    from ._types import MessageQueue as MessageQueue
    from ._types import Permission as Permission
    from ._types import PoppedQueue as PoppedQueue
    from ._types import QueueRange as QueueRange
    from ._types import TopicType as TopicType
    from .errors import ProtomqError as ProtomqError

__version__ = "0.1.0"

# Where each public name lives. Whoever adds a name adds it here, above and to `__all__`; a test compares the three.
_LAZY = {
    "Producer": "_producer",
    "AsyncProducer": "_async_producer",
    "OutgoingMessage": "_outgoing",
    "SendResult": "_outgoing",
    "SendStatus": "_outgoing",
    "DelayLevel": "_types",
    "BatchResult": "_outgoing",
    "Reply": "_requests",
    "TransactionProducer": "_transaction_producer",
    "AsyncTransactionProducer": "_async_transaction_producer",
    "Transaction": "_transaction_producer",
    "AsyncTransaction": "_async_transaction_producer",
    "TransactionDecision": "_transactions",
    "TransactionResult": "_transactions",
    "TransactionCheck": "_transactions",
    "PullConsumer": "_pull_consumer",
    "AsyncPullConsumer": "_async_pull_consumer",
    "QueueListener": "_queue_listener",
    "PushConsumer": "_push_consumer",
    "AsyncPushConsumer": "_async_push_consumer",
    "PushCounts": "_push_base",
    "Retry": "_push_results",
    "Reject": "_push_results",
    "Suspend": "_push_results",
    "SimpleConsumer": "_pop",
    "AsyncSimpleConsumer": "_async_pop",
    "PoppedQueue": "_types",
    "HandledCounts": "_pop_handling",
    "Hold": "_pop_handling",
    "Message": "_message",
    "ConnectionOptions": "_connection_options",
    "MessageQueue": "_types",
    "QueueRange": "_types",
    "Permission": "_types",
    "TopicType": "_types",
    "GroupLag": "_group_offsets",
    "QueueLockInfo": "_group_locks",
    "GroupMemberInfo": "_group_members",
    "MemberQueue": "_group_members",
    "MemberReport": "_group_members",
    "Admin": "_admin",
    "TopicConfig": "_admin_values",
    "TopicDescription": "_admin_values",
    "QueueStatus": "_admin_values",
    "BrokerInfo": "_admin_values",
    "BrokerStatus": "_admin_values",
    "DamagedQueue": "_admin_values",
    "LaneStatus": "_admin_values",
    "LogDamage": "_admin_values",
    "MissingBroker": "_admin_values",
    "RefusedBroker": "_admin_values",
    "TopicStats": "_admin_values",
    "ConsumerGroup": "_admin_values",
    "FilterModule": "_admin_values",
    "GroupSettings": "_group_admin",
    "BrokerRole": "_ha_admin",
    "HaStatus": "_ha_admin",
    "KnownMember": "_ha_admin",
    "LeadershipStatus": "_ha_admin",
    "ReplicaStatus": "_ha_admin",
    "DamagedLetters": "_dead_letters",
    "DeadLetters": "_dead_letters",
    "ReplayProgress": "_dead_letters",
    "MessagePlace": "_message_track",
    "MessageTrack": "_message_track",
    "PlaceKind": "_message_track",
    "TrackState": "_message_track",
    "TraceEvent": "_trace",
    "MessageOrigin": "_transit",
    "SentBack": "_send_back",
    "OpenTransaction": "_transaction_admin",
    "ProtomqError": "errors",
}

__all__ = [
    "Producer",
    "AsyncProducer",
    "OutgoingMessage",
    "SendResult",
    "SendStatus",
    "DelayLevel",
    "BatchResult",
    "Reply",
    "TransactionProducer",
    "AsyncTransactionProducer",
    "Transaction",
    "AsyncTransaction",
    "TransactionDecision",
    "TransactionResult",
    "TransactionCheck",
    "PullConsumer",
    "AsyncPullConsumer",
    "QueueListener",
    "PushConsumer",
    "AsyncPushConsumer",
    "PushCounts",
    "Retry",
    "Reject",
    "Suspend",
    "SimpleConsumer",
    "AsyncSimpleConsumer",
    "PoppedQueue",
    "HandledCounts",
    "Hold",
    "Message",
    "ConnectionOptions",
    "MessageQueue",
    "QueueLockInfo",
    "QueueRange",
    "Permission",
    "TopicType",
    "GroupLag",
    "GroupMemberInfo",
    "MemberQueue",
    "MemberReport",
    "Admin",
    "TopicConfig",
    "TopicDescription",
    "QueueStatus",
    "BrokerInfo",
    "BrokerStatus",
    "DamagedQueue",
    "LaneStatus",
    "LogDamage",
    "MissingBroker",
    "RefusedBroker",
    "TopicStats",
    "ConsumerGroup",
    "FilterModule",
    "GroupSettings",
    "BrokerRole",
    "HaStatus",
    "KnownMember",
    "LeadershipStatus",
    "ReplicaStatus",
    "DamagedLetters",
    "DeadLetters",
    "ReplayProgress",
    "MessagePlace",
    "MessageTrack",
    "PlaceKind",
    "TrackState",
    "TraceEvent",
    "MessageOrigin",
    "SentBack",
    "OpenTransaction",
    "ProtomqError",
    "errors",
    "__version__",
]



def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    module_name = _LAZY.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{module_name}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
