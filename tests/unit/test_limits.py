"""The limits in docs/wire.md are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from pathlib import Path
from typing import Final

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from protomq.v1 import (
    admin_service_pb2,
    consumer_service_pb2,
    options_pb2,
    pull_service_pb2,
    reply_service_pb2,
    route_service_pb2,
    send_service_pb2,
)
from protomq.wire import record, topics
from protomq_broker import (
    admin_service,
    consumer_service,
    filter_modules,
    group_members,
    ha_service,
    member_questions,
    memberships,
    pop_requests,
    pull_answer,
    pull_requests,
    pull_service,
    queue_locks,
    recalls,
    reply_calls,
    reply_service,
    send_request,
)
from protomq_broker.config import BrokerConfig
from protomq_broker.store.index import look_ups
from protomq_broker.store.state import groups, offsets, pop, sent_runs
from protomq_namesrv import request_checks
from protomq_namesrv.config import LimitsConfig
from protomq_runtime import dispatch, remoting_server, server

ROOT = Path(__file__).parents[2]
CONFIG = BrokerConfig()
UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

OF_A_REQUEST: Final = {
    "request": (server.REQUEST_SIZE_MAX_BYTES, None),
    "`records`, with trailers": (record.RECORDS_PER_REQUEST_MAX, None),
    "`records` that the broker has to rewrite": (record.RECORDS_WITHOUT_TRAILER_MAX, None),
    "`body` of a record": (record.BODY_SIZE_MAX_BYTES, None),
    "fields 2 to 5 of a record": (record.FRONT_SIZE_MAX_BYTES, None),
    "`keys` of a record": (record.KEYS_MAX, None),
    "fields beside the records, without `record_sizes`": (
        send_request.FIELDS_BESIDE_RECORDS_MAX,
        None,
    ),
    "`record_count_max`": (pull_service.RECORD_COUNT_MAX, pull_answer.RECORD_COUNT_DEFAULT),
    "`size_max_bytes`": (pull_service.SIZE_MAX_BYTES, pull_answer.SIZE_DEFAULT_BYTES),
    "messages of an answer over gRPC, or with plain bodies": (
        pull_requests.GRPC_SIZE_MAX_BYTES,
        None,
    ),
    "`hold_ms`": (pull_requests.HOLD_MAX_MS, None),
    "the hold itself (`hold_max_ms`)": (CONFIG.hold_max_ms, None),
    "`tags`": (pull_service.TAGS_MAX, None),
    "`member`, characters": (group_members.MEMBER_SIZE_MAX, None),
    "`invisible_ms` (`pop_invisible_max_ms`), 10,000 (`pop_invisible_min_ms`) at least": (
        CONFIG.pop_invisible_max_ms,
        pop_requests.INVISIBLE_DEFAULT_MS,
    ),
    "`hold_id`, octets: as many, or in a `Pop` none": (pop_requests.HOLD_ID_SIZE_BYTES, None),
    "`messages`, counted one by one": (pop_requests.SETTLED_COUNT_MAX, None),
    "`offsets`, each queue once": (consumer_service.OFFSETS_PER_COMMIT_MAX, None),
    "`queue_ids`, each once": (topics.QUEUES_MAX, None),
    "`write_queues`, `read_queues`": (topics.QUEUES_MAX, CONFIG.default_queues),
    "`page_size`": (admin_service.PAGE_SIZE_MAX, admin_service.PAGE_SIZE_DEFAULT),
    "name of a topic, of letters, digits, `_` and `-`": (topics.TOPIC_NAME_LENGTH_MAX, None),
    "name of a consumer group, of the same": (topics.GROUP_NAME_LENGTH_MAX, None),
    "`received_reply_ids`, `unwanted_reply_ids`": (reply_service.REPLY_IDS_MAX, None),
    "the whole request, to be taken": (reply_service.REPLY_SIZE_MAX_BYTES, None),
    "`caller_id`, `call_id`, bytes": (reply_service.ID_SIZE_MAX, None),
    "`member.topics`, that of the group's retries among them": (memberships.TOPICS_MAX, None),
    "queues of all these topics": (memberships.QUEUES_MAX, None),
    "`member.client_id`, `allocation`, `machine_room`, `client_version`, name of a topic: octets": (memberships.TEXT_MAX_BYTES, None),
    "`filter` of a topic, octets": (memberships.FILTER_MAX_BYTES, None),
    "`client_id`, octets": (remoting_server.CLIENT_ID_SIZE_MAX_BYTES, None),
}
"""What: (limit, default), for rows whose name is enough to tell them apart."""

REPLY: Final = reply_service_pb2.DESCRIPTOR.services_by_name["ReplyService"].methods_by_name["Reply"]

BY_REQUEST: Final = {
    ("`Pop`", "`record_count_max`"): (
        pop_requests.RECORD_COUNT_MAX,
        pull_answer.RECORD_COUNT_DEFAULT,
    ),
    ("`WaitForReplies`", "`hold_ms`"): (pull_requests.HOLD_MAX_MS, None),
    ("`Reply`", "request"): (REPLY.GetOptions().Extensions[options_pb2.remoting].request_size_max_bytes, None),
    ("all others", "request"): (dispatch.REQUEST_SIZE_DEFAULT_BYTES, None),
    ("`ListTopicNames`", "`page_size`"): (
        request_checks.PAGE_SIZE_MAX,
        request_checks.PAGE_SIZE_DEFAULT,
    ),
    ("`QueryMessages`", "`record_count_max`"): (
        admin_service.QUERY_COUNT_MAX,
        admin_service.QUERY_COUNT_DEFAULT,
    ),
}

OF_A_SERVER: Final = {
    "connections": CONFIG.connections.total_max,
    "connections of one address": CONFIG.connections.per_address_max or None,
    "producers": sent_runs.PRODUCERS_MAX,
    "held pulls of a lane": CONFIG.lanes.hold_max // CONFIG.lanes.pull_threads,
    "held pops": CONFIG.lanes.hold_max,
    "held fetches of a session": ha_service.FETCHES_MAX,
    "popped queues": pop.QUEUES_MAX,
    "locked queues": queue_locks.LOCKS_MAX,
    "pending messages": CONFIG.delayed_count_max,
    "bytes of pending messages": CONFIG.delayed_size_max_bytes,
    "open transactions": CONFIG.transaction_count_max,
    "bytes of half messages": CONFIG.transaction_size_max_bytes,
    "groups": memberships.GROUPS_MAX,
    "members": memberships.MEMBERS_MAX,
    "questions": member_questions.QUESTIONS_MAX,
    "groups that are set up": groups.GROUPS_SET_UP_MAX,
    "filter modules": filter_modules.MODULES_MAX,
    "consumer groups": offsets.GROUPS_MAX,
    "callers": reply_calls.CALLERS_MAX,
    "replies of a caller": reply_calls.REPLIES_MAX,
    "bytes of replies": reply_calls.REPLIES_SIZE_MAX_BYTES,
    "candidates of a look-up": look_ups.CANDIDATES_MAX,
    "candidates of a recall": recalls.CANDIDATES_MAX,
    "bytes of candidates of a recall": recalls.CANDIDATES_SIZE_MAX_BYTES,
    "brokers": LimitsConfig().broker_count_max,
    "topics of a broker": LimitsConfig().topic_count_max,
    "watched routes": LimitsConfig().watcher_count_max,
}


def rows(columns: int) -> list[list[str]]:
    """The rows of the tables with so many columns, heads and lines left out."""
    text = (ROOT / "docs/wire.md").read_text("utf-8")
    section = text[text.index("\n## Limits\n") : text.index("\n## The log\n")]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if len(row) == columns and row[0] not in ("---", "request", "`what`")]


def number(text: str) -> int | None:
    if not text:
        return None
    match = re.fullmatch(r"([\d.,]+) ?([KMG]iB)?", text)
    assert match is not None, text
    return int(float(match[1].replace(",", "")) * UNITS[match[2] or ""])


def test_the_limits_of_requests_are_those_of_the_code():
    found = []
    for request, what, limit, default, _ in rows(5):
        expected = BY_REQUEST.get((request, what)) or OF_A_REQUEST[what]
        assert (number(limit), number(default)) == expected, what
        found.append(what)
    assert set(found) == set(OF_A_REQUEST)
    assert len(found) == len(OF_A_REQUEST) + len(BY_REQUEST)


def test_the_limits_of_servers_are_those_of_the_code_and_what_names_them():
    found = {}
    for what, limit, _, _ in rows(4):
        name = re.match("`([^`]+)`", what)
        assert name is not None
        found[name[1]] = number(limit)
    assert found == OF_A_SERVER


def test_the_sizes_of_requests_are_those_of_the_contract():
    services: list[ServiceDescriptor] = [
        file.DESCRIPTOR.services_by_name[name]
        for file, name in (
            (send_service_pb2, "SendService"),
            (pull_service_pb2, "PullService"),
            (consumer_service_pb2, "ConsumerService"),
            (admin_service_pb2, "AdminService"),
            (route_service_pb2, "RouteService"),
        )
    ]
    large = {
        method.name
        for service in services
        for method in service.methods
        if method.GetOptions().Extensions[options_pb2.remoting].request_size_max_bytes
    }
    assert large == {"Send", "RegisterBroker"}


def whats_of(text: str) -> dict[str, bool]:
    """What the TOO_MANY errors of a module name, and whether a RetryInfo stands beside it. Functions that pass their `what` on count."""
    tree = ast.parse(text)
    makers = {"too_many": False}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for call in calls_of(function, {"too_many"}):
                if isinstance(call.args[0], ast.Name):
                    makers[function.name] = has_delay(call)
    found = {}
    for call in calls_of(tree, makers):
        assert isinstance(call.func, ast.Name)
        if isinstance(call.args[0], ast.Constant):
            found[str(call.args[0].value)] = makers[call.func.id] or has_delay(call)
        else:
            assert len(makers) > 1, ast.dump(call)
    return found


def calls_of(node: ast.AST, names: Container[str]) -> list[ast.Call]:
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call)]
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]


def has_delay(call: ast.Call) -> bool:
    return any(keyword.arg == "retry_delay_ms" for keyword in call.keywords)


def test_who_is_told_of_too_many_is_told_what_and_when_to_try_again_as_the_table_says():
    said = {row[0].split("`")[1]: row[2] == "yes" for row in rows(4)}
    given: dict[str, bool] = {}
    for path in sorted((ROOT / "services").rglob("*.py")):
        if path.name != "errors.py":  # It makes the error of what others tell it.
            given |= whats_of(path.read_text("utf-8"))
    assert given == said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('too_many("a", 1, "")', {"a": False}),
        ('too_many("a", 1, "", retry_delay_ms=2)', {"a": True}),
        ('def full(what):\n return too_many(what, 1, "", retry_delay_ms=2)\nfull("b")', {"b": True}),
        ('def full(what):\n return too_many(what, 1, "")\nfull("b")', {"b": False}),
    ],
)
def test_what_a_module_names_is_found(text: str, found: dict[str, bool]):
    assert whats_of(text) == found
