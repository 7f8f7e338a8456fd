"""Numbers that stand in two packages, since one of them must not import the other, are the same in both.

A client that refuses what its broker takes, or sends what it refuses, is found by no test of either alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def value(place: str) -> Any:
    """What stands at "module:NAME"; NAME may be private there."""
    module, _, name = place.partition(":")
    found = vars(importlib.import_module(module))
    return found[name] if name in found else found["_" + name]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # The SDK and the broker.
        ("protomq._send_back:ATTEMPT_MAX", "protomq_broker.send_backs:ATTEMPT_MAX"),
        ("protomq._send_back:MESSAGES_MAX", "protomq_broker.alike_failures:MESSAGES_MAX"),
        ("protomq._dead_letters:IDS_MAX", "protomq_broker.dead_letter_service:IDS_MAX"),
        ("protomq._filter_admin:MODULE_SIZE_MAX_BYTES", "protomq_broker.filters.wasm_filter:MODULE_SIZE_MAX_BYTES"),
        ("protomq._group_admin:RETRY_COUNT_MAX", "protomq_broker.store.state.group_settings:RETRY_COUNT_MAX"),
        ("protomq._group_admin:RETRY_DELAYS_MAX", "protomq_broker.store.state.group_settings:RETRY_DELAYS_MAX"),
        ("protomq._group_admin:DELAY_MAX_MS", "protomq_broker.store.timer.delay_levels:DELAY_MAX_MS"),
        ("protomq._group_admin:DELAY_MAX_MS", "protomq_broker.store.state.group_settings:RETRY_DELAY_MAX_MS"),
        ("protomq._pop_handling:FIRST_RETRY_LEVEL", "protomq_broker.store.state.group_settings:FIRST_RETRY_LEVEL"),
        ("protomq._offset_calls:TAGS_MAX", "protomq_broker.pull_service:TAGS_MAX"),
        ("protomq._membership_logic:TOPICS_MAX", "protomq_broker.memberships:TOPICS_MAX"),
        ("protomq._checks:NAME_MAX_BYTES", "protomq_broker.memberships:TEXT_MAX_BYTES"),
        ("protomq._checks:NAME_MAX_BYTES", "protomq_runtime.remoting_server:CLIENT_ID_SIZE_MAX_BYTES"),
        ("protomq._message:IDENTITY", "protomq_broker.failed_messages:IDENTITY"),
        # The command line and what it asks.
        ("protomq_cli.places:AHEAD_MAX_MS", "protomq_broker.request_times:AHEAD_MAX_MS"),
        ("protomq_cli.replication:BROKER_ID_MAX", "protomq_broker.config:BROKER_ID_MAX"),
        ("protomq_cli.message_text:DATETIME_MAX_MS", "protomq._message:DATETIME_MAX_MS"),
        ("protomq_cli.pops:HOLD_MAX_S", "protomq._pop_steps:HOLD_MAX_S"),
        ("protomq_cli.environment:WORKER_PROCESS_VARIABLE", "protomq._local_offsets:WORKER_PROCESS_VARIABLE"),
        ("protomq_cli.settings:BROKERS_NAMESRV_VARIABLE", "protomq._environment:BROKERS_NAMESRV_VARIABLE"),
        # Name servers and replication.
        ("protomq_namesrv.route_snapshot:MASTER_ID", "protomq_ha.slave_reads:MASTER_ID"),
        # Spark and the broker, which both read segments.
        ("protomq_spark.segments:TOPIC_SIZE_UNAMBIGUOUS_BYTES", "protomq_broker.store.log.record_scan:TOPIC_SIZE_UNAMBIGUOUS_BYTES"),
        # Both flavours of a client.
        ("protomq._async_push_consumer:JOIN_S", "protomq._push_consumer:JOIN_S"),
        ("protomq._async_request_calls:GOODBYE_S", "protomq._request_calls:GOODBYE_S"),
        ("protomq._member_stand_in:ANSWER_MAX_BYTES", "protomq._member_thread:ANSWER_MAX_BYTES"),
        ("protomq._member_stand_in:RESTART_S", "protomq._member_thread:RESTART_S"),
        ("protomq._pop_handling:CONCURRENCY_MAX", "protomq._push_options:CONCURRENCY_MAX"),
    ],
)
def test_what_stands_in_two_places_is_one_number(one: str, other: str) -> None:
    ours, theirs = value(one), value(other)
    if hasattr(ours, "format"):
        ours, theirs = ours.format, theirs.format
    assert ours == theirs
