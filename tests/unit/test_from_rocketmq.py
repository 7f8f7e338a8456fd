"""docs/from_rocketmq.md and docs/from_kafka.md name what there is: classes, methods and defaults are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import protomq
from protomq import allocation
from protomq._pop_handling import AHEAD_SIZE_MAX_BYTES
from protomq._routes import ROUTE_FRESH_S
from protomq.wire.record import BODY_SIZE_MAX_BYTES
from protomq_broker.config import BrokerConfig
from protomq_runtime.config import variable_of, variables_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "from_rocketmq.md").read_text()
KAFKA = (DOCS / "from_kafka.md").read_text()
OURS = {name for name in protomq.__all__ if inspect.isclass(getattr(protomq, name))}
DEFAULT = re.compile(r"`(\w+)\((\w+)=([^`]+)\)`")
DEFAULTS = DEFAULT.findall(PAGE.split("## Defaults")[1].split("## What is different")[0])
KAFKA_DEFAULTS = DEFAULT.findall(KAFKA.split("## Words")[1])
DEFAULTS_OF_CALLS = re.findall(r"`(\w+)\.(\w+)\((\w+)=([^`]+)\)`", PAGE.split("## Defaults")[1])
METHODS = re.findall(r"`(\w+)\.(\w+)`", PAGE)
KAFKA_METHODS = re.findall(r"`([A-Z]\w+)\.(\w+)`", KAFKA)
SETTINGS = re.findall(r"`([A-Z]\w+)\((\w+)=[^`]+\)`", PAGE.split("## Classes")[1])
ALLOCATIONS = re.findall(r"`([A-Z]\w+)\((?:\.\.\.)?\)`", PAGE)
KAFKA_SETTINGS = re.findall(r"`((?:store|ha|member)[._][\w.]+|auto_create_topics|default_queues)`", KAFKA)


JAVA_CLASSES = """
    DefaultMQProducer TransactionMQProducer TransactionListener RequestCallback Message MessageExt SendResult SendStatus
    DefaultMQPushConsumer MessageListenerConcurrently MessageListenerOrderly MessageModel MessageSelector OffsetStore
    RemoteBrokerOffsetStore LocalFileOffsetStore AllocateMessageQueueStrategy AllocateMessageQueueAveragely
    AllocateMessageQueueAveragelyByCircle
    AllocateMessageQueueByConfig AllocateMessageQueueByMachineRoom AllocateMachineRoomNearby AllocateMessageQueueConsistentHash
    DefaultLitePullConsumer MessageQueueListener TopicMessageQueueChangeListener MQPullConsumerScheduleService PullTaskCallback
    SimpleConsumer PushConsumer MessageListener DefaultMQAdminExt ClientConfig
    SendMessageHook ConsumeMessageHook FilterMessageHook EndTransactionHook RPCHook
"""
JAVA_CALLS = """
    registerMessageListener suspend resume updateCorePoolSize instanceName namesrvAddr sendMessageBack fetchPublishMessageQueues
    fetchMessageQueues
"""
JAVA_DEFAULTS = """
    sendMsgTimeout retryTimesWhenSendFailed retryTimesWhenSendAsyncFailed retryAnotherBrokerWhenNotStoreOK compressMsgBodyOverHowmuch
    maxMessageSize defaultTopicQueueNums sendLatencyFaultEnable enableMsgTrace waitStoreMsgOK
    consumeFromWhere consumeTimestamp consumeThreadMin consumeThreadMax consumeConcurrentlyMaxSpan pullThresholdForQueue
    pullThresholdSizeForQueue pullThresholdForTopic pullThresholdSizeForTopic pullInterval consumeMessageBatchMaxSize pullBatchSize
    maxReconsumeTimes suspendCurrentQueueTimeMillis consumeTimeout awaitTerminationMillisWhenShutdown persistConsumerOffsetInterval
    heartbeatBrokerInterval pollNameServerInterval
    brokerSuspendMaxTimeMillis consumerPullTimeoutMillis autoCommit autoCommitIntervalMillis pullThreadNums pollTimeoutMillis
    topicMetadataCheckIntervalMillis pullNextDelayTimeMillis awaitDuration invisibleDuration maxCacheMessageCount
"""


@pytest.mark.parametrize(
    ("part", "names"), [("## Classes", (JAVA_CLASSES + JAVA_CALLS).split()), ("## Defaults", JAVA_DEFAULTS.split())]
)
def test_what_the_java_client_has_stands_on_the_left(part: str, names: list[str]) -> None:
    rows = [row for row in PAGE.split(part)[1].split("\n## ")[0].splitlines() if row.startswith("| ")]
    left = set(re.findall(r"\w+", " ".join(re.split(r"(?<!\\)\|", row)[1] for row in rows)))
    assert not [name for name in names if name not in left]


@pytest.mark.parametrize(("owner", "setting", "value"), [*DEFAULTS, *KAFKA_DEFAULTS])
def test_a_default_is_that_of_the_code(owner: str, setting: str, value: str) -> None:
    assert inspect.signature(getattr(protomq, owner)).parameters[setting].default == ast.literal_eval(value)


@pytest.mark.parametrize(("owner", "call", "argument", "value"), DEFAULTS_OF_CALLS)
def test_a_default_of_a_call_is_that_of_the_code(owner: str, call: str, argument: str, value: str) -> None:
    parameters = inspect.signature(getattr(getattr(protomq, owner), call)).parameters
    assert parameters[argument].default == ast.literal_eval(value)


@pytest.mark.parametrize(("owner", "setting"), SETTINGS)
def test_a_setting_is_there(owner: str, setting: str) -> None:
    assert setting in inspect.signature(getattr(protomq, owner)).parameters


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_an_allocation_is_there(name: str) -> None:
    if name not in OURS:
        assert inspect.isclass(getattr(allocation, name))


@pytest.mark.parametrize(("owner", "method"), [*METHODS, *KAFKA_METHODS])
def test_a_method_is_there(owner: str, method: str) -> None:
    if owner not in OURS:
        assert (owner, method) in {("consumerOffset", "json"), ("protomq", "allocation")}, f"{owner} is no class of protomq"
        return
    member = getattr(protomq, owner)
    assert hasattr(member, method) or method in getattr(member, "__annotations__", {})


@pytest.mark.parametrize("setting", KAFKA_SETTINGS)
def test_a_setting_of_a_broker_is_there(setting: str) -> None:
    assert variable_of(setting) in variables_of(BrokerConfig)


def test_numbers_that_no_setting_has_are_those_of_the_code() -> None:
    for row, value in (
        ("maxMessageSize", f"a body of up to {BODY_SIZE_MAX_BYTES >> 20} MiB"),
        ("defaultTopicQueueNums", f"{BrokerConfig().default_queues} queues"),
        ("pollNameServerInterval", f"after {ROUTE_FRESH_S:.0f} s"),
        ("maxCacheMessageCount", f"and {AHEAD_SIZE_MAX_BYTES >> 20} MiB"),
    ):
        assert re.search(rf"^\|.*`{row}`.*\|.*{value}", PAGE, re.MULTILINE), row


def test_the_pages_have_something_to_compare() -> None:
    assert len(KAFKA_DEFAULTS) >= 10
    assert len(KAFKA_METHODS) >= 6
    assert len(KAFKA_SETTINGS) >= 6
    assert len(DEFAULTS) >= 28
    assert len(METHODS) >= 38
    assert len(DEFAULTS_OF_CALLS) >= 4
    assert len(ALLOCATIONS) >= 6
    for name in ("Producer", "PullConsumer", "PushConsumer", "SimpleConsumer", "Admin"):
        assert f"`{name}" in PAGE
