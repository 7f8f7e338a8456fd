"""What a name server accepts: requests from the wire, checked field by field, made into what the table works with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from protomq.v1.route_service_pb2 import Broker, RegisterBrokerRequest
from protomq.v1.topic_pb2 import DataVersion, Permission, Topic
from protomq.wire.broker_names import NAME_RULE, is_broker_name
from protomq.wire.topics import QUEUES_DEFAULT, QUEUES_MAX, is_stored_name
from protomq_runtime.addresses import WILDCARD_HOSTS, parse_address
from protomq_runtime.errors import Code, ServiceError, too_many

from .route_snapshot import BrokerKey, Registration, TopicShare, Version

PAGE_SIZE_MAX: Final = 10_000
PAGE_SIZE_DEFAULT: Final = 1_000
VIOLATIONS_MAX: Final = 16
"""Maximum number of faults that are listed: the answer must stay small whatever the request holds."""
BROKER_SIZE_MAX_BYTES: Final = 4_096
"""Of what a broker says of itself, which routes and lists of brokers repeat, with the fields of later versions. Names and addresses
of hosts take a quarter of it."""

"""Of brokers and clusters: often host names, so dots are fine."""
_PERMISSIONS: Final = frozenset(Permission.values())

Violation = tuple[str, str]


def to_registration(request: RegisterBrokerRequest, topic_count_max: int) -> Registration:
    """The registration in a request. Raises INVALID_ARGUMENT with the fields at fault, or TOO_MANY."""
    if len(request.topics) > topic_count_max:
        raise too_many(
            "topics of a broker",
            topic_count_max,
            f"{len(request.topics)} topics are more than the {topic_count_max} that this name server takes of a broker; "
            "raise limits.topic_count_max",
        )
    size_bytes = request.broker.ByteSize()
    if size_bytes > BROKER_SIZE_MAX_BYTES:
        _refuse([("broker", f"has {size_bytes} bytes; {BROKER_SIZE_MAX_BYTES} are the most")])
    violations = [*_broker_violations(request.broker), *_version_violations(request.data_version)]
    topics: dict[str, TopicShare] = {}
    for index, topic in enumerate(request.topics):
        if len(violations) >= VIOLATIONS_MAX:
            break
        if topic.name in topics:
            violations.append((f"topics[{index}].name", "names the same topic as an earlier one"))
        violations.extend(_topic_violations(topic, f"topics[{index}]"))
        topics[topic.name] = _share(topic)
    _refuse(violations)
    broker = Broker()
    broker.CopyFrom(request.broker)
    if broker.permission == Permission.PERMISSION_UNSPECIFIED:
        broker.permission = Permission.PERMISSION_READ_WRITE
    return Registration(broker, to_version(request.data_version), topics)


def to_version(version: DataVersion) -> Version:
    """A DataVersion that compares."""
    return Version(version.counter, version.time_ms)


def to_key(broker_name: str, broker_id: int) -> BrokerKey:
    """The broker that a request names. Raises INVALID_ARGUMENT."""
    _refuse(
        [*_name_violations("broker_name", broker_name), *_id_violations("broker_id", broker_id)]
    )
    return BrokerKey(broker_name, broker_id)


def check_broker_name(broker_name: str) -> None:
    """Raises INVALID_ARGUMENT unless it is a name that a broker can have."""
    _refuse(list(_name_violations("broker_name", broker_name)))


def check_topic(topic: str) -> None:
    """Raises INVALID_ARGUMENT unless it is a name that a topic can have."""
    if not is_stored_name(topic):
        _refuse([("topic", f"has to be 1 to 127 characters of A-Z a-z 0-9 _ - %, and is {_short(topic)}")])


def _short(topic: str) -> str:
    return repr(topic) if len(topic) <= 127 else f"{topic[:60] + '…'!r} of {len(topic):,} characters"


def page_size_of(page_size: int) -> int:
    """The page size that is meant. Raises INVALID_ARGUMENT."""
    if not 0 <= page_size <= PAGE_SIZE_MAX:
        _refuse(
            [
                (
                    "page_size",
                    f"is {page_size}; it has to be 0 (= {PAGE_SIZE_DEFAULT}) to {PAGE_SIZE_MAX}",
                )
            ]
        )
    return page_size or PAGE_SIZE_DEFAULT


def page_token_of(token: str) -> str:
    """The token, empty or the name with which the page before ended. Raises INVALID_ARGUMENT."""
    if token and not is_stored_name(token):
        _refuse([("page_token", "is none that this name server has given; leave it out for the first page")])
    return token


def _refuse(violations: list[Violation]) -> None:
    if violations:
        text = "; ".join(
            f"{name} {description}" for name, description in violations[:VIOLATIONS_MAX]
        )
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            text,
            field_violations=tuple(violations[:VIOLATIONS_MAX]),
        )


def _broker_violations(broker: Broker) -> Iterator[Violation]:
    yield from _name_violations("broker.cluster", broker.cluster)
    yield from _name_violations("broker.broker_name", broker.broker_name)
    yield from _id_violations("broker.broker_id", broker.broker_id)
    if not broker.grpc_address:
        yield "broker.grpc_address", "is empty; clients need it"
    for name in ("grpc_address", "remoting_address", "ha_address"):
        address = getattr(broker, name)
        if address:
            try:
                host = parse_address(address).host
            except ValueError as error:
                yield f"broker.{name}", str(error)
            else:
                if host in WILDCARD_HOSTS:
                    yield (
                        f"broker.{name}",
                        f"{address!r} is an address to listen on; clients need one that they can connect to",
                    )
    if broker.grpc_address and broker.grpc_address == broker.remoting_address:
        yield "broker.remoting_address", "is that of gRPC; a port speaks one of the two"
    if broker.incarnation <= 0:
        yield "broker.incarnation", "has to be the start of the process in milliseconds since 1970"
    if broker.store_id < 0:
        yield "broker.store_id", f"is {broker.store_id}; it has to be 0 or above"
    if broker.permission not in _PERMISSIONS:
        yield "broker.permission", f"is {broker.permission}, which is not a Permission"
    if not 0 <= broker.auto_create_queues <= QUEUES_MAX:
        yield (
            "broker.auto_create_queues",
            f"is {broker.auto_create_queues}; it has to be 0 to {QUEUES_MAX}",
        )


def _version_violations(version: DataVersion) -> Iterator[Violation]:
    if version.counter < 0:
        yield "data_version.counter", f"is {version.counter}; it counts changes, from 0"


def _topic_violations(topic: Topic, at: str) -> Iterator[Violation]:
    if not is_stored_name(topic.name):
        yield f"{at}.name", "has to be 1 to 127 characters of A-Z a-z 0-9 _ - %"
    if not 0 <= topic.write_queues <= QUEUES_MAX:
        yield (
            f"{at}.write_queues",
            f"is {topic.write_queues}; it has to be 0 (= {QUEUES_DEFAULT}) to {QUEUES_MAX}",
        )
    if not 0 <= topic.read_queues <= QUEUES_MAX:
        yield (
            f"{at}.read_queues",
            f"is {topic.read_queues}; it has to be 0 (= write_queues) to {QUEUES_MAX}",
        )
    if topic.permission not in _PERMISSIONS:
        yield f"{at}.permission", f"is {topic.permission}, which is not a Permission"
    if topic.incarnation < 0:
        yield f"{at}.incarnation", f"is {topic.incarnation}; it has to be 0 (= not known) or above"


def _name_violations(field: str, name: str) -> Iterator[Violation]:
    if not is_broker_name(name):
        yield field, f"has to be {NAME_RULE}"


def _id_violations(field: str, broker_id: int) -> Iterator[Violation]:
    if broker_id < 0:
        yield field, f"is {broker_id}; 0 is the master, slaves are above"


def _share(topic: Topic) -> TopicShare:
    write_queues = topic.write_queues or QUEUES_DEFAULT
    return TopicShare(write_queues, topic.read_queues or write_queues, topic.permission)
