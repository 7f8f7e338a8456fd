"""What a slave does with an answer, with stores on simulated disks."""

from __future__ import annotations

from unittest import mock

import pytest

from protomq.v1 import ha_service_pb2 as ha
from protomq.wire.record import RecordTemplate, encode_record_field
from protomq_broker.fetch_answers import AnswerMemory
from protomq_broker.ha_session import FollowSession
from protomq_broker.store.config import StoreConfig
from protomq_broker.store.errors import DiskFullError
from protomq_broker.store.log.append import AppendRequest
from protomq_broker.store.log.record_region import prove_region
from protomq_broker.store.state.topics import TopicConfig
from protomq_broker.store.store import Store
from protomq_broker.testing.simdisk import SimDisk
from protomq_ha.intake import LogPart
from tests.chaos.store_world import WorldClock


def a_store(*, sync_flush: bool = False, follows: bool = False) -> Store:
    config = StoreConfig(segment_size_bytes=1 << 20, sync_flush=sync_flush)
    return Store.open("/s", config, clock=WorldClock(), disk=SimDisk(), background=False, follows=follows)


def received(answer: ha.FetchResponse) -> tuple[ha.FetchResponse, LogPart]:
    return AnswerMemory().read(answer.SerializeToString())


def log_of_a_master() -> bytes:
    store = a_store()
    store.topics.create(TopicConfig("t"))
    record = RecordTemplate("t", 7, 0).encode(b"body", 1, 5)
    region = prove_region(bytearray(encode_record_field(record)), "t", [len(record)])
    assert region is not None
    store.append([AppendRequest(region, 0)])
    regions = store.log_regions(0, store.appended_position)
    return b"".join(region.file.read(region.offset, region.size_bytes) for region in regions)


@pytest.mark.parametrize(
    ("slave_syncs", "master_asks", "syncs"),
    [(False, False, False), (False, True, True), (True, False, True)],
)
def test_who_syncs_has_synced_what_it_acknowledges(
    slave_syncs: bool, master_asks: bool, syncs: bool
) -> None:
    store = a_store(sync_flush=slave_syncs, follows=True)
    session = FollowSession(store, lambda function: function())
    log = log_of_a_master()
    answer = ha.FetchResponse(
        status=ha.FETCH_STATUS_OK,
        session=1,
        segment_size_bytes=1 << 20,
        log=log,
        end_position=len(log),
        counts_flushed=master_asks,
    )
    assert session.began(*received(answer))
    assert store.appended_position == len(log)
    assert store.flushed_position == (len(log) if syncs else 0)


def an_answer(position: int, log: bytes, confirmed_position: int) -> tuple[ha.FetchResponse, LogPart]:
    return received(
        ha.FetchResponse(
            status=ha.FETCH_STATUS_OK,
            session=1,
            position=position,
            segment_size_bytes=1 << 20,
            log=log,
            confirmed_position=confirmed_position,
            end_position=confirmed_position,
        )
    )


def test_what_a_master_has_confirmed_beyond_a_slaves_log_is_not_confirmed_when_the_slave_leads() -> None:
    """An operator lets a slave lead that had not caught up: what it appends then stands at these positions."""
    store = a_store(follows=True)
    session = FollowSession(store, lambda function: function())
    log = log_of_a_master()
    assert session.began(*an_answer(0, log, 10 * len(log)))
    assert store.readable_position == store.appended_position == len(log)
    store.lead(waits_for_replicas=True)
    store.topics.create(TopicConfig("u"))
    assert len(log) < store.appended_position < 10 * len(log)
    assert store.readable_position == len(log)


def test_a_slave_gives_only_what_its_master_has_confirmed() -> None:
    store = a_store(follows=True)
    session = FollowSession(store, lambda function: function())
    log = log_of_a_master()
    assert session.began(*an_answer(0, log, 100))
    assert (store.readable_position, store.appended_position) == (100, len(log))
    assert session.took(*an_answer(len(log), b"", len(log)))
    assert store.readable_position == len(log)


def test_what_is_confirmed_is_known_when_it_is_stored_in_whatever_order_the_answers_come() -> None:
    store = a_store(follows=True)
    session = FollowSession(store, lambda function: function())
    log = log_of_a_master()
    assert session.began(*an_answer(0, b"", 0))
    assert session.took(*an_answer(100, log[100:], len(log)))
    assert store.readable_position == 0
    assert session.took(*an_answer(0, log[:100], 0))
    assert store.readable_position == len(log)


def test_a_slave_has_caught_up_when_it_has_all_that_its_master_had_when_the_session_began() -> None:
    store = a_store(follows=True)
    session = FollowSession(store, lambda function: function())
    log = log_of_a_master()
    assert session.began(*an_answer(0, b"", len(log)))
    assert not session.has_caught_up
    assert session.took(*an_answer(100, log[100:], 10 * len(log)))
    assert not session.has_caught_up, "the part before it is on its way"
    assert session.took(*an_answer(0, log[:100], 10 * len(log)))
    assert session.has_caught_up, "what came since is no matter"
    again = FollowSession(store, lambda function: function())
    assert again.began(*an_answer(len(log), b"", len(log)))
    assert again.has_caught_up


def test_a_slave_whose_disk_is_full_gives_what_is_confirmed_of_its_log() -> None:
    store = a_store(follows=True)
    session = FollowSession(store, lambda function: function())
    log = log_of_a_master()
    assert session.began(*an_answer(0, log, 0))
    assert store.readable_position == 0
    with mock.patch.object(store, "append_verbatim", side_effect=DiskFullError("full")), pytest.raises(DiskFullError):
        session.took(*an_answer(len(log), log, 2 * len(log)))
    assert store.readable_position == len(log)
    assert store.checkpoint()
