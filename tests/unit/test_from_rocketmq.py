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


LINES = (Path(__file__).with_name("rocketmq_client_settings.txt")).read_text().splitlines()
JAVA_SETTINGS = [(line.split(" ", 2)[0], line.split(" ", 2)[1], line.split(" ", 2)[2]) for line in LINES if not line.startswith("#")]
OTHER_UNITS = {"maxMessageSize", "backPressureForAsyncSendSize", "maxCacheMessageSizeInBytes", "pullBatchSizeInBytes"}
"""The page has them in MiB or KiB."""
MODULES = {("protomq", "allocation"), ("protomq", "hooks"), ("protomq", "errors"), ("protomq", "otel")}


JAVA_CLASSES = """
    DefaultMQProducer TransactionMQProducer TransactionListener RequestCallback Message MessageExt SendResult SendStatus
    DefaultMQPushConsumer MessageListenerConcurrently MessageListenerOrderly MessageModel MessageSelector OffsetStore
    RemoteBrokerOffsetStore LocalFileOffsetStore AllocateMessageQueueStrategy AllocateMessageQueueAveragely
    AllocateMessageQueueAveragelyByCircle
    AllocateMessageQueueByConfig AllocateMessageQueueByMachineRoom AllocateMachineRoomNearby AllocateMessageQueueConsistentHash
    DefaultLitePullConsumer MessageQueueListener TopicMessageQueueChangeListener MQPullConsumerScheduleService PullTaskCallback
    SimpleConsumer PushConsumer MessageListener DefaultMQAdminExt ClientConfig
    SendMessageHook ConsumeMessageHook FilterMessageHook EndTransactionHook RPCHook CheckForbiddenHook
    MessageQueueSelector SelectMessageQueueByHash SelectMessageQueueByRandom SelectMessageQueueByMachineRoom LocalTransactionState
    TransactionSendResult SendCallback TransactionCheckListener TraceDispatcher AsyncTraceDispatcher AclClientRPCHook
    SendMessageOpenTracingHookImpl ConsumeMessageOpenTracingHookImpl EndTransactionOpenTracingHookImpl
    ConsumeConcurrentlyContext ConsumeOrderlyContext DefaultMQPullConsumer MQClientException MQBrokerException RequestTimeoutException
    ClientConfiguration SessionCredentialsProvider FilterExpression MessageView TransactionChecker TransactionResolution SendReceipt
"""
JAVA_CALLS = """
    registerMessageListener suspend resume updateCorePoolSize instanceName namesrvAddr sendMessageBack fetchPublishMessageQueues
    fetchMessageQueues subscribe unsubscribe shutdown start recallMessage sendMessageInTransaction
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


def words_of_rows(column: int) -> list[list[str]]:
    rows = [re.split(r"(?<!\\)\|", row) for row in PAGE.splitlines() if row.startswith("| ")]
    return [re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d)", "", row[column])) for row in rows]


def test_no_setting_of_the_java_clients_is_missing() -> None:
    left = {word for words in words_of_rows(1) for word in words}
    missing = [f"{owner}.{name}" for owner, name, _ in JAVA_SETTINGS if name not in left]
    assert len(JAVA_SETTINGS) > 100
    assert not missing


def test_no_public_class_of_the_java_clients_is_missing() -> None:
    lines = Path(__file__).with_name("rocketmq_client_classes.txt").read_text().splitlines()
    classes = [line for line in lines if not line.startswith("#")]
    left = {word for words in words_of_rows(1) for word in words}
    assert len(classes) > 130
    assert not [name for name in classes if name not in left]


def test_the_numbers_of_the_java_clients_are_theirs() -> None:
    rows = list(zip(words_of_rows(1), words_of_rows(2), strict=True))
    wrong = [
        f"{owner}.{name} is {default}"
        for owner, name, default in JAVA_SETTINGS
        if re.fullmatch(r"\d+", default)
        and name not in OTHER_UNITS
        and not any(name in left and default in middle for left, middle in rows)
    ]
    assert not wrong


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
        assert (owner, method) in {("consumerOffset", "json"), *MODULES}, f"{owner} is no class of protomq"
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


@pytest.mark.parametrize("name", ["`setDelayTimeMs`", "`RECONSUME_LATER`", "`offsetForTimestamp`", "`pollTimeoutMillis`"])
def test_what_is_given_in_seconds_here_is_told_to_who_gave_milliseconds(name: str) -> None:
    (row,) = [line for line in PAGE.splitlines() if name in line]
    assert "seconds" in row
