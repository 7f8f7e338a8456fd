"""GroupService: settings of consumer groups, and messages that they send back. On the consumer lane: the admin lane may be busy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from protomq.v1.group_service_pb2 import (
    CreateRetryTopicRequest,
    CreateRetryTopicResponse,
    GetGroupRequest,
    GetGroupResponse,
    ListGroupSettingsRequest,
    ListGroupSettingsResponse,
    PutGroupRequest,
    PutGroupResponse,
)
from protomq.wire.topics import retry_topic
from protomq_runtime.dispatch import drained, raw
from protomq_runtime.errors import invalid_argument, unparsable

from .admin_service import check_page_token, page_size_of
from .gathered_calls import GatheredCalls
from .store.state.group_settings import (
    RETRY_DELAY_MAX_MS,
    VERSION_PUT_MAX,
    GroupSettingsError,
    group_from_message,
    group_to_message,
    retry_delays_of,
)
from .store.state.topics import require_group_name, topic_of_broker, topic_to_message
from .store.timer.delay_levels import DELAY_MAX_MS
from .store_errors import tells_store_errors, to_service_error
from .topic_access import check_group_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from protomq_runtime.call import Call, CallContext, CallLane

    from .send_backs import SendBacks
    from .state_changes import Outcome, StateChanges
    from .store.state.group_settings import GroupSettings
    from .store.state.topics import TopicConfig
    from .store.store import Store
    from .write_permit import WritePermit

assert RETRY_DELAY_MAX_MS == DELAY_MAX_MS, "a retry is a delayed message"

WITHOUT_LIMIT: Final = -1
"""In GetGroupResponse.retry_count_max."""


class GroupService:
    """Implements protomq.v1.GroupService on the consumer lane. `changed` is called with the name of a group whose settings have changed, on
    the send lane.
    """

    def __init__(
        self,
        store: Store,
        permit: WritePermit,
        changes: StateChanges,
        levels_ms: Sequence[int],
        changed: Callable[[str], None],
        send_backs: SendBacks,
        came_beside: Callable[[str, str], str],
    ) -> None:
        """`came_beside` is called with a group and the address of a consumer in broadcast mode; it returns the name of a member, or ""."""
        self._store = store
        self._permit = permit
        self._changes = changes
        self._levels_ms = levels_ms
        self._changed = changed
        self._send_backs = send_backs
        self._came_beside = came_beside
        self._gathered: dict[CallLane, GatheredCalls] = {}

    @raw
    def put_group(self, call: Call) -> None:
        """Stores a group's settings. The answer comes when they are stored."""
        self._permit.when_given([call], self._put_groups)

    def _put_groups(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                request = PutGroupRequest.FromString(bytes(call.payload))
                settings = group_from_message(request.settings)
                if settings.version > VERSION_PUT_MAX:
                    raise GroupSettingsError(
                        "version",
                        f"is 0 to 2^62, not {settings.version}: later settings need higher ones. 0: one above what this broker has",
                    )
            except DecodeError:
                call.fail(unparsable("protomq.v1.PutGroupRequest"))
            except GroupSettingsError as error:
                call.fail(invalid_argument(f"settings.{error.field}", str(error)))
            else:
                self._changes.make([call], partial(self._put, settings))

    def _put(self, settings: GroupSettings) -> Sequence[Outcome]:
        held = self._store.groups.put(settings)
        self._changed(held.group)
        return [PutGroupResponse(settings=group_to_message(held)).SerializeToString]

    @tells_store_errors
    def get_group(self, request: GetGroupRequest, context: CallContext) -> GetGroupResponse:
        """Returns the settings of a group, and the values that result from them and the defaults."""
        check_group_name(request.consumer_group)
        settings = self._store.groups.find(request.consumer_group)
        limit = settings.retry_limit
        return GetGroupResponse(
            settings=group_to_message(settings),
            retry_count_max=WITHOUT_LIMIT if limit is None else limit,
            retry_delays_ms=retry_delays_of(settings, self._levels_ms),
            sharing_member=self._came_beside(request.consumer_group, context.peer) if request.broadcasting else "",
        )

    @tells_store_errors
    def list_group_settings(
        self, request: ListGroupSettingsRequest, context: CallContext
    ) -> ListGroupSettingsResponse:
        """Returns a page of settings, sorted by the group's name. The page token is the last name of the previous page."""
        size = page_size_of(request.page_size)
        check_page_token(request.page_token, require_group_name)
        found = [each for each in self._store.groups.all() if each.group > request.page_token]
        return ListGroupSettingsResponse(
            settings=map(group_to_message, found[:size]),
            next_page_token=found[size - 1].group if len(found) > size else "",
        )

    @drained
    def send_back(self, calls: list[Call]) -> None:
        """Sends failed messages back: the broker delivers them again, or appends them to the dead letters."""
        lane = calls[0].lane
        gathered = self._gathered.get(lane)
        if gathered is None:
            gathered = self._gathered[lane] = GatheredCalls(lane, self._send_backs.send_back)
        gathered.add(calls)

    @raw
    def create_retry_topic(self, call: Call) -> None:
        """Creates the retry topic of a group. The answer comes when it is stored."""
        self._permit.when_given([call], self._create_retry_topics)

    def _create_retry_topics(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                request = CreateRetryTopicRequest.FromString(bytes(call.payload))
                check_group_name(request.consumer_group)
            except DecodeError:
                call.fail(unparsable("protomq.v1.CreateRetryTopicRequest"))
                continue
            except Exception as error:
                call.fail(to_service_error(error))
                continue
            name = retry_topic(request.consumer_group)
            topics = self._store.topics
            known = topics.find(name)
            # Members that start where sends are refused must get the retries that are there.
            if known is not None and topics.is_recorded(name, self._store.readable_position):
                call.answer(_told_retry_topic(known))
            else:
                self._changes.make([call], partial(self._create_retry_topic, name))

    def _create_retry_topic(self, name: str) -> Sequence[Outcome]:
        return [partial(_told_retry_topic, self._store.topics.create(topic_of_broker(name)))]


def _told_retry_topic(topic: TopicConfig) -> bytes:
    return CreateRetryTopicResponse(topic=topic_to_message(topic)).SerializeToString()
