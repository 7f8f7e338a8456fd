"""The methods that the SDK calls: path, number and lane, as the .proto files have them.

Written once here, so that no descriptor has to be loaded for a first call; a test compares them with the descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ._transport_options import HELD, SOON, Watch
from ._types import MethodInfo

LANE_ROUTE: Final = 1
LANE_SEND: Final = 2
LANE_PULL: Final = 3
LANE_CONSUMER: Final = 4
LANE_ADMIN: Final = 5
LANE_POP: Final = 6
LANE_HA: Final = 8

_V1: Final = "/protomq.v1."

GET_ROUTE: Final = MethodInfo(_V1 + "RouteService/GetRoute", 0x0104, LANE_ROUTE)
LIST_TOPIC_NAMES: Final = MethodInfo(_V1 + "RouteService/ListTopicNames", 0x0106, LANE_ROUTE)
GET_CLUSTER_INFO: Final = MethodInfo(_V1 + "RouteService/GetClusterInfo", 0x0107, LANE_ROUTE)
FORGET_BROKER: Final = MethodInfo(_V1 + "RouteService/ForgetBroker", 0x0108, LANE_ROUTE)

SEND: Final = MethodInfo(_V1 + "SendService/Send", 0x0201, LANE_SEND)
RECALL_MESSAGE: Final = MethodInfo(_V1 + "SendService/RecallMessage", 0x0202, LANE_SEND)

PULL: Final = MethodInfo(_V1 + "PullService/Pull", 0x0301, LANE_PULL)

POP: Final = MethodInfo(_V1 + "PopService/Pop", 0x0A01, LANE_POP)
ACK: Final = MethodInfo(_V1 + "PopService/Ack", 0x0A02, LANE_SEND)
CHANGE_INVISIBLE: Final = MethodInfo(_V1 + "PopService/ChangeInvisible", 0x0A03, LANE_SEND)
GIVE_UP_POP: Final = MethodInfo(_V1 + "PopService/GiveUpPop", 0x0A04, LANE_POP)

COMMIT_OFFSETS: Final = MethodInfo(_V1 + "ConsumerService/CommitOffsets", 0x0401, LANE_CONSUMER)
GET_OFFSETS: Final = MethodInfo(_V1 + "ConsumerService/GetOffsets", 0x0402, LANE_CONSUMER)
GET_QUEUE_RANGE: Final = MethodInfo(_V1 + "ConsumerService/GetQueueRange", 0x0403, LANE_CONSUMER)
SEARCH_OFFSET: Final = MethodInfo(_V1 + "ConsumerService/SearchOffset", 0x0404, LANE_CONSUMER)
GET_LAG: Final = MethodInfo(_V1 + "ConsumerService/GetLag", 0x0405, LANE_CONSUMER)
RESET_OFFSETS: Final = MethodInfo(_V1 + "ConsumerService/ResetOffsets", 0x0406, LANE_CONSUMER)
CLONE_OFFSETS: Final = MethodInfo(_V1 + "ConsumerService/CloneOffsets", 0x0407, LANE_CONSUMER)

CREATE_TOPIC: Final = MethodInfo(_V1 + "AdminService/CreateTopic", 0x0501, LANE_ADMIN)
DESCRIBE_TOPIC: Final = MethodInfo(_V1 + "AdminService/DescribeTopic", 0x0502, LANE_ADMIN)
DELETE_TOPIC: Final = MethodInfo(_V1 + "AdminService/DeleteTopic", 0x0503, LANE_ADMIN)
LIST_TOPICS: Final = MethodInfo(_V1 + "AdminService/ListTopics", 0x0504, LANE_ADMIN)
GET_BROKER_STATUS: Final = MethodInfo(_V1 + "AdminService/GetBrokerStatus", 0x0505, LANE_ADMIN)
GET_STATS: Final = MethodInfo(_V1 + "AdminService/GetStats", 0x0506, LANE_ADMIN)
QUERY_MESSAGES: Final = MethodInfo(_V1 + "AdminService/QueryMessages", 0x0507, LANE_ADMIN)
PING: Final = MethodInfo(_V1 + "AdminService/Ping", 0x0508, LANE_ADMIN)
LIST_GROUPS: Final = MethodInfo(_V1 + "AdminService/ListGroups", 0x0509, LANE_ADMIN)
DELETE_GROUP: Final = MethodInfo(_V1 + "AdminService/DeleteGroup", 0x050A, LANE_ADMIN)

WAIT_FOR_REPLIES: Final = MethodInfo(
    _V1 + "ReplyService/WaitForReplies", 0x0D01, LANE_CONSUMER
)
REPLY: Final = MethodInfo(_V1 + "ReplyService/Reply", 0x0D02, LANE_CONSUMER)

PUT_GROUP: Final = MethodInfo(_V1 + "GroupService/PutGroup", 0x0601, LANE_CONSUMER)
GET_GROUP: Final = MethodInfo(_V1 + "GroupService/GetGroup", 0x0602, LANE_CONSUMER)
LIST_GROUP_SETTINGS: Final = MethodInfo(
    _V1 + "GroupService/ListGroupSettings", 0x0603, LANE_CONSUMER
)
SEND_BACK: Final = MethodInfo(_V1 + "GroupService/SendBack", 0x0604, LANE_CONSUMER)
CREATE_RETRY_TOPIC: Final = MethodInfo(
    _V1 + "GroupService/CreateRetryTopic", 0x0605, LANE_CONSUMER
)

HOLD_MEMBERSHIP: Final = MethodInfo(
    _V1 + "MembershipService/HoldMembership", 0x0B01, LANE_CONSUMER
)
LEAVE_GROUP: Final = MethodInfo(_V1 + "MembershipService/LeaveGroup", 0x0B02, LANE_CONSUMER)
LIST_MEMBERS: Final = MethodInfo(_V1 + "MembershipService/ListMembers", 0x0B03, LANE_CONSUMER)
DESCRIBE_MEMBER: Final = MethodInfo(
    _V1 + "MembershipService/DescribeMember", 0x0B04, LANE_CONSUMER
)

LOCK_QUEUES: Final = MethodInfo(_V1 + "QueueLockService/LockQueues", 0x1101, LANE_CONSUMER)
UNLOCK_QUEUES: Final = MethodInfo(_V1 + "QueueLockService/UnlockQueues", 0x1102, LANE_CONSUMER)
LIST_QUEUE_LOCKS: Final = MethodInfo(
    _V1 + "QueueLockService/ListQueueLocks", 0x1103, LANE_CONSUMER
)

LIST_DEAD_LETTERS: Final = MethodInfo(
    _V1 + "DeadLetterService/ListDeadLetters", 0x0701, LANE_ADMIN
)
REPLAY_DEAD_LETTERS: Final = MethodInfo(
    _V1 + "DeadLetterService/ReplayDeadLetters", 0x0702, LANE_ADMIN
)

GET_HA_STATUS: Final = MethodInfo(_V1 + "HaService/GetHaStatus", 0x0804, LANE_HA)
ORDER_LEAD: Final = MethodInfo(_V1 + "HaService/OrderLead", 0x0805, LANE_ADMIN)
FORGET_MEMBER: Final = MethodInfo(_V1 + "HaService/ForgetMember", 0x0806, LANE_ADMIN)

END_TRANSACTION: Final = MethodInfo(_V1 + "TransactionService/EndTransaction", 0x0901, LANE_SEND)
WAIT_FOR_CHECKS: Final = MethodInfo(_V1 + "TransactionService/WaitForChecks", 0x0902, LANE_SEND)
LIST_TRANSACTIONS: Final = MethodInfo(
    _V1 + "TransactionService/ListTransactions", 0x0903, LANE_SEND
)

TRACK_MESSAGE: Final = MethodInfo(_V1 + "TrackService/TrackMessage", 0x0E01, LANE_ADMIN)

DEPLOY_FILTER: Final = MethodInfo(_V1 + "FilterService/DeployFilter", 0x0C01, LANE_ADMIN)
LIST_FILTERS: Final = MethodInfo(_V1 + "FilterService/ListFilters", 0x0C02, LANE_ADMIN)
DELETE_FILTER: Final = MethodInfo(_V1 + "FilterService/DeleteFilter", 0x0C03, LANE_ADMIN)

WATCHED: Final[Mapping[int, Watch]] = {
    SEND.method_id: SOON,  # A repeat is known by its producer id and sequence,
    RECALL_MESSAGE.method_id: SOON,  # ... or answered "recalled before".
    END_TRANSACTION.method_id: SOON,  # By the handle of the transaction.
    ACK.method_id: SOON,  # By receipt and offset.
    CHANGE_INVISIBLE.method_id: SOON,
    REPLY.method_id: SOON,  # By the id of the request's call.
    SEND_BACK.method_id: SOON,  # By its request id.
    COMMIT_OFFSETS.method_id: SOON,  # It sets what it set before.
    PULL.method_id: HELD,  # It only reads.
    HOLD_MEMBERSHIP.method_id: HELD,  # It says what the member has, whatever it said before.
    POP.method_id: HELD,  # What the lost answer had comes again, as after any lost answer.
    WAIT_FOR_REPLIES.method_id: HELD,  # Replies stay at the broker until it hears that they have come.
}
"""Calls that may be made twice, and end early where their server is silent, and another one has taken its name: see
`SyncTransport.is_replaced`.
"""

HELD_METHODS: Final = frozenset(
    method.method_id for method in (PULL, POP, HOLD_MEMBERSHIP, WAIT_FOR_REPLIES, WAIT_FOR_CHECKS)
)
"""Calls that a server holds until there is something. They end with their client: else it would be told what it does not take any more."""

GIVEN_UP: Final = frozenset((PULL.method_id, POP.method_id))
"""Held calls of which a server hears that nobody waits any more: a pop would take messages that come later. Of others one may not hear: a
member would be gone. A wait for replies, or for checks, is taken over by the next one, and what it was given is given again.
"""

REPEATABLE: Final = frozenset(
    method.method_id
    for method in (
        GET_ROUTE, LIST_TOPIC_NAMES, GET_CLUSTER_INFO,
        COMMIT_OFFSETS, GET_OFFSETS, GET_QUEUE_RANGE, SEARCH_OFFSET, GET_LAG,
        DESCRIBE_TOPIC, LIST_TOPICS, GET_BROKER_STATUS, GET_STATS, QUERY_MESSAGES, PING, LIST_GROUPS,
        GET_GROUP, LIST_GROUP_SETTINGS, CREATE_RETRY_TOPIC,
        LIST_MEMBERS, LIST_QUEUE_LOCKS, LIST_DEAD_LETTERS, GET_HA_STATUS, LIST_TRANSACTIONS, TRACK_MESSAGE, LIST_FILTERS,
    )
)  # fmt: skip
"""Methods that only read, or whose requests may be carried out twice, and that the server does not hold. Of a send, an acknowledgement
and the like the caller knows better what a second one does."""

LOOKED_AT_FIRST: Final = frozenset(
    method.method_id
    for method in (
        ACK, CHANGE_INVISIBLE, RECALL_MESSAGE,
        CREATE_TOPIC, DELETE_TOPIC, PUT_GROUP, DELETE_GROUP, RESET_OFFSETS, CLONE_OFFSETS,
        REPLAY_DEAD_LETTERS, DEPLOY_FILTER, DELETE_FILTER, ORDER_LEAD, FORGET_MEMBER, FORGET_BROKER,
    )
)  # fmt: skip
"""Of these a second try cannot tell whether the first was done, or came too late. So an idle connection is not trusted: its server may have
closed it, and nothing is to be sent to nobody. A broker that comes to lead closes all that it had as a slave."""
