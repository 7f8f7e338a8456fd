"""Admin: topics, brokers and look-ups, for tools and tests. Sync.

A topic lives on brokers, and each broker has its own queues of it. So a change goes to every broker of the cluster (or to those that are
named), and a description combines the answers of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from . import _methods
from ._admin_calls import AdminCalls, whole
from ._admin_values import (
    BrokerInfo,
    BrokerStatus,
    ConsumerGroup,
    FilterModule,
    MissingBroker,
    RefusedBroker,
    TopicConfig,
    TopicDescription,
    TopicStats,
    broker_status_of,
    refused_broker_of,
)
from ._checks import (
    check_seconds,
    check_text,
    check_wanted,
    checked_texts,
    explain_unknown_settings,
)
from ._connection_options import ConnectionOptions, connection_of
from ._dead_letters import DeadLetters, ReplayProgress, list_dead_letters, replay_dead_letters
from ._decoding import decoded
from ._filter_admin import delete_filter, deploy_filter, list_filters
from ._group_admin import (
    GroupSettings,
    delete_group,
    get_group,
    list_group_settings,
    list_groups,
    set_group,
)
from ._group_locks import QueueLockInfo, queue_locks
from ._group_members import GroupMemberInfo, MemberReport, describe_member, group_members
from ._group_offsets import GroupLag, Place, clone_offsets, group_lag, reset_offsets
from ._ha_admin import HaStatus, forget_member, ha_status, order_lead, wait_for_lead, withdraw_order
from ._late_imports import load_needed_modules
from ._message import Message
from ._message_queries import query_by_id, query_by_key
from ._message_track import MessageTrack, track_message
from ._topic_admin import create_topic, delete_topic, describe_topic, list_topics
from ._trace import TraceEvent, events_of
from ._transaction_admin import OpenTransaction, end_transaction, list_transactions
from ._types import PEER_TIMEOUT_S, Permission, TopicType
from .errors import (
    ConfigurationError,
    NotFoundError,
    PartialResultError,
    ProtomqError,
)
from .wire.record import decode_message_id
from .wire.topics import TRACE_TOPIC

if TYPE_CHECKING:
    from ._transactions import TransactionDecision

REQUEST_TIMEOUT_S = 5.0


class Admin(AdminCalls):
    """Administration of a cluster. Any thread may call everything.

    A method that asks several brokers goes on when one does not answer. In the end it raises PartialResultError with the answers of the
    others, or the error of the first if none answered. A broker that the name server misses counts as one that does not answer
    (BrokerMissingError), until it is back or somebody calls `forget_broker`. So does one of which only slaves are registered
    (NoRouteError). Methods that read what slaves have, too, then ask a slave: its answer is part of the result.
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
        silence_s: float = 0.0,
        connection: ConnectionOptions | None = None,
    ) -> None:
        """`request_timeout_s`: time-out of each call to a server. `silence_s`: a broker that did not answer is not asked again for that
        long, but counts as silent. So a program that asks for many things waits once. A change is not sent to it meanwhile: its error is
        ConnectFailedError. The others are as in Producer.
        """
        check_seconds("request_timeout_s", request_timeout_s)
        check_seconds("silence_s", silence_s, zero=True)
        connection = connection_of(
            connection, namesrv=namesrv, transport=transport, client_id=client_id, peer_timeout_s=peer_timeout_s, spin=spin,
        )  # fmt: skip
        load_needed_modules("protomq.v1.admin_service_pb2", "protomq.v1.topic_pb2")
        super().__init__(connection, request_timeout_s, silence_s)

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
        closed_from: Permission = Permission.UNSPECIFIED,
        only_if: TopicConfig | None = None,
    ) -> dict[str, TopicConfig]:
        """Creates a topic at all brokers or at those named. Returns its configuration by broker.

        0 queues: the broker's default (8). With `update` an existing topic is changed. `incarnation`: the same for the topic at all of
        these brokers (1 to 2^63 - 1); 0: each chooses its own. `type`: which messages it takes. The default is MIXED; an update that names
        no type leaves it. `closed_from`: the permission to note, to be given back later. `only_if`: the topic as you have seen it. If it
        is another one by now, it stays as it is, and TopicExistsError or TopicNotFoundError is raised. Brokers of earlier versions change
        it all the same. If groups have not consumed what stands in read queues that the topic loses, a RuntimeWarning says so. Raises
        TopicExistsError if it exists with another configuration or incarnation, InvalidArgumentError, BrokerNotFoundError.
        """
        return whole(
            *create_topic(
                self,
                topic,
                write_queues=write_queues,
                read_queues=read_queues,
                permission=permission,
                update=update,
                brokers=brokers,
                incarnation=incarnation,
                kind=type,
                closed_from=closed_from,
                only_if=only_if,
            )
        )

    def describe_topic(self, topic: str, *, brokers: Iterable[str] | None = None) -> TopicDescription:
        """Configuration and queues of a topic. Raises TopicNotFoundError."""
        return whole(*describe_topic(self, topic, brokers))

    def delete_topic(self, topic: str, *, brokers: Iterable[str] | None = None) -> list[str]:
        """Deletes a topic, its queues and committed offsets. Returns the brokers that had it. Raises TopicNotFoundError if none had."""
        return whole(*delete_topic(self, topic, brokers))

    def list_topic_names(self, *, group_topics: bool = False) -> list[str]:
        """Returns the names of all topics that the name server knows, sorted. `group_topics`: also those of groups (%RETRY%group,
        %DLQ%group).
        """
        self._check_open()
        return self._routes.topic_names(self._request_timeout_s, group_topics=group_topics)

    def list_topics(
        self, broker_name: str | None = None, *, group_topics: bool = False
    ) -> dict[str, list[TopicConfig]]:
        """Returns the topics of a broker, or of each, by broker name. `group_topics`: also those of groups (%RETRY%group, %DLQ%group)."""
        return whole(*list_topics(self, _one_or_all(broker_name), group_topics=group_topics))

    # -- groups ----------------------------------------------------------------------------------------------------------

    def list_groups(self, topic: str = "") -> list[ConsumerGroup]:
        """The consumer groups that have committed offsets or popped at any broker, by name; `topic`: only in that one.

        Brokers do not list a group that has done neither. Raises TopicNotFoundError.
        """
        return whole(*list_groups(self, topic))

    def group_lag(
        self, group: str, topic: str = "", *, brokers: Iterable[str] | None = None
    ) -> list[GroupLag]:
        """Returns the lag of a group by queue: of all topics in which it has committed or popped, or of one topic.

        A queue in which it has done neither lags by all that is stored.

        Raises GroupNotFoundError, TopicNotFoundError if no broker knows it.
        """
        return whole(*group_lag(self, group, topic, brokers))

    def group_members(
        self, group: str, *, brokers: Iterable[str] | None = None
    ) -> list[GroupMemberInfo]:
        """Returns the present members of a consumer group, and the queues of each. Consumers that `assign` are no members."""
        return whole(*group_members(self, group, brokers))

    def queue_locks(self, group: str, *, brokers: Iterable[str] | None = None) -> list[QueueLockInfo]:
        """Returns the queues that members of a group have locked, by queue, without those that nobody has locked."""
        return whole(*queue_locks(self, group, brokers))

    def describe_member(
        self, group: str, client_id: str, *, nonce: int = 0, stacks: bool = False
    ) -> MemberReport:
        """Returns the report of a group's member about itself; with `stacks` also what its threads and tasks are doing.

        `client_id`, `nonce`: from `group_members`; nonce 0: any member of that name. Raises MemberUnknownError, or RequestTimeoutError if
        the member does not answer in time.
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
        """Moves a group's offsets: to "earliest", to "latest" (skips its backlog), to the first message stored at a time or later, or to an
        offset. "start" and "end" are the same places. An offset that a queue does not have becomes the nearest that it has: its end, or
        its first message. Returns the brokers that did it. Each broker does it for all queues or for none.

        Running members go on there within seconds. They drop messages that they have pulled and not handed out, and may finish their
        present ones. If the group pops, so do its next pops. Messages that its members hold are theirs no more (StaleReceiptError).
        """
        return whole(*reset_offsets(self, group, topic, to, queue_ids, brokers))

    def clone_offsets(
        self, source: str, group: str, topic: str = "", *, brokers: Iterable[str] | None = None
    ) -> list[str]:
        """Makes a group go on where another one is, in all its topics or in one. Returns the brokers that did it.

        It is a reset. If the other group pops, the group begins at the first message that is not acknowledged there. Raises
        GroupNotFoundError.
        """
        return whole(*clone_offsets(self, source, group, topic, brokers))

    def delete_group(
        self, group: str, *, brokers: Iterable[str] | None = None, force: bool = False
    ) -> list[str]:
        """Deletes the offsets of a consumer group. Returns the brokers that knew it. Raises GroupNotFoundError if none did.

        Brokers refuse to delete a group that has members or had pulls within the last minute (GroupInUseError), unless `force` is given. A
        member that goes on would commit, and so create the group again.
        """
        return whole(*delete_group(self, group, brokers, force=force))

    def get_group(self, group: str) -> GroupSettings:
        """Returns the settings of a consumer group with the highest version over all brokers; the defaults if nobody has set it up."""
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
        """Changes settings of a consumer group at all brokers or at those named; None leaves a setting. Returns the new settings.

        `retry_count_max`: retries before a message becomes a dead letter; "default": 16, without limit if `orderly`. `retry_delays_ms`: how
        long each retry waits, the last one standing for all further ones; []: the brokers' delay levels from level 3 on.
        `consume_enabled=False`: brokers refuse pulls of the group (GroupDisabledError). `broadcast_enabled`: brokers only store it;
        consumers read it. Raises ConfigurationError if nothing is set.
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
        """Names of the groups that have settings at any broker."""
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

    def end_transaction(
        self, message_id: str, decision: TransactionDecision, *, broker: str | None = None
    ) -> OpenTransaction:
        """Commits or rolls back the open transaction of a message. Returns what it was. Raises TransactionNotFoundError if none is open,
        ConfigurationError if several are, as where a store was copied under another name. `broker`: the one at which it ends.
        """
        return end_transaction(self, message_id, decision, broker)

    def list_dead_letters(self, *, brokers: Iterable[str] | None = None) -> list[DeadLetters]:
        """Returns the groups that have dead letters, by name. Read the messages with a consumer of %DLQ%group, as in any topic."""
        return whole(*list_dead_letters(self, brokers))

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
        """Sends dead letters of a group to their original topics again: all, those with these ids, or those that died from `begin` to
        `end`.

        Each letter is replayed once, even if you call this again or it was interrupted, unless `again` is given. It keeps its id, its
        attempts begin again, and all groups of that topic get it. `on_progress` is called after each step. Raises TopicNotFoundError if
        the group has none, or is unknown. Raises ConfigurationError for a `begin` that lies ahead, or an `end` that is not after it.
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
        """Deploys a WebAssembly module at all brokers or at those named, and replaces one of that name. Returns the brokers that have it
        now: masters by name, then their slaves as `name/id`.

        What a module must export is in docs/filters.md. PartialResultError names a slave that does not answer; it copies the module from
        its master when it is back. Raises IllegalFilterError for an invalid module, InvalidArgumentError, TooManyError, UnsupportedError if
        a broker is installed without WebAssembly.
        """
        return whole(*deploy_filter(self, name, module, brokers))

    def list_filters(self) -> dict[str, list[FilterModule]]:
        """The modules of each broker: of masters by name, of slaves by `name/id`. A broker without modules has an empty list."""
        return whole(*list_filters(self))

    def delete_filter(self, name: str, *, brokers: Iterable[str] | None = None) -> list[str]:
        """Deletes a module. Returns the brokers that had it, labelled as by `deploy_filter`. Consumers that name it get
        IllegalFilterError from then on.
        """
        return whole(*delete_filter(self, name, brokers))

    # -- brokers ---------------------------------------------------------------------------------------------------------

    def missing_brokers(self, topic: str = "") -> list[MissingBroker]:
        """Brokers that were removed since the name server started and are not back, by name; `topic`: those that had it.

        Answers lack what these brokers store. A name server keeps this list in memory, so it is empty after a restart.
        """
        from .v1 import route_service_pb2 as pb

        return self._cluster(pb.GetClusterInfoRequest(topic=topic))[1]

    def refused_brokers(self) -> list[RefusedBroker]:
        """Brokers that a name server has refused within the last 5 minutes, and that have not registered since, by name, id and address.

        All name servers are asked. Of one that several refuse, the latest refusal is told. Raises NoRouteError if no name server answers.
        """
        from .v1 import route_service_pb2 as pb

        self._check_open()
        answers = self._routes.ask_all(_methods.GET_CLUSTER_INFO, pb.GetClusterInfoRequest().SerializeToString(), self._request_timeout_s)
        errors = [answer for answer in answers if isinstance(answer, ProtomqError)]
        if len(errors) == len(answers):
            raise errors[0]
        found: dict[tuple[str, int, str], RefusedBroker] = {}
        for answer in answers:
            if isinstance(answer, ProtomqError):
                continue
            for refused in map(refused_broker_of, decoded(answer, pb.GetClusterInfoResponse.FromString).refused_brokers):
                key = (refused.broker.broker_name, refused.broker.broker_id, refused.broker.grpc_address)
                if key not in found or found[key].refused_time < refused.refused_time:
                    found[key] = refused
        return [found[key] for key in sorted(found)]

    def forget_broker(self, broker_name: str) -> None:
        """Makes all name servers stop missing a broker that will not come back. Its stored messages stay as they are.

        Raises BrokerNotFoundError if none misses it, NoRouteError if a name server does not answer; then call again.
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
        """Returns the status of a broker, or of all brokers."""
        from .v1 import admin_service_pb2 as pb

        def ask(broker: BrokerInfo) -> pb.GetBrokerStatusResponse:
            request, answer = pb.GetBrokerStatusRequest(), pb.GetBrokerStatusResponse
            return self._call(broker.address, _methods.GET_BROKER_STATUS, request, answer)

        answers, failures = self._answers(_one_or_all(broker_name), ask)
        return whole([broker_status_of(answer) for _, answer in answers], failures)

    def ha_status(self, broker_name: str | None = None) -> list[HaStatus]:
        """Returns the state of replication at all masters and slaves, or at those of one name.

        Elected brokers that do not answer are in `HaStatus.away` of those that do. Raises BrokerNotFoundError if none is registered;
        PartialResultError if some did not answer, are missing, or have slaves alone: its `result` has what the others say.
        """
        states, failures = ha_status(self, broker_name)
        if not states:
            raise next(iter(failures.values()))
        return whole(states, failures)

    def switch_master(self, broker_name: str, broker_id: int | None = None, *, timeout_s: float = 15.0) -> None:
        """Orders the master of a name to give the lead to the slave with this id, or to the slave with the longest log. Nothing is lost.

        Returns when another broker leads, and takes the calls of this object; at once if the one with this id leads already. The master
        drops the order if no slave in sync has that id, or if the slave does not have the whole log in time. Then nobody else leads after
        `timeout_s`, and RequestTimeoutError is raised. Raises BrokerNotFoundError, UnsupportedError where roles are fixed.
        """
        ordered = order_lead(self, broker_name, broker_id, is_unclean=False)
        if ordered is not None:
            wait_for_lead(self, broker_name, ordered[0], timeout_s)

    def promote_unclean(self, broker_name: str, broker_id: int) -> str:
        """Orders the broker with this id to lead, even if it lacks acknowledged messages: those are lost.

        Returns when the order is in etcd; `ha_status` shows its outcome. It leads once no other master has a lease. Stop the old master
        before: one that leads takes the order back. If it is alone and cut off from etcd, it would go on acknowledging. Once etcd names no
        master, this order replaces one that nobody has taken, which is returned ("": none stood); before, OrderPendingError is raised.
        Raises BrokerNotFoundError, and UnsupportedError where roles are fixed.
        """
        ordered = order_lead(self, broker_name, broker_id, is_unclean=True)
        assert ordered is not None, "it is ordered whoever leads"
        return ordered[1]

    def withdraw_order(self, broker_name: str) -> str:
        """Takes back an order about who leads that nobody has taken, of any operator. Returns which one it was, "" if none stood.

        A switch that is under way ends, and the master takes sends again. Raises OrderPendingError if the order was taken or replaced
        at the same time, BrokerNotFoundError, and UnsupportedError where roles are fixed.
        """
        return withdraw_order(self, broker_name)

    def forget_member(self, broker_name: str, broker_id: int) -> None:
        """Makes the brokers of a name forget one of them that was removed for good: `HaStatus.away` has it no more. Nothing else changes.

        If it comes back all the same, it joins as before. Raises BrokerNotFoundError if they know no such broker, or if it is in the
        in-sync set: it may have what nobody else has. Raises UnsupportedError where roles are fixed.
        """
        forget_member(self, broker_name, broker_id)

    def stats(self, topics: Iterable[str] = ()) -> list[TopicStats]:
        """Returns counters of the topics named, or of all, by topic."""
        from .v1 import admin_service_pb2 as pb

        request = pb.GetStatsRequest(topics=checked_texts("topics", topics))
        sums: dict[str, list[int]] = {}

        def ask(broker: BrokerInfo) -> pb.GetStatsResponse:
            return self._call(broker.address, _methods.GET_STATS, request, pb.GetStatsResponse)

        answers, failures = self._answers(None, ask)
        for item in (item for _, answer in answers for item in answer.topics):
            counters = (item.records_in, item.bytes_in, item.records_out, item.bytes_out)
            known = sums.get(item.topic, (0, 0, 0, 0))
            sums[item.topic] = [a + b for a, b in zip(known, counters, strict=True)]
        return whole([TopicStats(topic, *sums[topic]) for topic in sorted(sums)], failures)

    def ping(self, broker_name: str) -> float:
        """Returns the time of a round trip to the broker's admin lane, in seconds."""
        address = self._master(check_text("broker_name", broker_name)).address
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

        A broker answers with at most 16 MiB (3.5 MiB over gRPC), but always with one message: ask for older ones with `end`.

        Raises CorruptLogError (from several brokers: PartialResultError) if a message with that key may be damaged. Then ask only for the
        found_count messages that its metadata names, or choose `begin` and `end` to leave the damage out.
        """
        return whole(
            *query_by_key(self, topic, key, begin=begin, end=end, count_max=count_max)
        )

    def query_by_id(self, topic: str, message_id: str) -> Message | None:
        """Returns the message with that id; None if no broker has it. Raises as `query_by_key` if it may be damaged."""
        return whole(*query_by_id(self, topic, message_id))

    def track_message(
        self, message_id: str, *, brokers: Iterable[str] | None = None
    ) -> MessageTrack:
        """Returns every place of a message in the brokers' logs, oldest first, and what groups have done with it there.

        A message keeps its id when it is moved: delayed, retried, committed, dead. A message that waits for its delay is in no queue yet,
        so it has no place. Raises InvalidArgumentError for an invalid message id.
        """
        return whole(*track_message(self, message_id, brokers))

    def trace_of(self, message_id: str) -> list[TraceEvent]:
        """Returns what tracing clients (`trace=True`) did with a message, oldest first; empty if none reported anything.

        Raises as `query_by_key`, and ConfigurationError for an invalid message id.
        """
        message_id = _checked_message_id(message_id).upper()
        try:
            found = self.query_by_key(TRACE_TOPIC, message_id, count_max=256)
        except PartialResultError as error:
            events = events_of(error.result, message_id)
            raise PartialResultError(str(error), events, error.failures) from error
        return events_of(found, message_id)

    # -- end -------------------------------------------------------------------------------------------------------------

    def transport(self, broker_name: str) -> str:
        """ "remoting", "grpc", or "" before the first call to that broker."""
        return self._transport.kind(self._master(check_text("broker_name", broker_name)).address)


def _checked_message_id(message_id: object) -> str:
    text = check_wanted("message_id", message_id)
    try:
        decode_message_id(text)
    except ValueError as error:
        raise ConfigurationError(f"message_id: {error}") from None
    return text


def _one_or_all(broker_name: str | None) -> list[str] | None:
    return None if broker_name is None else [broker_name]
