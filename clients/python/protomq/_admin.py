"""Admin: topics, brokers and look-ups, for tools and tests. Sync.

A topic lives on brokers, each of which has its own queues of it: what changes a topic is asked of every broker of the cluster
(or of those that are named), what describes it is put together from all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from . import _methods
from ._admin_calls import PAGE_SIZE, AdminCalls, whole
from ._admin_values import (
    BrokerInfo,
    BrokerStatus,
    ConsumerGroup,
    FilterModule,
    MissingBroker,
    QueueStatus,
    TopicConfig,
    TopicDescription,
    TopicStats,
    broker_status_of,
    datetime_of,
    topic_config_of,
)
from ._call_steps import decoded
from ._checks import (
    OFFSET_MAX,
    QUEUE_ID_MAX,
    check_count,
    check_flag,
    check_group,
    check_seconds,
    check_text,
    check_time,
    check_topic,
    check_wanted,
    checked_texts,
    explain_unknown_settings,
)
from ._connection_options import ConnectionOptions, connection_of
from ._dead_letters import DeadLetters, ReplayProgress, list_dead_letters, replay_dead_letters
from ._group_admin import GroupSettings, get_group, list_group_settings, set_group
from ._group_members import GroupMemberInfo, MemberReport, describe_member, group_members
from ._group_offsets import GroupLag, Place, clone_offsets, group_lag, reset_offsets
from ._ha_admin import HaStatus, ha_status, order_lead
from ._late_imports import fork_waits, load_needed_modules
from ._message import Message, field_values
from ._message_track import MessageTrack, track_message
from ._trace import TRACE_TOPIC, TraceEvent, events_of
from ._transaction_admin import OpenTransaction, end_transaction, list_transactions
from ._types import (
    PEER_TIMEOUT_S,
    MessageQueue,
    Permission,
    QueueRange,
    TopicType,
)
from .errors import (
    BrokerNotFoundError,
    GroupNotFoundError,
    NotFoundError,
    PartialResultError,
    ProtomqError,
    TopicNotFoundError,
    WrongTypeError,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message as PbMessage

    from ._transactions import TransactionDecision

REQUEST_TIMEOUT_S = 5.0

_T = TypeVar("_T", bound="PbMessage")

class Admin(AdminCalls):
    """Administration of a cluster. Any thread may call everything.

    A method that asks several brokers goes on when one does not answer, and in the end raises PartialResultError with what the
    others said; if none answers, the error of the first. A broker that the name server had and has no more does not answer either
    (BrokerMissingError), until it is back or `forget_broker` was called.
    """

    @explain_unknown_settings
    def __init__(
        self,
        *,
        namesrv: str | Sequence[str] | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        transport: Literal["auto", "remoting", "grpc"] = "auto",
        client_id: str = "",
        peer_timeout_s: float = PEER_TIMEOUT_S,
        spin: bool = True,
        connection: ConnectionOptions | None = None,
    ) -> None:
        """`request_timeout_s`: of each call to a server. The others are as in Producer."""
        check_seconds("request_timeout_s", request_timeout_s)
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s, spin=spin,
        )  # fmt: skip
        load_needed_modules("protomq.v1.admin_service_pb2", "protomq.v1.topic_pb2")
        super().__init__(connection, request_timeout_s)

    # -- topics ----------------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        topic: str,
        *,
        write_queues: int = 0,
        read_queues: int = 0,
        permission: Permission = Permission.READ_WRITE,
        update: bool = False,
        brokers: Iterable[str] | None = None,
        incarnation: int = 0,
        type: TopicType = TopicType.UNSPECIFIED,
    ) -> dict[str, TopicConfig]:
        """Creates a topic at all brokers or at those named; its configuration by broker.

        0 queues: the broker's default (8). With `update` an existing topic is changed. `incarnation`: the same for the topic at all
        of these brokers (1 to 2^63 - 1); 0: each chooses its own. `type`: which messages it takes; a topic is MIXED unless it is told
        otherwise, and an update that names no type leaves it. Raises TopicExistsError if it exists with another configuration or
        incarnation, InvalidArgumentError, BrokerNotFoundError.
        """
        from .v1 import admin_service_pb2 as pb
        from .v1 import topic_pb2

        check_topic(topic)
        for name, count in (("write_queues", write_queues), ("read_queues", read_queues)):
            check_count(name, count, 0, QUEUE_ID_MAX)
        if not isinstance(permission, Permission):
            raise WrongTypeError(f"permission is a Permission, Permission.READ for instance, not {permission!r}")
        check_flag("update", update)
        check_count("incarnation", incarnation, 0, OFFSET_MAX)
        if not isinstance(type, TopicType):
            raise WrongTypeError(f"type is a TopicType, TopicType.FIFO for instance, not {type!r}")
        kind: Any = int(type)
        number: Any = int(permission)
        wanted = topic_pb2.Topic(
            name=topic,
            write_queues=write_queues,
            read_queues=read_queues or write_queues,
            permission=number,
            incarnation=incarnation,
            type=kind,
        )
        request = pb.CreateTopicRequest(topic=wanted, update=update)
        configs = {}

        def ask(broker: BrokerInfo) -> None:
            answer = self._call(
                broker.address, _methods.CREATE_TOPIC, request, pb.CreateTopicResponse
            )
            configs[broker.broker_name] = topic_config_of(answer.topic)

        failures = self._ask_each(brokers, ask)
        self._routes.invalidate(topic)
        return whole(configs, failures)

    def describe_topic(self, topic: str) -> TopicDescription:
        """Configuration and queues of a topic. Raises TopicNotFoundError."""
        from .v1 import admin_service_pb2 as pb

        check_topic(topic)
        configs: dict[str, TopicConfig] = {}
        queues: list[QueueStatus] = []

        def ask(broker: BrokerInfo) -> None:
            try:
                answer = self._call(
                    broker.address,
                    _methods.DESCRIBE_TOPIC,
                    pb.DescribeTopicRequest(topic=topic),
                    pb.DescribeTopicResponse,
                )
            except TopicNotFoundError:
                return
            configs[broker.broker_name] = topic_config_of(answer.topic)
            queues.extend(
                QueueStatus(
                    MessageQueue(topic, broker.broker_name, item.queue_id),
                    QueueRange(item.min_offset, item.end_offset),
                    datetime_of(item.last_store_time) if item.HasField("last_store_time") else None,
                )
                for item in answer.queues
            )

        failures = self._ask_each(None, ask, topic)
        if not configs:
            raise next(iter(failures.values()), _no_broker_has(topic))
        return whole(TopicDescription(topic, configs, tuple(queues)), failures)

    def delete_topic(self, topic: str, *, brokers: Iterable[str] | None = None) -> list[str]:
        """Deletes a topic, its queues and committed offsets; the brokers that had it. Raises TopicNotFoundError if none had."""
        from .v1 import admin_service_pb2 as pb

        check_topic(topic)
        deleted: list[str] = []

        def ask(broker: BrokerInfo) -> None:
            try:
                self._call(
                    broker.address,
                    _methods.DELETE_TOPIC,
                    pb.DeleteTopicRequest(topic=topic),
                    pb.DeleteTopicResponse,
                )
            except TopicNotFoundError:
                return
            deleted.append(broker.broker_name)

        failures = self._ask_each(brokers, ask, topic)
        self._routes.invalidate(topic)
        if not deleted:
            raise next(iter(failures.values()), _no_broker_has(topic))
        return whole(deleted, failures)

    def list_topic_names(self, *, group_topics: bool = False) -> list[str]:
        """Names of all topics that the name server knows, in order; `group_topics`: those of groups, too (%RETRY%group, %DLQ%group)."""
        from .v1 import route_service_pb2 as pb

        self._check_open()
        names: list[str] = []
        token = ""
        while True:
            request = pb.ListTopicNamesRequest(
                page_size=PAGE_SIZE, page_token=token, group_topics=group_topics
            )
            data = self._routes.ask(
                _methods.LIST_TOPIC_NAMES, request.SerializeToString(), self._request_timeout_s
            )
            answer = decoded(data, pb.ListTopicNamesResponse.FromString)
            names.extend(answer.topics)
            token = answer.next_page_token
            if not token:
                return names

    def list_topics(
        self, broker_name: str | None = None, *, group_topics: bool = False
    ) -> dict[str, list[TopicConfig]]:
        """The topics of a broker, or of each, by broker name; `group_topics`: those of groups, too (%RETRY%group, %DLQ%group)."""
        from .v1 import admin_service_pb2 as pb

        found: dict[str, list[TopicConfig]] = {}

        def ask(broker: BrokerInfo) -> None:
            request = pb.ListTopicsRequest(group_topics=group_topics)
            pages = self._pages(broker, _methods.LIST_TOPICS, request, pb.ListTopicsResponse)
            found[broker.broker_name] = [topic_config_of(one) for page in pages for one in page.topics]

        return whole(found, self._ask_each(_one_or_all(broker_name), ask))

    # -- groups ----------------------------------------------------------------------------------------------------------

    def list_groups(self, topic: str = "") -> list[ConsumerGroup]:
        """The consumer groups that have committed offsets at any broker, by name; `topic`: only in that one.

        A group that has never committed is known to nobody but its members. Raises TopicNotFoundError.
        """
        from .v1 import admin_service_pb2 as pb

        check_topic(topic)
        found: dict[str, set[str]] = {}
        known = False

        def ask(broker: BrokerInfo) -> None:
            nonlocal known
            request = pb.ListGroupsRequest(topic=topic)
            try:
                for page in self._pages(broker, _methods.LIST_GROUPS, request, pb.ListGroupsResponse):
                    known = True
                    for group in page.groups:
                        found.setdefault(group.consumer_group, set()).update(group.topics)
            except TopicNotFoundError:
                return

        failures = self._ask_each(None, ask, topic)
        if topic and not known:
            raise next(iter(failures.values()), _no_broker_has(topic))
        groups = [ConsumerGroup(name, tuple(sorted(found[name]))) for name in sorted(found)]
        return whole(groups, failures)

    def group_lag(
        self, group: str, topic: str = "", *, brokers: Iterable[str] | None = None
    ) -> list[GroupLag]:
        """How far a group is behind, by queue: in all topics in which it has committed, or in all queues of one topic.

        Raises GroupNotFoundError, TopicNotFoundError if no broker knows it.
        """
        return whole(*group_lag(self, group, topic, brokers))

    def group_members(
        self, group: str, *, brokers: Iterable[str] | None = None
    ) -> list[GroupMemberInfo]:
        """Who is in a consumer group now, and which queues each has. Consumers that `assign` are no members."""
        return whole(*group_members(self, group, brokers))

    def describe_member(
        self, group: str, client_id: str, *, nonce: int = 0, stacks: bool = False
    ) -> MemberReport:
        """How a member of a group stands, as it says itself; with what its threads and tasks are doing, if `stacks`.

        `client_id`, `nonce`: as `group_members` tells; 0 for the only member of that name, or one of them. Raises MemberUnknownError,
        RequestTimeoutError if it says nothing in time.
        """
        return describe_member(self, group, client_id, nonce, stacks, self._request_timeout_s)

    def reset_offsets(
        self,
        group: str,
        topic: str,
        to: Place,
        *,
        queue_ids: Iterable[int] = (),
        brokers: Iterable[str] | None = None,
    ) -> list[str]:
        """Has a group go on elsewhere: at "earliest", at "latest" (what has piled up is skipped), at the first message that was stored at a
        time or later, or at an offset. The brokers that did it. Each broker takes it for all queues or for none.

        Members that run go on there within seconds: what they have pulled and not handed out is dropped. They may finish what they work at.
        """
        return whole(*reset_offsets(self, group, topic, to, queue_ids, brokers))

    def clone_offsets(
        self, source: str, group: str, topic: str = "", *, brokers: Iterable[str] | None = None
    ) -> list[str]:
        """Has a group go on where another one is, in all of its topics or in one. The brokers that did it. Raises GroupNotFoundError."""
        return whole(*clone_offsets(self, source, group, topic, brokers))

    def delete_group(
        self, group: str, *, brokers: Iterable[str] | None = None, force: bool = False
    ) -> list[str]:
        """Forgets what a consumer group has committed; the brokers that knew it. Raises GroupNotFoundError if none did.

        A group whose members have pulled within the last minute is refused by their brokers (GroupInUseError) unless `force` is given: a
        member that goes on commits again, and the group is there again.
        """
        from .v1 import admin_service_pb2 as pb

        check_group(group)
        check_flag("force", force)
        deleted: list[str] = []

        def ask(broker: BrokerInfo) -> None:
            try:
                self._call(
                    broker.address,
                    _methods.DELETE_GROUP,
                    pb.DeleteGroupRequest(consumer_group=group, force=force),
                    pb.DeleteGroupResponse,
                )
            except GroupNotFoundError:
                return
            deleted.append(broker.broker_name)

        failures = self._ask_each(brokers, ask)
        if not deleted:
            nobody = GroupNotFoundError(
                f"group {group!r} has committed nothing at any broker",
                metadata={"consumer_group": group},
            )
            raise next(iter(failures.values()), nobody)
        return whole(deleted, failures)

    def get_group(self, group: str) -> GroupSettings:
        """The settings of a consumer group: those with the highest version over all brokers; the defaults if nobody has set it up."""
        return whole(*get_group(self, group))

    def set_group(
        self,
        group: str,
        *,
        orderly: bool | None = None,
        retry_count_max: int | Literal["default"] | None = None,
        retry_delays_ms: Sequence[int] | None = None,
        consume_enabled: bool | None = None,
        broadcast_enabled: bool | None = None,
        brokers: Iterable[str] | None = None,
    ) -> GroupSettings:
        """Changes settings of a consumer group at all brokers or at those named; what is None stays. The settings that hold then.

        `retry_count_max`: retries before a message becomes a dead letter; "default": 16, without limit if `orderly`. `retry_delays_ms`: how
        long each retry waits, the last one standing for all further ones; []: the brokers' delay levels from level 3 on.
        `consume_enabled=False`: brokers refuse pulls of the group, GroupDisabledError. `broadcast_enabled`: for consumers to go by.
        """
        return whole(
            *set_group(
                self,
                group,
                orderly=orderly,
                retry_count_max=retry_count_max,
                retry_delays_ms=retry_delays_ms,
                consume_enabled=consume_enabled,
                broadcast_enabled=broadcast_enabled,
                brokers=brokers,
            )
        )

    def list_group_settings(self) -> list[str]:
        """Names of the groups that were set up at any broker."""
        return whole(*list_group_settings(self))

    # -- transactions ----------------------------------------------------------------------------------------------------

    def list_transactions(
        self,
        *,
        topic: str = "",
        group: str = "",
        message_id: str = "",
        with_messages: bool = False,
        brokers: Iterable[str] | None = None,
    ) -> list[OpenTransaction]:
        """The open transactions of all brokers, the oldest first: all, or those of a topic, a producer group, or a message."""
        return whole(
            *list_transactions(
                self,
                topic=topic,
                group=group,
                message_id=message_id,
                with_messages=with_messages,
                brokers=brokers,
            )
        )

    def end_transaction(self, message_id: str, decision: TransactionDecision) -> OpenTransaction:
        """Commits the open transaction of a message, or rolls it back; what it was. Raises TransactionNotFoundError if none is open."""
        return end_transaction(self, message_id, decision)

    def list_dead_letters(self) -> list[DeadLetters]:
        """The groups that have dead letters, by name. The messages: a consumer of %DLQ%group reads them like any topic."""
        return whole(*list_dead_letters(self))

    def replay_dead_letters(
        self,
        group: str,
        *,
        message_ids: Iterable[str] = (),
        begin: datetime | None = None,
        end: datetime | None = None,
        again: bool = False,
        brokers: Iterable[str] | None = None,
        on_progress: Callable[[ReplayProgress], None] | None = None,
    ) -> ReplayProgress:
        """Sends dead letters of a group to their original topics again: all, those with these ids, or those that died in a time.

        Each is replayed once, however often this is called and wherever it was interrupted, unless `again` is given. Its id stays, its
        attempts begin again, and all groups of that topic get it. `on_progress` is told after each step. Raises TopicNotFoundError if
        there are none.
        """
        return whole(
            *replay_dead_letters(
                self,
                group,
                message_ids=message_ids,
                begin=begin,
                end=end,
                again=again,
                brokers=brokers,
                on_progress=on_progress,
            )
        )

    # -- filters ---------------------------------------------------------------------------------------------------------

    def deploy_filter(
        self, name: str, module: bytes, *, brokers: Iterable[str] | None = None
    ) -> list[str]:
        """Deploys a WebAssembly module at all brokers or at those named, in place of one of that name; the brokers that have it now.

        docs/filters.md says what it exports. Raises IllegalFilterError for what is no such module, InvalidArgumentError, TooManyError,
        UnsupportedError where a broker is installed without WebAssembly.
        """
        with fork_waits:
            from .v1 import filter_service_pb2 as pb

        request = pb.DeployFilterRequest(name=check_text("name", name), module=_module(module))
        deployed: list[str] = []

        def ask(broker: BrokerInfo) -> None:
            self._call(broker.address, _methods.DEPLOY_FILTER, request, pb.DeployFilterResponse)
            deployed.append(broker.broker_name)

        return whole(deployed, self._ask_each(brokers, ask))

    def list_filters(self) -> dict[str, list[FilterModule]]:
        """The modules of each broker, by name."""
        with fork_waits:
            from .v1 import filter_service_pb2 as pb

        found: dict[str, list[FilterModule]] = {}

        def ask(broker: BrokerInfo) -> None:
            pages = self._pages(
                broker, _methods.LIST_FILTERS, pb.ListFiltersRequest(), pb.ListFiltersResponse
            )
            found[broker.broker_name] = [
                FilterModule(one.name, one.size_bytes, one.crc32c) for page in pages for one in page.modules
            ]

        return whole(found, self._ask_each(None, ask))

    def delete_filter(self, name: str, *, brokers: Iterable[str] | None = None) -> list[str]:
        """Deletes a module; the brokers that had it. Consumers that name it get IllegalFilterError from then on."""
        with fork_waits:
            from .v1 import filter_service_pb2 as pb

        request = pb.DeleteFilterRequest(name=check_text("name", name))
        deleted: list[str] = []

        def ask(broker: BrokerInfo) -> None:
            answer = self._call(
                broker.address, _methods.DELETE_FILTER, request, pb.DeleteFilterResponse
            )
            if answer.deleted:
                deleted.append(broker.broker_name)

        return whole(deleted, self._ask_each(brokers, ask))

    # -- brokers ---------------------------------------------------------------------------------------------------------

    def cluster_info(self) -> list[BrokerInfo]:
        """All brokers, by cluster, name and id; slaves too."""
        from .v1 import route_service_pb2 as pb

        return self._cluster(pb.GetClusterInfoRequest())[0]

    def missing_brokers(self, topic: str = "") -> list[MissingBroker]:
        """Brokers that were removed since the name server started and are not back, by name; `topic`: those that had it.

        What they store is in no answer. A name server keeps this in memory: one that was restarted knows of none.
        """
        from .v1 import route_service_pb2 as pb

        return self._cluster(pb.GetClusterInfoRequest(topic=topic))[1]

    def forget_broker(self, broker_name: str) -> None:
        """A missing broker will not come back: no name server misses it any more. What it stores is not touched.

        Raises BrokerNotFoundError if none misses it, NoRouteError if a name server does not answer: call again.
        """
        from .v1 import route_service_pb2 as pb

        self._check_open()
        request = pb.ForgetBrokerRequest(broker_name=broker_name).SerializeToString()
        answers = self._routes.ask_all(_methods.FORGET_BROKER, request, self._request_timeout_s)
        errors = [answer for answer in answers if isinstance(answer, ProtomqError)]
        for error in errors:
            if not isinstance(error, NotFoundError):
                raise error
        if len(errors) == len(answers):
            raise errors[0]

    def broker_status(self, broker_name: str | None = None) -> list[BrokerStatus]:
        """What a broker does, or all of them do."""
        from .v1 import admin_service_pb2 as pb

        answers: list[pb.GetBrokerStatusResponse] = []

        def ask(broker: BrokerInfo) -> None:
            request, answer = pb.GetBrokerStatusRequest(), pb.GetBrokerStatusResponse
            answers.append(self._call(broker.address, _methods.GET_BROKER_STATUS, request, answer))

        failures = self._ask_each(_one_or_all(broker_name), ask)
        states = [broker_status_of(answer) for answer in answers]
        return whole(states, failures)

    def ha_status(self, broker_name: str | None = None) -> list[HaStatus]:
        """How replication stands at all masters and slaves, or at those of one name.

        Raises BrokerNotFoundError if none is registered; PartialResultError if some did not answer.
        """
        states, failures = ha_status(self, broker_name)
        if not states:
            for error in failures.values():
                raise error
            raise BrokerNotFoundError(
                "no broker is registered at the name server"
                if broker_name is None
                else f"no broker of that name is registered: {broker_name}"
            )
        return whole(states, failures)

    def switch_master(self, broker_name: str, broker_id: int | None = None) -> None:
        """Orders the master of a name to give the lead to the slave with this id, or to the one that is furthest; nothing is lost.

        Returns when the order stands in etcd: `ha_status` tells what became of it. It is dropped if no slave in sync has that id, or has
        everything within some seconds. Raises BrokerNotFoundError, UnsupportedError where roles are fixed.
        """
        order_lead(self, broker_name, broker_id, is_unclean=False)

    def promote_unclean(self, broker_name: str, broker_id: int) -> None:
        """Orders the broker with this id to lead, whatever it lacks of what was acknowledged: that is lost.

        It leads when no other master's lease lasts. The old master must have been stopped: cut off from etcd and alone, it would go on
        acknowledging. Raises as `switch_master`.
        """
        order_lead(self, broker_name, broker_id, is_unclean=True)

    def stats(self, topics: Iterable[str] = ()) -> list[TopicStats]:
        """Counters of the topics named, or of all, by topic."""
        from .v1 import admin_service_pb2 as pb

        request = pb.GetStatsRequest(topics=checked_texts("topics", topics))
        sums: dict[str, list[int]] = {}

        def ask(broker: BrokerInfo) -> None:
            answer = self._call(broker.address, _methods.GET_STATS, request, pb.GetStatsResponse)
            for item in answer.topics:
                counters = (item.records_in, item.bytes_in, item.records_out, item.bytes_out)
                known = sums.get(item.topic, (0, 0, 0, 0))
                sums[item.topic] = [a + b for a, b in zip(known, counters, strict=True)]

        failures = self._ask_each(None, ask)
        return whole([TopicStats(topic, *sums[topic]) for topic in sorted(sums)], failures)

    def ping(self, broker_name: str) -> float:
        """Time of a round trip to the broker's admin lane, in seconds."""
        address = self._brokers([check_text("broker_name", broker_name)])[0][0].address
        started_s = time.perf_counter()
        self._ask(address, _methods.PING, ())
        return time.perf_counter() - started_s

    # -- messages --------------------------------------------------------------------------------------------------------

    def query_by_key(
        self,
        topic: str,
        key: str,
        *,
        begin: datetime | None = None,
        end: datetime | None = None,
        count_max: int = 32,
    ) -> list[Message]:
        """Messages with that key, newest first; stored at `begin` or later and before `end` (with time zones). `count_max`: 1 to 256.

        A broker answers with at most 16 MiB of them, 3.5 MiB over gRPC, though with one: ask for older ones with `end`.

        Raises CorruptLogError (from several brokers: PartialResultError) where a message with that key may be damaged: ask for its
        metadata's found_count only, or leave the time of the damage out.
        """
        from .v1 import admin_service_pb2 as pb

        check_topic(topic)
        check_wanted("key", key)
        check_count("count_max", count_max, 1, 256)
        request = pb.QueryMessagesRequest(topic=topic, key=key, record_count_max=count_max)
        if begin is not None:
            check_time("begin", begin)
            request.begin_time.FromMilliseconds(int(begin.timestamp() * 1000))
        if end is not None:
            check_time("end", end)
            request.end_time.FromMilliseconds(int(end.timestamp() * 1000))
        return self._query(request, count_max)

    def query_by_id(self, topic: str, message_id: str) -> Message | None:
        """The message with that id, None if no broker has it. Raises as `query_by_key` if it may be damaged."""
        from .v1 import admin_service_pb2 as pb

        check_topic(topic)
        check_wanted("message_id", message_id)
        request = pb.QueryMessagesRequest(topic=topic, message_id=message_id, record_count_max=1)
        try:
            found = self._query(request, 1)
        except PartialResultError as error:
            found = error.result
            if not found:
                raise PartialResultError(str(error), None, error.failures) from error
        return found[0] if found else None

    def track_message(
        self, message_id: str, *, brokers: Iterable[str] | None = None
    ) -> MessageTrack:
        """Every place of a message in the brokers' logs, the oldest first, and what groups have done with it there.

        A message keeps its id wherever it is moved: delayed, retried, committed, dead. One that waits for its delay is in no queue yet, and
        has no place. Raises InvalidArgumentError for what is no message id.
        """
        return whole(*track_message(self, message_id, brokers))

    def trace_of(self, message_id: str) -> list[TraceEvent]:
        """What clients that trace (`trace=True`) did with a message, the oldest first; empty if none of them told anything.

        Raises as `query_by_key`.
        """
        check_wanted("message_id", message_id)
        message_id = message_id.upper()
        try:
            found = self.query_by_key(TRACE_TOPIC, message_id, count_max=256)
        except PartialResultError as error:
            events = events_of(error.result, message_id)
            raise PartialResultError(str(error), events, error.failures) from error
        return events_of(found, message_id)

    # -- end -------------------------------------------------------------------------------------------------------------

    def transport(self, broker_name: str) -> str:
        """ "remoting", "grpc", or "" before the first call to that broker."""
        return self._transport.kind(self._brokers([check_text("broker_name", broker_name)])[0][0].address)

    def _query(self, request: Any, count_max: int) -> list[Message]:
        from .v1 import admin_service_pb2 as pb

        found: list[Message] = []
        payload = request.SerializeToString()

        def ask(broker: BrokerInfo) -> None:
            try:
                data = self._ask(broker.address, _methods.QUERY_MESSAGES, (payload,))
            except NotFoundError:
                return
            answer = decoded(data, pb.QueryMessagesResponse.FromString)
            # As they stand in the answer, not serialised again: their CRC covers octets.
            for record, octets in zip(answer.records, field_values(data, 1), strict=True):
                queue = MessageQueue(record.topic, broker.broker_name, record.queue_id)
                found.append(Message.from_record(octets, queue, record.queue_offset))

        failures = self._ask_each(None, ask, request.topic)
        found.sort(key=lambda message: message.store_time_ms, reverse=True)
        return whole(found[:count_max], failures)

def _one_or_all(broker_name: str | None) -> list[str] | None:
    return None if broker_name is None else [broker_name]


def _module(module: bytes) -> bytes:
    if not isinstance(module, bytes):
        raise WrongTypeError(f"module is bytes, those of a .wasm file, not {type(module).__name__}")
    return module


def _no_broker_has(topic: str) -> TopicNotFoundError:
    return TopicNotFoundError(f"no broker has the topic {topic!r}", metadata={"topic": topic})
