"""Topics by their names: what a name may be, how many queues there may be, and what each class of topics may do.

    orders            a user's
    %SYS%OFFSETS      of the system: states of the broker, which only it writes and reads
    %RETRY%group      of a group: messages that it is to get again; its consumers read them, the broker writes them
    %DLQ%group        of a group: dead letters; readable like any topic, the broker writes them
    TRANS_CHECK_MAX_TIME_TOPIC   of the system, too: readable like any topic, the broker writes it

Clients, name servers and brokers go by the one table `RULES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

TOPIC_NAME_LENGTH_MAX: Final = 127
GROUP_NAME_LENGTH_MAX: Final = 120
"""So that the name of a group's topics (%RETRY% and the group) is a topic name."""
QUEUES_MAX: Final = 1_024
QUEUES_DEFAULT: Final = 8
"""Of a topic that gives no count (topic.proto)."""

SYSTEM_PREFIX: Final = "%SYS%"
RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
OFFSETS_TOPIC: Final = SYSTEM_PREFIX + "OFFSETS"
"""Records of committed offsets; see the message OffsetsRecord."""
TRANSACTIONS_TOPIC: Final = SYSTEM_PREFIX + "TRANSACTIONS"
"""Records of how transactions ended, and of when they were checked; see the message TransactionsRecord."""
TOPICS_TOPIC: Final = SYSTEM_PREFIX + "TOPICS"
"""Records of the broker's topics; see the message TopicsRecord."""
LOG_TOPIC: Final = SYSTEM_PREFIX + "LOG"
"""Records of what the deleted front of the log told; see the message LogRecord."""
TIMER_TOPIC: Final = SYSTEM_PREFIX + "TIMER"
"""What became of delayed messages; see the message TimerRecord."""
GROUPS_TOPIC: Final = SYSTEM_PREFIX + "GROUPS"
"""Records of the settings of consumer groups; see the message GroupsRecord."""
EXPIRED_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Half messages whose transactions nobody ended, however often it was asked; RocketMQ's name."""
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""What clients did with messages, as they tell it: a topic of users."""
POP_TOPIC: Final = SYSTEM_PREFIX + "POP"
"""Which messages groups have popped and acknowledged; see the message PopRecord."""
LOCKS_TOPIC: Final = SYSTEM_PREFIX + "LOCKS"
"""Which member of a group has which queue to itself; see the message LocksRecord."""

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_STORED_NAME: Final = re.compile(r"[%A-Za-z0-9_-]+", re.ASCII)

assert len(RETRY_PREFIX) + GROUP_NAME_LENGTH_MAX <= TOPIC_NAME_LENGTH_MAX


class TopicClass(Enum):
    """Whose a topic is."""

    USER = "user"
    SYSTEM = "system"
    RETRY = "retry"
    DEAD_LETTER = "dead letter"
    EXPIRED = "expired transactions"


class TopicRules(NamedTuple):
    """What may be done with the topics of a class.

    Attributes:
        send: clients may send to it.
        pull: clients may read it, commit offsets, and delete it.
        create: clients may create it, by a call or with the first message.
        list: it is among the topics that are listed, unless those of groups are asked for too.
    """

    send: bool
    pull: bool
    create: bool
    list: bool


# fmt: off
RULES: Final[Mapping[TopicClass, TopicRules]] = MappingProxyType(
    {
        #                                  send   pull   create list
        TopicClass.USER:        TopicRules(True,  True,  True,  True),
        TopicClass.SYSTEM:      TopicRules(False, False, False, False),
        TopicClass.RETRY:       TopicRules(False, True,  False, False),
        TopicClass.DEAD_LETTER: TopicRules(False, True,  False, False),
        TopicClass.EXPIRED:     TopicRules(False, True,  False, True),
    }
)
# fmt: on


def class_of(topic: str) -> TopicClass:
    """The class of a topic. A name with a percent sign that is no group's belongs to the system."""
    if "%" not in topic:
        return TopicClass.EXPIRED if topic == EXPIRED_TOPIC else TopicClass.USER
    if _is_of_group(topic, RETRY_PREFIX):
        return TopicClass.RETRY
    if _is_of_group(topic, DEAD_LETTER_PREFIX):
        return TopicClass.DEAD_LETTER
    return TopicClass.SYSTEM


def rules_of(topic: str) -> TopicRules:
    """What may be done with a topic."""
    return RULES[class_of(topic)]


def retry_topic(group: str) -> str:
    """Where a group's messages wait that it is to get again."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Where a group's messages come that failed too often."""
    return DEAD_LETTER_PREFIX + group


def group_of(topic: str) -> str | None:
    """The group whose retries or dead letters the topic has; None for other topics."""
    if class_of(topic) in (TopicClass.RETRY, TopicClass.DEAD_LETTER):
        return topic[topic.index("%", 1) + 1 :]
    return None


def is_stored_name(name: str) -> bool:
    """Whether a topic of any class can have this name."""
    return 0 < len(name) <= TOPIC_NAME_LENGTH_MAX and _STORED_NAME.fullmatch(name) is not None


def is_user_name(name: str) -> bool:
    """Whether clients can have a topic of this name."""
    return not why_no_topic(name)


def why_no_topic(name: str) -> str:
    """Why clients cannot have a topic of this name; "" if they can."""
    return _why_not(name, "topic", TOPIC_NAME_LENGTH_MAX)


def why_no_group(name: str) -> str:
    """Why this cannot be the name of a group; "" if it can."""
    return _why_not(name, "group", GROUP_NAME_LENGTH_MAX)


def _why_not(name: str, what: str, length_max: int) -> str:
    if not 0 < len(name) <= length_max:
        return f"a {what} name has 1 to {length_max} characters, this one {len(name)}"
    if _NAME.fullmatch(name):
        return ""
    if _STORED_NAME.fullmatch(name):
        return f"{name!r} cannot be the name of a {what}: names with % are the system's own"
    return f"{name!r} cannot be the name of a {what}: only A-Z a-z 0-9 _ and - may stand in one"


def _is_of_group(topic: str, prefix: str) -> bool:
    return topic.startswith(prefix) and not why_no_group(topic[len(prefix) :])
